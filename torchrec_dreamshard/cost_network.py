"""The default cost network: a physical prior times learned corrections, positive and monotone by construction.

Every shard is encoded as non-negative numbers: its physical quantities and, for each member of a small ensemble,
channels ``c_k = base_k**p_k * exp(correction_k)``. A base is a physical quantity or the shard's cost under the
physical prior; the correction is a bounded function of the shard's normalised features. A device's latent is the
sum of its shards' encodings, ``C_k = sum c_k``. With ``X_k = C_k**g_k``, its kernel costs

    (launch + (sum_k w_1k X_k + (sum_k (w_2k X_k)**2)**(1/2) + (sum_k (w_4k X_k)**4)**(1/4))**growth)
    * exp(sum_h v_h s_h),

where ``s_h`` are sigmoids of logarithms of the physical sums and all ``w, v``, slopes and growth are at least 0. So the
cost is 0 for an empty device and never falls when a shard is added. Channels with ``g = 1`` are plain sums,
``g < 1 = p`` saturate, and ``g = 1/p`` are p-norms over the shards (for large p the largest one). The p-norms between
channels are rooflines (one resource hides behind another). A growth below 1 is what fusion saves, however many the
shards. The sigmoids are what a full cache costs, one that holds what a batch reads or the weights themselves.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchrec_dreamshard.config import CostConfig
from torchrec_dreamshard.cost_model import CostModel, CostPrediction
from torchrec_dreamshard.exchange import ExchangeCost
from torchrec_dreamshard.features import HARDWARE_FEATURES, SHARD_FEATURES, Normalizer, TaskTensors
from torchrec_dreamshard.paper_cost_network import PaperCostNetwork
from torchrec_dreamshard.physics import LOAD_INDEX, LOAD_QUANTITIES, NUM_KERNEL_QUANTITIES, load_quantities


class Channel(NamedTuple):
    """A kind of channel: the sum over shards of ``base**power``, raised to ``exponent``."""

    base: str
    """"forward", "backward" or "total" cost under the prior, or one of ``LOAD_QUANTITIES``."""
    power: float = 1.0
    exponent: float = 1.0


CHANNELS: tuple[Channel, ...] = (
    Channel("forward"),
    Channel("backward"),
    Channel("total"),
    Channel("total"),
    Channel("lookups"),
    Channel("read_ms"),
    Channel("output_ms"),
    Channel("total", 1.0, 0.6),
    Channel("total", 3.0, 1.0 / 3.0),
    Channel("longest_bag", 8.0, 1.0 / 8.0),
    Channel("hottest_uses", 8.0, 1.0 / 8.0),
)
"""The C channels of every member; the linear ones come first."""

_NUM_LINEAR = sum(channel.exponent == 1.0 for channel in CHANNELS)
CROWDED = (*range(NUM_KERNEL_QUANTITIES), LOAD_INDEX["weight_gb"])
"""The physical quantities that may fill a cache."""
_CACHED = ("weight_gb", "unique_ms", "unique_ids")  # what one sigmoid each looks at first
_FIRST_SLOPE = 1.0  # its logarithm
_NUM_NORMS = 3  # over the channels: 1, 2 and 4
_NUM_SIGMOIDS = 4
_MAX_CORRECTION = 2.0  # a channel is at most e**2 times its base, or that much smaller
_SMALL = 0.003  # first weight of everything that is not the prior
_NOTHING = -30.0  # the logarithm of a weight that does not count
_BASE_RANGE = (1e-4, 1e4)  # of a shard's base, in typical device loads: its eighth power stays a normal float32


class MemberEncoder(nn.Module):
    """The members' shard encoders, ``F -> hidden -> C``, evaluated as one batch."""

    def __init__(self, num_features: int, config: CostConfig) -> None:
        super().__init__()
        members, hidden, channels = config.num_members, config.hidden, len(CHANNELS)
        self.weight = nn.Parameter(torch.empty(members, num_features, hidden))
        self.bias = nn.Parameter(torch.zeros(members, 1, hidden))
        self.out_weight = nn.Parameter(torch.empty(members, hidden, channels))
        self.out_bias = nn.Parameter(torch.zeros(members, 1, channels))

    def reset(self, generator: torch.Generator) -> None:
        """Starts as (almost) no correction at all."""
        with torch.no_grad():
            self.weight.normal_(0.0, self.weight.shape[1] ** -0.5, generator=generator)
            self.bias.zero_()
            self.out_weight.normal_(0.0, 0.1 * self.out_weight.shape[1] ** -0.5, generator=generator)
            self.out_bias.zero_()

    def forward(self, features: Tensor, varies: Tensor) -> Tensor:
        """``N x F`` to ``N x M x C``: bounded log corrections; only the features that vary (``F`` bool) are read."""
        seen = features[:, varies].expand(len(self.bias), -1, -1)
        hidden = functional.silu(torch.baddbmm(self.bias, seen, self.weight[:, varies]))
        raw = torch.baddbmm(self.out_bias, hidden, self.out_weight)
        return (_MAX_CORRECTION * torch.tanh(raw / _MAX_CORRECTION)).transpose(0, 1)


class CostNetwork(CostModel):
    """Ensemble of monotone corrections of a physical prior; see the module's text."""

    prior: Tensor
    """``2 x (1 + P')``: launch cost and coefficients of the kernel quantities, forward and backward, in ms."""
    base: Tensor
    """``P x C``: a channel's base from the physical quantities, in typical device loads."""
    unit_ms: Tensor
    """``2``: forward and backward cost of a typical device load."""
    known: Tensor
    """``2``: 0 where a direction costs nothing at all, or nothing is known of it."""
    spread: Tensor
    """``2``: factor of the ensemble's spread, and share of the cost that is noise, in the stated deviation."""
    step_fit: Tensor
    """``2``: factor and offset (ms) from the slowest device's sum of terms to the step."""

    def __init__(self, config: CostConfig) -> None:
        super().__init__()
        self.config = config
        members, channels = config.num_members, len(CHANNELS)
        self.latent_dim = len(LOAD_QUANTITIES) + members * channels
        self.shard_normalizer = Normalizer(len(SHARD_FEATURES))
        self.hardware_normalizer = Normalizer(len(HARDWARE_FEATURES))
        self.load_normalizer = Normalizer(len(CROWDED))
        self.encoder = MemberEncoder(len(SHARD_FEATURES) + len(HARDWARE_FEATURES), config)
        # Logarithms of non-negative weights.
        self.mixing = nn.Parameter(torch.empty(_NUM_NORMS, members, channels, 2))
        self.growth = nn.Parameter(torch.empty(members, 1, 2))
        self.launch = nn.Parameter(torch.empty(members, 1, 2))
        self.slopes = nn.Parameter(torch.empty(members, len(CROWDED), _NUM_SIGMOIDS))
        self.thresholds = nn.Parameter(torch.empty(members, 1, _NUM_SIGMOIDS))
        self.crowding = nn.Parameter(torch.empty(members, _NUM_SIGMOIDS, 2))
        self.exchange = ExchangeCost()
        self.register_buffer("prior", torch.ones(2, 1 + NUM_KERNEL_QUANTITIES))
        self.register_buffer("base", torch.zeros(len(LOAD_QUANTITIES), channels))
        self.register_buffer("unit_ms", torch.ones(2))
        self.register_buffer("known", torch.ones(2))
        self.register_buffer("spread", torch.tensor([1.0, 0.05]))
        self.register_buffer("step_fit", torch.tensor([1.0, 0.0]))
        self.set_prior(self.prior, torch.ones(len(LOAD_QUANTITIES)))
        self.reset(torch.Generator().manual_seed(0))

    def reset(self, generator: torch.Generator) -> None:
        """Draws the members anew: with the prior's coefficients this is the prior, slightly perturbed."""
        self.encoder.reset(generator)
        with torch.no_grad():
            self.mixing.fill_(math.log(_SMALL))
            for direction in range(2):
                self.mixing[0, :, direction, direction] = 0.0
                launch = self.prior[direction, 0] / self.unit_ms[direction]
                self.launch[:, 0, direction] = torch.log(launch.clamp(min=_SMALL))
            self.growth.zero_()
            self.slopes.uniform_(-4.0, -2.0, generator=generator)
            for index, name in enumerate(_CACHED):
                self.slopes[:, CROWDED.index(LOAD_INDEX[name]), index] = _FIRST_SLOPE
            self.thresholds.normal_(generator=generator)
            self.crowding.fill_(math.log(_SMALL))

    def drop_corrections(self) -> None:
        """Makes every member the prior itself."""
        with torch.no_grad():
            for parameter in self.encoder.parameters():
                parameter.zero_()
            self.growth.zero_()
            self.crowding.fill_(_NOTHING)
            self.mixing.fill_(_NOTHING)
            for direction in range(2):
                self.mixing[0, :, direction, direction] = 0.0
                launch = self.prior[direction, 0] / self.unit_ms[direction]
                self.launch[:, 0, direction] = torch.log(launch).clamp(min=_NOTHING)

    def set_prior(self, prior: Tensor, typical: Tensor) -> None:
        """Sets the physical prior and with it the units of all channels.

        Args:
            prior: ``2 x (1 + P')`` non-negative coefficients in ms.
            typical: ``P``, quantities of a typical device load.
        """
        coefficients = prior[:, 1:] + 1e-9
        unit_ms = (coefficients @ typical[:NUM_KERNEL_QUANTITIES]).clamp(min=1e-9)
        in_units = {
            "forward": coefficients[0] / unit_ms[0],
            "backward": coefficients[1] / unit_ms[1],
            "total": coefficients.sum(dim=0) / unit_ms.sum(),
        }
        self.prior.copy_(prior)
        self.unit_ms.copy_(unit_ms)
        self.base.zero_()
        for index, channel in enumerate(CHANNELS):
            if channel.base in in_units:
                self.base[:NUM_KERNEL_QUANTITIES, index] = in_units[channel.base]
            else:
                row = LOAD_INDEX[channel.base]
                self.base[row, index] = 1.0 / typical[row].clamp(min=1e-9)

    def encode_shards(self, features: Tensor, hardware: Tensor) -> Tensor:
        """``N x F`` and ``N x K`` raw features of real shards to ``N x H``."""
        quantities = load_quantities(features, hardware)
        powers = torch.tensor([channel.power for channel in CHANNELS])
        logs = torch.log((quantities @ self.base).clamp(*_BASE_RANGE)) * powers
        inputs = torch.cat([self.shard_normalizer(features), self.hardware_normalizer(hardware)], dim=-1)
        # Constant features are normalised to 0: leaving them out changes nothing and saves half the time.
        varies = torch.cat([self.shard_normalizer.scale, self.hardware_normalizer.scale]) > 0
        channels = torch.exp(logs[:, None, :] + self.encoder(inputs, varies))
        return torch.cat([quantities, channels.flatten(1)], dim=-1)

    def encode(self, tasks: TaskTensors) -> Tensor:
        """See ``CostModel.encode``."""
        mask = tasks.shard_mask
        hardware = tasks.hardware[:, None, :].expand(-1, mask.shape[1], -1)
        out = tasks.shard_features.new_zeros(*mask.shape, self.latent_dim)
        out[mask] = self.encode_shards(tasks.shard_features[mask], hardware[mask])
        return out

    def member_compute(self, latents: Tensor) -> Tensor:
        """``... x H`` to ``... x M x 2``: each member's forward and backward cost in ms."""
        members = self.config.num_members
        flat = latents.reshape(-1, self.latent_dim)
        occupied = flat[:, LOAD_INDEX["tables"]].clamp(0, 1)
        sums = flat[:, len(LOAD_QUANTITIES) :].reshape(-1, members, len(CHANNELS))
        exponents = torch.tensor([channel.exponent for channel in CHANNELS[_NUM_LINEAR:]])
        curved = torch.exp(exponents * torch.log(sums[..., _NUM_LINEAR:].clamp(min=1e-32)))
        values = torch.cat([sums[..., :_NUM_LINEAR], curved], dim=-1).transpose(0, 1)  # M x N x C
        weights = torch.exp(self.mixing)
        squares, tiny = values * values, 1e-20
        mixed = torch.bmm(values, weights[0])
        mixed = mixed + torch.bmm(squares, weights[1] ** 2).clamp(min=tiny).sqrt()
        mixed = mixed + torch.bmm(squares * squares, weights[2] ** 4).clamp(min=tiny).sqrt().sqrt()
        mixed = mixed.clamp(min=tiny) ** torch.exp(self.growth) + torch.exp(self.launch)
        logs = self.load_normalizer(torch.log(flat[:, CROWDED].clamp(min=1e-9)))
        sigmoids = torch.sigmoid(torch.baddbmm(self.thresholds, logs.expand(members, -1, -1), torch.exp(self.slopes)))
        crowded = torch.exp(torch.bmm(sigmoids, torch.exp(self.crowding)))
        out = (mixed * crowded * occupied[:, None]).transpose(0, 1) * (self.unit_ms * self.known)
        return out.reshape(*latents.shape[:-1], members, 2)

    def device_compute(self, latents: Tensor, hardware: Tensor) -> Tensor:
        """See ``CostModel.device_compute``; the mean of the members."""
        return self.member_compute(latents).mean(dim=-2)

    def compute_std(self, latents: Tensor, hardware: Tensor) -> Tensor:
        """See ``CostModel.compute_std``: the members' spread and the noise of the measurements, calibrated."""
        total = self.member_compute(latents).sum(dim=-1)
        spread = total.std(dim=-1, correction=0) * self.spread[0]
        return torch.hypot(spread, total.mean(dim=-1) * self.spread[1])

    def prior_compute(self, latents: Tensor) -> Tensor:
        """``... x H`` to ``... x 2``: the physical prior alone, in ms."""
        occupied = latents[..., LOAD_INDEX["tables"], None].clamp(0, 1)
        return (latents[..., :NUM_KERNEL_QUANTITIES] @ self.prior[:, 1:].T + self.prior[:, 0] * occupied) * self.known

    def combine(self, compute: Tensor, latents: Tensor, tasks: TaskTensors) -> CostPrediction:
        """See ``CostModel.combine``."""
        forward, backward = compute[..., 0], compute[..., 1]
        comms = self.exchange(latents[..., LOAD_INDEX["output_values"]], forward, tasks)
        shape = (tasks.host.shape[0], *([1] * (forward.dim() - 2)), tasks.host.shape[1])
        device_ms = forward + backward + comms.sum(dim=-1)
        device_ms = device_ms * self.step_fit[0] + tasks.background_ms.reshape(shape)
        slowest = device_ms.masked_fill(~tasks.device_mask.reshape(shape), 0.0).amax(dim=-1)
        return CostPrediction(forward, comms[..., 0], comms[..., 1], backward, slowest + self.step_fit[1])


def make_cost_model(config: CostConfig) -> CostModel:
    """An untrained cost model of the configured form."""
    with torch.random.fork_rng(devices=[]):  # layers draw initial weights from the global generator
        return CostNetwork(config) if config.form == "physical" else PaperCostNetwork(config)

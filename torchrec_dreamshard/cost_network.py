"""The default cost network: a physical prior times learned corrections, positive and monotone by construction.

Every shard is encoded as non-negative numbers: its physical quantities ``q_p`` and, for each member of a small
ensemble, channels ``c_k = base**p_k * exp(correction_k)``, where ``base`` is the shard's own cost under the
physical prior and the correction is a bounded function of its normalised features. A device's latent is their
sum ``C_k``. A kernel then costs

    launch + sum_k v_k * C_k**g_k,    v_k >= 0, g_k > 0,

which is 0 for an empty device and never falls when a shard is added. Channels with ``g = 1`` are plain sums,
``g < 1`` with ``p = 1`` saturate, ``g = 1/p`` are p-norms over the shards (for large p the largest one).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchrec_dreamshard.config import CostConfig
from torchrec_dreamshard.cost_model import CostModel, CostPrediction
from torchrec_dreamshard.exchange import ExchangeCost, exchange_features
from torchrec_dreamshard.features import HARDWARE_FEATURES, SHARD_FEATURES, Normalizer, TaskTensors
from torchrec_dreamshard.paper_cost_network import PaperCostNetwork
from torchrec_dreamshard.physics import LOAD_INDEX, LOAD_QUANTITIES, NUM_KERNEL_QUANTITIES, load_quantities

CHANNEL_POWERS: tuple[tuple[float, float], ...] = (
    (1.0, 1.0),
    (1.0, 1.0),
    (1.0, 0.75),
    (1.0, 0.5),
    (3.0, 1.0 / 3.0),
    (1.0, 1.0),
    (1.0, 1.0),
    (1.0, 0.25),
)
"""``(p_k, g_k)`` of the first channels; further ones repeat the list."""

_MAX_CORRECTION = 2.0  # a channel is at most e**2 times its prior, or that much smaller


class MemberEncoder(nn.Module):
    """The members' shard encoders, ``F -> hidden -> channels``, evaluated as one batch."""

    def __init__(self, num_features: int, config: CostConfig) -> None:
        super().__init__()
        members, hidden, channels = config.num_members, config.hidden, config.num_channels
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

    def forward(self, features: Tensor) -> Tensor:
        """``N x F`` to ``N x M x C``: bounded log corrections."""
        hidden = functional.silu(features @ self.weight + self.bias)
        raw = hidden @ self.out_weight + self.out_bias
        return (_MAX_CORRECTION * torch.tanh(raw / _MAX_CORRECTION)).transpose(0, 1)


class CostNetwork(CostModel):
    """Ensemble of monotone corrections of a physical prior; see the module's text."""

    prior: Tensor
    """``2 x (1 + P')``: launch cost and coefficients of the kernel quantities, forward and backward, in ms."""
    base: Tensor
    """``P'``: coefficients of a shard's base, in units of a typical shard."""
    known: Tensor
    """``2``: 0 where a direction costs nothing at all in the training data."""
    spread: Tensor
    """``2``: factor of the ensemble's spread, and share of the cost that is noise, in the stated deviation."""
    powers: Tensor
    gammas: Tensor
    unit_ms: Tensor

    def __init__(self, config: CostConfig) -> None:
        super().__init__()
        self.config = config
        members, channels = config.num_members, config.num_channels
        self.latent_dim = len(LOAD_QUANTITIES) + members * channels
        self.shard_normalizer = Normalizer(len(SHARD_FEATURES))
        self.hardware_normalizer = Normalizer(len(HARDWARE_FEATURES))
        self.encoder = MemberEncoder(len(SHARD_FEATURES) + len(HARDWARE_FEATURES), config)
        self.mixing = nn.Parameter(torch.zeros(members, channels, 2))
        self.launch = nn.Parameter(torch.zeros(members, 2))
        self.exchange = ExchangeCost()
        kinds = [CHANNEL_POWERS[i % len(CHANNEL_POWERS)] for i in range(channels)]
        self.register_buffer("powers", torch.tensor([p for p, _ in kinds]))
        self.register_buffer("gammas", torch.tensor([g for _, g in kinds]))
        self.register_buffer("prior", torch.ones(2, 1 + NUM_KERNEL_QUANTITIES))
        self.register_buffer("base", torch.ones(NUM_KERNEL_QUANTITIES))
        self.register_buffer("unit_ms", torch.ones(2))
        self.register_buffer("known", torch.ones(2))
        self.register_buffer("spread", torch.tensor([1.0, 0.05]))
        self.reset(torch.Generator().manual_seed(0))

    def reset(self, generator: torch.Generator) -> None:
        """Draws the members anew; together with the prior's coefficients this is the prior, slightly perturbed."""
        self.encoder.reset(generator)
        linear = (self.powers == 1) & (self.gammas == 1)
        start = torch.where(linear, 1.0 / linear.sum().clamp(min=1), 0.02)
        with torch.no_grad():
            self.mixing.copy_(torch.log(torch.expm1(start))[None, :, None].expand_as(self.mixing))
            self.launch.fill_(math.log(math.e - 1))

    def set_prior(self, prior: Tensor, typical_ms: float) -> None:
        """Sets the physical prior.

        Args:
            prior: ``2 x (1 + P')`` non-negative coefficients.
            typical_ms: cost of a typical device load, the unit of the channels.
        """
        total = prior[:, 1:].sum(dim=0) / typical_ms
        # No quantity is left out altogether: the data may not have shown what it costs.
        floor = 1e-3 * torch.ones_like(total)
        self.prior.copy_(prior)
        self.base.copy_(total + floor * (total == 0))
        self.unit_ms.copy_(prior[:, 1:].sum(dim=1) / total.sum().clamp(min=1e-12))

    def encode_shards(self, features: Tensor, hardware: Tensor) -> Tensor:
        """``N x F`` and ``N x K`` raw features of real shards to ``N x H``."""
        quantities = load_quantities(features, hardware)
        base = (quantities[:, :NUM_KERNEL_QUANTITIES] @ self.base).clamp(min=1e-9)
        inputs = torch.cat([self.shard_normalizer(features), self.hardware_normalizer(hardware)], dim=-1)
        logs = torch.log(base)[:, None, None] * self.powers + self.encoder(inputs)
        return torch.cat([quantities, torch.exp(logs).flatten(1)], dim=-1)

    def encode(self, tasks: TaskTensors) -> Tensor:
        """See ``CostModel.encode``."""
        mask = tasks.shard_mask
        hardware = tasks.hardware[:, None, :].expand(-1, mask.shape[1], -1)
        out = tasks.shard_features.new_zeros(*mask.shape, self.latent_dim)
        out[mask] = self.encode_shards(tasks.shard_features[mask], hardware[mask])
        return out

    def member_compute(self, latents: Tensor) -> Tensor:
        """``... x H`` to ``... x M x 2``: each member's forward and backward cost in ms."""
        members, channels = self.config.num_members, self.config.num_channels
        occupied = latents[..., LOAD_INDEX["tables"]].clamp(0, 1)[..., None, None]
        sums = latents[..., len(LOAD_QUANTITIES) :].unflatten(-1, (members, channels))
        powered = torch.where(self.gammas == 1, sums, sums.clamp(min=1e-20) ** self.gammas) * occupied
        mixed = torch.einsum("...mc,mct->...mt", powered, functional.softplus(self.mixing)) * self.unit_ms
        launch = functional.softplus(self.launch) * self.prior[:, 0] * occupied
        return (mixed + launch) * self.known

    def device_compute(self, latents: Tensor, hardware: Tensor) -> Tensor:
        """See ``CostModel.device_compute``; the mean of the members."""
        return self.member_compute(latents).mean(dim=-2)

    def compute_std(self, latents: Tensor, hardware: Tensor) -> Tensor:
        """See ``CostModel.compute_std``: the members' spread and the noise of the measurements, calibrated."""
        total = self.member_compute(latents).sum(dim=-1)
        spread = total.std(dim=-1, correction=0) * self.spread[0]
        return torch.hypot(spread, total.mean(dim=-1) * self.spread[1])

    def combine(self, compute: Tensor, latents: Tensor, tasks: TaskTensors) -> CostPrediction:
        """See ``CostModel.combine``."""
        forward, backward = compute[..., 0], compute[..., 1]
        features = exchange_features(latents[..., LOAD_INDEX["output_values"]], forward, tasks)
        comms = self.exchange(features)
        shape = (tasks.host.shape[0], *([1] * (forward.dim() - 2)), tasks.host.shape[1])
        device_ms = forward + backward + comms.sum(dim=-1) + tasks.background_ms.reshape(shape)
        step = device_ms.masked_fill(~tasks.device_mask.reshape(shape), 0.0).amax(dim=-1)
        return CostPrediction(forward, comms[..., 0], comms[..., 1], backward, step)


def make_cost_model(config: CostConfig) -> CostModel:
    """An untrained cost model of the configured form."""
    return CostNetwork(config) if config.form == "physical" else PaperCostNetwork(config)

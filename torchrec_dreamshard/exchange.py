"""What devices exchange: features of an all-to-all for any number of devices and hosts, and its cost.

Device ``d`` computes pooled outputs for the global batch and sends every device its share, ``1/D`` of them. The
time of a device's exchange depends on what it sends, what it receives, the slowest of all (everyone waits), and
on how late its peers start: forward, a device that finished its kernel early waits for the slowest kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchrec_dreamshard.features import HARDWARE_INDEX, Normalizer, TaskTensors

EXCHANGE_FEATURES: tuple[str, ...] = (
    "start",
    "peers",
    "other_hosts",
    "own_ms",
    "sent_near_ms",
    "sent_far_ms",
    "received_near_ms",
    "received_far_ms",
    "slowest_sent_ms",
    "slowest_received_ms",
    "slowest_link_ms",
    "slowest_near_ms",
    "slowest_far_ms",
    "slowest_kind_ms",
    "mean_near_ms",
    "mean_far_ms",
    "skew_ms",
)
"""Names of the E features: a constant, counts, and bytes over the link's bandwidth; "near" is inside a host."""

SKEW, PEERS, OWN = (EXCHANGE_FEATURES.index(name) for name in ("skew_ms", "peers", "own_ms"))

NEAR_AND_FAR = tuple(
    (index, EXCHANGE_FEATURES.index(name.replace("near", "far")))
    for index, name in enumerate(EXCHANGE_FEATURES)
    if "near" in name
)
"""Features of links inside a host, each with its twin between hosts."""

_MAX_CORRECTION = 0.7  # the correction stays within a factor of two
_SMALLEST = 1e-5  # ms


def exchange_features(output_values: Tensor, forward_ms: Tensor, tasks: TaskTensors) -> Tensor:
    """Features of the exchange on every device.

    Args:
        output_values: ``B x ... x D``, millions of pooled output values of each device for the global batch.
        forward_ms: ``B x ... x D``, when each device's forward kernel ends.
        tasks: the B tasks.

    Returns:
        ``B x ... x D x E``, all at least 0; 0 for padded devices and where there is no peer or nothing to send.
    """
    shape = (tasks.host.shape[0], *([1] * (output_values.dim() - 2)), tasks.host.shape[1])

    def expand(values: Tensor) -> Tensor:
        return values.reshape(shape)

    mask = expand(tasks.device_mask).to(output_values.dtype)
    same_host = (tasks.host[:, :, None] == tasks.host[:, None, :]) & tasks.device_mask[:, None, :]
    near = same_host.to(output_values.dtype)
    num_devices = tasks.device_mask.sum(dim=1, keepdim=True).to(output_values.dtype)
    devices, on_host = expand(num_devices.expand(-1, shape[-1])), expand(near.sum(dim=2))
    hardware = tasks.hardware.reshape(shape[0], *shape[1:-1], 1, -1)
    megavalue_bytes = 1e6 * hardware[..., HARDWARE_INDEX["comms_dtype_bytes"]]
    near_rate = torch.exp(hardware[..., HARDWARE_INDEX["log_intra_host_gb_s"]]) * 1e6
    far_rate = torch.exp(hardware[..., HARDWARE_INDEX["log_inter_host_gb_s"]]) * 1e6

    share = output_values * mask * megavalue_bytes / devices.clamp(min=1)  # bytes to each single peer
    total = share.sum(dim=-1, keepdim=True)
    host_total = torch.einsum("bde,b...e->b...d", near, share)
    sent_near, sent_far = share * (on_host - 1).clamp(min=0) / near_rate, share * (devices - on_host) / far_rate
    received_near, received_far = (host_total - share) / near_rate, (total - host_total) / far_rate
    sent, received = sent_near + sent_far, received_near + received_far
    near_link, far_link = torch.maximum(sent_near, received_near), torch.maximum(sent_far, received_far)
    forward = forward_ms * mask

    def slowest(values: Tensor) -> Tensor:
        return (values * mask).amax(dim=-1, keepdim=True).expand_as(values)

    def mean(values: Tensor) -> Tensor:
        return ((values * mask).sum(dim=-1, keepdim=True) / devices.clamp(min=1)).expand_as(values)

    slowest_near, slowest_far = slowest(near_link), slowest(far_link)
    one = torch.ones_like(share)
    columns = (
        one,
        (devices - 1).expand_as(share),
        (devices > on_host).to(share.dtype).expand_as(share),
        share * devices / near_rate,
        sent_near,
        sent_far,
        received_near,
        received_far,
        slowest(sent),
        slowest(received),
        slowest(torch.maximum(sent, received)),
        slowest_near,
        slowest_far,
        torch.maximum(slowest_near, slowest_far),
        mean(near_link),
        mean(far_link),
        slowest(forward) - forward,
    )
    exchanges = mask * ((devices > 1) & (total > 0)).to(share.dtype)
    return torch.stack(columns, dim=-1).clamp(min=0) * exchanges[..., None]


class ExchangeCost(nn.Module):
    """Exchange times: non-negative combinations of features, times a bounded learned correction.

    The wait for the slowest kernel is not corrected: a coefficient in [0, 1] says how much of it the data counts
    as communication.
    """

    coefficients: Tensor
    """``2 x E``: forward, backward."""
    corrected: Tensor
    """``2``: 1 where the correction has proved itself on held-out measurements."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("coefficients", torch.zeros(2, len(EXCHANGE_FEATURES)))
        self.register_buffer("corrected", torch.zeros(2))
        self.normalizer = Normalizer(len(EXCHANGE_FEATURES))
        self.hidden, self.out = nn.Linear(len(EXCHANGE_FEATURES), 24), nn.Linear(24, 2)
        self.reset(torch.Generator().manual_seed(0))

    def assume_bandwidths(self) -> None:
        """Prices exchanges that nobody has measured: bytes over the busiest link's bandwidth, and the whole wait."""
        self.coefficients.zero_()
        self.coefficients[:, EXCHANGE_FEATURES.index("slowest_link_ms")] = 1.0
        self.coefficients[0, SKEW] = 1.0

    def reset(self, generator: torch.Generator) -> None:
        """Draws the correction anew; it starts as none."""
        with torch.no_grad():
            for layer in (self.hidden, self.out):
                layer.weight.normal_(0.0, layer.in_features**-0.5, generator=generator)
                layer.bias.zero_()
            self.out.weight.mul_(0.1)

    def inputs(self, features: Tensor) -> Tensor:
        """Logarithms of the features, without the skew."""
        logs = torch.log(features.clamp(min=_SMALLEST))
        return torch.cat([logs[..., :SKEW], torch.zeros_like(logs[..., SKEW:])], dim=-1)

    def from_features(self, features: Tensor) -> Tensor:
        """``... x E`` to ``... x 2``: forward and backward exchange in ms."""
        transfer = features[..., :SKEW] @ self.coefficients[:, :SKEW].T
        wait = features[..., SKEW:] * self.coefficients[:, SKEW]
        if bool(self.corrected.any()):
            raw = self.out(torch.tanh(self.hidden(self.normalizer(self.inputs(features)))))
            transfer = transfer * torch.exp(_MAX_CORRECTION * torch.tanh(raw / _MAX_CORRECTION) * self.corrected)
        return transfer + wait

    def forward(self, output_values: Tensor, forward_ms: Tensor, tasks: TaskTensors) -> Tensor:
        """``B x ... x D x 2``: forward and backward exchange in ms; for the arguments see ``exchange_features``."""
        return self.from_features(exchange_features(output_values, forward_ms, tasks))

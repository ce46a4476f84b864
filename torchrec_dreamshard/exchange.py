"""What devices exchange: features of an all-to-all for any number of devices and hosts, and its cost.

Device ``d`` computes pooled outputs for the global batch and sends every device its share, ``1/D`` of them. The
time of a device's exchange depends on what it sends, what it receives, the slowest of all (everyone waits), and
on how late its peers start: forward, a device that finished its kernel early waits for the slowest kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchrec_dreamshard.features import HARDWARE_INDEX, TaskTensors

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
    "mean_link_ms",
    "skew_ms",
)
"""Names of the E features: a constant, counts, and bytes over the link's bandwidth; "near" is inside a host."""

SKEW = EXCHANGE_FEATURES.index("skew_ms")


def exchange_features(output_values: Tensor, forward_ms: Tensor, tasks: TaskTensors) -> Tensor:
    """Features of the exchange on every device.

    Args:
        output_values: ``B x ... x D``, millions of pooled output values of each device for the global batch.
        forward_ms: ``B x ... x D``, when each device's forward kernel ends.
        tasks: the B tasks.

    Returns:
        ``B x ... x D x E``, all at least 0; 0 for padded devices and where there is no peer.
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
    link = torch.maximum(sent, received)
    forward = forward_ms * mask

    def slowest(values: Tensor) -> Tensor:
        return (values * mask).amax(dim=-1, keepdim=True).expand_as(values)

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
        slowest(link),
        (link * mask).sum(dim=-1, keepdim=True) / devices.clamp(min=1) * one,
        slowest(forward) - forward,
    )
    has_peers = mask * (devices > 1).to(share.dtype)
    return torch.stack(columns, dim=-1).clamp(min=0) * has_peers[..., None]


class ExchangeCost(nn.Module):
    """Non-negative combinations of ``exchange_features``, one for each direction."""

    coefficients: Tensor
    """``2 x E``: forward, backward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("coefficients", torch.zeros(2, len(EXCHANGE_FEATURES)))

    def forward(self, features: Tensor) -> Tensor:
        """``... x E`` to ``... x 2``: forward and backward exchange in ms."""
        return features @ self.coefficients.T

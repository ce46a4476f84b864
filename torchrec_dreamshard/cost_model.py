"""The interface between a model of placement costs and everything that uses one.

A device's load is described by a *latent*: the sum of its shards' encodings. Sums make a model work for any
number of shards and let a search move one shard at the price of two additions. Costs of one device follow from
its latent alone; what devices do together (exchanges, waiting) follows from all latents.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from torch import Tensor, nn

from torchrec_dreamshard.config import CostConfig
from torchrec_dreamshard.features import TaskTensors


class CostPrediction(NamedTuple):
    """Predicted costs in ms; ``...`` are the leading dimensions of the latents given."""

    forward_compute_ms: Tensor
    """``... x D``."""
    forward_comms_ms: Tensor
    """``... x D``, including the wait for the slowest sender."""
    backward_comms_ms: Tensor
    """``... x D``."""
    backward_compute_ms: Tensor
    """``... x D``."""
    step_ms: Tensor
    """``...``: overall cost, with the devices' background load."""


class CostModel(nn.Module, ABC):
    """Predicts what placements cost; the single source of costs for the MDP, the policy and the search."""

    config: CostConfig
    """What ``make_cost_model`` builds the model from."""
    latent_dim: int
    """H."""

    @abstractmethod
    def encode(self, tasks: TaskTensors) -> Tensor:
        """Encodes every shard: ``B x S x H``, exactly 0 for padding. Device latents are sums of these."""

    @abstractmethod
    def device_compute(self, latents: Tensor, hardware: Tensor) -> Tensor:
        """Fused-kernel costs of devices by themselves.

        Args:
            latents: ``... x H``, one row per device load; an all-zero row is an empty device and costs 0.
            hardware: ``... x K`` (broadcast against the rows), see ``TaskTensors.hardware``.

        Returns:
            ``... x 2``: forward and backward compute in ms.
        """

    @abstractmethod
    def combine(self, compute: Tensor, latents: Tensor, tasks: TaskTensors) -> CostPrediction:
        """Step costs from the devices' compute and what they exchange.

        Args:
            compute: ``B x ... x D x 2`` from ``device_compute``.
            latents: ``B x ... x D x H``.
            tasks: the B tasks (their devices, hosts, background and hardware; padded devices are ignored).
        """

    @abstractmethod
    def compute_std(self, latents: Tensor, hardware: Tensor) -> Tensor:
        """Uncertainty of forward plus backward compute in ms: ``...``; 0 where the model cannot tell."""

    def predict(self, latents: Tensor, tasks: TaskTensors) -> CostPrediction:
        """``combine`` of ``device_compute``; latents are ``B x ... x D x H``."""
        hardware = tasks.hardware.reshape(tasks.hardware.shape[0], *([1] * (latents.dim() - 2)), -1)
        return self.combine(self.device_compute(latents, hardware), latents, tasks)

"""DreamShard's own cost network (arXiv 2210.02023, section 3.2), the reference that the default is compared with.

Shard encoder 21 -> 128 -> 32, sum over a device's shards, heads 32 -> 64 -> 1 for forward compute, backward
compute and backward communication; element-wise max over the devices and 32 -> 64 -> 1 for the overall cost.
Forward communication appears only inside the overall cost. Heads are not constrained: costs may come out
negative, and may fall when a shard is added.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchrec_dreamshard.config import CostConfig
from torchrec_dreamshard.cost_model import CostModel, CostPrediction
from torchrec_dreamshard.features import SHARD_INDEX, Normalizer, TaskTensors
from torchrec_dreamshard.types import NUM_REUSE_BINS

_HIDDEN = 32
_BINS = slice(SHARD_INDEX["reuse_bin_0"], SHARD_INDEX["reuse_bin_0"] + NUM_REUSE_BINS)


def paper_features(features: Tensor) -> Tensor:
    """``... x F`` raw features to the paper's ``... x 21``: dim, rows, pooling factor, size and the 17 bins."""
    dim, rows = torch.exp(features[..., SHARD_INDEX["log_dim"]]), torch.exp(features[..., SHARD_INDEX["log_rows"]])
    pooling = torch.expm1(features[..., SHARD_INDEX["log1p_pooling"]])
    return torch.cat([torch.stack([dim, rows, pooling, dim * rows], dim=-1), features[..., _BINS]], dim=-1)


def reset_linear_layers(network: nn.Module, generator: torch.Generator) -> None:
    """Draws the weights of all linear layers anew: PyTorch's default initialisation, from one generator."""
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, nn.Linear):
                bound = module.in_features**-0.5
                module.weight.uniform_(-bound, bound, generator=generator)
                module.bias.uniform_(-bound, bound, generator=generator)


def _head() -> nn.Sequential:
    return nn.Sequential(nn.Linear(_HIDDEN, 64), nn.ReLU(), nn.Linear(64, 1))


class PaperCostNetwork(CostModel):
    """The paper's form; ``cost_scale`` buffers keep the targets near 1, which the paper does by hand."""

    cost_scale: Tensor
    has_overall: Tensor

    def __init__(self, config: CostConfig) -> None:
        super().__init__()
        self.config = config
        self.latent_dim = _HIDDEN + 1
        self.normalizer = Normalizer(4 + NUM_REUSE_BINS)
        self.encoder = nn.Sequential(nn.Linear(21, 128), nn.ReLU(), nn.Linear(128, _HIDDEN), nn.ReLU())
        self.heads = nn.ModuleList([_head(), _head(), _head()])
        self.overall = _head()
        self.register_buffer("cost_scale", torch.ones(()))
        self.register_buffer("has_overall", torch.ones(()))

    def reset(self, generator: torch.Generator) -> None:
        """Draws all weights anew."""
        reset_linear_layers(self, generator)

    def _normalized(self, tasks: TaskTensors) -> Tensor:
        values = paper_features(tasks.shard_features)
        if not self.config.per_task_normalization:
            normalized: Tensor = self.normalizer(values)
            return normalized
        mask = tasks.shard_mask[..., None].to(values.dtype)
        count = mask.sum(dim=1, keepdim=True).clamp(min=1)
        mean = (values * mask).sum(dim=1, keepdim=True) / count
        std = (((values - mean) * mask) ** 2).sum(dim=1, keepdim=True).div(count).sqrt()
        # The authors' code divides by zero for a constant column; 0 is the only sane score of one.
        scores = (values - mean) / std.clamp(min=1e-12)
        return torch.where(std > 1e-6 * (1 + mean.abs()), scores, torch.zeros_like(scores))

    def encode(self, tasks: TaskTensors) -> Tensor:
        """See ``CostModel.encode``; the last column counts shards, so that an empty device can be told."""
        mask = tasks.shard_mask[..., None].to(tasks.shard_features.dtype)
        return torch.cat([self.encoder(self._normalized(tasks)), torch.ones_like(mask)], dim=-1) * mask

    def _head(self, index: int, latents: Tensor) -> Tensor:
        occupied = (latents[..., _HIDDEN] > 0).to(latents.dtype)
        out: Tensor = self.heads[index](latents[..., :_HIDDEN]).squeeze(-1)
        return out * occupied * self.cost_scale

    def device_compute(self, latents: Tensor, hardware: Tensor) -> Tensor:
        """See ``CostModel.device_compute``; unlike the default, not bounded below."""
        return torch.stack([self._head(0, latents), self._head(1, latents)], dim=-1)

    def compute_std(self, latents: Tensor, hardware: Tensor) -> Tensor:
        """See ``CostModel.compute_std``; one network cannot tell."""
        return latents.new_zeros(latents.shape[:-1])

    def combine(self, compute: Tensor, latents: Tensor, tasks: TaskTensors) -> CostPrediction:
        """See ``CostModel.combine``; the overall cost has its own head, the background is not its input."""
        forward, backward = compute[..., 0], compute[..., 1]
        comms = self._head(2, latents)
        shape = (tasks.host.shape[0], *([1] * (forward.dim() - 2)), tasks.host.shape[1])
        mask = tasks.device_mask.reshape(shape)
        # Representations are not negative (ReLU), so padding cannot win the max.
        largest = (latents[..., :_HIDDEN] * mask[..., None]).amax(dim=-2)
        overall = self.overall(largest).squeeze(-1) * self.cost_scale
        device_ms = (forward + backward + comms).masked_fill(~mask, 0.0)
        step = torch.where(self.has_overall > 0, overall, device_ms.amax(dim=-1))
        background = tasks.background_ms.amax(dim=-1).reshape(shape[:-1])
        return CostPrediction(forward, torch.zeros_like(comms), comms, backward, step + background)

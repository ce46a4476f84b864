"""A cost model whose costs are known on paper: sums of what each shard costs alone."""

from __future__ import annotations

import torch

from torchrec_dreamshard.config import CostConfig
from torchrec_dreamshard.cost_model import CostModel, CostPrediction
from torchrec_dreamshard.features import SHARD_INDEX


class AdditiveCostModel(CostModel):
    """Forward ``dim x pooling / 100`` ms, backward twice that, exchange ``dim / 1000``; optionally with a launch."""

    latent_dim = 3

    def __init__(self, launch_ms=0.0, std=0.0):
        super().__init__()
        self.config = CostConfig()
        self.launch_ms, self.std = launch_ms, std

    def encode(self, tasks):
        features = tasks.shard_features
        dim = torch.exp(features[..., SHARD_INDEX["log_dim"]])
        pooling = torch.expm1(features[..., SHARD_INDEX["log1p_pooling"]])
        latents = torch.stack([dim * pooling / 100, dim / 1000, torch.ones_like(dim)], dim=-1)
        return latents * tasks.shard_mask[..., None]

    def device_compute(self, latents, hardware):
        forward = latents[..., 0] + self.launch_ms * (latents[..., 2] > 0.5)
        return torch.stack([forward, 2 * forward], dim=-1)

    def combine(self, compute, latents, tasks):
        shape = (tasks.host.shape[0], *([1] * (compute.dim() - 3)), tasks.host.shape[1])
        comms = latents[..., 1]
        total = compute.sum(dim=-1) + 2 * comms + tasks.background_ms.reshape(shape)
        step = total.masked_fill(~tasks.device_mask.reshape(shape), 0.0).amax(dim=-1)
        return CostPrediction(compute[..., 0], comms, comms, compute[..., 1], step)

    def compute_std(self, latents, hardware):
        return self.std * latents[..., 0]

"""Tasks as tensors: raw features of shards and hardware, padded batches and masks.

Heavy-tailed quantities (rows, lookups, bytes) enter as logarithms. Nothing here depends on a shard's neighbours:
normalisation is fitted once over a training pool and belongs to the model (see ``Normalizer``).
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class TaskTensors(NamedTuple):
    """B tasks, padded to S shards and D devices. Float tensors are float32 unless said otherwise."""

    shard_features: Tensor
    """``B x S x F``: raw features (see ``SHARD_FEATURES``), 0 for padding."""
    shard_mask: Tensor
    """``B x S`` bool: True for real shards."""
    memory_bytes: Tensor
    """``B x S x 2`` float64: HBM and host bytes of each shard (float64 counts bytes exactly up to 2**53)."""
    capacity_bytes: Tensor
    """``B x D x 2`` float64: HBM and host bytes of each device."""
    device_mask: Tensor
    """``B x D`` bool: True for real devices."""
    host: Tensor
    """``B x D`` int64: host index of each device, -1 for padding."""
    background_ms: Tensor
    """``B x D``."""
    hardware: Tensor
    """``B x K``: raw features of the hardware (logarithms of bandwidths, one-hot device kind, ...)."""

"""Tasks as tensors: raw features of shards and hardware, padded batches and masks.

Heavy-tailed quantities (rows, lookups, bytes) enter as logarithms. Nothing here depends on a shard's neighbours:
normalisation is fitted once over a training pool and belongs to the model (see ``Normalizer``).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from torchrec_dreamshard.measurement import FloatArray
from torchrec_dreamshard.reuse import BIN_MEANS
from torchrec_dreamshard.types import (
    COMPUTE_DEVICES,
    DTYPE_BYTES,
    KERNELS,
    NUM_REUSE_BINS,
    OPTIMIZERS,
    HardwareSpec,
    PlacementTask,
    ShardSpec,
)

SHARD_FEATURES: tuple[str, ...] = (
    "log_rows",
    "log_dim",
    "log1p_pooling",
    "log_batch",
    "log1p_lookups",
    "log1p_unique_ids",
    "unique_share",
    "log1p_hottest_uses",
    "log1p_read_bytes",
    "log1p_unique_bytes",
    "log1p_output_values",
    "log_weight_bytes",
    "weight_dtype_bytes",
    "log1p_state_bytes",
    "is_weighted",
    "is_pooled",
    "log_num_features",
    "cached_share",
    "has_histogram",
    *(f"optimizer_{name}" for name in OPTIMIZERS),
    *(f"kernel_{name}" for name in KERNELS),
    *(f"reuse_bin_{i}" for i in range(NUM_REUSE_BINS)),
)
"""Names of the F raw features of a shard. ``state_bytes`` counts the optimizer's state of one row; ``cached_share``
is the share of the rows in the device's own memory; ``unique_ids`` are the distinct rows that one batch reads,
``hottest_uses`` the reads of the row that is read most."""

HARDWARE_FEATURES: tuple[str, ...] = (
    *(f"is_{name}" for name in COMPUTE_DEVICES),
    "log_memory_gb_s",
    "log_cache_mb",
    "log_intra_host_gb_s",
    "log_inter_host_gb_s",
    "comms_dtype_bytes",
)
"""Names of the K raw features of the hardware."""

SHARD_INDEX = {name: index for index, name in enumerate(SHARD_FEATURES)}
HARDWARE_INDEX = {name: index for index, name in enumerate(HARDWARE_FEATURES)}

_SHARD_FIELDS = attrgetter(
    "rows", "dim", "pooling_factor", "batch_size", "num_features", "is_weighted", "is_pooled", "cache_load_factor"
)
_NO_HISTOGRAM = (0.0,) * NUM_REUSE_BINS
_MAX_SCALED = 5.0


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


def expected_unique_ids(lookups: FloatArray, rows: FloatArray, histograms: FloatArray) -> FloatArray:
    """Distinct rows that one batch reads.

    Args:
        lookups: ``N``, lookups of one batch.
        rows: ``N``.
        histograms: ``N x 17``, all zeros where unknown (ids are then taken as uniform over the rows).
    """
    mean_uses = histograms @ BIN_MEANS
    uniform = -rows * np.expm1(-lookups / rows)
    reused = np.minimum(lookups / np.maximum(mean_uses, 1.0), rows)
    return np.where(mean_uses > 0, reused, uniform)


def hottest_uses(unique: FloatArray, histograms: FloatArray) -> FloatArray:
    """Uses of the most used row in one batch, ``N``: the highest reuse bin that holds at least one row."""
    present = histograms * unique[:, None] >= 0.5
    return np.asarray(np.where(present, BIN_MEANS, 0.0).max(axis=1, initial=0.0))


def shard_features(shards: Sequence[ShardSpec]) -> Tensor:
    """Raw features of N shards, an ``N x F``-dim tensor; no value depends on another shard."""
    num_shards = len(shards)
    fields = np.array([_SHARD_FIELDS(shard) for shard in shards], dtype=object).reshape(num_shards, 8)
    cache = np.array([1.0 if value is None else value for value in fields[:, 7]], dtype=np.float64)
    rows, dim, pooling, batch, num_features, weighted, pooled = fields[:, :7].astype(np.float64).T
    flat = chain.from_iterable(shard.reuse_histogram or _NO_HISTOGRAM for shard in shards)
    bins = np.fromiter(flat, np.float64, num_shards * NUM_REUSE_BINS).reshape(num_shards, NUM_REUSE_BINS)
    dtype_bytes = np.array([DTYPE_BYTES[shard.weight_dtype] for shard in shards], dtype=np.float64)
    optimizer = np.array([OPTIMIZERS.index(shard.optimizer) for shard in shards], dtype=np.int64)
    kernel = np.array([KERNELS.index(shard.kernel) for shard in shards], dtype=np.int64)

    lookups = batch * pooling
    unique = expected_unique_ids(lookups, rows, bins)
    # Values of fp32 state per row: none, one, one per column, two per column.
    state_values = np.stack([0 * dim, np.ones_like(dim), dim, 2 * dim, 0 * dim])[optimizer, np.arange(num_shards)]
    in_uvm = np.array(["uvm" in name for name in KERNELS])[kernel]
    cached_in_uvm = np.array(["uvm_caching" in name for name in KERNELS])[kernel]
    # TorchRec's default cache holds a fifth of the rows.
    cached_share = np.where(cached_in_uvm, np.where(fields[:, 7] == None, 0.2, cache), np.where(in_uvm, 0.0, 1.0))  # noqa: E711
    columns = (
        np.log(rows),
        np.log(dim),
        np.log1p(pooling),
        np.log(batch),
        np.log1p(lookups),
        np.log1p(unique),
        np.where(lookups > 0, unique / np.maximum(lookups, 1e-9), 1.0).clip(max=1.0),
        np.log1p(hottest_uses(unique, bins)),
        np.log1p(lookups * dim * dtype_bytes),
        np.log1p(unique * dim * dtype_bytes),
        np.log1p(batch * dim * np.where(pooled > 0, num_features, pooling)),
        np.log(rows * dim * dtype_bytes),
        dtype_bytes,
        np.log1p(4.0 * state_values),
        weighted,
        pooled,
        np.log(num_features),
        cached_share,
        (bins.sum(axis=1) > 0).astype(np.float64),
    )
    one_hot = (np.eye(len(OPTIMIZERS))[optimizer], np.eye(len(KERNELS))[kernel])
    matrix = np.concatenate([np.stack(columns, axis=1), *one_hot, bins], axis=1)
    return torch.from_numpy(matrix.astype(np.float32))


def hardware_features(hardware: HardwareSpec) -> list[float]:
    """Raw features of the hardware, K floats (see ``HARDWARE_FEATURES``)."""
    rates = (hardware.memory_gb_s, hardware.cache_mb, hardware.intra_host_gb_s, hardware.inter_host_gb_s)
    kind = [float(hardware.compute_device == name) for name in COMPUTE_DEVICES]
    return [*kind, *np.log(rates).tolist(), DTYPE_BYTES[hardware.comms_dtype]]


def batch_tasks(tasks: Sequence[PlacementTask]) -> TaskTensors:
    """Pads tasks to the largest number of shards and devices among them.

    Args:
        tasks: B tasks of any size; a task without shards is legal.

    Raises:
        ValueError: no task was given.
    """
    if not tasks:
        raise ValueError("batch_tasks needs at least one task, got none")
    batch = len(tasks)
    num_shards = max(task.num_shards for task in tasks)
    num_devices = max(task.num_devices for task in tasks)
    features = torch.zeros(batch, num_shards, len(SHARD_FEATURES))
    shard_mask = torch.zeros(batch, num_shards, dtype=torch.bool)
    memory = torch.zeros(batch, num_shards, 2, dtype=torch.float64)
    capacity = torch.zeros(batch, num_devices, 2, dtype=torch.float64)
    device_mask = torch.zeros(batch, num_devices, dtype=torch.bool)
    host = torch.full((batch, num_devices), -1, dtype=torch.int64)
    background = torch.zeros(batch, num_devices)
    flat_features = shard_features([shard for task in tasks for shard in task.shards])
    start = 0
    for row, task in enumerate(tasks):
        s, d = task.num_shards, task.num_devices
        features[row, :s] = flat_features[start : start + s]
        start += s
        shard_mask[row, :s] = True
        device_mask[row, :d] = True
        if s:
            memory[row, :s] = torch.tensor([(x.hbm_bytes, x.ddr_bytes) for x in task.shards], dtype=torch.float64)
        capacity[row, :d] = torch.tensor([(x.hbm_bytes, x.ddr_bytes) for x in task.devices], dtype=torch.float64)
        host[row, :d] = torch.tensor([x.host for x in task.devices])
        background[row, :d] = torch.tensor([x.background_ms for x in task.devices])
    hardware = torch.tensor([hardware_features(task.hardware) for task in tasks])
    return TaskTensors(features, shard_mask, memory, capacity, device_mask, host, background, hardware)


def placement_latents(shard_latents: Tensor, placements: Tensor, num_devices: int) -> Tensor:
    """Sums the shards' latents on each device.

    Args:
        shard_latents: ``B x S x H``, 0 for padding.
        placements: ``B x S`` int64 device indices (any value for padding).
        num_devices: D.

    Returns:
        ``B x D x H``.
    """
    batch, _, hidden = shard_latents.shape
    index = placements.clamp(0, num_devices - 1).unsqueeze(-1).expand_as(shard_latents)
    return shard_latents.new_zeros(batch, num_devices, hidden).scatter_add(1, index, shard_latents)


class Normalizer(nn.Module):
    """Global z-scores, fitted once over a training pool and saved with the model.

    A column that is constant in the pool says nothing about the cost and maps to 0 wherever it is used, so that
    a value never seen in training cannot push the network into an untrained region. Scores are clamped for the
    same reason.
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(num_features))
        self.register_buffer("scale", torch.zeros(num_features))

    def fit(self, values: Tensor) -> None:
        """Sets the statistics.

        Columns that were constant in an earlier fit and vary now are added around their old value, those fitted
        already stay as they are: a model that is trained further keeps its meaning.

        Args:
            values: ``N x F``.
        """
        fresh = not bool(self.scale.any())
        mean, std = values.double().mean(dim=0), values.double().std(dim=0, correction=0)
        varies = std > 1e-6 * (1.0 + mean.abs())
        inverse = torch.where(varies, 1.0 / std.clamp(min=1e-12), 0.0).float()
        if fresh:
            self.mean.copy_(mean.float())
            self.scale.copy_(inverse)
        else:
            self.scale.copy_(torch.where(self.scale > 0, self.scale, inverse))

    def forward(self, values: Tensor) -> Tensor:
        """``... x F`` raw to ``... x F`` normalised."""
        return ((values - self.mean) * self.scale).clamp(-_MAX_SCALED, _MAX_SCALED)

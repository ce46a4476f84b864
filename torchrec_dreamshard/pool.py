"""The public table pool, and placement tasks drawn from it or from a pool of one's own.

A pool is a sequence of ``ShardSpec``, one per table. The public one describes the 856 tables of Meta's DLRM
dataset (data/SOURCES.md), which DreamShard (arXiv 2210.02023, section 4.1) splits into halves for training and
testing, so that no table is in both.
"""

from __future__ import annotations

import csv
import dataclasses
import gzip
import io
import math
from collections.abc import Sequence
from importlib import resources
from typing import Any

import numpy as np

from torchrec_dreamshard.hardware import resolve_hardware
from torchrec_dreamshard.reuse import rescale_histogram
from torchrec_dreamshard.types import (
    DEFAULT_DDR_BYTES,
    DEFAULT_HBM_BYTES,
    NUM_REUSE_BINS,
    HardwareSpec,
    PlacementTask,
    ShardSpec,
)

POOL_BATCH_SIZE = 65_536
"""Samples per batch behind the public pool's reuse histograms."""

_MAX_DRAWS = 100


def load_public_pool(
    *, dim: int = 16, weight_dtype: str = "fp32", optimizer: str = "sgd", include_unused: bool = True
) -> list[ShardSpec]:
    """The 856 tables of the public DLRM dataset as whole tables at its batch size, named ``table_<id>``.

    Args:
        dim: columns of every table (the dataset has none; the paper's DLRM tasks use 16).
        weight_dtype: see ``ShardSpec``.
        optimizer: see ``ShardSpec``.
        include_unused: whether to keep the 36 tables without lookups.
    """
    packed = resources.files("torchrec_dreamshard.data").joinpath("dlrm_856_tables.csv.gz").read_bytes()
    pool = []
    for row in csv.DictReader(io.StringIO(gzip.decompress(packed).decode())):
        pooling_factor = float(row["pooling_factor"])
        if pooling_factor == 0 and not include_unused:
            continue
        pool.append(
            ShardSpec(
                name=f"table_{row['table_id']}",
                rows=int(row["rows"]),
                dim=dim,
                pooling_factor=pooling_factor,
                batch_size=POOL_BATCH_SIZE,
                reuse_histogram=tuple(float(row[f"bin_{i}"]) for i in range(NUM_REUSE_BINS)),
                weight_dtype=weight_dtype,
                optimizer=optimizer,
            )
        )
    return pool


def split(pool: Sequence[ShardSpec], seed: int = 0) -> tuple[list[ShardSpec], list[ShardSpec]]:
    """Shuffles a pool and cuts it into two halves without a table in common: train and test."""
    order = np.random.default_rng(seed).permutation(len(pool))
    half = (len(pool) + 1) // 2
    return [pool[i] for i in sorted(order[:half])], [pool[i] for i in sorted(order[half:])]


def sample_tasks(
    pool: Sequence[ShardSpec],
    num_tasks: int,
    num_shards: int | tuple[int, int],
    num_devices: int | Sequence[int],
    *,
    dims: int | Sequence[int] | None = None,
    batch_size: int | None = None,
    hardware: str | HardwareSpec = "a100",
    memory_bytes: int | None = None,
    devices_per_host: int | None = None,
    seed: int = 0,
) -> list[PlacementTask]:
    """Draws tasks; the same arguments give the same tasks in every process.

    A draw whose shards cannot be packed into the devices' memory, largest first, is drawn again.

    Args:
        pool: the tables to draw from, without replacement within a task.
        num_tasks: how many tasks.
        num_shards: S, or an inclusive range to draw it from.
        num_devices: D, or the choices to draw it from.
        dims: columns of every shard, or the choices to draw each shard's from; None keeps the pool's.
        batch_size: samples per step (histograms follow, see ``rebatch``); None keeps the pool's.
        hardware: what the devices are, a name from ``hardware.HARDWARE`` or a record.
        memory_bytes: memory of each device (HBM of a cuda device, host memory of a cpu); None for 32 or 128 GiB.
        devices_per_host: devices that share a host; None puts all on one.
        seed: of the generator.

    Raises:
        ValueError: more shards than tables, or no draw that fits into memory.
    """
    low, high = (num_shards, num_shards) if isinstance(num_shards, int) else num_shards
    if not 1 <= low <= high <= len(pool):
        raise ValueError(f"num_shards must lie in 1 to {len(pool)}, the pool's size, got {num_shards!r}")
    if batch_size is not None:
        pool = [rebatch(shard, batch_size) for shard in pool]
    spec = resolve_hardware(hardware)
    on_host = spec.compute_device == "cpu"
    capacity = memory_bytes or (DEFAULT_DDR_BYTES if on_host else DEFAULT_HBM_BYTES)
    device_choices = [num_devices] if isinstance(num_devices, int) else list(num_devices)
    dim_choices = [dims] if isinstance(dims, int) else dims
    rng = np.random.default_rng(seed)
    tasks = []
    for _ in range(num_tasks):
        for _attempt in range(_MAX_DRAWS):
            drawn = rng.choice(len(pool), size=int(rng.integers(low, high + 1)), replace=False)
            shards = [pool[i] for i in drawn]
            if dim_choices is not None:
                shards = [with_dim(shard, int(rng.choice(dim_choices))) for shard in shards]
            count = int(rng.choice(device_choices))
            if _packs([max(shard.hbm_bytes, shard.ddr_bytes) for shard in shards], capacity, count):
                break
        else:
            raise ValueError(
                f"none of {_MAX_DRAWS} draws of {num_shards} shards fits into {count} devices of {capacity:,} bytes; "
                "raise memory_bytes or num_devices, or lower num_shards or dims"
            )
        memory = {"ddr_bytes" if on_host else "hbm_bytes": capacity}
        tasks.append(PlacementTask.uniform(shards, count, devices_per_host=devices_per_host, hardware=spec, **memory))
    return tasks


def plant_capacity(task: PlacementTask, fill: float, seed: int = 0) -> tuple[PlacementTask, tuple[int, ...]]:
    """Makes a task tight in memory around a placement that is known to fit.

    Args:
        task: its devices' capacities are replaced.
        fill: share of each device's memory that the planted placement uses, in (0, 1].
        seed: of the planted placement, which deals the shards in random order to the emptiest device.

    Returns:
        The task with each device's capacity, and the planted placement.
    """
    if not 0 < fill <= 1:
        raise ValueError(f"fill must lie in (0, 1], got {fill!r}")
    placement = [0] * task.num_shards
    used = np.zeros((task.num_devices, 2), dtype=np.int64)
    for index in np.random.default_rng(seed).permutation(task.num_shards):
        shard = task.shards[index]
        placement[index] = int(np.argmin(used.sum(axis=1)))
        used[placement[index]] += (shard.hbm_bytes, shard.ddr_bytes)
    devices = tuple(
        dataclasses.replace(device, hbm_bytes=math.ceil(hbm / fill), ddr_bytes=math.ceil(ddr / fill))
        for device, (hbm, ddr) in zip(task.devices, used.tolist(), strict=True)
    )
    return PlacementTask(task.shards, devices, task.hardware), tuple(placement)


def with_dim(shard: ShardSpec, dim: int, name: str | None = None) -> ShardSpec:
    """The shard with ``dim`` columns and, if given, another name; memory that was given scales along."""
    changes: dict[str, Any] = {"dim": dim, "name": shard.name if name is None else name, **_default_memory(shard)}
    if not shard.memory_is_default:
        changes["hbm_bytes"], changes["ddr_bytes"] = (
            -(-size * dim // shard.dim) for size in (shard.hbm_bytes, shard.ddr_bytes)
        )
    return dataclasses.replace(shard, **changes)


def rebatch(shard: ShardSpec, batch_size: int) -> ShardSpec:
    """The shard at another batch size, with the reuse histogram that follows (``reuse.rescale_histogram``)."""
    if batch_size == shard.batch_size:
        return shard
    histogram = shard.reuse_histogram
    if histogram is not None:
        histogram = rescale_histogram(histogram, batch_size / shard.batch_size)
    return dataclasses.replace(shard, batch_size=batch_size, reuse_histogram=histogram, **_default_memory(shard))


def _default_memory(shard: ShardSpec) -> dict[str, Any]:
    """What a changed copy must be given so that memory left to its default stays so."""
    return {"hbm_bytes": None, "ddr_bytes": None} if shard.memory_is_default else {}


def _packs(sizes: Sequence[int], capacity: int, num_devices: int) -> bool:
    """Whether dealing the largest first to the emptiest device stays within capacity."""
    used = np.zeros(num_devices, dtype=np.int64)
    for size in sorted(sizes, reverse=True):
        used[used.argmin()] += size
    return bool(used.max() <= capacity)

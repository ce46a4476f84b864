"""Which combinations of tables to measure, so that a small budget covers the ground evenly.

Sample ``i`` of a plan is a function of the plan and ``i`` alone. A run that was interrupted goes on where it
stopped, ranks share a plan by index, and a longer run starts with the samples of a shorter one. The main axes
(number of tables, batch size, memory, dims, variant of the kernel) follow an additive recurrence in the
generalised golden ratio, whose every prefix is spread evenly; what is left is drawn at random.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchrec_dreamshard.pool import rebatch
from torchrec_dreamshard.reuse import unique_rows
from torchrec_dreamshard.types import DTYPE_BYTES, DeviceSpec, HardwareSpec, PlacementTask, ShardSpec
from torchrec_dreamshard.validation import integer

_AXES = ("num_tables", "batch_size", "weight_bytes", "dims", "variant")
_UNIFORM_DIM_SHARE = 0.4  # of the samples have one dim throughout, as the paper's DLRM tasks do
_TWO_FEATURES_SHARE = 0.05  # of the tables
_POOLING_SPREAD, _ROWS_SPREAD = 0.3, 0.5  # standard deviations of logarithms: the pool's values are not the only ones
_LEAST_EVEN, _MOST_EVEN = 0.3, 30.0  # concentrations of the Dirichlet distribution of tables over devices
_MIN_WEIGHT_BYTES = 1 << 20
_MIN_BATCH = 64
_HISTOGRAM_DIGITS = 4
_DEFAULT_MEMORY: dict[str, Any] = {"hbm_bytes": None, "ddr_bytes": None}

_CPU_VARIANTS: tuple[tuple[float, dict[str, Any]], ...] = (
    (0.42, {}),
    (0.20, {"optimizer": "rowwise_adagrad"}),
    (0.08, {"optimizer": "adagrad"}),
    (0.08, {"weight_dtype": "fp16"}),
    (0.06, {"weight_dtype": "fp16", "optimizer": "rowwise_adagrad"}),
    (0.06, {"is_weighted": True}),
    (0.04, {"is_weighted": True, "optimizer": "rowwise_adagrad"}),
    (0.06, {"is_pooled": False}),
)
_CUDA_VARIANTS: tuple[tuple[float, dict[str, Any]], ...] = (
    (0.16, {}),
    (0.16, {"weight_dtype": "fp16"}),
    (0.16, {"optimizer": "rowwise_adagrad"}),
    (0.12, {"weight_dtype": "fp16", "optimizer": "rowwise_adagrad"}),
    (0.06, {"optimizer": "adagrad"}),
    (0.06, {"optimizer": "adam"}),
    (0.06, {"weight_dtype": "bf16"}),
    (0.08, {"is_weighted": True}),
    (0.06, {"is_pooled": False}),
    (0.08, {"kernel": "fused_uvm_caching"}),
)
"""Variants of the fused kernel with their shares of the samples."""


@dataclass(frozen=True, kw_only=True)
class SamplingPlan:
    """A sequence of one-device tasks to measure.

    Indexing gives the task of a sample; every index from 0 on is legal.
    """

    pool: Sequence[ShardSpec] = dataclasses.field(repr=False)
    """Tables to draw from, without replacement within a sample."""
    hardware: HardwareSpec
    """What the tasks say about the device."""
    seed: int = 0
    """Another seed gives other samples."""
    max_tables: int = 20
    """Tables of a sample: 1 to this many."""
    dims: tuple[int, ...] = (4, 8, 16, 32, 64, 128)
    """Columns of a table."""
    batch_sizes: tuple[int, int] = (128, 65_536)
    """Smallest and largest batch; halved while a sample exceeds the limits below."""
    max_lookups: int = 600_000
    """Lookups of a sample per step."""
    max_output_bytes: int = 48 * 1024**2
    """Output values of a sample per step, in fp32."""
    max_weight_bytes: int = 512 * 1024**2
    """Weights of a sample; rows of its tables shrink to fit."""

    def __post_init__(self) -> None:
        for name in ("max_tables", "max_lookups", "max_output_bytes", "max_weight_bytes"):
            object.__setattr__(self, name, integer("SamplingPlan", name, getattr(self, name), 1))
        if self.max_tables > len(self.pool):
            raise ValueError(f"SamplingPlan.max_tables is {self.max_tables}, but the pool has {len(self.pool)} tables")
        if not 1 <= self.batch_sizes[0] <= self.batch_sizes[1]:
            raise ValueError(f"SamplingPlan.batch_sizes must be (low, high) with low <= high, got {self.batch_sizes!r}")

    @property
    def fingerprint(self) -> str:
        """Short name of the plan: equal plans have equal samples."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("pool", "hardware")}
        values["pool"] = [shard.to_dict() for shard in self.pool]
        values["hardware"] = self.hardware.to_dict()
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]

    def __getitem__(self, index: int) -> PlacementTask:
        """The task of sample ``index``."""
        axes = self._axes(index)
        rng = np.random.default_rng([self.seed, index])
        tables = self._draw_tables(1 + int(axes["num_tables"] * self.max_tables), axes["dims"], rng)
        variant = self._variant(axes["variant"])
        low, high = self.batch_sizes
        batch_size = round(low * (high / low) ** axes["batch_size"])
        shards = _vary(tables, batch_size, variant)
        while batch_size > _MIN_BATCH and self._exceeds(shards):
            batch_size = max(_MIN_BATCH, batch_size // 2)
            shards = _vary(tables, batch_size, variant)
        span = max(1.0, self.max_weight_bytes / _MIN_WEIGHT_BYTES)
        weight_bytes = self.max_weight_bytes / span ** (1 - axes["weight_bytes"])
        shards = _scale_rows(shards, weight_bytes, rng)
        return PlacementTask.uniform(shards, 1, hardware=self.hardware)

    def _axes(self, index: int) -> dict[str, float]:
        """The sample's position on every axis, in [0, 1)."""
        phi = 2.0
        for _ in range(40):  # the root of x**(d + 1) = x + 1
            phi = (1 + phi) ** (1 / (len(_AXES) + 1))
        start = np.random.default_rng(self.seed).random(len(_AXES))
        return {
            name: math.fmod(float(start[axis]) + (index + 1) * phi ** -(axis + 1), 1.0)
            for axis, name in enumerate(_AXES)
        }

    def _draw_tables(self, count: int, mix: float, rng: np.random.Generator) -> list[ShardSpec]:
        drawn = [self.pool[i] for i in rng.choice(len(self.pool), size=count, replace=False)]
        dims = rng.choice(self.dims, size=count)
        if mix < _UNIFORM_DIM_SHARE:
            dims[:] = dims[0]
        poolings = np.exp(_POOLING_SPREAD * rng.standard_normal(count))
        features = 1 + (rng.random(count) < _TWO_FEATURES_SHARE)
        return [
            dataclasses.replace(
                table,
                dim=int(dim),
                pooling_factor=round(table.pooling_factor * float(pooling), 4),
                num_features=int(num_features),
                **_DEFAULT_MEMORY,
            )
            for table, dim, pooling, num_features in zip(drawn, dims, poolings, features, strict=True)
        ]

    def _variant(self, position: float) -> Mapping[str, Any]:
        variants = _CPU_VARIANTS if self.hardware.compute_device == "cpu" else _CUDA_VARIANTS
        for share, fields in variants:
            if position < share:
                return fields
            position -= share
        return variants[0][1]

    def _exceeds(self, shards: Sequence[ShardSpec]) -> bool:
        lookups = sum(shard.batch_size * shard.pooling_factor for shard in shards)
        output_bytes = sum(4 * shard.batch_size * shard.output_columns for shard in shards)
        used_bytes = sum(unique_rows(shard) * shard.dim * DTYPE_BYTES[shard.weight_dtype] for shard in shards)
        return (
            lookups > self.max_lookups or output_bytes > self.max_output_bytes or 2 * used_bytes > self.max_weight_bytes
        )


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """A sequence of placements to measure as whole steps, exchange included.

    Indexing gives the task and the placement of a sample; every index from 0 on is legal.
    """

    tables: SamplingPlan
    """Its samples are the tables to place."""
    hosts: tuple[int, ...]
    """Host of each rank there is; a sample uses the first 2 to all of them in turn."""

    def __post_init__(self) -> None:
        if len(self.hosts) < 2:
            raise ValueError(f"StepPlan.hosts must name at least 2 ranks, got {self.hosts!r}")

    @property
    def fingerprint(self) -> str:
        """Short name of the plan: equal plans have equal samples."""
        return hashlib.sha256(f"{self.tables.fingerprint} {self.hosts}".encode()).hexdigest()[:12]

    def __getitem__(self, index: int) -> tuple[PlacementTask, tuple[int, ...]]:
        """The task and the placement of sample ``index``, the tables spread evenly or unevenly over the devices."""
        num_devices = 2 + index % (len(self.hosts) - 1)
        rng = np.random.default_rng([self.tables.seed, index, num_devices])
        evenness = _LEAST_EVEN * (_MOST_EVEN / _LEAST_EVEN) ** rng.random()
        shares = rng.dirichlet(np.full(num_devices, evenness))
        shards = self.tables[index].shards
        placement = rng.choice(num_devices, size=len(shards), p=shares)
        devices = tuple(DeviceSpec(host=host) for host in self.hosts[:num_devices])
        return PlacementTask(shards, devices, self.tables.hardware), tuple(placement.tolist())


def _vary(tables: Sequence[ShardSpec], batch_size: int, variant: Mapping[str, Any]) -> list[ShardSpec]:
    shards = []
    for table in tables:
        shard = dataclasses.replace(rebatch(table, batch_size), **variant, **_DEFAULT_MEMORY)
        shards.append(dataclasses.replace(shard, reuse_histogram=_rounded(shard.reuse_histogram)))
    return shards


def _scale_rows(shards: Sequence[ShardSpec], weight_bytes: float, rng: np.random.Generator) -> list[ShardSpec]:
    """Gives the tables rows that add up to about ``weight_bytes``, but never fewer than a batch uses."""
    weights = np.array([shard.weight_bytes for shard in shards], dtype=np.float64)
    weights *= np.exp(_ROWS_SPREAD * rng.standard_normal(len(shards)))
    scales = weights / [shard.weight_bytes for shard in shards] * min(1.0, weight_bytes / weights.sum())
    return [
        dataclasses.replace(
            shard,
            rows=max(1, math.ceil(unique_rows(shard)), round(shard.rows * float(scale))),
            **_DEFAULT_MEMORY,
        )
        for shard, scale in zip(shards, scales, strict=True)
    ]


def _rounded(histogram: tuple[float, ...] | None) -> tuple[float, ...] | None:
    """A histogram with few digits, so that a store stays small; the largest share takes what rounding leaves."""
    if histogram is None:
        return None
    shares = [round(share, _HISTOGRAM_DIGITS) for share in histogram]
    largest = shares.index(max(shares))
    shares[largest] = round(shares[largest] + 1 - sum(shares), _HISTOGRAM_DIGITS)
    return tuple(shares)

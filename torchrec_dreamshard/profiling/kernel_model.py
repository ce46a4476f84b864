"""Analytic time of a fused embedding kernel: what each shard adds, and what a device makes of the sum.

One fused op serves all shards of a device. Each shard adds *throughput* work (bytes over bandwidths, sorting) and
a *serial* path (the longest bag in forward, the hottest row in backward). Throughput work adds up; serial paths
run beside it, so the device's time is

    smooth_max(floor, launch + tables * table + smooth_max(sum of throughput, largest serial path)),

with ``smooth_max`` a p-norm. Sums of single-shard times therefore exceed the fused time: launches and serial
paths are paid once. Traffic of one shard, with N lookups, U distinct rows, rows of r bytes rounded up to sectors:

* forward: indices and offsets, U rows from memory, N - U from cache or memory again, outputs written. Repeats hit
  the cache by Che's approximation: a row used c times per batch returns within the cache's lifetime t with
  probability 1 - exp(-c t), where t solves ``sum of r (1 - exp(-c t)) = cache``. Tables run one after the other, so
  each sees the whole cache.
* backward: N keys sorted and segmented, output gradients gathered in that order, U rows read and written with their
  optimizer state at the lower bandwidth of scattered writes.

Everything is calibrated in benchmarks/calibrate_analytic.py; "fitted" below means there.

References:
    [perf] Lin et al., "Towards Universal Performance Modeling for Machine Learning Training on Multi-GPU
        Platforms", arXiv 2404.12674 (sector rounding, reuse; its code owensgroup/ml_perf_model).
    [che] Che et al., "Hierarchical Web caching systems: modeling, design and experimental results", 2002.
    [torchrec] TorchRec 1.8, distributed/planner/constants.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from torchrec_dreamshard.hardware import device_details
from torchrec_dreamshard.measurement import FloatArray
from torchrec_dreamshard.reuse import BIN_MEANS, unique_rows
from torchrec_dreamshard.types import DTYPE_BYTES, NUM_REUSE_BINS, HardwareSpec, ShardSpec

_FP32 = 4.0  # outputs, gradients and optimizer states
_INDEX_BYTES = 8.0  # int64 indices and offsets
_P_FLOOR = 4.0  # sharpness of the change from host-bound to device-bound
_GB_S_TO_BYTES_PER_MS = 1e6

DEFAULT_CACHE_LOAD_FACTOR = 0.2  # [torchrec: uvm_caching_ratio]

STATE_BYTES_PER_ROW = {
    "sgd": (0.0, 0.0),
    "rowwise_adagrad": (0.0, _FP32),
    "adagrad": (_FP32, 0.0),
    "adam": (2 * _FP32, 0.0),
    "none": (0.0, 0.0),
}
"""Optimizer state of one row: bytes per column and bytes per row."""


@dataclass(frozen=True, kw_only=True)
class KernelConstants:
    """What a kind of device costs beyond its bandwidths."""

    forward_launch_ms: float
    """From the call to the kernel's start."""
    forward_floor_ms: float
    """Host time of a forward call; a shorter kernel hides behind it."""
    backward_launch_ms: float
    backward_floor_ms: float
    table_ms: float
    """Per table and direction: arguments, offsets, segment bookkeeping."""
    lookup_ns: tuple[float, float]
    """Instructions per lookup, forward and backward, beside the traffic."""
    column_ns: tuple[float, float]
    """The same per lookup and column."""
    bag_step_us: float
    """One step of a bag's serial loop."""
    serial_power: float
    """p of the norm that overlaps serial paths with throughput."""
    sector_bytes: float
    """Granularity of memory traffic."""
    cache_share: float
    """Share of the cache that embedding rows can hold beside streamed data."""
    sort_bytes: float
    """Traffic of sorting and segmenting, per lookup."""
    scatter_efficiency: float
    """Share of the bandwidth that scattered read-modify-writes reach."""
    host_repeat_hit: float
    """Share of repeated reads of rows in host memory that a cache serves."""
    cache_lookup_ns: tuple[float, float]
    """Bookkeeping of a ``*_uvm_caching`` kernel per lookup, forward and backward."""


GPU_CONSTANTS = KernelConstants(
    forward_launch_ms=0.012,  # fitted; V100: op time minus kernel time of kernels above 20 us
    forward_floor_ms=0.033,  # fitted; V100: op time of kernels of 5 us
    backward_launch_ms=0.075,  # about 15 kernels of 5 us each [perf: gpu_kernel_overhead]
    backward_floor_ms=0.15,  # about 15 launches 10 us apart [perf: kernel_launch_gap]
    table_ms=0.0002,  # fitted to the V100 op times of 32 tables
    lookup_ns=(0.0, 0.0),
    column_ns=(0.0, 0.0),
    bag_step_us=0.1,  # a dependent read from DRAM takes about 0.4 us, four are in flight
    serial_power=2.0,  # fitted to the learned aggregates
    sector_bytes=32.0,  # [perf]
    cache_share=0.5,  # fitted
    sort_bytes=400.0,  # radix passes, linear indices and segments of an 8 B key and its value; fitted to the H100 rows
    scatter_efficiency=0.6,  # V100 scattered writes reach 0.56 of the peak; Adam's extra time on H100 gives 0.62
    host_repeat_hit=0.65,  # fitted to the H100 rows with tables in host memory
    cache_lookup_ns=(2.9, 0.12),  # fitted to the H100 rows with a full cache
)

CPU_CONSTANTS = KernelConstants(
    forward_launch_ms=0.02,  # of one thread; all of this block fitted to measured kernels of 4 one-thread processes
    forward_floor_ms=0.05,
    backward_launch_ms=0.05,
    backward_floor_ms=0.10,
    table_ms=1.0,
    lookup_ns=(9.0, 22.0),
    column_ns=(0.25, 0.6),
    bag_step_us=0.0,
    serial_power=2.0,
    sector_bytes=64.0,  # a cache line
    cache_share=0.5,
    sort_bytes=0.0,
    scatter_efficiency=0.5,
    host_repeat_hit=1.0,
    cache_lookup_ns=(0.0, 0.0),
)


class ShardLoads(NamedTuple):
    """What shards add to a device, arrays of length S; times in ms."""

    forward: FloatArray
    """Throughput work."""
    backward: FloatArray
    forward_serial: FloatArray
    """Serial path."""
    backward_serial: FloatArray
    separate: FloatArray
    """Launches of one more kernel (forward, backward: ``S x 2``), which all dense shards of a device share."""
    exchange_bytes: FloatArray
    """Bytes of output that the exchange carries, over the whole batch."""


def kernel_constants(hardware: HardwareSpec) -> KernelConstants:
    """The constants of the hardware's kind."""
    return CPU_CONSTANTS if hardware.compute_device == "cpu" else GPU_CONSTANTS


def shard_loads(shards: Sequence[ShardSpec], hardware: HardwareSpec) -> ShardLoads:
    """Analytic loads of shards on the given hardware; see the module's text for the formulas."""
    traffic = _Traffic(shards, hardware)
    forward, backward = traffic.forward_ms(), traffic.backward_ms()
    dense = np.array([shard.kernel == "dense" for shard in shards], dtype=bool)
    constants = traffic.constants
    slow = np.where(dense, 2.0, 1.0)  # a dense kernel reaches half the bandwidth [torchrec: kernel_bandwidth_share]
    own_launches = np.array([constants.forward_floor_ms, constants.backward_floor_ms])
    return ShardLoads(
        forward=forward * slow,
        backward=backward * slow,
        forward_serial=traffic.bag_length() * constants.bag_step_us / 1e3,
        backward_serial=np.where(traffic.trained, traffic.hottest_uses(), 0.0) * traffic.hot_use_ms,
        separate=dense[:, None] * own_launches,
        exchange_bytes=traffic.batch * traffic.output_columns * DTYPE_BYTES[hardware.comms_dtype],
    )


def smooth_max(a: FloatArray, b: FloatArray | float, power: float) -> FloatArray:
    """The p-norm of two non-negative arrays: at least the larger, at most ``2**(1/p)`` times it."""
    return np.asarray((np.asarray(a) ** power + np.asarray(b) ** power) ** (1 / power))


def fused_times(
    forward: FloatArray,
    backward: FloatArray,
    forward_serial: FloatArray,
    backward_serial: FloatArray,
    num_tables: FloatArray,
    constants: KernelConstants,
) -> tuple[FloatArray, FloatArray]:
    """Forward and backward time of fused kernels in ms.

    Args:
        forward: throughput work, summed over the kernel's tables; any shape, the same for all arrays.
        backward: the same for backward; 0 where nothing is trained.
        forward_serial: the largest serial path of the tables.
        backward_serial: the same for backward.
        num_tables: tables in the kernel; 0 for a device without any, which costs nothing.
        constants: of the kind of device.
    """
    times = []
    for work, serial, launch, floor in (
        (forward, forward_serial, constants.forward_launch_ms, constants.forward_floor_ms),
        (backward, backward_serial, constants.backward_launch_ms, constants.backward_floor_ms),
    ):
        kernel = smooth_max(work, serial, constants.serial_power)
        busy = launch + num_tables * constants.table_ms + kernel
        times.append(np.where((num_tables > 0) & (work > 0), smooth_max(busy, floor, _P_FLOOR), 0.0))
    return times[0], times[1]


class _Traffic:
    """Bytes and counts of S shards as arrays of length S."""

    def __init__(self, shards: Sequence[ShardSpec], hardware: HardwareSpec) -> None:
        def array(values: Sequence[float | bool]) -> FloatArray:
            return np.array(values, dtype=np.float64)

        self.constants = kernel_constants(hardware)
        details = device_details(hardware)
        self.memory = hardware.memory_gb_s * _GB_S_TO_BYTES_PER_MS
        self.cache = details.cache_gb_s * _GB_S_TO_BYTES_PER_MS
        self.host_link = details.host_link_gb_s * _GB_S_TO_BYTES_PER_MS
        self.hot_use_ms = details.hot_use_us / 1e3
        self.cache_bytes = hardware.cache_mb * 1e6 * self.constants.cache_share
        self.dim = array([shard.dim for shard in shards])
        self.batch = array([shard.batch_size for shard in shards])
        self.lookups = array([shard.pooling_factor * shard.batch_size for shard in shards])
        self.unique = array([unique_rows(shard) for shard in shards])
        self.pooled = np.array([shard.is_pooled for shard in shards], dtype=bool)
        self.bags = self.batch * array([shard.num_features for shard in shards])
        self.outputs = np.where(self.pooled, self.bags, self.lookups)
        self.output_columns = array([shard.output_columns for shard in shards])
        self.weighted = array([shard.is_weighted for shard in shards])
        self.row_bytes = self._sectors(array([shard.dim * DTYPE_BYTES[shard.weight_dtype] for shard in shards]))
        state = np.array([STATE_BYTES_PER_ROW[shard.optimizer] for shard in shards]).reshape(-1, 2)
        self.state_bytes = self._sectors(state[:, 0] * self.dim + state[:, 1])
        self.writes_rows = np.array([shard.optimizer != "none" for shard in shards], dtype=bool)
        kernels = [shard.kernel for shard in shards]
        self.trained = np.array([not kernel.startswith("quant") for kernel in kernels], dtype=bool)
        # On a cpu, host memory is the device's own: the unified-memory kernels are plain ones there.
        cuda = hardware.compute_device == "cuda"
        self.in_host = np.array([cuda and kernel.endswith("_uvm") for kernel in kernels], dtype=bool)
        self.cached = np.array([cuda and kernel.endswith("_uvm_caching") for kernel in kernels], dtype=bool)
        self.missing = np.array([1 - (shard.cache_load_factor or DEFAULT_CACHE_LOAD_FACTOR) for shard in shards])
        self._shares, self._uses = self._reuse(shards)
        self.repeat_hits = self._repeat_hits()

    def forward_ms(self) -> FloatArray:
        """Throughput work of the forward pass."""
        repeats = self.lookups - self.unique
        host_reads = np.where(self.in_host, self.unique + repeats * (1 - self.constants.host_repeat_hit), 0.0)
        host_reads = np.where(self.cached, self.unique * self.missing, host_reads)
        cache_reads = np.where(self.in_host, self.lookups - host_reads, self.repeat_hits)
        memory_reads = np.where(self.in_host, 0.0, self.lookups - self.repeat_hits)
        streamed = self.lookups * (_INDEX_BYTES + self.weighted * _FP32) + self.bags * _INDEX_BYTES
        streamed += self.outputs * self._sectors(self.dim * _FP32)
        return (
            (streamed + memory_reads * self.row_bytes) / self.memory
            + cache_reads * self.row_bytes / self.cache
            + host_reads * self.row_bytes / self.host_link
            + self._instructions_ms(0)
        )

    def backward_ms(self) -> FloatArray:
        """Throughput work of the backward pass with its fused optimizer."""
        gradient_bytes = self._sectors(self.dim * _FP32)
        first = np.minimum(self.outputs, self.lookups)
        again = self.lookups - first
        hit = np.minimum(1.0, self.cache_bytes / np.maximum(self.outputs * gradient_bytes, 1.0))
        streamed = self.lookups * (self.constants.sort_bytes + self.weighted * _FP32)
        streamed += (first + again * (1 - hit)) * gradient_bytes
        scattered = self.memory * self.constants.scatter_efficiency
        # A read and a write of each row; without an optimizer only its gradient is written. A link to the host
        # carries both directions at once.
        rows = np.where(self.writes_rows, 2 * self.row_bytes, gradient_bytes)
        update = self.unique * np.where(self.in_host, self.row_bytes / self.host_link, rows / scattered)
        state_in_host = self.in_host | self.cached
        update += self.unique * self.state_bytes * np.where(state_in_host, 1 / self.host_link, 2 / scattered)
        work = streamed / self.memory + again * hit * gradient_bytes / self.cache + update + self._instructions_ms(1)
        return np.where(self.trained, work, 0.0)

    def bag_length(self) -> FloatArray:
        """Mean lookups of an output row."""
        return np.asarray(np.where(self.pooled, self.lookups / np.maximum(self.bags, 1.0), 1.0))

    def hottest_uses(self) -> FloatArray:
        """Uses of the row that is used most."""
        expected = self._shares * self.unique[:, None] >= 0.5
        return np.asarray(np.where(expected, self._uses, 0.0).max(axis=1, initial=0.0))

    def _instructions_ms(self, direction: int) -> FloatArray:
        constants = self.constants
        per_lookup = constants.lookup_ns[direction] + constants.column_ns[direction] * self.dim
        return self.lookups * (per_lookup + self.cached * constants.cache_lookup_ns[direction]) / 1e6

    def _sectors(self, size: FloatArray) -> FloatArray:
        return np.ceil(size / self.constants.sector_bytes) * self.constants.sector_bytes

    def _reuse(self, shards: Sequence[ShardSpec]) -> tuple[FloatArray, FloatArray]:
        """Shares of the distinct ids and their uses, both ``S x bins``, consistent with lookups and unique rows."""
        even = (1.0,) + (0.0,) * (NUM_REUSE_BINS - 1)
        shares = np.array([shard.reuse_histogram or even for shard in shards]).reshape(-1, NUM_REUSE_BINS)
        uses = np.tile(BIN_MEANS, (len(shards), 1))
        mean = self.lookups / np.maximum(self.unique, 1e-9)
        uses *= (mean / (shares * uses).sum(axis=1))[:, None]
        return shares, uses

    def _repeat_hits(self) -> FloatArray:
        """Repeated reads of rows that the cache serves (Che's approximation, solved by bisection)."""
        ids = self._shares * self.unique[:, None]
        room = self.cache_bytes / self.row_bytes
        low, high = np.zeros_like(room), np.ones_like(room)
        for _ in range(40):
            middle = (low + high) / 2
            too_long = (ids * -np.expm1(-self._uses * middle[:, None])).sum(axis=1) > room
            low, high = np.where(too_long, low, middle), np.where(too_long, middle, high)
        lifetime = np.where(self.unique <= room, np.inf, low)
        with np.errstate(invalid="ignore"):
            hit = -np.expm1(-np.where(self._uses > 0, self._uses * lifetime[:, None], 0.0))
        return np.asarray((ids * np.maximum(self._uses - 1, 0.0) * hit).sum(axis=1))

"""Fused embedding kernels: the tables of one device as FBGEMM's table-batched op runs them in a job.

``SplitTableBatchedEmbeddingBagsCodegen`` looks all of its tables up in one kernel and applies the optimizer
inside its backward pass, so the time of a device is not the sum of its tables' times. As in TorchRec 1.8, tables
share a kernel when precision, optimizer, pooling, weighting and memory kernel agree. One code path serves cpu
and cuda.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from torchrec_dreamshard.errors import MeasurementError
from torchrec_dreamshard.profiling.timing import Phase, PhaseTimes, TimingConfig, time_phases
from torchrec_dreamshard.profiling.workloads import Bags, fuse_bags, make_bags
from torchrec_dreamshard.types import ShardSpec

_OPTIMIZERS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "adam": EmbOptimType.ADAM,
}
_PRECISIONS = {"fp32": SparseType.FP32, "fp16": SparseType.FP16, "bf16": SparseType.BF16}
_LOCATIONS = {
    "fused": EmbeddingLocation.DEVICE,
    "fused_uvm": EmbeddingLocation.MANAGED,
    "fused_uvm_caching": EmbeddingLocation.MANAGED_CACHING,
}
_CPU_OPTIMIZERS = ("sgd", "rowwise_adagrad", "adagrad")  # FBGEMM 1.8
_CPU_PRECISIONS = ("fp32", "fp16")  # FBGEMM 1.8
_DEFAULT_CACHE_LOAD_FACTOR = 0.2  # TorchRec 1.8
_TILE_ELEMENTS = 1 << 20
_MEMINFO_UNIT = 1024  # "kB"
_CGROUP = Path("/sys/fs/cgroup")


class FusedKernel:
    """One fused op with its weights, its optimizer and one batch of lookups.

    Every run looks up the same batch. The rows of a ``fused_uvm_caching`` kernel are therefore found in its cache as
    far as the batch fits into it, which is the best that a job can see.

    Args:
        shards: tables that share a kernel (``group_shards``).
        device: where it runs.
        rng: source of weights, lookups and gradients.
    """

    def __init__(self, shards: Sequence[ShardSpec], device: torch.device, rng: np.random.Generator) -> None:
        first = shards[0]
        self._op = _build_op(shards, device)
        generator = torch.Generator().manual_seed(int(rng.integers(2**62)))
        _write_weights(self._op, generator)
        bags = fuse_bags([make_bags(shard, rng) for shard in shards])
        self._bags = Bags(*(part.to(device) for part in bags))
        self._weights: torch.Tensor | None = None
        if first.is_weighted:
            self._weights = torch.rand(len(bags.indices), generator=generator).to(device)
        columns = sum(shard.dim * shard.num_features for shard in shards)
        shape = (first.batch_size, columns) if first.is_pooled else (len(bags.indices), first.dim)
        self._gradient = torch.rand(shape, generator=generator).to(device)
        self._output: torch.Tensor | None = None

    def forward(self) -> None:
        """Looks up and pools; keeps the output for ``backward``."""
        self._output = self._op(self._bags.indices, self._bags.offsets, per_sample_weights=self._weights)

    def backward(self) -> None:
        """Sends a gradient back through the last ``forward`` and updates the weights."""
        if self._output is None:
            raise RuntimeError("backward() needs a forward() before it")
        output, self._output = self._output, None
        output.backward(self._gradient)  # type: ignore[no-untyped-call]


class DeviceKernels:
    """All fused kernels of one device, run one after the other; a device without shards does nothing.

    Args:
        shards: the device's shards; one without lookups still has its (empty) bags.
        device: where they run.
        rng: source of weights, lookups and gradients.

    Raises:
        MeasurementError: the kernels do not support a shard, or memory ran out.
    """

    def __init__(self, shards: Sequence[ShardSpec], device: torch.device, rng: np.random.Generator) -> None:
        for shard in shards:
            _check_supported(shard, device)
        _check_memory(shards, device)
        self._what = f"the fused kernel of {len(shards)} shards on {device}"
        with _as_measurement_error(self._what):
            self._kernels = [FusedKernel(group, device, rng) for group in group_shards(shards)]

    def forward(self) -> None:
        """The forward pass of every kernel."""
        with _as_measurement_error(self._what):
            for kernel in self._kernels:
                kernel.forward()

    def backward(self) -> None:
        """The backward pass of every kernel, each after its ``forward``."""
        with _as_measurement_error(self._what):
            for kernel in self._kernels:
                kernel.backward()


def time_device(
    shards: Sequence[ShardSpec],
    device: torch.device,
    config: TimingConfig | None = None,
    *,
    rng: np.random.Generator,
) -> PhaseTimes:
    """Times what one device runs in a step: the forward, then the backward pass of its fused kernels.

    Args:
        shards: the device's shards.
        device: where to run.
        config: how often to measure.
        rng: source of weights, lookups and gradients.

    Returns:
        ``R x 2`` times, forward and backward; zeros when there is nothing to do.

    Raises:
        MeasurementError: the kernels do not support a shard, or memory ran out.
    """
    if not shards:
        return PhaseTimes(np.zeros((1, 2)), np.ones(1, dtype=np.bool_))
    kernels = DeviceKernels(shards, device, rng)
    with _as_measurement_error("timing"):  # on cuda, errors of a kernel surface when the host synchronises
        return time_phases((Phase(kernels.forward), Phase(kernels.backward)), device, config)


def group_shards(shards: Sequence[ShardSpec]) -> list[list[ShardSpec]]:
    """Splits a device's shards into those that run fused, in the order of their first shards.

    Sequence outputs of one kernel share a width, and bags share a batch size.
    """
    groups: dict[tuple[object, ...], list[ShardSpec]] = {}
    for shard in shards:
        width = None if shard.is_pooled else shard.dim
        key = (shard.batch_size, shard.weight_dtype, shard.optimizer, shard.kernel, shard.is_weighted, width)
        groups.setdefault(key, []).append(shard)
    return list(groups.values())


def _build_op(shards: Sequence[ShardSpec], device: torch.device) -> Any:
    first = shards[0]
    on_cuda = device.type == "cuda"
    location = _LOCATIONS[first.kernel] if on_cuda else EmbeddingLocation.HOST
    compute = ComputeDevice.CUDA if on_cuda else ComputeDevice.CPU
    # One cache serves all tables of the kernel; TorchRec sizes it by the mean over rows.
    cached_rows = sum((shard.cache_load_factor or _DEFAULT_CACHE_LOAD_FACTOR) * shard.rows for shard in shards)
    return SplitTableBatchedEmbeddingBagsCodegen(
        [(shard.rows, shard.dim, location, compute) for shard in shards],
        feature_table_map=[table for table, shard in enumerate(shards) for _ in range(shard.num_features)],
        cache_load_factor=cached_rows / sum(shard.rows for shard in shards),
        weights_precision=_PRECISIONS[first.weight_dtype],
        output_dtype=SparseType.FP32,
        optimizer=_OPTIMIZERS[first.optimizer],
        pooling_mode=PoolingMode.SUM if first.is_pooled else PoolingMode.NONE,
        device=device,
    )


def _write_weights(op: Any, generator: torch.Generator) -> None:
    """Writes every weight: untouched pages of a fresh allocation all map to one page of zeros, which lies in cache.

    A repeated tile of random numbers is written at the speed of memory; drawing each would take far longer.
    """
    for weights in op.split_embedding_weights():
        flat = weights.detach().view(-1)
        size = min(_TILE_ELEMENTS, flat.numel())
        tile = (torch.rand(size, generator=generator) - 0.5).to(device=flat.device, dtype=flat.dtype)
        whole = flat.numel() // size * size
        flat[:whole].view(-1, size).copy_(tile)
        flat[whole:].copy_(tile[: flat.numel() - whole])


def _check_supported(shard: ShardSpec, device: torch.device) -> None:
    on_cpu = device.type == "cpu"
    kernels = ("fused",) if on_cpu else tuple(_LOCATIONS)
    precisions = _CPU_PRECISIONS if on_cpu else tuple(_PRECISIONS)
    optimizers = _CPU_OPTIMIZERS if on_cpu else tuple(_OPTIMIZERS)
    rules = (
        ("dim", shard.dim, shard.dim % 4 == 0, "a multiple of 4"),
        ("kernel", shard.kernel, shard.kernel in kernels, "one of " + ", ".join(kernels)),
        ("weight_dtype", shard.weight_dtype, shard.weight_dtype in precisions, "one of " + ", ".join(precisions)),
        ("optimizer", shard.optimizer, shard.optimizer in optimizers, "one of " + ", ".join(optimizers)),
    )
    for name, value, holds, rule in rules:
        if not holds:
            raise MeasurementError(
                f"shard {shard.name!r} cannot be measured: fused kernels on {device.type} need {name} to be {rule}, "
                f"got {value!r}"
            )


def _check_memory(shards: Sequence[ShardSpec], device: torch.device) -> None:
    """Refuses what cannot fit: Linux promises memory that it lacks, and then kills the process that uses it."""
    if device.type != "cpu":
        return
    needed = sum(shard.weight_bytes + _optimizer_bytes(shard) + _batch_bytes(shard) for shard in shards)
    available = _available_host_bytes()
    if needed > available:
        raise MeasurementError(
            f"{len(shards)} shards need {needed:,} bytes of host memory, but {available:,} are available"
        )


def _optimizer_bytes(shard: ShardSpec) -> int:
    values_per_row = {"rowwise_adagrad": 1, "adagrad": shard.dim, "adam": 2 * shard.dim}
    return 4 * shard.rows * values_per_row.get(shard.optimizer, 0)


def _batch_bytes(shard: ShardSpec) -> int:
    """Ids, and the outputs with their gradients in fp32."""
    return math.ceil(8 * shard.batch_size * (shard.pooling_factor + shard.output_columns))


def _available_host_bytes() -> int:
    """What the system has left, and at most what the limit of this control group (a container's, say) leaves."""
    system = _MEMINFO_UNIT * _numbers("/proc/meminfo")["MemAvailable:"]
    try:
        limit, used = (int((_CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        return min(system, limit - used + _numbers(_CGROUP / "memory.stat")["inactive_file"])
    except (OSError, ValueError, KeyError):  # no limit ("max"), or no such control group
        return system


def _numbers(path: str | Path) -> dict[str, int]:
    """First number of each line of a file, by the word before it."""
    lines = (line.split() for line in Path(path).read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1}


@contextlib.contextmanager
def _as_measurement_error(what: str) -> Iterator[None]:
    try:
        yield
    except MeasurementError:
        raise
    except Exception as error:  # out of memory, a device's error, one of FBGEMM's assertions
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise MeasurementError(f"{what} failed: {lines[0]}") from error

"""Exchanges between devices: an all-to-all of pooled embeddings, run for real or computed from bandwidths.

Shards that live whole on one device are exchanged all to all: device ``d`` computes pooled outputs for the global
batch and sends every device its share of the samples; gradients go the other way. Row-wise shards give every device
partial sums of all columns, which a reduce-scatter adds up; an all-gather takes their gradients back.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import distributed

from torchrec_dreamshard.errors import MeasurementError
from torchrec_dreamshard.profiling import exchange_model
from torchrec_dreamshard.profiling.timing import Phase, PhaseTimes, TimingConfig, time_phases
from torchrec_dreamshard.types import DTYPE_BYTES, PlacementTask

_TORCH_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

FloatArray = npt.NDArray[np.float64]


def output_values(task: PlacementTask, placement: Sequence[int]) -> FloatArray:
    """Pooled output values that each device computes for the global batch, ``D`` numbers."""
    values = np.zeros(task.num_devices)
    for shard, device in zip(task.shards, placement, strict=True):
        values[device] += shard.output_columns * shard.batch_size
    return values


def modelled_exchange_ms(
    task: PlacementTask, placement: Sequence[int], forward_ms: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """What the exchange would cost by ``exchange_model.AllToAll``, for when it cannot be measured.

    Args:
        task: the task.
        placement: S device indices.
        forward_ms: ``D``, when each device's forward kernel is done.

    Returns:
        Forward and backward exchange of each device, ``D`` each. The forward one starts when the slowest kernel
        is done and holds each device's wait for it.
    """
    output_bytes = output_values(task, placement) * DTYPE_BYTES[task.hardware.comms_dtype]
    transfer_ms = exchange_model.AllToAll(task.devices, task.hardware).transfer_ms(output_bytes[None])
    if transfer_ms[0] == 0:
        return np.zeros(task.num_devices), np.zeros(task.num_devices)
    backward_ms = np.full(task.num_devices, transfer_ms[0])
    return backward_ms + forward_ms.max() - forward_ms, backward_ms


class Exchange(Protocol):
    """Both directions of an exchange; each is a collective call of all ranks of its group."""

    def forward(self) -> None:
        """Outputs go to the ranks that own their samples."""
        ...

    def backward(self) -> None:
        """Gradients go back to the ranks that own the tables."""
        ...


class AllToAll:
    """The exchange of table-wise and column-wise shards.

    Args:
        values: ``D``, output values of each rank for the global batch (``output_values``).
        device: where the values are.
        comms_dtype: their precision: fp32, fp16 or bf16.
        group: D ranks; None for all of them.

    Raises:
        MeasurementError: the precision cannot be exchanged, or there are not D ranks.
    """

    def __init__(
        self,
        values: Sequence[float],
        device: torch.device,
        *,
        comms_dtype: str = "fp32",
        group: distributed.ProcessGroup | None = None,
    ) -> None:
        size, rank = _size_and_rank(group)
        if len(values) != size:
            raise MeasurementError(f"an exchange among {size} ranks needs {size} column sums, got {len(values)}")
        self._group = group
        self._received = [round(value / size) for value in values]  # from each rank
        self._sent = [self._received[rank]] * size  # to each rank
        dtype = _torch_dtype(comms_dtype)
        self._output = torch.ones(sum(self._sent), dtype=dtype, device=device)
        self._input = torch.ones(sum(self._received), dtype=dtype, device=device)

    def forward(self) -> None:
        """Outputs go to the ranks that own their samples."""
        distributed.all_to_all_single(self._input, self._output, self._received, self._sent, group=self._group)

    def backward(self) -> None:
        """Gradients go back to the ranks that own the tables."""
        distributed.all_to_all_single(self._output, self._input, self._sent, self._received, group=self._group)


class ReduceScatter:
    """The exchange of row-wise shards: a reduce-scatter forward, an all-gather backward.

    Args:
        values: output values of the global batch; each rank has a partial sum of all of them.
        device: where the values are.
        comms_dtype: their precision: fp32, fp16 or bf16.
        group: the ranks; None for all of them.

    Raises:
        MeasurementError: the precision cannot be exchanged.
    """

    def __init__(
        self,
        values: float,
        device: torch.device,
        *,
        comms_dtype: str = "fp32",
        group: distributed.ProcessGroup | None = None,
    ) -> None:
        size, _ = _size_and_rank(group)
        self._group = group
        self._own = torch.ones(round(values / size), dtype=_torch_dtype(comms_dtype), device=device)
        self._shares = [self._own.clone() for _ in range(size)]

    def forward(self) -> None:
        """Every rank gets the sums of its own samples."""
        distributed.reduce_scatter(self._own, self._shares, group=self._group)

    def backward(self) -> None:
        """Every rank gets the gradients of all samples."""
        distributed.all_gather(self._shares, self._own, group=self._group)


def time_exchange(
    exchange: Exchange,
    device: torch.device,
    config: TimingConfig,
    *,
    delay_ms: float = 0.0,
    group: distributed.ProcessGroup | None = None,
) -> PhaseTimes:
    """Times both directions of an exchange; a collective call.

    Args:
        exchange: what to time.
        device: where this rank runs.
        config: how often; the same on all ranks.
        delay_ms: how long this rank comes late to the forward direction, as after a slower kernel.
        group: the ranks of the exchange; None for all of them.

    Returns:
        ``R x 2`` times on this rank, forward and backward, each from this rank's start on. Waiting for ranks that
        start later is part of them.
    """

    def meet() -> None:
        align_ranks(device, group)

    def meet_and_come_late() -> None:
        meet()
        time.sleep(delay_ms / 1000)

    phases = (
        Phase(exchange.forward, cold=False, align=meet_and_come_late, waits=True),
        Phase(exchange.backward, cold=False, align=meet, waits=True),
    )
    return time_phases(phases, device, TimingConfig(warmup=config.warmup, repeats=config.repeats, max_disturbed=0))


def align_ranks(device: torch.device, group: distributed.ProcessGroup | None = None) -> None:
    """Lets all ranks go on at the same time; on cuda the wait is in the stream and does not hold the host."""
    distributed.all_reduce(torch.ones(1, device=device), group=group)


def _size_and_rank(group: distributed.ProcessGroup | None) -> tuple[int, int]:
    return distributed.get_world_size(group), distributed.get_rank(group)


def _torch_dtype(comms_dtype: str) -> torch.dtype:
    if comms_dtype not in _TORCH_DTYPES:
        known = ", ".join(_TORCH_DTYPES)
        raise MeasurementError(f"comms_dtype must be one of {known} to be measured, got {comms_dtype!r}")
    return _TORCH_DTYPES[comms_dtype]

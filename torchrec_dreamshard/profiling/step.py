"""A step measured by all ranks together: every rank runs its own device's kernels, and they exchange for real."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import distributed

from torchrec_dreamshard.errors import MeasurementError
from torchrec_dreamshard.profiling.comms import AllToAll, align_ranks, output_values
from torchrec_dreamshard.profiling.fused_kernels import DeviceKernels
from torchrec_dreamshard.profiling.timing import Phase, PhaseTimes, TimingConfig, time_phases
from torchrec_dreamshard.types import PlacementTask

_T = TypeVar("_T")


def time_step(
    task: PlacementTask,
    placement: Sequence[int],
    device: torch.device,
    config: TimingConfig,
    *,
    seed: int,
    group: distributed.ProcessGroup | None = None,
) -> list[PhaseTimes]:
    """Times forward compute, forward exchange, backward exchange and backward compute; rank r is device r.

    The ranks start each step together. The forward exchange follows the forward kernel at once, so a rank that is
    done early waits in it for the slowest, as in a job. Before the backward exchange the ranks meet again: there
    the dense part of a model, equal on all ranks, would run.

    Args:
        task: one device for each of the D ranks.
        placement: S device indices.
        device: where this rank runs.
        config: how often to measure; a disturbed repeat cannot be replaced, as the others would not know of it.
        seed: of weights, lookups and gradients.
        group: the D ranks; None for all of them.

    Returns:
        For each of the D devices its ``R x 4`` times, on every rank.

    Raises:
        MeasurementError: a rank cannot run its kernels, or was lost; raised on every rank that is there.
    """
    rank = distributed.get_rank(group)
    own = [shard for shard, where in zip(task.shards, placement, strict=True) if where == rank]
    failure, kernels, exchange = "", None, None
    try:
        kernels = DeviceKernels(own, device, np.random.default_rng(seed))
        kernels.forward()  # a kernel that runs out of memory does so here, and not while the others wait
        kernels.backward()
        exchange = AllToAll(
            output_values(task, placement).tolist(), device, comms_dtype=task.hardware.comms_dtype, group=group
        )
    except MeasurementError as error:
        failure = f"rank {rank}: {error}"
    failures = [text for text in _gather(failure, device, group) if text]
    if failures or kernels is None or exchange is None:
        raise MeasurementError("; ".join(failures))

    def align() -> None:
        align_ranks(device, group)

    phases = (
        Phase(kernels.forward, align=align),
        Phase(exchange.forward, cold=False, waits=True),
        Phase(exchange.backward, align=align, waits=True),
        Phase(kernels.backward, cold=False),
    )
    fixed = TimingConfig(warmup=config.warmup, repeats=config.repeats, max_disturbed=0)
    try:
        times = time_phases(phases, device, fixed)
        if not own:
            times.ms[:, [0, 3]] = 0.0  # what was timed is the call of nothing
        return _gather(times, device, group)
    except RuntimeError as error:
        raise MeasurementError(f"the step of {task.num_devices} ranks failed on rank {rank}: {error}") from error


def _gather(value: _T, device: torch.device, group: distributed.ProcessGroup | None) -> list[_T]:
    """The value of every rank."""
    values: list[_T | None] = [None] * distributed.get_world_size(group)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # NCCL sends objects through the current device
    distributed.all_gather_object(values, value, group=group)
    return [found for found in values if found is not None]

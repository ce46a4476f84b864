"""The profiler that measures: FBGEMM's fused kernels on this machine, and the exchange between ranks."""

from __future__ import annotations

import datetime
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import distributed

from torchrec_dreamshard.errors import MeasurementError
from torchrec_dreamshard.measurement import TERMS, CostBreakdown, Measurement, Provenance
from torchrec_dreamshard.profiling.comms import modelled_exchange_ms
from torchrec_dreamshard.profiling.devices import device_name, device_state, installed_versions
from torchrec_dreamshard.profiling.fused_kernels import time_device
from torchrec_dreamshard.profiling.step import time_step
from torchrec_dreamshard.profiling.timing import PhaseTimes, TimingConfig, torch_threads
from torchrec_dreamshard.types import PlacementTask
from torchrec_dreamshard.validation import choice, integer

_MS_DIGITS = 4  # decimals kept of each repeat: 0.1 microseconds


class FBGEMMProfiler:
    """Measures placements with FBGEMM's fused kernels (a ``Profiler``).

    Alone, it runs each device's kernels on this machine, one device after the other, and takes the exchange from
    a model of the bandwidths in ``task.hardware`` (``comms.modelled_exchange_ms``). Where ``torch.distributed``
    runs with one rank per device of the task, it measures together with the other ranks: every rank runs its own
    device's kernels at the same time as the others and the all-to-all between them, so that waiting for the
    slowest kernel is part of the forward exchange. ``measure`` and ``record`` are then collective calls with equal
    arguments on all ranks, and every rank gets the same result.

    Equal arguments draw equal lookups.

    Args:
        device: "cpu", "cuda" or "cuda:N"; one code path for both kinds.
        timing: how often to measure.
        num_threads: intra-op threads of a CPU measurement; a job that runs one process per core has one.
        seed: of weights, lookups and gradients.
        exchange: "auto" as above, or "modelled" to measure alone although other ranks are there.
        group: the ranks to measure with; None for all of them.

    Raises:
        ValueError: an unknown kind of device, or no such device here.
    """

    def __init__(
        self,
        device: str | torch.device = "cpu",
        *,
        timing: TimingConfig | None = None,
        num_threads: int = 1,
        seed: int = 0,
        exchange: str = "auto",
        group: distributed.ProcessGroup | None = None,
    ) -> None:
        self.device = _existing_device(device)
        self.timing = timing or TimingConfig()
        self.num_threads = integer("FBGEMMProfiler", "num_threads", num_threads, 1)
        self.seed = integer("FBGEMMProfiler", "seed", seed, 0)
        self.exchange = choice("FBGEMMProfiler", "exchange", exchange, ("auto", "modelled"))
        self.group = group

    def measure(self, task: PlacementTask, placement: Sequence[int]) -> CostBreakdown:
        """Measures one placement.

        Args:
            task: the task; its hardware must be of this profiler's kind.
            placement: S device indices.

        Returns:
            All four terms.

        Raises:
            MeasurementError: a shard is not supported, or memory ran out (on any rank).
        """
        placement = task.check_placement(placement)
        return self._cost(task, placement, self._time(task, placement))

    def record(
        self, task: PlacementTask, placement: Sequence[int], *, kernels_only: bool = False, **details: Any
    ) -> Measurement:
        """Measures one placement for the store: with its provenance and every repeat, failures included.

        Args:
            task: the task.
            placement: S device indices.
            kernels_only: keep the kernels only, without the exchange.
            **details: what else to keep in ``Provenance.details``.
        """
        placement = task.check_placement(placement)
        try:
            times = self._time(task, placement)
        except MeasurementError as error:
            return Measurement(
                task=task, placement=placement, error=str(error), provenance=self._provenance((), details)
            )
        cost = self._cost(task, placement, times)
        if kernels_only:
            cost = CostBreakdown(
                forward_compute_ms=cost.forward_compute_ms, backward_compute_ms=cost.backward_compute_ms
            )
        return Measurement(task=task, placement=placement, cost=cost, provenance=self._provenance(times, details))

    def _time(self, task: PlacementTask, placement: Sequence[int]) -> list[PhaseTimes]:
        """Times of each device: forward and backward kernels, or the four terms when ranks measure together."""
        if task.hardware.compute_device != self.device.type:
            raise MeasurementError(
                f"the task's hardware is {task.hardware.compute_device!r}, but this profiler measures on "
                f"{self.device.type!r}: give the task the hardware it is measured on"
            )
        shards = [
            [shard for shard, where in zip(task.shards, placement, strict=True) if where == device]
            for device in range(task.num_devices)
        ]
        with torch_threads(self.num_threads):
            if self._together(task):
                return time_step(task, placement, self.device, self.timing, seed=self.seed, group=self.group)
            return [time_device(own, self.device, self.timing, rng=np.random.default_rng(self.seed)) for own in shards]

    def _together(self, task: PlacementTask) -> bool:
        return (
            self.exchange == "auto"
            and task.num_devices > 1
            and distributed.is_available()
            and distributed.is_initialized()
            and distributed.get_world_size(self.group) == task.num_devices
        )

    def _cost(self, task: PlacementTask, placement: Sequence[int], times: Sequence[PhaseTimes]) -> CostBreakdown:
        medians = np.array([time.median_ms() for time in times])
        if medians.shape[1] == len(TERMS):
            forward, forward_comms, backward_comms, backward = medians.T
        else:
            forward, backward = medians.T
            forward_comms, backward_comms = modelled_exchange_ms(task, placement, forward)
        background = np.array([device.background_ms for device in task.devices])
        return CostBreakdown(
            forward_compute_ms=forward,
            forward_comms_ms=forward_comms,
            backward_comms_ms=backward_comms,
            backward_compute_ms=backward,
            background_ms=background if background.any() else None,
        )

    def _provenance(self, times: Sequence[PhaseTimes], details: Mapping[str, Any]) -> Provenance:
        kept: dict[str, Any] = {**details, **device_state(self.device)}
        if self.device.type == "cpu":
            kept["threads"] = self.num_threads
        if times:
            together = times[0].ms.shape[1] == len(TERMS)
            kept["exchange"] = "measured" if together else "modelled"
            for phase, name in enumerate(TERMS if together else (TERMS[0], TERMS[-1])):
                kept[name] = [time.ms[:, phase].round(_MS_DIGITS).tolist() for time in times]
            kept["disturbed"] = [np.flatnonzero(~time.undisturbed).tolist() for time in times]
        return Provenance(
            host=socket.gethostname(),
            device=device_name(self.device),
            profiler=type(self).__name__,
            versions=installed_versions(),
            time=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            repeats=self.timing.repeats,
            details=kept,
        )


def _existing_device(name: str | torch.device) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"FBGEMMProfiler.device must be cpu, cuda or cuda:N, got {name!r}") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"FBGEMMProfiler.device must be cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cuda":
        available = torch.cuda.device_count()
        device = torch.device("cuda", device.index or 0)
        if (device.index or 0) >= available:
            raise ValueError(f"FBGEMMProfiler.device is {name}, but this host has {available} CUDA devices")
    return device

"""The profiler that measures: FBGEMM's fused kernels on this machine, and the exchange between ranks."""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import platform
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from torchrec_dreamshard.errors import MeasurementError
from torchrec_dreamshard.measurement import CostBreakdown, FloatArray, Measurement, Provenance
from torchrec_dreamshard.profiling.comms import modelled_exchange_ms
from torchrec_dreamshard.profiling.fused_kernels import time_device
from torchrec_dreamshard.profiling.timing import PhaseTimes, TimingConfig, torch_threads
from torchrec_dreamshard.types import PlacementTask
from torchrec_dreamshard.validation import integer

_MS_DIGITS = 4  # decimals kept of each repeat: 0.1 microseconds


class FBGEMMProfiler:
    """Measures placements with FBGEMM's fused kernels (a ``Profiler``).

    Each device's kernels run on this machine, one device after the other. The exchange is computed from the
    bandwidths of ``task.hardware`` (``comms.modelled_exchange_ms``). Equal arguments draw equal lookups.

    Args:
        device: "cpu", "cuda" or "cuda:N"; one code path for both kinds.
        timing: how often to measure.
        num_threads: intra-op threads of a CPU measurement; a job that runs one process per core has one.
        seed: of weights, lookups and gradients.

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
    ) -> None:
        self.device = _existing_device(device)
        self.timing = timing or TimingConfig()
        self.num_threads = integer("FBGEMMProfiler", "num_threads", num_threads, 1)
        self.seed = integer("FBGEMMProfiler", "seed", seed, 0)

    def measure(self, task: PlacementTask, placement: Sequence[int]) -> CostBreakdown:
        """Measures one placement.

        Args:
            task: the task; its hardware must be of this profiler's kind.
            placement: S device indices.

        Returns:
            All four terms.

        Raises:
            MeasurementError: a shard is not supported, or memory ran out.
        """
        placement = task.check_placement(placement)
        times = self._time_devices(task, placement)
        return self._complete(task, placement, *_medians(times))

    def record(
        self, task: PlacementTask, placement: Sequence[int], *, kernels_only: bool = False, **details: Any
    ) -> Measurement:
        """Measures one placement for the store: with its provenance and every repeat, failures included.

        Args:
            task: the task.
            placement: S device indices.
            kernels_only: keep the measured kernels only, without the exchange.
            **details: what else to keep in ``Provenance.details``.
        """
        placement = task.check_placement(placement)
        try:
            times = self._time_devices(task, placement)
        except MeasurementError as error:
            return Measurement(
                task=task, placement=placement, error=str(error), provenance=self._provenance((), details)
            )
        forward_ms, backward_ms = _medians(times)
        if kernels_only:
            cost = CostBreakdown(forward_compute_ms=forward_ms, backward_compute_ms=backward_ms)
        else:
            cost = self._complete(task, placement, forward_ms, backward_ms)
        return Measurement(task=task, placement=placement, cost=cost, provenance=self._provenance(times, details))

    def _time_devices(self, task: PlacementTask, placement: Sequence[int]) -> list[PhaseTimes]:
        if task.hardware.compute_device != self.device.type:
            raise MeasurementError(
                f"the task's hardware is {task.hardware.compute_device!r}, but this profiler measures on "
                f"{self.device.type!r}: give the task the hardware it is measured on"
            )
        times = []
        with torch_threads(self.num_threads):
            for device in range(task.num_devices):
                shards = [shard for shard, where in zip(task.shards, placement, strict=True) if where == device]
                rng = np.random.default_rng(self.seed)
                times.append(time_device(shards, self.device, self.timing, rng=rng))
        return times

    def _complete(
        self, task: PlacementTask, placement: Sequence[int], forward_ms: FloatArray, backward_ms: FloatArray
    ) -> CostBreakdown:
        forward_comms_ms, backward_comms_ms = modelled_exchange_ms(task, placement, forward_ms)
        return CostBreakdown(
            forward_compute_ms=forward_ms,
            forward_comms_ms=forward_comms_ms,
            backward_comms_ms=backward_comms_ms,
            backward_compute_ms=backward_ms,
            background_ms=np.array([device.background_ms for device in task.devices]),
        )

    def _provenance(self, times: Sequence[PhaseTimes], details: Mapping[str, Any]) -> Provenance:
        kept: dict[str, Any] = dict(details)
        if self.device.type == "cpu":
            kept["threads"] = self.num_threads
        if times:
            kept["forward_ms"] = [time.ms[:, 0].round(_MS_DIGITS).tolist() for time in times]
            kept["backward_ms"] = [time.ms[:, 1].round(_MS_DIGITS).tolist() for time in times]
            kept["disturbed"] = [np.flatnonzero(~time.undisturbed).tolist() for time in times]
        return Provenance(
            host=socket.gethostname(),
            device=device_name(self.device),
            profiler=type(self).__name__,
            versions=_versions(),
            time=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            repeats=self.timing.repeats,
            details=kept,
        )


def _medians(times: Sequence[PhaseTimes]) -> tuple[FloatArray, FloatArray]:
    medians = np.array([time.median_ms() for time in times])
    return medians[:, 0], medians[:, 1]


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


@functools.cache
def device_name(device: torch.device) -> str:
    """Model of a device, for example "NVIDIA H200" or "AMD EPYC"."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    with open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.machine()


@functools.cache
def _versions() -> dict[str, str]:
    found = {}
    for package in ("torch", "fbgemm-gpu", "fbgemm-gpu-cpu", "torchrec_dreamshard"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found

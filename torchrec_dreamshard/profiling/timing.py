"""Timing of short phases of work on a device, with every repeat kept.

On CUDA one event pair surrounds each phase and the host synchronises once, at the end. On a CPU, a repeat during
which the operating system took the core away is set aside and done again: it measures the neighbours, not the
kernel. The clock there is ``time.perf_counter_ns``; work of a single thread is timed by ``time.thread_time_ns``,
which is the same less the time that the thread spent off its core. Caches are flushed before each phase, because
in a training step the dense part of the model runs between two visits of the embedding tables.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from torchrec_dreamshard.validation import integer

FloatArray = npt.NDArray[np.float64]

_CPU_FLUSH_BYTES = 64 * 1024**2  # twice the last-level cache of a common server core complex
# Many times any L2, and 0.5 ms or more of any GPU's time: the host queues the whole phase behind the flush meanwhile,
# so that what it takes to launch the kernels does not show as gaps between them.
_CUDA_FLUSH_BYTES = 2 * 1024**3
_WAITED_SHARE, _WAITED_NS = 0.02, 50_000  # wall time off the core that still counts as undisturbed


@dataclass(frozen=True, kw_only=True)
class TimingConfig:
    """How often to measure."""

    warmup: int = 3
    """Untimed runs first: they map memory, fill allocators' pools and wake the clocks."""
    repeats: int = 7
    """Undisturbed timed runs wanted."""
    max_disturbed: int = 7
    """Disturbed runs to replace at most; beyond it, those at hand have to do."""

    def __post_init__(self) -> None:
        for name, minimum in (("warmup", 0), ("repeats", 1), ("max_disturbed", 0)):
            object.__setattr__(self, name, integer("TimingConfig", name, getattr(self, name), minimum))


@dataclass(frozen=True)
class PhaseTimes:
    """Times of every repeat."""

    ms: FloatArray
    """``R x P``: each repeat's time of each phase."""
    undisturbed: npt.NDArray[np.bool_]
    """``R``: whether the repeat ran without losing its core."""

    def median_ms(self) -> FloatArray:
        """``P`` medians over the undisturbed repeats; over all of them when most were disturbed."""
        enough = 2 * int(self.undisturbed.sum()) >= len(self.undisturbed)
        return np.asarray(np.median(self.ms[self.undisturbed] if enough else self.ms, axis=0))


class Phase(NamedTuple):
    """One piece of work to time."""

    run: Callable[[], object]
    """The work; it may use what the phase before it left behind."""
    cold: bool = True
    """Whether to flush the caches before it."""
    align: Callable[[], object] | None = None
    """Untimed, right before the work: waits until all ranks are here."""
    waits: bool = False
    """Whether waiting for others is part of the work, as in an exchange."""


def time_phases(phases: Sequence[Phase], device: torch.device, config: TimingConfig | None = None) -> PhaseTimes:
    """Runs the phases in their order, again and again, and times each.

    Args:
        phases: P pieces of work, for example a forward and a backward pass.
        device: where they run.
        config: how often; None for the defaults. Ranks that work together need ``max_disturbed=0``, so that all
            of them run equally often.
    """
    config = config or TimingConfig()
    for _ in range(config.warmup):
        for phase in phases:
            phase.run()
    with _without_garbage_collection():
        return _time_on_cuda(phases, device, config) if device.type == "cuda" else _time_on_cpu(phases, config)


@contextlib.contextmanager
def torch_threads(num_threads: int) -> Iterator[None]:
    """Runs the body with so many intra-op threads, and restores the number that was set before."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _time_on_cuda(phases: Sequence[Phase], device: torch.device, config: TimingConfig) -> PhaseTimes:
    flush = torch.empty(_CUDA_FLUSH_BYTES, dtype=torch.int8, device=device)
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device)
        events = [[(_event(), _event()) for _ in phases] for _ in range(config.repeats)]
        for pairs in events:
            for phase, (start, end) in zip(phases, pairs, strict=True):
                if phase.cold:
                    flush.zero_()
                if phase.align is not None:
                    phase.align()
                start.record(stream)
                phase.run()
                end.record(stream)
        torch.cuda.synchronize(device)
    ms = np.array([[start.elapsed_time(end) for start, end in pairs] for pairs in events])
    return PhaseTimes(ms.reshape(config.repeats, len(phases)), np.ones(config.repeats, dtype=np.bool_))


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _time_on_cpu(phases: Sequence[Phase], config: TimingConfig) -> PhaseTimes:
    flush = _cpu_flush_buffer()
    one_thread = torch.get_num_threads() == 1
    times: list[list[float]] = []
    undisturbed: list[bool] = []
    while sum(undisturbed) < config.repeats and len(times) < config.repeats + config.max_disturbed:
        row, calm = [], True
        for phase in phases:
            if phase.cold:
                flush.add_(1)
            if phase.align is not None:
                phase.align()
            switches, core_ns, start = _preemptions(), time.thread_time_ns(), time.perf_counter_ns()
            phase.run()
            wall_ns = time.perf_counter_ns() - start
            core_ns = time.thread_time_ns() - core_ns
            if not phase.waits:
                calm &= _preemptions() == switches and wall_ns - core_ns <= max(_WAITED_NS, _WAITED_SHARE * wall_ns)
            row.append((core_ns if one_thread and not phase.waits else wall_ns) / 1e6)
        times.append(row)
        undisturbed.append(calm)
    return PhaseTimes(np.array(times), np.array(undisturbed, dtype=np.bool_))


def _preemptions() -> int:
    """How often the system has taken the core from this thread."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw


@functools.cache
def _cpu_flush_buffer() -> torch.Tensor:
    """One buffer per process: mapping fresh pages for each measurement would cost more than the measurement."""
    return torch.zeros(_CPU_FLUSH_BYTES // 4, dtype=torch.int32)


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()

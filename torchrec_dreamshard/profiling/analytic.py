"""A profiler without hardware: the analytic kernel and exchange models as a ``Profiler``.

What it returns is simulated, never measured, and says so in its provenance. It stands in for GPUs in tests, in
benchmarks at scales that no one has at hand, and for the shipped "cuda" agent; its errors against published timings
are printed by benchmarks/calibrate_analytic.py.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from torchrec_dreamshard.errors import MeasurementError
from torchrec_dreamshard.hardware import resolve_hardware
from torchrec_dreamshard.measurement import CostBreakdown, FloatArray, Provenance
from torchrec_dreamshard.profiling.exchange_model import AllToAll
from torchrec_dreamshard.profiling.kernel_model import fused_times, kernel_constants, shard_loads
from torchrec_dreamshard.types import HardwareSpec, PlacementTask
from torchrec_dreamshard.validation import number


class AnalyticProfiler:
    """Simulates what placements cost; deterministic, thousands of placements per second.

    Args:
        hardware: the simulated devices, a name from ``hardware.HARDWARE`` or a record; None takes each task's own.
            The exchange's precision is always the task's.
        noise: standard deviation of the logarithm of each simulated time; 0 for none. The noise is a function of
            ``seed``, the task and the placement: a repeated measurement gives the same value.
        seed: of the noise.
    """

    def __init__(self, hardware: str | HardwareSpec | None = "a100", *, noise: float = 0.0, seed: int = 0) -> None:
        self.hardware = None if hardware is None else resolve_hardware(hardware)
        self.noise = number("AnalyticProfiler", "noise", noise)
        self.seed = seed
        self._last: _SimulatedTask | None = None

    @property
    def provenance(self) -> Provenance:
        """For the measurements that are stored."""
        name = "as in the task" if self.hardware is None else self.hardware.name
        details = {"noise": self.noise, "seed": self.seed} if self.noise else {}
        return Provenance(device=f"analytic {name}", simulated=True, profiler="AnalyticProfiler", details=details)

    def measure(self, task: PlacementTask, placement: Sequence[int]) -> CostBreakdown:
        """Simulates one placement; see ``Profiler.measure``.

        Raises:
            MeasurementError: a device's memory does not hold its shards, or the task is for another kind of device.
        """
        simulated = self._simulate(task)
        placements = np.array([task.check_placement(placement)], dtype=np.int64).reshape(1, task.num_shards)
        simulated.check_memory(placements[0])
        terms = simulated.terms(placements)
        if self.noise:
            terms = terms * self._noise(simulated, placements[0])
        forward, exchange_forward, exchange_backward, backward = terms[:, 0]
        return CostBreakdown(
            forward_compute_ms=forward,
            forward_comms_ms=_with_wait(forward, exchange_forward),
            backward_comms_ms=exchange_backward,
            backward_compute_ms=backward,
            background_ms=simulated.background_ms if simulated.background_ms.any() else None,
        )

    def step_ms(self, task: PlacementTask, placements: npt.NDArray[np.int64]) -> FloatArray:
        """Overall costs of many placements at once, without noise and without a look at memory.

        Args:
            task: the task.
            placements: ``P x S`` device indices.

        Returns:
            ``P``: what ``measure(...).step_ms`` would be.
        """
        simulated = self._simulate(task)
        forward, exchange_forward, exchange_backward, backward = simulated.terms(np.asarray(placements))
        total = forward + _with_wait(forward, exchange_forward) + exchange_backward + backward
        return np.asarray((total + simulated.background_ms).max(axis=1))

    def _simulate(self, task: PlacementTask) -> _SimulatedTask:
        if self._last is None or self._last.task is not task:
            self._last = _SimulatedTask(task, self.hardware or task.hardware)
        return self._last

    def _noise(self, simulated: _SimulatedTask, placement: npt.NDArray[np.int64]) -> FloatArray:
        """Factors ``4 x 1 x D`` around 1."""
        digest = hashlib.sha256(f"{self.seed} ".encode() + simulated.digest() + placement.tobytes()).digest()
        rng = np.random.default_rng(np.frombuffer(digest, dtype=np.uint32))
        return np.exp(self.noise * rng.standard_normal((4, 1, simulated.task.num_devices)))


class _SimulatedTask:
    """A task with the loads of its shards, worked out once."""

    def __init__(self, task: PlacementTask, hardware: HardwareSpec) -> None:
        if hardware.compute_device != task.hardware.compute_device:
            raise MeasurementError(
                f"the task is for {task.hardware.compute_device} devices, but the profiler simulates "
                f"{hardware.compute_device}; give AnalyticProfiler another hardware"
            )
        self.task = task
        self.hardware = dataclasses.replace(hardware, comms_dtype=task.hardware.comms_dtype)
        self.constants = kernel_constants(hardware)
        self.loads = shard_loads(task.shards, self.hardware)
        self.exchange = AllToAll(task.devices, self.hardware)
        self.background_ms = np.array([device.background_ms for device in task.devices])
        self._needed = np.array([(s.hbm_bytes, s.ddr_bytes) for s in task.shards], dtype=np.float64).reshape(-1, 2)
        self._capacity = np.array([(d.hbm_bytes, d.ddr_bytes) for d in task.devices], dtype=np.float64)
        self._one_each = np.ones(task.num_shards)
        self._digest = b""

    def check_memory(self, placement: npt.NDArray[np.int64]) -> None:
        """Raises MeasurementError when a device's memory does not hold its shards."""
        for column, kind in enumerate(("HBM", "host")):
            used = np.bincount(placement, weights=self._needed[:, column], minlength=self.task.num_devices)
            device = int(np.argmax(used - self._capacity[:, column]))
            missing = int(used[device] - self._capacity[device, column])
            if missing > 0:
                raise MeasurementError(f"out of memory: device {device} lacks {missing:,} bytes of {kind} memory")

    def terms(self, placements: npt.NDArray[np.int64]) -> FloatArray:
        """Forward compute, both exchanges without waiting, and backward compute: ``4 x P x D``."""
        num_placements, num_devices = len(placements), self.task.num_devices
        cell = (placements + num_devices * np.arange(num_placements)[:, None]).ravel()

        def repeat(values: FloatArray) -> FloatArray:
            return values if num_placements == 1 else np.tile(values, num_placements)

        def total(values: FloatArray) -> FloatArray:
            return np.asarray(
                np.bincount(cell, weights=repeat(values), minlength=num_placements * num_devices), dtype=np.float64
            )

        def largest(values: FloatArray) -> FloatArray:
            result = np.zeros(num_placements * num_devices)
            np.maximum.at(result, cell, repeat(values))
            return result

        loads = self.loads
        forward, backward = fused_times(
            total(loads.forward),
            total(loads.backward),
            largest(loads.forward_serial),
            largest(loads.backward_serial),
            total(self._one_each),
            self.constants,
        )
        if loads.separate.any():
            forward, backward = forward + largest(loads.separate[:, 0]), backward + largest(loads.separate[:, 1])
        shape = (num_placements, num_devices)
        output_bytes = total(loads.exchange_bytes).reshape(shape)
        terms = np.empty((4, *shape))
        terms[0], terms[3] = forward.reshape(shape), backward.reshape(shape)
        terms[1:3] = self.exchange.transfer_ms(output_bytes)[:, None]
        return terms

    def digest(self) -> bytes:
        """A hash of the task that is the same in every process."""
        if not self._digest:
            self._digest = hashlib.sha256(json.dumps(self.task.to_dict(), sort_keys=True).encode()).digest()
        return self._digest


def _with_wait(forward: FloatArray, exchange: FloatArray) -> FloatArray:
    """The forward exchange as each device sees it: it starts when the slowest kernel is done."""
    wait = forward.max(axis=-1, keepdims=True) - forward
    return np.where(exchange.sum(axis=-1, keepdims=True) > 0, exchange + wait, 0.0)

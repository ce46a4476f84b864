"""Measurements as training tensors: distinct shards, device loads, targets per load and per step."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from torchrec_dreamshard.features import TaskTensors, batch_tasks, hardware_features, shard_features
from torchrec_dreamshard.measurement import CostBreakdown, Measurement
from torchrec_dreamshard.types import HardwareSpec, PlacementTask, ShardSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DeviceLoads:
    """N device loads of B measurements over U distinct shards; unknown targets are NaN."""

    shard_features: Tensor
    """``U x F``."""
    shard_hardware: Tensor
    """``U x K``."""
    load_hardware: Tensor
    """``N x K``."""
    shard_index: Tensor
    """``I``: distinct shard of each placed shard, sorted by load."""
    load_index: Tensor
    """``I``: its load."""
    offsets: Tensor
    """``N + 1``: loads as ranges of ``shard_index``."""
    compute_ms: Tensor
    """``N x 3``: forward, backward, and their sum."""
    comms_ms: Tensor
    """``N x 2``: forward and backward exchange."""
    measurement: Tensor
    """``N``: measurement of each load."""
    device: Tensor
    """``N``: its device index."""
    tasks: TaskTensors
    """The B tasks with their devices, without their shards."""
    step_ms: Tensor
    """``B``."""
    repeat: Tensor
    """``B``: measurements of the same placement of the same task share a number; numbers count from 0."""
    group: Tensor
    """``B``: measurements of the same task (shards, devices and hardware) share a number, which depends on nothing
    else."""

    @property
    def num_loads(self) -> int:
        """N."""
        return int(self.compute_ms.shape[0])

    @property
    def num_measurements(self) -> int:
        """B."""
        return int(self.step_ms.shape[0])

    def sums(self, shard_values: Tensor) -> Tensor:
        """``U x H`` values of the distinct shards to ``N x H`` sums over each load."""
        out = shard_values.new_zeros(self.num_loads, shard_values.shape[1])
        return out.index_add(0, self.load_index, shard_values[self.shard_index])

    def select(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What a few loads consist of.

        Args:
            rows: ``R`` loads.

        Returns:
            The distinct shards in them (``V``), and for each placed shard its index into these and into ``rows``.
        """
        counts = self.offsets[rows + 1] - self.offsets[rows]
        first = torch.repeat_interleave(self.offsets[rows] - (counts.cumsum(0) - counts), counts)
        placed = self.shard_index[first + torch.arange(int(counts.sum()))]
        shards, inverse = torch.unique(placed, return_inverse=True)
        return shards, inverse, torch.repeat_interleave(torch.arange(len(rows)), counts)

    def by_measurement(self, values: Tensor) -> Tensor:
        """``N x ...`` values to padded ``B x D x ...``."""
        out = values.new_zeros(self.num_measurements, self.tasks.host.shape[1], *values.shape[1:])
        out[self.measurement, self.device] = values
        return out


def usable(measurements: Sequence[Measurement]) -> list[Measurement]:
    """The measurements that have a cost.

    Raises:
        ValueError: there is none; says how many failed and with what.
    """
    kept = [m for m in measurements if m.cost is not None]
    if kept:
        if len(kept) < len(measurements):
            logger.info(
                "%d of %d measurements failed and are left out", len(measurements) - len(kept), len(measurements)
            )
        return kept
    if not measurements:
        raise ValueError("a cost model needs at least one measurement, got none: measure some placements first")
    raise ValueError(
        f"a cost model needs at least one measurement with a cost, but all {len(measurements)} failed; "
        f"the first error was: {measurements[0].error}"
    )


def collect_loads(measurements: Sequence[Measurement]) -> DeviceLoads:
    """Tensors of measurements that all have a cost (see ``usable``)."""
    distinct: dict[tuple[ShardSpec, HardwareSpec], int] = {}
    shard_index: list[int] = []
    counts: list[int] = []
    owner: list[tuple[int, int]] = []
    compute, comms, steps, group = [], [], [], []
    repeats: dict[tuple[int, tuple[int, ...]], int] = {}
    repeat = []
    for row, measurement in enumerate(measurements):
        task, cost = measurement.task, measurement.cost
        assert cost is not None
        on_device: list[list[int]] = [[] for _ in task.devices]
        for shard, device in zip(task.shards, measurement.placement, strict=True):
            on_device[device].append(distinct.setdefault((shard, task.hardware), len(distinct)))
        for device, members in enumerate(on_device):
            shard_index.extend(members)
            counts.append(len(members))
            owner.append((row, device))
        compute.append(_columns(cost, ("forward_compute_ms", "backward_compute_ms", "compute_ms"), task.num_devices))
        comms.append(_columns(cost, ("forward_comms_ms", "backward_comms_ms"), task.num_devices))
        steps.append(np.nan if cost.step_ms is None else cost.step_ms)
        group.append(task_number(task))
        repeat.append(repeats.setdefault((group[-1], measurement.placement), len(repeats)))
    load_counts = torch.tensor(counts, dtype=torch.int64)
    rows = torch.tensor(owner, dtype=torch.int64).reshape(-1, 2)
    hardware = torch.tensor([hardware_features(h) for _, h in distinct]).reshape(len(distinct), -1)
    tasks = batch_tasks([PlacementTask((), m.task.devices, m.task.hardware) for m in measurements])
    return DeviceLoads(
        shard_features=shard_features([shard for shard, _ in distinct]),
        shard_hardware=hardware,
        load_hardware=tasks.hardware[rows[:, 0]],
        shard_index=torch.tensor(shard_index, dtype=torch.int64),
        load_index=torch.repeat_interleave(torch.arange(len(counts)), load_counts),
        offsets=torch.cat([torch.zeros(1, dtype=torch.int64), load_counts.cumsum(0)]),
        compute_ms=torch.from_numpy(np.concatenate(compute)).float(),
        comms_ms=torch.from_numpy(np.concatenate(comms)).float(),
        measurement=rows[:, 0],
        device=rows[:, 1],
        tasks=tasks,
        step_ms=torch.tensor(steps, dtype=torch.float32),
        repeat=torch.tensor(repeat, dtype=torch.int64),
        group=torch.tensor(group, dtype=torch.int64),
    )


def task_number(task: PlacementTask) -> int:
    """A number that is the same for equal tasks in every process, whatever the names of their shards."""
    shards = [(s.rows, s.dim, s.pooling_factor, s.batch_size, s.kernel, s.weight_dtype) for s in task.shards]
    return zlib.crc32(repr((shards, task.num_devices, task.hardware.to_dict())).encode())


def _columns(cost: CostBreakdown, names: Sequence[str], num_devices: int) -> np.ndarray:
    unknown = np.full(num_devices, np.nan)
    return np.stack([unknown if getattr(cost, n) is None else getattr(cost, n) for n in names], axis=1)

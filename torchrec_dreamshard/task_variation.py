"""Practice tasks of other sizes, made from the shards of the tasks at hand; they cost no measurement."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from torchrec_dreamshard.packing import FloatArray, memory_of
from torchrec_dreamshard.types import PlacementTask

NUM_DEVICES = (2, 3, 4, 5, 6, 8, 12, 16)
"""Device counts of practice tasks."""
MAX_SHARDS = 80
_TIGHT_SHARE = 0.25
_ROOMY_FACTOR = 2.0


def vary_task(base: PlacementTask, tasks: Sequence[PlacementTask], generator: np.random.Generator) -> PlacementTask:
    """Draws a task like ``base`` with other shards, another number of them and of devices, and other memory.

    A quarter of the tasks are tight in memory (70 to 90 % full), so that the policy learns to mind it.

    Args:
        base: gives the hardware and the devices' kind.
        tasks: shards come from those with the same kind of device.
        generator: of the choices.
    """
    kind = base.hardware.compute_device
    alike = [task for task in tasks if task.hardware.compute_device == kind]
    num_devices = int(generator.choice(NUM_DEVICES))
    num_shards = min(MAX_SHARDS, max(num_devices, round(base.num_shards * float(np.exp(generator.uniform(-1, 1))))))
    shards = []
    for index in generator.integers(len(alike), size=num_shards):
        source = alike[index].shards
        shards.append(source[int(generator.integers(len(source)))])
    task = PlacementTask(tuple(shards), base.devices[:1], base.hardware)
    need, capacity = memory_of(task)
    even = need.sum(axis=0) / num_devices
    if generator.random() < _TIGHT_SHARE:
        room = even / generator.uniform(0.7, 0.9)
    else:
        room = np.maximum(capacity[0], _ROOMY_FACTOR * even)
    room = np.maximum(room, _most_used(need, num_devices))
    per_host = 8 if generator.random() < 0.5 else num_devices
    devices = tuple(
        dataclasses.replace(base.devices[0], hbm_bytes=int(room[0]), ddr_bytes=int(room[1]), host=index // per_host)
        for index in range(num_devices)
    )
    return PlacementTask(task.shards, devices, base.hardware)


def _most_used(need: FloatArray, num_devices: int) -> FloatArray:
    """Memory of one device that surely suffices: the most that dealing the largest shards first takes anywhere."""
    used = np.zeros((num_devices, 2))
    size = need / np.maximum(need.sum(axis=0), 1.0)
    for shard in np.argsort(-size.max(axis=1), kind="stable"):
        used[(used / np.maximum(need.sum(axis=0), 1.0)).max(axis=1).argmin()] += need[shard]
    return np.asarray(used.max(axis=0))

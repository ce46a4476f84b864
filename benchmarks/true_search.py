"""What the best placement costs under the analytic judge itself: a long search from above, a bound from below."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from torchrec_dreamshard import HardwareSpec, PlacementTask
from torchrec_dreamshard.packing import memory_of
from torchrec_dreamshard.profiling.exchange_model import AllToAll
from torchrec_dreamshard.profiling.kernel_model import fused_times, kernel_constants, shard_loads

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Evaluate = Callable[[IntArray], FloatArray]
"""``P x S`` placements to ``P`` steps in ms."""

_MAX_PAIRS = 2000


def long_search(
    task: PlacementTask,
    evaluate: Evaluate,
    starts: Sequence[Sequence[int]],
    *,
    num_evaluations: int = 100_000,
    seed: int = 0,
) -> tuple[tuple[int, ...], float]:
    """Iterated local search on the true cost: best moves and swaps, then kicks, until the evaluations are spent.

    Args:
        task: for memory.
        evaluate: the true cost.
        starts: placements that fit, at least one.
        num_evaluations: placements that may be evaluated; a started descent is not cut short.
        seed: of samples and kicks.

    Returns:
        The best placement seen and its step in ms.
    """
    rng = np.random.default_rng(seed)
    need, capacity = memory_of(task)
    spent = 0

    def descend(placement: IntArray, cost: float) -> tuple[IntArray, float]:
        nonlocal spent
        while True:
            candidates = _neighbours(placement, need, capacity, task.num_devices, rng)
            if not len(candidates):
                return placement, cost
            costs = evaluate(candidates)
            spent += len(candidates)
            index = int(costs.argmin())
            if costs[index] >= cost * (1 - 1e-6):
                return placement, cost
            placement, cost = candidates[index], float(costs[index])

    descents = []
    for start in dict.fromkeys(tuple(start) for start in starts):
        placement = np.array(start, dtype=np.int64)
        descents.append(descend(placement, float(evaluate(placement[None])[0])))
    best, best_cost = min(descents, key=lambda pair: pair[1])
    while spent < num_evaluations and task.num_devices > 1 and task.num_shards > 1:
        kicked = _kick(best, need, capacity, task.num_devices, rng)
        placement, cost = descend(kicked, float(evaluate(kicked[None])[0]))
        spent += 1
        if cost < best_cost:
            best, best_cost = placement, cost
    return tuple(best.tolist()), best_cost


def lower_bound_ms(task: PlacementTask, hardware: HardwareSpec) -> float:
    """A step that no placement can beat under the analytic model of ``hardware``.

    The slowest forward is at least the mean forward and at least the largest shard's; so is the slowest backward with
    the background; the exchange is at least that of balanced columns.
    """
    loads = shard_loads(task.shards, hardware)
    constants = kernel_constants(hardware)
    num_devices = task.num_devices
    one = np.ones(task.num_shards)
    alone = fused_times(loads.forward, loads.backward, loads.forward_serial, loads.backward_serial, one, constants)
    tables_ms = constants.table_ms * task.num_shards / num_devices
    forward = constants.forward_launch_ms + tables_ms + loads.forward.sum() / num_devices
    backward = constants.backward_launch_ms + tables_ms + loads.backward.sum() / num_devices
    background = np.array([device.background_ms for device in task.devices])
    balanced = np.full((1, num_devices), loads.exchange_bytes.sum() / num_devices)
    exchange = float(AllToAll(task.devices, hardware).transfer_ms(balanced)[0])
    return float(
        max(forward, alone[0].max())
        + 2 * exchange
        + max(backward + background.mean(), alone[1].max() + background.min(), background.max())
    )


def _neighbours(
    placement: IntArray, need: FloatArray, capacity: FloatArray, num_devices: int, rng: np.random.Generator
) -> IntArray:
    """A sample of all moves and swaps that fit, ``P x S``."""
    num_shards = len(placement)
    free = capacity - np.stack([np.bincount(placement, need[:, k], minlength=num_devices) for k in (0, 1)], axis=1)
    shard, device = np.divmod(np.arange(num_shards * num_devices), num_devices)
    moves = (device != placement[shard]) & (free[device] >= need[shard]).all(axis=1)
    shard, device = shard[moves], device[moves]
    first, second = np.triu_indices(num_shards, 1)
    net = need[first] - need[second]
    swaps = placement[first] != placement[second]
    swaps &= (free[placement[first]] + net >= 0).all(axis=1) & (free[placement[second]] - net >= 0).all(axis=1)
    first, second = first[swaps], second[swaps]
    if len(first) > _MAX_PAIRS:
        chosen = rng.choice(len(first), _MAX_PAIRS, replace=False)
        first, second = first[chosen], second[chosen]
    result = np.tile(placement, (len(shard) + len(first), 1))
    rows = np.arange(len(result))
    result[rows[: len(shard)], shard] = device
    result[rows[len(shard) :], first] = placement[second]
    result[rows[len(shard) :], second] = placement[first]
    return result


def _kick(
    placement: IntArray, need: FloatArray, capacity: FloatArray, num_devices: int, rng: np.random.Generator
) -> IntArray:
    """The placement after a few random swaps and moves that fit."""
    for _ in range(int(rng.integers(2, 6))):
        neighbours = _neighbours(placement, need, capacity, num_devices, rng)
        if len(neighbours):
            placement = neighbours[rng.integers(len(neighbours))]
    return placement

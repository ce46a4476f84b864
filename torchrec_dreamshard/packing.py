"""Fitting shards into memory: greedy placement by cost, and repair where greed runs into a dead end.

Both memories (HBM and host) count. Greedy placers share ``place_greedily``: when a shard fits nowhere it is put
where it overflows least, and the finished placement is repaired. Repair re-packs two devices at a time and tries
all ways to split up to ``PAIR_SHARDS`` of their shards, which contains every move and swap between the two. What is
done depends on the input alone, never on the clock.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from torchrec_dreamshard.errors import InfeasiblePlacementError
from torchrec_dreamshard.types import PlacementTask

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

PAIR_SHARDS = 12
"""Shards of a pair of devices that one repair step distributes anew: 2**12 ways, about 0.2 ms."""
REPAIR_STEPS = 1500
"""Repair steps before giving up (8 per device if that is more)."""
STALLED_STEPS = 150
"""Steps in a row without less overflow before giving up (2 per device if that is more), so that a refusal is quick."""
MEMORIES = ("HBM", "host memory")


def memory_of(task: PlacementTask) -> tuple[FloatArray, FloatArray]:
    """Memory needed and there, HBM and host: ``S x 2`` and ``D x 2`` bytes (float64 is exact up to 2**53)."""
    need = np.array([(s.hbm_bytes, s.ddr_bytes) for s in task.shards], dtype=np.float64).reshape(-1, 2)
    capacity = np.array([(d.hbm_bytes, d.ddr_bytes) for d in task.devices], dtype=np.float64)
    return need, capacity


def check_possible(task: PlacementTask) -> None:
    """Refuses what obviously cannot fit.

    Raises:
        InfeasiblePlacementError: a shard is larger than every device, or all shards together than all devices.
    """
    need, capacity = memory_of(task)
    if not len(need):
        return
    fits_somewhere = np.zeros(len(need), dtype=bool)
    for room in np.unique(capacity, axis=0):
        fits_somewhere |= np.all(need <= room, axis=1)
    if not fits_somewhere.all():
        shard = int(np.flatnonzero(~fits_somewhere)[0])
        lacking = np.maximum(need[shard] - capacity, 0.0)
        device = int(lacking.sum(axis=1).argmin())
        memory = int(lacking[device].argmax())
        raise _infeasible(
            task,
            shard,
            lacking[device].sum(),
            f"needs {need[shard, memory]:,.0f} bytes of {MEMORIES[memory]}, but the device with most room for it has "
            f"{capacity[device, memory]:,.0f}",
        )
    lacking = np.maximum(need.sum(axis=0) - capacity.sum(axis=0), 0.0)
    if lacking.any():
        memory = int(lacking.argmax())
        raise _infeasible(
            task,
            int(need[:, memory].argmax()),
            lacking[memory],
            f"cannot be placed with the others: all shards need {need[:, memory].sum():,.0f} bytes of "
            f"{MEMORIES[memory]}, all devices have {capacity[:, memory].sum():,.0f}",
        )


def place_greedily(task: PlacementTask, cost: Sequence[float] | FloatArray, seed: int = 0) -> tuple[int, ...]:
    """Shards in descending cost, each onto the device with the lowest sum so far among those where it fits.

    Args:
        task: the task.
        cost: S costs of at least 0.
        seed: for the repair of dead ends.

    Raises:
        InfeasiblePlacementError: no placement fits (or none was found in a bounded search).
    """
    check_possible(task)
    need, capacity = memory_of(task)
    cost = np.asarray(cost, dtype=np.float64)
    free, load = capacity.copy(), np.zeros(len(capacity))
    placement = np.zeros(len(need), dtype=np.int64)
    for shard in np.argsort(-cost, kind="stable"):
        left = free - need[shard]
        fits = (left >= 0).all(axis=1)
        device = np.where(fits, load, np.inf).argmin() if fits.any() else _overflow(left, capacity).argmin()
        placement[shard] = device
        load[device] += cost[shard]
        free[device] = left[device]
    return repair(task, placement, cost, seed)


def repair(
    task: PlacementTask, placement: Sequence[int] | IntArray, cost: FloatArray | None = None, seed: int = 0
) -> tuple[int, ...]:
    """The placement itself if it fits, else one nearby that does.

    Args:
        task: the task.
        placement: S device indices, memory not regarded.
        cost: S costs whose balance breaks ties between ways to fit; None for no preference.
        seed: of the random choices.

    Raises:
        InfeasiblePlacementError: no placement fits (or none was found in a bounded search).
    """
    need, capacity = memory_of(task)
    start = np.asarray(placement, dtype=np.int64)
    if not len(need) or _fits(need, capacity, start):
        return tuple(start.tolist())
    check_possible(task)
    cost = np.zeros(len(need)) if cost is None else cost
    generator = np.random.default_rng(seed)
    for candidate in (start, _best_fit_decreasing(need, capacity)):
        candidate = _unload(need, capacity, candidate, cost, generator)
        if _fits(need, capacity, candidate):
            return tuple(candidate.tolist())
    used = _used(need, capacity, candidate)
    lacking = np.maximum(used - capacity, 0.0)
    device, memory = np.unravel_index(int(lacking.argmax()), lacking.shape)
    on_device = np.flatnonzero(candidate == device)
    shard = int(on_device[need[on_device, memory].argmax()])
    raise _infeasible(
        task,
        shard,
        lacking[device, memory],
        f"found no room in a bounded search: {need[:, memory].sum():,.0f} of {capacity[:, memory].sum():,.0f} bytes of "
        f"{MEMORIES[memory]} are needed in all, and device {device} lacks {lacking[device, memory]:,.0f} for it",
    )


def _infeasible(task: PlacementTask, shard: int, missing: float, reason: str) -> InfeasiblePlacementError:
    name = task.shards[shard].name or f"#{shard}"
    return InfeasiblePlacementError(
        f"shard {name} {reason}; {int(missing):,} bytes are missing: split it by columns, add devices or reserve less",
        shard=name,
        missing_bytes=int(missing),
    )


def _used(need: FloatArray, capacity: FloatArray, placement: IntArray) -> FloatArray:
    columns = [np.bincount(placement, weights=need[:, k], minlength=len(capacity)) for k in range(2)]
    return np.stack(columns, axis=1)


def _fits(need: FloatArray, capacity: FloatArray, placement: IntArray) -> bool:
    return bool((_used(need, capacity, placement) <= capacity).all())


def _overflow(left: FloatArray, capacity: FloatArray) -> FloatArray:
    """Missing memory of ``... x 2`` left-overs, both memories in shares of the mean device."""
    scale = np.maximum(capacity.mean(axis=0), 1.0)
    return np.asarray((np.maximum(-left, 0.0) / scale).sum(axis=-1))


def _best_fit_decreasing(need: FloatArray, capacity: FloatArray) -> IntArray:
    """Large shards first, each onto the fitting device that has least room; overflows are left to repair."""
    scale = np.maximum(capacity.mean(axis=0), 1.0)
    free = capacity.copy()
    placement = np.zeros(len(need), dtype=np.int64)
    for shard in np.argsort(-(need / scale).max(axis=1), kind="stable"):
        left = free - need[shard]
        fits = (left >= 0).all(axis=1)
        room = np.where(fits, (left / scale).sum(axis=1), np.inf)
        device = room.argmin() if fits.any() else _overflow(left, capacity).argmin()
        placement[shard] = device
        free[device] = left[device]
    return placement


@functools.lru_cache(maxsize=PAIR_SHARDS + 1)
def _subsets(num: int) -> FloatArray:
    """All subsets of ``num`` things as rows of zeros and ones: ``2**num x num``."""
    return (np.arange(2**num)[:, None] >> np.arange(num) & 1).astype(np.float64)


def _unload(
    need: FloatArray, capacity: FloatArray, start: IntArray, cost: FloatArray, generator: np.random.Generator
) -> IntArray:
    """Re-packs pairs of devices until nothing overflows or the steps are spent; overflow never grows."""
    if len(capacity) == 1:
        return start
    placement: IntArray = start.copy()
    left = capacity - _used(need, capacity, placement)
    least, stalled = np.inf, 0
    for step in range(max(REPAIR_STEPS, 8 * len(capacity))):
        over = _overflow(left, capacity)
        stalled = 0 if over.sum() < least - 1e-12 else stalled + 1
        least = min(least, over.sum())
        if not over.any() or stalled > max(STALLED_STEPS, 2 * len(capacity)):
            break
        first, second = _choose_pair(left, capacity, over, step, generator)
        members = np.flatnonzero((placement == first) | (placement == second))
        if len(members) > PAIR_SHARDS:
            members = generator.choice(members, PAIR_SHARDS, replace=False)
        here = placement[members] == first
        pool = left[[first, second]] + np.stack([need[members[here]].sum(0), need[members[~here]].sum(0)])
        subsets = _subsets(len(members))
        taken = subsets @ need[members]
        rest = np.stack([pool[0] - taken, pool[1] - (need[members].sum(0) - taken)], axis=1)
        pair_over = _overflow(rest, capacity).sum(axis=1)
        if over.sum() - over[first] - over[second] + pair_over.min() < 1e-12:
            # The last overflow goes: among the ways that fit, the most even split of the costs.
            of_first = subsets @ cost[members] + cost[placement == first].sum() - cost[members[here]].sum()
            preference = np.maximum(of_first, cost[(placement == first) | (placement == second)].sum() - of_first)
        else:
            # More must go: gather free room on one of the two, broken ties at random.
            room = (np.maximum(rest, 0.0) / np.maximum(capacity.mean(axis=0), 1.0)).sum(axis=2).max(axis=1)
            preference = -room * generator.uniform(0.5, 1.0, len(room))
        best = np.flatnonzero(pair_over <= pair_over.min() + 1e-12)
        choice = best[preference[best].argmin()]
        placement[members] = np.where(subsets[choice] > 0, first, second)
        left[[first, second]] = rest[choice]
    return placement


def _choose_pair(
    left: FloatArray, capacity: FloatArray, over: FloatArray, step: int, generator: np.random.Generator
) -> tuple[int, int]:
    """An overflowing device and a partner: by turns the one with most room, and any (so that room gathers)."""
    room = (np.maximum(left, 0.0) / np.maximum(capacity.mean(axis=0), 1.0)).sum(axis=1)
    full = np.flatnonzero(over > 0)
    first = int(generator.choice(full)) if step % 4 != 3 else int(generator.integers(len(over)))
    room[first] = -1.0
    if step % 2 == 0:
        return first, int(room.argmax())
    second = int(generator.integers(len(over) - 1))
    return first, second + (second >= first)

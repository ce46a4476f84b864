"""Making a plan fit again with few changes: moves of single shards, and swaps of two where no move helps."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np
from torchrec.distributed.planner.types import ShardingOption, Topology
from torchrec.distributed.types import ShardingType

from torchrec_dreamshard.measurement import FloatArray
from torchrec_dreamshard.planner.choices import TableKey
from torchrec_dreamshard.planner.costs import lives_whole
from torchrec_dreamshard.planner.ledger import Ledger, need_of
from torchrec_dreamshard.planner.search import snapshot

_MAX_STEPS = 32


class _Place(NamedTuple):
    """One shard of a plan."""

    key: TableKey
    part: int


def moves_freely(option: ShardingOption) -> bool:
    """Whether each shard may go to any rank by itself."""
    return lives_whole(option) and option.sharding_type != ShardingType.TABLE_COLUMN_WISE.value


def moved(option: ShardingOption, index: int, rank: int) -> ShardingOption:
    """A copy of an option with one shard on another rank."""
    (copy,) = snapshot([option])
    copy.shards[index].rank = rank
    return copy


def repair(
    plan: Mapping[TableKey, ShardingOption],
    constraint: Topology,
    *,
    fixed: Collection[TableKey],
    deadline: float,
) -> dict[TableKey, ShardingOption] | None:
    """The plan with shards moved off the devices that overflow; None if moves and swaps are not enough.

    Each step takes what leaves the least overflow; among equals a move rather than a swap, and then what leaves
    most HBM on the fuller device.

    Args:
        plan: with ranks.
        constraint: the devices.
        fixed: tables that stay where they are.
        deadline: on ``time.monotonic``.
    """
    result = dict(plan)
    capacity = Ledger(constraint).capacity
    for _ in range(_MAX_STEPS):
        places = [_Place(key, i) for key, option in result.items() for i in range(option.num_shards)]
        shards = [result[place.key].shards[place.part] for place in places]
        needs = np.array([need_of(shard) for shard in shards])
        ranks = np.array([shard.rank for shard in shards])
        free = capacity.copy()
        np.subtract.at(free, ranks, needs)
        if np.all(free >= 0):
            return result
        mobile = np.array([place.key not in fixed and moves_freely(result[place.key]) for place in places])
        best: tuple[tuple[float, int, float], list[tuple[int, int]]] | None = None
        for shard in np.flatnonzero(mobile & (free[ranks] < 0).any(axis=1)):
            if time.monotonic() > deadline:
                return None
            for step in _steps(int(shard), result, places, needs, ranks, free, mobile):
                rating = (step.overflow, len(step.to), step.fullest)
                if best is None or rating < best[0]:
                    best = (rating, step.to)
        if best is None:
            return None
        for index, rank in best[1]:
            key, part = places[index]
            result[key] = moved(result[key], part, rank)
    return None


class _Step(NamedTuple):
    overflow: float
    """Bytes above capacity of the devices concerned, less those before."""
    fullest: float
    """Minus the least bytes left on the devices concerned."""
    to: list[tuple[int, int]]
    """Shards, by their place in the list of all, and their new ranks."""


def _steps(
    shard: int,
    plan: Mapping[TableKey, ShardingOption],
    places: list[_Place],
    needs: FloatArray,
    ranks: np.ndarray,
    free: FloatArray,
    mobile: np.ndarray,
) -> list[_Step]:
    """The best move of a shard and the best swap with another one, of those that lessen the overflow."""
    here = int(ranks[shard])

    def rate(there: np.ndarray, given: FloatArray) -> tuple[FloatArray, FloatArray]:
        mine, theirs = free[here] + given, free[there] - given
        before = np.maximum(-free[here], 0).sum() + np.maximum(-free[there], 0).sum(axis=1)
        after = np.maximum(-mine, 0).sum(axis=1) + np.maximum(-theirs, 0).sum(axis=1)
        return after - before, -np.minimum(mine[:, 0], theirs[:, 0])

    own = [s.rank for s in plan[places[shard].key].shards]
    others = np.array([rank for rank in range(len(free)) if rank not in own], dtype=int)
    partners = np.flatnonzero(mobile & ~np.isin(ranks, own))
    partners = np.array([i for i in partners if all(s.rank != here for s in plan[places[i].key].shards)], dtype=int)
    steps = []
    for there, given, swapped in (
        (others, np.broadcast_to(needs[shard], (len(others), needs.shape[1])), None),
        (ranks[partners], needs[shard] - needs[partners], partners),
    ):
        if not len(there):
            continue
        overflow, fullest = rate(there, given)
        best = int(np.lexsort((fullest, overflow))[0])
        if overflow[best] < 0:
            to = [(shard, int(there[best]))]
            if swapped is not None:
                to.append((int(swapped[best]), here))
            steps.append(_Step(float(overflow[best]), float(fullest[best]), to))
    return steps

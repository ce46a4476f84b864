"""Column shards of one table apart: two of them on one rank read its ids twice for nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torchrec.distributed.planner.types import ShardingOption

from torchrec_dreamshard.measurement import FloatArray
from torchrec_dreamshard.packing import IntArray, memory_of
from torchrec_dreamshard.planner.costs import PlanCosts
from torchrec_dreamshard.types import PlacementTask

_MAX_TRIALS, _TRIALS = 48, 6  # predictions, in all and for one shard
_TOLERANCE = 1.05  # of the step: what the networks do not know of ids read twice
_RANKS = 8  # least loaded ones that a shard may move to


def spread_columns(
    options: Sequence[ShardingOption], costs: PlanCosts, task: PlacementTask, placement: Sequence[int]
) -> tuple[int, ...]:
    """Moves column shards off ranks that hold another shard of their table, unless the step grows visibly.

    Args:
        options: whose shards the task holds, in order.
        costs: predicts.
        task: S shards.
        placement: S ranks.

    Returns:
        S ranks, which fit if those given do.
    """
    owners = np.array([index for index, option in enumerate(options) for _ in option.shards])
    ranks = np.array(placement)
    seen: set[tuple[int, int]] = set()
    crowded = []
    for shard, at in enumerate(zip(owners.tolist(), ranks.tolist(), strict=True)):
        if at in seen:
            crowded.append(shard)
        seen.add(at)
    if not crowded:
        return tuple(placement)
    need, capacity = memory_of(task)
    alone = costs.single_ms(task.shards)
    work = np.array([alone[spec] for spec in task.shards])
    bound_ms = _TOLERANCE * _step_ms(costs, task, ranks)
    for shard in crowded[: _MAX_TRIALS // _TRIALS]:
        best: tuple[float, IntArray] | None = None
        for trial in _trials(shard, owners, ranks, need, capacity, work)[:_TRIALS]:
            step_ms = _step_ms(costs, task, trial)
            if step_ms <= bound_ms and (best is None or step_ms < best[0]):
                best = step_ms, trial
        if best is not None:
            ranks = best[1]
    return tuple(ranks.tolist())


def _step_ms(costs: PlanCosts, task: PlacementTask, ranks: IntArray) -> float:
    step_ms = costs.agent.predict(task, ranks.tolist()).step_ms
    return float("inf") if step_ms is None else step_ms


def _trials(
    shard: int, owners: IntArray, ranks: IntArray, need: FloatArray, capacity: FloatArray, work: FloatArray
) -> list[IntArray]:
    """Moves of a shard to ranks without its table, and swaps with their shards, the best balanced first."""
    source = int(ranks[shard])
    here = owners[ranks == source]
    free = capacity.copy()
    np.subtract.at(free, ranks, need)
    load = np.bincount(ranks, weights=work, minlength=len(capacity))
    found: list[tuple[float, int, int]] = []
    foreign = np.flatnonzero(~np.isin(np.arange(len(capacity)), ranks[owners == owners[shard]]))
    for target in foreign[np.argsort(load[foreign], kind="stable")][:_RANKS].tolist():
        others = np.flatnonzero(ranks == target)
        for other in (-1, *others[~np.isin(owners[others], here)].tolist()):
            need_back, work_back = (need[other], work[other]) if other >= 0 else (0.0, 0.0)
            change, moved = need[shard] - need_back, work[shard] - work_back
            if np.all(change <= free[target]) and np.all(-change <= free[source]):
                found.append((max(load[target] + moved, load[source] - moved), target, other))
    trials = []
    for _, target, other in sorted(found):
        trial = ranks.copy()
        trial[shard] = target
        if other >= 0:
            trial[other] = source
        trials.append(trial)
    return trials

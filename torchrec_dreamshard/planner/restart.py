"""Starting from an earlier plan: as few changes as possible, each listed with what it gains.

Every change of a plan moves a table's weights and optimizer state, and a change of sharding type may break a
checkpoint. So the earlier plan is kept wherever it is still valid; a table is changed only where the plan no longer
fits, or where changes together make the predicted step fall by a given share.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from torchrec.distributed.planner.types import PlannerError, ShardingOption, Topology
from torchrec.distributed.types import ParameterSharding, ShardingPlan, ShardingType

from torchrec_dreamshard.measurement import CostBreakdown
from torchrec_dreamshard.planner.choices import TableKey
from torchrec_dreamshard.planner.costs import PlanCosts
from torchrec_dreamshard.planner.ledger import Ledger, need_of
from torchrec_dreamshard.planner.repair import moved, moves_freely, repair
from torchrec_dreamshard.planner.search import snapshot

_MAX_CHANGES = 32
_MAX_TABLES, _MAX_RANKS = 4, 3  # heaviest tables of the slowest device, and least loaded ranks, tried per change
_NOISE = 1e-6  # share of the step below which a gain is rounding

Plan = dict[TableKey, ShardingOption]


@dataclasses.dataclass(frozen=True)
class PlanChange:
    """One table that differs from the earlier plan."""

    table: str
    before: str
    after: str
    reason: str
    gain_ms: float | None = None
    """Predicted fall of the step, of changes that pay only together an equal part; None where it was forced."""

    def __str__(self) -> str:
        gain = "" if self.gain_ms is None else f", {self.gain_ms:.4g} ms faster"
        return f"{self.table}: {self.before} -> {self.after} ({self.reason}{gain})"


class Candidate(NamedTuple):
    """A plan, and what differs from the earlier one."""

    options: list[ShardingOption]
    changes: tuple[PlanChange, ...] = ()


def describe(option: ShardingOption) -> str:
    """Type, kernel and ranks of an option in a few words."""
    ranks = [shard.rank for shard in option.shards]
    where = "all ranks" if len(ranks) > 8 and ranks == list(range(len(ranks))) else f"ranks {ranks}"
    return f"{option.sharding_type} {option.compute_kernel} on {where}"


def continue_plan(
    previous: ShardingPlan,
    space: Sequence[ShardingOption],
    fresh: Sequence[ShardingOption],
    costs: PlanCosts,
    constraint: Topology,
    *,
    min_gain: float,
    movable: Mapping[str, object],
    deadline: float,
) -> list[Candidate]:
    """The earlier plan with the changes that are needed and those that pay, and, if any does, without the latter.

    Where the earlier plan overfills a device, a few tables are moved or swapped; ``fresh`` is taken only where that is
    not enough. Single changes of the slowest device follow as long as they help. They are accepted in stretches: as
    soon as those since the last accepted one gain ``min_gain`` of the step together. If ``fresh`` is still faster than
    the result by more than ``min_gain``, it is taken as a whole, but for towers and tables that it would replicate.

    Args:
        previous: the earlier plan.
        space: today's search space.
        fresh: today's best plan without regard to the earlier one.
        costs: predicts.
        constraint: the devices.
        min_gain: least share of the step that changes must gain together.
        movable: names of tables that are pinned or grouped: these follow ``fresh``.
        deadline: on ``time.monotonic``.
    """
    target = {(option.path, option.name): option for option in snapshot(fresh)}
    plan, changes = _kept(previous, space, target, costs.world_size, movable)
    fixed = {key for key, option in plan.items() if key[1] in movable or option.dependency}
    if not _fits(plan, constraint):
        repaired = repair(plan, constraint, fixed=fixed, deadline=deadline)
        usable = target if repaired is None else repaired
        changes += _listed(plan, usable, "the earlier plan no longer fits")
        if repaired is None:
            return [Candidate(list(target.values()), tuple(changes))]
        plan = repaired
    needed = Candidate(list(plan.values()), tuple(changes))
    share = max(min_gain, _NOISE)
    improved, gains = _improve(plan, target, costs, constraint, share, deadline, fixed)
    whole = _whole(improved, plan, target, costs, constraint, share, deadline, fixed)
    best, gains = (improved, gains) if whole is None else whole
    pays = _listed(plan, best, "pays" if whole is None else "pays together with the others", gains)
    return [Candidate(list(best.values()), (*changes, *pays)), needed] if pays else [needed]


def _kept(
    previous: ShardingPlan,
    space: Sequence[ShardingOption],
    target: Plan,
    world: int,
    movable: Mapping[str, object],
) -> tuple[Plan, list[PlanChange]]:
    """The earlier plan, with the target's option where it cannot stay as it was, and these changes."""
    options: dict[TableKey, list[ShardingOption]] = {}
    for option in space:
        options.setdefault((option.path, option.name), []).append(option)
    plan: Plan = {}
    changes: list[PlanChange] = []
    before = {key: previous.plan.get(key[0], {}).get(key[1]) for key in target}
    kept_as_was = {
        key: option
        for key, sharding in before.items()
        if sharding is not None
        and key[1] not in movable
        and (option := _restore(sharding, options[key], world)) is not None
    }
    # a tower stays on its host as a whole or follows the fresh plan as a whole
    broken = {option.dependency for key, option in target.items() if option.dependency and key not in kept_as_was}
    for key, wanted in target.items():
        sharding, kept = before[key], kept_as_was.get(key)
        kept = None if wanted.dependency in broken else kept
        plan[key] = kept or wanted
        if kept is None and (sharding is None or _differs(sharding, wanted)):
            was = "absent" if sharding is None else f"{sharding.sharding_type} on ranks {sharding.ranks}"
            reason = "new table" if sharding is None else "no longer possible as it was"
            changes.append(PlanChange(wanted.fqn.lstrip("."), was, describe(wanted), reason))
    return plan, changes


def _listed(
    before: Plan, after: Plan, reason: str, gains: Mapping[TableKey, float] = MappingProxyType({})
) -> list[PlanChange]:
    """One change for each table that differs."""
    return [
        PlanChange(after[key].fqn.lstrip("."), describe(before[key]), describe(after[key]), reason, gains.get(key))
        for key in _differing(before, after)
    ]


def _differing(before: Plan, after: Plan) -> list[TableKey]:
    return [key for key, option in after.items() if describe(before[key]) != describe(option)]


def _step_ms(plan: Plan, costs: PlanCosts) -> float:
    return _height(costs.breakdown(list(plan.values())))[0]


def _height(cost: CostBreakdown) -> tuple[float, float]:
    """What changes must lower: the step, and, where several devices are equally slow, the spread of their times."""
    if cost.step_ms is None or cost.device_ms is None:
        return float("inf"), float("inf")
    return round(cost.step_ms, 9), round(float(np.square(cost.device_ms).sum()), 9)


def _improve(
    plan: Plan,
    target: Plan,
    costs: PlanCosts,
    constraint: Topology,
    share: float,
    deadline: float,
    fixed: Collection[TableKey],
) -> tuple[Plan, dict[TableKey, float]]:
    """The plan after the stretches of changes that pay, and the gain of each changed table in ms.

    The gain of a stretch counts equally for its tables: the first of them often gain nothing by themselves.
    """
    accepted, gains = dict(plan), dict[TableKey, float]()
    step, trial = _step_ms(plan, costs), dict(plan)
    stretch: list[TableKey] = []
    for _ in range(_MAX_CHANGES):
        change = _best_change(trial, target, costs, constraint, deadline, fixed)
        if change is None:
            break
        key, option, after = change
        trial[key] = option
        stretch = [*(k for k in stretch if k != key), key]
        if step - after > share * step:
            for changed in stretch:
                gains[changed] = gains.get(changed, 0.0) + (step - after) / len(stretch)
            accepted, step, stretch = dict(trial), after, []
    return accepted, gains


def _whole(
    improved: Plan,
    plan: Plan,
    target: Plan,
    costs: PlanCosts,
    constraint: Topology,
    share: float,
    deadline: float,
    fixed: Collection[TableKey],
) -> tuple[Plan, dict[TableKey, float]] | None:
    """The target and its gains, if it is faster by enough than what single changes reached.

    Towers, tables that it would start to replicate, and those whose change gains nothing stay as they are.
    """
    stay = {key for key, wanted in target.items() if key in fixed or _replicates(plan[key], wanted)}
    whole = {key: plan[key] if key in stay else wanted for key, wanted in target.items()}
    if not _fits(whole, constraint):
        return None
    step, reached = _step_ms(whole, costs), _step_ms(improved, costs)
    if not reached - step > share * reached:
        return None
    for key in _differing(plan, whole):
        if time.monotonic() > deadline:
            break
        trial = {**whole, key: plan[key]}
        if _fits(trial, constraint) and _step_ms(trial, costs) <= step:
            whole = trial
    changed = _differing(plan, whole)
    gain = _step_ms(plan, costs) - _step_ms(whole, costs)
    return whole, {key: gain / len(changed) for key in changed}


def _replicates(option: ShardingOption, wanted: ShardingOption) -> bool:
    """Whether a change would start to replicate a table: a change of kind breaks checkpoints."""
    kind = ShardingType.DATA_PARALLEL.value
    return bool(wanted.sharding_type == kind != option.sharding_type)


def _restore(sharding: ParameterSharding, options: Sequence[ShardingOption], world: int) -> ShardingOption | None:
    """Today's option that is sharded as before, with the earlier ranks; None when there is none."""
    ranks = list(sharding.ranks or [])
    extents = None
    if sharding.sharding_spec is not None:
        extents = [(list(s.shard_offsets), list(s.shard_sizes)) for s in sharding.sharding_spec.shards]
    for option in options:
        same = (option.sharding_type, option.compute_kernel) == (sharding.sharding_type, sharding.compute_kernel)
        shapes = [(list(s.offset), list(s.size)) for s in option.shards]
        if not same or len(ranks) != option.num_shards or not all(0 <= rank < world for rank in ranks):
            continue
        if extents is not None and extents != shapes:
            continue
        (kept,) = snapshot([option])
        for shard, rank in zip(kept.shards, ranks, strict=True):
            shard.rank = rank
        return kept
    return None


def _differs(sharding: ParameterSharding, option: ShardingOption) -> bool:
    ranks = [shard.rank for shard in option.shards]
    return (sharding.sharding_type, sharding.compute_kernel, sharding.ranks) != (
        option.sharding_type,
        option.compute_kernel,
        ranks,
    )


def _fits(plan: Mapping[TableKey, ShardingOption], constraint: Topology) -> bool:
    ledger = Ledger(constraint)
    try:
        for option in plan.values():
            ledger.put(option, [int(shard.rank) for shard in option.shards], [0.0] * option.num_shards)
    except PlannerError:
        return False
    return True


def _best_change(
    plan: Plan,
    target: Plan,
    costs: PlanCosts,
    constraint: Topology,
    deadline: float,
    fixed: Collection[TableKey],
) -> tuple[TableKey, ShardingOption, float] | None:
    """The single change on the slowest device that helps most, and the step after it."""
    cost = costs.breakdown(list(plan.values()))
    device_ms = cost.device_ms
    if device_ms is None:
        return None
    slowest = int(np.argmax(device_ms))
    on_it = (key for key, option in plan.items() if any(shard.rank == slowest for shard in option.shards))
    here = [key for key in on_it if key not in fixed]
    costs.warm_up(plan[key] for key in here)
    here.sort(key=lambda key: (-costs.option_ms(plan[key]), key))
    best: tuple[TableKey, ShardingOption, float] | None = None
    lowest = _height(cost)
    for key in here[:_MAX_TABLES]:
        trials = _moves(plan[key], slowest, device_ms, constraint)
        if not _replicates(plan[key], target[key]):
            trials.append(target[key])
        for option in trials:
            if time.monotonic() > deadline:
                return best
            trial = {**plan, key: option}
            if describe(option) == describe(plan[key]) or not _fits(trial, constraint):
                continue
            height = _height(costs.breakdown(list(trial.values())))
            if height < lowest:
                best, lowest = (key, option, height[0]), height
    return best


def _moves(option: ShardingOption, slowest: int, device_ms: np.ndarray, constraint: Topology) -> list[ShardingOption]:
    """The option with its shard on the slowest device moved to one of the least loaded ranks that could hold it."""
    if not moves_freely(option):
        return []
    index = next(i for i, shard in enumerate(option.shards) if shard.rank == slowest)
    capacity = Ledger(constraint).capacity
    taken = {shard.rank for shard in option.shards}
    ranks = [int(r) for r in np.argsort(device_ms, kind="stable") if int(r) not in taken]
    roomy = [rank for rank in ranks if np.all(need_of(option.shards[index]) <= capacity[rank])]
    return [moved(option, index, rank) for rank in roomy[:_MAX_RANKS]]

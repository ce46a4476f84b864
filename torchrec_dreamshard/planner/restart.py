"""Starting from an earlier plan: as few changes as possible, each listed with what it gains.

Every change of a plan moves a table's weights and optimizer state, and a change of sharding type may break a
checkpoint. So the earlier plan is kept wherever it is still valid; a table is changed only where the plan no longer
fits, or where the change makes the predicted step fall by a given share.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from torchrec.distributed.planner.types import PlannerError, ShardingOption, Topology
from torchrec.distributed.types import ParameterSharding, ShardingPlan, ShardingType

from torchrec_dreamshard.planner.choices import TableKey
from torchrec_dreamshard.planner.costs import PlanCosts, lives_whole
from torchrec_dreamshard.planner.ledger import Ledger, need_of
from torchrec_dreamshard.planner.search import snapshot

_MAX_CHANGES = 32
_MAX_TABLES, _MAX_RANKS = 4, 3  # heaviest tables of the slowest device, and least loaded ranks, tried per change

Plan = dict[TableKey, ShardingOption]


@dataclasses.dataclass(frozen=True)
class PlanChange:
    """One table that differs from the earlier plan."""

    table: str
    before: str
    after: str
    reason: str
    gain_ms: float | None = None
    """Predicted fall of the step; None where the change was forced."""

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

    Args:
        previous: the earlier plan.
        space: today's search space.
        fresh: today's best plan without regard to the earlier one.
        costs: predicts.
        constraint: the devices.
        min_gain: least share of the step that a change must gain.
        movable: names of tables that are pinned or grouped: these follow ``fresh``.
        deadline: on ``time.monotonic``.
    """
    target = {(option.path, option.name): option for option in snapshot(fresh)}
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
        and (option := _restore(sharding, options[key], costs.world_size)) is not None
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
    if not _fits(plan, constraint):
        forced = [
            PlanChange(o.fqn.lstrip("."), describe(plan[k]), describe(o), "the earlier plan no longer fits")
            for k, o in target.items()
            if describe(plan[k]) != describe(o)
        ]
        return [Candidate(list(target.values()), (*changes, *forced))]
    needed = Candidate(list(plan.values()), tuple(changes))
    fixed = {key for key, option in plan.items() if key[1] in movable or option.dependency}
    for _ in range(_MAX_CHANGES):
        change = _best_change(plan, target, costs, constraint, min_gain, deadline, fixed)
        if change is None:
            break
        key, option, gain = change
        changes.append(PlanChange(option.fqn.lstrip("."), describe(plan[key]), describe(option), "pays", gain))
        plan[key] = option
    improved = Candidate(list(plan.values()), tuple(changes))
    return [improved, needed] if improved.changes != needed.changes else [needed]


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
    min_gain: float,
    deadline: float,
    fixed: Collection[TableKey],
) -> tuple[TableKey, ShardingOption, float] | None:
    """The single change on the slowest device that makes the step fall most, if by enough."""
    cost = costs.breakdown(list(plan.values()))
    step, device_ms = cost.step_ms, cost.device_ms
    if step is None or device_ms is None:
        return None
    slowest = int(np.argmax(device_ms))
    on_it = (key for key, option in plan.items() if any(shard.rank == slowest for shard in option.shards))
    here = [key for key in on_it if key not in fixed]
    costs.warm_up(plan[key] for key in here)
    here.sort(key=lambda key: (-costs.option_ms(plan[key]), key))
    best: tuple[TableKey, ShardingOption, float] | None = None
    for key in here[:_MAX_TABLES]:
        trials = _moves(plan[key], slowest, device_ms, constraint)
        if target[key].sharding_type != ShardingType.DATA_PARALLEL.value:  # a change of kind breaks checkpoints
            trials.append(target[key])
        for option in trials:
            if time.monotonic() > deadline:
                return best
            trial = {**plan, key: option}
            if describe(option) == describe(plan[key]) or not _fits(trial, constraint):
                continue
            after = costs.breakdown(list(trial.values())).step_ms
            gain = 0.0 if after is None else step - after
            if gain > min_gain * step and (best is None or gain > best[2]):
                best = (key, option, gain)
    return best


def _moves(option: ShardingOption, slowest: int, device_ms: np.ndarray, constraint: Topology) -> list[ShardingOption]:
    """The option with its shard on the slowest device moved to one of the least loaded ranks that could hold it."""
    if not lives_whole(option) or option.sharding_type == ShardingType.TABLE_COLUMN_WISE.value:
        return []
    index = next(i for i, shard in enumerate(option.shards) if shard.rank == slowest)
    capacity = Ledger(constraint).capacity
    taken = {shard.rank for shard in option.shards}
    ranks = [int(r) for r in np.argsort(device_ms, kind="stable") if int(r) not in taken]
    roomy = [rank for rank in ranks if np.all(need_of(option.shards[index]) <= capacity[rank])]
    moves = []
    for rank in roomy[:_MAX_RANKS]:
        (moved,) = snapshot([option])
        moved.shards[index].rank = rank
        moves.append(moved)
    return moves

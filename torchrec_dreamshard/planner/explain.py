"""Why a plan is as it is: what each device does, and for each table what bound it and what else was possible."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from torchrec.distributed.planner.types import ParameterConstraints, PartitionByType, ShardingOption, Topology
from torchrec.distributed.types import ShardingType

from torchrec_dreamshard.measurement import TERMS, CostBreakdown
from torchrec_dreamshard.planner.choices import capacities, fits_alone, group_options
from torchrec_dreamshard.planner.costs import PlanCosts, lives_whole
from torchrec_dreamshard.planner.enumerator import variant_order
from torchrec_dreamshard.planner.ledger import MEMORIES, need_of
from torchrec_dreamshard.planner.restart import PlanChange, describe
from torchrec_dreamshard.planner.search import snapshot
from torchrec_dreamshard.planner.verify import MeasuredPlan

GIB = 1024**3
COLUMN_TYPES = (ShardingType.COLUMN_WISE.value, ShardingType.TABLE_COLUMN_WISE.value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceReason:
    """One device: predicted times in ms, memory in bytes."""

    rank: int
    forward_compute_ms: float
    forward_comms_ms: float
    backward_comms_ms: float
    backward_compute_ms: float
    background_ms: float
    hbm_used: int
    hbm_there: int
    ddr_used: int
    ddr_there: int
    is_bottleneck: bool

    @property
    def total_ms(self) -> float:
        """All terms together."""
        return float(sum(getattr(self, term) for term in TERMS)) + self.background_ms


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableReason:
    """One table: how and where, what bound it, and what the next best would cost."""

    table: str
    chosen: str
    alone_ms: float
    """Predicted compute of its busiest shard alone."""
    why: str
    next_option: str | None = None
    next_option_step_ms: float | None = None
    """Predicted step with the next best way of sharding; None where there is none, or it was not looked at."""
    next_rank: int | None = None
    next_rank_step_ms: float | None = None
    """Predicted step with its busiest shard on the next best rank."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explanation:
    """The reasons of a plan; ``str()`` is for people, ``to_dict()`` for programs."""

    step_ms: float
    devices: tuple[DeviceReason, ...]
    tables: tuple[TableReason, ...]
    """Tables on the slowest devices first."""
    changes: tuple[PlanChange, ...] = ()
    """What differs from the earlier plan that was given."""
    measured: tuple[MeasuredPlan, ...] = ()
    """The plans that were measured on the job's ranks, the best predicted first."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        out = dataclasses.asdict(self)
        for device, entry in zip(self.devices, out["devices"], strict=True):
            entry["total_ms"] = device.total_ms
        return out

    def __str__(self) -> str:
        columns = ("rank", "forward", "comms fwd", "comms bwd", "backward", "other", "total")
        lines = [f"predicted step {self.step_ms:.4f} ms", "", "".join(f"{name:>11}" for name in columns) + "  memory"]
        for d in self.devices:
            times = (*(getattr(d, term) for term in TERMS), d.background_ms, d.total_ms)
            memory = f"{d.hbm_used / GIB:.2f}/{d.hbm_there / GIB:.2f} GiB HBM, " if d.hbm_there else ""
            memory += f"{d.ddr_used / GIB:.2f}/{d.ddr_there / GIB:.2f} GiB host"
            mark = "  <- bottleneck" if d.is_bottleneck else ""
            lines.append(f"{d.rank:>11d}" + "".join(f"{time:>11.4f}" for time in times) + f"  {memory}{mark}")
        lines.append("")
        for t in self.tables:
            lines.append(f"{t.table}: {t.chosen}, {t.alone_ms:.4f} ms alone: {t.why}")
            if t.next_option_step_ms is not None:
                lines.append(f"    next best way: {t.next_option}, step {t.next_option_step_ms:.4f} ms")
            if t.next_rank_step_ms is not None:
                lines.append(f"    next best rank: {t.next_rank}, step {t.next_rank_step_ms:.4f} ms")
        if self.changes:
            lines += ["", "changed since the earlier plan:", *(f"    {change}" for change in self.changes)]
        if self.measured:
            lines += ["", "measured on the job's ranks:", *(f"    {plan}" for plan in self.measured)]
        return "\n".join(lines)


def explain_plan(
    plan: Sequence[ShardingOption],
    space: Sequence[ShardingOption],
    costs: PlanCosts,
    constraint: Topology,
    *,
    constraints: Mapping[str, ParameterConstraints] | None = None,
    pins: Mapping[str, int] | None = None,
    together: Sequence[Sequence[str]] = (),
    changes: Sequence[PlanChange] = (),
    measured: Sequence[MeasuredPlan] = (),
    max_tables: int = 40,
) -> Explanation:
    """Explains a plan.

    Args:
        plan: the options with ranks.
        space: the search space that they were chosen from.
        costs: predicts.
        constraint: the devices with the memory left for tables.
        constraints: the user's, by table name.
        pins: the user's, by table name.
        together: the user's groups of tables on one device.
        changes: what differs from an earlier plan.
        measured: what verifying the plan brought.
        max_tables: alternatives are predicted for so many tables, those on the slowest devices first.
    """
    fixed = {name: f"kept together with {[n for n in names if n != name]}" for names in together for name in names}
    fixed.update({name: f"pinned to rank {rank}" for name, rank in (pins or {}).items()})
    plan = snapshot(plan)
    cost = costs.breakdown(plan)
    total = cast("np.ndarray[Any, Any]", cost.device_ms)
    capacity = capacities(constraint)
    used = np.zeros_like(capacity)
    for option in plan:
        for shard in option.shards:
            used[cast(int, shard.rank)] += need_of(shard)
    costs.warm_up(plan)
    order = sorted(plan, key=lambda o: (-max(float(total[cast(int, s.rank)]) for s in o.shards), -costs.option_ms(o)))
    tables = group_options(space)
    looker = _Alternatives(plan, costs, capacity, used, total)
    reasons = []
    for index, option in enumerate(order):
        variants = tables.get((option.path, option.name), [])
        constraint_of = (constraints or {}).get(option.name)
        reason = TableReason(
            table=option.fqn.lstrip("."),
            chosen=describe(option),
            alone_ms=costs.option_ms(option),
            why=_why(option, variants, capacity, constraint_of, fixed.get(option.name)),
        )
        reasons.append(looker.look(reason, option, variants) if index < max_tables else reason)
    devices = _devices(cost, used, capacity)
    return Explanation(
        step_ms=cast(float, cost.step_ms),
        devices=devices,
        tables=tuple(reasons),
        changes=tuple(changes),
        measured=tuple(measured),
    )


def _devices(
    cost: CostBreakdown, used: np.ndarray[Any, Any], capacity: np.ndarray[Any, Any]
) -> tuple[DeviceReason, ...]:
    slowest = int(np.argmax(cast("np.ndarray[Any, Any]", cost.device_ms)))
    background = np.zeros(len(used)) if cost.background_ms is None else cost.background_ms
    return tuple(
        DeviceReason(
            rank=rank,
            **{term: float(getattr(cost, term)[rank]) for term in TERMS},
            background_ms=float(background[rank]),
            hbm_used=int(used[rank, 0]),
            hbm_there=int(capacity[rank, 0]),
            ddr_used=int(used[rank, 1]),
            ddr_there=int(capacity[rank, 1]),
            is_bottleneck=rank == slowest,
        )
        for rank in range(len(used))
    )


def _why(
    option: ShardingOption,
    variants: Sequence[ShardingOption],
    capacity: np.ndarray[Any, Any],
    constraint: ParameterConstraints | None,
    fixed: str | None,
) -> str:
    """What bound the choice."""
    reasons = [fixed] if fixed else []
    for field in ("sharding_types", "compute_kernels"):
        allowed = getattr(constraint, field, None)
        if allowed:
            reasons.append(f"constrained to {field} {sorted(allowed)}")
    plainer = [other for other in variants if variant_order(other) < variant_order(option)]
    too_large = [other for other in plainer if not fits_alone(other, capacity)]
    if too_large:
        shard = max(too_large[0].shards, key=lambda s: float(need_of(s).sum()))
        need = need_of(shard)
        memory = int(np.argmax(need - capacity.max(axis=0)))
        reasons.append(
            f"{too_large[0].sharding_type} does not fit: {need[memory] / GIB:.2f} GiB of {MEMORIES[memory]} needed, "
            f"{capacity[:, memory].max() / GIB:.2f} on a device"
        )
    if constraint is not None and constraint.min_partition and option.sharding_type in COLUMN_TYPES:
        reasons.append(f"its column shards have at least {constraint.min_partition} columns (min_partition)")
    if option.dependency:
        reasons.append(f"all tables of the tower {option.dependency} share a host")
    if len(variants) == 1 and not reasons:
        reasons.append("nothing else is offered for it here, or could pay for its size and load")
    return "; ".join(reasons) if reasons else "least predicted step"


class _Alternatives:
    """Predicts a plan with one thing changed."""

    def __init__(
        self,
        plan: Sequence[ShardingOption],
        costs: PlanCosts,
        capacity: np.ndarray[Any, Any],
        used: np.ndarray[Any, Any],
        device_ms: np.ndarray[Any, Any],
    ) -> None:
        self._plan, self._costs, self._device_ms = plan, costs, device_ms
        self._free = capacity - used

    def look(self, reason: TableReason, option: ShardingOption, variants: Sequence[ShardingOption]) -> TableReason:
        """The reason with the next best way of sharding and the next best rank."""
        changes: dict[str, Any] = {}
        others = [o for o in variants if describe_kind(o) != describe_kind(option)]
        steps = [(self._step(option, trial), trial) for trial in map(self._lay_out, others)]
        if steps:
            step, trial = min(steps, key=lambda entry: (entry[0], variant_order(entry[1])))
            changes.update(next_option=describe(trial), next_option_step_ms=step)
        if lives_whole(option):
            moved = self._moved(option)
            if moved is not None:
                changes.update(next_rank=moved[0], next_rank_step_ms=self._step(option, moved[1]))
            full = self._full_ranks(option)
            if full:
                first = f"rank {full[0]}, less loaded, has" if len(full) == 1 else f"{len(full)} less loaded ranks have"
                changes.update(why=f"{reason.why}; {first} no memory left for it")
        return dataclasses.replace(reason, **changes)

    def _full_ranks(self, option: ShardingOption) -> list[int]:
        """Ranks with less load than its own that lack the memory for its largest shard."""
        shard = max(option.shards, key=lambda s: float(need_of(s).sum()))
        own = {cast(int, s.rank) for s in option.shards}
        lighter = np.flatnonzero(self._device_ms < self._device_ms[cast(int, shard.rank)])
        return [int(rank) for rank in lighter if rank not in own and np.any(need_of(shard) > self._free[rank])]

    def _step(self, option: ShardingOption, trial: ShardingOption) -> float:
        plan = [trial if other is option else other for other in self._plan]
        return cast(float, self._costs.breakdown(plan).step_ms)

    def _lay_out(self, option: ShardingOption) -> ShardingOption:
        """A copy of an option on the least loaded ranks; memory is not regarded, as others would move."""
        (trial,) = snapshot([option])
        order = [int(rank) for rank in np.argsort(self._device_ms, kind="stable")]
        if option.partition_by == PartitionByType.UNIFORM.value:
            order = list(range(len(order)))
        elif not lives_whole(option):
            start = min(order[0] // option.num_shards * option.num_shards, max(0, len(order) - option.num_shards))
            order = list(range(start, start + option.num_shards))
        for index, shard in enumerate(trial.shards):
            shard.rank = order[index % len(order)]
        return trial

    def _moved(self, option: ShardingOption) -> tuple[int, ShardingOption] | None:
        (trial,) = snapshot([option])
        shard = max(trial.shards, key=lambda s: float(self._device_ms[cast(int, s.rank)]))
        taken = {s.rank for s in option.shards}
        for rank in np.argsort(self._device_ms, kind="stable"):
            if int(rank) not in taken and np.all(need_of(shard) <= self._free[rank]):
                shard.rank = int(rank)
                return int(rank), trial
        return None


def describe_kind(option: ShardingOption) -> tuple[str, str, int]:
    """What tells the options of a table apart."""
    return option.sharding_type, option.compute_kernel, option.num_shards

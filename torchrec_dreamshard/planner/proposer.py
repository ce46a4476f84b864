"""How each table is sharded: proposals that follow the learned cost.

The first proposal takes the least work per table. Each later one changes what makes the slowest devices slow: it
splits, replicates or re-types tables there, judged first on the predicted step with the changed shards put on the
least loaded devices, then by the partitioner's real placement. A change that does not pay is never tried again.
"""

# TorchRec compares annotated signatures, so annotations here are evaluated and spelt as TorchRec spells them.
# ruff: noqa: UP006, UP035, UP045

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, List, Optional, cast

import numpy as np
from torchrec.distributed.planner.types import Enumerator, PartitionByType, Proposer, ShardingOption, Topology
from torchrec.distributed.types import ShardingType

from torchrec_dreamshard.measurement import FloatArray
from torchrec_dreamshard.planner import choices
from torchrec_dreamshard.planner.choices import Choice, TableKey
from torchrec_dreamshard.planner.costs import CostSource, PlanCosts, lives_whole
from torchrec_dreamshard.planner.enumerator import variant_order
from torchrec_dreamshard.planner.ledger import need_of

if TYPE_CHECKING:
    from torchrec_dreamshard.agent import Agent

_MIN_GAIN = 1e-3  # a change must pay more than this share of the step
_MAX_TRIALS = 12  # predicted changes per proposal
_MAX_FAILURES = 3
_MAX_REPAIRS = 12

Ranks = dict[TableKey, tuple[int, ...]]


class DreamShardProposer(Proposer):  # type: ignore[misc]
    """Proposes how each table is sharded. Usable alone inside TorchRec's ``EmbeddingShardingPlanner``.

    Args:
        agent: an agent, a name or path to load, or None for the one shipped for the topology's device.
        topology: the devices; None waits for the first feedback, which brings them.
        time_budget_s: proposals stop this long after ``load``.
        max_proposals: bound of the proposals.
        bound: names of tables that are pinned or kept together, so that they must live whole.
    """

    def __init__(
        self,
        agent: "Agent | CostSource | str | Path | None" = None,
        *,
        topology: Topology | None = None,
        time_budget_s: float = 10.0,
        max_proposals: int = 24,
        bound: Sequence[str] = (),
    ) -> None:
        self._source = CostSource.of(agent)
        self._given_topology = topology
        self._time_budget_s = time_budget_s
        self._max_proposals = max_proposals
        self._bound = tuple(bound)
        self._reset()

    def _reset(self) -> None:
        self._topology = self._given_topology
        self._tables: dict[TableKey, list[ShardingOption]] = {}
        self._next: Choice | None = None
        self._best: Choice | None = None
        self._best_ranks: Ranks = {}
        self._best_ms = float("inf")
        self._tried: set[tuple[TableKey, int]] = set()
        self._batch = 1
        self._failures = 0
        self._repairs = 0
        self._num_proposed = 0
        self.deadline = time.monotonic() + self._time_budget_s

    def use(self, topology: Topology) -> None:
        """Sets the devices of the plans to come, so that already the first proposal is made for them."""
        self._given_topology = topology

    def load(
        self,
        search_space: List[ShardingOption],
        enumerator: Optional[Enumerator] = None,
    ) -> None:
        """Starts anew on a search space; nothing of an earlier plan is kept."""
        self._reset()
        self._tables = choices.group_options(search_space, self._bound)
        if self._topology is None:
            self._next = choices.plainest(self._tables)
        else:
            self._next = self._start(self._topology)

    def propose(self) -> Optional[List[ShardingOption]]:
        """The next proposal, one option per table; None when no change promises anything, or time is over."""
        late = self._num_proposed > 0 and time.monotonic() > self.deadline
        if not self._next or late or self._num_proposed >= self._max_proposals:
            return None
        self._num_proposed += 1
        return list(self._next.values())

    def feedback(
        self,
        partitionable: bool,
        plan: Optional[List[ShardingOption]] = None,
        perf_rating: Optional[float] = None,
        storage_constraint: Optional[Topology] = None,
    ) -> None:
        """Learns what became of the last proposal and prepares the next one."""
        choice, self._next = self._next, None
        if choice is None:
            return
        new_topology = self._topology is None and storage_constraint is not None
        if storage_constraint is not None:
            self._topology = storage_constraint
        if self._topology is None:
            return
        if partitionable and perf_rating is not None and perf_rating < self._best_ms * (1 - _MIN_GAIN):
            self._best, self._best_ms, self._failures = choice, perf_rating, 0
            ranks = {(o.path, o.name): tuple(cast(int, s.rank) for s in o.shards) for o in plan or choice.values()}
            self._best_ranks = ranks
        elif self._best is not None:
            self._failures += 1
            self._batch = max(1, self._batch // 4)
        if self._best is None:
            self._next = self._repaired(choice, start_over=new_topology)
        elif self._failures < _MAX_FAILURES and time.monotonic() < self.deadline:
            self._next = self._improved()

    def _start(self, topology: Topology) -> Choice:
        capacity = choices.capacities(topology)
        choice = choices.cheapest(self._tables, capacity, self._costs())
        if np.all(sum(map(choices.total_need, choice.values())) <= capacity.sum(axis=0)):
            split = choices.packable(self._tables, choice, topology)
            if split is not choice or choices.packs(choice, topology):
                return split
        return choices.packable(self._tables, self._relieved(choice, topology, choices.FULL_SHARE), topology)

    def _relieved(self, choice: Choice, topology: Topology, share: float) -> Choice:
        """The choice with tables moved out of HBM until each tower fits on a host, and all fit together."""
        capacity = choices.capacities(topology)
        for keys, room in choices.shared_rooms(choice, topology):
            tables, now = {key: self._tables[key] for key in keys}, {key: choice[key] for key in keys}
            choice = {**choice, **choices.relieve(tables, now, room * (share, 1, 1), capacity, self._costs())}
        return choice

    def _costs(self) -> PlanCosts:
        assert self._topology is not None
        return self._source.on(self._topology)

    def _repaired(self, choice: Choice, *, start_over: bool) -> Choice | None:
        """What to try after a proposal that could not be placed."""
        assert self._topology is not None
        self._repairs += 1
        if self._repairs > _MAX_REPAIRS:
            return None
        if start_over:
            fitting = self._start(self._topology)
            if fitting != choice:
                return fitting
        # every failure asks for more: finer shards and a little more room in HBM
        capacity = choices.capacities(self._topology)
        relieved = self._relieved(choice, self._topology, choices.FULL_SHARE - 0.05 * self._repairs)
        split = choices.packable(self._tables, relieved, self._topology)
        if split == choice:
            split = choices.finer(self._tables, split, capacity, 2 ** (self._repairs - 1)) or choice
        return split if split != choice else None

    def _improved(self) -> Choice | None:
        """The best plan with the changes that promise most on its slowest devices; None when none does."""
        assert self._best is not None
        costs = self._costs()
        if self._num_proposed == 1:
            self._batch = max(1, costs.world_size // 16)
        assert self._topology is not None
        capacity = choices.capacities(self._topology)
        search = _ChangeSearch(self._tables, self._best, self._best_ranks, costs, capacity, self._tried, self.deadline)
        changes = (search.replicas() if self._num_proposed == 1 else {}) or search.changes(self._batch)
        self._tried.update((key, id(option)) for key, option in changes.items())
        return {**self._best, **changes} if changes else None


class _ChangeSearch:
    """Finds changes of a placed choice that make its predicted step fall."""

    def __init__(
        self,
        tables: Mapping[TableKey, Sequence[ShardingOption]],
        choice: Choice,
        ranks: Ranks,
        costs: PlanCosts,
        capacity: FloatArray,
        tried: set[tuple[TableKey, int]],
        deadline: float,
    ) -> None:
        self._tables, self._choice, self._ranks = tables, choice, ranks
        self._costs, self._tried, self._deadline = costs, tried, deadline
        cost = self._step(choice, ranks)
        self._step_ms = cast(float, cost.step_ms)
        device_ms = cost.device_ms
        self._device_ms = np.zeros(costs.world_size) if device_ms is None else np.array(device_ms)
        self._free = capacity.copy()
        for key, option in choice.items():
            np.subtract.at(self._free, list(ranks[key]), [need_of(shard) for shard in option.shards])

    def replicas(self) -> Choice:
        """All tables that may be data-parallel, if that pays: together they share what the first of them costs."""
        found = {
            key: option
            for key in self._choice
            for option in self._untried(key)
            if option.sharding_type == ShardingType.DATA_PARALLEL.value
        }
        everywhere = tuple(range(self._costs.world_size))
        ranks = {**self._ranks, **dict.fromkeys(found, everywhere)}
        step_ms = cast(float, self._step({**self._choice, **found}, ranks).step_ms)
        return found if step_ms < self._step_ms * (1 - _MIN_GAIN) else {}

    def changes(self, count: int) -> Choice:
        """Up to ``count`` changes, at most one per table; what is tried in vain makes room for the next."""
        found: Choice = {}
        while not found and time.monotonic() < self._deadline and (candidates := self._candidates(count)):
            found = self._most_promising(candidates, count)
        return found

    def _most_promising(self, candidates: Sequence[tuple[TableKey, ShardingOption]], count: int) -> Choice:
        found: Choice = {}
        scored: list[tuple[bool, float, TableKey, ShardingOption]] = []
        for key, option in candidates:
            if len(scored) >= _MAX_TRIALS and count == 1 or time.monotonic() > self._deadline:
                break
            if count > 1:  # too many devices to judge one by one: the placement of all together decides
                scored.append((False, -1.0, key, option))
                continue
            crowded, step = self._try(key, option)
            scored.append((crowded, step - self._step_ms, key, option))
            if step >= self._step_ms * (1 - _MIN_GAIN):
                self._tried.add((key, id(option)))
        # what finds room as things are comes before what asks for other tables to make room
        scored.sort(key=lambda entry: (*entry[:3], variant_order(entry[3])))
        for _, gain, key, option in scored:
            if gain < -_MIN_GAIN * self._step_ms and key not in found and len(found) < count:
                found[key] = option
        return found

    def _candidates(self, count: int) -> list[tuple[TableKey, ShardingOption]]:
        """Untried options of tables on the slowest devices, the heaviest tables first."""
        slowest = np.argsort(-self._device_ms, kind="stable")[: max(2, count)]
        out: list[tuple[TableKey, ShardingOption]] = []
        seen: set[TableKey] = set()
        on_device: dict[int, list[TableKey]] = {}
        for key, ranks in self._ranks.items():
            if self._choice[key].partition_by != PartitionByType.UNIFORM.value:
                for rank in set(ranks):
                    on_device.setdefault(rank, []).append(key)
        uniform = [k for k, o in self._choice.items() if o.partition_by == PartitionByType.UNIFORM.value]
        near = {key for rank in slowest for key in on_device.get(int(rank), [])} | set(uniform)
        self._costs.warm_up(option for key in near for option in (self._choice[key], *self._tables[key]))
        for rank in slowest:
            untried = [key for key in on_device.get(int(rank), []) if self._untried(key)]
            heavy = sorted(untried, key=lambda k: (-self._costs.option_ms(self._choice[k]), k))
            for key in [*heavy[: 4 if count == 1 else 1], *(uniform if count == 1 else [])]:
                if key not in seen:
                    seen.add(key)
                    out.extend((key, option) for option in self._untried(key)[: None if count == 1 else 1])
        return out

    def _untried(self, key: TableKey) -> list[ShardingOption]:
        now = self._choice[key]
        return [o for o in self._tables[key] if o is not now and (key, id(o)) not in self._tried]

    def _try(self, key: TableKey, option: ShardingOption) -> tuple[bool, float]:
        """One table changed, its shards on the least loaded devices: whether room is missing, and predicted step."""
        load, free = self._device_ms.copy(), self._free.copy()
        now = self._choice[key]
        for rank, shard in zip(self._ranks[key], now.shards, strict=True):
            load[rank] -= self._costs.option_ms(now)
            free[rank] += need_of(shard)
        crowded = False
        chosen: list[int] = []
        block = () if lives_whole(option) else _lightest_block(load, option.num_shards)
        own = self._costs.option_ms(option)
        for index, shard in enumerate(option.shards):
            fits = np.all(need_of(shard) <= free, axis=1)
            rank = block[index] if block else int(np.where(fits | ~fits.any(), load, np.inf).argmin())
            crowded = crowded or not fits[rank]
            load[rank] += own
            free[rank] -= need_of(shard)
            chosen.append(rank)
        cost = self._step({**self._choice, key: option}, {**self._ranks, key: tuple(chosen)})
        return crowded, cast(float, cost.step_ms)

    def _step(self, choice: Choice, ranks: Ranks):  # type: ignore[no-untyped-def]
        plan = list(choice.values())
        for key, option in choice.items():
            for shard, rank in zip(option.shards, ranks[key], strict=True):
                shard.rank = rank
        try:
            return self._costs.breakdown(plan)
        finally:
            for option in plan:
                for shard in option.shards:
                    shard.rank = None


def _lightest_block(load: np.ndarray, width: int) -> tuple[int, ...]:
    """The aligned block of ``width`` devices (a host, or several) whose busiest device is least loaded.

    A grid of more blocks than hosts goes round.
    """
    if width >= len(load):
        return tuple(index % len(load) for index in range(width))
    starts = range(0, len(load) - width + 1, width)
    start = min(starts, key=lambda first: (float(load[first : first + width].max()), first))
    return tuple(range(start, start + width))

"""Where each shard goes: the policy and its search inside TorchRec's ``Partitioner``.

What the policy cannot choose is laid out first: uniform options, pinned tables, tables kept together, and options
bound to the devices of one host. All of it is background load and used memory for the rest, which the agent places.
"""

# TorchRec compares annotated signatures, so annotations here are evaluated and spelt as TorchRec spells them.
# ruff: noqa: UP006, UP035, UP045

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, List

import numpy as np
from torchrec.distributed.planner.types import (
    PartitionByType,
    Partitioner,
    PlannerError,
    PlannerErrorType,
    ShardingOption,
    Topology,
)

from torchrec_dreamshard.errors import InfeasiblePlacementError
from torchrec_dreamshard.packing import memory_of
from torchrec_dreamshard.planner.costs import CostSource, PlanCosts, lives_whole
from torchrec_dreamshard.planner.enumerator import option_order
from torchrec_dreamshard.planner.hosts import host_ranks, is_host_bound, place_on_hosts, shard_ms
from torchrec_dreamshard.planner.ledger import Ledger, need_of
from torchrec_dreamshard.types import PlacementTask

if TYPE_CHECKING:
    from torchrec_dreamshard.agent import Agent

_MAX_SPREAD_TRIALS = 32
_MAX_REFINED = 24  # proposals of one plan; TorchRec's proposers make hundreds, of which the first are the likeliest


class DreamShardPartitioner(Partitioner):  # type: ignore[misc]
    """Sets the rank of every shard of a proposal with a trained agent.

    Usable alone inside TorchRec's ``EmbeddingShardingPlanner``.

    Args:
        agent: an agent, a name or path to load, or None for the one shipped for the topology's device.
        time_budget_s: bound of one call's search; None leaves it to the agent.
        seed: of the search.
        refine: False for one greedy rollout of the policy and nothing else, which is also all that proposals get
            after the first 24 of one plan.
        pins: rank of a table by name; its shards go nowhere else.
        together: groups of table names that share one device.
    """

    def __init__(
        self,
        agent: "Agent | CostSource | str | Path | None" = None,
        *,
        time_budget_s: float | None = 2.0,
        seed: int = 0,
        refine: bool = True,
        pins: Mapping[str, int] | None = None,
        together: Sequence[Sequence[str]] = (),
    ) -> None:
        self._source = CostSource.of(agent)
        self.time_budget_s = time_budget_s
        self._seed = seed
        self._refine = refine
        self._pins = dict(pins or {})
        self._constraint: Topology | None = None
        self._num_proposals = 0
        self._groups = {name: index for index, names in enumerate(together) for name in names}

    def partition(
        self,
        proposal: List[ShardingOption],
        storage_constraint: Topology,
    ) -> List[ShardingOption]:
        """Places a proposal.

        Args:
            proposal: one option per table; their shards' ranks are set in place.
            storage_constraint: the devices with the memory left for tables.

        Raises:
            PlannerError: something does not fit (names the table, the bytes needed and there).
        """
        if storage_constraint is not self._constraint:  # a planner makes one for each plan
            self._constraint, self._num_proposals = storage_constraint, 0
        self._num_proposals += 1
        costs = self._source.on(storage_constraint)
        ledger = Ledger(storage_constraint)
        options = sorted(proposal, key=option_order)
        uniform = [o for o in options if o.partition_by == PartitionByType.UNIFORM.value]
        for option in uniform:
            if option.num_shards != len(ledger.free):
                raise PlannerError(
                    f"table {option.fqn.lstrip('.')} is {option.sharding_type} in {option.num_shards} shards, but the "
                    f"topology has {len(ledger.free)} ranks; one shard per rank is needed",
                    PlannerErrorType.PARTITION,
                )
            ledger.put(option, range(option.num_shards), [0.0] * option.num_shards)
        apart = list(uniform)
        ledger.load_ms += costs.background_ms(uniform) if uniform else 0.0
        bound = self._place_groups(options, costs, ledger)
        taken = {id(o) for o in (*uniform, *bound)}
        hosts = host_ranks(storage_constraint)
        for option in _largest_first([o for o in options if id(o) not in taken and is_host_bound(o, hosts)], costs):
            place_on_hosts(option, costs, ledger, hosts)
            taken.add(id(option))
            if not lives_whole(option):
                apart.append(option)
        self._place_free([o for o in options if id(o) not in taken], costs, ledger)
        return proposal

    def _place_groups(self, options: list[ShardingOption], costs: PlanCosts, ledger: Ledger) -> list[ShardingOption]:
        """Places pinned tables and those that stay together; returns them."""
        groups: dict[str, list[ShardingOption]] = {}
        for option in options:
            if option.name in self._groups:
                groups.setdefault(f"group {self._groups[option.name]}", []).append(option)
            elif option.name in self._pins:
                groups.setdefault(f"table {option.name}", []).append(option)
        # pinned groups first: the others have a choice
        ordered = sorted(groups.values(), key=lambda group: not any(o.name in self._pins for o in group))
        for group in ordered:
            self._place_group(group, costs, ledger)
        return [option for group in ordered for option in group]

    def _place_group(self, group: list[ShardingOption], costs: PlanCosts, ledger: Ledger) -> None:
        for option in group:
            if not lives_whole(option):
                raise PlannerError(
                    f"table {option.fqn.lstrip('.')} is pinned or kept together with others, which a "
                    f"{option.sharding_type} table cannot be: allow table_wise for it or drop the pin",
                    PlannerErrorType.STRICT_CONSTRAINTS,
                )
        pinned = sorted({self._pins[o.name] for o in group if o.name in self._pins})
        if len(pinned) > 1 or any(not 0 <= rank < len(ledger.free) for rank in pinned):
            raise PlannerError(
                f"tables {sorted(o.name for o in group)} are pinned to ranks {pinned}: expected one rank from 0 to "
                f"{len(ledger.free) - 1}",
                PlannerErrorType.STRICT_CONSTRAINTS,
            )
        need = sum((need_of(shard) for o in group for shard in o.shards), np.zeros(3))
        allowed = pinned or list(range(len(ledger.free)))
        fitting = [rank for rank in allowed if np.all(need <= ledger.free[rank])]
        # where nothing fits, putting them one by one names the first that does not
        rank = min(fitting or allowed[:1], key=lambda r: (ledger.load_ms[r], r))
        for option in group:
            ledger.put(option, [rank] * option.num_shards, shard_ms(option, costs))

    def _place_free(self, options: list[ShardingOption], costs: PlanCosts, ledger: Ledger) -> None:
        specs = [spec for option in options for spec in costs.adapter.shard_specs(option, costs.world_size)]
        if not specs:
            return
        task = costs.task(specs, ledger.load_ms, [(int(hbm), int(ddr)) for hbm, ddr, _ in ledger.free])
        try:
            refine = self._refine and self._num_proposals <= _MAX_REFINED
            placement = costs.agent.place(task, refine=refine, time_budget_s=self.time_budget_s, seed=self._seed)
        except InfeasiblePlacementError as error:
            raise PlannerError(f"no placement fits: {error}", PlannerErrorType.PARTITION) from error
        ranks = _spread_columns(options, costs, task, task.check_placement(placement))
        remaining = iter(ranks)
        for option in options:
            ledger.put(option, [next(remaining) for _ in option.shards], [0.0] * option.num_shards)


def _spread_columns(
    options: Sequence[ShardingOption], costs: PlanCosts, task: PlacementTask, placement: Sequence[int]
) -> tuple[int, ...]:
    """Moves column shards off ranks that hold another shard of their table, as far as the step does not grow.

    Two shards of a table on one rank read its ids twice for nothing.
    """
    owners = [index for index, option in enumerate(options) for _ in option.shards]
    ranks = list(placement)
    seen: set[tuple[int, int]] = set()
    crowded = []
    for shard, (owner, rank) in enumerate(zip(owners, ranks, strict=True)):
        if (owner, rank) in seen:
            crowded.append(shard)
        seen.add((owner, rank))
    if not crowded:
        return tuple(ranks)
    best = costs.agent.predict(task, ranks).step_ms
    for shard in crowded[:_MAX_SPREAD_TRIALS]:
        need, free = memory_of(task)
        np.subtract.at(free, ranks, need)
        load = np.zeros(len(free))
        np.add.at(load, ranks, need[:, 0] + need[:, 1])
        elsewhere = np.all(need[shard] <= free, axis=1)
        elsewhere[[rank for owner, rank in zip(owners, ranks, strict=True) if owner == owners[shard]]] = False
        if best is None or not elsewhere.any():
            continue
        trial = list(ranks)
        trial[shard] = int(np.where(elsewhere, load, np.inf).argmin())
        step = costs.agent.predict(task, trial).step_ms
        if step is not None and step <= best:
            ranks, best = trial, step
    return tuple(ranks)


def _largest_first(options: Sequence[ShardingOption], costs: PlanCosts) -> list[ShardingOption]:
    return sorted(options, key=lambda option: (-sum(shard_ms(option, costs)), option_order(option)))

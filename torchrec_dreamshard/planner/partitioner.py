"""Where each shard goes: the policy and its search inside TorchRec's ``Partitioner``.

What the policy cannot choose is laid out first: uniform options, what must share a host or a rank, and shards on
SSDs, which the policy does not know. All of it is background load and used memory for the rest, which the agent places.
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
from torchrec_dreamshard.measurement import FloatArray
from torchrec_dreamshard.packing import place_greedily
from torchrec_dreamshard.planner.costs import CostSource, PlanCosts, lives_whole
from torchrec_dreamshard.planner.enumerator import option_order
from torchrec_dreamshard.planner.groups import Cluster, clusters_of, units_of
from torchrec_dreamshard.planner.hosts import host_ranks, place_units, shard_ms
from torchrec_dreamshard.planner.ledger import Ledger, need_of
from torchrec_dreamshard.planner.spread import spread_columns
from torchrec_dreamshard.types import ShardSpec

if TYPE_CHECKING:
    from torchrec_dreamshard.agent import Agent

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
        self._together = [tuple(names) for names in together]

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
        _place_uniform(uniform, costs, ledger)
        hosts = host_ranks(storage_constraint)
        clusters = clusters_of(options, self._pins, self._together, len(ledger.free))
        units = units_of(options, clusters, hosts)
        done = {id(option) for unit in units for option in unit.options}
        clusters = [cluster for cluster in clusters if id(cluster.options[0]) not in done]
        for cluster in clusters:
            if cluster.rank is not None:
                _put_cluster(cluster, cluster.rank, costs, ledger)
        place_units(units, costs, ledger, hosts)
        done |= {id(option) for option in (*uniform, *(o for c in clusters for o in c.options))}
        free = [option for option in options if id(option) not in done]
        on_ssd = [option for option in free if any(need_of(shard)[2] for shard in option.shards)]
        for option in sorted(on_ssd, key=lambda o: (-sum(shard_ms(o, costs)), option_order(o))):
            _put_on_roomy_ranks(option, costs, ledger)
            done.add(id(option))
        movable = [cluster for cluster in clusters if cluster.rank is None]
        waiting = {id(option) for cluster in movable for option in cluster.options}
        ledger.load_ms = _load_ms([o for o in options if id(o) in done and id(o) not in waiting], costs)
        self._place_free([o for o in free if id(o) not in done], movable, costs, ledger)
        return proposal

    def _place_free(
        self, options: list[ShardingOption], clusters: Sequence[Cluster], costs: PlanCosts, ledger: Ledger
    ) -> None:
        specs = [spec for option in options for spec in costs.adapter.shard_specs(option, costs.world_size)]
        fallback: Sequence[int] = ()
        if clusters:
            fallback = _place_clusters(clusters, specs, costs, ledger)
        if not specs:
            return
        task = costs.task(specs, ledger.load_ms, ledger.room)
        try:
            refine = self._refine and self._num_proposals <= _MAX_REFINED
            placement = costs.agent.place(task, refine=refine, time_budget_s=self.time_budget_s, seed=self._seed)
        except InfeasiblePlacementError as error:
            if not clusters:
                raise PlannerError(f"no placement fits: {error}", PlannerErrorType.PARTITION) from error
            placement = tuple(fallback)
        ranks = spread_columns(options, costs, task, task.check_placement(placement))
        remaining = iter(ranks)
        for option in options:
            ledger.put(option, [next(remaining) for _ in option.shards], [0.0] * option.num_shards)


def _place_uniform(uniform: Sequence[ShardingOption], costs: PlanCosts, ledger: Ledger) -> None:
    for option in uniform:
        if option.num_shards != len(ledger.free):
            raise PlannerError(
                f"table {option.fqn.lstrip('.')} is {option.sharding_type} in {option.num_shards} shards, but the "
                f"topology has {len(ledger.free)} ranks; one shard per rank is needed",
                PlannerErrorType.PARTITION,
            )
        ledger.put(option, range(option.num_shards), [0.0] * option.num_shards)
    ledger.load_ms = _load_ms(uniform, costs)


def _load_ms(placed: Sequence[ShardingOption], costs: PlanCosts) -> FloatArray:
    """What devices carry: options that run apart as a group each, shards that live whole one by one."""
    apart = [option for option in placed if not lives_whole(option)]
    load = costs.background_ms(apart) if apart else np.zeros(costs.world_size)
    for option in placed:
        if lives_whole(option):
            np.add.at(load, [shard.rank for shard in option.shards], shard_ms(option, costs))
    return load


def _put_cluster(cluster: Cluster, rank: int, costs: PlanCosts, ledger: Ledger) -> None:
    if np.any(cluster.need > ledger.free[rank]):
        raise cluster.no_room(ledger, [rank])
    for option in cluster.options:
        ledger.put(option, [rank] * option.num_shards, shard_ms(option, costs))


def _put_on_roomy_ranks(option: ShardingOption, costs: PlanCosts, ledger: Ledger) -> None:
    """Puts each shard on the least loaded rank with room for it, a rank of its own if there is one."""
    trial = ledger.copy()
    ranks: list[int] = []
    for shard, ms in zip(option.shards, shard_ms(option, costs), strict=True):
        fits = np.all(need_of(shard) <= trial.free, axis=1)
        if not fits.any():
            raise trial.no_room(option, shard, range(len(fits)))
        apart = fits & ~np.isin(np.arange(len(fits)), ranks)
        ranks.append(int(np.where(apart if apart.any() else fits, trial.load_ms, np.inf).argmin()))
        trial.free[ranks[-1]] -= need_of(shard)
        trial.load_ms[ranks[-1]] += ms
    ledger.put(option, ranks, shard_ms(option, costs))


def _place_clusters(
    clusters: Sequence[Cluster], specs: Sequence[ShardSpec], costs: PlanCosts, ledger: Ledger
) -> tuple[int, ...]:
    """Gives each cluster the rank that it gets when clusters and free shards are placed greedily together.

    Returns:
        The ranks that the free shards got, which fit.

    Raises:
        PlannerError: no placement fits.
    """
    for cluster in clusters:
        if not np.any(np.all(cluster.need <= ledger.free, axis=1)):
            raise cluster.no_room(ledger, range(len(ledger.free)))
    whole = [
        ShardSpec(
            rows=1,
            dim=1,
            pooling_factor=0.0,
            name=" with ".join(c.names),
            hbm_bytes=int(c.need[0]),
            ddr_bytes=int(c.need[1]),
        )
        for c in clusters
    ]
    alone = costs.single_ms(specs)
    loads = [sum(sum(shard_ms(option, costs)) for option in cluster.options) for cluster in clusters]
    task = costs.task([*whole, *specs], ledger.load_ms, ledger.room)
    try:
        ranks = place_greedily(task, [*loads, *(alone[spec] for spec in specs)])
    except InfeasiblePlacementError as error:
        raise PlannerError(f"no placement fits: {error}", PlannerErrorType.PARTITION) from error
    for cluster, rank in zip(clusters, ranks, strict=False):
        _put_cluster(cluster, rank, costs, ledger)
    return ranks[len(clusters) :]

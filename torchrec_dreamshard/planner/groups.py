"""Options whose places depend on each other: pins, tables kept together, towers, and types bound to hosts.

A *cluster* shares one rank: a pinned table, or a group of tables that the user keeps together. A *unit* shares one
host: the tables of an embedding tower (``ShardingOption.dependency``, whose sharded module asserts it), with the
clusters they belong to, or a single option whose type spans the devices of a host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from torchrec.distributed.planner.types import PartitionByType, PlannerError, PlannerErrorType, ShardingOption

from torchrec_dreamshard.measurement import FloatArray
from torchrec_dreamshard.planner.costs import lives_whole
from torchrec_dreamshard.planner.hosts import is_host_bound
from torchrec_dreamshard.planner.ledger import MEMORIES, Ledger, need_of


@dataclasses.dataclass(frozen=True, eq=False)
class Cluster:
    """Options all of whose shards share one rank."""

    options: tuple[ShardingOption, ...]
    rank: int | None
    """Where they are pinned to; None for any."""

    @property
    def need(self) -> FloatArray:
        """HBM, host and SSD bytes of all."""
        return np.asarray(sum((need_of(shard) for o in self.options for shard in o.shards), np.zeros(3)))

    @property
    def names(self) -> list[str]:
        """Full names of the tables, sorted."""
        return sorted(option.fqn.lstrip(".") for option in self.options)

    def no_room(self, ledger: Ledger, ranks: Sequence[int]) -> PlannerError:
        """The error for a cluster that fits on none of ``ranks``."""
        rank, memory, there, missing = ledger.shortage(self.need, ranks)
        bound = "kept together" if self.rank is None else f"pinned to rank {self.rank}"
        where = f"rank {rank}" if len(ranks) == 1 else f"rank {rank}, which has most room"
        remedy = "keep fewer tables together" if self.rank is None else "pin fewer tables there"
        return PlannerError(
            f"tables {self.names} are {bound}: they need {int(self.need[memory]):,} bytes of {MEMORIES[memory]}, "
            f"{there:,} are left on {where}; {missing:,} bytes are missing: {remedy}",
            PlannerErrorType.STRICT_CONSTRAINTS,
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Unit:
    """Options that share one host."""

    options: tuple[ShardingOption, ...]
    clusters: tuple[Cluster, ...] = ()
    """Those among the options that share one rank of the host."""


def clusters_of(
    options: Sequence[ShardingOption], pins: Mapping[str, int], together: Sequence[Sequence[str]], num_ranks: int
) -> list[Cluster]:
    """The clusters of a proposal, in the order of its options. Groups with a table in common are one.

    Raises:
        PlannerError: a table of a cluster is split by rows or replicated, or the pins of a cluster disagree.
    """
    group_of = {name: name for name in pins}
    for names in together:
        roots = {group_of.get(name, name) for name in names}
        merged = min(roots)
        group_of = {name: merged if root in roots else root for name, root in group_of.items()}
        group_of.update(dict.fromkeys(names, merged))
    members: dict[str, list[ShardingOption]] = {}
    for option in options:
        if option.name in group_of:
            members.setdefault(group_of[option.name], []).append(option)
    return [_cluster(group, pins, num_ranks) for group in members.values()]


def _cluster(group: Sequence[ShardingOption], pins: Mapping[str, int], num_ranks: int) -> Cluster:
    for option in group:
        if not lives_whole(option):
            raise PlannerError(
                f"table {option.fqn.lstrip('.')} is pinned or kept together with others, which a "
                f"{option.sharding_type} table cannot be: allow table_wise for it or drop the pin",
                PlannerErrorType.STRICT_CONSTRAINTS,
            )
    ranks = sorted({pins[option.name] for option in group if option.name in pins})
    if len(ranks) > 1 or any(not 0 <= rank < num_ranks for rank in ranks):
        raise PlannerError(
            f"tables {sorted(option.name for option in group)} are pinned to ranks {ranks}: expected one rank from 0 "
            f"to {num_ranks - 1}",
            PlannerErrorType.STRICT_CONSTRAINTS,
        )
    return Cluster(tuple(group), ranks[0] if ranks else None)


def units_of(options: Sequence[ShardingOption], clusters: Sequence[Cluster], hosts: Sequence[range]) -> list[Unit]:
    """The units of a proposal, in the order of its options; uniform options have no place of their own."""
    placed = [option for option in options if option.partition_by != PartitionByType.UNIFORM.value]
    parent: dict[object, object] = {}

    def root(key: object) -> object:
        while parent.setdefault(key, key) != key:
            key = parent[key]
        return key

    def join(first: object, second: object) -> None:
        parent[root(first)] = root(second)

    bound = set()
    for option in placed:
        if is_host_bound(option, hosts) or (option.dependency and len(hosts) > 1):
            bound.add(id(option))
            if option.dependency:
                join(id(option), option.dependency)
    for cluster in clusters:
        if any(id(option) in bound for option in cluster.options):
            bound.update(map(id, cluster.options))
            for option in cluster.options[1:]:
                join(id(option), id(cluster.options[0]))
    members: dict[object, list[ShardingOption]] = {}
    for option in placed:
        if id(option) in bound:
            members.setdefault(root(id(option)), []).append(option)
    return [
        Unit(tuple(group), tuple(c for c in clusters if id(c.options[0]) in set(map(id, group))))
        for group in members.values()
    ]

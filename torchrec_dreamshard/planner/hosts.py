"""What must sit on the devices of one host: table-row-wise, table-column-wise and grid options, and towers.

TorchRec maps a table-row-wise shard to the device of the same index on the chosen host, a grid does so with one
host per column block, and table-column-wise shards may take any devices of one host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from torchrec.distributed.planner.types import (
    PartitionByType,
    PlannerError,
    PlannerErrorType,
    Shard,
    ShardingOption,
    Topology,
)
from torchrec.distributed.types import ShardingType

from torchrec_dreamshard.planner.costs import PlanCosts, lives_whole
from torchrec_dreamshard.planner.ledger import MEMORIES, Ledger, need_of

if TYPE_CHECKING:
    from torchrec_dreamshard.planner.groups import Unit

_HOST_BOUND = (PartitionByType.HOST.value, PartitionByType.MULTI_HOST.value)

Entry = tuple[ShardingOption, Shard, float]
"""A shard, its option and its predicted time."""


def host_ranks(topology: Topology) -> list[range]:
    """Ranks of each host (TorchRec's group of fast links)."""
    group = int(topology.intra_group_size)
    return [range(start, start + group) for start in range(0, int(topology.world_size), group)]


def is_host_bound(option: ShardingOption, hosts: Sequence[range]) -> bool:
    """Whether an option must sit on one host (a grid: on hosts, whole); on one host, column shards are free."""
    if option.sharding_type == ShardingType.TABLE_COLUMN_WISE.value:
        return len(hosts) > 1
    return option.partition_by in _HOST_BOUND


def shard_ms(option: ShardingOption, costs: PlanCosts) -> list[float]:
    """Predicted compute of each shard alone."""
    specs = costs.adapter.shard_specs(option, costs.world_size)
    single = costs.single_ms(specs)
    return [single[spec] for spec in specs]


def place_units(units: Sequence[Unit], costs: PlanCosts, ledger: Ledger, hosts: Sequence[range]) -> None:
    """Puts each unit on the host where its busiest device ends up least loaded, the heaviest units first.

    Where that runs out of memory, the largest come first, each on the fullest host that has room for it.

    Raises:
        PlannerError: a unit fits on no host (names its tables, the bytes needed and there).
    """
    # what spans several hosts, or has a pinned table, has the least choice
    rigid = [unit for unit in units if _is_grid(unit) or any(c.rank is not None for c in unit.clusters)]
    free = [unit for unit in units if unit not in rigid]
    start = ledger.copy()
    by_load = sorted(free, key=lambda unit: -sum(sum(shard_ms(option, costs)) for option in unit.options))
    by_size = sorted(free, key=lambda unit: -float(_need(unit).sum()))
    try:
        for unit in (*rigid, *by_load):
            _place_unit(unit, costs, ledger, hosts, tightly=False)
    except PlannerError:
        ledger.restore(start)
        for unit in (*rigid, *by_size):
            _place_unit(unit, costs, ledger, hosts, tightly=True)


def _need(unit: Unit) -> np.ndarray:
    return np.asarray(sum((need_of(shard) for option in unit.options for shard in option.shards), np.zeros(3)))


def _is_grid(unit: Unit) -> bool:
    return any(option.partition_by == PartitionByType.MULTI_HOST.value for option in unit.options)


def _place_unit(unit: Unit, costs: PlanCosts, ledger: Ledger, hosts: Sequence[range], *, tightly: bool) -> None:
    if _is_grid(unit):
        for option in unit.options:
            times = shard_ms(option, costs)
            ledger.put(option, _grid_ranks(option, times, ledger, hosts), times)
        return
    times_of = {id(option): shard_ms(option, costs) for option in unit.options}
    best: tuple[float, float, list[list[int]]] | None = None
    pinned = {cluster.rank for cluster in unit.clusters if cluster.rank is not None}
    for host in hosts:
        if not pinned <= set(host):
            continue
        # an even load if possible; where that finds no room, the largest shards first
        trial = None
        for by_size in (False, True):
            trial = trial or _ranks_on_host(unit, times_of, ledger, host, by_size=by_size)
        if trial is None:
            continue
        ranks, load = trial
        room = float(ledger.free[list(host)].sum()) if tightly else 0.0
        if best is None or (room, load) < best[:2]:
            best = room, load, ranks
    if best is None:
        raise _no_host(unit, ledger, hosts, pinned)
    for option, chosen in zip(unit.options, best[2], strict=True):
        ledger.put(option, chosen, times_of[id(option)])


def _ranks_on_host(
    unit: Unit, times_of: dict[int, list[float]], ledger: Ledger, host: range, *, by_size: bool
) -> tuple[list[list[int]], float] | None:
    """Ranks of each option's shards on one host, and the load of its busiest device; None if there is no room."""
    free, load = ledger.free[list(host)].copy(), ledger.load_ms[list(host)].copy()
    chosen: dict[int, int] = {}  # by shard

    def put(entries: Sequence[Entry], local: int) -> bool:
        for _, shard, ms in entries:
            free[local] -= need_of(shard)
            load[local] += ms
            chosen[id(shard)] = host[local]
        return bool(np.all(free[local] >= 0))

    clustered = {id(option) for cluster in unit.clusters for option in cluster.options}
    movable: list[list[Entry]] = []
    fixed: list[tuple[list[Entry], int]] = []
    for cluster in unit.clusters:
        entries = [entry for option in cluster.options for entry in _entries(option, times_of)]
        if cluster.rank is None:
            movable.append(entries)
        else:
            fixed.append((entries, cluster.rank - host[0]))
    for option in unit.options:
        if id(option) in clustered:
            continue
        if lives_whole(option):
            movable.extend([entry] for entry in _entries(option, times_of))
        elif option.num_shards > len(host):
            return None
        else:
            fixed.extend(([entry], local) for local, entry in enumerate(_entries(option, times_of)))
    if not all(put(entries, local) for entries, local in fixed):
        return None

    def weight(entries: Sequence[Entry]) -> float:
        return -sum(float(need_of(shard).sum()) if by_size else ms for _, shard, ms in entries)

    siblings: dict[int, set[int]] = {}
    for entries in sorted(movable, key=weight):
        need = sum((need_of(shard) for _, shard, _ in entries), np.zeros(3))
        fits = np.all(need <= free, axis=1)
        if not fits.any():
            return None
        taken = siblings.setdefault(id(entries[0][0]), set())
        apart = fits & ~np.isin(np.arange(len(host)), list(taken))
        local = int(np.where(apart if apart.any() else fits, load, np.inf).argmin())
        taken.add(local)
        put(entries, local)
    return [[chosen[id(shard)] for shard in option.shards] for option in unit.options], float(load.max())


def _entries(option: ShardingOption, times_of: dict[int, list[float]]) -> list[Entry]:
    return [(option, shard, ms) for shard, ms in zip(option.shards, times_of[id(option)], strict=True)]


def _no_host(unit: Unit, ledger: Ledger, hosts: Sequence[range], pinned: set[int]) -> PlannerError:
    if len(unit.options) == 1:
        option = unit.options[0]
        largest = max(option.shards, key=lambda shard: float(need_of(shard).sum()))
        if not any(ledger.fits(largest, rank) for rank in range(len(ledger.free))):
            return ledger.no_room(option, largest, range(len(ledger.free)))
    names = sorted(option.fqn.lstrip(".") for option in unit.options)
    if len({rank // len(hosts[0]) for rank in pinned}) > 1:
        return PlannerError(
            f"tables {names} must share one host, but are pinned to ranks {sorted(pinned)} of several: pin them to "
            f"ranks of one host ({len(hosts[0])} ranks each)",
            PlannerErrorType.STRICT_CONSTRAINTS,
        )
    need = _need(unit)
    free = np.stack([ledger.free[list(host)].sum(axis=0) for host in hosts])
    lacking = np.maximum(need - free, 0)
    best = int(lacking.sum(axis=1).argmin())
    memory = int(lacking[best].argmax() if lacking[best].any() else need.argmax())
    why = "a tower" if len(names) > 1 else unit.options[0].sharding_type
    return PlannerError(
        f"tables {names} must share one host ({why}) and fit on none of {len(hosts)}: they need {int(need[memory]):,} "
        f"bytes of {MEMORIES[memory]}, {int(max(free[best, memory], 0)):,} are left on the host with most room, "
        f"{int(max(free[best, memory], 0)) // len(hosts[0]):,} per device: split the tower, allow table_row_wise for "
        "its tables, or use devices with more memory",
        PlannerErrorType.PARTITION,
    )


def _grid_ranks(option: ShardingOption, times: Sequence[float], ledger: Ledger, hosts: Sequence[range]) -> list[int]:
    ranks: list[int] = []
    width = len(hosts[0])
    used: set[int] = set()
    extra = np.zeros_like(ledger.free)  # of earlier blocks, which share hosts when blocks outnumber them
    for start in range(0, option.num_shards, width):
        shards, cost = option.shards[start : start + width], times[start : start + width]
        needs = np.stack([need_of(shard) for shard in shards])
        choices = []
        for index, host in enumerate(hosts):
            members = list(host)[: len(shards)]
            if np.all(needs + extra[members] <= ledger.free[members]):
                load = max(ledger.load_ms[rank] + ms for rank, ms in zip(members, cost, strict=True))
                choices.append((index in used, load, index))
        if not choices:
            largest = max(shards, key=lambda shard: float(need_of(shard).sum()))
            raise ledger.no_room(option, largest, range(len(ledger.free)))
        index = min(choices)[2]
        used.add(index)
        members = list(hosts[index])[: len(shards)]
        extra[members] += needs
        ranks.extend(members)
    return ranks

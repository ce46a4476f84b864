"""Options bound to the devices of one host: table-row-wise, table-column-wise and grid.

TorchRec maps a table-row-wise shard to the device of the same index on the chosen host, a grid does so with one
host per column block, and table-column-wise shards may take any devices of one host.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torchrec.distributed.planner.types import PartitionByType, ShardingOption, Topology
from torchrec.distributed.types import ShardingType

from torchrec_dreamshard.planner.costs import PlanCosts
from torchrec_dreamshard.planner.ledger import Ledger, need_of

_HOST_BOUND = (PartitionByType.HOST.value, PartitionByType.MULTI_HOST.value)


def host_ranks(topology: Topology) -> list[range]:
    """Ranks of each host (TorchRec's group of fast links)."""
    group = int(topology.intra_group_size)
    return [range(start, start + group) for start in range(0, int(topology.world_size), group)]


def is_host_bound(option: ShardingOption, hosts: Sequence[range]) -> bool:
    """Whether the choice of a host is all that is left; on one host, column shards are free."""
    if option.sharding_type == ShardingType.TABLE_COLUMN_WISE.value:
        return len(hosts) > 1
    return option.partition_by in _HOST_BOUND


def shard_ms(option: ShardingOption, costs: PlanCosts) -> list[float]:
    """Predicted compute of each shard alone."""
    specs = costs.adapter.shard_specs(option, costs.world_size)
    single = costs.single_ms(specs)
    return [single[spec] for spec in specs]


def place_on_hosts(option: ShardingOption, costs: PlanCosts, ledger: Ledger, hosts: Sequence[range]) -> None:
    """Puts an option on the host (for a grid: hosts) where its busiest device ends up least loaded.

    Raises:
        PlannerError: it fits on no host (names the table, the bytes needed and there).
    """
    times = shard_ms(option, costs)
    if option.sharding_type == ShardingType.TABLE_COLUMN_WISE.value:
        ranks = _columns_on_host(option, times, ledger, hosts)
    else:
        ranks = _rows_on_hosts(option, times, ledger, hosts)
    ledger.put(option, ranks, times)


def _rows_on_hosts(option: ShardingOption, times: Sequence[float], ledger: Ledger, hosts: Sequence[range]) -> list[int]:
    ranks: list[int] = []
    width = len(hosts[0])
    used: set[int] = set()
    extra = np.zeros_like(ledger.free)  # of a grid's earlier blocks, which may share a host when blocks outnumber hosts
    for start in range(0, option.num_shards, width):
        shards, cost = option.shards[start : start + width], times[start : start + width]
        choices = []
        for index, host in enumerate(hosts):
            members = list(host)[: len(shards)]
            needs = np.stack([need_of(shard) for shard in shards])
            if np.all(needs + extra[members] <= ledger.free[members]):
                load = max(ledger.load_ms[rank] + ms for rank, ms in zip(members, cost, strict=True))
                choices.append((index in used, load, index))
        if not choices:
            largest = max(shards, key=lambda shard: float(need_of(shard).sum()))
            raise ledger.no_room(option, largest, range(len(ledger.free)))
        index = min(choices)[2]
        used.add(index)
        members = list(hosts[index])[: len(shards)]
        extra[members] += np.stack([need_of(shard) for shard in shards])
        ranks.extend(members)
    return ranks


def _columns_on_host(
    option: ShardingOption, times: Sequence[float], ledger: Ledger, hosts: Sequence[range]
) -> list[int]:
    best: tuple[float, int] | None = None
    layouts: list[list[int]] = []
    for index, host in enumerate(hosts):
        free, load = ledger.free[list(host)].copy(), ledger.load_ms[list(host)].copy()
        ranks: list[int] = []
        for shard, cost in zip(option.shards, times, strict=True):
            need = need_of(shard)
            fits = np.all(need <= free, axis=1)
            if not fits.any():
                break
            local = int(np.where(fits, load, np.inf).argmin())
            free[local] -= need
            load[local] += cost
            ranks.append(host[local])
        layouts.append(ranks)
        if len(ranks) == option.num_shards and (best is None or float(load.max()) < best[0]):
            best = (float(load.max()), index)
    if best is None:
        largest = max(option.shards, key=lambda shard: float(need_of(shard).sum()))
        raise ledger.no_room(option, largest, range(len(ledger.free)))
    return layouts[best[1]]

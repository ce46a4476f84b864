"""Whether memory is short: what the search space must offer depends on it."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence

from torchrec.distributed.planner.types import ShardingOption, Topology

from torchrec_dreamshard.planner.tables import TableFacts

PACKED_SHARE = 0.75
"""Share of a device's memory that tables are sure to find after reservations and with gaps between them."""

TOWERS = ("EmbeddingTower", "EmbeddingTowerCollection")
"""Modules whose tables share a host. Few sharding types are left to them, so all are offered."""


def _memory(topology: Topology) -> str:
    return "ddr" if topology.compute_device == "cpu" else "hbm"


def weights_fit(facts: Mapping[str, TableFacts], topology: Topology) -> bool:
    """Whether all weights fit on all devices together: otherwise no split helps, and host memory must."""
    rooms = sum(getattr(device.storage, _memory(topology)) for device in topology.devices)
    return bool(sum(table.num_bytes for table in facts.values()) <= rooms)


def is_short(options: Sequence[ShardingOption], topology: Topology, *, with_caches: bool = False) -> bool:
    """Whether memory may be too small for these options: the finest of each table do not pack easily.

    Options in unified memory count with their caches, or not at all. Tables of a tower share a host, evenly.
    """
    memory = _memory(topology)
    finest: dict[tuple[str, str], list[int]] = {}
    towers: set[str] = set()
    for option in (o for o in options if with_caches or "uvm" not in o.compute_kernel):
        sizes = [int(getattr(shard.storage, memory, 0)) for shard in option.shards]
        key = (option.path, option.name)
        finest[key] = min(finest.get(key, sizes), sizes, key=max)
        if option.module_type_key.rsplit(".", 1)[-1] in TOWERS:
            towers.add(option.path)
    pieces = [size for (path, _), sizes in finest.items() if path not in towers for size in sizes]
    devices = topology.local_world_size
    for tower in sorted(towers):
        whole = sum(sum(sizes) for (path, _), sizes in finest.items() if path == tower)
        pieces.extend([math.ceil(whole / devices)] * devices)
    rooms = [-PACKED_SHARE * getattr(device.storage, memory) for device in topology.devices]
    heapq.heapify(rooms)
    for size in sorted(pieces, reverse=True):
        if -rooms[0] < size:
            return True
        heapq.heapreplace(rooms, rooms[0] + size)
    return False

"""What is known of each table before any option is built: enough to decide which options can pay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints, Topology
from torchrec.distributed.types import ModuleSharder, ShardingType
from torchrec.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection

from torchrec_dreamshard.planner.adapter import shardable_modules, table_configs

LARGE_SHARE = 0.5
"""A table larger than this share of a device leaves little room for others: ways to split it are offered."""
SHORT_SHARE = 0.8
"""Above this share of all HBM, unified-memory kernels are offered."""
GAP_SHARE = 0.05
"""A table of this share of a device may leave a gap too small for others: it is split by rows where memory is short."""
HEAVY_SHARE = 0.25
"""A table with more than this share of a device's mean load is worth splitting."""
MAX_REPLICATED_BYTES = 4 * 1024**2
"""Largest table worth replicating: beyond, summing its dense gradient costs more than any exchange."""
MAX_UNIFORM_SHARDS = 8_192
"""Shards of row-wise and of data-parallel options built for unconstrained tables; the hungriest come first."""


@dataclass(frozen=True, kw_only=True)
class TableFacts:
    """One table, in the light of all others and of the topology."""

    rows: int
    dim: int
    num_features: int
    num_bytes: int
    """Bytes of the weights."""
    load: float
    """Values read per sample: lookups times columns."""
    min_partition: int | None
    fits_whole: bool
    """Whether it fits on the largest device."""
    is_heavy: bool
    """Whether column splits may pay."""
    is_dominant: bool
    """Whether by itself it outweighs a device's mean load, or fills most of a device."""
    wants_rows: bool
    wants_replicas: bool
    wants_host_memory: bool
    """Unified memory, with a cache in HBM."""


def describe_tables(
    module: nn.Module,
    sharders: Sequence[ModuleSharder[nn.Module]],
    constraints: Mapping[str, ParameterConstraints] | None,
    topology: Topology,
    batch_size: int,
) -> dict[str, TableFacts]:
    """Facts of every shardable table by name (of the larger one where two modules share a name).

    Args:
        module: the model.
        sharders: the sharders in use.
        constraints: the user's, for pooling factors and ``min_partition``.
        topology: the devices.
        batch_size: samples per rank.
    """
    raw: dict[str, tuple[int, int, int, int, float]] = {}
    towers: dict[str, list[str]] = {}
    for path, child, sharder in shardable_modules(module, sharders):
        configs = table_configs(child)
        if isinstance(child, (EmbeddingTower, EmbeddingTowerCollection)):
            towers[path] = list(configs)
        for name, tensor in sharder.shardable_parameters(child).items():
            rows, dim = int(tensor.shape[0]), int(tensor.shape[1])
            constraint = (constraints or {}).get(name)
            features = len(configs[name].feature_names) if name in configs else 1
            factors = list(constraint.pooling_factors) if constraint is not None else [1.0]
            lookups = sum(factors) * (features if len(factors) == 1 else 1)
            facts = (rows, dim, features, rows * dim * tensor.element_size(), lookups * dim)
            raw[name] = max(raw.get(name, facts), facts, key=lambda values: values[3])
    on_host = topology.compute_device == "cpu"
    room = [device.storage.ddr if on_host else device.storage.hbm for device in topology.devices]
    world = topology.world_size
    total_bytes, total_load = sum(t[3] for t in raw.values()), sum(t[4] for t in raw.values())
    mean_load = max(total_load / world, 1e-9)
    largest = max(room)
    quota = max(1, MAX_UNIFORM_SHARDS // world)
    short = total_bytes > SHORT_SHARE * sum(room)

    host_room = max(sum(room[i : i + topology.intra_group_size]) for i in range(0, world, topology.intra_group_size))
    crowded = {n for names in towers.values() if sum(raw[n][3] for n in names) > SHORT_SHARE * host_room for n in names}
    # constrained to types that may leave it whole on one device, which cannot hold it
    confined = {
        n
        for n, t in raw.items()
        if t[3] > SHORT_SHARE * largest
        and constraints
        and n in constraints
        and constraints[n].sharding_types
        and ShardingType.ROW_WISE.value not in constraints[n].sharding_types
    }

    def hungriest(names: list[str], key: int) -> set[str]:
        return set(sorted(names, key=lambda name: (-raw[name][key], name))[:quota])

    big = [n for n, t in raw.items() if t[3] > LARGE_SHARE * largest]
    hot = [n for n, t in raw.items() if t[4] > mean_load]
    tiny = [n for n, t in raw.items() if t[3] <= MAX_REPLICATED_BYTES and t[0] * t[1] <= batch_size * t[4]]
    by_rows = hungriest(big, 3) | hungriest(hot, 4) | {n for n in big if raw[n][3] > largest}
    replicas = hungriest(tiny, 4) if world > 1 else set()
    return {
        name: TableFacts(
            rows=rows,
            dim=dim,
            num_features=features,
            num_bytes=num_bytes,
            load=load,
            min_partition=constraints[name].min_partition if constraints and name in constraints else None,
            fits_whole=num_bytes <= largest,
            is_heavy=world > 1 and (load > HEAVY_SHARE * mean_load or name in big),
            is_dominant=load > mean_load or name in big,
            wants_rows=world > 1 and name in by_rows,
            wants_replicas=name in replicas,
            wants_host_memory=not on_host
            and (short or name in crowded or name in confined or num_bytes > LARGE_SHARE * sum(room)),
        )
        for name, (rows, dim, features, num_bytes, load) in raw.items()
    }


def largest_tables(facts: Mapping[str, TableFacts], topology: Topology, share: float = GAP_SHARE) -> frozenset[str]:
    """Names of tables of more than a share of a device: large enough to leave gaps where memory is short.

    No more than their row-wise options stay within ``MAX_UNIFORM_SHARDS``.
    """
    on_host = topology.compute_device == "cpu"
    room = max(device.storage.ddr if on_host else device.storage.hbm for device in topology.devices)
    large = [name for name, table in facts.items() if table.num_bytes > share * room]
    large.sort(key=lambda name: (-facts[name].num_bytes, name))
    return frozenset(large[: max(1, MAX_UNIFORM_SHARDS // topology.world_size)])

"""How each table is sharded: one option per table, starting choices and what else a table could be.

A choice maps a table to one of its options. The start is the least work per table that fits; what does not fit is
relieved by splitting or by moving the coldest tables to host memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from torchrec.distributed.planner.types import ShardingOption, Topology
from torchrec.distributed.types import ShardingType

from torchrec_dreamshard.measurement import FloatArray
from torchrec_dreamshard.planner.costs import PlanCosts, lives_whole
from torchrec_dreamshard.planner.enumerator import option_order, variant_order
from torchrec_dreamshard.planner.ledger import need_of

TableKey = tuple[str, str]
"""Module path and table name."""
Choice = dict[TableKey, ShardingOption]

_FULL_SHARE = 0.95  # of all memory: above, no packing is likely to succeed
_COLUMN_TYPES = (ShardingType.COLUMN_WISE.value, ShardingType.TABLE_COLUMN_WISE.value)


def group_options(
    search_space: Iterable[ShardingOption], whole_only: Iterable[str] = ()
) -> dict[TableKey, list[ShardingOption]]:
    """Options of each table from the plainest on, tables in a stable order.

    Args:
        search_space: options of all tables in any order.
        whole_only: names of tables whose shards must sit together, so that uniform options and splits are out.
    """
    bound = set(whole_only)
    widest: dict[str, int] = {}
    space = sorted(search_space, key=option_order)
    for option in space:
        if not option.is_pooled and option.sharding_type in _COLUMN_TYPES:
            widest[option.path] = max(widest.get(option.path, 0), int(option.shards[0].size[1]))
    tables: dict[TableKey, list[ShardingOption]] = {}
    for option in space:
        variants = tables.setdefault((option.path, option.name), [])
        coupled = not option.is_pooled and option.sharding_type in _COLUMN_TYPES
        # column shards of one sequence collection must have one width
        if not coupled or int(option.shards[0].size[1]) == widest[option.path]:
            variants.append(option)
    for key, variants in tables.items():
        whole = [option for option in variants if lives_whole(option)]
        if key[1] in bound and whole:
            fewest = min(option.num_shards for option in whole)
            variants[:] = [option for option in whole if option.num_shards == fewest]
        variants.sort(key=variant_order)
    return tables


def capacities(topology: Topology) -> FloatArray:
    """HBM, host and SSD bytes of each device, ``D x 3``."""
    return np.array([(d.storage.hbm, d.storage.ddr, d.storage.ssd) for d in topology.devices], dtype=np.float64)


def total_need(option: ShardingOption) -> FloatArray:
    """Bytes of all shards of an option, by memory."""
    needs: FloatArray = np.stack([need_of(shard) for shard in option.shards])
    return np.asarray(needs.sum(axis=0))


def fits_alone(option: ShardingOption, capacity: FloatArray) -> bool:
    """Whether every shard of the option fits on some empty device."""
    rooms = np.unique(capacity, axis=0)
    return all(bool(np.any(np.all(need_of(shard) <= rooms, axis=1))) for shard in option.shards)


def total_ms(option: ShardingOption, costs: PlanCosts) -> float:
    """Predicted work of an option over all devices, each shard alone."""
    specs = costs.adapter.shard_specs(option, costs.world_size)
    single = costs.single_ms(specs)
    return sum(single[spec] for spec in specs)


def plainest(tables: Mapping[TableKey, Sequence[ShardingOption]]) -> Choice:
    """The first option of every table; for use before the devices are known."""
    return {key: variants[0] for key, variants in tables.items()}


def cheapest(tables: Mapping[TableKey, Sequence[ShardingOption]], capacity: FloatArray, costs: PlanCosts) -> Choice:
    """The option of least predicted work of every table among those that fit alone, relieved until all fit together.

    Where table-wise fits it is the least work by construction, so nothing is predicted for such tables.
    """
    choice: Choice = {}
    costs.warm_up(o for variants in tables.values() if _is_open(variants, capacity) for o in variants)
    for key, variants in tables.items():
        fitting = [option for option in variants if fits_alone(option, capacity)]
        # host memory is for what fits nowhere else: relieve() takes to it when HBM runs out
        fitting = [option for option in fitting if "uvm" not in option.compute_kernel] or fitting
        if not fitting:
            choice[key] = min(
                variants, key=lambda o: (max(float(need_of(s).sum()) for s in o.shards), variant_order(o))
            )
        elif len(fitting) == 1 or fitting[0].sharding_type == ShardingType.TABLE_WISE.value:
            choice[key] = fitting[0]
        else:
            choice[key] = min(fitting, key=lambda option: (total_ms(option, costs), variant_order(option)))
    return relieve(tables, choice, capacity.sum(axis=0) * _FULL_SHARE, costs)


def _is_open(variants: Sequence[ShardingOption], capacity: FloatArray) -> bool:
    """Whether a table's first choice depends on predictions."""
    return variants[0].sharding_type != ShardingType.TABLE_WISE.value or not fits_alone(variants[0], capacity)


def relieve(
    tables: Mapping[TableKey, Sequence[ShardingOption]], choice: Choice, room: FloatArray, costs: PlanCosts
) -> Choice:
    """Moves tables out of HBM, least predicted time per byte first, until all fit into ``room`` (three memories)."""
    choice = dict(choice)
    used = np.sum([total_need(option) for option in choice.values()], axis=0)
    if used[0] > room[0]:
        costs.warm_up(option for variants in tables.values() for option in variants)
    while used[0] > room[0]:
        swaps: list[tuple[float, TableKey, ShardingOption]] = []
        for key, variants in tables.items():
            now = total_need(choice[key])
            for option in variants:
                saved = now[0] - total_need(option)[0]
                if saved > 0:
                    slower = total_ms(option, costs) - total_ms(choice[key], costs)
                    swaps.append((slower / saved, key, option))
        swaps.sort(key=lambda swap: (swap[0], swap[1], variant_order(swap[2])))
        moved: set[TableKey] = set()
        for _, key, option in swaps:
            if used[0] <= room[0]:
                break
            after = used - total_need(choice[key]) + total_need(option)
            if key not in moved and after[1] <= max(room[1], used[1]) and after[2] <= max(room[2], used[2]):
                choice[key], used = option, after
                moved.add(key)
        if not moved:
            break
    return choice


def finer(
    tables: Mapping[TableKey, Sequence[ShardingOption]], choice: Choice, capacity: FloatArray, count: int
) -> Choice | None:
    """The choice with its ``count`` largest splittable shards split further; None when nothing can be.

    The way out when a choice fits in sum but cannot be packed.
    """
    candidates = []
    for key, option in choice.items():
        largest = _largest(option)
        smaller = [
            other
            for other in tables[key]
            if np.all(_largest(other) <= largest)
            and _largest(other).sum() < largest.sum()
            and fits_alone(other, capacity)
        ]
        if smaller:  # the mildest split that helps
            mildest = max(smaller, key=lambda other: (float(_largest(other).sum()), variant_order(other)))
            candidates.append((-float(largest.sum()), key, mildest))
    if not candidates:
        return None
    candidates.sort(key=lambda entry: entry[:2])
    return {**choice, **{key: option for _, key, option in candidates[:count]}}


def _largest(option: ShardingOption) -> FloatArray:
    """Bytes of an option's largest shard, by memory."""
    needs: FloatArray = np.stack([need_of(shard) for shard in option.shards])
    return np.asarray(needs.max(axis=0))

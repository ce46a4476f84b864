"""How each table is sharded: one option per table, starting choices and what else a table could be.

A choice maps a table to one of its options. The start is the least work per table that fits; what does not fit is
relieved by splitting or by moving the coldest tables to host memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from torchrec.distributed.planner.types import PartitionByType, ShardingOption, Topology
from torchrec.distributed.types import ShardingType

from torchrec_dreamshard.measurement import FloatArray
from torchrec_dreamshard.planner.costs import PlanCosts, lives_whole
from torchrec_dreamshard.planner.enumerator import option_order, variant_order
from torchrec_dreamshard.planner.ledger import need_of

TableKey = tuple[str, str]
"""Module path and table name."""
Choice = dict[TableKey, ShardingOption]

FULL_SHARE = 0.95
"""Share of all memory above which no packing is likely to succeed."""
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


def shared_rooms(choice: Choice, topology: Topology) -> list[tuple[list[TableKey], FloatArray]]:
    """Tables that share memory, and how much: each tower that of the roomiest host, then all tables that of all."""
    capacity = capacities(topology)
    hosts = by_host(capacity, topology).sum(axis=1)
    towers: dict[str, list[TableKey]] = {}
    for key, option in choice.items():
        if option.dependency:
            towers.setdefault(option.dependency, []).append(key)
    rooms = [(keys, hosts[hosts[:, 0].argmax()]) for _, keys in sorted(towers.items())]
    return [*rooms, (list(choice), capacity.sum(axis=0))]


def by_host(values: FloatArray, topology: Topology) -> FloatArray:
    """``D x 3`` values as ``hosts x devices x 3``; TorchRec leaves out the devices of a host that is not whole."""
    width = int(topology.intra_group_size)
    return values[: len(values) // width * width].reshape(-1, width, values.shape[1])


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
    """The option of least predicted work of every table among those that fit alone.

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
    return choice


def _is_open(variants: Sequence[ShardingOption], capacity: FloatArray) -> bool:
    """Whether a table's first choice depends on predictions."""
    return variants[0].sharding_type != ShardingType.TABLE_WISE.value or not fits_alone(variants[0], capacity)


def relieve(
    tables: Mapping[TableKey, Sequence[ShardingOption]],
    choice: Choice,
    room: FloatArray,
    capacity: FloatArray,
    costs: PlanCosts,
) -> Choice:
    """Moves tables out of HBM until all fit.

    First those that lose least predicted time per byte; where host memory is too short for that, those that free most.

    Args:
        tables: options of the tables that share the memory.
        choice: an option of each.
        room: bytes of the three memories that they share.
        capacity: of the devices, ``D x 3``: what fits on none of them is no way out.
        costs: predicts.
    """
    needs = {id(option): total_need(option) for variants in tables.values() for option in variants}
    if sum(needs[id(option)][0] for option in choice.values()) <= room[0]:
        return dict(choice)
    costs.warm_up(option for variants in tables.values() for option in variants)
    swaps: list[tuple[float, float, TableKey, ShardingOption]] = []
    for key, variants in tables.items():
        for option in variants:
            saved = float(needs[id(choice[key])][0] - needs[id(option)][0])
            # a coarser split may need less in all, but is harder to pack
            finer_or_equal = largest_shard(option)[0] <= largest_shard(choice[key])[0]
            if saved > 0 and finer_or_equal and fits_alone(option, capacity):
                slower = total_ms(option, costs) - total_ms(choice[key], costs)
                swaps.append((slower / saved, saved, key, option))
    cheap = sorted(swaps, key=lambda swap: (swap[0], swap[2], variant_order(swap[3])))
    large = sorted(swaps, key=lambda swap: (-swap[1], swap[2], variant_order(swap[3])))
    return _swapped([swap[2:] for swap in cheap], choice, needs, room, large_next=[swap[2:] for swap in large])


def _swapped(
    swaps: Sequence[tuple[TableKey, ShardingOption]],
    choice: Choice,
    needs: Mapping[int, FloatArray],
    room: FloatArray,
    large_next: Sequence[tuple[TableKey, ShardingOption]] = (),
) -> Choice:
    """The choice with swaps made in order until HBM suffices, one or more for a table, each freeing more of it."""
    out = dict(choice)
    used: FloatArray = np.sum([needs[id(option)] for option in out.values()], axis=0)
    for key, option in swaps:
        if used[0] <= room[0]:
            break
        after = used - needs[id(out[key])] + needs[id(option)]
        if after[0] < used[0] and np.all(after[1:] <= np.maximum(room[1:], used[1:])):
            out[key], used = option, after
    if used[0] <= room[0] or not large_next:
        return out
    other = _swapped(large_next, choice, needs, room)
    return min(out, other, key=lambda c: float(sum(needs[id(option)][0] for option in c.values())))


def packable(tables: Mapping[TableKey, Sequence[ShardingOption]], choice: Choice, topology: Topology) -> Choice:
    """The choice with its largest shards split until it packs by a simple rule; as it is where that is no way."""
    capacity, count = capacities(topology), 1
    split: Choice | None = choice
    while split is not None and not packs(split, topology):
        split, count = finer(tables, split, capacity, count), 2 * count
    return choice if split is None else split


def packs(choice: Choice, topology: Topology) -> bool:
    """Whether a choice fits when large shards come first and each goes where most room is left.

    True is certain but for towers, whose tables this spreads over hosts; False is not: a search may find a way.
    """
    free, width = capacities(topology), int(topology.intra_group_size)
    scale = np.maximum(free.mean(axis=0), 1.0)
    whole: list[FloatArray] = []
    spread: list[FloatArray] = []
    for option in choice.values():
        needs = [need_of(shard) for shard in option.shards]
        if lives_whole(option):
            whole.extend(needs)
        elif option.partition_by == PartitionByType.UNIFORM.value and len(needs) == len(free):
            free -= np.stack(needs)
        else:
            spread.extend(np.stack(needs[start : start + width]) for start in range(0, len(needs), width))
    for block in sorted(spread, key=lambda rows: -float((rows / scale).sum())):
        room = by_host(free / scale, topology).min(axis=(1, 2))
        start = int(room.argmax()) * width
        free[start : start + len(block)] -= block
    for need in sorted(whole, key=lambda need: -float((need / scale).sum())):
        left = free - need
        fits = np.all(left >= 0, axis=1)
        if not fits.any():
            return False
        device = int(np.where(fits, (left / scale).sum(axis=1), -np.inf).argmax())
        free[device] = left[device]
    return bool(np.all(free >= 0))


def finer(
    tables: Mapping[TableKey, Sequence[ShardingOption]], choice: Choice, capacity: FloatArray, count: int
) -> Choice | None:
    """The choice with its ``count`` largest splittable shards split further; None when nothing can be.

    The way out when a choice fits in sum but cannot be packed.
    """
    candidates = []
    for key, option in choice.items():
        largest = largest_shard(option)
        smaller = [
            other
            for other in tables[key]
            if np.all(largest_shard(other) <= largest)
            and largest_shard(other).sum() < largest.sum()
            and fits_alone(other, capacity)
        ]
        if smaller:  # the mildest split that helps
            mildest = max(smaller, key=lambda other: (float(largest_shard(other).sum()), variant_order(other)))
            candidates.append((-float(largest.sum()), key, mildest))
    if not candidates:
        return None
    candidates.sort(key=lambda entry: entry[:2])
    return {**choice, **{key: option for _, key, option in candidates[:count]}}


def largest_shard(option: ShardingOption) -> FloatArray:
    """Bytes of an option's largest shard, by memory."""
    needs: FloatArray = np.stack([need_of(shard) for shard in option.shards])
    return np.asarray(needs.max(axis=0))

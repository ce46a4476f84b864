"""The search space, pruned before it is built.

TorchRec's enumerator crosses every sharding type with every kernel for every table, which is most of its planning
time at scale. Here each unconstrained table gets table-wise, and the rest only where it can pay: column splits for
tables that weigh on a device, row-wise kinds for those that dominate or do not fit, data-parallel for the hot and
tiny, unified memory where HBM is short. Constrained tables get exactly what the user allows. The order of the
options is the same in every process.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

from torch import nn
from torchrec.distributed.planner.constants import POOLING_FACTOR
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    PartitionByType,
    PlannerError,
    PlannerErrorType,
    Shard,
    ShardingOption,
    Topology,
)
from torchrec.distributed.sharding_plan import calculate_shard_sizes_and_offsets
from torchrec.distributed.types import ModuleSharder, ShardingType

from torchrec_dreamshard.planner.adapter import shardable_modules
from torchrec_dreamshard.planner.optimizers import state_bytes
from torchrec_dreamshard.planner.room import TOWERS, is_short, weights_fit
from torchrec_dreamshard.planner.tables import TableFacts, describe_tables, largest_tables

TYPE_ORDER: tuple[str, ...] = (
    ShardingType.TABLE_WISE.value,
    ShardingType.COLUMN_WISE.value,
    ShardingType.TABLE_COLUMN_WISE.value,
    ShardingType.TABLE_ROW_WISE.value,
    ShardingType.ROW_WISE.value,
    ShardingType.GRID_SHARD.value,
    ShardingType.DATA_PARALLEL.value,
)
"""Sharding types from the plainest on; the order of options and of tie-breaks."""

KERNEL_ORDER: tuple[str, ...] = ("fused", "dense", "quant", "fused_uvm_caching", "quant_uvm_caching")
"""Kernels from the fastest on; others follow by name."""

MIN_COLUMNS = 16
"""Columns below which an unconstrained table is not split: narrower rows waste the memory's lines."""

_SEQUENCE_SUFFIX = "EmbeddingCollection"
_BAG_COLLECTION = "torchrec.modules.embedding_modules.EmbeddingBagCollection"
_ROW_TYPES = frozenset({ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value})
_COLUMN_TYPES = frozenset({ShardingType.COLUMN_WISE.value, ShardingType.TABLE_COLUMN_WISE.value})


_PARTITIONS = {
    ShardingType.TABLE_ROW_WISE.value: PartitionByType.HOST.value,
    ShardingType.TABLE_COLUMN_WISE.value: PartitionByType.HOST.value,
    ShardingType.ROW_WISE.value: PartitionByType.UNIFORM.value,
    ShardingType.DATA_PARALLEL.value: PartitionByType.UNIFORM.value,
    ShardingType.GRID_SHARD.value: PartitionByType.MULTI_HOST.value,
}


def partition_by_type(sharding_type: str) -> str:
    """How TorchRec lays out shards of a type, as ``ShardingOption.partition_by`` names it."""
    return str(_PARTITIONS.get(sharding_type, PartitionByType.DEVICE.value))


def option_order(option: ShardingOption) -> tuple[Any, ...]:
    """Sort key of options that does not depend on the process: table, then type, kernel and number of shards."""
    return (option.path, option.name, *variant_order(option))


def variant_order(option: ShardingOption) -> tuple[Any, ...]:
    """Sort key among the options of one table, from the plainest on."""
    kind, kernel = option.sharding_type, option.compute_kernel
    return (
        KERNEL_ORDER.index(kernel) if kernel in KERNEL_ORDER else len(KERNEL_ORDER),
        kernel,
        TYPE_ORDER.index(kind) if kind in TYPE_ORDER else len(TYPE_ORDER),
        kind,
        option.num_shards,
    )


class DreamShardEnumerator(EmbeddingEnumerator):  # type: ignore[misc]
    """TorchRec's enumerator with a pruned search space, a stable order and FBGEMM's real optimizer state.

    Args:
        topology: the devices.
        batch_size: per rank.
        constraints: by table name.
        estimator: as TorchRec's.
    """

    def __init__(
        self,
        topology: Topology,
        batch_size: int,
        constraints: dict[str, ParameterConstraints] | None = None,
        estimator: Any = None,
    ) -> None:
        super().__init__(topology, batch_size, constraints, estimator, use_exact_enumerate_order=True)
        self._topology = topology
        self._facts: dict[str, TableFacts] = {}
        self._short_of_room: frozenset[str] = frozenset()
        self._corrects_storage = estimator is None

    def enumerate(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> list[ShardingOption]:
        """Options of every shardable table in a stable order, with estimates.

        Raises:
            PlannerError: a table is left without any option (names it and the remedy).
        """
        self._check_sharders(module, sharders)
        self._facts = describe_tables(module, sharders, self._constraints, self._topology, self._batch_size)
        self._short_of_room = frozenset()
        try:
            options = super().enumerate(module, sharders)
        except (RuntimeError, ValueError) as error:
            raise PlannerError(self._explain(error), PlannerErrorType.STRICT_CONSTRAINTS) from error
        options = self._vary_columns(self._couple_sequence_widths(options))
        if self._world_size > 1 and is_short(options, self._topology):
            self._short_of_room = largest_tables(self._facts, self._topology)
            options.extend(self._row_variants(options))
            if weights_fit(self._facts, self._topology) and is_short(options, self._topology):
                # small tables count too: buffers of big batches may outweigh their weights
                self._short_of_room = largest_tables(self._facts, self._topology, share=0.0)
                options.extend(self._row_variants(options))
        if any(map(_is_cached, options)) and is_short(options, self._topology, with_caches=True):
            options.extend(self._uncached_variants(options))
        return sorted(options, key=option_order)

    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        """TorchRec's estimates, with the optimizer's state as FBGEMM keeps it."""
        for option in sharding_options:
            features = self._facts[option.name].num_features if option.name in self._facts else 1
            if option.input_lengths == [POOLING_FACTOR] and features > 1:
                option.input_lengths = [POOLING_FACTOR] * features
        self._estimate_distinct(sharding_options)
        if self._corrects_storage:
            for option in sharding_options:
                self._correct_state(option)

    def _estimate_distinct(self, options: list[ShardingOption]) -> None:
        """Estimates one of each option's equal shards: a shard's estimate depends on its own size alone."""
        thin = []
        for option in options:
            distinct = {tuple(shard.size): shard for shard in option.shards}
            thin.append((option, distinct, copy.copy(option)))
            thin[-1][2].shards = list(distinct.values())
        super().populate_estimates([twin for _, _, twin in thin])
        for option, distinct, twin in thin:
            option.is_weighted = twin.is_weighted  # estimators fill it in
            for shard in option.shards:
                estimated = distinct[tuple(shard.size)]
                shard.storage, shard.perf = copy.copy(estimated.storage), copy.copy(estimated.perf)

    def _correct_state(self, option: ShardingOption) -> None:
        fused = self._sharder_data_map[option.module_type_key].fused_params
        if option.sharding_type == ShardingType.DATA_PARALLEL.value or option.compute_kernel.startswith("quant"):
            return  # a dense optimizer keeps its state in the weights' precision, as TorchRec counts it
        classes = getattr(option.tensor, "_optimizer_classes", None)
        on_host = "uvm" in option.compute_kernel or self._compute_device == "cpu"
        values = option.tensor.element_size()
        for shard in option.shards:
            rows, dim = int(shard.size[0]), int(shard.size[1])
            counted = _torchrec_state_bytes(classes, rows, dim, int(option.tensor.shape[1]), values)
            missing = state_bytes(option, fused, rows, dim) - counted
            if missing > 0 and on_host:
                shard.storage.ddr += missing
            elif missing > 0:
                shard.storage.hbm += missing

    def _check_sharders(self, module: nn.Module, sharders: Sequence[ModuleSharder[nn.Module]]) -> None:
        """Refuses what no option exists for, in words that name the module and the remedy."""
        for path, child, sharder in shardable_modules(module, sharders):
            if not sharder.sharding_types(self._compute_device):
                raise PlannerError(
                    f"module {path!r} ({type(child).__name__}) cannot be sharded on {self._compute_device}: "
                    f"{type(sharder).__name__} offers no sharding type there; use a cuda topology or do not shard it",
                    PlannerErrorType.STRICT_CONSTRAINTS,
                )
            collisions = getattr(child, "_managed_collision_collection", None)
            if collisions is None or not hasattr(collisions, "table_to_number_buckets"):
                continue
            for table, buckets in sorted(collisions.table_to_number_buckets().items()):
                # ids hash into equal buckets on every rank; TorchRec fails on others with the name of a knob
                if buckets is not None and buckets % self._world_size:
                    raise PlannerError(
                        f"table {table} of module {path or type(child).__name__!r} has a managed-collision module with "
                        f"buckets={buckets}, which does not divide among {self._world_size} ranks: give that module a "
                        f"number of buckets that is a multiple of {self._world_size}",
                        PlannerErrorType.INPUT_VALIDATION,
                    )

    def _filter_sharding_types(self, name: str, allowed_sharding_types: list[str], sharder_key: str = "") -> list[str]:
        constraint = (self._constraints or {}).get(name)
        constrained = bool(constraint and constraint.sharding_types)
        allowed = list(allowed_sharding_types)
        row_wise = ShardingType.ROW_WISE.value
        on_request = constrained or name in self._short_of_room
        if on_request and row_wise not in allowed and self._compute_device == "cpu" and sharder_key == _BAG_COLLECTION:
            # runs on Gloo since TorchRec 1.7, but is not offered: taken if asked for, or if memory is short
            allowed.append(row_wise)
        if self._compute_device == "cpu" and self._is_sequence(sharder_key):
            # crashes in the first forward pass of a cpu EmbeddingCollection
            allowed = [kind for kind in allowed if kind != ShardingType.DATA_PARALLEL.value]
        types = sorted(super()._filter_sharding_types(name, allowed, sharder_key), key=_rank_in(TYPE_ORDER))
        facts = self._facts.get(name)
        if constrained or facts is None or sharder_key.rsplit(".", 1)[-1] in TOWERS:
            return types
        if facts.dim % 4:  # not even data-parallel, which runs without the fused optimizer: the user decides
            types = [kind for kind in types if kind != ShardingType.DATA_PARALLEL.value]
        needed = _ROW_TYPES if name in self._short_of_room else ()
        return [kind for kind in types if kind in needed or self._pays(kind, facts)] or types

    @staticmethod
    def _is_sequence(sharder_key: str) -> bool:
        return sharder_key.rsplit(".", 1)[-1].endswith(_SEQUENCE_SUFFIX)

    def _pays(self, kind: str, facts: TableFacts) -> bool:
        if kind == ShardingType.TABLE_WISE.value:
            return facts.fits_whole or facts.wants_host_memory
        if kind == ShardingType.COLUMN_WISE.value:
            return facts.is_heavy
        if kind == ShardingType.TABLE_ROW_WISE.value:
            return self._local_world_size < self._world_size and (facts.is_dominant or not facts.fits_whole)
        if kind == ShardingType.ROW_WISE.value:
            return facts.wants_rows
        if kind == ShardingType.DATA_PARALLEL.value:
            return facts.wants_replicas
        return False  # table-column-wise is column-wise with less freedom

    def _filter_compute_kernels(self, name: str, allowed_compute_kernels: list[str], sharding_type: str) -> list[str]:
        allowed = list(allowed_compute_kernels)
        if self._compute_device == "cpu":
            allowed = [kernel for kernel in allowed if "uvm" not in kernel]
        facts = self._facts.get(name)
        if facts is not None and facts.dim % 4 and sharding_type != ShardingType.DATA_PARALLEL.value:
            allowed = [kernel for kernel in allowed if not kernel.startswith("fused")]
        kernels = sorted(super()._filter_compute_kernels(name, allowed, sharding_type), key=_rank_in(KERNEL_ORDER))
        constraint = (self._constraints or {}).get(name)
        if facts is None or (constraint and constraint.compute_kernels):
            return kernels
        wanted = [k for k in kernels if facts.wants_host_memory or "uvm" not in k]
        return [k for k in wanted if not k.endswith("_uvm") or k + "_caching" not in wanted] or kernels

    def _explain(self, error: Exception) -> str:
        odd = sorted(f"{name} ({facts.dim})" for name, facts in self._facts.items() if facts.dim % 4)
        if "No available sharding type" in str(error) and odd:
            return (
                f"fused kernels need table widths (and column shards) that are multiples of 4; these are not: "
                f"{', '.join(odd)}. Pad embedding_dim or constrain the table to data_parallel. ({error})"
            )
        return str(error)

    def _couple_sequence_widths(self, options: list[ShardingOption]) -> list[ShardingOption]:
        """Column shards of one sequence collection must have one width: the widest that its tables ask for."""
        widths: dict[str, int] = {}
        for option in options:
            if not option.is_pooled and option.sharding_type in _COLUMN_TYPES:
                widths[option.path] = max(widths.get(option.path, 0), self._least_width(option))
        for index, option in enumerate(options):
            width = widths.get(option.path)
            if width and option.sharding_type in _COLUMN_TYPES and int(option.shards[0].size[1]) != width:
                options[index] = self._with_width(option, width)
        return options

    def _least_width(self, option: ShardingOption) -> int:
        """Width of the option's column shards, or the next that gives no more shards than devices may hold them."""
        width, dim = int(option.shards[0].size[1]), int(option.tensor.shape[1])
        return next((w for w in _widths(dim, width) if dim // w <= self._most_columns(option)), width)

    def _most_columns(self, option: ShardingOption) -> int:
        """Devices that the column shards of one table may go to."""
        bound = option.sharding_type == ShardingType.TABLE_COLUMN_WISE.value
        return int(self._local_world_size if bound else self._world_size)

    def _vary_columns(self, options: list[ShardingOption]) -> list[ShardingOption]:
        """Column splits into any number of equal parts up to the devices, beyond TorchRec's one width per table.

        TorchRec's own width goes where it gives more shards than devices: two shards of a table on one device read
        its ids twice for nothing.
        """
        out: list[ShardingOption] = []
        variants: list[ShardingOption] = []
        for option in options:
            facts = self._facts.get(option.name)
            if option.sharding_type not in _COLUMN_TYPES or not option.is_pooled or facts is None:
                out.append(option)
                continue
            width, most = int(option.shards[0].size[1]), self._most_columns(option)
            floor = facts.min_partition or min(MIN_COLUMNS, width)
            others = [w for w in _widths(facts.dim, floor) if w not in (width, facts.dim) and facts.dim // w <= most]
            variants.extend(self._with_width(option, other, populate=False) for other in others)
            if option.num_shards <= most:
                out.append(option)
            elif not others:
                variants.append(self._with_width(option, self._least_width(option), populate=False))
        self.populate_estimates(variants)
        return out + variants

    def _row_variants(self, options: Sequence[ShardingOption]) -> list[ShardingOption]:
        """Row-wise kinds of large tables that have none yet, as far as their sharders offer them."""
        present = {(o.path, o.name, o.sharding_type, o.compute_kernel) for o in options}
        variants = []
        for option in options:
            if option.name not in self._short_of_room or option.sharding_type == ShardingType.DATA_PARALLEL.value:
                continue  # a replicated table's dense kernel is its own
            sharder = self._sharder_map[option.module_type_key]
            offered = sharder.sharding_types(self._compute_device)
            for kind in self._filter_sharding_types(option.name, offered, option.module_type_key):
                key = (option.path, option.name, kind, option.compute_kernel)
                kernels = sharder.compute_kernels(kind, self._compute_device)
                if kind in _ROW_TYPES and key not in present and option.compute_kernel in kernels:
                    variants.append(self._with_rows(option, kind))
                    present.add(key)
        self.populate_estimates(variants)
        return variants

    def _uncached_variants(self, options: Sequence[ShardingOption]) -> list[ShardingOption]:
        """Cached options again without their caches, where the user leaves the kernel free."""
        variants = []
        for option in options:
            constraint = (self._constraints or {}).get(option.name)
            kernel = option.compute_kernel.removesuffix("_caching")
            offered = self._sharder_map[option.module_type_key].compute_kernels(
                option.sharding_type, self._compute_device
            )
            if not _is_cached(option) or (constraint and constraint.compute_kernels) or kernel not in offered:
                continue
            variant = copy.copy(option)
            variant.compute_kernel = kernel
            variant.shards = [Shard(size=shard.size, offset=shard.offset) for shard in option.shards]
            variants.append(variant)
        self.populate_estimates(variants)
        return variants

    def _with_rows(self, option: ShardingOption, kind: str) -> ShardingOption:
        sizes, offsets = calculate_shard_sizes_and_offsets(
            tensor=option.tensor,
            world_size=self._world_size,
            local_world_size=self._local_world_size,
            sharding_type=kind,
            device_memory_sizes=self._device_memory_sizes,
            num_buckets=self._get_num_buckets(option.name, option.module[1]),
        )
        variant = copy.copy(option)
        variant.sharding_type, variant.partition_by = kind, partition_by_type(kind)
        variant.shards = [Shard(size=size, offset=offset) for size, offset in zip(sizes, offsets, strict=True)]
        return variant

    def _with_width(self, option: ShardingOption, width: int, *, populate: bool = True) -> ShardingOption:
        rows, columns = (int(size) for size in option.tensor.shape)
        variant = copy.copy(option)
        variant.shards = [Shard(size=[rows, width], offset=[0, start]) for start in range(0, columns, width)]
        if populate:
            self.populate_estimates([variant])
        return variant


def _is_cached(option: ShardingOption) -> bool:
    return str(option.compute_kernel).endswith("_uvm_caching")


def _widths(dim: int, floor: int) -> list[int]:
    """Widths of at least ``floor`` that divide ``dim`` and that fused kernels take, the narrowest first."""
    return [width for width in range(max(4, floor), dim + 1) if dim % width == 0 and (width % 4 == 0 or width == dim)]


def _rank_in(order: Sequence[str]) -> Any:
    return lambda value: (order.index(value) if value in order else len(order), value)


def _torchrec_state_bytes(classes: Any, rows: int, dim: int, table_dim: int, value_bytes: int) -> int:
    """State bytes that TorchRec 1.8 already counts for a shard (``shard_estimators._get_optimizer_multipler``)."""
    name = classes[0].__name__ if classes else ""
    factor = {"": 0.0, "SGD": 0.0, "Adam": 2.0, "RowWiseAdagrad": 1.0 / table_dim}.get(name, 1.0)
    return math.ceil(rows * dim * value_bytes * factor)

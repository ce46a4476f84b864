"""From TorchRec's records to ours: sharding options become shards, a topology becomes devices and hardware.

Shards of row-wise kinds also live whole on their device: with ``W`` row shards each holds ``1/W`` of the rows and
sees ``1/W`` of the lookups of the global batch, and its reduce-scatter sends as many bytes as an exchange of ``dim``
columns would. So one learned cost serves every sharding type but data-parallel (see ``costs.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torchrec.distributed.planner.constants import (
    CROSS_NODE_BANDWIDTH,
    DDR_MEM_BW,
    HBM_MEM_BW,
    INTRA_NODE_BANDWIDTH,
    UVM_CACHING_RATIO,
)
from torchrec.distributed.planner.types import ParameterConstraints, ShardingOption, Topology
from torchrec.distributed.planner.utils import sharder_name
from torchrec.distributed.types import ModuleSharder, ShardingType

from torchrec_dreamshard.hardware import HARDWARE
from torchrec_dreamshard.planner.optimizers import optimizer_name
from torchrec_dreamshard.types import KERNELS, DeviceSpec, HardwareSpec, ShardSpec

ROW_SPLIT_TYPES = frozenset(
    {ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value, ShardingType.GRID_SHARD.value}
)
"""Sharding types that split rows: each shard sees a part of the lookups."""

_BYTES_PER_MS_TO_GB_PER_S = 1000 / 1e9  # TorchRec's bandwidths are in bytes/ms

_DTYPES: Mapping[torch.dtype, str] = {
    torch.float32: "fp32",
    torch.float64: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int8: "int8",
    torch.uint8: "int8",
    torch.quint4x2: "int4",
    torch.quint2x4: "int2",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
}
# Key-value and virtual-table kernels keep a cache of rows in HBM in front of slower memory.
_CACHED_KERNELS = frozenset({"key_value", "ssd_virtual_table", "dram_virtual_table", "dram_ssd_virtual_table"})


def table_configs(module: nn.Module) -> dict[str, Any]:
    """Configs of a collection's tables by name; empty where the module has none (a bare ``nn.EmbeddingBag``).

    Wrappers (feature processors, managed collisions, towers) are looked through.
    """
    for method in ("embedding_bag_configs", "embedding_configs"):
        if callable(getattr(module, method, None)):
            return {config.name: config for config in getattr(module, method)()}
    for inner in ("_embedding_bag_collection", "_embedding_module", "embedding"):
        if isinstance(getattr(module, inner, None), nn.Module):
            return table_configs(getattr(module, inner))
    towers = getattr(module, "towers", None)
    return {name: config for tower in towers or () for name, config in table_configs(tower).items()}


def shardable_modules(
    module: nn.Module, sharders: Sequence[ModuleSharder[nn.Module]]
) -> Iterator[tuple[str, nn.Module, ModuleSharder[nn.Module]]]:
    """Yields (path, module, sharder) of each module that TorchRec would shard, in the order of definition."""
    by_name = {sharder_name(sharder.module_type): sharder for sharder in sharders}

    def walk(path: str, child: nn.Module) -> Iterator[tuple[str, nn.Module, ModuleSharder[nn.Module]]]:
        sharder = by_name.get(sharder_name(type(child)))
        if sharder is not None:
            yield path, child, sharder
            return
        for name, grandchild in child.named_children():
            yield from walk(f"{path}.{name}" if path else name, grandchild)

    return walk("", module)


class OptionAdapter:
    """Translates TorchRec's options and topologies; one instance serves one planner.

    Args:
        constraints: the user's constraints by table name (batch sizes, poolings and weighted tables are read).
        reuse_histograms: optional reuse histogram (17 bins) of each table by name; unknown where missing.
    """

    def __init__(
        self,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        reuse_histograms: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        self._constraints = dict(constraints or {})
        self._histograms = {name: tuple(bins) for name, bins in (reuse_histograms or {}).items()}
        self._fused_params: dict[str, dict[str, Any]] = {}
        self._num_features: dict[int, dict[str, int]] = {}
        self._comms_dtype = "fp32"
        self._specs: dict[tuple[Any, ...], tuple[ShardSpec, ...]] = {}

    def bind(self, sharders: Iterable[ModuleSharder[nn.Module]]) -> None:
        """Reads optimizers and exchange precision from the sharders before a plan."""
        self._specs.clear()
        self._num_features.clear()
        self._fused_params = {}
        dtypes = set()
        for sharder in sharders:
            self._fused_params[sharder_name(sharder.module_type)] = dict(getattr(sharder, "fused_params", None) or {})
            for codecs in (getattr(sharder, "qcomm_codecs_registry", None) or {}).values():
                dtypes.add(_DTYPES.get(getattr(codecs.forward, "quantized_dtype", torch.float32), "fp32"))
        self._comms_dtype = dtypes.pop() if len(dtypes) == 1 else "fp32"

    def num_features(self, option: ShardingOption) -> int:
        """Features that share the option's table; at least 1."""
        module = option.module[1]
        if id(module) not in self._num_features:
            configs = table_configs(module)
            self._num_features[id(module)] = {name: len(c.feature_names) for name, c in configs.items()}
        return max(1, self._num_features[id(module)].get(option.name, len(option.input_lengths)))

    def shard_specs(self, option: ShardingOption, world_size: int) -> tuple[ShardSpec, ...]:
        """The option's shards as records, in the option's order.

        Args:
            option: an option with storage estimates.
            world_size: number of ranks; table-wise lookups of all of them reach a shard.
        """
        last = option.shards[-1]
        key = (
            option.path,
            option.name,
            option.sharding_type,
            option.compute_kernel,
            option.batch_size,
            option.cache_load_factor,
            option.num_shards,
            world_size,
            tuple(option.tensor.shape),
            option.tensor.dtype,
            *((tuple(s.size), s.storage.hbm, s.storage.ddr) if s.storage else None for s in (option.shards[0], last)),
        )
        if key not in self._specs:
            self._specs[key] = self._build_specs(option, world_size)
        return self._specs[key]

    def _build_specs(self, option: ShardingOption, world_size: int) -> tuple[ShardSpec, ...]:
        constraint = self._constraints.get(option.name)
        rows = max(1, int(option.tensor.shape[0]))
        data_parallel = option.sharding_type == ShardingType.DATA_PARALLEL.value
        # Replicated tables run dense kernels, whose price follows from a fused kernel's (costs.PlanCosts).
        kernel, clf = ("fused", None) if data_parallel else self._kernel(option)
        pooling_factor = self._lookups_per_sample(option, constraint)
        common: dict[str, Any] = {
            "batch_size": option.batch_size * (1 if data_parallel else world_size),
            "reuse_histogram": self._histograms.get(option.name),
            "weight_dtype": _DTYPES.get(option.tensor.dtype, "fp32"),
            "optimizer": self.optimizer(option),
            "kernel": kernel,
            "cache_load_factor": clf,
            "is_weighted": bool(
                option.is_weighted
                or option.has_feature_processor
                or (constraint is not None and constraint.is_weighted)
            ),
            "is_pooled": option.is_pooled,
            "num_features": self.num_features(option),
        }
        made: dict[tuple[int, int, int, int], ShardSpec] = {}  # equal shards share one record
        specs = []
        for index, shard in enumerate(option.shards):
            hbm, ddr = (shard.storage.hbm, shard.storage.ddr) if shard.storage else (0, 0)
            size = (int(shard.size[0]), int(shard.size[1]), hbm, ddr)
            if size not in made:
                share = size[0] / rows if option.sharding_type in ROW_SPLIT_TYPES else 1.0
                suffix = "" if option.num_shards == 1 else f"[{index}]"
                made[size] = ShardSpec(
                    name=option.fqn.lstrip(".") + suffix,
                    rows=max(1, size[0]),  # a row-wise split of few rows leaves some ranks without any
                    dim=size[1],
                    pooling_factor=pooling_factor * share,
                    hbm_bytes=max(0, hbm),
                    ddr_bytes=max(0, ddr),
                    **common,
                )
            specs.append(made[size])
        return tuple(specs)

    def _lookups_per_sample(self, option: ShardingOption, constraint: ParameterConstraints | None) -> float:
        """Mean lookups per sample over all features, with per-feature batch sizes and poolings folded in."""
        lengths = list(option.input_lengths)
        features = self.num_features(option)
        if len(lengths) == 1 and features > 1:
            lengths *= features  # one factor given for several features holds for each
        batch_sizes = constraint.batch_sizes if constraint is not None else None
        poolings = option.num_poolings or (constraint.num_poolings if constraint is not None else None)
        weights = [1.0] * len(lengths)
        if batch_sizes and len(batch_sizes) == len(lengths):
            weights = [size / option.batch_size for size in batch_sizes]
        if poolings and len(poolings) == len(lengths):
            weights = [weight * times for weight, times in zip(weights, poolings, strict=True)]
        return float(sum(length * weight for length, weight in zip(lengths, weights, strict=True)))

    def optimizer(self, option: ShardingOption) -> str:
        """Optimizer fused into the option's backward pass, one of ``types.OPTIMIZERS``."""
        return optimizer_name(option, self._fused_params.get(option.module_type_key, {}))

    def _kernel(self, option: ShardingOption) -> tuple[str, float | None]:
        kernel = option.compute_kernel
        if kernel in _CACHED_KERNELS:
            kernel = "fused_uvm_caching"
        elif kernel not in KERNELS:
            kernel = "fused"
        if not kernel.endswith("uvm_caching"):
            return kernel, None
        fused = self._fused_params.get(option.module_type_key, {})
        factor = option.cache_load_factor or fused.get("cache_load_factor") or UVM_CACHING_RATIO
        return kernel, min(1.0, max(1e-6, float(factor)))

    def devices(self, topology: Topology) -> tuple[DeviceSpec, ...]:
        """The topology's devices; ranks that share fast links have one host index."""
        group = max(1, int(topology.intra_group_size))
        return tuple(
            DeviceSpec(
                hbm_bytes=max(0, int(device.storage.hbm)),
                ddr_bytes=max(0, int(device.storage.ddr)),
                host=index // group,
            )
            for index, device in enumerate(topology.devices)
        )

    def hardware(self, topology: Topology) -> HardwareSpec:
        """The topology's bandwidths as numbers that the networks know.

        A bandwidth left at TorchRec's default says nothing about the machine: on cpu, where the default links are
        a GPU's, ours for the named hardware "cpu" stand in.
        """
        on_host = topology.compute_device == "cpu"
        known = HARDWARE["cpu"] if on_host else HardwareSpec()
        memory = topology.ddr_mem_bw if on_host else topology.hbm_mem_bw

        def rate(value: float, default: float, fallback: float) -> float:
            return fallback if value == default else value * _BYTES_PER_MS_TO_GB_PER_S

        return HardwareSpec(
            compute_device=known.compute_device,
            name=known.name,
            memory_gb_s=rate(memory, DDR_MEM_BW if on_host else HBM_MEM_BW, known.memory_gb_s),
            cache_mb=known.cache_mb,
            intra_host_gb_s=rate(topology.intra_host_bw, INTRA_NODE_BANDWIDTH, known.intra_host_gb_s),
            inter_host_gb_s=rate(topology.inter_host_bw, CROSS_NODE_BANDWIDTH, known.inter_host_gb_s),
            comms_dtype=self._comms_dtype,
        )

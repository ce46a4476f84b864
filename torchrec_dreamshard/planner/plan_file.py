"""Plans as JSON files: complete, versioned, and readable without the model.

A file holds what ``DistributedModelParallel`` needs of every table, parameters of caches and key-value stores
included, and, where the planner's options are at hand, the estimates that TorchRec's planner needs to reuse it.

    {"format": "torchrec_dreamshard.plan", "version": 1, "context_hash": ..., "predicted": ..., "tables": [
        {"module": "sparse.ebc", "table": "t0", "sharding_type": "column_wise", "compute_kernel": "fused",
         "ranks": [0, 3], "shards": [{"offset": [0, 0], "size": [1000, 32], "placement": "rank:0/cuda:0", ...}, ...],
         ...}, ...]}
"""

from __future__ import annotations

import dataclasses
import enum
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torchrec.distributed import types as torchrec_types
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.shard_estimators import EmbeddingOffloadStats
from torchrec.distributed.planner.types import Perf, PlanLoader, Shard, ShardingOption, Storage
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ParameterSharding,
    ShardingPlan,
    ShardingType,
    ShardMetadata,
)
from torchrec.modules.embedding_configs import DataType

from torchrec_dreamshard.measurement import CostBreakdown
from torchrec_dreamshard.planner.enumerator import partition_by_type

PLAN_FORMAT = "torchrec_dreamshard.plan"
PLAN_VERSION = 1

_T = TypeVar("_T")

_PARAMETERS = (
    "cache_params",
    "enforce_hbm",
    "stochastic_rounding",
    "bounds_check_mode",
    "output_dtype",
    "key_value_params",
)
_CLASSES: Mapping[str, Any] = {
    "DataType": DataType,
    **{
        name: getattr(torchrec_types, name)
        for name in (
            "BoundsCheckMode",
            "CacheAlgorithm",
            "CacheParams",
            "KeyValueParams",
            "KVZCHTBEConfig",
            "MultiPassPrefetchConfig",
            "TBEStatsReporterConfig",
        )
        if hasattr(torchrec_types, name)
    },
}


def save_plan(
    path: str | Path,
    plan: ShardingPlan,
    *,
    options: Sequence[ShardingOption] = (),
    predicted: CostBreakdown | None = None,
    context_hash: str | None = None,
) -> None:
    """Writes a plan; an existing file is replaced in one step.

    Args:
        path: the file.
        plan: the plan.
        options: the options that it was made from, whose estimates are kept too.
        predicted: its predicted cost, for readers.
        context_hash: TorchRec's hash of the planner's inputs, checked when the plan is loaded by a planner.

    Raises:
        ValueError: a parameter of a table cannot be written (names the table).
    """
    by_table = {(option.path, option.name): option for option in options}
    tables = [
        _encode_table(module, name, sharding, by_table.get((module, name)))
        for module, shardings in plan.plan.items()
        for name, sharding in cast("Mapping[str, ParameterSharding]", shardings).items()
    ]
    document = {
        "format": PLAN_FORMAT,
        "version": PLAN_VERSION,
        "context_hash": context_hash,
        "predicted": None if predicted is None else predicted.to_dict(),
        "tables": tables,
    }
    target = Path(path)
    temporary = target.with_name(target.name + ".tmp")
    temporary.write_text(json.dumps(document, indent=1), encoding="utf-8")
    os.replace(temporary, target)


def load_plan(path: str | Path) -> ShardingPlan:
    """Reads a plan, ready for ``DistributedModelParallel``.

    Raises:
        ValueError: not a plan file, or one of another version.
    """
    modules: dict[str, EmbeddingModuleShardingPlan] = {}
    for module, table, sharding in _tables(path, lambda e: (e["module"], e["table"], _decode_table(e))):
        modules.setdefault(module, EmbeddingModuleShardingPlan())[table] = sharding
    return ShardingPlan(modules)


class PlanFileLoader(PlanLoader):  # type: ignore[misc]
    """Gives a saved plan to a planner, ours or TorchRec's, in place of a search.

    Args:
        path: the file.
        check_context: refuse the plan when the planner's inputs differ from those it was made with.
    """

    def __init__(self, path: str | Path, *, check_context: bool = False) -> None:
        self._path = Path(path)
        self._check_context = check_context

    def load(self) -> dict[int, ShardingOption]:
        """The plan's options by TorchRec's ``storage_hash``.

        Raises:
            ValueError: not a plan file, or one of another version.
        """
        return {option.storage_hash(): option for option in _tables(self._path, _option)}

    def plan_context_hash(self) -> str | None:
        """Hash of the inputs that the plan was made with; None switches the comparison off."""
        return cast("str | None", _read(self._path).get("context_hash")) if self._check_context else None

    def get_plan_id(self) -> str:
        """The file's name, for messages."""
        return str(self._path)


def _read(path: str | Path) -> dict[str, Any]:
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read as a plan file: {error.strerror or error}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not a plan file: {error}") from None
    if not isinstance(document, dict) or document.get("format") != PLAN_FORMAT:
        raise ValueError(f'{path} is not a plan file: it must have "format": "{PLAN_FORMAT}"')
    if document.get("version") != PLAN_VERSION:
        raise ValueError(f"{path} has version {document.get('version')!r}, this release reads {PLAN_VERSION}")
    return document


def _tables(path: str | Path, decode: Callable[[Mapping[str, Any]], _T]) -> list[_T]:
    """Every table's entry, decoded."""
    document = _read(path)
    try:
        return [decode(entry) for entry in document["tables"]]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} is a damaged plan file ({reason}): restore it from a copy, or plan anew") from error


def _encode_table(module: str, name: str, sharding: ParameterSharding, option: ShardingOption | None) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "module": module,
        "table": name,
        "sharding_type": sharding.sharding_type,
        "compute_kernel": sharding.compute_kernel,
        "ranks": sharding.ranks,
    }
    if sharding.sharding_spec is not None:
        entry["shards"] = [
            {"offset": list(s.shard_offsets), "size": list(s.shard_sizes), "placement": str(s.placement)}
            for s in sharding.sharding_spec.shards
        ]
    for field in _PARAMETERS:
        value = getattr(sharding, field)
        if value is not None:
            entry[field] = _encode(value, f"table {name}, {field}")
    if option is not None:
        entry["estimates"] = {
            "rows": int(option.tensor.shape[0]),
            "dim": int(option.tensor.shape[1]),
            "input_lengths": list(option.input_lengths),
            "batch_size": option.batch_size,
            "is_pooled": option.is_pooled,
            "storage": [[s.storage.hbm, s.storage.ddr, s.storage.ssd] for s in option.shards if s.storage],
            "perf": [dataclasses.asdict(s.perf) for s in option.shards if s.perf],
        }
    return entry


def _decode_table(entry: Mapping[str, Any]) -> ParameterSharding:
    spec = None
    if "shards" in entry:
        spec = EnumerableShardingSpec(
            [
                ShardMetadata(shard_offsets=s["offset"], shard_sizes=s["size"], placement=s["placement"])
                for s in entry["shards"]
            ]
        )
    return ParameterSharding(
        sharding_type=ShardingType(entry["sharding_type"]).value,
        compute_kernel=EmbeddingComputeKernel(entry["compute_kernel"]).value,
        ranks=entry["ranks"],
        sharding_spec=spec,
        **{field: _decode(entry[field]) for field in _PARAMETERS if field in entry},
    )


def _option(entry: Mapping[str, Any]) -> ShardingOption:
    """A sharding option on a meta tensor; its module is a stand-in."""
    estimates = entry.get("estimates", {})
    shards = entry.get("shards", [])
    rows, dim = estimates.get("rows"), estimates.get("dim")
    if rows is None and shards:
        rows, dim = (max(s["offset"][axis] + s["size"][axis] for s in shards) for axis in (0, 1))
    rows, dim = rows or 0, dim or 0  # a data-parallel table without estimates: the model knows its shape
    extents = shards or [{"offset": [0, 0], "size": [rows, dim]}] * len(entry["ranks"])
    made = [
        Shard(size=list(s["size"]), offset=list(s["offset"]), rank=rank)
        for s, rank in zip(extents, entry["ranks"], strict=True)
    ]
    for shard, storage in zip(made, estimates.get("storage", []), strict=False):
        shard.storage = Storage(*storage)
    for shard, perf in zip(made, estimates.get("perf", []), strict=False):
        shard.perf = Perf(**perf)
    return ShardingOption(
        name=entry["table"],
        tensor=torch.empty(rows, dim, device="meta"),
        module=(entry["module"], nn.Module()),
        input_lengths=estimates.get("input_lengths", [1.0]),
        batch_size=estimates.get("batch_size", 1),
        sharding_type=ShardingType(entry["sharding_type"]).value,
        partition_by=partition_by_type(entry["sharding_type"]),
        compute_kernel=entry["compute_kernel"],
        shards=made,
        is_pooled=estimates.get("is_pooled", True),
        **{field: _decode(entry[field]) for field in _PARAMETERS if field in entry},
    )


def _encode(value: Any, where: str) -> Any:
    """Plain JSON values; enums, records and cache statistics are tagged with their class."""
    if isinstance(value, enum.Enum) and type(value).__name__ in _CLASSES:
        return {"class": type(value).__name__, "member": value.name}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_encode(item, where) for item in value]
    if isinstance(value, EmbeddingOffloadStats):
        return {
            "class": "EmbeddingOffloadStats",
            "fields": {
                "cacheability": value.cacheability,
                "expected_lookups": value.expected_lookups,
                "mrc_hist_counts": value.hist.tolist(),
                "height": value.height,
            },
        }
    if dataclasses.is_dataclass(value) and type(value).__name__ in _CLASSES:
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        return {"class": type(value).__name__, "fields": {k: _encode(v, f"{where}.{k}") for k, v in fields.items()}}
    raise ValueError(f"{where}: a {type(value).__name__} cannot be written to a plan file")


def _decode(value: Any) -> Any:
    if isinstance(value, list):  # TorchRec's parameters hold tuples, which hash
        return tuple(_decode(item) for item in value)
    if not isinstance(value, dict):
        return value
    if "member" in value:
        return _CLASSES[value["class"]][value["member"]]
    fields = {name: _decode(field) for name, field in value["fields"].items()}
    if value["class"] == "EmbeddingOffloadStats":
        return EmbeddingOffloadStats(**{**fields, "mrc_hist_counts": torch.tensor(fields["mrc_hist_counts"])})
    return _CLASSES[value["class"]](**fields)

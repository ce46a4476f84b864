"""Models, topologies and sharders from what a command line gives."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError, Topology
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import CacheParams, ModuleSharder
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from torchrec_dreamshard.pool import rebatch
from torchrec_dreamshard.table_files import load_tables
from torchrec_dreamshard.types import ShardSpec

_T = TypeVar("_T")

_DTYPES = {"fp32": DataType.FP32, "fp16": DataType.FP16, "bf16": DataType.BF16}
_OPTIMIZERS = {
    "sgd": "exact_sgd",
    "rowwise_adagrad": "exact_row_wise_adagrad",
    "adagrad": "exact_adagrad",
    "adam": "adam",
    "none": "none",
}


class TableModel(nn.Module):
    """The tables of a file as collections on the meta device: bags, weighted bags, and sequences of each width.

    Attributes:
        constraints: pooling factors and kernels of the tables.
        sharders: with the file's optimizer.
    """

    def __init__(self, tables: Sequence[ShardSpec]) -> None:
        """Builds the collections.

        Raises:
            ValueError: a table that no collection can hold (names it), or several optimizers.
        """
        super().__init__()
        optimizers = sorted({table.optimizer for table in tables})
        if len(optimizers) > 1:
            raise ValueError(f"all tables must have one optimizer, got {', '.join(optimizers)}")
        groups: dict[str, list[ShardSpec]] = {}
        for table in tables:
            if table.weight_dtype not in _DTYPES:
                raise ValueError(
                    f"table {table.name} has weight_dtype {table.weight_dtype}, expected one of {', '.join(_DTYPES)}"
                )
            kind = "weighted_bags" if table.is_weighted else "bags"
            groups.setdefault(kind if table.is_pooled else f"sequences_{table.dim}", []).append(table)
        meta = torch.device("meta")
        for kind, members in groups.items():
            if kind.startswith("sequences"):
                collection: nn.Module = EmbeddingCollection(
                    tables=[_config(EmbeddingConfig, table) for table in members], device=meta
                )
            else:
                collection = EmbeddingBagCollection(
                    tables=[_config(EmbeddingBagConfig, table) for table in members],
                    is_weighted=kind == "weighted_bags",
                    device=meta,
                )
            self.add_module(kind, collection)
        self.constraints = {table.name: _constraint(table) for table in tables}
        self._tables = tuple(tables)
        fused = {"optimizer": _OPTIMIZERS[optimizers[0]]}
        self.sharders: list[ModuleSharder[nn.Module]] = [
            EmbeddingBagCollectionSharder(fused_params=dict(fused)),
            EmbeddingCollectionSharder(fused_params=dict(fused)),
        ]

    def reuse_histograms(self, batch_size: int) -> dict[str, tuple[float, ...]]:
        """Where the file gives them, the tables' reuse histograms at a job's global batch (``pool.rebatch``)."""
        rebatched = (rebatch(table, batch_size) for table in self._tables)
        return {table.name: table.reuse_histogram for table in rebatched if table.reuse_histogram}


def read_tables(path: str | Path) -> TableModel:
    """The model of a tables file.

    Raises:
        ValueError: not such a file, or a table that no collection can hold.
    """
    tables = load_tables(path)
    try:
        return TableModel(tables)
    except (KeyError, TypeError, RuntimeError) as error:  # a name with a dot, more rows than an int64 counts
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{path}: TorchRec has no collection for these tables: {reason}") from error


def _config(kind: Callable[..., Any], table: ShardSpec) -> Any:
    return kind(
        name=table.name,
        num_embeddings=table.rows,
        embedding_dim=table.dim,
        feature_names=[f"{table.name}.{index}" for index in range(table.num_features)],
        data_type=_DTYPES[table.weight_dtype],
    )


def _constraint(table: ShardSpec) -> ParameterConstraints:
    cached = table.cache_load_factor
    return ParameterConstraints(
        pooling_factors=[table.pooling_factor / table.num_features] * table.num_features,
        compute_kernels=None if table.kernel == "fused" else [table.kernel],
        cache_params=None if cached is None else CacheParams(load_factor=cached),
        is_weighted=table.is_weighted,
    )


def make_topology(path: str | Path | None, flags: Mapping[str, Any]) -> Topology:
    """A topology from a JSON file of ``Topology``'s arguments, overridden by flags.

    Args:
        path: the file, or None.
        flags: arguments of ``Topology``; None values are left to the file or to TorchRec.

    Raises:
        ValueError: an unknown or impossible argument, or no world size.
    """
    known = set(inspect.signature(Topology.__init__).parameters) - {"self"}
    values: dict[str, Any] = {"compute_device": "cuda"}
    if path is not None:
        try:
            values.update(json.loads(Path(path).read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} must be a JSON object of topology arguments: {error}") from None
    values.update({name: value for name, value in flags.items() if value is not None})
    unknown = sorted(set(values) - known)
    if unknown:
        raise ValueError(f"unknown topology arguments {unknown}; known are {sorted(known)}")
    for name, value in values.items():
        if name.endswith(("_size", "_cap", "_bw")) and (
            isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0
        ):
            raise ValueError(f"the topology's {name} must be a number above 0, got {value!r}")
    if not isinstance(values.get("world_size"), int):
        raise ValueError("the topology needs a world size: give --world-size, or world_size in the topology file")
    try:
        return Topology(**{"created_by_factory": True, **values})
    except (AssertionError, AttributeError, TypeError) as error:
        raise ValueError(f"the topology is impossible: {error}") from None


def sharders_of(model: nn.Module) -> list[ModuleSharder[nn.Module]]:
    """The model's own ``sharders``, or TorchRec's default ones."""
    own: list[ModuleSharder[nn.Module]] | None = getattr(model, "sharders", None)
    return own if own else get_default_sharders()


def input_errors(work: Callable[[], _T]) -> _T:
    """Runs ``work`` with TorchRec's ``PlannerError`` turned into a ``ValueError``, for callers without TorchRec."""
    try:
        return work()
    except PlannerError as error:
        raise ValueError(str(error)) from error

"""What a live, sharded TorchRec model is made of, found by duck typing: TorchRec itself is not imported.

A sharded module of TorchRec 1.8 has one entry per sharding in ``_sharding_types`` (the type's name), ``_lookups``
(whose kernels have ``config`` and ``emb_module``) and ``_output_dists`` (the exchange of the outputs).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchrec_dreamshard.profiling.workloads import reuse_histogram
from torchrec_dreamshard.types import DTYPE_BYTES, KERNELS, ShardSpec

_WHOLE = ("table_wise", "column_wise", "table_column_wise")  # shardings whose shards live whole on one device
_OPTIMIZERS = {
    "exact_sgd": "sgd",
    "exact_row_wise_adagrad": "rowwise_adagrad",
    "exact_adagrad": "adagrad",
    "adam": "adam",
}


@dataclass(frozen=True)
class LiveSharding:
    """One sharding of one module, as this rank runs it."""

    is_whole: bool
    """Whether its shards live whole on one device; what else there is, all devices carry alike."""
    kernels: tuple[nn.Module, ...]
    """Fused kernels of this rank; none on a rank without tables."""
    exchange: nn.Module
    """Its call starts the exchange and returns what waits for it."""


def find_shardings(model: nn.Module) -> list[LiveSharding]:
    """The shardings of all sharded modules in a model.

    Args:
        model: a ``DistributedModelParallel`` or any module that contains sharded ones.

    Raises:
        ValueError: there is none.
    """
    found = []
    for module in model.modules():
        types = getattr(module, "_sharding_types", None)
        if types is None:
            types = list(getattr(module, "_sharding_type_to_sharding", ()))  # an EmbeddingCollection's name for it
        lookups, exchanges = getattr(module, "_lookups", ()), getattr(module, "_output_dists", ())
        if not types or not len(types) == len(lookups) == len(exchanges):
            continue
        for kind, lookup, exchange in zip(types, lookups, exchanges, strict=True):
            kernels = tuple(part for part in lookup.modules() if hasattr(part, "emb_module"))
            found.append(LiveSharding(kind in _WHOLE, kernels, exchange))
    if not found:
        raise ValueError(
            "the model has no sharded embedding module: give the DistributedModelParallel that is being trained"
        )
    return found


class KernelLookups:
    """What one kernel looks up, noted step by step without holding the device up.

    Features may have batch sizes of their own (TorchRec's variable batch per feature): a table's batch is then the
    mean over its features of the bags that reach it, and its pooling factor the lookups per such bag.

    Args:
        kernel: one of ``LiveSharding.kernels``.
    """

    def __init__(self, kernel: nn.Module) -> None:
        config: Any = kernel.config
        self._kernel: Any = kernel
        self._tables: Sequence[Any] = config.embedding_tables
        self._features = [len(table.feature_names) for table in self._tables]
        self._first_feature = [sum(self._features[:table]) for table in range(len(self._tables) + 1)]
        self._steps: list[tuple[list[int], Tensor]] = []
        self._sample: tuple[Tensor, Tensor] | None = None
        self._histograms: list[tuple[float, ...] | None] | None = None

    def note(self, arguments: Mapping[str, Any]) -> None:
        """Notes one call of the kernel.

        Args:
            arguments: its keyword arguments ``indices`` and ``offsets``, and with variable batches
                ``batch_size_per_feature_per_rank``.
        """
        offsets, num_features = arguments["offsets"], self._first_feature[-1]
        variable = arguments.get("batch_size_per_feature_per_rank")
        if variable:
            firsts = [0, *itertools.accumulate(sum(of_ranks) for of_ranks in variable)]
        else:
            batch_size = (offsets.numel() - 1) // num_features
            firsts = [feature * batch_size for feature in range(num_features + 1)]
        table_firsts = [firsts[feature] for feature in self._first_feature]
        bounds = offsets[torch.tensor(table_firsts).to(offsets.device, non_blocking=True)]
        self._steps.append((table_firsts, bounds))
        if self._histograms is None and self._sample is None:
            self._sample = (arguments["indices"].clone(), bounds)

    def shards(self) -> list[ShardSpec]:
        """The kernel's shards with the mean lookups since the last call; reuse is that of the first step of all."""
        if not self._steps:
            return []
        if self._sample is not None:
            indices, bounds = self._sample
            self._histograms = [
                reuse_histogram(indices[start:end]) for start, end in itertools.pairwise(bounds.tolist())
            ]
            self._sample = None
        num_bags = np.diff([firsts for firsts, _ in self._steps]).sum(axis=0)
        num_lookups = np.diff([bounds.tolist() for _, bounds in self._steps]).sum(axis=0)
        num_samples = num_bags / self._features
        batch_sizes = np.maximum(1, np.round(num_samples / len(self._steps))).astype(int)
        poolings = num_lookups / np.maximum(num_samples, 1)
        self._steps.clear()
        return [
            self._shard(table, int(batch_size), float(pooling), histogram)
            for table, batch_size, pooling, histogram in zip(
                self._tables, batch_sizes, poolings, self._histograms or (), strict=True
            )
        ]

    def _shard(
        self, table: Any, batch_size: int, pooling_factor: float, histogram: tuple[float, ...] | None
    ) -> ShardSpec:
        config, op = self._kernel.config, self._kernel.emb_module
        dtype = str(config.data_type.value).lower()
        kernel = str(config.compute_kernel.value)
        optimizer = str(getattr(getattr(op, "optimizer", None), "value", ""))
        return ShardSpec(
            name=table.name,
            rows=table.local_rows,
            dim=table.local_cols,
            pooling_factor=pooling_factor,
            batch_size=batch_size,
            reuse_histogram=histogram,
            weight_dtype=dtype if dtype in DTYPE_BYTES else "fp32",
            optimizer=_OPTIMIZERS.get(optimizer, "none"),
            kernel=kernel if kernel in KERNELS else "fused",
            is_weighted=bool(config.is_weighted),
            is_pooled=getattr(config.pooling, "value", "") != "NONE",
            num_features=len(table.feature_names),
        )


def tensor_of(outputs: Any) -> Tensor | None:
    """The one tensor in a module's output that gradients flow through, or None."""
    if isinstance(outputs, Tensor):
        return outputs if outputs.grad_fn is not None else None
    if isinstance(outputs, (list, tuple)):
        return next((found for found in map(tensor_of, outputs) if found is not None), None)
    return None


def device_of(model: nn.Module) -> torch.device:
    """Where the model runs: the device of its first parameter that is not a placeholder."""
    for parameter in model.parameters():
        if parameter.device.type != "meta":
            return parameter.device
    return torch.device("cpu")

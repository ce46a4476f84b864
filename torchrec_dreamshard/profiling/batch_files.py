"""A job's own lookups in files: one batch each, written by the job, measured by ``dreamshard profile --from-batches``.

A *batch file* is a safetensors file (nothing in it is ever executed) with two integer tensors per feature, as a
``KeyedJaggedTensor`` has them: ``<feature>.values``, the ids of all samples, and ``<feature>.lengths``, how many of
them belong to each sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

_VALUES, _LENGTHS = ".values", ".lengths"
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class FeatureLookups(NamedTuple):
    """One feature of a batch, with the methods of TorchRec's ``JaggedTensor`` that measuring needs."""

    ids: Tensor
    """The ids of all samples, one after the other."""
    num_ids: Tensor
    """How many of them each sample has."""

    def values(self) -> Tensor:
        """The ids."""
        return self.ids

    def lengths(self) -> Tensor:
        """Ids per sample."""
        return self.num_ids


class BatchFile(Mapping[str, FeatureLookups]):
    """The features of a batch file by name; each is read when it is asked for.

    Args:
        path: a file that ``save_batch`` wrote, or any other of its form.

    Raises:
        ValueError: not such a file; names it.
        OSError: it cannot be read.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        with self.path.open("rb"):  # safetensors' own errors name no file
            pass
        try:
            with safe_open(self.path, "pt") as file:
                tensors = set(file.keys())
        except SafetensorError as error:
            raise ValueError(f"{self.path} is not a safetensors file: {error}") from None
        self._features = sorted(name.removesuffix(_VALUES) for name in tensors if name.endswith(_VALUES))
        missing = sorted({feature + _LENGTHS for feature in self._features} - tensors)
        if not self._features or missing:
            raise ValueError(
                f"{self.path} must have tensors <feature>{_VALUES} and <feature>{_LENGTHS}, "
                + (f"{missing[0]} is missing" if missing else f"got {sorted(tensors)[:3]}")
            )

    def __getitem__(self, feature: str) -> FeatureLookups:
        """Reads a feature.

        Raises:
            KeyError: there is no such feature.
            ValueError: its tensors are not vectors of integers.
        """
        if feature not in self._features:
            raise KeyError(feature)
        with safe_open(self.path, "pt") as file:
            found = [file.get_tensor(feature + suffix) for suffix in (_VALUES, _LENGTHS)]
        for suffix, tensor in zip((_VALUES, _LENGTHS), found, strict=True):
            if tensor.dim() != 1 or tensor.dtype not in _INTEGERS:
                raise ValueError(
                    f"{self.path}: {feature}{suffix} must be a vector of integers, "
                    f"got {str(tensor.dtype).removeprefix('torch.')} of shape {list(tensor.shape)}"
                )
        return FeatureLookups(*found)

    def __iter__(self) -> Iterator[str]:
        return iter(self._features)

    def __len__(self) -> int:
        return len(self._features)


def save_batch(path: str | Path, batch: Any, features: Iterable[str] | None = None) -> None:
    """Writes one batch of a job's input to a file.

    Args:
        path: the file, replaced if it exists.
        batch: a ``KeyedJaggedTensor``, or anything that gives ``batch[feature].values()`` and ``.lengths()``.
        features: which to write; None for all of ``batch.keys()``.
    """
    tensors = {}
    for feature in batch.keys() if features is None else features:  # noqa: SIM118 (a KeyedJaggedTensor has only keys())
        jagged = batch[feature]
        tensors[feature + _VALUES] = jagged.values().detach().cpu().clone()
        tensors[feature + _LENGTHS] = jagged.lengths().detach().cpu().clone()
    save_file(tensors, path)

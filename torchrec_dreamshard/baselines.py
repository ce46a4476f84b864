"""The human-expert strategies of the paper (DreamShard, section 4.1).

Each places shards in descending cost onto the device with the lowest sum so far that has room for the shard; only
the cost differs. Unlike the authors' code all respect both memories, and repair where greed runs into a dead end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from torchrec_dreamshard.packing import FloatArray, check_possible, memory_of, place_greedily, repair
from torchrec_dreamshard.types import PlacementTask


def place_random(task: PlacementTask, seed: int = 0) -> tuple[int, ...]:
    """Every shard onto a random device that has room for it.

    Args:
        task: the task.
        seed: of the choices.

    Raises:
        InfeasiblePlacementError: no placement fits.
    """
    check_possible(task)
    generator = np.random.default_rng(seed)
    need, free = memory_of(task)
    placement = np.zeros(len(need), dtype=np.int64)
    for shard, wish in enumerate(generator.random((len(need), len(free)))):
        fits = (free >= need[shard]).all(axis=1)
        placement[shard] = np.where(fits, wish, wish - 1.0).argmax()
        free[placement[shard]] -= need[shard]
    return repair(task, placement, seed=seed)


def place_size(task: PlacementTask, seed: int = 0) -> tuple[int, ...]:
    """Balances ``rows x dim``; see ``place_greedily`` for arguments and errors."""
    return place_greedily(task, _column(task, "rows") * _column(task, "dim"), seed)


def place_dim(task: PlacementTask, seed: int = 0) -> tuple[int, ...]:
    """Balances ``dim``; see ``place_greedily`` for arguments and errors."""
    return place_greedily(task, _column(task, "dim"), seed)


def place_lookup(task: PlacementTask, seed: int = 0) -> tuple[int, ...]:
    """Balances ``dim x pooling_factor``; see ``place_greedily`` for arguments and errors."""
    return place_greedily(task, _column(task, "dim") * _column(task, "pooling_factor"), seed)


def place_size_lookup(task: PlacementTask, seed: int = 0) -> tuple[int, ...]:
    """Balances ``dim x pooling_factor x log10(rows)``; see ``place_greedily`` for arguments and errors."""
    lookups = _column(task, "dim") * _column(task, "pooling_factor")
    return place_greedily(task, lookups * np.log10(_column(task, "rows")), seed)


def _column(task: PlacementTask, name: str) -> FloatArray:
    return np.array([getattr(shard, name) for shard in task.shards], dtype=np.float64)


BASELINES: Mapping[str, Callable[..., tuple[int, ...]]] = {
    "random": place_random,
    "size": place_size,
    "dim": place_dim,
    "lookup": place_lookup,
    "size_lookup": place_size_lookup,
}
"""Strategies by name: ``strategy(task, seed=0) -> placement``."""

"""What the examples share: a small DLRM over tables of the public pool, and batches that look up like its users did.

Row counts are capped so that the examples start in seconds; lookups per sample and their reuse are the pool's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from torchrec_dreamshard import ShardSpec, pool
from torchrec_dreamshard.profiling.workloads import make_bags

NUM_DENSE = 13


def draw_tables(num_tables: int, *, batch_size: int, max_rows: int, seed: int) -> list[ShardSpec]:
    """Tables of the public pool with mixed dims, at a global batch size, with at most ``max_rows`` rows."""
    rng = np.random.default_rng(seed)
    candidates = pool.load_public_pool(include_unused=False)
    tables = []
    for index in rng.choice(len(candidates), size=num_tables, replace=False):
        table = pool.with_dim(candidates[index], int(rng.choice([8, 16, 32, 64])))
        table = pool.rebatch(table, batch_size)
        tables.append(dataclasses.replace(table, rows=min(table.rows, max_rows), hbm_bytes=None, ddr_bytes=None))
    return tables


class TinyDLRM(nn.Module):
    """Embedding bags and dense inputs, concatenated into a small MLP with one output."""

    def __init__(self, tables: Sequence[ShardSpec], device: torch.device) -> None:
        super().__init__()
        self.sparse = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=table.name,
                    num_embeddings=table.rows,
                    embedding_dim=table.dim,
                    feature_names=[f"{table.name}_ids"],
                )
                for table in tables
            ],
            device=device,
        )
        width = NUM_DENSE + sum(table.dim for table in tables)
        self.over = nn.Sequential(nn.Linear(width, 64, device=device), nn.ReLU(), nn.Linear(64, 1, device=device))

    def forward(self, dense: Tensor, ids: KeyedJaggedTensor) -> Tensor:
        """Logits, one per sample."""
        return self.over(torch.cat([dense, self.sparse(ids).values()], dim=1)).squeeze(1)


@dataclasses.dataclass(frozen=True)
class Batch:
    """One rank's part of a step."""

    dense: Tensor
    ids: KeyedJaggedTensor
    labels: Tensor

    def to(self, device: torch.device) -> Batch:
        """The batch on another device."""
        return Batch(self.dense.to(device), self.ids.to(device), self.labels.to(device))


def make_batches(tables: Sequence[ShardSpec], rank: int, world_size: int, seed: int) -> Iterator[Batch]:
    """This rank's parts of an endless stream of global batches; all ranks must use one seed."""
    rng = np.random.default_rng(seed)
    size = tables[0].batch_size // world_size
    own = slice(rank * size, (rank + 1) * size)
    while True:
        values, lengths = [], []
        for table in tables:
            bags = make_bags(table, rng)
            bounds = bags.offsets[own.start : own.stop + 1]
            values.append(bags.indices[bounds[0] : bounds[-1]])
            lengths.append(bounds.diff())
        dense = torch.from_numpy(rng.standard_normal((tables[0].batch_size, NUM_DENSE), dtype=np.float32))[own]
        labels = torch.from_numpy(rng.integers(0, 2, tables[0].batch_size).astype(np.float32))[own]
        ids = KeyedJaggedTensor(
            keys=[f"{table.name}_ids" for table in tables], values=torch.cat(values), lengths=torch.cat(lengths)
        )
        yield Batch(dense, ids, labels)

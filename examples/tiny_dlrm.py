"""What the examples share: a small DLRM over tables of the public pool, and batches that look up like its users did.

Row counts are capped so that the examples start in seconds; lookups per sample and their reuse are the pool's.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import warnings
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel, get_default_sharders
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from torchrec_dreamshard import ShardSpec, pool
from torchrec_dreamshard.profiling.workloads import make_bags

NUM_DENSE = 13
LEARNING_RATE = 0.05


def silence_internals() -> None:
    """Drops what TorchRec and PyTorch warn of about their own internals: it would drown an example's output."""
    warnings.simplefilter("ignore")
    for name in ("torch", "torchrec"):
        logging.getLogger(name).setLevel(logging.ERROR)


def start_process_group() -> torch.device:
    """Joins the ranks that torchrun started: NCCL with one GPU per rank if there are enough, else Gloo on the CPU."""
    local_rank, num_local = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.cuda.device_count() >= num_local:
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_local))
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device


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
        """The tables' optimizer, SGD, is fused into the backward pass."""
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
        apply_optimizer_in_backward(torch.optim.SGD, self.sparse.parameters(), {"lr": LEARNING_RATE})
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
        labels = (dense.sum(dim=1) > 0).float()  # something to learn, so that a broken step shows in the loss
        ids = KeyedJaggedTensor(
            keys=[f"{table.name}_ids" for table in tables], values=torch.cat(values), lengths=torch.cat(lengths)
        )
        yield Batch(dense, ids, labels)


class Trainer:
    """A sharded model with its optimizers."""

    def __init__(self, model: TinyDLRM, plan: ShardingPlan, device: torch.device) -> None:
        self.model = DistributedModelParallel(model, device=device, plan=plan, sharders=get_default_sharders())
        dense = dict(in_backward_optimizer_filter(self.model.named_parameters()))
        self.optimizer = KeyedOptimizerWrapper(dense, lambda params: torch.optim.SGD(params, lr=LEARNING_RATE))

    def step(self, batch: Batch) -> Tensor:
        """One step of training; returns the loss."""
        self.optimizer.zero_grad()
        loss = binary_cross_entropy_with_logits(self.model(batch.dense, batch.ids), batch.labels)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

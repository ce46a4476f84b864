"""Planned and sharded models beside unsharded ones: one forward pass and one step of both must agree."""

from __future__ import annotations

import torch
import torch.distributed as dist
from planner_models import jagged_batch, quiet_topology
from stand_in_agent import StandInAgent
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv
from torchrec.sparse.jagged_tensor import JaggedTensor

from torchrec_dreamshard.planner import DreamShardPlanner

LEARNING_RATE = 0.1
SGD = {"learning_rate": LEARNING_RATE}
BATCH_SIZE = 6


class Model(nn.Module):
    """Collections side by side, fed with one batch each; their outputs as one tensor each."""

    def __init__(self, *collections):
        super().__init__()
        self.collections = nn.ModuleList(collections)

    def forward(self, *batches):
        outputs = []
        for collection, batch in zip(self.collections, batches, strict=True):
            out = collection(batch)
            parts = [out[key] for key in sorted(out.keys())]
            sequence = isinstance(parts[0], JaggedTensor)
            outputs.append(torch.cat([part.values() if sequence else part for part in parts], dim=0 if sequence else 1))
        return outputs


def shard(model, sharders, constraints=None, **further):
    """The model under a plan of its own, and the type of each table."""
    planner = DreamShardPlanner(
        quiet_topology(dist.get_world_size()),
        BATCH_SIZE,
        constraints=constraints,
        stats=[],
        agent=StandInAgent(),
        **further,
    )
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    sharded = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=plan,
        sharders=sharders,
    )
    return sharded, {name: s.sharding_type for tables in plan.plan.values() for name, s in tables.items()}


def compare_with_unsharded(rank, make_collections, configs, sharders, constraints=None, weighted=()):
    """Trains the planned model for one SGD step beside the unsharded one.

    Args:
        rank: this one.
        make_collections: returns new collections.
        configs: the tables of each.
        sharders: with plain SGD of ``LEARNING_RATE``.
        constraints: of the planner.
        weighted: indices of the collections whose batches have weights.

    Returns:
        The type of each table.
    """
    world = dist.get_world_size()
    batches = [
        [jagged_batch(tables, BATCH_SIZE, seed, index in weighted) for index, tables in enumerate(configs)]
        for seed in range(world)
    ]
    torch.manual_seed(0)
    reference = Model(*make_collections())
    sharded, types = shard(Model(*make_collections()), sharders, constraints)
    for mine, theirs in weight_pairs(sharded.state_dict(), reference.state_dict()):
        mine.detach().copy_(theirs)

    outputs = [reference(*batch) for batch in batches]
    own = sharded(*batches[rank])
    torch.testing.assert_close(own, outputs[rank])

    def loss(tensors):
        return sum((t * torch.linspace(-1, 1, t.numel()).reshape(t.shape)).sum() for t in tensors)

    loss(own).backward()
    (sum(map(loss, outputs)) / world).backward()  # TorchRec divides gradients by the world size, as DDP does
    with torch.no_grad():
        for parameter in (*reference.parameters(), *sharded.parameters()):
            if parameter.grad is not None:  # tables that are not data-parallel have a fused optimizer
                parameter -= LEARNING_RATE * parameter.grad
    for mine, theirs in weight_pairs(sharded.state_dict(), reference.state_dict()):
        torch.testing.assert_close(mine, theirs)
    return types


def weight_pairs(sharded, reference):
    """Each local shard with its slice of the unsharded table."""
    assert set(sharded) == set(reference)
    for name, whole in reference.items():
        value = sharded[name]
        if hasattr(value, "local_shards"):
            for local in value.local_shards():
                (row, column), (rows, columns) = local.metadata.shard_offsets, local.metadata.shard_sizes
                yield local.tensor, whole[row : row + rows, column : column + columns]
        else:
            yield value, whole

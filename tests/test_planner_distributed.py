"""Two Gloo ranks: sharded models match unsharded ones, and errors reach every rank."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from planner_models import (
    bag_collection,
    bag_configs,
    jagged_batch,
    quiet_topology,
    sequence_collection,
    sequence_configs,
)
from stand_in_agent import StandInAgent
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError
from torchrec.distributed.types import ShardingEnv
from torchrec.sparse.jagged_tensor import JaggedTensor

from torchrec_dreamshard.planner import DreamShardPlanner

pytestmark = pytest.mark.distributed

WORLD = 2
LEARNING_RATE = 0.1


def launch(worker, *args):
    """Runs ``worker(rank, *args)`` on two ranks and raises what either raised."""
    mp.start_processes(_entry, args=(_free_port(), worker, args), nprocs=WORLD, start_method="fork")


def _free_port():
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _entry(rank, port, worker, args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    try:
        worker(rank, *args)
    finally:
        dist.destroy_process_group()


class Model(nn.Module):
    def __init__(self, collection):
        super().__init__()
        self.collection = collection

    def forward(self, features):
        out = self.collection(features)
        parts = [out[key] for key in sorted(out.keys())]
        sequence = isinstance(parts[0], JaggedTensor)
        return torch.cat([part.values() if sequence else part for part in parts], dim=0 if sequence else 1)


def compare_with_unsharded(rank, make_collection, configs, sharder, constraints, weighted=False, expected_types=None):
    """One forward and one SGD step of the planned model against the same step of the unsharded one."""
    batches = [jagged_batch(configs, 6, seed, weighted) for seed in range(WORLD)]
    model = Model(make_collection())
    torch.manual_seed(0)
    reference = Model(make_collection())

    planner = DreamShardPlanner(quiet_topology(WORLD), 6, constraints=constraints, stats=[], agent=StandInAgent())
    plan = planner.collective_plan(model, [sharder], dist.group.WORLD)
    types = {name: sharding.sharding_type for tables in plan.plan.values() for name, sharding in tables.items()}
    if expected_types is not None:
        assert types == expected_types
    sharded = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=plan,
        sharders=[sharder],
    )
    for mine, theirs in weight_pairs(sharded.state_dict(), reference.state_dict()):
        mine.detach().copy_(theirs)

    outputs = [reference(batch) for batch in batches]
    own = sharded(batches[rank])
    torch.testing.assert_close(own, outputs[rank])

    slopes = [torch.linspace(-1, 1, out.numel()).reshape(out.shape) for out in outputs]
    (own * slopes[rank]).sum().backward()
    # TorchRec divides gradients by the world size, as DDP does
    (sum((out * slope).sum() for out, slope in zip(outputs, slopes, strict=True)) / WORLD).backward()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter -= LEARNING_RATE * parameter.grad
        for parameter in sharded.parameters():
            if parameter.grad is not None:  # data-parallel tables have no fused optimizer
                parameter -= LEARNING_RATE * parameter.grad
    for mine, theirs in weight_pairs(sharded.state_dict(), reference.state_dict()):
        torch.testing.assert_close(mine, theirs)


def weight_pairs(sharded, reference):
    """Each local shard with its slice of the unsharded table."""
    assert set(sharded) == set(reference)
    for name, whole in reference.items():
        value = sharded[name]
        if hasattr(value, "local_shards"):
            for shard in value.local_shards():
                (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
                yield shard.tensor, whole[row : row + rows, column : column + columns]
        else:
            yield value, whole


SGD = {"learning_rate": LEARNING_RATE}


def bag_worker(rank, kind, weighted, features):
    shape = {"features": features} if features else {}
    constraints = (
        {f"t{i}": ParameterConstraints(sharding_types=[kind], min_partition=8) for i in range(4)} if kind else None
    )
    compare_with_unsharded(
        rank,
        lambda: bag_collection(is_weighted=weighted, **shape),
        bag_configs(**shape),
        EmbeddingBagCollectionSharder(fused_params=dict(SGD)),
        constraints,
        weighted=weighted,
        expected_types=dict.fromkeys(("t0", "t1", "t2", "t3"), kind) if kind else None,
    )


@pytest.mark.parametrize("kind", [None, "table_wise", "column_wise", "table_column_wise", "row_wise", "data_parallel"])
def test_bag_collection_matches_unsharded(kind):
    launch(bag_worker, kind, False, None)


def test_weighted_bags_with_shared_tables_match_unsharded():
    launch(bag_worker, None, True, [1, 3, 2, 1])


def sequence_worker(rank, kind):
    constraints = (
        {f"s{i}": ParameterConstraints(sharding_types=[kind], min_partition=8) for i in range(3)} if kind else None
    )
    compare_with_unsharded(
        rank,
        sequence_collection,
        sequence_configs(),
        EmbeddingCollectionSharder(fused_params=dict(SGD)),
        constraints,
        expected_types=dict.fromkeys(("s0", "s1", "s2"), kind) if kind else None,
    )


@pytest.mark.parametrize("kind", [None, "table_wise", "column_wise", "row_wise"])
def test_embedding_collection_matches_unsharded(kind):
    launch(sequence_worker, kind)


def failing_worker(rank):
    planner = DreamShardPlanner(quiet_topology(WORLD, ddr_cap=20_000), 6, stats=[], agent=StandInAgent())
    start = time.monotonic()
    with pytest.raises(PlannerError, match="t0.*bytes") as caught:
        planner.collective_plan(Model(bag_collection(rows=(10_000,), dims=(64,))), [EmbeddingBagCollectionSharder()])
    assert time.monotonic() - start < 30
    messages = [None] * WORLD
    dist.all_gather_object(messages, (str(caught.value), caught.value.error_type))
    assert messages[0] == messages[1]


def test_every_rank_gets_the_same_error():
    launch(failing_worker)


def subgroup_worker(rank):
    group = dist.new_group([1])
    if rank == 1:
        planner = DreamShardPlanner(quiet_topology(1), 6, stats=[], agent=StandInAgent())
        plan = planner.collective_plan(Model(bag_collection()), [EmbeddingBagCollectionSharder()], group)
        assert set(plan.plan["collection"]) == {"t0", "t1", "t2", "t3"}
    dist.barrier()


def test_a_group_without_global_rank_zero_plans():
    launch(subgroup_worker)


def mismatch_worker(rank):
    planner = DreamShardPlanner(quiet_topology(4), 6, stats=[], agent=StandInAgent())
    with pytest.raises(PlannerError, match="world size of 4.*2 ranks"):
        planner.collective_plan(Model(bag_collection()), [EmbeddingBagCollectionSharder()])


def test_topology_of_another_size_is_refused():
    launch(mismatch_worker)

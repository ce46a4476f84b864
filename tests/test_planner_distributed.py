"""Two Gloo ranks: sharded models match unsharded ones, and errors reach every rank."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from planner_models import (
    bag_collection,
    bag_configs,
    feature_processed,
    jagged_batch,
    managed_collisions,
    quiet_topology,
    sequence_collection,
    sequence_configs,
)
from stand_in_agent import StandInAgent
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError
from torchrec.distributed.sharding_plan import get_default_sharders
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


def fp_worker(rank, kind):
    constraints = {f"t{i}": ParameterConstraints(sharding_types=[kind]) for i in range(4)} if kind else None
    compare_with_unsharded(
        rank,
        feature_processed,
        bag_configs(),
        FeatureProcessedEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder(fused_params=dict(SGD))),
        constraints,
    )


def test_feature_processed_bags_match_unsharded():
    launch(fp_worker, None)


def several_worker(rank):
    """Bags and sequences in one model, each table with its own type."""
    kinds = {"t0": "row_wise", "t1": "column_wise", "t2": "data_parallel", "t3": "table_wise", "s0": "row_wise"}
    constraints = {name: ParameterConstraints(sharding_types=[kind], min_partition=8) for name, kind in kinds.items()}
    model = nn.ModuleDict({"bags": bag_collection("meta"), "sequences": sequence_collection("meta")})
    sharders = [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
    plan = DreamShardPlanner(
        quiet_topology(WORLD), 6, constraints=constraints, stats=[], agent=StandInAgent()
    ).collective_plan(model, sharders)
    sharded = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=plan,
        sharders=sharders,
    )
    bags = sharded.module["bags"](jagged_batch(bag_configs(), 6, rank))
    assert {key: bags[key].shape for key in bags.keys()} == {  # noqa: SIM118 - a KeyedTensor is no dict
        "t0_f0": (6, 8),
        "t1_f0": (6, 16),
        "t2_f0": (6, 32),
        "t3_f0": (6, 4),
    }
    sequences = sharded.module["sequences"](jagged_batch(sequence_configs(), 6, rank))
    assert sorted(sequences.keys()) == ["s0_f0", "s1_f0", "s2_f0"]


def test_mixed_types_and_modules_run():
    launch(several_worker)


def managed_collision_worker(rank):
    model = Model(managed_collisions("sequence"))
    sharders = get_default_sharders()
    plan = DreamShardPlanner(quiet_topology(WORLD), 6, stats=[], agent=StandInAgent()).collective_plan(model, sharders)
    sharded = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=plan,
        sharders=sharders,
    )
    embeddings, _ = sharded.module.collection(jagged_batch(sequence_configs(), 6, rank))
    sum(embeddings[key].values().sum() for key in sorted(embeddings.keys())).backward()


def test_managed_collisions_run():
    launch(managed_collision_worker)


def sharding_group_worker(rank):
    """The topology describes one sharding group of a DMPCollection, the process group the whole job."""
    model, sharders = Model(bag_collection()), [EmbeddingBagCollectionSharder()]
    planner = DreamShardPlanner(quiet_topology(1), 6, stats=[], agent=StandInAgent(), sharding_group_size=1)
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    assert {rank for s in plan.plan["collection"].values() for rank in s.ranks} == {0}
    with pytest.raises(PlannerError, match="world size of 1.*2 ranks.*sharding_group_size"):
        DreamShardPlanner(quiet_topology(1), 6, stats=[], agent=StandInAgent()).collective_plan(model, sharders)
    wrong = DreamShardPlanner(quiet_topology(4), 6, stats=[], agent=StandInAgent(), sharding_group_size=4)
    with pytest.raises(PlannerError, match="divide the process group's 2 ranks"):
        wrong.collective_plan(model, sharders)


def test_sharding_group_of_a_collection():
    launch(sharding_group_worker)


def environment_worker(rank):
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    planner = DreamShardPlanner(quiet_topology(WORLD), 6, stats=[], agent=StandInAgent())
    with pytest.raises(PlannerError, match="local world size of 2, but LOCAL_WORLD_SIZE is 1"):
        planner.collective_plan(Model(bag_collection()), [EmbeddingBagCollectionSharder()])


def test_local_world_size_is_compared():
    launch(environment_worker)


def device_worker(rank):
    planner = DreamShardPlanner(quiet_topology(WORLD, "cuda"), 6, stats=[], agent=StandInAgent())
    with pytest.raises(PlannerError, match="no CUDA device"):
        planner.collective_plan(Model(bag_collection()), [EmbeddingBagCollectionSharder()])


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a host without a GPU")
def test_device_is_compared():
    launch(device_worker)


def one_rank_differs_worker(rank):
    """Only rank 1 has a wrong topology; both ranks learn of it."""
    planner = DreamShardPlanner(quiet_topology(WORLD + rank), 6, stats=[], agent=StandInAgent())
    with pytest.raises(PlannerError, match="world size of 3"):
        planner.collective_plan(Model(bag_collection()), [EmbeddingBagCollectionSharder()])


def test_a_wrong_topology_on_one_rank_is_raised_on_all():
    launch(one_rank_differs_worker)


class UnpicklableError(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


class FailingAgent(StandInAgent):
    def place(self, task, **_):
        raise UnpicklableError("this", "that")


def unpicklable_worker(rank):
    planner = DreamShardPlanner(quiet_topology(WORLD), 6, stats=[], agent=FailingAgent())
    expected = UnpicklableError if rank == 0 else PlannerError
    with pytest.raises(expected, match="this and that"):
        planner.collective_plan(Model(bag_collection()), [EmbeddingBagCollectionSharder()])


def test_any_error_reaches_every_rank():
    launch(unpicklable_worker)

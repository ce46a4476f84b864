"""Two Gloo ranks plan together: groups and topologies are compared, and errors reach every rank."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from planner_models import bag_collection, quiet_topology
from stand_in_agent import StandInAgent
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.types import PlannerError

from torchrec_dreamshard.planner import DreamShardPlanner

pytestmark = pytest.mark.distributed

WORLD = 2


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


def model(**tables):
    return nn.ModuleDict({"collection": bag_collection("meta", **tables)})


def failing_worker(rank):
    planner = DreamShardPlanner(quiet_topology(WORLD, ddr_cap=20_000), 6, stats=[], agent=StandInAgent())
    start = time.monotonic()
    with pytest.raises(PlannerError, match="t0.*bytes") as caught:
        planner.collective_plan(model(rows=(10_000,), dims=(64,)), [EmbeddingBagCollectionSharder()])
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
        plan = planner.collective_plan(model(), [EmbeddingBagCollectionSharder()], group)
        assert set(plan.plan["collection"]) == {"t0", "t1", "t2", "t3"}
    dist.barrier()


def test_a_group_without_global_rank_zero_plans():
    launch(subgroup_worker)


def mismatch_worker(rank):
    planner = DreamShardPlanner(quiet_topology(4), 6, stats=[], agent=StandInAgent())
    with pytest.raises(PlannerError, match="world size of 4.*2 ranks"):
        planner.collective_plan(model(), [EmbeddingBagCollectionSharder()])


def test_topology_of_another_size_is_refused():
    launch(mismatch_worker)


def sharding_group_worker(rank):
    """The topology describes one sharding group of a DMPCollection, the process group the whole job."""
    module, sharders = model(), [EmbeddingBagCollectionSharder()]
    planner = DreamShardPlanner(quiet_topology(1), 6, stats=[], agent=StandInAgent(), sharding_group_size=1)
    plan = planner.collective_plan(module, sharders, dist.group.WORLD)
    assert {rank for s in plan.plan["collection"].values() for rank in s.ranks} == {0}
    with pytest.raises(PlannerError, match="world size of 1.*2 ranks.*sharding_group_size"):
        DreamShardPlanner(quiet_topology(1), 6, stats=[], agent=StandInAgent()).collective_plan(module, sharders)
    wrong = DreamShardPlanner(quiet_topology(4), 6, stats=[], agent=StandInAgent(), sharding_group_size=4)
    with pytest.raises(PlannerError, match="divide the process group's 2 ranks"):
        wrong.collective_plan(module, sharders)


def test_sharding_group_of_a_collection():
    launch(sharding_group_worker)


def environment_worker(rank):
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    planner = DreamShardPlanner(quiet_topology(WORLD), 6, stats=[], agent=StandInAgent())
    with pytest.raises(PlannerError, match="local world size of 2, but LOCAL_WORLD_SIZE is 1"):
        planner.collective_plan(model(), [EmbeddingBagCollectionSharder()])


def test_local_world_size_is_compared():
    launch(environment_worker)


def device_worker(rank):
    planner = DreamShardPlanner(quiet_topology(WORLD, "cuda"), 6, stats=[], agent=StandInAgent())
    with pytest.raises(PlannerError, match="no CUDA device"):
        planner.collective_plan(model(), [EmbeddingBagCollectionSharder()])


@pytest.mark.skipif(torch.cuda.is_available(), reason="a topology for cuda is only wrong on a host without a GPU")
def test_device_is_compared():
    launch(device_worker)


def one_rank_differs_worker(rank):
    """Only rank 1 has a wrong topology; both ranks learn of it."""
    planner = DreamShardPlanner(quiet_topology(WORLD + rank), 6, stats=[], agent=StandInAgent())
    with pytest.raises(PlannerError, match="world size of 3"):
        planner.collective_plan(model(), [EmbeddingBagCollectionSharder()])


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
        planner.collective_plan(model(), [EmbeddingBagCollectionSharder()])


def test_any_error_reaches_every_rank():
    launch(unpicklable_worker)

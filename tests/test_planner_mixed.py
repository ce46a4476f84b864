"""Models with every kind of module at once: each table is placed once, memory per rank is TorchRec's, corrected."""

from __future__ import annotations

import math

import numpy as np
import pytest
from planner_models import (
    bag_collection,
    feature_processed,
    managed_collisions,
    quantised,
    quiet_topology,
    sequence_collection,
)
from stand_in_agent import StandInAgent
from torch import nn
from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.planner.utils import build_sharder_data_map, sharder_name
from torchrec.distributed.sharding_plan import get_default_sharders

from torchrec_dreamshard.planner import DreamShardPlanner, LearnedPerfModel
from torchrec_dreamshard.planner.adapter import shardable_modules

TOPOLOGIES = {
    "cpu": {"world_size": 2},
    "cpu, two hosts": {"world_size": 4, "local_world_size": 2},
    "cuda": {"world_size": 2, "compute_device": "cuda"},
    "cuda, two hosts": {"world_size": 4, "compute_device": "cuda", "local_world_size": 2},
}


def mixed_model(device, world):
    modules = {
        "bags": bag_collection("meta", prefix="b"),
        "weighted": bag_collection("meta", is_weighted=True, prefix="w"),
        "sequences": sequence_collection("meta"),
        "processed": feature_processed("meta", prefix="p"),
        "quantised": quantised("bag"),
        "quantised_sequences": quantised("sequence"),
        "collisions": managed_collisions("sequence", buckets=world),
    }
    if device == "cuda":
        modules["bag_collisions"] = managed_collisions("bag", buckets=world)
    return nn.ModuleDict(modules)


@pytest.mark.parametrize("layout", TOPOLOGIES)
def test_mixed_models_are_planned_whole(layout):
    topology = quiet_topology(**TOPOLOGIES[layout])
    device, world = topology.compute_device, topology.world_size
    model, sharders = mixed_model(device, world), get_default_sharders()
    constraints = {"b0": ParameterConstraints(sharding_types=["data_parallel"])}
    planner = DreamShardPlanner(
        topology,
        batch_size=64,
        stats=[],
        agent=StandInAgent(),
        constraints=constraints,
        storage_reservation=FixedPercentageStorageReservation(0.0),
    )
    plan = planner.plan(model, sharders).plan
    expected = {path: set(sharder.shardable_parameters(m)) for path, m, sharder in shardable_modules(model, sharders)}
    assert set(expected) == set(model)
    assert {path: set(tables) for path, tables in plan.items()} == expected
    assert plan["bags"]["b0"].sharding_type == "data_parallel"
    for path in ("quantised", "quantised_sequences"):
        assert {s.compute_kernel for s in plan[path].values()} == {"quant"}
    for path in ("collisions", "bag_collisions"):
        assert {s.sharding_type for s in plan.get(path, {}).values()} <= {"row_wise", "table_row_wise"}
    best = planner._best_plan
    assert math.isfinite(LearnedPerfModel(topology, StandInAgent()).rate(best))
    assert np.all(np.isfinite(planner.predicted().device_ms))
    check_memory(best, topology, constraints, sharders)


def check_memory(best, topology, constraints, sharders):
    """Each shard's storage is TorchRec's estimate (no fused optimizer keeps state here), and all fit."""
    counted = [shard.storage for option in best for shard in option.shards]
    used = np.zeros((topology.world_size, 2))
    for option in best:
        for shard in option.shards:
            used[shard.rank] += (shard.storage.hbm, shard.storage.ddr)
    room = np.array([(device.storage.hbm, device.storage.ddr) for device in topology.devices])
    assert np.all(used <= room) and used.sum() > 0
    estimator = EmbeddingStorageEstimator(topology=topology, constraints=constraints)
    estimator.estimate(best, build_sharder_data_map({sharder_name(s.module_type): s for s in sharders}))
    assert counted == [shard.storage for option in best for shard in option.shards]

"""Plan files: complete round trips, use as a loader, and restarts from an earlier plan."""

from __future__ import annotations

import json

import pytest
import torch
from planner_models import bag_collection, quiet_topology, sequence_collection
from stand_in_agent import StandInAgent
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.shard_estimators import EmbeddingOffloadStats
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError
from torchrec.distributed.types import BoundsCheckMode, CacheAlgorithm, CacheParams, DataType, KeyValueParams

from torchrec_dreamshard.planner import DreamShardPlanner, PlanFileLoader, load_plan, save_plan

SHARDERS = [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]


def planner(**further):
    further = {"topology": quiet_topology(4, "cuda", local_world_size=2), "batch_size": 64, "stats": [], **further}
    return DreamShardPlanner(agent=StandInAgent(), **further)


def model():
    return nn.ModuleDict({"bags": bag_collection("meta", dims=(64,) * 4), "sequences": sequence_collection("meta")})


EVERYTHING = {
    "t0": ParameterConstraints(sharding_types=["column_wise"], min_partition=32, enforce_hbm=True),
    "t1": ParameterConstraints(
        sharding_types=["table_wise"],
        compute_kernels=["fused_uvm_caching"],
        cache_params=CacheParams(algorithm=CacheAlgorithm.LFU, load_factor=0.3, precision=DataType.FP16),
        bounds_check_mode=BoundsCheckMode.WARNING,
        stochastic_rounding=False,
        output_dtype=DataType.BF16,
    ),
    "t2": ParameterConstraints(sharding_types=["data_parallel"]),
    "t3": ParameterConstraints(sharding_types=["table_row_wise"]),
    "s0": ParameterConstraints(
        sharding_types=["row_wise"], key_value_params=KeyValueParams(ps_hosts=(("::1", 2000),), l2_cache_size=3)
    ),
}


def test_round_trip_keeps_every_parameter(tmp_path):
    plan = planner(constraints=EVERYTHING).plan(model(), SHARDERS)
    save_plan(tmp_path / "plan.json", plan)
    assert load_plan(tmp_path / "plan.json") == plan


def test_cache_statistics_survive(tmp_path):
    plan = planner(constraints=EVERYTHING).plan(model(), SHARDERS)
    stats = EmbeddingOffloadStats(0.4, 1000, torch.tensor([3.0, 1.0]), 60)
    plan.plan["bags"]["t1"].cache_params.stats = stats
    save_plan(tmp_path / "plan.json", plan)
    loaded = load_plan(tmp_path / "plan.json").plan["bags"]["t1"].cache_params.stats
    assert loaded.expected_miss_rate(0.5) == stats.expected_miss_rate(0.5)


def test_unknown_parameters_are_named(tmp_path):
    plan = planner().plan(model(), SHARDERS)
    plan.plan["bags"]["t1"].key_value_params = object()
    with pytest.raises(ValueError, match="table t1, key_value_params"):
        save_plan(tmp_path / "plan.json", plan)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no json", "is not a plan file"),
        ("{}", "must have"),
        ('{"format": "torchrec_dreamshard.plan", "version": 99}', "version 99"),
    ],
)
def test_foreign_files_are_refused(tmp_path, text, message):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_plan(path)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda document: document.pop("tables"),
        lambda document: document.update(tables=5),
        lambda document: document["tables"].insert(0, "t0"),
        lambda document: document["tables"][0].pop("ranks"),
        lambda document: document["tables"][0].update(sharding_type="tablewise"),
        lambda document: document["tables"][0]["shards"][0].pop("size"),
    ],
)
def test_damaged_files_are_refused(tmp_path, spoil):
    path = tmp_path / "plan.json"
    save_plan(path, planner().plan(model(), SHARDERS))
    document = json.loads(path.read_text())
    spoil(document)
    path.write_text(json.dumps(document))
    for read in (load_plan, lambda file: PlanFileLoader(file).load()):
        with pytest.raises(ValueError, match="is a damaged plan file"):
            read(path)


@pytest.mark.parametrize("constraints", [None, EVERYTHING])
def test_loader_brings_the_plan_back(tmp_path, constraints):
    first = planner(constraints=constraints)
    plan = first.plan(model(), SHARDERS)
    first.save_plan(tmp_path / "plan.json")
    again = planner(constraints=constraints, plan_loader=PlanFileLoader(tmp_path / "plan.json", check_context=True))
    assert again.plan(model(), SHARDERS) == plan
    assert again._num_proposals == 0


def test_plan_of_dmp_alone_can_be_loaded(tmp_path):
    """A plan without the planner's estimates is enough."""
    plan = planner(constraints=EVERYTHING).plan(model(), SHARDERS)
    save_plan(tmp_path / "plan.json", plan)
    again = planner(constraints=EVERYTHING, plan_loader=PlanFileLoader(tmp_path / "plan.json"))
    assert again.plan(model(), SHARDERS) == plan


def test_stock_planner_takes_our_file(tmp_path):
    first = planner()
    plan = first.plan(model(), SHARDERS)
    first.save_plan(tmp_path / "plan.json")
    stock = EmbeddingShardingPlanner(
        quiet_topology(4, "cuda", local_world_size=2), 64, stats=[], plan_loader=PlanFileLoader(tmp_path / "plan.json")
    )
    assert stock.plan(model(), SHARDERS) == plan


def test_changed_context_is_refused(tmp_path):
    first = planner()
    first.plan(model(), SHARDERS)
    first.save_plan(tmp_path / "plan.json")
    loader = PlanFileLoader(tmp_path / "plan.json", check_context=True)
    with pytest.raises(PlannerError, match="mismatch"):
        planner(batch_size=128, plan_loader=loader).plan(model(), SHARDERS)


def test_plan_of_another_model_is_refused(tmp_path):
    first = planner()
    first.plan(model(), SHARDERS)
    first.save_plan(tmp_path / "plan.json")
    loader = PlanFileLoader(tmp_path / "plan.json")
    larger = nn.ModuleDict({"bags": bag_collection("meta", rows=(41, 60, 80, 100), dims=(64,) * 4)})
    with pytest.raises(PlannerError, match="bags.t0 of 40 rows"):
        planner(plan_loader=loader).plan(larger, SHARDERS)
    other = nn.ModuleDict({"others": bag_collection("meta")})
    with pytest.raises(PlannerError, match="no table others.t0"):
        planner(plan_loader=loader).plan(other, SHARDERS)


def test_saving_before_planning_is_refused(tmp_path):
    with pytest.raises(ValueError, match="nothing was planned yet"):
        planner().save_plan(tmp_path / "plan.json")


def test_file_tells_the_prediction(tmp_path):
    first = planner()
    first.plan(model(), SHARDERS)
    first.save_plan(tmp_path / "plan.json")
    predicted = json.loads((tmp_path / "plan.json").read_text())["predicted"]
    assert predicted["step_ms"] == first.predicted().step_ms > 0


def ranks_of(plan):
    return {name: (s.sharding_type, s.ranks) for tables in plan.plan.values() for name, s in tables.items()}


def test_restart_keeps_what_it_can(tmp_path):
    """A new table joins; the others stay, although a search from scratch places them anew."""
    old = bag_collection("meta", rows=(100,) * 6, dims=(64, 64, 32, 32, 16, 16))
    first = planner(pins={"t0": 3, "t1": 2})
    plan = first.plan(old, SHARDERS)
    first.save_plan(tmp_path / "plan.json")

    grown = bag_collection("meta", rows=(100,) * 7, dims=(64, 64, 32, 32, 16, 16, 16))
    second = planner(previous=tmp_path / "plan.json")
    again = ranks_of(second.plan(grown, SHARDERS))
    changed = {change.table for change in second.changes}
    assert "t6" in changed
    assert {name for name, where in ranks_of(plan).items() if again[name] != where} == changed - {"t6"}
    assert all(change.gain_ms > 0 for change in second.changes if change.reason == "pays")
    assert planner(previous=plan).plan(old, SHARDERS) == plan


def test_restart_pays_for_its_changes():
    """A plan with everything on one rank is worth changing, and each change says what it gains."""
    model = bag_collection("meta", rows=(100,) * 4, dims=(64,) * 4)
    crowded = planner(together=[["t0", "t1", "t2", "t3"]]).plan(model, SHARDERS)
    ours = planner(previous=crowded)
    plan = ours.plan(model, SHARDERS)
    assert len({tuple(s.ranks) for s in plan.plan[""].values()}) > 1
    assert sum(change.gain_ms for change in ours.changes) > 0
    stubborn = planner(previous=crowded, min_gain=0.99)
    assert stubborn.plan(model, SHARDERS) == crowded
    assert stubborn.changes == []


def test_restart_leaves_what_no_longer_fits():
    model = bag_collection("meta", rows=(100_000,) * 4, dims=(64,) * 4)  # 25.6 MB each
    crowded = planner(together=[["t0", "t1", "t2", "t3"]]).plan(model, SHARDERS)
    small = quiet_topology(4, "cuda", local_world_size=2, hbm_cap=70_000_000)
    ours = planner(topology=small, previous=crowded)
    plan = ours.plan(model, SHARDERS)
    assert len({tuple(s.ranks) for s in plan.plan[""].values()}) >= 2
    assert any("no longer fits" in change.reason for change in ours.changes)

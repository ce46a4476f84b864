"""What must sit together: pins, groups of tables, towers; and plans that only fit in one way."""

from __future__ import annotations

import itertools

import pytest
import torch
from planner_models import bag_collection, bag_configs, quiet_topology, sequence_collection
from stand_in_agent import StandInAgent
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_tower_sharding import EmbeddingTowerCollectionSharder, EmbeddingTowerSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.planners import EmbeddingShardingPlanner
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection

from torchrec_dreamshard.planner import DreamShardPartitioner, DreamShardPlanner
from torchrec_dreamshard.planner.proposer import DreamShardProposer

BAGS = [EmbeddingBagCollectionSharder()]
SHARDERS = [*BAGS, EmbeddingCollectionSharder(), EmbeddingTowerSharder(), EmbeddingTowerCollectionSharder()]
MB = 1_000_000


def planner(topology, **further):
    further = {"batch_size": 64, "stats": [], "agent": StandInAgent(), **further}
    return DreamShardPlanner(topology, storage_reservation=FixedPercentageStorageReservation(0.0), **further)


def shardings(plan):
    return {name: sharding for tables in plan.plan.values() for name, sharding in tables.items()}


def tower(prefix, num=3, rows=1000):
    return EmbeddingTower(bag_collection("meta", rows=(rows,) * num, dims=(16,) * num, prefix=prefix), nn.Identity())


@pytest.mark.parametrize("kind", ["towers", "collection"])
def test_a_tower_stays_on_one_host(kind):
    towers = {prefix: tower(prefix) for prefix in "abcde"}
    model = nn.ModuleDict(towers if kind == "towers" else {"c": EmbeddingTowerCollection(list(towers.values()))})
    plan = planner(quiet_topology(8, "cuda", local_world_size=4)).plan(model, SHARDERS)
    hosts = {
        prefix: {rank // 4 for name, s in shardings(plan).items() if name[0] == prefix for rank in s.ranks}
        for prefix in towers
    }
    assert all(len(found) == 1 for found in hosts.values()), hosts
    assert {next(iter(found)) for found in hosts.values()} == {0, 1}


def test_towers_pack_where_the_heaviest_first_would_not_fit():
    # 9, 6, 5 and 5 tables of 6.4 MB on hosts of 2 x 50 MB, plus one tower that HBM holds only partly
    model = nn.ModuleDict({p: tower(p, num, rows=100_000) for p, num in (("a", 9), ("b", 6), ("c", 5), ("d", 5))})
    topology = quiet_topology(4, "cuda", local_world_size=2, hbm_cap=50 * MB, ddr_cap=60 * MB)
    plan = shardings(planner(topology).plan(model, SHARDERS))
    for prefix in "abcd":
        assert len({rank // 2 for name, s in plan.items() if name[0] == prefix for rank in s.ranks}) == 1


def test_a_tower_that_fits_on_no_host_is_named():
    model = nn.ModuleDict({"a": tower("a", 4, rows=100_000)})
    topology = quiet_topology(4, "cuda", local_world_size=1, hbm_cap=10 * MB, ddr_cap=0)
    with pytest.raises(PlannerError, match=r"a\.a0.*must share one host \(a tower\).*25,6\d\d,\d{3} bytes of HBM"):
        planner(topology).plan(model, SHARDERS)


def test_pins_and_groups_inside_towers():
    model = nn.ModuleDict({"a": tower("a"), "b": tower("b")})
    made = planner(quiet_topology(4, "cuda", local_world_size=2), pins={"a1": 3}, together=[["b0", "b2"]])
    plan = shardings(made.plan(model, SHARDERS))
    assert plan["a1"].ranks == [3]
    assert {rank // 2 for name in ("a0", "a1", "a2") for rank in plan[name].ranks} == {1}
    assert plan["b0"].ranks == plan["b2"].ranks and len(plan["b0"].ranks) == 1
    with pytest.raises(PlannerError, match="must share one host, but are pinned to ranks"):
        planner(quiet_topology(4, "cuda", local_world_size=2), pins={"a0": 0, "a1": 3}).plan(model, SHARDERS)


def test_bound_tables_are_not_split():
    model = bag_collection("meta", rows=(5_000_000, 1000, 1000), dims=(512, 16, 16))
    free = shardings(planner(quiet_topology(4, "cuda")).plan(model, BAGS))
    assert len(free["t0"].ranks) > 1
    for bound in ({"pins": {"t0": 2}}, {"together": [["t0", "t1"]]}):
        plan = shardings(planner(quiet_topology(4, "cuda"), **bound).plan(model, BAGS))
        assert plan["t0"].ranks == ([2] if "pins" in bound else plan["t1"].ranks)
        assert len(plan["t0"].ranks) == 1


def test_overlapping_groups_and_a_pin_are_one():
    model = bag_collection("meta", rows=(1000,) * 5, dims=(16,) * 5)
    made = planner(quiet_topology(3, "cuda"), together=[["t0", "t1"], ["t3", "t4"], ["t1", "t3"]], pins={"t4": 2})
    plan = shardings(made.plan(model, BAGS))
    assert all(plan[name].ranks == [2] for name in ("t0", "t1", "t3", "t4"))
    with pytest.raises(PlannerError, match=r"t0', 't1.*pinned to ranks \[0, 1\]"):
        planner(quiet_topology(3, "cuda"), together=[["t0", "t1"]], pins={"t0": 0, "t1": 1}).plan(model, BAGS)


def test_groups_are_packed_with_the_rest():
    """Three groups of two 6.4 MB tables and three single ones on three ranks of 20 MB: one way but for names."""
    model = bag_collection("meta", rows=(100_000,) * 9, dims=(16,) * 9)
    groups = [["t0", "t1"], ["t2", "t3"], ["t4", "t5"]]
    only = {f"t{i}": ParameterConstraints(sharding_types=["table_wise"]) for i in range(9)}
    topology = quiet_topology(3, "cuda", hbm_cap=20 * MB, ddr_cap=0)
    plan = shardings(planner(topology, together=groups, constraints=only).plan(model, BAGS))
    assert all(plan[first].ranks == plan[second].ranks for first, second in groups)
    assert sorted(s.ranks[0] for s in plan.values()) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize(
    ("bound", "message"),
    [
        (
            {"pins": dict.fromkeys(("t0", "t1", "t2", "t3"), 1)},
            r"'t0', 't1'.*pinned|t\d'\] are pinned to rank 1: they need",
        ),
        ({"together": [["t0", "t1", "t2", "t3"]]}, "t0', 't1', 't2', 't3'. are kept together: they need 25,6"),
    ],
)
def test_bound_tables_without_room_are_named(bound, message):
    model = bag_collection("meta", rows=(100_000,) * 4, dims=(16,) * 4)
    topology = quiet_topology(4, "cuda", hbm_cap=20 * MB, ddr_cap=0)
    with pytest.raises(PlannerError, match=message):
        planner(topology, **bound).plan(model, BAGS)


def test_parts_alone_keep_groups_in_the_stock_planner():
    model = bag_collection("meta", rows=(1000,) * 4, dims=(16,) * 4)
    topology = quiet_topology(2, "cuda")
    stock = EmbeddingShardingPlanner(
        topology,
        batch_size=64,
        stats=[],
        proposer=DreamShardProposer(StandInAgent(), bound=["t0", "t1"]),
        partitioner=DreamShardPartitioner(StandInAgent(), pins={"t0": 1}, together=[["t0", "t1"]]),
    )
    plan = shardings(stock.plan(model, BAGS))
    assert plan["t0"].ranks == plan["t1"].ranks == [1]


def test_a_restart_keeps_pins_groups_and_towers():
    model = nn.ModuleDict({"a": tower("a"), "b": tower("b"), "e": bag_collection("meta")})
    topology = quiet_topology(4, "cuda", local_world_size=2)
    first = planner(topology).plan(model, SHARDERS)
    again = planner(topology, previous=first, pins={"t0": 3, "a0": 0}, together=[["t1", "t2"]], min_gain=0.0)
    plan = shardings(again.plan(model, SHARDERS))
    assert plan["t0"].ranks == [3] and plan["a0"].ranks == [0]
    assert plan["t1"].ranks == plan["t2"].ranks
    for prefix in "ab":
        assert len({rank // 2 for name, s in plan.items() if name[0] == prefix for rank in s.ranks}) == 1


def test_a_narrow_giant_is_split_by_rows_on_a_cpu():
    """No rank holds it and its columns cannot be split: row-wise, which TorchRec 1.8 runs but does not offer."""
    model = bag_collection("meta", rows=(4_000_000, 1000), dims=(8, 16))  # 128 MB
    topology = quiet_topology(2, ddr_cap=100 * MB)
    with pytest.raises(PlannerError):
        EmbeddingShardingPlanner(topology, batch_size=64, stats=[]).plan(model, BAGS)
    plan = shardings(planner(topology).plan(model, BAGS))
    assert (plan["t0"].sharding_type, plan["t0"].ranks) == ("row_wise", [0, 1])
    roomy = shardings(planner(quiet_topology(2, ddr_cap=1000 * MB)).plan(model, BAGS))
    assert all(sharding.sharding_type != "row_wise" for sharding in roomy.values())
    with pytest.raises(PlannerError, match="row_wise.*EmbeddingBagCollection.*cpu"):
        planner(topology, constraints={"t0": ParameterConstraints(sharding_types=["table_wise"])}).plan(model, BAGS)


def test_tight_tables_are_split_until_they_fit():
    """Three tables of 60 % of a device on two devices, of which only row-wise halves fit."""
    model = bag_collection("meta", rows=(1_000_000,) * 3, dims=(8,) * 3)
    plan = shardings(planner(quiet_topology(2, "cuda", hbm_cap=53 * MB, ddr_cap=0)).plan(model, BAGS))
    assert any(sharding.sharding_type == "row_wise" for sharding in plan.values())


def test_names_shared_by_modules_are_bound_in_all():
    model = nn.ModuleDict(
        {
            "x": EmbeddingBagCollection(tables=bag_configs(), device=torch.device("meta")),
            "y": EmbeddingBagCollection(tables=bag_configs(), device=torch.device("meta")),
            "s": sequence_collection("meta"),
        }
    )
    plan = planner(quiet_topology(3, "cuda"), pins={"t1": 2}).plan(model, SHARDERS).plan
    assert plan["x"]["t1"].ranks == plan["y"]["t1"].ranks == [2]
    assert set(itertools.chain(*plan.values())) == {"t0", "t1", "t2", "t3", "s0", "s1", "s2"}

"""Known traps of TorchRec 1.8's planner: each with the built-in's behaviour and ours.

A test marked (d) is in test_planner_distributed.py, (p) in test_plan_file.py, (g) in test_planner_groups.py, (c) in
test_planner_constraints.py.

    #2282, #696 planning outlasts the group's timeout   test_planning_stays_in_its_budget
    an error on rank 0 leaves the others waiting        (d) test_every_rank_gets_the_same_error
    #1837 a group without global rank 0                 (d) test_a_group_without_global_rank_zero_plans
    DP proposer: crash on cpu, empty second plan()      test_second_plan_and_cpu_topology_work
    #4648, #3367 plan varies with PYTHONHASHSEED        test_plan_is_the_same_for_every_hash_seed
    #3376 loader without get_plan_id                    test_loader_without_plan_id
    #4595 reservation without _percentage               test_storage_error_is_shown_for_any_reservation
    #3652 a dropped table surfaces as KeyError          test_dropped_table_is_named
    #3495 a bad rank offline                            test_bad_rank_offline
    #741 percentage reservation is a no-op on cpu       test_percentage_reserves_host_memory
    #4142 optimizer state in the weights' precision     test_optimizer_state_is_fbgemms
    #225, #2510, #3569 topology differs from the job    (d) test_topology_of_another_size_is_refused,
                                                        (d) test_local_world_size_is_compared,
                                                        (d) test_device_is_compared
    world size not a multiple of the local one          test_world_must_divide_into_hosts
    #1252 row-wise bags on cpu                          test_row_wise_bags_on_cpu_when_asked_for,
                                                        (g) test_a_narrow_giant_is_split_by_rows_on_a_cpu
    #1255 data-parallel sequences on cpu                test_no_data_parallel_sequences_on_cpu
    #2958 managed collisions on cpu                     test_managed_collisions_on_cpu
    #4377 managed-collision buckets                     test_managed_collision_buckets_are_explained
    #1495, #1612 widths must be multiples of 4          test_odd_width_is_named
    #294 column widths of an EmbeddingCollection        test_sequence_column_widths_agree
    #1388 column shards of a table on one rank          test_column_shards_spread_over_ranks,
                                                        (c) test_column_shards_are_no_more_than_devices
    #325, #1094 pooling_factors per feature             test_pooling_factors_match_features,
                                                        test_one_default_factor_counts_for_every_feature
    names and modules ignored in silence                test_misspelled_constraint_is_warned,
                                                        test_constraints_next_to_an_enumerator_are_warned,
                                                        test_unsharded_modules_are_warned
    #2642, #662 pin or co-locate tables                 test_pins_and_groups, (g) the whole file
    towers on one host                                  (g) test_a_tower_stays_on_one_host
    #2394, #1739 plans that flip                        (p) test_restart_keeps_what_it_can
    #2575, #3025 quantised collections                  test_quantised_collections_are_planned
    #3295, #4310 DMPCollection                          (d) test_sharding_group_of_a_collection
"""

from __future__ import annotations

import copy
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from planner_models import (
    bag_collection,
    bag_configs,
    managed_collisions,
    quantised,
    quiet_topology,
    sequence_collection,
)
from stand_in_agent import StandInAgent
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.proposers import DynamicProgrammingProposer
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    PlanLoader,
    PlannerError,
    PlannerErrorType,
    StorageReservation,
)
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from torchrec_dreamshard.planner import DreamShardPlanner
from torchrec_dreamshard.planner.enumerator import DreamShardEnumerator

BAGS = [EmbeddingBagCollectionSharder()]
SEQUENCES = [EmbeddingCollectionSharder()]
GB = 1024**3


def planner(topology=None, **further):
    further = {"batch_size": 64, "stats": [], "agent": StandInAgent(), **further}
    return DreamShardPlanner(topology or quiet_topology(), **further)


def stock(topology=None, **further):
    return EmbeddingShardingPlanner(topology or quiet_topology(), **{"batch_size": 64, "stats": [], **further})


def shardings(plan):
    return {name: sharding for tables in plan.plan.values() for name, sharding in tables.items()}


def test_planning_stays_in_its_budget():
    model = bag_collection("meta", rows=[1000 + i for i in range(120)], dims=[16, 64, 128, 256] * 30)
    start = time.monotonic()
    plan = planner(quiet_topology(8, "cuda"), time_budget_s=0.5).plan(model, BAGS)
    assert len(shardings(plan)) == 120
    # the built-in needs some 20 s for 100 tables on 8 devices; a generous bound, as the host may be busy
    assert time.monotonic() - start < 10


def test_second_plan_and_cpu_topology_work():
    with pytest.raises(ZeroDivisionError):
        stock(proposer=DynamicProgrammingProposer()).plan(bag_collection("meta"), BAGS)
    ours = planner()
    first, second = (ours.plan(bag_collection("meta"), BAGS) for _ in range(2))
    assert first == second
    assert ours._num_proposals > 0


HASH_SEED_SCRIPT = """
import sys; sys.path.insert(0, {tests!r})
from test_traps import *
model = nn.ModuleDict({{"b": bag_collection("meta", dims=(64, 64, 64, 64)), "s": sequence_collection("meta")}})
kinds = ["column_wise", "table_wise", "row_wise"]
constraints = {{f"t{{i}}": ParameterConstraints(sharding_types=kinds) for i in range(4)}}
made = planner(quiet_topology(4, "cuda"), constraints=constraints, seed=3)
print("PLAN", {{name: (s.sharding_type, s.ranks) for name, s in shardings(made.plan(model, BAGS + SEQUENCES)).items()}})
print("HASH", made.hash_planner_context_inputs_str())
"""


def test_plan_is_the_same_for_every_hash_seed():
    script = HASH_SEED_SCRIPT.format(tests=str(Path(__file__).parent))
    outputs = set()
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        outputs.add(tuple(line for line in done.stdout.splitlines() if line.startswith(("PLAN", "HASH"))))
    assert len(outputs) == 1
    assert len(outputs.pop()) == 2


class BareLoader(PlanLoader):
    """A loader as the abstract class asks for it, without the undeclared ``get_plan_id``."""

    def __init__(self, options):
        self.options = options

    def load(self):
        return {option.storage_hash(): option for option in self.options}

    def plan_context_hash(self):
        return None


def test_loader_without_plan_id():
    model = bag_collection("meta")
    first = planner(seed=1)
    plan = first.plan(model, BAGS)
    loader = BareLoader(first._best_plan)
    with pytest.raises(AttributeError, match="get_plan_id"):
        stock(plan_loader=loader).plan(model, BAGS)
    assert planner(plan_loader=loader).plan(model, BAGS) == plan


class OwnReservation(StorageReservation):
    """A reservation without TorchRec's private ``_percentage``."""

    def reserve(self, topology, batch_size, module, sharders, constraints=None):
        self._topology = copy.deepcopy(topology)
        return self._topology

    @property
    def last_reserved_topology(self):
        return self._topology


def test_storage_error_is_shown_for_any_reservation():
    model = bag_collection("meta", rows=(1_000_000,), dims=(64,))
    topology = quiet_topology(2, "cuda", hbm_cap=1_000_000, ddr_cap=1_000_000)
    with pytest.raises(AttributeError, match="_percentage"):
        stock(topology, storage_reservation=OwnReservation()).plan(model, BAGS)
    with pytest.raises(PlannerError, match=r"t0.*needs [\d,]+ bytes") as caught:
        planner(topology, storage_reservation=OwnReservation()).plan(model, BAGS)
    assert caught.value.error_type is PlannerErrorType.INSUFFICIENT_STORAGE


def test_dropped_table_is_named():
    def drop(plan):
        return [option for option in plan if option.name != "t2"]

    incomplete = stock(callbacks=[drop]).plan(bag_collection("meta"), BAGS)  # the built-in does not notice
    assert "t2" not in shardings(incomplete)
    with pytest.raises(PlannerError, match="table t2"):
        planner(callbacks=[drop]).plan(bag_collection("meta"), BAGS)


def test_bad_rank_offline():
    def spoil(plan):
        plan[0].shards[0].rank = 7
        return plan

    whole = {"t0": ParameterConstraints(sharding_types=["table_wise"])}
    with pytest.raises(ValueError, match="process group"):
        stock(constraints=whole, callbacks=[spoil]).plan(bag_collection("meta"), BAGS)
    with pytest.raises(PlannerError, match="t0 has rank 7.*ranks 0 to 1") as caught:
        planner(callbacks=[spoil]).plan(bag_collection("meta"), BAGS)
    assert caught.value.error_type is PlannerErrorType.INVALID_RANK_ASSIGNMENT


def test_percentage_reserves_host_memory():
    model = bag_collection("meta", rows=(1_000_000,), dims=(64,))  # 256 MB of weights
    topology = quiet_topology(1, ddr_cap=400_000_000)
    reservation = FixedPercentageStorageReservation(0.5)
    stock(topology, storage_reservation=reservation).plan(model, BAGS)  # as if nothing were reserved
    with pytest.raises(PlannerError, match="host memory"):
        planner(topology, storage_reservation=reservation).plan(model, BAGS)


def test_optimizer_state_is_fbgemms():
    config = EmbeddingBagConfig(
        name="t0", num_embeddings=1000, embedding_dim=64, feature_names=["f"], data_type=DataType.BF16
    )
    adagrad = EmbeddingBagCollectionSharder(fused_params={"optimizer": "exact_adagrad"})
    stored = {}
    for sharder in (BAGS[0], adagrad):
        enumerator = DreamShardEnumerator(quiet_topology(2, "cuda"), 64)
        collection = EmbeddingBagCollection(tables=[config], device=torch.device("meta"))
        option = enumerator.enumerate(collection, [sharder])[0]
        assert option.sharding_type == "table_wise"
        stored[sharder is adagrad] = option.shards[0].storage.hbm
        builtin = stock(quiet_topology(2, "cuda"))._enumerator.enumerate(collection, [sharder])
        whole = next(o for o in builtin if (o.sharding_type, o.compute_kernel) == ("table_wise", "fused"))
        assert whole.shards[0].storage.hbm == stored[False]  # knows nothing of an optimizer in fused_params
    assert stored[True] - stored[False] == 1000 * 64 * 4  # one float32 per weight, whatever the weights' dtype


def test_world_must_divide_into_hosts():
    stock(quiet_topology(10, "cuda", local_world_size=4))  # silently loses ranks 8 and 9 for host-bound types
    with pytest.raises(ValueError, match="multiple of its local_world_size, got world size 10 and 4"):
        planner(quiet_topology(10, "cuda", local_world_size=4))


def test_row_wise_bags_on_cpu_when_asked_for():
    rows = {"t0": ParameterConstraints(sharding_types=["row_wise"])}
    with pytest.raises(RuntimeError, match="No available sharding type"):
        stock(constraints=rows).plan(bag_collection("meta"), BAGS)
    plan = shardings(planner(constraints=rows).plan(bag_collection("meta"), BAGS))
    assert plan["t0"].sharding_type == "row_wise"
    assert all(sharding.sharding_type != "row_wise" for name, sharding in plan.items() if name != "t0")


def test_no_data_parallel_sequences_on_cpu():
    model = sequence_collection("meta")
    offered = {o.sharding_type for o in stock()._enumerator.enumerate(model, SEQUENCES)}
    assert "data_parallel" in offered
    ours = {o.sharding_type for o in planner()._enumerator.enumerate(model, SEQUENCES)}
    assert "data_parallel" not in ours
    replicate = {"s0": ParameterConstraints(sharding_types=["data_parallel"])}
    with pytest.raises(PlannerError, match="s0"):
        planner(constraints=replicate).plan(model, SEQUENCES)


def test_managed_collisions_on_cpu():
    with pytest.raises(ValueError, match="compute kernel"):
        stock().plan(managed_collisions("sequence"), get_default_sharders())
    plan = shardings(planner().plan(managed_collisions("sequence"), get_default_sharders()))
    assert {(s.sharding_type, s.compute_kernel) for s in plan.values()} == {("row_wise", "fused")}
    with pytest.raises(PlannerError, match=r"ManagedCollisionEmbeddingBagCollection\) cannot be sharded on cpu"):
        planner().plan(managed_collisions("bag"), get_default_sharders())


def test_managed_collision_buckets_are_explained():
    with pytest.raises(ValueError, match="justknobs|JK"):
        stock().plan(managed_collisions("sequence", buckets=1), get_default_sharders())
    with pytest.raises(PlannerError, match="table s0.*buckets=1.*multiple of 2"):
        planner().plan(managed_collisions("sequence", buckets=1), get_default_sharders())


def test_odd_width_is_named():
    model = bag_collection("meta", dims=(10, 8, 16, 4))
    stock().plan(model, BAGS)  # and fails in DistributedModelParallel
    with pytest.raises(PlannerError, match=r"multiples of 4.*t0 \(10\)"):
        planner().plan(model, BAGS)
    replicate = {"t0": ParameterConstraints(sharding_types=["data_parallel"])}
    assert shardings(planner(constraints=replicate).plan(model, BAGS))["t0"].sharding_type == "data_parallel"


def test_sequence_column_widths_agree():
    model = sequence_collection("meta", dim=64)
    constraints = {
        f"s{i}": ParameterConstraints(sharding_types=["column_wise"], min_partition=width)
        for i, width in enumerate((16, 32, 64))
    }

    def widths(plan):
        return {shard.shard_sizes[1] for s in shardings(plan).values() for shard in s.sharding_spec.shards}

    assert len(widths(stock(constraints=constraints).plan(model, SEQUENCES))) > 1
    assert widths(planner(constraints=constraints).plan(model, SEQUENCES)) == {64}


class OneRankAgent(StandInAgent):
    """Puts everything on rank 0."""

    def place(self, task, **_):
        return (0,) * task.num_shards


def test_column_shards_spread_over_ranks():
    constraints = {"t0": ParameterConstraints(sharding_types=["column_wise"], min_partition=32)}
    model = bag_collection("meta", rows=(1000,), dims=(64,))
    narrow = {"t0": ParameterConstraints(sharding_types=["column_wise"], min_partition=16)}
    crowded = shardings(stock(constraints=narrow).plan(model, BAGS))["t0"].ranks
    assert len(crowded) > len(set(crowded))  # four shards on two ranks
    plan = planner(constraints=constraints, agent=OneRankAgent()).plan(model, BAGS)
    assert sorted(shardings(plan)["t0"].ranks) == [0, 1]


def test_pooling_factors_match_features():
    model = bag_collection("meta", features=[3, 1, 1, 1])
    one = {"t0": ParameterConstraints(pooling_factors=[20.0])}
    stock(constraints=one).plan(model, BAGS)  # three times too cheap
    with pytest.raises(PlannerError, match="t0.*3 features, got 1") as caught:
        planner(constraints=one).plan(model, BAGS)
    assert caught.value.error_type is PlannerErrorType.INPUT_VALIDATION
    with pytest.raises(PlannerError, match="t1.*finite"):
        planner(constraints={"t1": ParameterConstraints(pooling_factors=[float("nan")])}).plan(model, BAGS)


def test_one_default_factor_counts_for_every_feature():
    ours = planner()
    ours.plan(bag_collection("meta", features=[3, 1, 1, 1]), BAGS)
    costs = ours._source.on(ours._topology)
    factors = {o.name: costs.adapter.shard_specs(o, 2)[0].pooling_factor for o in ours._best_plan}
    assert factors == {"t0": 3.0, "t1": 1.0, "t2": 1.0, "t3": 1.0}


def test_misspelled_constraint_is_warned(caplog):
    stock(constraints={"t9": ParameterConstraints()}).plan(bag_collection("meta"), BAGS)
    assert "t9" not in "".join(r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING)
    planner(constraints={"t9": ParameterConstraints(), "t1": ParameterConstraints()}).plan(bag_collection("meta"), BAGS)
    warnings = [r.getMessage() for r in caplog.records if r.name.startswith("torchrec_dreamshard")]
    assert warnings == ["constraints name tables that no sharder handles, they have no effect: ['t9']"]


def test_constraints_next_to_an_enumerator_are_warned(caplog):
    topology = quiet_topology()
    enumerator = DreamShardEnumerator(topology, 64)
    constraints = {"t1": ParameterConstraints(sharding_types=["data_parallel"])}
    planner(topology, enumerator=enumerator, constraints=constraints).plan(bag_collection("meta"), BAGS)
    assert "enumerator" in caplog.text and "t1" in caplog.text


class OwnCollection(EmbeddingBagCollection):
    pass


def test_unsharded_modules_are_warned(caplog):
    model = nn.ModuleDict(
        {
            "plain": bag_collection("meta"),
            "own": OwnCollection(tables=bag_configs(prefix="o"), device=torch.device("meta")),
            "sequence": sequence_collection("meta"),
        }
    )
    with caplog.at_level(logging.WARNING):
        plan = planner().plan(model, BAGS)
    assert set(plan.plan) == {"plain"}
    assert "'own' (OwnCollection)" in caplog.text and "exactly" in caplog.text
    assert "'sequence'" in caplog.text


def test_pins_and_groups():
    model = bag_collection("meta", rows=(100,) * 6, dims=(16,) * 6)
    ours = planner(quiet_topology(3, "cuda"), pins={"t4": 2}, together=[["t0", "t3", "t5"]])
    plan = shardings(ours.plan(model, BAGS))
    assert plan["t4"].ranks == [2]
    assert plan["t0"].ranks == plan["t3"].ranks == plan["t5"].ranks
    with pytest.raises(ValueError, match="pins must be ranks from 0 to 2, got 9 for table t4"):
        planner(quiet_topology(3, "cuda"), pins={"t4": 9})


@pytest.mark.parametrize("kind", ["bag", "sequence"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_quantised_collections_are_planned(kind, device):
    plan = shardings(planner(quiet_topology(2, device)).plan(quantised(kind), get_default_sharders()))
    assert {s.compute_kernel for s in plan.values()} == {"quant"}

"""What TorchRec's own planner tests check, asked of ``DreamShardPlanner`` (TorchRec 1.8, distributed/planner/tests).

Not the built-in's exact layouts, which are the greedy's own. Tests in other files are marked: (p) test_planner.py,
(f) test_plan_file.py, (r) test_torchrec_reports.py, (t) test_traps.py, (d) test_planner_distributed.py.

    signatures of planner and parts             (p) test_signatures_are_torchrecs
    hash of the planner's inputs                test_equal_inputs_hash_equally, test_each_input_changes_the_hash,
                                                test_hashing_needs_a_search_space
    table-wise, hidden row-wise solutions       test_a_table_too_wide_for_any_device_is_split_by_rows
    never fit, and why                          test_never_fit, (p) test_strict_constraints_are_told_apart
    fail, then rerun                            (p) test_failure_then_success_with_one_planner
    no sharders, nothing to shard               test_no_sharders, (p) test_nothing_to_shard_gives_an_empty_plan
    constraints: types, kernels, partitions     (p) test_constraints_are_honoured
    constraints: fused parameters               test_fused_parameters_come_through
    constraints: inputs                         test_inputs_come_through
    constraints: virtual tables                 test_virtual_tables
    device groups                               test_tables_of_another_device_group_are_left_out
    proposers: greedy, uniform, grid, DP, cache test_torchrecs_proposers, test_torchrecs_proposer_of_caches
    partitioners: greedy, memory-balanced       test_torchrecs_partitioners
    perf models: perf, storage                  test_torchrecs_perf_models
    our parts in TorchRec's planner             (p) test_each_part_works_alone_in_the_stock_planner
    enumerators, estimators                     test_a_users_estimator_is_asked, (p) test_estimates_are_torchrecs
    reservations: each of TorchRec's            test_torchrecs_reservations, (p) test_reservation_counts
    device memory                               test_devices_of_different_sizes
    stats                                       (r) test_stats_given_in_any_way, (p) test_stats_and_callbacks_run
    callbacks                                   (r) test_callbacks_run_in_order
    loaders                                     (r) test_a_loader_without_a_plan, (r) test_a_loaded_context,
                                                (f) test_loader_brings_the_plan_back
    timeout                                     (r) test_timeout_stops_a_proposer_without_end,
                                                (r) test_timeout_must_be_positive
    validation of modules, ranks, kernels       (t) test_dropped_table_is_named, (t) test_bad_rank_offline,
                                                (r) test_an_unknown_kernel_is_refused
    planning together                           (d) test_every_rank_gets_the_same_error and the rest of it
"""

from __future__ import annotations

import pytest
import torch
from planner_models import bag_collection, quiet_topology, sequence_collection
from stand_in_agent import StandInAgent
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner, MemoryBalancedPartitioner
from torchrec.distributed.planner.perf_models import NoopPerfModel, NoopStorageModel
from torchrec.distributed.planner.proposers import (
    DynamicProgrammingProposer,
    EmbeddingOffloadScaleupProposer,
    GreedyProposer,
    GridSearchProposer,
    UniformProposer,
)
from torchrec.distributed.planner.shard_estimators import (
    EmbeddingOffloadStats,
    EmbeddingPerfEstimator,
    EmbeddingStorageEstimator,
)
from torchrec.distributed.planner.storage_reservations import (
    FixedAbsoluteStorageReservation,
    FixedPercentageStorageReservation,
    HeuristicalStorageReservation,
    InferenceStorageReservation,
)
from torchrec.distributed.planner.types import (
    CustomTopologyData,
    ParameterConstraints,
    PlannerError,
    PlannerErrorType,
)
from torchrec.distributed.types import BoundsCheckMode, CacheAlgorithm, CacheParams, DataType, KeyValueParams

from torchrec_dreamshard.planner import DreamShardPlanner
from torchrec_dreamshard.planner.enumerator import DreamShardEnumerator

BAGS = [EmbeddingBagCollectionSharder()]
ALL = [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
GB = 1024**3
NO_RESERVATION = FixedPercentageStorageReservation(0.0)


def gpus(world_size=2, **further):
    return quiet_topology(world_size, "cuda", **further)


def planner(topology=None, **further):
    return DreamShardPlanner(topology or gpus(), **{"batch_size": 64, "stats": [], "agent": StandInAgent(), **further})


def shardings(plan):
    return {name: sharding for tables in plan.plan.values() for name, sharding in tables.items()}


# hashing


def hashes(model=None, **further):
    ours = planner(**further)
    ours.plan(model or bag_collection("meta"), BAGS)
    return ours.hash_planner_context_inputs(), ours.hash_planner_context_inputs_str()


def test_equal_inputs_hash_equally():
    constraints = {"t0": ParameterConstraints(sharding_types=["row_wise"]), "t1": ParameterConstraints()}
    first = hashes(constraints=constraints)
    assert first == hashes(constraints=dict(reversed(constraints.items())))
    assert isinstance(first[0], int) and isinstance(first[1], str)


@pytest.mark.parametrize(
    "change",
    [
        {"topology": gpus(4)},
        {"topology": gpus(hbm_cap=300 * GB)},
        {"batch_size": 128},
        {"constraints": {"t0": ParameterConstraints(pooling_factors=[7.0])}},
        {"storage_reservation": FixedPercentageStorageReservation(0.3)},
        {"model": bag_collection("meta", rows=(41, 60, 80, 100))},
    ],
    ids=["world", "memory", "batch", "constraints", "reservation", "model"],
)
def test_each_input_changes_the_hash(change):
    for before, after in zip(hashes(), hashes(**change), strict=True):
        assert before != after


def test_hashing_needs_a_search_space():
    with pytest.raises(AssertionError, match="search space"):
        planner().hash_planner_context_inputs()


# solutions


def test_a_table_too_wide_for_any_device_is_split_by_rows():
    """One column group of the table is larger than a device: only rows help (TorchRec's "hidden row-wise solution")."""
    model = bag_collection("meta", rows=(50_000_000, 100), dims=(32, 16))  # 6.4 GB
    ours = planner(gpus(8, hbm_cap=2 * GB, ddr_cap=1000), storage_reservation=NO_RESERVATION)
    assert shardings(ours.plan(model, BAGS))["t0"].sharding_type == "row_wise"


def test_never_fit():
    model = bag_collection("meta", rows=(10_000_000,) * 10, dims=(64,) * 10)
    ours = planner(gpus(hbm_cap=GB, ddr_cap=GB), storage_reservation=NO_RESERVATION)
    with pytest.raises(PlannerError) as caught:
        ours.plan(model, BAGS)
    assert caught.value.error_type is PlannerErrorType.INSUFFICIENT_STORAGE
    assert ours._num_proposals >= 1 and ours._num_plans == 0
    with pytest.raises(ValueError, match="nothing was planned"):
        ours.predicted()


def test_no_sharders():
    assert planner().plan(bag_collection("meta"), []).plan == {}


# constraints


FUSED_PARAMETERS = {
    "cache_params": CacheParams(algorithm=CacheAlgorithm.LFU, load_factor=0.3, prefetch_pipeline=True),
    "enforce_hbm": True,
    "stochastic_rounding": False,
    "bounds_check_mode": BoundsCheckMode.WARNING,
    "output_dtype": DataType.FP16,
}


def test_fused_parameters_come_through():
    constraints = {"t0": ParameterConstraints(compute_kernels=["fused_uvm_caching"], **FUSED_PARAMETERS)}
    plan = shardings(planner(constraints=constraints).plan(bag_collection("meta"), BAGS))
    for field, value in FUSED_PARAMETERS.items():
        assert getattr(plan["t0"], field) == value
        assert getattr(plan["t1"], field) is None


def test_inputs_come_through():
    constraints = {
        "t0": ParameterConstraints(pooling_factors=[2.0, 3.0], num_poolings=[1.0, 4.0], batch_sizes=[32, 16]),
    }
    ours = planner(constraints=constraints)
    ours.plan(bag_collection("meta", features=[2, 1, 1, 1]), BAGS)
    options = {option.name: option for option in ours._best_plan}
    assert options["t0"].input_lengths == [2.0, 3.0]
    plain = planner(constraints={"t0": ParameterConstraints(pooling_factors=[2.0, 3.0])})
    plain.plan(bag_collection("meta", features=[2, 1, 1, 1]), BAGS)
    memory = [p._enumerator.last_stored_search_space[0].shards[0].storage.hbm for p in (ours, plain)]
    assert memory[0] != memory[1]  # poolings and batch sizes count in the estimates of the exchange's buffers


def test_virtual_tables():
    kernel = EmbeddingComputeKernel.DRAM_VIRTUAL_TABLE.value
    constraints = {
        "t0": ParameterConstraints(
            sharding_types=["row_wise"],
            compute_kernels=[kernel],
            use_virtual_table=True,
            key_value_params=KeyValueParams(max_l1_cache_size=1),
        )
    }
    plan = shardings(planner(constraints=constraints).plan(bag_collection("meta"), BAGS))
    assert (plan["t0"].sharding_type, plan["t0"].compute_kernel) == ("row_wise", kernel)
    assert plan["t0"].key_value_params == KeyValueParams(max_l1_cache_size=1)
    assert plan["t1"].compute_kernel == "fused"


def test_tables_of_another_device_group_are_left_out():
    constraints = {"t1": ParameterConstraints(device_group="cpu"), "t2": ParameterConstraints(device_group="cuda")}
    plan = shardings(planner(constraints=constraints).plan(bag_collection("meta"), BAGS))
    assert set(plan) == {"t0", "t2", "t3"}


# parts


@pytest.mark.parametrize(
    "proposers",
    [
        GreedyProposer(),
        GreedyProposer(use_depth=False),
        UniformProposer(),
        GridSearchProposer(),
        DynamicProgrammingProposer(),
        [GreedyProposer(), UniformProposer(use_depth=False)],
    ],
    ids=["greedy", "greedy-breadth", "uniform", "grid", "dynamic", "several"],
)
def test_torchrecs_proposers(proposers):
    ours = planner(proposer=proposers)
    first, second = (ours.plan(bag_collection("meta"), BAGS) for _ in range(2))
    assert set(shardings(first)) == set(shardings(second)) == {"t0", "t1", "t2", "t3"}
    assert ours._num_plans >= 1


def test_torchrecs_proposer_of_caches():
    """It grows caches as far as memory goes, most where most lookups miss."""
    cached = {
        f"t{i}": ParameterConstraints(
            compute_kernels=["fused_uvm_caching"],
            cache_params=CacheParams(
                load_factor=0.1,
                stats=EmbeddingOffloadStats(0.2 + 0.2 * i, 1000, torch.tensor([3.0, 1.0, 1.0]), 60),
            ),
        )
        for i in range(2)
    }
    model = bag_collection("meta", rows=(1_000_000,) * 2, dims=(64,) * 2)
    topology = gpus(hbm_cap=2 * GB)
    ours = planner(topology, proposer=EmbeddingOffloadScaleupProposer(), constraints=cached)
    plan = shardings(ours.plan(model, BAGS))
    assert ours._num_proposals > 1
    assert max(sharding.cache_params.load_factor or 1.0 for sharding in plan.values()) > 0.1


@pytest.mark.parametrize("partitioner", [GreedyPerfPartitioner(), MemoryBalancedPartitioner()])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_torchrecs_partitioners(partitioner, device):
    model = nn.ModuleDict({"bags": bag_collection("meta"), "sequences": sequence_collection("meta")})
    plan = planner(quiet_topology(2, device), partitioner=partitioner).plan(model, ALL)
    assert {rank for sharding in shardings(plan).values() for rank in sharding.ranks} == {0, 1}


@pytest.mark.parametrize("model", [NoopPerfModel, NoopStorageModel])
def test_torchrecs_perf_models(model):
    topology = gpus()
    plan = planner(topology, performance_model=model(topology)).plan(bag_collection("meta"), BAGS)
    assert set(shardings(plan)) == {"t0", "t1", "t2", "t3"}


class CountingStorage(EmbeddingStorageEstimator):
    def __init__(self, topology):
        super().__init__(topology)
        self.names = set()

    def estimate(self, sharding_options, sharder_data_map):
        self.names.update(option.name for option in sharding_options)
        super().estimate(sharding_options, sharder_data_map)
        for option in sharding_options:
            for shard in option.shards:
                shard.storage.hbm += 1_000_000


@pytest.mark.parametrize("kind", [EmbeddingEnumerator, DreamShardEnumerator])
def test_a_users_estimator_is_asked(kind):
    topology = gpus()
    storage = CountingStorage(topology)
    enumerator = kind(topology, 64, estimator=[EmbeddingPerfEstimator(topology), storage])
    ours = planner(topology, enumerator=enumerator)
    ours.plan(bag_collection("meta"), BAGS)
    assert storage.names == {"t0", "t1", "t2", "t3"}
    assert all(shard.storage.hbm >= 1_000_000 for option in ours._best_plan for shard in option.shards)


@pytest.mark.filterwarnings("ignore:HeuristicalStorageReservation")
@pytest.mark.parametrize(
    "reservation",
    [
        FixedPercentageStorageReservation(0.9),
        FixedAbsoluteStorageReservation(900_000_000),
        HeuristicalStorageReservation(0.9),
        InferenceStorageReservation(0.9),
        HeuristicalStorageReservation(0.0, dense_tensor_estimate=900_000_000),
    ],
)
def test_torchrecs_reservations(reservation):
    """200 MB of weights fit into 1 GB, but not into what a reservation of nine tenths leaves."""
    model = bag_collection("meta", rows=(800_000,), dims=(64,))
    whole = {"t0": ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"])}
    topology = gpus(hbm_cap=1_000_000_000, ddr_cap=10 * GB)
    planner(topology, storage_reservation=NO_RESERVATION, constraints=whole).plan(model, BAGS)
    with pytest.raises(PlannerError, match="t0|reserves"):
        planner(topology, storage_reservation=reservation, constraints=whole).plan(model, BAGS)


def test_devices_of_different_sizes():
    sizes = CustomTopologyData(data={"hbm_cap": [GB, 8 * GB], "ddr_cap": [GB, GB]}, world_size=2)
    topology = gpus(custom_topology_data=sizes)
    whole = {f"t{i}": ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"]) for i in range(3)}
    model = bag_collection("meta", rows=(10_000_000, 10_000_000, 100), dims=(64, 64, 16))  # 2.6 GB each
    plan = shardings(planner(topology, storage_reservation=NO_RESERVATION, constraints=whole).plan(model, BAGS))
    assert plan["t0"].ranks == plan["t1"].ranks == [1]
    assert plan["t2"].ranks == [0]

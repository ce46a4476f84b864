"""Every accepted constraint reaches the options, as with TorchRec's own enumerator, and the plan."""

from __future__ import annotations

import pytest
from planner_models import bag_collection, quiet_topology, sequence_collection
from stand_in_agent import StandInAgent
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.planners import EmbeddingShardingPlanner
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError
from torchrec.distributed.types import BoundsCheckMode, CacheParams, KeyValueParams
from torchrec.modules.embedding_configs import DataType

from torchrec_dreamshard.planner import DreamShardPlanner
from torchrec_dreamshard.planner.enumerator import DreamShardEnumerator

SHARDERS = [EmbeddingBagCollectionSharder()]
NOTHING_RESERVED = FixedPercentageStorageReservation(0.0)
OPTION_FIELDS = (
    "input_lengths batch_size cache_params cache_load_factor enforce_hbm stochastic_rounding bounds_check_mode "
    "dependency is_pooled is_weighted feature_names output_dtype key_value_params num_poolings partition_by"
).split()
PLAN_FIELDS = "cache_params enforce_hbm stochastic_rounding bounds_check_mode output_dtype key_value_params".split()
LOOKUPS = {"pooling_factors": [3.0, 4.0]}

CONSTRAINTS = {
    "pooling_factors": LOOKUPS,
    "num_poolings": {**LOOKUPS, "num_poolings": [2.0, 1.0]},
    "batch_sizes": {**LOOKUPS, "batch_sizes": [10, 20]},
    "is_weighted": {**LOOKUPS, "is_weighted": True},
    "sharding_types": {**LOOKUPS, "sharding_types": ["row_wise", "column_wise"]},
    "replicated": {**LOOKUPS, "sharding_types": ["data_parallel"], "compute_kernels": ["dense"]},
    "uvm": {**LOOKUPS, "compute_kernels": ["fused_uvm"]},
    "cache_params": {
        **LOOKUPS,
        "compute_kernels": ["fused_uvm_caching"],
        "cache_params": CacheParams(load_factor=0.1, reserved_memory=8.0, prefetch_pipeline=True),
    },
    "enforce_hbm": {**LOOKUPS, "compute_kernels": ["fused_uvm_caching"], "enforce_hbm": True},
    "stochastic_rounding": {**LOOKUPS, "stochastic_rounding": True},
    "bounds_check_mode": {**LOOKUPS, "bounds_check_mode": BoundsCheckMode.FATAL},
    "feature_names": {**LOOKUPS, "feature_names": ["t0_f0", "t0_f1"]},
    "output_dtype": {**LOOKUPS, "output_dtype": DataType.FP16},
    "device_group": {**LOOKUPS, "device_group": "cuda"},
    "key_value": {
        **LOOKUPS,
        "compute_kernels": ["key_value"],
        "key_value_params": KeyValueParams(ssd_storage_directory="ssd"),
    },
    "dram_virtual_table": {**LOOKUPS, "compute_kernels": ["dram_virtual_table"], "use_virtual_table": True},
    "ssd_virtual_table": {**LOOKUPS, "compute_kernels": ["ssd_virtual_table"], "use_virtual_table": True},
}


def by_kind(options):
    return {(o.sharding_type, o.compute_kernel, o.num_shards): o for o in options if o.name == "t0"}


@pytest.mark.parametrize("case", CONSTRAINTS)
def test_constraints_reach_options_and_plan(case):
    constraints = {"t0": ParameterConstraints(**CONSTRAINTS[case])}
    model = bag_collection("meta", rows=(100_000, 2000), dims=(64, 32), features=[2, 1])
    theirs = by_kind(EmbeddingEnumerator(quiet_topology(2, "cuda"), 64, constraints).enumerate(model, SHARDERS))
    ours = by_kind(DreamShardEnumerator(quiet_topology(2, "cuda"), 64, constraints).enumerate(model, SHARDERS))
    common = ours.keys() & theirs.keys()
    assert common
    assert {kernel for _, kernel, _ in ours} <= {kernel for _, kernel, _ in theirs}
    for kind in common:
        for field in OPTION_FIELDS:
            assert getattr(ours[kind], field) == getattr(theirs[kind], field), (kind, field)
        for mine, builtin in zip(ours[kind].shards, theirs[kind].shards, strict=True):
            assert (mine.size, mine.offset) == (builtin.size, builtin.offset)
            assert (mine.storage, mine.perf) == (builtin.storage, builtin.perf)
    planner = DreamShardPlanner(
        quiet_topology(2, "cuda"), batch_size=64, constraints=constraints, stats=[], agent=StandInAgent()
    )
    sharding = planner.plan(model, SHARDERS).plan[""]["t0"]
    for field in PLAN_FIELDS:
        assert getattr(sharding, field) == getattr(constraints["t0"], field), field
    for field, value in (("sharding_types", sharding.sharding_type), ("compute_kernels", sharding.compute_kernel)):
        allowed = getattr(constraints["t0"], field)
        assert allowed is None or value in allowed


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize(("dim", "min_partition"), [(64, 4), (64, 32), (512, None), (96, 16), (768, 64), (16, None)])
def test_column_shards_are_no_more_than_devices(world, dim, min_partition):
    constraints = {"t0": ParameterConstraints(sharding_types=["column_wise"], min_partition=min_partition)}
    model = bag_collection("meta", rows=(1000,), dims=(dim,))
    options = DreamShardEnumerator(quiet_topology(world, "cuda"), 64, constraints).enumerate(model, SHARDERS)
    for option in options:
        widths = {int(shard.size[1]) for shard in option.shards}
        assert option.num_shards <= world
        assert len(widths) == 1 and sum(int(shard.size[1]) for shard in option.shards) == dim
        assert min(widths) >= (min_partition or min(dim, 16)) and min(widths) % 4 == 0
    if dim // world >= (min_partition or 16) and dim % world == 0:
        assert max(option.num_shards for option in options) == world


def test_column_shards_on_ssds_have_ranks_of_their_own():
    kind = {"sharding_types": ["column_wise"], "compute_kernels": ["key_value"], "min_partition": 16}
    constraints = {"t0": ParameterConstraints(**kind, key_value_params=KeyValueParams(ssd_storage_directory="ssd"))}
    model = bag_collection("meta", rows=(100_000,), dims=(64,))
    topology = quiet_topology(4, "cuda", ssd_cap=10_000_000)
    planner = DreamShardPlanner(topology, batch_size=64, constraints=constraints, stats=[], agent=StandInAgent())
    ranks = planner.plan(model, SHARDERS).plan[""]["t0"].ranks
    assert len(ranks) == len(set(ranks)) == 4  # 25.6 MB of weights, 10 MB of SSD each: only four shards fit


def test_a_table_of_another_device_group_is_warned(caplog):
    elsewhere = {"t1": ParameterConstraints(device_group="tpu")}
    settings = {"batch_size": 64, "stats": [], "constraints": elsewhere}
    builtin = EmbeddingShardingPlanner(quiet_topology(), **settings).plan(bag_collection("meta"), SHARDERS)
    assert "t1" not in builtin.plan[""]  # says nothing
    DreamShardPlanner(quiet_topology(), agent=StandInAgent(), **settings).plan(bag_collection("meta"), SHARDERS)
    assert "table t1 is left out of the plan" in caplog.text


@pytest.mark.parametrize(
    ("further", "message"),
    [
        ({"batch_size": -1}, "batch_size must be at least 1"),
        ({"together": ["t0", "t1"]}, "together must hold groups"),
        ({"callbacks": [lambda plan: None]}, "must return the plan's options"),
    ],
)
def test_impossible_arguments_are_named(further, message):
    with pytest.raises(PlannerError, match=message):
        further = {"batch_size": 64, "stats": [], "agent": StandInAgent(), **further}
        DreamShardPlanner(quiet_topology(), **further).plan(bag_collection("meta"), SHARDERS)


def test_weights_whose_caches_fit_no_device_leave_hbm():
    model = bag_collection("meta", rows=(320_000,), dims=(16,))  # 20.5 MB; its cache takes 6.4 MB in one piece
    whole = {"t0": ParameterConstraints(sharding_types=["table_wise"])}
    topology = quiet_topology(4, "cuda", hbm_cap=6_300_000, ddr_cap=47_000_000)
    planner = DreamShardPlanner(
        topology, batch_size=1, constraints=whole, stats=[], agent=StandInAgent(), storage_reservation=NOTHING_RESERVED
    )
    assert planner.plan(model, SHARDERS).plan[""]["t0"].compute_kernel == "fused_uvm"


def test_small_tables_with_large_buffers_are_split_by_rows():
    model = nn.ModuleDict({"m": sequence_collection("meta", rows=(1952, 150_565), dim=128)})
    topology = quiet_topology(2, "cuda", hbm_cap=43_382_613, ddr_cap=21_691_306)
    planner = DreamShardPlanner(
        topology, batch_size=4096, stats=[], agent=StandInAgent(), storage_reservation=NOTHING_RESERVED
    )
    plan = planner.plan(model, [EmbeddingCollectionSharder()]).plan["m"]
    assert {sharding.sharding_type for sharding in plan.values()} == {"row_wise"}

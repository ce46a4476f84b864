"""The planner in one process: parts alone in the stock planner, constraints, memory, reasons."""

from __future__ import annotations

import inspect
import json
import math

import pytest
from planner_models import bag_collection, feature_processed, quiet_topology, sequence_collection
from stand_in_agent import StandInAgent
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.stats import EmbeddingStats
from torchrec.distributed.planner.storage_reservations import (
    FixedPercentageStorageReservation,
    HeuristicalStorageReservation,
)
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    Partitioner,
    PerfModel,
    PlannerError,
    PlannerErrorType,
    Proposer,
)
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.schema.utils import is_signature_compatible

from torchrec_dreamshard.planner import DreamShardPartitioner, DreamShardPlanner, DreamShardProposer, LearnedPerfModel
from torchrec_dreamshard.planner.costs import CostSource

BAGS = [EmbeddingBagCollectionSharder()]
NO_RESERVATION = FixedPercentageStorageReservation(0.0)
GB = 1024**3


def planner(topology=None, **further):
    further = {"batch_size": 64, "stats": [], "agent": StandInAgent(), **further}
    return DreamShardPlanner(topology or quiet_topology(), **further)


def shardings(plan):
    return {name: sharding for tables in plan.plan.values() for name, sharding in tables.items()}


def test_signatures_are_torchrecs():
    for name in ("__init__", "plan", "collective_plan"):
        theirs = inspect.signature(getattr(EmbeddingShardingPlanner, name))
        ours = inspect.signature(getattr(DreamShardPlanner, name))
        assert is_signature_compatible(theirs, ours), name
    for base, own, names in (
        (Proposer, DreamShardProposer, ("load", "feedback", "propose")),
        (Partitioner, DreamShardPartitioner, ("partition",)),
        (PerfModel, LearnedPerfModel, ("rate",)),
    ):
        for name in names:
            theirs = inspect.signature(getattr(base, name))
            ours = inspect.signature(getattr(own, name))
            assert list(theirs.parameters) == list(ours.parameters)
            assert is_signature_compatible(theirs, ours), name


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("parts", [{"proposer"}, {"partitioner"}, {"performance_model"}, None])
def test_each_part_works_alone_in_the_stock_planner(device, parts):
    topology, agent = quiet_topology(4, device), StandInAgent()
    ours = {
        "proposer": DreamShardProposer(agent),
        "partitioner": DreamShardPartitioner(agent),
        "performance_model": LearnedPerfModel(topology, agent),
    }
    chosen = ours if parts is None else {name: ours[name] for name in parts}
    stock = EmbeddingShardingPlanner(topology, 64, stats=[], **chosen)
    plans = [shardings(stock.plan(bag_collection("meta"), BAGS)) for _ in range(2)]
    assert set(plans[0]) == {"t0", "t1", "t2", "t3"}
    assert plans[0] == plans[1]


def test_constraints_are_honoured():
    constraints = {
        "t0": ParameterConstraints(sharding_types=["row_wise"]),
        "t1": ParameterConstraints(sharding_types=["column_wise"], min_partition=16),
        "t2": ParameterConstraints(sharding_types=["data_parallel"]),
        "t3": ParameterConstraints(compute_kernels=["fused_uvm"]),
    }
    model = bag_collection("meta", dims=(64,) * 4)
    plan = shardings(planner(quiet_topology(4, "cuda"), constraints=constraints).plan(model, BAGS))
    assert plan["t0"].sharding_type == "row_wise" and plan["t0"].ranks == [0, 1, 2, 3]
    assert plan["t1"].sharding_type == "column_wise"
    assert all(shard.shard_sizes[1] >= 16 for shard in plan["t1"].sharding_spec.shards)
    assert plan["t2"].sharding_type == "data_parallel"
    assert plan["t3"].compute_kernel == "fused_uvm"


@pytest.mark.parametrize("kind", ["table_row_wise", "table_column_wise", "grid_shard"])
def test_host_bound_types_stay_on_hosts(kind):
    constraints = {f"t{i}": ParameterConstraints(sharding_types=[kind], min_partition=32) for i in range(4)}
    topology = quiet_topology(8, "cuda", local_world_size=4)
    model = bag_collection("meta", rows=(100,) * 4, dims=(64,) * 4)
    plan = shardings(planner(topology, constraints=constraints).plan(model, BAGS))
    hosts = {name: {rank // 4 for rank in sharding.ranks} for name, sharding in plan.items()}
    assert all(len(used) == (2 if kind == "grid_shard" else 1) for used in hosts.values())
    assert set().union(*hosts.values()) == {0, 1}  # both hosts carry their part


def test_large_tables_are_split_before_host_memory_is_used():
    model = bag_collection("meta", rows=(10_000_000,) * 3, dims=(128,) * 3)  # 5.1 GB each

    def kernels(hbm):
        topology = quiet_topology(4, "cuda", hbm_cap=int(hbm * GB))
        plan = shardings(planner(topology, storage_reservation=NO_RESERVATION).plan(model, BAGS))
        return {s.compute_kernel for s in plan.values()}, {s.sharding_type for s in plan.values()}

    assert kernels(8) == ({"fused"}, {"table_wise"})
    assert kernels(4.3)[0] == {"fused"} and "table_wise" not in kernels(4.3)[1]
    assert "fused_uvm_caching" in kernels(2)[0]


def test_hot_table_is_split():
    constraints = {"t0": ParameterConstraints(pooling_factors=[200.0])}
    model = bag_collection("meta", rows=(1000,) * 10, dims=(64,) * 10)
    ours = planner(quiet_topology(8, "cuda"), constraints=constraints, batch_size=4096)
    plan = shardings(ours.plan(model, BAGS))
    assert plan["t0"].sharding_type != "table_wise"
    whole = {**constraints, "t0": ParameterConstraints(pooling_factors=[200.0], sharding_types=["table_wise"])}
    forced = planner(quiet_topology(8, "cuda"), constraints=whole, batch_size=4096)
    forced.plan(model, BAGS)
    assert ours.predicted().step_ms < forced.predicted().step_ms


def test_infeasible_names_table_and_bytes():
    model = bag_collection("meta", rows=(10_000_000, 100), dims=(128, 16))
    topology = quiet_topology(2, "cuda", hbm_cap=GB // 10, ddr_cap=GB // 10)
    with pytest.raises(PlannerError, match=r"t0.*needs 5,1\d\d,\d{3},\d{3} bytes of HBM.*1\d\d,\d{3},\d{3}") as caught:
        planner(topology, storage_reservation=NO_RESERVATION).plan(model, BAGS)
    assert caught.value.error_type is PlannerErrorType.INSUFFICIENT_STORAGE


def test_strict_constraints_are_told_apart():
    model = bag_collection("meta", rows=(10_000_000,), dims=(128,))
    topology = quiet_topology(4, "cuda", hbm_cap=2 * GB)
    whole = {"t0": ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"])}
    with pytest.raises(PlannerError, match="t0.*bytes") as caught:
        planner(topology, storage_reservation=NO_RESERVATION, constraints=whole).plan(model, BAGS)
    assert caught.value.error_type is PlannerErrorType.STRICT_CONSTRAINTS


def test_failure_then_success_with_one_planner():
    ours = planner(quiet_topology(2, "cuda", hbm_cap=GB // 10, ddr_cap=GB // 10), storage_reservation=NO_RESERVATION)
    with pytest.raises(PlannerError):
        ours.plan(bag_collection("meta", rows=(10_000_000,), dims=(128,)), BAGS)
    assert set(shardings(ours.plan(bag_collection("meta"), BAGS))) == {"t0", "t1", "t2", "t3"}


def test_reservation_counts():
    model = bag_collection("meta", rows=(1_000_000,), dims=(64,))  # 256 MB
    topology = quiet_topology(1, "cuda", hbm_cap=400_000_000, ddr_cap=1)
    planner(topology, storage_reservation=FixedPercentageStorageReservation(0.1)).plan(model, BAGS)
    with pytest.raises(PlannerError, match="t0"):
        planner(topology, storage_reservation=FixedPercentageStorageReservation(0.6)).plan(model, BAGS)


def test_reservation_of_everything_is_explained():
    dense = HeuristicalStorageReservation(0.1, dense_tensor_estimate=2 * GB)
    with pytest.raises(PlannerError, match="host memory.*nothing is left"):
        planner(quiet_topology(2, ddr_cap=GB), storage_reservation=dense).plan(bag_collection("meta"), BAGS)


class RecordingStats(EmbeddingStats):
    def __init__(self):
        super().__init__()
        self.logged = []

    def log(self, **arguments):
        super().log(**arguments)
        self.logged.append(arguments)


def test_stats_and_callbacks_run():
    stats, seen = RecordingStats(), []
    ours = planner(stats=stats, callbacks=[lambda plan: seen.append(len(plan)) or plan])
    plan = ours.plan(bag_collection("meta"), BAGS)
    assert seen == [4]
    assert stats.logged[0]["sharding_plan"] == plan
    assert stats.logged[0]["num_proposals"] >= 1 and "debug_stats" in stats.logged[0]
    failing = planner(quiet_topology(2, ddr_cap=1000), storage_reservation=NO_RESERVATION, stats=stats)
    with pytest.raises(PlannerError):
        failing.plan(bag_collection("meta"), BAGS)
    assert "debug_stats" not in stats.logged[1]
    assert {shard.rank for option in stats.logged[1]["best_plan"] for shard in option.shards} == {-1}


def test_several_modules_and_kinds():
    model = nn.ModuleDict(
        {
            "bags": bag_collection("meta"),
            "inner": nn.ModuleDict({"bags": bag_collection("meta")}),
            "sequences": sequence_collection("meta"),
            "weighted": feature_processed("meta", prefix="w"),
            "dense": nn.Linear(2, 2, device="meta"),
        }
    )
    plan = planner(quiet_topology(4, "cuda")).plan(model, get_default_sharders())
    assert set(plan.plan) == {"bags", "inner.bags", "sequences", "weighted"}
    assert all(0 <= rank < 4 for sharding in shardings(plan).values() for rank in sharding.ranks)


def test_nothing_to_shard_gives_an_empty_plan():
    assert planner().plan(nn.Linear(2, 2), BAGS).plan == {}


class BrokenAgent(StandInAgent):
    def predict(self, task, placement):
        raise ValueError("terms must be finite")


def test_rate_is_finite_or_an_error():
    ours = planner()
    ours.plan(bag_collection("meta"), BAGS)
    assert math.isfinite(ours._perf_model.rate(ours._best_plan))
    broken = LearnedPerfModel(quiet_topology(), BrokenAgent())
    with pytest.raises(PlannerError, match="finite"):
        broken.rate(ours._best_plan)


def test_shards_carry_what_costs_depend_on():
    fused = {"optimizer": "exact_row_wise_adagrad"}
    constraints = {
        "t0": ParameterConstraints(pooling_factors=[3.0], is_weighted=True, sharding_types=["row_wise"]),
        "t1": ParameterConstraints(compute_kernels=["fused_uvm_caching"]),
    }
    histogram = (1.0,) + (0.0,) * 16
    ours = planner(quiet_topology(4, "cuda"), constraints=constraints, reuse_histograms={"t1": histogram})
    ours.plan(bag_collection("meta"), [EmbeddingBagCollectionSharder(fused_params=fused)])
    costs = ours._source.on(ours._topology)
    specs = {o.name: costs.adapter.shard_specs(o, 4) for o in ours._best_plan}
    first = specs["t0"][0]
    assert (first.rows, first.dim, first.pooling_factor, first.batch_size) == (10, 8, 0.75, 256)
    assert first.is_weighted and first.optimizer == "rowwise_adagrad"
    assert specs["t1"][0].kernel == "fused_uvm_caching" and specs["t1"][0].cache_load_factor == 0.2
    assert specs["t1"][0].reuse_histogram == histogram
    assert specs["t1"][0].ddr_bytes > 0


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="time_budget_s must be above 0"):
        planner(time_budget_s=0)
    with pytest.raises(ValueError, match="no process group is initialised"):
        DreamShardPlanner(agent=StandInAgent())
    with pytest.raises(ValueError, match="agent must be"):
        planner(agent=7).plan(bag_collection("meta"), BAGS)
    with pytest.raises(ValueError, match="pins must give each table a rank, an integer, got 1.0 for table t0"):
        planner(pins={"t0": 1.0})
    with pytest.raises(ValueError, match="nowhere.json cannot be read as a plan file"):
        planner(previous="nowhere.json")


def test_explanation():
    constraints = {"t0": ParameterConstraints(sharding_types=["row_wise", "column_wise"], min_partition=32)}
    ours = planner(quiet_topology(4, "cuda"), constraints=constraints, pins={"t1": 2})
    with pytest.raises(ValueError, match="nothing was planned"):
        ours.explain()
    ours.plan(bag_collection("meta", dims=(64,) * 4), BAGS)
    explanation = ours.explain()
    assert explanation.step_ms == ours.predicted().step_ms
    assert len(explanation.devices) == 4
    assert sum(device.is_bottleneck for device in explanation.devices) == 1
    slowest = next(device for device in explanation.devices if device.is_bottleneck)
    assert slowest.total_ms == pytest.approx(max(device.total_ms for device in explanation.devices))
    tables = {reason.table: reason for reason in explanation.tables}
    assert "constrained to sharding_types" in tables["t0"].why
    assert tables["t0"].next_option_step_ms is not None
    assert "pinned to rank 2" in tables["t1"].why
    json.dumps(explanation.to_dict())
    assert "bottleneck" in str(explanation) and "t0: " in str(explanation)


def test_explanation_names_what_binds():
    """Memory of less loaded ranks, least widths and fixed kernels."""
    constraints = {
        "t0": ParameterConstraints(sharding_types=["column_wise"], min_partition=32, compute_kernels=["fused"]),
        "t1": ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"], pooling_factors=[50.0]),
        "t2": ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"]),
    }
    model = bag_collection("meta", rows=(1000, 1_000_000, 1_100_000), dims=(64, 64, 64))  # 256 and 282 MB
    topology = quiet_topology(2, "cuda", hbm_cap=300_000_000)
    ours = planner(topology, constraints=constraints, storage_reservation=NO_RESERVATION)
    ours.plan(model, BAGS)
    why = {reason.table: reason.why for reason in ours.explain().tables}
    assert "at least 32 columns (min_partition)" in why["t0"]
    assert "constrained to compute_kernels ['fused']" in why["t0"]
    assert "less loaded, has no memory left for it" in why["t1"]  # next to t2


def test_plan_runs_under_meta_and_real_devices_alike():
    plans = [planner(seed=1).plan(bag_collection(device), BAGS) for device in ("meta", "cpu")]
    assert plans[0] == plans[1]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_estimates_are_torchrecs(device):
    """Equal shards are estimated once; the values must be those of TorchRec's enumerator."""
    kinds = ["table_wise", "column_wise", "table_column_wise", "data_parallel"]
    kinds += ["row_wise", "table_row_wise", "grid_shard"] if device == "cuda" else []
    constraints = {f"t{i}": ParameterConstraints(sharding_types=kinds, pooling_factors=[3.0]) for i in range(2)}
    topology = quiet_topology(8, device, local_world_size=4)
    model = bag_collection("meta", rows=(1001, 5), dims=(256, 128))
    ours = DreamShardPlanner(topology, 64, constraints=constraints, agent=StandInAgent())._enumerator
    theirs = EmbeddingShardingPlanner(topology, 64, constraints=constraints)._enumerator
    estimates = [
        {
            (o.name, o.sharding_type, o.compute_kernel, o.num_shards): [(s.size, s.storage, s.perf) for s in o.shards]
            for o in enumerator.enumerate(model, BAGS)
        }
        for enumerator in (ours, theirs)
    ]
    common = set(estimates[0]) & set(estimates[1])
    assert {key[1] for key in common} == set(kinds)
    assert all(estimates[0][key] == estimates[1][key] for key in common)


def test_only_the_first_proposals_of_a_plan_are_refined():
    class Recording(StandInAgent):
        def __init__(self):
            super().__init__()
            self.refined = []

        def place(self, task, *, refine=True, time_budget_s=None, seed=0):
            self.refined.append(refine)
            return super().place(task, refine=refine, time_budget_s=time_budget_s, seed=seed)

    agent = Recording()
    rows, dims = (40, 60, 80, 100) * 3, (16,) * 12  # enough tables for TorchRec to make many proposals
    planner = EmbeddingShardingPlanner(quiet_topology(2), 64, partitioner=DreamShardPartitioner(agent), stats=[])
    for _ in range(2):
        agent.refined.clear()
        planner.plan(bag_collection("meta", rows=rows, dims=dims), get_default_sharders())
        assert 0 < sum(agent.refined) <= 24 < len(agent.refined)  # proposals without free shards count, but ask nobody
        assert not any(agent.refined[24:])


def test_tables_whose_caches_do_not_fit_live_in_host_memory():
    topology = quiet_topology(2, "cuda", hbm_cap=20 * 1024**3, ddr_cap=300 * 1024**3)
    tables = bag_collection("meta", rows=(400_000_000,) * 2, dims=(64, 64))
    plan = DreamShardPlanner(topology, 64, stats=[], agent=StandInAgent()).plan(tables, get_default_sharders())
    assert any(sharding.compute_kernel == "fused_uvm" for sharding in shardings(plan).values())


@pytest.mark.parametrize("device, share", [("cpu", 0.35), ("cuda", 2.0)])
def test_replicated_tables_run_dense_kernels(device, share):
    source = CostSource(StandInAgent())
    costs = source.on(quiet_topology(compute_device=device))
    table = bag_collection(rows=(40,), dims=(8,))
    constraints = {"t0": ParameterConstraints(sharding_types=["data_parallel"])}
    planner = DreamShardPlanner(
        topology=quiet_topology(compute_device=device), batch_size=8, constraints=constraints, agent=StandInAgent()
    )
    planner.plan(table, get_default_sharders())
    (option,) = planner._best_plan
    assert option.compute_kernel == "dense"
    specs = costs.adapter.shard_specs(option, 2)
    assert {spec.kernel for spec in specs} == {"fused"}  # the factor below must not count twice
    fused_ms = max(costs.single_ms(specs).values())
    gradient_ms = 3 * 40 * 8 * 4 / (costs.hardware.memory_gb_s * 1e6) if device == "cpu" else 0.0
    reduce_ms = 40 * 8 * 4 / (costs.hardware.intra_host_gb_s * 1e6)
    assert costs.option_ms(option) == pytest.approx(share * fused_ms + gradient_ms + reduce_ms)


def test_ids_of_sharded_tables_are_exchanged_on_a_cpu_only():
    for device, in_step in (("cpu", True), ("cuda", False)):
        planner = DreamShardPlanner(
            topology=quiet_topology(compute_device=device),
            batch_size=8,
            constraints={f"t{i}": ParameterConstraints(sharding_types=["table_wise"]) for i in range(4)},
            agent=StandInAgent(),
        )
        planner.plan(bag_collection(), get_default_sharders())
        cost = planner.predicted()
        assert (cost.background_ms.max() > 0) == in_step
        assert cost.step_ms == pytest.approx(cost.device_ms.max())

"""Plans measured on two Gloo ranks: the fastest wins everywhere, and what fails is dropped everywhere."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from planner_models import (
    bag_collection,
    bag_configs,
    feature_processed,
    jagged_batch,
    quiet_topology,
    sequence_collection,
)
from run_ranks import run_ranks
from stand_in_agent import StandInAgent
from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError, Proposer
from torchrec.distributed.sharding_plan import get_default_sharders

from torchrec_dreamshard.planner import DreamShardPlanner, Verify, table_step

WORLD = 2
KINDS = ("table_wise", "row_wise", "column_wise")


class OnePerKind(Proposer):
    """Proposes all tables table-wise, then all row-wise, then all column-wise."""

    def load(self, search_space, enumerator=None):
        self.proposals = []
        for kind in KINDS:
            by_table = {option.name: option for option in search_space if option.sharding_type == kind}
            self.proposals.append(list(by_table.values()))

    def propose(self):
        return self.proposals.pop(0) if self.proposals else None

    def feedback(self, partitionable, plan=None, perf_rating=None, storage_constraint=None):
        pass


class RatedByKind:
    """Rates table-wise best, then row-wise, then column-wise."""

    def rate(self, plan):
        return 1.0 + KINDS.index(plan[0].sharding_type)


def planner(verify, **further):
    constraints = {f"t{i}": ParameterConstraints(sharding_types=list(KINDS), min_partition=4) for i in range(4)}
    arguments = {"constraints": constraints, "proposer": OnePerKind(), "performance_model": RatedByKind(), **further}
    return DreamShardPlanner(quiet_topology(WORLD), 6, stats=[], agent=StandInAgent(), verify=verify, **arguments)


def kinds_of(plan):
    return {sharding.sharding_type for tables in plan.plan.values() for sharding in tables.values()}


def model():
    return nn.ModuleDict({"bags": bag_collection("meta"), "dense": nn.Linear(2, 2)})


class PlantedSteps:
    """Steps of planted lengths by sharding type, in ms, on the rank that ``slow_rank`` says; counts what is built."""

    def __init__(self, lengths, slow_rank):
        self.lengths, self.slow_rank, self.built = lengths, slow_rank, []

    def __call__(self, plan, group):
        (kind,) = kinds_of(plan)
        self.built.append(kind)
        pause = self.lengths[kind] if dist.get_rank() == self.slow_rank else 0

        def step():
            time.sleep(pause / 1e3)
            dist.all_reduce(torch.ones(1), group=group)

        return step


def planted(rank, lengths, slow_rank, options):
    build = PlantedSteps(lengths, slow_rank)
    ours = planner(Verify(build=build, **options))
    plan = ours.collective_plan(model())
    explained = str(ours.explain()) if rank == 0 else None
    return plan, build.built, ours.measured, explained


@pytest.mark.distributed
def test_the_fastest_measured_plan_is_taken_on_all_ranks():
    lengths = {"table_wise": 40, "row_wise": 20, "column_wise": 2}
    (plan, built, measured, explained), (other, *_) = run_ranks(planted, WORLD, lengths, 1, {"num_steps": 3})
    assert plan == other
    assert kinds_of(plan) == {"column_wise"}
    assert built == [*KINDS, *reversed(KINDS)]
    assert [m.predicted for m in measured] == [1.0, 2.0, 3.0]
    for found, kind in zip(measured, KINDS, strict=True):
        assert found.step_ms >= lengths[kind]
    assert [m.is_chosen for m in measured] == [False, False, True]
    assert "measured on the job's ranks" in explained and "<- taken" in explained


@pytest.mark.distributed
def test_the_predicted_best_stays_where_nothing_is_clearly_faster():
    lengths = {"table_wise": 20, "row_wise": 15, "column_wise": 14}
    options = {"num_plans": 2, "num_steps": 3, "min_gain": 0.5}
    (plan, built, measured, _), _ = run_ranks(planted, WORLD, lengths, 0, options)
    assert kinds_of(plan) == {"table_wise"}
    assert set(built) == {"table_wise", "row_wise"} and len(measured) == 2


def failing(rank, at, every):
    """The table-wise plan (or every one) fails on rank 1, when built or while rank 0 waits for it in a step."""

    def build(plan, group):
        broken = rank == 1 and (every or kinds_of(plan) == {"table_wise"})
        if broken and at == "build":
            raise MemoryError("no room for the tables")

        def step():
            if broken:
                raise MemoryError("no room for the outputs")
            dist.all_reduce(torch.ones(1), group=group)

        return step

    ours = planner(Verify(build=build, num_steps=2))
    start = time.monotonic()
    if every:
        with pytest.raises(PlannerError, match="none of 3 plans.*rank 1: MemoryError: no room"):
            ours.collective_plan(model())
        return None, None, time.monotonic() - start
    return ours.collective_plan(model()), ours.measured[0].error, time.monotonic() - start


@pytest.mark.distributed
@pytest.mark.parametrize("at", ["build", "step"])
def test_a_plan_that_fails_on_one_rank_is_dropped_on_all(at):
    outcomes = run_ranks(failing, WORLD, at, False)
    assert outcomes[0][0] == outcomes[1][0]
    for plan, error, seconds in outcomes:
        assert kinds_of(plan) < {"row_wise", "column_wise"}
        assert error.startswith("rank 1: MemoryError: no room")
        assert seconds < 30  # not the 60 s after which an exchange is given up


@pytest.mark.distributed
def test_where_every_plan_fails_every_rank_learns_why():
    for _, _, seconds in run_ranks(failing, WORLD, "step", True):
        assert seconds < 30


def real_tables(rank):
    """The tables alone, of several kinds of modules, under the learned planner's own candidates."""
    large = {"rows": (3000,) * 4, "dims": (64, 32, 16, 8)}
    tables = nn.ModuleDict(
        {
            "bags": bag_collection("cpu", **large),
            "weighted": bag_collection("meta", is_weighted=True, prefix="w"),
            "positions": feature_processed("cpu", prefix="p"),
            "sequences": sequence_collection("meta"),
        }
    )
    before = [parameter.clone() for parameter in tables["bags"].parameters()]
    ours = DreamShardPlanner(
        quiet_topology(WORLD), 16, stats=[], agent=StandInAgent(), verify=Verify(num_rounds=1, num_steps=2)
    )
    plan = ours.collective_plan(tables, get_default_sharders())
    for old, new in zip(before, tables["bags"].parameters(), strict=True):
        assert torch.equal(old, new)
    assert set(plan.plan) == set(tables)
    return plan, ours.measured


@pytest.mark.distributed
def test_real_steps_of_the_tables_alone():
    (plan, measured), (other, _) = run_ranks(real_tables, WORLD)
    assert plan == other
    assert len(measured) > 1
    assert all(found.error is None and found.step_ms > 0 for found in measured)


def given_batches(rank):
    batches = [jagged_batch(bag_configs(), 6, seed) for seed in range(3)]
    plan = planner(Verify(num_steps=2, batches=batches)).collective_plan(model())
    wrong = [jagged_batch(bag_configs(prefix="x"), 6, 0)]
    with pytest.raises(PlannerError, match="verify could run none"):
        planner(Verify(num_steps=2, batches=wrong)).collective_plan(model())
    nothing = planner(Verify()).collective_plan(nn.Linear(2, 2))
    assert nothing.plan == {}
    return plan


@pytest.mark.distributed
def test_a_users_batches_are_run():
    first, second = run_ranks(given_batches, WORLD)
    assert first == second


def test_planning_offline_measures_nothing():
    ours = planner(Verify(build=None))
    assert kinds_of(ours.plan(model(), get_default_sharders())) == {"table_wise"}
    assert ours.measured == []


@pytest.mark.parametrize(
    ("field", "value"), [("num_plans", 0), ("num_steps", 1.5), ("num_rounds", True), ("min_gain", -1), ("timeout_s", 0)]
)
def test_impossible_settings_are_refused(field, value):
    with pytest.raises(ValueError, match=f"Verify.{field}"):
        Verify(**{field: value})


def test_drawn_batches_have_the_constraints_pooling():
    constraints = {"t0": ParameterConstraints(pooling_factors=[20.5]), "t1": ParameterConstraints(pooling_factors=[0])}
    generator = torch.Generator().manual_seed(0)
    batch = table_step.draw_batch(bag_collection("meta", is_weighted=True), 1000, constraints, generator)
    means = {key: batch[key].lengths().float().mean().item() for key in batch.keys()}
    assert means["t0_f0"] == pytest.approx(20.5, abs=0.1)
    assert means["t1_f0"] == 0.0 and means["t2_f0"] == 1.0
    assert int(batch["t0_f0"].values().max()) < 40 and int(batch["t0_f0"].values().min()) == 0
    assert batch.weights().shape == batch.values().shape

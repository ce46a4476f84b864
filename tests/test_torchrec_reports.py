"""What goes in and out around TorchRec's planner: stats, callbacks, loaders, timeouts; see test_torchrec_planner.py."""

from __future__ import annotations

import dataclasses
import time

import pytest
from planner_models import bag_collection
from test_torchrec_planner import BAGS, GB, gpus, planner, shardings
from torchrec.distributed.planner.stats import EmbeddingStats, NoopEmbeddingStats
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    PlanLoader,
    PlannerError,
    PlannerErrorType,
    Proposer,
)


def test_stats_given_in_any_way(caplog):
    caplog.set_level("INFO", logger="torchrec")
    quiet = NoopEmbeddingStats()
    for stats, num_expected in ((None, 1), (EmbeddingStats(), 1), ([EmbeddingStats(), quiet], 2), ([], 0)):
        ours = planner(stats=stats)
        caplog.clear()
        ours.plan(bag_collection("meta"), BAGS)
        assert len(ours._stats) == num_expected
        assert ("Planner Statistics" in caplog.text) == (num_expected > 0)


def test_callbacks_run_in_order():
    seen = []

    def first(plan):
        seen.append("first")
        return plan

    def second(plan):
        seen.append("second")
        moved = [dataclasses.replace(shard, rank=1) for shard in plan[0].shards]
        plan[0].shards = moved
        return plan

    whole = {f"t{i}": ParameterConstraints(sharding_types=["table_wise"]) for i in range(4)}
    for _ in range(2):  # a plan that a callback changed must not leak into the next
        ours = planner(callbacks=[first, second], constraints=whole)
        assert shardings(ours.plan(bag_collection("meta"), BAGS))["t0"].ranks == [1]
    assert seen == ["first", "second"] * 2


class Loader(PlanLoader):
    def __init__(self, options, context=None):
        self.options, self.context = options, context

    def load(self):
        return None if self.options is None else {option.storage_hash(): option for option in self.options}

    def plan_context_hash(self):
        return self.context

    def get_plan_id(self):
        return "the plan of Monday"


def test_a_loader_without_a_plan():
    ours = planner(plan_loader=Loader(None))
    assert set(shardings(ours.plan(bag_collection("meta"), BAGS))) == {"t0", "t1", "t2", "t3"}
    assert ours._num_proposals >= 1


def test_a_loaded_context():
    first = planner(seed=1)
    plan = first.plan(bag_collection("meta"), BAGS)
    loader = Loader(first._best_plan, first.hash_planner_context_inputs_str())
    ours = planner(plan_loader=loader)
    assert ours.plan(bag_collection("meta"), BAGS) == plan
    assert ours._num_proposals == 0
    with pytest.raises(PlannerError, match="mismatch.*the plan of Monday|the plan of Monday") as caught:
        planner(gpus(hbm_cap=300 * GB), plan_loader=loader).plan(bag_collection("meta"), BAGS)
    assert caught.value.error_type is PlannerErrorType.PLANNER_INPUT_CONTEXT_MISMATCH


class Endless(Proposer):
    """The same proposal for ever, so that a search only ends by its clock."""

    def load(self, search_space, enumerator=None):
        self.space = {option.name: option for option in search_space}

    def propose(self):
        time.sleep(0.01)
        return list(self.space.values())

    def feedback(self, partitionable, plan=None, perf_rating=None, storage_constraint=None):
        pass


def test_timeout_stops_a_proposer_without_end():
    ours = planner(proposer=Endless(), timeout_seconds=1, time_budget_s=1000.0)
    assert set(shardings(ours.plan(bag_collection("meta"), BAGS))) == {"t0", "t1", "t2", "t3"}


def test_timeout_must_be_positive():
    with pytest.raises(AssertionError, match="positive"):
        planner(timeout_seconds=0)


def test_an_unknown_kernel_is_refused():
    def spoil(plan):
        plan[0].compute_kernel = "fusion"
        return plan

    with pytest.raises(PlannerError, match="t0: unknown compute kernel 'fusion'") as caught:
        planner(callbacks=[spoil]).plan(bag_collection("meta"), BAGS)
    assert caught.value.error_type is PlannerErrorType.INVALID_COMPUTE_KERNEL

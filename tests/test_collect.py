import dataclasses

import pytest
import torch
from run_ranks import run_ranks

from torchrec_dreamshard.errors import MeasurementError
from torchrec_dreamshard.hardware import named_hardware
from torchrec_dreamshard.measurement import CostBreakdown, Measurement
from torchrec_dreamshard.pool import load_public_pool
from torchrec_dreamshard.profiling.collect import (
    CollectConfig,
    calmest_runs,
    collect,
    rank_hosts,
    repeatability,
    share_size,
)
from torchrec_dreamshard.profiling.devices import host_name
from torchrec_dreamshard.profiling.fbgemm_profiler import FBGEMMProfiler
from torchrec_dreamshard.profiling.sampling import SamplingPlan
from torchrec_dreamshard.profiling.timing import TimingConfig
from torchrec_dreamshard.samples import MeasurementStore, load_measurements

PLAN = SamplingPlan(
    pool=load_public_pool(), hardware=named_hardware("cpu"), max_lookups=500, max_weight_bytes=2**21, max_tables=3
)
PROFILER = FBGEMMProfiler(timing=TimingConfig(warmup=0, repeats=1, max_disturbed=0))


@pytest.fixture
def store(tmp_path):
    return MeasurementStore(tmp_path / "store.jsonl")


def _samples(store):
    return [(m.provenance.details["sample"], m.provenance.details["repetition"]) for m in load_measurements(store.path)]


def test_an_interrupted_run_goes_on_where_it_stopped(store):
    def interrupt(measurement):
        if len(_samples(store)) == 3:
            raise KeyboardInterrupt

    config = CollectConfig(num_samples=5, num_repeated=2)
    with pytest.raises(KeyboardInterrupt):
        collect(PLAN, PROFILER, store, config, progress=interrupt)
    seen = []
    assert collect(PLAN, PROFILER, store, config, progress=seen.append) == 4
    assert [measurement is None for measurement in seen] == [True] * 3 + [False] * 4
    assert _samples(store) == [(0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (0, 1), (1, 1)]
    assert [m.task for m in load_measurements(store.path)][:5] == [PLAN[i] for i in range(5)]
    assert collect(PLAN, PROFILER, store, config) == 0


def test_ranks_share_the_samples_and_repeat_each_others(store):
    for rank in range(2):
        config = CollectConfig(num_samples=5, num_repeated=2, rank=rank, world_size=2)
        assert collect(PLAN, PROFILER, store, config) == share_size(config)
    expected = [(0, 0), (2, 0), (4, 0), (1, 1), (1, 0), (3, 0), (0, 1)]
    assert _samples(store) == expected


def test_the_budget_stops_before_the_next_sample(store):
    assert collect(PLAN, PROFILER, store, CollectConfig(num_samples=5, budget_s=0)) == 0


def test_failures_are_kept_and_the_run_goes_on(store):
    plan = dataclasses.replace(PLAN, dims=(4, 6))
    collect(plan, PROFILER, store, CollectConfig(num_samples=8))
    errors = [measurement.error for measurement in load_measurements(store.path)]
    assert None in errors and any(error and "multiple of 4" in error for error in errors)


def test_a_run_of_failures_stops_it(store):
    with pytest.raises(MeasurementError, match="20 samples in a row failed.*multiple of 4"):
        collect(dataclasses.replace(PLAN, dims=(6,)), PROFILER, store, CollectConfig(num_samples=50))
    assert len(_samples(store)) == 20


def test_a_store_of_another_device_is_refused(store):
    record = PROFILER.record(PLAN[0], (0,) * PLAN[0].num_shards)
    store.append(dataclasses.replace(record, provenance=dataclasses.replace(record.provenance, device="NVIDIA H200")))
    with pytest.raises(ValueError, match="'NVIDIA H200'.*different stores"):
        collect(PLAN, PROFILER, store, CollectConfig(num_samples=1))


def test_another_plan_may_share_the_store(store):
    collect(PLAN, PROFILER, store, CollectConfig(num_samples=1))
    assert collect(dataclasses.replace(PLAN, seed=9), PROFILER, store, CollectConfig(num_samples=1)) == 1


def test_repeatability_is_the_difference_over_the_mean(store):
    record = PROFILER.record(PLAN[0], (0,) * PLAN[0].num_shards, kernels_only=True, plan=PLAN.fingerprint)
    for sample, repetition, forward in ((4, 0, 1.0), (4, 1, 3.0), (5, 0, 7.0)):
        cost = dataclasses.replace(
            record.cost, forward_compute_ms=[forward], backward_compute_ms=[2.0], compute_ms=None
        )
        details = {**record.provenance.details, "sample": sample, "repetition": repetition}
        provenance = dataclasses.replace(record.provenance, details=details)
        store.append(dataclasses.replace(record, cost=cost, provenance=provenance))
    assert repeatability(store, PLAN) == {"forward": [1.0], "backward": [0.0], "total": [0.5]}


def test_the_calmest_run_of_each_combination_is_kept_and_tells_of_the_others():
    def run(sample, forward):
        task = PLAN[sample]
        cost = CostBreakdown(forward_compute_ms=[forward], backward_compute_ms=[1.0])
        return Measurement(task=task, placement=(0,) * task.num_shards, cost=cost)

    failed = Measurement(task=PLAN[3], placement=(0,) * PLAN[3].num_shards, error="out of memory")
    kept = calmest_runs([run(1, 5.0), run(2, 7.0), run(1, 4.0), failed, run(1, 6.0)])
    assert [float(m.cost.compute_ms[0]) for m in kept] == [5.0, 8.0]
    assert [m.provenance.details["runs_ms"] for m in kept] == [[6.0, 5.0, 7.0], [8.0]]


def _hosts_of_unequal_ranks(rank):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchrec_dreamshard.profiling.collect.device_name", lambda device: f"GPU {rank}")
        with pytest.raises(ValueError, match="equal devices, got GPU 0, GPU 1"):
            rank_hosts(torch.device("cpu"))
    return rank_hosts(torch.device("cpu"))


@pytest.mark.distributed
def test_ranks_of_different_hardware_do_not_measure_together():
    assert run_ranks(_hosts_of_unequal_ranks, 2) == [[host_name()] * 2] * 2

import dataclasses

import numpy as np
import pytest
import torch
from profiler_contract import ProfilerContract, small_shards
from run_ranks import run_ranks

from torchrec_dreamshard.errors import MeasurementError
from torchrec_dreamshard.hardware import named_hardware
from torchrec_dreamshard.measurement import TERMS, Measurement
from torchrec_dreamshard.profiling.fbgemm_profiler import FBGEMMProfiler
from torchrec_dreamshard.profiling.timing import PhaseTimes, TimingConfig
from torchrec_dreamshard.types import PlacementTask

QUICK = TimingConfig(warmup=1, repeats=2, max_disturbed=0)


class TestOnCpu(ProfilerContract):
    @pytest.fixture
    def profiler(self):
        return FBGEMMProfiler("cpu", timing=QUICK)

    @pytest.fixture
    def hardware(self):
        return named_hardware("cpu")


@pytest.mark.gpu
class TestOnCuda(ProfilerContract):
    @pytest.fixture
    def profiler(self):
        return FBGEMMProfiler("cuda", timing=QUICK)

    @pytest.fixture
    def hardware(self):
        return named_hardware("a100")


def _task(num_devices=2, **fields):
    return PlacementTask.uniform(small_shards(**fields), num_devices, hardware=named_hardware("cpu"))


def test_a_record_keeps_every_repeat_and_its_provenance():
    record = FBGEMMProfiler(timing=QUICK).record(_task(), [0, 0, 1, 1], sample=7)
    details = record.provenance.details
    assert np.array(details["forward_compute_ms"]).shape == np.array(details["backward_compute_ms"]).shape == (2, 2)
    assert (details["sample"], details["threads"], details["exchange"]) == (7, 1, "modelled")
    assert record.provenance.device and record.provenance.versions["torch"] == torch.__version__
    assert not record.provenance.simulated
    assert Measurement.from_dict(record.to_dict()) == record
    for device, repeats in enumerate(details["forward_compute_ms"]):
        undisturbed = np.array([repeat not in details["disturbed"][device] for repeat in range(2)])
        median_ms = PhaseTimes(np.array(repeats)[:, None], undisturbed).median_ms()
        np.testing.assert_allclose(record.cost.forward_compute_ms[device], median_ms, atol=1e-3)


def test_a_failure_is_recorded_and_measure_raises_it():
    task = _task(dim=6)
    record = FBGEMMProfiler(timing=QUICK).record(task, [0, 0, 1, 1])
    assert record.cost is None and "multiple of 4" in record.error
    with pytest.raises(MeasurementError, match="multiple of 4"):
        FBGEMMProfiler(timing=QUICK).measure(task, [0, 0, 1, 1])


def test_kernels_only_leaves_the_exchange_unknown():
    cost = FBGEMMProfiler(timing=QUICK).record(_task(), [0, 0, 1, 1], kernels_only=True).cost
    assert cost.forward_comms_ms is None and cost.step_ms is None and (cost.compute_ms > 0).all()


def test_the_wait_for_the_slowest_kernel_is_in_the_forward_exchange():
    cost = FBGEMMProfiler(timing=QUICK).measure(_task(), [0, 1, 1, 1])
    arrival = cost.forward_compute_ms + cost.forward_comms_ms
    assert arrival[0] == pytest.approx(arrival[1])
    assert cost.backward_comms_ms[0] == cost.backward_comms_ms[1] > 0


@pytest.mark.parametrize("device", ["tpu", "mps", "cuda:99"])
def test_unknown_devices_are_refused(device):
    with pytest.raises(ValueError, match="FBGEMMProfiler.device"):
        FBGEMMProfiler(device)


def test_the_number_of_threads_is_restored():
    before = torch.get_num_threads()
    FBGEMMProfiler(timing=QUICK, num_threads=before + 1).measure(_task(), [0, 0, 1, 1])
    assert torch.get_num_threads() == before


def _measure_together(rank):
    profiler = FBGEMMProfiler(timing=QUICK)
    shards = small_shards(batch_size=1024)
    task = PlacementTask.uniform(shards, 2, hardware=named_hardware("cpu"))
    record = profiler.record(task, [0, 0, 0, 1])
    empty = profiler.measure(task, [1, 1, 1, 1])
    bad = dataclasses.replace(shards[3], dim=6, hbm_bytes=None, ddr_bytes=None)
    failed = profiler.record(PlacementTask.uniform([*shards[:3], bad], 2, hardware=named_hardware("cpu")), [0, 0, 0, 1])
    alone = FBGEMMProfiler(timing=QUICK, exchange="modelled").record(task, [0, 0, 0, 1])
    three = profiler.record(PlacementTask.uniform(shards, 3, hardware=named_hardware("cpu")), [0, 1, 2, 0])
    return record, empty, failed, alone, three


@pytest.mark.distributed
def test_ranks_measure_together():
    (first, empty, failed, alone, three), (second, *others) = run_ranks(_measure_together, 2)
    assert first.cost == second.cost  # one result on all ranks
    assert all((getattr(first.cost, term) > 0).all() for term in TERMS)
    assert first.provenance.details["exchange"] == "measured"
    assert np.array(first.provenance.details["forward_comms_ms"]).shape == (2, 2)
    assert empty.compute_ms[0] == 0 and empty.forward_comms_ms[0] > 0
    # A rank that cannot measure fails on every rank, and nobody is left waiting.
    assert failed.error == others[1].error and "rank 1" in failed.error and "multiple of 4" in failed.error
    assert alone.provenance.details["exchange"] == three.provenance.details["exchange"] == "modelled"

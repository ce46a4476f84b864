import gc
import time

import numpy as np
import pytest
import torch

from torchrec_dreamshard.profiling import timing
from torchrec_dreamshard.profiling.timing import Phase, PhaseTimes, TimingConfig, time_phases, torch_threads

CPU = torch.device("cpu")


def test_phases_run_in_order_with_the_warm_up_before():
    calls = []
    phases = [Phase(lambda: calls.append("f")), Phase(lambda: calls.append("b"), align=lambda: calls.append("|"))]
    times = time_phases(phases, CPU, TimingConfig(warmup=1, repeats=2, max_disturbed=0))
    assert calls == ["f", "b", "f", "|", "b", "f", "|", "b"]
    assert times.ms.shape == (2, 2) and times.undisturbed.shape == (2,)


def test_what_a_thread_does_off_its_core_is_not_counted_but_marks_the_repeat():
    config = TimingConfig(warmup=0, repeats=2, max_disturbed=3)
    with torch_threads(1):
        times = time_phases([Phase(lambda: time.sleep(0.02))], CPU, config)
    assert len(times.ms) == 5 and not times.undisturbed.any()
    assert (times.ms < 10).all()


def test_waiting_is_part_of_an_exchange():
    config = TimingConfig(warmup=0, repeats=2, max_disturbed=3)
    times = time_phases([Phase(lambda: time.sleep(0.02), waits=True)], CPU, config)
    assert len(times.ms) == 2 and (times.ms >= 20).all()


def test_disturbed_repeats_are_replaced_and_left_out(monkeypatch):
    switches = iter([0, 1])
    monkeypatch.setattr(timing, "_preemptions", lambda: next(switches, 5))
    times = time_phases([Phase(lambda: None)], CPU, TimingConfig(warmup=0, repeats=3, max_disturbed=4))
    assert not times.undisturbed[0] and times.undisturbed[1:].sum() == 3


def test_median_is_over_undisturbed_repeats_unless_most_were_disturbed():
    ms = np.array([[1.0, 10.0], [2.0, 20.0], [90.0, 900.0]])
    assert PhaseTimes(ms, np.array([True, True, False])).median_ms().tolist() == [1.5, 15.0]
    assert PhaseTimes(ms, np.array([True, False, False])).median_ms().tolist() == [2.0, 20.0]


def test_caches_are_flushed_before_cold_phases_only():
    flush = timing._cpu_flush_buffer()
    before = int(flush[0])
    phases = [Phase(lambda: None), Phase(lambda: None, cold=False)]
    repeats = len(time_phases(phases, CPU, TimingConfig(warmup=4, repeats=3)).ms)
    assert int(flush[0]) == before + repeats


def test_threads_and_garbage_collection_are_as_before_even_after_an_error():
    threads = torch.get_num_threads()

    def fail():
        assert torch.get_num_threads() == 1 and not gc.isenabled()
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"), torch_threads(1):
        time_phases([Phase(fail)], CPU, TimingConfig(warmup=0))
    assert torch.get_num_threads() == threads and gc.isenabled()


def test_configuration_is_checked():
    with pytest.raises(ValueError, match=r"TimingConfig\.repeats must be an integer of at least 1, got 0"):
        TimingConfig(repeats=0)

"""The RNN strategy."""

import dataclasses

import numpy as np
import pytest
import torch

from torchrec_dreamshard.errors import InfeasiblePlacementError, MeasurementError
from torchrec_dreamshard.measurement import CostBreakdown
from torchrec_dreamshard.pool import load_public_pool, plant_capacity, sample_tasks
from torchrec_dreamshard.rnn_baseline import RNNConfig, train_rnn
from torchrec_dreamshard.types import PlacementTask, ShardSpec

TASKS = sample_tasks(load_public_pool(), 3, 8, 2, seed=0)


class CountingProfiler:
    """Costs the number of shards on device 0: the optimum is to leave it empty."""

    def __init__(self, fail_every=0):
        self.calls = 0
        self.fail_every = fail_every

    def measure(self, task, placement):
        self.calls += 1
        if self.fail_every and self.calls % self.fail_every == 0:
            raise MeasurementError("out of memory")
        return CostBreakdown(step_ms=1.0 + sum(device == 0 for device in placement))


def test_learns_a_known_optimum():
    profiler = CountingProfiler()
    placer = train_rnn(TASKS, profiler, RNNConfig(num_measurements=400), seed=1)
    assert profiler.calls == 400
    assert all(placer.place(task) == (1,) * 8 for task in TASKS)


def test_same_seed_same_network():
    config = RNNConfig(num_measurements=35)
    first, again, other = (train_rnn(TASKS, CountingProfiler(), config, seed=seed) for seed in (3, 3, 4))
    states = [
        torch.cat([value.flatten() for value in placer.state_dict().values()]) for placer in (first, again, other)
    ]
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])


def test_failed_measurements_cost_only_themselves():
    profiler = CountingProfiler(fail_every=2)
    placer = train_rnn(TASKS, profiler, RNNConfig(num_measurements=45), seed=1)
    assert profiler.calls == 45
    assert all(bool(value.isfinite().all()) for value in placer.parameters())


def test_placements_fit_tight_memory_and_fewer_devices():
    placer = train_rnn(sample_tasks(load_public_pool(), 2, 10, 4, seed=0), CountingProfiler(), seed=0)
    tight, _ = plant_capacity(TASKS[0], 0.95)
    placement = placer.place(tight)
    used = np.zeros(2)
    for shard, device in zip(tight.shards, placement, strict=True):
        used[device] += shard.hbm_bytes
    assert all(used <= [device.hbm_bytes for device in tight.devices])


def test_what_cannot_be_placed_is_refused():
    placer = train_rnn(TASKS, CountingProfiler(), RNNConfig(num_measurements=0))
    small = dataclasses.replace(TASKS[0], devices=PlacementTask.uniform((), 2, hbm_bytes=10).devices)
    with pytest.raises(InfeasiblePlacementError):
        placer.place(small)
    with pytest.raises(ValueError, match="at most 2 devices, the task has 3"):
        placer.place(PlacementTask.uniform([ShardSpec(rows=1, dim=4, pooling_factor=1)], 3))
    assert placer.place(PlacementTask.uniform((), 2)) == ()
    with pytest.raises(ValueError, match="at least one task"):
        train_rnn([], CountingProfiler())

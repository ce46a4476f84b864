from __future__ import annotations

import itertools
import time

import pytest
import torch
from additive_model import AdditiveCostModel
from placement_tasks import fits, planted_task, random_task
from placer_contract import shard

from torchrec_dreamshard.baselines import BASELINES
from torchrec_dreamshard.config import SearchConfig
from torchrec_dreamshard.mdp import EstimatedMDP
from torchrec_dreamshard.search import greedy_placement, refine
from torchrec_dreamshard.types import DeviceSpec, PlacementTask


def step_ms(mdp, placement):
    return float(mdp.step_ms(torch.tensor(placement)[None, None])[0, 0])


def test_never_worse_than_any_start():
    for seed in range(3):
        mdp = EstimatedMDP(AdditiveCostModel(launch_ms=0.2), [random_task(30, 5, seed)])
        starts = [place(mdp.tasks[0], seed=seed) for place in BASELINES.values()]
        for config in (SearchConfig(), SearchConfig(num_starts=1, num_kicks=0)):
            found = refine(mdp, starts, config)
            assert found.predicted_ms <= min(step_ms(mdp, start) for start in starts) * (1 + 1e-6)
            assert found.predicted_ms == pytest.approx(step_ms(mdp, found.placement), rel=1e-5)


def test_finds_the_optimum_of_a_small_task():
    for seed in range(4):
        task = random_task(9, 3, seed)
        mdp = EstimatedMDP(AdditiveCostModel(launch_ms=0.2), [task])
        every = torch.tensor(list(itertools.product(range(3), repeat=9)))
        best = float(mdp.step_ms(every[None]).min())
        assert refine(mdp, [(0,) * 9]).predicted_ms == pytest.approx(best, rel=1e-5)


def test_background_and_capacity_of_unequal_devices_count():
    devices = (DeviceSpec(hbm_bytes=100, background_ms=8.0), DeviceSpec(hbm_bytes=100), DeviceSpec(hbm_bytes=10))
    shards = [shard(f"s{i}", 10, dim=100, pooling_factor=1.0) for i in range(6)]  # 3 ms each
    mdp = EstimatedMDP(AdditiveCostModel(), [PlacementTask(tuple(shards), devices)])
    placement = refine(mdp, [(0,) * 6]).placement
    assert fits(mdp.tasks[0], placement)
    assert [placement.count(d) for d in range(3)] == [1, 4, 1]


def test_stays_within_memory():
    for seed in range(3):
        task = planted_task(24, 4, 0.95, seed, both_memories=True)
        mdp = EstimatedMDP(AdditiveCostModel(), [task])
        assert fits(task, refine(mdp, [BASELINES["lookup"](task)], seed=seed).placement)


def test_the_same_seed_gives_the_same_placement_whatever_the_deadline():
    mdp = EstimatedMDP(AdditiveCostModel(), [random_task(20, 4)])
    start = BASELINES["random"](mdp.tasks[0])
    free = refine(mdp, [start], seed=1)
    assert free.converged
    assert refine(mdp, [start], seed=1, deadline=time.monotonic() + 3600).placement == free.placement


def test_the_deadline_stops_it():
    mdp = EstimatedMDP(AdditiveCostModel(), [random_task(40, 4)])
    start = BASELINES["random"](mdp.tasks[0])
    stopped = refine(mdp, [start], deadline=time.monotonic())
    assert stopped.placement == start and not stopped.converged


def test_caution_prefers_what_the_model_is_sure_of():
    class Doubtful(AdditiveCostModel):
        def compute_std(self, latents, hardware):
            return 10.0 * (latents[..., 2] == 3)  # a load of three shards is anyone's guess

    shards = [shard(f"s{i}", 1, dim=100, pooling_factor=c) for i, c in enumerate((3.0, 1.0, 1.0, 1.0))]
    mdp = EstimatedMDP(Doubtful(), [PlacementTask.uniform(shards, 2)])
    counts = {c: refine(mdp, [(0, 1, 1, 1)], SearchConfig(caution=c)).placement.count(1) for c in (0.0, 1.0)}
    assert counts[0.0] == 3 and counts[1.0] != 3


def test_greedy_under_the_model_tries_the_whole_step():
    mdp = EstimatedMDP(AdditiveCostModel(launch_ms=0.3), [random_task(30, 4, seed=4)])
    placement = greedy_placement(mdp)
    heuristics = [step_ms(mdp, place(mdp.tasks[0])) for place in BASELINES.values()]
    assert step_ms(mdp, placement) <= min(heuristics) * 1.02
    assert greedy_placement(mdp, deadline=time.monotonic() - 1) is None


def test_many_devices():
    task = random_task(200, 64, seed=1)
    mdp = EstimatedMDP(AdditiveCostModel(), [task])
    start = BASELINES["random"](task)
    found = refine(mdp, [start], SearchConfig(num_kicks=0))
    assert fits(task, found.placement)
    # No step is shorter than its costliest shard, and a good search comes close to that or to the mean.
    bound = max(float(mdp.shard_load[0].sum(-1).max()), float(mdp.shard_load[0].sum()) / 64)
    assert found.predicted_ms <= 1.05 * bound

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from additive_model import AdditiveCostModel
from placement_tasks import fits, planted_task, random_task

from torchrec_dreamshard import Agent, CostBreakdown, InfeasiblePlacementError, MeasurementError, TrainConfig, train
from torchrec_dreamshard.config import CostConfig, PolicyConfig, SearchConfig
from torchrec_dreamshard.mdp import EstimatedMDP
from torchrec_dreamshard.measurement import Measurement
from torchrec_dreamshard.rollout import roll_out
from torchrec_dreamshard.task_variation import NUM_DEVICES, vary_task
from torchrec_dreamshard.training import Trainer
from torchrec_dreamshard.types import PlacementTask, ShardSpec

TINY = TrainConfig(
    num_measurements=12,
    num_iterations=2,
    num_updates=1,
    num_imitations=1,
    tasks_per_update=2,
    num_episodes=3,
    cost=CostConfig(num_steps=20, num_members=2),
)


class CountingProfiler:
    """Costs add up; every ``fail_every``-th call fails."""

    def __init__(self, fail_every=0):
        self.calls, self.fail_every = [], fail_every

    def measure(self, task, placement):
        self.calls.append((task, tuple(placement)))
        if self.fail_every and len(self.calls) % self.fail_every == 0:
            raise MeasurementError("out of memory")
        load = np.zeros(task.num_devices)
        for shard, device in zip(task.shards, placement, strict=True):
            load[device] += 0.01 * shard.dim * (1 + shard.pooling_factor)
        return CostBreakdown(
            forward_compute_ms=load,
            backward_compute_ms=2 * load,
            forward_comms_ms=load.max() - load + 0.1,
            backward_comms_ms=np.full(task.num_devices, 0.1),
        )


def tasks():
    return [random_task(8 + i, 2 + i % 2, seed=i) for i in range(4)]


def tensors(agent):
    return {**agent.cost_model.state_dict(), **{f"p.{k}": v for k, v in agent.policy.state_dict().items()}}


@pytest.mark.parametrize("num_measurements, num_iterations", [(12, 2), (5, 3), (2, 4)])
def test_the_budget_is_kept_exactly(num_measurements, num_iterations):
    profiler = CountingProfiler()
    config = dataclasses.replace(TINY, num_measurements=num_measurements, num_iterations=num_iterations)
    agent = train(tasks(), profiler, config)
    assert len(profiler.calls) == num_measurements == agent.metadata["num_measurements"]
    assert all(fits(task, placement) for task, placement in profiler.calls)


def test_failed_measurements_count_and_are_kept():
    profiler = CountingProfiler(fail_every=3)
    agent = train(tasks(), profiler, TINY)
    assert len(profiler.calls) == 12
    assert agent.metadata["num_failed"] == 4


def test_nothing_measurable_is_an_error():
    with pytest.raises(MeasurementError, match="none of 12 placements could be measured; last: out of memory"):
        train(tasks(), CountingProfiler(fail_every=1), TINY)


@pytest.mark.parametrize(
    "config", [TINY, dataclasses.replace(TINY, policy=PolicyConfig(form="paper"), diversify=False)]
)
def test_training_twice_gives_equal_tensors(config):
    state = torch.random.get_rng_state()
    first, second = (train(tasks(), CountingProfiler(), config, seed=3) for _ in range(2))
    assert first.metadata == second.metadata
    for name, value in tensors(first).items():
        assert torch.equal(value, tensors(second)[name]), name
    assert torch.equal(state, torch.random.get_rng_state())  # the global generator is left alone
    other = train(tasks(), CountingProfiler(), config, seed=4)
    assert any(not torch.equal(value, tensors(other)[name]) for name, value in tensors(first).items())


def stored(num=8):
    profiler = CountingProfiler()
    rows = []
    for index in range(num):
        task = tasks()[index % 4]
        placement = np.random.default_rng(index).integers(task.num_devices, size=task.num_shards).tolist()
        rows.append(Measurement(task=task, placement=tuple(placement), cost=profiler.measure(task, placement)))
    return rows


def test_from_measurements_alone_without_a_profiler():
    agent = train([], None, dataclasses.replace(TINY, num_measurements=0), measurements=stored())
    assert agent.metadata["num_given"] == agent.metadata["num_measurements"] == 8
    assert len(agent.place(random_task(6, 2))) == 6


def test_continues_a_trained_agent_and_leaves_it_as_it_was():
    first = train(tasks(), CountingProfiler(), TINY)
    before = {name: value.clone() for name, value in tensors(first).items()}
    second = train(tasks(), CountingProfiler(), TINY, agent=first)
    assert all(torch.equal(value, before[name]) for name, value in tensors(first).items())
    assert second.metadata["continued_from"] == first.metadata
    assert any(not torch.equal(value, before[name]) for name, value in tensors(second).items())


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"tasks": []}, "needs tasks"),
        ({"profiler": None}, "no profiler to measure with"),
        ({"profiler": None, "config": dataclasses.replace(TINY, num_measurements=0)}, "got neither"),
    ],
)
def test_nothing_to_train_on_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        train(**{"tasks": tasks(), "profiler": CountingProfiler(), "config": TINY, **arguments})


@pytest.mark.parametrize("result", [None, 3.0])
def test_a_profiler_that_returns_no_cost_is_named(result):
    profiler = CountingProfiler()
    profiler.measure = lambda task, placement: result
    with pytest.raises(ValueError, match=f"must return a CostBreakdown, got {result}"):
        train(tasks(), profiler, TINY)


def test_an_impossible_task_is_refused_before_anything_is_measured():
    profiler = CountingProfiler()
    huge = PlacementTask.uniform([ShardSpec(rows=1000, dim=8, pooling_factor=1.0, name="huge")], 2, hbm_bytes=10)
    with pytest.raises(InfeasiblePlacementError, match="huge"):
        train([*tasks(), huge], profiler, TINY)
    assert not profiler.calls


def test_the_paper_form_trains():
    config = dataclasses.replace(TrainConfig.paper(), num_measurements=6, num_iterations=2, num_updates=1)
    config = dataclasses.replace(config, cost=dataclasses.replace(config.cost, num_steps=5))
    agent = train(tasks(), CountingProfiler(), config)
    assert isinstance(agent, Agent) and len(agent.place(random_task(6, 2), refine=False)) == 6


def test_progress_reaches_its_total():
    steps = []
    train(tasks(), CountingProfiler(), TINY, progress=lambda done, total, phase: steps.append((done, total, phase)))
    assert [done for done, _, _ in steps] == list(range(1, steps[-1][1] + 1))
    assert {phase for _, _, phase in steps} == {"measure", "fit", "imitate", "improve"}


class Crowded(AdditiveCostModel):
    """Any second shard on a device costs a fortune: the optimum is one shard each, the reverse of greedy."""

    def combine(self, compute, latents, tasks):
        predicted = super().combine(compute, latents, tasks)
        return predicted._replace(step_ms=(latents[..., 2] - 1).clamp(min=0).amax(dim=-1) + 1)

    def device_compute(self, latents, hardware):
        return 0.01 * super().device_compute(latents, hardware)


@pytest.mark.parametrize("form", ["default", "paper"])
def test_reinforce_reaches_a_known_optimum(form):
    # Four shards of very different load on four devices, with a device that is loaded already: balance would
    # leave it empty, the optimum of this model uses each device once.
    shards = [ShardSpec(rows=100 * (i + 1), dim=4 * (i + 1), pooling_factor=1.0 + i) for i in range(4)]
    base = PlacementTask.uniform(shards, 4)
    devices = (dataclasses.replace(base.devices[0], background_ms=0.01), *base.devices[1:])
    task = PlacementTask(base.shards, devices, base.hardware)
    config = TrainConfig(
        num_measurements=0, diversify=False, num_imitations=0, num_updates=60, num_iterations=1, tasks_per_update=1,
        num_episodes=32, learning_rate=0.02, policy=PolicyConfig(form=form, greed=0.05),
    )  # fmt: skip
    trainer = Trainer([task], None, config, 0, stored(1), None, None)
    trainer.cost_model, trainer.fitted = Crowded(), True
    mdp = EstimatedMDP(trainer.cost_model, [task])
    before = roll_out(mdp, trainer.policy).step_ms[0].item()
    trainer.improve()
    assert roll_out(mdp, trainer.policy).step_ms[0].item() == 1.0 < before


def test_imitation_leads_to_the_refined_placement():
    task = random_task(12, 3, seed=2)
    config = dataclasses.replace(TINY, diversify=False, policy=PolicyConfig(greed=0.0))
    trainer = Trainer([task], None, dataclasses.replace(config, num_measurements=0), 0, stored(1), None, None)
    trainer.cost_model, trainer.fitted = AdditiveCostModel(launch_ms=0.2), True
    mdp, trail = trainer._refined_trail()
    before = trainer._imitation_loss(mdp, trail).item()
    for _ in range(40):
        trainer._update(trainer._imitation_loss(mdp, trail), "imitate")
    assert trainer._imitation_loss(mdp, trail).item() < 0.7 * before


def test_the_best_policy_of_a_round_stays():
    task = random_task(12, 3, seed=2)
    config = dataclasses.replace(TINY, diversify=False, num_measurements=0, learning_rate=1.0)  # learns nothing useful
    trainer = Trainer([task], None, config, 0, stored(1), None, None)
    trainer.cost_model, trainer.fitted = AdditiveCostModel(launch_ms=0.2), True
    mdp = EstimatedMDP(trainer.cost_model, [task])
    before = roll_out(mdp, trainer.policy).step_ms[0].item()
    trainer.improve()
    assert roll_out(mdp, trainer.policy).step_ms[0].item() <= before


def test_practice_tasks_vary_and_can_be_placed():
    generator = np.random.default_rng(0)
    base = planted_task(12, 3, 0.95)
    practice = [vary_task(base, [base, random_task(30, 2)], generator) for _ in range(40)]
    assert len({task.num_devices for task in practice}) > 4
    assert all(task.num_devices in NUM_DEVICES for task in practice)
    mdp = EstimatedMDP(AdditiveCostModel(), practice)
    policy = Trainer([base], CountingProfiler(), TINY, 0, (), None, None).policy
    for task, row in zip(practice, roll_out(mdp, policy).placements.tolist(), strict=True):
        assert fits(task, row[: task.num_shards])


def test_search_config_travels_with_the_agent():
    config = dataclasses.replace(TINY, search=SearchConfig(num_kicks=3))
    assert train(tasks(), CountingProfiler(), config).search_config.num_kicks == 3

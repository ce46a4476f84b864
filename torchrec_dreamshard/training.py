"""Training an agent: Algorithm 1 of DreamShard (arXiv 2210.02023, section 3.4).

    repeat:
        collect   measure placements
        fit       the cost model to all measurements
        improve   the policy on the estimated MDP, without hardware

The loss is REINFORCE's with the mean of a task's episodes as the baseline, plus an entropy bonus. Beyond the paper
(``TrainConfig.diversify``, ``num_imitations``): what is measured is a mix of the policy's, refined, heuristic and
unbalanced placements, because a cost model must be right where the search will look and know both ends of the
range; and the policy sees tasks of other sizes made from the same shards, and first imitates refined placements.
"""

from __future__ import annotations

import copy
import logging
import platform
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrec_dreamshard import search
from torchrec_dreamshard.agent import Agent
from torchrec_dreamshard.baselines import BASELINES
from torchrec_dreamshard.config import SearchConfig, TrainConfig
from torchrec_dreamshard.cost_network import make_cost_model
from torchrec_dreamshard.errors import MeasurementError
from torchrec_dreamshard.fitting import FitReport, fit_cost_model
from torchrec_dreamshard.mdp import EstimatedMDP
from torchrec_dreamshard.measurement import CostBreakdown, Measurement, Profiler, Provenance
from torchrec_dreamshard.packing import check_possible, repair
from torchrec_dreamshard.policy_network import make_policy
from torchrec_dreamshard.rollout import Rollout, Trail, roll_out, trail_log_probs
from torchrec_dreamshard.task_variation import vary_task
from torchrec_dreamshard.types import PlacementTask

logger = logging.getLogger(__name__)

Progress = Callable[[int, int, str], None]
"""Called with the steps done, the steps in all, and what is being done."""

_HEURISTICS = tuple(name for name in BASELINES if name != "random")
_QUICK = SearchConfig(num_rollouts=0, num_starts=1, num_kicks=3)
"""Search for placements to measure and to imitate."""


def train(
    tasks: Sequence[PlacementTask],
    profiler: Profiler | None,
    config: TrainConfig | None = None,
    *,
    seed: int = 0,
    measurements: Sequence[Measurement] | None = None,
    agent: Agent | None = None,
    progress: Progress | None = None,
) -> Agent:
    """Trains an agent.

    Args:
        tasks: what to measure and to practise on; with ``measurements`` may be empty, their tasks then serve.
        profiler: called exactly ``config.num_measurements`` times; may be None if that is 0. A placement that it
            cannot measure counts, and is kept as a failed measurement.
        config: see ``TrainConfig``.
        seed: of everything random; the same seed gives equal tensors.
        measurements: used from the start.
        agent: a trained agent to continue from (it is not changed).
        progress: called after each step.

    Returns:
        The agent; its metadata says what it was trained on, and its held-out errors.

    Raises:
        ValueError: nothing to train on.
        MeasurementError: not a single placement could be measured.
        InfeasiblePlacementError: a task cannot fit.
    """
    trainer = Trainer(tasks, profiler, config or TrainConfig(), seed, measurements or (), agent, progress)
    for share in trainer.shares():
        trainer.collect(share)
        trainer.fit()
        trainer.improve()
    return trainer.result()


class Trainer:
    """What ``train`` goes through, one method for each line of Algorithm 1."""

    def __init__(
        self,
        tasks: Sequence[PlacementTask],
        profiler: Profiler | None,
        config: TrainConfig,
        seed: int,
        measurements: Sequence[Measurement],
        agent: Agent | None,
        progress: Progress | None,
    ) -> None:
        self.config, self.profiler, self.seed = config, profiler, seed
        self.tasks = [task for task in tasks or [m.task for m in measurements] if task.num_shards]
        self.measurements, self.num_given = list(measurements), len(measurements)
        self._check(agent)
        self.numbers = np.random.default_rng(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.start = agent
        self.cost_model = make_cost_model(config.cost) if agent is None else agent.cost_model
        self.policy = make_policy(config.policy, self.generator) if agent is None else copy.deepcopy(agent.policy)
        self.fitted, self.num_fitted = agent is not None, 0
        self.report: FitReport | None = None
        updates = config.num_iterations * (config.num_imitations + config.num_updates)
        self.optimizer = torch.optim.Adam(self.policy.parameter_groups(config.learning_rate))
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, max(1, updates))
        self.progress, self.done, self.total = progress, 0, config.num_measurements + config.num_iterations + updates

    def _check(self, agent: Agent | None) -> None:
        if not self.tasks:
            raise ValueError("train needs tasks with shards, or measurements of such tasks; got none")
        if self.config.num_measurements and self.profiler is None:
            raise ValueError(
                f"num_measurements is {self.config.num_measurements}, but there is no profiler to measure with; "
                "give one, or set num_measurements=0 and give measurements"
            )
        if not self.config.num_measurements and not self.num_given and agent is None:
            raise ValueError("with num_measurements=0 train needs measurements, or an agent to continue; got neither")
        for task in self.tasks:
            check_possible(task)

    def shares(self) -> list[int]:
        """How many placements each round measures; they add up to the budget."""
        rounds, budget = self.config.num_iterations, self.config.num_measurements
        return [budget // rounds + (index < budget % rounds) for index in range(rounds)]

    def collect(self, count: int) -> None:
        """Measures ``count`` placements, failures included."""
        for task in self._draw_tasks(count):
            placement = self._placement_to_measure(task)
            assert self.profiler is not None
            provenance = getattr(self.profiler, "provenance", None)
            provenance = provenance if isinstance(provenance, Provenance) else Provenance()
            try:
                cost, error = self.profiler.measure(task, placement), None
            except MeasurementError as failure:
                cost, error = None, str(failure) or type(failure).__name__
            if error is None and not isinstance(cost, CostBreakdown):
                raise ValueError(f"the profiler's measure() must return a CostBreakdown, got {cost!r}")
            self.measurements.append(
                Measurement(task=task, placement=placement, cost=cost, error=error, provenance=provenance)
            )
            self._advance("measure")

    def _placement_to_measure(self, task: PlacementTask) -> tuple[int, ...]:
        if not self.config.diversify:
            rollout = self._sample(EstimatedMDP(self.cost_model, [task]), 1)
            return tuple(rollout.placements[0].tolist())
        kind = self.numbers.random()
        if not self.fitted:
            return self._unbalanced(task) if kind < 0.6 else self._heuristic(task)
        if kind < 0.4:
            return self._unbalanced(task)
        mdp = EstimatedMDP(self.cost_model, [task])
        placement = tuple(self._sample(mdp, 1).placements[0].tolist())
        if kind < 0.6:
            return placement
        return search.refine(mdp, [placement], _QUICK, seed=int(self.numbers.integers(1 << 31))).placement

    def _unbalanced(self, task: PlacementTask) -> tuple[int, ...]:
        """Shards at random, some devices preferred to others: loads of many sizes."""
        share = self.numbers.dirichlet(np.full(task.num_devices, self.numbers.choice([0.5, 2.0, 20.0])))
        placement = self.numbers.choice(task.num_devices, size=task.num_shards, p=share)
        return repair(task, placement, seed=int(self.numbers.integers(1 << 31)))

    def _heuristic(self, task: PlacementTask) -> tuple[int, ...]:
        name = _HEURISTICS[int(self.numbers.integers(len(_HEURISTICS)))]
        return BASELINES[name](task, seed=int(self.numbers.integers(1 << 31)))

    def fit(self) -> None:
        """Fits the cost model to all measurements, if there are new ones."""
        if len(self.measurements) > self.num_fitted and any(m.cost is not None for m in self.measurements):
            # The paper's network goes on learning; the default is fitted anew, which forgets bad early fits.
            goes_on = self.start is not None or (self.fitted and self.config.cost.form == "paper")
            model = None if not goes_on else (self.start.cost_model if self.start is not None else self.cost_model)
            config = self.config.cost if model is None else None
            self.cost_model, self.report = fit_cost_model(self.measurements, config, seed=self.seed, model=model)
            self.fitted, self.num_fitted = True, len(self.measurements)
        self._advance("fit")

    def improve(self) -> None:
        """Improves the policy on the estimated MDP."""
        if not self.fitted:
            return
        practice = self._practice(self.config.num_validations) if self.config.num_validations else None
        if practice is not None:
            self._keep_best(practice, [copy.deepcopy(self.policy.state_dict()), *self.policy.alternatives()])
        self.policy.train()
        states = [copy.deepcopy(self.policy.state_dict())]
        if self.config.num_imitations:
            mdp, trail = self._refined_trail()
            for _ in range(self.config.num_imitations):
                self._update(self._imitation_loss(mdp, trail), "imitate")
            states.append(copy.deepcopy(self.policy.state_dict()))
        for _ in range(self.config.num_updates):
            self._update(self._reinforce_loss(self._practice(self.config.tasks_per_update)), "improve")
        states.append(copy.deepcopy(self.policy.state_dict()))
        self.policy.eval()
        if practice is not None:
            self._keep_best(practice, states)

    def _keep_best(self, mdp: EstimatedMDP, states: Sequence[dict[str, Tensor]]) -> None:
        """Takes the policy with the shortest steps: acting greedily is not what the updates train."""
        steps = []
        for state in states:
            self.policy.load_state_dict(state)
            rollout = roll_out(mdp, self.policy)
            assert rollout is not None
            steps.append(float(rollout.step_ms.clamp(min=1e-9).log().mean()))
        self.policy.load_state_dict(states[int(np.argmin(steps))])

    def _update(self, loss: Tensor, phase: str) -> None:
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self._advance(phase)

    def _practice(self, count: int) -> EstimatedMDP:
        """``count`` tasks to learn from."""
        tasks = self._draw_tasks(count)
        if self.config.diversify:
            tasks = [vary_task(task, self.tasks, self.numbers) for task in tasks]
        return EstimatedMDP(self.cost_model, tasks)

    def _draw_tasks(self, count: int) -> list[PlacementTask]:
        """Tasks in random order, all of them before one comes again."""
        order: list[int] = []
        while len(order) < count:
            order += self.numbers.permutation(len(self.tasks)).tolist()
        return [self.tasks[index] for index in order[:count]]

    def _sample(self, mdp: EstimatedMDP, num_episodes: int, *, keep_trail: bool = False) -> Rollout:
        rollout = roll_out(mdp, self.policy, num_episodes, generator=self.generator, keep_trail=keep_trail)
        assert rollout is not None
        return rollout

    def _refined_trail(self) -> tuple[EstimatedMDP, Trail]:
        """Refined placements of some tasks, as episodes to imitate."""
        mdp = self._practice(self.config.tasks_per_update)
        follow = torch.zeros(mdp.order.shape, dtype=torch.int64)
        for row, task in enumerate(mdp.tasks):
            single = EstimatedMDP(self.cost_model, [task])
            start = tuple(self._sample(single, 1).placements[0].tolist())
            refined = search.refine(single, [start], _QUICK, seed=int(self.numbers.integers(1 << 31)))
            follow[row, : task.num_shards] = torch.tensor(refined.placement)
        rollout = roll_out(mdp, self.policy, follow=follow, keep_trail=True)
        assert rollout is not None and rollout.trail is not None
        return mdp, rollout.trail

    def _imitation_loss(self, mdp: EstimatedMDP, trail: Trail) -> Tensor:
        """Cross entropy along episodes to imitate."""
        chosen = trail_log_probs(self.policy, mdp, trail).gather(-1, trail.choices[..., None]).squeeze(-1)
        # A device that overflows on the way, until a later shard leaves it, is illegal there: nothing to learn.
        usable = trail.active & chosen.isfinite()
        return -torch.where(usable, chosen, 0.0).sum() / usable.sum().clamp(min=1)

    def _reinforce_loss(self, mdp: EstimatedMDP) -> Tensor:
        """REINFORCE with a baseline and an entropy bonus."""
        episodes = self.config.num_episodes
        rollout = self._sample(mdp, episodes, keep_trail=True)
        assert rollout.trail is not None
        trail, reward = rollout.trail, -rollout.step_ms.view(-1, episodes)
        deviation = reward.std(dim=1, correction=0, keepdim=True)
        advantage = ((reward - reward.mean(dim=1, keepdim=True)) / deviation.clamp(min=1e-9)).flatten()
        log_probs = trail_log_probs(self.policy, mdp, trail)
        chosen = log_probs.gather(-1, trail.choices[..., None]).squeeze(-1)
        entropy = -torch.where(trail.legal, log_probs.exp() * log_probs.masked_fill(~trail.legal, 0.0), 0.0).sum(dim=-1)
        bonus = self.config.entropy_weight * entropy
        steps = trail.active.sum().clamp(min=1)
        return -torch.where(trail.active, chosen * advantage + bonus, 0.0).sum() / steps

    def _advance(self, phase: str) -> None:
        self.done += 1
        if self.progress is not None:
            self.progress(self.done, self.total, phase)

    def result(self) -> Agent:
        """The agent as trained so far.

        Raises:
            MeasurementError: not a single placement could be measured.
        """
        if not self.fitted:
            errors = [m.error for m in self.measurements if m.error]
            raise MeasurementError(f"none of {len(self.measurements)} placements could be measured; last: {errors[-1]}")
        for note in () if self.report is None else self.report.notes:
            logger.warning("%s", note)
        search_config = self.config.search if self.start is None else self.start.search_config
        return Agent(self.cost_model, self.policy, self._metadata(), search_config=search_config)

    def _metadata(self) -> dict[str, Any]:
        simulated = {m.provenance.simulated for m in self.measurements if m.provenance.profiler}
        origin = {frozenset({True}): "simulated", frozenset({False}): "measured", frozenset(): "unknown"}
        return {
            "trained_on": origin.get(frozenset(simulated), "measured and simulated"),
            "profilers": sorted({m.provenance.profiler for m in self.measurements if m.provenance.profiler}),
            "devices": sorted({m.provenance.device for m in self.measurements if m.provenance.device}),
            "hardware": sorted({task.hardware.name for task in self.tasks}),
            "num_tasks": len(self.tasks),
            "num_measurements": len(self.measurements),
            "num_given": self.num_given,
            "num_failed": sum(m.cost is None for m in self.measurements),
            "seed": self.seed,
            "report": None if self.report is None else self.report.to_dict(),
            "continued_from": None if self.start is None else self.start.metadata,
            "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
        }

"""What the parts of the method are worth: policies trained without one of them, judged by the profiler.

    python benchmarks/ablations.py --family DLRM-40x4 --judge analytic:v100

Every row is a policy alone, one greedy rollout, on the same unseen tasks; every training has the same budget of
measured placements. The paper's form is compared with itself where a reduction is replaced by a mean, where its
policy does not see predicted costs, and where there is no estimated MDP: its policy then learns from measured costs
alone. The default is compared with its untrained rule and with a policy that does not see predicted costs, under one
cost network.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence

import numpy as np
import torch
from plan_quality import FAMILIES, make_tasks, parse_judge
from quality_report import ratio_interval
from torch import Tensor

from torchrec_dreamshard import Agent, PlacementTask, Profiler, TrainConfig, train
from torchrec_dreamshard.baselines import BASELINES
from torchrec_dreamshard.config import CostConfig, PolicyConfig
from torchrec_dreamshard.cost_model import CostPrediction
from torchrec_dreamshard.cost_network import make_cost_model
from torchrec_dreamshard.features import TaskTensors, batch_tasks
from torchrec_dreamshard.mdp import EstimatedMDP, Observation
from torchrec_dreamshard.paper_cost_network import PaperCostNetwork, paper_features
from torchrec_dreamshard.policy_network import PaperPolicyNetwork, Policy, make_policy
from torchrec_dreamshard.profiling.analytic import AnalyticProfiler
from torchrec_dreamshard.rollout import Rollout
from torchrec_dreamshard.training import Trainer

CONTROL = "paper"
DESCRIPTIONS = {
    "ours": "the default",
    "ours_untrained": "the default's rule before training, under the trained cost network",
    "ours_no_cost_features": "a policy that sees what is placed, not what it costs, under the same cost network",
    "paper": "the paper's form",
    "paper_mean_of_shards": "a device is the mean of its shards' encodings, not their sum",
    "paper_mean_of_devices": "the step comes from the mean over devices, not the largest",
    "paper_no_cost_features": "the policy does not see predicted costs",
    "paper_no_mdp": "no cost network: REINFORCE on measured costs",
}


class MeanOfShards(PaperCostNetwork):
    """Devices by the mean of their shards' encodings; the last column of a latent counts the shards."""

    def _mean(self, latents: Tensor) -> Tensor:
        count = latents[..., -1:]
        return torch.cat([latents[..., :-1] / count.clamp(min=1), count], dim=-1)

    def device_compute(self, latents: Tensor, hardware: Tensor) -> Tensor:
        """See ``CostModel``."""
        return super().device_compute(self._mean(latents), hardware)

    def combine(self, compute: Tensor, latents: Tensor, tasks: TaskTensors) -> CostPrediction:
        """See ``CostModel``."""
        return super().combine(compute, self._mean(latents), tasks)


class MeanOfDevices(PaperCostNetwork):
    """The step from the mean over devices."""

    def combine(self, compute: Tensor, latents: Tensor, tasks: TaskTensors) -> CostPrediction:
        """See ``CostModel``."""
        mask = tasks.device_mask.to(latents.dtype)
        share = mask / mask.sum(dim=1, keepdim=True)
        share = share.reshape(len(mask), *([1] * (latents.dim() - 3)), mask.shape[1], 1)
        mean = (latents * share).sum(dim=-2, keepdim=True).expand_as(latents)
        step = super().combine(compute, mean, tasks).step_ms
        return super().combine(compute, latents, tasks)._replace(step_ms=step)


class BlindPolicy(PaperPolicyNetwork):
    """Sees the encodings of what is placed, not what it costs."""

    def features(self, observation: Observation) -> Tensor:
        """See ``Policy``."""
        return torch.zeros_like(observation.load)


class MeasuringTrainer(Trainer):
    """Every episode's reward is a measurement."""

    def _sample(self, mdp: EstimatedMDP, num_episodes: int, *, keep_trail: bool = False) -> Rollout:
        rollout = super()._sample(mdp, num_episodes, keep_trail=keep_trail)
        assert self.profiler is not None
        steps = [
            self.profiler.measure(task, row[: task.num_shards]).step_ms
            for task, rows in zip(mdp.tasks, rollout.placements.view(len(mdp.tasks), num_episodes, -1), strict=True)
            for row in rows.tolist()
        ]
        return rollout._replace(step_ms=torch.tensor(steps))


def fresh_policy(policy: Policy, seed: int) -> Policy:
    """The policy with weights of a seed."""
    policy.reset(torch.Generator().manual_seed(seed))
    return policy


def train_paper(
    cost_class: type[PaperCostNetwork],
    policy_class: type[PaperPolicyNetwork],
    tasks: Sequence[PlacementTask],
    profiler: Profiler,
    num_measurements: int,
    seed: int,
) -> Agent:
    """The paper's training with other networks, all from the same kind of start."""
    config = dataclasses.replace(TrainConfig.paper(), num_measurements=num_measurements)
    cost = cost_class(config.cost)
    cost.reset(torch.Generator().manual_seed(seed))
    tensors = batch_tasks(tasks)
    cost.normalizer.fit(paper_features(tensors.shard_features)[tensors.shard_mask])
    first = profiler.measure(tasks[0], BASELINES["random"](tasks[0], seed=seed)).step_ms
    cost.cost_scale.fill_(first or 1.0)
    policy = fresh_policy(policy_class(config.policy), seed)
    return train(tasks, profiler, config, seed=seed, agent=Agent(cost, policy))


def train_without_mdp(tasks: Sequence[PlacementTask], profiler: Profiler, num_measurements: int, seed: int) -> Agent:
    """REINFORCE of the paper's policy on measurements; its cost network is untrained and says nothing."""
    paper = TrainConfig.paper()
    config = dataclasses.replace(
        paper,
        num_measurements=0,
        num_iterations=1,
        num_updates=num_measurements // (paper.num_episodes * paper.tasks_per_update),
    )
    start = Agent(make_cost_model(CostConfig()), fresh_policy(BlindPolicy(config.policy), seed))
    trainer = MeasuringTrainer(tasks, profiler, config, seed, (), start, None)
    trainer.improve()
    return trainer.result()


def train_all(tasks: Sequence[PlacementTask], profiler: Profiler, num_measurements: int, seed: int) -> dict[str, Agent]:
    """An agent for each row, by the names of ``DESCRIPTIONS``."""
    ours = train(tasks, profiler, TrainConfig(num_measurements=num_measurements), seed=seed)
    practice = TrainConfig(num_measurements=0)
    blind = Agent(ours.cost_model, fresh_policy(BlindPolicy(PolicyConfig(form="paper")), seed))

    def paper(cost: type[PaperCostNetwork], policy: type[PaperPolicyNetwork]) -> Agent:
        return train_paper(cost, policy, tasks, profiler, num_measurements, seed)

    return {
        "ours": ours,
        "ours_untrained": Agent(ours.cost_model, make_policy(PolicyConfig(), torch.Generator().manual_seed(seed))),
        "ours_no_cost_features": train(tasks, None, practice, seed=seed, agent=blind),
        "paper": paper(PaperCostNetwork, PaperPolicyNetwork),
        "paper_mean_of_shards": paper(MeanOfShards, PaperPolicyNetwork),
        "paper_mean_of_devices": paper(MeanOfDevices, PaperPolicyNetwork),
        "paper_no_cost_features": paper(PaperCostNetwork, BlindPolicy),
        "paper_no_mdp": train_without_mdp(tasks, profiler, num_measurements, seed),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=FAMILIES, default="DLRM-40x4", metavar="NAME")
    parser.add_argument("--judge", default="analytic:v100", help="as in plan_quality.py")
    parser.add_argument("--num-tasks", type=int, default=20, help="test tasks")
    parser.add_argument("--num-measurements", type=int, default=100, help="of each training")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of training; the tasks stay the same")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(arguments)
    profiler, hardware = parse_judge(args.judge)
    measured = not isinstance(profiler, AnalyticProfiler)
    train_tasks, test_tasks = make_tasks(FAMILIES[args.family], hardware, measured, args.num_tasks, 0)

    def steps(place) -> list[float]:  # type: ignore[no-untyped-def]
        return [profiler.measure(task, place(task)).step_ms or float("nan") for task in test_tasks]

    heuristics = {name: np.array(steps(place)) for name, place in BASELINES.items()}
    best = min(heuristics, key=lambda name: float(heuristics[name].mean()))
    rows: dict[str, list[list[float]]] = {}
    for seed in args.seeds:
        for name, agent in train_all(train_tasks, profiler, args.num_measurements, seed).items():
            rows.setdefault(name, []).append(steps(lambda task, agent=agent: agent.place(task, refine=False)))
            print(f"seed {seed}: {name} {np.mean(rows[name][-1]):.3f} ms", file=sys.stderr, flush=True)
    if args.json:
        print(json.dumps({"best_heuristic": best, "heuristic_ms": heuristics[best].tolist(), "steps_ms": rows}))
        return
    print(
        f"{args.family} on {args.judge}, {args.num_tasks} test tasks, {args.num_measurements} measured placements, ",
        end="",
    )
    print(f"{len(args.seeds)} seeds; mean and 95 % interval of paired ratios. Best heuristic: {best}.\n")
    print(f"| policy alone | step ms | / {CONTROL} | / best heuristic | |\n|---|---|---|---|---|")
    control = np.array(rows[CONTROL]).mean(axis=0)
    for name, values in rows.items():
        mean = np.array(values).mean(axis=0)
        ratios = [
            "{:.3f} ({:.3f} to {:.3f})".format(*ratio_interval(mean, other)) for other in (control, heuristics[best])
        ]
        print(f"| {name} | {mean.mean():.3f} | {ratios[0]} | {ratios[1]} | {DESCRIPTIONS[name]} |")


if __name__ == "__main__":
    main()

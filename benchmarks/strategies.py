"""Every strategy that plan quality is compared for, by name.

A strategy places a task; it may also return another task (tables split by columns) with its placement. Trained ones
are trained on the family's training tasks with the given number of measured placements, and nothing else.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from torchrec_dreamshard import Agent, PlacementTask, Profiler, TrainConfig, train
from torchrec_dreamshard.baselines import BASELINES
from torchrec_dreamshard.neuroshard_search import NeuroShardConfig, search_columns
from torchrec_dreamshard.rnn_baseline import RNNConfig, train_rnn

Placement = tuple[int, ...]


class SplitPlan(NamedTuple):
    """A plan that may have split tables: the task with the parts, and where they go."""

    task: PlacementTask
    placement: Placement


Strategy = Callable[[PlacementTask], Placement | SplitPlan]

HEURISTICS = tuple(BASELINES)
TRAINED = {
    "policy": "our policy alone: one greedy rollout",
    "search": "our search alone, from heuristics and greedy, under our cost network",
    "policy_and_search": "our agent as it plans by default",
    "paper_policy": "the paper's networks, features and training",
    "rnn": "sequence-to-sequence policy trained on measurements",
    "neuroshard_greedy": "NeuroShard's inner search under our cost network, whole tables",
    "neuroshard_columns": "the same with its beam over column halvings",
}


def heuristics() -> dict[str, Strategy]:
    """The human-expert strategies."""
    return {name: place for name, place in BASELINES.items()}


def torchrec_strategies() -> dict[str, Strategy]:
    """TorchRec's planner with each of its partitioners, whole tables; empty where TorchRec is not installed."""
    try:
        from torchrec_placer import PARTITIONERS, place_with_torchrec
    except ImportError:
        return {}
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    return {name: functools.partial(place_with_torchrec, make_partitioner=make) for name, make in PARTITIONERS.items()}


def train_strategies(
    names: Sequence[str],
    tasks: Sequence[PlacementTask],
    profiler: Profiler,
    *,
    num_measurements: int,
    seed: int,
    folder: Path,
) -> tuple[dict[str, Strategy], dict[str, float]]:
    """Trains what the named strategies need.

    Args:
        names: keys of ``TRAINED``.
        tasks: training tasks.
        profiler: measures ``num_measurements`` placements for each trained thing.
        num_measurements: the budget.
        seed: of training.
        folder: agents that are there as ``ours.safetensors`` and ``paper.safetensors`` are taken, others saved.

    Returns:
        The strategies, and the seconds that each training took.
    """
    found: dict[str, Strategy] = {}
    seconds: dict[str, float] = {}

    def agent(name: str, config: TrainConfig) -> Agent:
        path = folder / f"{name}.safetensors"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            started = time.perf_counter()
            config = dataclasses.replace(config, num_measurements=num_measurements)
            train(tasks, profiler, config, seed=seed).save(path)
            seconds[name] = time.perf_counter() - started
        return Agent.load(path)

    if set(names) - {"paper_policy", "rnn"}:
        found |= _of_agent(agent("ours", TrainConfig()))
    if "paper_policy" in names:
        found["paper_policy"] = functools.partial(agent("paper", TrainConfig.paper()).place, refine=False)
    if "rnn" in names:
        started = time.perf_counter()
        rnn = train_rnn(tasks, profiler, RNNConfig(num_measurements=num_measurements), seed=seed)
        seconds["rnn"] = time.perf_counter() - started
        found["rnn"] = rnn.place
    return {name: found[name] for name in names}, seconds


def _of_agent(agent: Agent) -> dict[str, Strategy]:
    def neuroshard(config: NeuroShardConfig) -> Strategy:
        def place(task: PlacementTask) -> SplitPlan:
            plan = search_columns(task, agent.cost_model, config)
            return SplitPlan(plan.task, plan.placement)

        return place

    return {
        "policy": functools.partial(agent.place, refine=False),
        "search": functools.partial(agent.place, use_policy=False),
        "policy_and_search": agent.place,
        "neuroshard_greedy": neuroshard(NeuroShardConfig(depth=0)),
        "neuroshard_columns": neuroshard(NeuroShardConfig()),
    }

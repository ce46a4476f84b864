"""``dreamshard compare``: place tasks with every strategy and let a profiler judge."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchrec_dreamshard.cli.common import add_common_arguments, emit, format_table, positive_float, progress_bar
from torchrec_dreamshard.cli.inputs import PROFILER_HELP, add_task_arguments, load_tasks, make_profiler
from torchrec_dreamshard.errors import InfeasiblePlacementError, MeasurementError
from torchrec_dreamshard.measurement import CostBreakdown

if TYPE_CHECKING:
    from torchrec_dreamshard.agent import Agent
    from torchrec_dreamshard.measurement import Profiler
    from torchrec_dreamshard.types import PlacementTask

Placer = Callable[["PlacementTask", int], Sequence[int]]

_DESCRIPTION = """\
Places tasks with the human-expert heuristics, the policy network alone, the search alone (started from the
heuristics) and both together, which is what a plan uses. A profiler, not the agent's own cost model, judges.
"""
LEARNED = ("policy", "search", "both")


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Adds the command."""
    parser = subparsers.add_parser("compare", help="compare placement strategies", description=_DESCRIPTION)
    parser.add_argument("--agent", help="agent file or shipped name (default: the shipped one for the tasks' device)")
    parser.add_argument("--profiler", default="analytic:a100", help=f"the judge: {PROFILER_HELP}; default: %(default)s")
    parser.add_argument("--strategies", nargs="+", metavar="NAME", help="default: all")
    parser.add_argument(
        "--time-budget", type=positive_float, default=2.0, metavar="S", help="seconds of search per task (default: 2)"
    )
    add_task_arguments(parser, num_tasks=10)
    add_common_arguments(parser)


@dataclass(frozen=True)
class Outcome:
    """What one strategy did with one task."""

    step_ms: float | None
    """Judged by the profiler; None when there is no cost."""
    place_s: float
    error: str | None = None


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    from torchrec_dreamshard.agent import Agent

    tasks = load_tasks(args)
    profiler = make_profiler(args.profiler, args.seed)
    agent = Agent.load(args.agent or tasks[0].hardware.compute_device)
    placers = make_placers(agent, args.strategies, args.time_budget)
    outcomes: dict[str, list[Outcome]] = {name: [] for name in placers}
    with progress_bar(len(tasks) * len(placers), "compare", "placement") as bar:
        for index, task in enumerate(tasks):
            for name, placer in placers.items():
                outcomes[name].append(judge(placer, profiler, task, args.seed + index))
                bar.update()
    result = summarise(outcomes)
    result["profiler"], result["num_tasks"] = args.profiler, len(tasks)
    emit(args, result, as_text(result))
    return 0


def make_placers(agent: Agent, names: Sequence[str] | None, time_budget_s: float) -> dict[str, Placer]:
    """The named strategies in the order given, or all.

    Raises:
        ValueError: an unknown name.
    """
    from torchrec_dreamshard.baselines import BASELINES

    placers: dict[str, Placer] = dict(BASELINES)
    placers["policy"] = lambda task, seed: agent.place(task, refine=False, seed=seed)
    placers["search"] = lambda task, seed: agent.place(task, use_policy=False, time_budget_s=time_budget_s, seed=seed)
    placers["both"] = lambda task, seed: agent.place(task, time_budget_s=time_budget_s, seed=seed)
    unknown = sorted(set(names or ()) - set(placers))
    if unknown:
        raise ValueError(f"unknown strategies {', '.join(unknown)}; known are {', '.join(placers)}")
    return {name: placers[name] for name in names or placers}


def judge(placer: Placer, profiler: Profiler, task: PlacementTask, seed: int) -> Outcome:
    """Places one task and measures the placement.

    Raises:
        ValueError: the profiler returns no cost.
    """
    start = time.perf_counter()
    try:
        placement = placer(task, seed)
        place_s = time.perf_counter() - start
        cost = profiler.measure(task, placement)
    except (InfeasiblePlacementError, MeasurementError) as error:
        return Outcome(None, time.perf_counter() - start, str(error))
    if not isinstance(cost, CostBreakdown):
        raise ValueError(f"the profiler's measure() must return a CostBreakdown, got {cost!r}")
    return Outcome(cost.step_ms, place_s, None if cost.step_ms is not None else "the profiler gives no step time")


def summarise(outcomes: dict[str, list[Outcome]]) -> dict[str, Any]:
    """Per strategy: its mean step, and the paired change against the best heuristic with a 95 % interval.

    The reference is the heuristic with the lowest mean, in hindsight. Only tasks that every strategy placed and the
    profiler measured count, so that all means are over the same tasks.
    """
    names = list(outcomes)
    common = [i for i in range(len(outcomes[names[0]])) if all(outcomes[n][i].step_ms is not None for n in names)]
    steps = {name: [float(outcomes[name][i].step_ms or 0.0) for i in common] for name in names}
    reference = min((name for name in names if name not in LEARNED), key=lambda n: sum(steps[n]), default=names[0])
    rows = []
    for name in names:
        changes = [100 * (s / r - 1) for s, r in zip(steps[name], steps[reference], strict=True) if r > 0]
        rows.append(
            {
                "strategy": name,
                "step_ms": _mean(steps[name]),
                "change_percent": _mean(changes),
                "change_interval": _interval(changes),
                "failed": [o.error for o in outcomes[name] if o.error],
                "place_ms": 1e3 * (_mean([o.place_s for o in outcomes[name]]) or 0.0),
                "step_ms_per_task": [o.step_ms for o in outcomes[name]],
            }
        )
    return {"reference": reference, "num_compared": len(common), "strategies": rows}


def as_text(result: dict[str, Any]) -> str:
    """The result as a table for people."""
    rows = [
        (
            row["strategy"],
            _format(row["step_ms"], ".3f"),
            f"{_format(row['change_percent'], '+.1f')} ± {_format(row['change_interval'], '.1f')}",
            str(len(row["failed"])),
            _format(row["place_ms"], ".1f"),
        )
        for row in result["strategies"]
    ]
    headers = ("strategy", "step ms", f"% vs {result['reference']}", "failed", "place ms")
    return (
        f"{result['num_compared']} of {result['num_tasks']} tasks, judged by {result['profiler']} "
        f"(mean; ± is the 95 % interval over tasks; less is better)\n\n" + format_table(headers, rows)
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _interval(values: Sequence[float]) -> float | None:
    """Half width of the 95 % interval of the mean (normal approximation)."""
    if len(values) < 2:
        return None
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return 1.96 * math.sqrt(variance / len(values))


def _format(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)

"""Quality of plans: every strategy on tasks never seen, judged by the profiler.

    python benchmarks/plan_quality.py                              # a small run of minutes
    python benchmarks/plan_quality.py --full --output out/quality  # the whole table
    python benchmarks/plan_quality.py --judges fbgemm:cpu --families DLRM-20x4

Training tasks come from one half of the public pool, test tasks from the other. Each family's result is a JSON file
in the output folder; results that are there already are kept, so that a run resumes and parts may run side by side.
The report is written from all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from quality_report import report
from strategies import TRAINED, SplitPlan, Strategy, heuristics, torchrec_strategies, train_strategies
from true_search import long_search, lower_bound_ms

from torchrec_dreamshard import InfeasiblePlacementError, MeasurementError, PlacementTask, Profiler, ShardSpec
from torchrec_dreamshard.pool import load_public_pool, sample_tasks, split
from torchrec_dreamshard.profiling.analytic import AnalyticProfiler

MIXED_DIMS = (4, 8, 16, 32, 64, 128)
NUM_TRAIN_TASKS = 50
CPU_MAX_ROWS = 200_000  # measured kernels allocate real tables
CPU_BATCH_SIZE = 2048


@dataclass(frozen=True)
class Family:
    """Tasks of one kind."""

    name: str
    num_shards: int
    num_devices: int
    dims: int | tuple[int, ...] = 16


FAMILIES = {
    family.name: family
    for family in (
        *(Family(f"DLRM-{count}x4", count, 4) for count in (20, 40, 60, 80, 100)),
        Family("mixed-20x2", 20, 2, MIXED_DIMS),
        Family("mixed-40x4", 40, 4, MIXED_DIMS),
        Family("mixed-60x8", 60, 8, MIXED_DIMS),
        Family("mixed-100x16", 100, 16, MIXED_DIMS),
    )
}
QUICK_FAMILIES = ("DLRM-40x4", "mixed-40x4")


def parse_judge(text: str) -> tuple[Profiler, str]:
    """``analytic:<hardware>`` or ``fbgemm:cpu`` to a profiler and the name of its hardware."""
    kind, _, hardware = text.partition(":")
    if kind == "analytic":
        return AnalyticProfiler(hardware), hardware
    if kind == "fbgemm" and hardware in ("cpu", "cuda"):
        from torchrec_dreamshard.profiling.fbgemm_profiler import FBGEMMProfiler

        return FBGEMMProfiler(hardware), "cpu" if hardware == "cpu" else "a100"
    raise ValueError(f"a judge is analytic:<hardware>, fbgemm:cpu or fbgemm:cuda, got {text!r}")


def make_tasks(
    family: Family, hardware: str, measured: bool, num_test: int, seed: int
) -> tuple[list[PlacementTask], list[PlacementTask]]:
    """Training and test tasks from disjoint halves of the pool."""
    halves: list[list[ShardSpec]] = list(split(load_public_pool(), seed))
    if measured:
        halves = [
            [dataclasses.replace(shard, rows=min(shard.rows, CPU_MAX_ROWS), hbm_bytes=None) for shard in half]
            for half in halves
        ]
    train_tasks, test_tasks = (
        sample_tasks(
            half,
            count,
            family.num_shards,
            family.num_devices,
            dims=family.dims,
            hardware=hardware,
            batch_size=CPU_BATCH_SIZE if measured else None,
            devices_per_host=8 if family.num_devices > 8 else None,
            seed=seed + offset,
        )
        for offset, (half, count) in enumerate(zip(halves, (NUM_TRAIN_TASKS, num_test), strict=True))
    )
    return train_tasks, test_tasks


def run_strategy(
    strategy: Strategy, tasks: Sequence[PlacementTask], profiler: Profiler
) -> tuple[dict[str, list[float]], list[tuple[int, ...] | None]]:
    """Steps (NaN where it failed) and times of one strategy, and its placements of whole tables."""
    record: dict[str, list[float]] = {"step_ms": [], "place_ms": []}
    placements: list[tuple[int, ...] | None] = []
    for task in tasks:
        started = time.perf_counter()
        try:
            placed = strategy(task)
        except InfeasiblePlacementError:
            placed = None
        record["place_ms"].append((time.perf_counter() - started) * 1e3)
        step, whole = math.nan, None
        if placed is not None:
            judged, placement = placed if isinstance(placed, SplitPlan) else (task, placed)
            whole = placement if judged.shards == task.shards else None
            with contextlib.suppress(MeasurementError):
                step = profiler.measure(judged, placement).step_ms or math.nan
        record["step_ms"].append(step)
        placements.append(whole)
    return record, placements


def run_family(family: Family, judge: str, args: argparse.Namespace) -> dict[str, Any]:
    """Trains and runs every strategy on one family."""
    profiler, hardware = parse_judge(judge)
    measured = not isinstance(profiler, AnalyticProfiler)
    _, test_tasks = make_tasks(family, hardware, measured, args.num_tasks, args.seed)
    home = FAMILIES[args.train_on or family.name]
    train_tasks, _ = make_tasks(home, hardware, measured, 1, args.seed)
    # The RNN's output has one unit per device: it cannot place on more than it was trained for.
    names = [name for name in args.trained if name != "rnn" or family.num_devices <= home.num_devices]
    strategies = heuristics() | torchrec_strategies()
    trained, train_s = train_strategies(
        names,
        train_tasks,
        profiler,
        num_measurements=args.num_measurements,
        seed=args.seed,
        folder=args.output / "agents" / _stem(judge, home.name, args),
    )
    records, placements = {}, {}
    for name, strategy in (strategies | trained).items():
        records[name], placements[name] = run_strategy(strategy, test_tasks, profiler)
        print(f"{judge} {family.name}: {name} {np.nanmean(records[name]['step_ms']):.3f} ms", file=sys.stderr)
    # Plans that split tables are not plans of the same task, so they do not count as the best known.
    whole = [name for name in placements if all(row is not None for row in placements[name])]
    best = np.nanmin([records[name]["step_ms"] for name in whole], axis=0)
    result: dict[str, Any] = {
        "family": family.name,
        "judge": judge,
        "trained_on": home.name,
        "num_tasks": args.num_tasks,
        "num_measurements": args.num_measurements,
        "seed": args.seed,
        "train_s": train_s,
        "best_heuristic": min(heuristics(), key=lambda name: float(np.nanmean(records[name]["step_ms"]))),
    }
    if isinstance(profiler, AnalyticProfiler):
        starts = [[row for name in whole if (row := placements[name][i]) is not None] for i in range(len(test_tasks))]
        records["long_search_on_true_cost"] = search_true_cost(profiler, test_tasks, starts, args)
        best = np.minimum(best, records["long_search_on_true_cost"]["step_ms"])
        result["lower_bound_ms"] = [lower_bound_ms(task, task.hardware) for task in test_tasks]
    return {**result, "best_known_ms": best.tolist(), "strategies": records}


def search_true_cost(
    profiler: AnalyticProfiler,
    tasks: Sequence[PlacementTask],
    starts: Sequence[Sequence[tuple[int, ...]]],
    args: argparse.Namespace,
) -> dict[str, list[float]]:
    """The long search from the two best of each task's starts."""
    record: dict[str, list[float]] = {"step_ms": [], "place_ms": []}
    for task, placements in zip(tasks, starts, strict=True):
        begun = time.perf_counter()
        evaluate = functools.partial(profiler.step_ms, task)
        best = np.argsort(evaluate(np.array(placements)), kind="stable")[:2]
        _, cost = long_search(
            task,
            evaluate,
            [placements[i] for i in best],
            num_evaluations=args.num_evaluations,
            seed=args.seed,
        )
        record["step_ms"].append(cost)
        record["place_ms"].append((time.perf_counter() - begun) * 1e3)
    return record


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="all families, 50 tasks each, a longer search")
    parser.add_argument("--quick", action="store_true", help="the small run (default)")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, metavar="NAME", help=", ".join(FAMILIES))
    parser.add_argument("--judges", nargs="+", help="analytic:<hardware> or fbgemm:cpu (default: analytic:v100)")
    parser.add_argument("--trained", nargs="*", choices=TRAINED, default=list(TRAINED), metavar="NAME")
    parser.add_argument("--train-on", choices=FAMILIES, metavar="NAME", help="train on this family, test on the others")
    parser.add_argument("--num-tasks", type=int, help="test tasks of a family (default: 10, full 50)")
    parser.add_argument("--num-measurements", type=int, default=100, help="of training (default: 100, the paper's)")
    parser.add_argument("--num-evaluations", type=int, help="of the long search per task (default: 20000, full 100000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("out/plan_quality"))
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of the report")
    args = parser.parse_args(arguments)
    args.families = args.families or list(FAMILIES if args.full else QUICK_FAMILIES)
    args.judges = args.judges or (["analytic:v100", "analytic:h100"] if args.full else ["analytic:v100"])
    args.num_tasks = args.num_tasks or (50 if args.full else 10)
    args.num_evaluations = args.num_evaluations or (100_000 if args.full else 20_000)
    for judge in args.judges:
        try:
            parse_judge(judge)
        except ValueError as error:
            parser.error(str(error))
    return args


def _stem(judge: str, family: str, args: argparse.Namespace) -> str:
    """File name of what belongs to a family, a judge, a budget and a seed."""
    return f"{judge.replace(':', '_')}_{family}_n{args.num_measurements}_s{args.seed}"


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_args(arguments)
    args.output.mkdir(parents=True, exist_ok=True)
    results = []
    for judge in args.judges:
        for name in args.families:
            home = f"_from_{args.train_on}" if args.train_on else ""
            path = args.output / f"{_stem(judge, name, args)}{home}.json"
            if not path.exists():
                path.write_text(json.dumps(run_family(FAMILIES[name], judge, args)))
            results.append(json.loads(path.read_text()))
    text = report(results, f"Command: `python benchmarks/plan_quality.py {' '.join(arguments or sys.argv[1:])}`")
    (args.output / "report.md").write_text(text)
    print(json.dumps(results) if args.json else text)


if __name__ == "__main__":
    main()

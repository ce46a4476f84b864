"""Quality of plans over the time the search may take, judged by the analytic profiler.

    python benchmarks/search_curve.py
    python benchmarks/search_curve.py --sizes 100x16 1000x128 --budgets 0.1 1 10 --json

Tasks are drawn from the public pool with mixed columns on hosts of eight GPUs, and placed by the shipped ``cuda`` agent
(or ``--agent``) on one core, each budget anew. Seconds are those of the whole call: encoding and the starts that every
call makes are not interrupted, so very large tasks take longer than a very short budget.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence

import numpy as np
import torch

from torchrec_dreamshard import Agent, PlacementTask
from torchrec_dreamshard.baselines import BASELINES
from torchrec_dreamshard.hardware import named_hardware
from torchrec_dreamshard.pool import load_public_pool, with_dim
from torchrec_dreamshard.profiling.analytic import AnalyticProfiler

DIMS = (4, 8, 16, 32, 64, 128)
SIZES = ("100x16", "1000x128", "5000x1024")
BUDGETS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
DEVICES_PER_HOST = 8
HBM_BYTES = 80 * 1024**3


def draw_task(size: str, hardware: str, seed: int) -> PlacementTask:
    """A task of ``<shards>x<devices>``; with more shards than the pool has tables, some come again."""
    num_shards, num_devices = map(int, size.split("x"))
    rng = np.random.default_rng(seed)
    pool = load_public_pool(include_unused=False)
    shards = [
        dataclasses.replace(with_dim(pool[index], int(rng.choice(DIMS))), name=f"table_{number}")
        for number, index in enumerate(rng.choice(len(pool), num_shards, replace=num_shards > len(pool)))
    ]
    return PlacementTask.uniform(
        shards, num_devices, hbm_bytes=HBM_BYTES, hardware=named_hardware(hardware), devices_per_host=DEVICES_PER_HOST
    )


def curve(agent: Agent, task: PlacementTask, budgets: Sequence[float]) -> list[dict[str, float | str]]:
    """Seconds and judged steps of the best heuristic, the policy alone, and the search with each budget."""
    profiler = AnalyticProfiler(task.hardware.name)

    def row(name: str, placement: Sequence[int], seconds: float) -> dict[str, float | str]:
        step = profiler.measure(task, placement).step_ms
        assert step is not None
        return {"way": name, "seconds": seconds, "step_ms": step}

    heuristics = [row("best heuristic", place(task, seed=0), 0.0) for place in BASELINES.values()]
    rows = [min(heuristics, key=lambda item: float(item["step_ms"]))]
    for budget in (None, *budgets):
        started = time.perf_counter()
        placement = agent.place(task, refine=budget is not None, time_budget_s=budget)
        seconds = time.perf_counter() - started
        rows.append(row("policy" if budget is None else f"{budget:g} s", placement, seconds))
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="SxD")
    parser.add_argument("--budgets", nargs="+", type=float, default=BUDGETS, metavar="SECONDS")
    parser.add_argument("--hardware", default="a100")
    parser.add_argument("--agent", default="cuda", help="a file or the name of a shipped agent")
    parser.add_argument("--num-tasks", type=int, default=1, help="of each size; figures are means")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    agent = Agent.load(args.agent)
    results = {}
    for size in args.sizes:
        curves = [curve(agent, draw_task(size, args.hardware, seed), args.budgets) for seed in range(args.num_tasks)]
        results[size] = [
            {
                "way": ways[0]["way"],
                "seconds": float(np.mean([way["seconds"] for way in ways])),
                "step_ms": float(np.mean([way["step_ms"] for way in ways])),
            }
            for ways in zip(*curves, strict=True)
        ]
        print(f"{size} done", file=sys.stderr, flush=True)
    if args.json:
        print(json.dumps(results))
        return
    for size, rows in results.items():
        print(f"\n{size} on {args.hardware}, mean of {args.num_tasks} tasks\n")
        print("| way | seconds | step ms | / policy |\n|---|---|---|---|")
        for row in rows:
            ratio = row["step_ms"] / rows[1]["step_ms"]
            print(f"| {row['way']} | {row['seconds']:.2f} | {row['step_ms']:.3f} | {ratio:.3f} |")


if __name__ == "__main__":
    main()

"""How long planning takes, and how good the plans are, beside TorchRec's planner.

    python benchmarks/planner_scale.py [--sizes 300x8 1000x128 5000x1024] [--builtin SECONDS] [--builtin-free 50x8]

Each run is a process of its own with one thread. Both planners plan the same tables of the public pool (drawn with
replacement, mixed columns) for cuda devices of 32 GiB; the built-in gets ``timeout_seconds``, or all the time it wants
where ``--builtin-free`` says so. Plans are rated by the agent and, because a planner must not judge itself, by the
analytic profiler for an A100. Times include enumeration.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import resource
import subprocess
import sys
import time
import warnings

GIB = 1024**3
BATCH_SIZE = 512  # per rank
DIMS = (16, 32, 64, 128)
TARGETS_S = {"300x8": 3, "1000x128": 10, "5000x1024": 60}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=list(TARGETS_S), metavar="TABLESxDEVICES")
    parser.add_argument("--budget", type=float, help="seconds (default: the targets 3, 10 and 60; else 10)")
    parser.add_argument("--builtin", type=int, help="timeout of the built-in in seconds (default: the budget)")
    parser.add_argument("--builtin-free", nargs="*", default=[], metavar="SIZE", help="sizes where it has no timeout")
    parser.add_argument("--only", choices=("dreamshard", "builtin"), help="one planner only")
    parser.add_argument("--agent", help="agent file or shipped name (default: cuda)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(run_one(**json.loads(args.worker))))
        return
    headings = ("budget s", "wall s", "cpu s", "GiB", "agent ms", "a100 ms")
    print(f"{'size':>10} {'planner':>12} " + " ".join(f"{heading:>9}" for heading in headings))
    for size in args.sizes:
        budget = args.budget or TARGETS_S.get(size, 10)
        jobs = {"dreamshard": budget, "builtin": None if size in args.builtin_free else args.builtin or int(budget)}
        for planner, seconds in jobs.items():
            if args.only in (None, planner):
                report(size, planner, seconds, args.agent)


def report(size: str, planner: str, seconds: float | None, agent: str | None) -> None:
    job = json.dumps({"size": size, "planner": planner, "seconds": seconds, "agent": agent})
    done = subprocess.run([sys.executable, __file__, "--worker", job], capture_output=True, text=True)
    if done.returncode:
        print(f"{size:>10} {planner:>12} failed: {done.stderr.strip().splitlines()[-1]}")
        return
    r = json.loads(done.stdout.splitlines()[-1])
    limit = "none" if seconds is None else f"{seconds:g}"
    print(
        f"{size:>10} {planner:>12} {limit:>9} {r['wall_s']:>9.2f} {r['cpu_s']:>9.2f} {r['peak_gib']:>9.2f} "
        f"{r['agent_ms']:>9.4f} {r['analytic_ms']:>9.4f}",
        flush=True,
    )


def run_one(size: str, planner: str, seconds: float | None, agent: str | None) -> dict[str, float]:
    """One planner on one size, in this process."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner
    from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
    from torchrec.distributed.planner.types import Topology

    from torchrec_dreamshard.planner import DreamShardPlanner

    num_tables, num_devices = map(int, size.split("x"))
    topology = Topology(
        num_devices, "cuda", hbm_cap=32 * GIB, local_world_size=min(num_devices, 8), created_by_factory=True
    )
    model, constraints, histograms = draw_model(num_tables)
    arguments = {
        "topology": topology,
        "batch_size": BATCH_SIZE,
        "storage_reservation": FixedPercentageStorageReservation(0.15),
        "constraints": constraints,
        "stats": [],
    }
    ours = DreamShardPlanner(**arguments, agent=agent, time_budget_s=seconds or 1e9, reuse_histograms=histograms)
    ours._source.agent("cuda")  # loading the agent is not planning
    builtin = EmbeddingShardingPlanner(**arguments, timeout_seconds=None if seconds is None else int(seconds))
    chosen = ours if planner == "dreamshard" else builtin
    start, cpu = time.perf_counter(), time.process_time()
    chosen.plan(model, [EmbeddingBagCollectionSharder()])
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
    agent_ms, analytic_ms = judge(chosen._best_plan, ours, topology)
    return {"wall_s": wall, "cpu_s": cpu, "peak_gib": peak, "agent_ms": agent_ms, "analytic_ms": analytic_ms}


def judge(plan: list, ours: object, topology: object) -> tuple[float, float]:
    """Predicted step under the agent, and under the analytic profiler as a second opinion."""
    from torchrec_dreamshard.planner.costs import CostSource
    from torchrec_dreamshard.profiling.analytic import AnalyticProfiler

    profiler = AnalyticProfiler("a100")

    class Second:
        """The profiler where an agent is expected."""

        place = None

        def predict(self, task, placement):
            return profiler.measure(task, placement)

    second = CostSource(Second())
    second.adapter = ours._source.adapter
    first = ours._source.on(topology).breakdown(plan).step_ms
    return first, second.on(topology).breakdown(plan).step_ms


def draw_model(num_tables: int) -> tuple[object, dict, dict]:
    """Tables of the public pool, drawn with replacement, on the meta device."""
    import torch
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    from torchrec_dreamshard.pool import load_public_pool

    pool = [table for table in load_public_pool() if table.pooling_factor > 0]
    draw = random.Random(0)
    tables, constraints, histograms = [], {}, {}
    for index in range(num_tables):
        table, name = draw.choice(pool), f"t{index}"
        tables.append(
            EmbeddingBagConfig(
                name=name, num_embeddings=table.rows, embedding_dim=draw.choice(DIMS), feature_names=[f"f{index}"]
            )
        )
        constraints[name] = ParameterConstraints(pooling_factors=[table.pooling_factor])
        if table.reuse_histogram:
            histograms[name] = table.reuse_histogram
    return EmbeddingBagCollection(tables=tables, device=torch.device("meta")), constraints, histograms


if __name__ == "__main__":
    main()

"""``dreamshard profile``: measure fused kernels on this machine, or the tables of a job from its own batches."""

from __future__ import annotations

import argparse
import os
import time
from typing import TYPE_CHECKING, Any

from torchrec_dreamshard.cli import batches
from torchrec_dreamshard.cli.common import (
    add_common_arguments,
    emit,
    int_range,
    non_negative_int,
    positive_float,
    positive_int,
    progress_bar,
)

if TYPE_CHECKING:
    from torchrec_dreamshard.profiling.collect import CollectConfig
    from torchrec_dreamshard.profiling.sampling import SamplingPlan
    from torchrec_dreamshard.profiling.timing import TimingConfig
    from torchrec_dreamshard.samples import MeasurementStore

_DESCRIPTION = """\
Measures combinations of tables as fused kernels on this machine, forward and backward apart, and appends each to a
store. A run that was interrupted goes on where it stopped when it is started again with the same arguments. Under
"torchrun --nproc_per_node N -m torchrec_dreamshard profile ..." the ranks share the samples.

With --from-batches it measures tables instead: how often a job's own batches look each of them up, and how often a
batch uses the same rows again. The tables file that it writes is what --tables of this and the other commands take.
"""

_SEVERAL_HOSTS = """\
several hosts, the same command on each:
  torchrun --nnodes 2 --nproc_per_node 8 --rdzv-backend c10d --rdzv-endpoint FIRST_HOST:29500 \\
    -m torchrec_dreamshard profile --out mine.jsonl
Every rank appends its own samples: to one file where the hosts share it, else to the --out of its host, and
"train --measurements" takes several stores. With --comms rank 0 alone writes, and every measurement says which
devices share a host. All ranks must have the same device: different hardware needs runs and stores of its own.
"""


def add_parser(subparsers: Any) -> None:
    """Adds the command to the root parser."""
    parser = subparsers.add_parser(
        "profile",
        help="measure on this hardware",
        description=_DESCRIPTION,
        epilog=_SEVERAL_HOSTS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--out", required=True, metavar="STORE", help="store to append to (.jsonl); of --from-batches see there"
    )
    parser.add_argument("--num-samples", type=positive_int, default=1000, help="samples wanted (default: 1000)")
    parser.add_argument("--budget-minutes", type=positive_float, help="stop after this time (default: no limit)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to measure (default: cpu)")
    parser.add_argument(
        "--repeat-first",
        type=non_negative_int,
        default=0,
        metavar="K",
        help="measure the first K samples twice and report how far the two differ (default: 0)",
    )
    parser.add_argument(
        "--comms",
        action="store_true",
        help="all ranks of a torchrun launch measure whole steps of placements together, the exchange included, "
        "for every number of ranks from 2 on",
    )
    what = parser.add_argument_group("what to measure")
    what.add_argument("--tables", metavar="FILE", help="tables file (CSV or JSON) to draw from (default: public pool)")
    what.add_argument("--hardware", help="named device of the samples (default: cpu, or the closest to the GPU)")
    what.add_argument("--max-tables", type=positive_int, default=20, help="tables of a sample, 1 to this (default: 20)")
    what.add_argument("--dim", type=positive_int, nargs="+", default=[4, 8, 16, 32, 64, 128], help="columns of a table")
    what.add_argument(
        "--batch-size", type=int_range, metavar="N|LOW-HIGH", help="samples per step (default: 128-65536)"
    )
    what.add_argument("--max-lookups", type=positive_int, help="lookups of a sample (default: 6e5, on cuda 6e7)")
    what.add_argument("--max-gib", type=positive_float, help="weights of a sample in GiB (default: 0.5, on cuda 8)")
    batches.add_arguments(parser)
    how = parser.add_argument_group("how to measure")
    how.add_argument("--repeats", type=positive_int, default=7, help="timed runs of a sample (default: 7)")
    how.add_argument("--warmup", type=non_negative_int, default=3, help="untimed runs before them (default: 3)")
    how.add_argument("--max-disturbed", type=non_negative_int, default=7, help="disturbed runs to redo (default: 7)")
    how.add_argument("--threads", type=positive_int, default=1, help="threads of a CPU kernel (default: 1)")
    add_common_arguments(parser, kept="what was finished is in {out}; run the same command again to go on")


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    if args.from_batches:
        return batches.run(args)
    from torchrec_dreamshard.profiling.collect import CollectConfig, collect, share_size, wait_for_ranks
    from torchrec_dreamshard.profiling.fbgemm_profiler import FBGEMMProfiler
    from torchrec_dreamshard.profiling.timing import TimingConfig
    from torchrec_dreamshard.samples import MeasurementStore

    if args.out.endswith(".gz"):
        raise ValueError(f"--out must be a .jsonl file to append to, got {args.out}")
    device = args.device if args.device == "cpu" else f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    timing = TimingConfig(warmup=args.warmup, repeats=args.repeats, max_disturbed=args.max_disturbed)
    plan, store = _plan(args), MeasurementStore(args.out)
    config = CollectConfig(
        num_samples=args.num_samples,
        num_repeated=args.repeat_first,
        budget_s=60 * (args.budget_minutes or float("inf")),
        rank=int(os.environ.get("RANK", "0")),
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
    )
    start = time.monotonic()
    if args.comms:
        measured = _collect_steps(args, device, timing, plan, store, config)
    else:
        profiler = FBGEMMProfiler(device, timing=timing, num_threads=args.threads, seed=args.seed)
        with progress_bar(share_size(config), "profile", "sample") as bar:
            measured = collect(plan, profiler, store, config, progress=lambda _: bar.update())
        measured = wait_for_ranks(measured)
    if config.rank == 0:
        result = _summary(store, plan, config, measured, time.monotonic() - start)
        emit(args, result, _text(result))
    return 0


def _collect_steps(
    args: argparse.Namespace,
    device: str,
    timing: TimingConfig,
    plan: SamplingPlan,
    store: MeasurementStore,
    config: CollectConfig,
) -> int:
    import torch

    from torchrec_dreamshard.profiling.collect import collect_steps, joined_ranks, rank_hosts, step_profilers

    if config.world_size < 2:
        raise ValueError("--comms needs at least 2 ranks: start it with torchrun --nproc_per_node 2 or more")
    if config.num_repeated:
        raise ValueError("--repeat-first is for fused kernels and cannot be used with --comms")
    with joined_ranks(args.device), progress_bar(config.num_samples, "profile steps", "sample") as bar:
        profilers = step_profilers(device, timing, args.threads, args.seed)
        return collect_steps(
            rank_hosts(torch.device(device)), plan, profilers, store, config, progress=lambda _: bar.update()
        )


def _plan(args: argparse.Namespace) -> SamplingPlan:
    import torch

    from torchrec_dreamshard import pool, table_files
    from torchrec_dreamshard.hardware import named_hardware
    from torchrec_dreamshard.profiling.devices import named_device
    from torchrec_dreamshard.profiling.sampling import SamplingPlan

    on_cpu = args.device == "cpu"
    tables = table_files.load_tables(args.tables) if args.tables else pool.load_public_pool()
    return SamplingPlan(
        pool=tables,
        hardware=named_hardware(args.hardware or named_device(torch.device(args.device))),
        seed=args.seed,
        max_tables=min(args.max_tables, len(tables)),
        dims=tuple(args.dim),
        batch_sizes=args.batch_size or (128, 65_536),
        max_lookups=args.max_lookups or (600_000 if on_cpu else 60_000_000),
        max_output_bytes=(48 if on_cpu else 2048) * 1024**2,
        max_weight_bytes=int((args.max_gib or (0.5 if on_cpu else 8.0)) * 1024**3),
    )


def _summary(
    store: MeasurementStore, plan: SamplingPlan, config: CollectConfig, measured: int, wall_s: float
) -> dict[str, Any]:
    import numpy as np

    from torchrec_dreamshard.profiling.collect import repeatability

    stored = list(store)
    costs = [float(m.cost.compute_ms.max()) for m in stored if m.cost is not None and m.cost.compute_ms is not None]
    result: dict[str, Any] = {
        "store": str(store.path),
        "plan": plan.fingerprint,
        "measured": measured,
        "stored": len(stored),
        "failed": sum(m.error is not None for m in stored),
        "wall_s": round(wall_s, 1),
        "samples_per_minute": round(60 * measured / wall_s, 1),
    }
    if costs:
        result["compute_ms"] = dict(
            zip(("p10", "p50", "p90"), np.percentile(costs, (10, 50, 90)).round(3).tolist(), strict=True)
        )
    if config.num_repeated:
        result["repeatability"] = {
            term: {"pairs": len(spread), "median": float(np.median(spread)), "p90": float(np.percentile(spread, 90))}
            for term, spread in repeatability(store, plan).items()
            if spread
        }
    return result


def _text(result: dict[str, Any]) -> str:
    lines = [
        f"{result['store']}: {result['stored']} measurements, {result['measured']} of them new, "
        f"{result['failed']} failed ({result['samples_per_minute']} a minute)"
    ]
    if "compute_ms" in result:
        spread = result["compute_ms"]
        lines.append(
            f"forward and backward: median {spread['p50']} ms, {spread['p10']} to {spread['p90']} (10 to 90 %)"
        )
    lines += [
        f"{term}: {spread['pairs']} repeated samples differ by {spread['median']:.1%} (median), "
        f"{spread['p90']:.1%} (90 %)"
        for term, spread in result.get("repeatability", {}).items()
    ]
    return "\n".join(lines)

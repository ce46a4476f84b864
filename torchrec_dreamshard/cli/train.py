"""``dreamshard train``: trains an agent on a profiler, on stored measurements, or on both."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from torchrec_dreamshard.cli.common import (
    add_common_arguments,
    emit,
    format_table,
    non_negative_int,
    output_file,
    progress_bar,
)
from torchrec_dreamshard.cli.inputs import PROFILER_HELP, add_task_arguments, load_tasks, make_profiler
from torchrec_dreamshard.importers import COLUMNS_HELP
from torchrec_dreamshard.measurement import Measurement

_DESCRIPTION = (
    "Trains an agent: measures placements with --profiler, learns from --measurements, or both, and writes one file. "
    "The report gives the cost model's errors on measurements that it did not see."
)


def add_parser(subparsers: Any) -> None:
    """Adds the command to the root parser."""
    parser = subparsers.add_parser("train", help="train an agent", description=_DESCRIPTION)
    parser.add_argument(
        "--out", type=output_file, required=True, metavar="FILE", help="agent file to write (.safetensors)"
    )
    parser.add_argument("--profiler", help=f"measure with this: {PROFILER_HELP}")
    parser.add_argument(
        "--measurements",
        nargs="+",
        default=[],
        metavar="FILE",
        help=f"stores (.jsonl, .jsonl.gz) or timings (.csv) to learn from; {COLUMNS_HELP}. --hardware names the device",
    )
    parser.add_argument(
        "--num-measurements",
        type=non_negative_int,
        metavar="N",
        help="placements to measure (default: 100 with --profiler, else 0)",
    )
    parser.add_argument("--agent", metavar="FILE", help="agent file or shipped name to continue from")
    parser.add_argument("--paper", action="store_true", help="the paper's networks and schedule")
    add_task_arguments(parser, num_tasks=50)
    add_common_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command; 1 if the agent was written but its report says that it is not ready."""
    from torchrec_dreamshard.agent import Agent
    from torchrec_dreamshard.config import TrainConfig
    from torchrec_dreamshard.training import train

    num_measurements = args.num_measurements
    if num_measurements is None:
        num_measurements = 100 if args.profiler else 0
    if num_measurements and not args.profiler:
        raise ValueError("--num-measurements needs a --profiler to measure with")
    if not num_measurements and not args.measurements:
        raise ValueError("nothing to learn from: give --profiler, --measurements or both")
    measurements = _load(args.measurements, args.hardware)
    start = Agent.load(args.agent) if args.agent else None
    profiler = make_profiler(args.profiler, args.seed) if args.profiler else None
    config = TrainConfig.paper() if args.paper else TrainConfig()
    config = dataclasses.replace(config, num_measurements=num_measurements)
    with progress_bar(None, "train", "step") as bar:

        def progress(done: int, total: int, phase: str) -> None:
            bar.total = total
            bar.set_postfix_str(phase, refresh=False)
            bar.update(done - bar.n)

        agent = train(
            load_tasks(args) if profiler is not None else [],
            profiler,
            config,
            seed=args.seed,
            measurements=measurements,
            agent=start,
            progress=progress,
        )
    agent.save(args.out)
    report = agent.metadata["report"] or {"ready": True, "reason": "", "terms": {}}
    emit(args, {"out": args.out, **agent.metadata}, _text(args.out, agent.metadata, report))
    return 0 if report["ready"] else 1


def _load(paths: list[str], hardware: str | None) -> list[Measurement]:
    """Measurements of stores and of CSV files."""
    from torchrec_dreamshard.hardware import named_hardware
    from torchrec_dreamshard.importers import load_csv
    from torchrec_dreamshard.samples import load_measurements

    tables = [path for path in paths if path.lower().endswith(".csv")]
    spec = named_hardware(hardware) if hardware else None
    stores = load_measurements(*(path for path in paths if path not in tables))
    return stores + [measurement for path in tables for measurement in load_csv(path, spec)]


def _text(out: str, metadata: dict[str, Any], report: dict[str, Any]) -> str:
    rows = []
    for name, term in report["terms"].items():
        prior = "" if term.get("prior_mape") is None else f"{term['prior_mape']:.1%}"
        rows.append([name, f"{term['mape']:.1%}", prior, f"{term['rank_correlation']:.3f}", f"{term['num_values']}"])
    table = format_table(["held-out", "error", "prior alone", "rank corr.", "values"], rows)
    judged = "ready" if report["terms"] else "not judged, since this form holds nothing out"
    state = judged if report["ready"] else f"NOT READY to plan with: {report['reason']}"
    return (
        f"{table}\n{metadata['num_measurements']} measurements ({metadata['num_failed']} failed), "
        f"{metadata['trained_on']}; wrote {out}: {state}"
    )

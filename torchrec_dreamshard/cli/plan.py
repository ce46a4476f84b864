"""``dreamshard plan``: plan a model, or a list of tables, for a topology; needs no GPU and no process group.

The plan is written as JSON, which ``torchrec_dreamshard.planner.load_plan`` reads and a planner takes with
``PlanFileLoader`` (instead of a search) or ``previous`` (to continue it).
"""

from __future__ import annotations

import argparse
import logging
import time
import warnings
from typing import TYPE_CHECKING, Any

from torchrec_dreamshard.cli.common import (
    add_common_arguments,
    emit,
    format_table,
    output_file,
    positive_float,
    positive_int,
)
from torchrec_dreamshard.cli.inputs import call_factory, load_object

if TYPE_CHECKING:
    from torch import nn

    from torchrec_dreamshard.planner import DreamShardPlanner
    from torchrec_dreamshard.planner.explain import Explanation

GIB = 1024**3
MAX_GIB = 2**33 - 1  # below 2**63 bytes, what a 64-bit count can hold
BYTES_PER_MS = 1e6
"""TorchRec's unit of bandwidth in 1e9 bytes/s."""


def gibibytes(text: str) -> float:
    """Argument type: an amount of memory that a machine can have, in GiB."""
    value = positive_float(text)
    if value > MAX_GIB:
        raise argparse.ArgumentTypeError(f"must be at most {MAX_GIB:,} GiB, got {text!r}")
    return value


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Adds the command."""
    parser = subparsers.add_parser("plan", help="plan a model for a topology", description=__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--model", metavar="MODULE:FACTORY", help="callable that returns the model; meta tables are fine"
    )
    source.add_argument("--tables", metavar="FILE", help="tables file (JSON or CSV: rows, dim, pooling, features, ...)")
    topology = parser.add_argument_group("topology", "the devices to plan for, by flags or from a file")
    topology.add_argument("--topology", metavar="FILE", help="JSON object of TorchRec's Topology arguments; flags win")
    topology.add_argument("--world-size", type=positive_int, help="ranks")
    topology.add_argument("--local-world-size", type=positive_int, help="ranks of one host (default: all)")
    topology.add_argument("--compute-device", choices=("cuda", "cpu"), help="default: cuda")
    topology.add_argument("--hbm-gib", type=gibibytes, help="memory of one GPU (default: 32)")
    topology.add_argument("--ddr-gib", type=gibibytes, help="host memory of one rank (default: 128)")
    topology.add_argument("--intra-host-gb-s", type=positive_float, help="bandwidth of a rank's link inside its host")
    topology.add_argument("--inter-host-gb-s", type=positive_float, help="bandwidth of a rank to other hosts")
    parser.add_argument("--batch-size", type=positive_int, default=512, help="samples per rank (default: 512)")
    parser.add_argument("--agent", help="agent file or shipped name (default: the shipped one for the device)")
    parser.add_argument("--time-budget", type=positive_float, default=10.0, metavar="S", help="seconds (default: 10)")
    parser.add_argument("--previous", metavar="PLAN", help="earlier plan file to continue with few changes")
    parser.add_argument("--pin", action="append", default=[], metavar="TABLE=RANK", help="may be repeated")
    parser.add_argument(
        "--together",
        action="append",
        nargs="+",
        default=[],
        metavar="TABLE",
        help="tables on one rank; may be repeated",
    )
    parser.add_argument(
        "--out", type=output_file, default="plan.json", metavar="FILE", help="plan file (default: plan.json)"
    )
    parser.add_argument(
        "--picture", type=output_file, metavar="FILE", help="stacked bars of every device's predicted times"
    )
    parser.add_argument("--explain", action="store_true", help="print why each table is where it is")
    add_common_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    from torchrec_dreamshard.planner import models

    # TorchRec's default reservation advises its caller to choose another, which is no choice of this command's user
    warnings.filterwarnings("ignore", "HeuristicalStorageReservation", FutureWarning)
    logging.getLogger("torchrec.distributed.planner.storage_reservations").setLevel(logging.ERROR)
    model = models.read_tables(args.tables) if args.tables else load_model(args.model)
    planner = models.input_errors(lambda: make_planner(args, model))
    start = time.perf_counter()
    plan = models.input_errors(lambda: planner.plan(model, models.sharders_of(model)))
    plan_s = time.perf_counter() - start
    num_tables = sum(len(tables) for tables in plan.plan.values())
    if not num_tables:
        raise ValueError(f"{args.model or args.tables} has no table that TorchRec can shard")
    planner.save_plan(args.out)
    if args.picture:
        from torchrec_dreamshard.picture import draw_cost

        draw_cost(args.picture, planner.predicted())
    explanation = planner.explain() if args.explain else planner.explain(max_tables=0)
    reasons = explanation.to_dict()
    result = {"num_tables": num_tables, "plan_s": plan_s, "out": args.out, "picture": args.picture, **reasons}
    if not args.explain:
        del result["tables"]
    emit(args, result, as_text(args, explanation, num_tables, plan_s))
    return 0


def load_model(text: str) -> nn.Module:
    """The model that ``--model`` names.

    Raises:
        ValueError: not a callable that returns a module.
    """
    from torch import nn

    factory = load_object(text)
    made = callable(factory) and not isinstance(factory, nn.Module)
    model = call_factory(text, factory) if made else factory
    if not isinstance(model, nn.Module):
        raise ValueError(f"{text} must return a torch.nn.Module, got {type(model).__name__}")
    return model


def make_planner(args: argparse.Namespace, model: nn.Module) -> DreamShardPlanner:
    """The planner that the arguments ask for."""
    from torchrec_dreamshard.planner import DreamShardPlanner, models

    flags: dict[str, Any] = {
        "world_size": args.world_size,
        "local_world_size": args.local_world_size,
        "compute_device": args.compute_device,
        "hbm_cap": None if args.hbm_gib is None else int(args.hbm_gib * GIB),
        "ddr_cap": None if args.ddr_gib is None else int(args.ddr_gib * GIB),
        "intra_host_bw": None if args.intra_host_gb_s is None else args.intra_host_gb_s * BYTES_PER_MS,
        "inter_host_bw": None if args.inter_host_gb_s is None else args.inter_host_gb_s * BYTES_PER_MS,
    }
    topology = models.make_topology(args.topology, flags)
    reuse = getattr(model, "reuse_histograms", None)
    if isinstance(model, models.TableModel):
        reuse = model.reuse_histograms(args.batch_size * topology.world_size)
    return DreamShardPlanner(
        topology,
        batch_size=args.batch_size,
        constraints=getattr(model, "constraints", None),
        stats=[],
        agent=args.agent,
        time_budget_s=args.time_budget,
        seed=args.seed,
        reuse_histograms=reuse,
        pins=_pins(args.pin),
        together=args.together,
        previous=args.previous,
    )


def _pins(texts: list[str]) -> dict[str, int]:
    pins: dict[str, int] = {}
    for text in texts:
        table, _, rank = text.rpartition("=")
        if not table or not rank.isdigit():
            raise ValueError(f"--pin must be TABLE=RANK, got {text!r}")
        if pins.setdefault(table, int(rank)) != int(rank):
            raise ValueError(f"--pin gives table {table} the ranks {pins[table]} and {rank}: one is needed")
    return pins


def as_text(args: argparse.Namespace, explanation: Explanation, num_tables: int, plan_s: float) -> str:
    """What people read."""
    lines = [
        f"{num_tables} tables planned on {len(explanation.devices)} ranks in {plan_s:.2f} s, "
        f"predicted step {explanation.step_ms:.3f} ms; plan written to {args.out}"
        + (f", picture to {args.picture}" if args.picture else "")
    ]
    if args.explain:
        return "\n".join([*lines, "", str(explanation)])
    slowest = sorted(explanation.devices, key=lambda device: -device.total_ms)
    rows = [
        [str(device.rank), f"{device.total_ms:.3f}", f"{max(device.hbm_used, device.ddr_used) / GIB:.2f}"]
        for device in (*slowest[:3], *slowest[3:][-1:])
    ]
    lines += ["", "slowest ranks, and the fastest:", format_table(["rank", "ms", "GiB"], rows)]
    return "\n".join([*lines, *(f"changed: {change}" for change in explanation.changes)])

"""Arguments that several commands take: which profiler, and which tasks."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from torchrec_dreamshard.cli.common import int_range, positive_float, positive_int
from torchrec_dreamshard.measurement import Profiler
from torchrec_dreamshard.types import PlacementTask

PROFILER_HELP = (
    "analytic:DEVICE (simulated; v100, a100, h100, h200, cpu), fbgemm:cpu or fbgemm:cuda (measures here), "
    "or MODULE:CALLABLE that returns a Profiler"
)


def make_profiler(text: str, seed: int = 0) -> Profiler:
    """The profiler that ``--profiler`` names (see ``PROFILER_HELP``).

    Raises:
        ValueError: an unknown kind or device, or a callable that gives something else.
    """
    kind, _, detail = text.partition(":")
    if kind == "analytic":
        from torchrec_dreamshard.profiling.analytic import AnalyticProfiler

        return AnalyticProfiler(detail or "a100", seed=seed)
    if kind == "fbgemm":
        from torchrec_dreamshard.profiling.fbgemm_profiler import FBGEMMProfiler

        return FBGEMMProfiler(detail or "cpu", seed=seed)
    if not detail:
        raise ValueError(f"unknown profiler {text!r}; expected {PROFILER_HELP}")
    profiler = load_object(text)
    profiler = call_factory(text, profiler) if callable(profiler) else profiler
    if not isinstance(profiler, Profiler):
        raise ValueError(f"{text} must give an object with measure(task, placement), got {profiler!r}")
    return profiler


def _hardware_of(profiler: str) -> str:
    """The named device that a profiler stands for, as far as its name tells."""
    from torchrec_dreamshard.hardware import HARDWARE

    kind, _, detail = profiler.partition(":")
    if kind == "fbgemm":
        return "a100" if detail.startswith("cuda") else "cpu"
    return detail if kind == "analytic" and detail in HARDWARE else "a100"


def load_object(text: str) -> Any:
    """The object that ``package.module:name`` names; modules of the current folder are found too.

    Raises:
        ValueError: no such module or name in it, or a module that fails when it is imported.
    """
    module, _, name = text.partition(":")
    if not module or not name:
        raise ValueError(f"expected MODULE:NAME, got {text!r}")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(f"{text}: cannot import it, there is no module {error.name!r}") from error
    except Exception as error:  # the user's code may raise anything
        raise ValueError(f"{text}: importing {module} failed with {type(error).__name__}: {error}") from error
    if not hasattr(loaded, name):
        raise ValueError(f"{text}: module {module!r} has no {name!r}")
    return getattr(loaded, name)


def call_factory(text: str, factory: Callable[[], Any]) -> Any:
    """What the user's callable named ``text`` returns.

    Raises:
        ValueError: it raised.
    """
    try:
        return factory()
    except Exception as error:  # the user's code may raise anything
        raise ValueError(f"{text} failed with {type(error).__name__}: {error}") from error


def add_task_arguments(parser: argparse.ArgumentParser, *, num_tasks: int) -> None:
    """Adds the arguments of ``load_tasks``, which also reads ``--profiler`` and ``--seed``."""
    group = parser.add_argument_group("tasks", "placement tasks from a file, or drawn at random from tables")
    group.add_argument("--tasks", metavar="FILE", help="tasks file (JSON); the other arguments are then not used")
    group.add_argument("--tables", metavar="FILE", help="tables file (CSV or JSON) to draw from instead of the pool")
    group.add_argument(
        "--pool",
        choices=("all", "train", "test"),
        default="all",
        help="which half of the public pool (default: all)",
    )
    group.add_argument("--num-tasks", type=positive_int, default=num_tasks, help=f"default: {num_tasks}")
    group.add_argument(
        "--num-tables",
        type=int_range,
        metavar="N|LOW-HIGH",
        help="tables of a task (default: 20-40, or all of --tables)",
    )
    group.add_argument("--num-devices", type=positive_int, nargs="+", default=[4], help="drawn from (default: 4)")
    group.add_argument(
        "--dim", type=positive_int, nargs="+", help="columns, drawn per table (default: 16, or the file's)"
    )
    group.add_argument("--batch-size", type=positive_int, help="samples per step, all ranks together")
    group.add_argument("--hardware", help="named device of the tasks (default: the profiler's, else a100)")
    group.add_argument("--memory-gib", type=positive_float, help="memory of a device (default: 32, or 128 on cpu)")


def load_tasks(args: argparse.Namespace) -> list[PlacementTask]:
    """The tasks that the arguments of ``add_task_arguments`` ask for; the same ones for the same ``--seed``.

    Raises:
        ValueError: a bad file, or arguments that no task can satisfy.
    """
    from torchrec_dreamshard import pool, table_files

    if args.tasks:
        return table_files.load_tasks(args.tasks)
    if args.tables:
        tables = table_files.load_tables(args.tables)
        counts, dims = args.num_tables or len(tables), args.dim
    else:
        tables = pool.load_public_pool()
        if args.pool != "all":
            tables = pool.split(tables)[("train", "test").index(args.pool)]
        counts, dims = args.num_tables or (20, 40), args.dim or [16]
    return pool.sample_tasks(
        tables,
        args.num_tasks,
        counts,
        args.num_devices,
        dims=dims,
        batch_size=args.batch_size,
        hardware=args.hardware or _hardware_of(args.profiler),
        memory_bytes=None if args.memory_gib is None else int(args.memory_gib * 1024**3),
        seed=args.seed,
    )

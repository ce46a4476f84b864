"""What the commands share: their common arguments, checked argument types, progress bars and output."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from tqdm import tqdm


class CommandParser(argparse.ArgumentParser):
    """An argument parser whose usage errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Ends with exit code 2."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def add_common_arguments(parser: argparse.ArgumentParser, *, kept: str = "nothing was written") -> None:
    """Adds ``--seed``, ``--json`` and ``--verbose``.

    Args:
        parser: a command's parser.
        kept: what stays of the work when the user interrupts it; may name arguments, as in ``"rows in {store}"``.
    """
    group = parser.add_argument_group("common")
    group.add_argument("--seed", type=non_negative_int, default=0, help="seed of everything random (default: 0)")
    group.add_argument("--json", action="store_true", help="print the result as one JSON object")
    group.add_argument("--verbose", action="store_true", help="log progress, and errors with their traceback")
    parser.set_defaults(kept=kept)


def positive_int(text: str) -> int:
    """Argument type: an integer of at least 1."""
    return _integer(text, 1)


def non_negative_int(text: str) -> int:
    """Argument type: an integer of at least 0."""
    return _integer(text, 0)


def positive_float(text: str) -> float:
    """Argument type: a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a finite number above 0, got {text!r}")
    return value


def int_range(text: str) -> tuple[int, int]:
    """Argument type: ``N`` or ``LOW-HIGH`` (both included), each at least 1."""
    low, _, high = text.partition("-")
    try:
        bounds = int(low), int(high or low)
    except ValueError:
        bounds = (0, 0)
    if not 1 <= bounds[0] <= bounds[1]:
        raise argparse.ArgumentTypeError(f"must be N or LOW-HIGH with 1 <= LOW <= HIGH, got {text!r}")
    return bounds


def output_file(text: str) -> str:
    """Argument type: a file that can be written, checked before the work whose result goes there."""
    folder = os.path.dirname(text) or "."
    if os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"must be a file, but {text!r} is a folder")
    if not os.path.isdir(folder):
        raise argparse.ArgumentTypeError(f"there is no folder {folder!r}, create it first")
    if not os.access(folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"the folder {folder!r} cannot be written to")
    return text


def _integer(text: str, minimum: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = minimum - 1
    if value < minimum:
        raise argparse.ArgumentTypeError(f"must be an integer of at least {minimum}, got {text!r}")
    return value


def progress_bar(total: float | None, description: str, unit: str = "it") -> tqdm[Any]:
    """A progress bar on stderr, shown on a terminal only and by the first rank only."""
    hidden = os.environ.get("RANK", "0") != "0"
    return tqdm(total=total, desc=description, unit=unit, file=sys.stderr, disable=hidden or None)


def emit(args: argparse.Namespace, result: dict[str, Any], text: str) -> None:
    """Prints ``result`` as JSON with ``--json``, else ``text``."""
    print(json.dumps(result) if args.json else text)


def format_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns: the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in (headers, *rows)) for i in range(len(headers))]
    lines = [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in (headers, ["-" * w for w in widths], *rows)
    ]
    return "\n".join(line.rstrip() for line in lines)


def error_line(error: BaseException) -> str:
    """The error as one line without a traceback."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return " ".join(str(error).split()) or type(error).__name__

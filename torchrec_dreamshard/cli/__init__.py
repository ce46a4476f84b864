"""The ``dreamshard`` command: ``profile``, ``train``, ``plan`` and ``compare``.

Each command is a module of this package with ``add_parser(subparsers)`` and ``run(args) -> int``. Only the module of
the command that was asked for is imported, so ``dreamshard --help`` needs neither PyTorch nor TorchRec.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Sequence

from torchrec_dreamshard import __version__
from torchrec_dreamshard.cli.common import CommandParser, error_line
from torchrec_dreamshard.errors import DreamShardError

COMMANDS = {
    "profile": "measure placements on this hardware and append them to a store",
    "train": "train an agent on a profiler, on stored measurements, or on both",
    "plan": "plan a model for a topology and write the plan",
    "compare": "compare placement strategies, judged by a profiler",
}

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

logger = logging.getLogger(__name__)


def build_parser(command: str | None = None) -> CommandParser:
    """The parser of the command line.

    Args:
        command: the command whose own arguments are needed; the others are only listed.
    """
    parser = CommandParser(prog="dreamshard", description="Learned placement of embedding tables for TorchRec.")
    parser.add_argument("--version", action="version", version=f"dreamshard {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        if name == command:
            importlib.import_module(f"{__name__}.{name}").add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=summary)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
        0 on success, 1 when the work failed (a measurement, say), 2 for a usage or input error, 130 when interrupted;
        every failure is one line on stderr.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = next((argument for argument in arguments if argument in COMMANDS), None)
    kept, verbose = "nothing was written", False
    try:
        args = build_parser(command).parse_args(arguments)
        kept, verbose = getattr(args, "kept", kept).format_map(vars(args)), getattr(args, "verbose", False)
        logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(levelname)s %(message)s")
        return int(importlib.import_module(f"{__name__}.{args.command}").run(args))
    except SystemExit as stop:  # argparse: --help, --version or a usage error that it has already printed
        return stop.code if isinstance(stop.code, int) else EXIT_USAGE
    except KeyboardInterrupt:
        return _failed(command, f"interrupted; {kept}", EXIT_INTERRUPTED)
    except BrokenPipeError:  # the reader of our output went away, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except (ValueError, OSError, ImportError, DreamShardError) as error:
        if verbose:
            logger.exception("%s failed", command)
        usage = not isinstance(error, DreamShardError) or isinstance(error, ValueError)
        return _failed(command, f"error: {error_line(error)}", EXIT_USAGE if usage else EXIT_FAILED)


def _failed(command: str | None, message: str, code: int) -> int:
    print(f"dreamshard{' ' + command if command else ''}: {message}", file=sys.stderr)
    return code

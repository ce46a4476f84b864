"""``dreamshard profile --from-batches``: the tables of a job, measured from the job's own batches."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torchrec_dreamshard.cli.common import emit, format_table, output_file, positive_int, progress_bar

if TYPE_CHECKING:
    from torchrec_dreamshard.profiling.batch_files import BatchFile
    from torchrec_dreamshard.types import ShardSpec

_MEASURED = ("pooling_factor", "batch_size", "reuse_histogram")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of measuring batches."""
    group = parser.add_argument_group("tables from batches")
    group.add_argument(
        "--from-batches",
        nargs="+",
        default=[],
        metavar="FILE",
        help="batch files (safetensors: integer vectors FEATURE.values and FEATURE.lengths of a KeyedJaggedTensor, as "
        "profiling.batch_files.save_batch writes them); --tables names the tables, their rows, dim and features, "
        "and --out is the tables file (.json) to write",
    )
    group.add_argument(
        "--batches-per-step",
        type=positive_int,
        default=1,
        metavar="N",
        help="files that make one step of the job: its ranks, if each file is one rank's batch (default: 1)",
    )


def run(args: argparse.Namespace) -> int:
    """Measures ``--tables`` over the batch files and writes them to ``--out``."""
    from torchrec_dreamshard import table_files
    from torchrec_dreamshard.profiling.workloads import measure_tables

    if not args.tables:
        raise ValueError("--from-batches needs --tables: a file with the rows, the dim and the features of each table")
    if not args.out.endswith(".json"):
        raise ValueError(f"--from-batches writes a tables file, which must end in .json: got --out {args.out}")
    if args.comms or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("--from-batches runs in one process: start it without torchrun and without --comms")
    output_file(args.out)
    tables, features = table_files.load_tables(args.tables), table_files.load_features(args.tables)
    configs = [
        SimpleNamespace(name=t.name, num_embeddings=t.rows, embedding_dim=t.dim, feature_names=features[t.name])
        for t in tables
    ]
    measured = [
        dataclasses.replace(table, **{name: getattr(found, name) for name in _MEASURED}, **_memory(table))
        for table, found in zip(
            tables,
            measure_tables(_read(args.from_batches), configs, batches_per_step=args.batches_per_step),
            strict=True,
        )
    ]
    table_files.save_tables(args.out, measured, features)
    result = _summary(args, measured)
    emit(args, result, _text(result))
    return 0


def _read(paths: Sequence[str]) -> Iterator[BatchFile]:
    from torchrec_dreamshard.profiling.batch_files import BatchFile

    with progress_bar(len(paths), "measure", "batch") as bar:
        for path in paths:
            yield BatchFile(path)
            bar.update()


def _memory(table: ShardSpec) -> dict[str, Any]:
    """What a changed copy must be given so that memory left to its default stays so."""
    return {"hbm_bytes": None, "ddr_bytes": None} if table.memory_is_default else {}


def _summary(args: argparse.Namespace, measured: Sequence[ShardSpec]) -> dict[str, Any]:
    from torchrec_dreamshard.reuse import unique_rows

    tables = {}
    for table in measured:
        lookups = table.pooling_factor * table.batch_size
        tables[table.name] = {
            "pooling_factor": table.pooling_factor,
            "batch_size": table.batch_size,
            "lookups": lookups,
            "unique_share": unique_rows(table) / lookups if lookups else 0.0,
        }
    steps = len(args.from_batches) // args.batches_per_step
    return {"out": args.out, "num_batches": len(args.from_batches), "num_steps": steps, "tables": tables}


def _text(result: dict[str, Any]) -> str:
    rows = [
        [
            name,
            str(table["batch_size"]),
            f"{table['pooling_factor']:.4g}",
            f"{table['lookups']:.0f}",
            f"{table['unique_share']:.1%}",
        ]
        for name, table in result["tables"].items()
    ]
    table = format_table(["table", "samples", "pooling", "lookups", "distinct"], rows)
    return f"{table}\n{len(rows)} tables measured over {result['num_steps']} steps; wrote {result['out']}"

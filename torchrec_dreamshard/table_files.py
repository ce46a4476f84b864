"""Tables and tasks from files that people write.

A *tables file* lists tables: CSV with a header, or JSON, a list of objects or ``{"tables": [...]}``. Columns are the
fields of ``ShardSpec``; ``rows`` and ``dim`` are needed. ``pooling`` may stand for ``pooling_factor`` (default 1) and
``features`` for ``num_features`` (a count, or the features' names: a list, or in CSV separated by spaces).
``bin_0`` to ``bin_16`` may stand for ``reuse_histogram``.

A *tasks file* is JSON, ``{"format": "torchrec_dreamshard.tasks", "version": 1, "tasks": [...]}``, each task as
``PlacementTask.to_dict`` writes it.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrec_dreamshard.types import NUM_REUSE_BINS, PlacementTask, ShardSpec

TASKS_FORMAT = "torchrec_dreamshard.tasks"
TASKS_VERSION = 1

_BINS = tuple(f"bin_{i}" for i in range(NUM_REUSE_BINS))
_TRUTH = {"true": True, "1": True, "false": False, "0": False}


def load_tables(path: str | Path) -> list[ShardSpec]:
    """Reads a tables file; tables without a name are called ``table_<line>``, counted from 0.

    Raises:
        ValueError: not such a file, no tables, a name twice, or a bad value; names the file and the table.
    """
    tables = []
    for index, entry in enumerate(_entries(Path(path))):
        try:
            tables.append(_table(entry, index))
        except ValueError as error:
            raise ValueError(f"{path}, table {index}: {error}") from None
    names = [table.name for table in tables]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{path} names tables twice: {', '.join(twice)}")
    return tables


def load_features(path: str | Path) -> dict[str, tuple[str, ...]]:
    """Names of the features that each table of a tables file reads; a table whose file says nothing reads its own name.

    Raises:
        ValueError: as ``load_tables``, or a table with several features that are only counted.
    """
    features = {}
    for table, entry in zip(load_tables(path), _entries(Path(path)), strict=True):
        named = entry.get("features", ())
        if isinstance(named, (list, tuple)) and len(named) == table.num_features:
            features[table.name] = tuple(str(feature) for feature in named)
        elif table.num_features == 1:
            features[table.name] = (table.name,)
        else:
            raise ValueError(
                f"{path}: table {table.name!r} reads {table.num_features} features: give their names as features"
            )
    return features


def save_tables(
    path: str | Path, tables: Sequence[ShardSpec], features: Mapping[str, Sequence[str]] | None = None
) -> None:
    """Writes a JSON tables file.

    Args:
        path: the file, replaced if it exists.
        tables: what to write.
        features: names of the features of tables, where they are known.
    """
    entries = []
    for table in tables:
        entry = table.to_dict()
        if features and table.name in features:
            entry.pop("num_features", None)
            entry["features"] = list(features[table.name])
        entries.append(entry)
    Path(path).write_text(json.dumps({"tables": entries}, indent=1) + "\n", encoding="utf-8")


def load_tasks(path: str | Path) -> list[PlacementTask]:
    """Reads a tasks file.

    Raises:
        ValueError: not such a file, another version, no tasks, or a bad value; names the file and the task.
    """
    document = _read_json(Path(path))
    if not isinstance(document, Mapping) or document.get("format") != TASKS_FORMAT:
        raise ValueError(f'{path} is not a tasks file: it must have "format": "{TASKS_FORMAT}"')
    if document.get("version") != TASKS_VERSION:
        raise ValueError(f"{path} has version {document.get('version')!r}, this release reads {TASKS_VERSION}")
    tasks = []
    for index, entry in enumerate(document.get("tasks") or ()):
        try:
            tasks.append(PlacementTask.from_dict(entry))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}, task {index}: {error}") from None
    if not tasks:
        raise ValueError(f"{path} must hold at least one task, got none")
    return tasks


def save_tasks(path: str | Path, tasks: Sequence[PlacementTask]) -> None:
    """Writes a tasks file."""
    document = {"format": TASKS_FORMAT, "version": TASKS_VERSION, "tasks": [task.to_dict() for task in tasks]}
    Path(path).write_text(json.dumps(document), encoding="utf-8")


def _entries(path: Path) -> list[Any]:
    """One entry per table, as JSON would give it."""
    if path.suffix.lower() == ".csv":
        try:
            with path.open(encoding="utf-8-sig", newline="") as file:
                rows: list[Any] = list(csv.DictReader(file))
        except (UnicodeDecodeError, csv.Error) as error:
            raise ValueError(f"{path} is not CSV: {error}") from None
        entries: Any = [_from_csv(row, f"{path}, table {index}") for index, row in enumerate(rows)]
    else:
        entries = _read_json(path)
        if isinstance(entries, Mapping):
            entries = entries.get("tables")
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{path} must list tables (CSV with a header, or JSON), got none")
    return entries


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # also a UnicodeDecodeError
        raise ValueError(f"{path} is not JSON: {error}") from None


def _table(entry: Any, index: int) -> ShardSpec:
    if not isinstance(entry, Mapping):
        raise ValueError(f"must be an object with rows and dim, got {entry!r}")
    values = {"pooling_factor": 1.0, "name": f"table_{index}", **entry}
    if "pooling" in values:
        values["pooling_factor"] = values.pop("pooling")
    if "features" in values:
        features = values.pop("features")
        values["num_features"] = len(features) if isinstance(features, (list, tuple)) else features
    return ShardSpec.from_dict(values)


def _from_csv(row: Mapping[str | None, str], where: str) -> dict[str, Any]:
    """A CSV row with numbers, truth values and lists in place of text; empty cells are left out."""
    if None in row:
        raise ValueError(f"{where}: more cells than the header has columns: {row[None]}")
    cells = {str(name).strip(): text.strip() for name, text in row.items() if text and text.strip()}
    bins = [cells.pop(name) for name in _BINS if name in cells]
    values: dict[str, Any] = {name: _value(name, text) for name, text in cells.items()}
    if bins:
        values["reuse_histogram"] = [_value("bin", share) for share in bins]
    return values


def _value(name: str, text: str) -> Any:
    if name in ("name", "weight_dtype", "optimizer", "kernel"):
        return text
    if name.startswith("is_"):
        return _TRUTH.get(text.lower(), text)
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            continue
    return text.split() if name == "features" else text

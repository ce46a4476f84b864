"""Timings taken elsewhere as measurements: a plain CSV with one row per shard of each measured placement.

Costs repeat in every row of a device, or stand in one of them. A row with an empty ``dim`` is a device without shards.
Unknown costs stay empty or have no column; see ``COLUMNS_HELP`` for the columns.
"""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from torchrec_dreamshard.measurement import TERMS, CostBreakdown, FloatArray, Measurement, Provenance
from torchrec_dreamshard.types import HardwareSpec, PlacementTask, ShardSpec

COLUMNS_HELP = (
    "a CSV has one row per table of each measured placement, with the columns measurement (a label; rows that share it "
    "are one placement), device (its index from 0), rows, dim, pooling_factor, any other field of ShardSpec "
    "(batch_size, weight_dtype, optimizer, reuse_histogram as 17 numbers between spaces, ...), and what is known of "
    "the costs in ms: per device forward_compute_ms, backward_compute_ms, compute_ms (both together), "
    "forward_comms_ms, backward_comms_ms, and step_ms of the whole placement"
)
"""The file format in one sentence, for people."""

_DEVICE_COSTS = (*TERMS, "compute_ms")
_SHARD_FIELDS = tuple(f.name for f in dataclasses.fields(ShardSpec) if f.init)
_INTEGERS = ("rows", "dim", "batch_size", "num_features", "hbm_bytes", "ddr_bytes")
_NUMBERS = ("pooling_factor", "cache_load_factor")
_FLAGS = ("is_weighted", "is_pooled")
_MAX_DEVICES = 65536  # a larger index is a slip, and would cost memory for every device up to it
_REQUIRED = ("measurement", "device", "rows", "dim", "pooling_factor")


def load_csv(path: str | Path, hardware: HardwareSpec | None = None) -> list[Measurement]:
    """Reads measurements from a CSV file, in the order in which their labels appear.

    Args:
        path: the file; see ``COLUMNS_HELP`` for its columns.
        hardware: what was measured; default a generic cuda device.

    Raises:
        ValueError: a column is missing or unknown, a value is bad, or costs of one device contradict each other;
            names the file and the line.
    """
    path = Path(path)
    groups: dict[str, list[tuple[int, dict[str, str]]]] = {}
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        _check_columns(path, reader.fieldnames or ())
        for row in reader:
            if None in row or None in row.values():
                raise ValueError(f"{path}, line {reader.line_num}: the number of values differs from the header's")
            groups.setdefault(row["measurement"], []).append((reader.line_num, row))
    if not groups:
        raise ValueError(f"{path} has a header but no rows; expected one row per placed shard")
    return [_measurement(path, label, rows, hardware or HardwareSpec()) for label, rows in groups.items()]


def _check_columns(path: Path, columns: Any) -> None:
    missing = [name for name in _REQUIRED if name not in columns]
    if missing:
        raise ValueError(f"{path} lacks the columns {missing}; required are {list(_REQUIRED)} and one cost")
    known = {"measurement", "device", "step_ms", *_DEVICE_COSTS, *_SHARD_FIELDS}
    unknown = sorted(set(columns) - known)
    if unknown:
        raise ValueError(f"{path} has unknown columns {unknown}; known are {sorted(known)}")
    if not {"step_ms", *_DEVICE_COSTS} & set(columns):
        raise ValueError(f"{path} has no cost column; expected one of {[*_DEVICE_COSTS, 'step_ms']}")


def _measurement(path: Path, label: str, rows: list[tuple[int, dict[str, str]]], hardware: HardwareSpec) -> Measurement:
    shards, placement = [], []
    costs: dict[tuple[str, int], float] = {}
    num_devices = 1
    for line, row in rows:
        try:
            device = int(row["device"])
            if not 0 <= device < _MAX_DEVICES:
                raise ValueError(f"device must be an index from 0 to {_MAX_DEVICES - 1}, got {device}")
            num_devices = max(num_devices, device + 1)
            if row["dim"].strip():
                shards.append(_shard(row))
                placement.append(device)
            for name in ("step_ms", *_DEVICE_COSTS):
                if row.get(name, "").strip():
                    _put(costs, (name, 0 if name == "step_ms" else device), float(row[name]))
        except ValueError as error:
            raise ValueError(f"{path}, line {line}: {error}") from None
    try:
        terms: dict[str, Any] = {name: _array(costs, name, num_devices, placement) for name in _DEVICE_COSTS}
        cost = CostBreakdown(step_ms=costs.get(("step_ms", 0)), **terms)
    except ValueError as error:
        raise ValueError(f"{path}, measurement {label!r}: {error}") from None
    return Measurement(
        task=_task(shards, placement, num_devices, hardware),
        placement=tuple(placement),
        cost=cost,
        provenance=Provenance(profiler="csv", details={"file": path.name, "measurement": label}),
    )


def _task(shards: list[ShardSpec], placement: list[int], num_devices: int, hardware: HardwareSpec) -> PlacementTask:
    """With the default memory, or as much as the measured placement needs: it ran, so it fits."""
    task = PlacementTask.uniform(shards, num_devices, hardware=hardware)
    need = np.zeros((num_devices, 2), dtype=np.int64)
    for shard, device in zip(task.shards, placement, strict=True):
        need[device] += (shard.hbm_bytes, shard.ddr_bytes)
    hbm, ddr = (int(most) for most in need.max(axis=0))
    devices = tuple(
        dataclasses.replace(device, hbm_bytes=max(device.hbm_bytes, hbm), ddr_bytes=max(device.ddr_bytes, ddr))
        for device in task.devices
    )
    return PlacementTask(task.shards, devices, task.hardware)


def _shard(row: Mapping[str, str]) -> ShardSpec:
    values: dict[str, Any] = {}
    for name in _SHARD_FIELDS:
        text = row.get(name, "").strip()
        if not text:
            continue
        if name in _INTEGERS:
            values[name] = int(text)
        elif name in _NUMBERS:
            values[name] = float(text)
        elif name in _FLAGS:
            if text.lower() not in ("0", "1", "false", "true"):
                raise ValueError(f"{name} must be 0, 1, true or false, got {text!r}")
            values[name] = text.lower() in ("1", "true")
        elif name == "reuse_histogram":
            values[name] = tuple(float(share) for share in text.split())
        else:
            values[name] = text
    missing = [name for name in ("rows", "dim", "pooling_factor") if name not in values]
    if missing:
        raise ValueError(f"a shard needs {missing}")
    return ShardSpec(**values)


def _put(costs: dict[tuple[str, int], float], key: tuple[str, int], value: float) -> None:
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{key[0]} must be a finite number of at least 0, got {value!r}")
    known = costs.setdefault(key, value)
    if known != value:
        raise ValueError(f"{key[0]} of device {key[1]} is {known:g} in an earlier row and {value:g} here")


def _array(
    costs: Mapping[tuple[str, int], float], name: str, num_devices: int, placement: list[int]
) -> FloatArray | None:
    known = {device for term, device in costs if term == name}
    if not known:
        return None
    # A device without shards computes nothing; everything else has to be told.
    missing = set(range(num_devices)) - known
    if "compute" in name:
        missing &= set(placement)
    if missing:
        raise ValueError(f"{name} is given for some devices but not for {sorted(missing)}")
    return np.array([costs.get((name, device), 0.0) for device in range(num_devices)])

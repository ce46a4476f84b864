"""Published CPU measurements as ``Measurement`` records (benchmarks/data/SOURCES.md).

from public_rows import load_compute_rows, load_comms_rows
rows = load_compute_rows(workers=4)  # 5,019 fused kernels of 1 to 15 tables
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from torchrec_dreamshard import CostBreakdown, Measurement, PlacementTask, Provenance, ShardSpec
from torchrec_dreamshard.hardware import named_hardware
from torchrec_dreamshard.pool import POOL_BATCH_SIZE, load_public_pool, with_dim

DATA = Path(__file__).parent / "data"


def load_compute_rows(workers: int, limit: int | None = None) -> list[Measurement]:
    """Fused kernels on one CPU thread: forward plus backward time, nothing else is known.

    Args:
        workers: processes that measured at the same time, 4 or 8.
        limit: how many rows, from the start; None for all.
    """
    pool, hardware = load_public_pool(), named_hardware("cpu")
    shards: dict[tuple[int, int], ShardSpec] = {}
    measurements = []
    for row in _rows(f"cpu_compute_workers{workers}.csv.gz", limit):
        keys = list(zip(map(int, row["table_ids"].split()), map(int, row["dims"].split()), strict=True))
        for table, dim in keys:
            if (table, dim) not in shards:
                shards[table, dim] = with_dim(pool[table], dim)
        task = PlacementTask.uniform([shards[key] for key in keys], 1, hardware=hardware)
        cost = CostBreakdown(compute_ms=[float(row["cost_ms"])])
        measurements.append(
            Measurement(task=task, placement=(0,) * len(keys), cost=cost, provenance=_provenance(workers))
        )
    return measurements


def load_comms_rows(workers: int, limit: int | None = None) -> list[Measurement]:
    """All-to-all exchanges among processes of one CPU host.

    Each rank's columns are one shard without lookups. The rank's start skew stands where its forward kernel would
    be: ``forward_compute_ms``; ``backward_compute_ms`` is not known.

    Args:
        workers: ranks, 4 or 8.
        limit: how many rows, from the start; None for all.
    """
    hardware = named_hardware("cpu")
    measurements = []
    for row in _rows(f"cpu_comms_workers{workers}.csv.gz", limit):
        columns, skew, forward, backward = (
            np.array(row[name].split(), dtype=np.float64)
            for name in ("dim_sums", "start_skew_ms", "forward_ms", "backward_ms")
        )
        ranks = np.flatnonzero(columns)
        shards = [ShardSpec(rows=1, dim=int(columns[r]), pooling_factor=0, batch_size=POOL_BATCH_SIZE) for r in ranks]
        cost = CostBreakdown(forward_compute_ms=skew, forward_comms_ms=forward, backward_comms_ms=backward)
        measurements.append(
            Measurement(
                task=PlacementTask.uniform(shards, workers, hardware=hardware),
                placement=tuple(int(rank) for rank in ranks),
                cost=cost,
                provenance=_provenance(workers),
            )
        )
    return measurements


def _rows(name: str, limit: int | None) -> Iterator[dict[str, str]]:
    with gzip.open(DATA / name, "rt", newline="") as file:
        for index, row in enumerate(csv.DictReader(file)):
            if limit is not None and index >= limit:
                return
            yield row


def _provenance(workers: int) -> Provenance:
    return Provenance(
        device="cpu, one thread (EC2, type unknown)",
        profiler="citz73/csharding@0e5d60f",
        repeats=10,
        details={"workers": workers},
    )

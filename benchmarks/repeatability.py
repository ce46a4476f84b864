"""How far two measurements of the same combination differ, and how well lookups follow their statistics.

    python benchmarks/repeatability.py [--samples 30] [--device cpu] [--json]

Measures the first combinations of the sampling plan, all of them once and then all of them again, so that the two
runs of a combination lie apart in time. The difference is that of the two medians over their mean. The second table
compares lookups with the statistics they are drawn from, over the public pool: the total variation distance between
the reuse histograms, and the relative difference of the numbers of distinct ids (of tables with 100 or more).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from torchrec_dreamshard.hardware import named_hardware
from torchrec_dreamshard.pool import load_public_pool, rebatch
from torchrec_dreamshard.profiling.collect import CollectConfig, collect, repeatability
from torchrec_dreamshard.profiling.devices import device_name, named_device
from torchrec_dreamshard.profiling.fbgemm_profiler import FBGEMMProfiler
from torchrec_dreamshard.profiling.sampling import SamplingPlan
from torchrec_dreamshard.profiling.workloads import make_bags, reuse_histogram
from torchrec_dreamshard.reuse import unique_rows
from torchrec_dreamshard.samples import MeasurementStore

BATCH_SIZES = (1024, 65_536)


def repeated(device: str, num_samples: int) -> dict[str, object]:
    plan = SamplingPlan(pool=load_public_pool(), hardware=named_hardware(named_device(torch.device(device))))
    with tempfile.TemporaryDirectory() as folder:
        store = MeasurementStore(Path(folder) / "repeated.jsonl")
        start = time.monotonic()
        measured = collect(
            plan, FBGEMMProfiler(device), store, CollectConfig(num_samples=num_samples, num_repeated=num_samples)
        )
        minutes = (time.monotonic() - start) / 60
        spreads = repeatability(store, plan)
    table = {
        term: dict(zip(("median", "p90", "max"), _summary(spread), strict=True)) for term, spread in spreads.items()
    }
    return {"device": device_name(torch.device(device)), "samples_per_minute": measured / minutes, "difference": table}


def workload_distances(every: int) -> dict[str, dict[str, float]]:
    rng = np.random.default_rng(0)
    table = {}
    for batch_size in BATCH_SIZES:
        distances, differences = [], []
        for shard in (rebatch(shard, batch_size) for shard in load_public_pool(include_unused=False)[::every]):
            ids = make_bags(shard, rng).indices
            drawn, wanted = reuse_histogram(ids), unique_rows(shard)
            if drawn is not None and shard.reuse_histogram is not None:
                distances.append(0.5 * np.abs(np.subtract(drawn, shard.reuse_histogram)).sum())
            if wanted >= 100:
                differences.append(abs(len(ids.unique()) / wanted - 1))
        for kind, values in (("histogram", distances), ("distinct ids", differences)):
            table[f"{kind}, batch {batch_size}"] = dict(zip(("median", "p90", "max"), _summary(values), strict=True))
    return table


def _summary(values: list[float]) -> list[float]:
    return np.percentile(values, (50, 90, 100)).round(5).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=30)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--every", type=int, default=10, help="tables of the pool for the lookups: every n-th")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = {"repeatability": repeated(args.device, args.samples), "workloads": workload_distances(args.every)}
    if args.json:
        print(json.dumps(result))
        return
    runs = result["repeatability"]
    print(f"{args.samples} combinations measured twice on {runs['device']}, {runs['samples_per_minute']:.0f} a minute")
    print(f"{'difference':12}{'median':>9}{'90 %':>9}{'max':>9}")
    for term, row in runs["difference"].items():
        print(f"{term:12}{row['median']:9.1%}{row['p90']:9.1%}{row['max']:9.1%}")
    print(f"\n{'lookups, distance of':28}{'median':>9}{'90 %':>9}{'max':>9}")
    for kind, row in result["workloads"].items():
        print(f"{kind:28}{row['median']:9.4f}{row['p90']:9.4f}{row['max']:9.4f}")


if __name__ == "__main__":
    main()

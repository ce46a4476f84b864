"""Held-out errors of the cost models on a store of measurements, by default the shipped CPU kernels.

python benchmarks/cost_model_store.py [--store FILE] [--seeds 3] [--quick]

Rows are split 80 to 20 (every row is another combination). Learning curve at a tenth and at all of the training rows,
default beside the paper's form. The batch sizes of the store differ from row to row and the paper's form has no input
for them, so a third form gets the lookups of a batch in place of the pooling factor: what the paper's would see had it
been built for this.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import numpy as np
from cost_model_scores import forms, inside_90, split, term_errors, timed_fit, with_spread

import torchrec_dreamshard
from torchrec_dreamshard import Measurement, PlacementTask
from torchrec_dreamshard.pool import POOL_BATCH_SIZE
from torchrec_dreamshard.samples import load_measurements

SHIPPED = Path(torchrec_dreamshard.__file__).parent / "data" / "cpu_measurements.jsonl.gz"


def at_the_papers_batch(measurement: Measurement) -> Measurement:
    """The same lookups in all, as if the batch were the paper's: its form cannot see another one."""
    task = measurement.task
    shards = [
        dataclasses.replace(
            shard, batch_size=POOL_BATCH_SIZE, pooling_factor=shard.pooling_factor * shard.batch_size / POOL_BATCH_SIZE
        )
        for shard in task.shards
    ]
    return dataclasses.replace(measurement, task=PlacementTask(tuple(shards), task.devices, task.hardware))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", default=SHIPPED, type=Path)
    parser.add_argument("--seeds", default=3, type=int)
    parser.add_argument("--quick", action="store_true", help="few steps for the paper's form")
    args = parser.parse_args()
    rows = [m for m in load_measurements(args.store) if m.cost is not None]
    print(f"{args.store.name}: {len(rows)} measurements")
    print("| form | rows | MAPE | weighted error | rank correlation | inside 90 % | CPU s |\n" + 7 * "|---" + "|")
    configs = forms(args.quick)
    same_batch = [at_the_papers_batch(m) for m in rows]
    named = {name: (config, rows) for name, config in configs.items()}
    named["paper, lookups of the batch"] = (configs["paper"], same_batch)
    for name, (config, seen) in named.items():
        for share in (0.1, 1.0):
            mape, weighted, rank, inside, seconds = [], [], [], [], []
            for seed in range(args.seeds):
                train, test = split(seen, seed)
                train = train[: round(share * len(train))]
                model, took = timed_fit(train, config, seed)
                error = term_errors(model, test)["compute_ms"]
                mape.append(error.mape)
                weighted.append(error.weighted)
                rank.append(error.rank)
                inside.append(inside_90(model, test))
                seconds.append(took)
            print(
                f"| {name} | {len(train)} | {with_spread(mape)} | {with_spread(weighted)} | {with_spread(rank)} "
                f"| {with_spread(inside, 2)} | {np.mean(seconds):.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()

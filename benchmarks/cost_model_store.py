"""Held-out errors of the cost models on a store of measurements, by default the shipped CPU kernels.

python benchmarks/cost_model_store.py [--store FILE] [--seeds 3] [--quick]

Rows are split by task, 80 to 20, so that no combination is on both sides. Learning curve at a tenth and at all of the
training rows, default beside the paper's form.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from cost_model_scores import forms, inside_90, split, term_errors, timed_fit, with_spread

import torchrec_dreamshard
from torchrec_dreamshard.samples import load_measurements

SHIPPED = Path(torchrec_dreamshard.__file__).parent / "data" / "cpu_measurements.jsonl.gz"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", default=SHIPPED, type=Path)
    parser.add_argument("--seeds", default=3, type=int)
    parser.add_argument("--quick", action="store_true", help="few steps for the paper's form")
    args = parser.parse_args()
    rows = [m for m in load_measurements(args.store) if m.cost is not None]
    print(f"{args.store.name}: {len(rows)} measurements")
    print("| form | rows | compute MAPE | rank correlation | inside 90 % | CPU s |\n|---|---|---|---|---|---|")
    for name, config in forms(args.quick).items():
        for share in (0.1, 1.0):
            mape, rank, inside, seconds = [], [], [], []
            for seed in range(args.seeds):
                train, test = split(rows, seed)
                train = train[: round(share * len(train))]
                model, took = timed_fit(train, config, seed)
                error = term_errors(model, test)["compute_ms"]
                mape.append(error.mape)
                rank.append(error.rank)
                inside.append(inside_90(model, test))
                seconds.append(took)
            print(
                f"| {name} | {len(train)} | {with_spread(mape)} | {with_spread(rank)} | {with_spread(inside, 2)} "
                f"| {np.mean(seconds):.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()

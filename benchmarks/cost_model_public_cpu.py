"""Cost models on published CPU measurements that nobody here made (benchmarks/data/SOURCES.md).

python benchmarks/cost_model_public_cpu.py [--workers 4 8] [--rows 100 400 2000 0] [--seeds 2] [--quick]

Fused kernels: forward plus backward of 1 to 15 tables, split 80 to 20 by row; learning curves of the default and the
paper's form on the same rows. The test errors published with the files are 2,587 (4 workers) and 12,835 ms^2 (8).
Exchanges: per rank and direction; the paper's form has no term for the forward exchange.
"""

from __future__ import annotations

import argparse

import numpy as np
from cost_model_scores import forms, inside_90, split, term_errors, timed_fit, with_spread
from public_rows import load_comms_rows, load_compute_rows


def compute_table(workers: int, sizes: list[int], seeds: int, quick: bool) -> None:
    measurements = load_compute_rows(workers)
    print(f"\nKernels, {workers} workers, {len(measurements)} rows")
    print("| form | rows | test MSE (ms²) | MAPE | rank correlation | inside 90 % | CPU s |")
    print("|---|---|---|---|---|---|---|")
    for name, config in forms(quick).items():
        for size in sizes:
            results, inside, seconds = [], [], []
            for seed in range(seeds):
                train, test = split(measurements, seed)
                train = train[: size or len(train)]
                model, took = timed_fit(train, config, seed)
                results.append(term_errors(model, test)["compute_ms"])
                inside.append(inside_90(model, test))
                seconds.append(took)
            columns = [[getattr(r, key) for r in results] for key in ("mse", "mape", "rank")]
            cells = [with_spread(columns[0]), *(with_spread(c) for c in columns[1:]), with_spread(inside, 2)]
            print(f"| {name} | {len(train)} | {' | '.join(cells)} | {np.mean(seconds):.0f} |", flush=True)


def comms_table(workers: int, sizes: list[int], seeds: int) -> None:
    measurements = load_comms_rows(workers)
    print(f"\nExchanges, {workers} ranks, {len(measurements)} rows")
    print("| form | rows | forward MAPE | backward MAPE | forward MSE | backward MSE |\n|---|---|---|---|---|---|")
    for name, config in forms().items():
        for size in sizes:
            results = []
            for seed in range(seeds):
                train, test = split(measurements, seed)
                train = train[: size or len(train)]
                results.append(term_errors(timed_fit(train, config, seed)[0], test))
            cells = [
                ""
                if name == "paper" and direction == "forward"
                else with_spread([getattr(r[f"{direction}_comms_ms"], key) for r in results])
                for key in ("mape", "mse")
                for direction in ("forward", "backward")
            ]
            print(f"| {name} | {len(train)} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", nargs="+", default=[4, 8], type=int, choices=[4, 8])
    parser.add_argument("--rows", nargs="+", default=[100, 400, 2000, 0], type=int, help="0: all")
    parser.add_argument("--seeds", default=2, type=int)
    parser.add_argument("--only", choices=["kernels", "exchanges"])
    parser.add_argument("--quick", action="store_true", help="few steps for the paper's form")
    args = parser.parse_args()
    for workers in args.workers:
        if args.only != "exchanges":
            compute_table(workers, args.rows, args.seeds, args.quick)
        if args.only != "kernels":
            comms_table(workers, args.rows, args.seeds)


if __name__ == "__main__":
    main()

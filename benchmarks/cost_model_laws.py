"""Cost models on a dozen made-up cost laws (``cost_laws.py``): 100 placements, then larger tasks. All simulated.

python benchmarks/cost_model_laws.py [--seeds 3] [--laws NAME ...] [--forms default paper]

Training: 100 placements of 20 to 40 tables on 4 devices. Tests have other tables: as many, 2 and 4 times as many, and
2 and 4 times as many devices with their tables. Even seeds draw tables from the public pool, odd ones make them up,
without histograms. A quarter of the tasks has devices with unequal background loads.
"""

from __future__ import annotations

import argparse
import dataclasses

import numpy as np
from cost_laws import LAWS, Law
from cost_model_scores import forms, term_errors, timed_fit, with_spread

from torchrec_dreamshard import Measurement, PlacementTask, ShardSpec
from torchrec_dreamshard.baselines import BASELINES
from torchrec_dreamshard.pool import load_public_pool, split, with_dim

DIMS = (4, 8, 16, 32, 64, 128)
CASES = {"same size": (1, 1), "2x tables": (2, 1), "4x tables": (4, 1), "2x devices": (2, 2), "4x devices": (4, 4)}
"""Factors of the number of tables and of devices."""


def tables(rng: np.random.Generator, seed: int, number: int, *, train: bool) -> list[ShardSpec]:
    """Tables of a task; training and test tables are different ones."""
    if seed % 2 == 0:
        pool = split(load_public_pool(), 0)[0 if train else 1]
        return [with_dim(pool[int(i)], int(rng.choice(DIMS))) for i in rng.integers(len(pool), size=number)]
    return [
        ShardSpec(
            rows=int(10 ** rng.uniform(3, 7)),
            dim=int(rng.choice(DIMS)),
            pooling_factor=float(np.round(10 ** rng.uniform(-1, 2), 2)),
        )
        for _ in range(number)
    ]


def samples(law: Law, number: int, seed: int, *, train: bool, factors: tuple[int, int] = (1, 1)) -> list[Measurement]:
    """Measured placements: random, more or less balanced, and those of the heuristics."""
    rng = np.random.default_rng([seed, train, *factors])
    profiler = dataclasses.replace(law, seed=seed, noise=law.noise if train else 0.0)
    rows = []
    for _ in range(number):
        count, devices = factors[0] * int(rng.integers(20, 41)), 4 * factors[1]
        background = float(rng.choice([0.0, 0.0, 0.0, 3.0])) * rng.random(devices)
        task = PlacementTask.uniform(tables(rng, seed, count, train=train), devices, hbm_bytes=10**15)
        unequal = [
            dataclasses.replace(d, background_ms=float(ms)) for d, ms in zip(task.devices, background, strict=True)
        ]
        task = PlacementTask(task.shards, tuple(unequal), task.hardware)
        if rng.random() < 0.3:
            placement = BASELINES[str(rng.choice(list(BASELINES)))](task, seed=int(rng.integers(1 << 31)))
        else:
            share = rng.dirichlet(np.full(devices, rng.choice([1.0, 5.0, 50.0])))
            placement = tuple(rng.choice(devices, size=count, p=share).tolist())
        rows.append(Measurement(task=task, placement=placement, cost=profiler.measure(task, placement)))
    return rows


def main() -> None:
    """Prints one row per law and form."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default=3, type=int)
    parser.add_argument("--laws", nargs="+", default=list(LAWS), choices=list(LAWS), metavar="NAME")
    parser.add_argument("--forms", nargs="+", default=list(forms()), choices=list(forms()))
    args = parser.parse_args()
    print("Mean absolute error of the step in per cent; in brackets mean predicted over true, where it is off by > 3 %")
    print(f"| law | form | compute | {' | '.join(CASES)} | CPU s |\n|---|---|---|{'---|' * len(CASES)}---|")
    totals: dict[str, list[list[float]]] = {}
    for name in args.laws:
        for form in args.forms:
            compute, seconds = [], []
            errors: dict[str, list[float]] = {case: [] for case in CASES}
            ratios: dict[str, list[float]] = {case: [] for case in CASES}
            for seed in range(args.seeds):
                model, took = timed_fit(samples(LAWS[name], 100, seed, train=True), forms()[form], seed)
                seconds.append(took)
                for case, factors in CASES.items():
                    test = samples(LAWS[name], 100 if case == "same size" else 40, seed, train=False, factors=factors)
                    scores = term_errors(model, test)
                    errors[case].append(100 * scores["step_ms"].mape)
                    ratios[case].append(scores["step_ms"].ratio)
                    if case == "same size":
                        compute.append(100 * scores["compute_ms"].mape if "compute_ms" in scores else np.nan)
            cells = []
            for case, values in errors.items():
                off = float(np.mean(ratios[case]))
                cells.append(with_spread(values, 3) + (f" ({off:.2f})" if abs(off - 1) > 0.03 else ""))
            print(
                f"| {name} | {form} | {with_spread(compute, 3)} | {' | '.join(cells)} | {np.mean(seconds):.0f} |",
                flush=True,
            )
            totals.setdefault(form, []).append([float(np.mean(v)) for v in errors.values()])
    for form, rows in totals.items():
        means = " | ".join(f"{value:.2f}" for value in np.exp(np.log(rows).mean(axis=0)))
        print(f"| geometric mean | {form} | | {means} | |")


if __name__ == "__main__":
    main()

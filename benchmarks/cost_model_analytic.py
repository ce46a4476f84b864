"""Cost models on the analytic GPU models: sample efficiency, transfer, extrapolation, speed. All figures simulated.

python benchmarks/cost_model_analytic.py [--part curve transfer extrapolation speed] [--seeds 3]

Tables of training and test tasks come from disjoint halves of the public pool.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import numpy as np
import torch
from cost_model_scores import forms, inside_90, term_errors, timed_fit, with_spread

from torchrec_dreamshard import Measurement, PlacementTask
from torchrec_dreamshard.config import CostConfig
from torchrec_dreamshard.cost_network import CostNetwork
from torchrec_dreamshard.hardware import resolve_hardware
from torchrec_dreamshard.pool import load_public_pool, split, with_dim
from torchrec_dreamshard.profiling.analytic import AnalyticProfiler

DIMS = (4, 8, 16, 32, 64, 128)
SHOWN = ("forward_compute_ms", "backward_compute_ms", "forward_comms_ms", "backward_comms_ms", "step_ms")


def samples(
    number: int,
    seed: int,
    *,
    train: bool,
    hardware: str = "a100",
    devices: int = 4,
    per_device: Sequence[int] = (5, 10),
) -> list[Measurement]:
    """Random placements of mixed-dim tasks; ``per_device`` bounds the mean number of shards of a device."""
    rng = np.random.default_rng(seed + 1000 * (not train))
    pool = split(load_public_pool(), 0)[0 if train else 1]
    profiler, spec = AnalyticProfiler(hardware), resolve_hardware(hardware)
    rows = []
    for _ in range(number):
        count = int(rng.integers(per_device[0] * devices, per_device[1] * devices + 1))
        chosen = rng.choice(len(pool), size=count, replace=count > len(pool))
        shards = [with_dim(pool[i], int(rng.choice(DIMS))) for i in chosen]
        task = PlacementTask.uniform(shards, devices, hbm_bytes=10**15, devices_per_host=8, hardware=spec)
        placement = tuple(rng.integers(devices, size=count).tolist())
        rows.append(Measurement(task=task, placement=placement, cost=profiler.measure(task, placement)))
    return rows


def report(label: str, errors: list[dict], more: str = "") -> None:
    cells = [with_spread([100 * e[name].mape for e in errors], 3) if name in errors[0] else "" for name in SHOWN]
    print(f"| {label} | {' | '.join(cells)} | {more}", flush=True)


def header(title: str) -> None:
    print(f"\n{title}; mean absolute percentage error on unseen tables, spread over seeds")
    print("| | fwd compute | bwd compute | fwd exchange | bwd exchange | step | |\n|---|---|---|---|---|---|---|")


def curve(seeds: int) -> None:
    header("Sample efficiency, a100, 4 devices")
    for name, config in forms().items():
        for number in (25, 100, 400):
            errors, inside, seconds = [], [], []
            for seed in range(seeds):
                model, took = timed_fit(samples(number, seed, train=True), config, seed)
                test = samples(100, seed, train=False)
                errors.append(term_errors(model, test))
                inside.append(inside_90(model, test))
                seconds.append(took)
            more = f"inside 90 %: {np.mean(inside):.2f}, {np.mean(seconds):.0f} CPU s |"
            report(f"{name}, {number} placements ({4 * number} kernels)", errors, more)


def transfer(seeds: int) -> None:
    header("Transfer a100 to h100")
    config = CostConfig()
    labels = ("a100 as it is", "fine-tuned on 50 kernels", "from scratch on 500 kernels")
    rows: dict[str, list[dict]] = {label: [] for label in labels}
    for seed in range(seeds):
        source, _ = timed_fit(samples(400, seed, train=True), config, seed)
        few, many = (samples(n, seed + 77, train=True, hardware="h100", devices=1) for n in (50, 500))
        test = samples(300, seed, train=False, hardware="h100", devices=1)
        models = (source, timed_fit(few, config, seed, source)[0], timed_fit(many, config, seed)[0])
        for label, model in zip(labels, models, strict=True):
            rows[label].append(term_errors(model, test))
    for label, errors in rows.items():
        report(label, errors, "|")


def extrapolation(seeds: int) -> None:
    header("Extrapolation: trained on 400 placements, 4 devices, at most 15 shards a device on average")
    models = {
        name: [timed_fit(samples(400, s, train=True, per_device=(2, 15)), config, s)[0] for s in range(seeds)]
        for name, config in forms().items()
    }
    cases = {f"4 devices, {n} shards a device": (4, (n, n)) for n in (8, 30, 60)}
    cases |= {f"{d} devices, 2 to 15 shards a device": (d, (2, 15)) for d in (2, 8, 16, 64)}
    for label, (devices, per_device) in cases.items():
        for name, fitted in models.items():
            errors = [
                term_errors(model, samples(20, seed, train=False, devices=devices, per_device=per_device))
                for seed, model in enumerate(fitted)
            ]
            report(f"{label}, {name}", errors, "|")


def speed() -> None:
    """Time of a batch of device loads, and of a fit to 15,000 of them."""
    torch.set_num_threads(1)
    model = CostNetwork(CostConfig()).requires_grad_(False)
    latents, hardware = torch.rand(10_000, model.latent_dim), torch.zeros(1, 7)
    times = []
    for _ in range(20):
        start = time.perf_counter()
        model.device_compute(latents, hardware)
        times.append(time.perf_counter() - start)
    print(
        f"\n10,000 device loads in one batch, one core: {1e3 * np.median(times):.1f} ms (best {1e3 * min(times):.1f})"
    )
    rows = samples(3750, 0, train=True)
    start = time.perf_counter()
    _, cpu = timed_fit(rows, CostConfig(), 0)
    print(f"Fit to 15,000 kernels (3,750 placements): {time.perf_counter() - start:.0f} s, {cpu:.0f} CPU s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("curve", "transfer", "extrapolation", "speed")
    parser.add_argument("--part", nargs="+", default=list(parts), choices=parts)
    parser.add_argument("--seeds", default=3, type=int)
    args = parser.parse_args()
    for part in args.part:
        if part == "speed":
            speed()
        else:
            {"curve": curve, "transfer": transfer, "extrapolation": extrapolation}[part](args.seeds)


if __name__ == "__main__":
    main()

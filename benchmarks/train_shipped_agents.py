"""Trains the agents that come with the package, from inputs that come with it too.

    python benchmarks/train_shipped_agents.py          # both
    python benchmarks/train_shipped_agents.py cpu      # one

``cpu`` learns from the measured kernels of ``data/cpu_measurements.jsonl.gz``, and its exchange from published
measurements (data/SOURCES.md here). ``cuda`` learns from the analytic profiler over several named GPUs: it is
simulated, and says so in its metadata.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from importlib import resources
from pathlib import Path

import numpy as np
from public_rows import load_comms_rows
from tqdm import tqdm

from torchrec_dreamshard import Agent, Measurement, PlacementTask, TrainConfig, train
from torchrec_dreamshard.config import CostConfig
from torchrec_dreamshard.hardware import named_hardware
from torchrec_dreamshard.pool import load_public_pool, sample_tasks
from torchrec_dreamshard.profiling.analytic import AnalyticProfiler
from torchrec_dreamshard.samples import load_measurements

DIMS = (4, 8, 16, 32, 64, 128, 256)
GPUS = ("v100", "a100", "h100", "h200")
DTYPES = ("fp32", "fp16")
OPTIMIZERS = ("sgd", "rowwise_adagrad", "adam")
NUM_CUDA_MEASUREMENTS = 1200
NUM_EXCHANGES = 800  # of either number of ranks
UVM_SHARE = 0.05  # of the cuda tasks' tables
SEED = 0


def train_cpu() -> Agent:
    """From measurements alone; the tasks are only practised on."""
    stored = resources.files("torchrec_dreamshard.data").joinpath("cpu_measurements.jsonl.gz")
    with resources.as_file(stored) as path:
        kernels = load_measurements(path)
    exchanges = [*load_comms_rows(4, NUM_EXCHANGES), *load_comms_rows(8, NUM_EXCHANGES)]
    hardware = named_hardware("cpu")
    tasks: list[PlacementTask] = []
    for seed, batch_size in enumerate((512, 2048, 8192)):
        tasks += sample_tasks(
            load_public_pool(),
            16,
            (10, 60),
            (2, 4, 8),
            dims=DIMS[:-1],
            batch_size=batch_size,
            hardware=hardware,
            memory_bytes=512 * 1024**3,
            seed=seed,
        )
    config = TrainConfig(
        num_measurements=0, num_iterations=1, num_updates=60, num_imitations=60, cost=CostConfig(num_steps=1500)
    )
    agent = _train(tasks, None, config, [*kernels, *exchanges])
    agent.metadata["recipe"] = (
        f"{len(kernels)} fused CPU kernels measured with dreamshard profile; exchange from {len(exchanges)} published "
        "all-to-all measurements of Gloo ranks on one machine"
    )
    return agent


def cuda_tasks() -> list[PlacementTask]:
    """Tasks over GPUs, hosts, batch sizes, precisions and optimizers."""
    rng = np.random.default_rng(SEED)
    tasks: list[PlacementTask] = []
    for index in range(240):
        pool = load_public_pool(weight_dtype=str(rng.choice(DTYPES)), optimizer=str(rng.choice(OPTIMIZERS)))
        uvm = rng.random(len(pool)) < UVM_SHARE
        kernels = rng.choice(["fused_uvm", "fused_uvm_caching"], len(pool))
        pool = [
            dataclasses.replace(shard, kernel=str(kernel), hbm_bytes=None, ddr_bytes=None) if in_uvm else shard
            for shard, in_uvm, kernel in zip(pool, uvm, kernels, strict=True)
        ]
        tasks += sample_tasks(
            pool,
            1,
            (2, 60),
            (1, 2, 4, 8, 16),
            dims=DIMS,
            batch_size=int(rng.choice([2048, 8192, 32_768, 65_536])),
            hardware=str(GPUS[index % len(GPUS)]),
            memory_bytes=512 * 1024**3,
            devices_per_host=None if index % 2 else int(rng.choice([2, 4, 8])),
            seed=index,
        )
    return tasks


def train_cuda() -> Agent:
    """On the analytic profiler."""
    config = TrainConfig(
        num_measurements=NUM_CUDA_MEASUREMENTS,
        num_iterations=2,
        num_updates=20,
        num_imitations=40,
        cost=CostConfig(num_steps=1000),
    )
    agent = _train(cuda_tasks(), AnalyticProfiler(None), config, [])
    agent.metadata["recipe"] = (
        f"{NUM_CUDA_MEASUREMENTS} placements simulated by the analytic profiler: {', '.join(GPUS)}"
    )
    return agent


def _train(
    tasks: list[PlacementTask],
    profiler: AnalyticProfiler | None,
    config: TrainConfig,
    measurements: list[Measurement],
) -> Agent:
    with tqdm(disable=None, mininterval=5) as bar:

        def progress(done: int, total: int, phase: str) -> None:
            bar.total = total
            bar.set_postfix_str(phase, refresh=False)
            bar.update(done - bar.n)

        return train(tasks, profiler, config, seed=SEED, measurements=measurements, progress=progress)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=["cpu", "cuda"], help="cpu, cuda (default: both)")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent.parent / "torchrec_dreamshard" / "checkpoints"
    )
    args = parser.parse_args()
    for name in args.names:
        start = time.monotonic()
        agent = {"cpu": train_cpu, "cuda": train_cuda}[name]()
        agent.save(args.out / f"{name}.safetensors")
        report = agent.metadata["report"]
        print(f"{name}: {agent.metadata['recipe']}; {time.monotonic() - start:.0f} s")
        for term, errors in report["terms"].items():
            print(f"  {term:22s} error {errors['mape']:6.1%}  rank correlation {errors['rank_correlation']:.4f}")
        if not report["ready"]:
            print(f"  not ready: {report['reason']}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

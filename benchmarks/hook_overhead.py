"""What ``record_costs`` costs a running job.

    python benchmarks/hook_overhead.py [--ranks 2] [--blocks 10] [--json]

Trains a sharded ``EmbeddingBagCollection`` on Gloo ranks of this host, in blocks of steps that are recorded and blocks
that are not, in turn, and compares the blocks pairwise: a change of the machine's speed touches both of a pair. Each
recorded block holds everything that recording does: attaching, timing, gathering, appending, detaching.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed, multiprocessing
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.types import ShardingEnv

from torchrec_dreamshard.profiling.hooks import record_costs
from torchrec_dreamshard.samples import MeasurementStore

NUM_TABLES, DIM, ROWS, LOOKUPS = 24, 64, 100_000, 8


def build() -> DistributedModelParallel:
    tables = [
        EmbeddingBagConfig(name=f"t{i}", num_embeddings=ROWS, embedding_dim=DIM, feature_names=[f"f{i}"])
        for i in range(NUM_TABLES)
    ]
    bags = EmbeddingBagCollection(tables=tables, device=torch.device("cpu"))
    apply_optimizer_in_backward(torch.optim.SGD, bags.parameters(), {"lr": 0.01})
    model, sharder = torch.nn.Sequential(bags), EmbeddingBagCollectionSharder()
    world_size = distributed.get_world_size()
    topology = Topology(world_size=world_size, compute_device="cpu", created_by_factory=True)
    plan = EmbeddingShardingPlanner(topology=topology).collective_plan(model, [sharder], distributed.group.WORLD)
    env = ShardingEnv.from_process_group(distributed.group.WORLD)
    return DistributedModelParallel(model, env=env, device=torch.device("cpu"), plan=plan, sharders=[sharder])


def steps(model: DistributedModelParallel, batch: KeyedJaggedTensor, count: int) -> None:
    for _ in range(count):
        model(batch).values().sum().backward()


def run(rank: int, port: int, path: str, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(args.ranks), "LOCAL_RANK": str(rank)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(args.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    distributed.init_process_group("gloo")
    model = build()
    count = NUM_TABLES * args.batch_size
    batch = KeyedJaggedTensor(
        keys=[f"f{i}" for i in range(NUM_TABLES)],
        values=torch.randint(0, ROWS, (count * LOOKUPS,), generator=torch.Generator().manual_seed(rank)),
        lengths=torch.full((count,), LOOKUPS),
    )
    store = MeasurementStore(path)
    steps(model, batch, 10)
    pairs = []
    for block in range(args.blocks):
        pair = {}
        for recorded in (False, True) if block % 2 else (True, False):
            distributed.barrier()
            start = time.perf_counter()
            with record_costs(model, store, steps_per_record=20) if recorded else contextlib.nullcontext():
                steps(model, batch, args.steps)
            pair[recorded] = 1000 * (time.perf_counter() - start) / args.steps
        pairs.append((pair[False], pair[True]))
    if rank == 0:
        report(np.array(pairs), len(list(store)), args)
    distributed.barrier()
    distributed.destroy_process_group()


def report(pairs: Any, num_records: int, args: argparse.Namespace) -> None:
    ratios = pairs[:, 1] / pairs[:, 0] - 1
    middle = float(np.median(ratios))
    spread = 1.25 * float(np.std(ratios, ddof=1)) / np.sqrt(len(ratios))  # standard error of a median
    result = {
        "ranks": args.ranks,
        "step_ms": round(float(np.median(pairs[:, 0])), 3),
        "recorded_step_ms": round(float(np.median(pairs[:, 1])), 3),
        "overhead": round(middle, 5),
        "standard_error": round(spread, 5),
        "records": num_records,
    }
    if args.json:
        print(json.dumps(result))
    else:
        print(
            f"{args.ranks} ranks, {args.blocks} pairs of {args.steps} steps: a step takes {result['step_ms']} ms, "
            f"recorded {result['recorded_step_ms']} ms; overhead {middle:.2%} +- {spread:.2%} (median of pairs)"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=1024, help="samples of one rank")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(run, args=(port, str(Path(folder) / "job.jsonl"), args), nprocs=args.ranks)


if __name__ == "__main__":
    main()

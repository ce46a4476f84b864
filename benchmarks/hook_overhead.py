"""What ``record_costs`` costs a running job.

    python benchmarks/hook_overhead.py [--ranks 2] [--pairs 24] [--json]

Trains a sharded ``EmbeddingBagCollection`` on Gloo ranks of this host, in short blocks of steps that are recorded and
blocks that are not, in turn, and compares them pairwise: a change of the machine's speed touches both of a pair. A
recorded block holds everything that recording does: attaching, timing, gathering, appending, detaching. Given are the
median of the pairs' ratios and its 95 % interval (of order statistics), for the time on the wall and for the cores'
time of rank 0, which neighbours disturb less; and, for machines too noisy to see so small a difference, the cores' time
that rank 0's main thread spends inside the recorder, which lacks only the dispatch of its callbacks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import tempfile
import time
from collections.abc import Callable
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

from torchrec_dreamshard.profiling.hooks import CostRecorder, record_costs
from torchrec_dreamshard.profiling.live_model import KernelLookups
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


class InsideRecorder:
    """Adds up the time of this thread inside the recorder's methods."""

    def __init__(self) -> None:
        self.ns, self._depth = 0, 0
        for name in ("attach", "detach", "_on_step", "_mark", "_span", "_watch_node", "_watch_backward_exchange"):
            setattr(CostRecorder, name, self._timed(getattr(CostRecorder, name)))
        KernelLookups.note = self._timed(KernelLookups.note)

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            start = time.thread_time_ns()
            try:
                return method(*args, **kwargs)
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self.ns += time.thread_time_ns() - start

        return timed


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
    with record_costs(model, store):  # the first record loads what later ones find
        steps(model, batch, 10)
    times = np.zeros((args.pairs, 2, 2))  # pairs x (plain, recorded) x (wall, cores)
    for pair in range(args.pairs):
        for recorded in (0, 1) if pair % 2 else (1, 0):
            distributed.barrier()
            wall, cores = time.perf_counter(), time.process_time()
            with record_costs(model, store, steps_per_record=args.steps) if recorded else contextlib.nullcontext():
                steps(model, batch, args.steps)
            times[pair, recorded] = time.perf_counter() - wall, time.process_time() - cores
    inside = InsideRecorder()  # last, as it slows recording down
    blocks = max(2, args.pairs // 10)
    for _ in range(blocks):
        with record_costs(model, store, steps_per_record=args.steps):
            steps(model, batch, args.steps)
    if rank == 0:
        report(1000 * times / args.steps, inside.ns / 1e6 / blocks / args.steps, len(list(store)), args)
    distributed.barrier()
    distributed.destroy_process_group()


def overhead(times: Any) -> dict[str, float]:
    """Median of the pairs' ratios less 1, with its distribution-free 95 % interval."""
    ratios = np.sort(times[:, 1] / times[:, 0] - 1)
    reach = 0.98 * np.sqrt(len(ratios))  # in ranks: 1.96 standard deviations of a binomial with share 1/2
    low, high = int(max(0, len(ratios) / 2 - reach)), int(min(len(ratios) - 1, len(ratios) / 2 + reach))
    return {
        "plain_ms": round(float(np.median(times[:, 0])), 3),
        "recorded_ms": round(float(np.median(times[:, 1])), 3),
        "overhead": round(float(np.median(ratios)), 5),
        "low": round(float(ratios[low]), 5),
        "high": round(float(ratios[high]), 5),
    }


def report(times: Any, inside_ms: float, num_records: int, args: argparse.Namespace) -> None:
    kinds = {"wall": overhead(times[..., 0]), "cores": overhead(times[..., 1])}
    share = inside_ms / kinds["cores"]["plain_ms"]
    if args.json:
        inside = {"inside_ms": round(inside_ms, 4), "inside_share": round(share, 5)}
        print(json.dumps({"ranks": args.ranks, "pairs": args.pairs, "records": num_records, **kinds, **inside}))
        return
    print(f"{args.ranks} ranks, {args.pairs} pairs of blocks of {args.steps} steps, {num_records} records")
    print(f"{'time of a step':16}{'plain ms':>10}{'recorded':>10}{'overhead':>10}{'95 % interval':>22}")
    for kind, row in kinds.items():
        interval = f"{row['low']:.2%} to {row['high']:.2%}"
        print(f"{kind:16}{row['plain_ms']:10.3f}{row['recorded_ms']:10.3f}{row['overhead']:10.2%}{interval:>22}")
    print(f"inside the recorder: {inside_ms:.3f} ms of a step, {share:.2%} of its cores' time")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=24)
    parser.add_argument("--steps", type=int, default=50, help="steps of a block, one record (default: 50)")
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

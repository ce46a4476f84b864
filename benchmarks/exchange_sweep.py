"""Exchange times over column sums from balanced to skewed, with and without a late start.

    python benchmarks/exchange_sweep.py [--ranks 2] [--columns 256] [--batch-size 4096] [--json]
    torchrun --nnodes 2 --nproc_per_node 8 --rdzv-backend c10d --rdzv-endpoint HOST:PORT benchmarks/exchange_sweep.py

Alone it starts its ranks itself, on Gloo; under torchrun it uses the launch's ranks (NCCL on GPUs). For every number
of ranks up to all of them: the all-to-all of table-wise shards, whose largest rank has from 1 to D times the mean
column sum, and the reduce-scatter and all-gather of row-wise ones. Each rank's times are medians; the table shows the
slowest rank.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
from typing import Any

import torch
from torch import distributed, multiprocessing

from torchrec_dreamshard.profiling.comms import AllToAll, ReduceScatter, time_exchange
from torchrec_dreamshard.profiling.timing import TimingConfig

SKEWS = (0.0, 0.5, 1.0)  # 0: equal column sums, 1: all columns on one rank
DELAYS_MS = (0.0, 5.0)  # of the last rank


def column_sums(total: float, num_ranks: int, skew: float) -> list[float]:
    even = total / num_ranks
    return [even * (1 - skew) + (total * skew if rank == 0 else 0.0) for rank in range(num_ranks)]


def sweep(device: torch.device, columns: int, batch_size: int) -> list[dict[str, Any]]:
    rows = []
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    config = TimingConfig(warmup=3, repeats=15)
    for size in range(2, world_size + 1):
        group = distributed.new_group(list(range(size)))
        if rank >= size:
            continue
        total = float(columns * size * batch_size * size)  # the global batch grows with the ranks
        cases = [("all_to_all", skew, delay) for skew in SKEWS for delay in DELAYS_MS] + [("reduce_scatter", 0.0, 0.0)]
        for kind, skew, delay_ms in cases:
            exchange = (
                AllToAll(column_sums(total, size, skew), device, group=group)
                if kind == "all_to_all"
                else ReduceScatter(total, device, group=group)
            )
            own = delay_ms if rank == size - 1 else 0.0
            times = time_exchange(exchange, device, config, delay_ms=own, group=group).median_ms()
            slowest = torch.tensor(times, device=device)
            distributed.all_reduce(slowest, op=distributed.ReduceOp.MAX, group=group)
            forward, backward = slowest.tolist()
            rows.append(
                {"kind": kind, "ranks": size, "skew": skew, "delay_ms": delay_ms, "forward_ms": forward}
                | {"backward_ms": backward, "mbytes": total * 4 / 1e6}
            )
    distributed.barrier()
    return rows


def run(rank: int, world_size: int, port: int, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    run_rank(args)


def run_rank(args: argparse.Namespace) -> None:
    on_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if on_cuda else "gloo")
    rows = sweep(device, args.columns, args.batch_size)
    if distributed.get_rank() == 0:
        report(rows, args.json)
    distributed.destroy_process_group()


def report(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(rows))
        return
    headers = ("kind", "ranks", "mbytes", "skew", "delay_ms", "forward_ms", "backward_ms")
    print("".join(f"{header:>15}" for header in headers))
    for row in rows:
        cells = [row[header] for header in headers]
        print("".join(f"{cell:15.3g}" if isinstance(cell, float) else f"{cell!s:>15}" for cell in cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="ranks to start when torchrun has not (default: 2)")
    parser.add_argument("--columns", type=int, default=256, help="mean column sum of a rank")
    parser.add_argument("--batch-size", type=int, default=1024, help="samples of one rank")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(args)
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    multiprocessing.spawn(run, args=(args.ranks, port, args), nprocs=args.ranks)


if __name__ == "__main__":
    main()

"""Plans a small DLRM, shards it and trains it; saves the plan.

    torchrun --standalone --nproc_per_node 2 examples/train_dlrm.py --num-tables 40 --steps 50

Runs with NCCL where every rank has a GPU, else with Gloo on the CPU.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from tiny_dlrm import TinyDLRM, Trainer, draw_tables, make_batches, silence_internals, start_process_group
from torchrec.distributed.model_parallel import get_default_sharders
from torchrec.distributed.planner import ParameterConstraints, Topology
from tqdm import tqdm

from torchrec_dreamshard import DreamShardPlanner


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-tables", type=int, default=40)
    parser.add_argument("--max-rows", type=int, default=100_000, help="cap of a table's rows")
    parser.add_argument("--batch-size", type=int, default=2048, help="global batch")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--agent", help="agent file or shipped name (default: the one for the device)")
    parser.add_argument("--plan-file", type=Path, default=Path("out/plan.json"))
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    silence_internals()
    device = start_process_group()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tables = draw_tables(args.num_tables, batch_size=args.batch_size, max_rows=args.max_rows, seed=args.seed)

    model = TinyDLRM(tables, torch.device("meta"))
    planner = DreamShardPlanner(
        topology=Topology(
            world_size=world_size, local_world_size=int(os.environ["LOCAL_WORLD_SIZE"]), compute_device=device.type
        ),
        batch_size=args.batch_size // world_size,
        constraints={t.name: ParameterConstraints(pooling_factors=[t.pooling_factor]) for t in tables},
        agent=args.agent,
        seed=args.seed,
    )
    start = time.perf_counter()
    plan = planner.collective_plan(model, get_default_sharders(), dist.GroupMember.WORLD)
    if rank == 0:
        print(f"planned {len(tables)} tables on {world_size} ranks in {time.perf_counter() - start:.2f} s")
        args.plan_file.parent.mkdir(parents=True, exist_ok=True)
        planner.save_plan(args.plan_file)
        print(f"plan written to {args.plan_file}")

    trainer = Trainer(model, plan, device)
    batches = make_batches(tables, rank, world_size, args.seed)
    with tqdm(range(args.steps), unit="step", disable=True if rank else None) as bar:
        for _ in bar:
            loss = trainer.step(next(batches).to(device))
            bar.set_postfix(loss=f"{loss.item():.4f}")
    if rank == 0:
        print(f"trained {args.steps} steps, last loss of rank 0: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

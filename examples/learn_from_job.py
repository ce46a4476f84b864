"""A running job teaches its own planner: record the costs of live steps, fine-tune the agent, predict the job better.

    torchrun --standalone --nproc_per_node 2 examples/learn_from_job.py

Trains a small DLRM for some steps under each of several plans and records them. The agent is fine-tuned on the records
of all plans but the last, and its predicted step time for the last one is compared before and after.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from tiny_dlrm import TinyDLRM, Trainer, draw_tables, make_batches, start_process_group
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan

from torchrec_dreamshard import Agent, Measurement, ShardSpec, TrainConfig, train
from torchrec_dreamshard.profiling.hooks import record_costs
from torchrec_dreamshard.samples import MeasurementStore, load_measurements

STEPS_PER_RECORD = 8


def random_plan(model: TinyDLRM, tables: list[ShardSpec], world_size: int, rng: np.random.Generator) -> ShardingPlan:
    """Tables spread at random, sometimes unevenly: an agent learns little from plans that are all alike."""
    shares = rng.dirichlet(np.full(world_size, 3.0))
    fused = EmbeddingComputeKernel.FUSED.value
    ranks = rng.choice(world_size, size=len(tables), p=shares)
    kinds = {t.name: table_wise(rank=int(r), compute_kernel=fused) for t, r in zip(tables, ranks, strict=True)}
    kind = "cuda" if dist.get_backend() == "nccl" else "cpu"
    bags = construct_module_sharding_plan(
        model.sparse, kinds, local_size=world_size, world_size=world_size, device_type=kind
    )
    return ShardingPlan({"sparse": bags})


def error(agent: Agent, records: list[Measurement]) -> float:
    """Mean relative error of the predicted step."""
    predicted = [agent.predict(record.task, record.placement).step_ms for record in records]
    measured = [record.cost.step_ms for record in records if record.cost is not None]
    return float(np.mean(np.abs(np.divide(predicted, measured) - 1)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-tables", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=2048, help="global batch")
    parser.add_argument("--plans", type=int, default=9)
    parser.add_argument("--records", type=int, default=4, help=f"records of a plan, {STEPS_PER_RECORD} steps each")
    parser.add_argument("--store", type=Path, default=Path("out/job.jsonl"), help="must not exist yet")
    args = parser.parse_args()
    if args.store.exists():
        parser.error(f"{args.store} exists: choose another --store")

    device = start_process_group()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # no rank makes the store before all have looked for it
    tables = draw_tables(args.num_tables, batch_size=args.batch_size, max_rows=100_000, seed=0)
    batches = make_batches(tables, rank, world_size, seed=0)
    store, rng = MeasurementStore(args.store), np.random.default_rng(0)
    for _ in range(args.plans):
        model = TinyDLRM(tables, torch.device("meta"))
        trainer = Trainer(model, random_plan(model, tables, world_size, rng), device)
        trainer.step(next(batches).to(device))
        with record_costs(trainer.model, store, steps_per_record=STEPS_PER_RECORD):
            for _ in range(args.records * STEPS_PER_RECORD):
                trainer.step(next(batches).to(device))
    dist.destroy_process_group()
    if rank == 0:
        records = load_measurements(args.store)
        before = Agent.load(device.type)
        config = TrainConfig(num_measurements=0, num_iterations=1)
        after = train([], None, config, measurements=records[: -args.records], agent=before)
        last = records[-args.records :]
        print(f"{len(records)} records of {args.plans} plans in {args.store}")
        print(f"error of the predicted step of the last plan: {error(before, last):.1%} as shipped, ", end="")
        print(f"{error(after, last):.1%} after learning from the job's other plans")


if __name__ == "__main__":
    main()

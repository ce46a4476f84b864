"""Plans one model with TorchRec's planner and with DreamShard's, trains both plans side by side, and compares.

    torchrun --standalone --nproc_per_node 2 examples/demo.py        (or: make demo)

Runs on the CPU with Gloo and one thread per rank. Both plans train the same model on the same batches; their steps are
timed in alternating rounds, so that what else the machine does hits both alike.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from tiny_dlrm import Batch, TinyDLRM, Trainer, draw_tables, make_batches, silence_internals
from torchrec.distributed.model_parallel import get_default_sharders
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.types import ShardingOption
from torchrec.distributed.types import ShardingPlan

from torchrec_dreamshard import CostBreakdown, DreamShardPlanner, LearnedPerfModel, ShardSpec
from torchrec_dreamshard.cli.common import format_table
from torchrec_dreamshard.picture import draw_cost
from torchrec_dreamshard.planner import save_plan
from torchrec_dreamshard.planner.costs import CostSource
from torchrec_dreamshard.profiling.hooks import CostRecorder, record_costs
from torchrec_dreamshard.samples import MeasurementStore, load_measurements

CPU = torch.device("cpu")


@dataclass
class Contestant:
    """One planner's plan, and what was measured with it on this rank."""

    name: str
    plan: ShardingPlan
    plan_s: float
    predicted: CostBreakdown | None
    """On rank 0, which planned."""
    trainer: Trainer
    recorder: CostRecorder
    step_ms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def run(self, batches: list[Batch], *, record: bool) -> None:
        """Trains one round; all ranks start each step together."""
        for batch in batches:
            dist.barrier()
            start = time.perf_counter()
            loss = self.trainer.step(batch)
            if record:
                self.step_ms.append(1e3 * (time.perf_counter() - start))
            self.losses.append(float(loss))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-tables", type=int, default=40)
    parser.add_argument("--max-rows", type=int, default=100_000, help="cap of a table's rows")
    parser.add_argument("--batch-size", type=int, default=4096, help="global batch")
    parser.add_argument("--rounds", type=int, default=8, help="measured rounds of 4 steps with each plan")
    parser.add_argument("--agent", default=None, help="agent file or shipped name (default: cpu)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the plan and its picture")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    silence_internals()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    say = print if dist.get_rank() == 0 else lambda *_: None
    tables = draw_tables(args.num_tables, batch_size=args.batch_size, max_rows=args.max_rows, seed=args.seed)
    stream = make_batches(tables, dist.get_rank(), dist.get_world_size(), args.seed)
    batches = [next(stream) for _ in range(4)]
    args.out.mkdir(parents=True, exist_ok=True)
    say(describe(tables, args, sum(batch.ids.values().numel() for batch in batches) // len(batches)))

    contestants = [plan_and_shard(name, tables, args) for name in ("TorchRec", "DreamShard")]
    for contestant in contestants:
        contestant.run(batches, record=False)  # warm-up
        contestant.recorder.attach()
    for turn in range(args.rounds):
        say(f"round {turn + 1} of {args.rounds}")
        for contestant in contestants if turn % 2 == 0 else reversed(contestants):
            contestant.run(batches, record=True)

    for contestant in contestants:
        contestant.recorder.detach()  # writes the record, a collective call
    train_ms = [all_ranks(statistics.median(contestant.step_ms)) for contestant in contestants]
    if dist.get_rank() == 0:
        measured = [load_measurements(record_path(args, c.name))[-1].cost for c in contestants]
        say("\n" + report(contestants, measured, train_ms))
        write_results(contestants[1], args.out)
        say(f"\nwritten: {args.out / 'demo_plan.json'} and {args.out / 'demo_plan.png'}")
    dist.destroy_process_group()


def describe(tables: list[ShardSpec], args: argparse.Namespace, lookups: int) -> str:
    """What is about to run, and what is not like the original."""
    megabytes = sum(table.weight_bytes for table in tables) / 1e6
    return (
        f"{len(tables)} tables of the public DLRM pool, dims 8 to 64, on {dist.get_world_size()} Gloo ranks with one "
        f"thread each; global batch {args.batch_size:,}, {lookups:,} lookups per rank and step.\n"
        f"Scaled down to fit any machine: at most {args.max_rows:,} rows per table ({megabytes:,.0f} MB of weights). "
        "Lookups per sample and their reuse are the pool's."
    )


def plan_and_shard(name: str, tables: list[ShardSpec], args: argparse.Namespace) -> Contestant:
    """Plans with one of the planners and builds the sharded model."""
    world_size = dist.get_world_size()
    topology = Topology(world_size=world_size, local_world_size=world_size, compute_device="cpu")
    chosen: list[ShardingOption] = []

    def keep(options: list[ShardingOption]) -> list[ShardingOption]:
        chosen.extend(options)
        return options

    constraints = {t.name: ParameterConstraints(pooling_factors=[t.pooling_factor]) for t in tables}
    reuse = {t.name: t.reuse_histogram for t in tables if t.reuse_histogram}
    arguments = {
        "topology": topology,
        "batch_size": args.batch_size // world_size,
        "constraints": constraints,
        "callbacks": [keep],
        "debug": False,
    }
    if name == "DreamShard":
        planner = DreamShardPlanner(**arguments, agent=args.agent, seed=args.seed, reuse_histograms=reuse)
    else:
        planner = EmbeddingShardingPlanner(**arguments)
    torch.manual_seed(args.seed)
    model = TinyDLRM(tables, torch.device("meta"))
    dist.barrier()
    start = time.perf_counter()
    plan = planner.collective_plan(model, get_default_sharders(), dist.GroupMember.WORLD)
    plan_s = time.perf_counter() - start
    # One judge for both plans: the agent's prediction. Only rank 0 planned and knows the options.
    judge = LearnedPerfModel(topology, CostSource(args.agent, constraints=constraints, reuse_histograms=reuse))
    predicted = judge.breakdown(chosen) if chosen else None
    trainer = Trainer(model, plan, CPU)
    store = MeasurementStore(record_path(args, name))
    recorder = record_costs(trainer.model, store, steps_per_record=4 * args.rounds)
    return Contestant(name, plan, plan_s, predicted, trainer, recorder)


def record_path(args: argparse.Namespace, name: str) -> Path:
    """Where a contestant's measured costs are appended."""
    return args.out / f"demo_{name.lower()}.jsonl"


def all_ranks(value: float) -> list[float]:
    """The value of every rank."""
    values = [0.0] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def report(contestants: list[Contestant], measured: list[CostBreakdown], train_ms: list[list[float]]) -> str:
    """The comparison as a table."""
    rows: list[list[str]] = [
        [label]
        for label in (
            "planning time, s",
            "shards per rank",
            "kernels per rank, predicted, ms",
            "kernels per rank, measured, ms",
            "embedding step per rank, predicted, ms",
            "embedding step per rank, measured, ms",
            "whole training step per rank, measured, ms",
            "balance (busiest rank's kernels over mean)",
            "loss of rank 0, first and last step",
        )
    ]
    for contestant, cost, train in zip(contestants, measured, train_ms, strict=True):
        kernels = kernels_ms(cost)
        cells = (
            f"{contestant.plan_s:.2f}",
            " / ".join(map(str, count_shards(contestant.plan))),
            per_rank(kernels_ms(contestant.predicted)),
            per_rank(kernels),
            per_rank(contestant.predicted.device_ms),
            per_rank(cost.device_ms),
            per_rank(train),
            f"{kernels.max() / kernels.mean():.3f}",
            f"{contestant.losses[0]:.4f} -> {contestant.losses[-1]:.4f}",
        )
        for row, cell in zip(rows, cells, strict=True):
            row.append(cell)
    steps = [statistics.mean(train) for train in train_ms]
    change = 100 * (steps[1] / steps[0] - 1)
    return f"""{format_table(["", *(c.name for c in contestants)], rows)}

Times are medians of {len(contestants[0].step_ms)} steps, measured inside the running models. All predictions are
the agent's. An embedding step is the kernels and the exchanges with the wait in them, and data-parallel tables, if any;
the whole step also has the dense layers and the exchange of ids, which the predictions include. Both planners know each
table's lookups per sample; DreamShard's also knows their reuse, which TorchRec's has no input for.
With DreamShard's plan a training step takes {abs(change):.1f} % {"less" if change < 0 else "more"} time."""


def kernels_ms(cost: CostBreakdown) -> np.ndarray:
    """Forward and backward kernels of each rank, data-parallel tables included."""
    return cost.compute_ms if cost.background_ms is None else cost.compute_ms + cost.background_ms


def per_rank(values: Iterable[float]) -> str:
    """One number per rank."""
    return " / ".join(f"{value:.1f}" for value in values)


def count_shards(plan: ShardingPlan) -> list[int]:
    """Shards on each rank; a data-parallel table counts on every rank."""
    counts = [0] * dist.get_world_size()
    for module in plan.plan.values():
        for parameter in module.values():
            shards = parameter.sharding_spec.shards if parameter.sharding_spec else ()
            ranks = [shard.placement.rank() for shard in shards] if shards else parameter.ranks
            for rank in ranks:
                counts[rank] += 1
    return counts


def write_results(contestant: Contestant, folder: Path) -> None:
    """Writes a plan as JSON and as a picture of its predicted cost."""
    save_plan(folder / "demo_plan.json", contestant.plan, predicted=contestant.predicted)
    draw_cost(folder / "demo_plan.png", contestant.predicted, title="DreamShard's plan, predicted")


if __name__ == "__main__":
    main()

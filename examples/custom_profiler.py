"""Your own hardware behind the ``Profiler`` protocol: train an agent on it and place tables it has never seen.

    python examples/custom_profiler.py

The device modelled here does not exist: a board with a small, fast buffer in front of slow memory, that gathers rows
while it pools the ones before. Replace ``measure`` by a call into your simulator or your cluster; nothing else changes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from torchrec_dreamshard import CostBreakdown, HardwareSpec, PlacementTask, ShardSpec, TrainConfig, pool, train
from torchrec_dreamshard.baselines import BASELINES

BOARD = HardwareSpec(name="my-board", memory_gb_s=120.0, cache_mb=64.0, intra_host_gb_s=25.0)


class BoardProfiler:
    """What a placement costs on the board, in ms."""

    def measure(self, task: PlacementTask, placement: Sequence[int]) -> CostBreakdown:
        """Costs of each device: kernels overlap gathering with pooling; everyone waits for the largest sender."""
        forward = np.zeros(task.num_devices)
        columns = np.zeros(task.num_devices)
        for device in range(task.num_devices):
            shards = [shard for shard, where in zip(task.shards, placement, strict=True) if where == device]
            gather = sum(self._gather_ms(shard, task.hardware) for shard in shards)
            pooling = sum(1e-9 * shard.batch_size * shard.pooling_factor * shard.dim for shard in shards)
            forward[device] = 0.05 + max(gather, pooling) + 0.2 * min(gather, pooling) if shards else 0.0
            columns[device] = sum(shard.batch_size * shard.output_columns for shard in shards)
        exchange = np.full(task.num_devices, columns.max() * 4 / (task.hardware.intra_host_gb_s * 1e6))
        wait = forward.max() - forward  # the forward exchange starts when the slowest kernel is done
        return CostBreakdown(
            forward_compute_ms=forward,
            forward_comms_ms=exchange + wait,
            backward_comms_ms=exchange,
            backward_compute_ms=2.2 * forward,
        )

    @staticmethod
    def _gather_ms(shard: ShardSpec, hardware: HardwareSpec) -> float:
        hot = min(1.0, hardware.cache_mb * 1e6 / shard.weight_bytes)  # share of the rows that the buffer holds
        row_bytes = max(shard.dim * 4, 64)
        lookups = shard.batch_size * shard.pooling_factor
        return lookups * row_bytes * (1 - 0.9 * hot) / (hardware.memory_gb_s * 1e6)


def main() -> None:
    profiler = BoardProfiler()
    train_pool, test_pool = pool.split(pool.load_public_pool(), seed=0)
    dims = (8, 16, 32, 64)
    tasks = pool.sample_tasks(train_pool, 30, (10, 25), [4], dims=dims, hardware=BOARD, seed=1)
    unseen = pool.sample_tasks(test_pool, 10, (20, 40), [4, 8], dims=dims, hardware=BOARD, seed=2)

    print("training on 100 placements, each measured by BoardProfiler ...")
    # The default config trains longer, for better policies; this one is done within a minute or so.
    config = TrainConfig(num_measurements=100, num_iterations=3, num_updates=10, num_imitations=10)
    agent = train(tasks, profiler, config, seed=0)

    def mean_step_ms(place) -> float:
        return float(np.mean([profiler.measure(task, place(task)).step_ms for task in unseen]))

    print(f"mean step of {len(unseen)} unseen tasks on the board:")
    for name, place in BASELINES.items():
        print(f"  {name:18s} {mean_step_ms(place):7.2f} ms")
    print(f"  {'policy only':18s} {mean_step_ms(lambda task: agent.place(task, refine=False)):7.2f} ms")
    print(f"  {'policy and search':18s} {mean_step_ms(lambda task: agent.place(task, time_budget_s=1.0)):7.2f} ms")


if __name__ == "__main__":
    main()

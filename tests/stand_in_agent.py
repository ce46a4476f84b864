"""A small agent with an additive cost and a greedy placement, for tests of the planner alone."""

from __future__ import annotations

import numpy as np

from torchrec_dreamshard.measurement import CostBreakdown
from torchrec_dreamshard.packing import place_greedily
from torchrec_dreamshard.types import DTYPE_BYTES


def shard_ms(shard, hardware):
    """A launch, and the bytes of the lookups over the bandwidth; unified memory is ten times slower."""
    lookups = shard.batch_size * shard.pooling_factor
    slow = 10.0 if "uvm" in shard.kernel else 1.0
    return 0.01 + slow * lookups * shard.dim * DTYPE_BYTES[shard.weight_dtype] / (hardware.memory_gb_s * 1e6)


class StandInAgent:
    """Places by greedy balance and predicts by addition; counts its calls."""

    metadata = {"trained_on": "nothing"}

    def __init__(self):
        self.num_places = 0

    def place(self, task, *, refine=True, time_budget_s=None, seed=0):
        self.num_places += 1
        return place_greedily(task, [shard_ms(s, task.hardware) for s in task.shards], seed)

    def predict(self, task, placement):
        compute = np.zeros(task.num_devices)
        comms = np.zeros(task.num_devices)
        for shard, device in zip(task.shards, placement, strict=True):
            compute[device] += shard_ms(shard, task.hardware)
            comms[device] += shard.batch_size * shard.output_columns * 4 / (task.hardware.intra_host_gb_s * 1e6)
        comms *= (task.num_devices - 1) / task.num_devices
        return CostBreakdown(
            forward_compute_ms=compute / 3,
            backward_compute_ms=compute * 2 / 3,
            forward_comms_ms=comms,
            backward_comms_ms=comms,
            background_ms=[device.background_ms for device in task.devices],
        )

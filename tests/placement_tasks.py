"""Tasks for tests of placers: random ones, and ones filled tightly around a placement that is known to fit."""

from __future__ import annotations

import numpy as np

from torchrec_dreamshard.types import DeviceSpec, HardwareSpec, PlacementTask, ShardSpec


def random_task(num_shards, num_devices, seed=0, **kwargs):
    rng = np.random.default_rng(seed)
    shards = [
        ShardSpec(
            name=f"s{i}",
            rows=int(np.exp(rng.uniform(5, 14))),
            dim=int(rng.choice([4, 8, 16, 32, 64])),
            pooling_factor=float(np.exp(rng.normal(1, 1.5))),
            batch_size=4096,
        )
        for i in range(num_shards)
    ]
    return PlacementTask.uniform(shards, num_devices, **kwargs)


def planted_task(num_shards, num_devices, fill, seed=0, *, both_memories=False):
    """Every device's capacity is what a hidden placement takes there, over ``fill``."""
    rng = np.random.default_rng(seed)
    task = random_task(num_shards, num_devices, seed)
    hidden = rng.permutation(np.arange(num_shards) % num_devices)
    host = rng.integers(1, 10**8, num_shards) if both_memories else np.zeros(num_shards, dtype=int)
    shards = [
        ShardSpec(
            name=s.name,
            rows=s.rows,
            dim=s.dim,
            pooling_factor=s.pooling_factor,
            hbm_bytes=s.weight_bytes,
            ddr_bytes=int(ddr),
        )
        for s, ddr in zip(task.shards, host, strict=True)
    ]
    devices = [
        DeviceSpec(
            hbm_bytes=int(np.ceil(sum(s.hbm_bytes for s, h in zip(shards, hidden, strict=True) if h == d) / fill)),
            ddr_bytes=int(np.ceil(sum(s.ddr_bytes for s, h in zip(shards, hidden, strict=True) if h == d) / fill)),
        )
        for d in range(num_devices)
    ]
    return PlacementTask(tuple(shards), tuple(devices), HardwareSpec())


def fits(task, placement):
    hbm, ddr = [0] * task.num_devices, [0] * task.num_devices
    for shard, device in zip(task.shards, placement, strict=True):
        hbm[device] += shard.hbm_bytes
        ddr[device] += shard.ddr_bytes
    return all(h <= d.hbm_bytes and m <= d.ddr_bytes for h, m, d in zip(hbm, ddr, task.devices, strict=True))

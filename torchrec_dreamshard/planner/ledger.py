"""Memory and load of devices while a plan is being laid out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from torchrec.distributed.planner.types import (
    PlannerError,
    PlannerErrorType,
    Shard,
    ShardingOption,
    Topology,
)

from torchrec_dreamshard.measurement import FloatArray

MEMORIES = ("HBM", "host memory", "SSD")


def need_of(shard: Shard) -> FloatArray:
    """HBM, host and SSD bytes of a shard."""
    storage = shard.storage
    return np.array([0, 0, 0] if storage is None else [storage.hbm, storage.ddr, storage.ssd], dtype=np.float64)


class Ledger:
    """What is left on each device of a topology, and the load in ms given to it so far."""

    def __init__(self, topology: Topology) -> None:
        self.capacity = np.array(
            [(d.storage.hbm, d.storage.ddr, d.storage.ssd) for d in topology.devices], dtype=np.float64
        )
        self.free = self.capacity.copy()
        self.load_ms = np.zeros(len(self.free))

    def fits(self, shard: Shard, rank: int) -> bool:
        """Whether a shard fits on a device."""
        return bool(np.all(need_of(shard) <= self.free[rank]))

    def put(self, option: ShardingOption, ranks: Sequence[int], shard_ms: Sequence[float]) -> None:
        """Gives an option's shards to ranks.

        Raises:
            PlannerError: one does not fit (names the table, the bytes needed and there).
        """
        for shard, rank, cost in zip(option.shards, ranks, shard_ms, strict=True):
            if not self.fits(shard, rank):
                raise self.no_room(option, shard, [rank])
            self.free[rank] -= need_of(shard)
            self.load_ms[rank] += cost
            shard.rank = int(rank)

    def no_room(self, option: ShardingOption, shard: Shard, ranks: Iterable[int]) -> PlannerError:
        """The error for a shard that fits on none of ``ranks``."""
        ranks = list(ranks)
        need, free = need_of(shard), self.free[ranks]
        lacking = np.maximum(need - free, 0)
        best = int(lacking.sum(axis=1).argmin())
        memory = int(lacking[best].argmax())
        where = f"rank {ranks[best]}" if len(ranks) == 1 else f"any of {len(ranks)} ranks"
        return PlannerError(
            f"table {option.fqn.lstrip('.')} ({option.sharding_type}, {option.compute_kernel}) does not fit "
            f"on {where}: a shard of it needs {int(need[memory]):,} bytes of {MEMORIES[memory]}, "
            f"{int(max(free[best, memory], 0)):,} are left; {int(lacking[best, memory]):,} bytes are missing",
            PlannerErrorType.PARTITION,
        )

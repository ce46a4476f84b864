"""Memory and load of devices while a plan is being laid out."""

from __future__ import annotations

import copy
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

    @property
    def room(self) -> list[tuple[int, int]]:
        """HBM and host bytes left on each device."""
        return [(int(hbm), int(ddr)) for hbm, ddr, _ in self.free]

    def copy(self) -> Ledger:
        """What is left now, apart from this ledger."""
        twin = copy.copy(self)
        twin.free, twin.load_ms = self.free.copy(), self.load_ms.copy()
        return twin

    def restore(self, earlier: Ledger) -> None:
        """Takes back what was put since ``earlier`` was copied."""
        self.free, self.load_ms = earlier.free.copy(), earlier.load_ms.copy()

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
        ranks, need = list(ranks), need_of(shard)
        rank, memory, there, missing = self.shortage(need, ranks)
        where = f"rank {rank}" if len(ranks) == 1 else f"any of {len(ranks)} ranks"
        return PlannerError(
            f"table {option.fqn.lstrip('.')} ({option.sharding_type}, {option.compute_kernel}) does not fit "
            f"on {where}: a shard of it needs {int(need[memory]):,} bytes of {MEMORIES[memory]}, "
            f"{there:,} are left; {missing:,} bytes are missing",
            PlannerErrorType.PARTITION,
        )

    def shortage(self, need: FloatArray, ranks: Sequence[int]) -> tuple[int, int, int, int]:
        """Where a need comes closest to fitting: the rank, the memory that lacks most, bytes left and missing."""
        free = self.free[list(ranks)]
        lacking = np.maximum(need - free, 0)
        best = int(lacking.sum(axis=1).argmin())
        memory = int(lacking[best].argmax())
        return ranks[best], memory, int(max(free[best, memory], 0)), int(lacking[best, memory])

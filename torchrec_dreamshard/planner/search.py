"""The loop of proposing, placing and rating, bounded in time; the best plan so far survives everything."""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
import time
from collections.abc import Sequence
from typing import Any

from torchrec.distributed.planner.proposers import DynamicProgrammingProposer
from torchrec.distributed.planner.types import (
    Enumerator,
    Partitioner,
    PerfModel,
    PlannerError,
    Proposer,
    ShardingOption,
    Storage,
    Topology,
)
from torchrec.distributed.planner.utils import reset_shard_rank

from torchrec_dreamshard.planner.partitioner import DreamShardPartitioner
from torchrec_dreamshard.planner.proposer import DreamShardProposer

logger = logging.getLogger(__name__)

_SHARE_OF_REST = 0.3  # of the time that is left, for one placement


class Search:
    """One search over the proposals of several proposers.

    Args:
        proposers: asked one after the other.
        partitioner: places proposals.
        perf_model: rates plans.
        deadline: on ``time.monotonic``; the first proposal is placed whatever the time.
        num_kept: the best so many different plans are kept.
    """

    def __init__(
        self,
        proposers: Sequence[Proposer],
        partitioner: Partitioner,
        perf_model: PerfModel,
        *,
        deadline: float,
        num_kept: int = 1,
    ) -> None:
        self._proposers = proposers
        self._partitioner = partitioner
        self._perf_model = perf_model
        self._deadline = deadline
        self._num_kept = num_kept
        self.space: list[ShardingOption] = []
        self.num_proposals = 0
        self.num_plans = 0
        self.last_error: PlannerError | None = None
        self.last_proposal: list[ShardingOption] = []
        self.lowest_storage: Storage | None = None
        """Storage of the leanest proposal that could not be placed."""
        self.kept: list[tuple[float, list[ShardingOption]]] = []
        """Rating and copy of the best different plans, the best first; among equals the one found first."""

    def run(
        self, space: list[ShardingOption], enumerator: Enumerator, constraint: Topology
    ) -> list[ShardingOption] | None:
        """The best plan, a copy with ranks; None where nothing could be placed."""
        self.space = space
        for proposer in self._proposers:
            if isinstance(proposer, DreamShardProposer):
                proposer.use(constraint)
            proposer.load(search_space=space, enumerator=enumerator)
            if isinstance(proposer, DreamShardProposer):
                proposer.deadline = self._deadline
            elif isinstance(proposer, DynamicProgrammingProposer):
                proposer._inited = False  # TorchRec 1.8 forgets to: a second search would get no proposal
        for proposer in self._proposers:
            seen: dict[frozenset[int], tuple[bool, list[ShardingOption], float | None]] = {}
            alive = []  # or the ids of what is gone would come back as those of other options
            while not self._late() and (proposal := proposer.propose()):
                key = frozenset(map(id, proposal))
                if key not in seen:
                    self.num_proposals += 1
                    alive.append(proposal)
                    seen[key] = self._evaluate(proposal, constraint)
                partitionable, plan, rating = seen[key]
                proposer.feedback(
                    partitionable=partitionable, plan=plan, perf_rating=rating, storage_constraint=constraint
                )
                reset_shard_rank(proposal)
        return self.kept[0][1] if self.kept else None

    def _late(self) -> bool:
        return self.num_proposals > 0 and time.monotonic() >= self._deadline

    def _evaluate(
        self, proposal: list[ShardingOption], constraint: Topology
    ) -> tuple[bool, list[ShardingOption], float | None]:
        if isinstance(self._partitioner, DreamShardPartitioner):
            left = self._deadline - time.monotonic()
            self._partitioner.time_budget_s = max(0.05, left * _SHARE_OF_REST)
        try:
            plan = self._partitioner.partition(proposal=proposal, storage_constraint=constraint)
            rating = float(self._perf_model.rate(plan=plan))
        except PlannerError as error:
            self.last_error, self.last_proposal = error, snapshot(proposal)
            storage = Storage(0, 0, 0)
            for option in proposal:
                storage += option.total_storage
            if self.lowest_storage is None or storage < self.lowest_storage:
                self.lowest_storage = storage
            return False, proposal, None
        self.num_plans += 1
        if math.isnan(rating):
            raise PlannerError(f"{type(self._perf_model).__name__} rated a plan NaN; ratings must be numbers")
        self._keep(rating, plan)
        return True, plan, rating

    def _keep(self, rating: float, plan: Sequence[ShardingOption]) -> None:
        if len(self.kept) == self._num_kept and rating >= self.kept[-1][0]:
            return
        if any(rating == found and layout(plan) == layout(other) for found, other in self.kept):
            return
        self.kept = sorted([*self.kept, (rating, snapshot(plan))], key=lambda entry: entry[0])[: self._num_kept]
        logger.debug("proposal %d: %.4f ms", self.num_proposals, rating)


def layout(plan: Sequence[ShardingOption]) -> dict[str, tuple[Any, ...]]:
    """What makes two plans the same for a job."""
    return {
        option.fqn: (option.sharding_type, option.compute_kernel, *((s.rank, *s.size) for s in option.shards))
        for option in plan
    }


def snapshot(plan: Sequence[ShardingOption]) -> list[ShardingOption]:
    """A copy of a plan that later proposals cannot touch; estimates are shared."""
    copied = []
    for option in plan:
        twin = copy.copy(option)
        twin.shards = [dataclasses.replace(shard) for shard in option.shards]
        copied.append(twin)
    return copied

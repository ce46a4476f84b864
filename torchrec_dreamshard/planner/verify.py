"""Measuring a few plans on the running job's ranks, and taking the fastest.

A prediction may be wrong for a job's hosts; a few steps of the real thing settle it. Each plan is built and run in a
process group of its own, so that a rank that fails takes no other with it, and is gone before the next is built.
"""

from __future__ import annotations

import dataclasses
import datetime
import gc
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torchrec.distributed.planner.types import PlannerError, PlannerErrorType
from torchrec.distributed.types import ShardingPlan
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

logger = logging.getLogger(__name__)

Step = Callable[[], object]
Build = Callable[[ShardingPlan, dist.ProcessGroup], Step]

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verify:
    """How ``DreamShardPlanner.collective_plan`` measures its best plans.

    Raises:
        ValueError: a number is out of its range.
    """

    num_plans: int = 3
    """Different plans to measure: the best predicted ones, and TorchRec's greedy one where it may compete (no pins, no
    groups, no ``previous``, no parts of the user's)."""
    num_rounds: int = 2
    """Visits of each plan, every second one in reverse order, so that a drift of the machine hits all alike."""
    num_steps: int = 8
    """Measured steps of one visit."""
    num_warmup: int = 2
    """Unmeasured steps before."""
    min_gain: float = 0.02
    """The plan predicted to be best stays unless another one's measured step is shorter by more than this share."""
    timeout_s: float = 60.0
    """For one exchange: a rank that has failed or hangs is given up after it."""
    batches: Sequence[KeyedJaggedTensor] = ()
    """This rank's batches, each with every feature of every table; drawn at random where there are none."""
    build: Build | None = None
    """Given a plan and the ranks' process group, builds a model and returns what runs one step of it. None for the
    tables alone: forward, backward and optimizers."""

    def __post_init__(self) -> None:
        for name, least in (("num_plans", 1), ("num_rounds", 1), ("num_steps", 1), ("num_warmup", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"Verify.{name} must be a whole number of at least {least}, got {value!r}")
        if not self.min_gain >= 0:
            raise ValueError(f"Verify.min_gain must be at least 0, got {self.min_gain}")
        if not self.timeout_s > 0:
            raise ValueError(f"Verify.timeout_s must be above 0, got {self.timeout_s}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredPlan:
    """One plan as predicted and as measured."""

    predicted: float
    """The planner's rating; ms for a planner with learned costs."""
    step_ms: float | None
    """Median over the steps of the slowest rank's time; None where the plan failed."""
    error: str | None = None
    """Why it failed, and on which rank."""
    is_chosen: bool = False

    def __str__(self) -> str:
        outcome = f"failed: {self.error}" if self.step_ms is None else f"measured {self.step_ms:.4f} ms"
        return f"predicted {self.predicted:.4f}, {outcome}{'  <- taken' if self.is_chosen else ''}"


def measure_plans(
    verify: Verify, plans: Sequence[tuple[float, ShardingPlan]], group: dist.ProcessGroup, build: Build
) -> tuple[int, list[MeasuredPlan]]:
    """Runs plans on all ranks of a group, and chooses; a collective call with one outcome on all ranks.

    Args:
        verify: how long, and how sure.
        plans: rating and plan, the best predicted first; the same on every rank.
        group: the ranks.
        build: builds what to run for a plan.

    Returns:
        Index of the chosen plan, and what was measured of all; nothing is, where there is no choice.

    Raises:
        PlannerError: every plan failed (with the first one's error), on all ranks.
    """
    if len(plans) < 2:
        return 0, []
    times: list[list[float]] = [[] for _ in plans]
    errors: list[str | None] = [None] * len(plans)
    for turn in range(verify.num_rounds):
        for index in range(len(plans)) if turn % 2 == 0 else reversed(range(len(plans))):
            if errors[index] is None:
                trial = _Trial(group, verify.timeout_s)
                try:
                    times[index] += trial.run(build, plans[index][1], verify.num_warmup, verify.num_steps)
                except _TrialError as error:
                    errors[index] = str(error)
                finally:
                    trial.close()
    if all(error is not None for error in errors):
        raise PlannerError(
            f"verify could run none of {len(plans)} plans, the first failed on {errors[0]}. Give Verify(batches=) or "
            "Verify(build=) where drawn batches or the tables alone do not suit the model, or plan without verify",
            PlannerErrorType.OTHER,
        )
    medians = [None if error else statistics.median(steps) for steps, error in zip(times, errors, strict=True)]
    chosen = _choose(medians, verify.min_gain)
    measured = [
        MeasuredPlan(predicted=rating, step_ms=median, error=error, is_chosen=index == chosen)
        for index, ((rating, _), median, error) in enumerate(zip(plans, medians, errors, strict=True))
    ]
    if group.rank() == 0:
        for plan in measured:
            logger.info("verified: %s", plan)
    return chosen, measured


def _choose(medians: Sequence[float | None], min_gain: float) -> int:
    """The fastest, or the first where that is not clearly slower."""
    known = [(median, index) for index, median in enumerate(medians) if median is not None]
    first, fastest = known[0], min(known)
    return fastest[1] if fastest[0] < first[0] * (1 - min_gain) else first[1]


class _TrialError(Exception):
    """A plan failed on some rank."""


class _Trial:
    """One plan on the ranks of a group, in a process group of its own.

    When a rank fails, it closes its group, which wakes the ranks that wait for it there (Gloo) or lets them run into
    the short timeout (NCCL, which then ends the process, as in any job); all meet in the outer group. Where that does
    not hold all ranks of the job, it is used itself, and its own timeout counts.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        self._group = group
        self._own: dist.ProcessGroup | None = group
        if group.size() == dist.get_world_size():  # PyTorch makes a new group only with all ranks of the job
            self._own = dist.new_group(timeout=datetime.timedelta(seconds=timeout_s), backend=dist.get_backend(group))
            dist.barrier(group)  # none may fail and close it while another still connects
        self._step: Step | None = None

    def run(self, build: Build, plan: ShardingPlan, num_warmup: int, num_steps: int) -> list[float]:
        """Time of each step in ms, on the slowest rank.

        Raises:
            _TrialError: on all ranks, when it failed on one.
        """
        self._together(lambda: self._build(build, plan))
        self._together(lambda: self._run(num_warmup))
        own = self._together(lambda: self._run(num_steps))
        by_rank: list[Any] = [None] * self._group.size()
        dist.all_gather_object(by_rank, own, group=self._group)
        return [max(step) for step in zip(*by_rank, strict=True)]

    def close(self) -> None:
        """Frees the model and the group."""
        self._step = None
        if self._own is not None and self._own is not self._group:
            dist.destroy_process_group(self._own)
        self._own = None
        gc.collect()  # sharded modules and errors' tracebacks are cyclic, and hold the group's connections
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _build(self, build: Build, plan: ShardingPlan) -> None:
        assert self._own is not None
        self._step = build(plan, self._own)

    def _run(self, count: int) -> list[float]:
        assert self._step is not None
        times = []
        for _ in range(count):
            _synchronize()
            dist.barrier(self._own)
            start = time.perf_counter()
            self._step()
            _synchronize()
            times.append(1e3 * (time.perf_counter() - start))
        return times

    def _together(self, work: Callable[[], _T]) -> _T:
        """Runs ``work`` on every rank; when it fails on one, raises that error on all."""
        failure, result = None, None
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - whatever a plan or a user's model raises
            failure = (time.time(), f"{type(error).__name__}: {error}".partition("\n")[0])
        if failure is not None:
            self.close()
        by_rank: list[Any] = [None] * self._group.size()
        dist.all_gather_object(by_rank, failure, group=self._group)
        failed = [(*found, rank) for rank, found in enumerate(by_rank) if found is not None]
        if failed:  # the first in time is the cause, the others follow from it
            _, text, rank = min(failed)
            raise _TrialError(f"rank {rank}: {text}")
        return result  # type: ignore[return-value]


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()

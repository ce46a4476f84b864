"""Planning on one rank for all: the result, or the error, reaches every rank of any process group at once."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torchrec.distributed.planner.types import PlannerError, PlannerErrorType, Topology

from torchrec_dreamshard.planner.errors import PlannerInputError

_T = TypeVar("_T")


def group_of_job() -> dist.ProcessGroup:
    """The group of all ranks.

    Raises:
        PlannerInputError: this is no distributed job.
    """
    if not dist.is_initialized():
        raise PlannerInputError(
            "no process group is initialised: call torch.distributed.init_process_group first, or plan offline, with a "
            "topology and plan()"
        )
    return cast(dist.ProcessGroup, dist.GroupMember.WORLD)


def check_group(topology: Topology, group: dist.ProcessGroup, sharding_group_size: int | None) -> None:
    """Compares a topology with the process group and the environment of the running job.

    Args:
        topology: the planner's.
        group: the group that plans together.
        sharding_group_size: ranks that share one copy of the tables (``DMPCollection``); None: all of the group.

    Raises:
        PlannerInputError: they do not match (says how).
    """
    size = group.size()
    if sharding_group_size is None and topology.world_size != size:
        raise PlannerInputError(
            f"the topology has a world size of {topology.world_size}, but the process group has {size} ranks; build "
            f"the topology for {size}, or pass sharding_group_size to plan for the groups of a DMPCollection"
        )
    if sharding_group_size is not None and (topology.world_size != sharding_group_size or size % sharding_group_size):
        raise PlannerInputError(
            f"sharding_group_size={sharding_group_size} must be the topology's world size ({topology.world_size}) and "
            f"divide the process group's {size} ranks"
        )
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    expected = min(int(local), topology.world_size) if local.isdigit() else topology.local_world_size
    if size == dist.get_world_size() and topology.local_world_size != expected:
        raise PlannerInputError(
            f"the topology has a local world size of {topology.local_world_size}, but LOCAL_WORLD_SIZE is {local}: "
            f"pass local_world_size={expected} to the topology"
        )
    _check_device(topology, group)


def _check_device(topology: Topology, group: dist.ProcessGroup) -> None:
    backends = str(dist.get_backend_config(group))
    if topology.compute_device == "cuda" and not torch.cuda.is_available():
        raise PlannerInputError(
            "the topology is for cuda, but this job has no CUDA device: use plan() to plan offline for other machines, "
            "or a topology with compute_device='cpu'"
        )
    if topology.compute_device == "cpu" and "gloo" not in backends and "mpi" not in backends:
        raise PlannerInputError(
            f"the topology is for cpu, but the process group's backend ({backends}) has no cpu collectives: use "
            "gloo, or a topology with compute_device='cuda'"
        )


def run_on_first_rank(group: dist.ProcessGroup, check: Callable[[], None] | None, work: Callable[[], _T]) -> _T:
    """Runs ``work`` on the group's first rank and gives every rank its result, or its error.

    Args:
        group: any group that the calling rank belongs to, with or without global rank 0.
        check: run on every rank first; an error on any rank is raised on all.
        work: run on the first rank only.

    Raises:
        Exception: what ``check`` or ``work`` raised, the same on every rank.
    """
    own: BaseException | None = None
    try:
        if check is not None:
            check()
    except Exception as error:  # noqa: BLE001 - passed on to every rank
        own = error
    errors: list[Any] = [None] * group.size()
    dist.all_gather_object(errors, None if own is None else _portable(own), group=group)
    for found in errors:
        if found is not None:
            raise found
    outcome: list[Any] = [None]
    if group.rank() == 0:
        try:
            outcome = [(work(), None)]
        except BaseException as error:  # the other ranks must not wait, whatever ends this one
            own = error
            outcome = [(None, _portable(error))]
    if group.size() > 1:
        dist.broadcast_object_list(outcome, src=dist.get_global_rank(group, 0), group=group)
    result: _T
    result, failure = outcome[0]
    if own is not None:
        raise own
    if failure is not None:
        raise failure
    return result


def _portable(error: BaseException) -> BaseException:
    """The error if it survives a trip between processes, else a ``PlannerError`` with its text."""
    if isinstance(error, Exception):  # an interrupt of one process is none of the others
        try:
            copied: object = pickle.loads(pickle.dumps(error))
            if type(copied) is type(error) and str(copied) == str(error):
                return error
        except Exception:  # noqa: BLE001 - any failure to pickle means the same
            pass
    kind = error.error_type if isinstance(error, PlannerError) else PlannerErrorType.OTHER
    message = f"planning failed on the group's first rank: {type(error).__name__}: {error}"
    portable: BaseException = PlannerError(message, kind)
    return portable

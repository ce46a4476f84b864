"""A loaded plan laid over the tables of the model at hand."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Mapping, Sequence

from torchrec.distributed.planner.types import (
    Enumerator,
    PlanLoader,
    PlannerError,
    PlannerErrorType,
    ShardingOption,
)
from torchrec.distributed.types import ShardingType

logger = logging.getLogger(__name__)

_PLAN_FIELDS = (
    "sharding_type",
    "compute_kernel",
    "partition_by",
    "cache_params",
    "enforce_hbm",
    "stochastic_rounding",
    "bounds_check_mode",
    "output_dtype",
    "key_value_params",
)


def use_loader(
    loader: PlanLoader, space: Sequence[ShardingOption], enumerator: Enumerator
) -> list[ShardingOption] | None:
    """The loader's plan for this model; None where it brings none.

    Raises:
        PlannerError: the plan is not one of this model.
    """
    loaded = loader.load()
    if loaded is None:
        return None
    plan_id = getattr(loader, "get_plan_id", lambda: "")()  # TorchRec calls it, but does not declare it
    logger.info("using the loaded plan %s instead of a search", plan_id)
    return load_options(space, loaded, enumerator)


def load_options(
    space: Sequence[ShardingOption], loaded: Mapping[int, ShardingOption], enumerator: Enumerator
) -> list[ShardingOption]:
    """One option per table with the loaded type, kernel and ranks, on this model's tensors.

    A loaded option need not be in the pruned search space.

    Raises:
        PlannerError: a table is missing in the loaded plan, or has another shape there.
    """
    by_table = {option.fqn: option for option in loaded.values()}
    plan: dict[str, ShardingOption] = {}
    for option in space:
        if option.fqn in plan:
            continue
        saved = by_table.get(option.fqn)
        if saved is None:
            raise PlannerError(
                f"the loaded plan has no table {option.fqn.lstrip('.')}: it was made for another model; plan anew",
                PlannerErrorType.PLAN_LOADING_FAILED,
            )
        if saved.sharding_type == ShardingType.DATA_PARALLEL.value:  # every rank holds the whole table
            saved = copy.copy(saved)
            saved.shards = [
                dataclasses.replace(shard, size=list(option.tensor.shape), offset=[0, 0]) for shard in saved.shards
            ]
        extent = [max(s.offset[axis] + s.size[axis] for s in saved.shards) for axis in (0, 1)]
        if extent != list(option.tensor.shape):
            raise PlannerError(
                f"the loaded plan has table {option.fqn.lstrip('.')} of {extent[0]} rows and {extent[1]} columns, the "
                f"model {list(option.tensor.shape)}: plan anew",
                PlannerErrorType.PLAN_LOADING_FAILED,
            )
        merged = copy.copy(option)
        for field in _PLAN_FIELDS:
            setattr(merged, field, getattr(saved, field))
        merged.shards = [dataclasses.replace(shard) for shard in saved.shards]
        plan[option.fqn] = merged
    lacking = [option for option in plan.values() if any(s.storage is None or s.perf is None for s in option.shards)]
    if lacking:
        enumerator.populate_estimates(lacking)
    return list(plan.values())

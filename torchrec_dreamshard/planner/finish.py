"""From the chosen options to TorchRec's plan: the user's callbacks, then every check that a plan must pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

from torch import nn
from torchrec.distributed.planner.planners import (
    to_sharding_plan,
    validate_compute_kernels,
    validate_modules_inclusion_in_sharding_plan,
)
from torchrec.distributed.planner.types import ParameterConstraints, ShardingOption, Topology
from torchrec.distributed.types import ModuleSharder, ShardingPlan

from torchrec_dreamshard.planner.checks import check_complete
from torchrec_dreamshard.planner.errors import PlannerInputError


def call_back(
    callbacks: Sequence[Callable[[list[ShardingOption]], list[ShardingOption]]], options: list[ShardingOption]
) -> list[ShardingOption]:
    """The options as the user's callbacks leave them.

    Raises:
        PlannerInputError: a callback returns nothing.
    """
    for callback in callbacks:
        options = callback(options)
        if options is None:
            raise PlannerInputError(f"the callback {callback!r} must return the plan's options, it returned None")
    return options


def checked_plan(
    options: list[ShardingOption],
    module: nn.Module,
    sharders: list[ModuleSharder[nn.Module]],
    topology: Topology,
    constraints: Mapping[str, ParameterConstraints] | None,
) -> ShardingPlan:
    """TorchRec's plan of the options.

    Raises:
        PlannerError: a table is missing, or a rank or kernel is none of the topology's.
    """
    check_complete(options, module, sharders, topology, constraints)
    plan = to_sharding_plan(options, topology)
    validate_modules_inclusion_in_sharding_plan(plan, module, sharders)
    validate_compute_kernels(options)
    return cast(ShardingPlan, plan)

"""Checks of what the user gives, and of the finished plan, that TorchRec leaves out.

Each error names the table or module, what was expected and what came. What TorchRec ignores in silence (misspelled
names, subclasses without a sharder) is warned about.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

from torch import nn
from torchrec.distributed.planner.types import (
    Enumerator,
    ParameterConstraints,
    PlannerError,
    PlannerErrorType,
    ShardingOption,
    Topology,
)
from torchrec.distributed.planner.utils import sharder_name
from torchrec.distributed.types import ModuleSharder
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface, EmbeddingCollectionInterface

from torchrec_dreamshard.planner.adapter import shardable_modules, table_configs
from torchrec_dreamshard.planner.costs import check_ranks
from torchrec_dreamshard.planner.errors import PlannerInputError

logger = logging.getLogger(__name__)

_DEFAULT_FACTORS = [1.0]


def check_topology(topology: Topology) -> None:
    """Refuses a world that does not divide into hosts: TorchRec loses the ranks that are left over.

    Raises:
        PlannerInputError: also a ValueError.
    """
    world, local, group = topology.world_size, topology.local_world_size, topology.intra_group_size
    for name, size in (("local_world_size", local), ("local_world_size times pod_size", group)):
        if size < 1 or world % size:
            raise PlannerInputError(
                f"the topology's world size must be a multiple of its {name}, got world size {world} and {size}"
            )


def check_arguments(
    batch_size: int, together: Sequence[Sequence[str]], pins: Mapping[str, int], min_gain: float, world_size: int
) -> None:
    """Refuses what TorchRec would only stumble over while it plans, or read as something else.

    Raises:
        PlannerInputError: also a ValueError.
    """
    if batch_size < 1:
        raise PlannerInputError(f"batch_size must be at least 1 sample per rank, got {batch_size}")
    if any(isinstance(names, str) for names in together):
        raise PlannerInputError(f"together must hold groups of table names, such as [('a', 'b')], got {together!r}")
    if not all(together):
        raise PlannerInputError(f"each group of together must name at least one table, got {together!r}")
    if not 0 <= min_gain <= 1:  # also catches NaN
        raise PlannerInputError(f"min_gain must be a share of the step from 0 to 1, got {min_gain}")
    for name, rank in pins.items():
        if isinstance(rank, bool) or not isinstance(rank, int):
            raise PlannerInputError(f"pins must give each table a rank, an integer, got {rank!r} for table {name}")
        if not 0 <= rank < world_size:
            raise PlannerInputError(f"pins must be ranks from 0 to {world_size - 1}, got {rank} for table {name}")


def check_inputs(
    module: nn.Module,
    sharders: Sequence[ModuleSharder[nn.Module]],
    constraints: Mapping[str, ParameterConstraints] | None,
    names: Mapping[str, Iterable[str]],
    compute_device: str,
) -> None:
    """Checks constraints against the tables they name, and looks for tables that nothing will shard.

    Args:
        module: the model.
        sharders: the sharders in use.
        constraints: by table name.
        names: further tables that the user names, by the argument that names them.
        compute_device: of the topology.

    Raises:
        PlannerInputError: a constraint's lists do not match the table's features.
    """
    features: dict[str, int] = {}
    tables: set[str] = set()
    for _, child, sharder in shardable_modules(module, sharders):
        configs = table_configs(child)
        for name in sharder.shardable_parameters(child):
            tables.add(name)
            if name in configs:
                features[name] = len(configs[name].feature_names)
    for argument, given in {"constraints": constraints or {}, **names}.items():
        unknown = sorted(set(given) - tables)
        if unknown:
            logger.warning("%s name tables that no sharder handles, they have no effect: %s", argument, unknown)
    for name, constraint in sorted((constraints or {}).items()):
        if name in features:
            _check_lengths(name, constraint, features[name])
    if not tables:
        logger.warning("no module of %s has a sharder among those given: the plan is empty", type(module).__name__)
    _warn_left_out(tables, constraints or {}, compute_device)
    _warn_unsharded(module, sharders)


def check_enumerator(enumerator: Enumerator, constraints: Mapping[str, ParameterConstraints] | None) -> None:
    """Warns of constraints that a user's own enumerator does not know."""
    if constraints and not getattr(enumerator, "_constraints", None):
        logger.warning(
            "constraints were given to the planner, but not to the enumerator that it was given, which is what "
            "applies them: they have no effect on the search space: %s",
            sorted(constraints),
        )


def _check_lengths(name: str, constraint: ParameterConstraints, num_features: int) -> None:
    for field in ("pooling_factors", "num_poolings", "batch_sizes"):
        values = getattr(constraint, field)
        if values is None or (field == "pooling_factors" and list(values) == _DEFAULT_FACTORS):
            continue
        if len(values) != num_features:
            raise PlannerInputError(
                f"constraints[{name!r}].{field} must have one value for each of the table's {num_features} features, "
                f"got {len(values)}: {list(values)}"
            )
        if any(not value >= 0 or value == float("inf") for value in values):  # also catches NaN
            raise PlannerInputError(
                f"constraints[{name!r}].{field} must be finite numbers of at least 0, got {list(values)}"
            )


def _warn_left_out(tables: set[str], constraints: Mapping[str, ParameterConstraints], compute_device: str) -> None:
    for name in sorted(tables & set(constraints)):
        group = constraints[name].device_group
        if group and group != compute_device:
            logger.warning(
                "table %s is left out of the plan: its constraint's device_group is %r, the topology is for %r",
                name,
                group,
                compute_device,
            )


def _warn_unsharded(module: nn.Module, sharders: Sequence[ModuleSharder[nn.Module]]) -> None:
    handled = {id(inner) for _, child, _ in shardable_modules(module, sharders) for inner in child.modules()}
    by_name = {sharder_name(sharder.module_type): sharder for sharder in sharders}
    for path, child in module.named_modules():
        collection = isinstance(child, (EmbeddingBagCollectionInterface, EmbeddingCollectionInterface))
        if not collection or id(child) in handled or sharder_name(type(child)) in by_name:
            continue
        base = next((s for s in sharders if isinstance(child, s.module_type)), None)
        why = (
            f"TorchRec matches types exactly, so the sharder of its base {base.module_type.__name__} is not used"
            if base is not None
            else "no sharder for its type was given"
        )
        logger.warning("module %r (%s) will not be sharded: %s", path, type(child).__name__, why)


def check_complete(
    plan: Sequence[ShardingOption],
    module: nn.Module,
    sharders: Sequence[ModuleSharder[nn.Module]],
    topology: Topology,
    constraints: Mapping[str, ParameterConstraints] | None,
) -> None:
    """Checks that every table of every sharded module is in the plan, with ranks of the topology.

    A table that is missing would surface as a KeyError inside ``DistributedModelParallel``.

    Raises:
        PlannerError: names the table.
    """
    planned = {(option.path, option.name) for option in plan}
    for path, child, sharder in shardable_modules(module, sharders):
        for name in sharder.shardable_parameters(child):
            group = constraints[name].device_group if constraints and name in constraints else None
            if group and group != topology.compute_device:
                continue
            if (path, name) not in planned:
                raise PlannerError(
                    f"table {name} of module {path!r} is not in the plan: a callback or a loaded plan left it out",
                    PlannerErrorType.MISSING_MODULE_IN_PLAN,
                )
    for option in plan:
        check_ranks(option, topology.world_size)

"""TorchRec's greedy plan as a rival: measured beside ours, it shows what the learned costs are worth on a host."""

from __future__ import annotations

from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.perf_models import NoopPerfModel
from torchrec.distributed.planner.proposers import GreedyProposer
from torchrec.distributed.planner.types import Enumerator, ShardingOption, Topology

from torchrec_dreamshard.planner.search import Search, layout


def with_rival(
    plans: list[list[ShardingOption]],
    num_kept: int,
    space: list[ShardingOption],
    enumerator: Enumerator,
    constraint: Topology,
    deadline: float,
) -> list[list[ShardingOption]]:
    """The plans, the last of them TorchRec's: its greedy search over the same options, by its own estimates.

    Args:
        plans: ours, the best predicted first.
        num_kept: plans wanted.
        space: the search space.
        enumerator: its maker.
        constraint: the devices with the memory left for tables.
        deadline: on ``time.monotonic``.
    """
    search = Search([GreedyProposer()], GreedyPerfPartitioner(), NoopPerfModel(constraint), deadline=deadline)
    rival = search.run(space, enumerator, constraint)
    if not plans or rival is None or any(layout(plan) == layout(rival) for plan in plans):
        return plans
    return [*plans[: num_kept - 1], rival]

"""The learned step time as TorchRec's ``PerfModel``."""

# TorchRec compares annotated signatures, so annotations here are evaluated and spelt as TorchRec spells them.
# ruff: noqa: UP006, UP035, UP045

from pathlib import Path
from typing import TYPE_CHECKING, List

from torchrec.distributed.planner.types import PerfModel, ShardingOption, Topology

from torchrec_dreamshard.measurement import CostBreakdown
from torchrec_dreamshard.planner.costs import CostSource

if TYPE_CHECKING:
    from torchrec_dreamshard.agent import Agent


class LearnedPerfModel(PerfModel):  # type: ignore[misc]
    """Rates plans by their predicted step. Usable alone inside TorchRec's ``EmbeddingShardingPlanner``.

    Args:
        topology: the devices.
        agent: an agent, a name or path to load, or None for the one shipped for the topology's device.
    """

    def __init__(self, topology: Topology, agent: "Agent | CostSource | str | Path | None" = None) -> None:
        self._topology = topology
        self._source = CostSource.of(agent)

    def rate(self, plan: List[ShardingOption]) -> float:
        """Predicted step of a plan in ms; lower is better.

        Args:
            plan: one option per table; every shard has a rank.

        Raises:
            PlannerError: a rank is missing or unknown, or the prediction is not finite.
        """
        step_ms = self.breakdown(plan).step_ms
        assert step_ms is not None  # PlanCosts.breakdown refuses costs without a step
        return step_ms

    def breakdown(self, plan: List[ShardingOption]) -> CostBreakdown:
        """Predicted cost of a plan, term by term and device by device; arguments and errors as for ``rate``."""
        return self._source.on(self._topology).breakdown(plan)

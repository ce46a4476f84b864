"""DreamShard inside TorchRec: the only part of the package that imports ``torchrec``."""

from torchrec_dreamshard.planner.partitioner import DreamShardPartitioner
from torchrec_dreamshard.planner.perf_model import LearnedPerfModel
from torchrec_dreamshard.planner.plan_file import PlanFileLoader, load_plan, save_plan
from torchrec_dreamshard.planner.planner import DreamShardPlanner
from torchrec_dreamshard.planner.proposer import DreamShardProposer
from torchrec_dreamshard.planner.verify import Verify

__all__ = [
    "DreamShardPartitioner",
    "DreamShardPlanner",
    "DreamShardProposer",
    "LearnedPerfModel",
    "PlanFileLoader",
    "Verify",
    "load_plan",
    "save_plan",
]

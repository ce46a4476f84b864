"""Learned placement of a recommender's embedding tables (DreamShard, arXiv 2210.02023) for TorchRec."""

from torchrec_dreamshard.errors import DreamShardError, InfeasiblePlacementError, MeasurementError
from torchrec_dreamshard.measurement import CostBreakdown, Measurement, Profiler, Provenance
from torchrec_dreamshard.types import DeviceSpec, HardwareSpec, PlacementTask, ShardSpec

__all__ = [
    "CostBreakdown",
    "DeviceSpec",
    "DreamShardError",
    "HardwareSpec",
    "InfeasiblePlacementError",
    "Measurement",
    "MeasurementError",
    "PlacementTask",
    "Profiler",
    "Provenance",
    "ShardSpec",
]

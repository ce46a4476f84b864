"""Learned placement of a recommender's embedding tables (DreamShard, arXiv 2210.02023) for TorchRec.

Importing the package is light: what needs PyTorch or TorchRec is loaded when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from torchrec_dreamshard.errors import DreamShardError, InfeasiblePlacementError, MeasurementError
from torchrec_dreamshard.measurement import CostBreakdown, Measurement, Profiler, Provenance
from torchrec_dreamshard.types import DeviceSpec, HardwareSpec, PlacementTask, ShardSpec

if TYPE_CHECKING:
    from torchrec_dreamshard.agent import Agent
    from torchrec_dreamshard.config import TrainConfig
    from torchrec_dreamshard.planner import (
        DreamShardPartitioner,
        DreamShardPlanner,
        DreamShardProposer,
        LearnedPerfModel,
    )
    from torchrec_dreamshard.training import train

__version__ = "0.1.0"

__all__ = [
    "Agent",
    "CostBreakdown",
    "DeviceSpec",
    "DreamShardError",
    "DreamShardPartitioner",
    "DreamShardPlanner",
    "DreamShardProposer",
    "HardwareSpec",
    "InfeasiblePlacementError",
    "LearnedPerfModel",
    "Measurement",
    "MeasurementError",
    "PlacementTask",
    "Profiler",
    "Provenance",
    "ShardSpec",
    "TrainConfig",
    "train",
]

_LAZY = {
    "Agent": "agent",
    "DreamShardPartitioner": "planner",
    "DreamShardPlanner": "planner",
    "DreamShardProposer": "planner",
    "LearnedPerfModel": "planner",
    "TrainConfig": "config",
    "train": "training",
}
"""Names loaded on first use, with the module that holds each."""

_HOST_PACKAGES = ("torchrec", "fbgemm_gpu", "tensordict", "torchmetrics", "pyre_extensions")


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _HOST_PACKAGES:
            raise
        raise ImportError(
            f"{name} needs TorchRec, but {error.name} is not installed: with an NVIDIA GPU run "
            "pip install 'torchrec_dreamshard[cuda]', without one pip install 'torchrec_dreamshard[cpu]' "
            "and pip install --no-deps torchrec==1.8.0",
            name=error.name,
        ) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

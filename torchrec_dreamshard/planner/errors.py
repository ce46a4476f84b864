"""Errors of the planner that TorchRec has no class for."""

from __future__ import annotations

from torchrec.distributed.planner.types import PlannerError, PlannerErrorType


class PlannerInputError(PlannerError, ValueError):  # type: ignore[misc]
    """Input that no plan can be made from: a ``PlannerError`` of type ``INPUT_VALIDATION`` and a ``ValueError``."""

    def __init__(self, message: str, error_type: PlannerErrorType = PlannerErrorType.INPUT_VALIDATION) -> None:
        super().__init__(message, error_type)

"""Errors that the package raises on purpose."""

from __future__ import annotations


class DreamShardError(Exception):
    """Base class of the errors that this package raises on purpose."""


class MeasurementError(DreamShardError):
    """A placement could not be measured (out of memory, a dead rank, ...)."""


class InfeasiblePlacementError(DreamShardError, ValueError):
    """No placement fits into the devices' memory.

    Attributes:
        shard: name of the shard that cannot be placed.
        missing_bytes: how many bytes more would be needed to place it.
    """

    def __init__(self, message: str, *, shard: str = "", missing_bytes: int = 0) -> None:
        super().__init__(message)
        self.shard = shard
        self.missing_bytes = missing_bytes

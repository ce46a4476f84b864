"""What a placement costs: the records of measuring, and the protocol of whoever measures.

The four terms follow DreamShard (arXiv 2210.02023, section 3): the step of a device is forward compute, forward
exchange, backward exchange and backward compute, and the overall cost is the slowest device's sum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from torchrec_dreamshard.types import PlacementTask
from torchrec_dreamshard.validation import invalid, known_fields, number

FloatArray = npt.NDArray[np.float64]

TERMS = ("forward_compute_ms", "forward_comms_ms", "backward_comms_ms", "backward_compute_ms")
"""The four terms of a step, in the order in which they happen; this order holds everywhere in the package."""


@dataclass(frozen=True, eq=False)
class CostBreakdown:
    """Cost of one placement in ms.

    Each term is a read-only array of length D, or None when it is not known. The overall cost follows the
    paper: the largest sum of a device's terms, with what the device carries anyway.
    """

    forward_compute_ms: FloatArray | None = None
    forward_comms_ms: FloatArray | None = None
    """Forward exchange, including the wait for the slowest sender."""
    backward_comms_ms: FloatArray | None = None
    backward_compute_ms: FloatArray | None = None
    step_ms: float | None = None
    """Overall cost; derived when all four terms are known and it is not given, else None."""
    compute_ms: FloatArray | None = None
    """Forward plus backward compute, for sources that cannot tell them apart; derived when both are known."""
    background_ms: FloatArray | None = None
    """Load that the devices carry anyway, part of ``step_ms``; None is zero."""
    step_std_ms: float | None = None
    """Standard deviation of ``step_ms``, where the source knows it (an ensemble, repeats)."""

    def __post_init__(self) -> None:
        length: int | None = None
        for name in (*TERMS, "compute_ms", "background_ms"):
            value = getattr(self, name)
            if value is None:
                continue
            try:
                array = np.array(value, dtype=np.float64)
            except (TypeError, ValueError):
                raise invalid("CostBreakdown", name, value, "a sequence of numbers, one per device") from None
            if array.ndim != 1 or not np.all(np.isfinite(array)) or np.any(array < 0):
                raise invalid(
                    "CostBreakdown", name, value, "a sequence of finite numbers of at least 0, one per device"
                )
            if length not in (None, len(array)):
                raise invalid("CostBreakdown", name, value, f"of length {length} like the terms before it")
            length = len(array)
            array.flags.writeable = False
            object.__setattr__(self, name, array)
        forward, backward = self.forward_compute_ms, self.backward_compute_ms
        if self.compute_ms is None and forward is not None and backward is not None:
            object.__setattr__(self, "compute_ms", forward + backward)
        for name in ("step_ms", "step_std_ms"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, number("CostBreakdown", name, getattr(self, name)))
        device_ms = self.device_ms
        if self.step_ms is None and device_ms is not None:
            object.__setattr__(self, "step_ms", float(device_ms.max()))
        if length is None and self.step_ms is None:
            raise ValueError("CostBreakdown must know at least one term or step_ms, got nothing")

    @property
    def device_ms(self) -> FloatArray | None:
        """Sum of all terms and the background per device; None while a term is unknown."""
        comms = (self.forward_comms_ms, self.backward_comms_ms)
        if self.compute_ms is None or comms[0] is None or comms[1] is None:
            return None
        total = self.compute_ms + comms[0] + comms[1]
        return total if self.background_ms is None else total + self.background_ms

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CostBreakdown) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; unknown terms are left out."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in values.items() if v is not None}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CostBreakdown:
        """Inverse of ``to_dict``."""
        return cls(**known_fields(cls, values))


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Where a measurement comes from."""

    host: str = ""
    device: str = ""
    """Model of the device, for example "NVIDIA H200" or "AMD EPYC"."""
    simulated: bool = False
    """True when a model, not hardware, gave the cost."""
    profiler: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    time: str = ""
    """ISO 8601, UTC."""
    repeats: int = 0
    details: Mapping[str, Any] = field(default_factory=dict)
    """What else the profiler wants kept (all repeats, threads, clocks)."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; defaults are left out."""
        return {k: v for k, v in dataclasses.asdict(self).items() if v}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Provenance:
        """Inverse of ``to_dict``."""
        return cls(**known_fields(cls, values))


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One record of the store: a placement with its measured cost, or with the error that prevented it."""

    task: PlacementTask
    placement: tuple[int, ...]
    cost: CostBreakdown | None = None
    error: str | None = None
    provenance: Provenance = Provenance()

    def __post_init__(self) -> None:
        object.__setattr__(self, "placement", self.task.check_placement(self.placement))
        if self.cost is None and self.error is None:
            raise ValueError("Measurement must have a cost or an error, got neither")
        if self.cost is not None and not isinstance(self.cost, CostBreakdown):
            raise invalid("Measurement", "cost", self.cost, "a CostBreakdown")
        if self.cost is not None:
            for name in (*TERMS, "compute_ms", "background_ms"):
                array = getattr(self.cost, name)
                if array is not None and len(array) != self.task.num_devices:
                    raise invalid(
                        "Measurement", f"cost.{name}", len(array), f"of length {self.task.num_devices}, one per device"
                    )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        out: dict[str, Any] = {"task": self.task.to_dict(), "placement": list(self.placement)}
        if self.cost is not None:
            out["cost"] = self.cost.to_dict()
        if self.error is not None:
            out["error"] = self.error
        out["provenance"] = self.provenance.to_dict()
        return out

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Measurement:
        """Inverse of ``to_dict``."""
        known = known_fields(cls, values)
        return cls(
            task=PlacementTask.from_dict(known["task"]),
            placement=tuple(known["placement"]),
            cost=CostBreakdown.from_dict(known["cost"]) if known.get("cost") is not None else None,
            error=known.get("error"),
            provenance=Provenance.from_dict(known.get("provenance", {})),
        )


@runtime_checkable
class Profiler(Protocol):
    """Anything that can tell what a placement costs: a cluster, a simulator, a lookup table."""

    def measure(self, task: PlacementTask, placement: Sequence[int]) -> CostBreakdown:
        """Measures one placement.

        Args:
            task: the task.
            placement: S device indices.

        Raises:
            MeasurementError: the placement cannot be measured.
        """
        ...

"""Checks shared by the records: each names the record, the field, the value and the rule."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any


def invalid(record: str, name: str, value: object, rule: str) -> ValueError:
    """The error for a bad value, for the caller to raise."""
    return ValueError(f"{record}.{name} must be {rule}, got {value!r}")


def integer(record: str, name: str, value: Any, minimum: int) -> int:
    """``value`` as an int of at least ``minimum``; bools and fractions are refused."""
    rule = f"an integer of at least {minimum}"
    if isinstance(value, bool):
        raise invalid(record, name, value, rule)
    try:
        result = operator.index(value)
    except TypeError:
        if not (isinstance(value, float) and value.is_integer()):
            raise invalid(record, name, value, rule) from None
        result = int(value)
    if result < minimum:
        raise invalid(record, name, value, rule)
    return result


def number(record: str, name: str, value: Any, *, minimum: float = 0.0, exclusive: bool = False) -> float:
    """``value`` as a finite float of at least (or above) ``minimum``."""
    rule = f"a finite number {'above' if exclusive else 'of at least'} {minimum:g}"
    try:
        result = float(value)
    except (TypeError, ValueError):
        raise invalid(record, name, value, rule) from None
    if (
        isinstance(value, (bool, str))
        or not math.isfinite(result)
        or result < minimum
        or (exclusive and result == minimum)
    ):
        raise invalid(record, name, value, rule)
    return result


def choice(record: str, name: str, value: Any, choices: Sequence[str]) -> str:
    """``value`` if it is one of ``choices``."""
    if value not in choices:
        raise invalid(record, name, value, "one of " + ", ".join(choices))
    return str(value)


def known_fields(cls: type, values: Any) -> dict[str, Any]:
    """``values`` as a dict after checking that ``cls`` has every field and lacks none that it needs."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{cls.__name__} must be a JSON object, got {type(values).__name__}")
    fields = [f for f in dataclasses.fields(cls) if f.init]
    known = {f.name for f in fields}
    unknown = sorted(set(values) - known)
    if unknown:
        raise ValueError(f"{cls.__name__} has unknown fields {unknown}; known are {sorted(known)}")
    needed = {f.name for f in fields if f.default is f.default_factory is dataclasses.MISSING}
    missing = sorted(needed - set(values))
    if missing:
        raise ValueError(f"{cls.__name__} lacks the fields {missing}")
    return dict(values)

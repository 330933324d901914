"""Results of jobs as plain values for JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import datetime, timedelta
from enum import Enum
from typing import Any, cast


def to_plain(value: object) -> Any:
    """Return a dictionary for a dataclass, recursively: instants in ISO 8601, durations in seconds, enums by name.

    ``msgspec.to_builtins`` is not used, because it writes UTC as ``Z`` and durations as ``PT1S``. Readers of the JSON
    expect ``+00:00`` and numbers.
    """
    match value:
        case Mapping():
            entries = cast("Mapping[object, object]", value)
            return {_leaf(key): to_plain(each) for key, each in entries.items()}
        case Sequence() if not isinstance(value, str):
            return [to_plain(each) for each in cast("Sequence[object]", value)]
        case _ if is_dataclass(value):
            return {each.name: to_plain(getattr(value, each.name)) for each in fields(value)}
        case _:
            return _leaf(value)


def _leaf(value: object) -> str | float | None:
    match value:
        case datetime():
            return value.isoformat()
        case timedelta():
            return value.total_seconds()
        case Enum():
            return value.name.lower()
        case None | str() | int() | float():
            return value
        case _:
            raise TypeError(f"{type(value).__name__} has no form in JSON")

"""Columns of times as instants, as :func:`postdate.pipeline.local_time.add_time` makes them on Spark."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# The stubs of Arrow make arrays generic in a type that is known only at run time.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, cast

import pyarrow as pa

from postdate.errors import PipelineError
from postdate.pipeline.clock_times import ZoneTimes, resolve_clock_times
from postdate.pipeline.local.values import spark_name
from postdate.pipeline.rows import CALENDAR, INSTANT, pc
from postdate.pipeline.time_texts import TimeText, read_time

_DAY_MICROSECONDS: Final = 86_400_000_000
_read_time = lru_cache(maxsize=10_000)(read_time)
"""Many rows of a table have the same time, or the same midnight."""


@dataclass(slots=True)
class Times:
    """The times of a column, each list with one value a row.

    Args:
        instants: microseconds since 1970; ``None`` without a time or with a problem.
        problems: code, or ``None``; see :func:`postdate.pipeline.local_time.add_time`.
        wall_times: clock time and zone of a time without an offset.
    """

    instants: list[int | None]
    problems: list[str | None] = field(default_factory=list[str | None])
    wall_times: list[str | None] = field(default_factory=list[str | None])


def no_times(count: int) -> Times:
    return Times([None] * count, [None] * count, [None] * count)


def check_time_type(kind: pa.DataType) -> None:
    """Raise PipelineError if a column of this type cannot have times."""
    if not (pa.types.is_timestamp(kind) or pa.types.is_date32(kind) or pa.types.is_string(kind)):
        raise PipelineError(f"a time must be a timestamp, a date or a text, not {spark_name(kind)}")


def read_times(column: Any, texts: Sequence[str | None], zone_times: ZoneTimes | None) -> Times:
    """Return the instants of a column.

    Args:
        column: instants, clock times, dates (their midnight) or texts.
        texts: the texts, if it is a column of texts.
        zone_times: without it, a time without an offset is a problem.
    """
    count, kind = len(column), column.type
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        times = Times(column.cast(pa.int64()).to_pylist(), [None] * count, [None] * count)
    elif pa.types.is_string(kind):
        parsed = [None if text is None else _read_time(text) for text in texts]
        times = no_times(count)
        clock_times = list[int | None]()
        for position, (text, time) in enumerate(zip(texts, parsed, strict=True)):
            if time is None and text is not None:
                times.problems[position] = "malformed_time"
            elif time is not None and time.has_offset:
                times.instants[position] = time.microseconds
            clock_times.append(_clock_time_of(time))
        _add_clock_times(times, clock_times, zone_times)
    else:
        micros = column.cast(pa.int64()) if pa.types.is_timestamp(kind) else column.cast(pa.int32()).cast(pa.int64())
        factor = 1 if pa.types.is_timestamp(kind) else _DAY_MICROSECONDS
        values = cast("list[int | None]", micros.to_pylist())
        times = no_times(count)
        clock_times = [None if value is None else value * factor for value in values]
        outside = [value is not None and not CALENDAR[0] <= value <= CALENDAR[1] for value in clock_times]
        inside = [None if is_outside else value for value, is_outside in zip(clock_times, outside, strict=True)]
        _add_clock_times(times, inside, zone_times)
        for position, is_outside in enumerate(outside):
            if is_outside:
                times.problems[position] = "time_out_of_range"
    for position, instant in enumerate(times.instants):
        if instant is not None and not CALENDAR[0] <= instant <= CALENDAR[1]:
            times.instants[position], times.problems[position] = None, "time_out_of_range"
    return times


def _clock_time_of(time: TimeText | None) -> int | None:
    return None if time is None or time.has_offset else time.microseconds


def _add_clock_times(times: Times, clock_times: Sequence[int | None], zone_times: ZoneTimes | None) -> None:
    """Add the instants at which clocks showed some times, or the problems with them."""
    positions = [position for position, clock_time in enumerate(clock_times) if clock_time is not None]
    if not positions:
        return
    if zone_times is None:
        for position in positions:
            times.problems[position] = "time_without_zone"
        return
    values = pa.array([clock_times[position] for position in positions], pa.int64()).cast(INSTANT)
    resolved = cast("Any", resolve_clock_times(values, zone_times))
    instants = pc.cast(resolved.field("instant"), pa.int64()).to_pylist()
    problems, wall_times = (resolved.field(name).to_pylist() for name in ("problem", "wall_time"))
    for position, *row in zip(positions, instants, problems, wall_times, strict=True):
        times.instants[position], times.problems[position], times.wall_times[position] = row

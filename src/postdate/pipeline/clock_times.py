"""Clock times: times without an offset from UTC, and the instants at which clocks show them.

In spring an hour of clock times never occurs, in autumn an hour of clock times occurs twice. Clock times become
instants by the rules of Python, which services of a store use as well.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# The stubs of Arrow make arrays generic in a type that is known only at run time.

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
import pyarrow as pa

from postdate.core.zones import offset_intervals, rules_of
from postdate.errors import InvalidTimestamp, PipelineError
from postdate.pipeline.rows import INSTANT, pc

DAY_SECONDS: Final = 86_400


class Ambiguous(enum.Enum):
    """How to read a clock time that occurs twice."""

    EARLIER = "earlier"
    LATER = "later"
    REJECT = "reject"


class Nonexistent(enum.Enum):
    """How to read a clock time that does not occur.

    ``FORWARD``: the instant is as long after the beginning of the gap as the clock time says. 02:30 becomes 03:30 if
    clocks go from 2 to 3.
    """

    FORWARD = "forward"
    REJECT = "reject"


@dataclass(frozen=True, slots=True)
class LocalTimes:
    """How to read times without an offset.

    Args:
        zone: name of a time zone, for example ``Europe/Paris``.
        ambiguous: by default the first of the two instants.
        nonexistent: by default the row is set aside with that reason.

    Raises:
        PipelineError: there is no such zone.
    """

    zone: str
    ambiguous: Ambiguous = Ambiguous.EARLIER
    nonexistent: Nonexistent = Nonexistent.REJECT

    def __post_init__(self) -> None:
        try:
            rules_of(self.zone)
        except InvalidTimestamp as error:
            raise PipelineError(str(error)) from error


@dataclass(frozen=True, slots=True)
class ZoneTimes:
    """:class:`LocalTimes` with the rules of the zone, which are the same on all executors.

    Args:
        local_times: how to read clock times.
        rules: a file in the format TZif.
    """

    local_times: LocalTimes
    rules: bytes


def resolve_clock_times(clock_times: pa.Array[Any], zone_times: ZoneTimes) -> pa.Array[Any]:
    """Return instant, problem and wall time for each clock time, which is stored as a UTC instant. Nulls stay null.

    The instants are those of :mod:`zoneinfo`: with ``fold=0``, or with ``fold=1`` for the later of two instants.
    """
    local_times, count = zone_times.local_times, len(clock_times)
    micros: Any = np.asarray(pc.fill_null(pc.cast(clock_times, pa.int64()), 0))
    seconds, years = np.floor_divide(micros, 1_000_000), micros.astype("datetime64[us]").astype("datetime64[Y]")
    first, second = np.zeros(count, np.int64), np.zeros(count, np.int64)
    for year in np.unique(years):
        rows = years == year
        number = min(max(int(year.astype(np.int64)) + 1970, 1), 9_999)  # Other years are refused later.
        offsets, first_changes, second_changes = _year_offsets(zone_times.rules, number)
        first[rows] = offsets[np.searchsorted(first_changes, seconds[rows], side="right")]
        second[rows] = offsets[np.searchsorted(second_changes, seconds[rows], side="right")]
    is_ambiguous, is_missing = first > second, first < second
    problems = np.full(count, None, object)
    if local_times.ambiguous is Ambiguous.REJECT:
        problems[is_ambiguous] = "ambiguous_local_time"
    if local_times.nonexistent is Nonexistent.REJECT:
        problems[is_missing] = "nonexistent_local_time"
    is_second = is_ambiguous & (local_times.ambiguous is Ambiguous.LATER)
    instants = micros - np.where(is_second, second, first) * 1_000_000
    no_instant = pc.or_(clock_times.is_null(), pa.array(problems != None))  # noqa: E711 - an array
    texts = pa.array(np.datetime_as_string(micros.astype("datetime64[us]")).astype(object), pa.string())
    suffixes = pa.array(np.where(is_second, ";fold=1 ", " ").astype(object), pa.string())
    whole = pc.replace_substring_regex(texts, r"\.000000$", "")
    columns: dict[str, Any] = {
        "instant": pa.array(instants, pa.int64()).cast(INSTANT),
        "problem": pa.array(problems, pa.string()),
        "wall_time": pc.binary_join_element_wise(whole, suffixes, local_times.zone, ""),
    }
    for name, hidden in (("instant", no_instant), ("problem", clock_times.is_null()), ("wall_time", no_instant)):
        columns[name] = pc.if_else(hidden, pa.scalar(None, columns[name].type), columns[name])
    return pa.StructArray.from_arrays([*columns.values()], names=[*columns])


@lru_cache(maxsize=20_000)
def _year_offsets(rules: bytes, year: int) -> tuple[Any, Any, Any]:
    """Return the offsets in and around a year, and the clock times, in seconds, at which the next offset applies.

    The first array of clock times is for ``fold=0``, the second for ``fold=1``. Between the two, clocks show a time
    twice or never.
    """
    intervals = [*_intervals_of(rules, year)]
    offsets = np.array([offset for _, _, offset in intervals], np.int64)
    changes = np.array([begin for begin, _, _ in intervals[1:]], np.int64)
    before, after = offsets[:-1], offsets[1:]
    return offsets, changes + np.maximum(before, after), changes + np.minimum(before, after)


def _intervals_of(rules: bytes, year: int) -> Iterator[tuple[int, int, int]]:
    start, end = (int(np.datetime64(f"{each:04}", "s").astype(np.int64)) for each in (year, year + 1))
    for interval in offset_intervals(rules, start - 2 * DAY_SECONDS):
        if interval[0] > end + 2 * DAY_SECONDS:
            return
        yield interval

"""Windows: times of day in which messages may be delivered, by the clocks of a zone. Source: ADR 34, 42."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Final, Self

from postdate.clock import LATEST, later, nearest_instant, to_microseconds
from postdate.core.zones import offset_intervals, rules_of
from postdate.errors import InvalidTimestamp

_DAYS: Final = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_WINDOW: Final = re.compile(r"(?:(?P<days>[a-z,-]+) )?(?P<begin>\d\d:\d\d)-(?P<end>\d\d:\d\d) (?P<zone>\S+)", re.ASCII)
_SECOND: Final = 1_000_000
_MINUTE: Final = 60 * _SECOND
_DAY: Final = 24 * 60 * _MINUTE
_FIRST_WEEKDAY: Final = 3
"""1 January 1970 was a Thursday."""

_SLICE: Final = timedelta(days=28)
"""A longer spread is computed in slices of this length: the open hours of a week more or less do not matter then."""


@dataclass(frozen=True, slots=True)
class Window:
    """A time of day, of every day or of some days of the week, by the clocks of a zone.

    It is open exactly when the clocks show a time within it. So when clocks are put forward it is shorter or does not
    open, and when they are put back it is longer or opens twice.
    """

    days: frozenset[int]
    """The days on which it begins; 0 is Monday."""
    start_minute: int
    """Minutes after midnight."""
    end_minute: int
    """Minutes after midnight. If it is not after ``start_minute``, it is on the next day."""
    zone: str

    @classmethod
    def parse_and_check_zone(cls, text: str) -> Self:
        """Return the window of a text such as ``mon-fri 09:00-17:00 Europe/Paris``; without days it opens every day.

        Raises:
            InvalidTimestamp: the text has another form, or there is no such zone.
        """
        window = cls.parse(text)
        rules_of(window.zone)
        return window

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the window of a text, even if the zone files of this machine do not have its zone.

        Raises:
            InvalidTimestamp: the text has another form.
        """
        return cls(*_parse(str(text)))  # str: callers without types

    def next_opening(self, now: datetime) -> datetime:
        """Return ``now`` if the window is open then, else the next instant at which it opens, UTC.

        Raises:
            InvalidTimestamp: the zone files of this machine do not have the zone, or not any more.
        """
        opening, _ = next(self._open_parts(to_microseconds(now)), (None, 0))
        return LATEST if opening is None else nearest_instant(opening)

    def instant_within(self, begin: datetime, span: timedelta, share: float) -> datetime:
        """Return an instant at which the window is open, at most ``span`` after it is first open at or after ``begin``.

        Args:
            begin: aware, UTC.
            span: zero or more.
            share: from 0 to less than 1: the part of the open time of ``span`` that lies before the instant.
        """
        opening = self.next_opening(begin)
        length = later(opening, span) - opening
        if length > _SLICE:
            number, share = divmod(share * (length / _SLICE), 1)
            slice_start = opening + number * _SLICE
            parts = self._open_parts_between(slice_start, min(later(slice_start, _SLICE), opening + length))
            parts = parts or self._open_parts_between(opening, opening + _SLICE)  # the last slice is short
        else:
            parts = self._open_parts_between(opening, opening + length)
        ahead = int(share * sum(end - start for start, end in parts))
        for start, end in parts:
            if ahead < end - start:
                return nearest_instant(start + ahead)
            ahead -= end - start
        return opening

    def _open_parts_between(self, begin: datetime, end: datetime) -> list[tuple[int, int]]:
        parts, last = list[tuple[int, int]](), to_microseconds(end)
        for start, stop in self._open_parts(to_microseconds(begin)):
            if start >= last:
                break
            parts.append((start, min(stop, last)))
        return parts

    def _open_parts(self, not_before: int) -> Iterator[tuple[int, int]]:
        """Yield the times in which it is open, from ``not_before`` on, in microseconds since 1970 UTC.

        Between two changes of the clocks, local time and UTC differ by a constant. So each part is the intersection of
        the window of one day with such a stretch. Adjacent parts may touch each other.
        """
        length = (self.end_minute - self.start_minute) * _MINUTE + (0 if self.start_minute < self.end_minute else _DAY)
        for start, end, offset in offset_intervals(rules_of(self.zone), not_before // _SECOND):
            ahead = offset * _SECOND
            first, last = max(start * _SECOND, not_before) + ahead, end * _SECOND + ahead  # as clocks show them
            for day in range(first // _DAY - 2, last // _DAY + 1):
                opening = day * _DAY + self.start_minute * _MINUTE
                interval = max(opening, first), min(opening + length, last)
                if (day + _FIRST_WEEKDAY) % 7 in self.days and interval[0] < interval[1]:
                    yield interval[0] - ahead, interval[1] - ahead


@lru_cache(maxsize=1_000)
def _parse(text: str) -> tuple[frozenset[int], int, int, str]:
    """Return the days, the minutes of begin and end, and the zone that a text names."""
    error_text = f"{text!r} is not a window of time, such as 'mon-fri 09:00-17:00 Europe/Paris'"
    match = _WINDOW.fullmatch(text)
    if match is None:
        raise InvalidTimestamp(error_text)
    days = set[int]()
    for part in (match["days"] or "mon-sun").split(","):
        names = part.split("-")
        if len(names) > 2 or not set(names) <= set(_DAYS):
            raise InvalidTimestamp(f"{error_text}: days are {', '.join(_DAYS)}")
        begin, end = _DAYS.index(names[0]), _DAYS.index(names[-1])
        days |= {day % 7 for day in range(begin, end + (1 if begin <= end else 8))}
    return frozenset(days), _minutes(match["begin"], error_text), _minutes(match["end"], error_text), match["zone"]


def _minutes(text: str, error_text: str) -> int:
    minutes = int(text[:2]) * 60 + int(text[3:])
    if int(text[3:]) > 59 or minutes > 24 * 60:
        raise InvalidTimestamp(f"{error_text}: {text} is not a time of day")
    return minutes

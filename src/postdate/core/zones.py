"""Rules of time zones: the files that they are read from, and the changes of clocks. Source: ADR 33, 42."""

from __future__ import annotations

import logging
import struct
import zoneinfo
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from typing import Final
from zoneinfo import ZoneInfo

import tzdata

from postdate.clock import SystemClock
from postdate.errors import InvalidTimestamp

SAME_FOR_SECONDS: Final = 60
"""The time for which zone files are not read again."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_HOUR: Final = 3_600
_LAST_YEAR: Final = 9_999
_CALENDAR_END: Final = 253_402_300_800
"""The end of the calendar, in seconds since 1970 UTC."""

_FIRST_ASKED, _LAST_ASKED = -62_135_596_800 + 48 * _HOUR, _CALENDAR_END - 48 * _HOUR
"""Instants nearer to the ends of the calendar are not computed: local time may be in a year that Python lacks."""

DAMAGED: Final = ValueError, EOFError, IndexError, struct.error
"""Raised by the standard library for a file that is not, or no longer, in the format TZif."""

log = logging.getLogger("postdate.zones")

# --- files ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ZoneFiles:
    """One of the sets of zone files of this machine.

    Args:
        folder: a folder of the system; ``None``: the files of the package ``tzdata``.
        version: such as ``2026b``; empty if the files do not state it.
    """

    folder: Path | None
    version: str

    def __str__(self) -> str:
        folder_text = "the package tzdata" if self.folder is None else str(self.folder)
        return f"{self.version or 'an unknown version'} in {folder_text}"

    def read(self, zone: str) -> bytes | None:
        """Return the rules of a zone; ``None`` if these files do not have it."""
        try:
            if self.folder is not None:
                return (self.folder / zone).read_bytes()
            return files("tzdata").joinpath("zoneinfo", *zone.split("/")).read_bytes()
        except OSError:
            return None


@dataclass(frozen=True, slots=True, eq=False)
class ZoneSource:
    """The source from which a process reads the rules of zones. Each source has a cache of its own.

    Args:
        files: returns the sets of zone files; the first set that has a zone is used.
        seconds: returns monotonic seconds, for :data:`SAME_FOR_SECONDS`.
    """

    files: Callable[[], list[ZoneFiles]]
    seconds: Callable[[], float]


def zone_files() -> list[ZoneFiles]:
    """Return the sets of zone files that this process reads; the first set that has a zone is used."""
    return SOURCE.get().files()


def _files_of_machine() -> list[ZoneFiles]:
    """Return the sets of zone files of this machine, in the order of their use.

    The newest files are first. If the first folder of the system does not state its version, it is before all others:
    an administrator may have chosen it.
    """
    system = [ZoneFiles(folder, _version_in(folder)) for folder in map(Path, zoneinfo.TZPATH) if folder.is_dir()]
    sets = [*system, ZoneFiles(None, tzdata.IANA_VERSION)]
    unversioned_files = [sets.pop(0)] if not sets[0].version else []
    return unversioned_files + sorted(sets, key=lambda each: each.version, reverse=True)


_MACHINE: Final = ZoneSource(_files_of_machine, SystemClock().monotonic)

SOURCE: Final = ContextVar("zone_source", default=_MACHINE)
"""The source in use: the files of this machine. A simulated process sets another one, to get new files at its own time.
"""


def _version_in(folder: Path) -> str:
    with suppress(OSError, UnicodeDecodeError), (folder / "tzdata.zi").open(encoding="ascii") as file:  # Linux
        first_line = file.readline()
        if first_line.startswith("# version "):
            return first_line.removeprefix("# version ").strip()
    with suppress(OSError, UnicodeDecodeError):  # macOS, BSD
        return (folder / "+VERSION").read_text(encoding="ascii").strip()
    return ""


@dataclass(frozen=True, slots=True)
class ZoneRules:
    """The rules of a zone and the version of their files, read at the same time.

    Args:
        content: a file in the format TZif.
        version: such as ``2026b``; empty if the files do not state it.
    """

    content: bytes
    version: str


def rules_of(zone: str) -> bytes:
    """Return the current rules of a zone on this machine: a file in the format TZif.

    Raises:
        InvalidTimestamp: there is no such zone.
    """
    return read_rules(zone).content


def read_rules(zone: str) -> ZoneRules:
    """Return the rules of a zone with the version of their files. Raises `InvalidTimestamp`: there is no such zone."""
    source = SOURCE.get()
    rules = _read_rules(source, str(zone), int(source.seconds() // SAME_FOR_SECONDS))  # str: callers without types
    if rules is None:
        raise InvalidTimestamp(f"there is no time zone {zone!r} that can be read; names look like Europe/Paris")
    return rules


@lru_cache(maxsize=1_000)
def _read_rules(source: ZoneSource, zone: str, _minute: int) -> ZoneRules | None:
    if zone in zoneinfo.available_timezones() - {"localtime"}:
        for each in source.files():
            if (content := each.read(zone)) is not None:
                try:
                    zone_of(content)
                except DAMAGED as error:
                    log.warning("the file of the time zone %s, of %s, is damaged: %s", zone, each, error)
                else:
                    return ZoneRules(content, each.version)
    return None


@lru_cache(maxsize=1_000)
def zone_of(rules: bytes) -> ZoneInfo:
    """Return the zone with these rules. Raises one of :data:`DAMAGED` if they are no file in the format TZif."""
    return ZoneInfo.from_file(BytesIO(rules))


# --- changes of clocks ------------------------------------------------------------------------------------------------


def offset_intervals(rules: bytes, start: int) -> Iterator[tuple[int, int, int]]:
    """Yield the stretches of time between changes of a zone's clocks, in order, each at most a year long.

    Args:
        rules: of the zone.
        start: of the first stretch, in seconds since 1970 UTC. The last one ends with the calendar.

    Returns:
        For each stretch its begin, its end, and how many seconds the clocks are ahead of UTC.
    """
    offset = _offset_at(rules, start)
    for year in range(_year_of(start), _LAST_YEAR + 1):
        for change, after in _changes_in(rules, year):
            if change > start:
                yield start, change, offset
            if change >= start:  # a change at the begin itself has no stretch before it
                start, offset = change, after
        if start < (end := _start_of_year(year + 1)):
            yield start, end, offset
            start = end


def has_same_rules(one: bytes, other: bytes, year: int) -> bool:
    """Return whether two files give the same local times from ``year`` on.

    They are compared up to forty years after the last change that a file lists. After that change rules repeat, and
    within forty years each possible calendar of a year occurs. A shorter time is not enough: for example "the last" and
    "the fourth Sunday of February" differ only in a leap year that begins on a Sunday.
    """
    if one == other:
        return True
    start = _start_of_year(year)
    if _offset_at(one, start) != _offset_at(other, start):
        return False
    last = max([year, *(_year_of(each[-1]) for each in (_listed_changes(one), _listed_changes(other)) if each)])
    years = range(year, min(last + 40, _LAST_YEAR) + 1)
    return all(_changes_in(one, each) == _changes_in(other, each) for each in years)


@lru_cache(maxsize=20_000)
def _changes_in(rules: bytes, year: int) -> tuple[tuple[int, int], ...]:
    """Return the changes of clocks in a year (of UTC): for each the second since 1970 and the offset after it.

    The offset is computed at each change that the file lists. After the last one it is computed every six hours: later
    changes follow from a rule, and no zone has a rule that applies for less than weeks. If two neighbouring offsets
    differ, a binary search finds the second of the change.
    """
    start, end = _start_of_year(year), _start_of_year(year + 1)
    listed = _listed_changes(rules)
    by_rule = start if not listed or listed[-1] < start else max(start, listed[-1])
    listed_in_year = listed[bisect_right(listed, start) : bisect_right(listed, end)]
    points = sorted(
        {start, *range(by_rule, end, 6 * _HOUR), *(each + before for each in listed_in_year for before in (-1, 0)), end}
    )
    changes, before, offset = list[tuple[int, int]](), start - 1, _offset_at(rules, start - 1)
    for point in points:
        if (new_offset := _offset_at(rules, point)) != offset:
            low, high = before, point
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if _offset_at(rules, middle) == offset else (low, middle)
            if start <= high < end:
                changes.append((high, new_offset))
        before, offset = point, new_offset
    return tuple(changes)


@lru_cache(maxsize=1_000)
def _listed_changes(rules: bytes) -> Sequence[int]:
    """Return the changes that a file in the format TZif lists (RFC 9636), in seconds since 1970 UTC."""
    header = struct.Struct(">4sc15x6L")
    (_, version, *counts), at, kind = header.unpack_from(rules), header.size, "l"
    if version >= b"2":  # a second block with the same content in 64-bit numbers follows: use that
        in_utc, standard, leaps, times, types, letters = counts
        at += times * 5 + types * 6 + letters + leaps * 8 + standard + in_utc
        (_, _, *counts), at, kind = header.unpack_from(rules, at), at + header.size, "q"
    return struct.unpack_from(f">{counts[3]}{kind}", rules, at)


def _offset_at(rules: bytes, second: int) -> int:
    instant = _EPOCH + timedelta(seconds=min(max(second, _FIRST_ASKED), _LAST_ASKED))
    offset = instant.astimezone(zone_of(rules)).utcoffset()
    return 0 if offset is None else int(offset.total_seconds())


def _start_of_year(year: int) -> int:
    return _CALENDAR_END if year > _LAST_YEAR else int((datetime(year, 1, 1, tzinfo=UTC) - _EPOCH).total_seconds())


def _year_of(second: int) -> int:
    return (_EPOCH + timedelta(seconds=min(max(second, _FIRST_ASKED), _CALENDAR_END - 1))).year

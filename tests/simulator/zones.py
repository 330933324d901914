"""A zone whose rules change: its files, and at which instants a wall time is by each version of them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final
from zoneinfo import ZoneInfo

from typing_extensions import override

from postdate.core.zones import ZoneFiles

ZONE: Final = "Europe/Paris"
"""Its files on this machine are not read."""

LARGEST_SHIFT_SECONDS: Final = 90
"""So much earlier or later a wall time is at most by one version than by another."""

_HEADER: Final = struct.Struct(">4sc15x6L")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class ZoneRules:
    """One version of the rules: clocks are changed once.

    Args:
        version: of the zone files, such as ``2026b``.
        before: seconds that clocks are ahead of UTC before they are changed.
        after: the same from then on; equal to ``before``: they are not changed.
        change: when, UTC, on a whole second.
    """

    version: str
    before: int
    after: int
    change: datetime

    def instant(self, local: datetime) -> datetime:
        """Return when clocks show a time; computed without :mod:`zoneinfo`, which the endpoint uses.

        A time that they show twice is the first of the two instants; one that they leave out is as long after the
        change as it says.
        """
        early, late = (local.replace(tzinfo=UTC) - timedelta(seconds=each) for each in (self.before, self.after))
        return early if early < self.change or late < self.change else late

    def local(self, instant: datetime) -> datetime:
        """Return what clocks show at an instant."""
        ahead = self.before if instant < self.change else self.after
        return (instant + timedelta(seconds=ahead)).replace(tzinfo=None)

    def file(self) -> bytes:
        """Return them as a file in the format TZif (RFC 9636)."""
        types = struct.pack(">lBBlBB", self.before, 0, 0, self.after, 0, 0)
        changes = struct.pack(">qB", int((self.change - _EPOCH).total_seconds()), 1)
        header = _HEADER.pack(b"TZif", b"2", 0, 0, 0, 1, 2, 4)
        return (
            _HEADER.pack(b"TZif", b"2", 0, 0, 0, 0, 1, 4)
            + types[:6]
            + b"SIM\0"
            + header
            + changes
            + types
            + (b"SIM\0\n\n")
        )


@dataclass(frozen=True, slots=True)
class SimulatedZoneFiles(ZoneFiles):
    """The zone files of one process: those of one zone, in one version."""

    rules: bytes = field(default=b"", kw_only=True)

    @override
    def read(self, zone: str) -> bytes | None:
        return self.rules if zone == ZONE else None


def files_of(rules: ZoneRules) -> SimulatedZoneFiles:
    """Return zone files with these rules."""
    return SimulatedZoneFiles(None, rules.version, rules=rules.file())


def instants_of(local: datetime, versions: Sequence[ZoneRules]) -> Sequence[datetime]:
    """Return when clocks show a time by each version."""
    return [each.instant(local) for each in versions]


def check_rules(rules: ZoneRules, zone: ZoneInfo) -> None:
    """Fail unless clocks of ``zone`` go by these rules shortly before and after they are changed."""
    for seconds in (-3_600, -1, 0, 3_600):
        instant = rules.change + timedelta(seconds=seconds)
        if instant.astimezone(zone).replace(tzinfo=None) != rules.local(instant):
            raise AssertionError(f"the file of {rules} says something else at {instant}")

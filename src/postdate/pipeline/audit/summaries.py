"""The summary of an audit: values, limits and bins, without Spark. :mod:`.totals` says how lateness is added up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from postdate.pipeline.audit.results import AuditCounts, AuditRow, LatenessBin

MOST_DESTINATIONS = 200
"""Maximum number of destinations in a result; the others are added up."""

MOST_HOURS = 1_000
"""Maximum number of hours in a result, some six weeks; the others are added up."""

CURVE_POINTS = 400
"""Maximum number of points of the curve over time."""

COUNTS = tuple(field.name for field in fields(AuditCounts))

SHOWN_BINS_A_DECADE = 8
BINS_IN_A_SHOWN_BIN = 29
BINS_A_DECADE = SHOWN_BINS_A_DECADE * BINS_IN_A_SHOWN_BIN
"""The values of one bin differ by a factor of at most 10 ** (1 / 232), which is 1.00997."""

PERCENTILES = (0.5, 0.95, 0.99, 1.0)


@dataclass(frozen=True, slots=True)
class AuditTable:
    """The rows of one level: those with most faults, then with most messages.

    Args:
        rows: at most as many as were asked for.
        keys: number of all keys of this level.
        remainder: counts of the keys that are not among ``rows``; ``None`` if there are none.
    """

    rows: tuple[AuditRow, ...]
    keys: int
    remainder: AuditRow | None


@dataclass(frozen=True, slots=True)
class Summary:
    """All counts; ``span_seconds`` has all due times and deliveries."""

    total: AuditRow
    by_endpoint: tuple[AuditRow, ...]
    by_destination: AuditTable
    by_hour: AuditTable
    lateness_bins: tuple[LatenessBin, ...]
    span_seconds: int


def subtract(total: AuditCounts, rows: Sequence[AuditRow]) -> AuditCounts:
    return AuditCounts(
        **{name: getattr(total, name) - sum(getattr(row.counts, name) for row in rows) for name in COUNTS}
    )

"""The summary of an audit: values, limits and bins, without Spark. :mod:`.totals` says how lateness is added up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta

from postdate.pipeline.audit.results import AuditCounts, AuditResult, AuditRow, LatenessBin
from postdate.ports.scanning import PrunedCounts

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


def make_result(
    summary: Summary, pruned: PrunedCounts, store: str, as_of: datetime, late_after: timedelta
) -> AuditResult:
    """Return a result with this summary; the caller adds findings, curve, and what it has written."""
    return AuditResult(
        store=store,
        as_of=as_of,
        late_after_seconds=late_after.total_seconds(),
        counts=summary.total.counts,
        lateness=summary.total.lateness,
        by_endpoint=summary.by_endpoint,
        by_destination=summary.by_destination.rows,
        number_of_destinations=summary.by_destination.keys,
        other_destinations=summary.by_destination.remainder,
        by_hour=summary.by_hour.rows,
        number_of_hours=summary.by_hour.keys,
        other_hours=summary.by_hour.remainder,
        lateness_bins=summary.lateness_bins,
        pruned={kind.name.lower(): count for kind, count in sorted(pruned.counts.items())},
        pruned_before=pruned.before,
    )


def subtract(total: AuditCounts, rows: Sequence[AuditRow]) -> AuditCounts:
    return AuditCounts(
        **{name: getattr(total, name) - sum(getattr(row.counts, name) for row in rows) for name in COUNTS}
    )

"""Results of an audit: values, without Spark."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from postdate.pipeline.engines import EngineName
from postdate.pipeline.plain import to_plain

BROKEN_PROMISES = ("lost", "duplicated", "early", "orphaned")
"""Broken promises: with any of these findings an audit is not clean."""

FINDINGS = (*BROKEN_PROMISES, "overdue", "failed", "late")
"""Lines of :class:`AuditCounts` for which the result names messages."""


SAMPLE_SIZE = 100
"""Maximum number of message ids shown for one finding."""


@dataclass(frozen=True, slots=True)
class AuditCounts:
    """Numbers of messages. A message counts once in each line that applies to it.

    Args:
        scheduled: stored for later delivery.
        delivered: sent to their queue.
        handled: handled by the receiver.
        queued: delivered and not handled yet; only if store and queues share a database.
        pending: waiting until they are due, or for another attempt.
        overdue: pending and past the due time.
        expired: past their expiry: not delivered when due, or delivered and discarded by the receiver.
        discarded: past their expiry or time to be received when received, or while in their queue; delayed messages
            among them also count as expired.
        undelayed: discarded messages that were sent without a delay: never scheduled, and in no other line.
        cancelled: cancelled before they were due.
        failed: moved to the error queue, and not returned from there.
        retried: with at least one failed attempt.
        archived: their outcome is in an archive that is not read here.
        lost: scheduled, and found nowhere; or delivered, gone from the queue, and not handled (see
            :func:`postdate.pipeline.audit.audit` for where that is known).
        duplicated: delivered or handled more than once, or still pending after they ended.
        early: delivered, or handled by the receiver, before they were due.
        orphaned: delivered, handled, expired, cancelled or failed without ever having been scheduled.
        late: delivered later after their due time than is allowed.
    """

    scheduled: int = 0
    delivered: int = 0
    handled: int = 0
    queued: int = 0
    pending: int = 0
    overdue: int = 0
    expired: int = 0
    discarded: int = 0
    undelayed: int = 0
    cancelled: int = 0
    failed: int = 0
    retried: int = 0
    archived: int = 0
    lost: int = 0
    duplicated: int = 0
    early: int = 0
    orphaned: int = 0
    late: int = 0


@dataclass(frozen=True, slots=True)
class Lateness:
    """Time from due to delivered, in seconds; ``None`` without any delivery.

    A percentile is at most 1 % too high, and never too low; the maximum is exact.
    """

    p50_seconds: float | None = None
    p95_seconds: float | None = None
    p99_seconds: float | None = None
    max_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class AuditRow:
    """Counts of one endpoint, of one destination, or of one hour of due times.

    Args:
        key: the name; for an hour its beginning, ISO 8601, UTC, or ``(never due)``.
        counts: numbers of messages.
        lateness: of their deliveries.
    """

    key: str
    counts: AuditCounts
    lateness: Lateness


@dataclass(frozen=True, slots=True)
class Finding:
    """Messages that should not exist, by their line in :class:`AuditCounts`. ``sample`` has some ids, in order."""

    name: str
    count: int
    sample: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Numbers of messages due, and delivered, in one interval that begins ``at`` (UTC)."""

    at: datetime
    due: int
    delivered: int


@dataclass(frozen=True, slots=True)
class LatenessBin:
    """Deliveries that were late by at least ``from_seconds`` and less than ``to_seconds``."""

    from_seconds: float
    to_seconds: float
    count: int


@dataclass(frozen=True, slots=True)
class AuditResult:
    """The result of an audit.

    Args:
        store: address, without password; several are separated by commas.
        as_of: the instant against which overdue is measured; UTC.
        late_after_seconds: a delivery that is later than this counts as late.
        counts: of all messages.
        lateness: of all deliveries.
        by_destination: destinations with most faults (:data:`BROKEN_PROMISES`), then with most messages; at most
            :data:`postdate.pipeline.audit.totals.MOST_DESTINATIONS`.
        number_of_destinations: number of all destinations.
        other_destinations: counts of the destinations that are not in ``by_destination``; ``None`` if there are none.
        by_hour: hours of due times, in order; at most :data:`postdate.pipeline.audit.totals.MOST_HOURS`, chosen as
            destinations are.
        number_of_hours: number of all hours.
        other_hours: counts of the hours that are not in ``by_hour``; ``None`` if there are none.
        findings: in the order of :data:`FINDINGS`, without empty ones. With a state: only of messages that have records
            since the last audit, or had not ended then.
        curve: due and delivered messages over time.
        curve_seconds: length of one interval of the curve.
        lateness_bins: distribution of the lateness, in bins of equal width on a logarithmic scale.
        by_endpoint: in order of the name; an endpoint is a store.
        records: folders that were read besides the stores.
        findings_to: folder of all findings.
        destinations_to: folder of the table of all destinations.
        state: folder with what one audit leaves to the next; then all counts are since the state began.
        since: instant of the last audit with this state; ``None`` for the first.
        pruned: number of records, not messages, that stores have removed because of their age, by kind.
        pruned_before: no message that was due before this instant is reported as lost, duplicated or orphaned.
        engine: what has read and judged the messages, ``local`` or ``spark``; the results of both are the same.
    """

    store: str
    as_of: datetime
    late_after_seconds: float
    counts: AuditCounts
    lateness: Lateness
    by_destination: tuple[AuditRow, ...] = ()
    by_hour: tuple[AuditRow, ...] = ()
    findings: tuple[Finding, ...] = ()
    curve: tuple[CurvePoint, ...] = ()
    curve_seconds: int = 60
    lateness_bins: tuple[LatenessBin, ...] = ()
    took_seconds: float = 0.0
    by_endpoint: tuple[AuditRow, ...] = ()
    records: tuple[str, ...] = ()
    findings_to: str | None = None
    destinations_to: str | None = None
    state: str | None = None
    since: datetime | None = None
    number_of_destinations: int = 0
    other_destinations: AuditRow | None = None
    number_of_hours: int = 0
    other_hours: AuditRow | None = None
    pruned: Mapping[str, int] = field(default_factory=dict[str, int])
    pruned_before: datetime | None = None
    engine: EngineName = "spark"

    @property
    def is_clean(self) -> bool:
        """Whether no message was lost, duplicated, early or orphaned; with a state: since the last audit."""
        return not any(finding.name in BROKEN_PROMISES for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        return {"clean": self.is_clean, **to_plain(self)}

    def table(self) -> list[tuple[str, str]]:
        """Return the totals as lines of name and value, for terminals."""
        return (
            [(name, f"{value:,}") for name, value in asdict(self.counts).items()]
            + [
                (f"lateness {name.removesuffix('_seconds')}", "-" if value is None else f"{value:.3f} s")
                for name, value in asdict(self.lateness).items()
            ]
            + [(f"pruned: {kind}", f"{count:,}") for kind, count in self.pruned.items()]
        )

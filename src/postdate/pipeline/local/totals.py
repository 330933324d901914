"""Add up judged messages: :mod:`postdate.pipeline.audit.totals` without Spark, with the same bins of lateness."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from postdate.clock import from_microseconds
from postdate.pipeline.audit import results, summaries
from postdate.pipeline.local.judging import AuditVerdict

_HOUR_MICROSECONDS = 3_600_000_000


@dataclass(slots=True)
class KeyTotals:
    """The sums of the messages of one key: of one destination, of one hour, or of all."""

    messages: int = 0
    counts: Counter[str] = field(default_factory=Counter[str])
    # By bin: number of deliveries, and the largest lateness in microseconds.
    deliveries: Counter[int] = field(default_factory=Counter[int])
    latest: dict[int, int] = field(default_factory=dict[int, int])

    def add(self, verdict: AuditVerdict) -> None:
        self.messages += 1
        self.counts.update(verdict.lines)
        late = verdict.late_microseconds
        if late is not None:
            number = _bin_of(late)
            self.deliveries[number] += 1
            self.latest[number] = max(late, self.latest.get(number, late))

    @property
    def faults(self) -> int:
        return sum(self.counts[name] for name in results.BROKEN_PROMISES)

    @property
    def audit_counts(self) -> results.AuditCounts:
        return results.AuditCounts(**{name: self.counts[name] for name in summaries.COUNTS})

    @property
    def lateness(self) -> results.Lateness:
        if not self.deliveries:
            return results.Lateness()
        return results.Lateness(*(self._percentile(share) / 1e6 for share in summaries.PERCENTILES))

    def _percentile(self, share: float) -> int:
        """Return the largest value of the bin in which the rank lies."""
        rank, before, value = math.ceil(self.deliveries.total() * share), 0, 0
        for number, count in sorted(self.deliveries.items()):
            if before >= rank:
                break
            before, value = before + count, self.latest[number]
        return value


def _bin_of(late: int) -> int:
    """Return the bin of a lateness in microseconds, which is negative if the delivery was early."""
    magnitude = math.floor(math.log10(max(abs(late), 1)) * summaries.BINS_A_DECADE)
    return -1 - magnitude if late < 0 else magnitude


@dataclass(frozen=True, slots=True)
class LocalSummary:
    """The summary, and the totals of all destinations."""

    summary: summaries.Summary
    destinations: Mapping[str | None, KeyTotals]


def summarize(verdicts: Sequence[AuditVerdict], endpoint: str) -> LocalSummary:
    """Add up the verdicts on the messages of one endpoint."""
    total, by_destination, by_hour = KeyTotals(), dict[str | None, KeyTotals](), dict[int | None, KeyTotals]()
    times = list[int]()
    for verdict in verdicts:
        hour = None if verdict.due is None else verdict.due // _HOUR_MICROSECONDS
        for key in (
            total,
            by_destination.setdefault(verdict.destination, KeyTotals()),
            by_hour.setdefault(hour, KeyTotals()),
        ):
            key.add(verdict)
        times += [time // 1_000_000 for time in (verdict.due, verdict.delivered_at) if time is not None]
    all_row = results.AuditRow("all", total.audit_counts, total.lateness)
    hours = _table(by_hour, _hour_text, summaries.MOST_HOURS, "all other hours", all_row.counts)
    return LocalSummary(
        summaries.Summary(
            total=all_row,
            by_endpoint=(results.AuditRow(endpoint, all_row.counts, all_row.lateness),) if verdicts else (),
            by_destination=_table(
                by_destination, _destination_text, summaries.MOST_DESTINATIONS, "all others", all_row.counts
            ),
            by_hour=summaries.AuditTable(
                tuple(sorted(hours.rows, key=lambda row: row.key)), hours.keys, hours.remainder
            ),
            lateness_bins=_shown_bins(total),
            span_seconds=max(times) - min(times) if times else 0,
        ),
        by_destination,
    )


def _destination_text(destination: str | None) -> str | None:
    return destination


def _hour_text(hour: int | None) -> str | None:
    if hour is None:
        return "(never due)"
    return f"{from_microseconds(hour * _HOUR_MICROSECONDS).replace(tzinfo=None).isoformat(timespec='minutes')}Z"


def _table(
    totals: Mapping[Any, KeyTotals],
    text_of: Callable[[Any], str | None],
    most: int,
    remainder_name: str,
    counts: results.AuditCounts,
) -> summaries.AuditTable:
    """Return the keys with most faults, then with most messages."""
    keys = [(text_of(key), total) for key, total in totals.items()]
    keys.sort(key=lambda row: (-row[1].faults, -row[1].messages, row[0] is not None, row[0] or ""))
    rows = tuple(
        results.AuditRow(text or "(unknown)", total.audit_counts, total.lateness) for text, total in keys[:most]
    )
    remainder = None
    if len(keys) > len(rows):
        remainder = results.AuditRow(remainder_name, summaries.subtract(counts, rows), results.Lateness())
    return summaries.AuditTable(rows, len(keys), remainder)


def _shown_bins(total: KeyTotals) -> tuple[results.LatenessBin, ...]:
    shown = Counter[int]()
    for number, count in total.deliveries.items():
        if number >= 0:
            shown[number // summaries.BINS_IN_A_SHOWN_BIN] += count
    return tuple(
        results.LatenessBin(
            10 ** (number / summaries.SHOWN_BINS_A_DECADE) / 1e6,
            10 ** ((number + 1) / summaries.SHOWN_BINS_A_DECADE) / 1e6,
            count,
        )
        for number, count in sorted(shown.items())
    )


def count_curve(verdicts: Iterable[AuditVerdict], width: int) -> tuple[results.CurvePoint, ...]:
    """Count due and delivered messages in each interval of ``width`` seconds, without empty intervals."""
    due, delivered = Counter[int](), Counter[int]()
    for verdict in verdicts:
        for counts, time in ((due, verdict.due), (delivered, verdict.delivered_at)):
            if time is not None:
                counts[time // 1_000_000 // width * width] += 1
    return tuple(
        results.CurvePoint(from_microseconds(start * 1_000_000), due[start], delivered[start])
        for start in sorted(due.keys() | delivered.keys())
    )


def findings_of(verdicts: Iterable[AuditVerdict]) -> tuple[results.Finding, ...]:
    """Return a finding for each line of :data:`FINDINGS` that is not 0, with a sample of ids."""
    ids = dict[str, list[str]]()
    for verdict in verdicts:
        for name in verdict.about:
            ids.setdefault(name, []).append(verdict.message_id)
    return tuple(
        results.Finding(name, len(ids[name]), tuple(sorted(ids[name])[: results.SAMPLE_SIZE]))
        for name in results.FINDINGS
        if name in ids
    )

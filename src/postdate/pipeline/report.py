"""An audit as one HTML file. Runs on the driver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from postdate.pipeline.audit import BROKEN_PROMISES, AuditResult, AuditRow, Finding
from postdate.pipeline.charts import curve_chart, lateness_chart
from postdate.pipeline.page import rendered

_MOST_HOURS = 400
"""Hours shown in the table, at most: nobody reads a longer table, and the JSON has them all."""

_BAD = frozenset(BROKEN_PROMISES)
_WORRYING = frozenset({"overdue", "failed", "late"})

_MEANINGS = {
    "scheduled": "stored to be delivered",
    "delivered": "put into their queue",
    "handled": "handled by their receiver",
    "queued": "in their queue, not yet handled",
    "pending": "waiting in the store",
    "overdue": "pending, and past their due time",
    "expired": "nobody wanted them any more when they were due",
    "discarded": "received, or ended in their queue, past their use",
    "undelayed": "of the discarded, never delayed: in no other line",
    "cancelled": "withdrawn before they were due",
    "failed": "moved to the error queue",
    "retried": "with at least one failed attempt",
    "archived": "in an archive that was not read here",
    "lost": "nowhere to be found",
    "duplicated": "delivered or handled more than once",
    "early": "delivered before they were due",
    "orphaned": "delivered or ended without ever having been scheduled",
    "late": "delivered later than allowed",
}

_ALWAYS_SHOWN = frozenset({"scheduled", "delivered"}) | _BAD
_TABLE_ORDER = (
    "scheduled", "delivered", "lost", "duplicated", "early", "orphaned", "late", "overdue",
    "handled", "queued", "pending", "expired", "discarded", "undelayed", "cancelled", "failed", "retried", "archived",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Tile:
    name: str
    count: int
    meaning: str
    mood: str


def render_html(result: AuditResult, title: str = "Delayed messages") -> str:
    """Return an audit as a complete HTML page; ``title`` is its heading."""
    charts = {
        "curve": curve_chart(result.curve, result.curve_seconds) if result.curve else None,
        "bins": lateness_chart(result.lateness_bins, result.lateness) if result.lateness_bins else None,
    }
    return rendered(
        "audit",
        title,
        charts,
        {},
        result=result,
        verdict=_verdict(result),
        tiles=_tiles(result),
        columns=_columns(result),
        endpoints=result.by_endpoint if len(result.by_endpoint) > 1 else (),
        destinations=result.by_destination,
        hours=_some_hours(result.by_hour),
        bad_columns=_BAD,
        hours_left_out=max(len(result.by_hour) - _MOST_HOURS, 0),
        findings=[
            (finding, _mood(finding.name, finding.count), _MEANINGS[finding.name]) for finding in result.findings
        ],
    )


def write_html(result: AuditResult, path: Path, title: str = "Delayed messages") -> None:
    path.write_text(render_html(result, title), encoding="utf-8")


def _tiles(result: AuditResult) -> list[_Tile]:
    counts: dict[str, int] = asdict(result.counts)
    return [_Tile(name, count, _MEANINGS[name], _mood(name, count)) for name, count in counts.items()]


def _columns(result: AuditResult) -> list[str]:
    """Return the columns of the tables, most important first, without those that are 0 everywhere."""
    counts: dict[str, int] = asdict(result.counts)
    return [name for name in _TABLE_ORDER if counts[name] or name in _ALWAYS_SHOWN]


def _mood(name: str, count: int) -> str:
    if name in _BAD:
        return "bad" if count else "good"
    return "worry" if name in _WORRYING and count else "plain"


def _verdict(result: AuditResult) -> tuple[str, str]:
    """Return mood and text of the headline."""
    bad: Sequence[Finding] = [finding for finding in result.findings if finding.name in _BAD]
    if bad:
        return "bad", ", ".join(f"{finding.count:,} {finding.name}" for finding in bad)
    if not result.counts.scheduled and not result.findings:
        return "plain", "There is nothing to audit: no message was ever scheduled."
    if result.counts.overdue:
        return "worry", f"Nothing lost, duplicated, early or orphaned; {result.counts.overdue:,} overdue"
    return "good", "Nothing lost, nothing duplicated, nothing early, nothing orphaned"


def _some_hours(rows: Sequence[AuditRow]) -> Sequence[AuditRow]:
    return rows[-_MOST_HOURS:]

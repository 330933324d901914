"""An audit as one HTML file, with its charts. Runs on the driver."""

# pyright: reportUnknownMemberType=false
# Matplotlib declares no types for the keyword arguments of its methods.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from functools import reduce
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from postdate.pipeline import audit, page

_MOST_HOURS = 400
"""Maximum number of hours in the table: a longer table is hard to read, and the JSON has all hours."""

_BAD = frozenset(audit.BROKEN_PROMISES)
_WORRYING = frozenset({"overdue", "failed", "late"})

_MEANINGS = {
    "scheduled": "stored to be delivered",
    "delivered": "put into their queue",
    "lost": "nowhere to be found",
    "duplicated": "delivered or handled more than once",
    "early": "delivered before they were due",
    "orphaned": "delivered or ended without ever having been scheduled",
    "late": "delivered later than allowed",
    "overdue": "pending, and past their due time",
    "handled": "handled by their receiver",
    "queued": "in their queue, not yet handled",
    "pending": "waiting in the store",
    "expired": "their time to be received had ended when they were due",
    "discarded": "received, or ended in their queue, past their use",
    "undelayed": "of the discarded, never delayed: in no other line",
    "cancelled": "withdrawn before they were due",
    "failed": "moved to the error queue",
    "retried": "with at least one failed attempt",
    "archived": "in an archive that was not read here",
}
"""Explanations of the counts, in the order of the columns of tables."""

_ALWAYS_SHOWN = frozenset({"scheduled", "delivered"}) | _BAD


def render_html(result: audit.AuditResult, title: str = "Delayed messages") -> str:
    """Return an audit as a complete HTML page; ``title`` is its heading."""
    charts = {
        "curve": curve_chart(result.curve, result.curve_seconds) if result.curve else None,
        "bins": lateness_chart(result.lateness_bins, result.lateness) if result.lateness_bins else None,
    }
    return page.render_page(
        "audit",
        title,
        charts,
        {},
        result=result,
        verdict=_verdict(result),
        tiles=[(name, count, _MEANINGS[name], _mood(name, count)) for name, count in asdict(result.counts).items()],
        columns=_columns(result),
        faults_of=_faults,
        endpoints=result.by_endpoint if len(result.by_endpoint) > 1 else (),
        destinations=result.by_destination,
        hidden_destinations=result.number_of_destinations - len(result.by_destination),
        hours=result.by_hour[-_MOST_HOURS:],
        other_hours=_other_hours(result),
        bad_columns=_BAD,
        hidden_hours=result.number_of_hours - min(len(result.by_hour), _MOST_HOURS),
        findings=[
            (finding, _mood(finding.name, finding.count), _MEANINGS[finding.name]) for finding in result.findings
        ],
    )


def write_html(result: audit.AuditResult, path: Path, title: str = "Delayed messages") -> None:
    path.write_text(render_html(result, title), encoding="utf-8")


def _columns(result: audit.AuditResult) -> list[str]:
    """Return the columns of the tables, most important first, without those that are 0 everywhere."""
    counts: dict[str, int] = asdict(result.counts)
    return [name for name in _MEANINGS if counts[name] or name in _ALWAYS_SHOWN]


def _faults(row: audit.AuditRow) -> int:
    return sum(getattr(row.counts, name) for name in audit.BROKEN_PROMISES)


def _other_hours(result: audit.AuditResult) -> audit.AuditRow | None:
    """Return the sum of the hours that the page does not show."""
    hidden = [row.counts for row in result.by_hour[:-_MOST_HOURS]]
    if result.other_hours is not None:
        hidden.append(result.other_hours.counts)
    if not hidden:
        return None
    counts = (asdict(each) for each in hidden)
    sums = reduce(lambda one, other: {name: one[name] + other[name] for name in one}, counts)
    return audit.AuditRow("all other hours", audit.AuditCounts(**sums), audit.Lateness())


def _mood(name: str, count: int) -> str:
    if name in _BAD:
        return "bad" if count else "good"
    return "worry" if name in _WORRYING and count else "plain"


def _verdict(result: audit.AuditResult) -> tuple[str, str]:
    """Return the mood and the text of the headline."""
    bad: Sequence[audit.Finding] = [finding for finding in result.findings if finding.name in _BAD]
    if bad:
        return "bad", ", ".join(f"{finding.count:,} {finding.name}" for finding in bad)
    if not result.counts.scheduled and not result.findings:
        return "plain", "There is nothing to audit: no message was ever scheduled."
    if result.counts.overdue:
        return "worry", f"Nothing lost, duplicated, early or orphaned; {result.counts.overdue:,} overdue"
    return "good", "Nothing lost, nothing duplicated, nothing early, nothing orphaned"


# --- charts -----------------------------------------------------------------------------------------------------------


_DUE, _DELIVERED, _MARK = "#030303", "#040404", "#050505"
_CSS_COLOURS = {_DUE: "var(--due)", _DELIVERED: "var(--delivered)", _MARK: "var(--mark)"}


def curve_chart(points: Sequence[audit.CurvePoint], width_seconds: int) -> str:
    """Return due (area) and delivered (line) messages over time, as one SVG element.

    If a herd would flatten all other times, a second panel shows them, and cuts off the herd.
    """
    usual = page.usual_height([height for point in points for height in (point.due, point.delivered)])
    with page.svg_axes("curve", _CSS_COLOURS, panels=1 if usual is None else 2) as (panels, svg_texts):
        edges, due, delivered = zip(*_steps(points, timedelta(seconds=width_seconds)), strict=True)
        for axes in panels:
            axes.fill_between(edges, due, step="post", color=_DUE, alpha=0.35, linewidth=0, label="due")
            axes.step(edges, delivered, where="post", color=_DELIVERED, linewidth=1.6, label="delivered")
            axes.margins(x=0)
        page.count_axis(panels[0], f"messages in {page.format_seconds(width_seconds)}")
        if usual is not None:
            page.count_axis(panels[1], "the same, without the peaks")
            panels[1].set_ylim(top=usual)
        page.time_axis(panels[-1])
        panels[0].legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0.2)
    return svg_texts[0]


def lateness_chart(bins: Sequence[audit.LatenessBin], lateness: audit.Lateness) -> str:
    """Return the distribution of lateness with percentiles, both scales logarithmic, as one SVG element.

    On a linear scale of counts the few messages that are very late, which matter most, have no visible bar.
    """
    with page.svg_axes("lateness", _CSS_COLOURS) as ((axes,), svg_texts):
        starts = [each.from_seconds for each in bins]
        widths = [each.to_seconds - each.from_seconds for each in bins]
        axes.bar(starts, [each.count for each in bins], widths, align="edge", color=_DELIVERED, alpha=0.75, linewidth=0)
        axes.set_xscale("log")
        axes.set_xlim(min(starts) / 1.5, max(each.to_seconds for each in bins) * 1.5)
        page.duration_axis(axes)
        axes.set_xlabel("late by")
        page.logarithmic_count_axis(axes)
        _mark_percentiles(axes, lateness)
    return svg_texts[0]


def _steps(points: Sequence[audit.CurvePoint], width: timedelta) -> list[tuple[Any, int, int]]:
    """Return the edge of each step with both heights from there on. The heights are 0 for intervals without a point."""
    steps = list[tuple[Any, int, int]]()
    for point in points:
        if steps and steps[-1][0] == point.at:
            steps.pop()
        steps += [(point.at, point.due, point.delivered), (point.at + width, 0, 0)]
    return steps


def _mark_percentiles(axes: Axes, lateness: audit.Lateness) -> None:
    marks = {
        "p50": lateness.p50_seconds, "p95": lateness.p95_seconds, "p99": lateness.p99_seconds,
        "max": lateness.max_seconds,
    }  # fmt: skip
    above = iter((1.03, 1.14, 1.25, 1.36))
    for name, value in marks.items():
        if value is not None and value > 0:
            axes.axvline(value, color=_MARK, linewidth=1.2, linestyle=(0, (4, 3)))
            label = f"{name} {page.format_seconds(value)}"
            axes.text(value, next(above), label, transform=axes.get_xaxis_transform(), ha="center", color=_MARK)

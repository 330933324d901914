"""Charts of an audit, as SVG elements for a page. Runs on the driver."""

# pyright: reportUnknownMemberType=false
# Matplotlib gives no types to the keyword arguments of its methods.

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from postdate.pipeline.audit import CurvePoint, Lateness, LatenessBin
from postdate.pipeline.svg import count_axis, svg_axes, time_axis

_DUE, _DELIVERED, _MARK = "#030303", "#040404", "#050505"
_CSS_COLOURS = {_DUE: "var(--due)", _DELIVERED: "var(--delivered)", _MARK: "var(--mark)"}
_MILLISECOND, _MINUTE, _HOUR, _DAY = 1e-3, 60.0, 3_600.0, 86_400.0


def curve_chart(points: Sequence[CurvePoint], width_seconds: int) -> str:
    """Return due (area) and delivered (line) messages over time, as one SVG element."""
    with svg_axes("curve", _CSS_COLOURS) as (axes, done):
        edges, due, delivered = _steps(points, timedelta(seconds=width_seconds))
        axes.fill_between(edges, due, step="post", color=_DUE, alpha=0.35, linewidth=0, label="due")
        axes.step(edges, delivered, where="post", color=_DELIVERED, linewidth=1.6, label="delivered")
        time_axis(axes)
        axes.margins(x=0)
        count_axis(axes, f"messages in {duration(width_seconds)}")
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2)
    return done[0]


def lateness_chart(bins: Sequence[LatenessBin], lateness: Lateness) -> str:
    """Return the distribution of lateness on a logarithmic scale, with percentiles, as one SVG element."""
    with svg_axes("lateness", _CSS_COLOURS) as (axes, done):
        left = [each.from_seconds for each in bins]
        widths = [each.to_seconds - each.from_seconds for each in bins]
        axes.bar(left, [each.count for each in bins], widths, align="edge", color=_DELIVERED, alpha=0.75, linewidth=0)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(_duration_label))
        axes.minorticks_off()
        axes.set_xlabel("late by")
        _mark_percentiles(axes, lateness)
        count_axis(axes, "messages")
    return done[0]


def duration(seconds: float) -> str:
    """Return a length of time in a suitable unit: ``250 ms``, ``1.5 s``, ``2 min``, ``3 h``."""
    for unit, size in (("d", _DAY), ("h", _HOUR), ("min", _MINUTE), ("s", 1.0), ("ms", _MILLISECOND)):
        if abs(seconds) >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs" if seconds else "0 s"


def _steps(points: Sequence[CurvePoint], width: timedelta) -> tuple[list[Any], list[int], list[int]]:
    """Return edges and heights of steps, with 0 for intervals without a point."""
    edges, due, delivered = list[Any](), list[int](), list[int]()
    for point in points:
        if edges and edges[-1] == point.at:
            edges.pop()
            due.pop()
            delivered.pop()
        edges += [point.at, point.at + width]
        due += [point.due, 0]
        delivered += [point.delivered, 0]
    return edges, due, delivered


def _mark_percentiles(axes: Axes, lateness: Lateness) -> None:
    marks = {"p50": lateness.p50_seconds, "p95": lateness.p95_seconds, "p99": lateness.p99_seconds}
    above = iter((1.02, 1.09, 1.16))
    for name, value in marks.items():
        if value is not None and value > 0:
            axes.axvline(value, color=_MARK, linewidth=1.2, linestyle=(0, (4, 3)))
            label = f"{name} {duration(value)}"
            axes.text(value, next(above), label, transform=axes.get_xaxis_transform(), ha="center", color=_MARK)


def _duration_label(seconds: float, _position: int | None) -> str:
    return duration(seconds)

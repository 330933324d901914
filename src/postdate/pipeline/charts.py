"""Charts of an audit as SVG elements for a page: text stays text, and colours are the page's own, light or dark.

Runs on the driver. Matplotlib draws with placeholder colours, which are then replaced by CSS variables.
"""

# pyright: reportUnknownMemberType=false
# Matplotlib gives no types to the keyword arguments of its methods.

from __future__ import annotations

import io
import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from postdate.pipeline.audit import CurvePoint, Lateness, LatenessBin

_TEXT, _GRID, _DUE, _DELIVERED, _MARK = "#010101", "#020202", "#030303", "#040404", "#050505"
_CSS_COLOURS: Mapping[str, str] = MappingProxyType(
    {
        _TEXT: "var(--soft)",
        _GRID: "var(--line)",
        _DUE: "var(--due)",
        _DELIVERED: "var(--delivered)",
        _MARK: "var(--mark)",
    }
)
_STYLE: Mapping[str, Any] = MappingProxyType(
    {
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "font.size": 11,
        "text.color": _TEXT,
        "axes.labelcolor": _TEXT,
        "axes.edgecolor": _GRID,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "grid.color": _GRID,
        "grid.linewidth": 0.8,
        "xtick.color": _TEXT,
        "ytick.color": _TEXT,
        "ytick.left": False,
        "legend.frameon": False,
    }
)
_MILLISECOND, _MINUTE, _HOUR, _DAY = 1e-3, 60.0, 3_600.0, 86_400.0


def curve_chart(points: Sequence[CurvePoint], width_seconds: int) -> str:
    """Return what was due (area) and what was delivered (line) over time, as one SVG element."""
    with _axes("curve") as (axes, done):
        edges, due, delivered = _steps(points, timedelta(seconds=width_seconds))
        axes.fill_between(edges, due, step="post", color=_DUE, alpha=0.35, linewidth=0, label="due")
        axes.step(edges, delivered, where="post", color=_DELIVERED, linewidth=1.6, label="delivered")
        locator = AutoDateLocator(maxticks=9)
        axes.xaxis.set_major_locator(locator)
        axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))
        axes.margins(x=0)
        _count_axis(axes, f"messages in {duration(width_seconds)}")
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2)
    return done[0]


def lateness_chart(bins: Sequence[LatenessBin], lateness: Lateness) -> str:
    """Return how late deliveries were, on a logarithmic scale, with the percentiles, as one SVG element."""
    with _axes("lateness") as (axes, done):
        left = [each.from_seconds for each in bins]
        widths = [each.to_seconds - each.from_seconds for each in bins]
        axes.bar(left, [each.count for each in bins], widths, align="edge", color=_DELIVERED, alpha=0.75, linewidth=0)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(_duration_label))
        axes.minorticks_off()
        axes.set_xlabel("late by")
        _mark_percentiles(axes, lateness)
        _count_axis(axes, "messages")
    return done[0]


def duration(seconds: float) -> str:
    """Return a length of time in the unit that suits it: ``250 ms``, ``1.5 s``, ``2 min``, ``3 h``."""
    for unit, size in (("d", _DAY), ("h", _HOUR), ("min", _MINUTE), ("s", 1.0), ("ms", _MILLISECOND)):
        if abs(seconds) >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs" if seconds else "0 s"


def _steps(points: Sequence[CurvePoint], width: timedelta) -> tuple[list[Any], list[int], list[int]]:
    """Return edges and heights of steps; they go down to 0 for intervals that the points leave out."""
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


def _count_label(count: float, _position: int | None) -> str:
    return f"{count:,.0f}"


def _count_axis(axes: Axes, label: str) -> None:
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(_count_label))
    axes.set_ylabel(label)


@contextmanager
def _axes(name: str) -> Generator[tuple[Axes, list[str]]]:
    """Give axes to draw on; afterwards the list has the SVG element."""
    done: list[str] = []
    style: dict[Any, Any] = {**_STYLE, "svg.hashsalt": name}
    with mpl.rc_context(style):
        figure = Figure(figsize=(9.6, 3.4), layout="constrained")
        figure.patch.set_alpha(0)
        axes = figure.add_subplot()
        axes.patch.set_alpha(0)
        yield axes, done
        written = io.StringIO()
        figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None})
    done.append(_for_page(written.getvalue(), name))


def _for_page(svg: str, name: str) -> str:
    """Make an SVG document an element: no prologue, the page's colours, and ids that no other chart has."""
    element = svg[svg.index("<svg") :]
    element = re.sub(r"<metadata>.*?</metadata>", "", element, flags=re.DOTALL)
    element = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", element)
    # The page gives the size, and a text alternative beside the drawing.
    element = re.sub(r'<svg([^>]*?) height="[^"]*"', r"<svg\1", element, count=1)
    element = re.sub(r'<svg([^>]*?) width="[^"]*"', r'<svg\1 aria-hidden="true" focusable="false"', element, count=1)
    for colour, variable in _CSS_COLOURS.items():
        element = element.replace(colour, variable)
    return element.strip()

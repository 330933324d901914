"""Drawings for a page as SVG elements: text stays text, and colours are the page's own, light or dark.

Runs on the driver. Matplotlib draws with placeholder colours, which are then replaced by CSS variables.
"""

# pyright: reportUnknownMemberType=false
# Matplotlib gives no types to the keyword arguments of its methods.

from __future__ import annotations

import io
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

TEXT, GRID = "#010101", "#020202"
"""Placeholders for the colours of text and lines; a drawing adds its own to them."""

_CSS_COLOURS = {TEXT: "var(--soft)", GRID: "var(--line)"}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 11,
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
    "axes.edgecolor": GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
    "ytick.left": False,
    "legend.frameon": False,
}


@contextmanager
def svg_axes(name: str, colours: Mapping[str, str]) -> Generator[tuple[Axes, list[str]]]:
    """Yield axes and a list that has the SVG element after the block; ``name`` is unique."""
    done: list[str] = []
    with mpl.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(9.6, 3.4), layout="constrained")
        figure.patch.set_alpha(0)
        axes = figure.add_subplot()
        axes.patch.set_alpha(0)
        yield axes, done
        written = io.StringIO()
        figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None})
    done.append(_for_page(written.getvalue(), name, {**_CSS_COLOURS, **colours}))


def time_axis(axes: Axes) -> None:
    """Show times in UTC on the x axis."""
    locator = AutoDateLocator(maxticks=9)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))


def count_axis(axes: Axes, label: str) -> None:
    """Show whole numbers from 0 on the y axis."""
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_ylabel(label)


def _for_page(svg: str, name: str, colours: Mapping[str, str]) -> str:
    """Return an SVG document as an element: no prologue, the page's colours, and ids unique on the page."""
    element = svg[svg.index("<svg") :]
    element = re.sub(r"<metadata>.*?</metadata>", "", element, flags=re.DOTALL)
    element = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", element)
    # The page gives the size, and a text alternative beside the drawing.
    element = re.sub(r'<svg([^>]*?) height="[^"]*"', r"<svg\1", element, count=1)
    element = re.sub(r'<svg([^>]*?) width="[^"]*"', r'<svg\1 aria-hidden="true" focusable="false"', element, count=1)
    for colour, variable in colours.items():
        element = element.replace(colour, variable)
    return element.strip()

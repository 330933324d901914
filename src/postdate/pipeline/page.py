"""A report as one HTML file: nothing to fetch, readable in light and dark, on paper, and by a screen reader.

Its drawings are SVG elements: text stays text, and colours are the page's own, light or dark. Matplotlib draws with
placeholder colours, which are then replaced by CSS variables. Runs on the driver. All pages share the template
``page.html``.
"""

# pyright: reportUnknownMemberType=false
# Matplotlib declares no types for the keyword arguments of its methods.

from __future__ import annotations

import io
import re
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from importlib.resources import files
from typing import Any

import matplotlib as mpl
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

# --- drawings ---------------------------------------------------------------------------------------------------------


TEXT, GRID = "#010101", "#020202"
"""Placeholders for the colours of text and lines. A drawing adds its own placeholders."""

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
    """Yield axes, and a list that has the SVG element after the block. ``name`` must be unique."""
    svg_texts: list[str] = []
    with mpl.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(9.6, 3.4), layout="constrained")
        figure.patch.set_alpha(0)
        axes = figure.add_subplot()
        axes.patch.set_alpha(0)
        yield axes, svg_texts
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    svg_texts.append(_adapt_svg(buffer.getvalue(), name, {**_CSS_COLOURS, **colours}))


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


def _adapt_svg(svg: str, name: str, colours: Mapping[str, str]) -> str:
    """Return an SVG document as an element: no prologue, the page's colours, and ids unique on the page."""
    element = svg[svg.index("<svg") :]
    element = re.sub(r"<metadata>.*?</metadata>", "", element, flags=re.DOTALL)
    element = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", element)
    # The page sets the size, and has a text alternative beside the drawing.
    element = re.sub(r'<svg([^>]*?) height="[^"]*"', r"<svg\1", element, count=1)
    element = re.sub(r'<svg([^>]*?) width="[^"]*"', r'<svg\1 aria-hidden="true" focusable="false"', element, count=1)
    for colour, variable in colours.items():
        element = element.replace(colour, variable)
    return element.strip()


# --- pages ------------------------------------------------------------------------------------------------------------


def render_page(
    kind: str, title: str, charts: Mapping[str, str | None], filters: Mapping[str, Callable[..., str]], **values: object
) -> str:
    """Return a complete HTML page from the template ``kind``. Charts are SVG elements; ``None``: there is no chart."""
    environment = Environment(
        loader=PackageLoader("postdate.pipeline"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters |= {"duration": format_seconds, **filters}
    # Everything is escaped except the charts, which are made here from numbers and times alone.
    chart_markup = {name: None if chart is None else Markup(chart) for name, chart in charts.items()}  # noqa: S704
    style = Markup((files("postdate") / "web" / "static" / "look.css").read_text("utf-8"))  # noqa: S704 - ours, too
    return environment.get_template(f"{kind}.html").render(kind=kind, title=title, look=style, **chart_markup, **values)


def format_seconds(seconds: float) -> str:
    """Return a length of time in a suitable unit: ``250 ms``, ``1.5 s``, ``2 min``, ``3 h``."""
    for unit, size in (("d", 86_400.0), ("h", 3_600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs" if seconds else "0 s"

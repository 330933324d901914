"""A report as one HTML file: nothing to fetch, readable in light and dark, on paper, and by a screen reader.

Its drawings are SVG elements: text stays text, and colours are the page's own, light or dark. Matplotlib draws with
placeholder colours, which are then replaced by CSS variables. Runs on the driver. All pages share the template
``page.html``.
"""

# pyright: reportUnknownMemberType=false
# Matplotlib declares no types for the keyword arguments of its methods.

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from importlib.resources import files
from typing import Any

import matplotlib as mpl
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, StrMethodFormatter

from postdate.clock import from_microseconds

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
def svg_axes(name: str, colours: Mapping[str, str], panels: int = 1) -> Generator[tuple[list[Axes], list[str]]]:
    """Yield the axes of each panel, and a list that has the SVG element after the block. ``name`` must be unique.

    Panels are below each other and share their x axis.
    """
    svg_texts: list[str] = []
    with mpl.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(9.6, 1.5 + 2.1 * panels), layout="constrained")
        figure.patch.set_alpha(0)
        axes: list[Axes] = []
        for number in range(panels):
            axes.append(figure.add_subplot(panels, 1, number + 1, sharex=axes[0] if axes else None))
            axes[-1].patch.set_alpha(0)
            axes[-1].tick_params(labelbottom=number == panels - 1)
        yield axes, svg_texts
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    svg_texts.append(_adapt_svg(buffer.getvalue(), name, {**_CSS_COLOURS, **colours}))


_HERD_FACTOR = 5


def usual_height(heights: Sequence[int]) -> float | None:
    """Return the height of a second panel that shows usual values, if a few values make them a line on the floor.

    ``None``: no value exceeds ``_HERD_FACTOR`` times the height that nine in ten intervals with messages do not exceed.
    """
    ascending = sorted(height for height in heights if height > 0)
    if not ascending:
        return None
    limit = _HERD_FACTOR * ascending[(len(ascending) - 1) * 9 // 10]
    return None if ascending[-1] <= limit else 1.15 * max(height for height in ascending if height <= limit)


_MINUTE, _HOUR, _DAY = 60, 3_600, 86_400
_STEPS = (
    1, 2, 5, 10, 15, 30,
    _MINUTE, 2 * _MINUTE, 5 * _MINUTE, 10 * _MINUTE, 15 * _MINUTE, 30 * _MINUTE,
    _HOUR, 2 * _HOUR, 3 * _HOUR, 6 * _HOUR, 12 * _HOUR,
    _DAY, 2 * _DAY, 7 * _DAY, 14 * _DAY,
)  # fmt: skip
_MOST_TICKS = 8
_FEWEST_TICKS = 3
_MONDAY = 4 * _DAY
"""The first Monday after 1970-01-01, in seconds."""


def time_ticks(first_seconds: float, last_seconds: float) -> list[tuple[int, str]]:
    """Return ticks for the time between two instants, in seconds since 1970 UTC, each with its label.

    Ticks are at round times: full minutes or hours, midnights, or Mondays. The label of the first tick, and of each
    tick at midnight, has the day of the week. The list is empty if there are no suitable ticks, for many months.
    """
    fitting = (step for step in _STEPS if (last_seconds - first_seconds) / step < _MOST_TICKS)
    if (step := next(fitting, None)) is None:
        return []
    offset = _MONDAY if step >= 7 * _DAY else 0
    first = math.ceil((first_seconds - offset) / step) * step + offset
    ticks = list[tuple[int, str]]()
    for second in range(first, math.floor(last_seconds) + 1, step):
        instant = from_microseconds(second * 1_000_000)
        clock = "" if step >= _DAY else f"{instant:%H:%M}" if step >= _MINUTE else f"{instant:%H:%M:%S}"
        has_day = step >= _DAY or not ticks or second % _DAY == 0
        day = f"{instant:%a}\n{instant.day} {instant:%b}" if has_day else ""
        ticks.append((second, "\n".join(filter(None, (clock, day)))))
    return ticks


def time_axis(axes: Axes) -> None:
    """Show times in UTC on the x axis, whose limits must be set."""
    low, high = axes.get_xlim()
    if ticks := time_ticks(low * _DAY, high * _DAY):
        # Matplotlib counts time in days.
        axes.set_xticks([second / _DAY for second, _ in ticks], [label for _, label in ticks], linespacing=1.6)
        return
    locator = AutoDateLocator(maxticks=_MOST_TICKS)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))


_DURATIONS = (
    *(1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 60.0, 600.0, 3_600.0, 36_000.0),
    *(86_400.0, 604_800.0, 2_592_000.0, 31_536_000.0),
)
"""Durations that are round numbers for people, about a decade apart."""


def duration_axis(axes: Axes) -> None:
    """Show durations in seconds on the x axis, on a logarithmic scale. Its limits must be set."""
    low, high = axes.get_xlim()
    durations = [duration for duration in _DURATIONS if low * 0.999 <= duration <= high * 1.001]
    if len(durations) < _FEWEST_TICKS:
        between = sorted(duration * factor for duration in _DURATIONS for factor in (1, 2, 3, 5))
        durations = [duration for duration in between if low * 0.999 <= duration <= high * 1.001]
    axes.set_xticks(durations, [format_seconds(duration) for duration in durations])
    axes.minorticks_off()


def count_axis(axes: Axes, label: str) -> None:
    """Show whole numbers from 0 on the y axis. The label is above the axis."""
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_title(label, loc="left", fontsize="medium")


def logarithmic_count_axis(axes: Axes) -> None:
    """Show whole numbers from 1 on the y axis, on a logarithmic scale on which 1 is still visible."""
    axes.set_yscale("log")
    axes.set_ylim(bottom=0.6)
    axes.yaxis.set_major_locator(LogLocator(10, numticks=6))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.yaxis.set_minor_locator(NullLocator())


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
    environment.filters |= {"duration": format_seconds, "short": shorten_name, **filters}
    # Everything is escaped except the charts, which are made here from numbers and times alone.
    chart_markup = {name: None if chart is None else Markup(chart) for name, chart in charts.items()}  # noqa: S704
    style = Markup((files("postdate") / "web" / "static" / "look.css").read_text("utf-8"))  # noqa: S704 - ours, too
    return environment.get_template(f"{kind}.html").render(kind=kind, title=title, look=style, **chart_markup, **values)


def format_seconds(seconds: float) -> str:
    """Return a length of time in one unit, or two: ``250 ms``, ``1.5 s``, ``1 min 40 s``, ``2 h 47 min``, ``3 d``."""
    magnitude = abs(seconds)
    if magnitude >= _MINUTE - 0.5:
        sign = "-" if seconds < 0 else ""
        for name, size, smaller_name, smaller_size in _LONG_UNITS:
            # The smaller unit is rounded first, so that there are no 60 seconds in a minute.
            whole, smaller = divmod(round(magnitude / smaller_size), size // smaller_size)
            if whole:
                return f"{sign}{whole:,} {name}" + (f" {smaller} {smaller_name}" if smaller else "")
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if magnitude >= size * 0.9995:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs" if seconds else "0 s"


_LONG_UNITS = (("d", _DAY, "h", _HOUR), ("h", _HOUR, "min", _MINUTE), ("min", _MINUTE, "s", 1))
_LONGEST_NAME = 28
"""Number of characters of a name in a table."""


def shorten_name(name: str) -> str:
    """Return a name that fits into a table: the middle of a long name is left out, because names differ at the ends."""
    if len(name) <= _LONGEST_NAME:
        return name
    tail = _LONGEST_NAME // 2 - 2
    return f"{name[: _LONGEST_NAME - tail - 1]}…{name[-tail:]}"

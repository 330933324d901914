"""A forecast as one HTML file, with its chart. Runs on the driver."""

# pyright: reportUnknownMemberType=false
# Matplotlib declares no types for the keyword arguments of its methods.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from matplotlib.axes import Axes

from postdate.clock import to_microseconds
from postdate.pipeline import forecast_result
from postdate.pipeline.page import count_axis, format_seconds, render_page, svg_axes, time_axis, usual_height

_MOST_ROWS = 100
"""Maximum number of destinations shown: a longer table is hard to read, and the JSON has more."""


def render_forecast(result: forecast_result.ForecastResult, title: str = "What falls due") -> str:
    """Return a forecast as a complete HTML page; ``title`` is its heading."""
    return render_page(
        "forecast",
        title,
        {"load_chart": load_chart(result) if result.intervals else None},
        {
            "instant": forecast_result.format_instant,
            "rate": forecast_result.format_rate,
            "destination": forecast_result.format_destination,
        },
        result=result,
        mood="worry" if result.overdue or result.herds else "plain",
        headlines=forecast_result.headlines(result),
        worth_showing=_visible_shares,
        legend=stacked_colours(result),
        others=any(interval.others for interval in result.intervals),
        destinations=result.destinations[:_MOST_ROWS],
    )


def write_forecast(result: forecast_result.ForecastResult, path: Path, title: str = "What falls due") -> None:
    path.write_text(render_forecast(result, title), encoding="utf-8")


def _visible_shares(herd: forecast_result.Herd) -> list[forecast_result.DestinationShare]:
    """Return the destinations without those that would be shown as 0 %."""
    return [share for share in herd.destinations if 200 * share.messages >= herd.messages]


# --- the chart --------------------------------------------------------------------------------------------------------


_MARK, _REMAINDER = "#030303", "#040404"
_STACKED = tuple(f"#0708{number:02x}" for number in range(8))
_CSS_COLOURS = {
    _MARK: "var(--mark)",
    _REMAINDER: "var(--others)",
    **{colour: f"var(--stack{number})" for number, colour in enumerate(_STACKED)},
}
_MARKED_HERDS = 5
_DAY_MICROSECONDS = 86_400_000_000
_SECOND = 1 / 86_400
_FIRST_DAY = to_microseconds(datetime(1, 1, 1, tzinfo=UTC)) / _DAY_MICROSECONDS
_LAST_DAY = to_microseconds(datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)) / _DAY_MICROSECONDS


def stacked_colours(result: forecast_result.ForecastResult) -> list[tuple[str | None, str]]:
    """Return the destinations that the load chart shows separately, with their CSS colours; most messages first."""
    separate_names = {share.destination for interval in result.intervals for share in interval.destinations}
    names = [each.destination for each in result.destinations if each.destination in separate_names]
    return [(name, _CSS_COLOURS[colour]) for name, colour in zip(names, _STACKED, strict=False)]


def load_chart(result: forecast_result.ForecastResult) -> str:
    """Return the load over time, stacked by destination, with the biggest herds marked, as one SVG element.

    If a herd would flatten all other times, a second panel shows them, and cuts off the herd.
    """
    usual = usual_height([interval.messages for interval in result.intervals])
    with svg_axes("load", _CSS_COLOURS, panels=1 if usual is None else 2) as (panels, svg_texts):
        starts = [to_microseconds(interval.start) / _DAY_MICROSECONDS for interval in result.intervals]
        names = [name for name, _ in stacked_colours(result)]
        days = result.interval_seconds / 86_400  # Matplotlib counts time in days.
        bottom = [0] * len(starts)
        shares = [{share.destination: share.messages for share in each.destinations} for each in result.intervals]
        layers = [[each.get(name, 0) for each in shares] for name in names]
        remainder = [each.others for each in result.intervals]
        for heights, colour in [*zip(layers, _STACKED, strict=False), (remainder, _REMAINDER)]:
            for axes in panels:
                axes.bar(starts, heights, days, bottom, align="edge", color=colour, linewidth=0)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
        _mark_herds(panels[0], result.herds, dict(zip(starts, bottom, strict=True)), result.interval_seconds)
        for axes in panels:
            axes.margins(y=0.12)
        count_axis(panels[0], f"messages in {format_seconds(result.interval_seconds)}")
        if usual is not None:
            count_axis(panels[1], "the same, without the peaks")
            panels[1].set_ylim(top=usual)
        _set_limits(panels[-1], starts[0], starts[-1] + days)
    return svg_texts[0]


def _mark_herds(
    axes: Axes, herds: Sequence[forecast_result.Herd], tops: Mapping[float, int], width_seconds: int
) -> None:
    """Number the biggest herds above their bars, as in the table below the chart."""
    width = width_seconds * 1_000_000
    numbers: dict[float, list[str]] = {}
    for number, herd in enumerate(herds[:_MARKED_HERDS], 1):
        start = to_microseconds(herd.start) // width * width / _DAY_MICROSECONDS
        if start in tops:  # A herd that is not in this dictionary is far away, and not in the picture.
            numbers.setdefault(start, []).append(str(number))
    for start, marks in numbers.items():
        position = (start + width / _DAY_MICROSECONDS / 2, tops[start])
        axes.annotate(
            f"herd {', '.join(marks)}", position, (0, 4), textcoords="offset points", ha="center", color=_MARK
        )


def _set_limits(axes: Axes, first: float, last: float) -> None:
    """Leave some space at the sides. Time ends with the year 9999, for Matplotlib too."""
    margin = max((last - first) / 100, _SECOND)
    axes.set_xlim(max(first - margin, _FIRST_DAY), min(last + margin, _LAST_DAY))
    time_axis(axes)

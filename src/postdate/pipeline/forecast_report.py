"""A forecast as one HTML file. Runs on the driver."""

from __future__ import annotations

from pathlib import Path

from postdate.pipeline.forecast_charts import load_chart, stacked_colours
from postdate.pipeline.forecast_result import (
    DestinationShare,
    ForecastResult,
    Herd,
    headlines,
    shown_destination,
    shown_instant,
    shown_rate,
)
from postdate.pipeline.page import rendered

_MOST_ROWS = 100
"""Destinations shown, at most: nobody reads a longer table, and the JSON has more."""


def render_forecast(result: ForecastResult, title: str = "What falls due") -> str:
    """Return a forecast as a complete HTML page; ``title`` is its heading."""
    return rendered(
        "forecast",
        title,
        {"load_chart": load_chart(result) if result.intervals else None},
        {"instant": shown_instant, "rate": shown_rate, "destination": shown_destination},
        result=result,
        mood="worry" if result.overdue or result.herds else "plain",
        headlines=headlines(result),
        worth_showing=_worth_showing,
        legend=stacked_colours(result),
        others=any(interval.others for interval in result.intervals),
        destinations=result.destinations[:_MOST_ROWS],
    )


def write_forecast(result: ForecastResult, path: Path, title: str = "What falls due") -> None:
    path.write_text(render_forecast(result, title), encoding="utf-8")


def _worth_showing(herd: Herd) -> list[DestinationShare]:
    """Leave out destinations that would be shown as 0 %."""
    return [share for share in herd.destinations if 200 * share.messages >= herd.messages]

"""A forecast as one HTML file. Runs on the driver."""

from __future__ import annotations

from pathlib import Path

from postdate.pipeline.forecast_charts import backlog_chart, drain_chart, load_chart, stacked_colours
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
"""Destinations and backlogs shown, at most: nobody reads a longer table, and the JSON has more."""


def render_forecast(result: ForecastResult, title: str = "What falls due") -> str:
    """Return a forecast as a complete HTML page; ``title`` is its heading."""
    curve = () if result.drain is None else result.drain.curve
    charts = {
        "load_chart": load_chart(result) if result.intervals else None,
        "drain_chart": drain_chart(curve) if curve else None,
        "backlog_chart": backlog_chart(curve) if curve else None,
    }
    return rendered(
        "forecast",
        title,
        charts,
        {"instant": shown_instant, "rate": shown_rate, "destination": shown_destination},
        result=result,
        mood=_mood(result),
        headlines=headlines(result),
        worth_showing=_worth_showing,
        legend=stacked_colours(result),
        others=any(interval.others for interval in result.intervals),
        destinations=result.destinations[:_MOST_ROWS],
        backlogs=() if result.drain is None else result.drain.backlogs[:_MOST_ROWS],
    )


def write_forecast(result: ForecastResult, path: Path, title: str = "What falls due") -> None:
    path.write_text(render_forecast(result, title), encoding="utf-8")


def _mood(result: ForecastResult) -> str:
    if result.drain is None:
        return "worry" if result.overdue or result.herds else "plain"
    if result.drain.backlogs:
        return "bad"
    return "worry" if result.overdue else "good"


def _worth_showing(herd: Herd) -> list[DestinationShare]:
    """Leave out destinations that would be shown as 0 %."""
    return [share for share in herd.destinations if 200 * share.messages >= herd.messages]

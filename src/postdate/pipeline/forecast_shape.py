"""What a forecast decides from the load over time, whatever has counted it: limits, widths, and needed rates."""

from __future__ import annotations

from datetime import datetime, timedelta

from postdate.clock import to_microseconds
from postdate.pipeline import forecast_result
from postdate.pipeline.forecast_rates import Load, horizon, needed_rate, round_width

MOST_INTERVALS = 400
"""Maximum number of intervals in JSON and on the page."""

MOST_DESTINATIONS, SEPARATE_DESTINATIONS = 400, 8
MOST_HERDS, DESTINATIONS_OF_A_HERD = 100, 5
_TOLERANCES_SECONDS = (10.0, 60.0)


def load_width(load: Load, width_name: str) -> int:
    """Return the width of the intervals of the table, in seconds."""
    if width_name != forecast_result.AUTO:
        return forecast_result.FRAME_WIDTHS[width_name]
    span = _span(load)
    return next(
        (width for width in forecast_result.FRAME_WIDTHS.values() if span < MOST_INTERVALS * width),
        forecast_result.FRAME_WIDTHS["day"],
    )


def interval_width(load: Load, width_name: str) -> int:
    """Return the width of the intervals of the result, in seconds."""
    at_least = max(forecast_result.FRAME_WIDTHS.get(width_name, 1), load.step)
    return round_width(_span(load), MOST_INTERVALS, at_least)


def _span(load: Load) -> int:
    return horizon(load) - int(load.seconds[0]) + load.step if len(load) else 0


def needed_rates(
    load: Load, as_of: datetime, overdue: int, tolerance: timedelta
) -> tuple[forecast_result.NeededRate, ...]:
    """Return the needed rates. No tolerance can be shorter than a step."""
    upcoming, with_overdue = (load.starting_at(to_microseconds(as_of) // 1_000_000, each) for each in (0, overdue))
    tolerances = (tolerance.total_seconds(), *_TOLERANCES_SECONDS)
    return tuple(
        forecast_result.NeededRate(seconds, needed_rate(upcoming, seconds), needed_rate(with_overdue, seconds))
        for seconds in sorted({max(seconds, float(load.step)) for seconds in tolerances})
    )

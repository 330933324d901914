"""Gauges of pending messages, and of the clock that judges them. Every service of a store reports the same values."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from datetime import timedelta

from postdate.clock import Clock
from postdate.core.upkeep.store_clock import FollowingClock
from postdate.operations import Overview
from postdate.operations.looking import Refresher
from postdate.runtime.reporting import Gauges


def build_gauge_reader(refresher: Refresher[Overview], clock: Clock) -> Callable[[], Gauges]:
    """Return a function that returns the gauges of the last look and requests another look.

    It may run in any thread.
    """
    loop = asyncio.get_running_loop()

    def read_gauges() -> Gauges:
        if not loop.is_closed():
            # The exporter calls this in a thread of its own, and events of the loop may only be set in the loop.
            loop.call_soon_threadsafe(refresher.remember_request)
        overview = refresher.last_value
        gauges = {} if overview is None else _store_gauges(overview)
        if isinstance(clock, FollowingClock) and (ahead := clock.ahead) is not None:
            gauges["clock.offset"] = {"": ahead.total_seconds()}
        return gauges

    return read_gauges


def _store_gauges(state: Overview) -> dict[str, Mapping[str, float]]:
    statistics, overdue_since = state.statistics, state.overdue_since
    age = timedelta(0) if overdue_since is None else statistics.at - overdue_since
    values = {
        **{name: getattr(statistics, name) for name in ("pending", "overdue", "claimed", "failing", "unreadable")},
        "overdue.age": age.total_seconds(),
        "errors": state.errors,
        # The statistics count the other services; this process is one more.
        "services": None if statistics.services is None else statistics.services + 1,
    }
    # The items of an hour are minutes. The first is the rest of this minute, so two reach to the end of the next one.
    intervals_until = {"minute": state.hour[:2], "hour": state.hour, "day": state.day}
    due = {name: sum(each.count for each in intervals) for name, intervals in intervals_until.items()}
    return {**{name: {"": value} for name, value in values.items() if value is not None}, "due": due}

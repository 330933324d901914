"""The state of a deployment at one glance: due times, destinations, processes and failures."""

from __future__ import annotations

import math
import statistics as mathematics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from postdate.clock import later
from postdate.core.limits import load_limits_in_force
from postdate.messages import OF_THE_STORE
from postdate.operations.messages import Statistics, statistics
from postdate.operations.needs import list_store_processes, require_administrable
from postdate.ports import DeliveredMessage, MessageFilter, Process, counts_between
from postdate.ports.limits import LimitingStore
from postdate.wiring import OpenDeployment

LOOK_AHEAD: Final = 10_000
_SEARCHED: Final = 500
"""Number of due messages to search for an overdue one that no limit holds."""

_HERD_FACTOR: Final = 10
"""A herd has this many times the messages of the ordinary interval."""

_LEAST_HERD: Final = 1_000
_LATEST: Final = 500
"""Number of the latest deliveries from which the lateness is computed."""

_UP_TO: Final = {"1 ms": 0.001, "10 ms": 0.01, "100 ms": 0.1, "1 s": 1.0, "10 s": 10.0, "1 min": 60.0}
_LATE: Final = {**{f"up to {name}": seconds for name, seconds in _UP_TO.items()}, "longer": math.inf}
"""Upper bounds of lateness, in seconds, by label."""

_MINUTE, _HOUR, _DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Interval:
    """Messages due from ``begin`` (inclusive) to ``end``. ``herd``: ten times as many as usual, and 1,000 at least."""

    begin: datetime
    end: datetime
    count: int
    herd: bool


@dataclass(frozen=True, slots=True)
class RecentLateness:
    """How late the latest deliveries were, by their records.

    Args:
        last: when the latest delivery was; ``None``: there is no recent one.
        since: when the earliest of the counted deliveries was.
        count: number of deliveries that say how late they were, at most 500; 0: there are none, or the store does not
            record their due times.
        median, most: lateness of these; ``most`` is the 99th percentile.
        spread: number of deliveries by lateness, from ``up to 1 ms`` on.
        early: number of deliveries recorded before their due time, as where clocks differ; they count as not late.
    """

    last: datetime | None
    since: datetime | None
    count: int
    median: timedelta
    most: timedelta
    spread: Mapping[str, int]
    early: int

    @classmethod
    def of(cls, deliveries: Sequence[DeliveredMessage]) -> RecentLateness:
        """Compute the lateness of deliveries, which are given with the newest first."""
        spans, zero = [(each.at, each.at - each.due) for each in deliveries if each.due is not None], timedelta(0)
        late = sorted(max(span, zero) for _, span in spans)
        spread = Counter(next(name for name, most in _LATE.items() if each.total_seconds() <= most) for each in late)
        return cls(
            last=deliveries[0].at if deliveries else None,
            since=spans[-1][0] if spans else None,
            count=len(late),
            median=late[(len(late) - 1) // 2] if late else zero,
            most=late[math.ceil(0.99 * len(late)) - 1] if late else zero,
            spread={name: spread[name] for name in _LATE},
            early=sum(span < zero for _, span in spans),
        )


@dataclass(frozen=True, slots=True)
class Overview:
    """Everything that the first page of an operator shows.

    Args:
        statistics: without counts of records.
        hour, day, month: the number of messages due from this minute on, by minute, hour and day of UTC.
        destinations: number of the next 10,000 messages by destination; ``None`` if that cannot be seen.
        processes: the processes that use the store; ``None`` if they cannot be seen.
        clocks: how far the clock of each process is ahead of the store's, by ``host:pid``, as far as that is known.
        errors: number of messages of the error queue; ``None`` if they cannot be counted.
        overdue_since: due time of the first overdue message that limits do not hold; ``None``: limits hold every due
            message among those examined.
        overdue: number of messages overdue for less than a minute, an hour, a day, and longer; empty if there are none.
            A message that is being sent counts if it was due more than a minute ago.
        lateness: of the latest deliveries; ``None`` if that cannot be seen, or was not asked for.
    """

    statistics: Statistics
    hour: Sequence[Interval]
    day: Sequence[Interval]
    month: Sequence[Interval]
    destinations: Mapping[str, int] | None
    processes: Sequence[Process] | None
    clocks: Mapping[str, timedelta]
    errors: int | None
    overdue_since: datetime | None
    overdue: Sequence[Interval]
    lateness: RecentLateness | None


async def overview(deployment: OpenDeployment, now: datetime, look_ahead: int = LOOK_AHEAD) -> Overview:
    """Return one view of everything, read by indexes.

    Args:
        deployment: the deployment to read.
        now: by the clock that judges due times.
        look_ahead: number of messages to count by destination; 0: count none, and do not read the latest deliveries.

    Raises:
        NotSupported: the store answers no questions at all.
        StoreUnavailable: the store does not answer. Queues that do not answer are not counted.
    """
    totals, view, store = await statistics(deployment, now, at_a_glance=True), deployment.store_view, deployment.store
    first = now.replace(second=0, microsecond=0)
    minutes, hours = _edges(first, first, _MINUTE, 60), _edges(first, first.replace(minute=0), _HOUR, 24)
    days = _edges(first, first.replace(hour=0, minute=0), _DAY, 30)
    # Each edge of hours and days is also an edge of the list: each message is counted once and added up three times.
    edges = sorted({*minutes, *hours, *days})
    counts = await require_administrable(deployment, "count messages").due_counts(edges)
    dues = list(zip(edges, counts, strict=False))
    next_destinations = None if view is None or not look_ahead else await view.next_destinations(look_ahead)
    return Overview(
        statistics=totals,
        hour=intervals(minutes, counts_between(minutes, dues)),
        day=intervals(hours, counts_between(hours, dues)),
        month=intervals(days, counts_between(days, dues)),
        destinations=next_destinations
        and {name: count for name, count in next_destinations.items() if name not in OF_THE_STORE},
        processes=await list_store_processes(deployment),
        clocks=await store.reported_clocks() if store and view and look_ahead and store.capabilities.has_clock else {},
        errors=(totals.queues or {}).get(deployment.settings.endpoint.error_queue),
        overdue_since=await _find_overdue_since(deployment, totals),
        overdue=await _count_by_age(deployment, totals),
        lateness=None if view is None or not look_ahead else RecentLateness.of(await view.latest_deliveries(_LATEST)),
    )


async def _find_overdue_since(deployment: OpenDeployment, totals: Statistics) -> datetime | None:
    store = require_administrable(deployment, "list messages")
    limited = (
        set(await load_limits_in_force(store)) if totals.overdue and isinstance(store, LimitingStore) else set[str]()
    )
    if not limited:
        return totals.next_due if totals.overdue else None
    due = await store.list_pending(MessageFilter(due_to=totals.at), _SEARCHED)
    return next((each.due for each in due if each.destination not in limited), None)


async def _count_by_age(deployment: OpenDeployment, totals: Statistics) -> Sequence[Interval]:
    if not totals.overdue or totals.next_due is None:
        return ()
    at = totals.at.replace(microsecond=0)
    oldest = min(totals.next_due.replace(microsecond=0), at - 2 * _DAY)
    edges = [oldest, at - _DAY, at - _HOUR, at - _MINUTE]
    old = await require_administrable(deployment, "count messages").due_counts(edges)
    # The rest is overdue for less than a minute. Messages due within this second do not count as overdue.
    counts = [*old, max(totals.overdue - sum(old), 0)]
    ages = zip(edges, [*edges[1:], totals.at], counts, strict=True)
    return [Interval(begin, end, count, herd=False) for begin, end, count in ages][::-1]


def _edges(first: datetime, begin: datetime, step: timedelta, count: int) -> list[datetime]:
    """Return the edges of ``count`` intervals.

    The first interval began at ``begin``, and is counted from ``first`` on.
    """
    return [first, *(later(begin, n * step) for n in range(1, count + 1))]


def intervals(edges: Sequence[datetime], counts: Sequence[int]) -> list[Interval]:
    """Return intervals with their counts, and mark the herds among them."""
    usual = mathematics.median([each for each in counts if each] or [0])
    least = max(_HERD_FACTOR * usual, _LEAST_HERD)
    return [Interval(*each, herd=each[2] >= least) for each in zip(edges, edges[1:], counts, strict=False)]

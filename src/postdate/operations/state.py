"""The state of a deployment at one glance: what is due when, where it goes, who delivers it, what went wrong."""

from __future__ import annotations

import statistics as mathematics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from postdate.clock import later
from postdate.core.limits import limits_of
from postdate.operations.messages import Statistics, statistics
from postdate.operations.needs import administrable, users_of_store
from postdate.ports import MessageFilter, Process, counted_between
from postdate.ports.changing import MARKERS
from postdate.ports.limits import LimitingStore
from postdate.wiring import OpenDeployment

LOOK_AHEAD: Final = 10_000
_LOOKED_THROUGH: Final = 500
"""Of what is due, where limits are in force: whether any of it is overdue."""

_HERD_IS: Final = 10
"""So many times the ordinary interval."""

_LEAST_HERD: Final = 1_000
_MINUTE, _HOUR, _DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Interval:
    """Messages due from ``begin`` (inclusive) to ``end``; ``herd``: ten times as many as usual, and 1,000 at least."""

    begin: datetime
    end: datetime
    count: int
    herd: bool


@dataclass(frozen=True, slots=True)
class Overview:
    """All that the first page of an operator shows.

    Args:
        statistics: without counts of records.
        hour, day, month: what falls due from this minute on, by minute, hour and day of UTC.
        destinations: how many of the next 10,000 messages each gets; ``None`` where that cannot be seen.
        processes: that use the store; ``None`` where they cannot be seen.
        errors: messages of the error queue; ``None`` where that cannot be counted.
        overdue_since: when the first was due of those that limits do not hold; ``None``: limits hold all that is due,
            as far as was looked.
    """

    statistics: Statistics
    hour: Sequence[Interval]
    day: Sequence[Interval]
    month: Sequence[Interval]
    destinations: Mapping[str, int] | None
    processes: Sequence[Process] | None
    errors: int | None
    overdue_since: datetime | None


async def overview(deployment: OpenDeployment, now: datetime, look_ahead: int = LOOK_AHEAD) -> Overview:
    """Look at everything once, by indexes.

    Args:
        deployment: that is looked at.
        now: by the clock that judges due times.
        look_ahead: so many messages are counted by destination; 0: none.

    Raises:
        NotSupported: the store answers no questions at all.
        StoreUnavailable: it does not answer. Queues that do not are not counted.
    """
    counted, view = await statistics(deployment, now, at_a_glance=True), deployment.store_view
    first = now.replace(second=0, microsecond=0)
    minutes, hours = _edges(first, first, _MINUTE, 60), _edges(first, first.replace(minute=0), _HOUR, 24)
    days = _edges(first, first.replace(hour=0, minute=0), _DAY, 30)
    # Each edge of one is an edge of all: what is due is counted once, and added up three times.
    edges = sorted({*minutes, *hours, *days})
    counts = await administrable(deployment, "count messages").due_counts(edges)
    dues = list(zip(edges, counts, strict=False))
    following = None if view is None or not look_ahead else await view.next_destinations(look_ahead)
    return Overview(
        statistics=counted,
        hour=intervals(minutes, counted_between(minutes, dues)),
        day=intervals(hours, counted_between(hours, dues)),
        month=intervals(days, counted_between(days, dues)),
        destinations=following and {name: count for name, count in following.items() if name != MARKERS},
        processes=await users_of_store(deployment),
        errors=(counted.queues or {}).get(deployment.settings.endpoint.error_queue),
        overdue_since=await _overdue_since(deployment, counted),
    )


async def _overdue_since(deployment: OpenDeployment, counted: Statistics) -> datetime | None:
    store = administrable(deployment, "list messages")
    held = set(await limits_of(store)) if counted.overdue and isinstance(store, LimitingStore) else set[str]()
    if not held:
        return counted.next_due if counted.overdue else None
    due = await store.list_pending(MessageFilter(due_to=counted.at), _LOOKED_THROUGH)
    return next((each.due for each in due if each.destination not in held), None)


def _edges(first: datetime, begin: datetime, step: timedelta, count: int) -> list[datetime]:
    """Return the edges of as many intervals, the first of which began before and is counted from ``first`` on."""
    return [first, *(later(begin, n * step) for n in range(1, count + 1))]


def intervals(edges: Sequence[datetime], counts: Sequence[int]) -> list[Interval]:
    """Return intervals with their counts, the herds among them marked."""
    usual = mathematics.median([each for each in counts if each] or [0])
    least = max(_HERD_IS * usual, _LEAST_HERD)
    return [
        Interval(begin, end, count, count >= least) for begin, end, count in zip(edges, edges[1:], counts, strict=False)
    ]

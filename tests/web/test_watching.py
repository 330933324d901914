"""However many watch, a store is looked at seldom: a fiftieth of the time, and not at all when nobody watches."""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import anyio
import pytest
from tests.web.conftest import Deployment, settings_of

from postdate import MemoryTransport, operations
from postdate.clock import Clock
from postdate.errors import (
    NotSupported,
    PostdateError,
    QueueNotFound,
    StoreUnavailable,
    StoreUnreachable,
    TransportUnreachable,
)
from postdate.operations.looking import Refresher, compute_pause
from postdate.runtime.resource import resource_of
from postdate.testing import VirtualClock
from postdate.web.watching import Watcher
from postdate.wiring import OpenDeployment, open_deployment

SECOND = timedelta(seconds=1)
HOUR = 3_600 * SECOND


@asynccontextmanager
async def refreshing(
    deployment: Deployment, clock: Clock, look: Callable[[OpenDeployment, datetime], Any]
) -> AsyncGenerator[Refresher[Any]]:
    refresher = Refresher(look, clock)
    async with open_deployment(settings_of(deployment.address)) as opening, anyio.create_task_group() as tasks:
        tasks.start_soon(refresher.run, opening)
        try:
            yield refresher
        finally:
            tasks.cancel_scope.cancel()


class Looks:
    """Takes so long, counts, and finds the number of the look."""

    def __init__(self, clock: VirtualClock, seconds: float) -> None:
        self._clock, self._took = clock, seconds * SECOND
        self.count = 0

    async def __call__(self, deployment: OpenDeployment, now: datetime) -> int:
        await self._clock.sleep(self._took)
        self.count += 1
        return self.count


@pytest.mark.parametrize(
    ("took", "most"), [(0.0, 1_801), (0.04, 1_765), (0.1, 727), (0.2, 361), (10.0, 12), (100.0, 10)]
)
async def test_looking_takes_a_fiftieth_of_the_time(deployment: Deployment, took: float, most: int) -> None:
    clock = VirtualClock()
    looks = Looks(clock, took)
    async with refreshing(deployment, clock, looks) as refresher:
        for _ in range(3_600):  # somebody asks each second
            refresher.remember_request()
            await clock.advance(SECOND)
    assert most - 8 <= looks.count <= most
    assert compute_pause(took) >= timedelta(seconds=min(max(49 * took, 2), 300))


async def test_nobody_watching_is_not_looked_for(deployment: Deployment) -> None:
    clock = VirtualClock()
    looks = Looks(clock, 0.0)
    async with refreshing(deployment, clock, looks) as refresher:
        await clock.advance(HOUR)
        assert looks.count == 0
        assert (await refresher.get_latest()).value == 1
        await clock.advance(HOUR)
        assert looks.count == 30  # for a minute after that
        look = await refresher.get_latest()
        assert (look.value, look.number) == (31, 31)  # not the one of an hour ago


async def test_any_number_of_requests_look_no_more_often(deployment: Deployment) -> None:
    clock = VirtualClock()
    looks, found = Looks(clock, 0.0), list[int]()

    async def ask(refresher: Refresher[int]) -> None:
        found.append((await refresher.get_latest()).value)

    async with refreshing(deployment, clock, looks) as refresher, anyio.create_task_group() as tasks:
        for _ in range(1_000):
            tasks.start_soon(ask, refresher)
    assert (found, looks.count) == ([1] * 1_000, 1)


async def test_an_error_is_told_to_all_until_a_look_finds_something(deployment: Deployment) -> None:
    clock, outage = VirtualClock(), [StoreUnavailable("away")]

    async def look(deployment: OpenDeployment, now: datetime) -> str:
        if outage:
            raise outage[0]
        return "there"

    async with refreshing(deployment, clock, look) as refresher:
        for _ in range(3):
            with pytest.raises(StoreUnavailable, match="away"):
                _ = (await refresher.get_latest()).value
        outage.clear()
        await clock.advance(11 * SECOND)
        assert (await refresher.get_latest()).value == "there"


@pytest.mark.parametrize(
    ("error", "asks_queues", "outages"),
    [
        (NotSupported("cannot group failed messages"), True, []),
        (QueueNotFound("there is no queue 'error'"), True, []),
        (StoreUnreachable("queues in a database"), True, ["queues"]),
        (TransportUnreachable("queues at a server"), True, ["queues"]),
        (StoreUnreachable("the store"), False, ["store"]),
    ],
)
async def test_an_outage_is_one_of_the_part_that_was_asked_and_a_refusal_is_none(
    deployment: Deployment, error: PostdateError, asks_queues: bool, outages: list[str]
) -> None:
    clock = VirtualClock()

    async def look(deployment: OpenDeployment, now: datetime) -> None:
        raise error

    refresher = Refresher(look, clock, asks_queues=asks_queues)
    async with open_deployment(settings_of(deployment.address)) as opening, anyio.create_task_group() as tasks:
        parts = replace(opening, transport=MemoryTransport())
        tasks.start_soon(refresher.run, parts)
        await refresher.get_latest()
        resources = {"store": resource_of(parts.store), "queues": resource_of(parts.transport)}
        assert [name for name, each in resources.items() if each.outage_text(clock.monotonic())] == outages
        tasks.cancel_scope.cancel()


async def test_an_error_queue_out_of_reach_is_an_outage_of_the_queues(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise StoreUnreachable("connection refused")

    monkeypatch.setattr(operations, "group_errors", fail)
    clock = VirtualClock()
    watcher = Watcher(settings_of(deployment.address), clock)
    async with open_deployment(watcher.settings) as opening, anyio.create_task_group() as tasks:
        parts = replace(opening, transport=MemoryTransport())
        tasks.start_soon(watcher.errors.run, parts)
        await watcher.errors.get_latest()
        outages = [resource_of(each).outage_text(clock.monotonic()) for each in (parts.store, parts.transport)]
        assert outages == [None, "out of reach for 0.0 s: connection refused"]
        tasks.cancel_scope.cancel()


async def test_news_come_with_the_next_look(deployment: Deployment) -> None:
    clock = VirtualClock()
    async with refreshing(deployment, clock, Looks(clock, 0.0)) as refresher:
        look = await refresher.get_latest()
        assert await refresher.wait_for_newer(look.number, 0.0) is None
        await clock.advance(3 * SECOND)
        newer = await refresher.wait_for_newer(look.number, 0.0)
    assert newer is not None
    assert newer.number == 2

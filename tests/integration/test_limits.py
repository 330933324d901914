"""Limits of destinations are kept by all services of a store together, on real servers (ADR 34)."""

import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from tests.integration.postgres_place import now
from tests.integration.test_client import client_of
from tests.integration.test_client_races import services
from tests.waiting import until

from postdate import Client, Limits, SendOptions, connect
from postdate.core.changes import administrable_store
from postdate.errors import NotSupported
from postdate.operations import MessageState
from postdate.ports import RecordKind, TransactionMode
from postdate.wiring import open_store, open_transport

SECOND = timedelta(seconds=1)


class Shop:
    """A store, its queues, and services of it that run as processes."""

    def __init__(self, client: Client, url: str, more: dict[str, str], queues: str, folder: Path) -> None:
        self.client, self._url, self._more, self._queues, self._folder = client, url, more, queues, folder
        self._of_queues = more if queues == url else {}
        self.transport = open_transport(queues, **self._of_queues)

    @asynccontextmanager
    async def running(self, count: int) -> AsyncGenerator[None]:
        await self.transport.create_queues(["q", "free", "error", "postdate.timeouts"])
        environment = {name: value for name, value in os.environ.items() if not name.startswith("POSTDATE_")}
        environment |= {"POSTDATE_STORE__ADDRESS": self._url, "POSTDATE_TRANSPORT__ADDRESS": self._queues}
        environment |= {f"POSTDATE_STORE__{name.upper()}": value for name, value in self._more.items()}
        environment |= {f"POSTDATE_TRANSPORT__{name.upper()}": value for name, value in self._of_queues.items()}
        async with services(environment, self._folder, count):
            yield

    async def send(self, count: int, queue: str = "q", due: timedelta = timedelta(0)) -> list[str]:
        at = now() + due
        found = [(b"%d" % n, SendOptions(queue, message_id=f"{queue}-{n:05}", deliver_at=at)) for n in range(count)]
        return await self.client.send_many(found)

    async def arrived(self, queue: str = "q") -> int:
        return (await self.transport.lengths_of([queue]) or {}).get(queue, 0)

    async def delivered_at(self, ids: Sequence[str]) -> list[datetime]:
        store = open_store(self._url, **self._more)
        try:
            await store.initialize("postdate", TransactionMode.RECEIVE_ONLY)
            found = [await administrable_store(store).history(each) for each in ids]
        finally:
            await store.close()
        return sorted(each.at for records in found for each in records if each.kind is RecordKind.DELIVERED)


@asynccontextmanager
async def shop(kind: str, request: pytest.FixtureRequest) -> AsyncGenerator[Shop]:
    folder: Path = request.getfixturevalue("tmp_path")
    name, _, queues = kind.partition(" ")
    with client_of(name, request) as (client, url, more):
        async with AsyncExitStack() as stack:
            own = client
            if queues:
                queues = f"local:///{folder / 'queues.db'}"
                own = await stack.enter_async_context(connect(url, transport=queues, **more))
            found = Shop(own, url, more, queues or url, folder)
            stack.push_async_callback(found.transport.close)
            yield found


KINDS = ["sqlite", "postgres", "postgres elsewhere", "mariadb elsewhere"]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_paused_queue_gets_nothing_until_it_is_resumed(kind: str, request: pytest.FixtureRequest) -> None:
    async with shop(kind, request) as place:
        assert await place.client.pause("q") == Limits(paused=True)
        async with place.running(1):
            ids = await place.send(50)
            free = await place.send(50, "free", SECOND)
            await until(lambda: _is(place, 50, "free"))
            assert await place.arrived() == 0
            explanation = await place.client.explain(ids[0])
            assert explanation.state is MessageState.HELD
            assert "paused" in explanation.headline
            assert await place.client.cancel(ids[0])
            assert await place.client.reschedule(ids[1], delay=timedelta(0))
            assert await place.client.limits() == {"q": Limits(paused=True)}
            await place.client.resume("q")
            await until(lambda: _is(place, 49))
        assert len(await place.delivered_at([*ids, *free])) == 99
        assert await place.client.list() == []


async def _is_over(place: Shop, count: int) -> bool:
    return await place.arrived() >= count


async def _is(place: Shop, count: int, queue: str = "q") -> bool:
    return await place.arrived(queue) == count


@pytest.mark.parametrize("kind", ["postgres", "mariadb elsewhere"])
async def test_three_services_keep_a_rate_together(kind: str, request: pytest.FixtureRequest) -> None:
    async with shop(kind, request) as place:
        await place.client.limit("q", per_second=100)
        ids, began = await place.send(250), now()
        async with place.running(3):
            await until(lambda: _is(place, 250))
        times = await place.delivered_at(ids)
        assert len(times) == 250
        for count, at in enumerate(times, 1):  # recorded when it was sent, or later; two turns may be made up for
            assert count <= 100 * ((at - began).total_seconds() + 0.05) + 20, (count, at - began)


@pytest.mark.soak(
    "a herd of 5,000 takes 100 s at 50 a second",
    part="random",
    proven_by="tests/integration/test_limits.py::test_three_services_keep_a_rate_together",
)
@pytest.mark.parametrize("kind", KINDS)
async def test_fifty_a_second_of_a_herd_of_5000(kind: str, request: pytest.FixtureRequest) -> None:
    async with shop(kind, request) as place:
        await place.client.limit("q", per_second=50)
        ids = await place.send(5_000, due=5 * SECOND)
        async with place.running(3):
            for count in (2_500, 5_000):
                await until(lambda count=count: _is_over(place, count))
        times = await place.delivered_at(ids)
        assert len(times) == 5_000
        first = times[0]
        spans = [sum(first + n * SECOND <= at < first + (n + 10) * SECOND for at in times) for n in range(85)]
        print(f"{kind}: {min(spans) / 10} to {max(spans) / 10} a second")  # noqa: T201
        assert 480 <= min(spans) <= max(spans) <= 520, spans


async def test_stores_that_keep_no_limits_say_so(request: pytest.FixtureRequest) -> None:
    with client_of("redis", request) as (client, _, _), pytest.raises(NotSupported, match="does not support limits"):
        await client.pause("q")

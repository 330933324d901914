"""Listening to channels of Redis, on a connection of the test's own: no server, and no moment left to chance."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import anyio
import pytest
from tests.waiting import until

from postdate.backends.redis.liveness import Subscriptions
from postdate.backends.redis.login import RedisLogin
from postdate.backends.redis.server import RedisConnections, cancel_task


class Connection:
    """Keeps what is sent; answers when the test does."""

    def __init__(self) -> None:
        self.sent: list[tuple[object, ...]] = []
        self.answers: asyncio.Queue[object] = asyncio.Queue()
        self.is_connected = True

    async def send_command(self, *words: object) -> None:
        self.sent.append(words)

    async def read_response(self, timeout: float) -> object:
        answer = await self.answers.get()
        if isinstance(answer, Exception):
            self.is_connected = False
            raise answer
        return answer

    async def disconnect(self, *, nowait: bool) -> None:
        self.is_connected = False


class Server(RedisConnections):
    """Has the connections that the test looks at."""

    def __init__(self) -> None:
        super().__init__(RedisLogin("nobody"))
        self.connections: asyncio.Queue[Connection] = asyncio.Queue()

    async def open_connection(self) -> Any:
        made = Connection()
        await self.connections.put(made)
        return made


@pytest.fixture
async def server() -> Server:
    return Server()


@pytest.fixture
async def listening(server: Server) -> AsyncIterator[Subscriptions]:
    made = Subscriptions(server)
    yield made
    await made.close()


def ignore(_text: bytes | None) -> None:
    """Hear nothing."""


async def connected(server: Server, listening: Subscriptions, channel: str) -> Connection:
    """Listen to a first channel; return the connection, on which the subscription stands."""
    begun = asyncio.create_task(listening.listen(channel, ignore))
    connection = await server.connections.get()
    await connection.answers.put([b"subscribe", channel.encode(), 1])
    await begun
    return connection


async def sent(connection: Connection, count: int) -> list[tuple[object, ...]]:
    await until(lambda: len(connection.sent) >= count)
    return connection.sent


async def test_who_listens_is_told_to_look_once_the_subscription_stands_and_not_before(
    server: Server, listening: Subscriptions
) -> None:
    """What is said between a look and the subscription would be heard by nobody."""
    heard = list[bytes | None]()
    begun = asyncio.create_task(listening.listen("wake", heard.append))
    first = await server.connections.get()
    assert await sent(first, 1) == [("SUBSCRIBE", b"wake")]
    assert heard == []
    await first.answers.put([b"subscribe", b"wake", 1])
    await begun
    assert heard == [None]
    await first.answers.put([b"message", b"wake", b"now"])
    await first.answers.put(ConnectionResetError("gone"))
    second = await server.connections.get()
    assert await sent(second, 1) == [("SUBSCRIBE", b"wake")]
    assert heard == [None, b"now"]
    await second.answers.put([b"subscribe", b"wake", 1])
    await until(lambda: len(heard) >= 3)
    assert heard == [None, b"now", None]


async def test_a_subscription_that_was_given_up_is_made_by_who_wants_it_next(
    server: Server, listening: Subscriptions
) -> None:
    connection = await connected(server, listening, "other")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(listening.listen, "wake", ignore)
        await sent(connection, 2)
        tasks.cancel_scope.cancel()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(listening.listen, "wake", ignore)
        assert (await sent(connection, 3))[1:] == [("SUBSCRIBE", b"wake")] * 2
        await connection.answers.put([b"subscribe", b"wake", 2])


async def test_nothing_is_sent_on_a_connection_that_has_ended(server: Server, listening: Subscriptions) -> None:
    """The driver would connect anew, and nobody would read what comes."""
    first = await connected(server, listening, "wake")
    first.is_connected = False
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(listening.listen, "other", ignore)
        await anyio.lowlevel.checkpoint()
        await first.answers.put(ConnectionResetError("gone"))
        second = await server.connections.get()
        assert set(cast("tuple[bytes, ...]", (await sent(second, 1))[0])) == {"SUBSCRIBE", b"wake", b"other"}
        await second.answers.put([b"subscribe", b"other", 1])
    assert len(first.sent) == 1


async def test_a_task_that_misses_its_cancellation_is_ended_nevertheless() -> None:
    """As it happens to one that waits by the means of Python 3.11, when what it waits for comes at the same moment."""
    missed = list[str]()

    async def miss_one() -> None:
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if missed:
                    raise
                missed.append("one")

    task = asyncio.create_task(miss_one())
    await anyio.lowlevel.checkpoint()
    await cancel_task(task)
    assert task.cancelled()
    assert missed == ["one"]

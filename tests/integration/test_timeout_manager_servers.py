"""A timeout manager on real servers: one database for both, and queues in a broker with the storage elsewhere."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import anyio
import psycopg
import pytest
from tests.postgres_subjects import drop_schema, fresh_schema
from tests.proxy import FaultyLink
from tests.rabbitmq_subjects import channel_of
from tests.waiting import patience, until

from postdate import (
    AzureStorageQueueTransport,
    DelayedDelivery,
    DelayedMessage,
    Endpoint,
    HandlerContext,
    Headers,
    MemoryStore,
    MemoryTimeouts,
    PostgresStore,
    PostgresTimeouts,
    PostgresTransport,
    RabbitMqTransport,
    SystemClock,
    TimeoutManager,
    TransactionMode,
)
from postdate.core.timeout_manager.steps import timeout_manager_envelope, timeout_of
from postdate.errors import StoreNotSetUp, StoreUnreachable
from postdate.messages import parse_timestamp
from postdate.ports import Transport
from postdate.ports.timeouts import Timeout

MILLISECOND = timedelta(milliseconds=1)
MESSAGES = 100
PING = {Headers.ENCLOSED_MESSAGE_TYPES: "Ping", Headers.CONTENT_TYPE: "application/json"}


@dataclass
class Ping:
    number: int


class Handled:
    """What an endpoint has handled; nothing of it too early."""

    def __init__(self, endpoint: Endpoint, wanted: int) -> None:
        self._wanted, self.counts, self.early = wanted, Counter[int](), list[datetime]()
        self.first, self.all = anyio.Event(), anyio.Event()
        endpoint.handler(Ping, name="Ping")(self._handle)

    async def _handle(self, message: Ping, context: HandlerContext) -> None:
        self.counts[message.number] += 1
        self.first.set()
        due = parse_timestamp(context.headers[Headers.EXPIRE])
        if SystemClock().now() < due:
            self.early.append(due)
        if len(self.counts) == self._wanted:
            self.all.set()


@pytest.fixture
def schema(postgres_url: str) -> Generator[str]:
    """A schema that is dropped afterwards."""
    name = fresh_schema()
    yield name
    drop_schema(postgres_url, name)


async def test_what_a_frozen_process_has_claimed_goes_to_another(
    postgres_url: str, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, the lock stood for as long as the process did, and nobody else sent that timeout."""
    monkeypatch.setattr(
        "postdate.backends.postgres.timeouts._LIMIT_IDLE_TRANSACTION",
        "SET LOCAL idle_in_transaction_session_timeout = 300",
    )
    due = SystemClock().now()
    frozen, other = (PostgresTimeouts(postgres_url, schema=schema) for _ in range(2))
    for each in (frozen, other):
        await each.initialize("sales")
    await frozen.setup()
    id_ = str(uuid.uuid4())
    await frozen.add(Timeout(id_, due, "sales"))
    first = await frozen.claim(id_)
    assert first is not None
    second = await until(lambda: other.claim(id_))
    assert await second.remove()
    with pytest.raises(StoreUnreachable):
        await first.remove()
    await frozen.close()
    await other.close()


@pytest.fixture
def name(rabbitmq_url: str) -> Generator[str]:
    """The name of an endpoint whose queues in the broker are deleted afterwards."""
    name = f"postdate.test.{uuid.uuid4().hex[:8]}"
    yield name
    with channel_of(rabbitmq_url) as channel:
        for queue in ("", ".Timeouts", ".TimeoutsDispatcher", ".timeouts", ".error"):
            channel.queue_delete(name + queue)


@asynccontextmanager
async def closing(*adapters: Any) -> AsyncGenerator[None]:
    try:
        with patience():
            yield
    finally:
        for adapter in adapters:
            await adapter.close()


def endpoint_on(name: str, transport: Transport, timeouts: PostgresTimeouts, **settings: Any) -> Endpoint:
    return Endpoint(
        name, transport=transport, timeout_manager=TimeoutManager(timeouts), error_queue=f"{name}.error", **settings
    )


async def emptied(timeouts: PostgresTimeouts) -> None:
    """Wait until nothing is stored any more: the message leaves before its timeout is removed."""
    now = SystemClock().now()

    async def nothing_is() -> bool:
        return not (await timeouts.next_chunk(now - timedelta(days=1), now + timedelta(days=1), 1)).due

    # Tables are made by a look; what was due when it arrived did not wait for one.
    await until(nothing_is, despite=StoreNotSetUp)


async def test_row_100_in_one_postgresql_database_each_arrives_once_from_two_processes(
    postgres_url: str, schema: str
) -> None:
    transport = PostgresTransport(postgres_url, schema=schema)
    timeouts = [PostgresTimeouts(postgres_url, schema=schema) for _ in range(2)]
    one, other = (endpoint_on("sales", transport, each) for each in timeouts)
    assert one.mode is TransactionMode.TRANSACTION_SCOPE
    async with closing(*timeouts, transport):
        handled = Handled(one, MESSAGES)
        both = Handled(other, MESSAGES)
        both.counts, both.all = handled.counts, handled.all
        async with one, other:
            for number in range(MESSAGES):
                await one.send(Ping(number), delay=(1_100 + 5 * number) * MILLISECOND)
            await handled.all.wait()
            await emptied(timeouts[0])
    assert handled.counts == dict.fromkeys(range(MESSAGES), 1)
    assert handled.early == both.early == []


@pytest.mark.parametrize("mode", ["none", "receive_only"])
async def test_queues_of_rabbitmq_and_a_storage_in_postgresql_lose_nothing(
    rabbitmq_url: str, postgres_url: str, schema: str, name: str, mode: str
) -> None:
    transport, timeouts = RabbitMqTransport(rabbitmq_url), PostgresTimeouts(postgres_url, schema=schema)
    endpoint = endpoint_on(name, transport, timeouts, transaction_mode=mode)
    async with closing(timeouts, transport):
        handled = Handled(endpoint, MESSAGES)
        async with endpoint:
            for number in range(MESSAGES):
                await endpoint.send(Ping(number), delay=(1_100 + 5 * number) * MILLISECOND)
            await handled.all.wait()
            await emptied(timeouts)
    assert handled.counts == dict.fromkeys(range(MESSAGES), 1)  # nothing has failed
    assert handled.early == []


async def test_sends_atomic_with_receive_on_postgresql_and_row_88_a_hybrid_beside_it(
    postgres_url: str, schema: str
) -> None:
    transport, timeouts = PostgresTransport(postgres_url, schema=schema), PostgresTimeouts(postgres_url, schema=schema)
    store = PostgresStore(postgres_url, schema=schema)
    async with closing(timeouts, store, transport):
        old = endpoint_on("sales", transport, timeouts, transaction_mode="sends_atomic_with_receive")
        Handled(old, 1)
        async with old:
            for number in range(20):
                await old.send(Ping(number), delay=(1_500 + number) * MILLISECOND)
        hybrid = endpoint_on("sales", transport, timeouts, delayed_delivery=DelayedDelivery(store))
        received = Counter[int]()
        done = anyio.Event()

        @hybrid.handler(Ping, name="Ping")
        async def note(message: Ping, context: HandlerContext) -> None:
            received[message.number] += 1
            if len(received) == 21:
                done.set()

        async with hybrid:
            await hybrid.send(Ping(20), delay=10 * MILLISECOND)
            await done.wait()
            await emptied(timeouts)
    assert received == dict.fromkeys(range(21), 1)


async def test_row_98_a_transaction_that_commits_after_later_timeouts_were_dispatched_is_not_missed(
    postgres_url: str, schema: str
) -> None:
    transport, timeouts = PostgresTransport(postgres_url, schema=schema), PostgresTimeouts(postgres_url, schema=schema)
    endpoint = endpoint_on("sales", transport, timeouts)
    handled = Handled(endpoint, 2)
    async with closing(timeouts, transport), endpoint:
        with psycopg.connect(postgres_url) as connection:
            due = SystemClock().now() + 100 * MILLISECOND
            late = timeout_manager_envelope(
                DelayedMessage("m-0", due, "sales", PING, b'{"number":0}'), "sales.Timeouts"
            )
            timeouts.adding_work(timeout_of(late, "sales"))(connection)
            await endpoint.send(Ping(1), delay=1_200 * MILLISECOND)
            await handled.first.wait()
            assert handled.counts == {1: 1}
        await handled.all.wait()
        await emptied(timeouts)
    assert handled.counts == {0: 1, 1: 1}


async def test_row_88_on_azure_storage_queues_a_hybrid_has_one_queue_and_serves_both(azurite_connection: str) -> None:
    """``{name}-Timeouts`` and ``{name}.timeouts`` are the same queue there."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    transport = AzureStorageQueueTransport(azurite_connection, longest_idle_wait=125 * MILLISECOND)
    timeouts, store, received, done = MemoryTimeouts(), MemoryStore(), Counter[int](), anyio.Event()
    delayed_delivery = DelayedDelivery(store)
    hybrid = Endpoint(
        name, transport=transport, delayed_delivery=delayed_delivery, timeout_manager=TimeoutManager(timeouts)
    )

    @hybrid.handler(Ping, name="Ping")
    async def note(message: Ping, context: HandlerContext) -> None:
        received[message.number] += 1
        if len(received) == 3:
            done.set()

    due = SystemClock().now() + 1_500 * MILLISECOND
    stored = timeout_manager_envelope(DelayedMessage("m-0", due, name, PING, b'{"number":0}'), name)
    await timeouts.add(timeout_of(stored, name))
    async with closing(transport):
        async with hybrid:
            await hybrid.send(Ping(1), delay=10 * MILLISECOND)
            of_old = timeout_manager_envelope(
                DelayedMessage("m-2", due, name, PING, b'{"number":2}'), f"{name}-timeouts"
            )
            assert list(await transport.send([of_old], due)) == [None]
            await done.wait()
            lengths = await transport.lengths_of([f"{name}-Timeouts", f"{name}-TimeoutsDispatcher"])
            assert set(lengths.values()) == {0}
        for queue in (name, f"{name}-timeouts", f"{name}-timeoutsdispatcher"):
            await transport.service.queue(queue).delete_queue()
    assert received == dict.fromkeys(range(3), 1)


async def test_row_102_the_endpoint_starts_before_the_storage_does_and_outlives_its_outages(
    rabbitmq_url: str, postgres_url: str, schema: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    where = urlsplit(postgres_url)
    critical: list[str] = []
    with FaultyLink(where.hostname or "", where.port or 0) as link:
        place = where.netloc.rpartition("@")[0] + f"@127.0.0.1:{link.port}"
        timeouts = PostgresTimeouts(urlunsplit(where._replace(netloc=place)), schema=schema)
        transport = RabbitMqTransport(rabbitmq_url)
        endpoint = endpoint_on(name, transport, timeouts, critical_error=lambda text, _: critical.append(text))
        async with closing(timeouts, transport):
            handled = Handled(endpoint, 20)
            link.cut()
            async with endpoint:
                for number in range(10):
                    await endpoint.send(Ping(number), delay=1_200 * MILLISECOND)
                assert "the storage of timeouts cannot be set up yet" in caplog.text
                link.restore()
                for number in range(10, 20):
                    await endpoint.send(Ping(number), delay=1_500 * MILLISECOND)
                await handled.first.wait()
                link.reset()
                await handled.all.wait()
                await emptied(timeouts)
                lengths = await transport.lengths_of([f"{name}.error"])
    assert lengths == {f"{name}.error": 0}
    assert critical == []
    assert handled.early == []

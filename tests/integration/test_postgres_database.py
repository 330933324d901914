"""One database object: what an endpoint keeps in one schema shares connections, a listener and a sign of life."""

import os
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import anyio
import psycopg
import pytest
from tests.integration.postgres_place import MILLISECOND
from tests.postgres_subjects import drop_schema, fresh_schema

from postdate import (
    DelayedDelivery,
    Endpoint,
    HandlerContext,
    Outbox,
    PostgresOutbox,
    PostgresSagaStore,
    PostgresStore,
    PostgresTimeouts,
    PostgresTransport,
    Saga,
    TimeoutManager,
    started_by,
)
from postdate.backends.postgres.database import Postgres
from postdate.backends.postgres.names import Names
from postdate.backends.postgres.sessions import mark

CONCURRENCY, MESSAGES = 8, 40


@dataclass
class Order:
    """Starts a saga in a transaction of the application."""

    number: int


@dataclass
class Reminder:
    """Delayed by the saga."""

    number: int


@dataclass
class State:
    number: int


class Orders(Saga[State], correlated_by="number"):
    """Delays a reminder for each order."""

    @started_by(Order)
    async def start(self, message: Order, context: HandlerContext) -> None:
        await context.send(Reminder(message.number), delay=10 * MILLISECOND)


class Closed(Protocol):
    async def close(self) -> None: ...


Made = tuple[Endpoint, Sequence[Closed]]


def of_one_database(url: str, schema: str) -> Made:
    database = Postgres(url, schema=schema)
    endpoint = Endpoint(
        "shop",
        database,
        outbox=True,
        delayed_delivery=DelayedDelivery(database.store),
        timeout_manager=TimeoutManager(database.timeouts),
        transaction_mode="receive_only",
        concurrency=CONCURRENCY,
    )
    return endpoint, [database]


def of_adapters_on_one(url: str, schema: str) -> Made:
    database = Postgres(url, schema=schema)
    database.expect(CONCURRENCY)
    return of_adapters(database, schema)


def of_adapters(url: str | Postgres, schema: str) -> Made:
    queues, store = PostgresTransport(url, schema=schema), PostgresStore(url, schema=schema)
    sagas, outbox = PostgresSagaStore(url, schema=schema), PostgresOutbox(url, schema=schema)
    timeouts = PostgresTimeouts(url, schema=schema)
    endpoint = Endpoint(
        "shop",
        transport=queues,
        delayed_delivery=DelayedDelivery(store),
        timeout_manager=TimeoutManager(timeouts),
        outbox=Outbox(outbox),
        sagas=sagas,
        transaction_mode="receive_only",
        concurrency=CONCURRENCY,
    )
    return endpoint, [queues, store, sagas, outbox, timeouts]


class Counts:
    """What is open of this process while messages are handled."""

    def __init__(self, url: str, schema: str) -> None:
        self._connection = psycopg.connect(url, autocommit=True, application_name="counts")
        self._holders = f"SELECT count(*) FROM {Names(schema).of('holder')} WHERE pid = %s".encode()
        self.connections = self.listeners = self.identities = 0

    def take(self) -> None:
        count = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE %s"
        self.connections = max(self.connections, self._one(count.encode(), f"%{mark()}"))
        threads = [each for each in threading.enumerate() if each.name == "postdate-postgres-listener"]
        self.listeners = max(self.listeners, len(threads))
        self.identities = max(self.identities, self._one(self._holders, os.getpid()))

    def _one(self, query: bytes, value: object) -> int:
        row = self._connection.execute(query, (value,)).fetchone()
        assert row is not None
        return row[0]

    def close(self) -> None:
        self._connection.close()


@asynccontextmanager
async def schema_on(url: str) -> AsyncGenerator[str]:
    schema = fresh_schema().replace('"', "")
    schema = fresh_schema()
    try:
        yield schema
    finally:
        drop_schema(url, schema)


async def work_of(endpoint: Endpoint, count: Callable[[], None]) -> None:
    """Handle messages in transactions of the application, all that can be at once."""
    endpoint.saga(Orders)
    inside, all_inside, done = list[int](), anyio.Event(), anyio.Event()
    reminded = set[int]()

    @endpoint.handler(Order)
    async def order(message: Order, context: HandlerContext) -> None:
        connection: Any = await context.transaction()
        await connection.execute("SELECT 1")
        inside.append(message.number)
        if len(inside) >= CONCURRENCY:
            await anyio.to_thread.run_sync(count)
            all_inside.set()
        await all_inside.wait()

    @endpoint.handler(Reminder)
    async def remind(message: Reminder, context: HandlerContext) -> None:
        await context.transaction()
        await anyio.to_thread.run_sync(count)
        reminded.add(message.number)
        if len(reminded) == MESSAGES:
            done.set()

    async with endpoint:
        with anyio.fail_after(90):
            async with anyio.create_task_group() as tasks:
                for number in range(MESSAGES):
                    tasks.start_soon(endpoint.send, Order(number))
            await done.wait()


@pytest.mark.parametrize("make", [of_one_database, of_adapters_on_one])
async def test_an_endpoint_on_one_database_opens_no_more_than_its_concurrency_and_three(
    postgres_url: str, make: Callable[[str, str], Made]
) -> None:
    """Store, queues, sagas, outbox and timeouts in one schema; there were 25 connections, 2 threads, 2 identities."""
    async with schema_on(postgres_url) as schema:
        endpoint, adapters = make(postgres_url, schema)
        counts = Counts(postgres_url, schema)
        try:
            await work_of(endpoint, counts.take)
        finally:
            for each in adapters:
                await each.close()
        assert counts.connections <= CONCURRENCY + 3
        assert (counts.listeners, counts.identities) == (1, 1)
        counts.connections = 0
        counts.take()
        assert counts.connections == 0
        counts.close()

"""One database object: what an endpoint keeps in one schema shares connections, a listener and a sign of life."""

import os
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import anyio
import psycopg
import pytest
from tests.integration.postgres_place import CONTENT, MILLISECOND, SECOND, now
from tests.postgres_subjects import drop_schema, fresh_schema
from tests.waiting import received, until

from postdate import (
    DelayedDelivery,
    DelayedMessage,
    Endpoint,
    Envelope,
    HandlerContext,
    Outbox,
    Postgres,
    PostgresOutbox,
    PostgresSagaStore,
    PostgresStore,
    PostgresTimeouts,
    PostgresTransport,
    Saga,
    TimeoutManager,
    TransactionMode,
    started_by,
)
from postdate.backends.postgres.names import SchemaNames
from postdate.backends.postgres.pool import FOR_BRIEF_WORK
from postdate.backends.postgres.sessions import mark
from postdate.config import load_settings
from postdate.errors import ConfigurationError, StoreUnavailable
from postdate.ports import Outcome
from postdate.wiring import open_deployment, open_outbox, open_saga_store

CONCURRENCY, MESSAGES = 8, 40
_SESSIONS = b"SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE %s"


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
    database.ensure_connections(CONCURRENCY)
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
        self._holders = f"SELECT count(*) FROM {SchemaNames(schema).name_of('holder')} WHERE pid = %s".encode()
        self.connections = self.listeners = self.identities = 0

    def take(self) -> None:
        self.connections = max(self.connections, self._one(_SESSIONS, f"%{mark()}"))
        threads = [each for each in threading.enumerate() if each.name == "postdate-postgres-listener"]
        self.listeners = max(self.listeners, len(threads))
        self.identities = max(self.identities, self._one(self._holders, os.getpid()))

    def _one(self, query: bytes, value: object) -> int:
        row = self._connection.execute(query, (value,)).fetchone()
        assert row is not None
        return row[0]

    async def until_none_is_open(self) -> None:
        """Wait for the server to have ended the sessions that were closed."""
        await until(lambda: self._one(_SESSIONS, f"%{mark()}") == 0)

    def close(self) -> None:
        self._connection.close()


@asynccontextmanager
async def schema_on(url: str) -> AsyncGenerator[str]:
    schema = fresh_schema()
    try:
        yield schema
    finally:
        drop_schema(url, schema)


async def work_of(endpoint: Endpoint, count: Callable[[], None]) -> None:
    """Handle messages in transactions of the application, all that can be at once."""
    endpoint.saga(Orders)
    inside, all_inside = list[int](), anyio.Event()
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

    async with endpoint:
        async with anyio.create_task_group() as tasks:
            for number in range(MESSAGES):
                tasks.start_soon(endpoint.send, Order(number))
        await until(lambda: len(reminded) >= MESSAGES)


@pytest.mark.parametrize("make", [of_one_database, of_adapters_on_one])
async def test_an_endpoint_on_one_database_opens_no_more_than_its_concurrency_and_three(
    postgres_url: str, make: Callable[[str, str], Made]
) -> None:
    """Store, queues, sagas, outbox and timeouts in one schema; there were 25 connections, 2 threads, 2 identities."""
    async with schema_on(postgres_url) as schema:
        endpoint, adapters = make(postgres_url, schema)
        counts = Counts(postgres_url, schema)
        await counts.until_none_is_open()
        try:
            await work_of(endpoint, counts.take)
        finally:
            for each in adapters:
                await each.close()
        assert counts.connections <= CONCURRENCY + 3
        assert (counts.listeners, counts.identities) == (1, 1)
        await counts.until_none_is_open()
        counts.close()


async def test_an_adapter_that_is_closed_gives_back_what_it_holds_and_leaves_the_others_theirs(
    postgres_url: str,
) -> None:
    async with schema_on(postgres_url) as schema, Postgres(postgres_url, schema=schema) as database:
        await set_up(database)
        await database.store.store_many([delayed(number) for number in range(4)], now())
        await database.queues.send([Envelope("shop", "e-1")], now())
        receiver = database.queues.receiver("shop")
        (held,) = await received(receiver, 1)
        claims = await database.store.claim_due(now() + SECOND, 3)  # locked
        await database.store.finish(claims[:1], Outcome.DELIVERED, now())  # and the others are leased
        await database.store.claim_due(now() + SECOND, 1)
        number = database.queues.database.listener().wait_for_holder()
        await database.store.close()
        another = PostgresStore(database, table="shop.timeouts")
        assert len(await another.claim_due(now() + SECOND, 10)) == 3
        await another.close()
        assert database.queues.database.listener().wait_for_holder() == number
        await receiver.commit(held, now())
        with pytest.raises(StoreUnavailable, match="closed"):
            await database.store.next_due()


async def test_what_an_adapter_may_hold_without_knowing_it_is_free_when_it_is_closed(postgres_url: str) -> None:
    """The thread goes on under another number: before, it ended with the adapter."""
    async with schema_on(postgres_url) as schema, Postgres(postgres_url, schema=schema) as database:
        await set_up(database)
        first, second = PostgresTransport(database), PostgresTransport(database)
        await first.send([Envelope("shop", "e-1")], now())
        receiver = first.receiver("shop")
        number = first.database.listener().wait_for_holder()
        claim = f"UPDATE {database.names.name_of('queue_message')} SET holder = %s".encode()
        with pytest.raises(StoreUnavailable):
            await anyio.to_thread.run_sync(receiver._run_claim, number, partial(lost_answer, first, claim, number))
        await first.close()
        other = second.receiver("shop")
        (again,) = await received(other, 1)
        assert again.envelope.message_id == "e-1"
        assert second.database.listener().wait_for_holder() != number
        await other.commit(again, now())
        await other.close()
        await second.close()


def lost_answer(transport: PostgresTransport, statement: bytes, number: int) -> None:
    """Claim, and do not hear of it."""
    transport.database.run_blocking(lambda c: c.execute(statement, (number,)))
    raise StoreUnavailable("the connection was lost")


async def test_the_last_adapter_closes_the_database_and_the_next_one_opens_it_again(postgres_url: str) -> None:
    async with schema_on(postgres_url) as schema:
        database = Postgres(postgres_url, schema=schema)
        await set_up(database)
        counts = Counts(postgres_url, schema)
        counts.take()
        assert (counts.connections > 0, counts.listeners) == (True, 0)
        await database.close()
        again = PostgresTransport(database)
        assert await again.lengths_of(["shop"]) == {"shop": 0}
        await again.close()
        await counts.until_none_is_open()
        counts.close()


async def test_brief_work_waits_for_a_place_and_is_never_kept_from_one_by_transactions(postgres_url: str) -> None:
    async with schema_on(postgres_url) as schema, Postgres(postgres_url, schema=schema) as database:
        counts = Counts(postgres_url, schema)
        await counts.until_none_is_open()
        await set_up(database)
        database.ensure_connections(2)
        pids = list[int]()
        transactions = [database.outbox.transaction("shop", f"m-{number}") for number in range(2)]
        for each in transactions:
            await each.begin()

        def work(connection: Any) -> None:
            pids.append(connection.info.backend_pid)
            connection.execute("SELECT pg_sleep(0.05)")

        async with anyio.create_task_group() as tasks:
            for _ in range(10):
                tasks.start_soon(database.store.database.run, work)
        counts.take()
        assert len(pids) == 10
        assert len(set(pids)) <= FOR_BRIEF_WORK
        assert counts.connections <= 2 + FOR_BRIEF_WORK
        for each in transactions:
            await each.roll_back()
        counts.close()


async def test_two_event_loops_share_a_database(postgres_url: str) -> None:
    async with schema_on(postgres_url) as schema, Postgres(postgres_url, schema=schema) as database:
        await set_up(database)
        database.ensure_connections(4)

        async def use(outbox: PostgresOutbox, name: str) -> None:
            for number in range(20):
                transaction = outbox.transaction("shop", f"{name}-{number}")
                connection: Any = await transaction.begin()
                await connection.execute("SELECT 1")
                assert await transaction.commit([], now())

        def in_a_loop_of_its_own() -> None:
            outbox = PostgresOutbox(database)
            anyio.run(use, outbox, "there")
            anyio.run(outbox.close)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.to_thread.run_sync, in_a_loop_of_its_own)
            tasks.start_soon(use, database.outbox, "here")
        assert await database.outbox.find("shop", "there-19") is not None


_FORK = """
import os, sys
from postdate import Postgres

access = Postgres(sys.argv[1], schema=sys.argv[2]).queues.database

def show(who):
    print(who, access.run_blocking(lambda c: c.info.backend_pid), access.listener().wait_for_holder(), flush=True)

show("before")
child = os.fork()
if not child:
    show("child")
    os._exit(0)
os.waitpid(child, 0)
show("parent")
access.close_blocking()
"""
"""For a process whose threads are all known: who forks beside others inherits the locks that they hold."""


async def test_a_fork_has_connections_and_a_number_of_its_own(postgres_url: str) -> None:
    async with schema_on(postgres_url) as schema, Postgres(postgres_url, schema=schema) as database:
        await set_up(database)
        command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", _FORK, postgres_url, schema]
        said = (await anyio.run_process(command)).stdout.decode().splitlines()
        shown = {who: tuple(map(int, found)) for who, *found in map(str.split, said)}
        assert shown["parent"] == shown["before"]
        assert all(child not in {0, before} for child, before in zip(shown["child"], shown["before"], strict=True))


async def test_a_second_endpoint_is_told_that_its_messages_have_another_table(postgres_url: str) -> None:
    async with Postgres(postgres_url) as database:
        Endpoint("sales", database)
        Endpoint("sales", database)
        with pytest.raises(ConfigurationError, match=r"'sales' wait.*'shop' have another table"):
            Endpoint("shop", database)
        own = PostgresStore(database, table="shop.timeouts")
        Endpoint("shop", database, delayed_delivery=DelayedDelivery(own))
        await own.close()


async def test_an_adapter_claims_in_the_schema_of_its_database_object_only(postgres_url: str) -> None:
    """The object shows life there. Processes of another schema would free the claims as those of a dead process."""
    async with schema_on(postgres_url) as schema, Postgres(postgres_url, schema=schema) as database:
        for adapter in (PostgresStore, PostgresTransport):
            with pytest.raises(ConfigurationError, match="schema='elsewhere' is not the schema of the database object"):
                adapter(database, schema="elsewhere")
            await adapter(database, schema=schema).close()


async def test_what_was_said_for_the_whole_process_is_not_contradicted(postgres_url: str) -> None:
    async with Postgres(postgres_url, holds_at_most=30 * SECOND) as database:
        with pytest.raises(ConfigurationError, match="opened with holds_at_most=0:00:30"):
            PostgresStore(database, holds_at_most=SECOND)
        assert database.store.capabilities.holds_at_most == 30 * SECOND


async def test_equal_addresses_in_the_settings_are_one_database(postgres_url: str) -> None:
    async with schema_on(postgres_url) as schema:
        variables = {
            "POSTDATE_STORE__ADDRESS": postgres_url,
            "POSTDATE_STORE__SCHEMA": schema,
            "POSTDATE_TRANSPORT__ADDRESS": postgres_url,
            "POSTDATE_TRANSPORT__SCHEMA": schema,
            "POSTDATE_TIMEOUT_MANAGER__ADDRESS": postgres_url,
        }
        settings = load_settings(None, variables)
        async with open_deployment(settings) as deployment:
            sagas, outbox = open_saga_store(settings, deployment.databases), open_outbox(settings, deployment.databases)
            (timeouts,) = deployment.timeouts.values()
            assert isinstance(deployment.store, PostgresStore)
            assert isinstance(deployment.transport, PostgresTransport)
            assert isinstance(sagas, PostgresSagaStore)
            assert isinstance(outbox, PostgresOutbox)
            assert isinstance(timeouts, PostgresTimeouts)
            one = deployment.store.database.shared
            assert deployment.transport.database.shared is one
            assert sagas.database.shared is one
            assert outbox._database.shared is one
            assert timeouts._connections.shared is one
            assert timeouts._schema == "public"
            await sagas.close()
            await outbox.close()


async def set_up(database: Postgres) -> None:
    await database.queues.create_queues(["shop"])
    await database.store.initialize("shop", TransactionMode.TRANSACTION_SCOPE)
    await database.store.setup()
    await database.outbox.setup()


def delayed(number: int) -> DelayedMessage:
    return DelayedMessage(f"m-{number}", now(), "elsewhere", CONTENT, b"{}")

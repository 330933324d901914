"""Messages stored in a transaction that the application has open, with every kind of connection it may have."""

import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import anyio
import asyncpg
import psycopg
import pytest
import sqlalchemy
from psycopg.rows import dict_row
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from tests.integration.postgres_place import MILLISECOND, SECOND, Place, now, placed
from tests.waiting import Eventually, UntilWoken, until

from postdate import DelayedDelivery, DelayedMessage, Endpoint, HandlerContext, MemoryStore, MemoryTransport
from postdate.backends.postgres.store import PostgresStore
from postdate.endpoint.endpoint import BlockingEndpoint
from postdate.errors import ConfigurationError, DelayedDeliveryNotConfigured, DuplicateMessage, MessageTooLarge
from postdate.ports import MovingStore

MINUTE = timedelta(minutes=1)


# --- kinds of connections ---------------------------------------------------------------------------------------------


@dataclass
class Application:
    """An application in the middle of a transaction."""

    connection: Any
    execute: Callable[[str], Awaitable[Any]]
    commit: Callable[[], Awaitable[None]]
    roll_back: Callable[[], Awaitable[None]]


def waiting(function: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    async def call(*arguments: Any) -> Any:
        return function(*arguments)

    return call


@asynccontextmanager
async def psycopg_connection(url: str) -> AsyncGenerator[Application]:
    with psycopg.connect(url, cursor_factory=psycopg.RawCursor) as connection:
        yield Application(
            connection,
            waiting(lambda sql: connection.execute(sql.encode())),
            waiting(connection.commit),
            waiting(connection.rollback),
        )


@asynccontextmanager
async def psycopg_async(url: str) -> AsyncGenerator[Application]:
    async with await psycopg.AsyncConnection[dict[str, Any]].connect(url, row_factory=dict_row) as connection:
        yield Application(
            connection, lambda sql: connection.execute(sql.encode()), connection.commit, connection.rollback
        )


@asynccontextmanager
async def asyncpg_connection(url: str) -> AsyncGenerator[Application]:
    connection = await asyncpg.connect(url)
    transaction = connection.transaction()
    await transaction.start()
    yield Application(connection, connection.execute, transaction.commit, transaction.rollback)
    await connection.close()


@asynccontextmanager
async def asyncpg_from_a_pool(url: str) -> AsyncGenerator[Application]:
    async with asyncpg.create_pool(url, min_size=1, max_size=1) as pool, pool.acquire() as connection:
        transaction = connection.transaction()
        await transaction.start()
        yield Application(connection, connection.execute, transaction.commit, transaction.rollback)


def sqlalchemy_url(url: str, driver: str) -> str:
    return url.replace("postgresql://", f"postgresql+{driver}://")


@asynccontextmanager
async def sqlalchemy_connection(url: str) -> AsyncGenerator[Application]:
    engine = sqlalchemy.create_engine(sqlalchemy_url(url, "psycopg"))
    with engine.connect() as connection:
        execute = waiting(lambda sql: connection.execute(sqlalchemy.text(sql)))
        yield Application(connection, execute, waiting(connection.commit), waiting(connection.rollback))
    engine.dispose()


@asynccontextmanager
async def sqlalchemy_session(url: str) -> AsyncGenerator[Application]:
    engine = sqlalchemy.create_engine(sqlalchemy_url(url, "psycopg"))
    with Session(engine) as session:
        execute = waiting(lambda sql: session.execute(sqlalchemy.text(sql)))
        yield Application(session, execute, waiting(session.commit), waiting(session.rollback))
    engine.dispose()


def sqlalchemy_async_connection(driver: str) -> Callable[[str], Any]:
    @asynccontextmanager
    async def connected(url: str) -> AsyncGenerator[Application]:
        engine = create_async_engine(sqlalchemy_url(url, driver))
        async with engine.connect() as connection:
            yield Application(
                connection,
                lambda sql: connection.execute(sqlalchemy.text(sql)),
                connection.commit,
                connection.rollback,
            )
        await engine.dispose()

    return connected


def sqlalchemy_async_session(driver: str) -> Callable[[str], Any]:
    @asynccontextmanager
    async def connected(url: str) -> AsyncGenerator[Application]:
        engine = create_async_engine(sqlalchemy_url(url, driver))
        async with AsyncSession(engine) as session:
            yield Application(
                session, lambda sql: session.execute(sqlalchemy.text(sql)), session.commit, session.rollback
            )
        await engine.dispose()

    return connected


KINDS: dict[str, Callable[[str], Any]] = {
    "psycopg.Connection": psycopg_connection,
    "psycopg.AsyncConnection": psycopg_async,
    "asyncpg.Connection": asyncpg_connection,
    "asyncpg.pool": asyncpg_from_a_pool,
    "sqlalchemy.Connection": sqlalchemy_connection,
    "sqlalchemy.Session": sqlalchemy_session,
    "sqlalchemy.AsyncConnection-asyncpg": sqlalchemy_async_connection("asyncpg"),
    "sqlalchemy.AsyncConnection-psycopg": sqlalchemy_async_connection("psycopg"),
    "sqlalchemy.AsyncSession-asyncpg": sqlalchemy_async_session("asyncpg"),
    "sqlalchemy.AsyncSession-psycopg": sqlalchemy_async_session("psycopg"),
}


@pytest.fixture(params=KINDS)
def begin(request: pytest.FixtureRequest) -> Callable[[str], Any]:
    """Return what connects an application to a database and begins a transaction."""
    return KINDS[request.param]


# --- an endpoint that delivers ----------------------------------------------------------------------------------------


@dataclass
class Remind:
    """A message."""

    of: str


class Sales:
    """An endpoint that runs, in a schema of its own whose name has every character that some driver minds."""

    def __init__(self, url: str) -> None:
        self.place = Place(url, f'{Place(url).schema} :id %s $1 \\:x "{{')
        self.store, self.transport = self.place.store, self.place.transport
        self.clock = UntilWoken()
        self.endpoint = Endpoint(
            "sales", transport=self.transport, delayed_delivery=DelayedDelivery(self.store), clock=self.clock
        )
        self.handled: list[tuple[str, timedelta]] = []

        @self.endpoint.handler(Remind)
        async def handle(message: Remind, context: HandlerContext) -> None:
            assert context.due is not None
            self.handled.append((message.of, now() - context.due))

    async def handles(self, *expected: str) -> None:
        """Wait until exactly these have been handled."""
        await until(lambda: len(self.handled) >= len(expected))
        assert sorted(of for of, _ in self.handled) == sorted(expected)


@pytest.fixture
async def sales(postgres_url: str):
    sales = Sales(postgres_url)
    async with sales.endpoint:
        with sales.place.connect() as connection:
            connection.execute('CREATE TABLE "order" (name text)')
        yield sales
    await sales.place.close()


def insert_order(sales: Sales, name: str) -> str:
    schema = sales.place.schema.replace('"', '""')
    return f"""INSERT INTO "{schema}"."order" VALUES ('{name}')"""


def orders(sales: Sales) -> list[str]:
    return [name for (name,) in sales.place.rows('SELECT name FROM "order" ORDER BY name')]


# --- the promise ------------------------------------------------------------------------------------------------------


async def test_what_is_sent_in_a_transaction_is_delivered_after_its_commit(sales: Sales, begin) -> None:
    async with begin(sales.place.url) as application:
        await application.execute("CREATE TEMP TABLE own (name text)")
        later = await sales.endpoint.send(Remind("later"), delay=50 * MILLISECOND, transaction=application.connection)
        at_once = await sales.endpoint.send(Remind("at once"), transaction=application.connection)
        assert await sales.store.get(later) is None, "seen before the commit"
        assert await sales.store.history(at_once) == []
        await application.commit()
        await sales.handles("later", "at once")
    assert all(lateness > timedelta(0) for _, lateness in sales.handled)


async def test_what_is_sent_in_a_transaction_that_is_rolled_back_never_was(sales: Sales, begin) -> None:
    async with begin(sales.place.url) as application:
        for name in ("first", "second"):
            await sales.endpoint.send(
                Remind(name), delay=10 * MILLISECOND, message_id=name, transaction=application.connection
            )
        await application.roll_back()
    await sales.endpoint.send(Remind("third"), delay=30 * MILLISECOND)
    await sales.handles("third")
    assert await sales.store.history("first") == []
    gone = "SELECT count(*) FROM content"  # once the commit of the third one's handler is there
    await until(lambda: sales.place.rows(gone) == [(0,)])
    await sales.endpoint.send(Remind("again"), delay=MILLISECOND, message_id="first")
    await sales.handles("third", "again")


async def test_a_commit_wakes_a_poller_that_sleeps_for_a_minute(sales: Sales, begin) -> None:
    await sales.clock.sleeps_again()
    await sales.endpoint.send(Remind("in ten minutes"), delay=10 * MINUTE)
    await sales.clock.sleeps_again(1)  # it has looked at that one
    async with begin(sales.place.url) as application:
        for number in range(3):
            due = now() + 10 * MILLISECOND
            await sales.endpoint.send(Remind(f"n-{number}"), deliver_at=due, transaction=application.connection)
        await application.commit()
        await sales.handles("n-0", "n-1", "n-2")
    assert all(lateness > timedelta(0) for _, lateness in sales.handled), sales.handled


async def test_an_id_that_was_used_is_told_and_the_transaction_goes_on(sales: Sales, begin) -> None:
    due = now() + 10 * MINUTE
    first, again = (DelayedMessage("used", due, "sales", {}, body) for body in (b"first", b"again"))
    await sales.store.store(first, now())
    async with begin(sales.place.url) as application:
        with pytest.raises(DuplicateMessage, match="'used' was stored before"):
            await sales.store.enqueue(
                application.connection, [again, DelayedMessage("new", due, "sales", {}, b"new")], now()
            )
        with pytest.raises(DuplicateMessage):
            await sales.endpoint.send(
                b"again", destination="sales", delay=SECOND, message_id="new", transaction=application.connection
            )
        with pytest.raises(MessageTooLarge):
            await sales.store.enqueue(
                application.connection, [DelayedMessage("large", due, "sales", {}, bytes(17 << 20))], now()
            )
        await application.execute("SELECT 1")
        await application.commit()
    stored, new = await sales.store.get("used"), await sales.store.get("new")
    assert stored is not None
    assert new is not None
    assert (stored.body, new.body) == (b"first", b"new")


async def test_a_message_is_stored_whole(sales: Sales, begin) -> None:
    """Every field, to the microsecond, and what a driver may take for something of its own."""
    due = datetime.fromisoformat("2031-02-03T04:05:06.789123+13:00")
    message = DelayedMessage(
        "%(id)s :id $1 ü 🦉 '\"",
        due,
        "queue %s ?",
        {"key :x": "%% 🦉 \\"},
        bytes(range(256)),
        expires_at=due + MINUTE,
    )
    async with begin(sales.place.url) as application:
        await sales.store.enqueue(application.connection, [message], now())
        await application.commit()
    assert await sales.store.get(message.message_id) == message
    (record,) = await sales.store.history(message.message_id)
    assert record.destination == "queue %s ?"


async def test_own_work_and_message_share_one_fate(sales: Sales) -> None:
    async with KINDS["psycopg.Connection"](sales.place.url) as application:
        for name, end in (("kept", application.commit), ("lost", application.roll_back)):
            await application.execute(insert_order(sales, name))
            await sales.endpoint.send(Remind(name), delay=MILLISECOND, transaction=application.connection)
            await end()
        await sales.handles("kept")
    assert orders(sales) == ["kept"]


async def test_a_transaction_that_ends_long_after_the_due_time_wakes_the_poller(sales: Sales, begin) -> None:
    """Its message is earlier than the one that the poller knows to be next."""
    await sales.endpoint.send(Remind("tomorrow"), delay=timedelta(days=1))
    async with begin(sales.place.url) as application:
        await sales.endpoint.send(Remind("overdue"), delay=10 * MILLISECOND, transaction=application.connection)
        before = sales.clock.sleeps
        await sales.endpoint.send(Remind("at once"), delay=20 * MILLISECOND)
        await sales.handles("at once")
        await sales.clock.sleeps_again(before)
        await application.commit()
        await sales.handles("at once", "overdue")


# --- what is refused --------------------------------------------------------------------------------------------------


async def refuses(sales: Sales, connection: object, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        await sales.endpoint.send(Remind("no"), delay=MILLISECOND, transaction=connection)
    assert sales.place.rows('SELECT count(*) FROM "service.timeouts"') == [(0,)]


async def test_a_connection_that_commits_every_statement_is_refused(sales: Sales) -> None:
    url, why = sales.place.url, "in no transaction"
    with psycopg.connect(url, autocommit=True) as connection:
        await refuses(sales, connection, why)
        with connection.transaction():
            await sales.endpoint.send(Remind("yes"), delay=MILLISECOND, transaction=connection)
    await sales.handles("yes")
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        await refuses(sales, connection, why)
    connection = await asyncpg.connect(url)
    await refuses(sales, connection, why)
    await connection.close()
    engine = sqlalchemy.create_engine(sqlalchemy_url(url, "psycopg"), isolation_level="AUTOCOMMIT")
    with engine.connect() as connection, Session(engine) as session:
        await refuses(sales, connection, why)
        await refuses(sales, session, why)
    engine.dispose()
    for driver in ("asyncpg", "psycopg"):
        engine = create_async_engine(sqlalchemy_url(url, driver))
        async with engine.connect() as connection:
            await connection.execution_options(isolation_level="AUTOCOMMIT")
            await refuses(sales, connection, why)
        await engine.dispose()


async def test_what_is_no_connection_to_such_a_database_is_refused(sales: Sales) -> None:
    await refuses(sales, object(), "builtins.object is not a connection")
    engine = sqlalchemy.create_engine("sqlite://")
    with engine.connect() as connection:
        await refuses(sales, connection, "to sqlite")
    engine.dispose()


async def test_a_connection_that_must_be_awaited_is_refused_by_the_blocking_call(sales: Sales) -> None:
    message = DelayedMessage("m", now(), "sales", {}, b"")
    async with await psycopg.AsyncConnection.connect(sales.place.url) as connection:
        with pytest.raises(ConfigurationError, match="must be awaited"):
            sales.store.enqueue_blocking(connection, [message], now())


async def test_a_store_that_cannot_and_an_endpoint_without_one_say_so() -> None:
    transport, store = MemoryTransport(), MemoryStore()
    assert not isinstance(store, MovingStore)
    with_store = Endpoint("a", transport=transport, delayed_delivery=DelayedDelivery(store))
    with pytest.raises(ConfigurationError, match="MemoryStore cannot be part of a transaction of yours"):
        await with_store.send(b"", destination="a", transaction=object())
    with pytest.raises(DelayedDeliveryNotConfigured, match="has no delayed message store"):
        await Endpoint("a", transport=transport).send(b"", destination="a", transaction=object())


async def test_a_user_with_the_rights_that_the_guide_names_may_send(sales: Sales) -> None:
    url, schema, role = sales.place.url, sales.place.schema.replace('"', '""'), f"postdate_shop_{os.getpid()}"
    grants = [
        f'USAGE ON SCHEMA "{schema}"',
        f'INSERT ON "{schema}".record, "{schema}".content, "{schema}"."service.timeouts"',
        f'SELECT ON "{schema}".record',
        f'USAGE ON SEQUENCE "{schema}".number',
    ]
    with psycopg.connect(url, autocommit=True) as administrator:
        administrator.execute(f"DROP ROLE IF EXISTS {role}".encode())
        administrator.execute(f"CREATE ROLE {role} LOGIN".encode())
        try:
            for grant in grants:
                administrator.execute(f"GRANT {grant} TO {role}".encode())
            with psycopg.connect(url.replace("//postdate@", f"//{role}@")) as connection:
                await sales.endpoint.send(Remind("allowed"), delay=MILLISECOND, transaction=connection)
            await sales.handles("allowed")
        finally:
            administrator.execute(f"DROP OWNED BY {role}".encode())
            administrator.execute(f"DROP ROLE {role}".encode())


# --- without an event loop --------------------------------------------------------------------------------------------


@contextmanager
def blocking_kinds(url: str) -> Generator[list[Any]]:
    engine = sqlalchemy.create_engine(sqlalchemy_url(url, "psycopg"))
    with psycopg.connect(url) as one, engine.connect() as another, Session(engine) as session:
        yield [one, another, session]
    engine.dispose()


def test_a_program_without_an_event_loop_sends_in_its_transactions(postgres_url: str, eventually: Eventually) -> None:
    place = Place(postgres_url)
    handled: list[str] = []
    endpoint = Endpoint("sales", transport=place.transport, delayed_delivery=DelayedDelivery(place.store))

    @endpoint.handler(Remind)
    async def handle(message: Remind, context: HandlerContext) -> None:
        handled.append(message.of)

    with BlockingEndpoint(endpoint) as sales, blocking_kinds(postgres_url) as connections:
        for number, connection in enumerate(connections):
            sales.send(Remind(f"lost {number}"), delay=MILLISECOND, transaction=connection)
            connection.rollback()
            sales.send(Remind(f"kept {number}"), delay=MILLISECOND, transaction=connection)
            connection.commit()
        eventually(lambda: len(handled) >= 3, "three are handled")
    assert sorted(handled) == ["kept 0", "kept 1", "kept 2"]
    anyio.run(place.close)


async def test_a_store_alone_stores_in_a_transaction(postgres_url: str) -> None:
    """What a web application needs that leaves the delivering to others."""
    async with placed(postgres_url) as place:
        store = PostgresStore(postgres_url, schema=place.schema, table="service.timeouts")
        with psycopg.connect(postgres_url) as connection:
            store.enqueue_blocking(connection, [place.work(1, now()), place.work(2, now())], now())
            await store.enqueue(connection, [place.work(3, now())], now())
        assert await store.get("m-3") is not None
        assert (await store.statistics(now())).pending == 3
        await store.close()

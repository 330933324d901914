"""One row that its store cannot write is no outage: its message ends in the error queue, and others flow meanwhile."""

import sqlite3
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path

import pytest
from tests.integration.postgres_place import Place, now, placed
from tests.mariadb_subjects import MariaDbStoreSubject
from tests.waiting import until

from postdate import (
    DelayedDelivery,
    DelayedMessage,
    Endpoint,
    HandlerContext,
    Headers,
    MemoryTransport,
    PostgresSagaStore,
    Recoverability,
    Saga,
    SqliteStore,
    started_by,
)
from postdate.backends.mariadb.connection import MariaDbServer
from postdate.backends.mariadb.schema import MariaDbNames, quote_name
from postdate.ports import ClaimingStore

pytestmark = pytest.mark.anyio

SHORT = timedelta(milliseconds=10)
BAD = "bad-0200-and-more"


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("core.receive.outcomes", "core.receive.pump"):
        monkeypatch.setattr(f"postdate.{module}.PAUSE_ARMED", SHORT)


def refuse_in_postgres(place: Place, table: str, condition: str) -> None:
    """Have a trigger say of one row what the server says of a damaged page."""
    place.run(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION "
        "'invalid page in block 7' USING ERRCODE = 'XX001'; END $$"
    )
    place.run(
        f"CREATE TRIGGER refuse BEFORE INSERT ON {table} FOR EACH ROW WHEN ({condition}) EXECUTE FUNCTION refuse()"
    )


def refuse_in_mariadb(subject: MariaDbStoreSubject, number: int) -> None:
    """Have a trigger say of one row what the server says of a failing index."""
    with closing(MariaDbServer(subject.url).connect()) as session:
        ((table,),) = session.rows(f"SELECT name FROM {MariaDbNames(subject.schema, 'any').name_of('store')}")
        pending = MariaDbNames(subject.schema, table).pending
        trigger = f"{quote_name(subject.schema)}.refuses".replace("%", "%%")
        session.change(
            f"CREATE TRIGGER {trigger} BEFORE INSERT ON {pending} FOR EACH ROW IF NEW.message_id = '{BAD}' THEN "
            f"SIGNAL SQLSTATE 'HY000' SET MYSQL_ERRNO = {number}, MESSAGE_TEXT = 'Got error 126'; END IF",
            {},
        )


async def sqlite_with_a_damaged_page(path: Path) -> None:
    store = SqliteStore(path, synchronous="normal")
    ids = [f"bad-{number:04}" for number in range(1_000)]
    await store.store_many([DelayedMessage(id_, now() + timedelta(days=9), "done") for id_ in ids], now())
    store.file.checkpoint_blocking()
    await store.close()
    damage_a_page(path)


def damage_a_page(path: Path) -> None:
    """Overwrite the page of the index of ids in which one that comes has its place."""
    with closing(sqlite3.connect(path)) as connection:
        ((size,),) = connection.execute("PRAGMA page_size").fetchall()
    content = bytearray(path.read_bytes())
    leaf_of_index = 0x0A
    starts = [at for at in range(0, len(content), size) if content[at] == leaf_of_index]
    (start,) = [at for at in starts if b"bad-0200" in content[at : at + size]]
    content[start] = 0xFF
    path.write_bytes(content)


@asynccontextmanager
async def store_that_refuses(
    backend: str, request: pytest.FixtureRequest, path: Path
) -> AsyncGenerator[tuple[ClaimingStore, Callable[[], None]]]:
    """Yield a store, and what has it refuse the row of one message, once it is in use."""
    if backend == "SQLite":
        await sqlite_with_a_damaged_page(path)
        store = SqliteStore(path, synchronous="normal")
        yield store, lambda: None
        await store.close()
    elif backend == "PostgreSQL":
        async with placed(request.getfixturevalue("postgres_url")) as place:
            yield place.store, partial(refuse_in_postgres, place, "record", f"NEW.message_id = '{BAD}'")
    else:
        subject = MariaDbStoreSubject(request.getfixturevalue("mariadb_url"))
        store = subject.open()
        yield store, partial(refuse_in_mariadb, subject, 1030 if backend == "MariaDB" else 1526)
        await store.close()
        subject.drop()


@pytest.mark.parametrize("backend", ["SQLite", "PostgreSQL", "MariaDB", "MariaDB, of the statement"])
async def test_a_delayed_message_whose_row_cannot_be_written_ends_in_the_error_queue_and_others_are_stored(
    backend: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("postdate.backends.sqlite.connection._CHECKED_BYTES", 0)
    queues, numbers, tomorrow = MemoryTransport(), count(), now() + timedelta(days=1)

    async def is_given_up() -> bool:
        await endpoint.send(b"", destination="done", deliver_at=tomorrow, message_id=f"m-{next(numbers)}")
        return (await queues.queue_lengths())["error"] == 1

    async def all_others_are_stored() -> bool:
        return (await queues.queue_lengths())["sales.timeouts"] == 0

    async with (
        store_that_refuses(backend, request, tmp_path / "a.db") as (store, refuse),
        Endpoint("sales", transport=queues, delayed_delivery=DelayedDelivery(store)) as endpoint,
    ):
        refuse()
        await endpoint.send(b"", destination="done", deliver_at=tomorrow, message_id=BAD)
        await until(is_given_up)
        await until(all_others_are_stored)
        (copy,) = await queues.receiver("error").receive(2)
    assert copy.envelope.message_id == BAD
    code = {"SQLite": "not_a_database", "MariaDB, of the statement": "store_error"}.get(backend, "store_troubled")
    assert copy.envelope.headers[Headers.ERROR_CODE] == code


@dataclass
class Begin:
    order_id: str


@dataclass
class State:
    order_id: str


class Order(Saga[State], correlated_by="order_id"):
    @started_by(Begin)
    async def begin(self, message: Begin, context: HandlerContext) -> None: ...


@pytest.mark.parametrize("elsewhere", [False, True], ids=["in the commit of the queue", "elsewhere"])
async def test_a_message_whose_saga_cannot_be_written_fails_and_others_are_handled(
    postgres_url: str, *, elsewhere: bool
) -> None:
    once = Recoverability(immediate_retries=0, delayed_retries=0)
    async with placed(postgres_url) as place:
        sagas = PostgresSagaStore(postgres_url, schema=place.schema)
        queues = MemoryTransport() if elsewhere else place.transport
        endpoint = Endpoint("orders", transport=queues, sagas=sagas, recoverability=once)
        endpoint.saga(Order)
        numbers = count()

        async def has_failed() -> bool:
            await endpoint.send(Begin(f"o-{next(numbers)}"), destination="orders")
            return (await queues.queue_lengths())["error"] == 1

        async def all_others_are_handled() -> bool:
            return (await queues.queue_lengths())["orders"] == 0

        async with endpoint:
            refuse_in_postgres(place, "saga", "NEW.value LIKE '%bad%'")
            await endpoint.send(Begin("bad"), destination="orders", message_id="m-bad")
            await until(has_failed)
            await until(all_others_are_handled)
        (copy,) = await queues.receiver("error").receive(2)
        assert copy.envelope.message_id == "m-bad"
        assert "invalid page in block 7" in copy.envelope.headers[Headers.EXCEPTION_MESSAGE]
        await sagas.close()

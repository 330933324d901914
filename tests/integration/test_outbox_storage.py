"""Outboxes in SQLite, PostgreSQL and MariaDB: what every storage of them promises (specification 7)."""

import asyncio
import os
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import closing, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import psycopg
import pymysql
import pytest
from tests import mariadb_subjects
from tests.integration.test_postgres_silence import through
from tests.postgres_subjects import drop_schema, fresh_schema
from tests.proxy import FaultyLink
from tests.waiting import patience, until

from postdate import DelayedMessage, Envelope, PostgresOutbox, SqliteOutbox, SqliteStore
from postdate.backends.mariadb.connection import MariaDbServer
from postdate.backends.mariadb.schema import MariaDbOutbox
from postdate.backends.sql.outbox import SqlOutbox, decode_operations
from postdate.backends.sql.row_locks.outbox import Result, ThreadedConnection
from postdate.core.recoverability import is_outage
from postdate.errors import (
    MessageTooLarge,
    StoreError,
    StoreFromNewerVersion,
    StoreNotSetUp,
    StoreUnavailable,
    StoreUnreachable,
)
from postdate.ports import OutboxRecord, OutboxStore, OutboxTransaction

NOW = datetime(2026, 1, 31, 12, 0, 5, 123_456, tzinfo=UTC)
SECOND = timedelta(seconds=1)
OPERATIONS = (
    Envelope("billing", "e-1", {"key": "wert ü"}, b"\0body", NOW, time_to_be_received=3 * SECOND),
    DelayedMessage("d-1", NOW + timedelta(microseconds=1), "sales", {"a": "b"}, b"", NOW + SECOND),
    Envelope("error", "e-2", {}, b"", due=NOW, use_dead_letter_queue=True),
)


class Subject:
    """A place for an outbox, with a table ``paid`` of an application in the same database."""

    store: OutboxStore
    elsewhere: OutboxStore
    table = "paid"
    marks = "postdate_migration"
    """The table in which is marked which tables were made."""
    at_once = 1
    """As many transactions can be open; others wait."""

    def query(self, statement: str) -> list[Any]:
        raise NotImplementedError

    def within(self, native: Any, statement: str) -> list[Any]:
        """Run a statement as work of another adapter does."""
        cursor = native.execute(statement)
        return cursor.fetchall() if cursor.description else []

    def drop(self) -> None:
        pass

    @property
    def insert(self) -> str:
        return f"INSERT INTO {self.table} VALUES (1)"

    def paid(self) -> int:
        return self.query(f"SELECT count(*) FROM {self.table}")[0][0]


class SqliteSubject(Subject):
    def __init__(self, path: Path) -> None:
        self._path = path
        self.query("CREATE TABLE paid (amount INTEGER)")
        self.store, self.elsewhere = (SqliteOutbox(path, synchronous="normal") for _ in range(2))

    def query(self, statement: str) -> list[Any]:
        connection = sqlite3.connect(self._path, isolation_level=None)
        try:
            return connection.execute(statement).fetchall()
        finally:
            connection.close()


class PostgresSubject(Subject):
    def __init__(self, url: str) -> None:
        self._url, self._schema, self.at_once = url, fresh_schema(), 16
        self.table = f"paid_{os.getpid()}"
        self.query(f"CREATE TABLE {self.table} (amount integer)")
        self.store, self.elsewhere = store, _ = tuple(PostgresOutbox(url, schema=self._schema) for _ in range(2))
        self.marks = store._database.names.name_of("migration").replace("%%", "%")

    def query(self, statement: str) -> list[Any]:
        with psycopg.connect(self._url, autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def drop(self) -> None:
        self.query(f"DROP TABLE {self.table}")
        drop_schema(self._url, self._schema)


class MariaDbSubject(Subject):
    def __init__(self, url: str) -> None:
        self._url, self._schema, self.at_once = url, mariadb_subjects.fresh_schema(), 16
        database = MariaDbServer(url).address.database  # our sessions have none of their own
        self.table = f"`{database}`.paid_{os.getpid()}"
        self.query(f"CREATE TABLE {self.table} (amount integer)")
        self.store, self.elsewhere = store, _ = tuple(MariaDbOutbox(url, schema=self._schema) for _ in range(2))
        self.marks = store._names.qualified_name("postdate_migration")

    def query(self, statement: str) -> list[Any]:
        with closing(MariaDbServer(self._url).connect_as_application()) as session:
            session.change(statement)
            return list(session.rows(statement.replace("%", "%%"))) if statement.startswith("SELECT") else []

    def within(self, native: Any, statement: str) -> list[Any]:
        if statement.startswith("SELECT"):
            return list(native.rows(statement))
        native.change(statement)
        return []

    def drop(self) -> None:
        self.query(f"DROP TABLE {self.table}")
        mariadb_subjects.drop_schema(self._url, self._schema)


async def execute(connection: Any, statement: str) -> Any:
    """Execute a statement as a handler does with this driver, and return what it brings first."""
    done = connection.execute(statement)
    found = await done if isinstance(done, Awaitable) else done
    if isinstance(found, Result):
        return found.rows[0] if found.rows else None
    if not found.description:
        return None
    row = found.fetchone()
    return await row if isinstance(row, Awaitable) else row


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
async def subject(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Subject]:
    if request.param == "sqlite":
        subject: Subject = SqliteSubject(tmp_path / "shop.db")
    elif request.param == "mariadb":
        subject = MariaDbSubject(request.getfixturevalue("mariadb_url"))
    else:
        subject = PostgresSubject(request.getfixturevalue("postgres_url"))
    yield subject
    for store in (subject.store, subject.elsewhere):
        await store.close()
        await store.close()  # a second time without effect
    subject.drop()


async def test_business_data_and_record_are_one_commit(subject: Subject) -> None:
    store = subject.store
    await store.setup()
    transaction = store.transaction("sales", "m-1")
    assert not transaction.has_begun
    connection = await transaction.begin()
    assert transaction.has_begun
    assert await transaction.begin() is connection
    await execute(connection, subject.insert)
    assert subject.paid() == 0
    assert await transaction.commit(OPERATIONS, NOW)
    assert subject.paid() == 1
    assert await store.find("sales", "m-1") == OutboxRecord(OPERATIONS, is_dispatched=False)
    assert await store.find("billing", "m-1") is None

    transaction = store.transaction("sales", "m-2")
    await execute(await transaction.begin(), subject.insert)
    await transaction.roll_back()
    await transaction.roll_back()  # without effect
    assert subject.paid() == 1
    assert await store.find("sales", "m-2") is None


async def test_operations_come_back_as_they_were(subject: Subject) -> None:
    await subject.store.setup()
    assert await subject.store.transaction("sales", "m \0 1").commit(OPERATIONS, NOW)  # without begin; a foreign id
    found = await subject.elsewhere.find("sales", "m \0 1")
    assert found is not None
    assert tuple(found.operations) == OPERATIONS
    await subject.store.mark_dispatched("sales", "m \0 1", NOW)
    await subject.store.mark_dispatched("sales", "m \0 1", NOW + SECOND)
    for another in ("m  1", "m 1", "m"):  # a NUL that is dropped, or that ends the id, would make it known
        assert await subject.store.find("sales", another) is None
    assert await subject.store.find("sales", "m \0 1") == OutboxRecord((), is_dispatched=True)


async def test_what_sends_nothing_is_dispatched_at_once(subject: Subject) -> None:
    await subject.store.setup()
    assert await subject.store.transaction("sales", "m-1").commit([], NOW)
    assert await subject.store.find("sales", "m-1") == OutboxRecord((), is_dispatched=True)


async def test_of_two_transactions_of_one_message_one_commits(subject: Subject) -> None:
    await subject.store.setup()
    outcomes: list[bool] = []

    async def handle(store: OutboxStore) -> None:
        transaction = store.transaction("sales", "m-1")
        await execute(await transaction.begin(), subject.insert)
        outcomes.append(await transaction.commit(OPERATIONS, NOW))

    async with anyio.create_task_group() as tasks:
        for store in (subject.store, subject.elsewhere, subject.store):
            tasks.start_soon(handle, store)
    assert sorted(outcomes) == [False, False, True]
    assert subject.paid() == 1


async def test_what_many_do_at_once_is_done_for_each(subject: Subject) -> None:
    """Without business data: written, found and marked by one statement for those that come at a time."""
    await subject.store.setup()
    told = list[tuple[str, bool]]()

    async def handle(store: OutboxStore, id_: str) -> None:
        assert await store.find("purchase", id_) is None
        told.append((id_, await store.transaction("sales", id_).commit(OPERATIONS if id_ < "m-5" else [], NOW)))

    async with anyio.create_task_group() as tasks:
        for n in range(30):
            tasks.start_soon(handle, subject.elsewhere if n >= 25 else subject.store, f"m-{n % 10}")
    assert sorted(id_ for id_, is_new in told if is_new) == [f"m-{n}" for n in range(10)]
    found = dict[str, OutboxRecord | None]()

    async def end(id_: str) -> None:
        await subject.store.mark_dispatched("sales", id_, NOW)
        found[id_] = await subject.store.find("sales", id_)

    assert await subject.store.find("sales", "m-1") == OutboxRecord(OPERATIONS, is_dispatched=False)
    async with anyio.create_task_group() as tasks:
        for n in range(11):
            tasks.start_soon(end, f"m-{n}")
    assert found == {**{f"m-{n}": OutboxRecord((), is_dispatched=True) for n in range(10)}, "m-10": None}


async def test_work_of_others_is_part_of_the_commit(subject: Subject) -> None:
    await subject.store.setup()
    insert, done = subject.insert, list[str]()

    def work(native: Any) -> None:
        subject.within(native, insert)
        done.append("done")

    assert await subject.store.transaction("sales", "m-1").commit([], NOW, [work, work])
    assert subject.paid() == 2
    assert not await subject.elsewhere.transaction("sales", "m-1").commit([], NOW, [work])
    assert (subject.paid(), len(done)) == (2, 2)

    def fail(native: Any) -> None:
        subject.within(native, insert)
        raise ValueError("no")

    transaction = subject.store.transaction("sales", "m-2")
    with pytest.raises(ValueError, match="no"):
        await transaction.commit([], NOW, [fail])
    await transaction.roll_back()
    assert subject.paid() == 2
    assert await subject.store.find("sales", "m-2") is None


async def test_a_handler_cannot_commit_by_itself(subject: Subject) -> None:
    await subject.store.setup()
    transaction = subject.store.transaction("sales", "m-1")
    connection = await transaction.begin()
    await execute(connection, subject.insert)
    if not isinstance(connection, ThreadedConnection):  # which has nothing to commit with
        with pytest.raises((sqlite3.DatabaseError, psycopg.ProgrammingError)):
            await _awaited(connection.commit())
    assert subject.paid() == 0
    if isinstance(connection, sqlite3.Connection):
        with pytest.raises(sqlite3.DatabaseError, match="not authorized"), connection:
            pass
        with pytest.raises(sqlite3.DatabaseError, match="not authorized"):
            connection.execute("COMMIT")
    await transaction.roll_back()
    assert subject.paid() == 0


async def _awaited(done: Any) -> None:
    if isinstance(done, Awaitable):
        await done


async def test_what_was_dispatched_long_ago_is_forgotten_in_batches(subject: Subject) -> None:
    store = subject.store
    await store.setup()
    for number in range(5):
        await store.transaction("sales", f"m-{number}").commit([], NOW + number * SECOND)
    await store.transaction("sales", "waits").commit(OPERATIONS, NOW)
    await store.transaction("billing", "m-0").commit([], NOW)
    assert await store.remove_dispatched("sales", NOW + 4 * SECOND, 3) == 3
    assert await store.remove_dispatched("sales", NOW + 4 * SECOND, 3) == 1
    assert await store.remove_dispatched("sales", NOW + 4 * SECOND, 3) == 0
    assert await store.find("sales", "m-0") is None
    assert await store.find("sales", "m-4") is not None
    assert await store.find("sales", "waits") is not None
    assert await store.find("billing", "m-0") is not None


async def test_without_tables_it_says_so_and_setup_may_be_done_by_several_at_once(subject: Subject) -> None:
    with pytest.raises(StoreNotSetUp):
        await subject.store.find("sales", "m-1")
    async with anyio.create_task_group() as tasks:
        for store in (subject.store, subject.elsewhere, subject.store):
            tasks.start_soon(store.setup)
    assert await subject.store.find("sales", "m-1") is None


async def test_a_cancelled_handler_leaves_nothing_behind(subject: Subject) -> None:
    await subject.store.setup()
    transaction = subject.store.transaction("sales", "m-1")
    first = subject.store.transaction("sales", "m-0")
    await first.begin()

    async def handle() -> None:
        await transaction.begin()
        await anyio.sleep_forever()

    with pytest.raises(TimeoutError):  # by asyncio's own means, while it may still be waiting for its turn
        await asyncio.wait_for(handle(), 0.01)  # noqa: TID251 - it must end so
    await transaction.roll_back()
    assert await first.commit([], NOW)
    with patience():  # nothing is locked
        assert await subject.elsewhere.transaction("sales", "m-1").commit([], NOW)


async def test_a_handler_that_gives_up_beginning_commits_without(subject: Subject) -> None:
    """It has a time limit of its own; where there is one writer, the begin waits for another process."""
    await subject.store.setup()
    other, transaction = subject.elsewhere.transaction("sales", "m-0"), subject.store.transaction("sales", "m-1")
    await other.begin()
    with suppress(TimeoutError):
        await asyncio.wait_for(transaction.begin(), 0.05)  # noqa: TID251 - it must end so
    await other.roll_back()
    with patience():
        assert await transaction.commit([], NOW)
        assert await subject.elsewhere.transaction("sales", "m-2").commit([], NOW)  # nothing is locked
    assert await subject.elsewhere.find("sales", "m-1") is not None


async def test_a_handler_may_give_up_beginning_at_any_moment(postgres_url: str) -> None:
    schema, server = fresh_schema(), urlsplit(postgres_url)
    assert server.hostname is not None
    assert server.port is not None
    with FaultyLink(server.hostname, server.port) as link:
        outbox = PostgresOutbox(through(link, postgres_url), schema=schema)
        try:
            await outbox.setup()
            assert await outbox.transaction("sales", "m").commit([], NOW)
            link.delay(timedelta(milliseconds=20))
            for moment in range(0, 200, 10):
                transaction = outbox.transaction("sales", f"m-{moment}")
                with patience():
                    with suppress(TimeoutError):
                        await asyncio.wait_for(transaction.begin(), moment / 1_000)  # noqa: TID251 - it must end so
                    assert await transaction.commit([], NOW)
        finally:
            await outbox.close()
            drop_schema(postgres_url, schema)


async def test_a_transaction_that_a_handler_broke_is_not_committed(subject: Subject) -> None:
    await subject.store.setup()
    transaction = subject.store.transaction("sales", "m-1")
    connection = await transaction.begin()
    await execute(connection, subject.insert)
    if isinstance(connection, sqlite3.Connection):
        connection.set_authorizer(None)
    await execute(connection, "COMMIT")
    with pytest.raises(StoreError, match="ended"):
        await transaction.commit([], NOW)
    await transaction.roll_back()
    assert await subject.store.find("sales", "m-1") is None


async def test_a_transaction_in_which_a_statement_failed_says_how_to_go_on(subject: Subject) -> None:
    """PostgreSQL commits nothing of it any more; the others undo the statement alone."""
    await subject.store.setup()
    transaction = subject.store.transaction("sales", "m-1")
    connection = await transaction.begin()
    with pytest.raises((sqlite3.Error, psycopg.Error, pymysql.Error)):
        await execute(connection, f"INSERT INTO {subject.table} (missing) VALUES (1)")
    if not isinstance(connection, psycopg.AsyncConnection):
        assert await transaction.commit([], NOW)
        return
    with pytest.raises(StoreError, match="savepoint"):
        await transaction.commit([], NOW)
    await transaction.roll_back()
    assert await subject.store.find("sales", "m-1") is None


async def test_a_later_version_is_left_alone(subject: Subject) -> None:
    await subject.store.setup()
    subject.query(f"INSERT INTO {subject.marks} (subject, version, name) SELECT subject, 99, '' FROM {subject.marks}")
    with pytest.raises(StoreFromNewerVersion, match="99"):
        await subject.elsewhere.setup()


async def test_after_closing_it_is_refused(tmp_path: Path) -> None:
    outbox = SqliteOutbox(tmp_path / "shop.db")
    await outbox.close()
    with pytest.raises(StoreError, match="closed"):
        await outbox.setup()


async def test_a_lost_connection_is_an_outage_and_not_the_fault_of_the_message(postgres_url: str) -> None:
    schema = fresh_schema()
    outbox = PostgresOutbox(postgres_url, schema=schema)
    try:
        await outbox.setup()
        transaction = outbox.transaction("sales", "m-1")
        connection = await transaction.begin()
        with psycopg.connect(postgres_url, autocommit=True) as other:
            other.execute("SELECT pg_terminate_backend(%s)", (connection.info.backend_pid,))
        with pytest.raises(psycopg.OperationalError):
            await connection.execute("SELECT 1")
        with pytest.raises(StoreUnreachable):
            await transaction.roll_back()

        transaction = outbox.transaction("sales", "m-1")
        connection = await transaction.begin()
        with psycopg.connect(postgres_url, autocommit=True) as other:
            other.execute("SELECT pg_terminate_backend(%s)", (connection.info.backend_pid,))
        with pytest.raises(StoreUnreachable):
            await transaction.commit([], NOW)
        with pytest.raises(StoreUnreachable):
            await transaction.roll_back()
        assert await outbox.transaction("sales", "m-1").commit([], NOW)
    finally:
        await outbox.close()
        drop_schema(postgres_url, schema)


FULL: Mapping[type[Subject], list[str]] = {
    SqliteSubject: ["PRAGMA max_page_count = 1", "INSERT INTO paid VALUES (zeroblob(1000000))"],
    PostgresSubject: ["SET TRANSACTION READ ONLY", f"INSERT INTO paid_{os.getpid()} VALUES (1)"],
    MariaDbSubject: ["SIGNAL SQLSTATE 'HY000' SET MYSQL_ERRNO = 1021, MESSAGE_TEXT = 'Disk full'"],
}


async def test_of_a_handlers_statements_those_are_outages_that_a_full_or_read_only_database_refuses(
    subject: Subject,
) -> None:
    for (*first, refused_one), is_outage_of_all in ((FULL[type(subject)], True), (["SELECT * FROM nowhere"], False)):
        transaction = subject.store.transaction("sales", "m-1")
        connection = await transaction.begin()
        for each in first:
            await execute(connection, each)
        with pytest.raises((sqlite3.Error, psycopg.Error, pymysql.Error)) as refused:
            await execute(connection, refused_one)
        assert (subject.store.outage_of(refused.value) is not None) == is_outage_of_all
        await transaction.roll_back()
    assert subject.store.outage_of(ValueError("of the handler")) is None


@pytest.mark.parametrize(
    "outbox",
    [
        lambda path: SqliteOutbox(path / "no folder" / "shop.db"),
        lambda _: PostgresOutbox("postgresql://postdate@127.0.0.1:1/shop"),
        lambda _: MariaDbOutbox("mariadb://postdate@127.0.0.1:1/shop"),
    ],
    ids=["sqlite", "postgres", "mariadb"],
)
async def test_a_database_that_gives_a_handler_no_connection_is_an_outage(
    tmp_path: Path, outbox: Callable[[Path], SqlOutbox[Any]]
) -> None:
    store = outbox(tmp_path)
    transaction = store.transaction("sales", "m-1")
    with pytest.raises(StoreError) as refused:
        await transaction.begin()
    assert is_outage(refused.value)
    with pytest.raises(type(refused.value)):  # whatever the handler has made of it
        await transaction.roll_back()
    await store.close()


async def test_a_race_that_is_lost_at_the_commit_is_no_outage(postgres_url: str) -> None:
    """Who chooses to be serializable loses some, and is handled again at once."""
    schema = fresh_schema()
    outbox = PostgresOutbox(postgres_url, schema=schema)
    try:
        await outbox.setup()
        transaction = outbox.transaction("sales", "m-1")
        await (await transaction.begin()).execute("""
            CREATE TEMP TABLE raced (x integer) ON COMMIT DROP;
            CREATE FUNCTION pg_temp.lose() RETURNS trigger LANGUAGE plpgsql AS
                $$ BEGIN RAISE EXCEPTION 'lost' USING ERRCODE = '40001'; END $$;
            CREATE CONSTRAINT TRIGGER lose AFTER INSERT ON raced DEFERRABLE INITIALLY DEFERRED
                FOR EACH ROW EXECUTE FUNCTION pg_temp.lose();
            INSERT INTO raced VALUES (1)""")
        with pytest.raises(StoreUnavailable, match="lost") as raised:
            await transaction.commit([], NOW)
        assert not is_outage(raised.value)
        await transaction.roll_back()
        assert await outbox.transaction("sales", "m-1").commit([], NOW)
    finally:
        await outbox.close()
        drop_schema(postgres_url, schema)


async def test_a_row_that_somebody_keeps_holds_up_the_message_that_changes_it_and_not_those_beside_it(
    postgres_url: str,
) -> None:
    """Who keeps it may wait for the row of another message that came at the same time."""
    subject = PostgresSubject(postgres_url)
    table = subject.table
    await subject.store.setup()
    subject.query(f"INSERT INTO {table} SELECT generate_series(0, 9)")

    def changed() -> int:
        return subject.query(f"SELECT count(*) FROM {table} WHERE amount >= 100")[0][0]

    async def handle(number: int) -> None:
        def change(native: Any) -> None:
            subject.within(native, f"UPDATE {table} SET amount = amount + 100 WHERE amount = {number}")

        assert await subject.store.transaction("sales", f"m-{number}").commit([], NOW, [change])

    with psycopg.connect(postgres_url) as owner:
        owner.execute(f"UPDATE {table} SET amount = 9 WHERE amount = 9".encode())
        async with anyio.create_task_group() as tasks:
            for number in range(10):
                tasks.start_soon(handle, number)
            await until(lambda: changed() == 9)
            owner.execute(f"UPDATE {table} SET amount = amount WHERE amount = 100".encode())
            owner.commit()
    assert changed() == 10
    assert await subject.elsewhere.find_all("sales", [f"m-{n}" for n in range(10)]) == [OutboxRecord((), True)] * 10
    await subject.store.close()
    await subject.elsewhere.close()
    subject.drop()


async def test_a_handlers_connection_has_the_settings_of_the_application(postgres_url: str) -> None:
    schema = fresh_schema()
    outbox = PostgresOutbox(postgres_url, schema=schema)
    try:
        await outbox.setup()
        transaction = outbox.transaction("sales", "m-1")
        cursor = await (await transaction.begin()).execute("SHOW enable_seqscan")
        assert await cursor.fetchone() == ("on",)
        await transaction.roll_back()
    finally:
        await outbox.close()
        drop_schema(postgres_url, schema)


def test_damaged_operations_are_told() -> None:
    with pytest.raises(StoreError, match="damaged"):
        decode_operations(b"\xc1")
    with pytest.raises(StoreError, match="newer"):
        decode_operations(b"\x82\xa7version\x02\xaaoperations\x90")


async def test_a_transaction_that_is_over_cannot_begin_and_holds_up_nobody(subject: Subject) -> None:
    await subject.store.setup()
    first, rolled_back = (subject.store.transaction("sales", each) for each in ("m-0", "m-1"))
    await first.begin()
    begun = asyncio.ensure_future(rolled_back.begin())
    await anyio.lowlevel.checkpoint()  # in SQLite it waits for its turn; in PostgreSQL it is beginning
    await rolled_back.roll_back()
    assert await first.commit([], NOW)
    with pytest.raises(StoreError, match="has ended"):
        await asyncio.gather(begun, rolled_back.begin())
    for transaction in (first, rolled_back):
        with pytest.raises(StoreError, match="has ended"):
            await transaction.begin()
    with patience():
        for number in range(40):  # more than there are connections
            late = subject.store.transaction("sales", "late")
            await late.roll_back()
            with pytest.raises(StoreError, match="has ended"):
                await late.begin()
            assert await subject.store.transaction("sales", f"then {number}").commit([], NOW)


async def test_who_waits_for_a_connection_when_its_transaction_ends_gives_it_back(subject: Subject) -> None:
    await subject.store.setup()
    holding = [subject.store.transaction("sales", f"m-{number}") for number in range(subject.at_once)]
    for each in holding:
        await each.begin()
    waiting = [subject.store.transaction("sales", f"w-{number}") for number in range(20)]
    begun = [asyncio.ensure_future(each.begin()) for each in waiting]
    await anyio.lowlevel.checkpoint()
    for each in waiting:
        await each.roll_back()
    for each in holding:
        await each.roll_back()
    assert all(isinstance(each, StoreError) for each in await asyncio.gather(*begun, return_exceptions=True))
    with patience():
        assert await subject.store.transaction("sales", "then").commit([], NOW)


async def test_what_a_handler_sets_on_the_connection_ends_with_its_transaction(subject: Subject) -> None:
    await subject.store.setup()
    seen: list[Any] = []

    def work(native: Any) -> None:
        seen.append(subject.within(native, "SELECT 'a'")[0])

    for number in range(2):
        transaction = subject.store.transaction("sales", f"m-{number}")
        connection = await transaction.begin()
        seen.append(await execute(connection, "SELECT 'b'"))
        connection.row_factory = _no_rows
        if isinstance(connection, sqlite3.Connection):
            connection.text_factory = bytes
        assert await transaction.commit(OPERATIONS, NOW, [work])
        found = await subject.store.find("sales", f"m-{number}")
        assert found is not None
        assert tuple(found.operations) == OPERATIONS
    assert seen == [("b",), ("a",)] * 2


async def test_a_temporary_table_of_one_handler_is_not_there_for_the_next(subject: Subject) -> None:
    await subject.store.setup()
    for number, commits in enumerate((True, False, True)):
        transaction = subject.store.transaction("sales", f"m-{number}")
        await execute(await transaction.begin(), "CREATE TEMPORARY TABLE batch (number INTEGER)")
        if commits:
            assert await transaction.commit([], NOW)
        else:
            await transaction.roll_back()


async def test_a_database_that_one_handler_attaches_is_not_there_for_the_next(tmp_path: Path) -> None:
    """It could not detach it in its transaction, and no other handler could attach one of that name."""
    outbox = SqliteOutbox(tmp_path / "shop.db")
    await outbox.setup()
    for number in range(2):
        transaction = outbox.transaction("sales", f"m-{number}")
        connection = await transaction.begin()
        await execute(connection, f"ATTACH '{tmp_path / 'warehouse.db'}' AS warehouse")
        assert await transaction.commit([], NOW)
    await outbox.close()


async def test_settings_and_locks_of_one_handler_do_not_reach_the_next_in_postgresql(postgres_url: str) -> None:
    subject = PostgresSubject(postgres_url)
    await subject.store.setup()
    transaction = subject.store.transaction("sales", "m-1")
    connection = await transaction.begin()
    await execute(connection, "SELECT pg_advisory_lock(4711)")
    await execute(connection, "SET search_path = nowhere")
    assert await transaction.commit([], NOW)
    assert subject.query("SELECT pg_try_advisory_lock(4711)") == [(True,)]
    transaction = subject.store.transaction("sales", "m-2")
    assert await execute(await transaction.begin(), "SHOW search_path") != ("nowhere",)
    await transaction.roll_back()
    for store in (subject.store, subject.elsewhere):
        await store.close()
    subject.drop()


def _no_rows(*_: object) -> Any:
    raise LookupError("rows of a handler")


async def test_an_outbox_of_a_later_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    outbox = SqliteOutbox(path)
    await outbox.setup()
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("INSERT INTO postdate_migration VALUES (2, 'of a later one', 'outbox')")
    with pytest.raises(StoreFromNewerVersion, match="version 2"):
        await outbox.setup()
    await outbox.close()


async def test_a_file_that_is_refused_is_not_open_while_the_error_is_looked_at(tmp_path: Path) -> None:
    """Not even by the traceback of the error, which has the connection in its frames."""
    path = tmp_path / "other.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE of_others (id INTEGER)")
    store, file = SqliteStore(path, create=False), path.stat()
    with pytest.raises(StoreNotSetUp) as refusal:
        await store.store(DelayedMessage("m-1", NOW, "q"), NOW)
    is_open = False
    for descriptor in range(1_000):
        with suppress(OSError):
            is_open |= os.path.samestat(os.fstat(descriptor), file)
    assert not is_open, refusal.traceback
    await store.close()


# --- MariaDB ----------------------------------------------------------------------------------------------------------


@pytest.fixture
async def mariadb(mariadb_url: str) -> AsyncIterator[MariaDbSubject]:
    subject = MariaDbSubject(mariadb_url)
    await subject.store.setup()
    yield subject
    await subject.store.close()
    await subject.elsewhere.close()
    subject.drop()


async def test_a_deadlock_that_a_handler_swallows_commits_nothing(mariadb: MariaDbSubject) -> None:
    """The server has rolled back everything, and would take what comes now for a transaction of its own."""
    mariadb.query(f"INSERT INTO {mariadb.table} VALUES (1), (2)")
    mariadb.query(f"ALTER TABLE {mariadb.table} ADD PRIMARY KEY (amount), ENGINE = InnoDB")
    one, two = (mariadb.store.transaction("sales", id_) for id_ in ("m-1", "m-2"))
    first, second = await one.begin(), await two.begin()
    await execute(first, f"DELETE FROM {mariadb.table} WHERE amount = 1")
    await execute(second, f"DELETE FROM {mariadb.table} WHERE amount = 2")
    lost = list[OutboxTransaction]()

    async def go_on(transaction: OutboxTransaction, connection: Any, amount: int) -> None:
        try:
            await execute(connection, f"DELETE FROM {mariadb.table} WHERE amount = {amount}")
        except pymysql.OperationalError:
            lost.append(transaction)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(go_on, one, first, 2)
        tasks.start_soon(go_on, two, second, 1)
    assert len(lost) == 1
    with pytest.raises(StoreError, match="deadlock") as raised:
        await lost[0].commit(OPERATIONS, NOW)
    assert not is_outage(raised.value)
    await lost[0].roll_back()
    assert await (two if lost == [one] else one).commit(OPERATIONS, NOW)
    assert mariadb.paid() == 0
    found = [await mariadb.store.find("sales", id_) for id_ in ("m-1", "m-2")]
    assert found.count(None) == 1


async def test_a_connection_that_the_server_ended_is_an_outage(mariadb: MariaDbSubject) -> None:
    for ends_at_commit in (False, True):
        transaction = mariadb.store.transaction("sales", "m-1")
        connection = await transaction.begin()
        (number,) = await execute(connection, "SELECT CONNECTION_ID()")
        mariadb.query(f"KILL {number}")
        if ends_at_commit:
            with pytest.raises(StoreUnreachable):
                await transaction.commit([], NOW)
        else:
            with pytest.raises(pymysql.Error):
                await execute(connection, "SELECT 1")
        with pytest.raises(StoreUnreachable):
            await transaction.roll_back()
    assert await mariadb.store.transaction("sales", "m-1").commit([], NOW)


async def test_a_lock_that_somebody_keeps_is_no_outage(mariadb: MariaDbSubject) -> None:
    """The row of the record is locked by another transaction of the same message for longer than is waited."""
    transaction = mariadb.store.transaction("sales", "m-1")
    connection = await transaction.begin()
    await execute(connection, "SET SESSION innodb_lock_wait_timeout = 1")
    with closing(MariaDbServer(mariadb._url).connect()) as other:
        table = f"{mariadb.marks.rpartition('.')[0]}.`postdate_outbox`"
        other.begin()
        other.change(f"INSERT INTO {table} (endpoint, message_id, handled_at) VALUES ('sales', 'm-1', 1)")
        with pytest.raises(StoreUnavailable, match="Lock wait timeout") as raised:
            await transaction.commit([], NOW)
    assert not is_outage(raised.value)
    await transaction.roll_back()
    assert await mariadb.store.transaction("sales", "m-1").commit([], NOW)


async def test_an_id_of_any_length_is_known(subject: Subject) -> None:
    """MariaDB's table takes 250 characters, and PostgreSQL's index 2,704 bytes after compression."""
    await subject.store.setup()
    long = "".join(chr(0x10000 + number * 7919 % 0xF0000) for number in range(10_000))
    ids = ["x" * 250, "x" * 251, long[:450], long[:451], long, f"{long[:-1]}y"]
    for id_ in ids:
        assert await subject.store.transaction("s" * 200, id_).commit([], NOW)
        assert not await subject.elsewhere.transaction("s" * 200, id_).commit([], NOW)


async def test_operations_that_fit_into_no_packet_are_refused(mariadb: MariaDbSubject) -> None:
    """The server would hang up, which looks like an outage and would come again and again."""
    (size,) = mariadb.query("SELECT @@max_allowed_packet")[0]
    large = [Envelope("billing", "e-1", {}, bytes(size // 2))]
    with pytest.raises(MessageTooLarge, match="max_allowed_packet"):
        await mariadb.store.transaction("sales", "m-1").commit(large, NOW)
    transaction = mariadb.store.transaction("sales", "m-1")
    await transaction.begin()
    with pytest.raises(MessageTooLarge, match="max_allowed_packet"):
        await transaction.commit(large, NOW)
    await transaction.roll_back()
    assert await mariadb.store.find("sales", "m-1") is None


async def test_a_handlers_connection_is_as_the_application_would_open_it(mariadb: MariaDbSubject) -> None:
    transaction = mariadb.store.transaction("sales", "m-1")
    connection = await transaction.begin()
    assert await execute(connection, "SELECT DATABASE(), @@tx_isolation") == ("postdate", "REPEATABLE-READ")
    found = await connection.execute("SELECT %s + %s", (1, 2))
    assert found == Result([(3,)], 1)
    assert await connection.run(lambda driver: driver.get_server_info()) is not None
    await execute(connection, "SET SESSION sql_mode = 'NO_BACKSLASH_ESCAPES'")
    assert await transaction.commit(OPERATIONS, NOW)
    found = await mariadb.store.find("sales", "m-1")
    assert found is not None
    assert tuple(found.operations) == OPERATIONS

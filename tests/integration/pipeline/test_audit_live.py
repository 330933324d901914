"""An audit of a store that others write to never takes what is on its way for lost, doubled or orphaned."""

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
import psycopg
import pytest
from pyspark.sql import SparkSession
from tests.mariadb_subjects import drop_schema as drop_database
from tests.mariadb_subjects import fresh_schema as fresh_database
from tests.postgres_subjects import drop_schema, fresh_schema
from tests.waiting import Eventually

from postdate.backends.mariadb.connection import MariaDbServer
from postdate.backends.mariadb.schema import quote_name
from postdate.backends.mariadb.store import MariaDbStore
from postdate.backends.postgres.store import PostgresStore
from postdate.backends.postgres.transport import PostgresTransport
from postdate.backends.sql.row_locks.parts import to_row
from postdate.messages import DelayedMessage
from postdate.pipeline.audit import AuditResult, audit, reading
from postdate.pipeline.audit.reading import AuditedStore, exclude_pruned
from postdate.pipeline.stores import StoreSpec, open_spec
from postdate.ports import Outcome

START = datetime(2026, 3, 1, 12, tzinfo=UTC)
LATER = START + timedelta(minutes=10)
TABLE = "live.timeouts"
_BESIDE_A_SERVICE = pytest.mark.soak(
    "a service works on beside two audits",
    part="spark",
    proven_by=(
        "tests/integration/pipeline/test_audit_live.py::test_a_low_number_that_is_committed_late_in_postgresql",
        "tests/integration/pipeline/test_audit_live.py::test_a_low_number_that_is_committed_late_in_mariadb",
    ),
)


@pytest.fixture
def postgres(postgres_url: str) -> Iterator[StoreSpec]:
    """A store in PostgreSQL with a few messages that wait."""
    schema = fresh_schema()
    yield from filled(
        StoreSpec(postgres_url, schema=schema, endpoint="live"), lambda: drop_schema(postgres_url, schema)
    )


@pytest.fixture
def mariadb(mariadb_url: str) -> Iterator[StoreSpec]:
    """The same in MariaDB."""
    database = fresh_database()
    session = MariaDbServer(mariadb_url).connect()
    session.change(f"CREATE DATABASE {quote_name(database)}")
    session.close()
    yield from filled(
        StoreSpec(mariadb_url, schema=database, endpoint="live"), lambda: drop_database(mariadb_url, database)
    )


def filled(spec: StoreSpec, drop: Callable[[], None]) -> Iterator[StoreSpec]:
    try:
        with open_spec(spec, create=True) as store:
            store.setup()
            store.store_many([DelayedMessage(f"m-{n}", LATER, "orders") for n in range(20)], START)
        yield spec
    finally:
        drop()


def test_a_low_number_that_is_committed_late_in_postgresql(
    spark: SparkSession, postgres: StoreSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer has drawn its number before all others, and commits as soon as the audit has its snapshot."""
    assert postgres.schema is not None
    store = PostgresStore(postgres.address, schema=postgres.schema, table=TABLE)
    writer = psycopg.connect(postgres.address)
    store.enqueue_blocking(writer, [DelayedMessage("low", LATER, "orders")], START)
    finds_nothing_while(spark, postgres, writer.commit, "_records", monkeypatch)
    writer.close()
    store.database.close_blocking()


def test_a_low_number_that_is_committed_late_in_mariadb(
    spark: SparkSession, mariadb: StoreSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is committed after the audit has read what waits, and before it reads the records."""
    assert mariadb.schema is not None
    store = MariaDbStore(mariadb.address, schema=mariadb.schema, table=TABLE)
    writer = MariaDbServer(mariadb.address).connect()
    writer.begin()
    tables = store._tables
    tables.insert(writer, [to_row(DelayedMessage("low", LATER, "orders"), 1_000)], 0)
    finds_nothing_while(spark, mariadb, writer.commit, "read_waiting", monkeypatch)
    writer.close()
    store._pool.close()


def finds_nothing_while(
    spark: SparkSession, spec: StoreSpec, commit: Callable[[], None], step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Store a message, and audit; commit one with a lower number after a step of the reading."""
    with open_spec(spec) as others:
        others.store_many([DelayedMessage("high", LATER, "orders")], START)
    done = list[None]()
    original = getattr(reading._StoreReading, step)

    def and_act(self: Any, *arguments: Any, **named: Any) -> Any:
        result = original(self, *arguments, **named)
        if not done:
            done.append(commit())
        return result

    with monkeypatch.context() as patched:
        patched.setattr(reading._StoreReading, step, and_act)
        result = audit(spark, spec, START, partitions=2)
    assert done
    assert (result.is_clean, result.counts.pending) == (True, 21)
    with open_spec(spec) as others:
        assert others.count_overdue(LATER + timedelta(days=1)) == 22


@_BESIDE_A_SERVICE
def test_what_a_service_moves_meanwhile_in_postgresql(
    spark: SparkSession, postgres: StoreSpec, eventually: Eventually
) -> None:
    """Messages are stored, moved and handled from beginning to end of two audits."""
    schema = postgres.schema
    assert schema is not None

    async def work(stopping: threading.Event, worked: threading.Event) -> None:
        store = PostgresStore(postgres.address, schema=schema, table=TABLE)
        transport = PostgresTransport(postgres.address, schema=schema)
        await transport.create_queues(["orders"])
        receiver, number = transport.receiver("orders"), 0
        while not stopping.is_set():
            await store.store_many([DelayedMessage(f"w-{number}-{n}", START, "orders") for n in range(20)], START)
            await store.move_due(LATER, 10)
            for received in await receiver.receive(8):
                await receiver.commit(received, LATER)
            number += 1
            worked.set()
        await receiver.close()
        await transport.close()
        await store.close()

    results = audited_beside(spark, postgres, work, eventually)
    assert [(result.is_clean, result.counts.duplicated) for result in results] == [(True, 0), (True, 0)]
    assert 0 < results[0].counts.handled < results[1].counts.handled
    assert 0 < results[0].counts.scheduled < results[1].counts.scheduled


@_BESIDE_A_SERVICE
def test_what_a_service_dispatches_meanwhile_in_mariadb(
    spark: SparkSession, mariadb: StoreSpec, eventually: Eventually
) -> None:
    schema = mariadb.schema
    assert schema is not None

    async def work(stopping: threading.Event, worked: threading.Event) -> None:
        store, number = MariaDbStore(mariadb.address, schema=schema, table=TABLE), 0
        while not stopping.is_set():
            await store.store_many([DelayedMessage(f"w-{number}-{n}", START, "orders") for n in range(20)], START)
            await store.finish(await store.claim_due(LATER, 10), Outcome.DELIVERED, LATER)
            number += 1
            worked.set()
        await store.close()

    results = audited_beside(spark, mariadb, work, eventually)
    assert [(result.is_clean, result.counts.duplicated) for result in results] == [(True, 0), (True, 0)]
    assert 0 < results[0].counts.delivered < results[1].counts.delivered


def audited_beside(
    spark: SparkSession,
    spec: StoreSpec,
    work: Callable[[threading.Event, threading.Event], Any],
    eventually: Eventually,
) -> list[AuditResult]:
    """Audit twice while a thread works; it has done a whole piece of work before each."""
    stopping, worked, failures = threading.Event(), threading.Event(), list[BaseException]()

    def run() -> None:
        try:
            anyio.run(work, stopping, worked)
        except BaseException as error:  # noqa: BLE001 - told by the test
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    results = list[AuditResult]()
    try:
        for _ in range(2):
            for _ in range(2):  # what it was at is done, and the next
                worked.clear()
                eventually(lambda: worked.is_set() or failures, "the service works")
            results.append(audit(spark, spec, LATER, late_after=timedelta(days=1), partitions=2))
    finally:
        stopping.set()
        thread.join()
    assert not failures
    return results


def test_what_was_archived_while_it_was_read_is_not_taken_for_lost(spark: SparkSession, store: StoreSpec) -> None:
    """Three messages seem lost or orphaned. One is archived by now, and one forgotten; the third is lost indeed."""
    with open_spec(store, create=True) as found:
        found.setup()
        found.store_many([DelayedMessage(name, LATER, "orders") for name in ("archived", "lost", "newest")], START)
    with closing(sqlite3.connect(store.address.removeprefix("sqlite:///"))) as connection, connection:
        connection.execute("UPDATE record SET detail = 'archived' WHERE seq = 1")
    seem = spark.createDataFrame(
        [
            ("postdate", "archived", True, False),
            ("postdate", "lost", True, False),
            ("postdate", "forgotten", False, True),
            ("postdate", "fine", False, False),
        ],
        "endpoint string, message_id string, lost boolean, orphaned boolean",
    )
    (held,) = (AuditedStore("postdate", store, has_snapshot=True),)
    assert exclude_pruned(spark, seem, [held], 2) is None
    left = exclude_pruned(spark, seem, [AuditedStore("postdate", store)], 2)
    assert left is not None
    assert sorted(row["message_id"] for row in left.collect()) == ["fine", "lost"]
    again = exclude_pruned(spark, left, [AuditedStore("postdate", store)], 2)
    assert again is None

"""An archive of a store on a server: what goes out comes back as it was, and services work on meanwhile."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import anyio
import pytest
from pyspark.sql import SparkSession
from tests.mariadb_subjects import drop_schema as drop_database
from tests.mariadb_subjects import fresh_schema as fresh_database
from tests.postgres_subjects import drop_schema, fresh_schema

from postdate.backends.mariadb.connection import MariaDbServer
from postdate.backends.mariadb.schema import quote_name
from postdate.backends.mariadb.store import MariaDbStore
from postdate.backends.postgres.store import PostgresStore
from postdate.backends.postgres.transport import PostgresTransport
from postdate.messages import DelayedMessage
from postdate.pipeline.archive import archive, restore
from postdate.pipeline.archive.job import _Run
from postdate.pipeline.audit import audit
from postdate.pipeline.stores import StoreSpec, open_spec
from postdate.ports import Outcome, Scan

START = datetime(2026, 3, 1, 12, tzinfo=UTC)
LATER = START + timedelta(minutes=10)
NOW = START + timedelta(days=2)
TABLE = "shop.timeouts"
COLUMNS = ("number", "kind", "message_id", "at", "due", "destination", "detail")


@pytest.fixture
def postgres(postgres_url: str) -> Iterator[StoreSpec]:
    """A store in PostgreSQL that is not set up."""
    schema = fresh_schema()
    yield StoreSpec(postgres_url, schema=schema, endpoint="shop")
    drop_schema(postgres_url, schema)


@pytest.fixture
def mariadb(mariadb_url: str) -> Iterator[StoreSpec]:
    """The same in MariaDB."""
    database = fresh_database()
    session = MariaDbServer(mariadb_url).connect()
    session.change(f"CREATE DATABASE {quote_name(database)}")
    session.close()
    yield StoreSpec(mariadb_url, schema=database, endpoint="shop")
    drop_database(mariadb_url, database)


def records(spec: StoreSpec) -> list[tuple[object, ...]]:
    with open_spec(spec) as found:
        store = found.require_scannable()
        parts = store.scan_parts("records", 1)
        pages = [page for part in parts for page in store.scan(Scan("records", COLUMNS), part, 1_000)]
    return sorted(tuple(row) for page in pages for row in page)


def test_out_of_postgresql_and_back(
    spark: SparkSession, postgres: StoreSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While records are taken out, a service stores and moves; an audit then sees nothing wrong."""
    schema = postgres.schema
    assert schema is not None

    async def work(name: str, at: datetime) -> None:
        store = PostgresStore(postgres.address, schema=schema, table=TABLE)
        transport = PostgresTransport(postgres.address, schema=schema)
        await store.setup()
        await transport.create_queues(["orders"])
        await store.store_many([DelayedMessage(f"{name}-{n}", at, "orders") for n in range(50)], at)
        await store.move_due(at + timedelta(seconds=1), 40)
        receiver = transport.receiver("orders")
        for received in await receiver.receive(30):
            await receiver.commit(received, at + timedelta(seconds=2))
        await receiver.close()
        await transport.close()
        await store.close()

    anyio.run(work, "old", START)
    before, plain = records(postgres), audit(spark, postgres, NOW).counts
    change = _Run._change

    def beside_a_service(self: _Run, *arguments: object) -> int:
        anyio.run(work, f"new-{arguments[1]}", LATER)
        return change(self, *arguments)  # pyright: ignore[reportArgumentType]

    with monkeypatch.context() as patched:
        patched.setattr(_Run, "_change", beside_a_service)
        result = archive(spark, postgres, tmp_path / "archive", LATER, NOW)
    # The message with the newest record of all stays.
    assert (result.messages, result.records, result.pruned, result.ids_kept) == (29, 87, 58, 29)
    assert [(day.day, day.messages) for day in result.days] == [("2026-03-01", 29)]
    alone = audit(spark, postgres, NOW)
    assert (alone.is_clean, alone.counts.archived, alone.counts.scheduled) == (True, 29, 150)
    back = restore(spark, postgres, tmp_path / "archive", ended_to=LATER)
    assert (back.messages, back.left_out) == (29, 0)
    numbers = {row[0] for row in before}  # the service has gone on with what was left of the old ones
    after = records(postgres)
    assert [row for row in after if row[0] in numbers] == before
    assert len({row[0] for row in after}) == len(after)
    assert plain.handled == 30


@pytest.mark.soak(
    "the same in MariaDB",
    part="spark",
    proven_by=(
        "tests/integration/pipeline/test_archive_servers.py::test_out_of_postgresql_and_back",
        "tests/integration/test_pruning.py::test_records_go_and_come_back",
    ),
)
def test_out_of_mariadb_and_back_to_a_new_store(spark: SparkSession, mariadb: StoreSpec, tmp_path: Path) -> None:
    schema = mariadb.schema
    assert schema is not None

    async def story() -> None:
        store = MariaDbStore(mariadb.address, schema=schema, table=TABLE)
        await store.setup()
        await store.store_many([DelayedMessage(f"m-{n}", START, "orders") for n in range(50)], START)
        await store.finish(await store.claim_due(LATER, 40), Outcome.DELIVERED, LATER)
        await store.store(DelayedMessage("newest", NOW, "orders"), NOW)
        await store.close()

    anyio.run(story)
    before = records(mariadb)
    result = archive(spark, mariadb, tmp_path / "archive", LATER + timedelta(seconds=1), NOW, keep_ids=False)
    assert (result.messages, result.records, result.pruned, result.ids_forgotten) == (40, 80, 40, 40)
    gone = {row[0] for row in before} - {row[0] for row in records(mariadb)}
    assert len(gone) == 80
    new = StoreSpec(f"sqlite:///{tmp_path / 'new.db'}", synchronous="normal")
    with open_spec(new, create=True) as store:
        store.setup()
    assert restore(spark, new, tmp_path / "archive").messages == 40
    assert records(new) == [row for row in before if row[0] in gone]

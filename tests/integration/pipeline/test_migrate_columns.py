"""Out of PostgreSQL in columns: the same messages as row by row, and what is odd is looked at row by row."""

import uuid
from collections.abc import Iterator

import psycopg
import pytest
from pyspark.sql import SparkSession
from tests.integration.pipeline.old_timeouts import COLUMNS, NO_SAGA, by_id, messages
from tests.postgres_subjects import drop_schema, fresh_schema

from postdate.clock import SystemClock
from postdate.messages import encode_headers
from postdate.pipeline.migrate import EVERYTHING, MARGIN, MigrateJob, OriginSpec, migrate, preview
from postdate.pipeline.rows import checked, restored
from postdate.pipeline.stores import StoreSpec, opened
from postdate.ports.migrating import MigrationRun, MigrationStatus

TABLE = "billing_TimeoutData"


@pytest.fixture
def schema(postgres_url: str) -> Iterator[str]:
    """A schema with a timeout manager's table, in which a store finds its place as well."""
    schema = fresh_schema()
    quoted = f'"{schema.replace(chr(34), chr(34) * 2)}"'
    table = f'{quoted}."{TABLE}"'.replace("%", "%%")
    timeouts = messages(20)
    # Written by others: spaces in the JSON, no body; and one that goes to whom answers go.
    spaced, answered = timeouts[0].message_id, timeouts[19].message_id
    with psycopg.connect(postgres_url, autocommit=True) as connection, connection.cursor() as cursor:
        cursor.execute(f"CREATE SCHEMA {quoted}".encode())
        cursor.execute(
            f'CREATE TABLE {quoted}."{TABLE}" ("Id" uuid PRIMARY KEY, "Destination" varchar(200), "SagaId" uuid, '
            f'"State" bytea, "Time" timestamp, "Headers" text, "PersistenceVersion" varchar(23))'.encode()
        )
        cursor.execute(f'CREATE INDEX ON {quoted}."{TABLE}" ("Time")'.encode())
        cursor.executemany(
            f"INSERT INTO {table} ({COLUMNS}) VALUES (%s, %s, %s, %s, %s, %s, '7.0.0')".encode(),
            [
                (m.message_id, m.destination, NO_SAGA, m.body, m.due.replace(tzinfo=None), encode_headers(m.headers))
                for m in timeouts
            ],
        )
        cursor.execute(
            f'UPDATE {table} SET "Headers" = %s, "State" = NULL WHERE "Id" = %s'.encode(),
            ('{ "a": "\\u00e9" }', spaced),
        )
        cursor.execute(
            f'UPDATE {table} SET "Headers" = %s, "Destination" = NULL WHERE "Id" = %s'.encode(),
            ('{"NServiceBus.ReplyToAddress":"back"}', answered),
        )
    yield schema
    drop_schema(postgres_url, schema)


def test_row_115_columns_are_what_rows_are(postgres_url: str, schema: str) -> None:
    with OriginSpec(postgres_url, schema).opened() as origin:
        now = SystemClock().now()
        run = MigrationRun(uuid.uuid4().hex, "billing", MigrationStatus.PREPARING, {}, EVERYTHING, now)
        origin.source.begin(run)
        assert len(origin.source.hide(run, 10, 2, MARGIN)) == 2
        assert origin.columns is not None
        first, last = (origin.columns.read(run.run_id, number) for number in (1, 2))
        assert first is not None
        assert last is None, "a timeout without a destination is left to the source"
        columns, bad = checked(first, 1_000_000)
        assert bad == []
        assert by_id(restored(columns)) == by_id(origin.source.read(run, 1))
        assert {message.destination for message in restored(origin.read(run, 2))} == {"orders", "back"}


def test_row_115_columns_of_an_exchanged_table_are_what_rows_are(postgres_url: str, schema: str) -> None:
    with OriginSpec(postgres_url, schema).opened() as origin:
        now = SystemClock().now()
        run = MigrationRun(uuid.uuid4().hex, "billing", MigrationStatus.PREPARING, {}, EVERYTHING, now)
        origin.source.begin(run)
        assert len(origin.source.hide(run, 2, 1, MARGIN)) == 10
        assert origin.columns is not None
        batches = [origin.columns.read(run.run_id, number) for number in range(1, 11)]
        assert [batch is None for batch in batches] == [False] * 9 + [True]
        for number, batch in enumerate(batches[:9], 1):
            assert batch is not None
            columns, _ = checked(batch, 1_000_000)
            assert by_id(restored(columns)) == by_id(origin.source.read(run, number))


def test_row_115_from_postgresql_into_a_store_beside_it(spark: SparkSession, postgres_url: str, schema: str) -> None:
    target = StoreSpec(postgres_url, schema=schema, endpoint="billing")
    with opened(target, create=True) as store:
        store.setup()
    job = MigrateJob(OriginSpec(postgres_url, schema), target, batch_size=10)
    (before,) = preview(job, SystemClock().now()).endpoints
    assert dict(before.destinations) == {"orders": 19, "back": 1}
    (result,) = migrate(spark, job).endpoints
    assert (result.moved, result.verified, result.mismatched, result.status) == (20, 20, 0, "completed")

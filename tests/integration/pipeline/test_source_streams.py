"""Streams into a store and out of it: every message stored once, every record read once, over restarts and kills."""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.streaming.query import StreamingQuery
from tests.postgres_subjects import drop_schema, fresh_schema

from postdate.backends.postgres.store import PostgresStore
from postdate.errors import PipelineError
from postdate.messages import DelayedMessage
from postdate.pipeline.rows import arrow_schema
from postdate.pipeline.source import streaming
from postdate.pipeline.source.streaming import FollowPlan, RecordStreamReader, split_range
from postdate.pipeline.stores import StoreSpec, open_spec
from postdate.ports import Scan

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
PROJECT = Path(__file__).parents[3]


@pytest.fixture
def on_postgres(postgres_url: str) -> Iterator[StoreSpec]:
    """A store in a schema of the test's own."""
    spec = StoreSpec(postgres_url, schema=fresh_schema())
    with open_spec(spec, create=True) as store:
        store.setup()
    yield spec
    assert spec.schema is not None
    drop_schema(postgres_url, spec.schema)


def add(spec: StoreSpec, *message_ids: str) -> None:
    with open_spec(spec, create=True) as store:
        store.setup()
        store.store_many([DelayedMessage(each, NOW + timedelta(hours=1), "orders") for each in message_ids], NOW)


def pending_ids(spec: StoreSpec) -> list[str]:
    with open_spec(spec) as store:
        scannable, scan = store.require_scannable(), Scan("pending", ("message_id",))
        return sorted(
            row[0]
            for part in scannable.scan_parts("pending", 1)
            for page in scannable.scan(scan, part, 99)
            for row in page
        )


def options(spec: StoreSpec) -> dict[str, str]:
    return {"store": spec.address} | (
        {"synchronous": spec.synchronous} if spec.schema is None else {"schema": spec.schema}
    )


def records(spark: SparkSession, spec: StoreSpec, **more: str | int) -> DataFrame:
    reads = spark.readStream.format("postdate").options(**options(spec), what="records", **more)
    return reads.load().select("number", "message_id", "kind")


def drain(frame: DataFrame, folder: Path) -> StreamingQuery:
    """Append what is available to the Parquet files in ``folder``, under its checkpoint."""
    writes = frame.writeStream.format("parquet").option("checkpointLocation", str(folder / "checkpoint"))
    query = writes.trigger(availableNow=True).start(str(folder / "files"))
    query.awaitTermination()
    return query


def read_ids(spark: SparkSession, folder: Path) -> list[str]:
    return sorted(row.message_id for row in spark.read.parquet(str(folder / "files")).collect())


# --- reading ------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["sqlite", "postgresql"])
def either(request: pytest.FixtureRequest) -> StoreSpec:
    return request.getfixturevalue("store" if request.param == "sqlite" else "on_postgres")


def _also_on_postgresql(*proven_by: str) -> pytest.MarkDecorator:
    soak = pytest.mark.soak(
        "whole streams; what they ask of the store is asked of PostgreSQL in this process, too",
        part="spark",
        proven_by=tuple(f"tests/integration/pipeline/test_source_streams.py::{test}" for test in proven_by),
    )
    return pytest.mark.parametrize("either", ["sqlite", pytest.param("postgresql", marks=soak)], indirect=True)


@_also_on_postgresql(
    "test_records_are_read_once_each_over_restarts[sqlite]",
    "test_a_limit_bounds_each_batch_and_all_available_has_none[postgresql]",
)
def test_records_are_read_once_each_over_restarts(spark: SparkSession, either: StoreSpec, tmp_path: Path) -> None:
    add(either, "a", "b", "c")
    drain(records(spark, either, maxRowsPerBatch=2), tmp_path)
    assert read_ids(spark, tmp_path) == ["a", "b", "c"]
    add(either, "c", "d")
    query = drain(records(spark, either), tmp_path)
    assert read_ids(spark, tmp_path) == ["a", "b", "c", "d"]
    progress = query.lastProgress
    assert progress is not None
    assert json.loads(progress["sources"][0]["endOffset"])["next"] > 4


def reader(spec: StoreSpec, **changed: Any) -> RecordStreamReader:
    values: dict[str, Any] = {
        "spec": spec,
        "schema": arrow_schema("records", ["number", "message_id"]),
        "partitions": 3,
        "starts_at_end": False,
        "rows_per_batch": 10,
    }
    return RecordStreamReader(FollowPlan(**(values | changed)))


def rows(one: RecordStreamReader, start: dict[str, Any], end: dict[str, Any]) -> list[str]:
    shares = one.partitions(start, end)
    batches = [batch for share in shares for batch in one.read(share)]
    return sorted(row["message_id"] for batch in batches for row in batch.to_pylist())


def test_a_limit_bounds_each_batch_and_all_available_has_none(either: StoreSpec) -> None:
    names = [f"m{n:02}" for n in range(25)]
    add(either, *names)
    one = reader(either)
    assert one.getDefaultReadLimit() == ReadMaxRows(10)
    start, read = one.initialOffset(), list[str]()
    for _ in range(5):
        end = one.latestOffset(start, ReadMaxRows(10))
        some = rows(one, start, end)
        assert len(some) <= 10
        read += some
        start = end
    assert sorted(read) == names
    assert one.latestOffset(start, ReadMaxRows(10)) == start
    assert rows(one, one.initialOffset(), one.latestOffset(one.initialOffset(), ReadAllAvailable())) == names
    assert one.partitions(start, start) == []
    one.stop()


def test_latest_begins_with_what_comes_next(either: StoreSpec) -> None:
    add(either, "before")
    one = reader(either, starts_at_end=True)
    start = one.initialOffset()
    add(either, "after")
    assert rows(one, start, one.latestOffset(start, ReadAllAvailable())) == ["after"]
    one.stop()


@pytest.mark.parametrize(
    ("first", "end", "shares"),
    [(0, 10_001, [(0, 3334), (3334, 6668), (6668, 10_001)]), (5, 20, [(5, 20)]), (7, 7, [])],
)
def test_shares_cover_the_numbers_evenly(first: int, end: int, shares: list[tuple[int, int]]) -> None:
    assert split_range(first, end, 3) == shares


def test_a_run_over_what_is_available_ends_although_others_go_on_writing(either: StoreSpec) -> None:
    add(either, "a")
    one = reader(either)
    one.prepareForTriggerAvailableNow()
    add(either, "later")
    end = one.latestOffset(one.initialOffset(), ReadAllAvailable())
    assert rows(one, one.initialOffset(), end) == ["a"]
    assert one.latestOffset(end, ReadAllAvailable()) == end
    assert one.reportLatestOffset()["next"] > end["next"]
    one.stop()


def test_a_transaction_that_stays_open_leaves_later_records_to_the_next_run(
    on_postgres: StoreSpec, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = PostgresStore(on_postgres.address, schema=on_postgres.schema or "", table="postdate.timeouts")
    one = reader(on_postgres)
    start = one.initialOffset()
    with psycopg.connect(on_postgres.address) as connection:
        store.enqueue_blocking(connection, [DelayedMessage("slow", NOW, "orders")], NOW)
        add(on_postgres, "quick")
        with monkeypatch.context() as impatient:
            impatient.setattr(streaming, "WRITER_TIMEOUT_SECONDS", 0.1)
            one.prepareForTriggerAvailableNow()
        assert rows(one, start, one.latestOffset(start, ReadAllAvailable())) == []
        assert "has been open for more than" in caplog.text
        connection.commit()
    again = reader(on_postgres)
    again.prepareForTriggerAvailableNow()
    assert rows(again, start, again.latestOffset(start, ReadAllAvailable())) == ["quick", "slow"]
    for each in (one, again):
        each.stop()
    store.database.close_blocking()


# --- checkpoints that are not of this store -----------------------------------------------------------------------


@_also_on_postgresql(
    "test_the_checkpoint_of_another_store_is_refused[sqlite]",
    "test_a_checkpoint_ahead_of_its_store_is_refused[postgresql]",
)
def test_the_checkpoint_of_another_store_is_refused(
    spark: SparkSession, either: StoreSpec, tmp_path: Path, store: StoreSpec
) -> None:
    add(either, "a")
    drain(records(spark, either), tmp_path)
    other = StoreSpec(f"sqlite:///{tmp_path / 'other.db'}", synchronous="normal")
    add(other, "b")
    with pytest.raises(StreamingQueryException, match="is of another store"):
        drain(records(spark, other), tmp_path)
    assert read_ids(spark, tmp_path) == ["a"]


def test_a_checkpoint_ahead_of_its_store_is_refused(either: StoreSpec) -> None:
    add(either, "a")
    one = reader(either)
    ahead = one.initialOffset() | {"next": 1_000}
    with pytest.raises(PipelineError, match="the store has none so high"):
        one.latestOffset(ahead, ReadAllAvailable())
    with pytest.raises(PipelineError, match="holds no offset of the format postdate"):
        one.partitions({"value": 3}, {"value": 4})
    one.stop()


def test_a_checkpoint_of_the_time_before_a_restore_is_refused(store: StoreSpec, tmp_path: Path) -> None:
    """The restored file has as many records again, so the checkpoint is not ahead of it."""
    file, backup = Path(store.address.removeprefix("sqlite:///")), tmp_path / "backup.db"
    add(store, "a")
    shutil.copy(file, backup)
    add(store, "b", "c")
    before = reader(store)
    checkpoint = before.latestOffset(before.initialOffset(), ReadAllAvailable())
    before.stop()
    for name in ("", "-wal", "-shm"):
        file.with_name(file.name + name).unlink(missing_ok=True)
    shutil.copy(backup, file)
    add(store, "d", "e", "f", "g")
    after = reader(store)
    assert checkpoint["next"] < after.latestOffset(after.initialOffset(), ReadAllAvailable())["next"]
    for use in (lambda: after.latestOffset(checkpoint, ReadAllAvailable()), lambda: after.partitions(checkpoint, {})):
        with pytest.raises(PipelineError, match="number 3 is another record now: the store was made anew, restored"):
            use()
    after.stop()


def test_the_last_record_of_a_checkpoint_may_be_removed_and_not_be_another(either: StoreSpec) -> None:
    add(either, "a", "b")
    one = reader(either)
    checkpoint = one.latestOffset(one.initialOffset(), ReadAllAvailable())
    add(either, "c")
    number = checkpoint["last"][0]
    change(either, f"UPDATE record SET message_id = 'x' WHERE {number_column(either)} = {number}")
    with pytest.raises(PipelineError, match=f"number {number} is another record now"):
        one.latestOffset(checkpoint, ReadAllAvailable())
    change(either, f"DELETE FROM record WHERE {number_column(either)} = {number}")
    assert rows(one, checkpoint, one.latestOffset(checkpoint, ReadAllAvailable())) == ["c"]
    of_earlier_version = {name: value for name, value in checkpoint.items() if name != "last"}
    assert rows(one, of_earlier_version, one.latestOffset(of_earlier_version, ReadAllAvailable())) == ["c"]
    one.stop()


def test_a_quiet_store_keeps_its_last_record_while_another_one_uses_the_numbers(on_postgres: StoreSpec) -> None:
    """Stores of one schema share their numbers; no record of its own is near the end."""
    add(on_postgres, "a")
    one = reader(on_postgres)
    before = one.latestOffset(one.initialOffset(), ReadAllAvailable())
    add(replace(on_postgres, endpoint="busy"), *(f"b{number}" for number in range(150)))
    after = one.latestOffset(before, ReadAllAvailable())
    assert after["next"] > before["next"] + 100
    assert after["last"] == before["last"] is not None
    one.stop()


def number_column(spec: StoreSpec) -> str:
    return "seq" if spec.schema is None else "number"


def change(spec: StoreSpec, statement: str) -> None:
    """Run a statement on the database of a store, in its schema."""
    if spec.schema is None:
        with closing(sqlite3.connect(spec.address.removeprefix("sqlite:///"))) as connection, connection:
            connection.execute(statement)
    else:
        with psycopg.connect(spec.address) as connection:
            connection.execute(sql.SQL("SET search_path = {}").format(sql.Identifier(spec.schema)))
            connection.execute(statement.encode())


# --- writing ------------------------------------------------------------------------------------------------------


def messages(spark: SparkSession, folder: Path) -> DataFrame:
    """Files of lines, each the id of a message, as a stream."""
    lines = spark.readStream.text(str(folder))
    return lines.selectExpr(
        "value AS message_id", "'orders' AS destination", "timestamp'2030-05-01T12:00:00Z' AS due", "value AS body"
    )


def test_a_stream_is_stored_and_one_that_is_read_again_changes_nothing(
    spark: SparkSession, store: StoreSpec, tmp_path: Path
) -> None:
    source = tmp_path / "lines"
    source.mkdir()
    (source / "one").write_text("a\nb\n", encoding="utf-8")
    for checkpoint in ("first", "lost"):
        writes = messages(spark, source).writeStream.format("postdate").options(**options(store))
        query = writes.option("checkpointLocation", str(tmp_path / checkpoint)).trigger(availableNow=True).start()
        query.awaitTermination()
    assert pending_ids(store) == ["a", "b"]


def test_a_row_that_is_no_message_fails_the_stream_and_is_named(
    spark: SparkSession, store: StoreSpec, tmp_path: Path
) -> None:
    source = tmp_path / "lines"
    source.mkdir()
    (source / "one").write_text("a\n \n", encoding="utf-8")
    writes = messages(spark, source).writeStream.format("postdate").options(**options(store))
    query = writes.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True).start()
    with pytest.raises(StreamingQueryException, match=r"row 1 of partition 0 \(message id ' '\) is not a message"):
        query.awaitTermination()


_DRIVER = """
import sys
from postdate.pipeline.session import spark_session
address, schema, source, checkpoint = sys.argv[1:]
with spark_session("killed", cores=1) as spark:
    lines = spark.readStream.option("maxFilesPerTrigger", 1).text(source)
    messages = lines.selectExpr(
        "value AS message_id", "'orders' AS destination", "timestamp'2030-05-01T12:00:00Z' AS due"
    )
    writes = messages.writeStream.format("postdate").options(store=address, schema=schema, batch=50)
    writes.option("checkpointLocation", checkpoint).trigger(availableNow=True).start().awaitTermination()
"""


@pytest.mark.soak(
    "a driver is killed with -9 and started again",
    part="kills",
    proven_by=(
        "tests/integration/pipeline/test_source_streams.py::test_a_stream_is_stored_and_one_that_is_read_again_changes_nothing",
        "tests/integration/pipeline/test_source.py::test_writing_again_stores_nothing_twice",
    ),
)
def test_a_driver_that_is_killed_and_started_again_stores_everything_once(
    on_postgres: StoreSpec, tmp_path: Path, eventually
) -> None:
    source = tmp_path / "lines"
    source.mkdir()
    for file in range(3):
        lines = "".join(f"m{file}-{n}\n" for n in range(400))
        (source / f"{file}").write_text(lines, encoding="utf-8")
    schema = on_postgres.schema or ""
    place = [on_postgres.address, schema, str(source), str(tmp_path / "checkpoint")]
    command = [sys.executable, "-c", _DRIVER, *place]
    counted = f'SELECT count(*) FROM "{schema.replace(chr(34), chr(34) * 2)}".record'.encode()

    def stored() -> int:
        with psycopg.connect(on_postgres.address) as connection:
            row = connection.execute(counted).fetchone()
        assert row is not None
        return row[0]

    with (tmp_path / "log").open("wb") as log:
        driver = subprocess.Popen(command, cwd=PROJECT, stdout=log, stderr=log, start_new_session=True)
        try:
            eventually(lambda: stored() >= 50 or driver.poll() is not None, "something is stored")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(driver.pid, 9)
            driver.wait()
        again = subprocess.run(command, cwd=PROJECT, stdout=log, stderr=log, check=False)
    assert again.returncode == 0, (tmp_path / "log").read_text(encoding="utf-8")[-2_000:]
    with psycopg.connect(on_postgres.address) as connection:
        ids = [row[0] for row in connection.execute(counted.replace(b"count(*)", b"message_id")).fetchall()]
    assert sorted(ids) == sorted(f"m{file}-{n}" for file in range(3) for n in range(400))

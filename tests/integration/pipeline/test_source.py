"""The Spark format ``postdate``: what is written is read back, in any number of shares, and nothing is written
twice."""

import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import anyio
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark program uses
from tests.postgres_subjects import drop_schema, fresh_schema

from postdate import LocalTransport, PostgresTransport, SystemClock
from postdate.errors import PipelineError
from postdate.pipeline.dispatching import SweepSpec
from postdate.pipeline.failures import shorten_errors
from postdate.pipeline.frames import open_snapshot
from postdate.pipeline.java import STARTUP_OPTIONS, find_java_home, prepare_java_home
from postdate.pipeline.rows import MESSAGE_SCHEMA
from postdate.pipeline.source import writing
from postdate.pipeline.source.writing import convert_headers_to_text
from postdate.pipeline.stores import StoreSpec, open_spec
from postdate.pipeline.texts import json_pairs

DUE = datetime(2026, 3, 1, 12, 0, 0, 123_456, tzinfo=UTC)


def messages(spark: SparkSession, number: int) -> DataFrame:
    rows = [
        (f"m{n}", "orders", DUE + timedelta(seconds=n), DUE + timedelta(days=1), {"k": "v “ü”"}, bytes([n % 256]))
        for n in range(number)
    ]
    return spark.createDataFrame(rows, MESSAGE_SCHEMA)


def write(frame: DataFrame, store: StoreSpec) -> None:
    frame.write.format("postdate").options(store=store.address, synchronous="normal").mode("append").save()


def read(spark: SparkSession, store: StoreSpec, **options: str | int) -> DataFrame:
    return spark.read.format("postdate").options(store=store.address, synchronous="normal", **options).load()


def test_messages_are_read_as_they_were_written(spark: SparkSession, store: StoreSpec) -> None:
    written = messages(spark, 300)
    write(written, store)
    pending = read(spark, store, partitions=3)
    columns = "message_id", "destination", "due", "expires_at", "headers", "body"
    assert sorted(pending.select(*columns).collect()) == sorted(written.select(*columns).collect())


def test_writing_again_stores_nothing_twice(spark: SparkSession, store: StoreSpec) -> None:
    for _ in range(2):
        write(messages(spark, 50), store)
    assert read(spark, store).count() == 50
    assert read(spark, store, what="records").count() == 50


def test_any_number_of_shares_reads_every_row_once(spark: SparkSession, store: StoreSpec) -> None:
    write(messages(spark, 7), store)
    for partitions in (1, 2, 7, 50):
        ids = [row.message_id for row in read(spark, store, partitions=partitions, columns="message_id").collect()]
        assert sorted(ids) == [f"m{n}" for n in range(7)]


def test_only_the_columns_that_are_named_are_read(spark: SparkSession, store: StoreSpec) -> None:
    write(messages(spark, 2), store)
    records = read(spark, store, what="records", columns="message_id, kind")
    assert [tuple(row) for row in records.orderBy("message_id").collect()] == [("m0", "scheduled"), ("m1", "scheduled")]


def test_an_empty_store_reads_as_no_rows(spark: SparkSession, store: StoreSpec) -> None:
    with open_spec(store, create=True) as open_store:
        open_store.setup()
    for what in ("pending", "records", "queued"):
        assert read(spark, store, what=what).collect() == []


def test_wrong_options_are_refused_when_the_frame_is_made(spark: SparkSession, store: StoreSpec) -> None:
    with pytest.raises(PySparkException, match="did you mean columns"):
        read(spark, store, colums="due")


def test_a_store_that_is_missing_is_not_made_by_reading(spark: SparkSession, store: StoreSpec) -> None:
    with pytest.raises(PySparkException, match="there is no file"):
        read(spark, store).count()
    assert not Path(store.address.removeprefix("sqlite:///")).exists()


def test_overwriting_is_refused(spark: SparkSession, store: StoreSpec) -> None:
    writer = messages(spark, 1).write.format("postdate").options(store=store.address)
    with pytest.raises(PySparkException, match="never overwritten"):
        writer.mode("overwrite").save()


def test_a_row_that_is_no_message_fails_the_job_and_is_named(spark: SparkSession, store: StoreSpec) -> None:
    late = messages(spark, 3).withColumn("destination", F.when(F.col("message_id") != "m1", "orders")).coalesce(1)
    with pytest.raises(PySparkException, match=r"row 1 of partition 0 \(message id 'm1'\) is not a message"):
        write(late, store)


def test_texts_are_taken_for_bodies_and_headers(spark: SparkSession, store: StoreSpec) -> None:
    texts = spark.createDataFrame(
        [("m1", "orders", DUE, "\u00fc", '{"k": "v"}'), ("m2", "orders", DUE, None, None)],
        "message_id string, destination string, due timestamp, body string, headers string",
    )
    write(texts, store)
    found = {row.message_id: (bytes(row.body), row.headers) for row in read(spark, store).collect()}
    assert found == {"m1": ("\u00fc".encode(), {"k": "v"}), "m2": (b"", {})}


def test_columns_can_be_chosen_by_a_schema(spark: SparkSession, store: StoreSpec) -> None:
    write(messages(spark, 2), store)
    reads = spark.read.format("postdate").options(store=store.address, synchronous="normal")
    chosen = reads.schema("due timestamp, message_id string").load()
    assert chosen.columns == ["due", "message_id"]
    first = int(DUE.timestamp()) * 1_000_000 + DUE.microsecond
    rows = chosen.selectExpr("message_id", "unix_micros(due)").collect()
    assert sorted(tuple(row) for row in rows) == [("m0", first), ("m1", first + 1_000_000)]


def test_shares_can_be_of_one_instant_that_the_driver_holds(spark: SparkSession, postgres_url: str) -> None:
    spec = StoreSpec(postgres_url, schema=fresh_schema())
    assert spec.schema is not None
    options = {"store": spec.address, "schema": spec.schema}
    messages(spark, 5).write.format("postdate").options(**options).mode("append").save()
    with open_snapshot(spec) as snapshot:
        assert snapshot is not None
        messages(spark, 9).write.format("postdate").options(**options).mode("append").save()
        reads = spark.read.format("postdate").options(**options, columns="message_id", partitions=2)
        assert reads.option("snapshot", snapshot).load().count() == 5
        assert reads.option("snapshot", snapshot).option("what", "records").load().count() == 9 - 4
    drop_schema(postgres_url, spec.schema)


# --- queues as sinks --------------------------------------------------------------------------------------------------


async def make_queues(store: StoreSpec, *names: str) -> None:
    transport = LocalTransport(store.address.removeprefix("sqlite:///"), synchronous="normal")
    await transport.create_queues(list(names))
    await transport.close()


async def test_what_is_written_to_queues_is_there_at_once_and_once(spark: SparkSession, store: StoreSpec) -> None:
    await make_queues(store, "orders", "error")
    at_once = messages(spark, 4).drop("due", "expires_at")
    for _ in range(2):
        writes = at_once.write.format("postdate").options(store=store.address, synchronous="normal", what="queued")
        writes.mode("append").save()
    queued = read(spark, store, what="queued").collect()
    assert sorted((row.message_id, row.queue) for row in queued) == [(f"m{n}", "orders") for n in range(4)]
    assert read(spark, store).count() == 0


async def test_messages_that_go_to_the_error_queue_are_told_after_all_tasks(
    spark: SparkSession, store: StoreSpec
) -> None:
    """A task that fails is repeated by Spark, and then finds nothing to do."""
    await make_queues(store, "orders", "error")
    rows = messages(spark, 4).drop("due", "expires_at")
    rows = rows.withColumn("destination", F.expr("if(message_id = 'm1', 'nowhere', destination)"))
    writes = rows.write.format("postdate").options(store=store.address, synchronous="normal", what="queued")
    with pytest.raises(PySparkException, match=r"1 messages could not be sent and are in the error queue 'error'"):
        writes.mode("append").save()
    queued = read(spark, store, what="queued").collect()
    assert sorted((row.message_id, row.queue) for row in queued if row.queue == "orders") == [
        (f"m{n}", "orders") for n in (0, 2, 3)
    ]
    assert [row.queue for row in queued if row.queue != "orders"] == ["error"]


async def test_what_is_written_to_queues_is_due_by_the_clock_of_the_store(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the clocks of driver and executor, which may be ahead, it would wait, and the job would end well."""

    class Ahead(SystemClock):
        def now(self) -> datetime:
            return super().now() + timedelta(hours=1)

    monkeypatch.setattr(writing, "SystemClock", Ahead)
    spec = StoreSpec(postgres_url, schema=fresh_schema())
    assert spec.schema is not None
    transport = PostgresTransport(postgres_url, schema=spec.schema)
    await transport.create_queues(["orders", "error"])
    plan = writing.WritePlan(spec, 10, SweepSpec(spec, postgres_url, {"schema": spec.schema}))
    batch = pa.record_batch({"message_id": ["a", "b"], "destination": ["orders", "orders"]})

    def run() -> None:
        plan.create_tables()
        plan.store_rows(iter([batch]), Ahead().now())

    await anyio.to_thread.run_sync(run)
    observer = transport.observer()
    assert observer is not None
    assert (await observer.queue_lengths())["orders"] == 2
    await transport.close()
    drop_schema(postgres_url, spec.schema)


# --- headers ----------------------------------------------------------------------------------------------------------

some_text = st.text(st.sampled_from('ab"\\\n\x01ü{},:'), max_size=4)
some_name = st.text(st.sampled_from('ab"\\\n\x01ü{},:'), min_size=1, max_size=4)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.none() | st.lists(st.tuples(some_name, some_text), max_size=3), max_size=5), st.integers(0, 3))
def test_maps_of_headers_become_the_same_headers_as_text(maps: list[list[tuple[str, str]] | None], first: int) -> None:
    column = pa.array(maps, pa.map_(pa.string(), pa.string()))
    batch = pa.record_batch(
        {"message_id": pa.array([str(n) for n in range(len(maps))], pa.string()), "headers": column}
    )
    found = convert_headers_to_text(batch.slice(first)).column("headers").to_pylist()
    assert [None if text is None else json_pairs(text) for text in found] == [
        None if pairs is None else [(name, dict(pairs)[name]) for name, _ in pairs] for pairs in maps[first:]
    ]


@pytest.mark.parametrize("column", ["message_id", "destination", "headers", "body", "map"])
def test_a_row_with_a_text_that_is_no_utf8_fails_the_job_in_a_sentence(
    spark: SparkSession, store: StoreSpec, column: str
) -> None:
    """And is not stored altered."""
    broken = "cast(X'61FF' AS string)"
    values = {"message_id": "'a'", "destination": "'q'", "headers": "'{}'", "body": "'x'"}
    values |= {"headers": f"map('k', {broken})"} if column == "map" else {column: broken}
    rows = spark.sql(f"SELECT timestamp '2030-05-01 12:00:00' due, {', '.join(f'{v} {n}' for n, v in values.items())}")
    with pytest.raises(PipelineError, match="the text is not UTF-8"), shorten_errors("the job has failed"):
        write(rows, store)
    assert read(spark, store).count() == 0


# --- found by its name, secrets not found -----------------------------------------------------------------------------

SECRET = "t0p-s3cret"
_PLAIN = """
import sys
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
folder, schema = sys.argv[1:]
builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").config("spark.log.level", "INFO")
builder = builder.config("spark.eventLog.enabled", "true").config("spark.eventLog.dir", f"file://{folder}/events")
spark = builder.config("spark.eventLog.compress", "false").getOrCreate()
options = {"store": f"file:{folder}/address", "schema": schema}
messages = spark.sql("SELECT 'm' || id AS message_id, 'orders' AS destination, now() AS due FROM range(3)")
messages.write.format("postdate").options(**options).mode("append").save()
pending = spark.read.format("postdate").options(**options).load()
pending.explain(True)
print(pending.where("message_id IN ('m1', 'm2')").count(), "postdate" in sys.modules)
try:
    messages.selectExpr("' ' AS message_id", "destination", "due").write.format("postdate").options(**options).mode(
        "append"
    ).save()
except PySparkException as error:
    print(error)
"""


@pytest.mark.soak(
    "a session of Spark's own, in a Java of its own",
    part="spark",
    proven_by=(
        "tests/integration/pipeline/test_source_options.py::test_the_package_that_spark_finds_stands_for_the_format",
        "tests/integration/pipeline/test_source_options.py::test_a_password_in_an_option_is_refused_and_not_shown",
        "tests/integration/pipeline/test_local_cluster.py::test_a_cluster_has_the_results_of_one_process_by_its_package_and_shows_no_secret",
    ),
)
def test_any_session_knows_the_format_and_none_tells_a_secret(postgres_url: str, tmp_path: Path) -> None:
    """A session started without Postdate, with Spark's own settings: push-down is off there."""
    schema = fresh_schema()
    assert "@" in postgres_url
    (tmp_path / "address").write_text(postgres_url.replace("@", f":{SECRET}@", 1), encoding="utf-8")
    (tmp_path / "events").mkdir()
    environment = {
        **os.environ,
        "JAVA_HOME": str(prepare_java_home(find_java_home(None, os.environ), tmp_path)),
        "SPARK_LAUNCHER_OPTS": " ".join(STARTUP_OPTIONS),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable,
    }
    command = [sys.executable, "-c", _PLAIN, str(tmp_path), schema]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    drop_schema(postgres_url, schema)
    assert "\n2 False\n" in done.stdout, done.stderr[-2_000:]
    assert "is not a message: message id is blank" in done.stdout
    files = [file for file in (tmp_path / "events").rglob("*") if file.is_file()]
    logs = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    assert any("BatchScan postdate" in log for log in logs), "the event log has the plan"
    for text in (done.stdout, done.stderr, *logs):
        assert SECRET not in text


def test_what_every_session_imports_imports_nothing_else() -> None:
    code = (
        "import pyspark.sql.datasource, sys; before = set(sys.modules); import pyspark_postdate; "
        "print(sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "['pyspark_postdate']\n"

"""The Spark format ``postdate``: what is written is read back, in any number of shares, and nothing is written
twice."""

from datetime import UTC, datetime, timedelta

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from postdate.pipeline.columns import MESSAGE_SCHEMA
from postdate.pipeline.stores import StoreSpec, opened

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
    with opened(store, create=True) as open_store:
        open_store.setup()
    for what in ("pending", "records", "queued"):
        assert read(spark, store, what=what).collect() == []


@pytest.mark.parametrize(
    ("options", "words"),
    [({"what": "nonsense"}, "choose one of pending"), ({"columns": "colour"}, "no column 'colour'")],
)
def test_what_is_not_there_is_refused(
    spark: SparkSession, store: StoreSpec, options: dict[str, str], words: str
) -> None:
    with pytest.raises(PySparkException, match=words):
        read(spark, store, **options)


def test_a_store_that_is_missing_is_not_made_by_reading(spark: SparkSession, store: StoreSpec) -> None:
    with pytest.raises(PySparkException):
        read(spark, store).count()


def test_overwriting_is_refused(spark: SparkSession, store: StoreSpec) -> None:
    writer = messages(spark, 1).write.format("postdate").options(store=store.address)
    with pytest.raises(PySparkException, match="never overwritten"):
        writer.mode("overwrite").save()


def test_a_row_that_is_no_message_fails_the_job(spark: SparkSession, store: StoreSpec) -> None:
    blank = spark.createDataFrame([(" ", "orders", DUE)], "message_id string, destination string, due timestamp")
    with pytest.raises(PySparkException, match="message id is blank"):
        write(blank, store)

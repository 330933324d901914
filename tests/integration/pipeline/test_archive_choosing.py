"""Whose story is over, told on frames."""

from datetime import UTC, datetime, timedelta

from pyspark.sql import DataFrame, SparkSession

from postdate.pipeline.archive.folder import RECORD_SCHEMA
from postdate.pipeline.archive.job import StoreContents, find_ended_messages, find_shared_numbers

START = datetime(2026, 3, 1, 12, tzinfo=UTC)


def records(spark: SparkSession, stories: dict[str, list[tuple[str, str | None]]]) -> DataFrame:
    """Return records of messages, numbered and timed in the order in which they stand there."""
    told = [(id_, kind, detail) for id_, story in stories.items() for kind, detail in story]
    rows = [
        (number, kind, id_, START + timedelta(seconds=number), START, "orders", detail)
        for number, (id_, kind, detail) in enumerate(told)
    ]
    return spark.createDataFrame(rows, RECORD_SCHEMA)


def test_what_came_back_or_waits_for_another_attempt_is_not_over(spark: SparkSession) -> None:
    sent = [("scheduled", None), ("delivered", None)]
    known = records(
        spark,
        {
            "handled": [*sent, ("handled", None)],
            "returned": [*sent, ("handled", None), ("failed", "ValueError: no"), ("returned", None)],
            "returned and handled": [*sent, ("failed", "ValueError: no"), ("returned", None), ("handled", None)],
            "sent again": [*sent, ("retried", "retried as other: ValueError: no")],
            "attempted": [*sent, ("retried", "no queue")],
            "newest": [("scheduled", None)],
        },
    )
    nothing = spark.createDataFrame([], RECORD_SCHEMA)
    contents = StoreContents(known, nothing.select("message_id"))
    over = find_ended_messages(contents, nothing, START + timedelta(days=1)).collect()
    assert {row["message_id"] for row in over} == {"handled", "returned and handled", "sent again"}
    assert {row["day"] for row in over} == {"2026-03-01"}


def test_numbers_that_two_records_have_are_found(spark: SparkSession) -> None:
    once = records(spark, {"a": [("scheduled", None), ("delivered", None)]})
    twice = once.union(records(spark, {"b": [("scheduled", None)]}))
    assert [row["number"] for row in find_shared_numbers(twice).collect()] == [0]
    assert find_shared_numbers(once).collect() == []

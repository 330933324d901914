"""What the audit makes of records, told on frames; and that it reads a store once."""

import sqlite3
from contextlib import closing
from datetime import UTC, datetime, timedelta

import anyio
from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark program uses

from postdate.backends.sqlite.store import SqliteStore
from postdate.messages import DelayedMessage
from postdate.pipeline.audit.judging import group_by_message, judge_messages
from postdate.pipeline.audit.reading import _events, checkpoint_frame
from postdate.pipeline.frames import scan_frame, scan_parts
from postdate.pipeline.rows import arrow_schema, spark_schema
from postdate.pipeline.stores import StoreSpec

DUE = datetime(2026, 3, 1, 12, tzinfo=UTC)
Story = list[tuple[str, float, str | None]]
"""Kind, seconds after it was due, and detail."""


def verdict(spark: SparkSession, stories: dict[str, Story], pruned_before: datetime | None = None) -> dict[str, Row]:
    rows = [
        (number, kind, id_, DUE + timedelta(seconds=at), DUE, "orders", detail)
        for id_, story in stories.items()
        for number, (kind, at, detail) in enumerate([("scheduled", -60, None), *story])
    ]
    found = spark.createDataFrame(rows, spark_schema(arrow_schema("records")))
    messages = group_by_message(_events(found, F.lit("shop"), before=1, times=1))
    told = judge_messages(messages, DUE + timedelta(hours=1), timedelta(seconds=1), pruned_before).collect()
    return {row["message_id"]: row for row in told}


def test_only_what_was_sent_again_accounts_for_a_message_that_left_its_queue(spark: SparkSession) -> None:
    found = verdict(
        spark,
        {
            "handled": [("delivered", 0, None), ("handled", 1, None)],
            "sent again": [("delivered", 0, None), ("retried", 1, "retried as other: ValueError: no")],
            "attempted": [("retried", 0, "no queue"), ("delivered", 1, None)],
            "attempted for no reason": [("retried", 0, None), ("delivered", 1, None)],
        },
    )
    assert {id_ for id_, row in found.items() if row["lost"]} == {"attempted", "attempted for no reason"}
    assert {id_ for id_, row in found.items() if row["retried"]} == found.keys() - {"handled"}


def test_one_record_of_a_discard_does_not_make_the_others_missing(spark: SparkSession) -> None:
    """Who records only outcomes keeps no record of what was handled, but of what was discarded."""
    story: dict[str, Story] = {
        "discarded": [("delivered", 0, None), ("discarded", 1, "expired at noon")],
        "not recorded": [("delivered", 0, None)],
    }
    found = verdict(spark, story)
    assert {id_: (row["lost"], row["discarded"]) for id_, row in found.items()} == {
        "discarded": (False, True),
        "not recorded": (False, False),
    }
    found = verdict(spark, {**story, "handled": [("delivered", 0, None), ("handled", 1, None)]})
    assert {id_ for id_, row in found.items() if row["lost"]} == {"not recorded"}


def test_records_that_were_removed_for_their_age_are_not_missed(spark: SparkSession) -> None:
    half: dict[str, Story] = {
        "nothing but scheduled": [],
        "came back": [("delivered", 0, None), ("delivered", 1, None)],
        "complete": [("delivered", 0, None), ("handled", 1, None)],
    }
    missed = verdict(spark, half)
    assert {id_ for id_, row in missed.items() if row["lost"] or row["duplicated"]} == half.keys() - {"complete"}
    for before, judged_by_them in ((DUE, True), (DUE + timedelta(microseconds=1), False)):
        found = verdict(spark, half, before)
        assert any(row["lost"] or row["duplicated"] for row in found.values()) is judged_by_them
        assert found["complete"]["handled"]


def test_a_receivers_clock_that_is_behind_makes_nothing_early(spark: SparkSession) -> None:
    found = verdict(
        spark,
        {
            "clock behind": [("delivered", 0.5, None), ("handled", -0.25, None)],
            "delivered early": [("delivered", -0.5, None), ("handled", 1, None)],
            "handled early, no delivery": [("handled", -0.25, None)],
            "on time": [("delivered", 0, None), ("handled", 0, None)],
        },
    )
    assert {id_: row["about_early"] for id_, row in found.items() if row["early"]} == {
        "delivered early": "0.500000 s before it was due",
        "handled early, no delivery": "0.250000 s before it was due",
    }


def test_what_was_read_is_never_read_again(spark: SparkSession, store: StoreSpec) -> None:
    """Not even when Spark has lost what it keeps: the store has gone on since."""
    path = store.address.removeprefix("sqlite:///")

    async def one_message() -> None:
        adapter = SqliteStore(path, synchronous="normal")
        await adapter.store_many([DelayedMessage("m-1", DUE, "orders")], DUE)
        await adapter.close()

    anyio.run(one_message)
    frame = checkpoint_frame(scan_frame(spark, store, "records", ("message_id",), scan_parts(store, "records", 1)))
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DELETE FROM record")
        connection.commit()
    spark.catalog.clearCache()
    assert [row["message_id"] for row in frame.collect()] == ["m-1"]

"""What an audit says of two stores between which messages move, and of one that an older version has emptied."""

import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing
from datetime import timedelta

import pytest
from pyspark.sql import SparkSession
from tests.integration.pipeline.old_timeouts import messages
from tests.integration.store_places import StorePlace, place_in
from tests.integration.test_store_move import left_in_both

from postdate.clock import SystemClock, to_microseconds
from postdate.pipeline.audit import audit
from postdate.ports import RecordKind

DAY = timedelta(days=1)


@pytest.fixture
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[StorePlace, StorePlace]]:
    """Return an old store in PostgreSQL and a new one in a file, both empty."""
    with ExitStack() as stack:
        yield stack.enter_context(place_in("postgres", request)), stack.enter_context(place_in("sqlite", request))


def test_audits_of_both_stores_are_clean_at_any_time(spark: SparkSession, ends: tuple[StorePlace, StorePlace]) -> None:
    """What has moved is cancelled in the old store, and scheduled in the new one; a page may be in both for a while."""
    old, new = ends
    found = messages(50)
    left_in_both(old, new, found)
    for place in ends:
        counts = audit(spark, place.spec, SystemClock().now()).counts
        assert (counts.scheduled, counts.cancelled, counts.pending, counts.lost) == (50, 0, 50, 0)

    old.add(messages(10, found[-1].due + DAY))
    assert old.move_to(new).is_complete
    assert len(new.deliver(found[5].due)) == 5
    counts = audit(spark, [old.spec, new.spec], SystemClock().now() + DAY).counts
    assert (counts.lost, counts.duplicated, counts.orphaned, counts.early) == (0, 0, 0, 0)
    assert (counts.scheduled, counts.cancelled, counts.pending, counts.delivered) == (120, 60, 55, 5)


def test_what_an_older_version_moved_away_and_gave_back_is_one_message(
    spark: SparkSession, request: pytest.FixtureRequest
) -> None:
    with place_in("sqlite", request) as place:
        (moved, back) = messages(2)
        place.add([moved, back])
        with closing(sqlite3.connect(place.spec.address.removeprefix("sqlite:///"))) as connection, connection:
            now, by = to_microseconds(SystemClock().now()), f"by migration {'0' * 32}"
            for message, kind, what in (
                (moved, RecordKind.CANCELLED, "moved to another store"),
                (back, RecordKind.CANCELLED, "moved to another store"),
                (back, RecordKind.RESCHEDULED, "given back"),
            ):
                row = (int(kind), message.message_id, now, to_microseconds(message.due), "orders", f"{what} {by}")
                sql = "INSERT INTO record (kind, message_id, at, due, destination, detail) VALUES (?, ?, ?, ?, ?, ?)"
                connection.execute(sql, row)
            connection.execute("DELETE FROM delayed_message WHERE message_id = ?", (moved.message_id,))
        assert place.deliver() == [back.message_id]
        counts = audit(spark, place.spec, SystemClock().now() + 9 * DAY).counts
        assert (counts.scheduled, counts.cancelled, counts.delivered) == (2, 2, 1)
        assert (counts.lost, counts.duplicated, counts.orphaned) == (0, 0, 0)

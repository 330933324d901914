"""Tables of a timeout manager as the source of a migration, on real servers: looking, hiding, runs. Row 115."""

import json
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from tests.integration.migration_places import (
    HOUR,
    LONG_AGO,
    MARGIN,
    NEXT_YEAR,
    PLACES,
    SECOND,
    Place,
    PostgresPlace,
    Row,
    SqlitePlace,
    hours,
    new_begun,
    new_run,
    opened,
)

from postdate import SystemClock
from postdate.backends.sql.timeouts_migration.tables import MigrationSource
from postdate.errors import (
    ConfigurationError,
    MessageError,
    MigrationConflict,
)
from postdate.ports.migrating import BatchStatus, MigrationStatus


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """Return an empty table of the endpoint ``Sales.Orders``."""
    yield from opened(request)


def all_hidden(place: Place, source: MigrationSource, size: int = 10) -> list[str]:
    """Hide everything; return the ids of all hidden timeouts in the order of their batches."""
    run = new_begun(source)
    while source.hide(run, size, 3, MARGIN):
        pass
    return [message.message_id for batch in source.batches(run) for message in source.read_batch(run, batch.number)]


# --- looking ----------------------------------------------------------------------------------------------------------


def test_endpoints_are_found_by_their_tables(place: Place) -> None:
    place.create("Billing_TimeoutData")
    place.create("oddTimeoutData")
    place.create("TimeoutData")
    assert place.source().endpoints() == ["Billing", "Sales_Orders"]
    given = place.source(prefixes={"Sales.Orders": "Sales_Orders_", "Odd": "odd", "Bare": "", "Gone": "gone_"})
    assert given.endpoints() == ["Bare", "Billing", "Odd", "Sales.Orders"]


def test_an_endpoint_has_any_case_and_points_or_underscores(place: Place) -> None:
    place.insert(hours(2))
    source = place.source()
    for name in ("Sales.Orders", "sales.orders", "SALES_ORDERS"):
        assert (source.preview(name, LONG_AGO).endpoint, source.preview(name, LONG_AGO).count) == (name, 2)
    with pytest.raises(ConfigurationError, match="did you mean 'Sales_Orders'"):
        source.preview("Sales.Order", LONG_AGO)


def test_a_preview_counts_and_changes_nothing(place: Place) -> None:
    place.insert([*hours(3), Row(NEXT_YEAR + HOUR, destination="Billing")])
    place.insert(hours(2, start=NEXT_YEAR - 5 * HOUR))
    tables, rows = place.tables(), place.rows()
    source = place.source()
    seen = source.preview("Sales.Orders", NEXT_YEAR)
    assert (seen.count, seen.count_before_cutoff, seen.problems) == (4, 2, [])
    assert (seen.earliest, seen.latest) == (NEXT_YEAR, NEXT_YEAR + 2 * HOUR)
    assert seen.destinations == {"Sales": 3, "Billing": 1}
    assert source.history() == []
    assert (place.tables(), place.rows()) == (tables, rows)


def test_a_preview_of_nothing(place: Place) -> None:
    seen = place.source().preview("Sales.Orders", LONG_AGO)
    assert (seen.count, seen.count_before_cutoff, seen.earliest, seen.latest, seen.problems) == (0, 0, None, None, [])


def test_what_is_no_message_is_a_problem_with_its_id(place: Place) -> None:
    bad = [
        Row(NEXT_YEAR, headers='["no object"]'),
        Row(NEXT_YEAR, headers='{"number": 1}'),
        Row(NEXT_YEAR, headers='{"": "no name"}'),
        Row(NEXT_YEAR, destination="  ", headers="{}"),
        Row(NEXT_YEAR, destination=None, headers='{"NServiceBus.ReplyToAddress": "' + 201 * "x" + '"}'),
    ]
    place.insert([*bad, *hours(2), *(Row(NEXT_YEAR, headers="{") for _ in range(20))])
    headers, destination = sorted(place.source().preview("Sales.Orders", LONG_AGO).problems, reverse=True)
    assert headers.startswith("23 with headers that are not a JSON object")
    assert headers.endswith(", …")
    assert destination.startswith("2 with a destination that is blank")
    assert all(each.timeout_id in destination.lower() for each in bad[3:])


def test_ids_and_times_that_cannot_be_read_are_problems(tmp_path: Path) -> None:
    place = SqlitePlace(tmp_path / "old.db")
    place.create()
    place.insert([Row(NEXT_YEAR, timeout_id="sales-17")])
    with closing(place.connect()) as connection:
        values = (str(uuid.uuid4()), "Sales", None, b"", "when the moon is full", "{}", "1")
        connection.execute('INSERT INTO "Sales_Orders_TimeoutData" VALUES (?, ?, ?, ?, ?, ?, ?)', values)
    source = place.source()
    problems = source.preview("Sales.Orders", LONG_AGO).problems
    assert sorted(problems) == [
        f"1 with a due time that cannot be read: {values[0]}",
        "1 with an id that is not a UUID: SALES-17",
    ]
    run = new_run()
    source.start_run(run)
    source.hide(run, 10, 1, MARGIN)
    with pytest.raises(MessageError):
        source.read_batch(run, 1)
    place.drop()


def test_times_without_a_date_are_problems(postgres_url: str) -> None:
    place = PostgresPlace(postgres_url)
    place.create()
    (row,) = place.insert([Row(NEXT_YEAR)])
    with closing(place.connect()) as connection:
        place.execute(connection, f"""UPDATE {place.table("Sales_Orders_TimeoutData")} SET "Time" = 'infinity'""")
    source = place.source()
    assert source.preview("Sales.Orders", LONG_AGO).problems == [
        f"1 with a due time that cannot be read: {row.timeout_id}"
    ]
    place.drop()


# --- hiding -----------------------------------------------------------------------------------------------------------


def test_the_earliest_are_hidden_first_in_batches(place: Place) -> None:
    rows = place.insert(hours(25))
    source = place.source()
    run = new_begun(source)
    first = source.hide(run, 4, 2, MARGIN)
    assert [(batch.number, batch.status, batch.count) for batch in first] == [
        (1, BatchStatus.PENDING, 4),
        (2, BatchStatus.PENDING, 4),
    ]
    assert [batch.earliest for batch in first] == [NEXT_YEAR, NEXT_YEAR + 4 * HOUR]
    assert place.ids() == {row.timeout_id for row in rows[8:]}
    more = [*source.hide(run, 4, 3, MARGIN), *source.hide(run, 4, 3, MARGIN)]
    assert [(batch.number, batch.count) for batch in more] == [(3, 4), (4, 4), (5, 4), (6, 4), (7, 1)]
    assert source.hide(run, 4, 3, MARGIN) == []
    assert [*source.batches(run)] == [*first, *more]
    assert place.ids() == set()
    (kept,) = source.history()
    assert (kept.batches, kept.messages, kept.status) == (7, 25, MigrationStatus.PREPARING)


def test_what_is_due_soon_or_before_the_cutoff_stays(place: Place) -> None:
    now = SystemClock().now()
    soon = place.insert([Row(now - HOUR), Row(now + MARGIN / 2)])
    later = place.insert([Row(now + 2 * MARGIN)])
    early = place.insert([Row(NEXT_YEAR - SECOND)])
    exact = place.insert([Row(NEXT_YEAR), Row(NEXT_YEAR + SECOND / 2)])
    source = place.source()
    run = new_run(cutoff=NEXT_YEAR)
    source.start_run(run)
    assert [batch.count for batch in source.hide(run, 10, 1, MARGIN)] == [len(exact)]
    assert source.return_batch(run, 1) == len(exact)
    source.set_status(run, MigrationStatus.ABORTED, NEXT_YEAR)
    assert all_hidden(place, source) == [row.timeout_id for row in [*later, *early, *exact]]
    assert place.ids() == {row.timeout_id for row in soon}


def test_a_herd_at_one_instant_is_hidden_whole(place: Place) -> None:
    rows = place.insert(Row(NEXT_YEAR) for _ in range(50))
    hidden = all_hidden(place, place.source(), size=7)
    assert sorted(hidden) == sorted(row.timeout_id for row in rows)


def test_messages_are_read_as_they_were_stored(place: Place) -> None:
    due = NEXT_YEAR + timedelta(microseconds=123_456)
    headers = {"NServiceBus.Timeout.Expire": "x", "NServiceBus.ReplyToAddress": "Sales@here", "é": "🕰\n"}
    stored = place.insert(
        [
            Row(due, body=bytes(range(256)), headers=json.dumps(headers)),
            Row(due + HOUR, destination="", body=None, headers=json.dumps(headers, ensure_ascii=False)),
            Row(due + 2 * HOUR, destination=None, headers=json.dumps(headers), body=b""),
        ]
    )
    source = place.source()
    run = new_begun(source)
    source.hide(run, 10, 1, MARGIN)
    read = source.read_batch(run, 1)
    assert [message.message_id for message in read] == [row.timeout_id for row in stored]
    assert [message.due for message in read] == [due, due + HOUR, due + 2 * HOUR]
    assert [message.body for message in read] == [bytes(range(256)), b"", b""]
    assert [message.destination for message in read] == ["Sales", "Sales@here", "Sales@here"]
    assert all(message.headers == headers for message in read)
    assert source.read_batch(run, 2) == []


def test_texts_that_write_times_otherwise_are_never_hidden_too_early(tmp_path: Path) -> None:
    """As text, a T is later than a space, and a time of fewer digits is earlier."""
    place = SqlitePlace(tmp_path / "old.db")
    place.create()
    rows = place.insert(hours(4))
    written = [
        "2100-05-01T11:59:59.999999",
        "2100-05-01T12:00:00",
        "2100-05-01 12:00:00",
        "2100-05-01 12:00:00.0000000",
    ]
    with closing(place.connect()) as connection:
        for row, text in zip(rows, written, strict=True):
            change = 'UPDATE "Sales_Orders_TimeoutData" SET "Time" = ? WHERE "Id" = ?'
            assert place.execute(connection, change, [text, row.timeout_id.upper()]).rowcount == 1
    noon = datetime(2100, 5, 1, 12, tzinfo=UTC)
    source, run = place.source(), new_run(cutoff=noon)
    seen = source.preview("Sales.Orders", noon)
    assert (seen.count, seen.count_before_cutoff, seen.earliest) == (3, 1, noon)
    source.start_run(run)
    assert [batch.count for batch in source.hide(run, 10, 1, MARGIN)] == [3]
    assert {message.due for message in source.read_batch(run, 1)} == {noon}
    assert place.ids() == {rows[0].timeout_id}
    place.drop()


# --- runs -------------------------------------------------------------------------------------------------------------


def test_a_run_is_written_down_as_it_began(place: Place) -> None:
    source, run = place.source(), new_run(cutoff=NEXT_YEAR + timedelta(microseconds=7))
    source.start_run(run)
    source.start_run(run)  # whoever got no answer asks again
    assert [*place.source().history()] == [run]
    source.set_status(run, MigrationStatus.PREPARED, NEXT_YEAR)
    source.set_status(run, MigrationStatus.COMPLETED, NEXT_YEAR)
    over = replace(run, status=MigrationStatus.COMPLETED, completed_at=NEXT_YEAR)
    assert [*source.history()] == [over]
    source.set_status(run, MigrationStatus.COMPLETED, NEXT_YEAR + HOUR)
    assert [*source.history()] == [over]
    for attempt in (
        lambda: source.hide(run, 1, 1, MARGIN),
        lambda: source.return_batch(run, 1),
        lambda: source.set_status(run, MigrationStatus.ABORTED, NEXT_YEAR),
    ):
        with pytest.raises(MigrationConflict, match="is COMPLETED"):
            attempt()


def test_one_run_at_a_time_has_an_endpoint(place: Place) -> None:
    place.create("Billing_TimeoutData")
    barrier = threading.Barrier(4)

    def begin(name: str) -> str:
        source, run = place.source(), new_run(name)
        barrier.wait()
        try:
            source.start_run(run)
        except MigrationConflict as error:
            return str(error)
        return run.run_id

    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(begin, ["Sales.Orders", "sales.orders", "Sales_Orders", "Sales.Orders"]))
    (begun,) = [run.run_id for run in place.source().history()]
    assert answers.count(begun) == 1
    assert sum(begun in answer for answer in answers) == 4
    place.source().start_run(new_run("Billing"))
    assert len(place.source().history()) == 2


def test_a_run_cannot_leave_batches_behind(place: Place) -> None:
    place.insert(hours(2))
    source = place.source()
    run = new_begun(source)
    source.hide(run, 1, 2, MARGIN)
    for status in (MigrationStatus.COMPLETED, MigrationStatus.ABORTED):
        with pytest.raises(MigrationConflict, match="batch 1 is PENDING"):
            source.set_status(run, status, NEXT_YEAR)
    assert source.return_batch(run, 1) == 1
    assert source.advance(run, 2, BatchStatus.PENDING, BatchStatus.STAGED)
    with pytest.raises(MigrationConflict, match="batch 2 is STAGED"):
        source.set_status(run, MigrationStatus.ABORTED, NEXT_YEAR)
    assert source.advance(run, 2, BatchStatus.STAGED, BatchStatus.COMPLETED)
    source.set_status(run, MigrationStatus.ABORTED, NEXT_YEAR)
    assert [batch.status for batch in source.batches(run)] == [BatchStatus.RETURNED, BatchStatus.COMPLETED]
    assert len(source.read_batch(run, 2)) == 1  # history stays


def test_a_batch_advances_from_where_it_is_only(place: Place) -> None:
    place.insert(hours(1))
    source = place.source()
    run = new_begun(source)
    source.hide(run, 1, 1, MARGIN)
    assert not source.advance(run, 1, BatchStatus.STAGED, BatchStatus.COMPLETED)
    assert source.advance(run, 1, BatchStatus.PENDING, BatchStatus.STAGED)
    assert not place.source().advance(run, 1, BatchStatus.PENDING, BatchStatus.STAGED)
    assert source.return_batch(run, 1) == 0
    assert place.ids() == set()
    assert not source.advance(run, 2, BatchStatus.PENDING, BatchStatus.STAGED)


def test_what_is_given_back_is_as_it_was(place: Place) -> None:
    """Columns that upstream's layout does not have are kept, too."""
    place.insert([*hours(5), Row(NEXT_YEAR, body=None, destination=None)])
    with closing(place.connect()) as connection:
        table, note = place.table("Sales_Orders_TimeoutData"), place.quoted("Note")
        place.execute(connection, f"ALTER TABLE {table} ADD COLUMN {note} varchar(20)")
        place.execute(connection, f"UPDATE {table} SET {note} = 'do not lose'")
    before = place.rows()
    source = place.source()
    run = new_begun(source)
    source.hide(run, 3, 2, MARGIN)
    assert [source.return_batch(run, number) for number in (1, 2, 1, 3)] == [3, 3, 0, 0]
    assert place.rows() == before
    assert source.read_batch(run, 1) == []
    source.set_status(run, MigrationStatus.ABORTED, NEXT_YEAR)
    assert place.source().hide(new_begun(source), 10, 1, MARGIN)[0].count == 6


def test_what_is_there_again_does_not_keep_the_rest_from_being_given_back(place: Place) -> None:
    """A message that the manager received twice is stored under its id again after it was hidden."""
    first, *_ = place.insert(hours(3))
    before = place.rows()
    source = place.source()
    run = new_begun(source)
    source.hide(run, 3, 1, MARGIN)
    place.insert([first])
    assert source.return_batch(run, 1) == 3
    assert place.rows() == before


def test_headers_of_which_some_are_null_are_no_problem(place: Place) -> None:
    place.insert([Row(NEXT_YEAR, headers='{"a": null, "b": "c"}')])
    source = place.source()
    assert list(source.preview("Sales.Orders", LONG_AGO).problems) == []
    run = new_begun(source)
    source.hide(run, 1, 1, MARGIN)
    assert [message.headers for message in source.read_batch(run, 1)] == [{"a": "", "b": "c"}]

"""Scheduling in bulk: every row is accepted, was there already, or is set aside with the reason."""

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import anyio
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StringType, StructField, StructType

from postdate.core.zones import read_rules, zone_of
from postdate.errors import PipelineError
from postdate.messages import DelayedMessage
from postdate.pipeline.files import read_input
from postdate.pipeline.local_time import Ambiguous, LocalTimes, Nonexistent
from postdate.pipeline.schedule import ColumnMapping, Rejects, ScheduleJob, ScheduleResult, schedule
from postdate.pipeline.stores import StoreSpec
from postdate.ports import AdministrableStore
from postdate.wiring import open_store

PARIS = ZoneInfo("Europe/Paris")
GAP, FOLD, PLAIN = "2026-03-29T02:30:00", "2026-10-25T02:30:00", "2026-07-01 08:00:00.25"

Table = Callable[..., DataFrame]


@pytest.fixture
def table(spark: SparkSession) -> Table:
    def make(*rows: tuple[str | None, str | None, str | None, str | None], **names: str) -> DataFrame:
        columns = [names.get(name, name) for name in ("message_id", "due", "destination", "body")]
        return spark.createDataFrame(list(rows), StructType([StructField(column, StringType()) for column in columns]))

    return make


def stored(store: StoreSpec, message_id: str) -> DelayedMessage | None:
    async def get() -> DelayedMessage | None:
        adapter = open_store(store.address, synchronous=store.synchronous)
        assert isinstance(adapter, AdministrableStore)
        try:
            return await adapter.get(message_id)
        finally:
            await adapter.close()

    return anyio.run(get)


def counts(result: ScheduleResult) -> tuple[int, int, int]:
    assert result.read == result.accepted + result.already_there + sum(result.set_aside.values())
    return result.read, result.accepted, result.already_there


def test_a_row_becomes_a_message(table: Table, store: StoreSpec, now: datetime) -> None:
    result = schedule(table(("a", "2026-04-01T12:00:00.000001+02:00", "orders", "hé")), ScheduleJob(store, now))
    assert counts(result) == (1, 1, 0)
    due = datetime(2026, 4, 1, 10, 0, 0, 1, tzinfo=UTC)
    assert stored(store, "a") == DelayedMessage(message_id="a", due=due, destination="orders", body="hé".encode())


def test_scheduling_the_same_again_changes_nothing(table: Table, store: StoreSpec, now: datetime) -> None:
    rows = table(*((f"m{n}", "2026-04-01T12:00:00Z", "orders", "x") for n in range(100)))
    job = ScheduleJob(store, now, batch=7)
    assert counts(schedule(rows, job)) == (100, 100, 0)
    assert counts(schedule(rows, job)) == (100, 0, 100)


def test_columns_may_have_any_name_and_a_queue_may_be_fixed(table: Table, store: StoreSpec, now: datetime) -> None:
    rows = table(("a", "2026-04-01T12:00:00Z", "ignored", "x"), message_id="Order `No`", due="when.at", body="text")
    columns = ColumnMapping("Order `No`", "when.at", "=orders", "text", headers=None, expires_at=None)
    assert counts(schedule(rows, ScheduleJob(store, now, columns))) == (1, 1, 0)
    message = stored(store, "a")
    assert message is not None
    assert message.destination == "orders"


def test_nanoseconds_in_texts_are_rounded_up_so_that_nothing_is_early(
    table: Table, store: StoreSpec, now: datetime
) -> None:
    """Seven digits are written by .NET, nine by Java."""
    texts = {"net": "12:00:00.0000019+02:00", "java": "12:00:00.000001001Z", "even": "12:00:00.000001000Z"}
    rows = table(*((name, f"2026-04-01T{text}", "orders", "x") for name, text in texts.items()))
    assert counts(schedule(rows, ScheduleJob(store, now))) == (3, 3, 0)
    for name, (hour, microsecond) in {"net": (10, 2), "java": (12, 2), "even": (12, 1)}.items():
        message = stored(store, name)
        assert message is not None
        assert message.due == datetime(2026, 4, 1, hour, 0, 0, microsecond, tzinfo=UTC)


def test_headers_and_expiry_are_taken_over(spark: SparkSession, store: StoreSpec, now: datetime) -> None:
    row = ("a", "2026-04-01T12:00:00Z", "orders", '{"k": "v"}', "2026-04-01 14:00:00:000005 Z")
    rows = spark.createDataFrame([row], ["message_id", "due", "destination", "headers", "expires_at"])
    schedule(rows, ScheduleJob(store, now))
    message = stored(store, "a")
    assert message is not None
    assert (message.headers, message.expires_at) == ({"k": "v"}, datetime(2026, 4, 1, 14, 0, 0, 5, tzinfo=UTC))


def test_bad_rows_are_set_aside_with_the_reason(table: Table, store: StoreSpec, now: datetime, tmp_path: Path) -> None:
    good = "2026-04-01T12:00:00Z"
    rows = table(
        ("fine", good, "orders", "x"),
        (None, good, "orders", "x"),
        ("no-due", " ", "orders", "x"),
        ("no-queue", good, None, "x"),
        ("no-time", "tomorrow", "orders", "x"),
        ("no-such-day", "2026-02-30T12:00:00Z", "orders", "x"),
        ("only-a-clock", "12:00", "orders", "x"),
        ("no-zone", PLAIN, "orders", "x"),
        ("n" * 251, good, "orders", "x"),
        ("twice", good, "orders", "x"),
        ("twice", good, "orders", "other"),
        ("equal", good, "orders", "x"),
        ("equal", good, "orders", "x"),
    )
    rejects = Rejects(tmp_path / "rejected")
    result = schedule(rows, ScheduleJob(store, now, rejects=rejects))
    assert counts(result) == (13, 2, 1)
    assert result.set_aside == {
        "conflicting_rows": 2,
        "invalid_message": 1,
        "malformed_time": 3,
        "missing_destination": 1,
        "missing_due": 1,
        "missing_id": 1,
        "time_without_zone": 1,
    }
    written = [json.loads(line) for file in Path(rejects.path).glob("*.json") for line in file.read_text().splitlines()]
    assert len(written) == 10
    by_id = {row.get("message_id"): row for row in written}
    assert by_id["no-time"]["due"] == "tomorrow"
    assert by_id["n" * 251]["due"] == "2026-04-01T12:00:00+00:00"
    assert all(row["detail"] for row in written)


def test_a_message_over_the_limit_of_the_store_is_set_aside(
    spark: SparkSession, store: StoreSpec, now: datetime
) -> None:
    row = ("big", datetime(2026, 4, 1, tzinfo=UTC), "orders", bytes(16 * 1024 * 1024))
    rows = spark.createDataFrame([row], "message_id string, due timestamp, destination string, body binary")
    assert schedule(rows, ScheduleJob(store, now)).set_aside == {"message_too_large": 1}


def test_bodies_that_are_no_text_are_set_aside_with_their_rows(
    spark: SparkSession, store: StoreSpec, now: datetime, tmp_path: Path
) -> None:
    rows = spark.sql(
        """
        SELECT *, 'orders' destination FROM VALUES
          ('small', 'tomorrow', unhex('61ff')), ('large', '2026-04-01T12:00:00Z', unhex(repeat('ff', 5000)))
          AS (message_id, due, body)
        """
    )
    small = StoreSpec(store.address, synchronous=store.synchronous, largest_message_bytes=4_000)
    rejects = Rejects(tmp_path / "rejected")
    result = schedule(rows, ScheduleJob(small, now, rejects=rejects))
    assert result.set_aside == {"malformed_time": 1, "message_too_large": 1}
    written = [json.loads(line) for file in Path(rejects.path).glob("*.json") for line in file.read_text().splitlines()]
    bodies = {row["message_id"]: row["body"] for row in written}
    assert bodies == {"small": "a\\xff", "large": "\ufffd" * 1_000 + "…"}


def test_a_message_that_expires_before_it_is_due_is_set_aside(
    spark: SparkSession, store: StoreSpec, now: datetime
) -> None:
    row = ("a", "2026-04-01T12:00:00Z", "orders", "2026-04-01T11:00:00Z")
    rows = spark.createDataFrame([row], ["message_id", "due", "destination", "expires_at"])
    assert schedule(rows, ScheduleJob(store, now)).set_aside == {"invalid_message": 1}


@pytest.mark.parametrize(
    ("local_times", "gap", "fold"),
    [
        (LocalTimes("Europe/Paris"), "nonexistent_local_time", datetime(2026, 10, 25, 0, 30, tzinfo=UTC)),
        (
            LocalTimes("Europe/Paris", Ambiguous.LATER, Nonexistent.FORWARD),
            datetime(2026, 3, 29, 1, 30, tzinfo=UTC),
            datetime(2026, 10, 25, 1, 30, tzinfo=UTC),
        ),
        (LocalTimes("Europe/Paris", Ambiguous.REJECT), "nonexistent_local_time", "ambiguous_local_time"),
    ],
)
def test_local_times_on_the_days_when_clocks_are_set(
    table: Table, store: StoreSpec, now: datetime, local_times: LocalTimes, gap: datetime | str, fold: datetime | str
) -> None:
    rows = table(("gap", GAP, "orders", "x"), ("fold", FOLD, "orders", "x"), ("plain", PLAIN, "orders", "x"))
    result = schedule(rows, ScheduleJob(store, now, local_times=local_times))
    expected = {"gap": gap, "fold": fold, "plain": datetime.fromisoformat(PLAIN).replace(tzinfo=PARIS)}
    assert result.set_aside == {reason: 1 for reason in expected.values() if isinstance(reason, str)}
    for message_id, due in expected.items():
        message = stored(store, message_id)
        assert (message is None) if isinstance(due, str) else (message is not None and message.due == due)


@pytest.mark.parametrize("zone", ["America/New_York", "Australia/Lord_Howe", "Africa/Casablanca", "Pacific/Apia"])
def test_local_times_are_what_zoneinfo_makes_of_them(
    spark: SparkSession, store: StoreSpec, now: datetime, zone: str
) -> None:
    """Half hours of days around each change of clocks, and of the year; fold 0, gaps moved forward."""
    tz = zone_of(read_rules(zone).content)  # The newest rules of this machine, as services have them.
    day, local = timedelta(days=1), datetime(2026, 1, 1)  # noqa: DTZ001 - a clock time
    half_hours = [local + timedelta(minutes=30 * n) for n in range(48 * 365)]

    def is_near_a_change(clock: datetime) -> bool:
        before, after = ((clock + each).replace(tzinfo=tz).utcoffset() for each in (-day, day))
        return before != after

    clock_times = [clock for n, clock in enumerate(half_hours) if n % 37 == 0 or is_near_a_change(clock)]
    rows = spark.createDataFrame(
        [(str(n), clock, "orders") for n, clock in enumerate(clock_times)],
        "message_id string, due timestamp_ntz, destination string",
    )
    local_times = LocalTimes(zone, Ambiguous.EARLIER, Nonexistent.FORWARD)
    schedule(rows, ScheduleJob(store, now, local_times=local_times))
    read = spark.read.format("postdate").options(store=store.address, synchronous="normal", columns="message_id,due")
    messages = read.load().where("message_id NOT LIKE 'postdate~%'")  # without the marker of the zone
    rows = messages.selectExpr("int(message_id) AS n", "unix_micros(due) AS micros")
    found = {row.n: row.micros for row in rows.collect()}
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    assert found == {
        n: (clock.replace(tzinfo=tz).astimezone(UTC) - epoch) // timedelta(microseconds=1)
        for n, clock in enumerate(clock_times)
    }


def test_times_outside_of_the_calendar_are_set_aside_whole_and_stop_nothing(
    spark: SparkSession, store: StoreSpec, now: datetime, tmp_path: Path
) -> None:
    """What programs write for "never": text a few hours too late, and the last timestamp and date that there are."""
    never, last, good = "9999-12-31T23:59:59-05:00", "timestamp_micros(9223372036854775807)", "2026-04-01T12:00:00Z"
    of_texts = spark.sql(
        f"""
        SELECT *, 'orders' destination, 'x' body FROM VALUES
          ('fine', '{good}', NULL), ('never', '{never}', NULL), ('before all', '0001-01-01T00:00:00+01:00', NULL),
          ('for ever', '{good}', {last}) AS (message_id, due, expires_at)
        """
    )
    of_clocks = spark.sql(
        f"""
        SELECT *, 'orders' destination, 'x' body FROM VALUES
          ('by a clock', timestamp_ntz'2026-04-01 08:00:00', NULL), ('late', timestamp_ntz'9999-12-31 23:00:00', NULL),
          ('last', cast({last} AS timestamp_ntz), NULL),
          ('last day', timestamp_ntz'2026-04-01 08:00:00', date_from_unix_date(2147483647))
          AS (message_id, due, expires_at)
        """
    )
    for rows, zone, accepted in ((of_texts, None, "fine"), (of_clocks, LocalTimes("America/New_York"), "by a clock")):
        rejects = Rejects(tmp_path / accepted)
        result = schedule(rows, ScheduleJob(store, now, local_times=zone, rejects=rejects))
        assert counts(result) == (4, 1, 0)
        assert result.set_aside == {"time_out_of_range": 2, "expiry_time_out_of_range": 1}
        message = stored(store, accepted)
        assert message is not None
        assert message.due == datetime.fromisoformat(good)
        written = [
            json.loads(line) for file in Path(rejects.path).glob("*.json") for line in file.read_text().splitlines()
        ]
        assert all("outside the years 1 to 9999" in row["detail"] and row["body"] == "x" for row in written)
        if rows is of_texts:
            assert {row["message_id"]: row["due"] for row in written}["never"] == never


def test_files_are_read_by_the_end_of_their_name(
    spark: SparkSession, store: StoreSpec, now: datetime, tmp_path: Path
) -> None:
    (tmp_path / "in.csv").write_text('message_id,due,destination,body\na,2026-04-01T12:00:00Z,orders,"x ""y""\nz"\n')
    (tmp_path / "in.json").write_text('{"message_id": 7, "due": "2026-04-01T12:00:00Z", "destination": "orders"}\n')
    for name in ("in.csv", "in.json"):
        assert counts(schedule(read_input(spark, str(tmp_path / name)), ScheduleJob(store, now))) == (1, 1, 0)
    first, second = stored(store, "a"), stored(store, "7")
    assert first is not None
    assert second is not None
    assert (first.body, second.body) == (b'x "y"\nz', b"")
    with pytest.raises(PipelineError, match="cannot tell the format"):
        read_input(spark, "messages.xls")


def test_what_cannot_be_done_is_refused_before_anything_is_stored(
    table: Table, store: StoreSpec, now: datetime, tmp_path: Path
) -> None:
    rows = table(("a", PLAIN, "orders", "x"))
    with pytest.raises(PipelineError, match="no column 'when'"):
        schedule(rows, ScheduleJob(store, now, ColumnMapping(due="when")))
    with pytest.raises(PipelineError, match="no time zone 'Mars/Base'"):
        LocalTimes("Mars/Base")
    with pytest.raises(PipelineError, match="is there already"):
        Rejects(tmp_path)
    with pytest.raises(PipelineError, match="lives in one process"):
        StoreSpec("memory:")
    assert not Path(store.address.removeprefix("sqlite:///")).exists()

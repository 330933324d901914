"""The delay operator as real queries on Spark's own state, and what it refuses before a query starts."""

import base64
import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from tests.waiting import Eventually

from postdate.clock import SystemClock
from postdate.errors import PipelineError
from postdate.pipeline.delay import (
    DelayOptions,
    DelayTarget,
    delay,
    delay_conf,
    read_directory,
    read_waiting,
    reopen_last_batch,
    run_delay,
    split_rejected,
    summarize_waiting,
    write_rejected,
)
from postdate.pipeline.delay import operator as operator_module
from postdate.pipeline.delay import rejecting as rejecting_module

COLUMNS = "id string, due timestamp"
TRIGGER = timedelta(seconds=2)
"""A micro-batch costs half a second of a processor, also one that has nothing to do."""


SLOW_START = "Python worker failed to connect back"
"""Spark gives the Python of a query ten seconds to start, which no setting changes. A busy machine may take longer."""


@pytest.fixture
def delaying(spark: SparkSession) -> Iterator[SparkSession]:
    """The session of all tests, with the settings that the operator needs."""
    before = {name: spark.conf.get(name, None) for name in delay_conf()}
    for name, value in delay_conf().items():
        spark.conf.set(name, value)
    yield spark
    for query in spark.streams.active:
        query.stop()
    for name, value in before.items():
        if value is None:
            spark.conf.unset(name)
        else:
            spark.conf.set(name, value)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for name in ("rows", "cancels"):
        (tmp_path / name).mkdir()
    return tmp_path


def put(directory: Path, rows: list[dict[str, Any]]) -> None:
    """Put a file of rows into a directory, whole."""
    number = len(list(directory.iterdir()))
    unfinished = directory.parent / "unfinished"
    unfinished.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    unfinished.rename(directory / f"{number}.json")


def started(spark: SparkSession, place: Path, options: DelayOptions | None = None, **others: Any) -> StreamingQuery:
    source = read_directory(spark, str(place / "rows"), others.pop("schema", COLUMNS))
    target = DelayTarget(str(place / "out"), str(place / "state"), trigger=others.pop("trigger", TRIGGER))
    return run_delay(source, target, options=options or DelayOptions(slots=2), **others)


def delivered(spark: SparkSession, place: Path, columns: str = COLUMNS) -> list[str]:
    return sorted(row.id for row in spark.read.schema(columns).parquet(str(place / "out")).select("id").collect())


def failed(query: StreamingQuery) -> bool:
    """Give a query a moment; raise when it has failed, for then nothing is to be waited for."""
    return bool(query.awaitTermination(1))


def has_taken(query: StreamingQuery, rows: int) -> bool:
    """Tell whether a query has taken so many rows and finished their micro-batch."""
    return sum(progress.numInputRows for progress in query.recentProgress) >= rows


def in_seconds(seconds: float) -> str:
    return (SystemClock().now() + timedelta(seconds=seconds)).isoformat()


def test_rows_of_every_type_come_out_as_they_went_in(
    delaying: SparkSession, place: Path, eventually: Eventually
) -> None:
    values = """
        id string, due timestamp, local timestamp_ntz, day date, flag boolean, tiny tinyint, small smallint, whole int,
        big bigint, single float, double double, exact decimal(20,4), raw binary, list array<int>,
        pairs map<string,timestamp>, nested struct<a: int, b: struct<c: string>>, nothing string
    """
    written = delaying.sql(
        """
        SELECT concat('m', id) id, CASE WHEN id = 1 THEN NULL ELSE timestamp_micros(unix_micros(now()) + id * 1000000)
          END due, timestamp_ntz'2026-03-29 02:30:00.000001' local, date'0001-01-01' day, id > 3 flag,
          cast(id AS tinyint) tiny, cast(id AS smallint) small, cast(id AS int) whole, id big, cast(id / 3 AS float)
          single, id / 3 double, cast(id / 3 AS decimal(20, 4)) exact, unhex('00ff') raw, array(1, null) list,
          map('k', timestamp_micros(id)) pairs, named_struct('a', cast(id AS int), 'b', named_struct('c', 'ü')) nested,
          cast(null AS string) nothing
        FROM range(6)
        """
    ).cache()
    written.write.parquet(str(place / "parquet"))
    source = read_directory(delaying, str(place / "parquet"), values, "parquet")
    rows = delay(source, options=DelayOptions(resolution=timedelta(milliseconds=50), null_due="now"))
    assert rows.schema == source.schema
    writer = rows.writeStream.option("checkpointLocation", str(place / "state")).format("parquet")
    query = writer.trigger(processingTime="2 seconds").start(str(place / "out"))
    read = delaying.read.schema(source.schema)
    eventually(lambda: read.parquet(str(place / "out")).count() == 6 or failed(query), "all rows are due")
    query.stop()
    out = read.parquet(str(place / "out")).orderBy("id").collect()
    assert out == written.orderBy("id").collect()


def test_times_written_as_json_keep_their_microseconds(
    delaying: SparkSession, place: Path, eventually: Eventually
) -> None:
    put(place / "rows", [{"id": "a", "due": "2026-03-01T12:00:00.123456Z", "at": "2026-03-01T12:00:00.000001"}])
    source = read_directory(delaying, str(place / "rows"), f"{COLUMNS}, at timestamp_ntz")
    query = run_delay(source, DelayTarget(str(place / "out"), str(place / "state"), format="json", trigger=TRIGGER))

    def lines() -> list[str]:
        return [line for file in (place / "out").glob("*.json") for line in file.read_text().splitlines()]

    eventually(lambda: lines() or failed(query), "the row is due")
    query.stop()
    assert [json.loads(line) for line in lines()] == [
        {"id": "a", "due": "2026-03-01T12:00:00.123456Z", "at": "2026-03-01T12:00:00.000001"}
    ]


def test_rows_that_wait_are_in_the_checkpoint_and_go_once_after_a_restart(
    delaying: SparkSession, place: Path, eventually: Eventually
) -> None:
    """Rows that have gone before the restart, where the machine is slow, do not come again either.

    The query is stopped between two micro-batches, and nothing new comes: Spark has no reason of its own to go on.
    """
    names = ["past", *(f"waits {n}" for n in range(20))]
    put(place / "rows", [{"id": "past", "due": in_seconds(-1)}])
    put(place / "rows", [{"id": name, "due": in_seconds(10)} for name in names[1:]])
    query = started(delaying, place, trigger=timedelta(seconds=5))
    eventually(lambda: has_taken(query, 21) or failed(query), "all rows are taken")
    eventually(lambda: not query.status["isTriggerActive"], "no micro-batch is under way")
    query.stop()
    again = started(delaying, place)
    eventually(lambda: len(delivered(delaying, place)) >= 21 or failed(again), "all rows are due")
    again.stop()
    assert delivered(delaying, place) == sorted(names)


@pytest.mark.soak(
    "rows wait for half a minute and more, through a restart",
    part="clocks",
    proven_by=(
        "tests/integration/pipeline/test_delay.py::test_rows_that_wait_are_in_the_checkpoint_and_go_once_after_a_restart",
        "tests/integration/pipeline/test_delay_in_virtual_time.py::test_a_cancel_takes_away_all_rows_with_its_id_and_no_others",
        "tests/integration/pipeline/test_delay_in_virtual_time.py::test_an_outage_does_not_forget_cancels_before_their_rows",
    ),
)
def test_rows_wait_through_a_restart_and_cancels_reach_them(
    delaying: SparkSession, tmp_path: Path, eventually: Eventually
) -> None:
    """With longer delays where the machine was too busy for the cancels to be in time."""
    assert any(cancels_were_in_time(delaying, tmp_path / f"{delay}", delay, eventually) for delay in (30, 120, 480))


def cancels_were_in_time(spark: SparkSession, place: Path, delay: int, eventually: Eventually) -> bool:
    """Delay rows through a restart, cancel half of them after it, and look at what is delivered, unless too late."""

    def start() -> StreamingQuery:
        return started(spark, place, id="id", cancel=read_directory(spark, str(place / "cancels"), "id string"))

    for name in ("rows", "cancels"):
        (place / name).mkdir(parents=True)
    due = in_seconds(delay)
    put(place / "rows", [{"id": name, "due": in_seconds(-1)} for name in ("past", "cancelled first")])
    put(place / "rows", [{"id": f"{name}{n}", "due": in_seconds(delay)} for name in "ab" for n in range(20)])
    put(place / "cancels", [{"id": "cancelled first"}, {"id": "never came"}, {"id": None}])
    query = start()
    eventually(lambda: has_taken(query, 45) or failed(query), "all rows are taken")
    query.stop()
    if in_seconds(0) < due:
        assert delivered(spark, place) == ["past"]
    put(place / "cancels", [{"id": f"a{n}"} for n in range(20)])
    put(place / "rows", [{"id": "never came", "due": in_seconds(0)}, {"id": "last", "due": in_seconds(delay + 1)}])
    query = start()
    eventually(lambda: has_taken(query, 22) or failed(query), "all rows are taken")
    if in_seconds(0) >= due:
        query.stop()
        return False
    eventually(lambda: "last" in delivered(spark, place) or failed(query), "the last row is due", seconds=900)
    query.stop()
    assert delivered(spark, place) == sorted(["past", "last", *(f"b{n}" for n in range(20))])
    return True


def test_a_query_goes_on_only_with_the_options_its_rows_wait_with(
    delaying: SparkSession, place: Path, eventually: Eventually
) -> None:
    put(place / "rows", [{"id": "waits", "due": in_seconds(3600)}])
    query = started(delaying, place)
    eventually(lambda: has_taken(query, 1) or failed(query), "the row is taken")
    query.stop()
    put(place / "rows", [{"id": "more", "due": in_seconds(3600)}])
    message = "resolution_ms was 250 and is 1000; slots was 2 and is 3"
    with pytest.raises(PipelineError, match=message):
        started(delaying, place, DelayOptions(slots=3, resolution=timedelta(seconds=1)))
    for schema, change in (("due timestamp", "'id' is missing"), ("id int, due timestamp", "'id' was string and is")):
        with pytest.raises(PipelineError, match=change):
            started(delaying, place, schema=schema)
    # A query of the user's own, which does not name its checkpoint to delay(), fails in its first micro-batch.
    source = read_directory(delaying, str(place / "rows"), COLUMNS)
    rows = delay(source, options=DelayOptions(slots=2, resolution=timedelta(seconds=1)))
    writer = rows.writeStream.option("checkpointLocation", str(place / "state")).format("parquet")
    said = SLOW_START
    while SLOW_START in said:
        with pytest.raises(StreamingQueryException) as caught:
            writer.start(str(place / "out")).awaitTermination()
        said = str(caught.value)
    assert "resolution_ms was 250 and is 1000" in said


def test_a_row_without_a_due_time_fails_the_query_or_is_dropped(
    delaying: SparkSession, place: Path, eventually: Eventually
) -> None:
    put(place / "rows", [{"id": "null"}, {"id": "null"}, {"id": "due", "due": in_seconds(0)}])
    query = started(delaying, place)
    with pytest.raises(StreamingQueryException, match="2 of 3 rows have no due time: 'due' is null"):
        query.awaitTermination()
    assert not (place / "out" / "_spark_metadata" / "0").exists()
    query = started(delaying, place, DelayOptions(slots=2, null_due="drop"))
    eventually(lambda: (place / "out" / "_spark_metadata" / "0").exists() or failed(query), "a micro-batch has ended")
    eventually(lambda: delivered(delaying, place) or failed(query), "a row is delivered")
    query.stop()
    assert delivered(delaying, place) == ["due"]


def test_a_query_goes_on_with_more_columns_and_another_order_and_its_rows_can_be_read_while_they_wait(
    delaying: SparkSession, place: Path, eventually: Eventually
) -> None:
    put(place / "rows", [{"id": name, "due": in_seconds(3600)} for name in ("waits", "cancelled")])
    put(place / "rows", [{"id": "soon", "due": in_seconds(20)}])
    put(place / "cancels", [{"id": "other"}])

    def start(schema: str) -> StreamingQuery:
        cancels = read_directory(delaying, str(place / "cancels"), "id string")
        return started(delaying, place, schema=schema, id="id", cancel=cancels)

    with pytest.raises(PipelineError, match="nothing waits in"):
        read_waiting(delaying, str(place / "state"))
    query = start(COLUMNS)
    eventually(lambda: has_taken(query, 4) or failed(query), "the rows are taken")
    query.stop()
    assert read_waiting(delaying, str(place / "state")).rows.columns == ["id", "due"]
    put(place / "cancels", [{"id": "cancelled"}])
    put(place / "rows", [{"id": "new", "due": in_seconds(3600), "text": "text of new"}])
    query = start("text string, due timestamp, id string")
    eventually(lambda: has_taken(query, 2) or failed(query), "the rows are taken")
    out = delaying.read.schema("text string, due timestamp, id string")
    eventually(lambda: out.parquet(str(place / "out")).count() or failed(query), "a row is due")
    assert [tuple(row) for row in out.parquet(str(place / "out")).select("id", "text").collect()] == [("soon", None)]
    waiting = read_waiting(delaying, str(place / "state"))
    query.stop()
    assert (waiting.due, waiting.id, waiting.rows.columns) == ("due", "id", ["text", "due", "id"])
    rows = waiting.rows.select("id", "text").collect()
    assert sorted(map(tuple, rows)) == [("new", "text of new"), ("waits", None)]
    summary = summarize_waiting(waiting, SystemClock().now(), by="text", first=1)
    assert (summary.total["rows"], summary.total["overdue"]) == (2, 0)
    assert sorted((group["value"] or "", group["rows"]) for group in summary.groups) == [("", 1), ("text of new", 1)]
    assert [row["id"] for row in summary.rows] == ["waits"]
    later = SystemClock().now() + timedelta(days=1)
    assert summarize_waiting(waiting, later).total["overdue"] == 2
    with pytest.raises(PipelineError, match="have no column 'queue'; they have text, due, id"):
        summarize_waiting(waiting, later, by="queue")


def test_a_checkpoint_that_is_none_or_of_another_query_cannot_be_read(delaying: SparkSession, place: Path) -> None:
    with pytest.raises(PipelineError, match="nothing waits in"):
        read_waiting(delaying, str(place / "missing"))


MALFORMED_JSON = b"""\
{"id": "good", "due": "2020-01-01T00:00:00Z", "number": 1}
nonsense
{"id": "wrong value", "due": "2020-01-01T00:00:00Z", "number": "one"}
{"id": "wrong time", "due": "tomorrow"}
{"id": "no time"}
{"id": "far", "due": "+20000-01-01T00:00:00Z"}
{"id": "\xff", "due": "2020-01-01T00:00:00Z"}

{"id": "twice", "id": "x", "due": "2020-01-01T00:00:00Z"}
{"id": "last", "due": "2020-01-01T00:00:00Z"}
"""
MALFORMED_CSV = b"""\
id,due,number
good,2020-01-01T00:00:00Z,1
wrong value,2020-01-01T00:00:00Z,one
few,cells
"quote" inside",2020-01-01T00:00:00Z,1
"two
lines",2020-01-01T00:00:00Z,
no time,,1
last,2020-01-01T00:00:00Z,
"never closed,2020-01-01T00:00:00Z,1
more,2020-01-01T00:00:00Z,1
"""
OTHER_CSV = b"id,number,due\nx,1,2020-01-01T00:00:00Z\n"


@pytest.mark.parametrize(
    ("name", "contents", "good", "rejected"),
    [
        (
            "json",
            [MALFORMED_JSON],
            ["good", "last"],
            [
                ("malformed_row", "nonsense"),
                ("malformed_row", '{"id": "twice", "id": "x", "due": "2020-01-01T00:00:00Z"}'),
                ("malformed_value", '{"id": "wrong time", "due": "tomorrow"}'),
                ("malformed_value", '{"id": "wrong value", "due": "2020-01-01T00:00:00Z", "number": "one"}'),
                ("missing_due", '{"id": "no time"}'),
                ("not_utf8", '{"id": "\\xff", "due": "2020-01-01T00:00:00Z"}'),
                ("time_out_of_range", '{"id": "far", "due": "+20000-01-01T00:00:00Z"}'),
            ],
        ),
        (
            "csv",
            [MALFORMED_CSV, OTHER_CSV],
            ["good", "last", "two\nlines"],
            [
                ("malformed_row", '"quote" inside",2020-01-01T00:00:00Z,1'),
                ("malformed_row", "few,cells"),
                ("malformed_value", "wrong value,2020-01-01T00:00:00Z,one"),
                ("missing_due", "no time,,1"),
                ("unclosed_quote", '"never closed,2020-01-01T00:00:00Z,1\nmore,2020-01-01T00:00:00Z,1'),
                ("wrong_header", "id,number,due"),
                ("wrong_header", "x,1,2020-01-01T00:00:00Z"),
            ],
        ),
    ],
)
def test_malformed_rows_are_written_with_their_reason_once_and_the_others_go(
    delaying: SparkSession, place: Path, name: str, contents: list[bytes], good: list[str], rejected: list[Any]
) -> None:
    for number, content in enumerate(contents):
        (place / "rows" / str(number)).write_bytes(content)

    def run() -> None:
        source = read_directory(delaying, str(place / "rows"), f"{COLUMNS}, number int", name, malformed="keep")
        rows, bad_rows = split_rejected(source)
        assert rows.columns == ["id", "due", "number"]
        for frame, folder in ((rows, "out"), (bad_rows, "rejected")):
            writer = frame.writeStream.format("json").option("checkpointLocation", str(place / f"state of {folder}"))
            writer.trigger(availableNow=True).start(str(place / folder)).awaitTermination()

    run()
    # The last micro-batch is repeated, as after a kill before its commit.
    reopen_last_batch(delaying, str(place / "state of rejected"))
    run()
    assert sorted(row.id for row in delaying.read.json(str(place / "out")).collect()) == good
    read = delaying.read.schema(
        "reason string, detail string, file string, line long, row string, bytes map<string,string>"
    )
    rows = read.json(str(place / "rejected")).collect()
    assert sorted((row.reason, row.row) for row in rows) == rejected
    files = {(place / "rows" / str(number)).as_uri() for number in range(len(contents))}
    assert all(row.detail and row.file.replace("file:/", "file:///") in files for row in rows)
    for row in rows:
        lines = (place / "rows" / row.file.rpartition("/")[2]).read_bytes().split(b"\n")
        assert row.row.startswith(lines[row.line - 1].decode("utf-8", "backslashreplace"))
    assert [base64.b64decode(row.bytes["row"]) for row in rows if row.bytes] == (
        [b'{"id": "\xff", "due": "2020-01-01T00:00:00Z"}'] if name == "json" else []
    )


def test_rows_of_any_stream_that_cannot_wait_are_rejected(
    delaying: SparkSession, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rejecting_module, "MOST_ROW_BYTES", 100)
    put(place / "rows", [{"id": "good", "due": in_seconds(0)}, {"id": "null"}, {"id": "x" * 101, "due": in_seconds(0)}])
    put(place / "rows", [{"id": "list", "due": in_seconds(0), "list": ["y" * 100]}])
    source = read_directory(delaying, str(place / "rows"), f"{COLUMNS}, list array<string>")
    for null_due, good, reasons in (
        ("fail", ["good"], ["missing_due", "row_too_large", "row_too_large"]),
        ("now", ["good", "null"], ["row_too_large", "row_too_large"]),
    ):
        seen = []
        for number, frame in enumerate(split_rejected(source, null_due=null_due)):
            name = f"{null_due}_{number}"
            query = frame.writeStream.format("memory").queryName(name).trigger(availableNow=True).start()
            query.awaitTermination()
            seen.append(delaying.table(name).collect())
        assert sorted(row.id for row in seen[0]) == good
        assert sorted(row.reason for row in seen[1]) == reasons
        assert all(row.file is None for row in seen[1])
    with pytest.raises(PipelineError, match="no column 'at' to tell the due time; there are id, due, list"):
        split_rejected(source, "at")


@pytest.mark.soak(
    "two streams, each started twice",
    part="spark",
    proven_by=(
        "tests/integration/pipeline/test_delay.py::test_malformed_rows_are_written_with_their_reason_once_and_the_others_go",
        "tests/integration/pipeline/test_delay.py::test_rows_of_any_stream_that_cannot_wait_are_rejected",
    ),
)
def test_a_query_of_rejected_rows_runs_beside_the_delay_and_goes_on_after_a_restart(
    delaying: SparkSession, place: Path, eventually: Eventually
) -> None:
    def start() -> tuple[StreamingQuery, StreamingQuery]:
        source = read_directory(delaying, str(place / "rows"), COLUMNS, malformed="keep")
        rows, rejected = split_rejected(source)
        target = DelayTarget(str(place / "out"), str(place / "state"), trigger=TRIGGER)
        query = run_delay(rows, target, options=DelayOptions(slots=2))
        return query, write_rejected(rejected, str(place / "rejected"), str(place / "state"))

    def rejected_rows() -> list[str]:
        read = delaying.read.schema("row string")
        return [row.row for row in read.json(str(place / "rejected")).collect()]

    def run_until_a_row_of_each_is_written(name: str, number: int) -> None:
        put(place / "rows", [{"id": name, "due": in_seconds(0)}, {"id": f"no time {name}"}])
        queries = start()
        eventually(lambda: any(map(failed, queries)) or len(rejected_rows()) == number, "a row is rejected")
        eventually(lambda: any(map(failed, queries)) or len(delivered(delaying, place)) == number, "a row is due")
        for query in queries:
            query.stop()

    names = ["good", "later"]
    for number, name in enumerate(names, start=1):
        run_until_a_row_of_each_is_written(name, number)
    assert delivered(delaying, place) == names
    assert sorted(json.loads(row)["id"] for row in rejected_rows()) == ["no time good", "no time later"]


# --- what is refused before a query starts ---------------------------------------------------------------------------


@pytest.fixture
def source(delaying: SparkSession, place: Path) -> DataFrame:
    return read_directory(delaying, str(place / "rows"), f"{COLUMNS}, number int, local timestamp_ntz, many array<int>")


def test_columns_that_do_not_fit_are_refused(source: DataFrame) -> None:
    with pytest.raises(PipelineError, match="no column 'at' to tell the due time; there are id, due"):
        delay(source, due="at")
    for column, kind in (("number", "int"), ("local", "timestamp_ntz")):
        with pytest.raises(PipelineError, match=f"must be a timestamp, which knows its zone, not {kind}"):
            delay(source, due=column)
    with pytest.raises(PipelineError, match="'id' is there more than once"):
        delay(source.select("*", "id"))
    with pytest.raises(PipelineError, match="Arrow cannot carry it"):
        delay(source.selectExpr("due", "make_interval(1) AS span"))


def test_a_table_is_refused(delaying: SparkSession, source: DataFrame) -> None:
    table = delaying.createDataFrame([], "id string, due timestamp")
    with pytest.raises(PipelineError, match="delay needs a streaming data frame"):
        delay(table)
    with pytest.raises(PipelineError, match="cancel must be a streaming data frame"):
        delay(source, id="id", cancel=table)


def test_cancels_that_do_not_fit_are_refused(source: DataFrame) -> None:
    with pytest.raises(PipelineError, match="cancel needs id"):
        delay(source, cancel=source)
    with pytest.raises(PipelineError, match="the rows have no column 'key'"):
        delay(source, id="key", cancel=source)
    with pytest.raises(PipelineError, match="cancel has no column 'id'"):
        delay(source, id="id", cancel=source.select("due"))
    with pytest.raises(PipelineError, match="the same in both streams; it is string and int"):
        delay(source, id="id", cancel=source.selectExpr("number AS id"))
    with pytest.raises(PipelineError, match="must be text, a whole number or binary"):
        delay(source, id="many", cancel=source)


def test_settings_that_do_not_fit_are_refused(delaying: SparkSession, source: DataFrame) -> None:
    name = "spark.sql.streaming.stateStore.providerClass"
    delaying.conf.unset(name)
    with pytest.raises(PipelineError, match=name):
        delay(source)
    delaying.conf.set(name, delay_conf()[name])
    delaying.conf.set("spark.sql.session.timeZone", "Europe/Berlin")
    try:
        with pytest.raises(PipelineError, match="time zone Europe/Berlin"):
            delay(source)
    finally:
        delaying.conf.set("spark.sql.session.timeZone", "UTC")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"resolution": timedelta(microseconds=10_500)}, "not a whole number of milliseconds"),
        ({"resolution": timedelta(milliseconds=5)}, "out of bounds"),
        ({"slots": 0}, "choose 1 to 10000"),
        ({"null_due": "keep"}, "choose one of fail, now, drop"),
        ({"keep_cancels": timedelta(seconds=-1)}, "below zero"),
    ],
)
def test_options_out_of_bounds_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        replace(DelayOptions(), **wrong)


def test_jobs_out_of_bounds_are_refused(delaying: SparkSession, place: Path) -> None:
    with pytest.raises(PipelineError, match="json or parquet, not 'csv'"):
        DelayTarget("out", "state", format="csv")
    with pytest.raises(PipelineError, match="too short"):
        DelayTarget("out", "state", trigger=timedelta(0))
    with pytest.raises(PipelineError, match="json, csv or parquet, not 'orc'"):
        read_directory(delaying, str(place), COLUMNS, "orc")
    with pytest.raises(PipelineError, match="below 1"):
        read_directory(delaying, str(place), COLUMNS, files_at_once=0)
    with pytest.raises(PipelineError, match="cannot read"):
        read_directory(delaying, str(place), "id strin")
    with pytest.raises(PipelineError, match="cannot read"):
        read_directory(delaying, str(place / "missing"), COLUMNS)


def test_the_keys_of_slots_spread_over_the_partitions_and_never_change(delaying: SparkSession) -> None:
    for count in (1, 2, 7, 200):
        keys = operator_module._slot_keys(delaying, count)
        frame = delaying.createDataFrame([(key,) for key in keys], "slot int")
        partitions = frame.selectExpr(f"pmod(hash(slot), {count}) AS partition").collect()
        assert [row.partition for row in partitions] == list(range(count))
    assert operator_module._slot_keys(delaying, 4) == operator_module._slot_keys(delaying, 4)

"""Files of rows: a table and a stream read them by the same rules, whole, by the names of their columns, at any age."""

import gzip
import json
import os
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession

from postdate.errors import PipelineError
from postdate.pipeline.counting import count_rows
from postdate.pipeline.failures import shorten_errors, wait_and_stop
from postdate.pipeline.files import read_directory, read_input
from postdate.pipeline.local_time import LocalTimes
from postdate.pipeline.rows import INSTANT
from postdate.pipeline.schedule import ColumnMapping, Rejects, ScheduleJob, schedule
from postdate.pipeline.stores import StoreSpec, open_spec
from postdate.ports import Scan

DUE = "2026-04-01T12:00:00Z"
DAY_SECONDS = 86_400


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    (tmp_path / "rows").mkdir()
    return tmp_path / "rows"


def put(folder: Path, name: str, text: str) -> Path:
    """Put a file into a folder that a stream reads, whole."""
    hidden = folder / f".{name}"
    hidden.write_text(text, encoding="utf-8")
    return hidden.rename(folder / name)


def streamed(stream: DataFrame, place: Path) -> list[dict[str, Any]]:
    """Return all rows of a stream so far, where it ended before or from its beginning."""
    writer = stream.writeStream.option("checkpointLocation", str(place / "state")).format("json")
    wait_and_stop(writer.trigger(availableNow=True).start(str(place / "out")), "the query", threading.Event())
    files = sorted((place / "out").glob("part-*.json"))
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def stored(spec: StoreSpec, *columns: str) -> list[tuple[Any, ...]]:
    with open_spec(spec) as store:
        scannable = store.require_scannable()
        parts, scan = scannable.scan_parts("pending", 1), Scan("pending", columns)
        return sorted(row for part in parts for page in scannable.scan(scan, part, 1_000) for row in page)


def test_files_that_are_older_than_others_are_read_at_any_age(spark: SparkSession, rows: Path, tmp_path: Path) -> None:
    """As ``mv``, ``cp -p`` and archives leave them; Spark's own source skips what is a week older than the newest."""

    def so_far() -> list[str]:
        return sorted(row["id"] for row in streamed(read_directory(spark, str(rows), "id string"), tmp_path))

    put(rows, "new.json", '{"id": "new"}\n')
    assert so_far() == ["new"]
    now = (rows / "new.json").stat().st_mtime
    for name, age in (("ten days", 10 * DAY_SECONDS), ("of 1970", now)):
        old = put(rows, f"{name}.json", json.dumps({"id": name}))
        os.utime(old, (now - age, now - age))
    assert so_far() == ["new", "of 1970", "ten days"]


# --- CSV -------------------------------------------------------------------------------------------------------------


def test_a_stream_refuses_a_file_whose_columns_are_in_another_order(
    spark: SparkSession, rows: Path, tmp_path: Path
) -> None:
    put(rows, "1.csv", f"text,due,id\nhello,{DUE},a\n")
    stream = read_directory(spark, str(rows), "id string, due timestamp, text string", "csv")
    said = r"1\.csv has the columns text, due, id, and others are read as id, due, text: "
    with pytest.raises(PipelineError, match=said) as refused:
        streamed(stream, tmp_path)
    assert "\n" not in str(refused.value)
    assert not list((tmp_path / "out").glob("part-*"))


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ("message_id,due,body,destination", "has the columns message_id, due, "),
        ("message_id,due,destination", "has [34] columns, "),
    ],
)
def test_a_folder_whose_files_have_other_columns_is_refused_before_anything_is_stored(
    spark: SparkSession, store: StoreSpec, now: datetime, rows: Path, header: str, said: str
) -> None:
    put(rows, "1.csv", f"message_id,due,destination,body\na,{DUE},orders,hello\n")
    put(rows, "2.csv", f"{header}\nb,{DUE},hello,orders\n")
    with pytest.raises(PipelineError, match=rf"[12]\.csv {said}"), shorten_errors("the job has failed"):
        schedule(read_input(spark, str(rows), "csv"), ScheduleJob(store, now))
    assert stored(store, "message_id") == []


def test_quotes_and_line_breaks_are_read_by_the_same_rules(spark: SparkSession, rows: Path, tmp_path: Path) -> None:
    put(rows, "1.csv", 'id,text\na,"x ""y"", z\nsecond \\line"\nb,"c:\\"\n')
    expected = [("a", 'x "y", z\nsecond \\line'), ("b", "c:\\")]
    table = read_input(spark, str(rows), "csv").collect()
    assert sorted((row["id"], row["text"]) for row in table) == expected
    stream = streamed(read_directory(spark, str(rows), "id string, text string", "csv"), tmp_path)
    assert sorted((row["id"], row["text"]) for row in stream) == expected


def test_what_spark_writes_is_refused_by_name_unless_it_is_told_to_write_quotes_twice(
    spark: SparkSession, store: StoreSpec, now: datetime, rows: Path, tmp_path: Path
) -> None:
    """The backslash that it puts before a quote by default would stay in the body, and the quote end it elsewhere."""
    written = [("a", DUE, "orders", "hello"), ("b", DUE, "orders", '"'), ("c", DUE, "orders", 'say "hi"')]
    columns = ["message_id", "due", "destination", "body"]
    table = spark.createDataFrame(written, columns).coalesce(1).write.option("header", True).mode("overwrite")
    table.csv(str(rows))
    schema = ", ".join(f"{name} string" for name in columns)
    said = r"part-\S*\.csv has a quote inside quotes, after line \d,.*twice: .*\.option\(.escape., .*\)"
    with pytest.raises(PipelineError, match=said), shorten_errors("the job has failed"):
        schedule(read_input(spark, str(rows), "csv"), ScheduleJob(store, now))
    with pytest.raises(PipelineError, match=said):
        streamed(read_directory(spark, str(rows), schema, "csv"), tmp_path / "refused")
    assert stored(store, "message_id") == []
    table.option("escape", '"').csv(str(rows))
    assert schedule(read_input(spark, str(rows), "csv"), ScheduleJob(store, now)).accepted == 3
    stream = streamed(read_directory(spark, str(rows), schema, "csv"), tmp_path)
    assert [tuple(row.values()) for row in sorted(stream, key=lambda row: row["message_id"])] == written


@pytest.mark.parametrize("column", ["message_id", "body"])
def test_a_quote_that_is_never_closed_is_refused_by_file_and_line_before_anything_is_stored(
    spark: SparkSession, store: StoreSpec, now: datetime, rows: Path, tmp_path: Path, column: str
) -> None:
    """The cell would take in the rest of the file, and the counts would add up."""
    lines = [f"m{n},{DUE},orders,hello" for n in range(50)]
    lines[10] = f'"m10,{DUE},orders,hello' if column == "message_id" else f'm10,{DUE},orders,"hello'
    put(rows, "1.csv", "message_id,due,destination,body\n" + "\n".join(lines) + "\n")
    said = r"1\.csv has a quote in line 12 .* never closed"
    with pytest.raises(PipelineError, match=said), shorten_errors("the job has failed"):
        schedule(read_input(spark, str(rows), "csv"), ScheduleJob(store, now))
    assert stored(store, "message_id") == []
    if column == "body":
        schema = "message_id string, due string, destination string, body string"
        with pytest.raises(PipelineError, match=said):
            streamed(read_directory(spark, str(rows), schema, "csv"), tmp_path)


def test_a_file_in_another_encoding_is_read_when_it_is_named_and_else_set_aside_with_its_bytes(
    spark: SparkSession, store: StoreSpec, now: datetime, rows: Path, tmp_path: Path
) -> None:
    text = f"message_id,due,destination,body\na,{DUE},orders,Müller\nb,{DUE},orders,plain\n"
    for name, encoding in (("1.csv", "latin-1"), ("2.csv", "utf-16"), ("3.csv", "utf-8-sig")):
        (rows / name).write_bytes(text.replace("\na,", f"\na{name[0]},").encode(encoding))
    latin, wide, marked = (str(rows / f"{number}.csv") for number in (1, 2, 3))
    result = schedule(read_input(spark, latin), ScheduleJob(store, now, rejects=Rejects(tmp_path / "r", "parquet")))
    assert (result.read, result.accepted, result.set_aside) == (2, 1, {"not_utf8": 1})
    (row,) = spark.read.parquet(str(tmp_path / "r")).collect()
    assert {name: bytes(content) for name, content in row["bytes"].items()} == {
        "row": f"a1,{DUE},orders,Müller".encode("latin-1")
    }
    with pytest.raises(PipelineError, match=r"looks like UTF-16 .* say encoding UTF-16"):
        read_input(spark, wide)
    for path, encoding in ((latin, "cp1252"), (wide, "UTF-16"), (marked, "UTF-8")):
        assert schedule(read_input(spark, path, encoding=encoding), ScheduleJob(store, now)).set_aside == {}
    bodies = stored(store, "message_id", "body")
    assert bodies == [(f"a{n}", "Müller".encode()) for n in (1, 2, 3)] + [("b", b"plain")]


def test_a_file_alone_may_have_names_twice_and_empty_ones(spark: SparkSession, rows: Path) -> None:
    """As spreadsheets write them, often at the end of the line."""
    file = put(rows, "1.csv", "id,text,text,\na,x,y,\n")
    (row,) = read_input(spark, str(file)).collect()
    *cells, origin = row
    assert cells == ["a", "x", "y", None]
    assert (origin.line, bytes(origin.content), origin.reason) == (2, b"a,x,y,", None)


NO_ROWS = {
    "1.csv": (f"message_id,due,body\na,{DUE},x\n", [f"b,{DUE},hello, world", f"c,{DUE}"]),
    "1.json": (json.dumps({"message_id": "a", "due": DUE, "body": "x"}) + "\n", ['{"message_id": "b"', "c"]),
}


@pytest.mark.parametrize("name", NO_ROWS)
def test_lines_that_are_no_rows_are_set_aside_whole(
    spark: SparkSession, store: StoreSpec, now: datetime, rows: Path, tmp_path: Path, name: str
) -> None:
    """A body with a comma that nobody has quoted would be cut, and a line that ends too early would have none."""
    good, bad = NO_ROWS[name]
    file = put(rows, name, good + "\n".join(bad) + "\n")
    columns = ColumnMapping(destination="=orders", headers=None, expires_at=None)
    job = ScheduleJob(store, now, columns, rejects=Rejects(tmp_path / "rejected"))
    result = schedule(read_input(spark, str(file)), job)
    assert (result.accepted, result.set_aside) == (1, {"malformed_row": 2})
    assert stored(store, "message_id", "body") == [("a", b"x")]
    written = (tmp_path / "rejected").glob("*.json")
    lines = [json.loads(line) for part in written for line in part.read_text(encoding="utf-8").splitlines()]
    assert sorted(row["row"] for row in lines) == sorted(bad)


# --- folders whose names are columns ----------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["csv", "json", "parquet"])
def test_the_names_of_folders_are_texts_and_every_file_is_in_such_a_folder(
    spark: SparkSession,
    rows: Path,
    format: str,  # noqa: A002
) -> None:
    """Spark makes a number of 007, and leaves out files beside the folders without a word."""
    content = {"csv": f"message_id,due\na,{DUE}\n", "json": json.dumps({"message_id": "a", "due": DUE}) + "\n"}
    queues = ["007", "1e3", "a+b%20=c", "é"]
    for queue in queues:
        folder = rows / f"queue={queue.replace('%', '%25').replace('=', '%3D')}"
        folder.mkdir()
        if format == "parquet":
            put_table(folder, "1.parquet", message_id=pa.array(["a"]), due=pa.array([DUE]))
        else:
            put(folder, f"1.{format}", content[format])
    read = read_input(spark, str(rows), format)
    assert sorted(row.queue for row in read.select("queue").collect()) == queues
    if format == "parquet":
        put_table(rows, "beside.parquet", message_id=pa.array(["b"]), due=pa.array([DUE]))
    else:
        put(rows, f"beside.{format}", content[format])
    with pytest.raises(PipelineError, match=r"beside.* is in no folder queue=…"):
        read_input(spark, str(rows), format)


def test_a_folder_does_not_replace_a_column_of_its_files(spark: SparkSession, rows: Path) -> None:
    (rows / "queue=eu").mkdir()
    put_table(rows / "queue=eu", "1.parquet", message_id=pa.array(["a"]), due=pa.array([DUE]), queue=pa.array(["us"]))
    with pytest.raises(PipelineError, match="queue: a column of the files and the name of folders"):
        read_input(spark, str(rows), "parquet")


# --- files that are whole, and those that were named ------------------------------------------------------------------


def test_no_setting_of_the_session_leaves_out_a_damaged_file(spark: SparkSession, rows: Path) -> None:
    lines = "".join(json.dumps({"message_id": str(number), "due": DUE}) + "\n" for number in range(50_000))
    (rows / "1.json.gz").write_bytes(gzip.compress(lines.encode())[:-5_000])
    spark.conf.set("spark.sql.files.ignoreCorruptFiles", "true")
    try:
        with pytest.raises(PipelineError, match="cannot read"), shorten_errors("cannot read"):
            read_input(spark, str(rows), "json").count()
    finally:
        spark.conf.unset("spark.sql.files.ignoreCorruptFiles")


@pytest.mark.parametrize("format", ["csv", "parquet"])
def test_a_file_that_is_there_is_meant_and_no_pattern(spark: SparkSession, rows: Path, format: str) -> None:  # noqa: A002
    for name, id_ in (("a[1]", "named"), ("a1", "matched")):
        if format == "parquet":
            put_table(rows, f"{name}.parquet", message_id=pa.array([id_]), due=pa.array([DUE]))
        else:
            put(rows, f"{name}.csv", f"message_id,due\n{id_},{DUE}\n")
    path = str(rows / f"a[1].{format}")
    assert [row.message_id for row in read_input(spark, path).collect()] == ["named"]
    assert count_rows(spark, path) == 1


# --- Parquet ---------------------------------------------------------------------------------------------------------


def put_table(folder: Path, name: str, **columns: Any) -> None:
    pq.write_table(pa.table(columns), folder / f".{name}")
    (folder / f".{name}").rename(folder / name)


def test_files_that_lack_columns_take_none_from_the_others(
    spark: SparkSession, store: StoreSpec, now: datetime, rows: Path
) -> None:
    due = pa.array([datetime(2026, 4, 1, tzinfo=UTC)], INSTANT)
    whole = {"headers": pa.array(['{"k":"v"}']), "body": pa.array([b"x"])}
    put_table(rows, "1.parquet", message_id=pa.array(["bare"]), due=due)
    put_table(rows, "2.parquet", message_id=pa.array(["whole"]), due=due, **whole)
    messages = read_input(spark, str(rows), "parquet")
    columns = ColumnMapping(destination="=orders", expires_at=None)
    assert schedule(messages, ScheduleJob(store, now, columns)).accepted == 2
    assert stored(store, "message_id", "headers", "body") == [("bare", "{}", b""), ("whole", '{"k":"v"}', b"x")]


def test_files_that_do_not_agree_on_a_type_are_refused_in_a_line(spark: SparkSession, rows: Path) -> None:
    put_table(rows, "1.parquet", due=pa.array([datetime(2026, 4, 1, tzinfo=UTC)], INSTANT))
    put_table(rows, "2.parquet", due=pa.array([1]))
    with pytest.raises(PipelineError, match=r"cannot read '.*rows': .*TIMESTAMP.*BIGINT") as refused:
        read_input(spark, str(rows), "parquet")
    assert "\n" not in str(refused.value)


def test_nanoseconds_are_rounded_up_so_that_nothing_is_early(
    spark: SparkSession, store: StoreSpec, now: datetime, rows: Path, tmp_path: Path
) -> None:
    """As pandas writes times by default, with a zone and without one."""
    second = 1_775_044_800_000_000
    names, nanoseconds = ("whole", "more", "before 1970"), [second * 1_000, second * 1_000 + 1, -1_999]
    due, by_a_clock = pa.array(nanoseconds, pa.timestamp("ns", "UTC")), pa.array(nanoseconds, pa.timestamp("ns"))
    put_table(
        rows,
        "1.parquet",
        message_id=pa.array(names),
        due=due,
        shown=by_a_clock,
        several=pa.array([[1]] * 3).cast(pa.list_(pa.timestamp("ns"))),
    )
    messages = read_input(spark, str(rows), "parquet")
    columns = ColumnMapping(destination="=orders", body=None, headers=None, expires_at="shown")
    result = schedule(messages, ScheduleJob(store, now, columns, LocalTimes("UTC")))
    assert (result.accepted, result.set_aside) == (3, {})
    at = {"whole": second, "more": second + 1, "before 1970": -1}
    marker, *messages = sorted(stored(store, "message_id", "due", "expires_at"), key=lambda row: row[0] in at)
    assert marker[0].startswith("postdate~UTC~")
    assert messages == sorted((name, us, us) for name, us in at.items())
    schema = "message_id string, due timestamp_ltz(9), shown timestamp_ntz(9)"
    stream = read_directory(spark, str(rows), schema, "parquet")
    came = streamed(stream.selectExpr("message_id", "unix_micros(due) AS due"), tmp_path)
    assert {row["message_id"]: row["due"] for row in came} == at


def test_no_setting_of_the_session_is_changed_by_reading(spark: SparkSession, rows: Path) -> None:
    before = dict(spark.conf.getAll)
    put_table(rows, "1.parquet", message_id=pa.array(["a"]), due=pa.array([1], pa.timestamp("ns", "UTC")))
    assert read_input(spark, str(rows), "parquet").count() == 1
    read_directory(spark, str(rows), "message_id string, due timestamp_ltz(9)", "parquet")
    assert dict(spark.conf.getAll) == before
    with pytest.raises(AnalysisException, match=r"FEATURE_NOT_ENABLED|PARQUET_TYPE_ILLEGAL"):  # as without Postdate
        spark.read.parquet(str(rows)).count()


def test_a_stream_says_what_is_in_nanoseconds_and_how_to_declare_it(
    spark: SparkSession, rows: Path, tmp_path: Path
) -> None:
    put_table(rows, "1.parquet", id=pa.array(["a"]), due=pa.array([1], pa.timestamp("ns", "UTC")))
    said = r"1\.parquet has no microseconds in due: .* timestamp_ltz\(9\)"
    with pytest.raises(PipelineError, match=said) as refused:
        streamed(read_directory(spark, str(rows), "id string, due timestamp", "parquet"), tmp_path)
    assert "\n" not in str(refused.value)

"""The contract of the bulk input: each row is stored, known, or set aside whole, and all of them are counted."""

import base64
import csv
import gzip
import io
import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.orc
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from postdate.errors import PipelineError
from postdate.pipeline.counting import count_rows
from postdate.pipeline.files import read_input
from postdate.pipeline.local_time import LocalTimes
from postdate.pipeline.rows import INSTANT
from postdate.pipeline.schedule import Rejects, ScheduleJob, schedule
from postdate.pipeline.stores import StoreSpec, open_spec
from postdate.ports import Scan

DUE = "2026-04-01T12:00:00Z"
HEADER = "message_id,due,destination,body,headers,note\n"


def stored(spec: StoreSpec, *columns: str) -> list[tuple[Any, ...]]:
    with open_spec(spec) as store:
        scannable = store.require_scannable()
        parts, scan = scannable.scan_parts("pending", 1), Scan("pending", columns)
        return sorted(row for part in parts for page in scannable.scan(scan, part, 1_000) for row in page)


def rejected(folder: Path) -> list[dict[str, Any]]:
    lines = [line for file in folder.glob("*.json") for line in file.read_text("utf-8").split("\n") if line]
    return sorted(map(json.loads, lines), key=lambda row: (row.get("line", 0), row.get("message_id", "")))


def test_rows_of_files_are_set_aside_whole_whatever_the_reason_so_that_they_can_be_sent_again(
    spark: SparkSession, store: StoreSpec, now: datetime, tmp_path: Path
) -> None:
    """With file, line, and all bytes, also of columns that no message has; found by SQL, by Arrow, or in the store."""
    good = f'a,{DUE},q,"two\nlines",,note\n'.encode()
    bad = {
        4: ("malformed_time", b'b,"tomorrow ""or so""",q,x,,"why, not"'),
        5: ("invalid_headers", f"c,{DUE},q,x,[],n".encode()),
        6: ("not_utf8", f"d,{DUE},q,".encode() + b"M\xfcller,,n"),
        7: ("malformed_row", f"e,{DUE}".encode()),
        8: ("conflicting_rows", f"f,{DUE},q,one,,n".encode()),
        9: ("conflicting_rows", f"f,{DUE},q,other,,n".encode()),
    }
    file = tmp_path / "in.csv"
    file.write_bytes(HEADER.encode() + good + b"\n".join(content for _, content in bad.values()) + b"\n")
    result = schedule(read_input(spark, str(file)), ScheduleJob(store, now, rejects=Rejects(tmp_path / "first")))
    assert (result.read, result.accepted, sum(result.set_aside.values())) == (7, 1, 6)
    rows = rejected(tmp_path / "first")
    assert all(row["file"].endswith("/in.csv") for row in rows)
    contents = {
        row["line"]: (
            row["reason"],
            base64.b64decode(row["bytes"]["row"]) if row.get("bytes", {}).get("row") else row["row"].encode(),
        )
        for row in rows
    }
    assert contents == bad

    again = tmp_path / "again.csv"
    mended = b"\n".join(contents[line][1] for line in (4, 6, 8))
    again.write_bytes(
        HEADER.encode() + mended.replace(b'"tomorrow ""or so"""', DUE.encode()).replace(b"\xfc", "ü".encode())
    )
    second = schedule(read_input(spark, str(again)), ScheduleJob(store, now))
    assert (second.read, second.accepted) == (3, 3)
    bodies = dict(stored(store, "message_id", "body"))
    assert bodies == {"a": b"two\nlines", "b": b"x", "d": "Müller".encode(), "f": b"one"}

    file.write_bytes(HEADER.encode() + good.replace(b"two", b"three") + f"f,{DUE},q,one,,n\n".encode())
    third = schedule(read_input(spark, str(file)), ScheduleJob(store, now, rejects=Rejects(tmp_path / "third")))
    assert (third.read, third.already_there, third.conflicting, third.set_aside) == (2, 1, 1, {})
    (row,) = rejected(tmp_path / "third")
    assert (row["reason"], row["line"], row["row"]) == ("conflicts_with_store", 2, f'a,{DUE},q,"three\nlines",,note')
    assert row["detail"] == "the store has this id with another body, and keeps what it has"
    assert dict(stored(store, "message_id", "body")) == bodies


def test_lines_of_json_are_set_aside_with_their_number_also_in_files_that_several_tasks_read(
    spark: SparkSession, store: StoreSpec, now: datetime, tmp_path: Path
) -> None:
    lines = [json.dumps({"message_id": f"m{n}", "due": DUE, "destination": "q", "body": "x" * 50}) for n in range(400)]
    for number in (3, 250, 399):
        lines[number] = lines[number].replace(DUE, "tomorrow")
    lines[300] = ""
    (tmp_path / "in.json").write_text("\n".join(lines))
    before = str(spark.conf.get("spark.sql.files.maxPartitionBytes"))
    spark.conf.set("spark.sql.files.maxPartitionBytes", "10000")
    try:
        messages = read_input(spark, str(tmp_path / "in.json"))
        assert messages.rdd.getNumPartitions() > 2
        result = schedule(messages, ScheduleJob(store, now, rejects=Rejects(tmp_path / "rejected")))
    finally:
        spark.conf.set("spark.sql.files.maxPartitionBytes", before)
    assert (result.read, result.set_aside) == (399, {"malformed_time": 3})
    assert {row["line"]: row["row"] for row in rejected(tmp_path / "rejected")} == {
        n + 1: lines[n] for n in (3, 250, 399)
    }


def test_a_body_that_is_too_large_is_set_aside_whole(
    spark: SparkSession, store: StoreSpec, now: datetime, tmp_path: Path
) -> None:
    small = StoreSpec(store.address, synchronous="normal", largest_message_bytes=4_000)
    body = bytes(range(256)) * 40
    rows = spark.createDataFrame(
        [("a", datetime(2026, 4, 1, tzinfo=UTC), "q", bytearray(body))],
        "message_id string, due timestamp, destination string, body binary",
    )
    schedule(rows, ScheduleJob(small, now, rejects=Rejects(tmp_path / "rejected")))
    (row,) = rejected(tmp_path / "rejected")
    assert (row["reason"], len(row["body"]), base64.b64decode(row["bytes"]["body"])) == (
        "message_too_large",
        1_001,
        body,
    )


def test_a_dry_run_counts_and_shows_what_a_run_would_do_and_stores_nothing(
    spark: SparkSession, store: StoreSpec, now: datetime
) -> None:
    given = [(f"m{n:02}", DUE, "q", "x") for n in range(30)]
    given += [("m00", DUE, "q", "x"), ("m01", DUE, "q", "y"), ("bad", "tomorrow", "q", "x")]
    rows = spark.createDataFrame(given, ["message_id", "due", "destination", "body"])
    first = schedule(rows, ScheduleJob(store, now, local_times=LocalTimes("Europe/Paris"), dry_run=True))
    assert not Path(store.address.removeprefix("sqlite:///")).exists()
    run = schedule(rows, ScheduleJob(store, now))
    assert (first.read, first.accepted, first.already_there) == (33, 29, 1)
    assert (run.accepted, run.already_there, run.set_aside) == (first.accepted, first.already_there, first.set_aside)
    assert len(first.sample) == 10
    assert all(
        row
        == {
            "message_id": row["message_id"],
            "destination": "q",
            "due": "2026-04-01T12:00:00+00:00",
            "headers": "{}",
            "body": "x",
        }
        for row in first.sample
    )
    assert {row["reason"] for row in first.rejected_sample} == {"malformed_time", "conflicting_rows"}
    changed = rows.selectExpr("message_id", "due", "'other' AS destination", "body")
    before = stored(store, "message_id", "destination")
    second = schedule(changed, ScheduleJob(store, now, dry_run=True))
    assert (second.read, second.accepted, second.already_there, second.conflicting) == (33, 0, 0, 30)
    assert second.rejected_sample[0]["detail"] in {
        "the store has this id with another destination, and keeps what it has",
        "this id stands in the input with differing content",
        "the due time is not ISO 8601, or no such time exists",
    }
    assert stored(store, "message_id", "destination") == before


def test_structs_are_stored_as_json(spark: SparkSession, store: StoreSpec, now: datetime) -> None:
    rows = spark.sql(
        f"""
        SELECT 'a' message_id, '{DUE}' due, 'q' destination,
            named_struct('n', 1, 'none', cast(null AS string), 's', array('é', 'z')) body,
            named_struct('k', 'v', 'none', cast(null AS string), 'n', 7, 'o', named_struct('x', true)) headers
        """
    )
    assert schedule(rows, ScheduleJob(store, now)).accepted == 1
    assert stored(store, "headers", "body") == [
        (r'{"k":"v","n":"7","o":"{\"x\":true}"}', '{"n":1,"none":null,"s":["é","z"]}'.encode())
    ]
    for name in ("body", "headers"):
        of_bytes = rows.selectExpr(f"* EXCEPT ({name})", f"named_struct('k', X'FF') {name}")
        with pytest.raises(PipelineError, match=r"must be texts, not struct<k:binary>"):
            schedule(of_bytes, ScheduleJob(store, now))


def put_csv(folder: Path, rows: list[list[str]]) -> Path:
    written = io.StringIO()
    csv.writer(written, delimiter=";", lineterminator="\n").writerows(
        [["message_id", "due", "destination", "body"], *rows]
    )
    (folder / "in.csv.gz").write_bytes(gzip.compress(written.getvalue().encode()))
    return folder / "in.csv.gz"


def put_json(folder: Path, rows: list[list[str]]) -> Path:
    names = ("message_id", "due", "destination", "body")
    (folder / "in.jsonl").write_text("\n\n".join(json.dumps(dict(zip(names, row, strict=True))) for row in rows))
    return folder / "in.jsonl"


def table_of(rows: list[list[str]]) -> pa.Table:
    ids, dues, queues, bodies = zip(*rows, strict=True)
    instants = pa.array([datetime.fromisoformat(due) for due in dues], INSTANT)
    return pa.table({"message_id": ids, "due": instants, "destination": queues, "body": bodies})


def put_parquet(folder: Path, rows: list[list[str]]) -> Path:
    pq.write_table(table_of(rows), folder / "in.parquet")
    return folder / "in.parquet"


def put_orc(folder: Path, rows: list[list[str]]) -> Path:
    pyarrow.orc.write_table(table_of(rows), folder / "in.orc")
    return folder / "in.orc"


@pytest.mark.parametrize("put", [put_csv, put_json, put_parquet, put_orc])
def test_rows_are_counted_by_another_reader(
    spark: SparkSession, store: StoreSpec, now: datetime, tmp_path: Path, put: Callable[[Path, list[list[str]]], Path]
) -> None:
    path = str(put(tmp_path, [["a", DUE, "q", 'x;"y\nz"'], ["b", DUE, "q", "y"], ["c", DUE, "q", "z"]]))
    assert count_rows(spark, path, delimiter=";") == 3
    messages = read_input(spark, path, delimiter=";")
    with pytest.raises(PipelineError, match="another reader counts 4 rows in the input, and Spark reads 3; nothing"):
        schedule(messages, ScheduleJob(store, now, expected_rows=4))
    assert schedule(messages, ScheduleJob(store, now, expected_rows=3)).accepted == 3
    assert dict(stored(store, "message_id", "body"))["a"] == b'x;"y\nz"'


def test_a_format_without_its_package_is_refused_by_the_name_of_the_package(
    spark: SparkSession, tmp_path: Path
) -> None:
    for name, package in (("avro", "spark-avro"), ("delta", "delta-spark"), ("iceberg", "iceberg-spark-runtime")):
        with pytest.raises(PipelineError, match=rf"no package for {name} here: start it with \S*{package}"):
            read_input(spark, str(tmp_path), name)
    with pytest.raises(PipelineError, match="rows of delta have no other reader"):
        count_rows(spark, str(tmp_path), "delta")


def test_a_file_without_an_object_is_refused_with_what_to_say(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "in.json").write_bytes('{"message_id": "é"}\n'.encode("latin-1"))
    with pytest.raises(PipelineError, match=r"no line of .* is a JSON object in UTF-8; name its encoding"):
        read_input(spark, str(tmp_path / "in.json"))

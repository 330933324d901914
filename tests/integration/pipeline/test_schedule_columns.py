"""Scheduling by columns: the same rows are accepted as one by one, and PostgreSQL takes them as they are."""

import json
import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark program uses
from tests.postgres_subjects import drop_schema, fresh_schema

from postdate.errors import PipelineError
from postdate.messages import encode_headers
from postdate.pipeline.files import ORIGIN_FIELD
from postdate.pipeline.frames import open_snapshot, scan_frame, scan_parts
from postdate.pipeline.rows import INSTANT, split_rows
from postdate.pipeline.schedule import ColumnMapping, Rejects, ScheduleJob, schedule
from postdate.pipeline.schedule.storing import store_all
from postdate.pipeline.stores import StoreSpec, open_spec
from postdate.pipeline.texts import ORIGIN, ORIGIN_TYPE
from postdate.ports import Scan, ScanFilter

DUE = datetime(2026, 4, 1, 12, tzinfo=UTC)
LIMIT = 300
TEXTS = ["", "v", "é🕰", '"', "\\", "\\u0041", "/", "\b\f\n\r\t", "\x00", "\x1f", "\x7f", "\u2028", '":null', "a,"]


@pytest.fixture
def postgres(postgres_url: str) -> Iterator[StoreSpec]:
    schema = fresh_schema()
    yield StoreSpec(postgres_url, schema=schema, endpoint="service")
    drop_schema(postgres_url, schema)


def texts_of(spec: StoreSpec, column: str = "headers") -> dict[str, Any]:
    """Return the headers, or the body, of every waiting message, exactly as they are stored."""
    with open_spec(spec) as store:
        scannable, found = store.require_scannable(), dict[str, Any]()
        for part in scannable.scan_parts("pending", 1):
            for page in scannable.scan(Scan("pending", ("message_id", column)), part, 1_000):
                found.update(page)
    return found


def test_spark_and_arrow_accept_what_the_message_accepts(
    spark: SparkSession, postgres: StoreSpec, now: datetime, tmp_path: Path, chance: random.Random
) -> None:
    """Random rows with all that is difficult in headers: the same are accepted, with the same text, or refused."""

    def headers() -> list[tuple[str, str | None]] | None:
        if chance.random() < 0.1:
            return None
        values = [*TEXTS, *TEXTS, None]
        named = {chance.choice(TEXTS[1:] * 3 + [""]): chance.choice(values) for _ in range(chance.randrange(4))}
        return list(named.items())

    odd_ids = ["x" * 249, "é" * 126, "e" * 251, "\t", "nul\0", "ключ"]
    ids = [f"{chance.choice(odd_ids) if chance.random() < 0.1 else 'id'}{n:03}" for n in range(400)]
    queues = ["q"] * 12 + ["очередь", "q\0"]
    expiries = [None, DUE, DUE - timedelta(microseconds=1), DUE + timedelta(days=1)]
    bodies = [None, b"", b"\0x", bytes(LIMIT - 20), bytes(LIMIT)]
    batch = pa.record_batch(
        {
            "message_id": pa.array(ids, pa.string()),
            "destination": pa.array([chance.choice(queues) for _ in ids], pa.string()),
            "due": pa.array([DUE] * len(ids), INSTANT),
            "expires_at": pa.array([chance.choice(expiries) for _ in ids], INSTANT),
            "headers": pa.array([headers() for _ in ids], pa.map_(pa.string(), pa.string())),
            "body": pa.array([chance.choice(bodies) for _ in ids], pa.binary()),
        }
    )
    expected, bad = split_rows(batch, LIMIT)
    assert expected
    assert {row.code for row in bad} == {"invalid_message", "invalid_headers", "message_too_large"}

    store = StoreSpec(postgres.address, schema=postgres.schema, endpoint="service", largest_message_bytes=LIMIT)
    rejects = Rejects(tmp_path / "rejected")
    rows = spark.createDataFrame(pa.Table.from_batches([batch]))
    result = schedule(rows, ScheduleJob(store, now, rejects=rejects))
    assert (result.accepted, result.already_there) == (len(expected), 0)
    assert result.set_aside == Counter(row.code for row in bad)
    assert texts_of(store) == {message.message_id: encode_headers(message.headers) for message in expected}
    lines = [line for file in Path(rejects.path).glob("*.json") for line in file.read_text().split("\n") if line]
    written = [json.loads(line) for line in lines]
    by_id = {row["message_id"]: row for row in written}
    for row in bad:
        assert by_id[ids[row.position]]["detail"] == row.detail or row.code == "message_too_large"


def test_headers_are_stored_as_they_are_written_or_set_aside(
    spark: SparkSession, postgres: StoreSpec, now: datetime
) -> None:
    """What Spark's own reading of JSON alters in silence: numbers, what follows an object, and names there twice."""
    stored = {
        "number": '{"k": "v", "é": 12300000000000000000, "f": 1.10, "big": 1e400}',
        "nested": '{"k": {"a": [1, 2.50, {"b": null}]}, "t": true}',
        "escaped": r'{"k": "\ud83d\ude00\u0041"}',
        "blank": " ",
    }
    refused = {
        "twice": '{"k": "first", "k": "last"}',
        "twice though written otherwise": r'{"k": "first", "\u006b": "last"}',
        "text after": '{"k": "v"} and more',
        "second object": '{"k": "v"} {"k": "w"}',
        "half a pair": r'{"k": "\ud800"}',
        "null": '{"k": null}',
        "not a number": '{"k": NaN}',
        "single quotes": "{'k': 'v'}",
        "a list": '["k", "v"]',
        "deep": '{"k": ' + "[" * 5_000 + "]" * 5_000 + "}",
    }
    given = [(id_, "2026-04-01T12:00:00Z", "q", headers) for id_, headers in {**stored, **refused}.items()]
    rows = spark.createDataFrame(given, ["message_id", "due", "destination", "headers"])
    result = schedule(rows, ScheduleJob(postgres, now))
    assert (result.read, result.set_aside) == (len(given), {"invalid_headers": len(refused)})
    assert texts_of(postgres) == {
        "number": '{"k":"v","é":"12300000000000000000","f":"1.10","big":"1e400"}',
        "nested": r'{"k":"{\"a\": [1, 2.50, {\"b\": null}]}","t":"true"}',
        "escaped": '{"k":"😀A"}',
        "blank": "{}",
    }


def test_maps_of_headers_are_stored_as_json_or_refused(spark: SparkSession, postgres: StoreSpec, now: datetime) -> None:
    rows = spark.sql(
        "SELECT 'a' message_id, timestamp '2026-04-01 12:00:00Z' due, 'q' destination, "
        "map('k', named_struct('n', 1, 'none', cast(null AS string), 's', array('z'))) headers"
    )
    assert schedule(rows, ScheduleJob(postgres, now)).accepted == 1
    assert texts_of(postgres) == {"a": r'{"k":"{\"n\":1,\"none\":null,\"s\":[\"z\"]}"}'}
    with pytest.raises(PipelineError, match=r"headers must be texts, not map<string,binary>"):
        schedule(rows.selectExpr("* EXCEPT (headers)", "map('k', X'FF') headers"), ScheduleJob(postgres, now))


def test_times_inside_a_body_or_headers_keep_their_microseconds(
    spark: SparkSession, postgres: StoreSpec, now: datetime
) -> None:
    """And rows that differ in them are not the same."""
    rows = spark.sql(
        """
        SELECT id message_id, timestamp'2026-04-01 12:00:00Z' due, 'q' destination,
            named_struct('at', at, 'local', cast(at AS timestamp_ntz)) body, named_struct('at', at) headers
        FROM VALUES ('a', timestamp'2026-03-01 12:00:00.123456Z'), ('b', timestamp'2026-03-01 12:00:00.123456Z'),
            ('b', timestamp'2026-03-01 12:00:00.123457Z') AS given(id, at)
        """
    )
    result = schedule(rows, ScheduleJob(postgres, now))
    assert (result.accepted, result.set_aside) == (1, {"conflicting_rows": 2})
    assert texts_of(postgres) == {"a": '{"at":"2026-03-01T12:00:00.123456Z"}'}
    assert (
        texts_of(postgres, "body")["a"] == b'{"at":"2026-03-01T12:00:00.123456Z","local":"2026-03-01T12:00:00.123456"}'
    )


def test_what_json_would_alter_is_refused_or_kept(spark: SparkSession, postgres: StoreSpec, now: datetime) -> None:
    def rows(columns: str) -> DataFrame:
        return spark.sql(f"SELECT 'a' message_id, timestamp'2026-04-01 12:00:00Z' due, 'q' destination, {columns}")

    nulls = "named_struct('o', named_struct('a', 1, 'b', cast(null AS string)), 'none', cast(null AS string)) headers"
    assert schedule(rows(nulls), ScheduleJob(postgres, now)).accepted == 1
    assert texts_of(postgres) == {"a": r'{"o":"{\"a\":1,\"b\":null}"}'}
    for body in ("map(date'2031-05-01', 'x')", "named_struct('m', map(timestamp'2031-05-01 00:00:00Z', 'x'))"):
        with pytest.raises(PipelineError, match=r"must not have keys of the type (date|timestamp) in a map"):
            schedule(rows(f"{body} body"), ScheduleJob(postgres, now))
    for name in ("message_id", "destination"):
        nested = rows("'b' body").withColumn(name, F.struct(F.lit("a, b").alias("t"), F.lit("c").alias("o")))
        with pytest.raises(PipelineError, match=f"{name} must be a text, not struct"):
            schedule(nested, ScheduleJob(postgres, now))


def test_a_row_of_a_file_without_its_text_is_set_aside(spark: SparkSession, postgres: StoreSpec, now: datetime) -> None:
    """As a stream of Parquet has them, which is scheduled batch by batch."""
    no_text = [(("file:/in.parquet", None, None, None, None),)]
    rows = spark.createDataFrame(no_text, f"`{ORIGIN}` {ORIGIN_FIELD.dataType.simpleString()}").selectExpr(
        "*", "cast(null AS string) message_id", "current_timestamp() due", "'q' destination"
    )
    result = schedule(rows, ScheduleJob(postgres, now))
    assert (result.accepted, result.set_aside) == (0, {"missing_id": 1})


def test_maps_whose_names_or_values_are_no_utf8_are_set_aside(
    spark: SparkSession, postgres: StoreSpec, now: datetime
) -> None:
    """Also where the bytes of two values together would be UTF-8."""
    maps = {
        "good": "map('k', 'é')",
        "null value": "map('k', 'é', 'l', null)",
        "name": "map(cast(X'FF' AS string), 'v')",
        "value": "map('k', 'v', 'l', cast(X'EDA080' AS string))",
        "halves": "map('k', cast(X'C3' AS string), 'l', cast(X'A9' AS string))",
        "null": "cast(null AS map<string, string>)",
    }
    rows = [f"SELECT '{id_}' message_id, {headers} headers" for id_, headers in maps.items()]
    table = spark.sql(" UNION ALL ".join(rows)).selectExpr(
        "*", "timestamp '2026-04-01 12:00:00Z' due", "'q' destination"
    )
    result = schedule(table, ScheduleJob(postgres, now))
    assert (result.accepted, result.set_aside) == (2, {"invalid_headers": 1, "not_utf8": 3})
    assert texts_of(postgres) == {"good": '{"k":"é"}', "null": "{}"}


def test_texts_that_are_no_utf8_are_set_aside_with_their_bytes(
    spark: SparkSession, postgres: StoreSpec, now: datetime, tmp_path: Path
) -> None:
    """Spark does not look at the bytes of a text; its functions make U+FFFD of them, and Python fails at them."""
    columns = {
        "message_id": "'good'",
        "destination": "'q'",
        "due": "'2026-04-01T12:00:00Z'",
        "headers": """'{"k":"é"}'""",
        "body": "'é'",
    }
    rows = [", ".join(f"{value} {name}" for name, value in columns.items())]
    for bad in columns:
        values = {**columns, "message_id": f"'bad {bad}'"}
        values[bad] = f"cast(concat(cast({values[bad]} AS binary), X'EDA080FF') AS string)"
        rows.append(", ".join(f"{value} {name}" for name, value in values.items()))
    table = spark.sql(" UNION ALL ".join(f"SELECT {row}" for row in rows)).coalesce(1)
    rejects = Rejects(tmp_path / "rejected", "parquet")
    result = schedule(table, ScheduleJob(postgres, now, rejects=rejects))
    assert (result.read, result.accepted, result.set_aside) == (6, 1, {"not_utf8": 5})
    assert texts_of(postgres) == {"good": '{"k":"é"}'}
    written = spark.read.parquet(str(rejects.path)).collect()
    contents = {name: bytes(content) for row in written for name, content in row["bytes"].items()}
    assert contents.keys() == columns.keys()
    assert all(content.endswith(b"\xed\xa0\x80\xff") for content in contents.values())
    assert {row["message_id"] for row in written} >= {"bad body", "bad due"}


@pytest.mark.parametrize("name", ["Body", "BODY"])
def test_columns_are_resolved_as_spark_does(spark: SparkSession, postgres: StoreSpec, now: datetime, name: str) -> None:
    rows = spark.createDataFrame(
        [("a", "2026-04-01T12:00:00Z", "q", "x", "y")], ["MESSAGE_ID", "Due", "destination", name, "note"]
    )
    result = schedule(rows, ScheduleJob(postgres, now))
    assert (result.accepted, result.unused) == (1, ("note",))
    with open_spec(postgres) as store:
        scannable = store.require_scannable()
        (part,) = scannable.scan_parts("pending", 1)
        assert [row for page in scannable.scan(Scan("pending", ("body",)), part, 10) for row in page] == [(b"x",)]


@pytest.mark.parametrize("near", ["body ", "bodi", "expiresAt", "Expires-At", "header", "hedaers", "expire_at"])
def test_a_column_that_is_another_only_by_a_slip_is_refused_unless_it_is_allowed(near: str) -> None:
    columns = ["message_id", "due", "destination", near]
    with pytest.raises(PipelineError, match=f"but '{near}': rename it"):
        ColumnMapping.match_columns(columns)
    allowed = ColumnMapping.match_columns(columns, unused=[near])
    assert (allowed.body, allowed.headers, allowed.expires_at) == (None, None, None)
    meant = {"b": "body", "h": "headers"}.get(near[0], "expires_at")
    named: dict[str, Any] = {meant: near}
    assert getattr(ColumnMapping.match_columns(columns, **named), meant) == near


def test_case_tells_columns_apart_only_where_spark_says_so() -> None:
    columns = ["message_id", "due", "destination", "Body"]
    assert ColumnMapping.match_columns(columns).body == "body"
    with pytest.raises(PipelineError, match="but 'Body'"):
        ColumnMapping.match_columns(columns, case_sensitive=True)


@pytest.mark.parametrize("far", ["payload", "customer", "text", "code", "header_id_of_page", "due_date"])
def test_a_column_of_another_name_is_no_slip(far: str) -> None:
    assert ColumnMapping.match_columns(["message_id", "due", "destination", far]).body is None


def test_rows_that_change_between_the_passes_are_told(
    spark: SparkSession, postgres: StoreSpec, now: datetime, tmp_path: Path
) -> None:
    """The rows are counted apart from what became of them."""
    marker = tmp_path / "read before"

    def other_rows(batches: Any) -> Any:
        again = marker.exists()
        marker.touch()
        for batch in batches:
            yield batch.slice(1 if again else 0)

    rows = table(spark, ("a", None, "x"), ("b", None, "y")).coalesce(1)
    with pytest.raises(PipelineError, match="had 2 rows when they were counted, and 1 when they were read again"):
        schedule(rows.mapInArrow(other_rows, rows.schema), ScheduleJob(postgres, now))


def table(spark: SparkSession, *bodies: tuple[str, str | None, str | None]) -> DataFrame:
    rows = [(id_, "2026-04-01T12:00:00Z", "q", headers, body) for id_, headers, body in bodies]
    return spark.createDataFrame(rows, "message_id string, due string, destination string, headers string, body string")


def test_what_is_in_conflict_is_told_from_what_only_looks_different(
    spark: SparkSession, postgres: StoreSpec, now: datetime, tmp_path: Path
) -> None:
    """The order of headers makes no other message, null is another body than headers, and a bad row is no rival."""
    rows = table(
        spark,
        ("order", '{"a": "1", "b": "2"}', "x"),
        ("order", '{"b":"2","a":"1"}', "x"),
        ("null", None, "{}"),
        ("null", "{}", None),
        ("body", None, "x"),
        ("body", None, "y"),
        ("body", None, "x"),
        ("bad rival", None, "x"),
        ("bad rival", "[]", "y"),
    )
    job = ScheduleJob(postgres, now, report=tmp_path / "report")
    result = schedule(rows, job)
    assert (result.accepted, result.already_there) == (2, 1)
    assert result.set_aside == {"conflicting_rows": 5, "invalid_headers": 1}
    assert sorted(texts_of(postgres)) == ["bad rival", "order"]
    report = {(row.outcome, row.reason): row.rows for row in spark.read.parquet(str(job.report)).collect()}
    assert result.reported_to == str(job.report)
    assert report == {
        ("accepted", None): 2,
        ("already_there", None): 1,
        ("set_aside", "conflicting_rows"): 5,
        ("set_aside", "invalid_headers"): 1,
    }
    with pytest.raises(PipelineError, match="is there already"):
        ScheduleJob(postgres, now, report=tmp_path / "report")


def test_what_is_scheduled_again_is_there_already_and_is_read_as_of_one_instant(
    spark: SparkSession, postgres: StoreSpec, now: datetime
) -> None:
    rows = spark.range(3_000).selectExpr(
        "concat('m', id) AS message_id",
        "timestamp'2026-04-01 12:00:00' + make_dt_interval(0, 0, 0, id) AS due",
        "if(id % 3 = 0, 'thirds', 'others') AS destination",
        "map('number', string(id), 'é', '\"') AS headers",
        "encode(string(id), 'UTF-8') AS body",
    )
    job = ScheduleJob(postgres, now, batch=700)
    first = schedule(rows.where("id < 2000"), job)
    assert (first.accepted, first.already_there) == (2_000, 0)
    with open_snapshot(postgres) as snapshot:
        parts = scan_parts(postgres, "pending", 2)
        second = schedule(rows, job)
        assert (second.accepted, second.already_there) == (1_000, 2_000)
        then = scan_frame(spark, postgres, "pending", ["message_id"], parts, snapshot=snapshot)
        assert then.distinct().count() == then.count() == 2_000
    where = ScanFilter(destinations=("thirds",), due_to=DUE + timedelta(seconds=30))
    found = scan_frame(spark, postgres, "pending", (), scan_parts(postgres, "pending", 2), scan_filter=where)
    assert found.columns == ["message_id", "destination", "due", "expires_at", "headers", "body", "number_of_failures"]
    by_id = {row.message_id: row for row in found.collect()}
    assert set(by_id) == {f"m{n}" for n in range(0, 30, 3)}
    nine = by_id["m9"]
    assert (nine.headers, bytes(nine.body)) == ({"number": "9", "é": '"'}, b"9")
    assert (nine.expires_at, nine.number_of_failures) == (None, 0)
    records = scan_frame(spark, postgres, "records", ("number", "kind"), scan_parts(postgres, "records", 2))
    assert dict(records.dtypes) == {"number": "bigint", "kind": "string"}
    kinds = Counter(row.kind for row in records.collect())
    assert kinds == {"scheduled": 3_000}
    assert records.select("number").distinct().count() == 3_000


# --- one task, as Spark runs it ---------------------------------------------------------------------------------------


@pytest.fixture
def task_rows() -> list[pa.RecordBatch]:
    """What a task is given: 1,000 rows in two batches."""
    columns = {"destination": "orders", "due": DUE, "expires_at": None, "headers": "{}", "body": b"x", "reason": None}
    schema = pa.schema(
        [
            ("message_id", pa.string()),
            ("destination", pa.string()),
            ("due", INSTANT),
            ("expires_at", INSTANT),
            ("headers", pa.string()),
            ("body", pa.binary()),
            ("reason", pa.string()),
            ("shown", pa.struct([("body", pa.binary())])),
            ("wall_time", pa.string()),
            ("origin", ORIGIN_TYPE),
        ]
    )
    rows = [{"message_id": f"m{n}", **columns} for n in range(1_000)]
    return [pa.RecordBatch.from_pylist(rows[at : at + 500], schema=schema) for at in (0, 500)]


def counted(outcomes: Iterator[pa.RecordBatch]) -> Counter[str]:
    total = Counter[str]()
    for outcome in outcomes:
        for row in outcome.to_pylist():
            total.update(stored=row["stored"], already_there=row["already_there"], set_aside=int(bool(row["reason"])))
    return total


def recorded(spec: StoreSpec) -> Counter[str]:
    with open_spec(spec) as store:
        scannable = store.require_scannable()
        pages = [
            page
            for part in scannable.scan_parts("records", 1)
            for page in scannable.scan(Scan("records", ("message_id",)), part, 1_000)
        ]
    return Counter(row[0] for page in pages for row in page)


def test_a_task_that_dies_and_runs_again_stores_nothing_twice(
    postgres: StoreSpec, task_rows: list[pa.RecordBatch], now: datetime
) -> None:
    """It dies after a commit that Spark was not told of; Spark runs it again from the beginning."""
    with open_spec(postgres, create=True) as store:
        store.setup()
    task = partial(store_all, postgres, now, 70, None)
    dying = task(iter(task_rows))
    for _ in range(5):
        next(dying)
    dying.close()  # pyright: ignore[reportAttributeAccessIssue] - it is a generator
    assert len(recorded(postgres)) == 350
    assert counted(task(iter(task_rows))) == {"stored": 650, "already_there": 350, "set_aside": 0}
    assert recorded(postgres) == Counter(f"m{n}" for n in range(1_000))


def test_a_task_that_runs_twice_at_once_stores_nothing_twice(
    postgres: StoreSpec, task_rows: list[pa.RecordBatch], now: datetime
) -> None:
    with open_spec(postgres, create=True) as store:
        store.setup()
    task = partial(store_all, postgres, now, 20, None)
    with ThreadPoolExecutor(2) as both:
        told = list(both.map(lambda _: counted(task(iter(task_rows))), range(2)))
    assert told[0] + told[1] == Counter(stored=1_000, already_there=1_000)
    assert recorded(postgres) == Counter(f"m{n}" for n in range(1_000))

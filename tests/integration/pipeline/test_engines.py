"""The local engine and Spark: the same inputs have the same results, rejected rows and stored rows."""

import json
import random
from collections.abc import Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark program uses
from tests.integration.pipeline.test_generated_files import WRITERS, Group, random_rows

from postdate.core.zones import rules_of
from postdate.errors import PipelineError
from postdate.pipeline.engines import NeedsSpark
from postdate.pipeline.failures import shorten_errors
from postdate.pipeline.files import read_input
from postdate.pipeline.local.reading import read_table
from postdate.pipeline.local.schedule import schedule as schedule_locally
from postdate.pipeline.local.times import read_times
from postdate.pipeline.local_time import Ambiguous, LocalTimes, Nonexistent, ZoneTimes, add_time
from postdate.pipeline.schedule import ColumnMapping, Rejects, ScheduleJob, schedule
from postdate.pipeline.stores import StoreSpec, open_spec
from postdate.ports import Scan
from postdate.ports.scanning import WRITTEN_COLUMNS

ZONE: Final = LocalTimes("Europe/Paris", Ambiguous.LATER, Nonexistent.REJECT)


def stored_in(spec: StoreSpec) -> dict[str, tuple[Any, ...]]:
    with open_spec(spec) as store:
        scannable = store.require_scannable()
        parts, scan = scannable.scan_parts("pending", 1), Scan("pending", WRITTEN_COLUMNS)
        return {row[0]: row for part in parts for page in scannable.scan(scan, part, 1_000) for row in page}


def rejected_in(folder: Path) -> list[str]:
    """Return the rejected rows of either engine, in one order."""
    lines = [line for file in folder.glob("part-*") for line in file.read_text("utf-8").splitlines()]
    return sorted(json.dumps(json.loads(line), sort_keys=True) for line in lines)


def reported_in(folder: Path) -> list[tuple[Any, ...]]:
    rows = [row for file in folder.glob("part-*") for row in pq.read_table(file).to_pylist()]
    return sorted(((row["outcome"], row["reason"] or "", row["rows"]) for row in rows), key=str)


def run_both(
    spark: SparkSession, folder: Path, now: datetime, path: str | Sequence[str], *reading: Any, **job: Any
) -> tuple[list[Any], list[Any]]:
    """Return what each engine makes of an input: an error, or all there is to compare."""
    return (
        run_one(schedule_locally, lambda: read_table(path, *reading), folder / "local", now, job),
        run_one(schedule, lambda: read_input(spark, path, *reading), folder / "spark", now, job),
    )


def run_one(engine: Any, read: Any, folder: Path, now: datetime, job: dict[str, Any]) -> list[Any]:
    folder.mkdir(exist_ok=True)
    spec = StoreSpec(f"sqlite:///{folder / 'store.db'}", synchronous="normal")
    number = len([*folder.iterdir()])
    rejects, report = folder / f"rejected-{number}", folder / f"report-{number}"
    outputs = {} if job.get("dry_run") else {"rejects": Rejects(rejects), "report": report}
    try:
        with shorten_errors("the job has failed"):
            result = engine(read(), ScheduleJob(spec, now, **outputs, **job))
    except NeedsSpark:
        raise
    except PipelineError as error:
        return ["refused", str(error).rpartition("file:")[2].lstrip("/")]
    assert result.engine == folder.name
    counts = (result.read, result.accepted, result.already_there, result.conflicting, result.set_aside, result.unused)
    samples = [sorted(map(str, each)) for each in (result.sample, result.rejected_sample)]
    stored = {} if job.get("dry_run") and not (folder / "store.db").exists() else stored_in(spec)
    return [counts, samples, rejected_in(rejects), reported_in(report), stored]


# --- generated files --------------------------------------------------------------------------------------------------


_MORE_SEEDS = pytest.mark.soak(
    "each takes many seconds",
    part="random",
    proven_by="tests/integration/pipeline/test_engines.py::test_generated_files_have_the_same_result_on_both_engines",
)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=_MORE_SEEDS) for seed in range(1, 6))])
def test_generated_files_have_the_same_result_on_both_engines(
    spark: SparkSession, tmp_path: Path, chance: random.Random, now: datetime, seed: int
) -> None:
    group, path = Group.choose(chance), tmp_path / "rows"
    if group.format == "orc" and group.due_is_instant:
        group = Group("parquet", *(getattr(group, name) for name in Group.__dataclass_fields__ if name != "format"))
    path.mkdir()
    for file in range(4):
        rows = random_rows(chance, f"{seed}.{file % 3}")
        WRITERS[group.format](chance, group, path / f"{file}.{group.format}", rows)
    job: dict[str, Any] = {"local_times": ZONE} if seed % 2 else {}
    local, on_spark = run_both(spark, tmp_path, now, str(path), group.format, group.encoding, group.delimiter, **job)
    assert local == on_spark, group
    # Again: everything is there already. Then as a dry run.
    local, on_spark = run_both(spark, tmp_path, now, str(path), group.format, group.encoding, group.delimiter, **job)
    assert local == on_spark, group


PIECES: Final = (
    "a,b", "m,n", '"x"', ",", "\n", "\r\n", "\r", '"', '""', '"q,\n"', '"q\r\nr"', " ", "\t", "\x01", "\f", "z", "ü",
    '"y" ', "1,2", ",3", "\ufeff", '"e""f",g',
)  # fmt: skip


def random_csv(chance: random.Random) -> bytes:
    line_break = chance.choice(("\n", "\r\n", "\r"))
    pieces = [line_break if chance.random() < 0.3 else chance.choice(PIECES) for _ in range(chance.randrange(14))]
    text = "a,b" + line_break + "".join(pieces)
    mark = b"\xef\xbb\xbf" if chance.random() < 0.1 else b""
    return mark + text.encode("utf-8" if chance.random() < 0.9 else "latin-1", "replace")


def read_locally(path: Path) -> list[str] | str:
    try:
        return sorted(str(row) for batch in read_table(str(path), "csv").read() for row in batch.to_pylist())
    except PipelineError as error:
        return str(error).rpartition("file:")[2].lstrip("/")


def read_on_spark(spark: SparkSession, path: Path) -> list[str] | str:
    try:
        with shorten_errors("it has failed"):
            return sorted(str(row.asDict(recursive=True)) for row in read_input(spark, str(path), "csv").collect())
    except PipelineError as error:
        return str(error).rpartition("file:")[2].lstrip("/")


def test_damaged_csv_is_cut_into_the_same_records_on_both_engines(
    spark: SparkSession, tmp_path: Path, chance: random.Random
) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.mkdir()
    bad.mkdir()
    for number in range(400):
        file = good / f"{number}.csv"
        file.write_bytes(random_csv(chance))
        if isinstance(read_locally(file), str):
            file.rename(bad / file.name)
    assert len([*good.iterdir()]) > 200
    assert read_locally(good) == read_on_spark(spark, good)
    for file in sorted(bad.iterdir())[:5]:
        assert read_locally(file) == read_on_spark(spark, file), file.read_bytes()


LINES: Final = (
    b'{"message_id": "a", "due": 1}', b'{"DUE": "2031-05-01T12:00Z", "n": 1.50}', b"", b"  ", b"{", b"[1]",
    b'{"a": "\xfc"}', b'{"a": 1, "a": 2}', b'{"a": 1, "A": 2}', b'\xef\xbb\xbf{"b": {"c": [1, 1.0]}}', b"null",
    b'{"b": null} x', b'{"b": "\\ud800"}',
)  # fmt: skip


def test_damaged_json_has_the_same_rows_on_both_engines(
    spark: SparkSession, tmp_path: Path, chance: random.Random
) -> None:
    for number in range(20):
        lines = chance.choices(LINES, k=chance.randrange(1, 12))
        content = b"".join(line + chance.choice((b"\n", b"\r\n", b"\r")) for line in lines)
        (tmp_path / f"{number}.json").write_bytes(content if chance.random() < 0.5 else content.rstrip())
    local = read_table(str(tmp_path), "json")
    on_spark = read_input(spark, str(tmp_path), "json")
    assert [*local.columns.names, "postdate_origin"] == on_spark.columns
    rows = sorted(str(row) for batch in local.read() for row in batch.to_pylist())
    assert rows == sorted(str(row.asDict(recursive=True)) for row in on_spark.collect())


# --- times ------------------------------------------------------------------------------------------------------------

TIME_PIECES: Final = (
    ("2026", "0000", "0001", "9999", "2024", "226"),
    ("-", ""),
    ("03", "12", "02", "13", "01"),
    ("-", ""),
    ("29", "31", "01", "30"),
    ("T", "t", " ", ""),
    ("02", "24", "00", "23", "2"),
    (":", ""),
    ("30", "00", "60"),
    (":", ""),
    ("00", "59", "60", ""),
    ("", ".5", ",123456789", ":123456", ".000000001", ".0", ".1234567890", "."),
    ("", "Z", "z", " Z", "+01:00", "-05", "+0530", "+18:00", "+18:30", "-00:00", "+05:60", "[Europe/Paris]"),
    ("", "", "", "[Europe/Paris]", "\n", "\r\n", "\n\n", " ", "\u2028", "x"),
)
TIMES: Final = (
    "2026-03-29T02:30", "2026-10-25T02:30:00", "2026-01-01T24:00:00Z", "2026-01-01 24:00:00Z", "2026-01-01", "", " ",
    "0000-12-31T23:30:00-01:00", "9999-12-31T24:00:00Z", "9999-12-31T23:59:59-05:00", " 2026-01-01T12:00 ",
    "\t2026-01-01T12:00Z", "2026-01-01T00:00:00Z\n", "2026-01-01T00:00:00Z[Eur\u00f6]", "\u0662026-01-01T00:00:00Z",
)  # fmt: skip


@pytest.mark.parametrize("zone", [None, ZONE, LocalTimes("Europe/Paris", Ambiguous.REJECT, Nonexistent.FORWARD)])
def test_the_texts_of_times_are_read_alike_by_both_engines(
    spark: SparkSession, chance: random.Random, zone: LocalTimes | None
) -> None:
    texts = [*TIMES, *("".join(chance.choice(piece) for piece in TIME_PIECES) for _ in range(1_000))]
    for _ in range(3_000):  # Most random texts are no times at all: these differ from one in a few places.
        changed = {chance.randrange(len(TIME_PIECES)) for _ in range(4)}
        texts.append("".join(chance.choice(p) if n in changed else p[0] for n, p in enumerate(TIME_PIECES)))
    zone_times = None if zone is None else ZoneTimes(zone, rules_of(zone.zone))
    local = read_times(pa.array(texts, pa.string()), texts, zone_times)
    frame = spark.createDataFrame(pa.table({"text": texts}))
    parsed = add_time(frame, "time", F.col("text"), frame.schema["text"].dataType, zone_times)
    rows = parsed.select("text", F.unix_micros("time.instant"), "time.problem", "time.wall_time").collect()
    differences = [
        (text, mine, row[1:])
        for text, *mine, row in zip(texts, local.instants, local.problems, local.wall_times, rows, strict=True)
        if tuple(mine) != tuple(row[1:])
    ]
    assert [row[0] for row in rows] == texts
    assert not differences
    assert sum(instant is not None for instant in local.instants) > 100


# --- types of Parquet -------------------------------------------------------------------------------------------------

INSTANTS: Final = [datetime(2031, 5, 1, 12, 0, 0, 123456, tzinfo=UTC), datetime(1, 1, 1, tzinfo=UTC), None]
CLOCKS: Final = [datetime.fromisoformat(text) for text in ("2031-03-30T02:30", "2031-10-26T02:30", "9999-12-31T23:59")]
DUES: Final = {
    "instants": pa.array(INSTANTS, pa.timestamp("us", "UTC")),
    "instants-of-paris": pa.array([INSTANTS[0], None, INSTANTS[0]], pa.timestamp("us", "Europe/Paris")),
    "seconds": pa.array([0, 1_930_000_000, None], pa.timestamp("s", "UTC")),
    "nanoseconds": pa.array([1, 1_930_000_000_000_000_001, -1], pa.timestamp("ns", "UTC")),
    "clock-nanoseconds": pa.array([1_000, 1_930_000_000_000_000_999, None], pa.timestamp("ns")),
    "clocks": pa.array(CLOCKS, pa.timestamp("us")),
    "far": pa.array([253_402_300_800_000_000, -62_135_596_800_000_001, 0], pa.timestamp("us", "UTC")),
    "dates": pa.array([date(2031, 5, 1), date(1, 1, 1), None], pa.date32()),
    "far-dates": pa.array([2_932_897, -719_163, 0], pa.int32()).cast(pa.date32()),
    "texts": pa.array(["2031-05-01T12:00Z", "x", None], pa.large_string()),
    "dictionary": pa.array(["2031-05-01T12:00Z", "x", "x"]).dictionary_encode(),
}


@pytest.mark.parametrize("kind", DUES)
def test_times_of_parquet_are_read_alike_by_both_engines(
    spark: SparkSession, tmp_path: Path, now: datetime, kind: str
) -> None:
    table = {"message_id": ["a", "b", "c"], "destination": ["q"] * 3, "due": DUES[kind]}
    pq.write_table(pa.table(table), tmp_path / "in.parquet")
    local, on_spark = run_both(spark, tmp_path, now, str(tmp_path / "in.parquet"), local_times=ZONE)
    assert local == on_spark


def test_old_instants_of_spark_are_read_alike_by_both_engines(
    spark: SparkSession, tmp_path: Path, now: datetime
) -> None:
    table = {"message_id": ["a", "b"], "destination": ["q"] * 2, "due": DUES["instants"][:2]}
    pq.write_table(pa.table(table), tmp_path / "in.parquet", use_deprecated_int96_timestamps=True)
    local, on_spark = run_both(spark, tmp_path, now, str(tmp_path / "in.parquet"))
    assert local == on_spark


def _expiring(span: str, sent: str) -> str:
    return json.dumps({"NServiceBus.TimeToBeReceived": span, "NServiceBus.TimeSent": sent})


HEADERS: Final = {
    "map": pa.array([[("k", "v"), ("é", 'a"\\\x01\x1f')], [], None, [("k", None)]], pa.map_(pa.string(), pa.string())),
    "struct": pa.array([{"a": "1", "b": None}, {"a": None, "b": None}, None, {"a": "", "b": "x"}]),
    "text": pa.array(['{"k": 1.50}', " ", None, '{"k": "v", "k": "w"}']),
    "expiring": pa.array(
        [
            _expiring("00:01:00", "2026-03-01 12:00:00:000000 Z"),
            _expiring("999999.00:01:00", "2026-03-01 12:00:00:000000 Z"),
            _expiring("00:01:00", "soon"),
            '{"NServiceBus.TimeToBeReceived": "00:01:00"',
        ]
    ),
}


@pytest.mark.parametrize("kind", HEADERS)
@pytest.mark.parametrize(
    "ids", [pa.array([1, -2, 3, 4]), pa.array([Decimal("1.50"), Decimal("1E-10"), None, Decimal(7)])]
)
def test_headers_and_ids_of_any_type_are_read_alike_by_both_engines(
    spark: SparkSession, tmp_path: Path, now: datetime, kind: str, ids: Any
) -> None:
    table = {"message_id": ids, "destination": [True, False, None, True], "due": ["2031-05-01T12:00Z"] * 4}
    table |= {"headers": HEADERS[kind], "Expires_At": ["2031-05-01T12:00Z", "x", "2031-05-01T11:00Z", None]}
    pq.write_table(pa.table(table), tmp_path / "in.parquet")
    local, on_spark = run_both(spark, tmp_path, now, str(tmp_path / "in.parquet"))
    assert local == on_spark


def test_texts_that_are_not_utf8_and_large_bodies_are_set_aside_alike(
    spark: SparkSession, tmp_path: Path, now: datetime
) -> None:
    texts = pa.array([b"a", b"\xff", b"c", b"d"], pa.binary()).cast(pa.string(), safe=False)
    bodies = pa.array([b"\xff", None, b"x" * 2_000_000_0, b""], pa.binary())
    table = {"message_id": texts, "destination": ["q"] * 4, "due": ["2031-05-01T12:00Z"] * 4, "body": bodies}
    pq.write_table(pa.table(table), tmp_path / "in.parquet")
    local, on_spark = run_both(spark, tmp_path, now, str(tmp_path / "in.parquet"))
    assert local == on_spark


def test_each_row_of_a_known_id_is_set_aside_alike_by_both_engines(
    spark: SparkSession, tmp_path: Path, now: datetime
) -> None:
    """Two rows that differ only in a column that is not used are two rows."""
    path = tmp_path / "in.csv"
    results = list[list[Any]]()
    for engine in (schedule_locally, schedule):
        place = tmp_path / engine.__module__
        place.mkdir()

        def run(engine: Any = engine, place: Path = place) -> Any:
            source = read_table(str(path), "csv") if engine is schedule_locally else read_input(spark, str(path), "csv")
            job = ScheduleJob(StoreSpec(f"sqlite:///{place / 'a.db'}"), now, rejects=Rejects(place / "rejected"))
            return engine(source, job)

        path.write_text("message_id,due,destination\na,2031-05-01T12:00Z,q\n")
        run()
        path.write_text(
            "message_id,due,destination,note\na,2032-01-01T00:00Z,q,first\na,2032-01-01T00:00:00+00:00,q,second\n"
        )
        run()
        written = [line for file in (place / "rejected").glob("*.json") for line in file.read_text().splitlines()]
        results.append(sorted((json.loads(line)["line"], json.loads(line)["row"]) for line in written))
    rows = ["a,2032-01-01T00:00Z,q,first", "a,2032-01-01T00:00:00+00:00,q,second"]
    assert results == [[(2, rows[0]), (3, rows[1])]] * 2


def test_an_id_in_bytes_that_is_no_text_is_set_aside_whole(spark: SparkSession, tmp_path: Path, now: datetime) -> None:
    ids = pa.array([b"a", b"\xff"], pa.binary())
    table = {"message_id": ids, "destination": ["q"] * 2, "due": ["2031-05-01T12:00Z"] * 2}
    pq.write_table(pa.table(table), tmp_path / "in.parquet")
    job = ScheduleJob(StoreSpec(f"sqlite:///{tmp_path / 'a.db'}"), now, rejects=Rejects(tmp_path / "rejected"))
    result = schedule(read_input(spark, str(tmp_path / "in.parquet")), job)
    assert (result.accepted, result.set_aside) == (1, {"not_utf8": 1})
    (line,) = [line for file in (tmp_path / "rejected").glob("*.json") for line in file.read_text().splitlines()]
    assert json.loads(line)["bytes"] == {"message_id": "/w=="}


def test_files_with_different_columns_are_read_alike_by_both_engines(
    spark: SparkSession, tmp_path: Path, now: datetime
) -> None:
    folder = tmp_path / "a b#%é[1]"
    (folder / "folder").mkdir(parents=True)
    base = {"message_id": ["a"], "destination": ["q"], "due": ["2031-05-01T12:00Z"]}
    pq.write_table(pa.table(base), folder / "1.parquet")
    pq.write_table(pa.table(base | {"message_id": ["b"], "body": ["x"]}), folder / "2.parquet")
    (folder / "_hidden.parquet").write_bytes(b"no Parquet")
    pq.write_table(pa.table(base | {"message_id": ["c"]}), folder / "_k=v.parquet")  # Spark does not take it for hidden
    path = str(folder).replace("[", "\\[").replace("]", "\\]")
    local = run_one(schedule_locally, lambda: read_table(str(folder), "parquet"), tmp_path / "local", now, {})
    on_spark = run_one(schedule, lambda: read_input(spark, path, "parquet"), tmp_path / "spark", now, {})
    assert local == on_spark


# --- the job ----------------------------------------------------------------------------------------------------------


def test_known_ids_loads_and_dry_runs_have_the_same_result_on_both_engines(
    spark: SparkSession, tmp_path: Path, now: datetime
) -> None:
    first, second = tmp_path / "1.csv", tmp_path / "2.csv"
    rows = [f"m{number},2031-05-01T12:00:0{number}Z,q,body {number}" for number in range(6)]
    first.write_text("\n".join(["message_id,due,destination,body", *rows]), encoding="utf-8")
    changed = [*rows[:2], "m2,2031-05-02T12:00Z,q,body 2", "m3,2031-05-01T12:00:03Z,other,body 3", "m7,x,q,", ",,q,"]
    changed += [
        "m8,2031-05-01T12:00Z,q,1",
        "m8,2031-05-01T12:00Z,q,2",
        "m9,2031-05-01T12:00Z,q,",
        "m9,2031-05-01T12:00Z,q,",
    ]
    second.write_text("\n".join(["message_id,due,destination,body", *changed]), encoding="utf-8")
    for path, job in (
        (second, {"dry_run": True}),
        (first, {"load": "spring", "expected_rows": 6}),
        (second, {"dry_run": True, "load": "spring"}),
        (second, {"load": "spring", "batch": 2}),
        (second, {"load": "spring", "expected_rows": 3}),
        (first, {"columns": ColumnMapping(destination="=all", headers=None, expires_at=None)}),
        (first, {"columns": ColumnMapping(body="text")}),
    ):
        local, on_spark = run_both(spark, tmp_path, now, str(path), **job)
        if job.get("expected_rows") == 3:
            assert (local[0], on_spark[0]) == ("refused", "refused")
        else:
            assert local == on_spark, job


def test_what_the_local_engine_does_not_do_needs_spark(tmp_path: Path, now: datetime, store: StoreSpec) -> None:
    base = {"message_id": ["a"], "destination": ["q"], "due": ["2031-05-01T12:00Z"]}
    inputs = {
        "body": base | {"body": [{"a": 1}]},
        "headers": base | {"headers": [{"a": 1}]},
        "message_id": base | {"message_id": [1.5]},
    }
    for name, table in inputs.items():
        pq.write_table(pa.table(table), tmp_path / f"{name}.parquet")
        with pytest.raises(NeedsSpark, match=name):
            schedule_locally(read_table(str(tmp_path / f"{name}.parquet")), ScheduleJob(store, now))
    (tmp_path / "day=1").mkdir()
    for path in (str(tmp_path), "s3a://bucket/in.parquet"):
        with pytest.raises(NeedsSpark):
            read_table(path, "parquet")
    table, job = read_table(str(tmp_path / "message_id.parquet")), ScheduleJob(store, now, load="spring", sync=True)
    with pytest.raises(NeedsSpark, match="--sync"):
        schedule_locally(table, job)
    assert not (tmp_path / "messages.db").exists()

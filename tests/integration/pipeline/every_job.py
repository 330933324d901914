"""Every job of the pipeline, small: what the tests of a kind of session run, with plain values in and out.

Each job works in a folder of its own, on stores and queues in SQLite files, so that driver and executors must be on one
machine. The results have no times and no paths: they are the same on every kind of session.
"""

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from tests.integration.pipeline.old_timeouts import OldFile, messages
from tests.waiting import Eventually

from postdate.backends.sqlite.transport import LocalTransport
from postdate.clock import SystemClock
from postdate.errors import PipelineError
from postdate.messages import DelayedMessage
from postdate.pipeline.audit import audit
from postdate.pipeline.delay import DelayOptions, DelayTarget, delay_conf, read_directory, run_delay
from postdate.pipeline.dispatching import SweepSpec
from postdate.pipeline.files import read_input
from postdate.pipeline.forecast import forecast, forecast_frame
from postdate.pipeline.history import read_history, write_history
from postdate.pipeline.loads import list_loads, show_load, undo_load
from postdate.pipeline.migrate import MigrateJob, migrate, preview
from postdate.pipeline.schedule import Rejects, ScheduleJob, schedule
from postdate.pipeline.source import register
from postdate.pipeline.stores import StoreSpec, open_spec
from postdate.pipeline.sweep import sweep, sweep_continuously

NOW = datetime(2030, 5, 1, tzinfo=UTC)
SECOND, DAY = timedelta(seconds=1), timedelta(days=1)
REFUSED = "refused: "
"""How the outcome of a job begins that says in a line why it does not run here."""

_MESSAGE = (
    "concat('m-', id) AS message_id",
    "'orders' AS destination",
    "timestamp'2030-05-01 12:00:00' + make_dt_interval(0, 0, 0, id) AS due",
    "encode(repeat('x', 100), 'UTF-8') AS body",
)


# --- stores and queues ------------------------------------------------------------------------------------------------


def _store_in(folder: Path) -> StoreSpec:
    return StoreSpec(f"sqlite:///{folder / 'messages.db'}", synchronous="normal")


def _sweep_in(folder: Path) -> SweepSpec:
    """Make queues beside a store."""
    path = folder / "messages.db"

    async def create() -> None:
        queues = LocalTransport(path)
        await queues.create_queues(["orders", "error"])
        await queues.close()

    spec = SweepSpec(_store_in(folder), f"local:///{path}", {"synchronous": "normal"})
    with open_spec(spec.store, create=True) as store:
        store.setup()
    anyio.run(create)
    return spec


def _add(spec: StoreSpec, count: int, due: datetime, now: datetime) -> None:
    with open_spec(spec, create=True) as store:
        store.setup()
        store.store_many([DelayedMessage(f"m-{n}", due, "orders", {}, b"") for n in range(count)], now)


def _rows(spec: StoreSpec, sql: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(spec.address.removeprefix("sqlite:///"))) as connection:
        return connection.execute(sql).fetchall()


def _delivered(spec: StoreSpec) -> int:
    return _rows(spec, "SELECT count(*) FROM record WHERE kind = 2")[0][0]


# --- the jobs ---------------------------------------------------------------------------------------------------------


def _schedule(spark: SparkSession, folder: Path) -> Any:
    rows = [{"message_id": f"m-{n}", "due": "2030-05-02T12:00:00Z", "destination": "orders"} for n in range(200)]
    rows += [{"message_id": "bad", "due": "soon", "destination": "orders"}, {**rows[0], "destination": "bills"}]
    (folder / "input.json").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    job = ScheduleJob(_store_in(folder), NOW, rejects=Rejects(folder / "rejected"), report=folder / "report")
    result = schedule(read_input(spark, str(folder / "input.json")), job)
    files = (folder / "rejected").glob("part-*")
    rejected = [json.loads(line) for file in files for line in file.read_text("utf-8").splitlines()]
    reported = spark.read.parquet(str(folder / "report")).collect()
    return {
        "counts": [result.read, result.accepted, result.already_there, dict(result.set_aside)],
        "rejected": sorted(row["message_id"] for row in rejected),
        "report": sorted([row["outcome"], row["reason"] or "", row["rows"]] for row in reported),
    }


def _loads(spark: SparkSession, folder: Path) -> Any:
    """Sync a load with a table, then with another one; list, show and undo it."""
    spec = _store_in(folder)
    job = ScheduleJob(spec, NOW, load="plan", sync=True)
    first = schedule(spark.range(50).selectExpr(*_MESSAGE), job)
    second = schedule(spark.range(10, 60).selectExpr(*_MESSAGE[:3]), job)
    assert first.sync is not None
    assert second.sync is not None
    shown, undone = show_load(spark, spec, "plan"), undo_load(spark, spec, "plan", NOW)
    return [
        [first.accepted, first.sync.unchanged],
        [second.accepted, second.sync.replaced, second.sync.cancelled],
        [shown.load.messages, undone.cancelled, len(list_loads(spark, spec).loads)],
    ]


def _forecast(spark: SparkSession, folder: Path) -> Any:
    _add(_store_in(folder), 50, NOW + DAY, NOW)
    return [
        forecast(spark, _store_in(folder), NOW).messages,
        forecast_frame(spark.range(9).selectExpr(*_MESSAGE), NOW).messages,
    ]


def _sweep(spark: SparkSession, folder: Path) -> Any:
    spec, now = _sweep_in(folder), SystemClock().now()
    _add(spec.store, 100, now - SECOND, now)
    first = sweep(spark, spec, ledger=folder / "ledger")
    second = sweep(spark, spec)
    # With speculation Spark kills one of two attempts, and what it had delivered is in no result and no ledger.
    ledger = spark.read.parquet(str(folder / "ledger")).count()
    assert ledger == first.delivered <= _delivered(spec.store)
    return [_delivered(spec.store), first.is_complete, second.delivered, second.is_complete]


def _sweep_continuously(spark: SparkSession, folder: Path) -> Any:
    spec, now = _sweep_in(folder), SystemClock().now()
    paths = {"checkpoint": folder / "checkpoint", "ledger": folder / "ledger"}
    with sweep_continuously(spark, spec, slots=1, residency=SECOND, **paths) as query:
        _add(spec.store, 100, now + SECOND, now)
        Eventually()(lambda: query.wait(0) or _delivered(spec.store) >= 100, "what is due is delivered")
    return [_delivered(spec.store), spark.read.parquet(str(folder / "ledger")).count()]


def _audit(spark: SparkSession, folder: Path) -> Any:
    spec = _sweep_in(folder)
    _add(spec.store, 100, NOW - SECOND, NOW - DAY)
    empty = audit(spark, spec.store, NOW)
    with closing(sqlite3.connect(folder / "messages.db")) as connection, connection:
        connection.execute("DELETE FROM delayed_message WHERE message_id = 'm-7'")
    found = audit(spark, spec.store, NOW, findings_to=folder / "findings")
    findings = spark.read.parquet(str(folder / "findings")).where("finding = 'lost'").collect()
    return [
        [empty.counts.scheduled, empty.counts.pending, empty.counts.lost],
        [found.counts.scheduled, found.counts.pending, found.counts.lost],
        [row["message_id"] for row in findings],
    ]


def _history(spark: SparkSession, folder: Path) -> Any:
    spec = _sweep_in(folder)
    _add(spec.store, 20, NOW - 40 * DAY, NOW - 50 * DAY)
    first = write_history(spark, spec.store, folder / "lake", rows_per_batch=7)
    again = write_history(spark, spec.store, folder / "lake")
    sweep(spark, spec)
    more = write_history(spark, spec.store, folder / "lake")
    numbers = sorted(row["number"] for row in read_history(spark, folder / "lake").collect())
    return [
        first.records,
        again.records,
        more.records,
        numbers,
        _rows(spec.store, "SELECT number FROM stream_position"),
    ]


def _migrate(spark: SparkSession, folder: Path) -> Any:
    old = OldFile(folder / "old.db")
    old.add("billing", messages(40))
    spec = _sweep_in(folder).store
    job = MigrateJob(old.origin, spec, ("billing",), batch_size=10)
    counts = [each.count for each in preview(job, SystemClock().now()).endpoints]
    result = migrate(spark, job)
    return [counts, result.moved, result.is_complete, old.seen("billing")]


def _delay(spark: SparkSession, folder: Path) -> Any:
    for name, value in delay_conf().items():
        spark.conf.set(name, value)
    (folder / "rows").mkdir()
    due = (SystemClock().now() + SECOND).isoformat()
    (folder / "new").write_text("".join(json.dumps({"id": f"r{n}", "due": due}) + "\n" for n in range(50)))
    (folder / "new").rename(folder / "rows" / "0.json")

    def released() -> int:
        """Count the rows that the sink has committed: a query that stops removes the files of an unfinished batch."""
        log = "".join(each.read_text() for each in (folder / "out" / "_spark_metadata").glob("[0-9]*"))
        written = [file for file in (folder / "out").glob("part-*.json") if file.name in log]
        return sum(len(file.read_text().splitlines()) for file in written)

    def start() -> StreamingQuery:
        source = read_directory(spark, str(folder / "rows"), "id string, due timestamp")
        target = DelayTarget(str(folder / "out"), str(folder / "state"), "json", SECOND)
        return run_delay(source, target, options=DelayOptions(slots=2))

    def committed() -> bool:
        """Tell whether a micro-batch has ended: its sink ends a moment before."""
        return any(file.name.isdecimal() for file in (folder / "state" / "commits").glob("*"))

    def done() -> bool:
        if (error := query.exception()) is not None:  # over Connect, a query that was stopped has none any more
            raise error
        return released() >= 50 and committed()

    query = start()
    Eventually()(done, "what is due is released")
    query.stop()
    return released()


def _delay_goes_on(spark: SparkSession, folder: Path) -> Any:
    first = _delay(spark, folder)
    source = read_directory(spark, str(folder / "rows"), "id string, due timestamp")
    target = DelayTarget(str(folder / "out"), str(folder / "state"), "json", SECOND)
    query = run_delay(source, target, options=DelayOptions(slots=2))
    query.stop()
    return first


def _write_and_read(spark: SparkSession, folder: Path) -> Any:
    register(spark)
    options = {"store": _store_in(folder).address, "synchronous": "normal"}
    spark.range(30).selectExpr(*_MESSAGE).write.format("postdate").options(**options).mode("append").save()
    pending = spark.read.format("postdate").options(**options).load()
    return [
        pending.count(),
        pending.where("message_id = 'm-3'").count(),
        pending.where("due < '2030-05-01 12:00:10'").count(),
    ]


def _stream_of_records(spark: SparkSession, folder: Path) -> Any:
    register(spark)
    options = {"store": _store_in(folder).address, "synchronous": "normal"}
    (folder / "rows").mkdir()
    spark.range(30).selectExpr(*_MESSAGE).write.parquet(str(folder / "rows"), mode="overwrite")
    rows = spark.readStream.schema(spark.range(0).selectExpr(*_MESSAGE).schema).parquet(str(folder / "rows"))
    writer = rows.writeStream.format("postdate").options(**options).trigger(availableNow=True)
    writer.option("checkpointLocation", str(folder / "storing")).start().awaitTermination()
    records = spark.readStream.format("postdate").options(**options, what="records").load()
    writer = records.writeStream.format("parquet").trigger(availableNow=True)
    writer = writer.option("checkpointLocation", str(folder / "following"))
    writer.start(str(folder / "records")).awaitTermination()
    return spark.read.parquet(str(folder / "records")).count()


JOBS: dict[str, Callable[[SparkSession, Path], Any]] = {
    "schedule": _schedule,
    "schedule with sync, and loads": _loads,
    "forecast": _forecast,
    "audit": _audit,
    "sweep": _sweep,
    "sweep, continuously": _sweep_continuously,
    "delay": _delay,
    "delay, started again": _delay_goes_on,
    "migrate": _migrate,
    "history": _history,
    "the format, written and read": _write_and_read,
    "the format, as streams": _stream_of_records,
}


def run(spark: SparkSession, name: str, folder: str) -> Any:
    """Run a job in a new folder. Return its result, or in a line why it is refused."""
    place = Path(folder)
    place.mkdir(parents=True)
    try:
        return JOBS[name](spark, place)
    except PipelineError as error:
        return f"{REFUSED}{error}"


# --- the table in the guide -------------------------------------------------------------------------------------------

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "spark-cluster.md"


def table_in_guide() -> dict[str, dict[str, str]]:
    """Return the cells of the guide's table: by job, then by kind of session."""
    lines = GUIDE.read_text("utf-8").partition("| job |")[2].partition("\n\n")[0].splitlines()
    kinds = _cells("| job |" + lines[0])[1:]
    return {job: dict(zip(kinds, cells, strict=True)) for job, *cells in map(_cells, lines[2:])}


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def check_cell(job: str, kind: str, outcome: Any) -> None:
    """Fail if the guide says something else about a job than its outcome."""
    runs = not str(outcome).startswith(REFUSED)
    assert table_in_guide()[job][kind].startswith("yes" if runs else "no"), f"{job}, {kind}: {outcome}"

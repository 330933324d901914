"""What the drivers of these tests are asked to do: plain values in, plain values out."""

import contextlib
import io
from dataclasses import asdict
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from postdate.pipeline.audit import audit
from postdate.pipeline.files import read_input
from postdate.pipeline.frames import scan_frame, scan_parts
from postdate.pipeline.schedule import Rejects, ScheduleJob, ScheduleResult, schedule
from postdate.pipeline.source import register
from postdate.pipeline.stores import StoreSpec
from postdate.ports import ScanPart

_MESSAGE = (
    "concat('m-', id) AS message_id",
    "'orders' AS destination",
    "timestamp'2030-05-01 12:00:00' + make_dt_interval(0, 0, 0, id) AS due",
    "encode(repeat('x', 100), 'UTF-8') AS body",
)


def where(spark: SparkSession) -> list[dict[str, str]]:
    """Tell of each of two tasks, one on each executor at the same time, where it runs and where it found Postdate."""

    def look(batches: Any) -> Any:
        import sys

        import postdate

        for _ in batches:
            found = {"package": postdate.__file__, "python": sys.executable, "directory": str(Path.cwd())}
            yield pa.RecordBatch.from_pylist([{**found, "path": ":".join(sys.path)}])

    schema = "package string, python string, directory string, path string"
    return [row.asDict() for row in spark.range(2, numPartitions=2).mapInArrow(look, schema, barrier=True).collect()]


def schedule_file(spark: SparkSession, path: str, store: dict[str, Any], now: str, rejects: str) -> dict[str, Any]:
    """Schedule a file; return the counts."""
    job = ScheduleJob(StoreSpec(**store), datetime.fromisoformat(now), rejects=Rejects(Path(rejects)))
    return _counts(schedule(read_input(spark, path), job))


def schedule_numbers(
    spark: SparkSession, first: int, end: int, store: dict[str, Any], now: str, tasks: int = 10, batch: int = 20
) -> dict[str, Any]:
    """Schedule the messages ``m-{first}`` up to, not including, ``m-{end}``; return the counts."""
    messages = spark.range(first, end, numPartitions=tasks).selectExpr(*_MESSAGE)
    return _counts(schedule(messages, _job(store, now, batch)))


def schedule_overdue(spark: SparkSession, number: int, store: dict[str, Any], now: str) -> dict[str, Any]:
    """Schedule messages that have been due for long; return the counts."""
    overdue = "timestamp'2020-05-01 12:00:00' AS due"
    columns = [overdue if column.endswith("AS due") else column for column in _MESSAGE]
    messages = spark.range(0, number, numPartitions=10).selectExpr(*columns)
    return _counts(schedule(messages, _job(store, now, 20)))


def schedule_unevenly(spark: SparkSession, end: int, store: dict[str, Any], now: str) -> dict[str, Any]:
    """Schedule most messages in one task and the others in many: Spark will try the one a second time."""
    small, large = spark.range(0, end // 10, numPartitions=20), spark.range(end // 10, end, numPartitions=1)
    return _counts(schedule(small.union(large).selectExpr(*_MESSAGE), _job(store, now, 20)))


def audit_store(spark: SparkSession, store: dict[str, Any], now: str) -> dict[str, Any]:
    """Audit; return the whole result except how long it took."""
    result = audit(spark, StoreSpec(**store), datetime.fromisoformat(now)).to_json()
    return {key: value for key, value in result.items() if key != "took_seconds"}


def by_name(spark: SparkSession, address: str, number: int) -> dict[str, Any]:
    """Write to a store and read it by the format's name; return the ids, and the plan of reading."""
    register(spark)
    messages = spark.range(number).selectExpr(*_MESSAGE)
    messages.write.format("postdate").option("store", address).mode("append").save()
    pending = spark.read.format("postdate").option("store", address).option("partitions", 2).load()
    return {"ids": [row.message_id for row in pending.select("message_id").collect()], "plan": plan(pending)}


def plan_of_scan(spark: SparkSession, store: dict[str, Any]) -> str:
    """Return the plan of a scan, which is also run."""
    spec = StoreSpec(**store)
    frame = scan_frame(spark, spec, "pending", ("message_id",), scan_parts(spec, "pending", 2))
    frame.count()
    return plan(frame)


def fail_in_a_task(spark: SparkSession, address: str) -> int:
    """Scan a store that cannot be reached."""
    impatient = StoreSpec(address, patience=timedelta(0))
    return scan_frame(spark, impatient, "pending", ("message_id",), [ScanPart(0, 1)]).count()


def plan(frame: DataFrame) -> str:
    """Return what ``frame.explain(True)`` prints."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        frame.explain(extended=True)
    return text.getvalue()


def web_url(spark: SparkSession) -> str:
    """Return the address of the application's web page."""
    url = spark.sparkContext.uiWebUrl
    assert url is not None
    return url


def _job(store: dict[str, Any], now: str, batch: int) -> ScheduleJob:
    return ScheduleJob(StoreSpec(**store), datetime.fromisoformat(now), batch=batch)


def _counts(result: ScheduleResult) -> dict[str, Any]:
    return {key: value for key, value in asdict(result).items() if key not in {"seconds", "rejected_to"}}

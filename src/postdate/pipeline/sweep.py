"""Deliver due messages with Spark: once, or continuously as a streaming query. Source: ADR 0011.

Each task is a dispatcher like that of ``postdate run``. Several tasks, executors and services may work on one store at
the same time, and no two of them claim the same message. So if Spark repeats a task, or starts it a second time
elsewhere because it seems slow, the second attempt finds only undone work. The guarantee is that of store and queues
together: exactly once if they share a database. Otherwise at least once, with the same message id, and only messages
that a killed process was sending may be duplicated.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
import time
import uuid
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import anyio
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark program uses
from pyspark.sql.streaming.query import StreamingQuery

from postdate.clock import SystemClock
from postdate.errors import PipelineError
from postdate.pipeline.dispatching import COUNTED, SweepSpec, count_delivered, sweep_slots
from postdate.pipeline.failures import check_query, shorten_errors, wait_for_query
from postdate.pipeline.plain import to_plain
from postdate.pipeline.rows import LEDGER_ARROW, spark_schema
from postdate.pipeline.session import check_utc, count_slots, set_temporarily
from postdate.pipeline.stores import open_spec

RESIDENCY: Final = timedelta(seconds=30)
"""How long a task of a continuous sweep dispatches before the next task replaces it.

Between two tasks, no dispatcher of the sweep polls for some tenths of a second. With longer tasks, fewer messages meet
this gap; but the ledger shows the deliveries of a task only when the task ends.
"""

_LINES_SCHEMA: Final = spark_schema(LEDGER_ARROW)
_STOP_TIMEOUT_SECONDS: Final = 60.0
_QUICK_CHECKPOINTS: Final = MappingProxyType(
    {
        "spark.sql.streaming.checkpointFileManagerClass": (
            "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
        ),
        "spark.sql.streaming.checkpoint.fileChecksum.enabled": "false",
    }
)


@dataclass(frozen=True, slots=True)
class SweepResult:
    """Result of a sweep, counted by the tasks that were not killed. Only the records of the store are complete.

    Args:
        delivered: messages that are in their queues now.
        expired: messages that had expired when they were due.
        retried: attempts that failed; the message waits for the next attempt.
        failed: messages that went to the error queue.
        left: messages that were due at the start, were not dispatched, and are not claimed: they wait for another
            attempt.
        seconds: duration from the start to the end.
        ledger: folder of the ledger; ``None``: no ledger was requested.
    """

    delivered: int
    expired: int
    retried: int
    failed: int
    left: int
    seconds: float
    ledger: str | None = None

    @property
    def per_second(self) -> float:
        """Messages delivered a second, over the whole duration."""
        return self.delivered / self.seconds if self.seconds else 0.0

    @property
    def is_complete(self) -> bool:
        """Whether every due message has been delivered or has expired."""
        return not (self.failed or self.left)

    def to_json(self) -> dict[str, Any]:
        return {**to_plain(self), "per_second": round(self.per_second, 1), "complete": self.is_complete}


def check_sweep(spec: SweepSpec) -> None:
    """Check on the driver, before any task starts, that store and queues exist.

    Raises StoreNotSetUp, StoreUnavailable, TransportUnavailable or ConfigurationError; the text says what to do.
    """
    with open_spec(spec.store) as store:
        store.count_overdue(SystemClock().now())

    async def check_transport() -> None:
        transport = spec.open_transport()
        try:
            await transport.server_facts()
        finally:
            await transport.close()

    anyio.run(check_transport)


def sweep(
    spark: SparkSession, spec: SweepSpec, *, slots: int | None = None, ledger: str | Path | None = None
) -> SweepResult:
    """Dispatch everything that is due now, and end.

    Args:
        spark: a session in UTC.
        spec: store and queues.
        slots: number of dispatchers that run at the same time; by default the number of Spark's cores.
        ledger: a folder to which Parquet files are added, with one line for each record.

    Raises:
        StoreUnavailable, TransportUnavailable, StoreNotSetUp, ConfigurationError: raised before any task starts.
        PipelineError: ``slots`` is less than one, or a task failed; messages delivered by then stay delivered.
    """
    check_utc(spark)
    check_sweep(spec)
    started, as_of, n = time.perf_counter(), SystemClock().now(), _slot_count(spark, slots)
    tasks = spark.range(0, n, 1, n)
    with shorten_errors("the sweep has failed"):
        if ledger is None:
            rows = tasks.mapInArrow(partial(count_delivered, spec), spark_schema(COUNTED)).collect()
            counts = {name: sum(row[name] for row in rows) for name in COUNTED.names}
        else:
            counts = _write_lines(tasks.mapInArrow(partial(sweep_slots, spec, None, None), _LINES_SCHEMA), str(ledger))
    with open_spec(spec.store) as store:
        overdue = store.count_overdue(as_of)
    return SweepResult(
        **{name: counts.get(name, 0) for name in COUNTED.names},
        left=overdue,
        seconds=time.perf_counter() - started,
        ledger=None if ledger is None else str(ledger),
    )


def _slot_count(spark: SparkSession, slots: int | None) -> int:
    if slots is not None and slots < 1:
        raise PipelineError(f"a sweep needs at least one dispatcher, not slots={slots}")
    return slots or count_slots(spark)


def _write_lines(lines: DataFrame, ledger: str) -> dict[str, int]:
    """Write the lines and count them while they are written. To read the frame a second time would sweep again."""
    observation = Observation()
    kind_counts = [F.count_if(F.col("kind") == name).alias(name) for name in COUNTED.names]
    lines.observe(observation, *kind_counts).write.mode("append").parquet(ledger)
    return observation.get


# --- continuously -----------------------------------------------------------------------------------------------------


class SweepQuery(AbstractContextManager["SweepQuery"]):
    """A continuous sweep. As a context manager, it stops at the end, after the messages in progress."""

    def __init__(self, query: StreamingQuery, stop_file: Path, residency: float) -> None:
        self.query = query
        self._stop_file, self._residency = stop_file, residency

    def __exit__(self, *_error: object) -> None:
        self.stop()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the end of the sweep. Return whether it has ended.

        Raises:
            PipelineError: the sweep has failed. Nothing is lost; start it again, and it continues.
        """
        wait_for_query(self.query, seconds)
        check_query(self.query, "the sweep")
        return not self.query.isActive

    @property
    def _last_batch(self) -> int:
        last = self.query.lastProgress
        return -1 if last is None else int(last["batchId"])

    def stop(self) -> None:
        """Let the dispatchers finish the messages in progress and write their ledger, then end the query.

        Executors that do not share the files of this machine end after their usual time, see :data:`RESIDENCY`.

        Raises:
            PipelineError: the sweep had failed before.
        """
        next_batch = self._last_batch + 1
        if self._stop_file.parent.is_dir():
            self._stop_file.touch()
        # The next micro-batch does nothing, because its tasks look for the stop file before they poll.
        wait_for_query(self.query, self._residency + _STOP_TIMEOUT_SECONDS, lambda: self._last_batch >= next_batch)
        self.query.stop()
        shutil.rmtree(self._stop_file.parent, ignore_errors=True)
        check_query(self.query, "the sweep")


def sweep_continuously(
    spark: SparkSession,
    spec: SweepSpec,
    *,
    checkpoint: str | Path,
    slots: int | None = None,
    ledger: str | Path | None = None,
    residency: timedelta = RESIDENCY,
) -> SweepQuery:
    """Dispatch messages as they fall due, until stopped: a streaming query whose tasks are resident dispatchers.

    Args:
        spark: a session in UTC.
        spec: store and queues.
        checkpoint: folder of the query. A query that is started again with it continues. Its loss costs only the order
            of the ledger's files, because the store knows what is due.
        slots: number of dispatchers that run at the same time; by default the number of Spark's cores. More slots than
            free cores would wait for each other.
        ledger: a folder of Parquet files, each line written once, for :func:`postdate.pipeline.audit.audit`.
        residency: see :data:`RESIDENCY`.

    Raises:
        StoreUnavailable, TransportUnavailable, StoreNotSetUp, ConfigurationError: raised before the query starts.
        PipelineError: ``slots`` is less than one, or ``residency`` is not above zero.
    """
    check_utc(spark)
    seconds = residency.total_seconds()
    if not (math.isfinite(seconds) and seconds > 0):
        raise PipelineError(f"residency must be above zero, not {residency}")
    n = _slot_count(spark, slots)
    check_sweep(spec)
    job = {"job": "sweep", "store": spec.store.redacted_address, "endpoint": spec.store.endpoint, "slots": n}
    bind_checkpoint(spark, str(checkpoint), job)
    stop_file = Path(tempfile.mkdtemp(prefix="postdate-sweep-")) / "stop"
    # Spark's rate source makes a row for each slot in each micro-batch. The next micro-batch begins when the last one
    # ends.
    ticks = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", n).option("numPartitions", n).load()
    lines = ticks.select("value").mapInArrow(partial(sweep_slots, spec, seconds, stop_file), _LINES_SCHEMA)
    writer = lines.writeStream.option("checkpointLocation", str(checkpoint)).queryName(f"sweep-{uuid.uuid4().hex[:8]}")
    sink = writer.format("noop") if ledger is None else writer.format("parquet").option("path", str(ledger))
    # The checkpoint is written in the fastest way, because its loss costs nothing.
    with set_temporarily(_QUICK_CHECKPOINTS, lambda name: spark.conf.get(name, None), spark.conf.set, spark.conf.unset):
        return SweepQuery(sink.start(), stop_file, seconds)


# --- whose checkpoint it is: Spark notices a wrong one late, or never -------------------------------------------------


_MARK = "postdate"
_QUERY_METADATA = "metadata"


def bind_checkpoint(spark: SparkSession, checkpoint: str, job: Mapping[str, str | int]) -> None:
    """Note in a checkpoint which job it belongs to. Raise PipelineError if it belongs to another job.

    ``job`` has the values that must be equal at every start of the query with this checkpoint. It contains no secrets.
    """
    path = f"{checkpoint}/{_MARK}"
    text = _read_text(spark, path)
    if text is not None:
        other_job: dict[str, str | int] = json.loads(text)
        differences = [
            f"{key} {other_job.get(key)!r}, not {value!r}" for key, value in job.items() if other_job.get(key) != value
        ]
        if differences:
            raise PipelineError(
                f"the checkpoint {checkpoint} is that of another job: {', '.join(differences)}; name another folder, "
                f"or start the job as it was"
            )
        return
    if _read_text(spark, f"{checkpoint}/{_QUERY_METADATA}") is not None:
        raise PipelineError(f"the checkpoint {checkpoint} is that of another query; name another folder")
    spark.createDataFrame([(json.dumps(dict(job)),)], "value string").coalesce(1).write.mode("overwrite").text(path)


def _read_text(spark: SparkSession, path: str) -> str | None:
    """Return the first line of a file or folder; ``None`` when there is none."""
    try:
        rows = spark.read.text(path).take(1)
    except AnalysisException:
        return None
    return rows[0]["value"] if rows else None

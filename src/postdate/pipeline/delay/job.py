"""Delays rows between two directories of files. Runs on the driver."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from postdate.errors import PipelineError
from postdate.pipeline.delay.operator import DelayOptions, delay
from postdate.pipeline.failures import told_in_one_line

_WRITTEN = ("json", "parquet")


@dataclass(frozen=True, slots=True)
class DelayTarget:
    """Where due rows go.

    Args:
        path: of a directory, of this query alone. Read it with Spark: only files named by its commit log count, and a
            killed micro-batch may leave others.
        checkpoint: of a directory, of this query alone; the rows wait there. Both may be on any file system of Spark.
        format: ``json`` or ``parquet``.
        trigger: how often a micro-batch begins; above zero.

    Raises:
        PipelineError: a value is out of its bounds.
    """

    path: str
    checkpoint: str
    format: str = "parquet"
    trigger: timedelta = timedelta(milliseconds=500)

    def __post_init__(self) -> None:
        if self.format not in _WRITTEN:
            raise PipelineError(f"due rows are written as {' or '.join(_WRITTEN)}, not {self.format!r}")
        if self.trigger < timedelta(milliseconds=1):
            raise PipelineError(f"a trigger of {self.trigger} is too short; a micro-batch takes some 100 ms at least")


def run_delay(
    source: DataFrame,
    target: DelayTarget,
    due: str = "due",
    id: str | None = None,  # noqa: A002 - the word for it
    cancel: DataFrame | None = None,
    options: DelayOptions | None = None,
) -> StreamingQuery:
    """Start a query that writes rows to files when they are due, and return it; it runs until it is stopped or fails.

    To stop it gracefully call ``stop()``; it may as well be killed. Started again with the same target it goes on.

    ``source`` is a stream, for example from :func:`postdate.pipeline.files.read_directory`; ``target`` is where the
    rows go, and where they wait. For the other arguments see :func:`postdate.pipeline.delay.delay`.

    Raises:
        PipelineError: the arguments do not fit together; nothing was started.
    """
    rows = delay(source, due, id, cancel, options)
    go_on(source.sparkSession, target.checkpoint)
    every = f"{target.trigger // timedelta(milliseconds=1)} milliseconds"
    writer = rows.writeStream.outputMode("append").trigger(processingTime=every).format(target.format)
    with told_in_one_line(f"cannot delay rows into {target.path!r}"):
        return writer.option("checkpointLocation", target.checkpoint).start(target.path)


def go_on(spark: SparkSession, checkpoint: str) -> None:
    """Let rows in a checkpoint go on as soon as their query starts again, without waiting for new input.

    Call it before each start of a query of your own with :func:`postdate.pipeline.delay.delay`; :func:`run_delay` does.

    Spark runs a micro-batch without new input only if its last one asks for that. A query that starts again
    after a stop between two micro-batches has no last one yet, and rows would wait until the source has something new.
    So the last micro-batch is repeated, as after a kill just before its commit: files get its rows once, by
    the batch id; a ``foreachBatch`` of your own sees its id again.

    Args:
        spark: the session that will start the query, which is not running.
        checkpoint: its directory, or where it will be.

    Raises:
        PipelineError: the directory cannot be read or written; nothing was changed.
    """
    bridge: Any = spark.sparkContext  # to Java, which alone knows the file systems of Spark
    hadoop = bridge._jvm.org.apache.hadoop.fs  # noqa: SLF001
    with told_in_one_line(f"cannot go on with the checkpoint {checkpoint!r}"):
        root = hadoop.Path(checkpoint)
        files = root.getFileSystem(bridge._jsc.hadoopConfiguration())  # noqa: SLF001

        def last(log: str) -> int:
            folder = hadoop.Path(root, log)
            names = [str(each.getPath().getName()) for each in files.listStatus(folder)] if files.exists(folder) else []
            return max((int(name) for name in names if name.isdecimal()), default=-1)

        batch = last("commits")
        if batch >= 0 and batch == last("offsets"):
            files.delete(hadoop.Path(root, f"commits/{batch}"), False)

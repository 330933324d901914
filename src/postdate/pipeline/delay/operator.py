"""The delay operator: checks on the driver before a query starts, the plan for Spark, and a job between folders."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from typing import Any

import pyarrow as pa
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark program uses
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import (
    BinaryType,
    ByteType,
    DataType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    TimestampType,
)

from postdate.errors import PipelineError
from postdate.pipeline.delay.packing import PACKED, SLOT, PackOptions, Wheel, pack_cancels, pack_rows, unpack_rows
from postdate.pipeline.delay.processor import EMITTED, DelayProcessor
from postdate.pipeline.delay.slot import CancelOptions
from postdate.pipeline.delay.waiting import check_waiting
from postdate.pipeline.failures import shorten_errors
from postdate.pipeline.outputs import hadoop_files
from postdate.pipeline.rows import TIME_FORMATS, quote_name
from postdate.pipeline.session import check_utc, is_connect

_PROVIDER = "spark.sql.streaming.stateStore.providerClass"
_ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
_NULL_DUE = ("fail", "now", "drop")
_ID_TYPES = (StringType, ByteType, ShortType, IntegerType, LongType, BinaryType)
_MOST_SLOTS = 10_000


def delay_conf() -> dict[str, str]:
    """Return the settings that a session needs for :func:`delay`; pass them to ``spark_session(conf=…)``.

    They may also be set while the session runs, before the query starts: ``spark.conf.set(name, value)``.
    """
    return {
        _PROVIDER: _ROCKSDB,
        # With this setting, a micro-batch uploads only its changes, instead of files of the whole state.
        "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    }


@dataclass(frozen=True, slots=True)
class DelayOptions:
    """How rows wait. ``resolution`` and ``slots`` must stay the same as long as rows wait in a checkpoint.

    Args:
        resolution: a row is released at the first multiple of it at or after its due time; 10 ms to 60 s, whole
            milliseconds. A finer resolution costs more timers; below the duration of a micro-batch it gains nothing.
        slots: number of keys of Spark's state over which the rows are spread; at least the number of cores that work on
            them. ``spark.sql.shuffle.partitions`` by default.
        null_due: what to do with rows whose due time is null: ``fail`` (the query fails and says how many there are),
            ``now`` (they are released at once) or ``drop``.
        keep_cancels: a row that arrives within this time after a cancel is still cancelled.

    Raises:
        PipelineError: a value is out of its bounds.
    """

    resolution: timedelta = timedelta(milliseconds=250)
    slots: int | None = None
    null_due: str = "fail"
    keep_cancels: timedelta = timedelta(hours=1)

    def __post_init__(self) -> None:
        if self.resolution % timedelta(milliseconds=1):
            raise PipelineError(f"a resolution of {self.resolution} is not a whole number of milliseconds")
        Wheel(self.resolution_ms)
        if self.slots is not None and not 1 <= self.slots <= _MOST_SLOTS:
            raise PipelineError(f"slots={self.slots} is out of bounds; choose 1 to {_MOST_SLOTS}")
        if self.null_due not in _NULL_DUE:
            raise PipelineError(f"null_due={self.null_due!r} is unknown; choose one of {', '.join(_NULL_DUE)}")
        if self.keep_cancels < timedelta(0):
            raise PipelineError(f"keep_cancels={self.keep_cancels} is below zero")

    @property
    def resolution_ms(self) -> int:
        return self.resolution // timedelta(milliseconds=1)


def delay(
    df: DataFrame,
    due: str = "due",
    id: str | None = None,  # noqa: A002 - the word for it
    cancel: DataFrame | None = None,
    options: DelayOptions | None = None,
    checkpoint: str | None = None,
) -> DataFrame:
    """Return the rows of a stream when they are due: never early, each once, unchanged, in no particular order.

    Rows wait in Spark's state store, so they survive everything that the checkpoint survives. They leave the state in
    the micro-batch that releases them. With a transactional sink, such as Spark's files, each row is written exactly
    once, even if the driver is killed. The clock is the driver's. Use the output mode ``append`` and a trigger between
    some 100 ms and some seconds: a row is late by up to the resolution, the rest of the trigger interval and the time
    of a micro-batch.

    This runs on the driver; the rows are packed, kept and unpacked on executors.

    Args:
        df: a streaming data frame with any columns that Arrow supports.
        due: the column with the due time, a timestamp (with zone); rows that are due already are released at once.
        id: the column that ``cancel`` refers to: text, a whole number or binary. It is needed only with ``cancel``.
        cancel: a streaming data frame with a column of the same name and type as ``id``. An id removes all rows with
            this id that wait when it arrives, or that arrive within ``keep_cancels`` after it. It has no effect on
            released rows. If a row and its cancel are in one micro-batch, the row is cancelled. Null cancels nothing.
        options: see :class:`DelayOptions`.
        checkpoint: the checkpoint directory of the query, which need not exist yet. If rows wait in it that this query
            could not release, this call refuses, instead of the first micro-batch.

    Returns:
        A streaming data frame with exactly the columns of ``df``, without watermarks.

    Raises:
        PipelineError: the frames, the options or the settings of the session do not allow it. A query fails with it
            later if a due time is null, or if its checkpoint was written with other options.
    """
    options = options or DelayOptions()
    spark = df.sparkSession
    _check_session(spark)
    _check_rows(df, due)
    _check_cancels(df, id, cancel)
    slots = _slot_keys(spark, options.slots or int(spark.conf.get("spark.sql.shuffle.partitions") or 1))
    packing = PackOptions(
        wheel=Wheel(options.resolution_ms),
        schema=_arrow_schema(df),
        due=due,
        slots=slots,
        null_due=options.null_due,
        has_cancels=cancel is not None,
    )
    if cancel is None or id is None:
        cancel_options = None
        packed = df.mapInArrow(partial(pack_rows, packing), PACKED)
    else:
        cancel_options = CancelOptions(id, options.keep_cancels // timedelta(milliseconds=1))
        number = F.pmod(F.xxhash64(quote_name(id)), F.lit(len(slots))).cast("int").alias(SLOT)
        packed = df.select("*", number).mapInArrow(partial(pack_rows, packing), PACKED)
        packed = packed.union(cancel.select(quote_name(id), number).mapInArrow(partial(pack_cancels, slots), PACKED))
    parameters = {
        "cancel": cancel_options is not None,
        "columns": df.schema.simpleString(),
        "due": due,
        "id": id,
        "resolution_ms": options.resolution_ms,
        "slots": len(slots),
    }
    if checkpoint is not None:
        query = {name: value for name, value in parameters.items() if name != "columns"}
        check_waiting(spark, checkpoint, query, packing.schema, cancel_options and cancel_options.keep_ms)
    return (
        packed.groupBy("slot")
        .transformWithStateInPandas(
            DelayProcessor(packing, parameters, cancel_options), EMITTED, "Append", "ProcessingTime"
        )
        .mapInArrow(partial(unpack_rows, packing), df.schema)
    )


def _check_session(spark: SparkSession) -> None:
    check_utc(spark)
    provider = spark.conf.get(_PROVIDER)
    if provider != _ROCKSDB:
        raise PipelineError(
            f"rows wait in RocksDB, but {_PROVIDER} is {provider}; set it to {_ROCKSDB}, "
            f"or start the session with spark_session(conf=delay_conf())"
        )
    if find_spec("google") is None or find_spec("google.protobuf") is None:
        raise PipelineError("Spark speaks to its state by protobuf, which is not installed: pip install protobuf")


def _check_rows(df: DataFrame, due: str) -> None:
    if not df.isStreaming:
        raise PipelineError("delay needs a streaming data frame (spark.readStream); for a table use pipeline schedule")
    if due not in df.columns:
        raise PipelineError(f"there is no column {due!r} to tell the due time; there are {', '.join(df.columns)}")
    repeated = {name for name in df.columns if df.columns.count(name) > 1}
    if repeated:
        raise PipelineError(f"the column {min(repeated)!r} is there more than once; rename one")
    kind = df.schema[due].dataType
    if not isinstance(kind, TimestampType):
        raise PipelineError(
            f"the due time {due!r} must be a timestamp, which knows its zone, not {kind.simpleString()}; "
            f"convert it, for example with to_timestamp"
        )


def _check_cancels(df: DataFrame, id_column: str | None, cancel: DataFrame | None) -> None:
    if cancel is None:
        return
    if id_column is None:
        raise PipelineError("cancel needs id: the column, in both streams, that says what is cancelled")
    if not cancel.isStreaming:
        raise PipelineError("cancel must be a streaming data frame, too (spark.readStream)")
    for frame, subject in ((df, "the rows have"), (cancel, "cancel has")):
        if id_column not in frame.columns:
            raise PipelineError(f"{subject} no column {id_column!r}; there are {', '.join(frame.columns)}")
    kinds: list[DataType] = [frame.schema[id_column].dataType for frame in (df, cancel)]
    if kinds[0] != kinds[1] or not isinstance(kinds[0], _ID_TYPES):
        type_names = " and ".join(kind.simpleString() for kind in kinds)
        raise PipelineError(
            f"{id_column!r} must be text, a whole number or binary, and the same in both streams; it is {type_names}"
        )


def _arrow_schema(df: DataFrame) -> pa.Schema:
    """Return the columns as executors see them. Raise PipelineError if Arrow does not support one."""
    large = df.sparkSession.conf.get("spark.sql.execution.arrow.useLargeVarTypes") == "true"
    try:
        return to_arrow_schema(df.schema, timezone="UTC", prefers_large_types=large)
    except PySparkException as error:
        raise PipelineError(f"a column cannot wait, because Arrow cannot carry it: {error}") from error


def _slot_keys(spark: SparkSession, count: int) -> tuple[int, ...]:
    """Return the keys of the slots: Spark hashes the ``n``-th key to the ``n``-th of ``count`` partitions.

    Keys ``0, 1, 2…`` would leave a third of the partitions empty. The keys depend on ``count`` alone, so they are the
    same whenever a query starts again.
    """
    key_count = count * (int(math.log(count)) + 2)
    keys: dict[int, int] = {}
    while len(keys) < count:
        key_count *= 2
        row: Any = spark.sql(
            f"SELECT transform(sequence(0, {key_count - 1}), k -> pmod(hash(k), {count})) AS partitions"
        ).first()
        keys = {}
        for key, partition in enumerate(row.partitions):
            keys.setdefault(partition, key)
    return tuple(keys[number] for number in range(count))


# --- between two directories of files ---------------------------------------------------------------------------------


_WRITTEN = ("json", "parquet")


@dataclass(frozen=True, slots=True)
class DelayTarget:
    """Where released rows are written.

    Args:
        path: a directory of this query alone. Read it with Spark: only files named by its commit log count, and a
            killed micro-batch may leave other files.
        checkpoint: a directory of this query alone, in which the rows wait. Both may be on any file system of Spark.
        format: ``json`` or ``parquet``.
        trigger: interval between the beginnings of micro-batches; above zero.

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
    """Start a query that writes rows to files when they are due. Return the query, which runs until it stops or fails.

    To stop it gracefully call ``stop()``; it may also be killed. If it is started again with the same target, it
    continues.

    ``source`` is a stream, for example from :func:`postdate.pipeline.files.read_directory`. ``target`` says where the
    rows wait and where they are written. For the other arguments see :func:`postdate.pipeline.delay.delay`.

    Raises:
        PipelineError: the arguments do not fit together; nothing was started.
    """
    rows = delay(source, due, id, cancel, options, target.checkpoint)
    reopen_last_batch(source.sparkSession, target.checkpoint)
    trigger_text = f"{target.trigger // timedelta(milliseconds=1)} milliseconds"
    writer = rows.writeStream.outputMode("append").trigger(processingTime=trigger_text).format(target.format)
    writer = writer.options(**TIME_FORMATS)
    with shorten_errors(f"cannot delay rows into {target.path!r}"):
        return writer.option("checkpointLocation", target.checkpoint).start(target.path)


def reopen_last_batch(spark: SparkSession, checkpoint: str) -> None:
    """Let rows in a checkpoint continue as soon as their query starts again, without waiting for new input.

    Call it before each start of your own query with :func:`postdate.pipeline.delay.delay`; :func:`run_delay` calls it.

    Spark runs a micro-batch without new input only if the last micro-batch asks for that. A query that starts again
    after a stop between two micro-batches has no last one yet, and rows would wait until the source has something new.
    So the last micro-batch is repeated, as after a kill just before its commit. Files get its rows once, by the batch
    id; your own ``foreachBatch`` sees its id again.

    Args:
        spark: the session that will start the query. The query must not be running.
        checkpoint: the checkpoint directory of the query, which need not exist yet.

    Raises:
        PipelineError: the directory cannot be read or written; nothing was changed. Or the session is one of Spark
            Connect, which cannot change files of a checkpoint, and rows may wait in it.
    """
    with shorten_errors(f"cannot go on with the checkpoint {checkpoint!r}"):
        if is_connect(spark):
            _check_new_checkpoint(spark, checkpoint)
            return
        hadoop, root, files = hadoop_files(spark, checkpoint)

        def last_number(log: str) -> int:
            folder = hadoop.Path(root, log)
            names = [str(each.getPath().getName()) for each in files.listStatus(folder)] if files.exists(folder) else []
            return max((int(name) for name in names if name.isdecimal()), default=-1)

        batch = last_number("commits")
        if batch >= 0 and batch == last_number("offsets"):
            files.delete(hadoop.Path(root, f"commits/{batch}"), False)


def _check_new_checkpoint(spark: SparkSession, checkpoint: str) -> None:
    """Raise PipelineError if a query has committed a micro-batch here, whose rows might wait for new input."""
    try:
        commits = spark.read.format("binaryFile").load(f"{checkpoint}/commits").select("path").take(1)
    except AnalysisException as error:
        if "PATH_NOT_FOUND" not in str(error):
            raise
        return
    if commits:
        raise PipelineError(
            f"the checkpoint {checkpoint} is not new, and a client of Spark Connect cannot let its rows go on by "
            f"themselves: start the query from a classic session"
        )

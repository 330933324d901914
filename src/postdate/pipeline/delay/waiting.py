"""Read what waits from the checkpoint of a query that delays rows, with Spark's reader for state. It changes nothing.

The query may run meanwhile: the result is the state after its last complete micro-batch.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# The stubs of Arrow make schemas and fields generic in a type that is known only at run time.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, Final, cast

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark program uses
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from postdate.errors import PipelineError
from postdate.pipeline.delay.layout import ARRIVED, Layout, QueryOptions, add_arrival, conform, split_package
from postdate.pipeline.delay.packing import from_content
from postdate.pipeline.failures import shorten_errors
from postdate.pipeline.frames import persist_frame
from postdate.pipeline.rows import Batches, quote_name

_NOTHING_COMMITTED: Final = frozenset({"STDS_COMMITTED_BATCH_UNAVAILABLE", "STDS_OFFSET_LOG_UNAVAILABLE"})
_DEFAULT_KEEP_MS: Final = 3_600_000
"""How long a cancel concerns later rows, if the state was written before that was kept in it."""

_MOST_GROUPS: Final = 50

_CANCELLED_ID: Final = "postdate_cancelled_id"
_LAST_ARRIVAL: Final = "postdate_last_arrival_ms"


@dataclass(frozen=True, slots=True)
class WaitingRows:
    """The rows that wait in a checkpoint.

    Args:
        rows: a data frame with the columns of the query, without rows that are cancelled.
        due: name of the column with the due time.
        id: name of the column that cancels refer to; ``None`` without cancels.
    """

    rows: DataFrame
    due: str
    id: str | None


def read_waiting(spark: SparkSession, checkpoint: str) -> WaitingRows:
    """Return the rows that wait in a checkpoint, for example to count them by due time or by a column.

    This runs on the driver; packages are read on executors when the frame is used.

    Args:
        spark: a session in UTC with the settings of :func:`postdate.pipeline.delay.delay_conf`.
        checkpoint: the checkpoint directory of a query with :func:`postdate.pipeline.delay.delay`.

    Raises:
        PipelineError: there is no such checkpoint, no micro-batch is complete in it, or it is of another query.
    """
    texts = read_layout_texts(spark, checkpoint)
    if not texts:
        raise PipelineError(f"nothing waits in {checkpoint!r}: no micro-batch with rows is complete in it")
    layouts = {text: Layout.from_text(text, partial(_parse_columns, spark)) for text in set(texts.values())}
    # A slot changes when it is used, so one slot may know more columns than another. The newest ones have all columns.
    newest = max(layouts.values(), key=lambda layout: len(layout.schemas))
    schema = newest.schemas[-1]
    slots = {slot: layouts[text] for slot, text in texts.items()}
    has_cancels = bool(newest.query["cancel"])
    with shorten_errors(f"cannot read what waits in {checkpoint!r}"):
        packages = _read_state(spark, checkpoint, "packages").select("key.slot", "user_map_value.content")
        rows = packages.mapInArrow(
            partial(_unpack_packages, slots, add_arrival(schema) if has_cancels else schema),
            from_arrow_schema(add_arrival(schema) if has_cancels else schema),
        )
        if has_cancels:
            keep_ms = _DEFAULT_KEEP_MS if newest.keep_cancels_ms is None else newest.keep_cancels_ms
            rows = _without_cancelled(rows, _read_cancels(spark, checkpoint, newest), newest.query["id"], keep_ms)
    return WaitingRows(rows.drop(ARRIVED), newest.query["due"], newest.query["id"])


@dataclass(frozen=True, slots=True)
class WaitingSummary:
    """Counts of the rows that wait, as texts and numbers.

    Args:
        total: ``rows``, ``overdue``, ``earliest`` and ``latest`` due time in UTC.
        groups: the same for each ``value`` of a column, the most frequent first; at most 50.
        rows: the rows that are due first, with all columns as texts.
    """

    total: Mapping[str, Any]
    groups: Sequence[Mapping[str, Any]]
    rows: Sequence[Mapping[str, Any]]


def summarize_waiting(waiting: WaitingRows, now: datetime, by: str | None = None, first: int = 0) -> WaitingSummary:
    """Count the rows that wait. This runs on the driver, and reads all of them.

    Args:
        waiting: from :func:`read_waiting`.
        now: decides which rows are overdue; aware.
        by: a column to count the rows by.
        first: number of rows to return that are due first.

    Raises:
        PipelineError: there is no such column, or the state cannot be read.
    """
    rows, due = waiting.rows, F.col(quote_name(waiting.due))
    if by is not None and by not in rows.columns:
        raise PipelineError(f"the rows that wait have no column {by!r}; they have {', '.join(rows.columns)}")
    counts = (
        F.count("*").alias("rows"),
        F.count_if(due <= F.lit(now)).alias("overdue"),
        F.min(due).cast("string").alias("earliest"),
        F.max(due).cast("string").alias("latest"),
    )
    groups, first_rows = list[dict[str, Any]](), list[dict[str, Any]]()
    with ExitStack() as stack, shorten_errors("cannot read what waits"):
        if by is not None or first:
            rows = persist_frame(stack, rows)
        total = rows.agg(*counts).collect()[0].asDict()
        if by is not None:
            counted = rows.groupBy(F.col(quote_name(by)).cast("string").alias("value")).agg(*counts)
            groups = [row.asDict() for row in counted.orderBy(F.desc("rows"), "value").limit(_MOST_GROUPS).collect()]
        if first:
            texts = [F.col(quote_name(name)).cast("string").alias(name) for name in rows.columns]
            first_rows = [row.asDict() for row in rows.orderBy(due).limit(first).select(*texts).collect()]
    return WaitingSummary(total, groups, first_rows)


def check_waiting(
    spark: SparkSession, checkpoint: str, query: QueryOptions, schema: pa.Schema, keep_cancels_ms: int | None
) -> None:
    """Raise PipelineError if a query with these options and columns cannot release the rows that wait."""
    for text in set(read_layout_texts(spark, checkpoint).values()):
        layout = Layout.from_text(text, partial(_parse_columns, spark))
        layout.continue_with(query, schema, keep_cancels_ms)


def read_layout_texts(spark: SparkSession, checkpoint: str) -> Mapping[int, str]:
    """Return the layout of each slot; empty if nothing was committed yet.

    Raises:
        PipelineError: the checkpoint cannot be read, or is of another query.
    """
    with shorten_errors(f"cannot read what waits in {checkpoint!r}"):
        try:  # A client of Spark Connect gets the error when the rows are collected.
            rows = _read_state(spark, checkpoint, "slot").select("key.slot", "value.options").collect()
        except PySparkException as error:
            if error.getCondition() in _NOTHING_COMMITTED:
                return {}
            raise
        return {row["slot"]: row["options"] for row in rows}


def _read_state(spark: SparkSession, checkpoint: str, name: str) -> DataFrame:
    return spark.read.format("statestore").option("path", checkpoint).option("stateVarName", name).load()


def _parse_columns(spark: SparkSession, text: str) -> pa.Schema:
    """Return the columns that the first format kept as a text."""
    parsed = spark.sql("SELECT from_json('{}', :columns) AS row", {"columns": text}).schema[0].dataType
    assert isinstance(parsed, StructType), "columns are a struct"
    return to_arrow_schema(parsed, timezone="UTC")


def _unpack_packages(slots: Mapping[int, Layout], schema: pa.Schema, batches: Batches) -> Batches:
    """Return the rows of packages; ``schema`` has all columns of all slots."""
    for batch in batches:
        packages = cast("list[bytes]", batch.column(1).to_pylist())
        for slot, package in zip(cast("list[int]", batch.column(0).to_pylist()), packages, strict=True):
            number, content = split_package(package)
            yield conform(from_content(content, slots[slot].stored_schema(number)), schema)


def _read_cancels(spark: SparkSession, checkpoint: str, layout: Layout) -> DataFrame:
    """Return cancelled ids, each with the latest time at which it was cancelled, in milliseconds."""
    id_type = layout.schemas[-1].field(layout.query["id"]).type
    chunk_schema = pa.schema([("id", id_type), ("cancelled_at_ms", pa.int64())])
    cancels = (
        _read_state(spark, checkpoint, "cancelled")
        .select("user_map_value.content")
        .mapInArrow(partial(_unpack_cancels, chunk_schema), from_arrow_schema(chunk_schema))
    )
    return cancels.groupBy(F.col("id").alias(_CANCELLED_ID)).agg(F.max("cancelled_at_ms").alias(_LAST_ARRIVAL))


def _unpack_cancels(schema: pa.Schema, batches: Batches) -> Batches:
    for batch in batches:
        for content in cast("list[bytes]", batch.column(0).to_pylist()):
            yield from_content(content, schema)


def _without_cancelled(rows: DataFrame, cancels: DataFrame, id_column: str, keep_ms: int) -> DataFrame:
    is_cancelled = (F.col(quote_name(id_column)) == F.col(_CANCELLED_ID)) & (
        F.col(ARRIVED) <= F.col(_LAST_ARRIVAL) + keep_ms
    )
    return rows.join(cancels, is_cancelled, "left_anti")

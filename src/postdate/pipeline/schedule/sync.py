"""Make a load equal to the table: the comparison on the driver, and the changes on executors."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# The stubs of Arrow make arrays generic in a type that is known only at run time.

from __future__ import annotations

from contextlib import ExitStack
from datetime import datetime
from functools import partial
from typing import Any, cast

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark program uses

from postdate.pipeline import rows as pipeline_rows
from postdate.pipeline import syncing
from postdate.pipeline.files import ORIGIN_FIELD
from postdate.pipeline.frames import persist_frame
from postdate.pipeline.loads import cancel_frame, read_pending_of_load
from postdate.pipeline.schedule import storing
from postdate.pipeline.schedule.job import ScheduleJob
from postdate.pipeline.schedule.preparing import check_same_number
from postdate.pipeline.schedule.result import SYNC_COUNTS, SyncResult
from postdate.pipeline.stores import StoreSpec, open_in_task

_CHECKED_ARROW = pa.unify_schemas([pipeline_rows.MESSAGE_COLUMNS, syncing.SIGNATURE])
_SYNC_ARROW = pa.unify_schemas([storing.OUTCOME_COLUMNS, pa.schema([(name, pa.int64()) for name in SYNC_COUNTS])])
_SYNC_SCHEMA = pipeline_rows.spark_schema(_SYNC_ARROW)


def check_rows(rows: DataFrame, limit: int, load: str | None) -> DataFrame:
    """Return each row either as ``rejected``, an outcome, or as ``message``, with the columns of a message to store.

    A message also has its signature and its origin.
    """
    rejected = f"struct<{_in_struct(storing.OUTCOME_COLUMNS)}>"
    message = f"struct<{_in_struct(_CHECKED_ARROW)}, origin: {ORIGIN_FIELD.dataType.simpleString()}>"
    return rows.mapInArrow(partial(_check_batches, limit, load), f"rejected {rejected}, message {message}")


def _in_struct(schema: pa.Schema) -> str:
    return ", ".join(f"{name}: {spark_type}" for name, spark_type in pipeline_rows.spark_types(schema).items())


def _check_batches(limit: int, load: str | None, batches: pipeline_rows.Batches) -> pipeline_rows.Batches:
    rejected_type = pa.struct(cast("Any", list(storing.OUTCOME_COLUMNS)))
    for batch in batches:
        good, messages, bad_rows, rejected = storing.split_batch(batch, limit, load)
        rejected_rows = pa.array([*rejected, *storing.refused_rows(good, bad_rows)], rejected_type)
        origins = _take_origins(good, messages)
        message_type = pa.struct(cast("Any", [*_CHECKED_ARROW, pa.field("origin", origins.type)]))
        columns = cast("list[Any]", [*messages.columns, *syncing.signature_columns(messages), origins])
        checked = pa.StructArray.from_arrays(columns, fields=list(message_type))
        names = ["rejected", "message"]
        yield pa.RecordBatch.from_arrays([rejected_rows, pa.nulls(len(rejected_rows), message_type)], names)
        yield pa.RecordBatch.from_arrays([pa.nulls(len(checked), rejected_type), checked], names)


def _take_origins(good: pa.RecordBatch, messages: pa.RecordBatch) -> Any:
    """Return the origins of messages that :func:`storing.split_batch` has put into another order.

    Equal rows have the first one.
    """
    origins = cast("Any", good.column("origin"))
    if origins.null_count == len(origins):
        return cast("Any", pa.nulls(messages.num_rows, origins.type))
    places = pipeline_rows.pc.index_in(messages.column("message_id"), value_set=good.column("message_id"))
    return origins.take(places)


def sync_load(
    stack: ExitStack, checked: DataFrame, read: int, job: ScheduleJob, *, is_set_up: bool, may_repeat: bool
) -> tuple[DataFrame, SyncResult]:
    """Return the frame that changes the store when it is computed, and the number of messages that it retains.

    All comparisons end before the first change. A run that was killed is repeated from the beginning, and its
    comparison finds only what is not done yet.
    """
    assert job.load is not None
    spark, ids = checked.sparkSession, F.col("message.message_id")
    distinct = F.count_distinct(ids) if may_repeat else F.count(ids)
    totals = checked.agg(
        F.count("rejected").alias("rejected"), F.count("message").alias("messages"), distinct.alias("ids")
    ).collect()[0]
    check_same_number(read, totals["rejected"] + totals["messages"], "nothing was changed")
    messages = checked.where("message IS NOT NULL").select("message.*")
    if may_repeat:  # Rows with one id are equal here: those with different content are rejected.
        messages = messages.dropDuplicates(["message_id"])
    plan = persist_frame(
        stack,
        syncing.plan_changes(
            messages.select("message_id", *syncing.SIGNATURE.names),
            _read_waiting(stack, spark, job, is_set_up=is_set_up),
        ).where(F.col("action") != syncing.UNCHANGED),
    )
    planned = {row["action"]: row["count"] for row in plan.groupBy("action").count().collect()}
    removed_count = planned.get(syncing.REMOVED, 0)

    planned_rows = plan.where(F.col("action") == syncing.CHANGED).select("message_id", "was_waiting")
    changing = partial(_change_all, job.store if is_set_up else None, job.now, job.batch, dry_run=job.dry_run)
    outcomes = messages.join(planned_rows, "message_id").mapInArrow(changing, _SYNC_SCHEMA)
    counts = {
        "outcome": storing.COUNTS,
        "stored": 0,
        "already_there": totals["messages"] - totals["ids"],
        "unchanged": totals["ids"] - planned.get(syncing.CHANGED, 0),
    }
    outcomes = outcomes.union(spark.createDataFrame(pa.Table.from_pylist([counts], schema=_SYNC_ARROW), _SYNC_SCHEMA))
    if totals["rejected"]:
        rejected = checked.where("rejected IS NOT NULL").select("rejected.*")
        return outcomes.unionByName(rejected, allowMissingColumns=True), SyncResult(retained=removed_count)
    if removed_count:
        removed = plan.where(F.col("action") == syncing.REMOVED)
        outcomes = outcomes.unionByName(_cancel(removed, job), allowMissingColumns=True)
    return outcomes, SyncResult()


def _read_waiting(stack: ExitStack, spark: SparkSession, job: ScheduleJob, *, is_set_up: bool) -> DataFrame:
    """Return what waits under the load of a job, each message once."""
    if not is_set_up:
        return spark.createDataFrame([], pipeline_rows.spark_schema(syncing.WAITING))
    assert job.load is not None
    columns, convert = pipeline_rows.MESSAGE_COLUMNS.names, partial(syncing.waiting_of_load, job.load)
    waiting = read_pending_of_load(stack, spark, job.store, columns, convert, syncing.WAITING)
    # A message that is rescheduled meanwhile may be read twice where the store has no snapshots.
    return waiting.dropDuplicates(["message_id"])


def _cancel(removed: DataFrame, job: ScheduleJob) -> DataFrame:
    """Return outcomes of cancelling the messages that are not in the table."""
    if job.dry_run:
        count = F.count("*").alias("cancelled")
        counts = removed.agg(count).select(F.lit(storing.COUNTS).alias("outcome"), "cancelled")
        due = F.date_format(F.timestamp_micros("due_at"), "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX").alias("due")
        texts = [
            F.lit(storing.SAMPLE).alias("outcome"),
            F.lit("cancelled").alias("reason"),
            "message_id",
            "destination",
            due,
        ]
        sample = removed.orderBy("message_id").limit(storing.SAMPLE_ROWS).select(*texts)
        return counts.unionByName(sample, allowMissingColumns=True)
    cancelled = cancel_frame(removed.select("message_id"), job.store, job.now)
    return cancelled.select(
        F.lit(storing.COUNTS).alias("outcome"), "cancelled", F.col("delivered").alias("not_cancelled")
    )


def _change_all(
    spec: StoreSpec | None,
    now: datetime,
    batch_size: int | None,
    batches: pipeline_rows.Batches,
    *,
    dry_run: bool,
) -> pipeline_rows.Batches:
    """Store or change the messages of a task. ``spec``: ``None`` for an empty store, only in a dry run."""
    with ExitStack() as stack:
        store = None if spec is None else stack.enter_context(open_in_task(spec))
        samples: dict[str | None, int] = dict.fromkeys(
            (None, syncing.RESCHEDULED, syncing.REPLACED), storing.SAMPLE_ROWS if dry_run else 0
        )
        for batch in batches:
            rows_at_once = batch_size or (batch.num_rows if store is None else store.rows_at_once)
            for start in range(0, batch.num_rows, max(rows_at_once, 1)):
                rows = batch.slice(start, rows_at_once)
                messages = rows.select(pipeline_rows.MESSAGE_COLUMNS.names)
                was_waiting = cast("list[bool]", rows.column("was_waiting").to_pylist())
                changes = syncing.change_messages(store, messages, was_waiting, now, dry_run=dry_run)
                positions: dict[str | None, list[int]] = {
                    None: changes.stored,
                    syncing.RESCHEDULED: changes.rescheduled,
                    syncing.REPLACED: changes.replaced,
                }
                counts = {name: len(getattr(changes, name)) for name in SYNC_COUNTS[:4]}
                counts |= {"stored": len(changes.stored), "already_there": len(changes.already_there)}
                outcomes: list[dict[str, Any]] = [{"outcome": storing.COUNTS, **counts}]
                for reason, places in positions.items():
                    shown = messages.take(pa.array(places[: samples[reason]], pa.int64()))
                    samples[reason] -= shown.num_rows
                    texts = pipeline_rows.texts_of(shown)
                    outcomes += [{"outcome": storing.SAMPLE, "reason": reason, **each} for each in texts]
                outcomes += [
                    storing.row_of(rows, position, storing.CONFLICTING, storing.CONFLICTS_WITH_STORE, detail)
                    for position, detail in changes.conflicts.items()
                ]
                yield pa.RecordBatch.from_pylist(outcomes, schema=_SYNC_ARROW)

"""Loads: the pending messages that one or several tables were scheduled as, under one name.

The name is a header of each message (``Postdate.Load``), so a load needs no table of its own, and ends with its last
message. Only messages that an application scheduled belong to a load: a retry of a failed handler is another message.
Source: ADR 0064.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# The stubs of Arrow make arrays generic in a type that is known only at run time.

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any, Final, TypeVar, cast

import anyio
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark program uses

from postdate.clock import from_microseconds
from postdate.core import changes
from postdate.errors import PipelineError
from postdate.messages import Headers, decode_headers
from postdate.pipeline.failures import shorten_errors
from postdate.pipeline.frames import open_snapshot, part_frame, persist_frame, read_part, scan_parts
from postdate.pipeline.load_names import check_load, load_of
from postdate.pipeline.plain import to_plain
from postdate.pipeline.rows import INSTANT, MESSAGE_COLUMNS, Batches, pc, spark_schema
from postdate.pipeline.session import check_utc, count_slots
from postdate.pipeline.stores import OpenStore, StoreSpec, open_in_task, open_spec
from postdate.ports import AdministrableStore, Answer, Scan, ScanPart

T = TypeVar("T")

_HEADER_TEXT: Final = f'"{Headers.LOAD}":'
"""How the header begins in encoded headers. Quotes inside a text have a backslash, so other texts seldom match."""

_LINES: Final = pa.schema(
    [("load", pa.string()), ("message_id", pa.string()), ("destination", pa.string()), ("due", INSTANT)]
)
_CANCELLED: Final = pa.schema([("cancelled", pa.int64()), ("delivered", pa.int64())])
_CALLS_AT_ONCE: Final = 16
_CALLS_BETWEEN_OUTAGES: Final = 500
"""Calls that are repeated together when one of them meets an outage. A repeated call changes nothing more."""
_SHOWN_DESTINATIONS, _SHOWN_GROUPS, _SHOWN_MESSAGES = 20, 1_000, 10


# --- results ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoadLine:
    """One load in a list.

    Args:
        load: name of the load.
        messages: number of its pending messages.
        first_due: earliest due time, UTC.
        last_due: latest due time, UTC.
        destinations: number of destinations.
        largest_destinations: number of messages by destination: the 20 with most messages.
    """

    load: str
    messages: int
    first_due: datetime
    last_due: datetime
    destinations: int
    largest_destinations: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class LoadList:
    """The loads of a store that have pending messages, by name."""

    store: str
    loads: tuple[LoadLine, ...]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return to_plain(self)


@dataclass(frozen=True, slots=True)
class LoadGroup:
    """Pending messages of one load that are for one destination and due on one day.

    ``day`` is a day in UTC, ISO 8601.
    """

    destination: str
    day: str
    messages: int


@dataclass(frozen=True, slots=True)
class LoadDetails:
    """The pending messages of one load.

    Args:
        store: address of the store, without password.
        load: name, counts, first and last due time, and destinations.
        groups: counts by destination and day, the earliest days first; at most 1,000 groups.
        more_groups: number of groups that are not in ``groups``.
        sample: the ten messages that are due first: ``message_id``, ``due`` (UTC) and ``destination``.
        seconds: duration.
    """

    store: str
    load: LoadLine
    groups: tuple[LoadGroup, ...]
    more_groups: int
    sample: tuple[Mapping[str, Any], ...]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return to_plain(self)


@dataclass(frozen=True, slots=True)
class UndoResult:
    """Result of cancelling a load.

    Args:
        store: address of the store, without password.
        load: name of the load.
        waiting: number of messages that were pending under the load at the start.
        cancelled: messages that are cancelled now; of a dry run, messages that would be.
        delivered: messages that a service delivered meanwhile, or is delivering. They are not cancelled.
        seconds: duration.
        is_dry_run: nothing was cancelled.
        sample: of a dry run, up to ten messages that would be cancelled.
    """

    store: str
    load: str
    waiting: int
    cancelled: int
    delivered: int
    seconds: float
    is_dry_run: bool = False
    sample: tuple[Mapping[str, Any], ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        return to_plain(self)


# --- jobs: on the driver ----------------------------------------------------------------------------------------------


@shorten_errors("the loads cannot be listed")
def list_loads(spark: SparkSession, spec: StoreSpec, *, partitions: int | None = None) -> LoadList:
    """Return every load that has pending messages.

    This runs on the driver; the rows are read on the executors. Nothing is changed.

    Args:
        spark: a session in UTC, classic or of Spark Connect.
        spec: the store.
        partitions: tasks that read the store; by default as many as run at the same time.

    Raises:
        PipelineError: the store cannot be read in bulk.
        StoreError: the store does not answer, or is not set up.
    """
    started = time.perf_counter()
    with ExitStack() as stack:
        lines = _read_lines(stack, spark, spec, None, partitions)
        loads = tuple(_summarize_loads(lines))
    return LoadList(spec.redacted_address, loads, time.perf_counter() - started)


@shorten_errors("the load cannot be shown")
def show_load(spark: SparkSession, spec: StoreSpec, load: str, *, partitions: int | None = None) -> LoadDetails:
    """Return what is pending under one load: counts by destination and day, and the messages that are due first.

    For arguments and errors see :func:`list_loads`.

    Raises:
        PipelineError: no message is pending under this name.
    """
    check_load(load)
    started = time.perf_counter()
    with ExitStack() as stack:
        lines = _read_lines(stack, spark, spec, load, partitions)
        summaries = _summarize_loads(lines)
        if not summaries:
            raise PipelineError(f"no message waits under the load {load!r}: see `postdate pipeline loads list`")
        by_day = lines.groupBy("destination", F.date_format("due", "yyyy-MM-dd").alias("day")).agg(
            F.count_distinct("message_id").alias("messages")
        )
        by_day = persist_frame(stack, by_day)
        rows = by_day.orderBy("day", "destination").limit(_SHOWN_GROUPS).collect()
        groups = tuple(LoadGroup(row["destination"], row["day"], row["messages"]) for row in rows)
        return LoadDetails(
            spec.redacted_address,
            summaries[0],
            groups,
            by_day.count() - len(groups),
            _sample(lines),
            time.perf_counter() - started,
        )


@shorten_errors("the load cannot be undone")
def undo_load(
    spark: SparkSession,
    spec: StoreSpec,
    load: str,
    now: datetime,
    *,
    partitions: int | None = None,
    dry_run: bool = False,
) -> UndoResult:
    """Cancel every message that is pending under a load.

    This runs on the driver; the messages are cancelled on the executors. Run it again after a failure: messages that
    are cancelled already are not counted again. Messages of other loads are not touched.

    Args:
        spark: a session in UTC, classic or of Spark Connect.
        spec: the store.
        load: name of the load.
        now: recorded as the time of cancelling; aware.
        partitions: tasks that work at the same time; by default as many as Spark runs.
        dry_run: count and show the messages, and cancel nothing.

    Raises:
        PipelineError: the store cannot be read in bulk, or its messages cannot be cancelled; nothing was done. Or a
            task failed; messages that were cancelled by then stay cancelled.
        StoreError: the store does not answer, or is not set up.
    """
    check_load(load)
    started = time.perf_counter()
    with open_spec(spec) as store:
        require_administrable(store)
    with ExitStack() as stack:
        lines = _read_lines(stack, spark, spec, load, partitions).dropDuplicates(["message_id"])
        lines = persist_frame(stack, lines)
        waiting, cancelled, delivered = lines.count(), 0, 0
        if dry_run:
            cancelled, sample = waiting, _sample(lines)
        else:
            sample = ()
            counts = cancel_frame(lines.select("message_id"), spec, now).agg(
                F.sum("cancelled").alias("cancelled"), F.sum("delivered").alias("delivered")
            )
            row = counts.collect()[0]
            cancelled, delivered = row["cancelled"] or 0, row["delivered"] or 0
    return UndoResult(
        spec.redacted_address,
        load,
        waiting,
        cancelled,
        delivered,
        time.perf_counter() - started,
        is_dry_run=dry_run,
        sample=sample,
    )


def _summarize_loads(lines: DataFrame) -> list[LoadLine]:
    by_destination = lines.groupBy("load", "destination").agg(
        # A message that is rescheduled meanwhile may be read twice where the store has no snapshots.
        F.count_distinct("message_id").alias("messages"),
        F.min("due").alias("first_due"),
        F.max("due").alias("last_due"),
    )
    largest = F.sort_array(F.collect_list(F.struct((-F.col("messages")).alias("order"), "destination")))
    rows = by_destination.groupBy("load").agg(
        F.sum("messages").alias("messages"),
        F.min(F.unix_micros("first_due")).alias("first_due"),
        F.max(F.unix_micros("last_due")).alias("last_due"),
        F.count("*").alias("destinations"),
        F.slice(largest, 1, _SHOWN_DESTINATIONS).alias("largest"),
    )
    return [
        LoadLine(
            row["load"],
            row["messages"],
            from_microseconds(row["first_due"]),
            from_microseconds(row["last_due"]),
            row["destinations"],
            {each["destination"]: -each["order"] for each in row["largest"]},
        )
        for row in rows.orderBy("load").collect()
    ]


def _sample(lines: DataFrame) -> tuple[Mapping[str, Any], ...]:
    rows = lines.orderBy("due", "message_id").limit(_SHOWN_MESSAGES)
    texts = rows.select("message_id", F.unix_micros("due").alias("due"), "destination").collect()
    return tuple(
        {
            "message_id": row["message_id"],
            "due": from_microseconds(row["due"]).isoformat(),
            "destination": row["destination"],
        }
        for row in texts
    )


# --- reading ----------------------------------------------------------------------------------------------------------


def _read_lines(
    stack: ExitStack, spark: SparkSession, spec: StoreSpec, load: str | None, partitions: int | None
) -> DataFrame:
    """Return a line for each pending message of one load, or of all; kept until the stack is closed."""
    check_utc(spark)
    columns = ("message_id", "destination", "due", "headers")
    return read_pending_of_load(stack, spark, spec, columns, partial(_lines_of, load), _LINES, partitions)


def _lines_of(load: str | None, batch: pa.RecordBatch) -> pa.RecordBatch:
    batch, loads = select_load(batch, load)
    columns = [pa.array(loads, pa.string()), *(batch.column(name) for name in ("message_id", "destination", "due"))]
    return pa.record_batch(columns, schema=_LINES)


def read_pending_of_load(  # noqa: PLR0913 - what to read, and how
    stack: ExitStack,
    spark: SparkSession,
    spec: StoreSpec,
    columns: Sequence[str],
    convert: Callable[[pa.RecordBatch], pa.RecordBatch],
    schema: pa.Schema,
    partitions: int | None = None,
) -> DataFrame:
    """Read the pending messages of a store now, on the executors; kept until the stack is closed.

    Rows are converted where they are read, so that bodies and messages of other loads never reach Spark.

    Args:
        stack: keeps the frame.
        spark: a session in UTC.
        spec: the store.
        columns: of :data:`postdate.pipeline.rows.MESSAGE_COLUMNS`, to read.
        convert: called on executors for each batch; returns the rows to keep, with the columns of ``schema``.
        schema: of the frame.
        partitions: tasks that read the store; by default as many as run at the same time.
    """
    scanned = pa.schema([MESSAGE_COLUMNS.field(name) for name in columns])
    with open_snapshot(spec) as snapshot:
        scan = Scan("pending", tuple(columns), snapshot=snapshot)

        def read_all(batches: Batches) -> Batches:
            for batch in batches:
                for share in batch.to_pylist():
                    for rows in read_part(spec, scan, scanned, ScanPart(**share)):
                        yield convert(rows)

        parts = scan_parts(spec, "pending", partitions or count_slots(spark))
        frame = persist_frame(stack, part_frame(spark, parts).mapInArrow(read_all, spark_schema(schema)))
        frame.count()  # while the snapshot is held
    return frame


def select_load(batch: pa.RecordBatch, load: str | None) -> tuple[pa.RecordBatch, list[str]]:
    """Return the rows of a load, or of all loads if ``load`` is ``None``, and the load of each.

    Only headers in which the name of the header occurs are decoded.
    """
    batch = batch.filter(pc.match_substring(batch.column("headers"), _HEADER_TEXT))
    loads = [load_of(decode_headers(text)) for text in cast("list[str]", batch.column("headers").to_pylist())]
    is_selected = [each is not None and load in {None, each} for each in loads]
    return batch.filter(pa.array(is_selected, pa.bool_())), [
        each for each, selected in zip(loads, is_selected, strict=True) if selected and each is not None
    ]


# --- changing: on the executors ---------------------------------------------------------------------------------------


def require_administrable(store: OpenStore) -> AdministrableStore:
    """Return the store if its messages can be cancelled and rescheduled. Raise PipelineError if not."""
    if not isinstance(store.store, AdministrableStore):
        raise PipelineError(f"the messages of {type(store.store).__name__} cannot be cancelled or rescheduled")
    return store.store


def cancel_frame(ids: DataFrame, spec: StoreSpec, now: datetime) -> DataFrame:
    """Return a frame that cancels the messages with these ids when it is computed, and counts what became of them."""
    return ids.mapInArrow(partial(_cancel_all, spec, now), spark_schema(_CANCELLED))


def _cancel_all(spec: StoreSpec, now: datetime, batches: Batches) -> Batches:
    with open_in_task(spec) as store:
        for batch in batches:
            ids = cast("list[str]", batch.column("message_id").to_pylist())
            answers = call_each(store, ids, lambda adapter, id_: changes.cancel(adapter, id_, now))
            # A message that is cancelled already was cancelled by an earlier attempt of this task, or by an operator.
            cancelled = sum(answer in {Answer.DONE, Answer.CANCELLED} for answer in answers)
            row = {"cancelled": cancelled, "delivered": len(answers) - cancelled}
            yield pa.RecordBatch.from_pylist([row], schema=_CANCELLED)


def call_each(
    store: OpenStore, items: Collection[T], call: Callable[[AdministrableStore, T], Awaitable[Answer]]
) -> list[Answer]:
    """Call ``call`` for each item, several at a time; return the answers in the order of the items.

    An outage is waited for, as long as the patience of the store. Then some calls are made again, so a repeated call
    must leave the store as one call does.
    """
    administrable, remaining = require_administrable(store), list(items)
    answers = list[Answer]()

    def answer(some: Sequence[T]) -> list[Answer]:
        return store.portal.call(_answer_all, administrable, some, call)

    while remaining:
        some, remaining = remaining[:_CALLS_BETWEEN_OUTAGES], remaining[_CALLS_BETWEEN_OUTAGES:]
        answers += store.retry(partial(answer, some))
    return answers


async def _answer_all(
    store: AdministrableStore, items: Sequence[T], call: Callable[[AdministrableStore, T], Awaitable[Answer]]
) -> list[Answer]:
    answers, errors = [Answer.NOT_FOUND] * len(items), list[Exception]()
    numbers = iter(range(len(items)))

    async def work() -> None:
        # As in changes.change_all: the first error stops all, and is raised without an exception group.
        while not errors and (number := next(numbers, None)) is not None:
            try:
                answers[number] = await call(store, items[number])
            except Exception as error:  # noqa: BLE001 - raised below
                errors.append(error)

    async with anyio.create_task_group() as tasks:
        for _ in range(_CALLS_AT_ONCE):
            tasks.start_soon(work)
    if errors:
        raise errors[0]
    return answers

"""Write messages to a store, from data frames and from streams; idempotent by message id."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# Arrow's stubs make arrays generic in a type that only the running program knows.

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import MappingProxyType
from typing import Any, Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import DataType, DateType, StringType, StructType, TimestampNTZType
from typing_extensions import override

from postdate.clock import SystemClock, to_microseconds
from postdate.errors import PipelineError
from postdate.pipeline.dispatching import SweepSpec, drain_due
from postdate.pipeline.rows import INSTANT, Batches, pc, split_columns, texts_of
from postdate.pipeline.source.options import DEFAULT_BATCH, PENDING, QUEUED, SourceOptions
from postdate.pipeline.stores import OpenStore, StoreSpec, open_in_task, open_spec
from postdate.ports.scanning import TIME_COLUMNS, WRITTEN_COLUMNS

_TEXT: Final = "string"
_TIME: Final = "timestamp"
_HEADERS: Final = "map<string,string>"
_COLUMN_TYPES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        **{name: (_TIME if name in TIME_COLUMNS else _TEXT,) for name in WRITTEN_COLUMNS},
        "headers": (_HEADERS, _TEXT),
        "body": ("binary", _TEXT),
    }
)
_NEEDED: Final = ("message_id", "destination", "due")
_IGNORED_COLUMNS: Final = frozenset({"number_of_failures"})
"""Columns of messages read from a store that have no meaning in another store."""


def check_columns(schema: StructType, *, for_queues: bool = False) -> None:
    """Raise PipelineError for a column that is missing, unknown or of another type, before anything is written.

    ``for_queues``: messages go to their queues at once, so they have no due time.
    """
    names = schema.fieldNames()
    if for_queues and "due" in names:
        raise PipelineError("what is written to queues goes there at once: drop the column 'due', or write to pending")
    for name in names:
        if name not in _COLUMN_TYPES and name not in _IGNORED_COLUMNS:
            matches = difflib.get_close_matches(name.lower(), _COLUMN_TYPES, n=1)
            mend = f"rename it to {matches[0]}" if matches and matches[0] not in names else "drop it"
            raise PipelineError(f"messages have no column {name!r}, only {', '.join(_COLUMN_TYPES)}; {mend}")
    for name in _NEEDED:
        if name not in names and not (for_queues and name == "due"):
            raise PipelineError(f"messages need the column {name!r}; there are {', '.join(names) or 'none'}")
    for field in schema.fields:
        if field.name in _COLUMN_TYPES and _type_name(field.dataType) not in _COLUMN_TYPES[field.name]:
            raise PipelineError(_wrong_type(field.name, field.dataType))


def _type_name(kind: DataType) -> str:
    return re.sub(r"\bstring collate \w+", _TEXT, kind.simpleString())


def _wrong_type(name: str, kind: DataType) -> str:
    text = f"the column {name!r} is {kind.simpleString()}; it must be {' or '.join(_COLUMN_TYPES[name])}"
    match name in TIME_COLUMNS, kind:
        case True, TimestampNTZType():
            return (
                f"{text}: its times have no zone. Say which they are in: "
                f"F.expr(\"to_utc_timestamp(cast({name} as timestamp), 'Europe/Paris')\") in a session whose time zone "
                f"is UTC, or cast('timestamp') for the zone of the session"
            )
        case True, StringType():
            return f"{text}: F.to_timestamp('{name}') reads texts such as 2030-05-01T12:00:00Z"
        case True, DateType():
            return f"{text}: a day has no time; cast('timestamp') takes its midnight in the time zone of the session"
        case _ if name == "headers":
            return f"{text}, a JSON object of texts"
        case _:
            return f"{text}: F.col('{name}').cast('{_COLUMN_TYPES[name][0]}')"


@dataclass(frozen=True)
class _TaskResult(WriterCommitMessage):
    """The result of a task, which Spark hands to the driver.

    Args:
        error_copies: number of messages that the task has sent to the error queue.
    """

    error_copies: int = 0


@dataclass(frozen=True, slots=True)
class WritePlan:
    """Where to write, as a value that is sent to executors.

    With ``sweep``, messages are sent on to their queues at once.
    """

    spec: StoreSpec
    batch: int
    sweep: SweepSpec | None

    @classmethod
    def of(cls, options: SourceOptions) -> WritePlan:
        """Return where to write, as the options say.

        Raise PipelineError for rows other than pending messages or queues, or if there are no queues.
        """
        for_queues = options.row_kind(PENDING, QUEUED) == QUEUED
        return cls(options.spec(), options.get("batch", DEFAULT_BATCH), options.sweep_spec() if for_queues else None)

    def create_tables(self) -> None:
        """Create missing tables, so that the job fails before any task begins if the store cannot be reached."""
        with open_spec(self.spec, create=True) as store:
            store.setup()

    def store_rows(self, batches: Batches, now: datetime) -> WriterCommitMessage:
        """Store all rows, and send the messages on if they are for queues. This runs on executors."""
        rows = 0
        with open_in_task(self.spec, create=True) as store:
            due = None if self.sweep is None else min(now, SystemClock().now(), store.read_clock())
            for batch in batches:
                for start in range(0, batch.num_rows, self.batch):
                    part = batch.slice(start, self.batch)
                    _store_part(store, part if due is None else _add_due_times(part, due), now, rows + start)
                rows += batch.num_rows
        return _TaskResult(drain_due(self.sweep)["failed"] if self.sweep is not None and rows else 0)

    def check_results(self, results: Sequence[WriterCommitMessage | None]) -> None:
        """Raise PipelineError if messages went to the error queue.

        This runs on the driver. A task does not raise it: Spark would repeat the task, which finds its messages stored
        and sent, and nobody would hear of the error.
        """
        error_copies = sum(result.error_copies for result in results if isinstance(result, _TaskResult))
        if self.sweep is not None and error_copies:
            raise PipelineError(
                f"{error_copies:,} messages could not be sent and are in the error queue {self.sweep.error_queue!r}; "
                f"`postdate errors list --queue {self.sweep.error_queue}` says why"
            )


def _add_due_times(part: pa.RecordBatch, due: datetime) -> pa.RecordBatch:
    column = pa.array([to_microseconds(due)] * part.num_rows, pa.int64()).cast(INSTANT)
    return part.append_column("due", column)


class StoreWriter(DataSourceArrowWriter):
    """Stores messages, idempotent by id: a task that Spark repeats stores nothing twice.

    Each batch is a transaction. A job that fails leaves the stored batches; run it again. A row that is not a valid
    message fails the job; to set such rows aside use :func:`postdate.pipeline.schedule.schedule`.
    """

    def __init__(self, plan: WritePlan, now: datetime) -> None:
        self._plan, self._now = plan, now

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Store the rows of a task. This runs on executors, once a task."""
        return self._plan.store_rows(iterator, self._now)

    @override
    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """End the job. Raise PipelineError if messages went to the error queue; all others are stored and sent."""
        self._plan.check_results(messages)


class StreamStoreWriter(DataSourceStreamArrowWriter):
    """Stores the messages of each micro-batch, idempotent by id: a repeated micro-batch stores nothing twice.

    Spark creates one writer to write each micro-batch and another to commit it, so only tasks open the store.
    """

    def __init__(self, plan: WritePlan) -> None:
        self._plan = plan

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Store the rows of a task. This runs on executors, once a task of a micro-batch."""
        self._plan.create_tables()
        return self._plan.store_rows(iterator, SystemClock().now())

    @override
    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """End a micro-batch. Raise PipelineError if messages went to the error queue; all others are stored and sent.

        The query then fails. Started again, it repeats the micro-batch, which sends nothing again, and goes on.
        """
        self._plan.check_results(messages)


def _store_part(store: OpenStore, part: pa.RecordBatch, now: datetime, first_row: int) -> None:
    messages, bad_rows = split_columns(convert_headers_to_text(part), store.largest_message_bytes)
    if bad_rows:
        first, context = min(bad_rows, key=lambda row: row.position), TaskContext.get()
        partition = "" if context is None else f" of partition {context.partitionId()}"
        message_id = texts_of(part.select(["message_id"]).slice(first.position, 1))[0]["message_id"]
        raise PipelineError(
            f"row {first_row + first.position}{partition} (message id {message_id!r}) is not a message: "
            f"{first.detail}. The rows of its batch were not stored; postdate.pipeline.schedule.schedule sets such "
            f"rows aside"
        )
    store.store_batch(messages, now)


# --- headers: from Spark's maps into the JSON text of stores ----------------------------------------------------------

_ESCAPED: Final = r"[\x00-\x1f\x22\\]"
"""A text without any of these characters is valid JSON between quotes."""


def convert_headers_to_text(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return rows with their headers as JSON text if they are a map. Headers that are text are not checked here."""
    position = rows.schema.get_field_index("headers")
    if position < 0 or not pa.types.is_map(rows.column(position).type):
        return rows
    return rows.set_column(position, "headers", _texts(rows.column(position)))


def _texts(maps: Any) -> pa.Array[Any]:
    first, last = maps.offsets[0].as_py(), maps.offsets[-1].as_py()
    offsets: Any = pc.subtract(maps.offsets, first)  # A slice of an array still has the pairs of its neighbours.
    keys, values = (each.slice(first, last - first) for each in (maps.keys, maps.items))
    if _has_special_text(keys, values):
        pairs = _escaped_pairs(keys, values)
    else:  # No text becomes a Python object: the pairs are joined inside their column.
        pairs = pc.binary_join_element_wise('"', keys, '":"', values, '"', "")
    joined = pc.binary_join(pa.ListArray.from_arrays(offsets, pairs), ",")
    return pc.if_else(maps.is_null(), pa.scalar(None, pa.string()), pc.binary_join_element_wise("{", joined, "}", ""))


def _has_special_text(keys: pa.Array[Any], values: pa.Array[Any]) -> bool:
    """Return whether a name has no value, or JSON must escape a character."""
    return bool(values.null_count) or any(
        pc.any(pc.match_substring_regex(each, _ESCAPED)).as_py() for each in (keys, values)
    )


def _escaped_pairs(keys: pa.Array[Any], values: pa.Array[Any]) -> pa.Array[Any]:
    """Return each pair as JSON. Bytes that are not UTF-8 stay, so that the row is refused because of them."""
    names: list[Any] = keys.cast(pa.binary()).to_pylist()
    texts: list[Any] = values.cast(pa.binary()).to_pylist()
    pairs = [
        f"{_encode_json(name)}:{'null' if text is None else _encode_json(text)}".encode("utf-8", "surrogateescape")
        for name, text in zip(names, texts, strict=True)
    ]
    return pa.array(pairs, pa.binary()).view(pa.string())


def _encode_json(text: bytes) -> str:
    return json.dumps(text.decode("utf-8", "surrogateescape"), ensure_ascii=False)

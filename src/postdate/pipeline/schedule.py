"""Any table of messages into a store: millions of rows, idempotent by message id, bad rows set aside with the reason.

The input is read twice: once for ids with differing content, which only the whole input can tell, and once to store.
Rows are checked by Spark SQL where it can (times, headers), then by Arrow in whole batches; only doubtful ones are
checked row by row. A store that takes columns gets them as they are.

Nothing is half-done after a failure: every batch is a transaction, ids stored before are left as they are, so the same
job is simply run again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark program uses
from pyspark.sql.types import BinaryType, MapType, StringType

from postdate.errors import PipelineError
from postdate.pipeline.files import MALFORMED
from postdate.pipeline.frames import kept
from postdate.pipeline.lapsing import end_of_time_to_be_received
from postdate.pipeline.local_time import LocalTimes, read_time
from postdate.pipeline.plain import plain
from postdate.pipeline.rows import BadRow, Batches, checked, pc, quoted, spark_schema
from postdate.pipeline.session import require_utc
from postdate.pipeline.stores import OpenStore, StoreSpec, opened
from postdate.ports.scanning import WRITTEN

_SHOWN = (*WRITTEN, "row")
_TEXTS = ("reason", "detail", *_SHOWN)
_OUTCOME_ARROW = pa.schema(
    [("stored", pa.int64()), ("already_there", pa.int64()), *((name, pa.string()) for name in _TEXTS)]
)
_REPORT_SCHEMA = "outcome string, reason string, rows long"
_BEGINNING_CHARACTERS = 1_000
_REJECTED_FORMATS = frozenset({"json", "parquet"})


@dataclass(frozen=True, slots=True)
class ColumnMapping:
    """The input's columns; a column named here must exist.

    Args:
        message_id: text, 1 to 250 characters; the job is idempotent by it.
        due: timestamp, or text in ISO 8601.
        destination: a column; or a fixed queue for all rows, written ``=queue``.
        body: text (stored as UTF-8) or binary; ``None`` for messages without one.
        headers: map of texts, or text that is a JSON object of texts; ``None`` for messages without headers.
        expires_at: like ``due``; ``None`` for messages that never expire.
    """

    message_id: str = "message_id"
    due: str = "due"
    destination: str = "destination"
    body: str | None = "body"
    headers: str | None = "headers"
    expires_at: str | None = "expires_at"

    @classmethod
    def found_in(cls, columns: list[str]) -> ColumnMapping:
        """Return the default names, without the optional columns that are missing."""
        return replace(cls(), **{name: None for name in ("body", "headers", "expires_at") if name not in columns})


@dataclass(frozen=True, slots=True)
class Rejects:
    """Where to write rows that are no message.

    Args:
        path: of a directory, which must not exist yet.
        format: ``json`` or ``parquet``. Columns: ``reason`` (a stable code), ``detail``, and the row as texts; a
            malformed line of a file is written whole, as ``row``.
    """

    path: Path
    format: str = "json"

    def __post_init__(self) -> None:
        if self.format not in _REJECTED_FORMATS:
            raise PipelineError(f"rejected rows are written as json or parquet, not {self.format!r}")
        if self.path.exists():
            raise PipelineError(f"{self.path} is there already; name a new directory for the rejected rows")


@dataclass(frozen=True, slots=True)
class ScheduleResult:
    """Result of a schedule job. ``read`` is the sum of ``accepted``, ``already_there`` and all of ``set_aside``.

    Args:
        read: rows of the input.
        accepted: messages that are new in the store.
        already_there: rows whose id was stored before, by this job (equal rows count once) or an earlier one.
        set_aside: rows by reason.
        rejected_to: directory of these rows; ``None`` when there are none, or when none was named.
        seconds: from the start to the last commit.
        reported_to: directory of the validation report; ``None`` when none was named.
    """

    read: int
    accepted: int
    already_there: int
    set_aside: Mapping[str, int] = field(default_factory=dict[str, int])
    rejected_to: str | None = None
    seconds: float = 0.0
    reported_to: str | None = None

    @property
    def rows_per_second(self) -> float:
        """Rows read a second, over the whole time."""
        return self.read / self.seconds if self.seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        return {**plain(self), "rows_per_second": round(self.rows_per_second, 1)}


@dataclass(frozen=True, slots=True)
class ScheduleJob:
    """What to schedule, and how. Runs on the driver; pickled only in part.

    Args:
        store: where the messages go; created when it is missing.
        now: recorded as the time of scheduling; aware.
        columns: of the input; by default columns of the usual names.
        local_times: how to read times without an offset; without it such rows are set aside.
        rejects: where to put rows that are no message; without it they are only counted.
        batch: messages stored in one transaction; by default a good number for the store.
        report: directory, which must not exist yet, for a Parquet table of results: ``outcome``
            (``accepted``, ``already_there`` or ``set_aside``), ``reason`` (null unless set aside), ``rows``.
    """

    store: StoreSpec
    now: datetime
    columns: ColumnMapping | None = None
    local_times: LocalTimes | None = None
    rejects: Rejects | None = None
    batch: int | None = None
    report: Path | None = None

    def __post_init__(self) -> None:
        if self.report is not None and self.report.exists():
            raise PipelineError(f"{self.report} is there already; name a new directory for the report")


def schedule(messages: DataFrame, job: ScheduleJob) -> ScheduleResult:
    """Store every row of ``messages`` that is a message, and set the others aside.

    Runs on the driver; the rows are checked, turned into messages and stored on the executors.

    Args:
        messages: one row a message; it is computed twice, so cache what is expensive.
        job: see :class:`ScheduleJob`.

    Returns:
        Counts of all rows. When Spark repeats a task, messages that its first attempt stored count as already there.

    Raises:
        PipelineError: a column is missing or of a wrong type; nothing was stored.
        StoreError: the store failed; messages stored by then stay, and the job can be run again.
    """
    started = time.perf_counter()
    require_utc(messages.sparkSession)
    columns = job.columns or ColumnMapping.found_in(messages.columns)
    _require_columns(messages, columns)
    with opened(job.store, create=True) as store:
        store.setup()
        limit = store.largest_message_bytes
    rows = _checked(messages, columns, job.local_times, limit)
    with ExitStack() as stack:
        candidates = kept(stack, _candidates(messages, columns))
        if candidates.count():
            rows = _without_conflicts(rows, candidates)
        storing = partial(_store_all, job.store, job.now, job.batch)
        outcomes = kept(stack, rows.mapInArrow(storing, spark_schema(_OUTCOME_ARROW)), StorageLevel.DISK_ONLY)
        return _result(outcomes, job, started)


# --- checks in Spark SQL ----------------------------------------------------------------------------------------------


def _checked(messages: DataFrame, columns: ColumnMapping, local_times: LocalTimes | None, limit: int) -> DataFrame:
    """Return the columns of a message, ``reason`` (null for good rows), and in ``shown`` a bad row in texts.

    Headers become text, a JSON object; ``doubtful`` says that a name may be twice in it. A body
    over ``limit`` bytes goes no further than this: a few of them would fill the memory of every later step.
    """
    types = {column.name: column.dataType for column in messages.schema}
    due = read_time(F.col(quoted(columns.due)), types[columns.due], local_times)
    reasons = [*_missing(columns), due.problem]
    expires_at: Column = F.lit(None).cast("timestamp")
    if columns.expires_at is not None:
        expiry = read_time(F.col(quoted(columns.expires_at)), types[columns.expires_at], local_times)
        expires_at = expiry.instant
        reasons.append(F.when(expiry.problem.isNotNull(), F.concat(F.lit("expiry_"), expiry.problem)))
    headers, headers_problem = _headers(messages, columns.headers)
    body = _body(messages, columns.body)
    too_large = F.octet_length(body) > limit
    # The time to be received counts from the time sent and not from when it is due: such a message would never be
    # handled (specification row 75). One with a malformed end is accepted, and fails with its receiver.
    lapses = end_of_time_to_be_received(headers) < due.instant
    reasons += [
        headers_problem,
        F.when(too_large, F.lit("message_too_large")),
        F.when(lapses, F.lit("lapses_before_due")),
    ]
    if MALFORMED in messages.columns:
        reasons.insert(0, F.when(F.col(MALFORMED).isNotNull(), F.lit("malformed_row")))
    reason = F.coalesce(*reasons)
    return messages.select(
        F.col(quoted(columns.message_id)).cast("string").alias("message_id"),
        _destination(columns.destination).alias("destination"),
        due.instant.alias("due"),
        expires_at.alias("expires_at"),
        F.to_json(headers).alias("headers"),
        (F.size(F.array_distinct(F.map_keys(headers))) < F.size(headers)).alias("doubtful"),
        F.when(~too_large, body).alias("body"),
        reason.alias("reason"),
        F.when(reason.isNotNull(), _shown(messages, columns, too_large)).alias("shown"),
    )


def _require_columns(messages: DataFrame, columns: ColumnMapping) -> None:
    named = [name for name in asdict(columns).values() if name is not None and not name.startswith("=")]
    missing = [name for name in named if name not in messages.columns]
    if missing:
        names = [name for name in messages.columns if name != MALFORMED]
        raise PipelineError(f"the input has no column {missing[0]!r}; it has {', '.join(names)}")


def _destination(name: str) -> Column:
    return F.lit(name[1:]) if name.startswith("=") else F.col(quoted(name)).cast("string")


def _missing(columns: ColumnMapping) -> list[Column]:
    required = {
        "missing_id": F.col(quoted(columns.message_id)).cast("string"),
        "missing_due": F.col(quoted(columns.due)).cast("string"),
        "missing_destination": _destination(columns.destination),
    }
    return [F.when(column.isNull() | (F.trim(column) == ""), F.lit(reason)) for reason, column in required.items()]


def _headers(messages: DataFrame, name: str | None) -> tuple[Column, Column]:
    """Return the headers as a map, and the reason for null in invalid ones."""
    no_problem = F.lit(None).cast("string")
    if name is None:
        return F.lit(None).cast("map<string,string>"), no_problem
    column, data_type = F.col(quoted(name)), messages.schema[name].dataType
    if isinstance(data_type, MapType):
        return column.cast("map<string,string>"), no_problem
    if isinstance(data_type, StringType):
        parsed = F.from_json(column, "map<string,string>")
        return parsed, F.when(column.isNotNull() & (F.trim(column) != "") & parsed.isNull(), F.lit("invalid_headers"))
    raise PipelineError(f"headers must be a map or a text, not {data_type.simpleString()}")


def _body(messages: DataFrame, name: str | None) -> Column:
    if name is None:
        return F.lit(None).cast("binary")
    column, data_type = F.col(quoted(name)), messages.schema[name].dataType
    if isinstance(data_type, BinaryType):
        return column
    if isinstance(data_type, StringType):
        return F.encode(column, "UTF-8")
    raise PipelineError(f"a body must be binary or a text, not {data_type.simpleString()}")


def _shown(messages: DataFrame, columns: ColumnMapping, too_large: Column) -> Column:
    """Return a row as texts, unchanged, for setting it aside; only the beginning of a body that is too large."""
    named = {name: F.lit(None).cast("string") for name in _SHOWN}
    for name, column in asdict(columns).items():
        if column is not None and column.startswith("="):
            named[name] = F.lit(column[1:])
        elif column is not None:
            is_map, value = isinstance(messages.schema[column].dataType, MapType), F.col(quoted(column))
            named[name] = F.to_json(value) if is_map else value.cast("string")
    if MALFORMED in messages.columns:
        named["row"] = F.col(MALFORMED)
    beginning = F.make_valid_utf8(F.substring(named["body"], 1, _BEGINNING_CHARACTERS))
    named["body"] = F.when(too_large, F.concat(beginning, F.lit("…")))  # others need not be UTF-8: Python shows them
    return F.struct(*(named[name].alias(name) for name in _SHOWN))


def _candidates(messages: DataFrame, columns: ColumnMapping) -> DataFrame:
    """Return the checksums of ids that may be in the input more than once; nearly always none.

    Only the column of ids is read, and eight bytes of each are shuffled.
    """
    id_ = F.col(quoted(columns.message_id)).cast("string")
    checksums = messages.where(id_.isNotNull()).select(F.xxhash64(id_).alias("id_checksum"))
    return checksums.groupBy("id_checksum").count().where("count > 1").select("id_checksum")


def _without_conflicts(rows: DataFrame, candidates: DataFrame) -> DataFrame:
    """Set the reason ``conflicting_rows`` for all rows whose id is in the input with differing content.

    None of them can be preferred. Only good rows count, and only ids and checksums are shuffled, never bodies.
    """
    headers = F.array_sort(F.map_entries(F.from_json("headers", "map<string,string>")))
    parts = [*map(F.col, ("due", "destination", "expires_at")), headers, F.col("body")]
    content = F.xxhash64(*parts, *(part.isNull() for part in parts))  # depends on which are null, too
    conflicting = (
        rows.where(F.col("reason").isNull())
        .withColumn("id_checksum", F.xxhash64("message_id"))
        .join(candidates, "id_checksum", "left_semi")
        .select("message_id", content.alias("content"))
        .groupBy("message_id")
        .agg(F.min("content").alias("least"), F.max("content").alias("greatest"))
        .where(F.col("least") != F.col("greatest"))
        .select("message_id", F.lit("conflicting_rows").alias("conflict"))
    )
    return rows.join(F.broadcast(conflicting), "message_id", "left").withColumn(
        "reason", F.coalesce("reason", "conflict")
    )


# --- storing: on the executors ---------------------------------------------------------------------------------------


def _store_all(spec: StoreSpec, now: datetime, chosen: int | None, batches: Batches) -> Batches:
    """Store the rows of a task. It takes a store address along, never a connection."""
    with opened(spec) as store:
        size = chosen or store.good_batch
        for batch in batches:
            for start in range(0, batch.num_rows, size):
                yield _store(store, batch.slice(start, size), now)


def _store(store: OpenStore, batch: pa.RecordBatch, now: datetime) -> pa.RecordBatch:
    """Store one batch in one transaction; return its counts in a first row, and then the rows that were set aside."""
    is_good = pc.is_null(batch.column("reason"))
    good = batch.filter(is_good)
    messages, bad = checked(good, store.largest_message_bytes)
    report = store.store_batch(messages, now)
    counts = {"stored": report.stored, "already_there": len(report.already_there)}
    rows = [counts, *_set_aside(batch.filter(pc.invert(is_good))), *_refused(good, bad)]
    return pa.RecordBatch.from_pylist(rows, schema=_OUTCOME_ARROW)


def _set_aside(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Return the rows that Spark SQL found a reason against; conflicting ones have no ``shown`` texts."""
    rows = list[dict[str, Any]]()
    for row in batch.to_pylist():
        shown: Mapping[str, str | None] = row["shown"] or {}
        texts = {**_in_texts(row), **{name: text for name, text in shown.items() if text is not None}}
        rows.append({"reason": row["reason"], "detail": _DETAILS.get(row["reason"], ""), **texts})
    return rows


def _refused(batch: pa.RecordBatch, bad: list[BadRow]) -> list[dict[str, Any]]:
    return [
        {"reason": row.code, "detail": row.detail, **_in_texts(batch.slice(row.position, 1).to_pylist()[0])}
        for row in bad
    ]


def _in_texts(row: Mapping[str, Any]) -> dict[str, str | None]:
    return {name: _in_text(row[name]) for name in WRITTEN}


def _in_text(value: str | datetime | bytes | None) -> str | None:
    if isinstance(value, datetime):
        return value.isoformat()
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else value


_DETAILS_OF_TIMES: Mapping[str, str] = {
    "malformed_time": "is not ISO 8601, or no such time exists",
    "time_without_zone": "has no offset from UTC; give it one, or name the zone of such times",
    "time_out_of_range": "is outside the years 1 to 9999 of UTC; give a time in them",
    "nonexistent_local_time": "is one that clocks never showed: they were set forward over it",
    "ambiguous_local_time": "is one that clocks showed twice: they were set back over it",
}
_DETAILS: Mapping[str, str] = {
    "malformed_row": "the line has more or fewer cells than the header line, or is no JSON object",
    **{reason: f"the due time {detail}" for reason, detail in _DETAILS_OF_TIMES.items()},
    **{f"expiry_{reason}": f"the expiry {detail}" for reason, detail in _DETAILS_OF_TIMES.items()},
    "missing_id": "the message id is missing or blank",
    "missing_due": "the due time is missing or blank",
    "missing_destination": "the destination is missing or blank",
    "conflicting_rows": "this id stands in the input with differing content",
    "invalid_headers": "the headers are no JSON object",
    "lapses_before_due": "its time to be received, which counts from its time sent, ends before it is due",
    "message_too_large": "the body is larger than the store takes; keep it elsewhere and send a reference",
}


# --- result: on the driver -------------------------------------------------------------------------------------------


def _result(outcomes: DataFrame, job: ScheduleJob, started: float) -> ScheduleResult:
    counted = outcomes.groupBy("reason").agg(
        F.count("*").alias("rows"), F.sum("stored").alias("stored"), F.sum("already_there").alias("already_there")
    )
    rows = {row["reason"]: row for row in counted.collect()}
    seconds = time.perf_counter() - started
    stored = rows.pop(None, None)
    accepted, already_there = (stored["stored"], stored["already_there"]) if stored else (0, 0)
    set_aside = {reason: row["rows"] for reason, row in sorted(rows.items())}
    written, rejects = None, job.rejects
    if set_aside and rejects is not None:
        outcomes.where(F.col("reason").isNotNull()).select(*_TEXTS).write.format(rejects.format).save(str(rejects.path))
        written = str(rejects.path)
    result = ScheduleResult(
        read=accepted + already_there + sum(set_aside.values()),
        accepted=accepted,
        already_there=already_there,
        set_aside=set_aside,
        rejected_to=written,
        seconds=seconds,
        reported_to=None if job.report is None else str(job.report),
    )
    if job.report is not None:
        _write_report(outcomes.sparkSession, result, job.report)
    return result


def _write_report(spark: SparkSession, result: ScheduleResult, path: Path) -> None:
    rows: list[tuple[str, str | None, int]] = [
        ("accepted", None, result.accepted),
        ("already_there", None, result.already_there),
        *(("set_aside", reason, count) for reason, count in result.set_aside.items()),
    ]
    spark.createDataFrame(rows, _REPORT_SCHEMA).coalesce(1).write.parquet(str(path))

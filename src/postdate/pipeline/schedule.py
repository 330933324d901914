"""Store a table of messages: millions of rows, idempotent by message id. Bad rows are set aside with the reason.

The input is read twice: once to find ids with different content, which needs the whole input, and once to store. Spark
SQL checks times and texts of rows; Arrow then checks whole batches, and only doubtful rows are checked one by one. A
store that accepts columns gets them without conversion.

A row is stored unchanged or set aside as a whole. A text that is not UTF-8, or headers that JSON cannot represent, are
never altered. The rows of the input are counted separately from the results, and the sums are compared.

After a failure nothing is half done: every batch is a transaction, and ids that were stored before are left unchanged.
So the same job can be run again.
"""

from __future__ import annotations

import difflib
import re
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark program uses
from pyspark.sql.types import ArrayType, BinaryType, MapType, StringType, StructType

from postdate.errors import PipelineError
from postdate.messages import Headers
from postdate.pipeline.files import MALFORMED
from postdate.pipeline.frames import persist_frame
from postdate.pipeline.lapsing import relative_expiry_of
from postdate.pipeline.local_time import LocalTimes, read_time
from postdate.pipeline.plain import to_plain
from postdate.pipeline.rows import (
    MESSAGE_COLUMNS,
    NOT_UTF8,
    BadRow,
    Batches,
    pc,
    quote_name,
    spark_schema,
    split_columns,
    texts_of,
)
from postdate.pipeline.session import check_utc
from postdate.pipeline.stores import OpenStore, StoreSpec, open_spec
from postdate.ports.scanning import WRITTEN_COLUMNS

_SHOWN_COLUMNS = (*WRITTEN_COLUMNS, "row")
_TEXTS = ("reason", "detail", *_SHOWN_COLUMNS)
_BYTES: pa.DataType = pa.map_(pa.string(), pa.binary())
_OUTCOME_ARROW = pa.schema(
    [
        ("stored", pa.int64()),
        ("already_there", pa.int64()),
        *((name, pa.string()) for name in _TEXTS),
        ("bytes", _BYTES),
    ]
)
_CONTENT = spark_schema(MESSAGE_COLUMNS)
_REPORT_SCHEMA = "outcome string, reason string, rows long"
_BEGINNING_CHARACTERS = 1_000
_REJECTED_FORMATS = frozenset({"json", "parquet"})


@dataclass(frozen=True, slots=True)
class ColumnMapping:
    """The names of the input's columns. A column named here must exist.

    Args:
        message_id: text, 1 to 250 characters; the job is idempotent by this id.
        due: timestamp, or text in ISO 8601.
        destination: a column; or a fixed queue for all rows, written ``=queue``.
        body: text (stored as UTF-8) or binary; ``None`` for messages without a body.
        headers: map of texts, or text that is a JSON object; ``None`` for messages without headers. A value that is not
            text becomes its JSON text, exactly as it is written.
        expires_at: like ``due``; ``None`` for messages that never expire.
    """

    message_id: str = "message_id"
    due: str = "due"
    destination: str = "destination"
    body: str | None = "body"
    headers: str | None = "headers"
    expires_at: str | None = "expires_at"

    @classmethod
    def match_columns(
        cls, columns: Sequence[str], unused: Collection[str] = (), *, case_sensitive: bool = False, **given_names: Any
    ) -> ColumnMapping:
        """Return ``given_names`` and the default names of other columns, without the optional columns that are missing.

        Args:
            columns: names of the input's columns.
            unused: columns that resemble an optional column, but do not stand for it.
            case_sensitive: whether names that differ only in case are different, as ``spark.sql.caseSensitive`` says.
            given_names: columns by field, instead of the default names.

        Raises:
            PipelineError: an optional column is missing, and another column has nearly its name: its content would be
                dropped.
        """
        mapping = cls(**given_names)
        for name in sorted(_OPTIONAL - given_names.keys()):
            if _matching_columns(name, columns, case_sensitive=case_sensitive):
                continue
            candidates = [column for column in columns if column not in {*unused, *asdict(mapping).values()}]
            if similar := _find_nearest(name, candidates):
                raise PipelineError(
                    f"the input has no column {name!r}, but {similar!r}: rename it, or name it as {name}, or name it "
                    f"as "
                    f"unused if it is none of the message"
                )
            mapping = replace(mapping, **{name: None})
        return mapping


@dataclass(frozen=True, slots=True)
class Rejects:
    """Where to write rows that are not messages.

    Args:
        path: path of a directory, which must not exist yet.
        format: ``json`` or ``parquet``. Columns: ``reason`` (a stable code), ``detail``, and the row as texts; a
            malformed line of a file is written whole, as ``row``. ``bytes`` has the bytes of the texts that are not
            UTF-8, by column; in JSON as base64.
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
        read: rows of the input, counted separately from the results.
        accepted: messages that are new in the store.
        already_there: rows whose id was stored before, by this job (equal rows count once) or an earlier one.
        set_aside: rows by reason.
        rejected_to: directory of these rows; ``None`` if there are none, or if no directory was named.
        seconds: duration from the start to the last commit.
        reported_to: directory of the validation report; ``None`` if none was named.
        unused: columns of the input of which nothing was stored.
    """

    read: int
    accepted: int
    already_there: int
    set_aside: Mapping[str, int] = field(default_factory=dict[str, int])
    rejected_to: str | None = None
    seconds: float = 0.0
    reported_to: str | None = None
    unused: tuple[str, ...] = ()

    @property
    def rows_per_second(self) -> float:
        """Rows read a second, over the whole duration."""
        return self.read / self.seconds if self.seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        return {**to_plain(self), "rows_per_second": round(self.rows_per_second, 1)}


@dataclass(frozen=True, slots=True)
class ScheduleJob:
    """The parameters of a schedule job. The object lives on the driver; only parts of it are pickled.

    Args:
        store: the store for the messages; created if it is missing.
        now: recorded as the time of scheduling; aware.
        columns: columns of the input; by default columns of the usual names.
        local_times: how to read times without an offset; without it, rows with such times are set aside.
        rejects: where to write rows that are not messages; without it, they are only counted.
        batch: number of messages stored in one transaction; by default a good number for the store.
        report: directory, which must not exist yet, for a Parquet table of results: ``outcome``
            (``accepted``, ``already_there`` or ``set_aside``), ``reason`` (null unless set aside), ``rows``.
        unused: columns that resemble an optional column of the usual names, but do not stand for it. An input with such
            a column that is not listed here is refused.
    """

    store: StoreSpec
    now: datetime
    columns: ColumnMapping | None = None
    local_times: LocalTimes | None = None
    rejects: Rejects | None = None
    batch: int | None = None
    report: Path | None = None
    unused: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.report is not None and self.report.exists():
            raise PipelineError(f"{self.report} is there already; name a new directory for the report")


def schedule(messages: DataFrame, job: ScheduleJob) -> ScheduleResult:
    """Store every row of ``messages`` that is a message, and set the other rows aside.

    This runs on the driver. The rows are checked, turned into messages and stored on the executors.

    Args:
        messages: one message a row; the frame is computed twice, so cache an expensive one.
        job: see :class:`ScheduleJob`.

    Returns:
        Counts of all rows. If Spark repeats a task, messages that its first attempt stored count as already there.

    Raises:
        PipelineError: a column is missing, misspelt or of a wrong type; nothing was stored. Or the input returned
            different rows when it was read again; messages stored by then stay.
        StoreError: the store failed; messages stored by then stay, and the job can be run again.
    """
    started = time.perf_counter()
    check_utc(messages.sparkSession)
    messages, columns, unused = _resolve_columns(messages, job)
    with open_spec(job.store, create=True) as store:
        store.setup()
        limit = store.largest_message_bytes
    rows = _select_messages(messages, columns, job.local_times, limit)
    with ExitStack() as stack:
        checksums = persist_frame(stack, _checksums(messages, columns))
        read = sum(row["rows"] for row in checksums.where("id_checksum IS NULL").collect())
        candidates = checksums.where("id_checksum IS NOT NULL").select("id_checksum")
        if candidates.count():
            rows = _mark_conflicts(rows, candidates, limit)
        storing = partial(_store_all, job.store, job.now, job.batch)
        outcomes = persist_frame(stack, rows.mapInArrow(storing, spark_schema(_OUTCOME_ARROW)), StorageLevel.DISK_ONLY)
        result = replace(_result(outcomes, job, started), unused=unused)
    if result.read != read:
        raise PipelineError(
            f"the input had {read:,} rows when they were counted, and {result.read:,} when they were stored: it gives "
            f"other rows each time it is read. What was stored stays; cache the input, and run the job again"
        )
    return result


# --- checks in Spark SQL ----------------------------------------------------------------------------------------------


def _select_messages(
    messages: DataFrame, columns: ColumnMapping, local_times: LocalTimes | None, limit: int
) -> DataFrame:
    """Return the columns of a message, ``reason`` (null for good rows), and in ``shown`` the bytes of a bad row.

    Headers become text if they are a map. The content of a text is checked later, together with everything that Spark
    would alter. A body over ``limit`` bytes is removed here: a few of them would fill the memory of every later step.
    """
    types = {column.name: column.dataType for column in messages.schema}
    due = read_time(F.col(quote_name(columns.due)), types[columns.due], local_times)
    not_utf8 = _has_invalid_text(messages, columns)
    reasons = [F.when(not_utf8, F.lit(NOT_UTF8)), *_missing_reasons(columns), due.problem]
    expires_at: Column = F.lit(None).cast("timestamp")
    if columns.expires_at is not None:
        expiry = read_time(F.col(quote_name(columns.expires_at)), types[columns.expires_at], local_times)
        expires_at = expiry.instant
        reasons.append(F.when(expiry.problem.isNotNull(), F.concat(F.lit("expiry_"), expiry.problem)))
    headers = _headers(messages, columns.headers)
    body = _body(messages, columns.body)
    too_large = F.octet_length(body) > limit
    # The time to be received counts from the time sent, not from the due time: such a message would never be handled
    # (specification row 75). A message whose end is malformed is accepted, and fails at its receiver.
    expires_before_due = relative_expiry_of(_expiry_headers(headers)) < due.instant
    reasons += [
        F.when(too_large, F.lit("message_too_large")),
        F.when(expires_before_due, F.lit("lapses_before_due")),
    ]
    if MALFORMED in messages.columns:
        is_text = F.is_valid_utf8(F.col(MALFORMED).cast("string"))
        malformed = F.when(is_text, F.lit("malformed_row")).otherwise(F.lit(NOT_UTF8))
        reasons.insert(0, F.when(F.col(MALFORMED).isNotNull(), malformed))
    reason = F.coalesce(*reasons)
    good = reason.isNull()
    return messages.select(
        F.when(good, F.col(quote_name(columns.message_id)).cast("string")).alias("message_id"),
        F.when(good, _destination(columns.destination)).alias("destination"),
        due.instant.alias("due"),
        expires_at.alias("expires_at"),
        F.when(good, headers).alias("headers"),
        F.when(good, body).alias("body"),
        reason.alias("reason"),
        F.when(reason.isNotNull(), _original_bytes(messages, columns, too_large)).alias("shown"),
    )


_OPTIONAL = frozenset({"body", "headers", "expires_at"})
_NEAR = 0.75
"""Similarity at which two names count as one misspelt name: a letter changed in four, or two letters swapped."""


def _resolve_columns(messages: DataFrame, job: ScheduleJob) -> tuple[DataFrame, ColumnMapping, tuple[str, ...]]:
    """Return the input, the names of its columns, and the names of unused columns.

    Columns are resolved as Spark does it: without regard to case, unless the session says otherwise.
    """
    case_sensitive = messages.sparkSession.conf.get("spark.sql.caseSensitive") == "true"
    names = [name for name in messages.columns if name != MALFORMED]
    columns = job.columns or ColumnMapping.match_columns(names, job.unused, case_sensitive=case_sensitive)
    resolved_names = dict[str, Any]()
    for field_name, column in asdict(columns).items():
        if column is None or column.startswith("="):
            resolved_names[field_name] = column
            continue
        matches = _matching_columns(column, names, case_sensitive=case_sensitive)
        if not matches:
            raise PipelineError(f"the input has no column {column!r}; it has {', '.join(names)}")
        if len(matches) > 1:
            raise PipelineError(f"the input has several columns {column!r}: {', '.join(matches)}; rename one")
        resolved_names[field_name] = matches[0]
    unused = tuple(name for name in names if name not in resolved_names.values())
    return messages, ColumnMapping(**resolved_names), unused


def _matching_columns(name: str, columns: Sequence[str], *, case_sensitive: bool) -> list[str]:
    """Return the columns that match a name."""
    return [each for each in columns if each == name or (not case_sensitive and each.lower() == name.lower())]


def _find_nearest(name: str, columns: Sequence[str]) -> str | None:
    """Return the column that differs from the name only by a slip: spaces, case, separators, or one letter."""
    plain_names = {re.sub(r"[\W_]", "", column).lower(): column for column in columns}
    similar = difflib.get_close_matches(name.replace("_", ""), plain_names, n=1, cutoff=_NEAR)
    return plain_names[similar[0]] if similar else None


def _destination(name: str) -> Column:
    return F.lit(name[1:]) if name.startswith("=") else F.col(quote_name(name)).cast("string")


def _missing_reasons(columns: ColumnMapping) -> list[Column]:
    required = {
        "missing_id": F.col(quote_name(columns.message_id)).cast("string"),
        "missing_due": F.col(quote_name(columns.due)).cast("string"),
        "missing_destination": _destination(columns.destination),
    }
    return [F.when(column.isNull() | (F.trim(column) == ""), F.lit(reason)) for reason, column in required.items()]


def _has_invalid_text(messages: DataFrame, columns: ColumnMapping) -> Column:
    """Return whether a text of a row is not UTF-8. Spark's own functions would alter such a text."""
    not_utf8 = F.lit(False)
    for name in asdict(columns).values():
        if name is None or name.startswith("="):
            continue
        column, data_type = F.col(quote_name(name)), messages.schema[name].dataType
        if isinstance(data_type, StringType):
            not_utf8 |= F.coalesce(~F.is_valid_utf8(column), F.lit(False))
        elif isinstance(data_type, MapType):
            if isinstance(data_type.keyType, StringType):
                not_utf8 |= F.coalesce(F.exists(F.map_keys(column), _is_not_utf8), F.lit(False))
            if isinstance(data_type.valueType, StringType):
                not_utf8 |= F.coalesce(F.exists(F.map_values(column), _is_not_utf8), F.lit(False))
    return not_utf8


def _is_not_utf8(text: Column) -> Column:
    return ~F.is_valid_utf8(text)


def _headers(messages: DataFrame, name: str | None) -> Column:
    """Return the headers as a text that is a JSON object."""
    if name is None:
        return F.lit(None).cast("string")
    column, data_type = F.col(quote_name(name)), messages.schema[name].dataType
    if isinstance(data_type, StringType):
        return F.when(F.trim(column) != "", column)
    if not isinstance(data_type, MapType):
        raise PipelineError(f"headers must be a map or a text, not {data_type.simpleString()}")
    value = data_type.valueType
    if isinstance(value, BinaryType) or isinstance(data_type.keyType, (BinaryType, *_NESTED)):
        raise PipelineError(f"headers must be texts, not {data_type.simpleString()}; convert them first")
    if isinstance(value, _NESTED):
        column = F.transform_values(column, lambda _, nested: F.to_json(nested, {"ignoreNullFields": "false"}))
    return F.to_json(column.cast("map<string,string>"))


_NESTED = (ArrayType, MapType, StructType)


def _expiry_headers(headers: Column) -> Column:
    """Return headers that may set an expiry as a map; null for all other headers, which are nearly all."""
    may_expire = headers.contains(Headers.TIME_TO_BE_RECEIVED) | headers.contains("\\u")
    return F.when(may_expire, F.from_json(headers, "map<string,string>"))


def _body(messages: DataFrame, name: str | None) -> Column:
    if name is None:
        return F.lit(None).cast("binary")
    column, data_type = F.col(quote_name(name)), messages.schema[name].dataType
    if isinstance(data_type, BinaryType | StringType):
        return column.cast("binary")
    raise PipelineError(f"a body must be binary or a text, not {data_type.simpleString()}")


def _original_bytes(messages: DataFrame, columns: ColumnMapping, too_large: Column) -> Column:
    """Return the original bytes of a row, to set it aside. Of a body that is too large, return only the beginning."""
    contents = {name: F.lit(None).cast("binary") for name in _SHOWN_COLUMNS}
    for name, column in asdict(columns).items():
        if column is not None and column.startswith("="):
            contents[name] = F.lit(column[1:]).cast("binary")
        elif column is not None:
            data_type, value = messages.schema[column].dataType, F.col(quote_name(column))
            # This also works for a map with bytes that are not UTF-8, which JSON cannot represent.
            text = value.cast("string")
            if isinstance(data_type, MapType):
                text = F.when(F.is_valid_utf8(text), F.to_json(value)).otherwise(text)
            contents[name] = value if isinstance(data_type, BinaryType) else text.cast("binary")
    if MALFORMED in messages.columns:
        contents["row"] = F.col(MALFORMED).cast("binary")
    beginning = F.make_valid_utf8(F.substring(contents["body"].cast("string"), 1, _BEGINNING_CHARACTERS))
    shortened = F.concat(beginning, F.lit("…")).cast("binary")
    contents["body"] = F.when(F.coalesce(too_large, F.lit(False)), shortened).otherwise(contents["body"])
    return F.struct(*(contents[name].alias(name) for name in _SHOWN_COLUMNS))


def _checksums(messages: DataFrame, columns: ColumnMapping) -> DataFrame:
    """Return the number of all rows, with a null ``id_checksum``, and the checksums of ids that may be repeated.

    There are nearly never such checksums. Only the column of ids is read, and eight bytes of each id are shuffled.
    """
    id_ = F.col(quote_name(columns.message_id)).cast("string")
    checksum = F.coalesce(F.xxhash64(id_), F.lit(0)).alias("id_checksum")
    checksum_counts = messages.select(checksum).rollup("id_checksum").agg(F.count("*").alias("rows"))
    return checksum_counts.where("id_checksum IS NULL OR rows > 1")


def _mark_conflicts(rows: DataFrame, candidates: DataFrame, limit: int) -> DataFrame:
    """Set the reason ``conflicting_rows`` for all rows whose id is in the input with different content.

    None of these rows can be preferred. Only good rows are compared, in the form in which they will be stored. Only ids
    and checksums are shuffled, never bodies.
    """
    headers = F.array_sort(F.map_entries(F.from_json("headers", "map<string,string>")))
    parts = [*map(F.col, ("due", "destination", "expires_at")), headers, F.col("body")]
    content = F.xxhash64(*parts, *(part.isNull() for part in parts))  # The checksum includes which parts are null.
    conflicting = (
        rows.where(F.col("reason").isNull())
        .withColumn("id_checksum", F.xxhash64("message_id"))
        .join(candidates, "id_checksum", "left_semi")
        .select(*MESSAGE_COLUMNS.names)
        .mapInArrow(partial(_select_good, limit), _CONTENT)
        .select("message_id", content.alias("content"))
        .groupBy("message_id")
        .agg(F.min("content").alias("least"), F.max("content").alias("greatest"))
        .where(F.col("least") != F.col("greatest"))
        .select("message_id", F.lit("conflicting_rows").alias("conflict"))
    )
    return rows.join(F.broadcast(conflicting), "message_id", "left").withColumn(
        "reason", F.coalesce("reason", "conflict")
    )


def _select_good(limit: int, batches: Batches) -> Batches:
    """Return the rows that are messages, with their headers in the one form in which they are stored."""
    for batch in batches:
        yield split_columns(batch, limit)[0]


# --- storing: on the executors ---------------------------------------------------------------------------------------


def _store_all(spec: StoreSpec, now: datetime, batch_size: int | None, batches: Batches) -> Batches:
    """Store the rows of a task. The task receives the address of a store, never a connection."""
    with open_spec(spec) as store:
        rows_at_once = batch_size or store.rows_at_once
        for batch in batches:
            for start in range(0, batch.num_rows, rows_at_once):
                yield _store(store, batch.slice(start, rows_at_once), now)


def _store(store: OpenStore, batch: pa.RecordBatch, now: datetime) -> pa.RecordBatch:
    """Store one batch in one transaction. Return its counts in the first row, then the rows that were set aside."""
    is_good = pc.is_null(batch.column("reason"))
    good = batch.filter(is_good)
    messages, bad_rows = split_columns(good, store.largest_message_bytes)
    report = store.store_batch(messages, now)
    counts = {"stored": report.stored, "already_there": len(report.duplicate_ids)}
    rows = [counts, *_rejected_rows(batch.filter(pc.invert(is_good))), *_refused_rows(good, bad_rows)]
    return pa.RecordBatch.from_pylist(rows, schema=_OUTCOME_ARROW)


def _rejected_rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Return the rows that have a reason from Spark SQL. Conflicting rows have no ``row_bytes`` bytes."""
    rows = list[dict[str, Any]]()
    reasons = cast("list[str]", batch.column("reason").to_pylist())
    contents = cast("list[Any]", batch.column("shown").to_pylist())
    for reason, row_bytes, texts in zip(reasons, contents, texts_of(batch), strict=True):
        row_contents: Mapping[str, bytes | None] = row_bytes or {}
        raw = {name: content for name, content in row_contents.items() if content is not None}
        decoded = {name: content.decode("utf-8", "backslashreplace") for name, content in raw.items()}
        row = {"reason": reason, "detail": _DETAILS.get(reason, ""), **texts, **decoded}
        rows.append({**row, "bytes": _not_utf8_bytes(raw)})
    return rows


def _refused_rows(batch: pa.RecordBatch, bad_rows: list[BadRow]) -> list[dict[str, Any]]:
    rows = list[dict[str, Any]]()
    for row in bad_rows:
        row_batch = batch.slice(row.position, 1)
        body = cast("bytes | None", row_batch.column("body")[0].as_py())
        contents: dict[str, bytes] = {} if body is None else {"body": body}
        rows.append(
            {"reason": row.code, "detail": row.detail, **texts_of(row_batch)[0], "bytes": _not_utf8_bytes(contents)}
        )
    return rows


def _not_utf8_bytes(contents: Mapping[str, bytes]) -> list[tuple[str, bytes]] | None:
    """Return the contents that are not UTF-8, which a text cannot hold."""
    undecodable = list[tuple[str, bytes]]()
    for name, content in contents.items():
        try:
            content.decode()
        except UnicodeDecodeError:
            undecodable.append((name, content))
    return undecodable or None


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
    NOT_UTF8: "a text of the row is no UTF-8; bytes has it as it is. Say which encoding a file has, or mend the row",
    "lapses_before_due": "its time to be received, which counts from its time sent, ends before it is due",
    "message_too_large": "the body is larger than the store takes; keep it elsewhere and send a reference",
}


# --- result: on the driver -------------------------------------------------------------------------------------------


def _result(outcomes: DataFrame, job: ScheduleJob, started: float) -> ScheduleResult:
    reason_counts = outcomes.groupBy("reason").agg(
        F.count("*").alias("rows"), F.sum("stored").alias("stored"), F.sum("already_there").alias("already_there")
    )
    rows = {row["reason"]: row for row in reason_counts.collect()}
    seconds = time.perf_counter() - started
    stored = rows.pop(None, None)
    accepted, already_there = (stored["stored"], stored["already_there"]) if stored else (0, 0)
    set_aside = {reason: row["rows"] for reason, row in sorted(rows.items())}
    rejected_to, rejects = None, job.rejects
    if set_aside and rejects is not None:
        outcomes.where(F.col("reason").isNotNull()).select(*_TEXTS, "bytes").write.format(rejects.format).save(
            str(rejects.path)
        )
        rejected_to = str(rejects.path)
    result = ScheduleResult(
        read=accepted + already_there + sum(set_aside.values()),
        accepted=accepted,
        already_there=already_there,
        set_aside=set_aside,
        rejected_to=rejected_to,
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

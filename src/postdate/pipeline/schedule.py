"""Store a table of messages: millions of rows, idempotent by message id. Bad rows are set aside with the reason.

The input is read twice: once to find ids with different content, which needs the whole input, and once to store. Spark
SQL checks times and texts of rows; Arrow then checks whole batches, and only doubtful rows are checked one by one. A
store that accepts columns gets them without conversion.

With ``sync``, the messages that wait under the name of a load become those of the table; see
:mod:`postdate.pipeline.syncing`.

A row is stored unchanged or set aside as a whole. A text that is not UTF-8, or headers that JSON cannot represent, are
never altered. A row whose id the store knows is compared with what the store has; see
:mod:`postdate.pipeline.duplicates`. The rows of the input are counted separately from the results, and the sums are
compared.

After a failure nothing is half done: every batch is a transaction, and ids that were stored before are left unchanged.
So the same job can be run again.
"""

from __future__ import annotations

import difflib
import json
import logging
import re
import time
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark program uses
from pyspark.sql import types as sql_types

from postdate.core.upkeep.wall_times import ZoneMarkers
from postdate.core.zones import read_rules
from postdate.errors import PipelineError, PostdateError, StoreNotSetUp
from postdate.messages import Headers, decode_headers
from postdate.pipeline import rows as pipeline_rows
from postdate.pipeline import syncing
from postdate.pipeline.duplicates import can_compare, find_conflicts, find_duplicate_ids
from postdate.pipeline.failures import shorten_errors
from postdate.pipeline.files import ORIGIN, ORIGIN_FIELD
from postdate.pipeline.frames import persist_frame
from postdate.pipeline.lapsing import relative_expiry_of
from postdate.pipeline.loads import cancel_frame, check_load, read_pending_of_load
from postdate.pipeline.local_time import LocalTimes, ZoneTimes, add_time, differs_from_java
from postdate.pipeline.outputs import NewFolder, check_new_folder, check_new_path
from postdate.pipeline.plain import to_plain
from postdate.pipeline.session import check_utc
from postdate.pipeline.stores import OpenStore, StoreSpec, open_in_task, open_spec
from postdate.ports.scanning import WRITTEN_COLUMNS

_SHOWN_COLUMNS = (*WRITTEN_COLUMNS, "row")
_TEXTS = ("reason", "detail", "file", *_SHOWN_COLUMNS)
_BYTES: pa.DataType = pa.map_(pa.string(), pa.binary())
_OUTCOME_ARROW = pa.schema(
    [
        ("outcome", pa.string()),
        ("stored", pa.int64()),
        ("already_there", pa.int64()),
        *((name, pa.string()) for name in _TEXTS),
        ("line", pa.int64()),
        ("bytes", _BYTES),
    ]
)
_REJECTED_COLUMNS = ("reason", "detail", "file", "line", *_SHOWN_COLUMNS, "bytes")
_COUNTS, _REJECTED, _CONFLICTING, _SAMPLE = "counts", "set_aside", "conflicting", "sample"
_SAMPLE_ROWS = 10
CONFLICTS_WITH_STORE = "conflicts_with_store"
"""Reason of rows whose id the store knows with other content."""

log = logging.getLogger("postdate.pipeline")

_CONTENT = pipeline_rows.spark_schema(pipeline_rows.MESSAGE_COLUMNS)
_REPORT_SCHEMA = "outcome string, reason string, rows long"
_BEGINNING_CHARACTERS = 1_000
_REJECTED_ROWS, _REPORT = "the rejected rows", "the report"
_TOO_LARGE = "message_too_large"
_REJECTED_FORMATS = frozenset({"json", "parquet"})


@dataclass(frozen=True, slots=True)
class ColumnMapping:
    """The names of the input's columns. A column named here must exist.

    Args:
        message_id: text, 1 to 250 characters; the job is idempotent by this id.
        due: timestamp, or text in ISO 8601.
        destination: a column; or a fixed queue for all rows, written ``=queue``.
        body: text (stored as UTF-8) or binary; ``None`` for messages without a body. A struct, an array or a map is
            stored as its JSON text.
        headers: map of texts, struct, or text that is a JSON object; ``None`` for messages without headers. A value
            that is not text becomes its JSON text, exactly as it is written. A null field of a struct is no header.
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
        path: a directory, which must not exist yet: a path on the driver's machine, or as text a URI such as
            ``s3a://bucket/rejected``.
        format: ``json`` or ``parquet``. Columns: ``reason`` (a stable code), ``detail``, the message as texts; of CSV
            and JSON also ``file``, ``line`` and ``row``, which is the whole row exactly as it stands in the file.
            ``bytes`` has by column what a text cannot hold: bytes that are not UTF-8, and a whole body that is too
            large; in JSON as base64.
    """

    path: str | Path
    format: str = "json"

    def __post_init__(self) -> None:
        if self.format not in _REJECTED_FORMATS:
            raise PipelineError(f"rejected rows are written as json or parquet, not {self.format!r}")
        check_new_path(self.path, _REJECTED_ROWS)


@dataclass(frozen=True, slots=True)
class SyncResult:
    """What became of the messages that were pending under a load. Of a dry run: what would become of them.

    Args:
        unchanged: rows that are equal to the message that is pending.
        rescheduled: rows of which only the due time differed; the message has the new one.
        replaced: rows of which anything else differed; the row replaces the message.
        delivered_meanwhile: rows that differed, and whose message was claimed or delivered, or ended otherwise, before
            it could be changed.
        cancelled: messages that were pending and not in the table.
        not_cancelled: messages that were pending and not in the table, and that were claimed or delivered, or ended
            otherwise, before they could be cancelled.
        retained: messages that are not in the table and stay, because rows were set aside: the table is incomplete.
        samples: of a dry run, up to ten messages that would be ``rescheduled``, ``replaced`` and ``cancelled``.
    """

    unchanged: int = 0
    rescheduled: int = 0
    replaced: int = 0
    delivered_meanwhile: int = 0
    cancelled: int = 0
    not_cancelled: int = 0
    retained: int = 0
    samples: Mapping[str, tuple[Mapping[str, Any], ...]] = field(
        default_factory=dict[str, tuple[Mapping[str, Any], ...]]
    )

    @property
    def rows(self) -> int:
        """Number of rows of the table that these counts are about."""
        return self.unchanged + self.rescheduled + self.replaced + self.delivered_meanwhile


@dataclass(frozen=True, slots=True)
class ScheduleResult:
    """Result of a schedule job.

    ``read`` is the sum of ``accepted``, ``already_there``, ``conflicting`` and all of ``set_aside``; with ``sync`` also
    of its ``unchanged``, ``rescheduled``, ``replaced`` and ``delivered_meanwhile``.

    Args:
        read: rows of the input, counted separately from the results.
        accepted: messages that are new in the store.
        already_there: rows whose id was stored before, by this job (equal rows count once) or an earlier one, and
            which do not differ from what the store has.
        conflicting: rows whose id was stored before with another due time, destination, expiry, body or other headers.
            The store keeps what it has.
        set_aside: rows by reason.
        rejected_to: directory of the rows that were not stored; ``None`` if there are none, or if no directory was
            named.
        seconds: duration from the start to the last commit.
        reported_to: directory of the validation report; ``None`` if none was named.
        unused: columns of the input of which nothing was stored.
        is_dry_run: nothing was stored: ``accepted`` counts the messages that would be.
        sample: of a dry run, up to ten messages that would be stored, as texts.
        rejected_sample: of a dry run, up to ten rows that would not be stored, as texts with ``reason`` and ``detail``.
        load: name of the load; ``None``: the messages belong to no load.
        sync: what became of the messages that were pending under the load; ``None`` without ``sync``.
    """

    read: int
    accepted: int
    already_there: int
    conflicting: int = 0
    set_aside: Mapping[str, int] = field(default_factory=dict[str, int])
    rejected_to: str | None = None
    seconds: float = 0.0
    reported_to: str | None = None
    unused: tuple[str, ...] = ()
    is_dry_run: bool = False
    sample: tuple[Mapping[str, Any], ...] = ()
    rejected_sample: tuple[Mapping[str, Any], ...] = ()
    load: str | None = None
    sync: SyncResult | None = None

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
            (``accepted``, ``already_there``, ``conflicting`` or ``set_aside``), ``reason`` (null unless set aside),
            ``rows``. A path or a URI, as for :class:`Rejects`.
        unused: columns that resemble an optional column of the usual names, but do not stand for it. An input with such
            a column that is not listed here is refused.
        dry_run: read and check everything, and store nothing. No rejected rows and no report are written.
        expected_rows: number of rows of the input, as another reader has counted them; see
            :func:`postdate.pipeline.counting.count_rows`. Without it, the rows are only counted in a pass of their own.
        load: name of the load that the messages belong to, at most 200 characters; ``None``: of no load.
        sync: make the pending messages of the load equal to the table: store, reschedule, replace and cancel. Nothing
            is cancelled if a row is set aside. An input without rows is refused.
    """

    store: StoreSpec
    now: datetime
    columns: ColumnMapping | None = None
    local_times: LocalTimes | None = None
    rejects: Rejects | None = None
    batch: int | None = None
    report: str | Path | None = None
    unused: tuple[str, ...] = ()
    dry_run: bool = False
    expected_rows: int | None = None
    load: str | None = None
    sync: bool = False

    def __post_init__(self) -> None:
        if self.load is not None:
            check_load(self.load)
        elif self.sync:
            raise PipelineError("sync needs the name of a load: the messages under this name become those of the table")
        if self.report is not None:
            check_new_path(self.report, _REPORT)


@shorten_errors("the schedule has failed")
def schedule(messages: DataFrame, job: ScheduleJob) -> ScheduleResult:
    """Store every row of ``messages`` that is a message, and set the other rows aside.

    This runs on the driver. The rows are checked, turned into messages and stored on the executors.

    Args:
        messages: one message a row; the frame is computed twice, so cache an expensive one.
        job: see :class:`ScheduleJob`.

    Returns:
        Counts of all rows. If Spark repeats a task, messages that its first attempt stored count as already there, and
        those that it changed as unchanged.

    Raises:
        PipelineError: a column is missing, misspelt or of a wrong type, or a folder exists or cannot be written;
            nothing was stored. Or a task failed, or the input returned different rows when it was read again; messages
            stored by then stay, and the job can be run again.
        StoreError: the store failed before any task began; nothing was stored.
    """
    started = time.perf_counter()
    check_utc(messages.sparkSession)
    columns, unused = _resolve_columns(messages, job)
    folders = _check_folders(messages.sparkSession, job)
    limit, zone_times, is_set_up = _prepare_store(messages.sparkSession, job)
    with ExitStack() as stack:
        checksums = persist_frame(stack, _checksums(messages, columns))
        read = sum(row["rows"] for row in checksums.where("id_checksum IS NULL").collect())
        if job.expected_rows not in {None, read}:
            raise PipelineError(
                f"another reader counts {job.expected_rows:,} rows in the input, and Spark reads {read:,}; nothing was "
                f"stored"
            )
        if job.sync and not read:
            raise PipelineError(
                f"the input has no rows, so every message of the load {job.load!r} would be cancelled: if you mean "
                f"that, use `postdate pipeline loads undo`"
            )
        rows = _select_messages(messages, columns, zone_times, limit)
        candidates = checksums.where("id_checksum IS NOT NULL").select("id_checksum")
        may_repeat = bool(candidates.count())
        if may_repeat:
            rows = _mark_conflicts(rows, candidates, limit)
            if job.dry_run and not job.sync:  # Rows with one id come to one task, which counts them.
                rows = rows.repartition("message_id")
        if job.sync:
            # Without a checkpoint, Spark optimizes all expressions about times and headers again for each comparison,
            # which takes minutes. If an executor dies with its part, the job fails, and can be run again.
            checked = _check_rows(rows, limit, job.load).localCheckpoint(storageLevel=StorageLevel.DISK_ONLY)
            outcomes, sync = _sync(stack, checked, read, job, is_set_up=is_set_up, may_repeat=may_repeat)
        else:
            handling = (
                partial(_check_all, job.store if is_set_up else None, limit, job.load)
                if job.dry_run
                else partial(_store_all, job.store, job.now, job.batch, job.load)
            )
            outcomes, sync = rows.mapInArrow(handling, pipeline_rows.spark_schema(_OUTCOME_ARROW)), None
        outcomes = persist_frame(stack, outcomes, StorageLevel.DISK_ONLY)
        result = replace(_result(outcomes, job, folders, sync, started), unused=unused)
    _check_same_number(read, result.read, "what was stored stays")
    return result


def _check_same_number(counted: int, handled: int, state: str) -> None:
    """Raise PipelineError if the input had other rows when it was read again."""
    if counted != handled:
        raise PipelineError(
            f"the input had {counted:,} rows when they were counted, and {handled:,} when they were read again: it "
            f"gives other rows each time it is read; {state}. Cache the input, and run the job again"
        )


@dataclass(frozen=True, slots=True)
class _Folders:
    """The folders of a job, checked before anything is stored; ``None``: not requested."""

    rejected: NewFolder | None
    rejected_format: str
    report: NewFolder | None


def _check_folders(spark: SparkSession, job: ScheduleJob) -> _Folders:
    rejects, report = job.rejects, job.report
    return _Folders(
        rejected=None if rejects is None or job.dry_run else check_new_folder(spark, rejects.path, _REJECTED_ROWS),
        rejected_format="json" if rejects is None else rejects.format,
        report=None if report is None or job.dry_run else check_new_folder(spark, report, _REPORT),
    )


def _prepare_store(spark: SparkSession, job: ScheduleJob) -> tuple[int, ZoneTimes | None, bool]:
    """Return the limit of a message in bytes, the rules for clock times, and whether the store is set up."""
    with _open_store(job) as (store, is_set_up):
        if not can_compare(store.store):
            log.warning(
                "%s does not show its messages: rows whose ids it knows are not compared with them",
                type(store.store).__name__,
            )
        if job.sync:
            syncing.check_syncable(store)
        limit, local_times = store.largest_message_bytes, job.local_times
        if local_times is None:
            return limit, None, is_set_up
        markers = ZoneMarkers(store.store)
        if job.dry_run:
            markers.check_store(local_times.zone)
            rules = read_rules(local_times.zone).content
        else:
            rules = store.portal.call(markers.ensure_marker, local_times.zone, job.now)
    zone_times = ZoneTimes(local_times, rules)
    if differs_from_java(spark, zone_times, job.now):
        log.warning(
            "the rules of %s in Spark's Java are not those of Python (%s): times are read by those of Python, as by "
            "services",
            local_times.zone,
            read_rules(local_times.zone).version or "of an unknown version",
        )
    return limit, zone_times, is_set_up


@contextmanager
def _open_store(job: ScheduleJob) -> Generator[tuple[OpenStore, bool]]:
    """Open the store, and set it up unless the job is a dry run. Yields also whether it is set up."""
    is_set_up = not job.dry_run or _is_set_up(job.store)
    with open_spec(job.store, create=not job.dry_run, connect=is_set_up) as store:
        if not job.dry_run:
            store.setup()
        yield store, is_set_up


def _is_set_up(spec: StoreSpec) -> bool:
    try:
        with open_spec(spec) as store:
            find_duplicate_ids(store, _NO_MESSAGE)
    except StoreNotSetUp:
        return False
    return True


_NO_MESSAGE = pa.RecordBatch.from_pylist([{"message_id": "postdate"}], pipeline_rows.MESSAGE_COLUMNS)


# --- checks in Spark SQL ----------------------------------------------------------------------------------------------


def _select_messages(
    messages: DataFrame, columns: ColumnMapping, zone_times: ZoneTimes | None, limit: int
) -> DataFrame:
    """Return the columns of a message, ``reason`` (null for good rows), and in ``shown`` the bytes of a bad row.

    ``wall_time`` is the clock time and zone of rows that are due by the clocks of a zone. ``origin`` says where a row
    of a file stands.

    Headers become text if they are a map. The content of a text is checked later, together with everything that Spark
    would alter. A body over ``limit`` bytes is removed here: a few of them would fill the memory of every later step.
    """
    types = {column.name: column.dataType for column in messages.schema}
    prefix = "postdate~"
    while any(name.lower().startswith(prefix) for name in messages.columns):
        prefix += "~"

    def step(name: str) -> Column:
        return F.col(pipeline_rows.quote_name(prefix + name))

    # Each step is a column that the next ones name; for the reason see add_time().
    rows = messages.withColumns(
        {prefix + "headers": _headers(messages, columns.headers), prefix + "body": _body(messages, columns.body)}
    )
    due_column = F.col(pipeline_rows.quote_name(columns.due))
    rows = add_time(rows, prefix + "due", due_column, types[columns.due], zone_times)
    due, headers, body = step("due"), step("headers"), step("body")
    reasons = [
        F.when(_has_invalid_text(messages, columns), F.lit(pipeline_rows.NOT_UTF8)),
        *_missing_reasons(columns),
        due["problem"],
    ]
    expires_at: Column = F.lit(None).cast("timestamp")
    if columns.expires_at is not None:
        expiry_column = F.col(pipeline_rows.quote_name(columns.expires_at))
        rows = add_time(rows, prefix + "expires_at", expiry_column, types[columns.expires_at], zone_times)
        expires_at, problem = step("expires_at")["instant"], step("expires_at")["problem"]
        reasons.append(F.when(problem.isNotNull(), F.concat(F.lit("expiry_"), problem)))
    # The time to be received counts from the time sent, not from the due time: such a message would never be handled
    # (specification row 75). A message whose end is malformed is accepted, and fails at its receiver.
    expires_before_due = relative_expiry_of(_expiry_headers(headers)) < due["instant"]
    reasons += [
        F.when(F.octet_length(body) > limit, F.lit(_TOO_LARGE)),
        F.when(expires_before_due, F.lit("lapses_before_due")),
    ]
    origin = F.col(ORIGIN) if ORIGIN in messages.columns else F.lit(None).cast(ORIGIN_FIELD.dataType)
    reason, good = step("reason"), step("reason").isNull()
    return rows.withColumn(prefix + "reason", F.coalesce(origin["reason"], *reasons)).select(
        F.when(good, F.col(pipeline_rows.quote_name(columns.message_id)).cast("string")).alias("message_id"),
        F.when(good, _destination(columns.destination)).alias("destination"),
        due["instant"].alias("due"),
        expires_at.alias("expires_at"),
        F.when(good, headers).alias("headers"),
        F.when(good, body).alias("body"),
        reason.alias("reason"),
        F.when(reason.isNotNull(), _original_bytes(messages, columns)).alias("shown"),
        F.when(good, due["wall_time"]).alias("wall_time"),
        origin.alias("origin"),
    )


_OPTIONAL = frozenset({"body", "headers", "expires_at"})
_NEAR = 0.75
"""Similarity at which two names count as one misspelt name: a letter changed in four, or two letters swapped."""


def _resolve_columns(messages: DataFrame, job: ScheduleJob) -> tuple[ColumnMapping, tuple[str, ...]]:
    """Return the names of the input's columns, and the names of unused columns.

    Columns are resolved as Spark does it: without regard to case, unless the session says otherwise.
    """
    case_sensitive = messages.sparkSession.conf.get("spark.sql.caseSensitive") == "true"
    names = [name for name in messages.columns if name != ORIGIN]
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
    return ColumnMapping(**resolved_names), unused


def _matching_columns(name: str, columns: Sequence[str], *, case_sensitive: bool) -> list[str]:
    """Return the columns that match a name."""
    return [each for each in columns if each == name or (not case_sensitive and each.lower() == name.lower())]


def _find_nearest(name: str, columns: Sequence[str]) -> str | None:
    """Return the column that differs from the name only by a slip: spaces, case, separators, or one letter."""
    plain_names = {re.sub(r"[\W_]", "", column).lower(): column for column in columns}
    similar = difflib.get_close_matches(name.replace("_", ""), plain_names, n=1, cutoff=_NEAR)
    return plain_names[similar[0]] if similar else None


def _destination(name: str) -> Column:
    return F.lit(name[1:]) if name.startswith("=") else F.col(pipeline_rows.quote_name(name)).cast("string")


def _missing_reasons(columns: ColumnMapping) -> list[Column]:
    required = {
        "missing_id": F.col(pipeline_rows.quote_name(columns.message_id)).cast("string"),
        "missing_due": F.col(pipeline_rows.quote_name(columns.due)).cast("string"),
        "missing_destination": _destination(columns.destination),
    }
    return [F.when(column.isNull() | (F.trim(column) == ""), F.lit(reason)) for reason, column in required.items()]


def _has_invalid_text(messages: DataFrame, columns: ColumnMapping) -> Column:
    """Return whether a text of a row is not UTF-8. Spark's own functions would alter such a text."""
    not_utf8 = F.lit(False)
    for name in asdict(columns).values():
        if name is None or name.startswith("="):
            continue
        column, data_type = F.col(pipeline_rows.quote_name(name)), messages.schema[name].dataType
        if isinstance(data_type, sql_types.StringType):
            not_utf8 |= F.coalesce(~F.is_valid_utf8(column), F.lit(False))
        elif isinstance(data_type, _NESTED):  # This text has the bytes of all texts in the value.
            not_utf8 |= F.coalesce(~F.is_valid_utf8(column.cast("string")), F.lit(False))
    return not_utf8


def _headers(messages: DataFrame, name: str | None) -> Column:
    """Return the headers as a text that is a JSON object."""
    if name is None:
        return F.lit(None).cast("string")
    column, data_type = F.col(pipeline_rows.quote_name(name)), messages.schema[name].dataType
    if isinstance(data_type, sql_types.StringType):
        return F.when(F.trim(column) != "", column)
    if isinstance(data_type, sql_types.StructType | sql_types.VariantType):
        _refuse_bytes(data_type, "headers")
        return F.to_json(column)
    if not isinstance(data_type, sql_types.MapType):
        raise PipelineError(f"headers must be a map, a struct or a text, not {data_type.simpleString()}")
    value = data_type.valueType
    _refuse_bytes(data_type, "headers")
    if isinstance(data_type.keyType, _NESTED):
        raise PipelineError(f"headers must be texts, not {data_type.simpleString()}; convert them first")
    if isinstance(value, _NESTED):
        column = F.transform_values(column, lambda _, nested: F.to_json(nested, {"ignoreNullFields": "false"}))
    return F.to_json(column.cast("map<string,string>"))


_NESTED = (sql_types.ArrayType, sql_types.MapType, sql_types.StructType)


def _refuse_bytes(data_type: sql_types.DataType, what: str) -> None:
    """Raise PipelineError for a value with bytes in it: JSON has none, and Spark would write them as base64."""
    if _has_bytes(data_type):
        raise PipelineError(f"{what} must be texts, not {data_type.simpleString()}; convert them first")


def _has_bytes(data_type: sql_types.DataType) -> bool:
    match data_type:
        case sql_types.BinaryType():
            return True
        case sql_types.ArrayType():
            return _has_bytes(data_type.elementType)
        case sql_types.MapType():
            return _has_bytes(data_type.keyType) or _has_bytes(data_type.valueType)
        case sql_types.StructType():
            return any(_has_bytes(field.dataType) for field in data_type.fields)
        case _:
            return False


def _expiry_headers(headers: Column) -> Column:
    """Return headers that may set an expiry as a map; null for all other headers, which are nearly all."""
    may_expire = headers.contains(Headers.TIME_TO_BE_RECEIVED) | headers.contains("\\u")
    return F.when(may_expire, F.from_json(headers, "map<string,string>"))


def _body(messages: DataFrame, name: str | None) -> Column:
    if name is None:
        return F.lit(None).cast("binary")
    column, data_type = F.col(pipeline_rows.quote_name(name)), messages.schema[name].dataType
    if isinstance(data_type, sql_types.BinaryType | sql_types.StringType):
        return column.cast("binary")
    if isinstance(data_type, (*_NESTED, sql_types.VariantType)):
        _refuse_bytes(data_type, "a body that becomes JSON")
        return F.to_json(column, {"ignoreNullFields": "false"}).cast("binary")
    raise PipelineError(f"a body must be binary, a text or a struct, not {data_type.simpleString()}")


def _original_bytes(messages: DataFrame, columns: ColumnMapping) -> Column:
    """Return the original bytes of a row's message, to set it aside."""
    contents = {name: F.lit(None).cast("binary") for name in WRITTEN_COLUMNS}
    for name, column in asdict(columns).items():
        if column is not None and column.startswith("="):
            contents[name] = F.lit(column[1:]).cast("binary")
        elif column is not None:
            data_type, value = messages.schema[column].dataType, F.col(pipeline_rows.quote_name(column))
            # This also works for a value with bytes that are not UTF-8, which JSON cannot represent.
            text = value.cast("string")
            if isinstance(data_type, _NESTED):
                text = F.when(F.is_valid_utf8(text), F.to_json(value, {"ignoreNullFields": "false"})).otherwise(text)
            contents[name] = value if isinstance(data_type, sql_types.BinaryType) else text.cast("binary")
    return F.struct(*(contents[name].alias(name) for name in WRITTEN_COLUMNS))


def _checksums(messages: DataFrame, columns: ColumnMapping) -> DataFrame:
    """Return the number of all rows, with a null ``id_checksum``, and the checksums of ids that may be repeated.

    There are nearly never such checksums. Only the column of ids is read, and eight bytes of each id are shuffled.
    """
    id_ = F.col(pipeline_rows.quote_name(columns.message_id)).cast("string")
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
        .select(*pipeline_rows.MESSAGE_COLUMNS.names, "wall_time")
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


def _select_good(limit: int, batches: pipeline_rows.Batches) -> pipeline_rows.Batches:
    """Return the rows that are messages, with their headers in the one form in which they are stored."""
    for batch in batches:
        yield pipeline_rows.split_columns(_add_own_headers(batch, None), limit)[0]


# --- storing: on the executors ---------------------------------------------------------------------------------------


def _store_all(
    spec: StoreSpec, now: datetime, batch_size: int | None, load: str | None, batches: pipeline_rows.Batches
) -> pipeline_rows.Batches:
    """Store the rows of a task. The task receives the address of a store, never a connection."""
    with open_in_task(spec) as store:
        rows_at_once = batch_size or store.rows_at_once
        for batch in batches:
            for start in range(0, batch.num_rows, rows_at_once):
                yield _store(store, batch.slice(start, rows_at_once), now, load)


def _store(store: OpenStore, batch: pa.RecordBatch, now: datetime, load: str | None) -> pa.RecordBatch:
    """Store one batch in one transaction. Return its counts in the first row, then the rows that were not stored."""
    good, messages, bad_rows, rejected = _split(batch, store.largest_message_bytes, load)
    report = store.store_batch(messages, now)
    conflicts = find_conflicts(store, messages, {*report.duplicate_ids})
    already_there = len(report.duplicate_ids) - len(conflicts)
    counts = {"outcome": _COUNTS, "stored": report.stored, "already_there": already_there}
    rows = [counts, *rejected, *_refused_rows(good, bad_rows), *_conflicting_rows(good, messages, conflicts)]
    return pa.RecordBatch.from_pylist(rows, schema=_OUTCOME_ARROW)


def _check_all(
    spec: StoreSpec | None, limit: int, load: str | None, batches: pipeline_rows.Batches
) -> pipeline_rows.Batches:
    """Check the rows of a task as :func:`_store_all` does, and store nothing. ``spec``: ``None`` for an empty store."""
    with ExitStack() as stack:
        store = None if spec is None else stack.enter_context(open_in_task(spec))
        earlier_ids, samples = set[str](), _SAMPLE_ROWS
        for batch in batches:
            good, messages, bad_rows, rejected = _split(batch, limit, load)
            duplicate_ids = set[str]() if store is None else find_duplicate_ids(store, messages)
            conflicts = {} if store is None else find_conflicts(store, messages, duplicate_ids)
            ids, new_positions = cast("list[str]", messages.column("message_id").to_pylist()), list[int]()
            for position, message_id in enumerate(ids):
                if message_id not in duplicate_ids and message_id not in earlier_ids:
                    new_positions.append(position)
                    earlier_ids.add(message_id)
            sample = [
                {"outcome": _SAMPLE, **texts}
                for texts in pipeline_rows.texts_of(messages.take(pa.array(new_positions[:samples], pa.int64())))
            ]
            samples -= len(sample)
            already_there = messages.num_rows - len(new_positions) - len(conflicts)
            counts = {"outcome": _COUNTS, "stored": len(new_positions), "already_there": already_there}
            conflicting = _conflicting_rows(good, messages, conflicts)
            rows = [counts, *sample, *rejected, *_refused_rows(good, bad_rows), *conflicting]
            yield pa.RecordBatch.from_pylist(rows, schema=_OUTCOME_ARROW)


def _split(
    batch: pa.RecordBatch, limit: int, load: str | None
) -> tuple[pa.RecordBatch, pa.RecordBatch, list[pipeline_rows.BadRow], list[dict[str, Any]]]:
    """Return the rows without a reason, the messages of them, the others of them, and the rows with a reason."""
    is_good = pipeline_rows.pc.is_null(batch.column("reason"))
    good = batch.filter(is_good)
    messages, bad_rows = pipeline_rows.split_columns(_add_own_headers(good, load), limit)
    return good, messages, bad_rows, _rejected_rows(batch.filter(pipeline_rows.pc.invert(is_good)))


def _add_own_headers(batch: pa.RecordBatch, load: str | None) -> pa.RecordBatch:
    """Return rows whose headers have the wall time of the row, if it has one, and the load, if there is one.

    Headers that are no object stay. A row that has the header of another load gets a second one, and is refused for it.
    """
    wall_times, headers = (cast("Any", batch.column(name)) for name in ("wall_time", "headers"))
    if load is not None:
        pair = f'"{Headers.LOAD}":{json.dumps(load, ensure_ascii=False)}'
        pairs = pipeline_rows.pc.if_else(pa.array(_has_load(headers, load), pa.bool_()), None, pair)
        headers = _add_pairs(headers, pairs)
    if wall_times.null_count < batch.num_rows:
        pairs = pipeline_rows.pc.binary_join_element_wise(f'"{Headers.WALL_TIME}":"', wall_times, '"', "")
        headers = _add_pairs(headers, pairs)
    return batch.set_column(batch.schema.get_field_index("headers"), "headers", headers)


def _has_load(headers: Any, load: str) -> list[bool]:
    """Return for each row whether its headers name this load already, as those of a row that was read from a store."""
    may_have_load = pipeline_rows.pc.match_substring(pipeline_rows.pc.fill_null(headers, ""), Headers.LOAD)
    has_load = [False] * len(headers)
    for position in cast("list[int]", pipeline_rows.pc.indices_nonzero(may_have_load).to_pylist()):
        with suppress(PostdateError):  # Such headers are refused later, with their row.
            has_load[position] = decode_headers(headers[position].as_buffer().to_pybytes()).get(Headers.LOAD) == load
    return has_load


def _add_pairs(headers: Any, pairs: Any) -> Any:
    """Return headers, as JSON objects, that begin with the given name and value; null pairs add nothing."""
    pc = pipeline_rows.pc
    objects = pc.replace_substring_regex(pc.fill_null(headers, "{}"), r"\A[ \t\r\n]*\{[ \t\r\n]*", "{")
    remainder = pc.binary_replace_slice(objects.cast(pa.binary()), 0, 1, b"").cast(pa.string())
    separator = pc.if_else(pc.starts_with(remainder, "}"), "", ",")
    joined = pc.binary_join_element_wise("{", pairs, separator, remainder, "")
    is_changed = pc.and_(pairs.is_valid(), pc.starts_with(objects, "{"))
    return pc.if_else(is_changed, joined, headers)


def _rejected_rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Return the rows that have a reason from Spark SQL. Conflicting rows have no ``shown`` bytes."""
    rows = list[dict[str, Any]]()
    reasons = cast("list[str]", batch.column("reason").to_pylist())
    contents = cast("list[Any]", batch.column("shown").to_pylist())
    for position, (reason, shown, texts) in enumerate(
        zip(reasons, contents, pipeline_rows.texts_of(batch), strict=True)
    ):
        message_contents: Mapping[str, bytes | None] = shown or _message_bytes(batch, position)
        raw = {name: content for name, content in message_contents.items() if content is not None}
        origin = _origin_of(batch, position, raw)
        decoded = {name: content.decode("utf-8", "backslashreplace") for name, content in raw.items()}
        row = {
            "outcome": _REJECTED,
            "reason": reason,
            "detail": _DETAILS.get(reason, ""),
            **texts,
            **decoded,
            **origin,
        }
        binary = _not_utf8_bytes(raw)
        if reason == _TOO_LARGE and "body" in raw:
            row["body"] = f"{raw['body'][:_BEGINNING_CHARACTERS].decode('utf-8', 'replace')}…"
            binary = {**binary, "body": raw["body"]}
        rows.append({**row, "bytes": [*binary.items()] or None})
    return rows


def _message_bytes(batch: pa.RecordBatch, position: int) -> dict[str, bytes | None]:
    return {"body": cast("bytes | None", batch.column("body")[position].as_py())}


def _refused_rows(batch: pa.RecordBatch, bad_rows: list[pipeline_rows.BadRow]) -> list[dict[str, Any]]:
    return [_row_of(batch, row.position, _REJECTED, row.code, row.detail) for row in bad_rows]


def _conflicting_rows(
    good: pa.RecordBatch, messages: pa.RecordBatch, conflicts: Mapping[int, str]
) -> list[dict[str, Any]]:
    """Return the rows that conflict with the store, as they are in the input."""
    if not conflicts:
        return []
    ids = cast("list[str]", messages.column("message_id").to_pylist())
    positions = dict[str, int]()  # Rows with one id and different content were set aside before.
    for position, message_id in enumerate(cast("list[str]", good.column("message_id").to_pylist())):
        positions.setdefault(message_id, position)
    return [
        _row_of(good, positions[ids[position]], _CONFLICTING, CONFLICTS_WITH_STORE, detail)
        for position, detail in conflicts.items()
    ]


def _row_of(batch: pa.RecordBatch, position: int, outcome: str, reason: str, detail: str) -> dict[str, Any]:
    raw = {name: content for name, content in _message_bytes(batch, position).items() if content is not None}
    origin = _origin_of(batch, position, raw)
    texts = pipeline_rows.texts_of(batch.slice(position, 1))[0]
    binary = _not_utf8_bytes(raw)
    return {
        "outcome": outcome,
        "reason": reason,
        "detail": detail,
        **texts,
        **origin,
        "bytes": [*binary.items()] or None,
    }


def _origin_of(batch: pa.RecordBatch, position: int, raw: dict[str, bytes]) -> dict[str, Any]:
    """Return file, line and text of a row, with what makes it malformed, and add its bytes to ``raw``."""
    origin = cast("dict[str, Any] | None", batch.column("origin")[position].as_py())
    if origin is None:
        return {}
    raw["row"] = origin["content"]
    text = origin["content"].decode("utf-8", "backslashreplace")
    detail = {} if origin["detail"] is None else {"detail": origin["detail"]}
    return {"file": origin["file"], "line": origin["line"], "row": text, **detail}


def _not_utf8_bytes(contents: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the contents that are not UTF-8, which a text cannot hold."""
    undecodable = dict[str, bytes]()
    for name, content in contents.items():
        try:
            content.decode()
        except UnicodeDecodeError:
            undecodable[name] = content
    return undecodable


_DETAILS_OF_TIMES: Mapping[str, str] = {
    "malformed_time": "is not ISO 8601, or no such time exists",
    "time_without_zone": "has no offset from UTC; give it one, or name the zone of such times",
    "time_out_of_range": "is outside the years 1 to 9999 of UTC; give a time in them",
    "nonexistent_local_time": "is one that clocks never showed: they were set forward over it",
    "ambiguous_local_time": "is one that clocks showed twice: they were set back over it",
}
_DETAILS: Mapping[str, str] = {
    **{reason: f"the due time {detail}" for reason, detail in _DETAILS_OF_TIMES.items()},
    **{f"expiry_{reason}": f"the expiry {detail}" for reason, detail in _DETAILS_OF_TIMES.items()},
    "missing_id": "the message id is missing or blank",
    "missing_due": "the due time is missing or blank",
    "missing_destination": "the destination is missing or blank",
    "conflicting_rows": "this id stands in the input with differing content",
    pipeline_rows.NOT_UTF8: (
        "a text of the row is not UTF-8; the column bytes has its bytes. Name the encoding of the file, or correct the "
        "row"
    ),
    "lapses_before_due": "its time to be received, which counts from its time sent, ends before it is due",
    "message_too_large": "the body is larger than the store takes; keep it elsewhere and send a reference",
}


# --- making a load equal to the table ---------------------------------------------------------------------------------


_CHECKED_ARROW = pa.unify_schemas([pipeline_rows.MESSAGE_COLUMNS, syncing.SIGNATURE])
_SYNC_COUNTS = ("unchanged", syncing.RESCHEDULED, syncing.REPLACED, "delivered_meanwhile", "cancelled", "not_cancelled")
_SYNC_ARROW = pa.unify_schemas([_OUTCOME_ARROW, pa.schema([(name, pa.int64()) for name in _SYNC_COUNTS])])
_SYNC_SCHEMA = pipeline_rows.spark_schema(_SYNC_ARROW)


def _check_rows(rows: DataFrame, limit: int, load: str | None) -> DataFrame:
    """Return each row either as ``rejected``, an outcome, or as ``message``, with the columns of a message to store.

    A message also has its signature and its origin.
    """
    rejected = f"struct<{_in_struct(_OUTCOME_ARROW)}>"
    message = f"struct<{_in_struct(_CHECKED_ARROW)}, origin: {ORIGIN_FIELD.dataType.simpleString()}>"
    return rows.mapInArrow(partial(_check_batches, limit, load), f"rejected {rejected}, message {message}")


def _in_struct(schema: pa.Schema) -> str:
    return ", ".join(f"{name}: {spark_type}" for name, spark_type in pipeline_rows.spark_types(schema).items())


def _check_batches(limit: int, load: str | None, batches: pipeline_rows.Batches) -> pipeline_rows.Batches:
    rejected_type = pa.struct(cast("Any", list(_OUTCOME_ARROW)))
    for batch in batches:
        good, messages, bad_rows, rejected = _split(batch, limit, load)
        rejected_rows = pa.array([*rejected, *_refused_rows(good, bad_rows)], rejected_type)
        origins = _take_origins(good, messages)
        message_type = pa.struct(cast("Any", [*_CHECKED_ARROW, pa.field("origin", origins.type)]))
        columns = cast("list[Any]", [*messages.columns, *syncing.signature_columns(messages), origins])
        checked = pa.StructArray.from_arrays(columns, fields=list(message_type))
        names = ["rejected", "message"]
        yield pa.RecordBatch.from_arrays([rejected_rows, pa.nulls(len(rejected_rows), message_type)], names)
        yield pa.RecordBatch.from_arrays([pa.nulls(len(checked), rejected_type), checked], names)


def _take_origins(good: pa.RecordBatch, messages: pa.RecordBatch) -> Any:
    """Return the origins of messages that :func:`_split` has put into another order. Equal rows have the first one."""
    origins = cast("Any", good.column("origin"))
    if origins.null_count == len(origins):
        return cast("Any", pa.nulls(messages.num_rows, origins.type))
    places = pipeline_rows.pc.index_in(messages.column("message_id"), value_set=good.column("message_id"))
    return origins.take(places)


def _sync(
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
    _check_same_number(read, totals["rejected"] + totals["messages"], "nothing was changed")
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
        "outcome": _COUNTS,
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
        counts = removed.agg(count).select(F.lit(_COUNTS).alias("outcome"), "cancelled")
        due = F.date_format(F.timestamp_micros("due_at"), "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX").alias("due")
        texts = [F.lit(_SAMPLE).alias("outcome"), F.lit("cancelled").alias("reason"), "message_id", "destination", due]
        sample = removed.orderBy("message_id").limit(_SAMPLE_ROWS).select(*texts)
        return counts.unionByName(sample, allowMissingColumns=True)
    cancelled = cancel_frame(removed.select("message_id"), job.store, job.now)
    return cancelled.select(F.lit(_COUNTS).alias("outcome"), "cancelled", F.col("delivered").alias("not_cancelled"))


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
            (None, syncing.RESCHEDULED, syncing.REPLACED), _SAMPLE_ROWS if dry_run else 0
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
                counts = {name: len(getattr(changes, name)) for name in _SYNC_COUNTS[:4]}
                counts |= {"stored": len(changes.stored), "already_there": len(changes.already_there)}
                outcomes: list[dict[str, Any]] = [{"outcome": _COUNTS, **counts}]
                for reason, places in positions.items():
                    shown = messages.take(pa.array(places[: samples[reason]], pa.int64()))
                    samples[reason] -= shown.num_rows
                    texts = pipeline_rows.texts_of(shown)
                    outcomes += [{"outcome": _SAMPLE, "reason": reason, **each} for each in texts]
                outcomes += [
                    _row_of(rows, position, _CONFLICTING, CONFLICTS_WITH_STORE, detail)
                    for position, detail in changes.conflicts.items()
                ]
                yield pa.RecordBatch.from_pylist(outcomes, schema=_SYNC_ARROW)


# --- result: on the driver -------------------------------------------------------------------------------------------


def _result(
    outcomes: DataFrame, job: ScheduleJob, folders: _Folders, sync: SyncResult | None, started: float
) -> ScheduleResult:
    summed = ("stored", "already_there", *(() if sync is None else _SYNC_COUNTS))
    counts = outcomes.groupBy("outcome", "reason").agg(
        F.count("*").alias("rows"), *(F.sum(name).alias(name) for name in summed)
    )
    rows = {(row["outcome"], row["reason"]): row for row in counts.collect()}
    seconds = time.perf_counter() - started
    total = rows.get((_COUNTS, None))
    accepted, already_there = (total["stored"], total["already_there"]) if total else (0, 0)
    set_aside = {
        reason: row["rows"] for (outcome, reason), row in sorted(rows.items(), key=str) if outcome == _REJECTED
    }
    conflicting = sum(row["rows"] for (outcome, _), row in rows.items() if outcome == _CONFLICTING)
    if sync is not None and total is not None:
        sync = replace(sync, **{name: total[name] or 0 for name in _SYNC_COUNTS})
    result = ScheduleResult(
        read=accepted + already_there + conflicting + sum(set_aside.values()) + (0 if sync is None else sync.rows),
        accepted=accepted,
        already_there=already_there,
        conflicting=conflicting,
        set_aside=set_aside,
        seconds=seconds,
        load=job.load,
        sync=sync,
    )
    rejected = outcomes.where(F.col("outcome").isin(_REJECTED, _CONFLICTING))
    if job.dry_run:
        sample = outcomes.where(F.col("outcome") == _SAMPLE)
        if sync is not None:
            samples = {
                reason: _sample(sample.where(F.col("reason") == reason), WRITTEN_COLUMNS)
                for reason in (syncing.RESCHEDULED, syncing.REPLACED, "cancelled")
            }
            result = replace(result, sync=replace(sync, samples=samples))
        return replace(
            result,
            is_dry_run=True,
            sample=_sample(sample.where("reason IS NULL"), WRITTEN_COLUMNS),
            rejected_sample=_sample(rejected, _REJECTED_COLUMNS[:-1]),
        )
    if (set_aside or conflicting) and folders.rejected is not None:
        folders.rejected.write(rejected.select(*_REJECTED_COLUMNS), folders.rejected_format)
        result = replace(result, rejected_to=folders.rejected.location)
    if folders.report is not None:
        result = replace(result, reported_to=folders.report.location)
        _write_report(outcomes.sparkSession, result, folders.report)
    return result


def _sample(rows: DataFrame, columns: Sequence[str]) -> tuple[Mapping[str, Any], ...]:
    """Return the first rows, without empty columns; of long texts the beginning."""
    samples = list[Mapping[str, Any]]()
    for row in rows.select(*columns).limit(_SAMPLE_ROWS).collect():
        values = {name: value for name, value in row.asDict().items() if value is not None}
        samples.append(
            {
                name: f"{value[:_BEGINNING_CHARACTERS]}…"
                if isinstance(value, str) and len(value) > _BEGINNING_CHARACTERS
                else value
                for name, value in values.items()
            }
        )
    return tuple(samples)


def _write_report(spark: SparkSession, result: ScheduleResult, folder: NewFolder) -> None:
    rows: list[tuple[str, str | None, int]] = [
        ("accepted", None, result.accepted),
        ("already_there", None, result.already_there),
        *([] if result.sync is None else [(name, None, getattr(result.sync, name)) for name in _SYNC_COUNTS]),
        *([("conflicting", CONFLICTS_WITH_STORE, result.conflicting)] if result.conflicting else []),
        *(("set_aside", reason, count) for reason, count in result.set_aside.items()),
    ]
    folder.write(spark.createDataFrame(rows, _REPORT_SCHEMA).coalesce(1), "parquet")

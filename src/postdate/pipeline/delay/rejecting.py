"""Rows that cannot be delayed, as a stream of their own: a dead-letter output instead of a query that fails.

One Spark query has one sink, so rejected rows are written by a second query with a checkpoint of its own. Both read the
same source, and which rows are rejected depends only on the row. So each row of the source is in exactly one of them.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# The stubs of Arrow make arrays generic in a type that is known only at run time.

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import reduce
from typing import Any, Final, NamedTuple, cast

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark program uses
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import AtomicType, BinaryType, NullType, StringType

from postdate.errors import PipelineError
from postdate.pipeline.failures import shorten_errors
from postdate.pipeline.files import ORIGIN, ORIGIN_FIELD
from postdate.pipeline.rows import TIME_FORMATS, Batches, quote_name

MOST_ROW_BYTES: Final = 32 << 20
"""A larger row is rejected. A task gathers about as many bytes of rows while it packs them."""

_EARLIEST_US: Final = -62_135_596_800_000_000
_LATEST_US: Final = 253_402_300_799_999_999
"""The years 1 to 9999 of UTC, which Python's times can represent."""

_BEGINNING_BYTES: Final = 1_000

_REJECTED: Final = pa.schema(
    [
        ("reason", pa.string()),
        ("detail", pa.string()),
        ("file", pa.string()),
        ("line", pa.int64()),
        ("row", pa.string()),
        ("bytes", pa.map_(pa.string(), pa.binary())),
    ]
)
_REJECTED_COLUMNS: Final = "reason string, detail string, file string, line long, row string, bytes map<string,binary>"

_DETAILS: Final = {
    "missing_due": "the due time is null; give it one, or choose null_due='now' or null_due='drop'",
    "time_out_of_range": "the due time is outside the years 1 to 9999 of UTC; give a time in them",
    "row_too_large": f"the row is larger than {MOST_ROW_BYTES} bytes; keep its content elsewhere and send a reference",
}


class SplitRows(NamedTuple):
    """The rows of a stream that can be delayed, and those that cannot.

    Args:
        rows: for :func:`postdate.pipeline.delay.delay`.
        rejected: columns ``reason`` (a stable code), ``detail``, ``file`` (null if the source is no file), ``line``
            (null also in the second and later parts of a file of JSON that Spark splits), ``row`` (as it stands in the
            file, or as JSON), and ``bytes``: the bytes of ``row`` if they are not UTF-8.
    """

    rows: DataFrame
    rejected: DataFrame


def split_rejected(df: DataFrame, due: str | None = "due", null_due: str = "fail") -> SplitRows:
    """Split a stream into the rows that can be delayed, and the rows that cannot, with the reason.

    Start a query for each of the two frames; see :func:`write_rejected`. This runs on the driver.

    Args:
        df: any frame, for example from ``read_directory(…, malformed="keep")``, which also has malformed rows.
        due: the column with the due time; ``None`` for a stream without due times, such as cancels.
        null_due: as in :class:`postdate.pipeline.delay.DelayOptions`; with ``fail``, rows without a due time are
            rejected.

    Raises:
        PipelineError: there is no such column.
    """
    columns = [name for name in df.columns if name != ORIGIN]
    if due is not None and due not in columns:
        raise PipelineError(f"there is no column {due!r} to tell the due time; there are {', '.join(columns)}")
    reasons: list[Column] = []
    if ORIGIN in df.columns:
        reasons.append(F.col(f"{ORIGIN}.reason"))
    if due is not None:
        instant = F.col(quote_name(due))
        if null_due == "fail":
            reasons.append(F.when(instant.isNull(), F.lit("missing_due")))
        in_range = F.unix_micros(instant).between(_EARLIEST_US, _LATEST_US)
        reasons.append(F.when(~in_range, F.lit("time_out_of_range")))
    reasons.append(F.when(_row_bytes(df, columns) > MOST_ROW_BYTES, F.lit("row_too_large")))
    reason = F.coalesce(*reasons)
    rows = df.where(reason.isNull()).select(*map(quote_name, columns))
    return SplitRows(rows, _rejected_rows(df.where(reason.isNotNull()), columns, reason))


def write_rejected(
    rejected: DataFrame | Sequence[DataFrame],
    path: str,
    checkpoint: str,
    format: str = "json",  # noqa: A002 - Spark's word
    trigger: timedelta = timedelta(seconds=1),
) -> StreamingQuery:
    """Start a query that writes rejected rows to files, each once. Return the query.

    Args:
        rejected: from :func:`split_rejected`; or several, for example of rows and of cancels.
        path: a directory of this query alone. Read it with Spark.
        checkpoint: the checkpoint of the query that delays the rows; this query uses the directory ``rejected`` in it.
        format: ``json`` or ``parquet``.
        trigger: interval at which the source is read.

    Raises:
        PipelineError: the query cannot start.
    """
    frames = [rejected] if isinstance(rejected, DataFrame) else rejected
    writer = reduce(DataFrame.unionByName, frames).writeStream.outputMode("append").format(format)
    writer = writer.options(**TIME_FORMATS)
    writer = writer.trigger(processingTime=f"{trigger // timedelta(milliseconds=1)} milliseconds")
    with shorten_errors(f"cannot write rejected rows into {path!r}"):
        return writer.option("checkpointLocation", f"{checkpoint.rstrip('/')}/rejected").start(path)


def _row_bytes(df: DataFrame, columns: list[str]) -> Column:
    """Return about how large a row is. Columns of a fixed size do not count."""
    sizes = [F.lit(0)]
    for name in columns:
        kind, column = df.schema[name].dataType, F.col(quote_name(name))
        if isinstance(kind, StringType | BinaryType):
            sizes.append(F.coalesce(F.octet_length(column), F.lit(0)))
        elif not isinstance(kind, AtomicType | NullType):
            sizes.append(F.coalesce(F.octet_length(F.to_json(F.struct(column))), F.lit(0)))
    return sum(sizes[1:], sizes[0])


def _rejected_rows(rows: DataFrame, columns: list[str], reason: Column) -> DataFrame:
    as_json = F.encode(F.to_json(F.struct(*map(quote_name, columns)), dict(TIME_FORMATS)), "UTF-8")
    details = F.create_map(*(F.lit(text) for pair in _DETAILS.items() for text in pair))
    if ORIGIN in rows.columns:
        origin = F.col(ORIGIN)
        row, detail = F.coalesce(origin["content"], as_json), F.coalesce(origin["detail"], details[reason])
    else:
        origin, row, detail = F.lit(None).cast(ORIGIN_FIELD.dataType), as_json, details[reason]
    row = F.when(reason == "row_too_large", F.substring(row, 1, _BEGINNING_BYTES)).otherwise(row)
    selected = rows.select(
        reason.alias("reason"),
        detail.alias("detail"),
        origin["file"].alias("file"),
        origin["line"].alias("line"),
        row.alias("row"),
    )
    return selected.mapInArrow(_decode_rows, _REJECTED_COLUMNS)


def _decode_rows(batches: Batches) -> Batches:
    """Return rejected rows as texts, with the bytes of those that are not UTF-8. Runs on executors."""
    for batch in batches:
        raw_rows = cast("list[bytes | None]", batch.column(4).to_pylist())
        texts = [None if raw is None else raw.decode("utf-8", "backslashreplace") for raw in raw_rows]
        undecodable: list[Any] = [
            [("row", raw)] if raw is not None and text != raw.decode("utf-8", "replace") else None
            for raw, text in zip(raw_rows, texts, strict=True)
        ]
        originals: Any = pa.array(undecodable, _REJECTED.field("bytes").type)
        arrays = [*batch.columns[:4], pa.array(texts, pa.string()), originals]
        yield pa.RecordBatch.from_arrays(arrays, schema=_REJECTED)

"""Files of rows, as a table or as a stream, by the same rules: columns are matched by name, and wrong names refused.

A CSV file begins with a line of names, the same and in the same order as in the first file or the schema.
A quote inside quotes is written twice, or the file is refused, and a line may break inside them. JSON has one object a
line. The files of a folder of Parquet need not have the same columns, only the same types. Runs on the driver.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark program uses
from pyspark.sql.types import StringType, StructField, StructType

from postdate.errors import PipelineError
from postdate.pipeline.failures import told_in_one_line
from postdate.pipeline.rows import quoted

MALFORMED: Final = "_corrupt_record"
"""Spark's name of the column that holds the whole of a malformed line, and is null in rows."""

_RULES: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "csv": {
            "header": True,
            "enforceSchema": False,
            "multiLine": True,
            "escape": '"',
            "unescapedQuoteHandling": "RAISE_ERROR",  # as Spark's own writer leaves them: backslashes would stay
        },
        "json": {"primitivesAsString": True},
        "parquet": {"mergeSchema": True},
    }
)
_JSON_LINES = frozenset({"jsonl", "ndjson"})

_ANY_AGE = "1000000d"
"""Files are read whatever their age: tools that move, copy or unpack files keep their times, and by default Spark
silently ignores files a week older than the newest. With this it remembers all names, as its checkpoint's log does.
"""

_NANOSECONDS: Final = re.compile(r"(timestamp_[ln]tz)\([789]\)", re.IGNORECASE)
"""Spark's types of times below a microsecond, which only its Java knows."""


def read_input(spark: SparkSession, path: str, input_format: str | None = None) -> DataFrame:
    """Read a file or directory of messages; all columns of CSV and of JSON are texts, :data:`MALFORMED` among them.

    Args:
        spark: any session.
        path: of a file or directory.
        input_format: ``csv``, ``json`` (one object a line) or ``parquet``; by default from the name's ending.

    Raises:
        PipelineError: the format is unknown, or the files do not agree on a type. A CSV file with other columns than
            the first fails only when it is read.
    """
    name = input_format or Path(path).name.removesuffix(".gz").rpartition(".")[2].lower()
    name = "json" if name in _JSON_LINES else name
    if name not in _RULES:
        raise PipelineError(f"cannot tell the format of {path!r}; say csv, json or parquet")
    _know_nanoseconds(spark)
    reader = spark.read.format(name).options(**_RULES[name], columnNameOfCorruptRecord=MALFORMED)
    with told_in_one_line(f"cannot read {path!r}"):
        rows = reader.load(path)
        if name == "csv":  # of JSON Spark looks at all lines, and has the column where it is needed
            # Spark changes names that are empty or there twice: they would differ from those of their own file.
            reader = reader.option("enforceSchema", len(rows.inputFiles()) == 1)
            rows = reader.schema(StructType([*rows.schema, StructField(MALFORMED, StringType())])).load(path)
        return _in_microseconds(rows)


def read_directory(
    spark: SparkSession,
    path: str,
    schema: str,
    format: str = "json",  # noqa: A002 - Spark's word
    files_at_once: int = 100,
) -> DataFrame:
    """Return the stream of a directory's files: existing ones, then new ones, whatever their times.

    Put files in by renaming them, whole: Spark reads each name once.

    Args:
        spark: a session in UTC.
        path: of the directory.
        schema: a Spark schema, such as ``id string, due timestamp``. The header line of a CSV file must have these
            names in this order. Times that Parquet has in nanoseconds are ``timestamp_ltz(9)``, or ``timestamp_ntz(9)``
            without a zone; they are rounded up to microseconds.
        format: ``json`` (one object a line), ``csv`` or ``parquet``.
        files_at_once: how many files a micro-batch takes at most, which bounds the memory it needs.

    Raises:
        PipelineError: the directory is missing, or the format or the schema is invalid.
    """
    if format not in _RULES:
        raise PipelineError(f"rows are read from json, csv or parquet, not {format!r}")
    if files_at_once < 1:
        raise PipelineError(f"files_at_once={files_at_once} is below 1")
    _know_nanoseconds(spark)
    # A value that is malformed must not become a null that looks like a row without a due time.
    reader = spark.readStream.options(maxFilesPerTrigger=files_at_once, maxFileAge=_ANY_AGE, mode="FAILFAST")
    with told_in_one_line(f"cannot read {path!r} with the schema {schema!r}"):
        return _in_microseconds(reader.options(**_RULES[format]).schema(schema).format(format).load(path))


# --- nanoseconds, which pandas writes by default ---------------------------------------------------------------------


def _know_nanoseconds(spark: SparkSession) -> None:
    """Switch on a preview of Spark 4.3; for as long as the session lives, because plans are made later."""
    spark.conf.set("spark.sql.timestampNanosTypes.enabled", "true")


def _in_microseconds(rows: DataFrame) -> DataFrame:
    """Return rows with times in microseconds, which Python knows, rounded up: no message is early."""
    described = rows.sparkSession.sql("DESCRIBE QUERY SELECT * FROM {rows}", rows=rows).collect()
    types = {row["col_name"]: row["data_type"] for row in described}
    if not any(map(_NANOSECONDS.search, types.values())):
        return rows
    return rows.select(*(_rounded_up(name, kind).alias(name) for name, kind in types.items()))


def _rounded_up(name: str, kind: str) -> Column:
    column = F.col(quoted(name))
    if not _NANOSECONDS.search(kind):
        return column
    microseconds = column.cast(_NANOSECONDS.sub(r"\1", kind))
    if not _NANOSECONDS.fullmatch(kind):  # a time inside something else is none of a message
        return microseconds
    later = microseconds + F.lit(timedelta(microseconds=1))
    return F.when(microseconds.cast(kind) < column, later).otherwise(microseconds)

"""Files of rows, as a table or as a stream, by the same rules.

Columns are matched by name, and wrong names are refused. A CSV file begins with a line of names, which are the same and
in the same order as in the first file or the schema. A quote inside quotes must be doubled, and every quote must be
closed; otherwise the file is refused. A line may break inside quotes. JSON has one object a line. The files of a folder
of Parquet need not have the same columns, only the same types. Texts are in UTF-8, or in the encoding that is named.
Runs on the driver.

No setting of the session is changed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark program uses
from pyspark.sql.types import BinaryType, StringType, StructField, StructType

from postdate.errors import PipelineError
from postdate.pipeline.failures import shorten_errors
from postdate.pipeline.rows import Batches, quote_name
from postdate.pipeline.texts import CsvFile, Encoding, Row, header_names, json_object, read_header, to_table

MALFORMED: Final = "_corrupt_record"
"""The column with all bytes of a line that is not a row. It is null in rows."""

_FORMATS: Final = ("csv", "json", "parquet")
_JSON_LINES = frozenset({"jsonl", "ndjson"})

_ANY_AGE = "1000000d"
"""Files are read whatever their age, because tools that move, copy or unpack files keep their times.

By default Spark silently ignores files that are a week older than the newest. With this setting Spark remembers all
names, as the log in its checkpoint does.
"""

_NANOSECONDS: Final = re.compile(r"(timestamp_[ln]tz)\([789]\)", re.IGNORECASE)
"""Spark's types of times with nanoseconds. Only Spark's Java code knows these types."""


def read_input(spark: SparkSession, path: str, input_format: str | None = None, encoding: str = "UTF-8") -> DataFrame:
    """Read a file or directory of messages. All columns of CSV and of JSON are texts, except :data:`MALFORMED`.

    A JSON value that is not text becomes its JSON text, exactly as it is written.

    Args:
        spark: any session.
        path: path of a file or directory.
        input_format: ``csv``, ``json`` (one object a line) or ``parquet``; by default from the name's ending.
        encoding: encoding of CSV and JSON, for example ``cp1252`` or ``UTF-16``. A row with other bytes is malformed.

    Raises:
        PipelineError: the format or the encoding is unknown, or the files do not agree on a type. A CSV file with other
            columns than the first, or with a quote that is never closed, fails only when it is read.
    """
    name = input_format or Path(path).name.removesuffix(".gz").rpartition(".")[2].lower()
    name = "json" if name in _JSON_LINES else name
    if name not in _FORMATS:
        raise PipelineError(f"cannot tell the format of {path!r}; say csv, json or parquet")
    checked_encoding = _check_encoding(Encoding(encoding), name)
    with shorten_errors(f"cannot read {path!r}"):
        match name:
            case "csv":
                return _csv_rows(spark, _csv_records(spark.read, path, checked_encoding), path, checked_encoding)
            case "json":
                return _json_rows(spark, _lines(spark.read, path), path, checked_encoding)
            case _:
                return _read_parquet(spark, path)


def read_directory(
    spark: SparkSession,
    path: str,
    schema: str,
    format: str = "json",  # noqa: A002 - Spark's word
    files_at_once: int = 100,
    encoding: str = "UTF-8",
) -> DataFrame:
    """Return the stream of a directory's files: existing files, then new ones, whatever their times.

    Add files by renaming complete files into the directory, because Spark reads each name once.

    Args:
        spark: a session in UTC.
        path: path of the directory.
        schema: a Spark schema, such as ``id string, due timestamp``. The header line of a CSV file must have these
            names in this order. Times that Parquet has in nanoseconds are ``timestamp_ltz(9)``, or ``timestamp_ntz(9)``
            without a zone; they are rounded up to microseconds. Such a stream belongs to a session of its own, with the
            present settings of ``spark``.
        format: ``json`` (one object a line), ``csv`` or ``parquet``.
        files_at_once: maximum number of files in a micro-batch, which limits the memory that it needs.
        encoding: encoding of CSV and JSON. A row with other bytes, or a malformed row, fails the query.

    Raises:
        PipelineError: the directory is missing, or the format, the encoding or the schema is invalid.
    """
    if format not in _FORMATS:
        raise PipelineError(f"rows are read from json, csv or parquet, not {format!r}")
    if files_at_once < 1:
        raise PipelineError(f"files_at_once={files_at_once} is below 1")
    checked_encoding = _check_encoding(Encoding(encoding), format)
    with ExitStack() as stack:
        stack.enter_context(shorten_errors(f"cannot read {path!r} with the schema {schema!r}"))
        if format == "parquet" and _NANOSECONDS.search(schema):
            spark = stack.enter_context(_nanosecond_session(spark))
        reader = spark.readStream.options(maxFilesPerTrigger=files_at_once, maxFileAge=_ANY_AGE)
        if format == "parquet":
            # A malformed value must not become a null, which would look like a row without a due time.
            return _convert_to_microseconds(reader.options(mode="FAILFAST").schema(schema).format(format).load(path))
        columns: StructType = spark.range(0).select(F.from_json(F.lit("{}"), schema).alias("row")).schema[0].dataType  # type: ignore[assignment]
        if format == "csv":
            texts = _csv_records(reader, path, checked_encoding).mapInArrow(
                partial(_csv_texts, columns.fieldNames(), checked_encoding), "text string"
            )
            row = F.from_csv("text", schema, {"mode": "FAILFAST", "escape": '"', "multiLine": "true"})
        else:
            texts = _lines(reader, path).mapInArrow(partial(_json_texts, checked_encoding), "text string")
            row = F.from_json("text", schema, {"mode": "FAILFAST"})
        return texts.select(row.alias("row")).select("row.*")


def _check_encoding(encoding: Encoding, name: str) -> Encoding:
    if name == "json" and not encoding.is_ascii_compatible:
        raise PipelineError(f"JSON is not read in {encoding.name}; convert it to UTF-8")
    return encoding


# --- CSV: Spark cuts files into records, which need not have the columns of a schema ----------------------------------

_MOST_CELLS: Final = 511
_RECORD: Final = StructType(
    [
        *(StructField(f"c{number}", StringType()) for number in range(_MOST_CELLS + 1)),
        StructField("record", StringType()),
    ]
)
"""This schema has more cells than any record has.

So each record is malformed for Spark, which then returns it whole.
"""


def _csv_records(reader: Any, path: str, encoding: Encoding) -> DataFrame:
    """Return the records of files unchanged, without empty lines, and the columns from the names of folders."""
    rows = (
        reader.format("csv")
        .options(multiLine=True, escape='"', unescapedQuoteHandling="RAISE_ERROR", encoding=encoding.spark_encoding)
        .options(maxColumns=_MOST_CELLS, columnNameOfCorruptRecord="record", mode="PERMISSIVE")
        .schema(_RECORD)
        .load(path)
    )
    folders = [name for name in rows.columns if name not in set(_RECORD.fieldNames())]
    # Spark does not return a malformed record alone.
    return rows.select(F.col("_metadata.file_path").alias("_file"), "record", "c0", *map(quote_name, folders))


def _csv_rows(spark: SparkSession, files: DataFrame, path: str, encoding: Encoding) -> DataFrame:
    first = files.select("_file", "record", "c0").take(1)
    if not first:
        raise PipelineError(f"{path!r} has no line of names")
    header = read_header(first[0]["_file"], first[0]["record"], encoding)
    names = header_names(header, case_sensitive=_is_case_sensitive(spark))
    schema = _schema_of(names, files)
    return files.mapInArrow(partial(_parse_csv, header, encoding), schema)


def _schema_of(names: list[str], files: DataFrame) -> StructType:
    """Return the columns of rows: those of the files, that of malformed lines, and those from the names of folders."""
    if MALFORMED in names:
        raise PipelineError(f"a column must not have the name {MALFORMED!r}; rename it")
    folders = [field for field in files.schema if field.name not in {"_file", "record", "c0"}]
    return StructType(
        [*(StructField(name, StringType()) for name in names), StructField(MALFORMED, BinaryType()), *folders]
    )


def _parse_csv(header: list[str | None], encoding: Encoding, batches: Batches) -> Batches:
    for batch, origins, rows in _csv_file_rows(header, encoding, batches):
        yield to_table(rows, origins, batch, len(header), skipped=3)


def _csv_texts(names: list[str], encoding: Encoding, batches: Batches) -> Batches:
    """Check the records of a stream, and return each as one text."""
    for _, _, rows in _csv_file_rows(list(names), encoding, batches):
        for _, malformed in rows:
            if malformed is not None:
                raise PipelineError(
                    f"a record has other cells than the header line, or is no {encoding.name}: {malformed[:200]!r}"
                )
        texts = [",".join(map(_quote_cell, cells)) for cells, _ in rows]
        yield pa.record_batch([pa.array(texts, pa.string())], names=["text"])


def _quote_cell(cell: str | None) -> str:
    return "" if cell is None else '"' + cell.replace('"', '""') + '"'


def _csv_file_rows(
    header: list[str | None], encoding: Encoding, batches: Batches
) -> Iterator[tuple[pa.RecordBatch, list[int], list[Row]]]:
    """Yield the rows of each batch, with the positions of their records in it. A task has whole files, in order."""
    file: CsvFile | None = None
    for batch in batches:
        rows, origins = list[Row](), list[int]()
        paths, contents = _column(batch, 0), _column(batch, 1)
        for position, (path, record) in enumerate(zip(paths, contents, strict=True)):
            if file is None or file.path != path:
                file = CsvFile(path, header, encoding)
            if record is None:
                raise PipelineError(f"{path} has a record of {_MOST_CELLS + 1} cells; at most {_MOST_CELLS} are read")
            for row in file.rows(record):
                rows.append(row)
                origins.append(position)
        yield batch, origins, rows


def _column(batch: pa.RecordBatch, number: int) -> list[Any]:
    return cast("list[Any]", batch.column(number).to_pylist())


# --- JSON: one object a line ------------------------------------------------------------------------------------------


def _lines(reader: Any, path: str) -> DataFrame:
    rows = reader.format("text").load(path)
    folders = [name for name in rows.columns if name != "value"]
    return rows.select(F.col("value").cast("binary").alias("line"), *map(quote_name, folders))


def _json_rows(spark: SparkSession, lines: DataFrame, path: str, encoding: Encoding) -> DataFrame:
    case_sensitive = _is_case_sensitive(spark)
    parse_as_written = partial(json_object, encoding=encoding, case_sensitive=True)
    name_rows = (
        lines.select("line").mapInArrow(partial(_json_names, parse_as_written), "name string").distinct().collect()
    )
    columns = dict[str, str]()  # Names are compared in lower case, unless names that differ only in case are different.
    for name in sorted((row["name"] for row in name_rows), key=str.swapcase):
        columns.setdefault(name if case_sensitive else name.lower(), name)
    if MALFORMED in columns:
        raise PipelineError(f"{path!r} has the name {MALFORMED!r} in it; rename it")
    folders = [field for field in lines.schema if field.name != "line"]
    cells = [StructField(name, StringType()) for name in columns.values()]
    schema = StructType([*cells, StructField(MALFORMED, BinaryType()), *folders])
    parse = partial(json_object, encoding=encoding, case_sensitive=case_sensitive)
    return lines.mapInArrow(partial(_parse_json, parse, list(columns)), schema)


def _json_names(parse: Callable[[bytes], Mapping[str, str | None] | None], batches: Batches) -> Batches:
    names = set[str]()
    for batch in batches:
        for line in _column(batch, 0):
            names.update(parse(line) or () if line.strip() else ())
    yield pa.record_batch([pa.array(sorted(names), pa.string())], names=["name"])


def _parse_json(
    parse: Callable[[bytes], Mapping[str, str | None] | None], names: list[str], batches: Batches
) -> Batches:
    for batch in batches:
        rows, origins = list[Row](), list[int]()
        for position, line in enumerate(_column(batch, 0)):
            if line.strip():
                values = parse(line)
                rows.append(([None] * len(names), line) if values is None else ([*map(values.get, names)], None))
                origins.append(position)
        yield to_table(rows, origins, batch, len(names), skipped=1)


def _json_texts(encoding: Encoding, batches: Batches) -> Batches:
    """Check the lines of a stream, and return them as texts."""
    for batch in batches:
        lines = [line for line in _column(batch, 0) if line.strip()]
        for line in lines:
            if json_object(line, encoding, case_sensitive=True) is None:
                raise PipelineError(f"a line is no JSON object in {encoding.name}, or has a name twice: {line[:200]!r}")
        texts = [(encoding.decode(line) or "").removeprefix("\ufeff") for line in lines]
        yield pa.record_batch([pa.array(texts, pa.string())], names=["text"])


def _is_case_sensitive(spark: SparkSession) -> bool:
    return spark.conf.get("spark.sql.caseSensitive") == "true"


# --- Parquet, and nanoseconds, which pandas writes by default ---------------------------------------------------------


def _read_parquet(spark: SparkSession, path: str) -> DataFrame:
    try:
        return _convert_to_microseconds(spark.read.options(mergeSchema=True).parquet(path))
    except Exception as error:
        if "nanos" not in str(error).lower():  # The error names the setting, or the type.
            raise
        with _nanosecond_session(spark) as session:
            return _convert_to_microseconds(session.read.options(mergeSchema=True).parquet(path))


@contextmanager
def _nanosecond_session(spark: SparkSession) -> Generator[SparkSession]:
    """Yield a session with the settings of another one, and with a preview of Spark 4.3 that supports nanoseconds.

    Its frames need the preview setting whenever they are planned, but the setting would change how other frames are
    read. So it is not set in the session of the user. In the block this session is the active one, by whose settings
    Spark parses types.
    """
    session = spark.newSession()
    for name, value in spark.conf.getAll.items():
        if session.conf.isModifiable(name):
            session.conf.set(name, value)
    session.conf.set("spark.sql.timestampNanosTypes.enabled", "true")
    java: Any = session
    sessions = java._jvm.org.apache.spark.sql.classic.SparkSession  # noqa: SLF001 - only Java knows the active one
    session_before = sessions.getActiveSession()
    sessions.setActiveSession(java._jsparkSession)  # noqa: SLF001
    try:
        yield session
    finally:
        if session_before.isDefined():
            sessions.setActiveSession(session_before.get())
        else:
            sessions.clearActiveSession()


def _convert_to_microseconds(rows: DataFrame) -> DataFrame:
    """Return rows with times in microseconds, which Python supports.

    Times are rounded up, so that no message is early.
    """
    description_rows = rows.sparkSession.sql("DESCRIBE QUERY SELECT * FROM {rows}", rows=rows).collect()
    types = {row["col_name"]: row["data_type"] for row in description_rows}
    if not any(map(_NANOSECONDS.search, types.values())):
        return rows
    return rows.selectExpr(
        *(f"{_round_up_sql(quote_name(name), kind)} AS {quote_name(name)}" for name, kind in types.items())
    )


def _round_up_sql(column: str, kind: str) -> str:
    """Return a column as SQL text. It is parsed by the settings of its frame's session, not of the user's session."""
    if not _NANOSECONDS.search(kind):
        return column
    microsecond_type = _NANOSECONDS.sub(r"\1", kind)
    microseconds = f"CAST({column} AS {microsecond_type})"
    if not _NANOSECONDS.fullmatch(kind):  # A time inside another type does not belong to a message.
        return microseconds
    later = f"{microseconds} + INTERVAL '0.000001' SECOND"
    return f"CASE WHEN CAST({microseconds} AS {kind}) < {column} THEN {later} ELSE {microseconds} END"

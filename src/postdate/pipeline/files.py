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
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final, Literal, cast
from urllib.parse import unquote

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark program uses
from pyspark.sql.pandas.types import from_arrow_type
from pyspark.sql.types import StringType, StructField, StructType

from postdate.errors import PipelineError
from postdate.pipeline import inputs, texts
from postdate.pipeline.failures import shorten_errors
from postdate.pipeline.rows import Batches, quote_name
from postdate.pipeline.session import is_connect
from postdate.pipeline.texts import ORIGIN

_STREAM_FORMATS: Final = ("csv", "json", "parquet")

_ANY_AGE = "1000000d"
"""Files are read whatever their age, because tools that move, copy or unpack files keep their times.

By default Spark silently ignores files that are a week older than the newest. With this setting Spark remembers all
names, as the log in its checkpoint does.
"""

_NANOSECONDS: Final = re.compile(r"(timestamp_[ln]tz)\([789]\)", re.IGNORECASE)
"""Spark's types of times with nanoseconds. Only Spark's Java code knows these types."""


def read_input(
    spark: SparkSession,
    path: str | Sequence[str],
    input_format: str | None = None,
    encoding: str = "UTF-8",
    delimiter: str = ",",
) -> DataFrame:
    """Read files or directories of messages. All columns of CSV and of JSON are texts, except :data:`ORIGIN`.

    A JSON value that is not text becomes its JSON text, exactly as it is written.

    Args:
        spark: any session.
        path: path of a file or directory, or several with the same format and columns; with patterns, as in
            ``in/*.csv``.
        input_format: ``csv``, ``json`` (one object a line), ``parquet`` or ``orc``; by default from the name's ending.
            ``avro``, ``delta`` and ``iceberg`` need another package in Spark.
        encoding: encoding of CSV and JSON, for example ``cp1252`` or ``UTF-16``. A row with other bytes is malformed.
        delimiter: the character between the cells of CSV.

    Raises:
        PipelineError: the format, the encoding or the delimiter is unknown, a package is missing, or the files do not
            agree on a type. A CSV file with other columns than the first, or with a quote that is never closed, fails
            only when it is read.
    """
    sources = [path] if isinstance(path, str) else list(path)
    name = inputs.input_format_of(sources, input_format)
    subject, paths = ", ".join(map(repr, sources)), [*map(inputs.escape_file_path, sources)]
    checked_encoding = inputs.check_encoding(texts.Encoding(encoding), name)
    checked_delimiter = texts.Delimiter(delimiter).text
    with shorten_errors(f"cannot read {subject}"):
        match name:
            case "csv":
                records = _csv_records(spark.read, paths, checked_encoding, checked_delimiter)
                return _csv_rows(spark, records, subject, checked_encoding, checked_delimiter)
            case "json":
                return _json_rows(spark, _lines(spark.read, paths, with_origin=True), subject, checked_encoding)
            case "parquet" | "orc":
                return _read_columns(spark, paths, name)
            case _:
                return _read_with_package(spark, paths, name)


def _read_with_package(spark: SparkSession, paths: list[str], name: str) -> DataFrame:
    try:
        return spark.read.options(**inputs.WHOLE_FILES).format(name).load(paths)
    except Exception as error:
        text = str(error)
        if "Failed to find" not in text and "DATA_SOURCE_NOT_FOUND" not in text and "ClassNotFound" not in text:
            raise
        raise PipelineError(
            f"Spark has no package for {name} here: start it with {inputs.PACKAGES[name]} of its version among "
            f"spark.jars.packages"
        ) from error


def read_directory(  # noqa: PLR0913 - which files, and how to read them
    spark: SparkSession,
    path: str,
    schema: str,
    format: str = "json",  # noqa: A002 - Spark's word
    files_at_once: int = 100,
    encoding: str = "UTF-8",
    malformed: Literal["fail", "keep"] = "fail",
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
        encoding: encoding of CSV and JSON. A row with other bytes is malformed.
        malformed: what a malformed row of CSV or JSON does: ``fail`` (it fails the query) or ``keep``. The stream then
            also has the column :data:`ORIGIN`, for :func:`postdate.pipeline.delay.split_rejected`.

    Raises:
        PipelineError: the directory is missing, or the format, the encoding or the schema is invalid.
    """
    if format not in _STREAM_FORMATS:
        raise PipelineError(f"rows are read from json, csv or parquet, not {format!r}")
    if files_at_once < 1:
        raise PipelineError(f"files_at_once={files_at_once} is below 1")
    checked_encoding = inputs.check_encoding(texts.Encoding(encoding), format)
    with ExitStack() as stack:
        stack.enter_context(shorten_errors(f"cannot read {path!r} with the schema {schema!r}"))
        if format == "parquet" and _NANOSECONDS.search(schema):
            spark = stack.enter_context(_nanosecond_session(spark))
        reader = spark.readStream.options(maxFilesPerTrigger=files_at_once, maxFileAge=_ANY_AGE, **inputs.WHOLE_FILES)
        if format == "parquet":
            # A malformed value must not become a null, which would look like a row without a due time.
            rows = reader.options(mode="FAILFAST").schema(schema).format(format).load(path)
            return _convert_to_microseconds(rows if malformed == "fail" else rows.selectExpr("*", _PARQUET_ORIGIN))
        columns: StructType = spark.range(0).select(F.from_json(F.lit("{}"), schema).alias("row")).schema[0].dataType  # type: ignore[assignment]
        if malformed == "keep":
            return _rows_with_origin(reader, path, columns, format, checked_encoding)
        if format == "csv":
            rows = _csv_records(reader, path, checked_encoding).mapInArrow(
                partial(_csv_texts, columns.fieldNames(), checked_encoding), "text string"
            )
            row = F.from_csv("text", schema, {"mode": "FAILFAST", "escape": '"', "multiLine": "true"})
        else:
            rows = _lines(reader, path).mapInArrow(partial(_json_texts, checked_encoding), "text string")
            row = F.from_json("text", schema, {"mode": "FAILFAST"})
        return rows.select(row.alias("row")).select("row.*")


# --- where rows stand, and streams that keep malformed rows -----------------------------------------------------------


ORIGIN_FIELD: Final = StructField(ORIGIN, from_arrow_type(texts.ORIGIN_TYPE))
_PARQUET_ORIGIN: Final = (
    "struct(_metadata.file_path AS file, CAST(NULL AS BIGINT) AS line, CAST(NULL AS BINARY) AS content, "
    f"CAST(NULL AS STRING) AS reason, CAST(NULL AS STRING) AS detail) AS {ORIGIN}"
)
_TEXT_WITH_ORIGIN: Final = StructType([StructField("text", StringType()), ORIGIN_FIELD])
_WRONG_VALUE: Final = "_corrupt_record"
"""The column in which Spark puts the text of a row with a value that is not of its type."""

_VALUE_DETAIL: Final = "a value is not of the type that the schema names"


def _rows_with_origin(
    reader: Any,
    path: str,
    columns: StructType,
    format: str,  # noqa: A002 - Spark's word
    encoding: texts.Encoding,
) -> DataFrame:
    """Return the rows of a stream with :data:`ORIGIN`. Malformed rows have a reason there, and nulls elsewhere."""
    if not {_WRONG_VALUE, ORIGIN}.isdisjoint(columns.fieldNames()):
        raise PipelineError(f"a column must not have the name {_WRONG_VALUE!r} or {ORIGIN!r}; rename it")
    parsed_columns = StructType([*columns.fields, StructField(_WRONG_VALUE, StringType())])
    options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _WRONG_VALUE}
    if format == "csv":
        # A quote inside quotes must not fail the query: the record is malformed when it is parsed here.
        records = _csv_records(reader, path, encoding, unescaped_quotes="STOP_AT_DELIMITER")
        rows = records.mapInArrow(partial(_csv_origins, columns.fieldNames(), encoding), _TEXT_WITH_ORIGIN)
        schema = ", ".join(f"{quote_name(field.name)} {field.dataType.simpleString()}" for field in parsed_columns)
        row = F.from_csv("text", schema, {**options, "escape": '"', "multiLine": "true"})
    else:
        lines = _lines(reader, path, with_origin=True).select("line", "_file", "_start")
        rows = lines.mapInArrow(partial(_json_origins, encoding), _TEXT_WITH_ORIGIN)
        row = F.from_json("text", parsed_columns, options)
    parsed, origin = rows.select(row.alias("parsed"), ORIGIN), F.col(ORIGIN)
    is_wrong_value = origin["reason"].isNull() & F.col(f"parsed.{_WRONG_VALUE}").isNotNull()
    wrong_value = origin.withField("reason", F.lit("malformed_value")).withField("detail", F.lit(_VALUE_DETAIL))
    return parsed.select(
        *(F.col(f"parsed.{quote_name(name)}") for name in columns.fieldNames()),
        F.when(is_wrong_value, wrong_value).otherwise(origin).alias(ORIGIN),
    )


def _json_origins(encoding: texts.Encoding, batches: Batches) -> Batches:
    """Return each line as a text, or as malformed. A part of a file that is not its first does not know its lines."""
    numbers = Counter[tuple[str, int]]()
    for batch in batches:
        rows = list[tuple[str | None, texts.RowOrigin]]()
        for line, path, start in zip(*(_column(batch, number) for number in range(3)), strict=True):
            numbers[path, start] += 1
            if line.strip():
                is_malformed = texts.json_object(line, encoding, case_sensitive=True) is None
                text = None if is_malformed else (encoding.decode(line) or "").removeprefix("\ufeff")
                origin = inputs.origin_of(texts.Row((), is_malformed, line, numbers[path, start]), path, encoding)
                rows.append((text, origin if start == 0 else origin._replace(line=None)))
        yield _text_batch(rows)


def _csv_origins(names: list[str], encoding: texts.Encoding, batches: Batches) -> Batches:
    """Return each record as one text. A file whose header line is wrong has no rows; all its records are malformed."""
    file: texts.CsvFile | None = None
    wrong_header: str | None = None
    for batch in batches:
        rows = list[tuple[str | None, texts.RowOrigin]]()
        for path, record in zip(_column(batch, 0), _column(batch, 1), strict=True):
            if file is None or file.path != path:
                file, wrong_header = texts.CsvFile(path, names, encoding), None
            is_header, line = file.lines == 0, file.lines + 1
            if record is None:
                detail = f"the record has more than {_MOST_CELLS} cells, so that it cannot be shown"
                wrong_header = detail if is_header else wrong_header
                rows.append((None, texts.RowOrigin(path, line, None, "malformed_row", detail)))
                file.lines += 1
                continue
            content = record.encode("latin-1") if encoding.is_ascii_compatible else record.encode()
            try:
                record_rows = list(file.rows(record))
            except PipelineError as error:
                wrong_header = str(error) if is_header else wrong_header
                reason = "wrong_header" if is_header else "unclosed_quote"
                rows.append((None, texts.RowOrigin(path, line, content, reason, str(error))))
                continue
            if wrong_header is not None:
                rows.append((None, texts.RowOrigin(path, line, content, "wrong_header", wrong_header)))
                continue
            for row in record_rows:
                text = None if row.is_malformed else ",".join(map(_quote_cell, row.cells))
                rows.append((text, inputs.origin_of(row, path, encoding)))
        yield _text_batch(rows)


def _text_batch(rows: Sequence[tuple[str | None, texts.RowOrigin]]) -> pa.RecordBatch:
    arrays: list[Any] = [pa.array([text for text, _ in rows], pa.string())]
    arrays.append(texts.origin_array([origin for _, origin in rows]))
    return pa.RecordBatch.from_arrays(arrays, names=["text", ORIGIN])


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


def _folder_texts(rows: DataFrame, names: Sequence[str]) -> list[Column]:
    """Return the columns from the names of folders, as the texts that they are. Spark would make numbers of some.

    Raises:
        PipelineError: a file is in no such folder. Spark would leave it out.
    """
    if not names:
        return []
    for file in rows.inputFiles():
        if lacks := [name for name in names if f"/{name}=" not in unquote(file)]:
            raise PipelineError(
                f"{file} is in no folder {lacks[0]}=…, as other files are: Spark would not read it; move it, or name "
                f"the folders one by one"
            )
    columns = list[Column]()
    for name in names:
        text = F.regexp_extract("_metadata.file_path", f"/{re.escape(name)}=([^/]*)/", 1)
        for _ in range(2):  # The address is encoded, and so are some characters in the names of folders.
            text = F.url_decode(F.regexp_replace(text, "[+]", "%2B"))
        columns.append(F.when(text != "__HIVE_DEFAULT_PARTITION__", text).alias(name))
    return columns


def _csv_records(
    reader: Any,
    path: str | list[str],
    encoding: texts.Encoding,
    delimiter: str = ",",
    unescaped_quotes: str = "RAISE_ERROR",
) -> DataFrame:
    """Return the records of files unchanged, without empty lines, and the columns from the names of folders."""
    rows = (
        reader.format("csv")
        .options(multiLine=True, escape='"', unescapedQuoteHandling=unescaped_quotes, encoding=encoding.spark_encoding)
        .options(sep=delimiter, maxColumns=_MOST_CELLS, columnNameOfCorruptRecord="record", mode="PERMISSIVE")
        .options(**inputs.WHOLE_FILES)
        .schema(_RECORD)
        .load(path)
    )
    folders = _folder_texts(rows, [name for name in rows.columns if name not in set(_RECORD.fieldNames())])
    # Spark does not return a malformed record alone.
    return rows.select(F.col("_metadata.file_path").alias("_file"), "record", "c0", *folders)


def _csv_rows(
    spark: SparkSession, files: DataFrame, subject: str, encoding: texts.Encoding, delimiter: str
) -> DataFrame:
    first = files.select("_file", "record", "c0").take(1)
    if not first:
        raise PipelineError(f"{subject} has no line of names")
    header = texts.read_header(first[0]["_file"], first[0]["record"], encoding, delimiter)
    names = texts.header_names(header, case_sensitive=_is_case_sensitive(spark))
    schema = _schema_of(names, [field for field in files.schema if field.name not in {"_file", "record", "c0"}])
    return files.mapInArrow(partial(_parse_csv, header, encoding, delimiter), schema)


def _schema_of(names: Sequence[str], folders: Sequence[StructField]) -> StructType:
    """Return the columns of rows: those of the files, their origin, and those from the names of folders."""
    if ORIGIN in names:
        raise PipelineError(f"a column must not have the name {ORIGIN!r}; rename it")
    return StructType([*(StructField(name, StringType()) for name in names), ORIGIN_FIELD, *folders])


def _parse_csv(header: list[str | None], encoding: texts.Encoding, delimiter: str, batches: Batches) -> Batches:
    for batch, positions, rows in _csv_file_rows(header, encoding, batches, delimiter):
        paths = _column(batch, 0)
        files = [paths[position] for position in positions]
        origins = [inputs.origin_of(row, file, encoding) for row, file in zip(rows, files, strict=True)]
        yield texts.to_table(rows, origins, positions, batch, len(header), skipped=3)


def _csv_texts(names: list[str], encoding: texts.Encoding, batches: Batches) -> Batches:
    """Check the records of a stream, and return each as one text."""
    for _, _, rows in _csv_file_rows(list(names), encoding, batches):
        for row in rows:
            if row.is_malformed:
                raise PipelineError(
                    f"a record has other cells than the header line, or is not {encoding.name}: {row.content[:200]!r}"
                )
        contents = [",".join(map(_quote_cell, row.cells)) for row in rows]
        yield pa.record_batch([pa.array(contents, pa.string())], names=["text"])


def _quote_cell(cell: str | None) -> str:
    return "" if cell is None else '"' + cell.replace('"', '""') + '"'


def _csv_file_rows(
    header: list[str | None], encoding: texts.Encoding, batches: Batches, delimiter: str = ","
) -> Iterator[tuple[pa.RecordBatch, list[int], list[texts.Row]]]:
    """Yield the rows of each batch, with the positions of their records in it. A task has whole files, in order."""
    file: texts.CsvFile | None = None
    for batch in batches:
        rows, positions = list[texts.Row](), list[int]()
        paths, contents = _column(batch, 0), _column(batch, 1)
        for position, (path, record) in enumerate(zip(paths, contents, strict=True)):
            if file is None or file.path != path:
                file = texts.CsvFile(path, header, encoding, delimiter)
            if record is None:
                raise PipelineError(f"{path} has a record of {_MOST_CELLS + 1} cells; at most {_MOST_CELLS} are read")
            for row in file.rows(record):
                rows.append(row)
                positions.append(position)
        yield batch, positions, rows


def _column(batch: pa.RecordBatch, number: int) -> list[Any]:
    return cast("list[Any]", batch.column(number).to_pylist())


# --- JSON: one object a line ------------------------------------------------------------------------------------------


def _lines(reader: Any, path: str | list[str], *, with_origin: bool = False) -> DataFrame:
    """Return the lines as bytes, and the columns from the names of folders.

    ``with_origin``: each line has its file, and the byte at which the part of the file begins that its task reads.
    """
    rows = reader.options(**inputs.WHOLE_FILES).format("text").load(path)
    folders = _folder_texts(rows, [name for name in rows.columns if name != "value"])
    origin = [F.col("_metadata.file_path").alias("_file"), F.col("_metadata.file_block_start").alias("_start")]
    return rows.select(F.col("value").cast("binary").alias("line"), *(origin if with_origin else ()), *folders)


def _json_rows(spark: SparkSession, lines: DataFrame, subject: str, encoding: texts.Encoding) -> DataFrame:
    case_sensitive = _is_case_sensitive(spark)
    parse_as_written = partial(texts.json_object, encoding=encoding, case_sensitive=True)
    facts = (
        lines.select("line", "_file", "_start")
        .mapInArrow(partial(_json_facts, parse_as_written), "name string, file string, start long, lines long")
        .distinct()
        .collect()
    )
    columns = dict[str, str]()  # Names are compared in lower case, unless names that differ only in case are different.
    for name in sorted((row["name"] for row in facts if row["name"] is not None), key=str.swapcase):
        columns.setdefault(name if case_sensitive else name.lower(), name)
    if facts and not columns:
        raise PipelineError(f"no line of {subject} is a JSON object in {encoding.name}; name its encoding")
    schema = _schema_of([*columns.values()], [field for field in lines.schema if field.name not in _LINE_COLUMNS])
    parse = partial(texts.json_object, encoding=encoding, case_sensitive=case_sensitive)
    return lines.mapInArrow(partial(_parse_json, parse, encoding, list(columns), _lines_before(facts)), schema)


_LINE_COLUMNS: Final = frozenset({"line", "_file", "_start"})


def _lines_before(facts: Sequence[Any]) -> dict[tuple[str, int], int]:
    """Return the number of lines before each part of a file that does not begin with its first line."""
    lines_before, count, file = dict[tuple[str, int], int](), 0, None
    parts = sorted((row["file"], row["start"], row["lines"]) for row in facts if row["name"] is None)
    for part_file, start, lines in parts:
        count = count if part_file == file else 0
        if count:
            lines_before[part_file, start] = count
        file, count = part_file, count + lines
    return lines_before


def _json_facts(parse: Callable[[bytes], Mapping[str, str | None] | None], batches: Batches) -> Batches:
    """Return the names in the lines of a task, and the number of lines of each part of a file."""
    names, lines = set[str](), Counter[tuple[str, int]]()
    for batch in batches:
        lines.update(zip(_column(batch, 1), _column(batch, 2), strict=True))
        for line in _column(batch, 0):
            names.update(parse(line) or () if line.strip() else ())
    rows: list[dict[str, Any]] = [{"name": name} for name in sorted(names)]
    rows += [{"file": file, "start": start, "lines": count} for (file, start), count in lines.items()]
    yield pa.RecordBatch.from_pylist(rows, _FACTS)


_FACTS: Final = pa.schema([("name", pa.string()), ("file", pa.string()), ("start", pa.int64()), ("lines", pa.int64())])


def _parse_json(
    parse: Callable[[bytes], Mapping[str, str | None] | None],
    encoding: texts.Encoding,
    names: list[str],
    lines_before: Mapping[tuple[str, int], int],
    batches: Batches,
) -> Batches:
    numbers = Counter[tuple[str, int]](lines_before)
    for batch in batches:
        rows, origins, positions = list[texts.Row](), list[texts.RowOrigin](), list[int]()
        for position, (line, *part) in enumerate(zip(*(_column(batch, number) for number in range(3)), strict=True)):
            file, start = part
            numbers[file, start] += 1
            if line.strip():
                values = parse(line)
                cells = [None] * len(names) if values is None else [*map(values.get, names)]
                rows.append(texts.Row(cells, values is None, line, numbers[file, start]))
                origins.append(inputs.origin_of(rows[-1], file, encoding))
                positions.append(position)
        yield texts.to_table(rows, origins, positions, batch, len(names), skipped=3)


def _json_texts(encoding: texts.Encoding, batches: Batches) -> Batches:
    """Check the lines of a stream, and return them as texts."""
    for batch in batches:
        lines = [line for line in _column(batch, 0) if line.strip()]
        for line in lines:
            if texts.json_object(line, encoding, case_sensitive=True) is None:
                raise PipelineError(
                    f"a line is not a JSON object in {encoding.name}, or has a name twice: {line[:200]!r}"
                )
        contents = [(encoding.decode(line) or "").removeprefix("\ufeff") for line in lines]
        yield pa.record_batch([pa.array(contents, pa.string())], names=["text"])


def _is_case_sensitive(spark: SparkSession) -> bool:
    return spark.conf.get("spark.sql.caseSensitive") == "true"


# --- Parquet, and nanoseconds, which pandas writes by default ---------------------------------------------------------


def _read_columns(spark: SparkSession, paths: list[str], name: str) -> DataFrame:
    """Read Parquet or ORC."""
    try:
        return _convert_to_microseconds(_with_folder_texts(spark, paths, name))
    except Exception as error:
        if "nanos" not in str(error).lower():  # The error names the setting, or the type.
            raise
        with _nanosecond_session(spark) as session:
            return _convert_to_microseconds(_with_folder_texts(session, paths, name))


def _with_folder_texts(spark: SparkSession, paths: list[str], name: str) -> DataFrame:
    """Read Parquet or ORC, with the columns from the names of folders as texts."""
    reader = spark.read.options(mergeSchema=True, **inputs.WHOLE_FILES).format(name)
    rows = reader.load(paths)
    files = [unquote(file) for file in rows.inputFiles()]
    if not any("=" in file.rpartition("/")[0] for file in files):
        return rows
    columns = _column_types(rows)
    folders = [each for each in columns if any(f"/{each}=" in file for file in files)]
    if both := {*folders} & {*_column_types(reader.load(inputs.escape_pattern(files[0])))}:
        raise PipelineError(
            f"{', '.join(sorted(both))}: a column of the files and the name of folders, which Spark prefers; rename one"
        )
    others = [quote_name(each) for each in columns if each not in folders]
    return rows.select(*others, *_folder_texts(rows, folders))


def _column_types(rows: DataFrame) -> dict[str, str]:
    """Return the types of columns as SQL text. PySpark cannot parse a type with nanoseconds."""
    description_rows = rows.sparkSession.sql("DESCRIBE QUERY SELECT * FROM {rows}", rows=rows).collect()
    return {row["col_name"]: row["data_type"] for row in description_rows}


@contextmanager
def _nanosecond_session(spark: SparkSession) -> Generator[SparkSession]:
    """Yield a session with the settings of another one, and with a preview of Spark 4.3 that supports nanoseconds.

    Its frames need the preview setting whenever they are planned, but the setting would change how other frames are
    read. So it is not set in the session of the user. In the block this session is the active one, by whose settings
    Spark parses types.
    """
    if is_connect(spark):
        raise PipelineError(
            "times in nanoseconds are not read over Spark Connect: write them in microseconds, or use a classic session"
        )
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
    types = _column_types(rows)
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

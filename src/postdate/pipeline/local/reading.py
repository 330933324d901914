"""Read files of messages as batches of rows, as :func:`postdate.pipeline.files.read_input` does on Spark."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# The stubs of Arrow make arrays generic in a type that is known only at run time.

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from postdate.errors import PipelineError
from postdate.pipeline import texts
from postdate.pipeline.counting import decompress
from postdate.pipeline.engines import NeedsSpark
from postdate.pipeline.inputs import PACKAGES, check_encoding, input_format_of, origin_of
from postdate.pipeline.local.columnar_files import read_columnar_files
from postdate.pipeline.local.csv_records import split_records
from postdate.pipeline.local.files import list_input_files, url_of_file

ROWS_AT_ONCE: Final = 20_000
_LARGEST_RECORD_CELLS: Final = 511
_LINE_BREAK: Final = re.compile(rb"\r\n?|\n")
_COMPRESSED: Final = (".deflate", ".lz4", ".snappy", ".zst")
"""Ends of the names of files that Spark unpacks and this engine does not."""


@dataclass(frozen=True, slots=True)
class LocalTable:
    """Rows of files.

    Args:
        columns: names and types, without :data:`postdate.pipeline.texts.ORIGIN`.
        read: returns the rows, each time from their first one. Tables of CSV and JSON also have the origin of rows.
        files: where the rows come from.
        input_format: their format.
    """

    columns: pa.Schema
    read: Callable[[], Iterator[pa.RecordBatch]]
    files: tuple[Path, ...] = ()
    input_format: str = ""


def read_table(
    path: str | Sequence[str], input_format: str | None = None, encoding: str = "UTF-8", delimiter: str = ","
) -> LocalTable:
    """Return the rows of files or folders of this machine. All columns of CSV and of JSON are texts.

    For the arguments see :func:`postdate.pipeline.files.read_input`.

    Raises:
        PipelineError: as there.
        NeedsSpark: the input is not on this machine, or has a format or a type that only Spark reads.
    """
    paths = [path] if isinstance(path, str) else list(path)
    name = input_format_of(paths, input_format)
    subject = ", ".join(map(repr, paths))
    checked_encoding = check_encoding(texts.Encoding(encoding), name)
    checked_delimiter = texts.Delimiter(delimiter).text
    if name in PACKAGES:
        raise NeedsSpark(f"{name} is read by a package of Spark")
    files = tuple(list_input_files(paths))
    if any(file.name.endswith(_COMPRESSED) for file in files):
        raise NeedsSpark(f"{subject} are compressed, and not by gzip or bzip2")
    match name:
        case "csv":
            return _csv_table(files, subject, checked_encoding, checked_delimiter)
        case "json":
            return _json_table(files, subject, checked_encoding)
        case _:
            columns, read = read_columnar_files(files, name, subject)
            return LocalTable(columns, read, files, name)


def _content_of(file: Path) -> bytes:
    try:
        return decompress(file.name, file.read_bytes())
    except (OSError, EOFError) as error:
        raise PipelineError(f"cannot read {file}: {error}") from error


def _text_columns(names: Sequence[str]) -> pa.Schema:
    if texts.ORIGIN in names:
        raise PipelineError(f"a column must not have the name {texts.ORIGIN!r}; rename it")
    return pa.schema([(name, pa.string()) for name in names])


def _to_batch(rows: Sequence[tuple[texts.Row, texts.RowOrigin]], columns: pa.Schema) -> pa.RecordBatch:
    cells = zip(*(row.cells for row, _ in rows), strict=True) if rows else [()] * len(columns)
    arrays: list[Any] = [pa.array(column, pa.string()) for column in cells]
    arrays.append(texts.origin_array([origin for _, origin in rows]))
    return pa.RecordBatch.from_arrays(arrays, names=[*columns.names, texts.ORIGIN])


def _read_rows(
    rows_of_file: Callable[[Path], Iterator[tuple[texts.Row, texts.RowOrigin]]],
    files: Sequence[Path],
    columns: pa.Schema,
) -> Iterator[pa.RecordBatch]:
    rows = chain.from_iterable(map(rows_of_file, files))
    while batch := list(islice(rows, ROWS_AT_ONCE)):
        yield _to_batch(batch, columns)


# --- CSV --------------------------------------------------------------------------------------------------------------


def _csv_table(files: tuple[Path, ...], subject: str, encoding: texts.Encoding, delimiter: str) -> LocalTable:
    # The largest file is the one that Spark reads first.
    by_size = sorted(files, key=lambda file: -file.stat().st_size)
    first = next(((file, record) for file in by_size for record in _csv_records(file, encoding, delimiter)), None)
    if first is None:
        raise PipelineError(f"{subject} has no line of names")
    header = texts.read_header(url_of_file(first[0]), first[1], encoding, delimiter)
    columns = _text_columns(texts.header_names(header, case_sensitive=False))
    rows_of_file = partial(_csv_rows, header, encoding, delimiter)
    return LocalTable(columns, partial(_read_rows, rows_of_file, files, columns), files, "csv")


def _csv_records(file: Path, encoding: texts.Encoding, delimiter: str) -> Iterator[str]:
    return split_records(url_of_file(file), _decode_as_spark(_content_of(file), encoding), delimiter)


def _decode_as_spark(content: bytes, encoding: texts.Encoding) -> str:
    """Return a file as Spark reads it, with one character a byte if the encoding is a superset of ASCII."""
    if encoding.is_ascii_compatible:
        return content.decode("latin-1")
    name = encoding.name
    if name.replace("_", "-").lower() in {"utf-16", "utf16"} and content[:2] not in {b"\xff\xfe", b"\xfe\xff"}:
        name = "utf-16-be"  # Java's order of bytes without a mark.
    return content.decode(name, "replace")


def _csv_rows(
    header: list[str | None], encoding: texts.Encoding, delimiter: str, file: Path
) -> Iterator[tuple[texts.Row, texts.RowOrigin]]:
    url = url_of_file(file)
    csv_file = texts.CsvFile(url, header, encoding, delimiter)
    for record in _csv_records(file, encoding, delimiter):
        for row in csv_file.rows(record):
            if row.is_malformed and record.count(delimiter) >= _LARGEST_RECORD_CELLS:
                _check_cells(url, record, delimiter)
            yield row, origin_of(row, url, encoding)


def _check_cells(url: str, record: str, delimiter: str) -> None:
    """Refuse a record with more cells than Spark reads."""
    if any(len(cells or ()) > _LARGEST_RECORD_CELLS for cells in texts.records(record, delimiter)):
        raise PipelineError(
            f"{url} has a record of {_LARGEST_RECORD_CELLS + 1} cells; at most {_LARGEST_RECORD_CELLS} are read"
        )


# --- JSON: one object a line ------------------------------------------------------------------------------------------


def _json_table(files: tuple[Path, ...], subject: str, encoding: texts.Encoding) -> LocalTable:
    names, has_lines = set[str](), False
    for file in files:
        for _, line in _json_lines(file):
            has_lines = True
            names.update(texts.json_object(line, encoding, case_sensitive=True) or ())
    columns = dict[str, str]()  # Names are compared in lower case, as by Spark.
    for name in sorted(names, key=str.swapcase):
        columns.setdefault(name.lower(), name)
    if has_lines and not columns:
        raise PipelineError(f"no line of {subject} is a JSON object in {encoding.name}; name its encoding")
    schema = _text_columns([*columns.values()])
    rows_of_file = partial(_json_rows, list(columns), encoding)
    return LocalTable(schema, partial(_read_rows, rows_of_file, files, schema), files, "json")


def _json_lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file with their numbers, without blank ones, which have numbers as well."""
    content = _content_of(file).removeprefix(b"\xef\xbb\xbf")
    for number, line in enumerate(_LINE_BREAK.split(content), 1):
        if line.strip():
            yield number, line


def _json_rows(names: list[str], encoding: texts.Encoding, file: Path) -> Iterator[tuple[texts.Row, texts.RowOrigin]]:
    url, no_cells = url_of_file(file), [None] * len(names)
    for number, line in _json_lines(file):
        values = texts.json_object(line, encoding, case_sensitive=False)
        cells = no_cells if values is None else [*map(values.get, names)]
        row = texts.Row(cells, values is None, line, number)
        yield row, origin_of(row, url, encoding)

"""CSV and JSON: bytes in, rows out. Each row is returned exactly as written, or as malformed with all its bytes.

Spark only splits files into records (CSV) or lines (JSON). Their content is parsed here, because Spark's own readers
alter rows without an error: a quote that is never closed swallows the rest of a file, bytes that are not text become
U+FFFD, numbers are rewritten, text after an object is dropped, and the last of two equal names wins. Runs on executors.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# The stubs of Arrow make arrays generic in a type that is known only at run time.

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgspec
import pyarrow as pa

from postdate.errors import PipelineError


class Row(NamedTuple):
    """A row of a file, and where it stands there.

    Args:
        cells: the values; all ``None`` if the line is not a row.
        is_malformed: whether the line is not a row.
        content: the bytes of the row in the file; for CSV that is decoded by Spark, the text in UTF-8.
        line: number of its first line, from 1. Empty lines of CSV are not counted.
    """

    cells: Sequence[str | None]
    is_malformed: bool
    content: bytes
    line: int


class RowOrigin(NamedTuple):
    """Where a row stands in its file, and why it is malformed. Tables and streams have it as a column.

    Args:
        file: the URL of the file.
        line: number of its first line, from 1, without empty lines of CSV; ``None`` if it is not known.
        content: the bytes of the row, as in :class:`Row`; ``None`` if they are not known.
        reason: why it is malformed, as a stable code; ``None`` for a row.
        detail: why it is malformed, for a reader; ``None`` for a row.
    """

    file: str
    line: int | None = None
    content: bytes | None = None
    reason: str | None = None
    detail: str | None = None


ORIGIN_TYPE: Final = pa.struct(
    [
        ("file", pa.string()),
        ("line", pa.int64()),
        ("content", pa.binary()),
        ("reason", pa.string()),
        ("detail", pa.string()),
    ]
)
"""The fields of :class:`RowOrigin`."""

ORIGIN: Final = "postdate_origin"
"""The column with the origin of a row of a file: its file, its line, its bytes, and why it is malformed.

It has the fields of :class:`RowOrigin`. Tables of CSV and JSON have it, and streams that keep
malformed rows.
"""

_BOM: Final = "\ufeff"
_NOT_DECODED: Final = "\ufffd"
_QUOTED: Final = re.compile(r'"([^"]*+(?:""[^"]*+)*+)"')
AS_SPARK_WRITES: Final = """Spark's writer does that when it is told .option("escape", '"')"""
"""What to do about a quote inside quotes that is not written twice."""

SAME_COLUMNS: Final = "all files of a folder, and the schema if there is one, have the same columns in the same order"


@dataclass(frozen=True, slots=True)
class Encoding:
    """The encoding of files.

    Args:
        name: a name that Python or Java knows.

    Raises:
        PipelineError: there is no such encoding.
    """

    name: str = "UTF-8"

    def __post_init__(self) -> None:
        try:
            codecs.lookup(self.name)
        except (LookupError, ValueError) as error:
            raise PipelineError(
                f"there is no encoding {self.name!r}; names look like UTF-8, Latin-1, cp1252"
            ) from error

    @property
    def is_ascii_compatible(self) -> bool:
        """Whether commas, quotes and line breaks are the bytes of ASCII, so that files can be split before decoding."""
        return '",{}\r\n'.encode(self.name) == b'",{}\r\n'

    @property
    def spark_encoding(self) -> str:
        """The encoding in which Spark reads: if Spark need not decode, one in which each byte is a character."""
        return "ISO-8859-1" if self.is_ascii_compatible else self.name

    def decode(self, content: bytes) -> str | None:
        """Return the text, or ``None`` if the bytes are not valid in this encoding."""
        try:
            return content.decode(self.name)
        except UnicodeDecodeError:
            return None

    def is_valid(self, content: bytes) -> bool:
        """Return whether the content of a :class:`Row` is in this encoding."""
        # What Spark decodes itself is UTF-8 by now, with a mark in the place of other bytes.
        return self.decode(content) is not None if self.is_ascii_compatible else _NOT_DECODED not in content.decode()


# --- CSV --------------------------------------------------------------------------------------------------------------


class UnclosedQuoteError(Exception):
    """A quote opens at ``position`` of a text and is never closed."""

    def __init__(self, position: int) -> None:
        super().__init__(f"a quote at {position} is never closed")
        self.position = position


@dataclass(frozen=True, slots=True)
class Delimiter:
    """The character between the cells of CSV.

    Raises:
        PipelineError: it is not one character of ASCII, or has another meaning in CSV.
    """

    text: str = ","

    def __post_init__(self) -> None:
        if len(self.text) != 1 or not self.text.isascii() or self.text in '"\r\n\0 \\':
            raise PipelineError(f"a delimiter is one character of ASCII, such as ; or a tab, and not {self.text!r}")


def records(text: str, delimiter: str = ",") -> Iterator[list[str | None] | None]:
    """Yield the cells of each record of a text; ``None`` for a record with text after a quoted cell.

    Empty cells are ``None``. Raises UnclosedQuoteError.
    """
    for cells, _, _ in _record_spans(text, delimiter):
        yield cells


def _record_spans(text: str, delimiter: str) -> Iterator[tuple[list[str | None] | None, int, int]]:
    """Yield the cells of each record, as :func:`records` does, with its begin and its end in the text."""
    if '"' not in text and "\n" not in text:
        yield [cell or None for cell in text.split(delimiter)], 0, len(text)
        return
    start, position, cells, is_malformed = 0, 0, list[str | None](), False
    blanks = " \t".replace(delimiter, "")
    next_delimiter = next_break = -1  # Each is searched again only after it was passed.
    while True:
        quoted = None
        if text.startswith('"', position):
            quoted = _QUOTED.match(text, position)
            if quoted is None:
                raise UnclosedQuoteError(position)
            position = quoted.end()
            while position < len(text) and text[position] in blanks:
                position += 1
        if next_delimiter < position:
            next_delimiter = _find(text, delimiter, position)
        if next_break < position:
            next_break = _find(text, "\n", position)
        end = min(next_delimiter, next_break)
        plain = text[position:end]
        if quoted is not None:
            cells.append(quoted[1].replace('""', '"') or None)
            is_malformed = is_malformed or plain not in ("", "\r")
        else:
            cells.append((plain.removesuffix("\r") if end == next_break < len(text) else plain) or None)
        position = end + 1
        if end == next_delimiter < len(text):
            continue
        yield None if is_malformed else cells, start, end
        if end >= len(text):
            return
        start, cells, is_malformed = position, [], False


def _find(text: str, part: str, position: int) -> int:
    """Return where a part of a text begins; the length of the text if it is not there."""
    place = text.find(part, position)
    return len(text) if place < 0 else place


def header_names(cells: Sequence[str | None], *, case_sensitive: bool) -> list[str]:
    """Return the names of columns as Spark makes them: empty and repeated names get their number."""
    folded = [name if case_sensitive or name is None else name.lower() for name in cells]
    return [
        f"_c{number}" if name is None else f"{name}{number}" if folded.count(folded[number]) > 1 else name
        for number, name in enumerate(cells)
    ]


@dataclass(slots=True)
class CsvFile:
    """One file that is read record by record.

    Args:
        path: used in errors.
        header: cells of the first line, which is the same in all files.
        encoding: encoding of the file.
        delimiter: the character between cells.
        lines: number of lines read so far, without empty lines, which Spark drops.
    """

    path: str
    header: Sequence[str | None]
    encoding: Encoding
    delimiter: str = ","
    lines: int = 0

    def rows(self, record: str) -> Iterator[Row]:
        """Yield the rows of one record of Spark, which may be several if line breaks are mixed.

        Raises:
            PipelineError: a quote is never closed, or the header line is different.
        """
        content = record.encode("latin-1") if self.encoding.is_ascii_compatible else record.encode()
        text = self.encoding.decode(content) if self.encoding.is_ascii_compatible else record
        first_line, self.lines = self.lines + 1, self.lines + 1 + content.count(b"\n")
        # The positions of quotes and commas do not depend on the meaning of the other bytes.
        parsable = record if text is None or (_NOT_DECODED in text and not self.encoding.is_ascii_compatible) else text
        parsable = parsable.removeprefix(_BOM) if first_line == 1 else parsable
        try:
            spans = list(_record_spans(parsable, self.delimiter))
        except UnclosedQuoteError as error:
            line = first_line + parsable[: error.position].count("\n")
            raise PipelineError(
                f"{self.path} has a quote in line {line} (empty lines are not counted) that is never closed: all that "
                f"follows it in the file would be one cell"
            ) from error
        if first_line == 1:
            self._check_header(text, spans[0][0])
            spans = spans[1:]
        no_cells = [None] * len(self.header)
        if text is None or (_NOT_DECODED in text and not self.encoding.is_ascii_compatible):
            yield Row(no_cells, is_malformed=True, content=content, line=first_line)
            return
        for cells, start, end in spans:
            line = first_line + parsable.count("\n", 0, start)
            row_content = content if (start, end) == (0, len(parsable)) else self._encode(parsable[start:end])
            is_row = cells is not None and len(cells) == len(self.header)
            yield Row(cells or [] if is_row else no_cells, not is_row, row_content, line)

    def _encode(self, text: str) -> bytes:
        return text.encode(self.encoding.name) if self.encoding.is_ascii_compatible else text.encode()

    def _check_header(self, text: str | None, cells: Sequence[str | None] | None) -> None:
        if text is None or cells is None:
            raise PipelineError(f"the first line of {self.path} is not {self.encoding.name}; name its encoding")
        if list(cells) != list(self.header):
            raise PipelineError(
                f"{self.path} has the columns {_join_names(cells)}, and others are read as {_join_names(self.header)}: "
                f"{SAME_COLUMNS}"
                if len(cells) == len(self.header)
                else f"{self.path} has {len(cells)} columns, and others are read as {len(self.header)}: {SAME_COLUMNS}"
            )


def _join_names(cells: Sequence[str | None]) -> str:
    return ", ".join(cell or "" for cell in cells)


def read_header(path: str, record: str, encoding: Encoding, delimiter: str = ",") -> list[str | None]:
    """Return the cells of a file's first line.

    Raises:
        PipelineError: the line is in another encoding, or a quote is never closed.
    """
    if encoding.is_ascii_compatible and (record.startswith(("\xff\xfe", "\xfe\xff")) or "\0" in record):
        raise PipelineError(f"{path} looks like UTF-16 and is read as {encoding.name}: say encoding UTF-16")
    content = record.encode("latin-1") if encoding.is_ascii_compatible else record.encode()
    text = encoding.decode(content) if encoding.is_ascii_compatible else record
    if text is None:
        raise PipelineError(f"the first line of {path} is not {encoding.name}; name its encoding")
    try:
        cells = next(records(text.removeprefix(_BOM), delimiter))
    except UnclosedQuoteError as error:
        raise PipelineError(f"{path} has a quote in line 1 that is never closed") from error
    if cells is None:
        raise PipelineError(f"the first line of {path} has text behind a quoted name")
    return cells


# --- JSON -------------------------------------------------------------------------------------------------------------


_decode_values: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_text: Final = msgspec.json.Decoder(str).decode


def json_pairs(text: str) -> list[tuple[str, str | None]]:
    """Return all pairs of a JSON object, including repeated names, with their values as texts.

    A value that is not text becomes its JSON text, exactly as it is written; null becomes ``None``. A repeated name has
    its last value each time.

    Raises:
        ValueError: the text is not exactly one JSON object, or has half of a pair of surrogates.
    """
    try:
        values = {name: _text_of(bytes(value)) for name, value in _decode_values(text).items()}
        names: Any = json.loads(text, object_pairs_hook=_names, parse_int=str, parse_float=str, parse_constant=str)
        "".join((*values, *(value or "" for value in values.values()))).encode()
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from error
    return [(name, values[name]) for name in names]


def _names(pairs: list[tuple[str, Any]]) -> list[str]:
    return [name for name, _ in pairs]


def _text_of(value: bytes) -> str | None:
    if value.startswith(b'"'):
        return _decode_text(value)
    return None if value == b"null" else value.decode()


def json_object(line: bytes, encoding: Encoding, *, case_sensitive: bool) -> dict[str, str | None] | None:
    """Return the values of a line by name, in lower case unless ``case_sensitive``.

    Returns ``None`` if the line is not a JSON object in the encoding, or has a name twice.
    """
    text = encoding.decode(line)
    try:
        pairs = json_pairs((text or "").removeprefix(_BOM))
    except ValueError:
        return None
    values = {name if case_sensitive else name.lower(): value for name, value in pairs}
    return values if len(values) == len(pairs) else None


# --- Arrow ------------------------------------------------------------------------------------------------------------


def to_table(
    rows: Sequence[Row],
    origins: Sequence[RowOrigin],
    positions: Sequence[int],
    batch: pa.RecordBatch,
    width: int,
    skipped: int,
) -> pa.RecordBatch:
    """Return rows as a batch: cells, their origin, and the columns of ``batch`` after the first ``skipped``.

    ``positions`` are those in ``batch`` from which the rows come; ``width`` is the number of cells.
    """
    columns = zip(*(row.cells for row in rows), strict=True) if rows else [()] * width
    arrays: list[Any] = [pa.array(column, pa.string()) for column in columns]
    arrays.append(origin_array(origins))
    places = pa.array(positions, pa.int64())
    arrays += [column.take(places) for column in batch.columns[skipped:]]
    return pa.RecordBatch.from_arrays(arrays, names=[str(number) for number in range(len(arrays))])


def origin_array(origins: Sequence[RowOrigin]) -> Any:
    """Return origins as an array of :data:`ORIGIN_TYPE`."""
    columns = zip(*origins, strict=True) if origins else [()] * ORIGIN_TYPE.num_fields
    arrays: list[Any] = [pa.array(column, field.type) for column, field in zip(columns, ORIGIN_TYPE, strict=True)]
    return pa.StructArray.from_arrays(arrays, names=[field.name for field in ORIGIN_TYPE])

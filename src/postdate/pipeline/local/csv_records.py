"""Cut a CSV file into records, at the places where Spark's reader cuts it.

Only the places of quotes, delimiters and line breaks matter here. The cells are read by
:class:`postdate.pipeline.texts.CsvFile`, as on Spark.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from postdate.errors import PipelineError
from postdate.pipeline.texts import AS_SPARK_WRITES

_QUOTED: Final = re.compile(r'"[^"]*+(?:""[^"]*+)*+"')
_LINE_BREAK: Final = re.compile(r"\r\n?|\n")


def split_records(path: str, text: str, delimiter: str) -> Iterator[str]:
    """Yield the records of a file without empty lines, each without the line break at its end.

    Args:
        path: used in errors.
        text: the file; one character a byte, if the encoding is a superset of ASCII.
        delimiter: the character between cells.

    Raises:
        PipelineError: text follows the end of a quoted cell.
    """
    first_break = _LINE_BREAK.search(text)
    line_break = "\n" if first_break is None else first_break[0]
    # The first line break of a file decides what its line breaks are. A line feed alone is always one.
    line_end = re.compile("\n" if line_break == "\n" else f"{line_break}|\n")
    cell_end = re.compile(f"{re.escape(delimiter)}|{line_end.pattern}")
    start, end, next_quote = 0, len(text), text.find('"')
    while start < end:
        if 0 <= next_quote < start:
            next_quote = text.find('"', start)
        line_match = line_end.search(text, start)
        if next_quote >= 0 and (line_match is None or next_quote < line_match.start()):
            line_match = _find_record_end(path, text, start, line_break, cell_end)
        stop, after = (end, end) if line_match is None else line_match.span()
        if line_match is not None and line_match[0] != line_break and text.startswith(line_break, after):
            # Spark takes an empty line after such a line feed for a part of the record.
            after += len(line_break)
        if stop > start:
            yield _strip_line_end(text[start:after])
        start = after


def _find_record_end(
    path: str, text: str, start: int, line_break: str, cell_end: re.Pattern[str]
) -> re.Match[str] | None:
    """Return the line break at the end of a record; ``None``: it ends with the file, as an open quote does."""
    position, end = start, len(text)
    while position < end:
        if text[position] == '"':
            quoted = _QUOTED.match(text, position)
            if quoted is None:
                return None
            position = quoted.end()
            while position < end and text[position] <= " " and cell_end.match(text, position) is None:
                position += 1
            cell_match = cell_end.match(text, position)
            if cell_match is None and position < end:
                line = text.count(line_break, 0, position)
                raise PipelineError(
                    f"{path} has a quote inside quotes, after line {line}, that is not written twice: {AS_SPARK_WRITES}"
                )
        else:
            cell_match = cell_end.search(text, position)
        if cell_match is None or cell_match[0][0] in "\r\n":
            return cell_match
        position = cell_match.end()
    return None


def _strip_line_end(record: str) -> str:
    if record.endswith("\r\n"):
        return record[:-2]
    return record[:-1] if record.endswith(("\r", "\n")) else record

"""Cut a CSV file into records, at the places where Spark's reader cuts it.

Only the places of quotes, delimiters and line breaks matter here. The cells are read by
:class:`postdate.pipeline.texts.CsvFile`, as on Spark.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
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
    cutter = _RecordCutter.of(path, text, delimiter)
    start, end, next_quote = 0, len(text), text.find('"')
    while start < end:
        if 0 <= next_quote < start:
            next_quote = text.find('"', start)
        stop = text.find(cutter.line_break, start)
        stop = end if stop < 0 else stop
        after = stop + len(cutter.line_break)
        if cutter.is_mixed or 0 <= next_quote < stop:
            stop, after = cutter.find_record_end(start)
        if stop > start:
            yield _strip_line_end(text[start:after])
        start = after


@dataclass(frozen=True, slots=True)
class _RecordCutter:
    """Finds the ends of the records of one file cell by cell, as Spark's reader (Univocity) does.

    The first line break of a file decides what its line breaks are. If that is not a line feed, a line feed alone ends
    a record where a cell begins and behind a quoted cell. Inside other cells it is a character like others, if a
    delimiter or a line break follows it; such a record is several rows for :class:`postdate.pipeline.texts.CsvFile`.
    """

    path: str
    text: str
    delimiter: str
    line_break: str
    # Whether there are line feeds besides the line breaks of the file.
    is_mixed: bool
    # The ends of cells, and those with a line feed alone among them.
    cell_end: re.Pattern[str]
    any_cell_end: re.Pattern[str]

    @classmethod
    def of(cls, path: str, text: str, delimiter: str) -> _RecordCutter:
        first = _LINE_BREAK.search(text)
        line_break = "\n" if first is None else first[0]
        is_mixed = line_break != "\n" and text.count("\n") > text.count(line_break) * line_break.count("\n")
        cell_end = f"{re.escape(delimiter)}|{line_break}"
        return cls(path, text, delimiter, line_break, is_mixed, re.compile(cell_end), re.compile(f"{cell_end}|\n"))

    def find_record_end(self, start: int) -> tuple[int, int]:
        """Return where a record ends, and where the next one begins. A quote that stays open ends with the file."""
        text, position, end = self.text, start, len(self.text)
        while position < end:
            match = self.any_cell_end.match(text, position)
            if match is None:
                quoted = text[position] == '"'
                match = self._find_end_of_quoted_cell(position) if quoted else self._find_cell_end(position)
            if match is None:
                return end, end
            if match[0] != self.delimiter:
                return match.span()
            position = match.end()
        return end, end

    def _find_cell_end(self, position: int) -> re.Match[str] | None:
        match = self.cell_end.search(self.text, position)
        if match is None or (match[0] == "\r" and match.end() == len(self.text)):
            return self.any_cell_end.search(self.text, position)
        return match

    def _find_end_of_quoted_cell(self, position: int) -> re.Match[str] | None:
        text = self.text
        quoted = _QUOTED.match(text, position)
        if quoted is None:
            return None
        position = quoted.end()
        while position < len(text) and text[position] <= " " and self.any_cell_end.match(text, position) is None:
            position += 1
        match = self.any_cell_end.match(text, position)
        if match is None and position < len(text):
            line = text.count(self.line_break, 0, position)
            raise PipelineError(
                f"{self.path} has a quote inside quotes, after line {line}, that is not written twice: "
                f"{AS_SPARK_WRITES}"
            )
        return match


def _strip_line_end(record: str) -> str:
    if record.endswith("\r\n"):
        return record[:-2]
    return record[:-1] if record.endswith(("\r", "\n")) else record

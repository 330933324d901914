"""The format of reports on a terminal and in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

from rich.console import Console
from rich.table import Table
from rich.text import Text

from postdate.operations.plain import Body, escape_control_characters, format_time

_WIDE = 100_000
"""Number of columns if the output is not a terminal: lines in a pipe are never wrapped, and no id is ever cut."""


def hexdump(content: bytes) -> str:
    """Return lines of offset, sixteen hexadecimal pairs, and the ASCII characters."""
    lines: list[str] = []
    for offset in range(0, len(content), 16):
        part = content[offset : offset + 16]
        ascii_text = "".join(chr(each) if 32 <= each < 127 else "." for each in part)
        lines.append(f"{offset:08x}  {part.hex(' '):<47}  {ascii_text}")
    return "\n".join(lines)


def one_line(text: str, limit: int = 100) -> str:
    line = " ".join(escape_control_characters(text).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def time_or_dash(instant: datetime | None) -> str:
    return "-" if instant is None else format_time(instant)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print rows under headings. Numbers are aligned to the right."""
    console = Console(width=None if sys.stdout.isatty() else _WIDE, highlight=False)
    with console.capture() as capture:
        console.print(_table(columns, [list(row) for row in rows]))
    print("\n".join(line.rstrip() for line in capture.get().splitlines()))


def _table(columns: Sequence[str], lines: Sequence[Sequence[object]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for position, name in enumerate(columns):
        numbers = bool(lines) and all(isinstance(line[position], int) for line in lines)
        table.add_column(name, justify="right" if numbers else "left", overflow="fold")
    for line in lines:
        table.add_row(*(Text(_cell(value)) for value in line))
    return table


def print_pairs(pairs: Mapping[str, object]) -> None:
    """Print names and values below each other, without ``None`` and empty values."""
    width = max((len(name) for name in pairs), default=0)
    for name, value in pairs.items():
        if value is not None and value != "":
            print(f"{name:<{width}}  {_cell(value)}")


def print_body(body: Body) -> None:
    print(f"body ({body.size_bytes:,} bytes{'' if body.base64 is None else ', base64'})")
    if body.size_bytes:
        print(escape_control_characters(body.text if body.text is not None else body.base64 or ""))


def _cell(value: object) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case datetime():
            return time_or_dash(value)
        case _:
            return escape_control_characters(str(value))

"""Numbered SQL: the same numbers and names in all dialects with queues, and in all without.

Applied in order, each together with its mark.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True, slots=True)
class Migration:
    """One numbered step.

    Args:
        version: 1, 2, 3 … without gaps.
        name: what it does, from the file name.
        sql: its statements.
    """

    version: int
    name: str
    sql: str


def setup_command(table: str) -> str:
    """Return the command that creates the table of a store, the endpoint it belongs to included where that is known."""
    endpoint = table.removesuffix(".timeouts")
    if endpoint in {table, "postdate"}:
        return "run `postdate setup`"
    return f"run `POSTDATE_ENDPOINT__NAME={shlex.quote(endpoint)} postdate setup`, or name it with endpoint.name"


def migrations(dialect: str) -> tuple[Migration, ...]:
    """Return the migrations of a dialect (``sqlite`` …) in order."""
    folder = resources.files("postdate.migrations") / dialect
    files = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".sql"))
    return tuple(
        Migration(int(file[:4]), file[5:-4].replace("_", " "), (folder / file).read_text(encoding="utf-8"))
        for file in files
    )


def script(dialect: str, marks: str, table: str) -> str:
    """Return the SQL that applies all migrations of a dialect of SQLite to a file without any of them.

    Args:
        dialect: which.
        marks: the statement that creates ``table``.
        table: in which is marked what was done.
    """
    parts = [f"{marks};"]
    for each in migrations(dialect):
        mark = f"INSERT INTO {table} VALUES ({each.version}, '{each.name}');"
        parts.append(f"-- {each.version:04d} {each.name}\n{each.sql.strip()}\n{mark}")
    return "\n\n".join(parts) + "\n"

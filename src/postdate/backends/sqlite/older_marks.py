"""Marks of migrations in files that versions before 821f8fd6 made: until 0.2.0 is out, as the folders ``older``.

These versions had a table of marks for each part, without subjects.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from typing import Final

_CREATED_BY: Final = "SELECT sql FROM sqlite_master WHERE type = 'table' AND name = "
_TABLES: Final = {"": "postdate_migration", "saga": "saga_migration", "outbox": "postdate_outbox_migration"}


def shared_condition(table_sql: str) -> str:
    """Return the condition for the marks of the shared tables; ``table_sql`` created the table of marks."""
    return "WHERE subject = ''" if "subject" in table_sql else ""


def drop_older_marks(execute: Callable[..., sqlite3.Cursor]) -> Sequence[tuple[int, str, str]]:
    """Drop the tables of marks of older versions; return version, name and subject of each of their marks."""
    marks = list[tuple[int, str, str]]()
    for subject, table in _TABLES.items():
        row = execute(f"{_CREATED_BY}'{table}'").fetchone()
        if row is not None and "subject" not in row[0]:
            marks += execute(f"SELECT version, name, '{subject}' FROM {table}").fetchall()
            execute(f"DROP TABLE {table}")
    return marks

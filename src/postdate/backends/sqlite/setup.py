"""Numbered migrations of a file: of what store and queues share, of sagas, of outboxes; each part has its own marks."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from typing import Final

from postdate.persistence.migrations import Step, migrations, run
from postdate.ports.backends import LibraryFacts

MARKS: Final = "postdate_migration"
"""Of what store and queues share."""

SAGA_MARKS: Final = "saga_migration"
OUTBOX_MARKS: Final = "postdate_outbox_migration"


def bring_up_to_date(execute: Callable[..., sqlite3.Cursor], wanted: Sequence[Step], marks: str, where: str) -> None:
    """Apply the migrations that are missing, in the transaction that runs.

    Args:
        execute: of a connection or a transaction.
        wanted: see :func:`postdate.persistence.migrations.missing`.
        marks: name of the table in which is marked what was done.
        where: for texts.

    Raises:
        StoreFromNewerVersion: see :func:`postdate.persistence.migrations.missing`.
    """
    execute(marking(marks))
    done = execute(f"SELECT '', version FROM {marks}").fetchall()
    run(wanted, done, where, execute, lambda step: mark_done(marks, step))


def steps(part: str) -> tuple[Step, ...]:
    """Return the migrations of a part of a file: ``database``, ``sagas`` or ``outbox``."""
    found = migrations("postdate.backends.sqlite", part)
    return tuple(Step("", each.version, each.name, tuple(statements_of(each.sql))) for each in found)


def newest_version() -> int:
    """Return the version of what store and queues share that this Postdate makes."""
    return migrations("postdate.backends.sqlite")[-1].version


def library_facts() -> LibraryFacts:
    """Return what the SQLite of this process is."""
    return LibraryFacts("sqlite", sqlite3.sqlite_version_info, newest_version())


def marking(marks: str) -> str:
    """Return the statement that makes a table of marks."""
    return f"CREATE TABLE IF NOT EXISTS {marks} (version INTEGER PRIMARY KEY, name TEXT NOT NULL)"


def mark_done(marks: str, step: Step) -> str:
    """Return the statement that says that a step was done."""
    return f"INSERT INTO {marks} VALUES ({step.version}, '{step.name}')"


def setup_script(part: str, marks: str) -> str:
    """Return the SQL that makes a part of a file that has nothing of it, for an administrator."""
    parts = [f"{marking(marks)};"]
    for step in steps(part):
        sql = "".join(step.statements).strip()
        parts.append(f"-- {step.version:04d} {step.name}\n{sql}\n{mark_done(marks, step)};")
    return "\n\n".join(parts) + "\n"


def statements_of(script: str) -> list[str]:
    """Return the statements of a script, one by one: a script as a whole cannot run in a transaction."""
    statements: list[str] = []
    pending = ""
    for line in script.splitlines(keepends=True):
        pending += line
        if sqlite3.complete_statement(pending):
            statements.append(pending)
            pending = ""
    return statements

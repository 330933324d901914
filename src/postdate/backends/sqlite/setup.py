"""Numbered migrations of a file: of store and queues, of sagas, of outboxes; one table marks those applied."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from typing import Final

from postdate.persistence.migrations import Step, migrations, run
from postdate.ports.backends import LibraryFacts

_MARKING: Final = (
    "CREATE TABLE IF NOT EXISTS postdate_migration (version INTEGER NOT NULL, name TEXT NOT NULL, "
    "subject TEXT NOT NULL DEFAULT '', PRIMARY KEY (subject, version))"
)
_MARKS: Final = "SELECT sql FROM sqlite_master WHERE type = 'table' AND name = "
_SUBJECTS: Final = {"database": "", "sagas": "saga", "outbox": "outbox"}
_MARKED_APART: Final = {"saga": "saga_migration", "outbox": "postdate_outbox_migration"}
"""Tables of marks of earlier versions, which may run beside this one and still use them."""


def bring_up_to_date(execute: Callable[..., sqlite3.Cursor], wanted: Sequence[Step], where: str) -> None:
    """Apply the missing migrations in the open transaction, with its ``execute``. Raises `StoreFromNewerVersion`."""
    _gather_marks(execute)
    done = execute("SELECT subject, version FROM postdate_migration").fetchall()
    run(wanted, done, where, execute, mark_done)


def _gather_marks(execute: Callable[..., sqlite3.Cursor]) -> None:
    """Make the table of marks and copy those of earlier versions, whose tables stay for older processes."""
    found = execute(f"{_MARKS}'postdate_migration'").fetchone()
    if found is not None and "subject" not in found[0]:
        execute("ALTER TABLE postdate_migration RENAME TO postdate_migration_before")
        execute(_MARKING)
        execute("INSERT INTO postdate_migration (version, name) SELECT version, name FROM postdate_migration_before")
        execute("DROP TABLE postdate_migration_before")
    execute(_MARKING)
    for subject, table in _MARKED_APART.items():
        if execute(f"{_MARKS}'{table}'").fetchone() is not None:
            execute(f"INSERT OR IGNORE INTO postdate_migration SELECT version, name, '{subject}' FROM {table}")


def version_of(execute: Callable[[str], sqlite3.Cursor]) -> int:
    """Return the version of the tables of store and queues; 0: there are none."""
    found = execute(f"{_MARKS}'postdate_migration'").fetchone()
    if found is None:
        return 0
    of_these = "WHERE subject = ''" if "subject" in found[0] else ""  # else an earlier version has made it
    return execute(f"SELECT coalesce(max(version), 0) FROM postdate_migration {of_these}").fetchone()[0]


def steps(part: str) -> tuple[Step, ...]:
    """Return the migrations of a part of a file: ``database``, ``sagas`` or ``outbox``."""
    found, subject = migrations("postdate.backends.sqlite", part), _SUBJECTS[part]
    return tuple(Step(subject, each.version, each.name, tuple(statements_of(each.sql))) for each in found)


def newest_version() -> int:
    return migrations("postdate.backends.sqlite")[-1].version


def library_facts() -> LibraryFacts:
    return LibraryFacts("sqlite", sqlite3.sqlite_version_info, newest_version())


def mark_done(step: Step) -> str:
    return f"INSERT INTO postdate_migration VALUES ({step.version}, '{step.name}', '{step.subject}')"


def setup_script(part: str) -> str:
    parts = [f"{_MARKING};"]
    for step in steps(part):
        sql = "".join(step.statements).strip()
        parts.append(f"-- {step.version:04d} {step.name}\n{sql}\n{mark_done(step)};")
    return "\n\n".join(parts) + "\n"


def statements_of(script: str) -> list[str]:
    """Split a script into statements: as a whole it cannot run in a transaction."""
    statements: list[str] = []
    pending = ""
    for line in script.splitlines(keepends=True):
        pending += line
        if sqlite3.complete_statement(pending):
            statements.append(pending)
            pending = ""
    return statements

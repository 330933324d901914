"""Creating the tables, by numbered migrations. Source: ADR 0008."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any, Final

from postdate.backends.mariadb.connection import MariaDbSession
from postdate.backends.mariadb.names import Names, literal, quoted
from postdate.backends.rowlocks import migrating as rowlocks
from postdate.errors import StoreUnavailable
from postdate.persistence.migrations import Step, run

_WAIT_SECONDS: Final = 30


def foundation(names: Names) -> tuple[str, ...]:
    """Return the statements that come before every migration."""
    marks = (
        f"CREATE TABLE IF NOT EXISTS {names.plain('postdate_migration')} (\n"
        f"    subject VARCHAR(64) NOT NULL, version INTEGER NOT NULL, name VARCHAR(100) NOT NULL,\n"
        f"    PRIMARY KEY (subject, version)\n"
        f") ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin"
    )
    return (f"CREATE DATABASE IF NOT EXISTS {quoted(names.schema)} CHARACTER SET utf8mb4", marks)


def steps(names: Names) -> tuple[Step, ...]:
    """Return the migrations of the database and of the store's table, in order."""
    replacements = {
        "{schema}": quoted(names.schema),
        "{table}": names.plain(names.table),
        "{name}": literal(names.table),
    }

    return rowlocks.steps("postdate.backends.mariadb", names.table, replacements)


def mark_done(names: Names, step: Step) -> str:
    """Return the statement that says that a step was done."""
    return (
        f"INSERT IGNORE INTO {names.plain('postdate_migration')} (subject, version, name) "
        f"VALUES ({literal(step.subject)}, {step.version}, {literal(step.name)})"
    )


def setup_statements(names: Names) -> str:
    """Return the SQL that creates everything that is missing; harmless when it is run again."""
    statements = [
        *foundation(names),
        *(statement for step in steps(names) for statement in (*step.statements, mark_done(names, step))),
    ]
    rights = (
        f"What a user needs that runs Postdate and may not create tables:\n"
        f"GRANT SELECT, INSERT, UPDATE, DELETE ON {quoted(names.schema)}.* TO the_user;\n"
    )
    body = "".join(f"{statement.strip()};\n\n" for statement in statements)
    return textwrap.indent(rights, "-- ", lambda line: True) + body


def setup(session: MariaDbSession, names: Names) -> None:
    """Create what is missing; several processes may do it at once.

    Raises:
        StoreFromNewerVersion: a newer Postdate was here.
        StoreUnavailable: another process has been at it for half a minute.
    """
    lock = {"name": names.lock("setup"), "wait": _WAIT_SECONDS}
    if session.rows("SELECT GET_LOCK(%(name)s, %(wait)s)", lock)[0][0] != 1:
        raise StoreUnavailable("another process has been setting up this database for half a minute; try again")
    try:
        found = session.rows(
            "SELECT 1 FROM information_schema.tables WHERE table_schema = %(schema)s AND table_name = %(table)s",
            {"schema": names.schema, "table": "postdate_migration"},
        )
        if not found:  # so that later starts need no right to create
            for statement in foundation(names):
                session.change(statement)
        where = f"database {names.schema!r}"
        run(steps(names), marks(session, names), where, session.change, lambda step: mark_done(names, step))
    finally:
        session.rows("SELECT RELEASE_LOCK(%(name)s)", lock)


def marks(session: MariaDbSession, names: Names) -> Sequence[tuple[Any, ...]]:
    """Return subject and version of each migration that was done."""
    return session.rows(f"SELECT subject, version FROM {names.of('migration')}")

"""Creating the tables, by numbered migrations in one transaction. Source: ADR 0008."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any, Final

from postdate.backends.rowlocks import migrating as rowlocks
from postdate.backends.sqlserver.connection import ADMINISTRATORS_SETTINGS, SqlServerSession
from postdate.backends.sqlserver.names import Names, literal, quoted
from postdate.errors import StoreUnavailable
from postdate.persistence.migrations import Step, run

_WAIT_MILLISECONDS: Final = 30_000
TAKE_TURN: Final = (
    "DECLARE @granted int; EXEC @granted = sp_getapplock @Resource = %(name)s, @LockMode = 'Exclusive', "
    "@LockOwner = 'Transaction', @LockTimeout = %(wait)s; SELECT @granted"
)


def foundation(names: Names) -> tuple[str, ...]:
    """Return the statements that come before every migration; creating a schema must be alone in its batch."""
    schema, marks = quoted(names.schema), names.plain("postdate_migration")
    create = literal(f"CREATE SCHEMA {schema}")
    return (
        f"IF SCHEMA_ID({literal(names.schema)}) IS NULL EXEC ({create})",
        (
            f"IF OBJECT_ID({literal(marks)}, N'U') IS NULL CREATE TABLE {marks} (\n"
            f"    subject nvarchar(128) COLLATE Latin1_General_BIN2 NOT NULL, version int NOT NULL,\n"
            f"    name nvarchar(100) NOT NULL, PRIMARY KEY (subject, version)\n"
            f")"
        ),
    )


def steps(names: Names) -> tuple[Step, ...]:
    """Return the migrations of the schema and of the store's table, in order."""
    replacements = {
        "{schema}": quoted(names.schema),
        "{table}": names.plain(names.table),
        "{name}": literal(names.table),
    }

    return rowlocks.steps("postdate.backends.sqlserver", names.table, replacements)


def mark_done(names: Names, step: Step) -> str:
    """Return the statement that says that a step was done."""
    return (
        f"INSERT INTO {names.plain('postdate_migration')} (subject, version, name) "
        f"VALUES ({literal(step.subject)}, {step.version}, {literal(step.name)})"
    )


def setup_statements(names: Names) -> str:
    """Return the SQL that creates everything that is missing; harmless when it is run again."""
    guarded = (
        _guarded(names, step, statement)
        for step in steps(names)
        for statement in (*step.statements, mark_done(names, step))
    )
    body = "".join(f"{statement.strip()};\n\n" for statement in [*foundation(names), *guarded])
    rights = (
        f"What a user needs that runs Postdate and may not create tables:\n"
        f"GRANT SELECT, INSERT, UPDATE, DELETE ON SCHEMA::{quoted(names.schema)} TO the_user;\n"
    )
    comment = textwrap.indent(rights, "-- ", lambda line: True)
    return f"{ADMINISTRATORS_SETTINGS};\n\nBEGIN TRANSACTION;\n\n{body}COMMIT TRANSACTION;\n\n{comment}"


def _guarded(names: Names, step: Step, statement: str) -> str:
    """Return a statement of a migration that is skipped once the migration is marked: by its last statement."""
    marked = (
        f"SELECT 1 FROM {names.plain('postdate_migration')} "
        f"WHERE subject = {literal(step.subject)} AND version = {step.version}"
    )
    return f"IF NOT EXISTS ({marked})\n{statement}"


def setup(session: SqlServerSession, names: Names) -> None:
    """Create what is missing; several processes may do it at once.

    Raises:
        StoreFromNewerVersion: a newer Postdate was here.
        StoreUnavailable: another process has been at it for half a minute.
    """
    session.begin()
    try:
        _wait_for_our_turn(session, names)
        for statement in foundation(names):
            session.change(statement)
        where = f"schema {names.schema!r}"
        run(steps(names), marks(session, names), where, session.change, lambda step: mark_done(names, step))
        session.commit()
    except BaseException:
        session.rollback()
        raise


def _wait_for_our_turn(session: SqlServerSession, names: Names) -> None:
    ((granted,),) = session.rows(TAKE_TURN, {"name": names.lock("setup"), "wait": _WAIT_MILLISECONDS})
    if granted < 0:
        raise StoreUnavailable("another process has been setting up this schema for half a minute; try again")


def marks(session: SqlServerSession, names: Names) -> Sequence[tuple[Any, ...]]:
    """Return subject and version of each migration that was done."""
    return session.rows(f"SELECT subject, version FROM {names.plain('postdate_migration')}")

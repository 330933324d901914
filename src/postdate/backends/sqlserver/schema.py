"""A schema in a database of SQL Server: its names, its set-up in one transaction, its sagas and its outbox.

It has never been run against a server. Source: ADR 0008.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

from postdate.backends.sql.migrations import Step, oldest_versions, too_old_advice
from postdate.backends.sql.row_locks import names as row_locks_names
from postdate.backends.sql.row_locks.database import RowLockSchema, ServerSagaStore, TableCreation
from postdate.backends.sql.row_locks.outbox import ServerOutbox
from postdate.backends.sqlserver.connection import ADMINISTRATORS_SETTINGS, SqlServerInstance
from postdate.backends.sqlserver.statements import SqlServerSqlDialect
from postdate.errors import ConfigurationError, StoreUnavailable

LONGEST_NAME: Final = 128


def quote_name(name: str) -> str:
    return "[" + name.replace("]", "]]") + "]"


def literal(text: str) -> str:
    return "N'" + text.replace("'", "''") + "'"


def check_name(name: str, what: str) -> str:
    """Return ``name`` if SQL Server can have it.

    Raises:
        ConfigurationError: the name is blank, over 128 UTF-16 units, has a NUL or a lone surrogate, or could be
            confused with one of Postdate's own tables.
    """
    if not name.strip() or any(character == "\0" or 0xD800 <= ord(character) < 0xE000 for character in name):
        raise ConfigurationError(f"{what} must not be blank or have NUL characters or lone surrogates: {name!r}")
    if (units := len(name.encode("utf-16-le")) // 2) > LONGEST_NAME:
        raise ConfigurationError(
            f"{what} {name!r} has {units} UTF-16 units; SQL Server allows at most {LONGEST_NAME}: choose a shorter one "
            f"(table=... for a store)"
        )
    return row_locks_names.check_not_reserved(name, what)


class SqlServerNames(row_locks_names.RowLockNames):
    """The names of one store. The server compares names of locks without regard to case beyond 32 characters."""

    spelling = row_locks_names.Spelling("postdate.backends.sqlserver", quote_name, literal, check_name)


_WAIT_MILLISECONDS: Final = 30_000
ACQUIRE_LOCK: Final = (
    "DECLARE @granted int; EXEC @granted = sp_getapplock @Resource = %(name)s, @LockMode = 'Exclusive', "
    "@LockOwner = 'Transaction', @LockTimeout = %(wait)s; SELECT @granted"
)


def foundation(names: row_locks_names.RowLockNames) -> tuple[str, ...]:
    marks = names.qualified_name("postdate_migration")
    return (
        create_schema_statement(names.schema),
        (
            f"IF OBJECT_ID({literal(marks)}, N'U') IS NULL CREATE TABLE {marks} (\n"
            f"    subject nvarchar(128) COLLATE Latin1_General_BIN2 NOT NULL, version int NOT NULL,\n"
            f"    name nvarchar(100) NOT NULL, PRIMARY KEY (subject, version)\n"
            f")"
        ),
    )


def create_schema_statement(schema: str) -> str:
    """Return the statement that creates a missing schema, in EXEC, because CREATE SCHEMA must be alone in its batch."""
    return f"IF SCHEMA_ID({literal(schema)}) IS NULL EXEC ({literal(f'CREATE SCHEMA {quote_name(schema)}')})"


def setup_statements(names: row_locks_names.RowLockNames, steps: Sequence[Step]) -> str:
    refusals = (_refusal(names, *each) for each in oldest_versions(steps).items())
    guarded_statements = (
        _guarded_statement(names, step, statement)
        for step in steps
        for statement in (*step.statements, row_locks_names.mark_statement(names, step))
    )
    body = "".join(f"{statement.strip()};\n\n" for statement in [*foundation(names), *refusals, *guarded_statements])
    rights = row_locks_names.rights_comment(names, f"SCHEMA::{quote_name(names.schema)}")
    return f"{ADMINISTRATORS_SETTINGS};\n\nBEGIN TRANSACTION;\n\n{body}COMMIT TRANSACTION;\n\n{rights}"


def _guarded_statement(names: row_locks_names.RowLockNames, step: Step, statement: str) -> str:
    """Return a statement that runs only as part of the next migration, which ends with its mark, the last statement."""
    newest = row_locks_names.newest_mark_query(names, step.subject)
    return f"IF {newest} {'IS NULL' if step.is_initial else f'= {step.version - 1}'}\n{statement}"


def _refusal(names: row_locks_names.RowLockNames, subject: str, oldest: int) -> str:
    """Return a statement that fails in a schema that is too old."""
    text = literal(f"schema {names.schema!r} is too old: {too_old_advice(oldest)}")
    return f"IF {row_locks_names.newest_mark_query(names, subject)} < {oldest}\nTHROW 50000, {text}, 1"


def setup(session: Any, names: row_locks_names.RowLockNames, steps: Sequence[Step]) -> None:
    """Apply the missing migrations of ``steps``; several processes may do it at once.

    Raises as `find_missing_steps` does, or `StoreUnavailable` when another process has been migrating for half a
    minute.
    """
    with lock_setup(session, names.lock_name("setup")):
        for statement in foundation(names):
            session.change(statement)
        row_locks_names.migrate(session, names, steps, f"schema {names.schema!r}")


@contextmanager
def lock_setup(session: Any, lock: str) -> Generator[None]:
    """Hold the lock of all set-ups during a transaction.

    Raises `StoreUnavailable` when another process has had it for half a minute.
    """
    session.begin()
    try:
        _acquire_lock(session, lock)
        yield
        session.commit()
    except BaseException:
        session.rollback()
        raise


def _acquire_lock(session: Any, lock: str) -> None:
    ((granted,),) = session.rows(ACQUIRE_LOCK, {"name": lock, "wait": _WAIT_MILLISECONDS})
    if granted < 0:
        raise StoreUnavailable("another process has been setting up this schema for half a minute; try again")


DEFAULT_SCHEMA: Final = "dbo"


class SqlServerSchema(RowLockSchema):
    """A schema, and the connections to its server; by default ``dbo``."""

    dialect, names_of = SqlServerSqlDialect(), SqlServerNames
    tables = TableCreation(setup, setup_statements)

    def _server_at(self, url: str, answers_within: timedelta | None) -> SqlServerInstance:
        return SqlServerInstance(url, answers_within)

    def _check_schema(self, schema: str | None) -> str:
        return check_name(DEFAULT_SCHEMA if schema is None else schema, "schema")


class SqlServerSagaStore(ServerSagaStore):
    """Keeps saga instances in SQL Server; see :class:`postdate.backends.sql.row_locks.database.ServerSagaStore`."""

    database_type = SqlServerSchema


class SqlServerOutbox(ServerOutbox):
    """Keeps outboxes in SQL Server; see :class:`postdate.backends.sql.row_locks.outbox.ServerOutbox`."""

    database_type = SqlServerSchema

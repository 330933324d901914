"""A database of a MariaDB server, which takes the place of a schema: its names, its set-up, its sagas and its outbox.

MariaDB commits after each statement. Source: ADR 0008.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

import pymysql
from typing_extensions import override

from postdate.backends.mariadb.connection import MariaDbServer, translate
from postdate.backends.mariadb.objects import restore_indexes
from postdate.backends.mariadb.statements import MariaDbSqlDialect
from postdate.backends.sql.migrations import Step, oldest_versions, too_old_advice
from postdate.backends.sql.row_locks import names as row_locks_names
from postdate.backends.sql.row_locks.database import RowLockSchema, ServerSagaStore, TableCreation
from postdate.backends.sql.row_locks.outbox import ServerOutbox
from postdate.errors import ConfigurationError, PostdateError, StoreFull, StoreReadOnly, StoreUnavailable

LONGEST_NAME: Final = 64


def quote_name(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def literal(text: str) -> str:
    """Return a text literal that is safe, however the server treats backslashes."""
    return f"CONVERT(X'{text.encode().hex()}' USING utf8mb4)" if "\\" in text else "'" + text.replace("'", "''") + "'"


def check_name(name: str, what: str) -> str:
    """Return ``name`` if MariaDB can have it.

    Raises:
        ConfigurationError: the name is blank, over 64 characters, has a NUL, a space at its end, or a character outside
            the basic plane (such as an emoji), or could be confused with one of Postdate's own tables.
    """
    if not name.strip() or "\0" in name or name.endswith(" "):
        raise ConfigurationError(f"{what} must not be blank, end in a space or have NUL characters: {name!r}")
    if len(name) > LONGEST_NAME:
        raise ConfigurationError(
            f"{what} {name!r} has {len(name)} characters; MariaDB allows at most {LONGEST_NAME}: choose a shorter one "
            f"(table=... for a store)"
        )
    beyond = [character for character in name if ord(character) > 0xFFFF or 0xD800 <= ord(character) < 0xE000]
    if beyond:
        raise ConfigurationError(f"{what} {name!r} has {beyond[0]!r}, which MariaDB does not allow in names")
    return row_locks_names.check_not_reserved(name, what)


class MariaDbNames(row_locks_names.RowLockNames):
    """The names of one store; its schema is a database, and names of locks are server-wide."""

    spelling = row_locks_names.Spelling("postdate.backends.mariadb", quote_name, literal, check_name)


_WAIT_SECONDS: Final = 30
_INSERT: Final = "INSERT IGNORE"
TABLE_EXISTS: Final = (
    "SELECT 1 FROM information_schema.tables WHERE table_schema = %(schema)s AND table_name = %(table)s"
)


def foundation(names: row_locks_names.RowLockNames) -> tuple[str, ...]:
    marks = (
        f"CREATE TABLE IF NOT EXISTS {names.qualified_name('postdate_migration')} (\n"
        f"    subject VARCHAR(64) NOT NULL, version INTEGER NOT NULL, name VARCHAR(100) NOT NULL,\n"
        f"    PRIMARY KEY (subject, version)\n"
        f") ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin"
    )
    return (f"CREATE DATABASE IF NOT EXISTS {quote_name(names.schema)} CHARACTER SET utf8mb4", marks)


def setup_statements(names: row_locks_names.RowLockNames, steps: Sequence[Step]) -> str:
    """Return migrations as SQL for an administrator. The SQL may be run again: then no statement changes anything.

    In a database of an earlier version the initial migration finds all tables there. Its mark comes last, because it
    would hide the steps from that version to this one if they did not run to the end.
    """
    refusals = (sql for each in oldest_versions(steps).items() for sql in _refusal(names, *each))
    statements = [*foundation(names), *refusals]
    for subject in dict.fromkeys(step.subject for step in steps):
        (initial,) = (step for step in steps if step.subject == subject and step.is_initial)
        statements += initial.statements
        for step in steps:
            if step.subject == subject:
                statements += [
                    *(() if step.is_initial else step.statements),
                    row_locks_names.mark_statement(names, step, _INSERT),
                ]
    body = "".join(f"{statement.strip()};\n\n" for statement in statements)
    return row_locks_names.rights_comment(names, f"{quote_name(names.schema)}.*") + body


def _refusal(names: row_locks_names.RowLockNames, subject: str, oldest: int) -> tuple[str, str]:
    """Return statements that fail in a database that is too old."""
    # The text has no name of the database, because it must be a plain literal.
    signal = (
        f"SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = {literal(f'the database is too old: {too_old_advice(oldest)}')}"
    )
    is_too_old = f"{row_locks_names.newest_mark_query(names, subject)} < {oldest}"
    return f"SET @postdate_check = IF({is_too_old}, {literal(signal)}, 'DO 0')", "EXECUTE IMMEDIATE @postdate_check"


def setup(session: Any, names: row_locks_names.RowLockNames, steps: Sequence[Step]) -> None:
    """Apply the missing migrations of ``steps``, and create missing indexes of a store again.

    Several processes may do it at once. Raises as `find_missing_steps` does, or `StoreUnavailable` when another process
    has been migrating for half a minute.
    """
    lock = {"name": names.lock_name("setup"), "wait": _WAIT_SECONDS}
    if session.rows("SELECT GET_LOCK(%(name)s, %(wait)s)", lock)[0][0] != 1:
        raise StoreUnavailable("another process has been setting up this database for half a minute; try again")
    try:
        # An existing table is not changed, so that later starts need no right to create tables.
        if not session.rows(TABLE_EXISTS, {"schema": names.schema, "table": "postdate_migration"}):
            for statement in foundation(names):
                session.change(statement)
        where = f"database {names.schema!r}"
        row_locks_names.migrate(session, names, steps, where, _INSERT)
        if any(each.subject == names.table for each in steps):  # of a store, not of sagas or an outbox
            restore_indexes(session, names, where)
    finally:
        session.rows("SELECT RELEASE_LOCK(%(name)s)", lock)


class MariaDbSchema(RowLockSchema):
    """A database on a server, and the connections to it; by default the database in the address."""

    dialect, names_of = MariaDbSqlDialect(), MariaDbNames
    tables = TableCreation(setup, setup_statements)

    def _server_at(self, url: str, answers_within: timedelta | None) -> MariaDbServer:
        return MariaDbServer(url, self.holds_at_most, answers_within)

    def _check_schema(self, schema: str | None) -> str:
        name = self.server.address.database if schema is None else schema
        if not name:
            raise ConfigurationError("MariaDB needs a database: mariadb://user@host/database, or schema=...")
        return check_name(name, "schema")


class MariaDbSagaStore(ServerSagaStore):
    """Keeps saga instances in MariaDB; see :class:`postdate.backends.sql.row_locks.database.ServerSagaStore`."""

    database_type = MariaDbSchema


class MariaDbOutbox(ServerOutbox):
    """Keeps outboxes in MariaDB; see :class:`postdate.backends.sql.row_locks.outbox.ServerOutbox`."""

    database_type = MariaDbSchema

    @override
    def outage_of(self, error: Exception) -> PostdateError | None:
        outage = translate(error, self.where) if isinstance(error, pymysql.Error) else None
        return outage if isinstance(outage, StoreFull | StoreReadOnly) else None

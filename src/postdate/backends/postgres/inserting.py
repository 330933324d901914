"""Inserting into the tables of a store, and notifying other processes in the same transaction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

import psycopg

from postdate.backends.postgres.access import Connection
from postdate.backends.postgres.next_due import PostgresNextDue
from postdate.backends.postgres.rows import COLUMNS, Row
from postdate.backends.postgres.statements import Statements
from postdate.clock import to_microseconds
from postdate.errors import StoreNotSetUp
from postdate.persistence.migrations import setup_command
from postdate.ports import StoreReport

PARAMETERS: Final[Mapping[str, str]] = {**COLUMNS, "now": "timestamptz", "store": "smallint", "notice": "text"}
"""Of the statements that insert one message, with their types, in the order of :func:`values_of`."""

_BULK_FROM: Final = 5
"""From so many messages on, COPY is faster than parameters."""


def find_store(connection: Connection, sql: Statements, where: str) -> int:
    """Return the number of the store, asked once and kept in ``sql``. Raises `StoreNotSetUp`."""
    if sql.store_id is None:
        missing = f"{where} has no table {sql.table!r}; {setup_command(sql.table)}"
        try:
            row = connection.execute(sql.find_store, (sql.table,)).fetchone()
        except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName) as error:
            raise StoreNotSetUp(missing) from error
        if row is None:
            raise StoreNotSetUp(missing)
        sql.store_id = row[0]
    assert sql.store_id is not None
    return sql.store_id


def insert(connection: Connection, sql: Statements, rows: Sequence[Row], now: datetime, store_id: int) -> StoreReport:
    """Insert new messages; the notification is part of the transaction."""
    unique = dict[str, Row]()
    for row in rows:
        unique.setdefault(row[0], row)
    if len(unique) < _BULK_FROM:
        fresh = [id_ for id_, row in unique.items() if insert_one(connection, sql, row, now, store_id)]
    else:
        fresh = _insert_bulk(connection, sql, list(unique.values()), now, store_id)
        if fresh:
            notify(connection, sql, min(row[1] for row in rows), now, store_id)
    if len(fresh) == len(rows):
        return StoreReport(len(rows))
    return StoreReport.of((row[0] for row in rows), fresh)


def _insert_bulk(
    connection: Connection, sql: Statements, rows: Sequence[tuple[Any, ...]], now: datetime, store_id: int
) -> list[str]:
    """Insert messages with different ids by COPY into a temporary table and one statement; return the new ids."""
    connection.execute(sql.make_incoming)
    with connection.cursor() as cursor:
        with cursor.copy(sql.copy_incoming) as copy:
            copy.set_types(["int4", *COLUMNS.values()])
            for position, row in enumerate(rows):
                copy.write_row((position, *row))
        cursor.execute(sql.insert_incoming, {"now": now, "store": store_id})
        fresh = [id_ for (id_,) in cursor.fetchall()]
        cursor.execute(sql.clear_incoming)
    return fresh


def insert_one(connection: Connection, sql: Statements, row: Row, now: datetime, store_id: int) -> bool:
    """Insert and announce one message by one statement, which is its own transaction; return whether it is new."""
    values = values_of(row, now, store_id, PostgresNextDue.NOTICE)
    return connection.execute(sql.insert_one, values, prepare=True).rowcount == 1


def insert_or_revive(
    connection: Connection, sql: Statements, rows: Sequence[Row], now: datetime, store_id: int
) -> StoreReport:
    """Insert; a known message that went to the error queue last comes back under its old number."""
    report = insert(connection, sql, rows, now, store_id)
    back = set[str]()
    for row in rows:
        if row[0] in report.already_there and row[0] not in back and _revive(connection, sql, row, now, store_id):
            back.add(row[0])
    return StoreReport(report.stored + len(back), tuple(id_ for id_ in report.already_there if id_ not in back))


def _revive(connection: Connection, sql: Statements, row: Row, now: datetime, store_id: int) -> bool:
    return connection.execute(sql.revive, values_of(row, now, store_id, PostgresNextDue.NOTICE)).rowcount == 1


def notify(connection: Connection, sql: Statements, due: datetime, now: datetime, store_id: int) -> None:
    """Notify other processes at the commit, unless the message is far off."""
    if (said := notice(store_id, due, now, PostgresNextDue.NOTICE)) is not None:
        connection.execute(sql.notify_due, (said,))


def notice(store_id: int, due: datetime, now: datetime, ahead: timedelta) -> str | None:
    """Return the payload of the notification; ``None`` when the message is not due within ``ahead``."""
    return f"due {store_id} {to_microseconds(due)}" if due < now + ahead else None


def values_of(row: Row, now: datetime, store_id: int, ahead: timedelta) -> dict[str, Any]:
    """Return the parameters of a message; ``now`` is recorded as the time of scheduling, ``ahead``: :func:`notice`."""
    return dict(zip(PARAMETERS, (*row, now, store_id, notice(store_id, row[1], now, ahead)), strict=True))

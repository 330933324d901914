"""Putting messages into the table of a store, and telling other processes of them in the same transaction."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

import psycopg

from postdate.backends.postgres.access import Connection
from postdate.backends.postgres.bulk import insert_bulk
from postdate.backends.postgres.next_due import PostgresNextDue
from postdate.backends.postgres.statements import Statements
from postdate.clock import to_microseconds
from postdate.errors import StoreNotSetUp
from postdate.persistence.migrations import setup_command
from postdate.ports import StoreReport

Row = tuple[Any, ...]
"""A message as it is inserted: id, due, destination, expiry, headers, body."""

_BULK_FROM: Final = 5
"""From so many messages on, COPY beats statements with parameters."""


def find_store(connection: Connection, sql: Statements, where: str) -> int:
    """Return the number of the store; asked of the server once, and kept in ``sql``.

    Args:
        connection: in or out of a transaction.
        sql: of the store.
        where: the server, for people.

    Raises:
        StoreNotSetUp: the table is missing.
    """
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
    """Insert what is new; the wake-up of others is part of the transaction and leaves with its commit."""
    unique = dict[str, Row]()
    for row in rows:
        unique.setdefault(row[0], row)
    if len(unique) < _BULK_FROM:
        fresh = [id_ for id_, row in unique.items() if insert_one(connection, sql, row, now, store_id)]
    else:
        fresh = insert_bulk(connection, sql, list(unique.values()), now, store_id)
        if fresh:
            notify(connection, sql, min(row[1] for row in rows), now, store_id)
    if len(fresh) == len(rows):
        return StoreReport(len(rows))
    return StoreReport.of((row[0] for row in rows), fresh)


def insert_one(connection: Connection, sql: Statements, row: Row, now: datetime, store_id: int) -> bool:
    """Insert one message and announce it: one statement, so that it is one transaction without another word.

    Returns:
        Whether the message is new.
    """
    return connection.execute(sql.insert_one, _values(row, now, store_id), prepare=True).rowcount == 1


def insert_or_revive(
    connection: Connection, sql: Statements, rows: Sequence[Row], now: datetime, store_id: int
) -> StoreReport:
    """Insert; what is known and went to the error queue last comes back under its old number."""
    report = insert(connection, sql, rows, now, store_id)
    back = set[str]()
    for row in rows:
        if row[0] in report.already_there and row[0] not in back and _revive(connection, sql, row, now, store_id):
            back.add(row[0])
    return StoreReport(report.stored + len(back), tuple(id_ for id_ in report.already_there if id_ not in back))


def _revive(connection: Connection, sql: Statements, row: Row, now: datetime, store_id: int) -> bool:
    return connection.execute(sql.revive, _values(row, now, store_id)).rowcount == 1


def notify(connection: Connection, sql: Statements, due: datetime, now: datetime, store_id: int) -> None:
    """Tell other processes of a message, with the commit of the transaction; nothing if it is far off."""
    said = notice(store_id, due, now)
    if said is not None:
        connection.execute(sql.notify_due, (said,))


def notice(store_id: int, due: datetime, now: datetime) -> str | None:
    """Return what other processes are told of a message; nothing if it is far off."""
    return f"due {store_id} {to_microseconds(due)}" if due < now + PostgresNextDue.NOTICE else None


def _values(row: Row, now: datetime, store_id: int) -> dict[str, Any]:
    id_, due, destination, expires_at, headers, body = row
    return {
        "id": id_,
        "due": due,
        "destination": destination,
        "expires_at": expires_at,
        "headers": headers,
        "body": body,
        "now": now,
        "store": store_id,
        "notice": notice(store_id, due, now),
    }

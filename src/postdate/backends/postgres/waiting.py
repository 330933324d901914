"""Questions about what waits in a store and what was recorded of it. No message is touched, nobody is waited for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import psycopg

from postdate.backends.postgres.access import Connection
from postdate.backends.postgres.errors import is_refused
from postdate.backends.postgres.rows import Row, present, read
from postdate.backends.postgres.statements import Statements
from postdate.messages import DelayedMessage, decode_headers
from postdate.ports import MessageFilter, Record, RecordKind, StoreStatistics


def message_of(  # noqa: PLR0913 - the columns
    message_id: str, due: Any, destination: str, expires_at: Any, failures: int, headers: str | None, body: bytes
) -> DelayedMessage:
    """Return a row of the table as a message."""
    found = decode_headers(present(headers))
    return DelayedMessage.restored(message_id, due, destination, found, body, expires_at, failures)


def first_due(connection: Connection, sql: Statements) -> datetime | None:
    """See :meth:`postdate.ports.DelayedMessageStore.next_due`."""
    row = connection.execute(sql.first_due, {}).fetchone()
    return None if row is None else _utc(row[0])


def statistics(connection: Connection, sql: Statements, now: datetime, store_id: int) -> StoreStatistics:
    """See :meth:`postdate.ports.AdministrableStore.statistics`."""
    values = {"now": now, "store": store_id}
    try:
        row = connection.execute(sql.statistics, values).fetchone()
    except psycopg.Error as error:
        if not is_refused(error):
            raise
        row = connection.execute(sql.statistics_of_waiting, values).fetchone()  # who sets nothing aside counts none
    assert row is not None
    return StoreStatistics(*row[:4], next_due=_utc(row[4]), quarantined=row[5])


def record_counts(connection: Connection, sql: Statements, store_id: int) -> Mapping[RecordKind, int]:
    """See :meth:`postdate.ports.AdministrableStore.record_counts`."""
    rows = connection.execute(sql.record_counts, {"store": store_id}).fetchall()
    return {RecordKind(kind): number for kind, number in rows}


def list_pending(connection: Connection, sql: Statements, where: MessageFilter, limit: int) -> Sequence[DelayedMessage]:
    """See :meth:`postdate.ports.AdministrableStore.list_pending`."""
    values = {"destination": where.destination, "from": where.due_from, "to": where.due_to, "limit": limit}
    return read(connection.execute(sql.list, values, binary=True), 0, _message_of)[0]


def get(connection: Connection, sql: Statements, message_id: str, store_id: int) -> DelayedMessage | None:
    """See :meth:`postdate.ports.AdministrableStore.get`."""
    found, _ = read(connection.execute(sql.get, {"id": message_id, "store": store_id}, binary=True), 0, _message_of)
    return found[0] if found else None


def _message_of(row: Row) -> DelayedMessage:
    return message_of(*row[1:])


def history(connection: Connection, sql: Statements, message_id: str, store_id: int) -> Sequence[Record]:
    """See :meth:`postdate.ports.AdministrableStore.history`; needs a transaction, for a setting of the planner."""
    connection.execute("SET LOCAL enable_bitmapscan = on")  # the only way by an index of ranges
    rows = connection.execute(sql.history, {"id": message_id, "store": store_id}).fetchall()
    return [
        Record(RecordKind(kind), id_, _utc(at), _utc(due), destination, detail or "")
        for kind, id_, at, due, destination, detail in rows
    ]


def _utc(instant: Any) -> Any:
    return None if instant is None else instant.astimezone(UTC)

"""Questions about what waits in a store and what was recorded of it. No message is touched, nobody is waited for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from postdate.messages import DelayedMessage, decode_headers
from postdate.ports import MessageFilter, Record, RecordKind, StoreStatistics
from postdate.postgres.database import Connection
from postdate.postgres.statements import Statements


def message_of(  # noqa: PLR0913 - the columns
    message_id: str, due: Any, destination: str, expires_at: Any, failures: int, headers: str, body: bytes
) -> DelayedMessage:
    """Return a row of the table as a message."""
    return DelayedMessage.restored(message_id, due, destination, decode_headers(headers), body, expires_at, failures)


def first_due(connection: Connection, sql: Statements) -> datetime | None:
    """See :meth:`postdate.ports.DelayedMessageStore.next_due`."""
    row = connection.execute(sql.first_due, {}).fetchone()
    return None if row is None else _utc(row[0])


def statistics(connection: Connection, sql: Statements, now: datetime) -> StoreStatistics:
    """See :meth:`postdate.ports.InspectableStore.statistics`."""
    row = connection.execute(sql.statistics, {"now": now}).fetchone()
    assert row is not None
    return StoreStatistics(*row[:4], next_due=_utc(row[4]))


def record_counts(connection: Connection, sql: Statements, store_id: int) -> Mapping[RecordKind, int]:
    """See :meth:`postdate.ports.InspectableStore.record_counts`."""
    rows = connection.execute(sql.record_counts, {"store": store_id}).fetchall()
    return {RecordKind(kind): number for kind, number in rows}


def list_pending(connection: Connection, sql: Statements, where: MessageFilter, limit: int) -> Sequence[DelayedMessage]:
    """See :meth:`postdate.ports.InspectableStore.list_pending`."""
    values = {"destination": where.destination, "from": where.due_from, "to": where.due_to, "limit": limit}
    return [message_of(*row) for row in connection.execute(sql.list, values, binary=True).fetchall()]


def get(connection: Connection, sql: Statements, message_id: str, store_id: int) -> DelayedMessage | None:
    """See :meth:`postdate.ports.InspectableStore.get`."""
    row = connection.execute(sql.get, {"id": message_id, "store": store_id}, binary=True).fetchone()
    return None if row is None else message_of(*row)


def history(connection: Connection, sql: Statements, message_id: str, store_id: int) -> Sequence[Record]:
    """See :meth:`postdate.ports.InspectableStore.history`; needs a transaction, for a setting of the planner."""
    connection.execute("SET LOCAL enable_bitmapscan = on")  # the only way by an index of ranges
    rows = connection.execute(sql.history, {"id": message_id, "store": store_id}).fetchall()
    return [
        Record(RecordKind(kind), id_, _utc(at), _utc(due), destination, detail or "")
        for kind, id_, at, due, destination, detail in rows
    ]


def _utc(instant: Any) -> Any:
    return None if instant is None else instant.astimezone(UTC)

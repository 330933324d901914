"""Stores on database servers that claim by row locks: everything but the dialect. Source: ADR 0008.

A server's room gives its driver (:class:`~postdate.backends.rowlocks.connection.DatabaseServer` and its sessions) and
the dialect: :class:`~postdate.backends.rowlocks.statements.RowLockStatements` as data, and the few methods at the end
of :class:`~postdate.backends.rowlocks.tables.RowLockTables`. :class:`LockingStore` is the store.
"""

from postdate.backends.rowlocks.parts import (
    SCANNED,
    Conflict,
    MessageRow,
    PooledSession,
    RecordNote,
    SessionSource,
    WaitingRow,
    check_columns,
    from_row,
)
from postdate.backends.rowlocks.pool import Pool
from postdate.backends.rowlocks.store import LockingStore

__all__ = [
    "SCANNED",
    "Conflict",
    "LockingStore",
    "MessageRow",
    "Pool",
    "PooledSession",
    "RecordNote",
    "SessionSource",
    "WaitingRow",
    "check_columns",
    "from_row",
]

"""Stores on database servers that claim by row locks: everything but the SQL. Source: ADR 0008.

A server's room gives a :class:`Session` (its driver), a :class:`Server` (connections, and who is alive) and
:class:`Tables` (its SQL); :class:`LockingStore` is the store.
"""

from postdate.backends.rowlocks.parts import (
    SCANNED,
    Conflict,
    Ending,
    Row,
    Server,
    Session,
    Tables,
    Waiting,
    check_columns,
    from_row,
)
from postdate.backends.rowlocks.pool import Pool
from postdate.backends.rowlocks.store import LockingStore

__all__ = [
    "SCANNED",
    "Conflict",
    "Ending",
    "LockingStore",
    "Pool",
    "Row",
    "Server",
    "Session",
    "Tables",
    "Waiting",
    "check_columns",
    "from_row",
]

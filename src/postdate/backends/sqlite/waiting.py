"""Questions about all that waits in the file, answered from its indexes. Times are microseconds since 1970 UTC."""

from __future__ import annotations

import sqlite3
from datetime import datetime
from typing import Final

from postdate.backends.sqlite.rows import nearest_instant
from postdate.ports import StoreStatistics

_FIRST_DUE: Final = """
    SELECT min(first) FROM (
        SELECT min(attempt_at) AS first FROM delayed_message
        UNION ALL SELECT min(due) FROM delayed_message WHERE failures > 0
        UNION ALL SELECT min(due) FROM delayed_message WHERE attempt_at IS NULL)"""


def first_due(connection: sqlite3.Connection) -> datetime | None:
    """Return the earliest due time without reading every row: only failed and held rows differ from attempt_at."""
    (first,) = connection.execute(_FIRST_DUE).fetchone()
    return nearest_instant(first)


def next_attempt(connection: sqlite3.Connection) -> datetime | None:
    """Return when something can be attempted next; what is claimed has no such time."""
    row = connection.execute(
        "SELECT attempt_at FROM delayed_message WHERE attempt_at IS NOT NULL ORDER BY attempt_at LIMIT 1"
    ).fetchone()
    return None if row is None else nearest_instant(row[0])


def statistics(connection: sqlite3.Connection, now: int) -> StoreStatistics:
    """See :meth:`postdate.ports.AdministrableStore.statistics`."""

    def count(condition: str, *values: int) -> int:
        sql = f"SELECT count(*) FROM delayed_message WHERE {condition}"
        number: int = connection.execute(sql, values).fetchone()[0]
        return number

    quarantined: int = connection.execute("SELECT count(*) FROM quarantine WHERE place = ''").fetchone()[0]
    return StoreStatistics(
        pending=count("1"),
        overdue=count("attempt_at < ?", now) + count("failures > 0 AND attempt_at >= ? AND due < ?", now, now),
        claimed=count("attempt_at IS NULL"),
        failing=count("failures > 0"),
        next_due=first_due(connection),
        quarantined=quarantined,
    )

"""An operator's questions about waiting messages, answered from indexes. Times are microseconds since 1970 UTC."""

from __future__ import annotations

import sqlite3
from datetime import datetime
from typing import Final

from postdate.backends.sqlite.rows import WAITING_COLUMNS, time_of

# Due times differ from attempt_at only in failed and claimed rows: so not every row is read.
next_due: Final = """
    SELECT min(first) FROM (
        SELECT min(attempt_at) AS first FROM delayed_message
        UNION ALL SELECT min(due) FROM delayed_message WHERE failures > 0
        UNION ALL SELECT min(due) FROM delayed_message WHERE attempt_at IS NULL)"""
statistics: Final = f"""
    SELECT (SELECT count(*) FROM delayed_message),
        (SELECT count(*) FROM delayed_message WHERE attempt_at < :at)
            + (SELECT count(*) FROM delayed_message WHERE failures > 0 AND attempt_at >= :at AND due < :at),
        (SELECT count(*) FROM delayed_message WHERE attempt_at IS NULL),
        (SELECT count(*) FROM delayed_message WHERE failures > 0),
        ({next_due}), (SELECT count(*) FROM quarantine WHERE place = '')"""
record_counts: Final = "SELECT kind, count(*) FROM record GROUP BY kind ORDER BY kind"
list_pending: Final = f"""
    SELECT {WAITING_COLUMNS} FROM delayed_message
    WHERE (:destination IS NULL OR destination = :destination) AND (:due_from IS NULL OR due >= :due_from)
        AND (:due_to IS NULL OR due < :due_to) ORDER BY due, seq LIMIT :limit"""
get: Final = f"""
    SELECT {WAITING_COLUMNS} FROM delayed_message
    WHERE seq = (SELECT seq FROM record WHERE kind = 1 AND message_id = :id)"""
history: Final = "SELECT kind, message_id, at, due, destination, detail FROM record WHERE message_id = :id ORDER BY seq"


def next_attempt(connection: sqlite3.Connection) -> datetime | None:
    """Return the earliest next attempt; claimed messages have none."""
    row = connection.execute(
        "SELECT attempt_at FROM delayed_message WHERE attempt_at IS NOT NULL ORDER BY attempt_at LIMIT 1"
    ).fetchone()
    return None if row is None else time_of(row[0])

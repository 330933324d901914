"""Replaces a pending message: by its id, or the message under a key.

Under a key, the newest message is replaced if it is pending; otherwise a new one is stored.
"""

from __future__ import annotations

import sqlite3
from itertools import count
from typing import Any, Final, NamedTuple

from postdate.backends.sqlite.rows import Transaction, insert, record, signal_if_first
from postdate.ports import RecordKind
from postdate.ports.changing import KEYED, KeyedIds

_NEWEST: Final = f"""
    SELECT r.message_id, r.at, d.seq, d.content
    FROM record AS r LEFT JOIN delayed_message AS d
        ON d.seq = r.seq AND d.claimant IS NULL AND d.unreadable IS NULL
    WHERE r.kind = 1 AND r.message_id BETWEEN ? AND ? AND length(r.message_id) = length(?)
        AND substr(r.message_id, -8) NOT GLOB '*[^0-9]*' AND r.detail = '{KEYED}'
    ORDER BY r.message_id DESC LIMIT 1"""
_IS_KNOWN: Final = "SELECT 1 FROM record WHERE kind = 1 AND message_id = ?"
_PENDING: Final = """
    SELECT seq, content FROM delayed_message
    WHERE unreadable IS NULL AND claimant IS NULL
        AND seq = (SELECT seq FROM record WHERE kind = 1 AND message_id = ?)"""
STORE_KEY: Final = f"UPDATE record SET detail = '{KEYED}' WHERE kind = 1 AND message_id = ? AND detail IS NULL"
_REPLACE: Final = """
    UPDATE delayed_message SET due = ?, attempt_at = ?, failures = 0, destination = ?, expires_at = ? WHERE seq = ?"""


class NewestOfKey(NamedTuple):
    """The last message that was stored under a key; ``seq`` and ``content`` are set if it is pending and unclaimed."""

    message_id: str
    stored_at: object
    seq: int | None
    content: int | None


def _newest(connection: sqlite3.Connection, ids: KeyedIds) -> NewestOfKey:
    row = connection.execute(_NEWEST, (ids.first, ids.last, ids.first)).fetchone()
    return NewestOfKey("", None, None, None) if row is None else NewestOfKey(*row)


def newest_of_key(connection: sqlite3.Connection, ids: KeyedIds) -> tuple[NewestOfKey, str]:
    """Return the newest message of a key, and its id if it is pending, else a new id. Raises `InvalidMessage`."""
    newest = _newest(connection, ids)
    if newest.seq is not None:
        return newest, newest.message_id
    candidates = (ids.id_after(newest.message_id, refused) for refused in count())
    return newest, next(each for each in candidates if not connection.execute(_IS_KNOWN, (each,)).fetchone())


def replace_newest(tx: Transaction, *, ids: KeyedIds, newest: NewestOfKey, row: tuple[Any, ...], at: int) -> bool:
    """Write a message in place of the newest one of a key. Return ``False``, and write nothing, if that has changed."""
    if _newest(tx.connection, ids) != newest:
        return False
    if newest.seq is None:
        if insert(tx, [row], at).duplicate_ids:
            return False
        tx.execute(STORE_KEY, (row[0],))
        return True
    assert newest.content is not None
    _write(tx, newest.seq, newest.content, row, at)
    return True


def replace_pending(tx: Transaction, *, row: tuple[Any, ...], at: int) -> bool:
    """Write a message in place of the pending message with its id. Return ``False`` if that is claimed or not there."""
    pending_row = tx.execute(_PENDING, (row[0],)).fetchone()
    if pending_row is None:
        return False
    seq, content_seq = pending_row
    _write(tx, seq, content_seq, row, at)
    return True


def _write(tx: Transaction, seq: int, content_seq: int, row: tuple[Any, ...], at: int) -> None:
    message_id, due, destination, expires_at, *content = row
    signal_if_first(tx, due)
    tx.execute(_REPLACE, (due, due, destination, expires_at, seq))
    tx.execute("UPDATE content SET headers = ?, body = ? WHERE seq = ?", (*content, content_seq))
    record(tx, RecordKind.RESCHEDULED, (message_id, due, destination), at, "replaced")

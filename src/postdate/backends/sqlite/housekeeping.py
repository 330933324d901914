"""Housekeeping of the file: removes expired messages from queues, and returns free pages to the disk.

Messages expire by the clock of the machine. Source: docs/guides/time-to-be-received.md.

SQLite reuses free pages at no cost. So they are returned to the disk only if many have been free for some time, and the
size of a busy file does not go up and down. Files of earlier versions cannot shrink, as SQLite stores that setting in
the file; ``VACUUM`` would rewrite such a file while no other process has it open.
"""

from __future__ import annotations

import sqlite3
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from postdate.backends.sqlite import rows as sqlite_rows
from postdate.clock import EARLIEST
from postdate.errors import InvalidHeaders, InvalidMessage
from postdate.messages import encode_headers, format_timestamp
from postdate.ports import RecordKind

DEAD_LETTERS: Final = "postdate.dead-letters"
"""The queue of a file for expired messages that are kept. It is created with the first of them."""

DEAD_LETTER_HEADER: Final = "Postdate.DeadLetter"
"""Header of a dead letter, with its former queue and the time at which it expired there."""

BATCH: Final = 250
"""The most messages removed in one transaction. It takes some 10 ms, and a sender may have to wait for it."""

_IS_ANY: Final = """
    SELECT 1 FROM queue_message INDEXED BY queue_message_ending
    WHERE ends_at < ? AND ends_at IS NOT NULL AND claimant IS NULL LIMIT 1"""
# Claimed messages are not in this index: their receivers got them before they expired.
_EXPIRED: Final = """
    SELECT m.seq, m.content, m.message_id, m.due, m.ends_at, m.dead_letter, q.name
    FROM queue_message AS m INDEXED BY queue_message_ending CROSS JOIN queue AS q USING (queue_id)
    WHERE m.ends_at < ? AND m.ends_at IS NOT NULL AND m.claimant IS NULL ORDER BY m.ends_at LIMIT ?"""
INSERT_RECORD: Final = "INSERT INTO record (kind, message_id, at, due, destination, detail) VALUES (?, ?, ?, ?, ?, ?)"
_CONTENT: Final = "SELECT CAST(headers AS BLOB), body FROM content WHERE seq = ?"
# The expiry is removed. With it the message would also expire among the dead letters, or in the queue to which an
# operator returns it.
_MOVE_TO_DEAD_LETTERS: Final = """
    UPDATE queue_message SET queue_id = ?, ends_at = NULL, expires_at = NULL, dead_letter = 0, failures = 0,
        unanswered = 0
    WHERE seq = ?"""


@dataclass(frozen=True, slots=True)
class ExpiredCounts:
    """The result of a batch: how many messages were deleted, and how many became dead letters."""

    deleted_count: int
    dead_letter_count: int


@dataclass(frozen=True, slots=True)
class _Message:
    seq: int
    content: int
    message_id: str
    due: int | None
    expired_at: int
    dead_letter: int
    queue: str

    def detail(self) -> str:
        copy = f"; kept in {DEAD_LETTERS}" if self.dead_letter else ""
        return f"expired in its queue at {self.at().isoformat()}{copy}"

    def at(self) -> datetime:
        return sqlite_rows.time_of(self.expired_at) or EARLIEST


def has_expired(connection: sqlite3.Connection, now: int) -> bool:
    """Return whether an unclaimed message expired before ``now`` (microseconds since 1970 UTC)."""
    return connection.execute(_IS_ANY, (now,)).fetchone() is not None


def remove_expired(tx: sqlite_rows.Transaction, now: int, limit: int = BATCH) -> ExpiredCounts:
    """Remove up to ``limit`` messages that expired before ``now`` (microseconds since 1970 UTC), and record that.

    Several processes may do this at once: each message is removed by one of them.
    """
    expired = [_Message(*row) for row in sqlite_rows.read_rows(tx.connection, _EXPIRED, (now, limit))]
    dead_letters = [each for each in expired if each.dead_letter]
    deleted = [each for each in expired if not each.dead_letter]
    tx.executemany("DELETE FROM queue_message WHERE seq = ?", [(each.seq,) for each in deleted])
    tx.executemany("DELETE FROM content WHERE seq = ?", [(each.content,) for each in deleted])
    if dead_letters:
        _move_to_dead_letters(tx, dead_letters)
    kind = int(RecordKind.DISCARDED)
    tx.executemany(
        INSERT_RECORD, [(kind, each.message_id, now, each.due, each.queue, each.detail()) for each in expired]
    )
    return ExpiredCounts(len(deleted), len(dead_letters))


def _move_to_dead_letters(tx: sqlite_rows.Transaction, dead_letters: Sequence[_Message]) -> None:
    tx.execute("INSERT INTO queue (name) VALUES (?) ON CONFLICT DO NOTHING", (DEAD_LETTERS,))
    (queue_id,) = tx.execute("SELECT queue_id FROM queue WHERE name = ?", (DEAD_LETTERS,)).fetchone()
    reasons = dict[int, str]()
    for each in dead_letters:
        rows = sqlite_rows.read_rows(tx.connection, _CONTENT, (each.content,))
        try:
            headers, _ = sqlite_rows.content_of(*(rows[0] if rows else (None, None)))
        except (InvalidHeaders, InvalidMessage) as error:
            reasons[each.seq] = str(error)
            continue
        reason = f"expired in {each.queue} at {format_timestamp(each.at())}"
        headers = encode_headers({**headers, DEAD_LETTER_HEADER: reason})
        tx.execute("UPDATE content SET headers = ? WHERE seq = ?", (headers, each.content))
        tx.execute(_MOVE_TO_DEAD_LETTERS, (queue_id, each.seq))
    sqlite_rows.mark_and_log(tx, sqlite_rows.QUEUED, reasons)
    tx.signal(sqlite_rows.queue_topic(DEAD_LETTERS))


# --- free pages of the file ----------------------------------------------------------------------------------------

ROUNDS_UNUSED: Final = 10
"""The number of checks, one a second, in all of which the pages must have been free."""

_LEAST_BYTES: Final = 8 * 1024 * 1024  # fewer free bytes are not returned to the disk
_PAGES_AT_ONCE: Final = 500
"""The most pages returned in one transaction (2 MB). It takes some 10 ms."""

_INCREMENTAL: Final = 2  # SQLite's value of ``auto_vacuum`` for a file that can shrink


class FreePages:
    """Decides how many pages are returned to the disk. Pure."""

    def __init__(self) -> None:
        self._free: deque[int] = deque(maxlen=ROUNDS_UNUSED)

    def count_releasable(self, free: int, pages: int, page_bytes: int) -> int:
        """Return how many pages to return to the disk, of ``free`` free pages in a file of ``pages``."""
        self._free.append(free)
        unused = min(self._free)
        threshold = max(pages // 4, _LEAST_BYTES // page_bytes)
        return unused if len(self._free) == ROUNDS_UNUSED and unused > threshold else 0


def page_counts(connection: sqlite3.Connection) -> tuple[int, int, int] | None:
    """Return the number of free pages, of all pages, and the bytes of a page; ``None`` if this file cannot shrink."""
    if _pragma(connection, "auto_vacuum") != _INCREMENTAL:
        return None
    return _pragma(connection, "freelist_count"), _pragma(connection, "page_count"), _pragma(connection, "page_size")


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    value: int = connection.execute(f"PRAGMA {name}").fetchone()[0]
    return value


def release_pages(tx: sqlite_rows.Transaction, pages: int) -> int:
    """Return up to ``pages`` pages to the disk, at most as many as fit one transaction; return how many remain."""
    page_count = min(pages, _PAGES_AT_ONCE)
    for _ in range(page_count):
        # SQLite frees one page in each step, and Python makes only one step of a statement without columns.
        tx.execute("PRAGMA incremental_vacuum(1)")
    return pages - page_count

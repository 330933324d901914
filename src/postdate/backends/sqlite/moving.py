"""Moves due messages to their queues inside the file, with a few statements for a batch. Source: ADR 0002, ADR 0003."""

from __future__ import annotations

from collections import Counter
from typing import Final

from postdate.backends.sqlite.rows import Transaction, display_text, next_attempt, queue_topic, read_rows, time_of
from postdate.clock import LATEST
from postdate.ports import NOTHING_MOVED, MovedMessages, MoveReport

# The batch is written to a table first, so that every later statement works on exactly these rows. An expiry that is no
# number is ignored here and in the queue; the receiver of the message marks it as unreadable.
_SELECT_BATCH: Final = """
    INSERT INTO temp.batch (seq, queue_id, expired)
    SELECT d.seq, q.queue_id, typeof(d.expires_at) = 'integer' AND d.expires_at < :now
    FROM delayed_message AS d INDEXED BY delayed_message_attempt CROSS JOIN queue AS q ON q.name = d.destination
    WHERE d.attempt_at < :now
        AND (NOT EXISTS (SELECT 1 FROM destination_limit) OR coalesce((
            SELECT l.limits FROM destination_limit AS l WHERE l.store = 0 AND l.destination = d.destination), '') = '')
    ORDER BY d.attempt_at LIMIT :limit"""
_SEND_BATCH: Final = """
    INSERT INTO queue_message (queue_id, message_id, due, expires_at, ends_at, dead_letter, content)
    SELECT b.queue_id, d.message_id, d.due, d.expires_at,
        iif(typeof(d.expires_at) = 'integer', d.expires_at + :ahead, NULL), :dead_letter, d.content
    FROM temp.batch AS b CROSS JOIN delayed_message AS d ON d.seq = b.seq
    WHERE NOT b.expired ORDER BY b.position"""
_RECORD_BATCH: Final = """
    INSERT INTO record (kind, message_id, at, due, destination)
    SELECT iif(b.expired, 5, 2), d.message_id, :now, d.due, d.destination
    FROM temp.batch AS b CROSS JOIN delayed_message AS d ON d.seq = b.seq
    ORDER BY b.position"""
_LIST_BATCH: Final = """
    SELECT d.message_id, d.due, d.destination, b.expired
    FROM temp.batch AS b CROSS JOIN delayed_message AS d ON d.seq = b.seq ORDER BY b.position"""
_CONTENT_OF_EXPIRED: Final = """
    SELECT d.content FROM temp.batch AS b CROSS JOIN delayed_message AS d ON d.seq = b.seq WHERE b.expired"""
_FIRST_DUE: Final = """
    SELECT d.due FROM temp.batch AS b CROSS JOIN delayed_message AS d ON d.seq = b.seq
    WHERE NOT b.expired ORDER BY b.position LIMIT 1"""


# GROUP BY sorts. Most batches are for one queue, and one pass without sorting finds that out.
_ONE_QUEUE: Final = """
    SELECT name FROM queue WHERE queue_id = (
        SELECT iif(min(queue_id) = max(queue_id), min(queue_id), NULL) FROM temp.batch WHERE NOT expired)"""
_SENT_TO: Final = """
    SELECT q.name, b.sent FROM (
        SELECT queue_id, count(*) AS sent FROM temp.batch WHERE NOT expired GROUP BY queue_id) AS b
    CROSS JOIN queue AS q ON q.queue_id = b.queue_id"""
_REMOVE_BATCH: Final = """
    DELETE FROM delayed_message WHERE seq IN (SELECT seq FROM temp.batch)"""
_HEAD_DOES_NOT_MOVE: Final = """
    SELECT NOT EXISTS (SELECT 1 FROM queue AS q WHERE q.name = d.destination)
        OR EXISTS (SELECT 1 FROM destination_limit AS l
            WHERE l.store = 0 AND l.destination = d.destination AND l.limits <> '')
    FROM delayed_message AS d INDEXED BY delayed_message_attempt
    WHERE d.attempt_at < :now ORDER BY d.attempt_at LIMIT 1"""


def move(tx: Transaction, now: int, limit: int, *, listing: bool) -> MoveReport:
    """Move up to ``limit`` messages that were due before ``now``; see `MovingStore.move_due`.

    ``now`` is in microseconds since 1970 UTC.
    """
    tx.execute(
        "CREATE TEMP TABLE IF NOT EXISTS batch (position INTEGER PRIMARY KEY, seq INTEGER, queue_id INTEGER, expired)"
    )
    tx.execute("DELETE FROM temp.batch")
    values = {"now": now, "limit": limit}
    moved, sent_counts, first_due = NOTHING_MOVED if listing else None, Counter[str](), None
    if size := tx.execute(_SELECT_BATCH, values).rowcount:
        moved = _read_moved(tx) if listing else None
        (first_due,) = tx.execute(_FIRST_DUE).fetchone() or (None,)
        sent_counts = _move_batch(tx, now, size)
    head = tx.execute(_HEAD_DOES_NOT_MOVE, {"now": now}).fetchone()
    has_unmoved, next_due = bool(head and head[0]), next_attempt(tx.connection)
    return MoveReport(
        sent_counts.total(), size - sent_counts.total(), has_unmoved, next_due, sent_counts, time_of(first_due), moved
    )


def _read_moved(tx: Transaction) -> MovedMessages:
    ids, dues, destinations, expired = zip(*read_rows(tx.connection, _LIST_BATCH, ()), strict=True)
    return MovedMessages(
        [display_text(each) for each in ids],
        [time_of(due) or LATEST for due in dues],
        [display_text(each) for each in destinations],
        [bool(each) for each in expired],
    )


def _move_batch(tx: Transaction, now: int, size: int) -> Counter[str]:
    """Return how many messages were moved to each queue; the other messages of the batch had expired."""
    # Messages expire in a queue by the clock of the machine; the mover's clock may be another one.
    values = {"ahead": tx.rules.now() - now, "dead_letter": int(tx.rules.has_dead_letters)}
    delivered = tx.execute(_SEND_BATCH, values).rowcount
    tx.execute(_RECORD_BATCH, {"now": now})
    if delivered < size:
        tx.executemany("DELETE FROM content WHERE seq = ?", tx.execute(_CONTENT_OF_EXPIRED).fetchall())
    tx.execute(_REMOVE_BATCH)
    only_queue = tx.execute(_ONE_QUEUE).fetchone()
    sent_counts = Counter[str]({only_queue[0]: delivered} if only_queue else dict(tx.execute(_SENT_TO).fetchall()))
    for name in sent_counts:
        tx.signal(queue_topic(name))
    return sent_counts

"""Moving due messages to their queues inside the file, by a few statements a batch. Source: ADR 0003."""

from __future__ import annotations

from typing import Final

from postdate.backends.sqlite.file import Transaction, queue_topic
from postdate.backends.sqlite.rows import read_rows, shown, time_of
from postdate.backends.sqlite.waiting import next_attempt
from postdate.clock import LATEST
from postdate.ports import NOTHING_MOVED, Moved, MoveReport

# The batch goes into a table first, so that every later statement works on exactly these rows. An expiry that is no
# number ends nothing, here and in the queue: the receiver of the message quarantines it.
_TAKE_BATCH: Final = """
    INSERT INTO temp.batch (seq, queue_id, expired)
    SELECT d.seq, q.queue_id, typeof(d.expires_at) = 'integer' AND d.expires_at < :now
    FROM delayed_message AS d INDEXED BY delayed_message_attempt CROSS JOIN queue AS q ON q.name = d.destination
    WHERE d.attempt_at < :now ORDER BY d.attempt_at LIMIT :limit"""
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
_DROP_EXPIRED_CONTENT: Final = """
    DELETE FROM content WHERE seq IN (
        SELECT d.content FROM temp.batch AS b CROSS JOIN delayed_message AS d ON d.seq = b.seq WHERE b.expired)"""
_REMOVE_BATCH: Final = """
    DELETE FROM delayed_message WHERE seq IN (SELECT seq FROM temp.batch)"""
_HEAD_HAS_NO_QUEUE: Final = """
    SELECT NOT EXISTS (SELECT 1 FROM queue AS q WHERE q.name = d.destination)
    FROM delayed_message AS d INDEXED BY delayed_message_attempt
    WHERE d.attempt_at < :now ORDER BY d.attempt_at LIMIT 1"""


def move(tx: Transaction, now: int, limit: int, *, listing: bool) -> MoveReport:
    """Move up to ``limit`` messages that were due before ``now`` (microseconds); see `MovingStore.move_due`."""
    tx.execute(
        "CREATE TEMP TABLE IF NOT EXISTS batch (position INTEGER PRIMARY KEY, seq INTEGER, queue_id INTEGER, expired)"
    )
    tx.execute("DELETE FROM temp.batch")
    values = {"now": now, "limit": limit}
    moved = NOTHING_MOVED if listing else None
    delivered = expired = 0
    if tx.execute(_TAKE_BATCH, values).rowcount:
        moved = _listed(tx) if listing else None
        delivered, expired = _move_batch(tx, now)
    head = tx.execute(_HEAD_HAS_NO_QUEUE, {"now": now}).fetchone()
    return MoveReport(delivered, expired, bool(head and head[0]), next_attempt(tx.connection), moved)


def _listed(tx: Transaction) -> Moved:
    rows = read_rows(tx.connection, _LIST_BATCH, ())
    ids, dues, destinations, expired = zip(*rows, strict=True)
    return Moved(
        [shown(each) for each in ids],
        [time_of(due) or LATEST for due in dues],
        [shown(each) for each in destinations],
        [bool(each) for each in expired],
    )


def _move_batch(tx: Transaction, now: int) -> tuple[int, int]:
    # Messages expire in a queue by the clock of the machine, whatever the mover's clock is.
    values = {"ahead": tx.rules.now() - now, "dead_letter": int(tx.rules.keeps_expired)}
    delivered = tx.execute(_SEND_BATCH, values).rowcount
    tx.execute(_RECORD_BATCH, {"now": now})
    tx.execute(_DROP_EXPIRED_CONTENT)
    removed = tx.execute(_REMOVE_BATCH).rowcount
    for (name,) in tx.execute(
        "SELECT name FROM queue WHERE queue_id IN (SELECT queue_id FROM temp.batch WHERE NOT expired)"
    ).fetchall():
        tx.signal(queue_topic(name))
    return delivered, removed - delivered

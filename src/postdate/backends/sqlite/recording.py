"""Storing messages in the file, and their records. Times are microseconds since 1970 UTC."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from postdate.backends.sqlite.rows import INSERT_WAITING
from postdate.backends.sqlite.transaction import DUE, Transaction
from postdate.ports import RecordKind, StoreReport

INSERT_SCHEDULED: Final = """
    INSERT INTO record (seq, kind, message_id, at, due, destination) VALUES (?, 1, ?, ?, ?, ?)
    ON CONFLICT (message_id) WHERE kind = 1 DO NOTHING"""
_INSERT_CONTENT: Final = "INSERT INTO content (seq, headers, body) VALUES (?, ?, ?)"

FAILED_LAST: Final = """
    SELECT s.seq FROM record AS s WHERE s.kind = 1 AND s.message_id = :id
        AND NOT EXISTS (SELECT 1 FROM delayed_message AS d WHERE d.seq = s.seq)
        AND NOT EXISTS (SELECT 1 FROM record AS later WHERE later.message_id = :id AND later.kind IN (2, 3, 5, 6, 9)
            AND later.seq > (SELECT max(f.seq) FROM record AS f WHERE f.kind = 7 AND f.message_id = :id))
        AND EXISTS (SELECT 1 FROM record AS f WHERE f.kind = 7 AND f.message_id = :id)"""
"""The number of a message that is not waiting, and whose last record is a failure: only such a one may come back."""

NEXT_NUMBER: Final = """
    SELECT max(coalesce((SELECT max(seq) FROM record), 0), coalesce((SELECT max(seq) FROM delayed_message), 0)) + 1"""
"""Above those of waiting messages, too: in files where older versions recorded nothing they may have no record."""


def insert(tx: Transaction, rows: Sequence[tuple[Any, ...]], at: int) -> StoreReport:
    """Insert messages whose ids are new; rows: as :func:`postdate.backends.sqlite.rows.waiting_row` makes them."""
    if not rows:
        return StoreReport(0)
    (base,) = tx.execute(NEXT_NUMBER).fetchone()
    numbered = [(base + offset, *row) for offset, row in enumerate(rows)]
    records = [(seq, id_, at, due, destination) for seq, id_, due, destination, *_ in numbered]
    new, duplicates = numbered, tuple[str, ...]()
    if tx.executemany(INSERT_SCHEDULED, records).rowcount < len(rows):
        fresh = {seq for (seq,) in tx.execute("SELECT seq FROM record WHERE seq >= ?", (base,))}
        new = [row for row in numbered if row[0] in fresh]
        duplicates = tuple(row[1] for row in numbered if row[0] not in fresh)
    if new:
        signal_if_first(tx, min(row[2] for row in new))
        (content,) = tx.execute("SELECT coalesce(max(seq), 0) + 1 FROM content").fetchone()
        tx.executemany(_INSERT_CONTENT, [(content + number, *row[5:]) for number, row in enumerate(new)])
        tx.executemany(INSERT_WAITING, [(*row[:5], content + number, row[2]) for number, row in enumerate(new)])
    return StoreReport(len(new), duplicates)


def insert_or_revive(tx: Transaction, rows: Sequence[tuple[Any, ...]], at: int) -> StoreReport:
    """Insert; a known message that went to the error queue last comes back under its old number."""
    report = insert(tx, rows, at)
    content_of = {row[0]: row for row in reversed(rows)}  # of an id that stands twice the first one counts
    still_there = list[str]()
    for id_ in report.already_there:
        row = content_of.pop(id_, None)
        if row is None or not _revive(tx, row, at):
            still_there.append(id_)
    return StoreReport(len(rows) - len(still_there), tuple(still_there))


def _revive(tx: Transaction, row: tuple[Any, ...], at: int) -> bool:
    found = tx.execute(FAILED_LAST, {"id": row[0]}).fetchone()
    if found is None:
        return False
    message_id, due, destination, *_ = row
    signal_if_first(tx, due)
    content = tx.execute("INSERT INTO content (headers, body) VALUES (?, ?)", row[4:]).lastrowid
    tx.execute(INSERT_WAITING, (found[0], *row[:4], content, due))
    record(tx, RecordKind.RESCHEDULED, (message_id, due, destination), at, "came back from the error queue")
    return True


def signal_if_first(tx: Transaction, due: int) -> None:
    """Wake the poller only for a message due before all others: most are not."""
    (first,) = tx.execute("SELECT min(attempt_at) FROM delayed_message").fetchone()
    if first is None or due < first:
        tx.signal(DUE)


def record(
    tx: Transaction, kind: RecordKind, of: tuple[str, int | None, str | None], at: int, detail: str = ""
) -> None:
    """Record an event of a message; ``of``: id, due time, destination."""
    tx.execute(
        "INSERT INTO record (kind, at, detail, message_id, due, destination) VALUES (?, ?, ?, ?, ?, ?)",
        (int(kind), at, detail or None, *of),
    )

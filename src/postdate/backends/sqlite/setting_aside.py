"""Moves unreadable rows to the quarantine, in the transaction that met them. Source: ADR 0019."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from postdate.backends.sqlite.recording import record
from postdate.backends.sqlite.rows import (
    QUEUED_COLUMNS,
    QUEUED_FIELDS,
    WAITING_COLUMNS,
    WAITING_FIELDS,
    Row,
    decoded,
    envelope_of,
    message_of,
    read_rows,
    time_of,
)
from postdate.backends.sqlite.transaction import Transaction
from postdate.clock import to_microseconds
from postdate.ports import RecordKind

log = logging.getLogger("postdate.embedded")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class QuarantineTable:
    """A table whose rows are read as messages.

    Args:
        columns: as :attr:`decode` reads them.
        table: its name.
        copy: copies a row to the quarantine by its number; inside SQLite, so no byte changes.
        decode: reads :attr:`columns`; raises when the row is unreadable.
    """

    table: str
    columns: str
    copy: str
    decode: Callable[[Row], object]


WAITING: Final = QuarantineTable(
    "delayed_message",
    WAITING_COLUMNS,
    f"""
    INSERT INTO quarantine (place, reason, at, {", ".join(WAITING_FIELDS)}, headers, body)
    SELECT '', ?, ?, {", ".join(WAITING_FIELDS)}, headers, body
    FROM delayed_message AS d LEFT JOIN content AS c ON c.seq = d.content WHERE d.seq = ?""",
    message_of,
)
QUEUED: Final = QuarantineTable(
    "queue_message",
    QUEUED_COLUMNS,
    f"""
    INSERT INTO quarantine (place, reason, at, destination, {", ".join(QUEUED_FIELDS)}, headers, body)
    SELECT name, ?, ?, name, {", ".join(QUEUED_FIELDS)}, headers, body
    FROM queue_message AS m JOIN queue AS q USING (queue_id) LEFT JOIN content AS c ON c.seq = m.content
    WHERE m.seq = ?""",
    lambda row: envelope_of(row, ""),
)

_TAKEN: Final = "SELECT message_id, due, destination FROM quarantine WHERE number = ?"


def set_aside(tx: Transaction, shelf: QuarantineTable, bad: Mapping[int, str], at: int | None = None) -> None:
    """Move rows to the quarantine and record that.

    ``bad``: why each is unreadable, by its number; ``at``: microseconds since 1970 UTC, by default now.
    """
    when = tx.rules.now() if at is None else at
    for seq, reason in bad.items():
        number = tx.execute(shelf.copy, (reason, when, seq)).lastrowid
        ((message_id, due, destination),) = read_rows(tx.connection, _TAKEN, (number,))
        contents = tx.execute(f"DELETE FROM {shelf.table} WHERE seq = ? RETURNING content", (seq,)).fetchall()
        tx.executemany("DELETE FROM content WHERE seq = ?", contents)
        if isinstance(message_id, str):
            where = destination if isinstance(destination, str) else None
            record(tx, RecordKind.FAILED, (message_id, readable(due), where), when, f"unreadable: {reason}")
    if bad:
        text = "set aside what cannot be read: %d in this batch, the first because %s; `postdate errors` lists them"
        log.error(text, len(bad), next(iter(bad.values())))


def readable(due: object) -> int | None:
    """Return a due time in microseconds; ``None``: the value is no instant."""
    nearest = time_of(due)
    exact = None if nearest is None else to_microseconds(nearest)
    return exact if exact == due else None


def claimed(
    tx: Transaction,
    shelf: QuarantineTable,
    sql: str,
    values: Sequence[Any] | Mapping[str, Any],
    decode: Callable[[Row], T],
    at: int | None = None,
) -> list[T]:
    """Run a statement that claims; return the readable rows. Unreadable ones are quarantined, and more are claimed.

    Empty only when nothing is left to claim. Any other failure to read ends the transaction, and the claims with it.
    """
    while True:
        rows = sorted(read_rows(tx.connection, sql, values), key=lambda row: row[0])
        good, bad = decoded(rows, decode)
        if bad:
            set_aside(tx, shelf, bad, at)
        if good or not bad:
            return good

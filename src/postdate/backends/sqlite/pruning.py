"""Removing records from the file, and restoring them. Source: ADR 0011."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from postdate.backends.sqlite.file import SqliteFile, Transaction
from postdate.ports import RecordKind
from postdate.ports.scanning import ARCHIVED, StoredRecord

_MARK: Final = f"UPDATE record SET detail = '{ARCHIVED}' WHERE seq = ? AND kind = 1 AND detail IS NOT '{ARCHIVED}'"
# New records are numbered after the last one: without it, numbers in an archive would be given again.
_PRUNE: Final = "DELETE FROM record WHERE seq = ? AND seq < (SELECT max(seq) FROM record)"
_UNMARK: Final = f"UPDATE record SET detail = ? WHERE kind = 1 AND message_id = ? AND detail = '{ARCHIVED}'"
_INSERT: Final = "INSERT INTO record (seq, kind, message_id, at, due, destination, detail) VALUES (?, ?, ?, ?, ?, ?, ?)"


def mark_archived(file: SqliteFile, numbers: Sequence[int]) -> int:
    return file.write_blocking(lambda tx: tx.executemany(_MARK, [(number,) for number in numbers]).rowcount)


def prune(file: SqliteFile, numbers: Sequence[int]) -> int:
    return file.write_blocking(lambda tx: tx.executemany(_PRUNE, [(number,) for number in numbers]).rowcount)


def restore(file: SqliteFile, records: Sequence[StoredRecord]) -> int:
    scheduled = [record for record in records if record.kind == RecordKind.SCHEDULED]
    others = [record for record in records if record.kind != RecordKind.SCHEDULED]

    def put_back(tx: Transaction) -> int:
        back = {record.message_id for record in scheduled if _claim(tx, record)}
        tx.executemany(_INSERT, [_row(record) for record in others if record.message_id in back])
        return len(back)

    return file.write_blocking(put_back)


def _claim(tx: Transaction, record: StoredRecord) -> bool:
    if tx.execute(_UNMARK, (record.detail, record.message_id)).rowcount:
        return True
    # Only an id in use is let pass: a number that another record has must not look like one.
    return tx.execute(f"{_INSERT} ON CONFLICT (message_id) WHERE kind = 1 DO NOTHING", _row(record)).rowcount == 1


def _row(record: StoredRecord) -> tuple[object, ...]:
    return (
        record.number,
        record.kind,
        record.message_id,
        record.at,
        record.due,
        record.destination,
        record.detail,
    )

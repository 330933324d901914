"""Removing records from MariaDB, and restoring them. Source: ADR 0011."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from postdate.backends.mariadb.connection import MariaDbSession, literal
from postdate.backends.rowlocks.names import RowLockNames
from postdate.backends.rowlocks.pool import Pool
from postdate.ports import RecordKind
from postdate.ports.scanning import ARCHIVED, StoredRecord

_ROWS_AT_ONCE: Final = 2_000
"""Numbers or rows in one statement, at most: well below what servers take in a packet."""

_STATEMENT_BYTES: Final = 1024 * 1024
"""The longest statement, unless a single row is longer."""


def tables_of_stores(pool: Pool, names: RowLockNames) -> Sequence[str]:
    query = f"SELECT name FROM {names.of('store')} ORDER BY name"
    return [name for (name,) in pool.run_blocking(lambda session: session.rows(query))]


def mark_archived(pool: Pool, names: RowLockNames, numbers: Sequence[int]) -> int:
    statement = (
        f"UPDATE {names.of('record')} SET detail = '{ARCHIVED}' "
        f"WHERE number IN %(numbers)s AND once = 1 AND NOT detail <=> '{ARCHIVED}'"
    )
    return pool.transaction_blocking(lambda session: _change(session, statement, numbers))


def prune(pool: Pool, names: RowLockNames, numbers: Sequence[int]) -> int:
    """The server remembers the numbers it gave, so none is given again."""
    statement = f"DELETE FROM {names.of('record')} WHERE number IN %(numbers)s"
    return pool.transaction_blocking(lambda session: _change(session, statement, numbers))


def _change(session: MariaDbSession, statement: str, numbers: Sequence[int]) -> int:
    """Run a statement on numbers in ascending order, so that two processes wait for each other and do not deadlock."""
    wanted = sorted(numbers)
    return sum(
        session.change(statement, {"numbers": wanted[start : start + _ROWS_AT_ONCE]})
        for start in range(0, len(wanted), _ROWS_AT_ONCE)
    )


def restore(pool: Pool, names: RowLockNames, records: Sequence[StoredRecord]) -> int:
    scheduled = [record for record in records if record.kind == RecordKind.SCHEDULED]
    others = [record for record in records if record.kind != RecordKind.SCHEDULED]

    def put_back(session: MariaDbSession) -> int:
        find_store = f"SELECT store_id FROM {names.of('store')} WHERE name = %(name)s"
        ((store,),) = session.rows(find_store, {"name": names.table})
        if records:
            _lift_counter(session, names, store, max(records, key=lambda record: record.number))
        back = {record.message_id for record in scheduled if _unmark(session, names, store, record)}
        new = [record for record in scheduled if record.message_id not in back]
        for rows in _in_pieces(_row(record, store) for record in new):
            found = session.rows_of_bytes(_insert(names, "INSERT IGNORE") + b",".join(rows) + b" RETURNING message_id")
            back.update(id_ for (id_,) in found)
        for rows in _in_pieces(_row(record, store) for record in others if record.message_id in back):
            session.change_bytes(_insert(names, "INSERT") + b",".join(rows))
        return len(back)

    return pool.transaction_blocking(put_back)


def _lift_counter(session: MariaDbSession, names: RowLockNames, store: int, newest: StoredRecord) -> None:
    """Let new numbers begin above this record's: the server counts on from the highest ever inserted.

    It never counts back, and this waits for no lock.
    """
    row = _row(newest._replace(kind=RecordKind.DELIVERED), store)
    if session.change_bytes(_insert(names, "INSERT IGNORE") + row):
        session.change(f"DELETE FROM {names.of('record')} WHERE number = %(number)s", {"number": newest.number})


def _unmark(session: MariaDbSession, names: RowLockNames, store: int, record: StoredRecord) -> int:
    values: dict[str, Any] = {"id": record.message_id, "store": store, "detail": record.detail}
    return session.change(
        f"UPDATE {names.of('record')} SET detail = %(detail)s "
        f"WHERE message_id = %(id)s AND store_id = %(store)s AND once = 1 AND detail = '{ARCHIVED}'",
        values,
    )


def _insert(names: RowLockNames, command: str) -> bytes:
    return (
        f"{command} INTO {names.plain('postdate_record')} "
        f"(number, at, due, store_id, kind, once, message_id, destination, detail) VALUES "
    ).encode()


def _row(record: StoredRecord, store: int) -> bytes:
    once = b"1" if record.kind == RecordKind.SCHEDULED else b"NULL"
    due = b"NULL" if record.due is None else b"%d" % record.due
    texts = (_text(record.message_id), _text(record.destination), _text(record.detail))
    return b"(%d,%d,%b,%d,%d,%b,%b,%b,%b)" % (record.number, record.at, due, store, record.kind, once, *texts)


def _text(text: str | None) -> bytes:
    return b"NULL" if text is None else literal(text)


def _in_pieces(rows: Iterable[bytes]) -> Iterable[list[bytes]]:
    piece, size = list[bytes](), 0
    for row in rows:
        if piece and (size + len(row) > _STATEMENT_BYTES or len(piece) == _ROWS_AT_ONCE):
            yield piece
            piece, size = [], 0
        piece.append(row)
        size += len(row)
    if piece:
        yield piece

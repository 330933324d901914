"""Unreadable rows of a file: they are marked when they are read, and an operator lists and discards them.

A claim, a receiver or a query that reads such a row marks it in its own transaction. The row stays in its table.
Source: :class:`postdate.ports.UnreadableRows`; ADR 0043.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, ClassVar, Final, TypeVar

from typing_extensions import override

from postdate.backends.sqlite import rows as sqlite_rows
from postdate.backends.sqlite.file import OnFile, SqliteFile
from postdate.clock import from_microseconds, to_microseconds
from postdate.errors import MessageNotFound, StoreError
from postdate.ports import RecordKind, UnreadableRow, UnreadableRows

T = TypeVar("T")

_CONTENT: Final = ("c.headers", "c.body")
_FIELDS: Final = {
    sqlite_rows.PENDING.name: sqlite_rows.PENDING_FIELDS,
    sqlite_rows.QUEUED.name: sqlite_rows.QUEUED_FIELDS,
}
_QUEUES: Final = {
    sqlite_rows.PENDING.name: "''",
    sqlite_rows.QUEUED.name: (
        "coalesce((SELECT name FROM queue AS q WHERE q.queue_id = abs(t.queue_id)), abs(t.queue_id))"
    ),
}


async def read_readable_rows(
    file: SqliteFile,
    table: sqlite_rows.MessageTable,
    sql: str,
    values: Sequence[Any] | Mapping[str, Any],
    decode: Callable[[sqlite_rows.Row], T],
) -> list[T]:
    """Run a statement that only reads; return the readable rows, in order, and mark unclaimed unreadable ones.

    If nothing can be written the query does not fail: then unreadable rows are only left out.
    """
    return (await read_readable_and_all_rows(file, table, sql, values, decode))[0]


async def read_readable_and_all_rows(
    file: SqliteFile,
    table: sqlite_rows.MessageTable,
    sql: str,
    values: Sequence[Any] | Mapping[str, Any],
    decode: Callable[[sqlite_rows.Row], T],
) -> tuple[list[T], Sequence[sqlite_rows.Row]]:
    """Call :func:`read_readable_rows`; return also all rows of the statement's last run, including unreadable ones."""
    while True:
        rows = await file.read(lambda connection: sqlite_rows.read_rows(connection, sql, values))
        messages, reasons = sqlite_rows.decode_rows(rows, decode)
        if not reasons:
            return messages, rows
        marked_count = 0
        with suppress(StoreError):
            marked_count = await file.write(lambda tx, bad=reasons: _mark_if_still_unreadable(tx, table, bad))
        if not marked_count:
            return messages, rows


def _mark_if_still_unreadable(
    tx: sqlite_rows.Transaction, table: sqlite_rows.MessageTable, suspects: Mapping[int, str]
) -> int:
    placeholders = ",".join("?" * len(suspects))
    is_unclaimed = "claimant IS NULL AND unreadable IS NULL"
    sql = f"SELECT {table.columns} FROM {table.name} WHERE seq IN ({placeholders}) AND {is_unclaimed}"
    _, reasons = sqlite_rows.decode_rows(sqlite_rows.read_rows(tx.connection, sql, tuple(suspects)), table.decode)
    sqlite_rows.mark_and_log(tx, table, reasons)
    return len(reasons)


class UnreadableFileRows(OnFile, UnreadableRows):
    _messages: ClassVar[sqlite_rows.MessageTable]
    """The table with the messages of this adapter."""

    @override
    async def list_unreadable(self, limit: int) -> Sequence[UnreadableRow]:
        table, fields = self._messages.name, _FIELDS[self._messages.name]
        # An id that is no UTF-8 is decoded as far as possible for display; its bytes are kept.
        columns = ", ".join(f"CAST({name} AS BLOB)" for name in (*(f"t.{each}" for each in fields), *_CONTENT))
        sql = f"""
            SELECT t.seq, {_QUEUES[table]}, t.unreadable, t.unreadable_at, {columns}
            FROM {table} AS t LEFT JOIN content AS c ON c.seq = t.content
            WHERE t.unreadable IS NOT NULL ORDER BY t.seq LIMIT ?"""
        rows = await self.file.read(lambda c: c.execute(sql, (limit,)).fetchall())
        return [_unreadable_row(row, (*fields, "headers", "body")) for row in rows]

    @override
    async def count_unreadable(self) -> int:
        sql = f"SELECT count(*) FROM {self._messages.name} WHERE unreadable IS NOT NULL"
        return await self.file.read(lambda c: int(c.execute(sql).fetchone()[0]))

    @override
    async def discard_unreadable(self, number: int, now: datetime) -> None:
        table, at = self._messages, to_microseconds(now)

        def discard(tx: sqlite_rows.Transaction) -> None:
            find = f"SELECT unreadable, content FROM {table.name} WHERE seq = ? AND unreadable IS NOT NULL"
            if (row := tx.execute(find, (number,)).fetchone()) is None:
                raise MessageNotFound(f"no unreadable row of {self.file.path} has the number {number}")
            reason, content = row
            sqlite_rows.record_unreadable(
                tx, RecordKind.DISCARDED, sqlite_rows.unreadable_parts(tx, table, number), reason, at
            )
            tx.execute(f"DELETE FROM {table.name} WHERE seq = ?", (number,))
            tx.execute("DELETE FROM content WHERE seq = ?", (content,))

        await self.file.write(discard)


def _unreadable_row(row: sqlite_rows.Row, names: Sequence[str]) -> UnreadableRow:
    number, queue, reason, at, *values = row
    raw = {name: value for name, value in zip(names, values, strict=True) if value is not None}
    message_id = raw.get("message_id", b"").decode(errors="replace")
    return UnreadableRow(number, str(queue), message_id, reason, from_microseconds(at), raw)

"""The quarantine of a file: unreadable rows are moved to it byte for byte, and back once they are repaired.

A claim, a receiver or a look that meets such a row moves it in its own transaction, so the tables and indexes of
deliveries stay as they are. Source: :mod:`postdate.ports.observation`; ADR 0019.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, ClassVar, Final, TypeVar

from typing_extensions import override

from postdate.backends.sql.questions import mended
from postdate.backends.sqlite.file import OnFile, SqliteFile
from postdate.backends.sqlite.rows import (
    DUE,
    FAILED_LAST,
    INSERT_QUEUED,
    INSERT_SCHEDULED,
    INSERT_WAITING,
    NEXT_NUMBER,
    QUEUED_FIELDS,
    WAITING_FIELDS,
    QuarantineTable,
    Row,
    Transaction,
    decoded,
    envelope_of,
    message_of,
    queue_topic,
    read_rows,
    readable,
    record,
    set_aside,
)
from postdate.clock import from_microseconds, to_microseconds
from postdate.errors import DuplicateMessage, MessageNotFound, QueueNotFound, StoreError
from postdate.messages import check_headers
from postdate.ports import Mending, Quarantine, Quarantined, RecordKind

T = TypeVar("T")

_Aside = dict[str, Any]
"""A row of the quarantine, by its columns, which may hold anything."""

_NAMES: Final = (*WAITING_FIELDS, "ends_at", "dead_letter", "headers", "body")
_TAKEN: Final = ("number", "place", "reason", *_NAMES)
# An id that is no UTF-8 is decoded as far as possible for display; its bytes are kept.
_BYTES: Final = ", ".join(f"CAST({name} AS BLOB)" for name in _NAMES)
_LISTED: Final = f"SELECT number, place, reason, at, {_BYTES} FROM quarantine"


async def looked_at(
    file: SqliteFile,
    shelf: QuarantineTable,
    sql: str,
    values: Sequence[Any] | Mapping[str, Any],
    decode: Callable[[Row], T],
) -> list[T]:
    """Run a statement that only reads; return the readable rows, in order, and move unclaimed unreadable ones away.

    A look does not fail because nothing can be written: unreadable rows are then left out.
    """
    return (await looked_at_all(file, shelf, sql, values, decode))[0]


async def looked_at_all(
    file: SqliteFile,
    shelf: QuarantineTable,
    sql: str,
    values: Sequence[Any] | Mapping[str, Any],
    decode: Callable[[Row], T],
) -> tuple[list[T], Sequence[Row]]:
    """:func:`looked_at`; return also all rows of the last run of the statement, unreadable ones included."""
    while True:
        rows = await file.read(lambda connection: read_rows(connection, sql, values))
        good, bad = decoded(rows, decode)
        if not bad:
            return good, rows
        moved = 0
        with suppress(StoreError):
            moved = await file.write(lambda tx, bad=bad: _set_aside_again(tx, shelf, bad))
        if not moved:
            return good, rows


def _set_aside_again(tx: Transaction, shelf: QuarantineTable, suspects: Mapping[int, str]) -> int:
    marks = ",".join("?" * len(suspects))
    sql = f"SELECT {shelf.columns} FROM {shelf.table} WHERE seq IN ({marks}) AND claimant IS NULL"
    _, bad = decoded(read_rows(tx.connection, sql, tuple(suspects)), shelf.decode)
    set_aside(tx, shelf, bad)
    return len(bad)


class FileQuarantine(OnFile, Quarantine):
    _place: ClassVar[str]
    """SQL condition for the rows of this adapter."""

    @override
    async def quarantined(self, limit: int) -> Sequence[Quarantined]:
        sql = f"{_LISTED} WHERE {self._place} ORDER BY number LIMIT ?"
        return [_shown(row) for row in await self.file.read(lambda c: c.execute(sql, (limit,)).fetchall())]

    @override
    async def quarantined_count(self) -> int:
        sql = f"SELECT count(*) FROM quarantine WHERE {self._place}"
        return await self.file.read(lambda c: int(c.execute(sql).fetchone()[0]))

    @override
    async def put_back(self, number: int, mending: Mending, now: datetime) -> None:
        if mending.headers is not None:
            check_headers(mending.headers)
        await self.file.write(lambda tx: _put_back(tx, self._taken(tx, number), mending, to_microseconds(now)))

    @override
    async def discard_quarantined(self, number: int, now: datetime) -> None:
        def discard(tx: Transaction) -> None:
            aside = self._taken(tx, number)
            tx.execute("DELETE FROM quarantine WHERE number = ?", (number,))
            if isinstance(aside["message_id"], str):
                detail = f"unreadable: {aside['reason']}"
                record(tx, RecordKind.DISCARDED, _recorded(aside), to_microseconds(now), detail)

        await self.file.write(discard)

    def _taken(self, tx: Transaction, number: int) -> _Aside:
        sql = f"SELECT {', '.join(_TAKEN)} FROM quarantine WHERE number = ? AND {self._place}"
        if not (rows := read_rows(tx.connection, sql, (number,))):
            raise MessageNotFound(f"nothing of number {number} is set aside in {self.file.path}")
        return dict(zip(_TAKEN, rows[0], strict=True))


def _recorded(aside: _Aside) -> tuple[str, int | None, str | None]:
    destination = aside["destination"]
    return aside["message_id"], readable(aside["due"]), destination if isinstance(destination, str) else None


def _shown(row: Row) -> Quarantined:
    number, place, reason, at, *values = row
    raw = {name: value for name, value in zip(_NAMES, values, strict=True) if value is not None}
    message_id = raw.get("message_id", b"").decode(errors="replace")
    return Quarantined(number, place, message_id, reason, from_microseconds(at), raw)


def _put_back(tx: Transaction, aside: _Aside, mending: Mending, at: int) -> None:
    row = {**aside, **mended(mending)}
    if aside["place"]:
        _into_queue(tx, row)
    else:
        _into_store(tx, row, at)
    tx.execute("DELETE FROM quarantine WHERE number = ?", (aside["number"],))
    if row["due"] is not None:
        record(tx, RecordKind.RETURNED, _recorded(row), at)


def _into_store(tx: Transaction, row: _Aside, at: int) -> None:
    fields = [row[name] for name in WAITING_FIELDS]
    message_of((0, *fields, row["headers"], row["body"]))
    seq = _number_of(tx, row, at)
    tx.execute(INSERT_WAITING, (seq, *fields[:-1], _content(tx, row), row["due"]))
    tx.execute("UPDATE delayed_message SET failures = ? WHERE seq = ?", (row["failures"], seq))
    tx.signal(DUE)


def _number_of(tx: Transaction, row: _Aside, at: int) -> int:
    """Return the former number of a message that failed last, otherwise a new one. Raises `DuplicateMessage`."""
    if (failed := tx.execute(FAILED_LAST, {"id": row["message_id"]}).fetchone()) is not None:
        return failed[0]
    (seq,) = tx.execute(NEXT_NUMBER).fetchone()
    if not tx.execute(INSERT_SCHEDULED, (seq, row["message_id"], at, row["due"], row["destination"])).rowcount:
        raise DuplicateMessage.of_set_aside(row["message_id"])
    return seq


def _into_queue(tx: Transaction, row: _Aside) -> None:
    *fields, ends_at, dead_letter = (row[name] for name in QUEUED_FIELDS)
    envelope_of((0, *fields, row["headers"], row["body"]), row["place"])
    if (found := tx.execute("SELECT queue_id FROM queue WHERE name = ?", (row["place"],)).fetchone()) is None:
        raise QueueNotFound.of(row["place"], row["message_id"])
    end = (ends_at if isinstance(ends_at, int) else None, int(dead_letter == 1))
    tx.execute(INSERT_QUEUED, (found[0], *fields, *end, _content(tx, row)))
    tx.signal(queue_topic(row["place"]))


def _content(tx: Transaction, row: _Aside) -> int:
    headers = row["headers"].decode() if isinstance(row["headers"], bytes) else row["headers"]
    return int(tx.execute("INSERT INTO content (headers, body) VALUES (?, ?)", (headers, row["body"])).lastrowid or 0)

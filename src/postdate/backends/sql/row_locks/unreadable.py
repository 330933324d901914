"""Unreadable rows, which are marked and stay in their table, listed and discarded.

**The unreadable row.** These rules hold for every store on row locks:

1. Each row is read by itself: an unreadable one never prevents another from being claimed or shown.
2. A claim marks the unreadable rows that it finds, with a record and a log entry. Their transaction is committed before
   a batch is claimed, so the mark survives the process. Then it claims again.
3. A query marks unclaimed unreadable rows, and leaves out claimed ones: the process that claimed them could read them.

Source: :class:`postdate.ports.UnreadableRows`; ADR 0043.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

from typing_extensions import override

from postdate.backends.sql.row_locks.parts import MarkedRow, MessageRow, NewRecord, decode_rows
from postdate.backends.sql.row_locks.pool import Pool
from postdate.backends.sql.row_locks.tables import RowLockTables
from postdate.clock import from_microseconds, to_microseconds
from postdate.errors import MessageNotFound, StoreError
from postdate.messages import DelayedMessage
from postdate.ports import RecordKind, UnreadableRow, UnreadableRows
from postdate.ports.observation import UNREADABLE
from postdate.runtime.next_due import NextDue

log = logging.getLogger("postdate.stores")


class UnreadableInTable(UnreadableRows):
    """The unreadable rows of one store. Methods that are no coroutines block."""

    _pool: Pool
    _next_due: NextDue[int]

    @property
    @abstractmethod
    def _tables(self) -> RowLockTables:
        """The steps of the store."""

    def _mark_and_log(self, session: Any, reasons: Mapping[int, str], at: int) -> None:
        """Mark locked rows, and log that with the reason of the first; ``reasons``: reasons by number."""
        self._tables.mark_unreadable(session, reasons, at)
        text = "cannot be read, and marked so: %d messages (%s); `postdate messages list --unreadable` lists them"
        log.error(text, len(reasons), next(iter(reasons.values())))
        self._next_due.forget()  # the earliest known attempt may have been one of them

    def _read_messages(
        self, read_rows: Callable[[Any], Sequence[tuple[int, MessageRow]]]
    ) -> tuple[Mapping[int, DelayedMessage], Sequence[tuple[int, MessageRow]]]:
        """Return the readable messages that ``read_rows`` finds, in order, and all rows of its last run.

        Unclaimed unreadable rows are marked. A query does not fail if nothing can be written: then unreadable rows are
        only left out.
        """
        while True:
            rows = self._pool.run_blocking(read_rows)
            messages, reasons = decode_rows(rows)
            if not reasons:
                return messages, rows
            marked_count = 0
            with suppress(StoreError):
                marked_count = self._pool.transaction_blocking(
                    lambda session, bad=reasons: self._mark_if_still_unreadable(session, sorted(bad))
                )
            if not marked_count:
                return messages, rows

    def _mark_if_still_unreadable(self, session: Any, suspects: Sequence[int]) -> int:
        _, reasons = decode_rows(self._tables.lock_unclaimed(session, suspects))
        if reasons:
            self._mark_and_log(session, reasons, self._tables.now(session))
        return len(reasons)

    @override
    async def list_unreadable(self, limit: int) -> Sequence[UnreadableRow]:
        rows = await self._pool.run(lambda session: self._tables.list_unreadable(session, limit))
        return [_unreadable_row(row) for row in rows]

    @override
    async def count_unreadable(self) -> int:
        return await self._pool.run(self._tables.count_unreadable)

    @override
    async def discard_unreadable(self, number: int, now: datetime) -> None:
        def discard(session: Any) -> None:
            if (row := self._tables.lock_unreadable(session, number)) is None:
                raise MessageNotFound(f"no unreadable row of this store has the number {number}")
            note = NewRecord(to_microseconds(now), int(RecordKind.DISCARDED), f"{UNREADABLE}{row.reason}")
            self._tables.discard_unreadable(session, row, note)

        await self._pool.transaction(discard)


def _unreadable_row(row: MarkedRow) -> UnreadableRow:
    raw = {name: _bytes(value) for name, value in row.content._asdict().items() if value is not None}
    return UnreadableRow(row.number, "", row.content.message_id, row.reason, from_microseconds(row.at), raw)


def _bytes(value: str | int | bytes) -> bytes:
    return bytes(value) if isinstance(value, bytes | bytearray) else str(value).encode()

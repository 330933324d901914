"""Moves unreadable rows to the quarantine, and back once they are repaired.

**The unreadable row.** These rules hold for every store on row locks:

1. Each row is read by itself: an unreadable one never keeps another from being claimed or shown.
2. A claim moves the unreadable rows that it finds, with a record and a log entry, in a transaction that is committed
   before a batch is held, so the move survives the process. Then it claims again.
3. A look moves unclaimed unreadable rows, and leaves out claimed ones: whoever claimed them could read them.
4. Where the move is refused (missing rights or tables), claims leave such rows out for a minute and go on with the
   others; that is logged once, with the remedy.

Source: :mod:`postdate.ports.observation`; ADR 0019.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, Final

from typing_extensions import override

from postdate.backends.rowlocks.parts import MessageRow, QuarantinedRow, RecordNote, decoded, from_row
from postdate.backends.rowlocks.pool import Pool
from postdate.backends.rowlocks.tables import RowLockTables
from postdate.backends.sql.questions import mended
from postdate.clock import from_microseconds, steady_seconds, to_microseconds
from postdate.errors import DuplicateMessage, MessageNotFound, StoreError, StoreNotSetUp, StoreNotWritable
from postdate.messages import DelayedMessage, check_headers
from postdate.ports import Mending, Quarantine, Quarantined, RecordKind
from postdate.runtime.next_due import NextDue

_NONE: Final = frozenset[int]()
_TRY_AGAIN_AFTER_SECONDS: Final = 60.0
_GRANT: Final = "Run the statements of `postdate setup --print-sql` again, grants included"

log = logging.getLogger("postdate.stores")


class RowQuarantine(Quarantine):
    """The quarantined messages of one store. Thread-safe; what is no coroutine blocks."""

    def __init__(self, pool: Pool, tables: RowLockTables, next_due: NextDue[int]) -> None:
        self._pool, self._tables, self._next_due = pool, tables, next_due
        self._left = _NONE
        self._left_until = 0.0
        self._has_complained = False

    def left_out(self) -> frozenset[int]:
        """Return the row numbers that claims leave out for 60 s, because the quarantine refused them."""
        return self._left if steady_seconds() < self._left_until else _NONE

    def clear_away(self, session: Any, bad: Mapping[int, str], at: int) -> None:
        """Quarantine locked messages and end the transaction; if that is refused, claims leave them out for a while.

        An administrator may have made the table without rights on it, which must not stop readable messages.
        """
        try:
            self.put_aside(session, bad, at)
            session.commit()
        except (StoreNotWritable, StoreNotSetUp) as error:
            session.rollback()
            self._left, self._left_until = self.left_out() | bad.keys(), steady_seconds() + _TRY_AGAIN_AFTER_SECONDS
            if not self._has_complained:
                text = "%d messages cannot be read (%s) and may not be set aside: %s; the others go on. %s"
                log.error(text, len(bad), next(iter(bad.values())), error, _GRANT)
            self._has_complained = True
        else:
            self._left, self._has_complained = _NONE, False

    def count(self, session: Any) -> int:
        """Return how many messages are quarantined; 0 without the right to read: then we have written none either."""
        try:
            return self._tables.set_aside_count(session)
        except (StoreNotWritable, StoreNotSetUp) as error:
            if not self._has_complained:
                log.error("what is set aside cannot be counted: %s. %s", error, _GRANT)
            self._has_complained = True
            return 0

    def put_aside(self, session: Any, bad: Mapping[int, str], at: int) -> None:
        self._tables.set_aside(session, bad, at)
        text = "%d messages cannot be read and were set aside (%s); `postdate errors` shows what is to be done"
        log.error(text, len(bad), next(iter(bad.values())))
        self._next_due.forget()  # the earliest that is known may have been one of them

    def looked_at(
        self, look: Callable[[Any], Sequence[tuple[int, MessageRow]]]
    ) -> tuple[Mapping[int, DelayedMessage], Sequence[tuple[int, MessageRow]]]:
        """Return the readable messages that ``look`` finds, in order, and all rows of its last run.

        Unclaimed unreadable ones are quarantined. A look does not fail because nothing can be written: unreadable rows
        are then left out.
        """
        while True:
            rows = self._pool.run_blocking(look)
            good, bad = decoded(rows)
            if not bad:
                return good, rows
            moved = 0
            with suppress(StoreError):
                moved = self._pool.transaction_blocking(
                    lambda session, bad=bad: self._set_aside_again(session, sorted(bad))
                )
            if not moved:
                return good, rows

    def _set_aside_again(self, session: Any, suspects: Sequence[int]) -> int:
        _, bad = decoded(self._tables.free_ones(session, suspects))
        if bad:
            self.put_aside(session, bad, self._tables.now(session))
        return len(bad)

    @override
    async def quarantined(self, limit: int) -> Sequence[Quarantined]:
        found = await self._pool.run(lambda session: self._tables.all_aside(session, limit))
        return [_shown(aside) for aside in found]

    @override
    async def quarantined_count(self) -> int:
        return await self._pool.run(self._tables.set_aside_count)

    @override
    async def put_back(self, number: int, mending: Mending, now: datetime) -> None:
        at = to_microseconds(now)
        if mending.headers is not None:
            check_headers(mending.headers)

        def put_back(session: Any) -> None:
            aside = self._taken(session, number)
            row = aside.row._replace(**mended(mending))
            from_row(row)
            note = RecordNote(at, int(RecordKind.RETURNED))
            if not self._tables.come_back(session, row, note) and not self._tables.insert(session, [row], at):
                raise DuplicateMessage.of_set_aside(row.message_id)
            self._tables.end_aside(session, aside, None)

        await self._pool.transaction(put_back)
        self._next_due.forget()

    @override
    async def discard_quarantined(self, number: int, now: datetime) -> None:
        def discard(session: Any) -> None:
            aside = self._taken(session, number)
            note = RecordNote(to_microseconds(now), int(RecordKind.DISCARDED), f"unreadable: {aside.reason}")
            self._tables.end_aside(session, aside, note)

        await self._pool.transaction(discard)

    def _taken(self, session: Any, number: int) -> QuarantinedRow:
        if (found := self._tables.lock_aside(session, number)) is None:
            raise MessageNotFound(f"nothing of number {number} is set aside in this store")
        return found


def _shown(aside: QuarantinedRow) -> Quarantined:
    raw = {name: _bytes(value) for name, value in aside.row._asdict().items() if value is not None}
    return Quarantined(aside.number, "", aside.row.message_id, aside.reason, from_microseconds(aside.at), raw)


def _bytes(value: str | int | bytes) -> bytes:
    return bytes(value) if isinstance(value, bytes | bytearray) else str(value).encode()

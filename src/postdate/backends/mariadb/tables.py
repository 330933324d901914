"""What a store does in MariaDB, step by step; the contracts are those of :class:`postdate.backends.rowlocks.Tables`."""

from __future__ import annotations

import os
import platform
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from postdate.backends.mariadb import setup
from postdate.backends.mariadb.connection import MariaDbSession, literal
from postdate.backends.mariadb.errors import LockedTooLong
from postdate.backends.mariadb.facts import server_facts
from postdate.backends.mariadb.names import Names
from postdate.backends.mariadb.statements import EARLIEST, NOW, AsideStatements, ScanStatements, Statements
from postdate.backends.rowlocks import Ending, Row, Waiting
from postdate.backends.rowlocks.parts import Aside, filter_values, headers_retimed, readable_due
from postdate.errors import MessageTooLarge, StoreNotSetUp, StoreUnreachable
from postdate.persistence.migrations import setup_command
from postdate.ports import Recording, RecordKind, Scan, ScanPart, ServerFacts

_PACKET_ROOM: Final = 64 * 1024
"""Of a packet that is not for rows: the statement around them."""
_STATEMENT_BYTES: Final = 1024 * 1024
"""How long one statement gets if its rows allow it: longer ones are not faster."""
_ROWS_AT_ONCE: Final = 2_000


class MariaDbTables:
    """Every statement of one store.

    Args:
        names: of its tables.
        recording: what is recorded.
    """

    def __init__(self, names: Names, recording: Recording) -> None:
        self.names = names
        self._recording = recording
        self._store_id: int | None = None
        self._sql, self._scans, self._aside = Statements(names), ScanStatements(names), AsideStatements(names)

    @property
    def recording(self) -> Recording:
        """See :class:`postdate.backends.rowlocks.Tables`."""
        return self._recording

    def setup(self, session: MariaDbSession) -> None:
        """See :class:`postdate.backends.rowlocks.Tables`."""
        setup.setup(session, self.names)

    def _store(self, session: MariaDbSession) -> int:
        if self._store_id is None:
            missing = (
                f"database {self.names.schema!r} has no table {self.names.table!r}; {setup_command(self.names.table)}"
            )
            try:
                found = session.rows(self._sql.find_store, {"name": self.names.table})
            except StoreNotSetUp as error:
                raise StoreNotSetUp(missing) from error
            if not found:
                raise StoreNotSetUp(missing)
            self._store_id = found[0][0]
        assert self._store_id is not None
        return self._store_id

    # --- storing ------------------------------------------------------------------------------------------------

    def insert(self, session: MariaDbSession, rows: Sequence[Row], at: int) -> Sequence[str]:
        """See :class:`postdate.backends.rowlocks.Tables`."""
        store = self._store(session)
        records = [
            b"(%d,%d,%d,1,1,%b,%b)" % (at, row.due, store, literal(row.message_id), literal(row.destination))
            for row in rows
        ]
        numbers = dict[str, int]()
        for part in _statements(records, session.largest_packet):
            found = session.rows_of_bytes(self._sql.insert_records + part + self._sql.insert_records_end)
            numbers |= {message_id: number for number, message_id in found}
        self._insert_messages(session, [(numbers[row.message_id], row) for row in rows if row.message_id in numbers])
        return list(numbers)

    def _insert_messages(self, session: MariaDbSession, numbered: Sequence[tuple[int, Row]]) -> None:
        values = [
            b"(%d,%d,%d,%b,%d,%b,%b,%b,%b)"
            % (
                number,
                row.due,
                row.due,
                b"NULL" if row.expires_at is None else b"%d" % row.expires_at,
                row.failures,
                *(literal(each) for each in (row.message_id, row.destination, row.headers, row.body)),
            )
            for number, row in numbered
        ]
        limit = session.largest_packet - _PACKET_ROOM
        for (_, row), text in zip(numbered, values, strict=True):
            size = len(row.headers) + len(row.body)
            if size > limit // 4 and (size := len(text)) > limit:
                raise MessageTooLarge(
                    f"message {row.message_id!r} takes {size:,} bytes in a statement; the server takes {limit:,} "
                    f"(max_allowed_packet, but for some room): raise max_allowed_packet there, or keep large content "
                    f"elsewhere and send a reference"
                )
        for part in _statements(values, session.largest_packet):
            session.change_bytes(self._sql.insert_messages + part)

    def come_back(self, session: MariaDbSession, row: Row, note: Ending) -> bool:
        """See :class:`postdate.backends.rowlocks.Tables`."""
        store = self._store(session)
        of_id = {"id": row.message_id, "store": store}
        found = session.rows(self._sql.lock_scheduled, of_id)
        if not found:
            return False
        number = found[0][0]
        last = session.rows(self._sql.last_kind, {**of_id, "number": number})
        if not last or last[0][0] not in {RecordKind.FAILED, RecordKind.RETURNED}:
            return False
        self._insert_messages(session, [(number, row)])
        self._record_one(session, number, note, Recording.OUTCOMES)
        return True

    def _record_one(self, session: MariaDbSession, number: int, note: Ending, from_level: Recording) -> None:
        """Record what happens to a message that stays, if so much is recorded."""
        if self._recording is Recording.ALL or self._recording is from_level:
            session.change(self._sql.record_one, {"number": number, **self._note(session, note)})

    def _note(self, session: MariaDbSession, note: Ending) -> dict[str, Any]:
        return {"store": self._store(session), "at": note.at, "kind": note.kind, "detail": note.detail}

    # --- claims -------------------------------------------------------------------------------------------------

    def claim(self, session: MariaDbSession, at: int, limit: int) -> Sequence[tuple[int, int, Row]]:
        """See :class:`postdate.backends.rowlocks.Tables`.

        The plain look comes first: while any session holds an old snapshot, what was delivered stays in the index, and
        a look that locks takes forty times as long to walk over it (ADR 0008).
        """
        first = self.next_attempt(session, ())
        if first is None or first >= at:
            return []
        found = session.rows(self._sql.claim, {"from": first - 1, "at": at, "limit": limit})
        return [(number, attempt_at, Row(*row)) for number, attempt_at, *row in found]

    def finish(self, session: MariaDbSession, numbers: Sequence[int], holder: int | None, ending: Ending) -> int:
        """See :class:`postdate.backends.rowlocks.Tables`."""
        values = {"numbers": numbers, "holder": holder}
        if self._recording is not Recording.NONE:
            session.change(self._sql.record_held, {**values, **self._note(session, ending)})
        else:
            held = [number for (number,) in session.rows(self._sql.find_held, values)]
            if held:
                session.change(self._sql.forget_scheduled, {"numbers": held})
        return session.change(self._sql.delete_held, values)

    def lease(self, session: MariaDbSession, numbers: Sequence[int], holder: int) -> None:
        """See :class:`postdate.backends.rowlocks.Tables`."""
        if not session.rows(self._sql.keep_holder, {"holder": holder}):
            raise StoreUnreachable(f"the connection that held messages under number {holder} is gone")
        session.change(self._sql.lease, {"numbers": numbers, "holder": holder})

    def free(self, session: MariaDbSession, holders: Sequence[int], numbers: Sequence[int] | None = None) -> int:
        """See :class:`postdate.backends.rowlocks.Tables`."""
        if numbers is None:
            numbers = [number for (number,) in session.rows(self._sql.find_leased, {"holders": holders})]
        freed = 0
        for start in range(0, len(numbers), _ROWS_AT_ONCE):
            some = numbers[start : start + _ROWS_AT_ONCE]
            freed += session.change(self._sql.free, {"numbers": some, "holders": holders})
        return freed

    def release(
        self, session: MariaDbSession, numbers: Sequence[int], holder: int | None, attempt_at: int | None
    ) -> int:
        """See :class:`postdate.backends.rowlocks.Tables`."""
        return session.change(self._sql.release, {"numbers": numbers, "holder": holder, "attempt_at": attempt_at})

    def retry(
        self, session: MariaDbSession, number: int, holder: int | None, attempt_at: int | None, note: Ending
    ) -> bool:
        """See :class:`postdate.backends.rowlocks.Tables`."""
        values = {"number": number, "holder": holder, "attempt_at": attempt_at}
        if not session.change(self._sql.retry, values):
            return False
        self._record_one(session, number, note, Recording.ALL)
        return True

    def lock(self, session: MariaDbSession, message_id: str) -> Waiting | None:
        """See :class:`postdate.backends.rowlocks.Tables`; waits a second, as a look may lock a row for a moment."""
        values = {"id": message_id, "store": self._store(session)}
        found = session.rows(self._sql.find, values)
        if not found:
            return None
        try:
            locked = session.rows(self._sql.lock_one, {"number": found[0][0]})
        except LockedTooLong:
            return None
        return Waiting(*locked[0]) if locked else None

    def reschedule(self, session: MariaDbSession, found: Waiting, due: int, at: int) -> None:
        """See :class:`postdate.backends.rowlocks.Tables`."""
        session.change(self._sql.reschedule, {"number": found.number, "due": due, **headers_retimed(found.due, due)})
        self._record_one(session, found.number, Ending(at, int(RecordKind.RESCHEDULED)), Recording.OUTCOMES)

    # --- what cannot be read ------------------------------------------------------------------------------------

    def free_ones(self, session: MariaDbSession, numbers: Sequence[int]) -> Sequence[tuple[int, Row]]:
        """See :class:`postdate.backends.rowlocks.Tables`."""
        return _numbered(session.rows(self._aside.free_ones, {"numbers": numbers}))

    def set_aside(self, session: MariaDbSession, bad: Mapping[int, str], at: int) -> None:
        """See :class:`postdate.backends.rowlocks.Tables`."""
        for number, reason in bad.items():
            of_row = {"number": number, "at": at, "store": self._store(session)}
            session.change(self._aside.set_aside, {**of_row, "reason": reason})
            ((aside,),) = session.rows("SELECT LAST_INSERT_ID()")
            found = self.lock_aside(session, aside)
            assert found is not None
            self._record_aside(session, found, Ending(at, int(RecordKind.FAILED), f"unreadable: {reason}"))
            session.change(self._aside.remove_one, {"number": number})
            if self._recording is Recording.NONE:
                session.change(self._sql.forget_scheduled, {"numbers": [number]})

    def _record_aside(self, session: MariaDbSession, aside: Aside, note: Ending) -> None:
        if self._recording is Recording.NONE:
            return
        of_message = {"id": aside.row.message_id, "due": readable_due(aside.row), "destination": aside.row.destination}
        session.change(self._aside.record_aside, {**of_message, **self._note(session, note)})

    def set_aside_count(self, session: MariaDbSession) -> int:
        """See :class:`postdate.backends.rowlocks.Tables`."""
        return _only(session.rows(self._aside.set_aside_count, {"store": self._store(session)}))

    def all_aside(self, session: MariaDbSession, limit: int) -> Sequence[Aside]:
        """See :class:`postdate.backends.rowlocks.Tables`."""
        found = session.rows(self._aside.all_aside, {"store": self._store(session), "limit": limit})
        return [_aside(row) for row in found]

    def lock_aside(self, session: MariaDbSession, number: int) -> Aside | None:
        """See :class:`postdate.backends.rowlocks.Tables`."""
        found = session.rows(self._aside.lock_aside, {"store": self._store(session), "number": number})
        return _aside(found[0]) if found else None

    def end_aside(self, session: MariaDbSession, aside: Aside, ending: Ending | None) -> None:
        """See :class:`postdate.backends.rowlocks.Tables`."""
        session.change(self._aside.end_aside, {"number": aside.number})
        if ending is not None:
            self._record_aside(session, aside, ending)

    # --- who is alive -------------------------------------------------------------------------------------------

    def appear(self, session: MariaDbSession) -> int:
        """See :class:`postdate.backends.rowlocks.Tables`.

        The lock comes first: without it the number would be taken for dead.
        """
        lock = self.names.lock(uuid.uuid4().hex)
        session.rows("SELECT GET_LOCK(%(name)s, 0)", {"name": lock})
        session.show_life()
        values = {"store": self._store(session), "lock": lock, "pid": os.getpid(), "machine": platform.node()}
        ((holder,),) = session.rows(self._sql.add_holder, values)
        return holder

    def dead(self, session: MariaDbSession) -> Sequence[int]:
        """See :class:`postdate.backends.rowlocks.Tables`."""
        return [holder for (holder,) in session.rows(self._sql.find_dead, {"store": self._store(session)})]

    def unknown(self, session: MariaDbSession) -> Sequence[int]:
        """See :class:`postdate.backends.rowlocks.Tables`."""
        return [holder for (holder,) in session.rows(self._sql.find_unknown)]

    def bury(self, session: MariaDbSession, holders: Sequence[int]) -> None:
        """See :class:`postdate.backends.rowlocks.Tables`."""
        session.change(self._sql.drop_holders, {"holders": holders})

    # --- looking ------------------------------------------------------------------------------------------------

    def next_attempt(self, session: MariaDbSession, locked: Sequence[int]) -> int | None:
        """See :class:`postdate.backends.rowlocks.Tables`."""
        if locked:
            return _only(session.rows(self._sql.next_attempt_but, {"from": EARLIEST, "locked": locked}))
        return _only(session.rows(self._sql.next_attempt, {"from": EARLIEST}))

    def next_due(self, session: MariaDbSession) -> int | None:
        """See :class:`postdate.backends.rowlocks.Tables`."""
        return _only(session.rows(self._sql.next_due))

    def statistics(self, session: MariaDbSession, at: int) -> tuple[int, int, int, int, int | None]:
        """See :class:`postdate.backends.rowlocks.Tables`; exact as long as what is locked are the oldest."""
        first_attempt = self.next_attempt(session, ())
        from_ = EARLIEST if first_attempt is None else first_attempt - 1
        free = session.rows(self._sql.first_free, {"from": from_, "at": at})
        free_at, free_number = free[0] if free else (None, None)
        values = {"from": from_, "at": at, "free_at": free_at, "free_number": free_number}
        ((pending, overdue, claimed, failing, first),) = session.rows(self._sql.statistics, values)
        return int(pending), max(int(overdue), 0), int(claimed), int(failing), first

    def record_counts(self, session: MariaDbSession) -> Mapping[int, int]:
        """See :class:`postdate.backends.rowlocks.Tables`."""
        return dict(session.rows(self._sql.record_counts, {"store": self._store(session)}))

    def list_pending(
        self, session: MariaDbSession, destination: str | None, due_from: int | None, due_to: int | None, limit: int
    ) -> Sequence[tuple[int, Row]]:
        """See :class:`postdate.backends.rowlocks.Tables`."""
        values = {
            "destination": destination,
            "due_from": EARLIEST if due_from is None else due_from,
            "due_to": due_to,
            "limit": limit,
        }
        return _numbered(session.rows(self._sql.list_pending, values))

    def get(self, session: MariaDbSession, message_id: str) -> Sequence[tuple[int, Row]]:
        """See :class:`postdate.backends.rowlocks.Tables`."""
        return _numbered(session.rows(self._sql.get_one, {"id": message_id, "store": self._store(session)}))

    def history(self, session: MariaDbSession, message_id: str) -> Sequence[tuple[Any, ...]]:
        """See :class:`postdate.backends.rowlocks.Tables`."""
        return session.rows(self._sql.history_of, {"id": message_id, "store": self._store(session)})

    def now(self, session: MariaDbSession) -> int:
        """See :class:`postdate.backends.rowlocks.Tables`."""
        return _only(session.rows(NOW))

    def report_clock(self, session: MariaDbSession, holder: int, ahead: int) -> None:
        """See :class:`postdate.backends.rowlocks.Tables`."""
        session.change(self._sql.report_clock, {"holder": holder, "ahead": ahead})

    def reported_clocks(self, session: MariaDbSession) -> Sequence[tuple[str, int, int]]:
        """See :class:`postdate.backends.rowlocks.Tables`."""
        found = session.rows(self._sql.reported_clocks, {"store": self._store(session)})
        return [(machine, pid, ahead) for machine, pid, ahead in found]

    def facts(self, session: MariaDbSession) -> ServerFacts:
        """See :class:`postdate.backends.rowlocks.Tables`."""
        return server_facts(session, self.names)

    def bounds(self, session: MariaDbSession, what: str) -> tuple[int, int]:
        """See :class:`postdate.backends.rowlocks.Tables`."""
        ((first, end),) = session.rows(self._scans.bounds[what])
        return first, end

    def scan(self, session: MariaDbSession, scan: Scan, part: ScanPart, page: int) -> Iterable[list[tuple[Any, ...]]]:
        """See :class:`postdate.backends.rowlocks.Tables`; one statement, so one snapshot."""
        given = filter_values(scan.where)
        values = {**given, "first": part.first, "end": part.end, "store": self._store(session)}
        return session.pages(self._scans.scanned(scan, given), values, page)


def _numbered(rows: Sequence[tuple[Any, ...]]) -> list[tuple[int, Row]]:
    return [(number, Row(*row)) for number, *row in rows]


def _aside(row: tuple[Any, ...]) -> Aside:
    number, at, reason, *content = row
    return Aside(number, at, reason, Row(*content))


def _only(rows: Sequence[tuple[Any, ...]]) -> Any:
    return rows[0][0] if rows else None


def _statements(values: Sequence[bytes], largest_packet: int) -> Iterable[bytes]:
    """Yield lists of values that fit into one statement each."""
    room = min(_STATEMENT_BYTES, largest_packet - _PACKET_ROOM)
    part, size = list[bytes](), 0
    for value in values:
        if part and size + len(value) > room:
            yield b",".join(part)
            part, size = [], 0
        part.append(value)
        size += len(value) + 1
    if part:
        yield b",".join(part)

"""The steps of one store in SQL, the same for every server with row locks and SKIP LOCKED. Source: ADR 0008.

A dialect is a subclass of :class:`RowLockTables`: its statements as data, and the methods at the end of the class.
"""

from __future__ import annotations

import os
import platform
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from postdate.backends.sql.migrations import current_and_newest_version, setup_command
from postdate.backends.sql.row_locks.names import RowLockNames, read_marks, steps_of
from postdate.backends.sql.row_locks.parts import (
    MarkedRow,
    MessageRow,
    NewRecord,
    PendingRow,
    filter_values,
    readable_due,
)
from postdate.backends.sql.row_locks.statements import EARLIEST, RowLockStatements
from postdate.clock import from_microseconds, nearest_instant
from postdate.errors import StoreNotSetUp, StoreUnreachable
from postdate.messages import text_with_due
from postdate.ports import Recording, RecordKind, Scan, ScanPart, ServerFacts
from postdate.ports.observation import UNREADABLE


class RowLockTables(ABC):
    """The steps of one store. Each step is part of a transaction that the caller begins and ends, and may block.

    Times are whole microseconds since 1970-01-01 UTC. If possible, rows are locked and removed in the order of their
    numbers, so that two processes wait for each other and do not deadlock. For the steps on leases see
    :class:`postdate.backends.sql.row_locks.claims.LeasingTables`.
    """

    product: ClassVar[str]
    """The server's usual name."""
    schema_is: ClassVar[str] = "schema"
    """The server's word for a schema."""

    def __init__(self, names: RowLockNames, sql: RowLockStatements, recording: Recording) -> None:
        self.names, self.sql, self._recording = names, sql, recording
        self._store_id: int | None = None
        self._own_lock = ""

    def store_id(self, session: Any) -> int:
        if self._store_id is None:
            missing = (
                f"{self.schema_is} {self.names.schema!r} has no table {self.names.table!r}; "
                f"{setup_command(self.names.table)}"
            )
            try:
                rows = session.rows(self.sql.find_store, {"name": self.names.table})
            except StoreNotSetUp as error:
                raise StoreNotSetUp(missing) from error
            if not rows:
                raise StoreNotSetUp(missing)
            self._store_id = int(rows[0][0])
        return self._store_id

    # --- storing ------------------------------------------------------------------------------------------------

    def insert(self, session: Any, rows: Sequence[MessageRow], at: int) -> Sequence[str]:
        """Write messages with new ids, and their records; return these ids."""
        numbers = self._insert_records(session, rows, at)
        self._insert_messages(session, [(numbers[row.message_id], row) for row in rows if row.message_id in numbers])
        return list(numbers)

    def revive(self, session: Any, row: MessageRow, note: NewRecord) -> bool:
        """Store a message again under its old number if it is in the error queue; return whether it was stored."""
        of_id = {"id": row.message_id, "store": self.store_id(session)}
        if not (rows := session.rows(self.sql.lock_scheduled, of_id)):
            return False
        number = rows[0][0]
        last = session.rows(self.sql.last_kind, {**of_id, "number": number})
        if not last or last[0][0] not in {RecordKind.FAILED, RecordKind.RETURNED}:
            return False
        self._insert_messages(session, [(number, row)])
        self._record_one(session, number, note)
        return True

    def _record_one(self, session: Any, number: int, note: NewRecord) -> None:
        session.change(self.sql.record_one, {"number": number, **self._record_values(session, note)})

    def _record_values(self, session: Any, note: NewRecord) -> dict[str, Any]:
        return {"store": self.store_id(session), "at": note.at, "kind": note.kind, "detail": note.detail}

    # --- claims -------------------------------------------------------------------------------------------------

    def claim(
        self, session: Any, at: int, limit: int, after: int | None = None
    ) -> Sequence[tuple[int, int, MessageRow]]:
        """Lock the oldest unlocked messages with ``attempt_at`` after ``after`` and before ``at``.

        Return number, ``attempt_at`` and row of each. By default ``after`` is before the earliest attempt.
        """
        after = self._lower_bound(session) if after is None else after
        if after is None or after >= at - 1:
            return []
        rows = session.rows(self.sql.claim, {"from": after, "at": at, "limit": limit})
        return [(number, attempt_at, MessageRow(*row)) for number, attempt_at, *row in rows]

    def finish(self, session: Any, numbers: Sequence[int], holder: int | None, ending: NewRecord) -> int:
        """Remove and record those of ``numbers`` (ascending) that ``holder`` has claimed; return how many."""
        values = {"numbers": self._list_value(numbers), "holder": holder}
        return self._remove_and_record(session, values, self._record_values(session, ending))

    def lease(self, session: Any, numbers: Sequence[int], holder: int) -> None:
        if not session.rows(self.sql.lock_holder, {"holder": holder}):
            raise StoreUnreachable(f"the connection that held messages under number {holder} is gone")
        session.change(self.sql.lease, {"numbers": self._list_value(numbers), "holder": holder})

    def release(self, session: Any, numbers: Sequence[int], holder: int | None, attempt_at: int | None) -> int:
        """Release those of ``numbers`` (ascending) that ``holder`` has claimed; return how many.

        Their next attempt is at ``attempt_at``; ``None``: at their due times.
        """
        values = {"numbers": self._list_value(numbers), "holder": holder, "attempt_at": attempt_at}
        return session.change(self.sql.release, values)

    def retry(self, session: Any, number: int, holder: int | None, attempt_at: int | None, note: NewRecord) -> bool:
        """Count a failure of a message of ``holder`` and release it; return whether it was claimed by ``holder``.

        Its next attempt is at ``attempt_at``; ``None``: at its due time.
        """
        if not session.change(self.sql.retry, {"number": number, "holder": holder, "attempt_at": attempt_at}):
            return False
        if self._recording is Recording.ALL:
            self._record_one(session, number, note)
        return True

    def lock(self, session: Any, message_id: str) -> PendingRow | None:
        """Lock a pending message; ``None`` if there is none, or if another transaction has locked it."""
        rows = session.rows(self.sql.lock, {"id": message_id, "store": self.store_id(session)})
        return PendingRow(*rows[0]) if rows else None

    def reschedule(self, session: Any, waiting: PendingRow, due: int, wall_time: str | None, at: int) -> None:
        """Change the due time of a locked message, also in its headers."""
        ((headers,),) = session.rows(self.sql.headers_of, {"number": waiting.number})
        changed = text_with_due(headers, nearest_instant(waiting.due), nearest_instant(due), wall_time)
        values = {"number": waiting.number, "due": due, "headers": headers if changed is None else changed}
        session.change(self.sql.reschedule, values)
        self._record_one(session, waiting.number, NewRecord(at, int(RecordKind.RESCHEDULED)))

    # --- unreadable rows ----------------------------------------------------------------------------------------

    def lock_unclaimed(self, session: Any, numbers: Sequence[int]) -> Sequence[tuple[int, MessageRow]]:
        """Lock and return those of ``numbers`` (ascending) that are unclaimed."""
        return numbered_rows(session.rows(self.sql.lock_unclaimed, {"numbers": self._list_value(numbers)}))

    def mark_unreadable(self, session: Any, reasons: Mapping[int, str], at: int) -> None:
        """Mark locked rows as unreadable, so that nothing claims them, and record it.

        ``reasons``: reasons by number.
        """
        for number, reason in reasons.items():
            session.change(self.sql.mark_unreadable, {"number": number, "at": at, "reason": reason})
            row = self.lock_unreadable(session, number)
            assert row is not None
            self._record_unreadable(session, row, NewRecord(at, int(RecordKind.FAILED), f"{UNREADABLE}{reason}"))

    def _record_unreadable(self, session: Any, row: MarkedRow, note: NewRecord) -> None:
        content = row.content
        parts = {"id": content.message_id, "due": readable_due(content), "destination": content.destination}
        session.change(self.sql.record_unreadable, {**parts, **self._record_values(session, note)})

    def count_unreadable(self, session: Any) -> int:
        return _first_value(session.rows(self.sql.count_unreadable, {}))

    def list_unreadable(self, session: Any, limit: int) -> Sequence[MarkedRow]:
        return [_marked_row(row) for row in session.rows(self.sql.list_unreadable, {"limit": limit})]

    def lock_unreadable(self, session: Any, number: int) -> MarkedRow | None:
        rows = session.rows(self.sql.lock_unreadable, {"number": number})
        return _marked_row(rows[0]) if rows else None

    def discard_unreadable(self, session: Any, row: MarkedRow, note: NewRecord) -> None:
        """Delete a locked row, with a record."""
        self._record_unreadable(session, row, note)
        session.change(self.sql.remove_one, {"number": row.number})

    # --- heartbeats and holders ---------------------------------------------------------------------------------

    def register_holder(self, session: Any) -> int:
        """Return a new number under which this process may claim messages while ``session`` is open."""
        self._own_lock = self.names.lock_name(uuid.uuid4().hex)
        self._acquire_lock(session, self._own_lock)  # before the INSERT: without the lock the number counts as dead
        values = {
            "store": self.store_id(session),
            "lock": self._own_lock,
            "pid": os.getpid(),
            "machine": platform.node(),
        }
        return _first_value(session.rows(self.sql.add_holder, values))

    def find_dead_holders(self, session: Any) -> Sequence[int]:
        """Return the numbers whose connection is closed."""
        return [holder for (holder,) in session.rows(self.sql.find_dead, self._own_values(session))]

    def find_unknown_holders(self, session: Any) -> Sequence[int]:
        """Return numbers of leases without a registered holder, as after a restore or a manual DELETE."""
        return [holder for (holder,) in session.rows(self.sql.find_unknown, {})]

    def remove_holders(self, session: Any, holders: Sequence[int]) -> None:
        """Delete numbers. It waits for transactions that lease under them, and blocks new ones until its own ends."""
        session.change(self.sql.drop_holders, {"holders": self._list_value(holders)})

    def report_clock(self, session: Any, holder: int, ahead: int) -> None:
        session.change(self.sql.report_clock, {"holder": holder, "ahead": ahead})

    def reported_clocks(self, session: Any) -> Sequence[tuple[str, int, int]]:
        """Return machine, process id and reported clock difference (microseconds ahead) of live holders."""
        return session.rows(self.sql.reported_clocks, self._own_values(session))

    def _own_values(self, session: Any) -> dict[str, Any]:
        return {"store": self.store_id(session), "own": self._own_lock}

    # --- queries ------------------------------------------------------------------------------------------------

    def next_attempt(self, session: Any, locked: Sequence[int]) -> int | None:
        """Return the earliest ``attempt_at`` of messages not in ``locked``, without waiting for a lock."""
        if locked:
            return _first_value(
                session.rows(self.sql.next_attempt_except, {"from": EARLIEST, "locked": self._list_value(locked)})
            )
        return _first_value(session.rows(self.sql.next_attempt, {"from": EARLIEST}))

    def statistics(self, session: Any, at: int) -> tuple[int, int, int, int, int | None, int]:
        """Return the values of :class:`postdate.ports.StoreStatistics`; exact if the locked messages are the oldest."""
        after = self._lower_bound(session)
        bounds = {"from": EARLIEST if after is None else after, "at": at}
        unclaimed = session.rows(self.sql.first_unclaimed, bounds)
        free_at, free_number = unclaimed[0] if unclaimed else (None, None)
        values = {**bounds, "free_at": free_at, "free_number": free_number}
        ((pending, overdue, claimed, failing, first, unreadable),) = session.rows(self.sql.statistics, values)
        return int(pending), max(int(overdue), 0), int(claimed), int(failing), first, int(unreadable)

    def now(self, session: Any) -> int:
        return _first_value(session.rows(self.sql.now, {}))

    def facts(self, session: Any) -> ServerFacts:
        """Return facts about the server; the tables need not exist."""
        version, now, settings = self._server_facts(session)
        try:
            applied_marks = read_marks(session, self.names)
        except StoreNotSetUp:
            applied_marks = list[tuple[Any, ...]]()
        current, newest = current_and_newest_version(steps_of(self.names), applied_marks)
        # Tables of an earlier version lack what later migrations add.
        missing = self._missing_objects(session) if current == newest else ()
        return ServerFacts(self.product, version, from_microseconds(now), current, newest, settings, missing)

    def bounds(self, session: Any, what: str) -> tuple[int, int]:
        """Return the first number of a relation and the one after its last; equal when it is empty."""
        ((first, end),) = session.rows(self.sql.bounds[what], {})
        return first, end

    def scan(self, session: Any, scan: Scan, part: ScanPart, page: int) -> Iterable[list[tuple[Any, ...]]]:
        """Yield pages of a share, read by one statement. The caller has checked the columns."""
        values = filter_values(scan.row_filter)
        lists = {name: self._list_value(values[name]) for name in ("message_ids", "destinations") if name in values}
        parameters = {**values, **lists, "first": part.first, "end": part.end, "store": self.store_id(session)}
        return session.pages(self.sql.scan_statement(scan, values), parameters, page)

    # --- methods of a dialect ------------------------------------------------------------------------------------

    @abstractmethod
    def release_leases(self, session: Any, holders: Sequence[int], numbers: Sequence[int] | None = None) -> int: ...

    @abstractmethod
    def _insert_records(self, session: Any, rows: Sequence[MessageRow], at: int) -> Mapping[str, int]:
        """Write the *scheduled* records of new ids, at ``at`` (microseconds); return the number of each new id."""

    @abstractmethod
    def _insert_messages(self, session: Any, numbered: Sequence[tuple[int, MessageRow]]) -> None: ...

    @abstractmethod
    def _remove_and_record(self, session: Any, values: Mapping[str, Any], note: Mapping[str, Any]) -> int:
        """Remove those of ``numbers`` that ``holder`` has claimed, with a record of each; return how many."""

    @abstractmethod
    def _acquire_lock(self, session: Any, lock: str) -> None:
        """Acquire the server lock of that name for the life of the connection."""

    @abstractmethod
    def _server_facts(self, session: Any) -> tuple[str, int, dict[str, str]]:
        """Return the server's version, its time, and settings that matter to operators."""

    def _missing_objects(self, session: Any) -> Sequence[str]:
        """Return the tables and indexes that are missing although their migrations were applied, in words."""
        return ()

    def _list_value(self, values: Sequence[Any]) -> Any:
        return values

    def _lower_bound(self, session: Any) -> int | None:
        """Return a lower bound for the next attempt, at which a query may begin; ``None`` if no message is pending."""
        return EARLIEST


def numbered_rows(rows: Sequence[tuple[Any, ...]]) -> list[tuple[int, MessageRow]]:
    return [(number, MessageRow(*row)) for number, *row in rows]


def _marked_row(row: tuple[Any, ...]) -> MarkedRow:
    number, at, reason, *content = row
    return MarkedRow(number, at, reason, MessageRow(*content))


def _first_value(rows: Sequence[tuple[Any, ...]]) -> Any:
    return rows[0][0] if rows else None

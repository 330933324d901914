"""What a store does in SQL Server, step by step. The contracts: :class:`postdate.backends.rowlocks.Tables`."""

from __future__ import annotations

import base64
import json
import logging
import os
import platform
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

from postdate.backends.rowlocks import Ending, Row, Waiting
from postdate.backends.rowlocks.parts import Aside, filter_values, headers_retimed, readable_due
from postdate.backends.sqlserver import setup
from postdate.backends.sqlserver.connection import SqlServerSession
from postdate.backends.sqlserver.names import Names
from postdate.backends.sqlserver.statements import (
    EARLIEST,
    NOW,
    AsideStatements,
    LifeStatements,
    ScanStatements,
    Statements,
)
from postdate.clock import from_microseconds
from postdate.errors import StoreNotSetUp, StoreNotWritable, StoreUnavailable, StoreUnreachable
from postdate.persistence.migrations import setup_command, standing
from postdate.ports import Recording, RecordKind, Scan, ScanPart, ServerFacts

log = logging.getLogger("postdate.stores")

_LATEST: Final = 2**63 - 1
HOLDS_AT_MOST: Final = timedelta(seconds=60)
_SPEAK_EVERY_SECONDS: Final = 5.0
_STATEMENT_CHARACTERS: Final = 2 * 1024 * 1024


class SqlServerTables:
    """Every step of one store.

    Args:
        names: of its tables.
        recording: what is recorded.
        holds_at_most: a process that shows no life for so long is ended, where we have the rights.
    """

    def __init__(self, names: Names, recording: Recording, holds_at_most: timedelta = HOLDS_AT_MOST) -> None:
        self.names, self._holds_at_most = names, holds_at_most
        self._spoke_at, self._told = time.monotonic(), set[int]()
        self._recording = recording
        self._store_id: int | None = None
        self._own_lock = ""
        self._sql, self._scans, self._aside = Statements(names), ScanStatements(names), AsideStatements(names)
        self._life = LifeStatements(names)

    @property
    def recording(self) -> Recording:
        """See :class:`postdate.backends.rowlocks.Tables`."""
        return self._recording

    def setup(self, session: SqlServerSession) -> None:
        """See :class:`postdate.backends.rowlocks.Tables`."""
        setup.setup(session, self.names)

    def _store(self, session: SqlServerSession) -> int:
        if self._store_id is None:
            missing = (
                f"schema {self.names.schema!r} has no table {self.names.table!r}; {setup_command(self.names.table)}"
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

    def insert(self, session: SqlServerSession, rows: Sequence[Row], at: int) -> Sequence[str]:
        """See :class:`postdate.backends.rowlocks.Tables`."""
        values = {"at": at, "store": self._store(session)}
        keys = [
            {"position": position, "message_id": row.message_id, "due": row.due, "destination": row.destination}
            for position, row in enumerate(rows)
        ]
        # By id: two writers lock the gaps between ids in one order, and wait for each other instead of deadlocking.
        keys.sort(key=lambda key: str(key["message_id"]))
        numbers = dict[str, int]()
        for part in _json_lists(keys):
            found = session.rows(self._sql.insert_records, {**values, "rows": part})
            numbers |= {message_id: number for number, message_id in found}
        self._insert_messages(session, [(numbers[row.message_id], row) for row in rows if row.message_id in numbers])
        return list(numbers)

    def _insert_messages(self, session: SqlServerSession, numbered: Sequence[tuple[int, Row]]) -> None:
        for part in _json_lists([_content(number, row) for number, row in numbered]):
            session.change(self._sql.insert_messages, {"rows": part})

    def come_back(self, session: SqlServerSession, row: Row, note: Ending) -> bool:
        """See :class:`postdate.backends.rowlocks.Tables`."""
        of_id = {"id": row.message_id, "store": self._store(session)}
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

    def _record_one(self, session: SqlServerSession, number: int, note: Ending, from_level: Recording) -> None:
        """Record what happens to a message that stays, if so much is recorded."""
        if self._recording is Recording.ALL or self._recording is from_level:
            session.change(self._sql.record_one, {"number": number, **self._note(session, note)})

    def _note(self, session: SqlServerSession, note: Ending) -> dict[str, Any]:
        return {"store": self._store(session), "at": note.at, "kind": note.kind, "detail": note.detail}

    # --- claims -------------------------------------------------------------------------------------------------

    def claim(self, session: SqlServerSession, at: int, limit: int) -> Sequence[tuple[int, int, Row]]:
        """See :class:`postdate.backends.rowlocks.Tables`."""
        found = session.rows(self._sql.claim, {"from": EARLIEST, "at": at, "limit": limit})
        return [(number, attempt_at, Row(*row)) for number, attempt_at, *row in found]

    def finish(self, session: SqlServerSession, numbers: Sequence[int], holder: int | None, ending: Ending) -> int:
        """See :class:`postdate.backends.rowlocks.Tables`."""
        values = {"numbers": json.dumps(list(numbers)), "holder": holder}
        if self._recording is not Recording.NONE:
            return session.change(self._sql.finish, {**values, **self._note(session, ending)})
        removed = [number for (number,) in session.rows(self._sql.remove, values)]
        if removed:
            session.change(self._sql.forget_scheduled, {"numbers": json.dumps(removed)})
        return len(removed)

    def lease(self, session: SqlServerSession, numbers: Sequence[int], holder: int) -> None:
        """See :class:`postdate.backends.rowlocks.Tables`."""
        if not session.rows(self._sql.keep_holder, {"holder": holder}):
            raise StoreUnreachable(f"the connection that held messages under number {holder} is gone")
        session.change(self._sql.lease, {"numbers": json.dumps(list(numbers)), "holder": holder})

    def free(self, session: SqlServerSession, holders: Sequence[int], numbers: Sequence[int] | None = None) -> int:
        """See :class:`postdate.backends.rowlocks.Tables`."""
        values = {"holders": json.dumps(list(holders))}
        if numbers is None:
            return session.change(self._sql.free, values)
        return session.change(self._sql.free_some, {**values, "numbers": json.dumps(list(numbers))})

    def release(
        self, session: SqlServerSession, numbers: Sequence[int], holder: int | None, attempt_at: int | None
    ) -> int:
        """See :class:`postdate.backends.rowlocks.Tables`."""
        values = {"numbers": json.dumps(list(numbers)), "holder": holder, "attempt_at": attempt_at}
        return session.change(self._sql.release, values)

    def retry(
        self, session: SqlServerSession, number: int, holder: int | None, attempt_at: int | None, note: Ending
    ) -> bool:
        """See :class:`postdate.backends.rowlocks.Tables`."""
        if not session.change(self._sql.retry, {"number": number, "holder": holder, "attempt_at": attempt_at}):
            return False
        self._record_one(session, number, note, Recording.ALL)
        return True

    def lock(self, session: SqlServerSession, message_id: str) -> Waiting | None:
        """See :class:`postdate.backends.rowlocks.Tables`."""
        found = session.rows(self._sql.lock, {"id": message_id, "store": self._store(session)})
        return Waiting(*found[0]) if found else None

    def reschedule(self, session: SqlServerSession, found: Waiting, due: int, at: int) -> None:
        """See :class:`postdate.backends.rowlocks.Tables`."""
        session.change(self._sql.reschedule, {"number": found.number, "due": due, **headers_retimed(found.due, due)})
        self._record_one(session, found.number, Ending(at, int(RecordKind.RESCHEDULED)), Recording.OUTCOMES)

    # --- what cannot be read ------------------------------------------------------------------------------------

    def free_ones(self, session: SqlServerSession, numbers: Sequence[int]) -> Sequence[tuple[int, Row]]:
        """See :class:`postdate.backends.rowlocks.Tables`."""
        return _numbered(session.rows(self._aside.free_ones, {"numbers": json.dumps(list(numbers))}))

    def set_aside(self, session: SqlServerSession, bad: Mapping[int, str], at: int) -> None:
        """See :class:`postdate.backends.rowlocks.Tables`."""
        for number, reason in bad.items():
            values = {"number": number, "at": at, "store": self._store(session), "reason": reason}
            ((aside,),) = session.rows(self._aside.set_aside, values)
            found = self.lock_aside(session, aside)
            assert found is not None
            self._record_aside(session, found, Ending(at, int(RecordKind.FAILED), f"unreadable: {reason}"))
            session.change(self._aside.remove_one, {"number": number})
            if self._recording is Recording.NONE:
                session.change(self._sql.forget_scheduled, {"numbers": json.dumps([number])})

    def _record_aside(self, session: SqlServerSession, aside: Aside, note: Ending) -> None:
        if self._recording is Recording.NONE:
            return
        of_message = {"id": aside.row.message_id, "due": readable_due(aside.row), "destination": aside.row.destination}
        session.change(self._aside.record_aside, {**of_message, **self._note(session, note)})

    def set_aside_count(self, session: SqlServerSession) -> int:
        """See :class:`postdate.backends.rowlocks.Tables`."""
        return _only(session.rows(self._aside.set_aside_count, {"store": self._store(session)}))

    def all_aside(self, session: SqlServerSession, limit: int) -> Sequence[Aside]:
        """See :class:`postdate.backends.rowlocks.Tables`."""
        found = session.rows(self._aside.all_aside, {"store": self._store(session), "limit": limit})
        return [_aside(row) for row in found]

    def lock_aside(self, session: SqlServerSession, number: int) -> Aside | None:
        """See :class:`postdate.backends.rowlocks.Tables`."""
        found = session.rows(self._aside.lock_aside, {"store": self._store(session), "number": number})
        return _aside(found[0]) if found else None

    def end_aside(self, session: SqlServerSession, aside: Aside, ending: Ending | None) -> None:
        """See :class:`postdate.backends.rowlocks.Tables`."""
        session.change(self._aside.end_aside, {"number": aside.number})
        if ending is not None:
            self._record_aside(session, aside, ending)

    # --- who is alive -------------------------------------------------------------------------------------------

    def appear(self, session: SqlServerSession) -> int:
        """See :class:`postdate.backends.rowlocks.Tables`.

        The lock comes first: without it the number would be taken for dead.
        """
        self._own_lock = self.names.lock(uuid.uuid4().hex)
        ((granted,),) = session.rows(self._life.take_lock, {"name": self._own_lock})
        if granted < 0:
            raise StoreUnavailable(f"SQL Server did not grant the application lock {self._own_lock!r} ({granted})")
        values = {"store": self._store(session), "lock": self._own_lock, "pid": os.getpid(), "machine": platform.node()}
        ((holder,),) = session.rows(self._life.add_holder, values)
        return holder

    def dead(self, session: SqlServerSession) -> Sequence[int]:
        """See :class:`postdate.backends.rowlocks.Tables`.

        Those that show no life any more are ended first, where we may.
        """
        values = {"store": self._store(session), "own": self._own_lock}
        if time.monotonic() - self._spoke_at >= _SPEAK_EVERY_SECONDS:
            self._spoke_at = time.monotonic()
            session.change(self._life.show_life, {"own": self._own_lock})
            self._end_silent(session, values)
        return [holder for (holder,) in session.rows(self._life.find_dead, values)]

    def _end_silent(self, session: SqlServerSession, values: Mapping[str, Any]) -> None:
        """End the connections of frozen processes: the server never does so by itself.

        That takes the rights to see them and to end them. Without, it is said once that such a process is there.
        """
        silence = int(self._holds_at_most.total_seconds())
        for holder, pid, machine in session.rows(self._life.find_silent, {**values, "silence": silence * 1_000_000}):
            of_process = {"pid": pid, "machine": machine, "seconds": silence}
            try:
                found = session.rows(self._life.find_silent_sessions, of_process)
                for (number,) in found:
                    session.change(f"KILL {int(number)}")
            except StoreNotWritable:
                found = []
            if not found and holder not in self._told:
                log.warning(
                    "process %d on %s has shown no life for %d s and keeps what it holds; others may end its "
                    "connections with the rights VIEW SERVER STATE and ALTER ANY CONNECTION",
                    pid,
                    machine,
                    silence,
                )
                self._told.add(holder)

    def unknown(self, session: SqlServerSession) -> Sequence[int]:
        """See :class:`postdate.backends.rowlocks.Tables`."""
        return [holder for (holder,) in session.rows(self._life.find_unknown, {})]

    def bury(self, session: SqlServerSession, holders: Sequence[int]) -> None:
        """See :class:`postdate.backends.rowlocks.Tables`."""
        session.change(self._life.drop_holders, {"holders": json.dumps(list(holders))})

    # --- looking ------------------------------------------------------------------------------------------------

    def next_attempt(self, session: SqlServerSession, locked: Sequence[int]) -> int | None:
        """See :class:`postdate.backends.rowlocks.Tables`."""
        if locked:
            values = {"from": EARLIEST, "locked": json.dumps(list(locked))}
            return _only(session.rows(self._sql.next_attempt_but, values))
        return _only(session.rows(self._sql.next_attempt, {"from": EARLIEST}))

    def next_due(self, session: SqlServerSession) -> int | None:
        """See :class:`postdate.backends.rowlocks.Tables`."""
        return _only(session.rows(self._sql.next_due, {}))

    def statistics(self, session: SqlServerSession, at: int) -> tuple[int, int, int, int, int | None]:
        """See :class:`postdate.backends.rowlocks.Tables`; exact as long as what is locked are the oldest."""
        free = session.rows(self._sql.first_free, {"from": EARLIEST, "at": at})
        free_at, free_number = free[0] if free else (None, None)
        values = {"from": EARLIEST, "at": at, "free_at": free_at, "free_number": free_number}
        ((pending, overdue, claimed, failing, first),) = session.rows(self._sql.statistics, values)
        return pending, max(overdue, 0), claimed, failing, first

    def record_counts(self, session: SqlServerSession) -> Mapping[int, int]:
        """See :class:`postdate.backends.rowlocks.Tables`."""
        found = session.rows(self._sql.record_counts, {"store": self._store(session)})
        return {kind: count for kind, count in found}  # noqa: C416 - typed

    def list_pending(
        self, session: SqlServerSession, destination: str | None, due_from: int | None, due_to: int | None, limit: int
    ) -> Sequence[tuple[int, Row]]:
        """See :class:`postdate.backends.rowlocks.Tables`."""
        values = {
            "destination": destination,
            "due_from": EARLIEST if due_from is None else due_from,
            "due_to": _LATEST if due_to is None else due_to,
            "limit": limit,
        }
        return _numbered(session.rows(self._sql.list_pending, values))

    def get(self, session: SqlServerSession, message_id: str) -> Sequence[tuple[int, Row]]:
        """See :class:`postdate.backends.rowlocks.Tables`."""
        return _numbered(session.rows(self._sql.get, {"id": message_id, "store": self._store(session)}))

    def history(self, session: SqlServerSession, message_id: str) -> Sequence[tuple[Any, ...]]:
        """See :class:`postdate.backends.rowlocks.Tables`."""
        return session.rows(self._sql.history, {"id": message_id, "store": self._store(session)})

    def now(self, session: SqlServerSession) -> int:
        """See :class:`postdate.backends.rowlocks.Tables`."""
        return _only(session.rows(NOW))

    def report_clock(self, session: SqlServerSession, holder: int, ahead: int) -> None:
        """See :class:`postdate.backends.rowlocks.Tables`."""
        session.change(self._life.report_clock, {"holder": holder, "ahead": ahead})

    def reported_clocks(self, session: SqlServerSession) -> Sequence[tuple[str, int, int]]:
        """See :class:`postdate.backends.rowlocks.Tables`."""
        found = session.rows(self._life.reported_clocks, {"store": self._store(session), "own": self._own_lock})
        return [(machine, pid, ahead) for machine, pid, ahead in found]

    def facts(self, session: SqlServerSession) -> ServerFacts:
        """See :class:`postdate.backends.rowlocks.Tables`."""
        ((version, now, durability),) = session.rows(self._sql.facts)
        settings = {"delayed_durability": str(durability), "isolation": "READ-COMMITTED"}
        try:
            done = setup.marks(session, self.names)
        except StoreNotSetUp:
            done = list[tuple[Any, ...]]()
        there, newest = standing(setup.steps(self.names), done)
        return ServerFacts("SQL Server", version, from_microseconds(now), there, newest, settings)

    def bounds(self, session: SqlServerSession, what: str) -> tuple[int, int]:
        """See :class:`postdate.backends.rowlocks.Tables`."""
        ((first, end),) = session.rows(self._scans.bounds[what], {})
        return first, end

    def scan(self, session: SqlServerSession, scan: Scan, part: ScanPart, page: int) -> Iterable[list[tuple[Any, ...]]]:
        """See :class:`postdate.backends.rowlocks.Tables`.

        It reads one snapshot if the database allows it (ALLOW_SNAPSHOT_ISOLATION).
        """
        given = filter_values(scan.where)
        lists = {name: json.dumps(value) for name, value in given.items() if isinstance(value, tuple)}
        values = {**given, **lists, "first": part.first, "end": part.end, "store": self._store(session)}
        if _only(session.rows(self._sql.snapshots)) == 1:
            session.change("SET TRANSACTION ISOLATION LEVEL SNAPSHOT")
        return session.pages(self._scans.scanned(scan, given), values, page)


def _numbered(rows: Sequence[tuple[Any, ...]]) -> list[tuple[int, Row]]:
    return [(number, Row(*row)) for number, *row in rows]


def _aside(row: tuple[Any, ...]) -> Aside:
    number, at, reason, *content = row
    return Aside(number, at, reason, Row(*content))


def _only(rows: Sequence[tuple[Any, ...]]) -> Any:
    return rows[0][0] if rows else None


def _content(number: int, row: Row) -> dict[str, Any]:
    return {
        "number": number,
        "due": row.due,
        "expires_at": row.expires_at,
        "failures": row.failures,
        "message_id": row.message_id,
        "destination": row.destination,
        "headers": row.headers,
        "body": base64.b64encode(row.body).decode(),  # how OPENJSON takes varbinary
    }


def _json_lists(rows: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    """Yield lists of rows that are not too long for one statement each."""
    part, size = list[str](), 0
    for row in rows:
        text = json.dumps(row, ensure_ascii=False)
        if part and size + len(text) > _STATEMENT_CHARACTERS:
            yield f"[{','.join(part)}]"
            part, size = [], 0
        part.append(text)
        size += len(text)
    if part:
        yield f"[{','.join(part)}]"

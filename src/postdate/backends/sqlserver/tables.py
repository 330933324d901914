"""The steps of a store that differ in SQL Server; see :mod:`postdate.backends.sql.row_locks.tables`."""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

from typing_extensions import override

from postdate.backends.sql.row_locks.database import HOLDS_AT_MOST
from postdate.backends.sql.row_locks.parts import MessageRow, split_texts
from postdate.backends.sql.row_locks.tables import RowLockTables
from postdate.backends.sqlserver.schema import SqlServerNames
from postdate.backends.sqlserver.statements import SqlServerStatements
from postdate.clock import steady_seconds
from postdate.errors import StoreNotWritable, StoreUnavailable
from postdate.ports import Recording, Scan, ScanPart

log = logging.getLogger("postdate.stores")

_HEARTBEAT_INTERVAL_SECONDS: Final = 5.0
_STATEMENT_CHARACTERS: Final = 2 * 1024 * 1024  # of one statement's JSON, unless a single row is longer


class SqlServerTables(RowLockTables):
    """The steps of one store.

    ``holds_at_most``: the connections of a process that sends no heartbeat for this long are ended, with the rights for
    it.
    """

    product = "SQL Server"

    def __init__(self, names: SqlServerNames, recording: Recording, holds_at_most: timedelta = HOLDS_AT_MOST) -> None:
        self._sqlserver = SqlServerStatements(names)
        super().__init__(names, self._sqlserver, recording)
        self._holds_at_most = holds_at_most
        self._heartbeat_at, self._logged_holders = steady_seconds(), set[int]()

    def _list_value(self, values: Sequence[Any]) -> str:
        return json.dumps(list(values))

    def _insert_records(self, session: Any, rows: Sequence[MessageRow], at: int) -> Mapping[str, int]:
        values = {"at": at, "store": self.store_id(session)}
        keys = [
            {"position": position, "message_id": row.message_id, "due": row.due, "destination": row.destination}
            for position, row in enumerate(rows)
        ]
        # Sorted by id: two writers then lock the gaps between ids in one order, and wait for each other instead of
        # deadlocking. Numbers follow ``position``, that is ``rows``, within one statement.
        keys.sort(key=lambda key: str(key["message_id"]))
        numbers = dict[str, int]()
        for part in _json_lists(keys):
            inserted = session.rows(self.sql.insert_records, {**values, "rows": part})
            numbers |= {message_id: number for number, message_id in inserted}
        return numbers

    def _insert_messages(self, session: Any, numbered: Sequence[tuple[int, MessageRow]]) -> None:
        for part in _json_lists([_content(number, row) for number, row in numbered]):
            session.change(self.sql.insert_messages, {"rows": part})

    def _remove_and_record(self, session: Any, values: Mapping[str, Any], note: Mapping[str, Any]) -> int:
        return session.change(self._sqlserver.finish, {**values, **note})

    @override
    def release_leases(self, session: Any, holders: Sequence[int], numbers: Sequence[int] | None = None) -> int:
        values = {"holders": self._list_value(holders)}
        if numbers is None:
            return session.change(self._sqlserver.release_leases, values)
        return session.change(self._sqlserver.release_some_leases, {**values, "numbers": self._list_value(numbers)})

    def _acquire_lock(self, session: Any, lock: str) -> None:
        ((granted,),) = session.rows(self._sqlserver.acquire_lock, {"name": lock})
        if granted < 0:
            raise StoreUnavailable(f"SQL Server did not grant the application lock {lock!r} ({granted})")

    @override
    def find_dead_holders(self, session: Any) -> Sequence[int]:
        """Return the numbers of dead processes; end silent processes first, with the rights for it."""
        if steady_seconds() - self._heartbeat_at >= _HEARTBEAT_INTERVAL_SECONDS:
            self._heartbeat_at = steady_seconds()
            session.change(self._sqlserver.write_heartbeat, {"own": self._own_lock})
            self._kill_silent(session)
        return super().find_dead_holders(session)

    def _kill_silent(self, session: Any) -> None:
        """End the connections of frozen processes, because the server never does so by itself.

        Without the rights to see and to end them, the presence of such a process is logged once.
        """
        silence = int(self._holds_at_most.total_seconds())
        values = {**self._own_values(session), "silence": silence * 1_000_000}
        for holder, pid, machine in session.rows(self._sqlserver.find_silent, values):
            of_process = {"pid": pid, "machine": machine, "seconds": silence}
            try:
                sessions = session.rows(self._sqlserver.find_silent_sessions, of_process)
                for (number,) in sessions:
                    session.change(f"KILL {int(number)}")
            except StoreNotWritable:
                sessions = []
            if not sessions and holder not in self._logged_holders:
                log.warning(
                    "process %d on %s has sent no heartbeat for %d s and keeps what it holds; others may end its "
                    "connections with the rights VIEW SERVER STATE and ALTER ANY CONNECTION",
                    pid,
                    machine,
                    silence,
                )
                self._logged_holders.add(holder)

    def _server_facts(self, session: Any) -> tuple[str, int, dict[str, str]]:
        ((version, now, durability, writes),) = session.rows(self._sqlserver.facts)
        settings = {"delayed_durability": str(durability), "isolation": "READ-COMMITTED", "updateability": str(writes)}
        return version, now, settings

    @override
    def scan(self, session: Any, scan: Scan, part: ScanPart, page: int) -> Iterable[list[tuple[Any, ...]]]:
        """Yield pages of a share; they come from one snapshot if the database allows it (ALLOW_SNAPSHOT_ISOLATION)."""
        pages = super().scan(session, scan, part, page)
        if session.rows(self._sqlserver.snapshots) == [(1,)]:
            session.change("SET TRANSACTION ISOLATION LEVEL SNAPSHOT")
        return pages


def _content(number: int, row: MessageRow) -> dict[str, Any]:
    body = base64.b64encode(row.body).decode()  # OPENJSON reads varbinary in this form.
    return {"number": number, **row._asdict(), "body": body}


def _json_lists(rows: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    texts = (json.dumps(row, ensure_ascii=False) for row in rows)
    return (f"[{','.join(part)}]" for part in split_texts(texts, _STATEMENT_CHARACTERS))

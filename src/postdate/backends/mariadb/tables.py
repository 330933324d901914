"""The steps of a store that differ in MariaDB; for the others see :mod:`postdate.backends.sql.row_locks.tables`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

from typing_extensions import override

from postdate.backends.mariadb.connection import LockedTooLong, larger_than_packet_error, literal, max_statement_bytes
from postdate.backends.mariadb.objects import find_missing_objects
from postdate.backends.mariadb.schema import MariaDbNames
from postdate.backends.mariadb.statements import MariaDbStatements
from postdate.backends.sql.row_locks.parts import MessageRow, NewRecord, PendingRow, split_texts
from postdate.backends.sql.row_locks.tables import RowLockTables
from postdate.errors import StoreNotWritable
from postdate.ports import OldSnapshot, Recording, RecordKind

STATEMENT_BYTES: Final = 1024 * 1024
"""The longest statement, unless a single row is longer: larger statements are not faster."""
ROWS_AT_ONCE: Final = 2_000
"""The most numbers or records in one statement: well below what servers accept in a packet."""
_SETTINGS: Final = ("innodb_flush_log_at_trx_commit", "sync_binlog", "log_bin", "max_allowed_packet", "read_only")
_OLD_SECONDS: Final = 60  # younger snapshots are normal
# A transaction at READ COMMITTED has a new snapshot for each statement, so it does not keep old row versions.
_OLD_SNAPSHOTS: Final = (
    "SELECT t.trx_mysql_thread_id, p.user, TIMESTAMPDIFF(SECOND, t.trx_started, SYSDATE()), "
    "COALESCE(t.trx_operation_state, p.command) FROM information_schema.innodb_trx AS t "
    "LEFT JOIN information_schema.processlist AS p ON p.id = t.trx_mysql_thread_id "
    "WHERE t.trx_isolation_level IN ('REPEATABLE READ', 'SERIALIZABLE') "
    "AND t.trx_started <= SYSDATE() - INTERVAL %(old)s SECOND ORDER BY t.trx_started"
)


class MariaDbTables(RowLockTables):
    product = "MariaDB"
    schema_is = "database"

    def __init__(self, names: MariaDbNames, recording: Recording) -> None:
        self._mariadb = MariaDbStatements(names)
        self._records, self._messages = map(
            _split_at_rows, (self._mariadb.insert_records, self._mariadb.insert_messages)
        )
        super().__init__(names, self._mariadb, recording)

    def newest(self, session: Any, first: str, last: str) -> tuple[str, int, bool]:
        """Return the last id between two, when it was stored, and whether it is pending and unclaimed.

        The id is empty if there is none. The time is in microseconds since 1970 UTC.
        """
        rows = session.rows(self._mariadb.newest, {"first": first, "last": last, "store": self.store_id(session)})
        return rows[0] if rows else ("", 0, False)

    def store_key(self, session: Any, message_id: str) -> None:
        session.change(self._mariadb.store_key, {"id": message_id, "store": self.store_id(session)})

    def replace(self, session: Any, pending_row: PendingRow, row: MessageRow, at: int) -> None:
        """Replace a locked message by another one."""
        session.change(self._mariadb.replace, {**row._asdict(), "number": pending_row.number})
        self._record_one(session, pending_row.number, NewRecord(at, int(RecordKind.RESCHEDULED), "replaced"))

    def _insert_records(self, session: Any, rows: Sequence[MessageRow], at: int) -> Mapping[str, int]:
        store = self.store_id(session)
        records = [
            b"(%d,%d,%d,1,1,%b,%b)" % (at, row.due, store, literal(row.message_id), literal(row.destination))
            for row in rows
        ]
        numbers, (prefix, suffix) = dict[str, int](), self._records
        for part in split_texts(records, _part_bytes(session)):
            numbers |= {message_id: number for number, message_id in session.rows(prefix + b",".join(part) + suffix)}
        return numbers

    def _insert_messages(self, session: Any, numbered: Sequence[tuple[int, MessageRow]]) -> None:
        values = [b"(%d,%d,%b)" % (number, row.due, b",".join(map(literal, row))) for number, row in numbered]
        limit = max_statement_bytes(session)
        for (_, row), text in zip(numbered, values, strict=True):
            size = len(row.headers) + len(row.body)
            if size > limit // 4 and (size := len(text)) > limit:
                raise larger_than_packet_error(f"message {row.message_id!r}", size, limit)
        prefix, suffix = self._messages
        for part in split_texts(values, _part_bytes(session)):
            session.change(prefix + b",".join(part) + suffix)

    def _lower_bound(self, session: Any) -> int | None:
        """Return the first attempt, found by a read without locks.

        While a session has an old snapshot, delivered rows stay in the index, and a locking read takes forty times as
        long to skip them (ADR 0008).
        """
        first = self.next_attempt(session, ())
        return None if first is None else first - 1

    def _remove_and_record(self, session: Any, values: Mapping[str, Any], note: Mapping[str, Any]) -> int:
        session.change(self._mariadb.record_claimed, {**values, **note})
        return session.change(self._mariadb.delete_claimed, values)

    @override
    def release_leases(self, session: Any, holders: Sequence[int], numbers: Sequence[int] | None = None) -> int:
        """Release messages, at most :data:`ROWS_AT_ONCE` in a statement."""
        if numbers is None:
            numbers = [number for (number,) in session.rows(self._mariadb.find_leased, {"holders": holders})]
        parts = split_numbers(numbers)
        return sum(
            session.change(self._mariadb.release_leases, {"numbers": part, "holders": holders}) for part in parts
        )

    @override
    def lock(self, session: Any, message_id: str) -> PendingRow | None:
        """Lock a pending message. It waits up to a second, as a query may lock a row for a moment."""
        rows = session.rows(self._mariadb.find, {"id": message_id, "store": self.store_id(session)})
        if not rows:
            return None
        try:
            locked_rows = session.rows(self._mariadb.lock, {"number": rows[0][0]})
        except LockedTooLong:
            return None
        return PendingRow(*locked_rows[0]) if locked_rows else None

    def _acquire_lock(self, session: Any, lock: str) -> None:
        session.rows("SELECT GET_LOCK(%(name)s, 0)", {"name": lock})
        session.limit_silence()

    def _server_facts(self, session: Any) -> tuple[str, int, dict[str, str]]:
        variables = ", ".join(f"@@{name}" for name in _SETTINGS)
        ((version, isolation, *values),) = session.rows(f"SELECT VERSION(), @@tx_isolation, {variables}")
        settings = {"isolation": isolation, **dict(zip(_SETTINGS, map(str, values), strict=True))}
        return version, self.now(session), settings

    @override
    def _missing_objects(self, session: Any) -> Sequence[str]:
        tables, indexes = find_missing_objects(session, self.names)
        return [*(f"the table {name!r}" for name in tables), *map(str, indexes)]


def old_snapshots(session: Any) -> Sequence[OldSnapshot]:
    """Return the transactions that prevent the purge of old rows, oldest first; none without the right ``PROCESS``."""
    try:
        rows = session.rows(_OLD_SNAPSHOTS, {"old": _OLD_SECONDS})
    except StoreNotWritable:
        return []
    return [
        OldSnapshot(thread, "", user or "", timedelta(seconds=int(age)), state or "")
        for thread, user, age, state in rows
    ]


def _split_at_rows(template: str) -> tuple[bytes, bytes]:
    """Split an INSERT before and after the rows, which are inserted as literals."""
    prefix, _, suffix = template.rpartition("%(rows)s")
    return prefix.replace("%%", "%").encode(), suffix.replace("%%", "%").encode()


def split_numbers(numbers: Sequence[int]) -> list[Sequence[int]]:
    """Return numbers in parts, each for one statement."""
    return [numbers[start : start + ROWS_AT_ONCE] for start in range(0, len(numbers), ROWS_AT_ONCE)]


def _part_bytes(session: Any) -> int:
    return min(STATEMENT_BYTES, max_statement_bytes(session))

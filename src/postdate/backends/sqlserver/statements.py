"""The SQL of a store in SQL Server, with its names filled in. Parameters are those of pytds. Source: ADR 0008.

Lists travel as JSON: a statement takes no more than 2,100 parameters. A name stands for ``NULL`` in the text when its
value is ``None``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from postdate.backends.sqlserver.names import Names
from postdate.ports import Scan

EARLIEST: Final = -(2**63) + 1
"""Before every time; a bound that also leaves out NULL."""

_ROW: Final = "p.message_id, p.due, p.destination, p.expires_at, p.failures, p.headers, p.body"
_MICROSECONDS_NOW: Final = "DATEDIFF_BIG(microsecond, CAST('19700101' AS datetime2), SYSUTCDATETIME())"
_LOCKED: Final = "UPDLOCK, ROWLOCK, READCOMMITTEDLOCK"
"""READCOMMITTEDLOCK: with row versions switched on in the database, READPAST is refused without it."""

_TEXT: Final = "CAST(j.[value] AS nvarchar(500)) COLLATE Latin1_General_BIN2"
"""One of a list that travels as JSON."""

_ID: Final = "CAST(%(id)s AS nvarchar(500)) COLLATE Latin1_General_BIN2"


def _numbers(name: str) -> str:
    return f"(SELECT CAST(j.[value] AS bigint) FROM OPENJSON(%({name})s) AS j)"


def _texts(name: str, column: str) -> str:
    """Return the condition that a column is one of a list; spaces at the end, which ``=`` does not see, count."""
    return (
        f"EXISTS (SELECT 1 FROM OPENJSON(%({name})s) AS j "
        f"WHERE {column} = {_TEXT} AND DATALENGTH({column}) = DATALENGTH({_TEXT}))"
    )


NOW: Final = f"SELECT {_MICROSECONDS_NOW}"
"""The time of the server."""


class Statements:
    """Every statement of one store.

    Args:
        names: of its tables.
    """

    def __init__(self, names: Names) -> None:
        pending, record, store, holder = names.pending, names.of("record"), names.of("store"), names.of("holder")
        of_id = f"message_id = {_ID} AND message_id_bytes = DATALENGTH({_ID}) AND store_id = %(store)s"
        into_record = f"{record} (at, due, store_id, kind, message_id, destination, detail)"
        # FORCESEEK: a small table would be read from its beginning to its end, through rows that others have locked;
        # and statistics made while it was small must not turn a change of some rows into a scan of millions later.
        by_number = f"FROM {pending} AS p WITH (FORCESEEK, ROWLOCK)"
        is_holder = "(p.holder = %(holder)s OR (p.holder IS NULL AND %(holder)s IS NULL))"
        held = f"{by_number} WHERE p.number IN {_numbers('numbers')} AND {is_holder}"
        attempt = f"{pending} AS p WITH (INDEX ([attempt]))"
        due_first = "p.attempt_at > %(from)s AND p.attempt_at < %(at)s ORDER BY p.attempt_at, p.number"
        claimable = f"{pending} AS p WITH (INDEX ([attempt]), READPAST, {_LOCKED})"

        self.find_store = f"SELECT store_id FROM {store} WHERE name = %(name)s"
        self.insert_records = (
            f"INSERT INTO {record} (at, due, store_id, kind, message_id, destination) "
            f"OUTPUT inserted.number, inserted.message_id "
            f"SELECT %(at)s, i.due, %(store)s, 1, i.message_id, i.destination FROM OPENJSON(%(rows)s) WITH "
            f"(position int '$.position', message_id nvarchar(500) '$.message_id', due bigint '$.due', "
            f"destination nvarchar(400) '$.destination') AS i WHERE NOT EXISTS ("
            f"SELECT 1 FROM {record} AS r WITH (UPDLOCK, HOLDLOCK) "
            f"WHERE r.message_id = i.message_id COLLATE Latin1_General_BIN2 "
            f"AND r.message_id_bytes = DATALENGTH(i.message_id) AND r.store_id = %(store)s AND r.kind = 1) "
            f"ORDER BY i.position"
        )
        self.insert_messages = (
            f"INSERT INTO {pending} "
            f"(number, due, attempt_at, expires_at, failures, message_id, destination, headers, body) SELECT "
            f"i.number, i.due, i.due, i.expires_at, i.failures, i.message_id, i.destination, i.headers, i.body "
            f"FROM OPENJSON(%(rows)s) WITH (number bigint '$.number', due bigint '$.due', "
            f"expires_at bigint '$.expires_at', failures int '$.failures', message_id nvarchar(500) '$.message_id', "
            f"destination nvarchar(400) '$.destination', headers nvarchar(max) '$.headers', "
            f"body varbinary(max) '$.body') AS i"
        )
        self.lock_scheduled = f"SELECT number FROM {record} WITH ({_LOCKED}) WHERE {of_id} AND kind = 1"
        self.last_kind = (
            f"SELECT TOP (1) kind FROM {record} WHERE {of_id} AND NOT EXISTS "
            f"(SELECT 1 FROM {pending} WHERE number = %(number)s) ORDER BY number DESC"
        )

        self.claim = f"SELECT TOP (%(limit)s) p.number, p.attempt_at, {_ROW} FROM {claimable} WHERE {due_first}"
        self.finish = (
            f"DELETE p OUTPUT %(at)s, deleted.due, %(store)s, %(kind)s, deleted.message_id, "
            f"deleted.destination, %(detail)s INTO {into_record} {held}"
        )
        self.remove = f"DELETE p OUTPUT deleted.number {held}"
        self.forget_scheduled = (
            f"DELETE r FROM {record} AS r WITH (FORCESEEK, ROWLOCK) WHERE r.number IN {_numbers('numbers')}"
        )
        self.lease = (
            f"UPDATE p SET holder = %(holder)s, attempt_at = NULL {by_number} WHERE p.number IN {_numbers('numbers')}"
        )
        leased = f"p.attempt_at IS NULL AND p.holder IN {_numbers('holders')}"
        free = "UPDATE p SET holder = NULL, attempt_at = p.due"
        self.free = f"{free} FROM {pending} AS p WITH (FORCESEEK ([attempt] ([attempt_at])), ROWLOCK) WHERE {leased}"
        self.free_some = f"{free} {by_number} WHERE {leased} AND p.number IN {_numbers('numbers')}"
        given_back = "holder = NULL, attempt_at = COALESCE(CAST(%(attempt_at)s AS bigint), p.due)"
        self.retry = (
            f"UPDATE p SET failures = p.failures + 1, {given_back} {by_number} "
            f"WHERE p.number = %(number)s AND {is_holder}"
        )
        self.release = f"UPDATE p SET {given_back} {held}"
        self.record_one = (
            f"INSERT INTO {into_record} SELECT %(at)s, due, %(store)s, %(kind)s, message_id, destination, %(detail)s "
            f"FROM {pending} WHERE number = %(number)s"
        )
        known = f"(SELECT number FROM {record} WHERE {of_id} AND kind = 1)"
        self.lock = (
            f"SELECT p.number, p.due, p.attempt_at, p.expires_at, p.holder "
            f"FROM {pending} AS p WITH (READPAST, {_LOCKED}) WHERE p.number = {known}"
        )
        self.reschedule = (
            f"UPDATE p SET due = %(due)s, attempt_at = %(due)s, headers = REPLACE(headers, %(was)s, %(is)s) "
            f"{by_number} WHERE p.number = %(number)s"
        )

        after = f"SELECT TOP (1) p.attempt_at FROM {attempt} WHERE p.attempt_at > %(from)s"
        self.next_attempt = f"{after} ORDER BY p.attempt_at"
        # In a table with a key: as a condition, thousands of numbers would be parsed anew for each row that is passed.
        self.next_attempt_but = (
            f"DECLARE @locked TABLE (number bigint NOT NULL PRIMARY KEY); "
            f"INSERT INTO @locked (number) SELECT CAST(j.[value] AS bigint) FROM OPENJSON(%(locked)s) AS j; "
            f"{after} AND NOT EXISTS (SELECT 1 FROM @locked AS l WHERE l.number = p.number) ORDER BY p.attempt_at"
        )
        self.next_due = f"SELECT TOP (1) due FROM {pending} WITH (INDEX ([due])) ORDER BY due"
        # What is locked are the oldest, up to the first that can be locked: that one is touched, and no other.
        self.first_free = f"SELECT TOP (1) p.attempt_at, p.number FROM {claimable} WHERE {due_first}"
        self.statistics = (
            f"SELECT c.pending, c.overdue - h.overdue - x.locked, h.held + x.locked, c.failing, c.first FROM "
            f"(SELECT COUNT(*) AS pending, COALESCE(SUM(CASE WHEN due < %(at)s THEN 1 ELSE 0 END), 0) AS overdue, "
            f"COALESCE(SUM(CASE WHEN failures > 0 THEN 1 ELSE 0 END), 0) AS failing, MIN(due) AS first "
            f"FROM {pending} WITH (INDEX ([due]))) AS c CROSS JOIN "
            f"(SELECT COUNT(*) AS held, COALESCE(SUM(CASE WHEN p.due < %(at)s THEN 1 ELSE 0 END), 0) AS overdue "
            f"FROM {attempt} WHERE p.attempt_at IS NULL) AS h CROSS JOIN "
            f"(SELECT COUNT(*) AS locked FROM {attempt} WHERE p.attempt_at > %(from)s AND p.attempt_at < %(at)s "
            f"AND (%(free_number)s IS NULL OR p.attempt_at < %(free_at)s "
            f"OR (p.attempt_at = %(free_at)s AND p.number < %(free_number)s))) AS x"
        )
        self.record_counts = (
            f"SELECT kind, COUNT(*) FROM {record} WHERE store_id = %(store)s GROUP BY kind ORDER BY kind"
        )
        destination = "CAST(%(destination)s AS nvarchar(400))"
        self.list_pending = (
            f"SELECT TOP (%(limit)s) p.number, {_ROW} FROM {pending} AS p WITH (INDEX ([due])) "
            f"WHERE p.due >= %(due_from)s AND p.due < %(due_to)s AND (%(destination)s IS NULL OR "
            f"(p.destination = {destination} AND DATALENGTH(p.destination) = DATALENGTH({destination}))) "
            f"ORDER BY p.due, p.number"
        )
        self.get = f"SELECT p.number, {_ROW} FROM {pending} AS p WHERE p.number = {known}"
        self.history = (
            f"SELECT kind, message_id, at, due, destination, detail FROM {record} WHERE {of_id} ORDER BY number"
        )

        # REPEATABLEREAD: a shared lock until the transaction ends, also with row versions switched on in the database.
        self.keep_holder = f"SELECT holder FROM {holder} WITH (REPEATABLEREAD, ROWLOCK) WHERE holder = %(holder)s"
        self.facts = (
            f"SELECT CAST(SERVERPROPERTY('ProductVersion') AS nvarchar(128)), {_MICROSECONDS_NOW}, "
            f"(SELECT delayed_durability_desc FROM sys.databases WHERE database_id = DB_ID())"
        )
        self.snapshots = "SELECT snapshot_isolation_state FROM sys.databases WHERE database_id = DB_ID()"


class LifeStatements:
    """What shows which processes live.

    Args:
        names: of the tables.
    """

    def __init__(self, names: Names) -> None:
        holder, attempt = names.of("holder"), f"{names.pending} AS p WITH (INDEX ([attempt]))"
        self.take_lock = (
            "DECLARE @granted int; EXEC @granted = sp_getapplock @Resource = %(name)s, @LockMode = 'Exclusive', "
            "@LockOwner = 'Session', @LockTimeout = 0; SELECT @granted"
        )
        self.add_holder = (
            f"INSERT INTO {holder} (store_id, lock_name, pid, machine, started_at, seen_at) OUTPUT inserted.holder "
            f"VALUES (%(store)s, %(lock)s, %(pid)s, %(machine)s, {_MICROSECONDS_NOW}, {_MICROSECONDS_NOW})"
        )
        self.report_clock = f"UPDATE {holder} SET ahead = %(ahead)s WHERE holder = %(holder)s"
        lives = "APPLOCK_TEST('public', lock_name, 'Exclusive', 'Session') = 0"
        self.reported_clocks = (
            f"SELECT machine, pid, ahead FROM {holder} "
            f"WHERE store_id = %(store)s AND ahead IS NOT NULL AND (lock_name = %(own)s OR {lives})"
        )
        # A frozen process keeps its connections: whoever has the rights ends them.
        self.show_life = f"UPDATE {holder} SET seen_at = {_MICROSECONDS_NOW} WHERE lock_name = %(own)s"
        self.find_silent = (
            f"SELECT holder, pid, machine FROM {holder} WHERE store_id = %(store)s AND lock_name <> %(own)s "
            f"AND seen_at < {_MICROSECONDS_NOW} - %(silence)s AND {lives}"
        )
        self.find_silent_sessions = (
            "SELECT session_id FROM sys.dm_exec_sessions WHERE program_name = N'postdate' "
            "AND host_process_id = %(pid)s AND host_name = %(machine)s AND session_id <> @@SPID "
            "AND DATEDIFF(second, last_request_start_time, SYSDATETIME()) >= %(seconds)s"
        )
        # A session may have a lock twice, so it would take itself for dead.
        self.find_dead = (
            f"SELECT holder FROM {holder} WHERE store_id = %(store)s AND lock_name <> %(own)s "
            f"AND APPLOCK_TEST('public', lock_name, 'Exclusive', 'Session') = 1"
        )
        self.find_unknown = (
            f"SELECT DISTINCT p.holder FROM {attempt} WHERE p.attempt_at IS NULL AND p.holder IS NOT NULL "
            f"AND NOT EXISTS (SELECT 1 FROM {holder} AS h WHERE h.holder = p.holder)"
        )
        self.drop_holders = (
            f"DELETE h FROM {holder} AS h WITH (FORCESEEK, ROWLOCK) WHERE h.holder IN {_numbers('holders')}"
        )


class AsideStatements:
    """What sets rows aside that cannot be read.

    Args:
        names: of the tables.
    """

    def __init__(self, names: Names) -> None:
        pending, record = names.pending, names.of("record")
        into_record = f"{record} (at, due, store_id, kind, message_id, destination, detail)"
        by_number = f"FROM {pending} AS p WITH (FORCESEEK, ROWLOCK)"
        aside, content = names.of("quarantine"), "message_id, due, destination, expires_at, failures, headers, body"
        self.free_ones = (
            f"SELECT p.number, {_ROW} FROM {pending} AS p WITH (FORCESEEK, READPAST, {_LOCKED}) "
            f"WHERE p.number IN {_numbers('numbers')} AND p.holder IS NULL ORDER BY p.number"
        )
        self.set_aside = (
            f"INSERT INTO {aside} (store_id, at, reason, {content}) OUTPUT inserted.number "
            f"SELECT %(store)s, %(at)s, %(reason)s, {content} {by_number} WHERE p.number = %(number)s"
        )
        self.remove_one = f"DELETE p {by_number} WHERE p.number = %(number)s"
        self.record_aside = (
            f"INSERT INTO {into_record} "
            f"VALUES (%(at)s, %(due)s, %(store)s, %(kind)s, %(id)s, %(destination)s, %(detail)s)"
        )
        of_store = "WHERE store_id = %(store)s"
        aside_row = f"number, at, reason, {content} FROM {aside}"
        self.set_aside_count = f"SELECT COUNT(*) FROM {aside} {of_store}"
        self.all_aside = f"SELECT TOP (%(limit)s) {aside_row} {of_store} ORDER BY number"
        self.lock_aside = f"SELECT {aside_row} WITH (UPDLOCK, ROWLOCK) {of_store} AND number = %(number)s"
        self.end_aside = f"DELETE FROM {aside} WHERE number = %(number)s"


class ScanStatements:
    """What reads whole tables.

    Args:
        names: of the tables.
    """

    def __init__(self, names: Names) -> None:
        pending, record = names.pending, names.of("record")
        self._columns = {
            "message_id": "t.message_id", "destination": "t.destination", "due": "t.due",
            "expires_at": "t.expires_at", "headers": "t.headers", "body": "t.body",
            "number_of_failures": "t.failures",
            "number": "t.number", "kind": "t.kind", "at": "t.at", "detail": "t.detail",
        }  # fmt: skip
        self.bounds = {
            "pending": f"SELECT COALESCE(MIN(number), 0), COALESCE(MAX(number) + 1, 0) FROM {pending}",
            "records": f"SELECT COALESCE(MIN(number), 0), COALESCE(MAX(number) + 1, 0) FROM {record}",
        }
        share = "t.number >= %(first)s AND t.number < %(end)s"
        self._shares = {
            "pending": f" FROM {pending} AS t WHERE {share}",
            "records": f" FROM {record} AS t WHERE {share} AND t.store_id = %(store)s",
        }
        self._conditions = {
            "destinations": _texts("destinations", "t.destination"),
            "due_from": "t.due >= %(due_from)s",
            "due_to": "t.due < %(due_to)s",
        }
        self._with_ids = {
            "pending": (
                f"t.number IN (SELECT r.number FROM OPENJSON(%(message_ids)s) AS j JOIN {record} AS r "
                f"ON r.message_id = {_TEXT} AND r.message_id_bytes = DATALENGTH({_TEXT}) "
                f"AND r.store_id = %(store)s AND r.kind = 1)"
            ),
            "records": _texts("message_ids", "t.message_id"),
        }

    def scanned(self, scan: Scan, conditions: Iterable[str]) -> str:
        """Return the statement of a scan; ``conditions`` are the names of those that are given."""
        wanted = ", ".join(self._columns[column] for column in scan.columns) or "1"
        known = {**self._conditions, "message_ids": self._with_ids[scan.what]}
        return " AND ".join([f"SELECT {wanted}{self._shares[scan.what]}", *(known[name] for name in conditions)])

"""The SQL of a store in SQL Server. Source: ADR 0008.

Lists are sent as JSON, because a statement accepts at most 2,100 parameters. The driver writes ``NULL`` into the text
for a value of ``None``.

FORCESEEK has two reasons. The server would read a small table completely, including rows that others have locked. And
statistics from a time when it was small must not turn a change of some rows into a scan of millions later.
READCOMMITTEDLOCK: with row versions switched on in the database, READPAST is refused without it. REPEATABLEREAD: a
shared lock until the transaction ends, also with row versions switched on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from typing_extensions import override

from postdate.backends.sql.row_locks.statements import (
    EARLIEST,
    LANE_MICROSECONDS,
    LANES_START,
    RowLockStatements,
    ServerSqlDialect,
)


class SqlServerStatements(RowLockStatements):
    """Every statement of one store; parameters are those of pytds."""

    fragments = {  # noqa: RUF012 - nobody changes it
        "time": "DATEDIFF_BIG(microsecond, CAST('19700101' AS datetime2), SYSUTCDATETIME())",
        "locked_hints": "UPDLOCK, ROWLOCK, READCOMMITTEDLOCK",
        "the_id": "CAST(%(id)s AS nvarchar(500)) COLLATE Latin1_General_BIN2",
        # For a list in JSON. Spaces at the end count, although = ignores them.
        "text": "CAST(j.[value] AS nvarchar(500)) COLLATE Latin1_General_BIN2",
        "numbers": "(SELECT CAST(j.[value] AS bigint) FROM OPENJSON(%(numbers)s) AS j)",
        "holders": "(SELECT CAST(j.[value] AS bigint) FROM OPENJSON(%(holders)s) AS j)",
        "of_id": "message_id = {the_id} AND message_id_bytes = DATALENGTH({the_id}) AND store_id = %(store)s",
        "record_columns": "{record} (at, due, store_id, kind, message_id, destination, detail)",
        "by_number": "FROM {pending} AS p WITH (FORCESEEK, ROWLOCK)",
        "is_holder": "(p.holder = %(holder)s OR (p.holder IS NULL AND %(holder)s IS NULL))",
        "held": "{by_number} WHERE p.number IN {numbers} AND {is_holder}",
        "attempt": "{pending} AS p WITH (INDEX ([attempt]))",
        "marked": f"{{attempt}} WHERE p.attempt_at = CAST({EARLIEST} AS bigint) AND p.unreadable IS NOT NULL",
        "marked_row": "p.number, p.unreadable_at, p.unreadable, {row} FROM",
        "claimable": "{pending} AS p WITH (INDEX ([attempt]), READPAST, {locked_hints})",
        "leased": "p.attempt_at IS NULL AND p.holder IN {holders}",
        "freed": "UPDATE p SET holder = NULL, attempt_at = p.due",
        "given_back": "holder = NULL, attempt_at = COALESCE(CAST(%(attempt_at)s AS bigint), p.due)",
        "known": "(SELECT number FROM {record} WHERE {of_id} AND kind = 1)",
        "after": "SELECT TOP (1) p.attempt_at FROM {attempt} WHERE p.attempt_at > %(from)s",
        "to": "CAST(%(destination)s AS nvarchar(400))",
        "listed": (
            "{pending} AS w WITH (INDEX ([due])) WHERE w.unreadable IS NULL "
            "AND w.due < COALESCE(CAST(%(due_to)s AS bigint), "
            "9223372036854775807) AND (%(destination)s IS NULL OR "
            "(w.destination = {to} AND DATALENGTH(w.destination) = DATALENGTH({to})))"
        ),
        "lives": "APPLOCK_TEST('public', lock_name, 'Exclusive', 'Session') = 0",
    }

    insert_records = (
        "INSERT INTO {record} (at, due, store_id, kind, message_id, destination) "
        "OUTPUT inserted.number, inserted.message_id "
        "SELECT %(at)s, i.due, %(store)s, 1, i.message_id, i.destination FROM OPENJSON(%(rows)s) WITH "
        "(position int '$.position', message_id nvarchar(500) '$.message_id', due bigint '$.due', "
        "destination nvarchar(400) '$.destination') AS i WHERE NOT EXISTS ("
        "SELECT 1 FROM {record} AS r WITH (UPDLOCK, HOLDLOCK) "
        "WHERE r.message_id = i.message_id COLLATE Latin1_General_BIN2 "
        "AND r.message_id_bytes = DATALENGTH(i.message_id) AND r.store_id = %(store)s AND r.kind = 1) "
        "ORDER BY i.position"
    )
    insert_messages = (
        "INSERT INTO {pending} (number, attempt_at, {content}) SELECT number, due, {content} FROM OPENJSON(%(rows)s) "
        "WITH (number bigint '$.number', due bigint '$.due', expires_at bigint '$.expires_at', "
        "failures int '$.failures', message_id nvarchar(500) '$.message_id', "
        "destination nvarchar(400) '$.destination', headers nvarchar(max) '$.headers', body varbinary(max) '$.body')"
    )
    lock_scheduled = "SELECT number FROM {record} WITH ({locked_hints}) WHERE {of_id} AND kind = 1"
    last_kind = (
        "SELECT TOP (1) kind FROM {record} WHERE {of_id} AND NOT EXISTS "
        "(SELECT 1 FROM {pending} WHERE number = %(number)s) ORDER BY number DESC"
    )

    claim = "SELECT TOP (%(limit)s) p.number, p.attempt_at, {row} FROM {claimable} WHERE {due_first}"
    finish = (
        "DELETE p OUTPUT %(at)s, deleted.due, %(store)s, %(kind)s, deleted.message_id, deleted.destination, %(detail)s "
        "INTO {record_columns} {held}"
    )
    lease = "UPDATE p SET holder = %(holder)s, attempt_at = NULL {by_number} WHERE p.number IN {numbers}"
    lock_holder = "SELECT holder FROM {holder} WITH (REPEATABLEREAD, ROWLOCK) WHERE holder = %(holder)s"
    release_leases = "{freed} FROM {pending} AS p WITH (FORCESEEK ([attempt] ([attempt_at])), ROWLOCK) WHERE {leased}"
    release_some_leases = "{freed} {by_number} WHERE {leased} AND p.number IN {numbers}"
    retry = (
        "UPDATE p SET failures = p.failures + 1, {given_back} {by_number} WHERE p.number = %(number)s AND {is_holder}"
    )
    release = "UPDATE p SET {given_back} {held}"
    lock = (
        "SELECT {waiting} FROM {pending} AS p WITH (READPAST, {locked_hints}) "
        "WHERE p.number = {known} AND p.unreadable IS NULL"
    )
    headers_of = "SELECT p.headers FROM {pending} AS p WHERE p.number = %(number)s"
    reschedule = (
        "UPDATE p SET due = %(due)s, attempt_at = %(due)s, failures = 0, headers = %(headers)s "
        "{by_number} WHERE p.number = %(number)s"
    )

    next_attempt = "{after} ORDER BY p.attempt_at"
    # In a table with a key: in a condition, the JSON of thousands of numbers would be parsed for each row.
    next_attempt_except = (
        "DECLARE @locked TABLE (number bigint NOT NULL PRIMARY KEY); "
        "INSERT INTO @locked (number) SELECT CAST(j.[value] AS bigint) FROM OPENJSON(%(locked)s) AS j; "
        "{after} AND NOT EXISTS (SELECT 1 FROM @locked AS l WHERE l.number = p.number) ORDER BY p.attempt_at"
    )
    next_due = "SELECT TOP (1) due FROM {pending} WITH (INDEX ([due])) WHERE unreadable IS NULL ORDER BY due"
    first_unclaimed = "SELECT TOP (1) p.attempt_at, p.number FROM {claimable} WHERE {due_first}"
    statistics = (
        "SELECT c.pending - u.unreadable, c.overdue - u.overdue - h.overdue - x.locked, h.held + x.locked, "
        "c.failing - u.failing, "
        "(SELECT TOP (1) due FROM {pending} WITH (INDEX ([due])) WHERE unreadable IS NULL ORDER BY due), "
        "u.unreadable FROM "
        "(SELECT COUNT(*) AS pending, COALESCE(SUM(CASE WHEN due < %(at)s THEN 1 ELSE 0 END), 0) AS overdue, "
        "COALESCE(SUM(CASE WHEN failures > 0 THEN 1 ELSE 0 END), 0) AS failing "
        "FROM {pending} WITH (INDEX ([due]))) AS c CROSS JOIN "
        "(SELECT COUNT(*) AS unreadable, COALESCE(SUM(CASE WHEN p.due < %(at)s THEN 1 ELSE 0 END), 0) AS overdue, "
        "COALESCE(SUM(CASE WHEN p.failures > 0 THEN 1 ELSE 0 END), 0) AS failing FROM {marked}) AS u CROSS JOIN "
        "(SELECT COUNT(*) AS held, COALESCE(SUM(CASE WHEN p.due < %(at)s THEN 1 ELSE 0 END), 0) AS overdue "
        "FROM {attempt} WHERE p.attempt_at IS NULL) AS h CROSS JOIN "
        "(SELECT COUNT(*) AS locked FROM {attempt} WHERE p.attempt_at > %(from)s AND p.attempt_at < %(at)s "
        "AND (%(free_number)s IS NULL OR p.attempt_at < %(free_at)s "
        "OR (p.attempt_at = %(free_at)s AND p.number < %(free_number)s))) AS x"
    )
    # A recursion may not search the first row here, so each lane is searched.
    limits_of_held = (
        "SELECT l.destination, l.lane, l.limits, l.free_at FROM {limits} AS l WHERE l.store = %(store)s AND EXISTS "
        f"(SELECT 1 FROM {{attempt}} WHERE p.attempt_at >= {LANES_START} + l.lane * {LANE_MICROSECONDS} "
        f"AND p.attempt_at < {LANES_START} + (l.lane + 1) * {LANE_MICROSECONDS})"
    )
    due_count = (
        "SELECT (SELECT COUNT_BIG(*) FROM {pending} WITH (INDEX ([due])) WHERE due >= %(first)s AND due < %(end)s) - "
        "(SELECT COUNT_BIG(*) FROM {marked} AND p.due >= %(first)s AND p.due < %(end)s)"
    )
    # Two parts, each a range of the index: a comparison of due time and number as a pair would use no range.
    list_pending = (
        "SELECT p.number, {row} FROM (SELECT TOP (%(limit)s) both_parts.due, both_parts.number FROM ("
        "SELECT * FROM (SELECT TOP (%(limit)s) w.due, w.number FROM {listed} "
        "AND w.due = %(due_from)s AND w.number > %(behind)s ORDER BY w.number) AS same UNION ALL "
        "SELECT * FROM (SELECT TOP (%(limit)s) w.due, w.number FROM {listed} "
        "AND w.due > %(due_from)s ORDER BY w.due, w.number) AS later"
        ") AS both_parts ORDER BY both_parts.due, both_parts.number) AS listed "
        "JOIN {pending} AS p ON p.number = listed.number ORDER BY listed.due, listed.number"
    )
    get = "SELECT p.number, {row} FROM {pending} AS p WHERE p.number = {known} AND p.unreadable IS NULL"
    now = "SELECT {time}"
    facts = (
        "SELECT CAST(SERVERPROPERTY('ProductVersion') AS nvarchar(128)), {time}, "
        "(SELECT delayed_durability_desc FROM sys.databases WHERE database_id = DB_ID()), "
        "CAST(DATABASEPROPERTYEX(DB_NAME(), 'Updateability') AS nvarchar(128))"
    )
    snapshots = "SELECT snapshot_isolation_state FROM sys.databases WHERE database_id = DB_ID()"

    acquire_lock = (
        "DECLARE @granted int; EXEC @granted = sp_getapplock @Resource = %(name)s, @LockMode = 'Exclusive', "
        "@LockOwner = 'Session', @LockTimeout = 0; SELECT @granted"
    )
    add_holder = (
        "INSERT INTO {holder} (store_id, lock_name, pid, machine, started_at, seen_at) OUTPUT inserted.holder "
        "VALUES (%(store)s, %(lock)s, %(pid)s, %(machine)s, {time}, {time})"
    )
    # A session may acquire a lock twice, so without this condition it would consider itself dead.
    find_dead = (
        "SELECT holder FROM {holder} WHERE store_id = %(store)s AND lock_name <> %(own)s "
        "AND APPLOCK_TEST('public', lock_name, 'Exclusive', 'Session') = 1"
    )
    drop_holders = "DELETE h FROM {holder} AS h WITH (FORCESEEK, ROWLOCK) WHERE h.holder IN {holders}"
    reported_clocks = (
        "SELECT machine, pid, ahead FROM {holder} "
        "WHERE store_id = %(store)s AND ahead IS NOT NULL AND (lock_name = %(own)s OR {lives})"
    )
    # A frozen process keeps its connections; other processes end them, if they have the rights.
    write_heartbeat = "UPDATE {holder} SET seen_at = {time} WHERE lock_name = %(own)s"
    find_silent = (
        "SELECT holder, pid, machine FROM {holder} WHERE store_id = %(store)s AND lock_name <> %(own)s "
        "AND seen_at < {time} - %(silence)s AND {lives}"
    )
    find_silent_sessions = (
        "SELECT session_id FROM sys.dm_exec_sessions WHERE program_name = N'postdate' "
        "AND host_process_id = %(pid)s AND host_name = %(machine)s AND session_id <> @@SPID "
        "AND DATEDIFF(second, last_request_start_time, SYSDATETIME()) >= %(seconds)s"
    )

    lock_unclaimed = (
        "SELECT p.number, {row} FROM {pending} AS p WITH (FORCESEEK, READPAST, {locked_hints}) "
        "WHERE p.number IN {numbers} AND p.holder IS NULL AND p.unreadable IS NULL ORDER BY p.number"
    )
    mark_unreadable = (
        f"UPDATE p SET attempt_at = {EARLIEST}, holder = NULL, unreadable = %(reason)s, unreadable_at = %(at)s "
        "{by_number} WHERE p.number = %(number)s"
    )
    remove_one = "DELETE p {by_number} WHERE p.number = %(number)s"
    list_unreadable = "SELECT TOP (%(limit)s) {marked_row} {marked} ORDER BY p.number"
    lock_unreadable = (
        "SELECT {marked_row} {pending} AS p WITH (FORCESEEK, UPDLOCK, ROWLOCK) "
        "WHERE p.number = %(number)s AND p.unreadable IS NOT NULL"
    )

    _listed = {  # noqa: RUF012 - likewise
        "destinations": (
            "EXISTS (SELECT 1 FROM OPENJSON(%(destinations)s) AS j "
            "WHERE t.destination = {text} AND DATALENGTH(t.destination) = DATALENGTH({text}))"
        ),
        "records": (
            "EXISTS (SELECT 1 FROM OPENJSON(%(message_ids)s) AS j "
            "WHERE t.message_id = {text} AND DATALENGTH(t.message_id) = DATALENGTH({text}))"
        ),
        "pending": (
            "t.number IN (SELECT r.number FROM OPENJSON(%(message_ids)s) AS j JOIN {record} AS r "
            "ON r.message_id = {text} AND r.message_id_bytes = DATALENGTH({text}) "
            "AND r.store_id = %(store)s AND r.kind = 1)"
        ),
    }


class SqlServerSqlDialect(ServerSqlDialect):
    """The common statements in the form of SQL Server. Spaces at the end count here, although ``=`` ignores them.

    A row is inserted unless its key exists, under a lock on the gap between keys: an error would end the transaction.
    """

    @override
    def placeholder(self, column: str) -> str:
        if column == "operations":
            return "CONVERT(varbinary(max), CAST(%(operations)s AS varchar(max)), 2)"
        return super().placeholder(column)

    @override
    def equality(self, *columns: str) -> str:
        return " AND ".join(
            f"{column} = {text} AND DATALENGTH({column}) = DATALENGTH({text})"
            for column in columns
            for text in (f"CAST(%({column})s AS nvarchar(500)) COLLATE Latin1_General_BIN2",)
        )

    @override
    def insert_statement(self, table: str, columns: Iterable[str], key: Sequence[str]) -> str:
        names = list(columns)
        return (
            f"INSERT INTO {table} ({', '.join(names)}) SELECT {', '.join(map(self.placeholder, names))} "
            f"WHERE NOT EXISTS (SELECT 1 FROM {table} WITH (UPDLOCK, HOLDLOCK) WHERE {self.equality(*key)})"
        )

    @override
    def first_rows(self, query: str) -> str:
        return query.replace("SELECT", "SELECT TOP (%(limit)s)", 1)

    @override
    def delete_statement(self, table: str, condition: str, order: str, index: str) -> str:
        hints = f"INDEX ([{index}]), READPAST, ROWLOCK, READCOMMITTEDLOCK"
        return (
            f"WITH oldest AS (SELECT TOP (%(limit)s) * FROM {table} WITH ({hints}) "
            f"WHERE {condition} ORDER BY {order}) DELETE FROM oldest"
        )

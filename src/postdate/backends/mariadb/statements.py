"""The SQL of a store in MariaDB. Source: ADR 0008.

FORCE INDEX has two reasons. The server would read a small table completely, including rows that others have locked. And
statistics from a time when it was small must not turn a claim into a scan of millions of rows later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from typing_extensions import override

from postdate.backends.sql.row_locks.parts import DuplicateKey
from postdate.backends.sql.row_locks.statements import (
    EARLIEST,
    LANE_MICROSECONDS,
    LANES_START,
    RowLockStatements,
    ServerSqlDialect,
)
from postdate.ports.changing import KEYED


def _next_lane(lane: str) -> str:
    """Return SQL for the number of the first lane from ``lane`` on that has messages."""
    return (
        f"SELECT (p.attempt_at - {LANES_START}) DIV {LANE_MICROSECONDS} FROM {{attempt}} "
        f"WHERE p.attempt_at >= {LANES_START} + ({lane}) * {LANE_MICROSECONDS} ORDER BY p.attempt_at LIMIT 1"
    )


class MariaDbStatements(RowLockStatements):
    """Every statement of one store; parameters are PyMySQL's, lists included."""

    fragments = {  # noqa: RUF012 - nobody changes it
        "time": "CAST(UNIX_TIMESTAMP(SYSDATE(6)) * 1000000 AS SIGNED)",
        "of_id": "message_id = %(id)s AND store_id = %(store)s",
        "by_number": "{pending} FORCE INDEX (PRIMARY)",
        "by_holder": "{by_number} WHERE number IN %(numbers)s AND holder <=> %(holder)s",
        "attempt": "{pending} AS p FORCE INDEX (attempt)",
        "marked": f"{{attempt}} WHERE p.attempt_at = {EARLIEST} AND p.unreadable IS NOT NULL",
        "marked_row": "SELECT p.number, p.unreadable_at, p.unreadable, {row} FROM",
        "after": "SELECT p.attempt_at FROM {attempt} WHERE p.attempt_at > %(from)s",
        "known": "FROM {record} AS r JOIN {pending} AS p ON p.number = r.number",
        "scheduled": "r.message_id = %(id)s AND r.store_id = %(store)s AND r.once = 1",
        "listed": (
            "{pending} AS w FORCE INDEX (due) WHERE w.unreadable IS NULL "
            "AND (%(destination)s IS NULL OR w.destination = %(destination)s) "
            "AND w.due < COALESCE(%(due_to)s, 9223372036854775807)"
        ),
        "given_back": "holder = NULL, attempt_at = COALESCE(%(attempt_at)s, due)",
    }

    insert_records = (
        "INSERT IGNORE INTO {record} (at, due, store_id, kind, once, message_id, destination) VALUES %(rows)s "
        "RETURNING number, message_id"
    )
    insert_messages = "INSERT INTO {pending} (number, attempt_at, {content}) VALUES %(rows)s"
    lock_scheduled = "SELECT number FROM {record} WHERE {of_id} AND once = 1 FOR UPDATE"
    last_kind = (
        "SELECT kind FROM {record} WHERE {of_id} AND NOT EXISTS "
        "(SELECT 1 FROM {pending} WHERE number = %(number)s) ORDER BY number DESC LIMIT 1"
    )

    claim = (
        "SELECT p.number, p.attempt_at, {row} FROM {attempt} WHERE {due_first} LIMIT %(limit)s FOR UPDATE SKIP LOCKED"
    )
    record_claimed = "{into_record} {as_record} {by_holder} ORDER BY number FOR UPDATE"
    delete_claimed = "DELETE FROM {pending} USING {by_holder}"
    lease = "UPDATE {by_number} SET holder = %(holder)s, attempt_at = NULL WHERE number IN %(numbers)s"
    lock_holder = "SELECT holder FROM {holder} WHERE holder = %(holder)s LOCK IN SHARE MODE"
    find_leased = "SELECT number FROM {attempt} WHERE attempt_at IS NULL AND holder IN %(holders)s ORDER BY number"
    release_leases = (
        "UPDATE {by_number} SET holder = NULL, attempt_at = due WHERE number IN %(numbers)s AND holder IN %(holders)s"
    )
    retry = (
        "UPDATE {by_number} SET failures = failures + 1, {given_back} "
        "WHERE number = %(number)s AND holder <=> %(holder)s"
    )
    release = "UPDATE {by_number} SET {given_back} WHERE number IN %(numbers)s AND holder <=> %(holder)s"
    find = "SELECT p.number {known} WHERE {scheduled} AND p.unreadable IS NULL"
    lock = "SELECT {waiting} FROM {pending} AS p WHERE p.number = %(number)s AND p.unreadable IS NULL FOR UPDATE WAIT 1"
    headers_of = "SELECT p.headers FROM {pending} AS p WHERE p.number = %(number)s"
    reschedule = (
        "UPDATE {pending} SET due = %(due)s, attempt_at = %(due)s, failures = 0, headers = %(headers)s "
        "WHERE number = %(number)s"
    )

    newest = (
        "SELECT r.message_id, r.at, p.number IS NOT NULL AND p.holder IS NULL AND p.unreadable IS NULL "
        "FROM {record} AS r LEFT JOIN {pending} AS p ON p.number = r.number "
        "WHERE r.store_id = %(store)s AND r.once = 1 AND r.message_id BETWEEN %(first)s AND %(last)s "
        "AND CHAR_LENGTH(r.message_id) = CHAR_LENGTH(%(first)s) AND RIGHT(r.message_id, 8) REGEXP '^[0-9]*$' "
        f"AND r.detail = '{KEYED}' "
        "ORDER BY r.message_id DESC LIMIT 1"
    )
    store_key = f"UPDATE {{record}} SET detail = '{KEYED}' WHERE {{of_id}} AND once = 1 AND detail IS NULL"
    replace = (
        "UPDATE {pending} SET due = %(due)s, attempt_at = %(due)s, failures = 0, destination = %(destination)s, "
        "expires_at = %(expires_at)s, headers = %(headers)s, body = %(body)s WHERE number = %(number)s"
    )

    next_attempt = "{after} ORDER BY p.attempt_at LIMIT 1"
    next_attempt_except = "{after} AND p.number NOT IN %(locked)s ORDER BY p.attempt_at LIMIT 1"
    next_due = "SELECT due FROM {pending} FORCE INDEX (due) WHERE unreadable IS NULL ORDER BY due LIMIT 1"
    first_unclaimed = "SELECT p.attempt_at, p.number FROM {attempt} WHERE {due_first} LIMIT 1 FOR UPDATE SKIP LOCKED"
    statistics = (
        "SELECT c.pending - u.unreadable, c.overdue - u.overdue - l.held_overdue - x.locked, h.held + x.locked, "
        "c.failing - u.failing, "
        "(SELECT due FROM {pending} FORCE INDEX (due) WHERE unreadable IS NULL ORDER BY due LIMIT 1), "
        "u.unreadable FROM "
        "(SELECT COUNT(*) AS pending, COALESCE(SUM(due < %(at)s), 0) AS overdue, "
        "COALESCE(SUM(failures > 0), 0) AS failing FROM {pending} FORCE INDEX (due)) AS c, "
        "(SELECT COUNT(*) AS unreadable, COALESCE(SUM(p.due < %(at)s), 0) AS overdue, "
        "COALESCE(SUM(p.failures > 0), 0) AS failing FROM {marked}) AS u, "
        "(SELECT COALESCE(SUM(due < %(at)s), 0) AS held_overdue FROM {attempt} WHERE attempt_at IS NULL) AS l, "
        "(SELECT COUNT(*) AS held FROM {attempt} WHERE attempt_at IS NULL) AS h, "
        "(SELECT COUNT(*) AS locked FROM {attempt} WHERE p.attempt_at > %(from)s AND p.attempt_at < %(at)s "
        "AND (%(free_number)s IS NULL OR p.attempt_at < %(free_at)s "
        "OR (p.attempt_at = %(free_at)s AND p.number < %(free_number)s))) AS x"
    )
    # From each lane with messages to the next one: one search of an index for each, however many lanes are empty.
    limits_of_held = (
        f"WITH RECURSIVE held (lane) AS (SELECT ({_next_lane('0')}) UNION ALL "
        f"SELECT ({_next_lane('h.lane + 1')}) FROM held AS h WHERE h.lane < (SELECT MAX(lane) FROM {{limits}})) "
        f"SELECT l.destination, l.lane, l.limits, l.free_at FROM held AS h JOIN {{limits}} AS l ON l.lane = h.lane "
        f"WHERE l.store = %(store)s"
    )
    due_count = (
        "SELECT (SELECT COUNT(*) FROM {pending} FORCE INDEX (due) WHERE due >= %(first)s AND due < %(end)s) - "
        "(SELECT COUNT(*) FROM {marked} AND p.due >= %(first)s AND p.due < %(end)s)"
    )
    # Two parts, each a range of the index: a comparison of due time and number as a pair would use no range.
    list_pending = (
        "SELECT p.number, {row} FROM ("
        "(SELECT w.due, w.number FROM {listed} AND w.due = %(due_from)s AND w.number > %(behind)s "
        "ORDER BY w.number LIMIT %(limit)s) UNION ALL "
        "(SELECT w.due, w.number FROM {listed} AND w.due > %(due_from)s ORDER BY w.due, w.number LIMIT %(limit)s) "
        "ORDER BY due, number LIMIT %(limit)s) AS listed "
        "JOIN {pending} AS p ON p.number = listed.number ORDER BY listed.due, listed.number"
    )
    get = "SELECT p.number, {row} {known} WHERE {scheduled} AND p.unreadable IS NULL"
    now = "SELECT {time}"

    add_holder = (
        "INSERT INTO {holder} (store_id, lock_name, pid, machine, started_at) "
        "VALUES (%(store)s, %(lock)s, %(pid)s, %(machine)s, {time}) RETURNING holder"
    )
    find_dead = "SELECT holder FROM {holder} WHERE store_id = %(store)s AND IS_FREE_LOCK(lock_name) = 1"
    drop_holders = "DELETE FROM {holder} USING {holder} FORCE INDEX (PRIMARY) WHERE holder IN %(holders)s"
    reported_clocks = (
        "SELECT machine, pid, ahead FROM {holder} "
        "WHERE store_id = %(store)s AND ahead IS NOT NULL AND IS_FREE_LOCK(lock_name) = 0"
    )

    lock_unclaimed = (
        "SELECT p.number, {row} FROM {pending} AS p FORCE INDEX (PRIMARY) "
        "WHERE p.number IN %(numbers)s AND p.holder IS NULL AND p.unreadable IS NULL ORDER BY p.number "
        "FOR UPDATE SKIP LOCKED"
    )
    mark_unreadable = (
        f"UPDATE {{by_number}} SET attempt_at = {EARLIEST}, holder = NULL, unreadable = %(reason)s, "
        "unreadable_at = %(at)s WHERE number = %(number)s"
    )
    remove_one = "DELETE FROM {pending} WHERE number = %(number)s"
    list_unreadable = "{marked_row} {marked} ORDER BY p.number LIMIT %(limit)s"
    lock_unreadable = "{marked_row} {pending} AS p WHERE p.number = %(number)s AND p.unreadable IS NOT NULL FOR UPDATE"

    _listed = {  # noqa: RUF012 - likewise
        "destinations": "t.destination IN %(destinations)s",
        "records": "t.message_id IN %(message_ids)s",
        "pending": (
            "t.number IN (SELECT number FROM {record} WHERE message_id IN %(message_ids)s "
            "AND store_id = %(store)s AND once = 1)"
        ),
    }


class MariaDbSqlDialect(ServerSqlDialect):
    """MariaDB's form of the common statements."""

    @override
    def placeholder(self, column: str) -> str:
        return "UNHEX(%(operations)s)" if column == "operations" else super().placeholder(column)

    @override
    def insert_statement(self, table: str, columns: Iterable[str], key: Sequence[str]) -> str:
        """Return an INSERT without IGNORE, which would truncate values that are too long."""
        names = list(columns)
        return f"INSERT INTO {table} ({', '.join(names)}) VALUES ({', '.join(map(self.placeholder, names))})"

    @override
    def insert_new(self, session: Any, statement: str, values: Mapping[str, Any]) -> bool:
        try:
            return session.change(statement, values) == 1
        except DuplicateKey:  # The server undoes only this statement.
            return False

    @override
    def delete_statement(self, table: str, condition: str, order: str, index: str) -> str:
        """Return a DELETE for a table with the primary key ``number``. A DELETE of one table accepts no index hint."""
        first = f"SELECT number FROM {table} FORCE INDEX ({index}) WHERE {condition} ORDER BY {order} LIMIT %(limit)s"
        return (
            f"DELETE FROM {table} USING ({first}) AS oldest STRAIGHT_JOIN {table} FORCE INDEX (PRIMARY) "
            f"ON {table}.number = oldest.number"
        )

"""The SQL of a store in MariaDB, with its names filled in. Parameters are those of PyMySQL. Source: ADR 0008.

Rows are locked and removed in the order of their primary key wherever the order is ours to choose, so that two
processes wait for each other instead of deadlocking; what deadlocks all the same is run again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from postdate.backends.mariadb.names import Names
from postdate.ports import Scan

EARLIEST: Final = -(2**63) + 1
"""Before every time; a bound that also leaves out NULL."""

_MICROSECONDS_NOW: Final = "CAST(UNIX_TIMESTAMP(SYSDATE(6)) * 1000000 AS SIGNED)"
_ROW: Final = "p.message_id, p.due, p.destination, p.expires_at, p.failures, p.headers, p.body"


NOW: Final = f"SELECT {_MICROSECONDS_NOW}"
"""The time of the server."""


class Statements:
    """Every statement of one store.

    Args:
        names: of its tables.
    """

    def __init__(self, names: Names) -> None:
        pending, record, store = names.pending, names.of("record"), names.of("store")
        # FORCE INDEX: a small table would be read from its beginning to its end, through rows that others have locked;
        # and statistics made while it was small must not turn a claim into a scan of millions of rows later.
        by_number = f"{pending} FORCE INDEX (PRIMARY)"
        held = f"FROM {by_number} WHERE number IN %(numbers)s AND holder <=> %(holder)s"
        into_record = f"INSERT INTO {record} (at, due, store_id, kind, message_id, destination, detail)"
        of_message = "SELECT %(at)s, due, %(store)s, %(kind)s, message_id, destination, %(detail)s"

        self.find_store = f"SELECT store_id FROM {store} WHERE name = %(name)s"
        self.insert_records = _complete(
            f"INSERT IGNORE INTO {record} (at, due, store_id, kind, once, message_id, destination) VALUES "
        )
        self.insert_records_end = b" RETURNING number, message_id"
        self.insert_messages = _complete(
            f"INSERT INTO {pending} "
            f"(number, due, attempt_at, expires_at, failures, message_id, destination, headers, body) VALUES "
        )
        of_id = "message_id = %(id)s AND store_id = %(store)s"
        self.lock_scheduled = f"SELECT number FROM {record} WHERE {of_id} AND once = 1 FOR UPDATE"
        self.last_kind = (
            f"SELECT kind FROM {record} WHERE {of_id} AND NOT EXISTS "
            f"(SELECT 1 FROM {pending} WHERE number = %(number)s) ORDER BY number DESC LIMIT 1"
        )

        attempt = f"{pending} AS p FORCE INDEX (attempt)"
        due_first = "p.attempt_at > %(from)s AND p.attempt_at < %(at)s ORDER BY p.attempt_at, p.number"
        self.claim = (
            f"SELECT p.number, p.attempt_at, {_ROW} FROM {attempt} WHERE {due_first} LIMIT %(limit)s "
            f"FOR UPDATE SKIP LOCKED"
        )
        self.record_held = f"{into_record} {of_message} {held} ORDER BY number FOR UPDATE"
        self.find_held = f"SELECT number {held} ORDER BY number FOR UPDATE"
        self.delete_held = f"DELETE FROM {pending} USING {held.removeprefix('FROM ')}"
        self.forget_scheduled = f"DELETE FROM {record} WHERE number IN %(numbers)s"
        self.lease = f"UPDATE {by_number} SET holder = %(holder)s, attempt_at = NULL WHERE number IN %(numbers)s"
        self.find_leased = (
            f"SELECT number FROM {attempt} WHERE attempt_at IS NULL AND holder IN %(holders)s ORDER BY number"
        )
        self.free = (
            f"UPDATE {by_number} SET holder = NULL, attempt_at = due "
            f"WHERE number IN %(numbers)s AND holder IN %(holders)s"
        )
        self.retry = (
            f"UPDATE {by_number} SET failures = failures + 1, holder = NULL, "
            f"attempt_at = COALESCE(%(attempt_at)s, due) WHERE number = %(number)s AND holder <=> %(holder)s"
        )
        self.release = (
            f"UPDATE {by_number} SET holder = NULL, attempt_at = COALESCE(%(attempt_at)s, due) "
            f"WHERE number IN %(numbers)s AND holder <=> %(holder)s"
        )
        self.record_one = f"{into_record} {of_message} FROM {pending} WHERE number = %(number)s"
        known = f"FROM {record} AS r JOIN {pending} AS p ON p.number = r.number"
        scheduled = "r.message_id = %(id)s AND r.store_id = %(store)s AND r.once = 1"
        self.find = f"SELECT p.number {known} WHERE {scheduled}"
        self.lock_one = (
            f"SELECT number, due, attempt_at, expires_at, holder FROM {pending} WHERE number = %(number)s "
            f"FOR UPDATE WAIT 1"
        )
        self.reschedule = (
            f"UPDATE {pending} SET due = %(due)s, attempt_at = %(due)s, headers = REPLACE(headers, %(was)s, %(is)s) "
            f"WHERE number = %(number)s"
        )
        after = f"SELECT p.attempt_at FROM {attempt} WHERE p.attempt_at > %(from)s"
        self.next_attempt = f"{after} ORDER BY p.attempt_at LIMIT 1"
        self.next_attempt_but = f"{after} AND p.number NOT IN %(locked)s ORDER BY p.attempt_at LIMIT 1"
        self.next_due = f"SELECT due FROM {pending} FORCE INDEX (due) ORDER BY due LIMIT 1"
        # What is locked are the oldest, up to the first that can be locked: that one is touched, and no other.
        self.first_free = (
            f"SELECT p.attempt_at, p.number FROM {attempt} WHERE {due_first} LIMIT 1 FOR UPDATE SKIP LOCKED"
        )
        self.statistics = (
            f"SELECT c.pending, c.overdue - l.held_overdue - x.locked, h.held + x.locked, c.failing, c.first FROM "
            f"(SELECT COUNT(*) AS pending, COALESCE(SUM(due < %(at)s), 0) AS overdue, "
            f"COALESCE(SUM(failures > 0), 0) AS failing, MIN(due) AS first FROM {pending} FORCE INDEX (due)) AS c, "
            f"(SELECT COALESCE(SUM(due < %(at)s), 0) AS held_overdue FROM {attempt} WHERE attempt_at IS NULL) AS l, "
            f"(SELECT COUNT(*) AS held FROM {attempt} WHERE attempt_at IS NULL) AS h, "
            f"(SELECT COUNT(*) AS locked FROM {attempt} WHERE p.attempt_at > %(from)s AND p.attempt_at < %(at)s "
            f"AND (%(free_number)s IS NULL OR p.attempt_at < %(free_at)s "
            f"OR (p.attempt_at = %(free_at)s AND p.number < %(free_number)s))) AS x"
        )
        self.record_counts = (
            f"SELECT kind, COUNT(*) FROM {record} WHERE store_id = %(store)s GROUP BY kind ORDER BY kind"
        )
        self.list_pending = (
            f"SELECT p.number, {_ROW} FROM {pending} AS p FORCE INDEX (due) "
            f"WHERE (%(destination)s IS NULL OR p.destination = %(destination)s) "
            f"AND p.due >= %(due_from)s AND (%(due_to)s IS NULL OR p.due < %(due_to)s) "
            f"ORDER BY p.due, p.number LIMIT %(limit)s"
        )
        self.get_one = f"SELECT p.number, {_ROW} {known} WHERE {scheduled}"
        self.history_of = (
            f"SELECT kind, message_id, at, due, destination, detail FROM {record} WHERE {of_id} ORDER BY number"
        )

        holder = names.of("holder")
        self.add_holder = (
            f"INSERT INTO {holder} (store_id, lock_name, pid, machine, started_at) "
            f"VALUES (%(store)s, %(lock)s, %(pid)s, %(machine)s, {_MICROSECONDS_NOW}) RETURNING holder"
        )
        self.report_clock = f"UPDATE {holder} SET ahead = %(ahead)s WHERE holder = %(holder)s"
        self.reported_clocks = (
            f"SELECT machine, pid, ahead FROM {holder} "
            f"WHERE store_id = %(store)s AND ahead IS NOT NULL AND IS_FREE_LOCK(lock_name) = 0"
        )
        self.find_dead = f"SELECT holder FROM {holder} WHERE store_id = %(store)s AND IS_FREE_LOCK(lock_name) = 1"
        self.find_unknown = (
            f"SELECT DISTINCT p.holder FROM {attempt} WHERE p.attempt_at IS NULL AND p.holder IS NOT NULL "
            f"AND NOT EXISTS (SELECT 1 FROM {holder} AS h WHERE h.holder = p.holder)"
        )
        # Both touch the rows they name and no other: a look at all would wait for every process that leases just now.
        self.keep_holder = f"SELECT holder FROM {holder} WHERE holder = %(holder)s LOCK IN SHARE MODE"
        self.drop_holders = f"DELETE FROM {holder} USING {holder} FORCE INDEX (PRIMARY) WHERE holder IN %(holders)s"


class AsideStatements:
    """What sets rows aside that cannot be read.

    Args:
        names: of the tables.
    """

    def __init__(self, names: Names) -> None:
        pending, record = names.pending, names.of("record")
        into_record = f"INSERT INTO {record} (at, due, store_id, kind, message_id, destination, detail)"
        aside, content = names.of("quarantine"), "message_id, due, destination, expires_at, failures, headers, body"
        self.free_ones = (
            f"SELECT p.number, {_ROW} FROM {pending} AS p FORCE INDEX (PRIMARY) "
            f"WHERE p.number IN %(numbers)s AND p.holder IS NULL ORDER BY p.number FOR UPDATE SKIP LOCKED"
        )
        self.set_aside = (
            f"INSERT INTO {aside} (store_id, at, reason, {content}) "
            f"SELECT %(store)s, %(at)s, %(reason)s, {content} "
            f"FROM {pending} FORCE INDEX (PRIMARY) WHERE number = %(number)s"
        )
        self.remove_one = f"DELETE FROM {pending} WHERE number = %(number)s"
        self.record_aside = (
            f"{into_record} VALUES (%(at)s, %(due)s, %(store)s, %(kind)s, %(id)s, %(destination)s, %(detail)s)"
        )
        of_store = f"FROM {aside} WHERE store_id = %(store)s"
        self.set_aside_count = f"SELECT COUNT(*) {of_store}"
        self.all_aside = f"SELECT number, at, reason, {content} {of_store} ORDER BY number LIMIT %(limit)s"
        self.lock_aside = f"SELECT number, at, reason, {content} {of_store} AND number = %(number)s FOR UPDATE"
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
        of_ids = "message_id IN %(message_ids)s"
        self._conditions = {
            "destinations": "t.destination IN %(destinations)s",
            "due_from": "t.due >= %(due_from)s",
            "due_to": "t.due < %(due_to)s",
        }
        self._with_ids = {
            "pending": (
                f"t.number IN (SELECT number FROM {record} WHERE {of_ids} AND store_id = %(store)s AND once = 1)"
            ),
            "records": f"t.{of_ids}",
        }

    def scanned(self, scan: Scan, conditions: Mapping[str, Any]) -> str:
        """Return the statement of a scan; ``conditions`` are those that are given, by their names."""
        wanted = ", ".join(self._columns[column] for column in scan.columns) or "1"
        known = {**self._conditions, "message_ids": self._with_ids[scan.what]}
        # An empty list is no SQL, and nothing is in it.
        given = [known[name] if value != () else "FALSE" for name, value in conditions.items()]
        return " AND ".join([f"SELECT {wanted}{self._shares[scan.what]}", *given])


def _complete(sql: str) -> bytes:
    """Return the beginning of a statement that gets its values without parameters."""
    return sql.replace("%%", "%").encode()

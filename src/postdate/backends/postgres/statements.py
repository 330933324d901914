"""The SQL of a PostgreSQL store; parameters are psycopg's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from typing_extensions import override

from postdate.backends.postgres.access import Connection
from postdate.backends.postgres.names import SchemaNames, lookup_join, sql
from postdate.backends.postgres.rows import AFTER_LATEST_TIME, LISTED_COLUMNS, PENDING_COLUMNS, clamped_time, utc
from postdate.backends.postgres.unreadable import statements_of_store
from postdate.backends.sql.dialect import SqlDialect, Values
from postdate.clock import nearest_instant
from postdate.messages import Headers
from postdate.ports import Recording, RecordKind
from postdate.ports.changing import KEYED
from postdate.ports.limits import LANE_WIDTH, LANES

_RECORD_INTO = "(at, due, store_id, kind, message_id, destination, detail)"


class Statements:
    """Every statement of one store, whose pending messages are in ``table``."""

    def __init__(self, names: SchemaNames, table: str, recording: Recording) -> None:  # noqa: PLR0915 - one for each
        self.table = table
        self.store_id: int | None = None
        pending, content, record, queue = (
            names.name_of(table),
            names.name_of("content"),
            names.name_of("record"),
            names.name_of("queue"),
        )
        queue_message, self.limits_table = names.name_of("queue_message"), names.name_of("destination_limit")
        is_own = "(r.store_id = %(store)s OR r.store_id IS NULL)"
        scheduled = "r.message_id = %(id)s AND r.store_id = %(store)s AND r.kind = 1"
        # A value and no join, so that the planner cannot begin with the pending messages.
        number_of_id = f"(SELECT r.number FROM {record} AS r WHERE {scheduled})"
        of_retries = "" if recording is Recording.ALL else " WHERE false"

        def insert_records(of: str, kind: str, detail: str) -> str:
            """Return the insert of records of messages that leave the store, or stay."""
            return (
                f"INSERT INTO {record} {_RECORD_INTO} SELECT %(now)s, due, %(store)s::smallint, {kind}, message_id, "
                f"destination, {detail} FROM {of}"
            )

        def delete_content(of: str) -> str:
            """Return the removal of the content of messages that leave the store."""
            return f"dropped AS (DELETE FROM {content} WHERE number = ANY (ARRAY(SELECT number FROM {of})))"

        content_of = (
            f"LEFT JOIN LATERAL (SELECT headers, body FROM {content} WHERE number = p.number OFFSET 0) AS c ON true"
        )

        def select_and_notify(of: str) -> str:
            notify = f"pg_notify('{names.channel}', %(notice)s::text)"
            return f"SELECT number, CASE WHEN %(notice)s::text IS NOT NULL THEN {notify} END FROM {of}"

        self.unreadable = statements_of_store(names, table)
        self.find_store = sql(f"SELECT store_id FROM {names.name_of('store')} WHERE name = %s")
        self.notify_due = sql(f"SELECT pg_notify('{names.channel}', %s)")

        # --- storing
        self.insert_one = sql(f"""
            WITH fresh AS (
                INSERT INTO {record} (at, due, store_id, kind, message_id, destination)
                VALUES (%(now)s, %(due)s, %(store)s, 1, %(message_id)s, %(destination)s)
                ON CONFLICT (message_id, store_id) WHERE kind = 1 DO NOTHING RETURNING number),
            kept AS (INSERT INTO {content} SELECT number, %(headers)s, %(body)s FROM fresh),
            stored AS (
                INSERT INTO {pending} (number, due, attempt_at, expires_at, message_id, destination)
                SELECT number, %(due)s, %(due)s, %(expires_at)s::timestamptz, %(message_id)s, %(destination)s
                FROM fresh)
            {select_and_notify("fresh")}""")
        self.create_incoming = sql("""
            CREATE TEMP TABLE IF NOT EXISTS postdate_incoming (
                position int, message_id text COLLATE "C", due timestamptz, destination text COLLATE "C",
                expires_at timestamptz, headers text, body bytea) ON COMMIT DELETE ROWS""")
        self.copy_incoming = sql("COPY postdate_incoming FROM STDIN (FORMAT BINARY)")
        self.clear_incoming = sql("TRUNCATE postdate_incoming")
        self.insert_incoming = sql(f"""
            WITH fresh AS (
                INSERT INTO {record} (at, due, store_id, kind, message_id, destination)
                SELECT %(now)s, due, %(store)s::smallint, 1, message_id, destination
                FROM postdate_incoming ORDER BY position
                ON CONFLICT (message_id, store_id) WHERE kind = 1 DO NOTHING RETURNING number, message_id),
            kept AS (
                INSERT INTO {content}
                SELECT f.number, i.headers, i.body FROM fresh AS f JOIN postdate_incoming AS i USING (message_id)),
            stored AS (
                INSERT INTO {pending} (number, due, attempt_at, expires_at, message_id, destination)
                SELECT f.number, i.due, i.due, i.expires_at, i.message_id, i.destination
                FROM fresh AS f JOIN postdate_incoming AS i USING (message_id))
            SELECT message_id FROM fresh""")
        # A message whose last record is a failure comes back under its number.
        self.revive = sql(f"""
            WITH back AS (
                SELECT r.number FROM {record} AS r
                WHERE r.message_id = %(message_id)s AND r.store_id = %(store)s AND r.kind = 1
                    AND (SELECT p.number FROM {pending} AS p WHERE p.number = r.number) IS NULL
                    AND (SELECT o.kind FROM {record} AS o WHERE o.message_id = %(message_id)s AND o.kind > 3
                        AND (o.store_id = %(store)s OR o.store_id IS NULL) ORDER BY o.number DESC LIMIT 1) IN (7, 10)),
            kept AS (
                INSERT INTO {content} SELECT number, %(headers)s, %(body)s FROM back
                ON CONFLICT DO NOTHING RETURNING number),
            stored AS (
                INSERT INTO {pending} (number, due, attempt_at, expires_at, message_id, destination)
                SELECT number, %(due)s, %(due)s, %(expires_at)s::timestamptz, %(message_id)s, %(destination)s FROM kept
                RETURNING number, message_id, due, destination),
            recorded AS ({insert_records("stored", "8", "'came back from the error queue'")})
            {select_and_notify("stored")}""")

        # --- claims. The lower bound spares reading entries of delivered rows that an old snapshot keeps (ADR 0057).
        since = "coalesce(%(from)s::timestamptz, '-infinity')"
        due = f"p.attempt_at < %(now)s AND p.attempt_at >= {since} ORDER BY p.attempt_at, p.number LIMIT %(limit)s"
        # A row that was changed while the statement ran is locked in its new version, but its content is read as it was
        # before. The statement cannot see the new version's place, and leaves such a row to the next claim.
        is_seen = f"(SELECT s.number FROM {pending} AS s WHERE s.ctid = p.place) IS NOT NULL"
        self.claim = sql(f"""
            WITH batch AS MATERIALIZED (
                SELECT p.*, p.ctid AS place FROM {pending} AS p WHERE {due} FOR UPDATE SKIP LOCKED)
            SELECT p.number, {PENDING_COLUMNS} FROM batch AS p {content_of} WHERE {is_seen}
            ORDER BY p.attempt_at, p.number""")
        # Nothing here names the holder in a way that the index of claimed messages matches. The planner would prefer to
        # read that index, because it was empty when the plan was made.
        is_claimed = "number = ANY(%(numbers)s::bigint[]) AND holder IS NOT DISTINCT FROM %(holder)s::bigint"
        self.finish = sql(f"""
            WITH gone AS (DELETE FROM {pending} WHERE {is_claimed} RETURNING number, message_id, due, destination),
            {delete_content("gone")},
            recorded AS ({insert_records("gone", "%(kind)s::smallint", "%(detail)s::text")})
            SELECT count(*)::integer FROM gone""")
        self.lease = sql(
            f"UPDATE {pending} SET holder = %(holder)s, attempt_at = NULL WHERE number = ANY(%(numbers)s::bigint[])"
        )
        self.still_claimed = sql(f"""
            SELECT number FROM {pending} WHERE number = ANY(%(numbers)s::bigint[]) AND coalesce(holder, 0) <> 0""")
        # Sleeping pollers are notified: a released message may be due before all messages that they know.
        self.release_leases = sql(f"""
            WITH freed AS (
                UPDATE {pending} SET holder = NULL, attempt_at = due
                WHERE number = ANY(%(numbers)s::bigint[]) AND coalesce(holder, 0) = ANY(%(holders)s) RETURNING 1)
            SELECT count(*), pg_notify('{names.channel}', 'lost 0 0') FROM freed HAVING count(*) > 0""")
        self.release = sql(f"""
            WITH back AS (
                UPDATE {pending} SET holder = NULL, attempt_at = coalesce(%(attempt_at)s::timestamptz, due)
                WHERE {is_claimed}
                RETURNING attempt_at)
            SELECT count(*)::integer, pg_notify('{names.channel}', 'due ' || %(store)s || ' '
                || (extract(epoch FROM min(attempt_at)) * 1000000)::bigint) FROM back HAVING count(*) > 0""")
        self.retry = sql(f"""
            WITH counted AS (
                UPDATE {pending} SET failures = failures + 1, holder = NULL, attempt_at = %(attempt_at)s
                WHERE {is_claimed}
                RETURNING number, message_id, due, destination),
            recorded AS ({insert_records("counted", "4", "%(reason)s::text")}{of_retries})
            SELECT number FROM counted""")
        # One search of an index for each message, however many queues and limits there are; none if nothing was ever
        # limited.
        limits = f"SELECT l.limits FROM {self.limits_table} AS l WHERE l.store = %(store)s"
        has_no_limits = f"""(NOT EXISTS (SELECT 1 FROM {self.limits_table})
            OR coalesce(({limits} AND l.destination = p.destination), '') = '')"""
        can_move = f"(SELECT q.queue_id FROM {queue} AS q WHERE q.name = p.destination) IS NOT NULL AND {has_no_limits}"
        is_unclaimed = f"p.attempt_at >= {since} AND p.number <> ALL(%(held)s::bigint[])"
        self.next_attempt = sql(f"""
            SELECT {clamped_time("p.attempt_at")}, {can_move} FROM {pending} AS p WHERE {is_unclaimed}
            ORDER BY p.attempt_at, p.number LIMIT 1""")
        lanes = f"'{LANES.isoformat()}'::timestamptz"
        earliest = f"""least((SELECT min(attempt_at) FROM {pending}),
            (SELECT min(due) FROM {pending} WHERE attempt_at <> due),
            (SELECT min(due) FROM {pending} WHERE holder IS NOT NULL))"""
        first_due = f"SELECT {clamped_time('first.due')} FROM (SELECT {earliest} AS due) AS first"
        self.next_due = sql(first_due)

        # From each lane with messages to the next one: one search of an index for each, however many lanes are empty.
        width = f"interval '{LANE_WIDTH.total_seconds():.0f} seconds'"

        def next_lane(lane: str) -> str:
            lane_of = f"floor(extract(epoch FROM min(p.attempt_at) - {lanes}) / extract(epoch FROM {width}))::bigint"
            in_lane = f"p.attempt_at >= {lanes} + ({lane}) * {width}"
            within = f"p.attempt_at < {lanes} + ((SELECT lane FROM last) + 1) * {width}"
            return f"SELECT {lane_of} FROM {pending} AS p WHERE {in_lane} AND {within}"

        self.limits_of_held = sql(f"""
            WITH RECURSIVE
            last AS MATERIALIZED (SELECT max(lane) AS lane FROM {self.limits_table}),
            held (lane) AS (
                SELECT ({next_lane("0")})
                UNION ALL SELECT ({next_lane("h.lane + 1")}) FROM held AS h WHERE h.lane IS NOT NULL)
            SELECT l.destination, l.lane, l.limits, l.free_at
            FROM held AS h JOIN {self.limits_table} AS l ON l.lane = h.lane WHERE l.store = %(store)s""")

        # --- moving: one statement. The batch is written down first, so that every part works on exactly these rows.
        # A row that was changed while the statement ran is locked in its new version, which the removal cannot see.
        # Then the statement fails (division by zero, see errors.is_conflict) and is run again.
        listed_columns = ", ".join(
            f"array_agg({column}) FILTER (WHERE %(listing)s)"
            for column in ("message_id", clamped_time("due"), "destination", "expired")
        )
        move = f"""
            WITH batch AS MATERIALIZED (
                SELECT p.ctid AS place, p.number, p.message_id, p.due, p.expires_at, p.destination, q.queue_id,
                    coalesce(p.expires_at < %(now)s, false) AS expired
                FROM {pending} AS p {lookup_join("queue_id", queue, "name = p.destination", "q")}
                WHERE {has_no_limits} AND {due} FOR UPDATE OF p SKIP LOCKED),
            gone AS (DELETE FROM {pending} WHERE ctid = ANY (ARRAY(SELECT place FROM batch)) RETURNING 1),
            sent AS (
                INSERT INTO {queue_message} (queue_id, content, due, expires_at, ends_at, store_id, message_id)
                SELECT queue_id, number, due, expires_at, clock_timestamp() + (expires_at - %(now)s),
                    %(store)s::smallint, message_id
                FROM batch WHERE NOT expired
                RETURNING queue_id, number),
            {delete_content("batch WHERE expired")},
            recorded AS ({insert_records("batch", "CASE WHEN expired THEN 5 ELSE 2 END", "NULL")})
            SELECT done.*, next.* FROM (
                SELECT count(*) FILTER (WHERE NOT expired)::integer, count(*) FILTER (WHERE expired)::integer,
                    (SELECT jsonb_object_agg(q.name, s.sent) FROM (
                        SELECT queue_id, count(*) AS sent, pg_notify(
                            '{names.channel}', 'queue ' || queue_id || ' ' || min(number)) FROM sent GROUP BY queue_id
                        ) AS s {lookup_join("name", queue, "queue_id = s.queue_id", "q")}),
                    {clamped_time("min(due) FILTER (WHERE NOT expired)")},
                    1 / (CASE WHEN count(*) = (SELECT count(*) FROM gone) THEN 1 ELSE 0 END),
                    {listed_columns}
                FROM batch) AS done"""
        # If few messages are due at a time, the same statement returns the next attempt. A full batch is followed by
        # another query anyhow, so it would read the same rows twice.
        nothing_next = "CROSS JOIN (SELECT NULL::timestamptz, NULL::boolean) AS next"
        next_one = f"""
            LEFT JOIN (
                SELECT {clamped_time("p.attempt_at")}, {can_move} FROM {pending} AS p
                WHERE {is_unclaimed} AND p.number NOT IN (SELECT number FROM batch)
                ORDER BY p.attempt_at, p.number LIMIT 1) AS next ON true"""
        self.move, self.move_few = sql(f"{move} {nothing_next}"), sql(f"{move} {next_one}")

        # --- one message by its id
        def target(where: str) -> str:
            return f"""
            target AS (
                SELECT p.number, p.due FROM {pending} AS p
                WHERE p.number = {number_of_id} AND p.unreadable IS NULL AND {where}
                FOR UPDATE OF p SKIP LOCKED)"""

        def removal_statement(where: str, kind: RecordKind) -> bytes:
            return sql(f"""
            WITH {target(where)},
            gone AS (
                DELETE FROM {pending} WHERE number = (SELECT number FROM target)
                RETURNING number, message_id, due, destination),
            {delete_content("gone")},
            recorded AS ({insert_records("gone", f"{kind:d}", "NULL")})
            SELECT number FROM gone""")

        free_or_own = "(p.holder IS NULL OR p.holder = ANY(%(others)s::bigint[]))"
        self.remove_by_id = removal_statement(free_or_own, RecordKind.DELIVERED)
        self.cancel = removal_statement("p.holder IS NULL", RecordKind.CANCELLED)
        self.count_failure_by_id = sql(f"""
            WITH {target(free_or_own)},
            counted AS (
                UPDATE {pending} SET failures = failures + 1, holder = NULL, attempt_at = due
                WHERE number = (SELECT number FROM target) RETURNING number, message_id, due, destination),
            recorded AS ({insert_records("counted", "4", "NULL")}{of_retries})
            SELECT number, pg_notify('{names.channel}', 'lost 0 0') FROM counted""")

        def deliver_at_header(due: str) -> str:
            """Return SQL of the header of a due time, as `postdate.messages.format_timestamp` writes it."""
            time = f"to_char({due}::timestamptz AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS:US')"
            return f"""'"{Headers.DELIVER_AT}":"' || {time} || ' Z"'"""

        before, after = deliver_at_header("(SELECT due FROM target)"), deliver_at_header("%(due)s")

        # The header of a wall time, with one of the commas beside it. In an encoded text each quotation mark has a
        # backslash before it, so only the header itself matches.
        wall = f'"{Headers.WALL_TIME}":"[^"]*"'.replace(".", "[.]")
        wall = f"(?<=[{{,]){wall},|,{wall}(?=[}}]$)|(?<=^[{{]){wall}(?=[}}]$)"

        self.reschedule = sql(f"""
            WITH {target("p.holder IS NULL AND (p.expires_at IS NULL OR p.expires_at >= %(due)s)")},
            moved AS (
                UPDATE {pending} SET due = %(due)s, attempt_at = %(due)s, failures = 0
                WHERE number = (SELECT number FROM target) RETURNING number, message_id, due, destination),
            retimed AS (
                UPDATE {content} SET headers = (
                    SELECT CASE WHEN %(wall)s::text IS NULL THEN n.headers
                        WHEN n.headers = '{{}}' THEN %(wall)s::text || '}}'
                        ELSE %(wall)s::text || ',' || substr(n.headers, 2) END
                    FROM (SELECT regexp_replace(
                        replace(headers, {before}, {after}), '{wall}', ''
                        )) AS n (headers))
                WHERE number = (SELECT number FROM target) AND (
                    %(wall)s::text IS NOT NULL OR strpos(headers, '"{Headers.WALL_TIME}":') > 0
                    OR strpos(headers, {before}) > 0)),
            recorded AS ({insert_records("moved", "8", "NULL")})
            {select_and_notify("moved")}""")
        self.lock_key = sql("SELECT pg_advisory_xact_lock(hashtextextended(%(first)s, %(store)s))")
        self.newest = sql(f"""
            SELECT r.message_id, {clamped_time("r.at")},
                coalesce((SELECT p.holder IS NULL AND p.unreadable IS NULL
                    FROM {pending} AS p WHERE p.number = r.number), false)
            FROM {record} AS r
            WHERE r.kind = 1 AND r.store_id = %(store)s AND r.message_id BETWEEN %(first)s AND %(last)s
                AND char_length(r.message_id) = char_length(%(first)s) AND right(r.message_id, 8) ~ '^[0-9]{{8}}$'
                AND r.detail = '{KEYED}'
            ORDER BY r.message_id DESC LIMIT 1""")
        self.store_key = sql(f"""
            UPDATE {record} AS r SET detail = '{KEYED}' WHERE {scheduled} AND r.detail IS NULL RETURNING r.number""")
        self.replace = sql(f"""
            WITH target AS (
                SELECT p.number FROM {pending} AS p
                WHERE p.holder IS NULL AND p.unreadable IS NULL AND p.number = (
                    SELECT r.number FROM {record} AS r
                    WHERE r.message_id = %(message_id)s AND r.store_id = %(store)s AND r.kind = 1)
                FOR UPDATE OF p SKIP LOCKED),
            changed AS (
                UPDATE {pending} SET due = %(due)s, attempt_at = %(due)s, failures = 0,
                    expires_at = %(expires_at)s::timestamptz, destination = %(destination)s
                WHERE number = (SELECT number FROM target) RETURNING number, message_id, due, destination),
            written AS (
                UPDATE {content} SET headers = %(headers)s, body = %(body)s
                WHERE number = (SELECT number FROM changed)),
            recorded AS ({insert_records("changed", "8", "'replaced'")})
            {select_and_notify("changed")}""")
        self.get = sql(f"""
            SELECT {LISTED_COLUMNS}
            FROM {pending} AS p {lookup_join("headers, body", content, "number = p.number", "c")}
            WHERE p.number = {number_of_id} AND p.unreadable IS NULL""")

        # --- questions of operators -----------------------------------------------------

        def first_rows_by(time: str, condition: str) -> str:
            return f"""
                (SELECT * FROM (
                    SELECT * FROM {pending} WHERE {condition}
                        AND ({time}, number) > (%(due_from)s::timestamptz, %(behind)s::bigint)
                        AND {time} < coalesce(%(due_to)s::timestamptz, {AFTER_LATEST_TIME})
                    ORDER BY {time}, number LIMIT %(among)s::integer) AS looked_through
                WHERE %(destination)s::text IS NULL OR destination = %(destination)s
                ORDER BY {time}, number LIMIT %(limit)s)"""

        # The due times of most messages are those of their attempts, and both have an index. Claimed messages are in no
        # index by their due time, but they are few. Content is joined to the first rows only.
        self.list_pending = sql(f"""
            SELECT {LISTED_COLUMNS} FROM (
                {first_rows_by("attempt_at", "attempt_at = due")}
                UNION ALL {first_rows_by("due", "attempt_at <> due")}
                UNION ALL {first_rows_by("due", "attempt_at IS NULL AND unreadable IS NULL")}
                ORDER BY due, number LIMIT %(limit)s) AS p {content_of} ORDER BY p.due, p.number""")
        self.history = sql(f"""
            WITH known AS MATERIALIZED (
                SELECT r.* FROM {record} AS r WHERE {scheduled}
                UNION ALL SELECT r.* FROM {record} AS r WHERE r.message_id = %(id)s AND r.kind > 3 AND {is_own}),
            delivered AS (
                SELECT found.* FROM (SELECT DISTINCT due FROM known) AS at CROSS JOIN LATERAL (
                    SELECT r.* FROM {record} AS r
                    WHERE r.due = at.due AND r.kind IN (2, 3) AND r.message_id = %(id)s AND {is_own} OFFSET 0) AS found)
            SELECT kind, message_id, at, due, destination, detail
            FROM (SELECT * FROM known UNION ALL SELECT * FROM delivered) AS every ORDER BY number""")
        self.record_counts = sql(f"""
            SELECT kind, count(*) FROM {record} AS r WHERE {is_own} GROUP BY kind ORDER BY kind""")
        # A row lock is the number of the running transaction in the row's xmax, which is visible without any write.
        is_locked = (
            "p.xmax::text IN (SELECT transactionid::text FROM pg_locks WHERE locktype = 'transactionid' AND granted)"
        )
        unreadable = f"SELECT count(*) FROM {pending} WHERE unreadable IS NOT NULL"
        counts = f"""
            SELECT (SELECT count(*) FROM {pending}) - ({unreadable}),
                (SELECT count(*) FROM {pending} AS p WHERE attempt_at < %(at)s AND NOT {is_locked})
                    + (SELECT count(*) FROM {pending}
                        WHERE attempt_at <> due AND attempt_at >= %(at)s AND due < %(at)s),
                (SELECT count(*) FROM {pending} WHERE holder IS NOT NULL)
                    + (SELECT count(*) FROM {pending} AS p WHERE attempt_at < %(at)s AND {is_locked}),
                (SELECT count(*) FROM {pending} WHERE failures > 0 AND unreadable IS NULL), ({first_due})"""
        self.due_count = sql(f"SELECT count(*) FROM {pending} WHERE attempt_at >= %(first)s AND attempt_at < %(end)s")
        self.moved_dues = sql(f"""
            SELECT date_trunc('second', at), sum(count)::bigint FROM (
                SELECT due AS at, 1 AS count FROM {pending} WHERE failures > 0 AND unreadable IS NULL
                UNION ALL SELECT due, 1 FROM {pending}
                    WHERE failures = 0 AND attempt_at IS NULL AND unreadable IS NULL
                UNION ALL SELECT due, 1 FROM {pending} WHERE failures = 0 AND attempt_at > {lanes}
                UNION ALL SELECT attempt_at, -1 FROM {pending} WHERE failures > 0 AND unreadable IS NULL) AS moved
            WHERE at >= %(first)s AND at < %(end)s GROUP BY 1""")
        self.statistics = sql(f"{counts}, ({unreadable})")


def columns_of(rows: Sequence[Values]) -> dict[str, list[Any]]:
    """Return the values of a statement for many rows, as an array for each column."""
    return {name: [row[name] for row in rows] for name in rows[0]}


class PostgresSqlDialect(SqlDialect):
    """PostgreSQL's form of the common statements: prepared, with ``timestamptz`` for times."""

    can_batch = True

    @override
    def statement_of(self, template: str) -> bytes:
        return sql(template)

    @override
    def rows(self, session: Connection, statement: bytes, values: Mapping[str, Any]) -> Sequence[tuple[Any, ...]]:
        return session.execute(statement, values, prepare=True).fetchall()

    @override
    def change(self, session: Connection, statement: bytes, values: Mapping[str, Any]) -> int:
        return session.execute(statement, values, prepare=True).rowcount

    @override
    def delete_statement(self, table: str, condition: str, order: str, index: str) -> bytes:
        """Return a DELETE that skips rows in deletion by others, so that two prune runs do not wait for each other.

        Our sessions do not sort, so the order leaves no choice of the index.
        """
        first = f"SELECT ctid FROM {table} WHERE {condition} ORDER BY {order} LIMIT %(limit)s FOR UPDATE SKIP LOCKED"
        return sql(f"DELETE FROM {table} WHERE ctid = ANY (ARRAY({first}))")

    @override
    def time(self, instant: datetime) -> datetime:
        return instant

    @override
    def time_at(self, microseconds: int) -> datetime:
        return nearest_instant(microseconds)

    @override
    def instant(self, value: datetime | None) -> datetime | None:
        return utc(value)

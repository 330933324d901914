"""An operator's questions to a PostgreSQL store and its queues, and its clock (ADR 48). They change no message.

The row of a leased message names its holder. A row lock is visible as the number of the running transaction in the
row's ``xmax``. It leads to the session, whose name contains the process.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeVar

from typing_extensions import override

from postdate import ports
from postdate.backends.postgres import rows as postgres_rows
from postdate.backends.postgres.access import Access, Connection
from postdate.backends.postgres.listening import holders_of_process, live_holders_query
from postdate.backends.postgres.names import SchemaNames, sql
from postdate.backends.postgres.objects import find_missing_objects
from postdate.backends.postgres.queues import lengths_query
from postdate.backends.sql.migrations import migrations
from postdate.backends.sql.questions import header_text
from postdate.clock import steady_seconds
from postdate.errors import QueueNotFound

T = TypeVar("T")

_SETTINGS: Final = ("fsync", "full_page_writes", "synchronous_commit", "transaction_read_only")
_OLD: Final = timedelta(minutes=1)
"""The age from which on a snapshot is old; younger snapshots are normal."""
_FAR_BEHIND: Final = 100_000
"""The number of transactions after which a replication slot counts as old.

The server does not store its snapshot's time.
"""
_LATEST_PAGES: Final = 1_500
"""The number of last pages of the records, which are appended: some 100,000 records."""

_FACTS: Final = """
    SELECT current_setting('server_version'), clock_timestamp(), pg_is_in_recovery(),
        (SELECT json_object_agg(name, setting) FROM pg_settings WHERE name = ANY(%s))"""
# A snapshot in another database does no harm here; a snapshot in no database (replication) does.
_OLD_SESSIONS: Final = """
    SELECT pid, application_name, coalesce(usename, ''), coalesce(state, backend_type, ''),
        clock_timestamp() - coalesce(xact_start, backend_start), ''
    FROM pg_stat_activity
    WHERE (datname = current_database() OR datid IS NULL) AND pid <> pg_backend_pid()
        AND (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL) AND backend_type <> 'autovacuum worker'
        AND clock_timestamp() - coalesce(xact_start, backend_start) >= %(old)s"""
_PREPARED: Final = """
    SELECT 0, 'prepared transaction ' || gid, owner::text, 'prepared', clock_timestamp() - prepared,
        'ROLLBACK PREPARED ' || quote_literal(gid)
    FROM pg_prepared_xacts WHERE database = current_database() AND clock_timestamp() - prepared >= %(old)s"""
# to_jsonb: servers before version 17 do not have the column.
_SLOTS: Final = """
    SELECT 0, 'replication slot ' || slot_name, '', age(xmin) || ' transactions behind',
        coalesce(clock_timestamp() - (to_jsonb(s) ->> 'inactive_since')::timestamptz, '0 s'),
        'SELECT pg_drop_replication_slot(' || quote_literal(slot_name) || ')'
    FROM pg_replication_slots AS s
    WHERE (database = current_database() OR database IS NULL) AND age(xmin) >= %(far_behind)s"""


class PostgresQueueObserver(ports.Observer):
    """Answers questions about the queues of a schema, and the processes that use it. Unreadable rows are left out."""

    def __init__(self, database: Access) -> None:
        self._database = database
        names = database.names
        self._holder = names.name_of("holder")
        self._queued_query = f"""
            SELECT m.number, q.name, {postgres_rows.QUEUED_COLUMNS}, h.pid
            FROM {names.name_of("queue_message")} AS m JOIN {names.name_of("queue")} AS q USING (queue_id)
            JOIN {names.name_of("content")} AS c ON c.number = m.content LEFT JOIN {self._holder} AS h USING (holder)"""

    @property
    def _delivers(self) -> str:
        """The condition under which a process delivers due messages."""
        return "delivers"

    @property
    def _values(self) -> Mapping[str, object]:
        """The values of :attr:`_delivers`."""
        return {}

    async def _rows(self, statement: str, values: Mapping[str, object]) -> list[tuple[Any, ...]]:
        return await self._database.run(
            lambda connection: connection.execute(sql(statement), values).fetchall(), patiently=True
        )

    async def _read_all(
        self, statement: str, values: Mapping[str, object], decode: Callable[[tuple[Any, ...]], T]
    ) -> list[T]:
        return (await self._read_page(statement, values, decode))[0]

    async def _read_page(
        self, statement: str, values: Mapping[str, object], decode: Callable[[tuple[Any, ...]], T]
    ) -> tuple[list[T], list[postgres_rows.Unreadable]]:
        def read_page(connection: Connection) -> tuple[list[T], list[postgres_rows.Unreadable]]:
            return postgres_rows.decode_rows(connection.execute(sql(statement), values), 0, decode)

        return await self._database.run(read_page, patiently=True)

    @override
    async def processes(self) -> Sequence[ports.Process]:
        return await self._database.run(self._read_processes)

    def _read_processes(self, connection: Connection) -> list[ports.Process]:
        lives = """EXISTS (
            SELECT 1 FROM pg_locks AS l WHERE l.locktype = 'advisory' AND l.objsubid = 2 AND l.granted
                AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
                AND l.classid = %(class)s::integer::oid AND l.objid::bigint = h.holder)"""
        rows = connection.execute(
            sql(
                f"SELECT holder, pid, machine, started_at, {lives}, {self._delivers}, receives "
                f"FROM {self._holder} AS h ORDER BY holder"
            ),
            {"class": self._database.names.lock_class, **self._values},
        ).fetchall()
        own_numbers = holders_of_process(self._database.names)
        processes: dict[tuple[str, int, bool], ports.Process] = {}
        for holder, pid, machine, started_at, alive, delivers, receives in rows:
            if holder in own_numbers and pid == os.getpid():
                continue
            process = ports.Process(pid, machine, started_at.astimezone(UTC), alive, delivers, tuple(receives))
            key = (machine, pid, alive)  # A process has one holder for its store and another one for its queues.
            processes[key] = processes[key].merge(process) if key in processes else process
        return list(processes.values())

    @override
    async def queue_lengths(self) -> Mapping[str, int]:
        return dict(await self._rows(f"{lengths_query(self._database.names)} ORDER BY name", {}))

    @override
    async def browse(self, queue: str, limit: int, after: int = 0) -> Sequence[ports.QueuedMessage]:
        queue_id, messages = await self._queue_id(queue), list[ports.QueuedMessage]()
        statement = (
            f"{self._queued_query} WHERE m.queue_id = %(queue)s AND m.number > %(after)s "
            "ORDER BY m.queue_id, m.number LIMIT %(limit)s"
        )
        while (remaining := limit - len(messages)) > 0:
            values = {"queue": queue_id, "after": after, "limit": remaining}
            page, unreadable = await self._read_page(statement, values, _decode_queued)
            messages += page
            if len(page) + len(unreadable) < remaining:
                break
            after = max(*(each.number for each in page), *(each.number for each in unreadable), after)
        return messages

    @override
    async def last_number(self, queue: str) -> int:
        message = self._database.names.name_of("queue_message")
        values = {"queue": await self._queue_id(queue)}
        query = f"SELECT number FROM {message} WHERE queue_id = %(queue)s ORDER BY queue_id DESC, number DESC LIMIT 1"
        rows = await self._rows(query, values)
        return int(rows[0][0]) if rows else 0

    async def _queue_id(self, queue: str) -> int:
        find = f"SELECT queue_id FROM {self._database.names.name_of('queue')} WHERE name = %(queue)s"
        if not (rows := await self._rows(find, {"queue": queue})):
            raise QueueNotFound.of(queue, database=self._database.where)
        return int(rows[0][0])

    @override
    async def find_in_queues(self, message_id: str) -> Sequence[ports.QueuedMessage]:
        condition = "WHERE m.message_id = %(id)s OR strpos(c.headers, %(header)s) > 0 ORDER BY m.number"
        values = {"id": message_id, "header": header_text(message_id)}
        return await self._read_all(f"{self._queued_query} {condition}", values, _decode_queued)


class PostgresObserver(PostgresQueueObserver):
    """Answers questions about one store and the queues of its schema.

    ``table`` returns the name of the store's table, which may not be known yet.
    """

    def __init__(self, database: Access, table: Callable[[], str]) -> None:
        super().__init__(database)
        self._table = table

    @property
    def _pending_table(self) -> str:
        return self._database.names.name_of(self._table())

    @property
    def _pending_state_query(self) -> str:
        return f"""
            SELECT p.number, {postgres_rows.PENDING_COLUMNS}, p.attempt_at, h.pid,
                (SELECT a.pid || ' ' || a.application_name FROM pg_locks AS l JOIN pg_stat_activity AS a USING (pid)
                 WHERE l.locktype = 'transactionid' AND l.granted AND l.transactionid = p.xmax)
            FROM {self._pending_table} AS p JOIN {self._database.names.name_of("content")} AS c USING (number)
            LEFT JOIN {self._holder} AS h USING (holder)"""

    @property
    def _store_number(self) -> str:
        return f"(SELECT store_id FROM {self._database.names.name_of('store')} WHERE name = %(table)s)"

    @property
    def _store_condition(self) -> str:
        return f"store_id = {self._store_number}"

    @property
    @override
    def _delivers(self) -> str:
        """A process of another endpoint delivers from another store of the schema."""
        from_here = f"coalesce({self._store_number} = ANY (delivers_from), false)"
        return f"(delivers AND (delivers_from IS NULL OR {from_here}))"

    @property
    @override
    def _values(self) -> Mapping[str, object]:
        return {"table": self._table()}

    @override
    async def pending_state_of(self, message_id: str) -> ports.PendingState | None:
        record = f"SELECT number FROM {self._database.names.name_of('record')} WHERE kind = 1 AND message_id = %(id)s"
        number = f"{record} AND {self._store_condition}"
        query = f"{self._pending_state_query} WHERE p.unreadable IS NULL AND p.number = ({number})"
        standings = await self._read_all(query, {"id": message_id, "table": self._table()}, _decode_pending_state)
        return standings[0] if standings else None

    @override
    async def retries_of(self, message_id: str) -> Sequence[ports.PendingState]:
        other_readable = "p.message_id <> %(id)s AND p.unreadable IS NULL"
        condition = f"WHERE strpos(c.headers, %(header)s) > 0 AND {other_readable} ORDER BY p.number"
        values = {"id": message_id, "header": header_text(message_id)}
        return await self._read_all(f"{self._pending_state_query} {condition}", values, _decode_pending_state)

    @property
    def _latest_query(self) -> str:
        pages = "(pg_relation_size(%(record)s::regclass) / current_setting('block_size')::bigint)"
        first = f"SELECT ('(' || greatest({pages} - {_LATEST_PAGES}, 0) || ',0)')::tid"  # once, not for each row
        return f"""
            SELECT at, due FROM {self._database.names.name_of("record")}
            WHERE ctid >= ({first}) AND kind = 2 AND {self._store_condition}
            ORDER BY at DESC, number DESC LIMIT %(limit)s"""

    @override
    async def latest_deliveries(self, limit: int) -> Sequence[ports.DeliveredMessage]:
        record = self._database.names.qualified_name("record")
        rows = await self._rows(self._latest_query, {"record": record, "table": self._table(), "limit": limit})
        return [ports.DeliveredMessage(at.astimezone(UTC), postgres_rows.utc(due)) for at, due in rows]

    @override
    async def next_destinations(self, messages: int) -> Mapping[str, int]:
        pending = f"{self._pending_table} WHERE unreadable IS NULL"
        following = f"SELECT destination FROM {pending} ORDER BY attempt_at, number LIMIT %(messages)s"
        counts_query = f"SELECT destination, count(*) FROM ({following}) AS f GROUP BY 1 ORDER BY 1"
        return dict(await self._rows(counts_query, {"messages": messages}))

    def _read_processes(self, connection: Connection) -> list[ports.Process]:
        """Add processes that claim messages by row locks alone: they have no number, but a session with their name."""
        processes = super()._read_processes(connection)
        for session, started_at in connection.execute(
            "SELECT a.pid || ' ' || a.application_name, min(a.backend_start) FROM pg_stat_activity AS a "
            "WHERE a.datname = current_database() AND a.pid <> pg_backend_pid() AND EXISTS ("
            "    SELECT 1 FROM pg_locks AS l WHERE l.pid = a.pid AND l.granted AND l.relation = %(table)s::regclass "
            "    AND l.mode = 'RowShareLock' AND l.database = a.datid) GROUP BY 1 ORDER BY 2",
            {"table": self._pending_table.replace("%%", "%")},
        ).fetchall():
            pid = _pid_of(session)
            if pid != os.getpid() and all(each.pid != pid or not each.alive for each in processes):
                processes.append(
                    ports.Process(pid, "", started_at.astimezone(UTC), alive=True, delivers=False, receives=())
                )
        return processes


# --- a server, its clock, and the sessions that keep it from cleaning up --------------------------------------------


async def server_facts(database: Access, table: str | None) -> ports.ServerFacts:
    def read_facts(connection: Connection) -> ports.ServerFacts:
        ((version, now, in_recovery, settings),) = connection.execute(_FACTS, (list(_SETTINGS),)).fetchall()
        current, newest, subjects = _schema_version(database, connection, table)
        # Tables of an earlier version lack what later migrations add.
        is_newest = current == newest
        missing = find_missing_objects(connection, database.names.schema, subjects).texts() if is_newest else []
        settings = {**settings, "in_recovery": "on" if in_recovery else "off"}
        return ports.ServerFacts("PostgreSQL", version, now.astimezone(UTC), current, newest, settings, missing)

    return await database.run(read_facts)


def _schema_version(database: Access, connection: Connection, table: str | None) -> tuple[int, int, list[str]]:
    """Return the present version, the newest one, and the subjects of the migrations.

    The versions are those of the schema, or of the store's table if only the table lags behind.
    """
    current_versions = dict[str, int]()
    marks = database.names.name_of("migration")
    if connection.execute("SELECT to_regclass(%s)", (marks.replace("%%", "%"),)).fetchone() != (None,):
        current_versions = dict(
            connection.execute(sql(f"SELECT subject, max(version) FROM {marks} GROUP BY subject"), ()).fetchall()
        )
    subjects = [("", "database"), *([] if table is None else [(table, "store")])]
    versions = [
        (current_versions.get(subject, 0), migrations("postdate.backends.postgres", part)[-1].version)
        for subject, part in subjects
    ]
    current, newest = next(((current, newest) for current, newest in versions if current != newest), versions[0])
    parts = [each for each in ("saga", "outbox") if each in current_versions]
    return current, newest, [*(subject for subject, _ in subjects), *parts]


async def old_snapshots(database: Access) -> Sequence[ports.OldSnapshot]:
    """Return old sessions, prepared transactions and replication slots.

    Other users' sessions are visible only to the role ``pg_read_all_stats``.
    """

    def read_snapshots(connection: Connection) -> list[ports.OldSnapshot]:
        values = {"old": _OLD, "far_behind": _FAR_BEHIND}
        snapshots = [
            ports.OldSnapshot(pid, application, user, age, state, mend)
            for statement in (_OLD_SESSIONS, _PREPARED, _SLOTS)
            for pid, application, user, state, age, mend in connection.execute(statement, values).fetchall()
        ]
        return sorted(snapshots, key=lambda snapshot: snapshot.age, reverse=True)

    return await database.run(read_snapshots)


def server_now(connection: Connection) -> tuple[datetime, float]:
    """Return the server's time, and the monotonic seconds at which it was received."""
    ((now,),) = connection.execute("SELECT clock_timestamp()").fetchall()
    return now.astimezone(UTC), steady_seconds()


def report_clock(database: Access, ahead: timedelta) -> None:
    holder = database.listener().wait_for_holder()
    update = sql(f"UPDATE {database.names.name_of('holder')} SET ahead = %s WHERE holder = %s")
    database.run_blocking(lambda connection: connection.execute(update, (ahead, holder)))


def reported_clocks(connection: Connection, names: SchemaNames) -> Mapping[str, timedelta]:
    query = sql(
        f"SELECT machine || ':' || pid, ahead FROM {names.name_of('holder')} "
        f"WHERE ahead IS NOT NULL AND holder IN ({live_holders_query(names)})"
    )
    return dict(connection.execute(query, ()).fetchall())


# --- rows --------------------------------------------------------------------------------------------------------


def _pid_of(session: str) -> int:
    """Return the client's process id from a session's name; the server's process id if the name has none."""
    match = re.search(r" postdate (\d+)( [0-9a-f]+)?$", session)
    return int(session.partition(" ")[0]) if match is None else int(match[1])


def _decode_pending_state(row: Sequence[Any]) -> ports.PendingState:
    _, *columns, attempt_at, leased_by, locked_by = row
    if locked_by is not None:
        return ports.PendingState(postgres_rows.message_of(*columns), None, _pid_of(locked_by))
    return ports.PendingState(postgres_rows.message_of(*columns), postgres_rows.utc(attempt_at), leased_by)


def _decode_queued(row: Sequence[Any]) -> ports.QueuedMessage:
    number, queue, *columns, pid = row
    envelope, failures, unanswered = postgres_rows.envelope_of(queue, *columns)
    return ports.QueuedMessage(queue, envelope, failures + unanswered, pid, number)

"""Jobs on whole tables of PostgreSQL: scans, the stream of records, pruning. Source: ADR 0011, 0032, 0063.

Shares of a scan are ranges of pages on disk.

Numbers of records are not in the order of commits. A transaction that draws a number holds a lock on the sequence until
its rows are visible, or it was rolled back. Therefore a stream reads the last number drawn, and *then* the holders of
that lock. Once these holders have ended, no transaction can write a number up to that one: later transactions draw
higher numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, Final

import psycopg
from typing_extensions import override

from postdate.backends.postgres.access import Access, Connection
from postdate.backends.postgres.inserting import OnTable
from postdate.backends.postgres.names import DEFAULT_SCHEMA, SchemaNames, check_name, literal, sql
from postdate.backends.postgres.rows import clamped_time, utc
from postdate.backends.sql.migrations import setup_command
from postdate.backends.sql.retention import AgeCondition
from postdate.clock import from_microseconds, to_microseconds
from postdate.errors import NotSupported, PipelineError, PostdateError, StoreNotSetUp
from postdate.ports import RecordKind, RecordStreamStore, Scan, ScanPart, scanning

_ELSEWHERE: Final[Mapping[str, str]] = {
    "headers": "c.headers",
    "body": "c.body",
    "number_of_failures": "t.failures",
    "queue": "q.name",
}
"""SQL of the columns that are not columns of the same name in ``t``."""

_TABLES: Final = {"records": "record", "queued": "queue_message"}
CONTENT: Final = frozenset({"headers", "body"})

BEGIN_SCAN: Final = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"


_NO_SUCH_SNAPSHOT: Final = frozenset({"22023", "42704"})
"""Error codes for the name of a snapshot that has ended: the former up to version 16."""


def adopt_snapshot(snapshot: str, execute: Callable[[str], object]) -> None:
    """Let a new transaction use a snapshot. ``execute`` is a function of either driver.

    Raises `PipelineError` when the server does not know the snapshot any more.
    """
    try:
        execute(f"SET TRANSACTION SNAPSHOT {literal(snapshot)}")
    except Exception as error:
        if getattr(error, "sqlstate", None) in _NO_SUCH_SNAPSHOT:
            raise PipelineError(
                f"the snapshot {snapshot!r} is not open any more; keep it open until all parts have been read"
            ) from error
        raise


def scan_query(names: SchemaNames, table: str, scan: Scan, part: ScanPart, *, plain: bool) -> str:
    """Return the statement that reads a share, without parameters, because COPY accepts none. Raise `PipelineError`.

    ``plain``: times are whole microseconds since 1970 UTC.
    """
    scanning.check_scan(scan.row_kind, scan.columns)
    columns = [
        f"{_column_sql(name, is_time=plain and name in scanning.TIME_COLUMNS)} AS {name}" for name in scan.columns
    ]
    conditions = [f"t.ctid >= '({part.first},0)'::tid", f"t.ctid < '({part.end},0)'::tid"]
    conditions += _conditions(names, table, scan)
    return f"SELECT {', '.join(columns) or '1'} FROM {_relation(names, table, scan)} WHERE {' AND '.join(conditions)}"


def _column_sql(name: str, *, is_time: bool) -> str:
    column = _ELSEWHERE.get(name, f"t.{name}")
    return f"(extract(epoch FROM {clamped_time(column)}) * 1000000)::bigint" if is_time else column


def _relation(names: SchemaNames, table: str, scan: Scan) -> str:
    if scan.row_kind == "records":
        return f"{names.qualified_name('record')} AS t"
    if scan.row_kind == "queued":
        return (
            f"{names.qualified_name('queue_message')} AS t JOIN {names.qualified_name('queue')} AS q USING (queue_id)"
        )
    pending = f"{names.qualified_name(table)} AS t"
    # Every pending message has its content: the join is only needed for its columns.
    if CONTENT.isdisjoint(scan.columns):
        return pending
    # One search of an index for each row: a join of the planner's choice would read all contents for each share.
    content = f"SELECT k.headers, k.body FROM {names.qualified_name('content')} AS k WHERE k.number = t.number OFFSET 0"
    return f"{pending} CROSS JOIN LATERAL ({content}) AS c"


def _conditions(names: SchemaNames, table: str, scan: Scan) -> list[str]:
    where, conditions = scan.row_filter, list[str]()
    store = f"(SELECT store_id FROM {names.qualified_name('store')} WHERE name = {_text(table)})"
    if scan.row_kind == "pending":
        conditions.append("t.unreadable IS NULL")
    else:
        conditions.append(f"(t.store_id IS NULL OR t.store_id = {store})")
    if where.message_ids is not None:
        conditions.append(_id_condition(names, scan.row_kind, store, _array(where.message_ids)))
    if where.destinations is not None:
        destination = "q.name" if scan.row_kind == "queued" else "t.destination"
        conditions.append(f"{destination} = ANY({_array(where.destinations)})")
    if where.due_from is not None:
        conditions.append(f"t.due >= {_instant(where.due_from)}")
    if where.due_to is not None:
        conditions.append(f"t.due < {_instant(where.due_to)}")
    return conditions


def _id_condition(names: SchemaNames, what: str, store: str, ids: str) -> str:
    if what != "pending":
        return f"t.message_id = ANY({ids})"
    # By the unique index of the scheduled records: pending messages have no index on their ids.
    return (
        f"t.number IN (SELECT r.number FROM {names.qualified_name('record')} AS r "
        f"WHERE r.message_id = ANY({ids}) AND r.store_id = {store} AND r.kind = 1)"
    )


def _text(text: str) -> str:
    """Return a text literal that the server reads the same way, however the session treats backslashes."""
    return "E'" + text.replace("\\", "\\\\").replace("'", "''") + "'"


def _array(texts: Sequence[str]) -> str:
    """Return an array of texts as SQL, without texts that no column can contain."""
    return f"ARRAY[{', '.join(_text(text) for text in texts if scanning.can_store_text(text))}]::text[]"


def _instant(instant: datetime) -> str:
    return f"'{from_microseconds(to_microseconds(instant)).isoformat(sep=' ')}'::timestamptz"


_WRITERS: Final = sql("""
    SELECT virtualtransaction FROM pg_locks
    WHERE locktype = 'relation' AND mode = 'RowExclusiveLock' AND granted AND relation = %s::regclass
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())""")

_COLUMNS: Final = {
    "number": "t.number",
    "kind": "t.kind",
    "message_id": "t.message_id",
    "at": "(extract(epoch FROM t.at) * 1000000)::bigint",
    "due": "(extract(epoch FROM t.due) * 1000000)::bigint",
    "destination": "t.destination",
    "detail": "t.detail",
}


@dataclass(frozen=True, slots=True)
class _AwaitedEnd:
    """A number, and the transactions that may still write up to it."""

    end: int
    writers: frozenset[str]


class PostgresRecordStream(RecordStreamStore):
    """A stream of records; see :class:`postdate.ports.scanning.RecordStreamStore`.

    A transaction that has drawn a number and stays open stops :meth:`safe_end` until the transaction ends.

    Args:
        url: of the primary: on a standby the writers are not visible.
        table: of the pending messages: which store of the schema.
        schema: of the tables.
    """

    def __init__(self, url: str, *, table: str, schema: str = DEFAULT_SCHEMA) -> None:
        self._database = Access(url, schema)
        self._table = check_name(table, "table")
        self._record, self._sequence = (
            self._database.names.name_of(name).replace("%%", "%") for name in ("record", "number")
        )
        self._safe_end = 0
        self._awaited_end: _AwaitedEnd | None = None
        self._identity: str | None = None

    @property
    @override
    def identity(self) -> str:
        """A hash of cluster, record table (by oid) and store: a restored copy is another store."""
        if self._identity is None:
            self._identity = self._database.run_blocking(self._identify)
        return self._identity

    @property
    @override
    def location(self) -> str:
        return f"{self._database.where}, table {self._table}"

    def _identify(self, connection: Connection) -> str:
        row = connection.execute(
            sql(f"""
                SELECT pg_is_in_recovery(), (SELECT system_identifier FROM pg_control_system()), current_database(),
                    %s::regclass::oid,
                    (SELECT store_id FROM {self._database.names.name_of("store")} WHERE name = %s)"""),
            (self._record, self._table),
        ).fetchone()
        assert row is not None
        standby, *parts = row
        if standby:
            raise NotSupported(
                f"{self._database.where} is a standby, which does not show the transactions that write; read from "
                f"the primary"
            )
        if parts[-1] is None:
            raise StoreNotSetUp(f"{self._database.where} has no table {self._table!r}; {setup_command(self._table)}")
        return hashlib.sha256(" ".join(map(str, parts)).encode()).hexdigest()[:24]

    @override
    def next_number(self) -> int:
        return self._database.run_blocking(self._next_number)

    def _next_number(self, connection: Connection) -> int:
        return connection.execute(sql(f"SELECT last_value + is_called::integer FROM {self._sequence}")).fetchall()[0][0]

    @override
    def safe_end(self) -> int:
        return self._database.run_blocking(self._advance_safe_end)

    def _advance_safe_end(self, connection: Connection) -> int:
        # The writers of one moment all end at some time, even if new ones begin all the time. So an awaited number is
        # not replaced by a higher one.
        if self._awaited_end is not None:
            if remaining := self._awaited_end.writers & self._writers(connection):
                self._awaited_end = _AwaitedEnd(self._awaited_end.end, remaining)
                return self._safe_end
            self._safe_end = self._awaited_end.end
        end = self._next_number(connection)
        writers = self._writers(connection)  # after the number; see above
        if writers:
            self._awaited_end = _AwaitedEnd(end, writers)
        else:
            self._safe_end, self._awaited_end = end, None
        return self._safe_end

    def _writers(self, connection: Connection) -> frozenset[str]:
        return frozenset(row[0] for row in connection.execute(_WRITERS, (self._sequence,)).fetchall())

    @override
    def read_records(self, first: int, end: int, columns: Sequence[str], page: int) -> Iterable[list[tuple[Any, ...]]]:
        with self._database.translate_errors(), self._database.connect() as connection:
            connection.execute("BEGIN READ ONLY")
            # The index of numbers is BRIN, which only bitmap scans use.
            connection.execute("SET LOCAL enable_bitmapscan = on")
            with connection.cursor(name="postdate_record_stream") as cursor:
                cursor.execute(self.query(columns), {"first": first, "end": end, "table": self._table})
                while rows := cursor.fetchmany(page):
                    yield rows

    def query(self, columns: Sequence[str]) -> bytes:
        """Return the statement of :meth:`read_records`, with the parameters ``first``, ``end`` and ``table``."""
        names, selected = self._database.names, ", ".join(_COLUMNS[column] for column in columns)
        store_id = f"SELECT store_id FROM {names.name_of('store')} WHERE name = %(table)s"
        of_this_store = f"(t.store_id IS NULL OR t.store_id = ({store_id}))"
        return sql(
            f"SELECT {selected} FROM {names.name_of('record')} AS t "
            f"WHERE t.number >= %(first)s AND t.number < %(end)s AND {of_this_store}"
        )

    @override
    def close(self) -> None:
        self._database.close_blocking()


# The next run repeats a removal that a crash of the server undoes. So no commit waits for the disk or delays services.
_ASYNCHRONOUS_COMMIT: Final = "SET LOCAL synchronous_commit = off"
_RECORD_COLUMNS: Final = "number, at, due, store_id, kind, message_id, destination, detail"
_PAGES_PER_RANGE: Final = 32
"""Of the indexes of the records."""


def _share_condition(part: ScanPart) -> str:
    return f"ctid >= '({part.first},0)'::tid AND ctid < '({part.end},0)'::tid"


class PostgresBulk(OnTable, scanning.StreamableStore):
    @contextmanager
    @override
    def snapshot(self) -> Generator[str]:
        """Yield the name of a snapshot; a separate connection and its transaction stay open for the block."""
        with self.database.translate_errors():
            connection = self.database.connect()
            try:
                connection.execute(BEGIN_SCAN)
                yield connection.execute("SELECT pg_export_snapshot()").fetchall()[0][0]
            finally:
                with suppress(psycopg.Error):  # The server ends the transaction of a closed connection some time later.
                    connection.rollback()
                connection.close()

    @override
    def scan_parts(self, row_kind: str, parts: int) -> Sequence[ScanPart]:
        """Return shares, which are ranges of pages on disk."""
        scanning.check_scan(row_kind)
        name = self.database.names.name_of(_TABLES.get(row_kind, self._sql.table)).replace("%%", "%")
        with self.database.lend_connection() as connection:
            ((pages,),) = connection.execute(
                "SELECT (pg_relation_size(%s::regclass) / current_setting('block_size')::integer)::bigint", (name,)
            ).fetchall()
        return scanning.split_into_shares(0, pages, parts)

    @override
    def scan(self, scan: Scan, part: ScanPart, page: int) -> Iterable[list[tuple[Any, ...]]]:
        query = scan_query(self.database.names, self._sql.table, scan, part, plain=True)
        with self.database.translate_errors(), self.database.connect() as connection:
            connection.execute(BEGIN_SCAN)
            if scan.snapshot is not None:
                adopt_snapshot(scan.snapshot, lambda text: connection.execute(sql(text)))
            with connection.cursor(name="postdate_scan") as cursor:
                cursor.execute(sql(query))
                while rows := cursor.fetchmany(page):
                    yield rows

    @property
    @override
    def records_in_commit_order(self) -> bool:
        return False

    @override
    def tables_of_stores(self) -> Sequence[str]:
        query = sql(f"SELECT name FROM {self.database.names.qualified_name('store')} ORDER BY name")
        return self.database.run_blocking(lambda connection: [name for (name,) in connection.execute(query)])

    @property
    @override
    def prune_share_width(self) -> int:
        """The number of pages with some ten thousand records."""
        return 128

    @override
    def prune_before(self, part: ScanPart, before: datetime, now: datetime) -> int:
        names, store_id = self.database.names, self.database.run_blocking(self._store_id)
        record, last_of_key = names.qualified_name("record"), "left(r.message_id, -8) || '99999999'"
        of_this_store = f"AND ({{0}}.store_id = {store_id} OR {{0}}.store_id IS NULL)"
        pending, at = names.qualified_name(self._sql.table), _instant(before)
        # A record without a store is in the streams of all stores of the schema.
        is_followed = f"r.store_id IS NULL OR p.store_id = {store_id}"
        position = f"SELECT min(p.number) FROM {names.qualified_name('stream_position')} AS p WHERE {is_followed}"
        is_keyed = "r.message_id ~ '~[0-9]{8}$'"
        condition = AgeCondition(
            record, pending, "number", at, is_keyed, last_of_key, of_this_store, "OFFSET 0", position
        )
        # Of the records without a store, those of another store's messages are left to it: its retention may be longer.
        scheduled_elsewhere = f"s.message_id = r.message_id AND s.kind = 1 AND s.store_id <> {store_id} OFFSET 0"
        prune_old = sql(f"""
            DELETE FROM {record} AS r WHERE {_share_condition(part)} AND (r.store_id = {store_id} OR (
                r.store_id IS NULL AND NOT EXISTS (SELECT 1 FROM {record} AS s WHERE {scheduled_elsewhere})))
                AND {condition.condition()} RETURNING r.kind""")
        remove_marker = sql(f"""
            DELETE FROM {record} WHERE message_id = {literal(scanning.PRUNED_ID)} AND store_id = {store_id}
                AND kind = {RecordKind.PRUNED:d} RETURNING due, detail""")
        insert_marker = sql(
            f"INSERT INTO {names.name_of('record')} ({_RECORD_COLUMNS}) VALUES (DEFAULT, %s, %s, %s, %s, %s, NULL, %s)"
        )

        def prune(connection: Connection) -> int:
            connection.execute(_ASYNCHRONOUS_COMMIT)
            kinds = [kind for (kind,) in connection.execute(prune_old)]
            if kinds:
                marker = scanning.PrunedCounts.of(
                    (utc(due), detail) for due, detail in connection.execute(remove_marker)
                ).plus(before, kinds)
                values = (now, marker.before, store_id, int(RecordKind.PRUNED), scanning.PRUNED_ID, marker.detail)
                connection.execute(insert_marker, values)
            return len(kinds)

        removed = self.database.transaction_blocking(prune, patiently=True)
        if removed:
            self._lost_records.add(part)
        elif part in self._lost_records:
            self._lost_records.discard(part)
            self._summarize(part)
        return removed

    @cached_property
    def _lost_records(self) -> set[ScanPart]:
        """The shares from which records were pruned since their indexes were made."""
        return set()

    def _summarize(self, part: ScanPart) -> None:
        """Make the indexes of page ranges forget the rows that an earlier round pruned from a share and vacuumed.

        Otherwise the ranges only widen. Nothing is done while the table is vacuumed, or where the role has no right.
        """
        calls = [
            f"brin_desummarize_range({index}, page), brin_summarize_range({index}, page)"
            for name in ("record_delivered", "record_number")
            for index in (f"{literal(self.database.names.qualified_name(name))}::regclass",)
        ]
        pages = f"generate_series({part.first}::bigint, {part.end - 1}, {_PAGES_PER_RANGE}) AS page"

        def summarize(connection: Connection) -> None:
            connection.execute("SET LOCAL lock_timeout = '50ms'")
            connection.execute(sql(f"SELECT {', '.join(calls)} FROM {pages}"))

        with suppress(PostdateError):
            self.database.transaction_blocking(summarize)

    # --- positions of streams -----------------------------------------------------------------------------------

    @override
    def stream_positions(self) -> Sequence[scanning.StreamPosition]:
        table = self.database.names.name_of("stream_position")
        query = sql(f"SELECT name, number, at FROM {table} WHERE store_id = %s ORDER BY name")

        def read(connection: Connection) -> list[scanning.StreamPosition]:
            rows = connection.execute(query, (self._store_id(connection),)).fetchall()
            return [scanning.StreamPosition(name, number, at.astimezone(UTC)) for name, number, at in rows]

        return self.database.run_blocking(read)

    @override
    def set_stream_position(self, name: str, number: int, now: datetime) -> None:
        table = self.database.names.name_of("stream_position")
        update = sql(f"UPDATE {table} SET number = %s, at = %s WHERE store_id = %s AND name = %s")
        insert = sql(f"INSERT INTO {table} (number, at, store_id, name) VALUES (%s, %s, %s, %s)")

        def write(connection: Connection) -> None:
            values = (number, now, self._store_id(connection), name)
            if connection.execute(update, values).rowcount:
                return
            # A removal that runs now has not seen this position. Each reads this table until its transaction ends, so
            # the lock waits for it, and a later one sees the position.
            connection.execute(sql(f"LOCK TABLE {self.database.names.qualified_name('stream_position')}"))
            if not connection.execute(update, values).rowcount:
                connection.execute(insert, values)

        self.database.transaction_blocking(write, patiently=True)

    @override
    def remove_stream_position(self, name: str) -> bool:
        table = self.database.names.name_of("stream_position")
        delete = sql(f"DELETE FROM {table} WHERE store_id = %s AND name = %s")
        return self.database.transaction_blocking(
            lambda connection: connection.execute(delete, (self._store_id(connection), name)).rowcount == 1
        )

"""The stream of records in PostgreSQL, whose numbers are not in the order of commits.

A transaction that draws a number holds a lock on the sequence until its rows are visible, or it was rolled back. So:
read the last number drawn, *then* the holders of that lock. Once all of these have ended, nobody can write a number up
to that one any more: later transactions draw higher ones. Source: ADR 0011, point 5.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from typing_extensions import override

from postdate.backends.postgres.access import Access, Connection
from postdate.backends.postgres.names import DEFAULT_SCHEMA, check_name, sql
from postdate.errors import NotSupported, StoreNotSetUp
from postdate.persistence.migrations import setup_command
from postdate.ports import RecordStreamStore

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
class _Awaited:
    """A number, and the transactions that may still write up to it."""

    end: int
    writers: frozenset[str]


class PostgresRecordStream(RecordStreamStore):
    """See :class:`postdate.ports.scanning.RecordStreamStore`.

    A transaction that has drawn a number and stays open keeps :meth:`safe_end` where it is until it ends.

    Args:
        url: of the primary: on a standby the writers are not visible.
        table: of the waiting messages: which store of the schema.
        schema: of the tables.
    """

    def __init__(self, url: str, *, table: str, schema: str = DEFAULT_SCHEMA) -> None:
        self._database = Access(url, schema)
        self._table = check_name(table, "table")
        self._record, self._sequence = (
            self._database.names.of(name).replace("%%", "%") for name in ("record", "number")
        )
        self._safe_end = 0
        self._awaited: _Awaited | None = None
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
    def where(self) -> str:
        return f"{self._database.where}, table {self._table}"

    def _identify(self, connection: Connection) -> str:
        row = connection.execute(
            sql(f"""
                SELECT pg_is_in_recovery(), (SELECT system_identifier FROM pg_control_system()), current_database(),
                    %s::regclass::oid, (SELECT store_id FROM {self._database.names.of("store")} WHERE name = %s)"""),
            (self._record, self._table),
        ).fetchone()
        assert row is not None
        standby, *parts = row
        if standby:
            raise NotSupported(
                f"{self._database.where} is a standby, where it cannot be seen who writes; read from the primary"
            )
        if parts[-1] is None:
            raise StoreNotSetUp(f"{self._database.where} has no table {self._table!r}; {setup_command(self._table)}")
        return hashlib.sha256(" ".join(map(str, parts)).encode()).hexdigest()[:24]

    @override
    def next_number(self) -> int:
        return self._database.run_blocking(self._next_number)

    def _next_number(self, connection: Connection) -> int:
        row = connection.execute(sql(f"SELECT last_value + is_called::integer FROM {self._sequence}")).fetchone()
        assert row is not None
        return row[0]

    @override
    def safe_end(self) -> int:
        return self._database.run_blocking(self._advance)

    def _advance(self, connection: Connection) -> int:
        # The writers of one moment all end some time, however many others come and go; so an awaited number is not
        # given up for a higher one.
        if self._awaited is not None:
            still = self._awaited.writers & self._writers(connection)
            if still:
                self._awaited = _Awaited(self._awaited.end, still)
                return self._safe_end
            self._safe_end = self._awaited.end
        end = self._next_number(connection)
        writers = self._writers(connection)  # in this order: see above
        if writers:
            self._awaited = _Awaited(end, writers)
        else:
            self._safe_end, self._awaited = end, None
        return self._safe_end

    def _writers(self, connection: Connection) -> frozenset[str]:
        return frozenset(row[0] for row in connection.execute(_WRITERS, (self._sequence,)).fetchall())

    @override
    def records(self, first: int, end: int, columns: Sequence[str], page: int) -> Iterable[list[tuple[Any, ...]]]:
        with self._database.translating(), self._database.connect() as connection:
            connection.execute("BEGIN READ ONLY")
            # The index of numbers is BRIN, which only bitmap scans use.
            connection.execute("SET LOCAL enable_bitmapscan = on")
            with connection.cursor(name="postdate_record_stream") as cursor:
                cursor.execute(self.query(columns), {"first": first, "end": end, "table": self._table})
                while rows := cursor.fetchmany(page):
                    yield rows

    def query(self, columns: Sequence[str]) -> bytes:
        """Return the statement of :meth:`records`, with the parameters ``first``, ``end`` and ``table``."""
        names, wanted = self._database.names, ", ".join(_COLUMNS[column] for column in columns)
        ours = f"(t.store_id IS NULL OR t.store_id = (SELECT store_id FROM {names.of('store')} WHERE name = %(table)s))"
        return sql(
            f"SELECT {wanted} FROM {names.of('record')} AS t "
            f"WHERE t.number >= %(first)s AND t.number < %(end)s AND {ours}"
        )

    @override
    def close(self) -> None:
        self._database.close_blocking()

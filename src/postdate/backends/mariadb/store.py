"""Delayed messages in MariaDB 10.6 or newer.

Due messages are claimed by row locks of an open transaction: a claim ends with its connection and needs no write.
Source: ADR 0008.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from typing_extensions import override

from postdate.backends.mariadb.connection import MariaDbSession
from postdate.backends.mariadb.schema import MariaDbNames, MariaDbSchema
from postdate.backends.mariadb.tables import MariaDbTables, old_snapshots, split_numbers
from postdate.backends.sql.retention import AgeCondition
from postdate.backends.sql.row_locks.parts import MessageRow, to_row
from postdate.backends.sql.row_locks.store import LockingStore
from postdate.clock import from_microseconds, to_microseconds
from postdate.messages import DelayedMessage
from postdate.ports import OldSnapshot, RecordKind, ReplacingStore, ScanPart
from postdate.ports.changing import CreateMessage, KeyedIds
from postdate.ports.scanning import PRUNED_ID, PrunableStore, PrunedCounts


class MariaDbStore(LockingStore, PrunableStore, ReplacingStore):
    """Keeps delayed messages in a table of MariaDB.

    Args:
        url: ``mariadb://user:password@host:port/database``; for TLS, ``?ssl=true`` (see
            :class:`postdate.backends.mariadb.connection.MariaDbServer`). Or a
            :class:`postdate.backends.mariadb.database.MariaDb`, whose connections it uses, and which has the settings
            ``schema``, ``holds_at_most`` and ``answers_within``.
        schema: the database of the tables; ``None``: the database in ``url``.
        table: of the pending messages; at most 64 characters, none of them an emoji. ``None``: ``{endpoint}.timeouts``.
        recording: how much is recorded for audits.
        largest_message_bytes: of headers and body together; ``None``: 7 MiB. A message is sent in one statement, in
            which a byte may need two bytes. So the default always fits the packet of 16 MiB that servers allow by
            default (``max_allowed_packet``).
        holds_at_most: a process that sends no heartbeat for this long (frozen, swapped out, cut off) loses its claims,
            because the server ends its connections. Whole seconds, at least 1; ``None``: 60 s.
        answers_within: a connection is abandoned if the server does not answer for this long; above 0. ``None``: 30 s.
            Statements on whole tables may take 10 minutes.

    Raises:
        ConfigurationError: the address, the schema, the table or a time is invalid.
    """

    database_type = MariaDbSchema
    largest_message = 7 * 1024 * 1024
    ends_silent_connections = True

    @override
    def _tables_of(self, table: str) -> MariaDbTables:
        return MariaDbTables(MariaDbNames(self._database.schema, table), self._recording)

    @override
    async def replace(self, key: str, create_message: CreateMessage, now: datetime) -> str:
        """Replace the message of a key, or store the first one.

        If two processes begin a key at the same time, both make the same id. One of them stores it, and the other reads
        the newest message again. If that is unchanged, the id belongs to a message without a key, and the next id is
        tried.
        """
        ids, at = KeyedIds(key), to_microseconds(now)
        max_bytes, tables = self._capabilities.largest_message_bytes, self._tables
        assert isinstance(tables, MariaDbTables)
        refusal_counts = dict[str, int]()  # for each newest id, how many later ids were tried

        def replace(session: MariaDbSession) -> MessageRow | None:
            newest, stored_at, is_pending = tables.newest(session, ids.first, ids.last)
            pending_row = tables.lock(session, newest) if is_pending else None
            if pending_row is not None and pending_row.holder is None:
                row = to_row(create_message(newest, self._dialect.instant(stored_at)), max_bytes)
                tables.replace(session, pending_row, row, at)
                return row
            row = to_row(create_message(ids.id_after(newest, refusal_counts.get(newest, 0)), None), max_bytes)
            if not tables.insert(session, [row], at):
                refusal_counts[newest] = refusal_counts.get(newest, -1) + 1
                return None
            tables.store_key(session, row.message_id)
            return row

        while (row := await self._pool.transaction(replace)) is None:
            pass
        self._next_due.announce(row.due)
        return row.message_id

    @override
    async def replace_pending(self, message: DelayedMessage, now: datetime) -> bool:
        row, at, tables = to_row(message, self._capabilities.largest_message_bytes), to_microseconds(now), self._tables
        assert isinstance(tables, MariaDbTables)

        def replace(session: MariaDbSession) -> bool:
            pending_row = tables.lock(session, row.message_id)
            if pending_row is None or pending_row.holder is not None:
                return False
            tables.replace(session, pending_row, row, at)
            return True

        if done := await self._pool.transaction(replace):
            self._next_due.announce(row.due)
        return done

    @override
    async def store_keys(self, message_ids: Sequence[str]) -> None:
        tables = self._tables
        assert isinstance(tables, MariaDbTables)

        def store(session: MariaDbSession) -> None:
            for each in sorted(message_ids):
                tables.store_key(session, each)

        await self._pool.transaction(store)

    @override
    async def old_snapshots(self) -> Sequence[OldSnapshot]:
        """Return old snapshots; none are visible without the right ``PROCESS``."""
        return await self._pool.run(old_snapshots)

    @property
    @override
    def records_in_commit_order(self) -> bool:
        """Return ``False``: the server assigns numbers before the commit."""
        return False

    @override
    def tables_of_stores(self) -> Sequence[str]:
        query = f"SELECT name FROM {self._tables.names.name_of('store')} ORDER BY name"
        return [name for (name,) in self._pool.run_blocking(lambda session: session.rows(query))]

    @property
    @override
    def prune_share_width(self) -> int:
        return 10_000

    @override
    def prune_before(self, part: ScanPart, before: datetime, now: datetime) -> int:
        names, tables = self._tables.names, self._tables
        record, values = (
            names.name_of("record"),
            {"first": part.first, "end": part.end, "before": to_microseconds(before)},
        )
        last_of_key = "CONCAT(LEFT(r.message_id, CHAR_LENGTH(r.message_id) - 8), '99999999')"
        is_same_store = "AND {0}.store_id = r.store_id"
        is_keyed = "r.message_id REGEXP '~[0-9]{8}$'"
        condition = AgeCondition(record, names.pending, "number", "%(before)s", is_keyed, last_of_key, is_same_store)
        find_old = (
            f"SELECT r.number FROM {record} AS r FORCE INDEX (PRIMARY) WHERE r.number >= %(first)s "
            f"AND r.number < %(end)s AND r.store_id = %(store)s "
            f"AND {condition.condition()} ORDER BY r.number"
        )
        # RETURNING counts only rows that this process removes: another one may have removed some since the query.
        delete = f"DELETE FROM {record} WHERE number IN %(numbers)s RETURNING kind"
        is_marker = f"message_id = '{PRUNED_ID}' AND store_id = %(store)s AND kind = {RecordKind.PRUNED:d}"
        remove_markers = f"DELETE FROM {record} WHERE {is_marker} RETURNING due, detail"
        insert_marker = (
            f"INSERT INTO {record} (at, due, store_id, kind, message_id, detail) "
            f"VALUES (%(at)s, %(due)s, %(store)s, {RecordKind.PRUNED:d}, '{PRUNED_ID}', %(detail)s)"
        )

        def prune(session: MariaDbSession) -> int:
            store_values = {"store": tables.store_id(session)}
            numbers = [number for (number,) in session.rows(find_old, values | store_values)]
            kinds = [kind for part in split_numbers(numbers) for (kind,) in session.rows(delete, {"numbers": part})]
            if kinds:
                markers = [
                    (from_microseconds(due), detail) for due, detail in session.rows(remove_markers, store_values)
                ]
                marker = PrunedCounts.of(markers).plus(before, kinds)
                due = to_microseconds(marker.before or before)
                session.change(
                    insert_marker, {**store_values, "at": to_microseconds(now), "due": due, "detail": marker.detail}
                )
            return len(kinds)

        return self._pool.transaction_blocking(prune)

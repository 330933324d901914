"""The table of a store: its statements and its number; inserts, and notifications in the same transaction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

import psycopg

from postdate.backends.postgres.access import Access, Connection
from postdate.backends.postgres.next_due import PostgresNextDue
from postdate.backends.postgres.rows import COLUMNS, Row, row_of
from postdate.backends.postgres.statements import Statements
from postdate.backends.sql.migrations import setup_command
from postdate.clock import to_microseconds
from postdate.errors import ConfigurationError, DuplicateMessage, StoreNotSetUp
from postdate.messages import DelayedMessage
from postdate.ports import StoreCapabilities, StoreReport

PARAMETERS: Final[Mapping[str, str]] = {**COLUMNS, "now": "timestamptz", "store": "smallint", "notice": "text"}
"""The parameters of statements that insert one message, with types, in the order of :meth:`OnTable._values_of`."""

_BULK_FROM: Final = 5
"""The number of messages from which on COPY is faster than parameters."""


class OnTable:
    """A store on a table. The table's name may become known later, and the store's number is read at the first use."""

    database: Access
    _table: str | None
    _statements: Statements | None = None
    _capabilities: StoreCapabilities

    @property
    def _sql(self) -> Statements:
        if self._statements is None:
            if self._table is None:
                raise ConfigurationError(
                    "PostgresStore does not know its table yet: call initialize(endpoint, mode) first, or give table="
                )
            self._statements = Statements(self.database.names, self._table, self.database.recording)
        return self._statements

    def _store_id(self, connection: Connection) -> int:
        """Return the number of the store, which is read once. Raise `StoreNotSetUp`."""
        sql = self._sql
        if sql.store_id is None:
            missing = f"{self.database.where} has no table {sql.table!r}; {setup_command(sql.table)}"
            try:
                row = connection.execute(sql.find_store, (sql.table,)).fetchone()
            except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName) as error:
                raise StoreNotSetUp(missing) from error
            if row is None:
                raise StoreNotSetUp(missing)
            sql.store_id = row[0]
        assert sql.store_id is not None
        return sql.store_id

    def _row(self, message: DelayedMessage) -> Row:
        return row_of(message, self._capabilities.largest_message_bytes)

    def _insert(self, connection: Connection, rows: Sequence[Row], now: datetime) -> StoreReport:
        """Insert new messages; the notification is part of the transaction."""
        unique = dict[str, Row]()
        for row in rows:
            unique.setdefault(row[0], row)
        if len(unique) < _BULK_FROM:
            new_ids = [id_ for id_, row in unique.items() if self._insert_one(connection, row, now)]
        else:
            new_ids = self._insert_bulk(connection, list(unique.values()), now)
            if new_ids:
                self._notify(connection, min(row[1] for row in rows), now)
        if len(new_ids) == len(rows):
            return StoreReport(len(rows))
        return StoreReport.of((row[0] for row in rows), new_ids)

    def _insert_bulk(self, connection: Connection, rows: Sequence[Row], now: datetime) -> list[str]:
        """Insert messages with different ids by COPY into a temporary table and one statement; return the new ids."""
        sql, store_id = self._sql, self._store_id(connection)
        connection.execute(sql.create_incoming)
        with connection.cursor() as cursor:
            with cursor.copy(sql.copy_incoming) as copy:
                copy.set_types(["int4", *COLUMNS.values()])
                for position, row in enumerate(rows):
                    copy.write_row((position, *row))
            cursor.execute(sql.insert_incoming, {"now": now, "store": store_id})
            new_ids = [id_ for (id_,) in cursor.fetchall()]
            cursor.execute(sql.clear_incoming)
        return new_ids

    def _insert_one(self, connection: Connection, row: Row, now: datetime) -> bool:
        """Insert and announce one message by one statement, which is its own transaction; return whether it is new."""
        self._store_id(connection)
        return connection.execute(self._sql.insert_one, self._values_of(row, now), prepare=True).rowcount == 1

    def _insert_new_or_revive(self, connection: Connection, rows: Sequence[Row], now: datetime) -> None:
        """Insert; a known message whose last record is a failure comes back under its old number."""
        revived_ids = set[str]()
        duplicate_ids = self._insert(connection, rows, now).duplicate_ids
        for row in rows:
            if row[0] in duplicate_ids and row[0] not in revived_ids and self._revive(connection, row, now):
                revived_ids.add(row[0])
        for id_ in duplicate_ids:
            if id_ not in revived_ids:
                raise DuplicateMessage.of(id_)

    def _revive(self, connection: Connection, row: Row, now: datetime) -> bool:
        return connection.execute(self._sql.revive, self._values_of(row, now)).rowcount == 1

    def _notify(self, connection: Connection, due: datetime, now: datetime) -> None:
        """Notify other processes at the commit, unless the due time is far off."""
        if (payload := notice(self._store_id(connection), due, now)) is not None:
            connection.execute(self._sql.notify_due, (payload,))

    def _values_of(self, row: Row, now: datetime, ahead: timedelta = PostgresNextDue.NOTICE) -> dict[str, Any]:
        """Return the parameters of a message; ``now`` is recorded as the time of scheduling.

        For ``ahead`` see :func:`notice`.

        The number of the store must be known.
        """
        store_id = self._sql.store_id
        assert store_id is not None
        return dict(zip(PARAMETERS, (*row, now, store_id, notice(store_id, row[1], now, ahead)), strict=True))


def notice(store_id: int, due: datetime, now: datetime, ahead: timedelta = PostgresNextDue.NOTICE) -> str | None:
    """Return the payload of the notification; ``None`` when the message is not due within ``ahead``."""
    return f"due {store_id} {to_microseconds(due)}" if due < now + ahead else None

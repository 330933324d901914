"""Unreadable rows of PostgreSQL: statements that mark, list and discard them; they stay in their tables.

Source: :class:`postdate.ports.UnreadableRows`; ADR 0043.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from typing_extensions import override

from postdate.backends.postgres.access import Access, Connection
from postdate.backends.postgres.names import SchemaNames, array, ctids_of, sql
from postdate.backends.postgres.rows import Unreadable, time_in_calendar
from postdate.errors import MessageNotFound
from postdate.ports import RecordKind, UnreadableRow, UnreadableRows
from postdate.ports.observation import UNREADABLE

log = logging.getLogger("postdate.postgres")

_FIELDS: Final = ("message_id", "due", "expires_at", "failures")
_REASON: Final = "(%(reasons)s::text[])[array_position(%(numbers)s::bigint[], number)]"
"""The reason of the row with that number; see :func:`reasons`."""


@dataclass(frozen=True, slots=True)
class _Table:
    """The way in which unreadable rows of one table are marked and shown. Expressions read a row ``t``.

    Args:
        name: quoted.
        fields: its columns with the parts of a message.
        release_clause: the SET clause of an UPDATE after which no claim finds the row; it is not claimed any more.
        is_claimed: condition on the rows that are marked.
        content: expression for the number of its content.
        queue: expression for the queue of a row; empty for a store.
        destination: expression for the destination in the record.
        store: expression for the number of the store; NULL: nothing is recorded.
        now: expression for the time of marking.
    """

    name: str
    fields: Sequence[str]
    release_clause: str
    is_claimed: str
    content: str
    queue: str
    destination: str
    store: str
    now: str


class UnreadableStatements:
    """The statements of one table. Statements that mark rows return how many rows they have marked."""

    def __init__(self, names: SchemaNames, table: _Table) -> None:
        contents, name, store = names.name_of("content"), table.name, table.store
        self.names = (*table.fields, "headers", "body")
        raw = ", ".join(f"convert_to(t.{field}::text, 'UTF8')" for field in table.fields)
        content = f"SELECT headers, body FROM {contents} WHERE number = {table.content} OFFSET 0"
        self.list = sql(f"""
            SELECT t.number, t.unreadable_at, t.unreadable, {table.queue}, {raw},
                convert_to(c.headers, 'UTF8'), c.body
            FROM {name} AS t LEFT JOIN LATERAL ({content}) AS c ON true
            WHERE t.unreadable IS NOT NULL ORDER BY t.number LIMIT %(limit)s""")
        self.count = sql(f"SELECT count(*) FROM {name} WHERE unreadable IS NOT NULL")

        def insert_records(rows: str, kind: RecordKind, at: str) -> str:
            return f"""
                INSERT INTO {names.name_of("record")} (at, due, store_id, kind, message_id, destination, detail)
                SELECT {at}, {time_in_calendar("t.due")}, {store}, {kind:d}, t.message_id, {table.destination},
                    '{UNREADABLE}' || t.unreadable
                FROM {rows} AS t WHERE {store} IS NOT NULL"""

        self.mark = sql(f"""
            WITH marked AS (
                UPDATE {name} SET {table.release_clause}, unreadable = {_REASON}, unreadable_at = {table.now}
                WHERE {table.is_claimed} RETURNING *),
            recorded AS ({insert_records("marked", RecordKind.FAILED, table.now)})
            SELECT count(*)::integer FROM marked""")
        self.discard = sql(f"""
            WITH gone AS (
                DELETE FROM {name} WHERE number = %(number)s AND unreadable IS NOT NULL RETURNING *),
            dropped AS (DELETE FROM {contents} WHERE number = ANY (ARRAY(SELECT {table.content} FROM gone AS t))),
            recorded AS ({insert_records("gone", RecordKind.DISCARDED, "%(now)s::timestamptz")})
            SELECT count(*)::integer FROM gone""")


def statements_of_store(names: SchemaNames, table: str) -> UnreadableStatements:
    """Return the statements of a store.

    The one that marks has the parameter ``holder``; ``None``: claimed by row locks.
    """
    pending_table = _Table(
        name=names.name_of(table),
        fields=(*_FIELDS, "destination"),
        release_clause="attempt_at = NULL, holder = NULL",
        is_claimed="number = ANY(%(numbers)s::bigint[]) AND holder IS NOT DISTINCT FROM %(holder)s::bigint",
        content="t.number",
        queue="''",
        destination="t.destination",
        store="%(store)s::smallint",
        now="%(now)s::timestamptz",
    )
    return UnreadableStatements(names, pending_table)


def statements_of_queues(names: SchemaNames) -> UnreadableStatements:
    """Return the statements of all queues of a schema."""
    message = names.name_of("queue_message")
    ctids = ctids_of(
        "unnest(%(numbers)s::bigint[]) AS k(number)", message, "queue_id = %(queue)s AND number = k.number"
    )
    queue = f"(SELECT q.name FROM {names.name_of('queue')} AS q WHERE q.queue_id = abs(t.queue_id))"
    queue_table = _Table(
        name=message,
        fields=_FIELDS,
        release_clause="queue_id = -queue_id, holder = NULL, ends_at = NULL",
        is_claimed=f"ctid = ANY ({ctids}) AND coalesce(holder, 0) = %(holder)s",
        content="t.content",
        queue=f"coalesce({queue}, abs(t.queue_id)::text)",
        destination=queue,
        store="t.store_id",
        now="clock_timestamp()",
    )
    return UnreadableStatements(names, queue_table)


def mark_unreadable(
    connection: Connection, statements: UnreadableStatements, values: dict[str, Any], rows: Sequence[Unreadable]
) -> None:
    """Mark rows that are claimed, and log that with the reason of the first."""
    connection.execute(statements.mark, {**values, **reasons(rows)})
    text = "cannot be read, and marked so: %d messages (%s); `postdate messages list --unreadable` lists them"
    log.error(text, len(rows), rows[0].reason)


def reasons(rows: Sequence[Unreadable]) -> dict[str, object]:
    """Return the numbers and reasons of rows as parameters."""
    return {"numbers": array(row.number for row in rows), "reasons": [row.reason.replace("\0", "") for row in rows]}


class UnreadableInSchema(UnreadableRows):
    """The unreadable rows of one store, or of all queues of a schema."""

    database: Access

    @property
    @abstractmethod
    def _unreadable(self) -> UnreadableStatements:
        """The statements of the table."""

    def _values_of_unreadable(self, connection: Connection) -> dict[str, Any]:
        """Return the parameters of the statements besides numbers and times."""
        return {}

    def _translate_errors(self) -> AbstractContextManager[None]:
        """Wrap each call, so that queues raise errors of queues."""
        return nullcontext()

    @override
    async def list_unreadable(self, limit: int) -> Sequence[UnreadableRow]:
        statements = self._unreadable

        def read_rows(connection: Connection) -> list[UnreadableRow]:
            rows = connection.execute(statements.list, {"limit": limit}).fetchall()
            return [_unreadable_row(row, statements.names) for row in rows]

        with self._translate_errors():
            return await self.database.run(read_rows)

    @override
    async def count_unreadable(self) -> int:
        count = self._unreadable.count
        with self._translate_errors():
            return await self.database.run(lambda connection: connection.execute(count, ()).fetchall()[0][0])

    @override
    async def discard_unreadable(self, number: int, now: datetime) -> None:
        statements = self._unreadable

        def discard(connection: Connection) -> int:
            values = {"number": number, "now": now, **self._values_of_unreadable(connection)}
            return connection.execute(statements.discard, values).fetchall()[0][0]

        with self._translate_errors():
            if not await self.database.run(discard):
                raise MessageNotFound(f"no unreadable row in {self.database.where} has the number {number}")


def _unreadable_row(row: Sequence[Any], names: Sequence[str]) -> UnreadableRow:
    number, at, reason, queue, *values = row
    raw = {name: bytes(value) for name, value in zip(names, values, strict=True) if value is not None}
    return UnreadableRow(number, queue, raw["message_id"].decode(), reason, at.astimezone(UTC), raw)

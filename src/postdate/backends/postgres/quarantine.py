"""The quarantine: unreadable rows are moved to it unchanged, and back once they are repaired.

The move is one statement, so no byte passes through Python. The tables and indexes of deliveries stay as they are.
Source: :mod:`postdate.ports.observation`; ADR 0019, point 6.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

import psycopg
from typing_extensions import override

from postdate.backends.postgres.access import Access, Connection
from postdate.backends.postgres.errors import AFTER_AN_UPGRADE, is_refused
from postdate.backends.postgres.names import SchemaNames, array, places, sql
from postdate.backends.postgres.rows import Unreadable, only_in_calendar, present
from postdate.errors import DuplicateMessage, InvalidMessage, MessageNotFound, QueueNotFound
from postdate.messages import check_headers, decode_headers, encode_headers
from postdate.ports import Mending, Quarantine, Quarantined, RecordKind

log = logging.getLogger("postdate.postgres")

_RAW: Final = ("message_id", "destination", "due", "expires_at", "failures", "headers", "body")
_UNREADABLE: Final = "unreadable: "


class QuarantineStatements:
    def __init__(self, names: SchemaNames) -> None:
        self._names = names
        quarantine, content, record = names.of("quarantine"), names.of("content"), names.of("record")
        queue, queue_message = names.of("queue"), names.of("queue_message")
        self.quarantine, self.queue, self.content, self.record = quarantine, queue, content, record
        raw = ", ".join("body" if name == "body" else f"convert_to(t.{name}::text, 'UTF8')" for name in _RAW)
        place = f"(SELECT name FROM {queue} AS q WHERE q.queue_id = t.queue_id)"
        self.list = (
            f"SELECT t.number, t.at, t.reason, coalesce({place}, t.queue_id::text, ''), {raw} FROM {quarantine} AS t"
        )
        times = {name: only_in_calendar(f"t.{name}") for name in ("due", "expires_at")}
        self.taken = (
            f"RETURNING t.reason, t.store_id, t.queue_id, t.due IS NOT NULL, "
            f"{', '.join(times.get(name, f't.{name}') for name in _RAW)}"
        )
        self._kept = f"INSERT INTO {quarantine} (at, reason, store_id, queue_id, place, {', '.join(_RAW)})"
        self._given = "unnest(%(numbers)s::bigint[], %(reasons)s::text[]) AS e(number, reason)"
        numbered = places(
            "unnest(%(numbers)s::bigint[]) AS k(number)", queue_message, "queue_id = %(queue)s AND number = k.number"
        )
        name_of_queue = f"(SELECT name FROM {queue} AS q WHERE q.queue_id = g.queue_id)"
        self.from_queue = sql(f"""
            WITH gone AS (
                DELETE FROM {queue_message} WHERE ctid = ANY ({numbered}) AND coalesce(holder, 0) = %(holder)s
                RETURNING *),
            kept AS ({self._kept}
                SELECT clock_timestamp(), e.reason, g.store_id, g.queue_id, g.number, {_gone(destination="NULL")}
                FROM gone AS g JOIN {self._given} USING (number) {self._content_of("g.content")}),
            dropped AS (DELETE FROM {content} WHERE number = ANY (ARRAY(SELECT content FROM gone))),
            noted AS ({self._noted("clock_timestamp()", "g.store_id", name_of_queue)})
            SELECT count(*) FROM gone""")
        number = names.of("number").replace("'", "''")
        self.record_one = sql(f"""
            INSERT INTO {record} (at, due, store_id, kind, message_id, destination, detail)
            VALUES (%(now)s, %(due)s, %(store)s, %(kind)s, %(id)s, %(destination)s, %(detail)s)""")
        self.find_queue = sql(f"SELECT name FROM {queue} WHERE queue_id = %(queue)s")
        self.into_queue = sql(f"""
            WITH kept AS (
                INSERT INTO {content} (number, headers, body) VALUES (nextval('{number}'), %(headers)s, %(body)s)
                RETURNING number),
            sent AS (
                INSERT INTO {queue_message}
                    (queue_id, content, due, expires_at, ends_at, failures, store_id, message_id)
                SELECT %(queue)s, number, %(due)s, %(expires_at)s::timestamptz,
                    clock_timestamp() + (%(expires_at)s::timestamptz - %(now)s), %(failures)s, %(store)s::smallint,
                    %(id)s
                FROM kept RETURNING number)
            SELECT pg_notify('{names.channel}', 'queue ' || %(queue)s || ' ' || number) FROM sent""")
        # The former number, and the kind of the last record, among those found by the id.
        self.number_of = sql(f"""
            SELECT r.number, (SELECT o.kind FROM {record} AS o WHERE o.message_id = %(id)s AND o.kind > 3
                AND (o.store_id = %(store)s OR o.store_id IS NULL) ORDER BY o.number DESC LIMIT 1)
            FROM {record} AS r WHERE r.message_id = %(id)s AND r.store_id = %(store)s AND r.kind = 1""")
        self.schedule = sql(f"""
            INSERT INTO {record} (at, due, store_id, kind, message_id, destination)
            VALUES (%(now)s, %(due)s, %(store)s, 1, %(id)s, %(destination)s) RETURNING number""")

    def _content_of(self, number: str) -> str:
        content = f"SELECT headers, body FROM {self.content} WHERE number = {number} OFFSET 0"
        return f"LEFT JOIN LATERAL ({content}) AS c ON true"

    def _noted(self, at: str, store: str, destination: str) -> str:
        return f"""
            INSERT INTO {self.record} (at, due, store_id, kind, message_id, destination, detail)
            SELECT {at}, {only_in_calendar("g.due")}, {store}, {int(RecordKind.FAILED)}, g.message_id, {destination},
                '{_UNREADABLE}' || e.reason
            FROM gone AS g JOIN {self._given} USING (number) WHERE {store} IS NOT NULL"""

    def from_store(self, table: str) -> bytes:
        """Return the statement that moves waiting messages, locked by the transaction or leased by ``holder``."""
        return sql(f"""
            WITH gone AS (
                DELETE FROM {self._names.of(table)} WHERE number = ANY(%(numbers)s::bigint[])
                    AND holder IS NOT DISTINCT FROM %(holder)s::bigint RETURNING *),
            kept AS ({self._kept}
                SELECT %(now)s, e.reason, %(store)s::smallint, NULL, g.number, {_gone()}
                FROM gone AS g JOIN {self._given} USING (number) {self._content_of("g.number")}),
            dropped AS (DELETE FROM {self.content} WHERE number = ANY (ARRAY(SELECT number FROM gone))),
            noted AS ({self._noted("%(now)s", "%(store)s::smallint", "g.destination")})
            SELECT count(*) FROM gone""")

    def into_store(self, table: str) -> bytes:
        return sql(f"""
            WITH kept AS (
                INSERT INTO {self.content} (number, headers, body) VALUES (%(row)s, %(headers)s, %(body)s)),
            stored AS (
                INSERT INTO {self._names.of(table)}
                    (number, due, attempt_at, expires_at, failures, message_id, destination)
                VALUES (%(row)s, %(due)s, %(due)s, %(expires_at)s, %(failures)s, %(id)s, %(destination)s))
            SELECT pg_notify('{self._names.channel}', %(notice)s)""")


def _gone(**instead: str) -> str:
    """Return :data:`_RAW` of a row ``g`` and its content ``c``, some of them written otherwise."""
    columns = {"headers": "c.headers", "body": "c.body", **instead}
    return ", ".join(columns.get(name, f"g.{name}") for name in _RAW)


class Aside(NamedTuple):
    """A row just deleted from the quarantine, in a transaction that may undo it; also parameters of statements."""

    reason: str
    store: int | None
    queue: int | None
    was_delayed: bool
    id: str
    destination: str | None
    due: datetime | None
    expires_at: datetime | None
    failures: int
    headers: str | None
    body: bytes | None

    def mended(self, mending: Mending, now: datetime) -> dict[str, Any]:
        """Return the repaired message's values for statements. Raises `InvalidMessage` or `InvalidHeaders`."""
        body = self.body if mending.body is None else mending.body
        headers = present(self.headers if mending.headers is None else encode_headers(mending.headers))
        due = (mending.due or self.due) if self.was_delayed else None
        if due is None and self.was_delayed:
            raise InvalidMessage(f"the due time of message {self.id!r} lies outside the years 1 to 9999")
        if body is None:
            raise InvalidMessage(f"the body of message {self.id!r} is gone")
        decode_headers(headers)
        destination = mending.destination or self.destination
        if destination is not None and not destination.strip():
            raise InvalidMessage(f"the destination of message {self.id!r} is blank")
        changed = {"headers": headers, "body": body, "due": due, "destination": destination}
        return {**self._asdict(), **changed, "now": now}


class SettingAside:
    """Moves unreadable rows to the quarantine. Where the role lacks the rights, they stay claimed, and work goes on."""

    def __init__(self) -> None:
        self.left_some = False
        """Whether this process keeps claims of unreadable rows, until it ends or gets another number."""

    def do(self, connection: Connection, statement: bytes, values: dict[str, Any], bad: Sequence[Unreadable]) -> bool:
        """Move rows by ``statement``, and log that with the reason of the first; ``False``: it was refused.

        It runs in a savepoint, so a refusal undoes nothing else. The caller then keeps its claims, so that no process
        meets the rows again.
        """
        try:
            with connection.transaction():
                connection.execute(statement, values)
        except psycopg.Error as error:
            if not is_refused(error):
                raise
            if not self.left_some:
                self.left_some = True
                text = (
                    "%d messages cannot be read (%s) nor be set aside (%s), and are held until this process ends; "
                    f"{AFTER_AN_UPGRADE}, and start the services anew"
                )
                log.error(text, len(bad), bad[0].reason, str(error).partition("\n")[0])
            return False
        text = "%d messages cannot be read and were set aside (%s); `postdate errors` shows what is to be done"
        log.error(text, len(bad), bad[0].reason)
        return True


def named(bad: Sequence[Unreadable]) -> dict[str, object]:
    """Return the numbers and reasons of rows as parameters."""
    return {"numbers": array(row.number for row in bad), "reasons": [row.reason.replace("\0", "") for row in bad]}


class PostgresQuarantine(Quarantine):
    """The quarantined messages of one store, or of all queues of a schema: rows that meet the condition ``place``.

    ``put`` inserts a repaired message; ``errors`` wraps each call, so that queues raise errors of queues.
    """

    def __init__(
        self,
        database: Access,
        statements: QuarantineStatements,
        place: Callable[[Connection], str],
        put: Callable[[Connection, dict[str, Any]], None],
        errors: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._database, self._sql, self._place, self._put, self._errors = database, statements, place, put, errors

    @override
    async def quarantined(self, limit: int) -> Sequence[Quarantined]:
        def find(connection: Connection) -> list[Quarantined]:
            query = f"{self._sql.list} WHERE {self._place(connection)} ORDER BY t.number LIMIT %s"
            return [_shown(row) for row in connection.execute(sql(query), (limit,)).fetchall()]

        with self._errors():
            return await self._database.run(find)

    @override
    async def quarantined_count(self) -> int:
        def count(connection: Connection) -> int:
            query = f"SELECT count(*) FROM {self._sql.quarantine} AS t WHERE {self._place(connection)}"
            return connection.execute(sql(query), ()).fetchall()[0][0]

        with self._errors():
            return await self._database.run(count)

    @override
    async def put_back(self, number: int, mending: Mending, now: datetime) -> None:
        if mending.headers is not None:
            check_headers(mending.headers)

        def put_back(connection: Connection) -> None:
            mended = self._taken(connection, number).mended(mending, now)
            self._put(connection, mended)
            self._record(connection, mended, RecordKind.RETURNED, None)

        with self._errors():
            await self._database.transaction(put_back)

    @override
    async def discard_quarantined(self, number: int, now: datetime) -> None:
        def discard(connection: Connection) -> None:
            aside = self._taken(connection, number)
            self._record(
                connection, {**aside._asdict(), "now": now}, RecordKind.DISCARDED, f"{_UNREADABLE}{aside.reason}"
            )

        with self._errors():
            await self._database.transaction(discard)

    def _taken(self, connection: Connection, number: int) -> Aside:
        place = f"number = %s AND {self._place(connection)}"
        take = f"DELETE FROM {self._sql.quarantine} AS t WHERE {place} {self._sql.taken}"
        if (row := connection.execute(sql(take), (number,)).fetchone()) is None:
            raise MessageNotFound(f"nothing of number {number} is set aside in {self._database.where}")
        return Aside(*row)

    def _record(self, connection: Connection, values: dict[str, Any], kind: RecordKind, detail: str | None) -> None:
        """Record the outcome of a store's message; messages that were never delayed have no records."""
        if values["store"] is None:
            return
        if values["destination"] is None:
            row = connection.execute(self._sql.find_queue, values).fetchone()
            values = {**values, "destination": None if row is None else row[0]}
        connection.execute(self._sql.record_one, {**values, "kind": int(kind), "detail": detail})


def number_for(connection: Connection, statements: QuarantineStatements, mended: dict[str, Any]) -> int:
    """Return the number under which a repaired message waits again: its former one, if its last record is the failure.

    Raises `DuplicateMessage` if it has a later record.
    """
    if (known := connection.execute(statements.number_of, mended).fetchone()) is None:
        return connection.execute(statements.schedule, mended).fetchall()[0][0]
    number, last = known
    if last != RecordKind.FAILED:
        raise DuplicateMessage.of_set_aside(mended["id"])
    return number


def into_queue(connection: Connection, statements: QuarantineStatements, mended: dict[str, Any], where: str) -> None:
    if connection.execute(statements.find_queue, mended).fetchone() is None:
        raise QueueNotFound(f"{where} has no queue any more in which message {mended['id']!r} was")
    connection.execute(statements.into_queue, mended)


def _shown(row: Sequence[Any]) -> Quarantined:
    number, at, reason, place, *values = row
    raw = {name: bytes(value) for name, value in zip(_RAW, values, strict=True) if value is not None}
    return Quarantined(number, place, raw["message_id"].decode(), reason, at.astimezone(UTC), raw)

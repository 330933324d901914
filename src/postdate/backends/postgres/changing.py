"""Changes of pending messages as steps, for connections of ours and of an application. Source: ADR 31."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import count
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

import msgspec
import psycopg
from typing_extensions import override

from postdate import ports
from postdate.backends.postgres.access import Connection
from postdate.backends.postgres.errors import translate_missing_tables
from postdate.backends.postgres.inserting import OnTable, notice
from postdate.backends.postgres.joining import NOTICE, join, join_blocking, run_steps
from postdate.backends.postgres.rows import Row, page_of_rows, utc
from postdate.backends.postgres.statements import PostgresSqlDialect
from postdate.backends.sql.questions import page_values
from postdate.errors import ConfigurationError, DuplicateMessage, StoreUnavailable
from postdate.messages import DelayedMessage, Headers, copy_with_due
from postdate.ports.changing import CreateMessage, KeyedIds

T = TypeVar("T")

_DIALECT: Final = PostgresSqlDialect()

_DATABASE_IDENTITY: Final = b"""
    SELECT CAST(c.system_identifier AS text), CAST(d.oid AS text), CAST(d.datname AS text)
    FROM pg_control_system() AS c, pg_database AS d WHERE d.datname = current_database()"""
"""Identifies a database among all others, including those on other servers."""

_IDENTITIES: Final = WeakKeyDictionary[Any, Sequence[str] | None]()
"""The connections of applications, with the identities of their databases."""

_SHORT_LOCK_TIMEOUT: Final = b"SET LOCAL lock_timeout = '5s'"
"""For a caller that replaces under the same key in a transaction that stays open. It is less than the silence limit."""


class PostgresChanges(OnTable, ports.JoiningStore, ports.ReplacingStore, ABC):
    """The changes of one store. Their statements contain the store's number, which is read before the first change."""

    _database_identity: Sequence[str] | None = None
    """The identity of the store's database (:data:`_DATABASE_IDENTITY`); ``None`` before the first transaction."""

    @override
    async def join(self, connection: ports.NativeTransaction, steps: ports.Steps[T]) -> T:
        if self._database_identity is None:
            await self.database.run(self._read_identity)
        with translate_missing_tables(self.database.where):
            return await join(connection, self._run_in_same_database(connection, steps))

    @override
    def join_blocking(self, connection: ports.NativeTransaction, steps: ports.Steps[T]) -> T:
        if self._database_identity is None:
            self.database.run_blocking(self._read_identity)
        with translate_missing_tables(self.database.where):
            return join_blocking(connection, self._run_in_same_database(connection, steps))

    def _read_identity(self, connection: Connection) -> None:
        self._store_id(connection)
        self._database_identity = connection.execute(_DATABASE_IDENTITY).fetchone()

    def _run_in_same_database(self, connection: ports.NativeTransaction, steps: ports.Steps[T]) -> ports.Steps[T]:
        """Run ``steps`` if the transaction is in the database of the store.

        Another one may have a store of that name, too.

        A connection of psycopg never changes its database, so the identity is read once. The proxies of other drivers
        may change theirs, so it is read each time.
        """
        is_lasting = isinstance(connection, psycopg.Connection | psycopg.AsyncConnection)
        if not is_lasting or connection not in _IDENTITIES or _IDENTITIES[connection] != self._database_identity:
            rows = yield _DATABASE_IDENTITY, {}
            identity = list((rows or ((),))[0])
            if identity != list(self._database_identity or ()):
                raise ConfigurationError(
                    f"the transaction is in the database {identity[-1]!r}, which is not the database of the store, "
                    f"{self.database.where}: nothing was done; use a connection to the store's database"
                )
            if is_lasting:
                _IDENTITIES[connection] = self._database_identity
        return (yield from steps)

    def _run_steps(self, connection: Connection, steps: ports.Steps[T]) -> T:
        """Run ``steps`` on a connection of ours."""
        self._store_id(connection)
        return run_steps(lambda statement, values: connection.execute(statement, values).fetchall(), steps)

    def _values(self, **more: Any) -> Mapping[str, Any]:
        return {"store": self._sql.store_id, **more}

    @override
    def storing_steps(self, messages: Sequence[DelayedMessage], now: datetime) -> ports.Steps[None]:
        duplicate_ids = list[str]()
        for row in [self._row(each) for each in messages]:
            if not (yield self._sql.insert_one, self._values_of(row, now, NOTICE)):
                duplicate_ids.append(row[0])
        if duplicate_ids:
            raise DuplicateMessage.of(*duplicate_ids)

    @override
    def cancelling_steps(self, message_id: str, now: datetime) -> ports.Steps[ports.Answer]:
        if (yield from self._cancel_steps(message_id, now)):
            return ports.Answer.DONE
        return (yield from self._answer_steps(message_id))[0]

    def _cancel_steps(self, message_id: str, now: datetime) -> ports.Steps[bool]:
        return bool((yield self._sql.cancel, self._values(id=message_id, now=now)))

    @override
    def rescheduling_steps(
        self, message_id: str, due: datetime, now: datetime, wall_time: str | None = None
    ) -> ports.Steps[ports.Answer]:
        if (yield from self._reschedule_steps(message_id, due, now, wall_time)):
            return ports.Answer.DONE
        answer, message = yield from self._answer_steps(message_id)
        if message is not None:
            copy_with_due(message, due)  # raises if this is why it was not changed
        return answer

    def _reschedule_steps(
        self, message_id: str, due: datetime, now: datetime, wall_time: str | None
    ) -> ports.Steps[bool]:
        store_id = self._sql.store_id
        assert store_id is not None
        notice_values = notice(store_id, due, now, NOTICE)
        wall = None if wall_time is None else f'{{"{Headers.WALL_TIME}":{msgspec.json.encode(wall_time).decode()}'
        values = self._values(id=message_id, due=due, now=now, notice=notice_values, wall=wall)
        return bool((yield self._sql.reschedule, values))

    @override
    async def replace(self, key: str, create_message: CreateMessage, now: datetime) -> str:
        def replace(connection: Connection) -> str:
            connection.execute(_SHORT_LOCK_TIMEOUT)
            try:
                return self._run_steps(connection, self.replacing_steps(key, create_message, now))
            except psycopg.errors.LockNotAvailable as error:
                raise StoreUnavailable(
                    f"the key {key!r} was replaced in a transaction that is open for more than 5 s: commit it, or roll "
                    f"it back, and try again"
                ) from error

        return await self.database.transaction(replace)

    @override
    def replacing_steps(self, key: str, create_message: CreateMessage, now: datetime) -> ports.Steps[str]:
        """Replace under a key.

        Callers with the same key wait for each other, but not for other holders of the message.
        """
        ids = KeyedIds(key)
        yield self._sql.lock_key, self._values(first=ids.first)
        rows = yield self._sql.newest, self._values(first=ids.first, last=ids.last)
        newest, at, is_pending = rows[0] if rows else ("", None, False)
        if is_pending:
            row = self._row(create_message(newest, utc(at)))
            if (yield from self._replace_steps(row, now)):
                return row[0]
        for refused in count():
            row = self._row(create_message(ids.id_after(newest, refused), None))
            if (yield self._sql.insert_one, self._values_of(row, now, NOTICE)):
                yield self._sql.store_key, self._values(id=row[0])
                return row[0]
        raise AssertionError  # The loop ends earlier: the ids refuse a key whose numbers are used up.

    def _replace_steps(self, row: Row, now: datetime) -> ports.Steps[bool]:
        return bool((yield self._sql.replace, self._values_of(row, now, NOTICE)))

    @override
    async def store_keys(self, message_ids: Sequence[str]) -> None:
        def store(connection: Connection) -> None:
            self._store_id(connection)
            for each in message_ids:
                connection.execute(self._sql.store_key, self._values(id=each))

        await self.database.transaction(store)

    @override
    def getting_steps(self, message_id: str) -> ports.Steps[DelayedMessage | None]:
        page = page_of_rows((yield self._sql.get, self._values(id=message_id)) or (), None)
        return page.messages[0] if page.messages else None

    @override
    def reading_steps(self, message_filter: ports.MessageFilter, limit: int) -> ports.Steps[ports.PendingPage]:
        values = self._values(**page_values(message_filter, limit, _DIALECT))
        return page_of_rows((yield self._sql.list_pending, values) or (), limit)

    def _answer_steps(self, message_id: str) -> ports.Steps[tuple[ports.Answer, DelayedMessage | None]]:
        """Return why a message was not changed, and the message if it is still pending."""
        message = yield from self.getting_steps(message_id)
        if message is not None:
            return ports.Answer.BEING_DELIVERED, message
        records = yield self._sql.history, self._values(id=message_id)
        last = (ports.RecordKind(records[-1][0]), records[-1][5] or "") if records else None
        return ports.answer_of(last), None

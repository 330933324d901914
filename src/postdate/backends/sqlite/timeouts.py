"""Timeouts in one SQLite file, that of the local transport and of the SQLite store if they are on it.

With the local transport on the same file, a timeout is stored, or dispatched and removed, in the transaction of the
queues. Source: specification 4.6; ADR 0003, ADR 0014.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from typing_extensions import override

from postdate.backends.sqlite.file import SqliteFile, Transaction
from postdate.backends.sqlite.liveness import presence_folder
from postdate.backends.sqlite.locked_files import LockedFile, try_to_hold
from postdate.errors import ConfigurationError, TimeoutConcurrentlyProcessed
from postdate.persistence import chunks
from postdate.persistence.timeouts import (
    TIME,
    checked,
    decode,
    encode,
    normal_id,
    normal_saga,
    table_name,
    text_time,
)
from postdate.ports import Recording, Work
from postdate.ports.timeouts import DueChunk, Timeout, TimeoutClaim, TimeoutPersister
from postdate.runtime.threads import in_thread

_RESERVED: Final = "sqlite_"
_ALL: Final = -1


class SqliteTimeouts(TimeoutPersister):
    """Keeps timeouts in a table of an SQLite file; :class:`postdate.ports.timeouts.TimeoutPersister`.

    Times are texts ``yyyy-MM-dd HH:mm:ss.ffffff`` in UTC. Several processes may use one file at once.

    Args:
        path: of the file; created by :meth:`setup`.
        table_prefix: what the name of the table begins with; any characters. ``None``: that of the endpoint, see
            :func:`postdate.persistence.timeouts.table_prefix`. SQLite does not tell tables apart by the case of
            letters.
        synchronous: as of the transport on the file; see :class:`postdate.SqliteStore`.
        recording: as of the transport on the file.

    Raises:
        ConfigurationError: the table cannot be, or the file is open in this process with other settings.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        table_prefix: str | None = None,
        synchronous: str = "full",
        recording: Recording = Recording.ALL,
    ) -> None:
        self._prefix, self._endpoint = table_prefix, ""
        self._sql = None if table_prefix is None else _Statements(table_name(prefix=table_prefix))
        self.file = SqliteFile.open(path, synchronous=synchronous, recording=recording)
        self._closed = False

    @property
    @override
    def database(self) -> object:
        """See :class:`postdate.ports.timeouts.TimeoutPersister`; that of a local transport on the same file."""
        return ("sqlite", str(self.file.path))

    @override
    async def initialize(self, endpoint: str) -> None:
        """Settle the name of the table; the file is not opened."""
        self._endpoint = endpoint
        self._sql = _Statements(table_name(endpoint, prefix=self._prefix))

    @override
    async def setup(self) -> None:
        """Create the file and the table where they are missing."""
        statements = self._known.setup

        def create(tx: Transaction) -> None:
            for statement in statements:
                tx.execute(statement)

        await self.file.setup()
        await self.file.write(create)

    @property
    def _known(self) -> _Statements:
        if self._sql is None:
            raise ConfigurationError(
                "SqliteTimeouts does not know its table yet: call initialize(endpoint) first, or give table_prefix="
            )
        return self._sql

    @override
    async def add(self, timeout: Timeout) -> bool:
        sql, row = self._known.insert, _row(timeout)
        return await self.file.write(lambda tx: tx.execute(sql, row).rowcount > 0)

    @override
    def adding(self, timeout: Timeout) -> Work:
        sql, row = self._known.insert, _row(timeout)

        def add(tx: Transaction) -> None:
            tx.execute(sql, row)

        return add

    @override
    async def peek(self, timeout_id: str) -> Timeout | None:
        sql, wanted = self._known.peek, normal_id(timeout_id)
        row = await self.file.read(lambda connection: connection.execute(sql, (wanted,)).fetchone())
        return None if row is None else decode(*row, owner=self._endpoint)

    @override
    async def claim(self, timeout_id: str) -> TimeoutClaim | None:
        """See :meth:`postdate.ports.timeouts.TimeoutPersister.claim`: a file is locked, nothing is written."""
        wanted = normal_id(timeout_id)
        if wanted is None:
            return None
        folder, name = presence_folder(self.file.path), f"{self._known.table.lower()}\n{wanted}"
        hold = await in_thread(try_to_hold, folder, name)
        if hold is None:
            return None
        found = None
        try:
            found = await self.peek(wanted)
        finally:
            if found is None:
                hold.let_go()
        if found is None:
            return None
        claim = _FileClaim(found, self, hold)
        return TimeoutClaim(found, claim.remove, claim.release)

    @override
    async def try_remove(self, timeout_id: str) -> bool:
        sql, wanted = self._known.delete, normal_id(timeout_id)
        return await self.file.write(lambda tx: tx.execute(sql, (wanted,)).rowcount > 0)

    @override
    def removing(self, timeout_id: str) -> Work:
        sql, wanted = self._known.delete, normal_id(timeout_id)

        def remove(tx: Transaction) -> None:
            if not tx.execute(sql, (wanted,)).rowcount:
                raise TimeoutConcurrentlyProcessed(f"timeout {timeout_id} was removed meanwhile")

        return remove

    @override
    async def remove_by_saga(self, saga_id: str) -> int:
        sql, saga = self._known.delete_saga, normal_saga(saga_id)
        return await self.file.write(lambda tx: tx.execute(sql, (saga,)).rowcount)

    @override
    def removing_by_saga(self, saga_id: str) -> Work:
        sql, saga = self._known.delete_saga, normal_saga(saga_id)

        def remove(tx: Transaction) -> None:
            tx.execute(sql, (saga,))

        return remove

    @override
    async def next_chunk(self, start: datetime, now: datetime, limit: int) -> DueChunk:
        """See :meth:`postdate.ports.timeouts.TimeoutPersister.next_chunk`; one snapshot."""
        sql = self._known

        def find(connection: Any) -> DueChunk:
            def due(after: datetime, until: datetime, at_most: int | None) -> Sequence[tuple[Any, ...]]:
                values = (text_time(after), text_time(until), _ALL if at_most is None else at_most)
                return connection.execute(sql.due, values).fetchall()

            def first(after: datetime) -> object:
                return connection.execute(sql.first, (text_time(after),)).fetchone()[0]

            return chunks.next_chunk(start, now, limit, due, first)

        return await self.file.read(find)

    @override
    async def close(self) -> None:
        """Give the file back; a second time without effect."""
        closed, self._closed = self._closed, True
        if not closed:
            self.file.close()


class _FileClaim:
    """What a :class:`postdate.ports.timeouts.TimeoutClaim` calls: a locked file."""

    def __init__(self, timeout: Timeout, timeouts: SqliteTimeouts, hold: LockedFile) -> None:
        self.timeout, self._timeouts = timeout, timeouts
        self._hold: LockedFile | None = hold

    async def remove(self) -> bool:
        """Remove it, and let it go when that is committed."""
        try:
            return self._hold is not None and await self._timeouts.try_remove(self.timeout.timeout_id)
        finally:
            await self.release()

    async def release(self) -> None:
        """Let it go; that takes some microseconds."""
        hold, self._hold = self._hold, None
        if hold is not None:
            hold.let_go()


def setup_statements(endpoint: str, table_prefix: str | None = None) -> str:
    """Return the SQL that makes an endpoint's table in a file that has those of queues, for an administrator."""
    return "".join(f"{statement};\n" for statement in _Statements(table_name(endpoint, prefix=table_prefix)).setup)


def _row(timeout: Timeout) -> dict[str, Any]:
    row = encode(checked(timeout))
    return {**row, TIME: text_time(row[TIME])}


class _Statements:
    """Every statement of one table.

    Args:
        table: its name.

    Raises:
        ConfigurationError: SQLite cannot have it.
    """

    def __init__(self, table: str) -> None:
        self.table = table
        name = _quoted(_checked_name(table))
        self.setup = (
            (
                f'CREATE TABLE IF NOT EXISTS {name} ("Id" TEXT NOT NULL PRIMARY KEY, "Destination" TEXT, '
                f'"SagaId" TEXT, "State" BLOB, "Time" TEXT, "Headers" TEXT NOT NULL, '
                f'"PersistenceVersion" TEXT NOT NULL)'
            ),
            f'CREATE INDEX IF NOT EXISTS {_quoted(f"{table}_SagaId")} ON {name} ("SagaId")',
            f'CREATE INDEX IF NOT EXISTS {_quoted(f"{table}_Time")} ON {name} ("Time")',
        )
        self.insert = (
            f'INSERT INTO {name} ("Id", "Destination", "SagaId", "State", "Time", "Headers", "PersistenceVersion") '
            f"VALUES (:Id, :Destination, :SagaId, :State, :Time, :Headers, :PersistenceVersion) "
            f'ON CONFLICT ("Id") DO NOTHING'
        )
        self.peek = f'SELECT "Id", "Destination", "SagaId", "State", "Time", "Headers" FROM {name} WHERE "Id" = ?'
        self.delete = f'DELETE FROM {name} WHERE "Id" = ?'
        self.delete_saga = f'DELETE FROM {name} WHERE "SagaId" = ?'
        self.due = f'SELECT "Id", "Time" FROM {name} WHERE "Time" > ? AND "Time" <= ? ORDER BY "Time" LIMIT ?'
        self.first = f'SELECT min("Time") FROM {name} WHERE "Time" > ?'


def _checked_name(table: str) -> str:
    """Return the name of a table if SQLite can have it.

    Raises:
        ConfigurationError: it has a NUL character or a lone surrogate, or is one of SQLite's own.
    """
    lone = any(0xD800 <= ord(character) < 0xE000 for character in table)
    if "\0" in table or lone or table.lower().startswith(_RESERVED):
        raise ConfigurationError(
            f"the table of timeouts {table!r} must not have NUL characters or lone surrogates, nor begin with "
            f"{_RESERVED!r}: choose another table_prefix"
        )
    return table


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'

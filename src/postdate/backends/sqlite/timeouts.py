"""Timeouts in one SQLite file.

With the local transport on the same file, a timeout is stored, or dispatched and removed, in the transaction of the
queues. Source: ADR 0003, ADR 0014.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any, Final

from typing_extensions import override

from postdate.backends.sql.timeouts import LATER, SharedSqlTimeouts, TimeoutTable, standard_statements
from postdate.backends.sql.timeouts_layout import TIME, normal_id, table_name, text_time
from postdate.backends.sqlite.file import OnFile, SqliteFile
from postdate.backends.sqlite.processes import acquire_file_lock, claimants_folder
from postdate.backends.sqlite.rows import SqliteSqlDialect, Transaction
from postdate.errors import ConfigurationError
from postdate.ports import Recording
from postdate.ports.timeouts import TimeoutClaim
from postdate.runtime.threads import run_in_thread

_RESERVED: Final = "sqlite_"


class SqliteTimeouts(OnFile, SharedSqlTimeouts["_SqliteTable"]):
    """Keeps timeouts in a table of an SQLite file; :class:`postdate.ports.timeouts.TimeoutPersister`.

    Times are texts ``yyyy-MM-dd HH:mm:ss.ffffff`` in UTC. Several processes may use one file at once.

    Args:
        path: of the file; created by :meth:`setup` or at first use unless ``create`` is false.
        table_prefix: of the table's name; any characters. ``None``: the prefix of the endpoint, see
            :func:`postdate.backends.sql.timeouts_layout.table_prefix`. SQLite ignores the case of letters in it.
        synchronous: as of the transport on the file; see :class:`postdate.SqliteStore`.
        recording: as of the transport on the file.
        create: create the file, and migrate the tables of an older one.

    Raises:
        ConfigurationError: the table's name is invalid, or the file is open in this process with other settings.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        table_prefix: str | None = None,
        synchronous: str = "full",
        recording: Recording = Recording.ALL,
        create: bool = True,
    ) -> None:
        if table_prefix is not None:
            _check_name(table_name("", prefix=table_prefix))  # before the file is opened
        self.file = SqliteFile.open(path, synchronous=synchronous, recording=recording, create=create)
        super().__init__(self.file, _SqliteTable, table_prefix)

    @property
    @override
    def database(self) -> object:
        return ("sqlite", str(self.file.path))

    @override
    async def setup(self) -> None:
        statements = self._checked_table.setup

        def create(tx: Transaction) -> None:
            for statement in statements:
                tx.execute(statement)

        await self.file.setup()
        await self.file.write(create)

    @override
    async def claim(self, timeout_id: str) -> TimeoutClaim | None:
        """Claim a timeout by a locked file, without a write to the database."""
        if (normal := normal_id(timeout_id)) is None:
            return None
        folder, name = claimants_folder(self.file.path), f"{self._checked_table.name.lower()}\n{normal}"
        if (file_lock := await run_in_thread(acquire_file_lock, folder, name)) is None:
            return None
        timeout = None
        try:
            timeout = await self.peek(normal)
        finally:
            if timeout is None:
                file_lock.unlock()
        if timeout is None:
            return None

        async def remove() -> bool:
            try:
                return file_lock.is_locked and await self.try_remove(timeout.timeout_id)
            finally:
                file_lock.unlock()

        async def release() -> None:
            file_lock.unlock()

        return TimeoutClaim(timeout, remove, release)


def setup_statements(endpoint: str, table_prefix: str | None = None) -> str:
    """Return the SQL of an endpoint's table, for a file that has the tables of queues."""
    return "".join(f"{statement};\n" for statement in _SqliteTable(table_name(endpoint, prefix=table_prefix)).setup)


class _SqliteTable(TimeoutTable):
    dialect, no_limit = SqliteSqlDialect(), -1

    def __init__(self, name: str) -> None:
        self.name = name
        plain = _quote_name(_check_name(name))
        table = plain.replace("%", "%%")
        self.setup = (
            (
                f'CREATE TABLE IF NOT EXISTS {plain} ("Id" TEXT NOT NULL PRIMARY KEY, "Destination" TEXT, '
                f'"SagaId" TEXT, "State" BLOB, "Time" TEXT, "Headers" TEXT NOT NULL, '
                f'"PersistenceVersion" TEXT NOT NULL)'
            ),
            f'CREATE INDEX IF NOT EXISTS {_quote_name(f"{name}_SagaId")} ON {plain} ("SagaId")',
            f'CREATE INDEX IF NOT EXISTS {_quote_name(f"{name}_Time")} ON {plain} ("Time")',
        )
        super().__init__(standard_statements(table, '"Headers"', f'SELECT min("Time") FROM {table} WHERE {LATER}'))

    @override
    def instant(self, instant: datetime) -> str:
        return text_time(instant)

    @override
    def insert(self, session: Transaction, row: dict[str, Any]) -> bool:
        return self.dialect.change(session, self.sql.insert, {**row, TIME: text_time(row[TIME])}) > 0


def _check_name(table: str) -> str:
    """Raise `ConfigurationError` for NUL characters, lone surrogates, and names reserved by SQLite."""
    has_surrogate = any(0xD800 <= ord(character) < 0xE000 for character in table)
    if "\0" in table or has_surrogate or table.lower().startswith(_RESERVED):
        raise ConfigurationError(
            f"the table of timeouts {table!r} must not have NUL characters or lone surrogates, nor begin with "
            f"{_RESERVED!r}: choose another table_prefix"
        )
    return table


def _quote_name(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'

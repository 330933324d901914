"""Saga instances in one SQLite file, beside the delayed messages and queues there: one transaction for all."""

from __future__ import annotations

from pathlib import Path

from typing_extensions import override

from postdate.backends.sql.sagas import SqlSagaStore
from postdate.backends.sqlite.connection import apply_migrations, steps
from postdate.backends.sqlite.file import OnFile, SqliteFile
from postdate.backends.sqlite.rows import SqliteSqlDialect
from postdate.ports import Recording


class SqliteSagaStore(OnFile, SqlSagaStore):
    """Keeps saga instances in an SQLite file; several processes may use it at once.

    Args:
        path: of the file; created by :meth:`setup` or at first use unless ``create`` is false.
        synchronous: see :class:`postdate.SqliteStore`; all adapters on the same file need the same value.
        recording: see :class:`postdate.SqliteStore`; all adapters on the same file need the same value.
        create: create the file when it is missing.

    Raises:
        ConfigurationError: a setting is invalid, or the file is open in this process with other settings.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        synchronous: str = "full",
        recording: Recording = Recording.ALL,
        create: bool = True,
    ) -> None:
        self.file = SqliteFile.open(path, synchronous=synchronous, recording=recording, create=create)
        super().__init__(self.file, SqliteSqlDialect(), "saga", ("sqlite", self.file.where))

    @override
    async def setup(self) -> None:
        await self.file.setup()
        where = f"the sagas in {self.file.path}"
        await self.file.write(lambda tx: apply_migrations(tx.execute, steps("sagas"), where))

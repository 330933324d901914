"""Saga instances in a schema of PostgreSQL, beside the delayed messages and queues there: one transaction for all."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from typing_extensions import override

from postdate.backends.postgres.access import Access, OpenDatabase
from postdate.backends.postgres.names import part_script, part_steps
from postdate.backends.postgres.statements import PostgresSqlDialect
from postdate.backends.sql.sagas import SqlSagaStore
from postdate.ports import Scripted
from postdate.runtime.threads import in_thread

_TABLE: Final = "saga"


class PostgresSagaStore(SqlSagaStore, Scripted):
    """Keeps saga instances in PostgreSQL; several processes may use it at once.

    Args:
        database: ``postgresql://user:password@host:port/database``, any connection string of libpq, or a
            :class:`postdate.Postgres` that others use, too.
        schema: of the table; a store and queues in the same schema share their transactions with it. ``None``: that of
            the database, which is ``postdate``.
        answers_within: a connection is given up after so long a silence of the server; above 0. ``None``: as the
            database says, or 20 seconds.

    Raises:
        ConfigurationError: the address, the schema or the duration is invalid.
    """

    def __init__(
        self, database: str | OpenDatabase, *, schema: str | None = None, answers_within: timedelta | None = None
    ) -> None:
        self.database = Access(database, schema, answers_within=answers_within)
        table, identity = self.database.names.of(_TABLE), self.database.identity
        super().__init__(self.database, PostgresSqlDialect(), table, identity)

    @override
    def setup_statements(self, endpoint: str) -> str:
        schema = self.database.names.schema
        return part_script(schema, part_steps(schema, "sagas", _TABLE), with_queues=True)

    @override
    async def setup(self) -> None:
        await in_thread(self.database.setup_blocking, None, part_steps(self.database.names.schema, "sagas", _TABLE))

    @override
    async def close(self) -> None:
        await in_thread(self.database.close_blocking)

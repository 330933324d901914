"""One schema of a database server, the connections that all its adapters share, and the sagas in it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, Final, Self

from typing_extensions import override

from postdate.backends.sql.dialect import SqlDialect
from postdate.backends.sql.migrations import Step
from postdate.backends.sql.row_locks.connection import DatabaseServer
from postdate.backends.sql.row_locks.names import RowLockNames, part_steps
from postdate.backends.sql.row_locks.pool import Connections, Pool
from postdate.backends.sql.sagas import SqlSagaStore
from postdate.errors import ConfigurationError
from postdate.ports import Scripted
from postdate.ports.backends import DatabaseObject
from postdate.runtime.threads import run_in_thread

HOLDS_AT_MOST: Final = timedelta(seconds=60)  # default of ``holds_at_most``


@dataclass(frozen=True, slots=True)
class TableCreation:
    """The creation of tables on a server: ``migrate`` applies missing migrations, ``script`` returns them as SQL."""

    migrate: Callable[[Any, RowLockNames, Sequence[Step]], None]
    script: Callable[[RowLockNames, Sequence[Step]], str]


class RowLockSchema(DatabaseObject, ABC):
    """A schema on a server. Its adapters share its connections, which are closed with the last adapter.

    All claims of stores depend on one connection and one number of this process; claims of timeouts are only row locks.

    Args:
        url: of the database.
        schema: of the tables; ``None``: the server's default.
        holds_at_most: a process that sends no heartbeat for this long loses its claims; ``None``: 60 s.
        answers_within: a connection is abandoned if the server does not answer for this long; above 0. ``None``: 30 s.
            Statements on whole tables may take 10 minutes.

    Raises:
        ConfigurationError: the address, the schema or a time is invalid.
    """

    has_a_table_for_each_endpoint = True
    dialect: ClassVar[SqlDialect]
    names_of: ClassVar[type[RowLockNames]]
    tables: ClassVar[TableCreation]

    def __init__(
        self,
        url: str,
        *,
        schema: str | None = None,
        holds_at_most: timedelta | None = None,
        answers_within: timedelta | None = None,
    ) -> None:
        super().__init__()
        self.holds_at_most = HOLDS_AT_MOST if holds_at_most is None else holds_at_most
        self.server = self._server_at(url, answers_within)
        self.schema = self._check_schema(schema)
        self.connections = Connections(self.server)

    @abstractmethod
    def _server_at(self, url: str, answers_within: timedelta | None) -> DatabaseServer[Any]: ...

    @abstractmethod
    def _check_schema(self, schema: str | None) -> str:
        """Return the schema's name, or the default; raise `ConfigurationError` if the name is not possible."""

    @property
    def identity(self) -> tuple[object, ...]:
        """A value that is equal for the same schema of the same server."""
        return (self.server.product, self.server.address.host, self.server.address.port, self.schema)

    @classmethod
    def of(
        cls,
        address_or_database: str | Self,
        schema: str | None = None,
        holds_at_most: timedelta | None = None,
        answers_within: timedelta | None = None,
    ) -> Self:
        """Return the given database object, or a new one for an address and settings.

        Raises:
            ConfigurationError: a setting is invalid, or was given beside a database object.
        """
        if isinstance(address_or_database, str):
            return cls(address_or_database, schema=schema, holds_at_most=holds_at_most, answers_within=answers_within)
        for name, value in {"schema": schema, "holds_at_most": holds_at_most, "answers_within": answers_within}.items():
            if value is not None:
                raise ConfigurationError(f"{name}= belongs to the database object: pass it where that object is made")
        return address_or_database


class OwnTableOnServer(Scripted):
    """An adapter with a table of its own in a schema, beside those of stores."""

    database_type: ClassVar[type[RowLockSchema]]
    part: ClassVar[str]
    """The folder of its migrations."""
    table: ClassVar[str]
    """The name of its table, without the common prefix."""

    def _set_database(self, url: str | RowLockSchema, schema: str | None, answers_within: timedelta | None) -> None:
        self._database = self.database_type.of(url, schema, answers_within=answers_within)
        self._pool = Pool(self._database.connections)
        self._names = self._database.names_of(self._database.schema, self.table)
        self._required_steps = part_steps(self._names, self.part)

    @override
    def setup_statements(self, endpoint: str) -> str:
        return self._database.tables.script(self._names, self._required_steps)

    async def setup(self) -> None:
        migrate = self._database.tables.migrate
        await self._pool.run(lambda session: migrate(session, self._names, self._required_steps), patiently=True)

    async def close(self) -> None:
        await run_in_thread(self._pool.close)


class ServerSagaStore(OwnTableOnServer, SqlSagaStore):
    """Keeps saga instances in the table ``postdate_saga`` of a schema; several processes may use it at once.

    Args:
        url: of the database, or its database object, whose connections and ``schema`` it uses. With an outbox in the
            same schema, changes of instances are part of the outbox's commit.
        schema: of the table; ``None``: the default of the server.
        answers_within: a connection is abandoned if the server does not answer for this long; above 0. ``None``: 30 s.

    Raises:
        ConfigurationError: the address, the schema or the duration is invalid.
    """

    part, table = "sagas", "saga"

    def __init__(
        self, url: str | RowLockSchema, *, schema: str | None = None, answers_within: timedelta | None = None
    ) -> None:
        self._set_database(url, schema, answers_within)
        super().__init__(self._pool, self._database.dialect, self._names.name_of(self.table), self._database.identity)

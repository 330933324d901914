"""One schema of a database server, and the connections to it that what is kept there shares."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, Final, Self

from typing_extensions import override

from postdate.backends.rowlocks.connection import DatabaseServer
from postdate.backends.rowlocks.names import RowLockNames
from postdate.backends.rowlocks.pool import Connections, Pool
from postdate.backends.rowlocks.setup import part_steps
from postdate.backends.sql.dialect import SqlDialect
from postdate.errors import ConfigurationError
from postdate.persistence.databases import DatabaseObject
from postdate.persistence.migrations import Step
from postdate.ports import Scripted
from postdate.runtime.threads import in_thread

HOLDS_AT_MOST: Final = timedelta(seconds=60)


@dataclass(frozen=True, slots=True)
class TableMaking:
    """How tables are made on a server.

    Args:
        migrate: does what is missing of some migrations; several processes may do it at once. Blocks.
        script: returns the SQL that does the same, for a database administrator.
    """

    migrate: Callable[[Any, RowLockNames, Sequence[Step]], None]
    script: Callable[[RowLockNames, Sequence[Step]], str]


class RowLockSchema(DatabaseObject, ABC):
    """A schema on a server. Adapters made from it share its connections, of which the last that is closed closes all.

    Claims of a store are shown to live by one connection and one number, however many share the schema; claims of
    timeouts are row locks alone.

    Args:
        url: of the database.
        schema: that the tables are in; ``None``: the server's default.
        holds_at_most: a process that shows no life for so long loses what it holds; ``None``: 60 s.
        answers_within: after so long a silence of the server a connection is given up; above 0. ``None``: 30 s. What
            reads or changes whole tables may take 10 minutes.

    Raises:
        ConfigurationError: the address, the schema or a time cannot be.
    """

    has_a_table_for_each_endpoint = True
    dialect: ClassVar[SqlDialect]
    names_of: ClassVar[type[RowLockNames]]
    tables: ClassVar[TableMaking]

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
        self.schema = self._checked(schema)
        self.connections = Connections(self.server)

    @abstractmethod
    def _server_at(self, url: str, answers_within: timedelta | None) -> DatabaseServer[Any]:
        """Return the server of an address."""

    @abstractmethod
    def _checked(self, schema: str | None) -> str:
        """Return the name of the schema, if the server can have it."""

    @property
    def identity(self) -> tuple[object, ...]:
        """What tells databases apart, and the schema."""
        return (self.server.product, self.server.address.host, self.server.address.port, self.schema)

    @classmethod
    def of(
        cls,
        place: str | Self,
        schema: str | None = None,
        holds_at_most: timedelta | None = None,
        answers_within: timedelta | None = None,
    ) -> Self:
        """Return the schema that an adapter is made from: the one it is given, or that of an address and settings.

        Raises:
            ConfigurationError: the address or a setting cannot be, or a setting is the given object's.
        """
        if isinstance(place, str):
            return cls(place, schema=schema, holds_at_most=holds_at_most, answers_within=answers_within)
        given = {"schema": schema, "holds_at_most": holds_at_most, "answers_within": answers_within}
        for name, value in given.items():
            if value is not None:
                raise ConfigurationError(f"{name}= belongs to the database object: give it where that is made")
        return place


class KeptOnServer(Scripted):
    """What has a table of its own in a schema, beside those of stores."""

    made_from: ClassVar[type[RowLockSchema]]
    part: ClassVar[str]
    """Folder of its migrations."""
    table: ClassVar[str]
    """Its name, without what all of ours begin with."""

    def _use(self, url: str | RowLockSchema, schema: str | None, answers_within: timedelta | None) -> None:
        self._database = self.made_from.of(url, schema, answers_within=answers_within)
        self._pool = Pool(self._database.connections)
        self._names = self._database.names_of(self._database.schema, self.table)
        self._wanted = part_steps(self._names, self.part)

    @override
    def setup_statements(self, endpoint: str) -> str:
        """Return the SQL that :meth:`setup` runs where nothing is there yet, for a database administrator."""
        return self._database.tables.script(self._names, self._wanted)

    async def setup(self) -> None:
        """Create what is missing; several processes may do it at once."""
        migrate = self._database.tables.migrate
        await self._pool.run(lambda session: migrate(session, self._names, self._wanted), patiently=True)

    async def close(self) -> None:
        """Close every connection that nobody else uses; a second time without effect."""
        await in_thread(self._pool.close)

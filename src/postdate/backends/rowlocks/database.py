"""One schema of a database server, and the connections to it that a store and timeouts there share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from datetime import timedelta
from typing import Any, Final, Self

from postdate.backends.rowlocks.connection import DatabaseServer
from postdate.backends.rowlocks.pool import Connections
from postdate.errors import ConfigurationError
from postdate.persistence.databases import DatabaseObject

HOLDS_AT_MOST: Final = timedelta(seconds=60)


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

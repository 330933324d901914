"""A database of a MariaDB server, which is what a schema is there."""

from __future__ import annotations

from datetime import timedelta

from postdate.backends.mariadb.connection import MariaDbServer
from postdate.backends.mariadb.names import check_name
from postdate.backends.rowlocks.database import RowLockSchema
from postdate.errors import ConfigurationError


class MariaDbSchema(RowLockSchema):
    """A database on a server, and the connections to it; by default the one that the address names."""

    def _server_at(self, url: str, answers_within: timedelta | None) -> MariaDbServer:
        return MariaDbServer(url, self.holds_at_most, answers_within)

    def _checked(self, schema: str | None) -> str:
        name = self.server.database if schema is None else schema
        if not name:
            raise ConfigurationError("MariaDB needs a database: mariadb://user@host/database, or schema=...")
        return check_name(name, "schema")

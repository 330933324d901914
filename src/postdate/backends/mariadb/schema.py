"""A database of a MariaDB server, which takes the place of a schema, with the sagas and the outbox in it."""

from __future__ import annotations

from datetime import timedelta

from postdate.backends.mariadb import setup
from postdate.backends.mariadb.connection import MariaDbServer
from postdate.backends.mariadb.names import MariaDbNames, check_name
from postdate.backends.mariadb.statements import MariaDbSqlDialect
from postdate.backends.rowlocks.database import RowLockSchema, TableMaking
from postdate.backends.rowlocks.outbox import ServerOutbox
from postdate.backends.rowlocks.sagas import ServerSagaStore
from postdate.errors import ConfigurationError


class MariaDbSchema(RowLockSchema):
    """A database on a server, and the connections to it; by default the one that the address names."""

    dialect, names_of = MariaDbSqlDialect(), MariaDbNames
    tables = TableMaking(setup.setup, setup.setup_statements)

    def _server_at(self, url: str, answers_within: timedelta | None) -> MariaDbServer:
        return MariaDbServer(url, self.holds_at_most, answers_within)

    def _checked(self, schema: str | None) -> str:
        name = self.server.database if schema is None else schema
        if not name:
            raise ConfigurationError("MariaDB needs a database: mariadb://user@host/database, or schema=...")
        return check_name(name, "schema")


class MariaDbSagaStore(ServerSagaStore):
    """Keeps saga instances in MariaDB; see :class:`postdate.backends.rowlocks.sagas.ServerSagaStore`."""

    made_from = MariaDbSchema


class MariaDbOutbox(ServerOutbox):
    """Keeps outboxes in MariaDB; see :class:`postdate.backends.rowlocks.outbox.ServerOutbox`."""

    made_from = MariaDbSchema

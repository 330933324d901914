"""A schema in a database of SQL Server, with the sagas and the outbox in it; never run against a server so far."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from postdate.backends.rowlocks.database import RowLockSchema, TableMaking
from postdate.backends.rowlocks.outbox import ServerOutbox
from postdate.backends.rowlocks.sagas import ServerSagaStore
from postdate.backends.sqlserver import setup
from postdate.backends.sqlserver.connection import SqlServerInstance
from postdate.backends.sqlserver.names import SqlServerNames, check_name
from postdate.backends.sqlserver.statements import SqlServerSqlDialect

DEFAULT_SCHEMA: Final = "dbo"


class SqlServerSchema(RowLockSchema):
    """A schema, and the connections to its server; by default ``dbo``."""

    dialect, names_of = SqlServerSqlDialect(), SqlServerNames
    tables = TableMaking(setup.setup, setup.setup_statements)

    def _server_at(self, url: str, answers_within: timedelta | None) -> SqlServerInstance:
        return SqlServerInstance(url, answers_within)

    def _checked(self, schema: str | None) -> str:
        return check_name(DEFAULT_SCHEMA if schema is None else schema, "schema")


class SqlServerSagaStore(ServerSagaStore):
    """Keeps saga instances in SQL Server; see :class:`postdate.backends.rowlocks.sagas.ServerSagaStore`."""

    made_from = SqlServerSchema


class SqlServerOutbox(ServerOutbox):
    """Keeps outboxes in SQL Server; see :class:`postdate.backends.rowlocks.outbox.ServerOutbox`."""

    made_from = SqlServerSchema

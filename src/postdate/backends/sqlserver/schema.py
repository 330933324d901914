"""A schema in a database of SQL Server."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from postdate.backends.rowlocks.database import RowLockSchema
from postdate.backends.sqlserver.connection import SqlServerInstance
from postdate.backends.sqlserver.names import check_name

DEFAULT_SCHEMA: Final = "dbo"


class SqlServerSchema(RowLockSchema):
    """A schema, and the connections to its server; by default ``dbo``."""

    def _server_at(self, url: str, answers_within: timedelta | None) -> SqlServerInstance:
        return SqlServerInstance(url, answers_within)

    def _checked(self, schema: str | None) -> str:
        return check_name(DEFAULT_SCHEMA if schema is None else schema, "schema")

"""Delayed messages in SQL Server 2016 or newer.

Not run against a server so far: none can be installed where Postdate is built. The conformance suite runs it when
``POSTDATE_SQLSERVER_URL`` is set; without, its statements are parsed, and the rest is what MariaDB proves.
Source: specification 1.1, 1.3; ADR 0008.
"""

from __future__ import annotations

from postdate.locking import LockingStore
from postdate.ports import Recording
from postdate.sqlserver.connection import SqlServer
from postdate.sqlserver.names import Names, check_name
from postdate.sqlserver.setup import setup_statements
from postdate.sqlserver.tables import SqlServerTables


class SqlServerStore(LockingStore):
    """Keeps delayed messages in a table of SQL Server.

    Args:
        url: ``mssql://user:password@host:port/database``; for TLS, ``?cafile=/path``.
        schema: that the tables are in.
        table: of the waiting messages; at most 128 characters. ``None``: ``{endpoint}.timeouts``.
        recording: how much is kept for audits.
        largest_message_bytes: of headers and body together.

    Raises:
        ConfigurationError: the address, the schema or the table cannot be.
    """

    def __init__(
        self,
        url: str,
        *,
        schema: str = "dbo",
        table: str | None = None,
        recording: Recording = Recording.ALL,
        largest_message_bytes: int = 16 * 1024 * 1024,
    ) -> None:
        self.server = SqlServer(url)
        self._schema, self._recording = check_name(schema, "schema"), recording
        super().__init__(self.server, self._tables_of, table, largest_message_bytes)

    def _tables_of(self, table: str) -> SqlServerTables:
        return SqlServerTables(Names(self._schema, table), self._recording)

    def setup_statements(self, endpoint: str) -> str:
        """Return the SQL that :meth:`setup` runs on an empty database, for a database administrator."""
        return setup_statements(Names(self._schema, self._table or f"{endpoint}.timeouts"))

"""Delayed messages in SQL Server 2016 or newer.

The store has never been run against a server, because none can be installed where Postdate is built. The conformance
suite runs it when ``POSTDATE_SQLSERVER_URL`` is set. Otherwise its statements are parsed, its wire protocol is tested
against our own listener, and MariaDB proves the common part. Source: ADR 0008.
"""

from __future__ import annotations

from typing_extensions import override

from postdate.backends.sql.row_locks.store import LockingStore
from postdate.backends.sqlserver.schema import SqlServerNames, SqlServerSchema
from postdate.backends.sqlserver.tables import SqlServerTables


class SqlServerStore(LockingStore):
    """Keeps delayed messages in a table of SQL Server.

    Args:
        url: ``mssql://user:password@host:port/database``, in TLS unless it says otherwise; for its options see
            :class:`postdate.backends.sqlserver.connection.SqlServerInstance`. Or a
            :class:`postdate.backends.sqlserver.database.SqlServer`, whose connections it uses, and which has the
            settings ``schema``, ``holds_at_most`` and ``answers_within``.
        schema: of the tables; ``None``: ``dbo``.
        table: of the pending messages; at most 128 characters. ``None``: ``{endpoint}.timeouts``.
        recording: how much is recorded for audits.
        largest_message_bytes: of headers and body together; ``None``: 16 MiB.
        holds_at_most: a process that sends no heartbeat for this long (frozen, swapped out) loses its claims to other
            processes that have the rights to end its connections (VIEW SERVER STATE and ALTER ANY CONNECTION). The
            server itself never ends them. So without these rights the process keeps its claims, and that is logged.
            ``None``: 60 s.
        answers_within: a connection is abandoned if the server does not answer for this long; above 0. ``None``: 30 s.
            Statements on whole tables may take 10 minutes.

    Raises:
        ConfigurationError: the address, the schema, the table or a time is invalid.
    """

    database_type = SqlServerSchema

    @override
    def _tables_of(self, table: str) -> SqlServerTables:
        names = SqlServerNames(self._database.schema, table)
        return SqlServerTables(names, self._recording, self._database.holds_at_most)

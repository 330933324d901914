"""SQL Server as one object, from which an endpoint's adapters on a schema are made."""

from __future__ import annotations

from functools import cached_property

from postdate.backends.sqlserver.schema import SqlServerOutbox, SqlServerSagaStore, SqlServerSchema
from postdate.backends.sqlserver.store import SqlServerStore
from postdate.backends.sqlserver.timeouts import SqlServerTimeouts


class SqlServer(SqlServerSchema):
    """A schema of SQL Server 2016 or newer: one pool of connections for all adapters on it.

    Adapters with settings of their own are made from it, too: ``SqlServerStore(database, recording=…)``.

    Args:
        url: ``mssql://user:password@host:port/database``, in TLS unless it says otherwise; for its options see
            :class:`postdate.backends.sqlserver.connection.SqlServerInstance`.
        schema: of the tables; ``None``: ``dbo``.
        holds_at_most: see :class:`postdate.backends.sqlserver.store.SqlServerStore`; ``None``: 60 s.
        answers_within: a connection is given up after so long a silence of the server; above 0. ``None``: 30 s.

    Raises:
        ConfigurationError: the address, the schema or a time is invalid.
    """

    @cached_property
    def store(self) -> SqlServerStore:
        """Where delayed messages wait, in the table ``{endpoint}.timeouts``."""
        return self.register_adapter(SqlServerStore(self))

    @cached_property
    def sagas(self) -> SqlServerSagaStore:
        """Where saga instances are kept."""
        return self.register_adapter(SqlServerSagaStore(self))

    @cached_property
    def outbox(self) -> SqlServerOutbox:
        """Where outboxes are kept, and whose transactions handlers use."""
        return self.register_adapter(SqlServerOutbox(self))

    @cached_property
    def timeouts(self) -> SqlServerTimeouts:
        """Where a timeout manager keeps its timeouts."""
        return self.register_adapter(SqlServerTimeouts(self))

"""SQL Server as one object, which creates the adapters of an endpoint on one schema."""

from __future__ import annotations

from functools import cached_property

from postdate.backends.sqlserver.schema import SqlServerOutbox, SqlServerSagaStore, SqlServerSchema
from postdate.backends.sqlserver.store import SqlServerStore
from postdate.backends.sqlserver.timeouts import SqlServerTimeouts


class SqlServer(SqlServerSchema):
    """A schema of SQL Server 2016 or newer: one pool of connections for all adapters on it.

    Adapters with their own settings are created from it, too: ``SqlServerStore(database, recording=…)``.

    Args:
        url: ``mssql://user:password@host:port/database``, in TLS unless it says otherwise; for its options see
            :class:`postdate.backends.sqlserver.connection.SqlServerInstance`.
        schema: of the tables; ``None``: ``dbo``.
        holds_at_most: see :class:`postdate.backends.sqlserver.store.SqlServerStore`; ``None``: 60 s.
        answers_within: a connection is abandoned if the server does not answer for this long; above 0. ``None``: 30 s.

    Raises:
        ConfigurationError: the address, the schema or a time is invalid.
    """

    @cached_property
    def store(self) -> SqlServerStore:
        """The store of delayed messages, in the table ``{endpoint}.timeouts``."""
        return self.register_adapter(SqlServerStore(self))

    @cached_property
    def sagas(self) -> SqlServerSagaStore:
        """The store of saga instances."""
        return self.register_adapter(SqlServerSagaStore(self))

    @cached_property
    def outbox(self) -> SqlServerOutbox:
        """The store of outboxes, whose transactions handlers use."""
        return self.register_adapter(SqlServerOutbox(self))

    @cached_property
    def timeouts(self) -> SqlServerTimeouts:
        """The persister of a timeout manager."""
        return self.register_adapter(SqlServerTimeouts(self))

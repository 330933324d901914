"""PostgreSQL as one object: the adapters of an endpoint on one schema and one set of connections. Source: ADR 0021."""

from __future__ import annotations

from functools import cached_property

from typing_extensions import override

from postdate.backends.postgres.access import OpenDatabase
from postdate.backends.postgres.outbox import PostgresOutbox
from postdate.backends.postgres.sagas import PostgresSagaStore
from postdate.backends.postgres.store import PostgresStore
from postdate.backends.postgres.timeouts import PostgresTimeouts
from postdate.backends.postgres.transport import PostgresTransport
from postdate.ports.backends import DatabaseObject


class Postgres(OpenDatabase, DatabaseObject):
    """One schema of a database, which creates store, queues, sagas, outbox and timeouts, each once, at first use.

    ``Endpoint("sales", Postgres(url))`` uses the adapters that it needs. The adapters share the connections of this
    process, one listener thread and one heartbeat. Once an endpoint uses it, at most three connections more are open
    than messages are handled at once. Close it with :meth:`close`, or use it as an asynchronous context manager. Its
    adapters may be closed before, each by itself.

    An adapter with its own settings is created from it like this: ``PostgresStore(database, table="orders.timeouts")``.

    Args:
        url: ``postgresql://user:password@host:port/database``, or any connection string of libpq. Needs direct
            connections: a pooler would swallow wake-ups.
        schema: of the tables; any characters.
        recording: how much is recorded for audits.
        answers_within: a connection is abandoned if the server does not answer for this long; above 0.
        holds_at_most: if a process sends no heartbeat for this long, other processes that use the schema end its
            sessions, which releases its claims; above 0. They need the same role, or a role that is a member of it.

    Raises:
        ConfigurationError: the address, the schema or a duration is invalid.
    """

    has_a_table_for_each_endpoint = True

    @cached_property
    def store(self) -> PostgresStore:
        """The store of delayed messages, in the table ``{endpoint}.timeouts``."""
        return self.register_adapter(PostgresStore(self))

    @cached_property
    def queues(self) -> PostgresTransport:
        """The transport for the queues."""
        return self.register_adapter(PostgresTransport(self))

    @cached_property
    def sagas(self) -> PostgresSagaStore:
        """The store of saga instances."""
        return self.register_adapter(PostgresSagaStore(self))

    @cached_property
    def outbox(self) -> PostgresOutbox:
        """The store of outboxes, whose transactions handlers use."""
        return self.register_adapter(PostgresOutbox(self))

    @cached_property
    def timeouts(self) -> PostgresTimeouts:
        """The persister of a timeout manager, in this schema, too.

        By default, a .NET endpoint writes its timeouts to ``public``: use ``PostgresTimeouts(database)`` for these.
        """
        return self.register_adapter(PostgresTimeouts(self, schema=self.schema))

    @override
    def register_endpoint(self, endpoint: str, concurrency: int, *, uses_store: bool) -> None:
        """Limit the connections to the needs of the endpoints."""
        super().register_endpoint(endpoint, concurrency, uses_store=uses_store)
        self.ensure_connections(concurrency)

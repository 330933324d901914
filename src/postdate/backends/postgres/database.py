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
    """One schema of a database, from which store, queues, sagas, outbox and timeouts are made: each once, at first use.

    ``Endpoint("sales", Postgres(url))`` takes what it needs. The adapters share the connections of this process, one
    listener thread and one sign of life; once an endpoint uses it, no more connections are open than messages are
    handled at once, and three. Close it with :meth:`close`, or use it as an asynchronous context manager; adapters made
    from it may be closed before, each by itself.

    An adapter with settings of its own is made from it like this: ``PostgresStore(database, table="orders.timeouts")``.

    Args:
        url: ``postgresql://user:password@host:port/database``, or any connection string of libpq. Needs direct
            connections: a pooler would swallow wake-ups.
        schema: of the tables; any characters.
        recording: how much is kept for audits.
        answers_within: a connection is given up after so long a silence of the server; above 0.
        holds_at_most: a process that shows no life for so long has its sessions ended by others that use the schema,
            which frees its claims; above 0. They need the same role, or one that is a member of it.

    Raises:
        ConfigurationError: the address, the schema or a duration is invalid.
    """

    has_a_table_for_each_endpoint = True

    @cached_property
    def store(self) -> PostgresStore:
        """Where delayed messages wait, in the table ``{endpoint}.timeouts``."""
        return self.register_adapter(PostgresStore(self))

    @cached_property
    def queues(self) -> PostgresTransport:
        """The queues."""
        return self.register_adapter(PostgresTransport(self))

    @cached_property
    def sagas(self) -> PostgresSagaStore:
        """Where saga instances are kept."""
        return self.register_adapter(PostgresSagaStore(self))

    @cached_property
    def outbox(self) -> PostgresOutbox:
        """Where outboxes are kept, and whose transactions handlers use."""
        return self.register_adapter(PostgresOutbox(self))

    @cached_property
    def timeouts(self) -> PostgresTimeouts:
        """Where a timeout manager keeps its timeouts: in this schema, too.

        Those that a .NET endpoint has written are in ``public`` by default: ``PostgresTimeouts(database)``.
        """
        return self.register_adapter(PostgresTimeouts(self, schema=self.schema))

    @override
    def register_endpoint(self, endpoint: str, concurrency: int, *, uses_store: bool) -> None:
        """Limit the connections to the needs of its endpoints."""
        super().register_endpoint(endpoint, concurrency, uses_store=uses_store)
        self.ensure_connections(concurrency)

"""MariaDB as one object, from which an endpoint's adapters on a database are made."""

from __future__ import annotations

from functools import cached_property

from postdate.backends.mariadb.schema import MariaDbOutbox, MariaDbSagaStore, MariaDbSchema
from postdate.backends.mariadb.store import MariaDbStore
from postdate.backends.mariadb.timeouts import MariaDbTimeouts


class MariaDb(MariaDbSchema):
    """A database of MariaDB 10.6 or newer: one pool of connections for all adapters on it.

    Adapters with settings of their own are made from it, too: ``MariaDbStore(database, recording=…)``.

    Args:
        url: ``mariadb://user:password@host:port/database``; for TLS, ``?ssl=true`` (see
            :class:`postdate.backends.mariadb.connection.MariaDbServer`).
        schema: the database of the tables; ``None``: that of ``url``.
        holds_at_most: a process that shows no life for so long (frozen, swapped out, cut off) loses its claims: the
            server ends its connections. Whole seconds, 1 at least; ``None``: 60 s.
        answers_within: a connection is given up after so long a silence of the server; above 0. ``None``: 30 s.

    Raises:
        ConfigurationError: the address, the schema or a time is invalid.
    """

    @cached_property
    def store(self) -> MariaDbStore:
        """Where delayed messages wait, in the table ``{endpoint}.timeouts``."""
        return self.register_adapter(MariaDbStore(self))

    @cached_property
    def sagas(self) -> MariaDbSagaStore:
        """Where saga instances are kept."""
        return self.register_adapter(MariaDbSagaStore(self))

    @cached_property
    def outbox(self) -> MariaDbOutbox:
        """Where outboxes are kept, and whose transactions handlers use."""
        return self.register_adapter(MariaDbOutbox(self))

    @cached_property
    def timeouts(self) -> MariaDbTimeouts:
        """Where a timeout manager keeps its timeouts."""
        return self.register_adapter(MariaDbTimeouts(self))

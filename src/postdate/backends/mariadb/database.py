"""MariaDB as one object, which creates the adapters of an endpoint on one database."""

from __future__ import annotations

from functools import cached_property

from postdate.backends.mariadb.schema import MariaDbOutbox, MariaDbSagaStore, MariaDbSchema
from postdate.backends.mariadb.store import MariaDbStore
from postdate.backends.mariadb.timeouts import MariaDbTimeouts


class MariaDb(MariaDbSchema):
    """A database of MariaDB 10.6 or newer: one pool of connections for all adapters on it.

    Adapters with their own settings are created from it, too: ``MariaDbStore(database, recording=…)``.

    Args:
        url: ``mariadb://user:password@host:port/database``; for TLS, ``?ssl=true`` (see
            :class:`postdate.backends.mariadb.connection.MariaDbServer`).
        schema: the database of the tables; ``None``: the database in ``url``.
        holds_at_most: a process that sends no heartbeat for this long (frozen, swapped out, cut off) loses its claims,
            because the server ends its connections. Whole seconds, at least 1; ``None``: 60 s.
        answers_within: a connection is abandoned if the server does not answer for this long; above 0. ``None``: 30 s.

    Raises:
        ConfigurationError: the address, the schema or a time is invalid.
    """

    @cached_property
    def store(self) -> MariaDbStore:
        """The store of delayed messages, in the table ``{endpoint}.timeouts``."""
        return self.register_adapter(MariaDbStore(self))

    @cached_property
    def sagas(self) -> MariaDbSagaStore:
        """The store of saga instances."""
        return self.register_adapter(MariaDbSagaStore(self))

    @cached_property
    def outbox(self) -> MariaDbOutbox:
        """The store of outboxes, whose transactions handlers use."""
        return self.register_adapter(MariaDbOutbox(self))

    @cached_property
    def timeouts(self) -> MariaDbTimeouts:
        """The persister of a timeout manager."""
        return self.register_adapter(MariaDbTimeouts(self))

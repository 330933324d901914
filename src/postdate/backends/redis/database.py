"""A database of a Redis server as one object, which makes the store and the transport. Source: ADR 0021."""

from __future__ import annotations

from datetime import timedelta
from functools import cached_property

from postdate.backends.redis.liveness import OpenRedis
from postdate.backends.redis.login import RedisLogin
from postdate.backends.redis.store import RedisStore
from postdate.backends.redis.transport import RedisTransport
from postdate.ports import Recording
from postdate.ports.backends import DatabaseObject


class Redis(OpenRedis, DatabaseObject):
    """Store and queues under one prefix of a database of Redis 7.0 or newer. Each is created once, at first use.

    ``Endpoint("sales", Redis(url))`` uses the store and the queues that it needs. Store and queues share the
    connections and the liveness of the process. A store with its own settings can share them, too:
    ``RedisStore(database, table="orders.timeouts")``.

    Args:
        url: ``redis://:password@host:6379/0?prefix=NAME``, or ``rediss://…`` for TLS.
        recording: how much is recorded for audits; records stay in the server's memory.
        holds_at_most: after so long without a heartbeat a process loses its claims; ``None``: 60 s.
        answers_within: a call that is not answered for so long fails; ``None``: 30 s.

    Raises:
        ConfigurationError: the address cannot be parsed.
    """

    has_a_table_for_each_endpoint = True

    def __init__(
        self,
        url: str | RedisLogin,
        *,
        recording: Recording = Recording.ALL,
        holds_at_most: timedelta | None = None,
        answers_within: timedelta | None = None,
    ) -> None:
        DatabaseObject.__init__(self)
        OpenRedis.__init__(self, url, holds_at_most=holds_at_most, answers_within=answers_within)
        self._recording = recording

    def ensure_connections(self, concurrency: int) -> None:
        """Do nothing: any number of calls share the connections, because each call is one round trip."""

    @cached_property
    def store(self) -> RedisStore:
        """The store of delayed messages, named ``{endpoint}.timeouts``."""
        return self.register_adapter(RedisStore(self, recording=self._recording))

    @cached_property
    def queues(self) -> RedisTransport:
        """The transport for the queues."""
        return self.register_adapter(RedisTransport(self, recording=self._recording))

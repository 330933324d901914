"""A database of a Redis server as one object, from which store and queues are made. Source: ADR 0021."""

from __future__ import annotations

from datetime import timedelta
from functools import cached_property

from postdate.backends.redis.login import RedisLogin
from postdate.backends.redis.opened import OpenRedis
from postdate.backends.redis.store import RedisStore
from postdate.backends.redis.transport import RedisTransport
from postdate.persistence.databases import DatabaseObject
from postdate.ports import Recording


class Redis(OpenRedis, DatabaseObject):
    """Store and queues under one prefix of a database of Redis 7.0 or newer: each made once, when asked.

    ``Endpoint("sales", Redis(url))`` takes what it needs. They share the connections of this process, the one that
    listens, and one sign of life. A store with settings of its own is made from it, too:
    ``RedisStore(database, table="orders.timeouts")``.

    Args:
        url: ``redis://:password@host:6379/0?prefix=NAME``, or ``rediss://…`` for TLS.
        recording: how much is kept for audits; records stay in the server's memory.
        holds_at_most: a process that is not heard for so long loses what it holds; ``None``: 60 s.
        answers_within: after so long a silence a connection is given up; ``None``: 30 s.

    Raises:
        ConfigurationError: the address cannot be.
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

    def expect(self, concurrency: int) -> None:
        """Any number of messages at once is well served: calls take turns on the connections, a round trip each."""

    @cached_property
    def store(self) -> RedisStore:
        """Where delayed messages wait, in the store ``{endpoint}.timeouts``."""
        return self.made(RedisStore(self, recording=self._recording))

    @cached_property
    def queues(self) -> RedisTransport:
        """The queues."""
        return self.made(RedisTransport(self, recording=self._recording))

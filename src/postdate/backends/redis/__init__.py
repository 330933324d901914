"""A store and queues under one prefix of one Redis server. Source: docs/guides/redis.md.

What differs from the other backends:

- Each step is a Lua script (``lua/``): Redis runs it alone, so a move is atomic without a transaction.
  ``lua/common.lua`` lists the keys.
- A process shows life by a subscription, which ends with it, and by a heartbeat, which stops when it freezes. Any
  other process frees the claims of a dead one.
- Redis may lose acknowledged writes when it fails over to a replica, or when it writes its log once a second.
  ``doctor`` fails for a server that evicts keys.

Read first: ``layout`` and ``lua/common.lua``; then ``store``, and ``liveness`` for claims.
"""

from dataclasses import dataclass
from typing import Annotated, Final

from msgspec import Meta

from postdate.ports.backends import Adapter, Addresses, Backend, Place
from postdate.ports.common import Recording
from postdate.ports.settings import AnswersWithin, HoldsAtMost, HowMuchIsRecorded, LimitedMessages


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreUnderPrefix(LimitedMessages):
    """Settings of the store; see :class:`postdate.backends.redis.store.RedisStore`."""

    table: Annotated[
        str | None, Meta(description="in Redis, names the store under its prefix; default: {endpoint.name}.timeouts")
    ] = None
    recording: HowMuchIsRecorded = Recording.ALL
    holds_at_most: HoldsAtMost = None
    answers_within: AnswersWithin = None


BACKEND: Final = Backend(
    product="Redis",
    place=Place.SERVER,
    addresses=Addresses(("redis", "rediss"), "redis://:password@host:6379/0", bench_address="env:POSTDATE_REDIS_URL"),
    extra="redis",
    oldest_version=(7, 0),
    database=Adapter(
        "postdate.backends.redis.database:Redis", arguments=frozenset({"recording", "holds_at_most", "answers_within"})
    ),
    store=Adapter("postdate.backends.redis.store:RedisStore", StoreUnderPrefix),
    transport=Adapter(
        "postdate.backends.redis.transport:RedisTransport",
        LimitedMessages,
        from_store=frozenset({"recording", "holds_at_most", "answers_within"}),
    ),
    scratch=Adapter("postdate.backends.redis.scratch:scratch"),
)

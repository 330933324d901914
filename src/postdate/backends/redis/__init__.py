"""Redis: a store and queues on one server, moved between by its scripts (docs/guides/redis.md)."""

from typing import Final

from postdate.ports.backends import Adapter, Addresses, Backend, Place

BACKEND: Final = Backend(
    product="Redis",
    place=Place.SERVER,
    addresses=Addresses(("redis", "rediss"), "redis://:password@host:6379/0"),
    extra="redis",
    oldest_version=(7, 0),
    store=Adapter(
        "postdate.backends.redis.store:RedisStore",
        frozenset({"table", "recording", "largest_message_bytes", "checksum", "holds_at_most", "answers_within"}),
    ),
    transport=Adapter(
        "postdate.backends.redis.transport:RedisTransport",
        frozenset({"recording", "largest_message_bytes", "holds_at_most", "answers_within"}),
    ),
    bench=Adapter("postdate.backends.redis.bench:RedisBenchRoom"),
)

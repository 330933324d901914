"""One SQLite file, which store, queues, sagas, outbox and timeouts share (ADR 0003)."""

from typing import Final

from postdate.ports.backends import Adapter, Addresses, Backend, Place

_FILE: Final = frozenset({"synchronous", "recording", "create"})
_HELD: Final = frozenset({"largest_message_bytes", "holds_at_most"})

BACKEND: Final = Backend(
    product="SQLite",
    place=Place.FILE,
    addresses=Addresses(("sqlite",), "sqlite:///file.db"),
    queue_addresses=Addresses(("local",), "local:///file.db", aliases=("sqlite",)),
    store=Adapter("postdate.backends.sqlite.store:SqliteStore", _FILE | _HELD | {"checksum"}),
    transport=Adapter("postdate.backends.sqlite.transport:LocalTransport", _FILE | _HELD | {"expiry", "clock"}),
    sagas=Adapter("postdate.backends.sqlite.sagas:SqliteSagaStore", _FILE),
    outbox=Adapter("postdate.backends.sqlite.outbox:SqliteOutbox", frozenset({"synchronous"})),
    timeouts=Adapter(
        "postdate.backends.sqlite.timeouts:SqliteTimeouts", frozenset({"synchronous", "recording", "table_prefix"})
    ),
    records=Adapter(
        "postdate.backends.sqlite.record_stream:SqliteRecordStream", frozenset({"synchronous", "recording"})
    ),
    timeouts_source=Adapter("postdate.backends.sqlite.timeouts_source:SqliteDialect"),
    file_facts=Adapter("postdate.backends.sqlite.observation:look_at"),
    scripts=Adapter("postdate.backends.sqlite.scripts:scripts"),
    store_source=Adapter("postdate.backends.sqlite.store_source:SqliteStoreDialect"),
    benchmark=Adapter("postdate.backends.sqlite.benchmark:SqliteTarget"),
)

"""PostgreSQL: one schema, which store, queues, sagas, outbox and timeouts share (ADR 0005, ADR 0007)."""

from typing import Final

from postdate.ports.backends import Adapter, Addresses, Backend, Place

_STORE: Final = frozenset(
    {"schema", "table", "recording", "largest_message_bytes", "checksum", "holds_at_most", "answers_within"}
)
_QUEUES: Final = _STORE - {"table", "checksum"}

BACKEND: Final = Backend(
    product="PostgreSQL",
    place=Place.SERVER,
    addresses=Addresses(("postgresql",), "postgresql://user@host/database", aliases=("postgres",)),
    extra="postgres",
    oldest_version=(13,),
    database=Adapter(
        "postdate.backends.postgres.database:Postgres",
        frozenset({"schema", "recording", "holds_at_most", "answers_within"}),
    ),
    store=Adapter("postdate.backends.postgres.store:PostgresStore", _STORE),
    transport=Adapter("postdate.backends.postgres.transport:PostgresTransport", _QUEUES),
    sagas=Adapter("postdate.backends.postgres.sagas:PostgresSagaStore", frozenset({"schema"})),
    outbox=Adapter("postdate.backends.postgres.outbox:PostgresOutbox", frozenset({"schema"})),
    timeouts=Adapter("postdate.backends.postgres.timeouts:PostgresTimeouts", frozenset({"schema", "table_prefix"})),
    records=Adapter("postdate.backends.postgres.record_stream:PostgresRecordStream", frozenset({"schema", "table"})),
    timeouts_source=Adapter("postdate.backends.postgres.timeouts_source:PostgresDialect", frozenset({"schema"})),
    store_source=Adapter("postdate.backends.postgres.store_source:PostgresStoreDialect", frozenset({"schema"})),
)

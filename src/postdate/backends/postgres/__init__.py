"""PostgreSQL: one schema, which store, queues, sagas, outbox and timeouts share (ADR 0005, ADR 0007)."""

from dataclasses import dataclass
from typing import Annotated, Final

from msgspec import Meta

from postdate.ports.backends import Adapter, Addresses, Backend, Place
from postdate.ports.settings import InSchema, LimitedMessages, PrefixedTablesOnServer, TablesOnServer


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueTables(LimitedMessages):
    """Settings of the queues."""

    schema: Annotated[str | None, Meta(description="of the tables, on a server; default: the store's")] = None


BACKEND: Final = Backend(
    product="PostgreSQL",
    place=Place.SERVER,
    addresses=Addresses(
        ("postgresql",), "postgresql://user@host/database", aliases=("postgres",), found_by="env:POSTDATE_POSTGRES_URL"
    ),
    extra="postgres",
    oldest_version=(13,),
    database=Adapter(
        "postdate.backends.postgres.database:Postgres",
        arguments=frozenset({"schema", "recording", "holds_at_most", "answers_within"}),
    ),
    store=Adapter("postdate.backends.postgres.store:PostgresStore", TablesOnServer),
    transport=Adapter(
        "postdate.backends.postgres.transport:PostgresTransport",
        QueueTables,
        from_store=frozenset({"recording", "holds_at_most", "answers_within"}),
    ),
    sagas=Adapter("postdate.backends.postgres.sagas:PostgresSagaStore", InSchema),
    outbox=Adapter("postdate.backends.postgres.outbox:PostgresOutbox", InSchema),
    timeouts=Adapter("postdate.backends.postgres.timeouts:PostgresTimeouts", PrefixedTablesOnServer),
    records=Adapter("postdate.backends.postgres.bulk:PostgresRecordStream", from_store=frozenset({"schema", "table"})),
    timeouts_source=Adapter(
        "postdate.backends.postgres.timeouts_source:PostgresDialect", arguments=frozenset({"schema"})
    ),
    scratch=Adapter("postdate.backends.postgres.scratch:scratch"),
)

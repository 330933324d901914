"""A store, queues, sagas, an outbox and timeouts in one schema of PostgreSQL. Source: ADR 0005, ADR 0007.

Differences from the other backends:

- One statement moves due messages into their queues. The wake-up is a notification, which its commit sends.
- The store claims by row locks of an open transaction, without a write. The queues mark rows with a *holder*, a
  number for which a session keeps an advisory lock. These claims end with the session, and so with the process or its
  machine.
- Connections must be direct: a pooler in transaction mode swallows notifications.
- Statements of the hot path name row numbers, so that they do not depend on statistics (ADR 0037).
- An application can store in its own open transaction (``joining``, ``changing``).

Read first: ``statements`` and ``store``; then ``queues`` and ``transport``; then ``listening`` for the holder and
wake-ups.
"""

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
        ("postgresql",),
        "postgresql://user@host/database",
        aliases=("postgres",),
        bench_address="env:POSTDATE_POSTGRES_URL",
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

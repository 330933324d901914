"""A store, sagas, an outbox and timeouts in a database of MariaDB 10.6 or newer. Source: ADR 0008, ADR 0058.

Differences from the other backends: there are no queues; these are elsewhere (RabbitMQ, Azure). The store is the one of
:mod:`postdate.backends.sql.row_locks`, and this package has its SQL and its driver. A database takes the place of a
schema. MariaDB has no notifications: a thread of the process polls for stored messages (``row_locks.liveness``).

Read ``statements`` first, then ``tables`` for the steps that differ.
"""

from typing import Final

from postdate.ports.backends import Adapter, Addresses, Backend, Place
from postdate.ports.settings import InSchema, PrefixedTablesOnServer, TablesOnServer

BACKEND: Final = Backend(
    product="MariaDB",
    place=Place.SERVER,
    addresses=Addresses(
        ("mariadb",), "mariadb://user@host/database", aliases=("mysql",), bench_address="env:POSTDATE_MARIADB_URL"
    ),
    extra="mariadb",
    oldest_version=(10, 6),
    store=Adapter("postdate.backends.mariadb.store:MariaDbStore", TablesOnServer),
    sagas=Adapter("postdate.backends.mariadb.schema:MariaDbSagaStore", InSchema),
    outbox=Adapter("postdate.backends.mariadb.schema:MariaDbOutbox", InSchema),
    timeouts=Adapter("postdate.backends.mariadb.timeouts:MariaDbTimeouts", PrefixedTablesOnServer),
    timeouts_source=Adapter(
        "postdate.backends.mariadb.timeouts_source:MariaDbDialect", arguments=frozenset({"schema"})
    ),
    scratch=Adapter("postdate.backends.mariadb.scratch:scratch"),
)

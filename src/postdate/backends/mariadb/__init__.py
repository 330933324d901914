"""MariaDB: a store, sagas, an outbox, and timeouts (ADR 0008, 0030)."""

from typing import Final

from postdate.ports.backends import Adapter, Addresses, Backend, Place
from postdate.ports.settings import InSchema, PrefixedTablesOnServer, TablesOnServer

BACKEND: Final = Backend(
    product="MariaDB",
    place=Place.SERVER,
    addresses=Addresses(
        ("mariadb",), "mariadb://user@host/database", aliases=("mysql",), found_by="env:POSTDATE_MARIADB_URL"
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

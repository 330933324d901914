"""MariaDB: a store, and timeouts (ADR 0008)."""

from typing import Final

from postdate.ports.backends import Adapter, Addresses, Backend, Place

_STORE: Final = frozenset(
    {"schema", "table", "recording", "largest_message_bytes", "checksum", "holds_at_most", "answers_within"}
)

BACKEND: Final = Backend(
    product="MariaDB",
    place=Place.SERVER,
    addresses=Addresses(
        ("mariadb",), "mariadb://user@host/database", aliases=("mysql",), found_by="env:POSTDATE_MARIADB_URL"
    ),
    extra="mariadb",
    oldest_version=(10, 6),
    store=Adapter("postdate.backends.mariadb.store:MariaDbStore", _STORE),
    timeouts=Adapter("postdate.backends.mariadb.timeouts:MariaDbTimeouts", frozenset({"schema", "table_prefix"})),
    timeouts_source=Adapter("postdate.backends.mariadb.timeouts_source:MariaDbDialect", frozenset({"schema"})),
    store_source=Adapter("postdate.backends.mariadb.store_source:MariaDbStoreDialect", frozenset({"schema"})),
    benchmark=Adapter("postdate.backends.mariadb.benchmark:MariaDbTarget"),
)

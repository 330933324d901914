"""SQL Server: a store, and timeouts (ADR 0008)."""

from typing import Final

from postdate.ports.backends import Adapter, Addresses, Backend, Place

_STORE: Final = frozenset(
    {"schema", "table", "recording", "largest_message_bytes", "checksum", "holds_at_most", "answers_within"}
)

BACKEND: Final = Backend(
    product="SQL Server",
    place=Place.SERVER,
    addresses=Addresses(
        ("mssql",), "mssql://user@host/database", aliases=("sqlserver",), found_by="env:POSTDATE_SQLSERVER_URL"
    ),
    extra="sqlserver",
    oldest_version=(13,),
    awaits="its first production server",
    compares_loosely=True,
    store=Adapter("postdate.backends.sqlserver.store:SqlServerStore", _STORE),
    timeouts=Adapter("postdate.backends.sqlserver.timeouts:SqlServerTimeouts", frozenset({"schema", "table_prefix"})),
    timeouts_source=Adapter("postdate.backends.sqlserver.timeouts_source:SqlServerDialect", frozenset({"schema"})),
    benchmark=Adapter("postdate.backends.sqlserver.benchmark:SqlServerTarget"),
)

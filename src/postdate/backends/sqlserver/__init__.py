"""SQL Server: a store, and timeouts (ADR 0008)."""

from typing import Final

from postdate.ports.backends import Adapter, Addresses, Backend, Place
from postdate.ports.settings import PrefixedTablesOnServer, TablesOnServer

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
    store=Adapter("postdate.backends.sqlserver.store:SqlServerStore", TablesOnServer),
    timeouts=Adapter("postdate.backends.sqlserver.timeouts:SqlServerTimeouts", PrefixedTablesOnServer),
    timeouts_source=Adapter(
        "postdate.backends.sqlserver.timeouts_source:SqlServerDialect", arguments=frozenset({"schema"})
    ),
    benchmark=Adapter("postdate.backends.sqlserver.benchmark:SqlServerTarget"),
)

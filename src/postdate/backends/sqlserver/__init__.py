"""A store, sagas, an outbox and timeouts in a schema of SQL Server 2016 or newer. Source: ADR 0008, ADR 0058.

Differences from the other backends: as in MariaDB, the store is the one of :mod:`postdate.backends.sql.row_locks`. TLS,
deadlines and routing of the login are ours (``channel``, ``login``), beneath the driver. It has never been run against
a server: the tests parse its SQL, and each process logs a line that says so.

Read first: ``statements``, then ``tables`` for the steps that differ.
"""

from typing import Final

from postdate.ports.backends import Adapter, Addresses, Backend, Place
from postdate.ports.settings import InSchema, PrefixedTablesOnServer, TablesOnServer

BACKEND: Final = Backend(
    product="SQL Server",
    place=Place.SERVER,
    addresses=Addresses(
        ("mssql",), "mssql://user@host/database", aliases=("sqlserver",), bench_address="env:POSTDATE_SQLSERVER_URL"
    ),
    extra="sqlserver",
    oldest_version=(13,),
    awaits="its first production server",
    compares_loosely=True,
    store=Adapter("postdate.backends.sqlserver.store:SqlServerStore", TablesOnServer),
    sagas=Adapter("postdate.backends.sqlserver.schema:SqlServerSagaStore", InSchema),
    outbox=Adapter("postdate.backends.sqlserver.schema:SqlServerOutbox", InSchema),
    timeouts=Adapter("postdate.backends.sqlserver.timeouts:SqlServerTimeouts", PrefixedTablesOnServer),
    timeouts_source=Adapter(
        "postdate.backends.sqlserver.timeouts_source:SqlServerDialect", arguments=frozenset({"schema"})
    ),
    scratch=Adapter("postdate.backends.sqlserver.scratch:scratch"),
)

"""A place for ``postdate bench`` on SQL Server: a schema."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager

from postdate.backends.sqlserver.connection import SqlServerInstance
from postdate.ports.backends import Scratch


@contextmanager
def scratch(address: str, run: str, queues: Sequence[str]) -> Generator[Scratch]:
    """Yield a schema of the run in the database of the address; drop it afterwards."""
    del queues  # SQL Server has no queues here.
    schema, server = f"postdate_bench_{run}", SqlServerInstance(address)
    with closing(server.connect()) as session:
        session.change(f"CREATE SCHEMA [{schema}]")
    try:
        yield Scratch(address, {"schema": schema})
    finally:
        # A new session, because the one that created the schema may have ended during the run.
        with closing(server.connect()) as session:
            # A schema can be dropped only when it is empty.
            tables = "SELECT name FROM sys.tables WHERE schema_id = SCHEMA_ID(%(schema)s)"
            for (table,) in list(session.rows(tables, {"schema": schema})):
                session.change(f"DROP TABLE [{schema}].[{table}]")
            session.change(f"DROP SCHEMA [{schema}]")

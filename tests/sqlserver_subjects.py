"""SQL Server under the conformance suite: run where POSTDATE_SQLSERVER_URL names a server, and nowhere else."""

import itertools
import os
from contextlib import closing

from postdate.ports import DelayedMessageStore
from postdate.sqlserver.connection import SqlServer
from postdate.sqlserver.names import Names, literal, quoted
from postdate.stores.sqlserver import SqlServerStore
from postdate.testing import StoreSubject

VARIABLE = "POSTDATE_SQLSERVER_URL"
_NUMBERS = itertools.count(1)


class SqlServerStoreSubject(StoreSubject):
    """The store in SQL Server; every subject has a schema of its own, with a name that has to be quoted."""

    def __init__(self, url: str) -> None:
        self.url, self.schema = url, f"po]st.date'%s é🕰 -- {os.getpid()}.{next(_NUMBERS)}"

    def open(self, **settings) -> SqlServerStore:
        return SqlServerStore(self.url, schema=self.schema, **settings)

    def open_elsewhere(self) -> DelayedMessageStore:
        return SqlServerStore(self.url, schema=self.schema)

    def drop(self) -> None:
        with closing(SqlServer(self.url).connect()) as session:
            tables = session.rows(
                f"SELECT name FROM sys.tables WHERE schema_id = SCHEMA_ID({literal(self.schema)}) ORDER BY name"
            )
            for (table,) in tables:
                session.change(f"DROP TABLE {Names(self.schema, 'any').plain(table)}")
            session.change(f"DROP SCHEMA IF EXISTS {quoted(self.schema)}")


def sqlserver_subjects() -> dict[str, str]:
    """Return the server's URL by the name of its store; nothing without one."""
    url = os.environ.get(VARIABLE, "")
    return {"SqlServerStore": url} if url else {}

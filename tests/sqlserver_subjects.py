"""SQL Server under the conformance suite: run where POSTDATE_SQLSERVER_URL names a server, and nowhere else."""

import itertools
import os
from contextlib import closing

from tests.mariadb_subjects import DAMAGES

from postdate.backends.sqlserver import BACKEND
from postdate.backends.sqlserver.connection import SqlServerInstance
from postdate.backends.sqlserver.schema import SqlServerNames, literal, quote_name
from postdate.backends.sqlserver.store import SqlServerStore
from postdate.ports import DelayedMessageStore
from postdate.testing import Damage, StoreSubject
from postdate.testing.damaged import Damages, damages_of

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

    def damages(self) -> Damages:
        return damages_of(self.damage, DAMAGES)

    def damage(self, message_id: str, damage: Damage) -> bytes:
        with closing(SqlServerInstance(self.url).connect()) as session:
            ((table,),) = session.rows(f"SELECT name FROM {SqlServerNames(self.schema, 'any').name_of('store')}", {})
            pending = SqlServerNames(self.schema, table).pending
            column, value = DAMAGES[damage]
            change = f"UPDATE {pending} SET {column} WHERE message_id = %(id)s"
            assert session.change(change, {"id": message_id, "value": value})
        return str(value).encode()

    def drop(self) -> None:
        with closing(SqlServerInstance(self.url).connect()) as session:
            tables = session.rows(
                f"SELECT name FROM sys.tables WHERE schema_id = SCHEMA_ID({literal(self.schema)}) ORDER BY name"
            )
            for (table,) in tables:
                session.change(f"DROP TABLE {SqlServerNames(self.schema, 'any').qualified_name(table)}")
            session.change(f"DROP SCHEMA IF EXISTS {quote_name(self.schema)}")


def sqlserver_subjects() -> dict[str, str]:
    """Return the server's URL by the name of its store; nothing without one."""
    url = os.environ.get(VARIABLE, "")
    if url:
        BACKEND.warn_if_untested()  # here, and in no test
    return {"SqlServerStore": url} if url else {}

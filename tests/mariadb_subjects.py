"""MariaDB under the conformance suite: every subject has a database of its own, with a name that has to be quoted."""

import itertools
import os

from postdate.mariadb.connection import MariaDbServer
from postdate.mariadb.names import quoted
from postdate.ports import DelayedMessageStore
from postdate.stores.mariadb import MariaDbStore
from postdate.testing import StoreSubject

_NUMBERS = itertools.count(1)


def fresh_schema() -> str:
    """Return the name of a database that does not exist: a point, quotes, a percent sign and letters are in it."""
    return f"po`st.date]%s\\'é; -- {os.getpid()}.{next(_NUMBERS)}"


def drop_schema(url: str, schema: str) -> None:
    session = MariaDbServer(url).connect()
    session.change(f"DROP DATABASE IF EXISTS {quoted(schema)}")
    session.close()


class MariaDbStoreSubject(StoreSubject):
    """The store in MariaDB."""

    def __init__(self, url: str) -> None:
        self.url, self.schema = url, fresh_schema()

    def open(self, **settings) -> MariaDbStore:
        return MariaDbStore(self.url, schema=self.schema, **settings)

    def open_elsewhere(self) -> DelayedMessageStore:
        return MariaDbStore(self.url, schema=self.schema)

    def drop(self) -> None:
        drop_schema(self.url, self.schema)

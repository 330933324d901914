"""MariaDB under the conformance suite: every subject has a database of its own, with a name that has to be quoted."""

import itertools
import os
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager

from postdate.backends.mariadb.connection import MariaDbServer
from postdate.backends.mariadb.schema import MariaDbNames, quote_name
from postdate.backends.mariadb.store import MariaDbStore
from postdate.ports import DelayedMessageStore
from postdate.testing import Damage, StoreSubject
from postdate.testing.damaged import Damages, damages_of

DAMAGES = {
    Damage.HEADERS: ("headers = %(value)s", '{"a": "b'),
    Damage.DESTINATION: ("destination = %(value)s", " "),
    Damage.DUE: ("due = %(value)s, attempt_at = %(value)s", -(10**18)),
}
"""In which ways a row can be damaged; that content is gone cannot be: it is a part of the row that is never NULL."""

_NUMBERS = itertools.count(1)


def fresh_schema() -> str:
    """Return the name of a database that does not exist: a point, quotes, a percent sign and letters are in it."""
    return f"po`st.date]%s\\'é; -- {os.getpid()}.{next(_NUMBERS)}"


def drop_schema(url: str, schema: str) -> None:
    session = MariaDbServer(url).connect()
    session.change(f"DROP DATABASE IF EXISTS {quote_name(schema)}")
    session.close()


class MariaDbStoreSubject(StoreSubject):
    """The store in MariaDB."""

    def __init__(self, url: str) -> None:
        self.url, self.schema = url, fresh_schema()

    def open(self, **settings) -> MariaDbStore:
        return MariaDbStore(self.url, schema=self.schema, **settings)

    def open_elsewhere(self) -> DelayedMessageStore:
        return MariaDbStore(self.url, schema=self.schema)

    def damages(self) -> Damages:
        return damages_of(self.damage, DAMAGES)

    def damage(self, message_id: str, damage: Damage) -> bytes:
        with closing(MariaDbServer(self.url).connect()) as session:
            ((table,),) = session.rows(f"SELECT name FROM {MariaDbNames(self.schema, 'any').name_of('store')}")
            pending = MariaDbNames(self.schema, table).pending
            column, value = DAMAGES[damage]
            change = f"UPDATE {pending} SET {column} WHERE message_id = %(id)s"
            assert session.change(change, {"id": message_id, "value": value})
        return str(value).encode()

    def refusals(self, store: DelayedMessageStore) -> Mapping[str, AbstractContextManager[object]]:
        numbers = {"read-only": ("HY000", 1290), "full": ("HY000", 1021), "lost row": ("HY000", 1020)}
        numbers |= {"failing disk": ("HY000", 1030), "too many connections": ("08004", 1040)}
        return {name: self._refusing(state, number) for name, (state, number) in numbers.items()}

    @contextmanager
    def _refusing(self, state: str, number: int) -> Generator[None]:
        """Have a trigger answer for the server."""
        with closing(MariaDbServer(self.url).connect()) as session:
            ((table,),) = session.rows(f"SELECT name FROM {MariaDbNames(self.schema, 'any').name_of('store')}")
            pending, trigger = (
                MariaDbNames(self.schema, table).pending,
                f"{quote_name(self.schema)}.refuses".replace("%", "%%"),
            )
            says = f"SIGNAL SQLSTATE '{state}' SET MYSQL_ERRNO = {number}, MESSAGE_TEXT = 'as the server'"
            session.change(f"CREATE TRIGGER {trigger} BEFORE INSERT ON {pending} FOR EACH ROW {says}", {})
            yield
            session.change(f"DROP TRIGGER {trigger}", {})

    def drop(self) -> None:
        drop_schema(self.url, self.schema)

"""Messages that wait in a Postdate store in MariaDB."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from typing_extensions import override

from postdate.backends.mariadb.names import MariaDbNames, literal
from postdate.backends.mariadb.timeouts_source import MariaDbDialect
from postdate.migrating.dialect import Hiding, Session
from postdate.migrating.names import NUMBER
from postdate.migrating.store_dialect import ENDING, StoreDialect


class MariaDbStoreDialect(StoreDialect, MariaDbDialect):
    """The SQL of MariaDB. Dispatchers look at what is due ten times a second: nobody has to be woken.

    Args:
        url: of the database.
        schema: the database that the stores are in; ``None``: that of the URL.
    """

    @override
    def stores(self, session: Session) -> Mapping[str, str]:
        if "postdate_store" not in self.tables(session):
            return {}
        found = session.rows(f"SELECT name FROM {self._own('store')} ORDER BY name", {})
        return {name.removesuffix(ENDING): name for (name,) in found}

    @override
    def is_here(self, session: Session, other: Session, schema: str) -> bool:
        """See :class:`StoreDialect`; locks have names for the whole server."""
        name = {"name": f"postdate {secrets.token_hex(16)}"}
        session.rows("SELECT GET_LOCK(%(name)s, 0)", name)
        try:
            ((free,),) = other.rows("SELECT IS_FREE_LOCK(%(name)s)", name)
        finally:
            session.rows("SELECT RELEASE_LOCK(%(name)s)", name)
        return not free and schema == self.schema

    def _earliest(self, hiding: Hiding) -> str:
        # FORCE INDEX: a small table would be read whole, through rows that dispatchers have locked (ADR 0008).
        return (
            f"SELECT {self.list_of(hiding.columns)} FROM {self.table(hiding.live)} FORCE INDEX (attempt) "
            f"{self._free(hiding)} FOR UPDATE SKIP LOCKED"
        )

    def _removing(self, hiding: Hiding) -> str:
        return (
            f"DELETE t FROM {self.table(hiding.staging)} AS s STRAIGHT_JOIN {self.table(hiding.live)} AS t "
            f"FORCE INDEX (PRIMARY) ON t.number = s.number WHERE s.{self.quoted(NUMBER)} >= {hiding.first}"
        )

    def _records(self) -> str:
        return self._own("record")

    def _store_number(self, live: str) -> str:
        name = literal(live).replace("%", "%%")
        return f"(SELECT o.store_id FROM {self._own('store')} AS o WHERE o.name = {name}), "

    def _own(self, name: str) -> str:
        return MariaDbNames(self.schema, "any").of(name)

"""Messages that wait in a Postdate store in an SQLite file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from typing_extensions import override

from postdate.backends.sqlite.file import DUE
from postdate.backends.sqlite.timeouts_source import SqliteDialect
from postdate.backends.sqlite.wakeup import Wakeups
from postdate.migrating.dialect import Hiding, Session
from postdate.migrating.store_dialect import StoreDialect

LIVE: Final = "delayed_message"


class SqliteStoreDialect(StoreDialect, SqliteDialect):
    """The SQL of SQLite. Content stays where it is: hidden rows point to it, as waiting ones do.

    Args:
        path: of the file.
        clock: of the machine, which is the database's.
    """

    key, holder = "seq", "claimant"
    _store_column = ""

    @override
    def stores(self, session: Session) -> Mapping[str, str]:
        """See :class:`StoreDialect`; a file is one store, whatever endpoints are on it, and is called by its name."""
        return {self._path.name: LIVE} if LIVE in self.tables(session) else {}

    @override
    def table_for(self, endpoint: str, named: str | None) -> str:
        """See :class:`StoreDialect`; all endpoints on a file share one."""
        return LIVE

    @override
    def is_here(self, session: Session, other: Session, schema: str) -> bool:
        files = [
            each.rows("SELECT file FROM pragma_database_list WHERE name = 'main'", {}) for each in (session, other)
        ]
        return files[0] == files[1]

    def _earliest(self, hiding: Hiding) -> str:
        return f"SELECT {self.list_of(hiding.columns)} FROM {self.table(hiding.live)} {self._free(hiding)}"

    def _records(self) -> str:
        return self.table("record")

    def _store_number(self, live: str) -> str:
        return ""

    def _content(self) -> str:
        return f"c.headers, c.body FROM {{hidden}} AS h JOIN {self.table('content')} AS c ON c.seq = h.content"

    @override
    def wake(self, session: Session) -> None:
        """See :class:`StoreDialect`; by a datagram, which may be lost: then they look within a minute."""
        listening = session.rows("SELECT port FROM listener WHERE topic = %(topic)s", {"topic": DUE})
        wakeups = Wakeups()
        try:
            wakeups.signal((), [(DUE, port) for (port,) in listening])
        finally:
            wakeups.close()

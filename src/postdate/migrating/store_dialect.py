"""What differs between the databases that Postdate's own stores are in. Source: ADR 0015.

A store's dispatchers take a message by a claim, in a transaction: so a row that nobody has claimed is hidden by whoever
deletes it, and no dispatcher has it in hand. Records tell of it in the same transaction (ADR 0004).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from typing_extensions import override

from postdate.clock import from_microseconds, to_microseconds
from postdate.errors import InvalidMessage, MessageError, StoreUnavailable
from postdate.messages import DelayedMessage, decode_headers
from postdate.migrating.dialect import Dialect, Given, Hiding, Session
from postdate.migrating.names import NUMBER, run_of, staging_table
from postdate.ports.common import RecordKind
from postdate.ports.migrating import GIVEN_BACK, MOVED_AWAY

ENDING: Final = ".timeouts"
"""What the table of an endpoint's store ends with."""

_HIDDEN: Final = (RecordKind.CANCELLED, MOVED_AWAY)
_RETURNED: Final = (RecordKind.RESCHEDULED, GIVEN_BACK)


class StoreDialect(Dialect):
    """The SQL of one database for the waiting messages of its stores. The statements here are common to them.

    A hidden message is the row of the waiting one; what is kept apart from that row stays where it is.
    """

    state_table = "StoreMigration_State"
    batch_table = "StoreMigration_Batches"
    key, time = "number", "due"
    """The number of a waiting message is that of its *scheduled* record."""
    holder = "holder"
    """The column that says who holds it beyond a lock of its row."""
    _store_column = "store_id, "

    # --- stores --------------------------------------------------------------------------------------------------

    @abstractmethod
    def stores(self, session: Session) -> Mapping[str, str]:
        """Return the tables of waiting messages by the names of their endpoints; none where no store is."""

    def table_for(self, endpoint: str, named: str | None) -> str:
        """Return the table that an endpoint's messages wait in: the one that its settings name, or its own."""
        return named or f"{endpoint}{ENDING}"

    @abstractmethod
    def is_here(self, session: Session, other: Session, schema: str) -> bool:
        """Return whether another session, whatever address it went to, is in this database, and ``schema`` this one."""

    # --- values --------------------------------------------------------------------------------------------------

    @override
    def floor(self, instant: datetime) -> object:
        return to_microseconds(instant)

    def instant_of(self, value: Any) -> datetime:
        """Return what a column of the store says, in UTC."""
        return from_microseconds(value)

    @override
    def is_due_from(self) -> str:
        return "due >= %(floor)s"

    @override
    def is_due_before(self) -> str:
        return "due < %(floor)s"

    # --- moving --------------------------------------------------------------------------------------------------

    @override
    def hide(self, session: Session, hiding: Hiding, floor: datetime) -> int:
        """See :class:`Dialect`; with the records."""
        moved = session.change(self._copying(hiding), {"floor": self.floor(floor)})
        taken = session.change(self._removing(hiding), {}) if moved else 0
        since = f"{self.quoted(NUMBER)} >= {hiding.first}"
        said = self._record(session, hiding.live, hiding.staging, since, _HIDDEN) if moved else 0
        if not moved == taken == said:
            raise StoreUnavailable(
                f"{self.where}: {moved} messages were copied out of {hiding.live}, {taken} taken out and {said} "
                f"recorded; try again"
            )
        return moved

    def _free(self, hiding: Hiding) -> str:
        """Return the rest of a query for what nobody holds; a failed message waits longer than until it is due."""
        return (
            f"WHERE attempt_at >= %(floor)s AND due >= %(floor)s AND {self.holder} IS NULL "
            f"ORDER BY attempt_at, {self.key} LIMIT {hiding.limit}"
        )

    def _record(self, session: Session, live: str, staging: str, which: str, what: tuple[RecordKind, str]) -> int:
        """Record what happens to hidden messages, given as their table and a condition; return how many."""
        kind, said = what
        return session.change(
            f"INSERT INTO {self._records()} (at, due, {self._store_column}kind, message_id, destination, detail) "
            f"SELECT %(at)s, due, {self._store_number(live)}{int(kind)}, message_id, destination, "
            f"'{said}{run_of(staging)}' FROM {self.table(staging)} WHERE {which} ORDER BY {self.key}",
            {"at": self.floor(self.now(session))},
        )

    @abstractmethod
    def _records(self) -> str:
        """Return the table of records as SQL."""

    @abstractmethod
    def _store_number(self, live: str) -> str:
        """Return the value of the column that says which store's a record is, with a comma behind it."""

    @override
    def give_back(self, session: Session, run_id: str, number: int, live: str, columns: Sequence[str]) -> Given:
        """See :class:`Dialect`; with the records. Nobody can have stored a message of that id meanwhile."""
        wanted, staging, which = self.list_of(columns), staging_table(run_id), f"{self.quoted(NUMBER)} = {number}"
        of = f"{self.table(staging)} WHERE {which}"
        put = session.change(f"INSERT INTO {self.table(live)} ({wanted}) SELECT {wanted} FROM {of}", {})
        self._record(session, live, staging, which, _RETURNED)
        return Given(put, session.change(f"DELETE FROM {of}", {}))

    def wake(self, session: Session) -> None:
        """Tell dispatchers, after a commit, that something is there that may be due before all they know."""

    # --- reading -------------------------------------------------------------------------------------------------

    def counted(self, session: Session, staging: str, first: int) -> list[tuple[int, int, datetime]]:
        """Return of each batch from ``first`` on its number, how many messages it has, and when the first is due."""
        number = self.quoted(NUMBER)
        rows = session.rows(
            f"SELECT {number}, COUNT(*), MIN(due) FROM {self.table(staging)} WHERE {number} >= {first} "
            f"GROUP BY {number} ORDER BY {number}",
            {},
        )
        return [(batch, count, self.instant_of(due)) for batch, count, due in rows]

    def messages(self, session: Session, staging: str, number: int) -> list[DelayedMessage]:
        """Return the messages of a batch, by due time."""
        sql = (
            f"SELECT h.message_id, h.due, h.destination, h.expires_at, h.failures, {self._content()} "
            f"WHERE h.{self.quoted(NUMBER)} = %(number)s ORDER BY h.due, h.{self.key}"
        )
        rows = session.rows(sql.replace("{hidden}", self.table(staging)), {"number": number})
        return [self._message(*row) for row in rows]

    def _content(self) -> str:
        """Return the rest of a list of columns, headers and body, and where all of them are from."""
        return "h.headers, h.body FROM {hidden} AS h"

    def _message(  # noqa: PLR0913 - the columns
        self, message_id: str, due: Any, destination: str, expires_at: Any, failures: int, headers: str, body: bytes
    ) -> DelayedMessage:
        ends = None if expires_at is None else self.instant_of(expires_at)
        try:
            found = decode_headers(headers)
        except MessageError as error:
            raise InvalidMessage(f"message {message_id!r} cannot be read: {error}") from error
        return DelayedMessage.restored(message_id, self.instant_of(due), destination, found, body, ends, failures)

"""A Postdate store as a source of migrations: what is the same as with a timeout manager's tables is in ``tables``.

Source: ADR 0015, "Another store".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from datetime import datetime

from typing_extensions import override

from postdate.errors import ConfigurationError, MigrationConflict
from postdate.messages import DelayedMessage
from postdate.migrating.dialect import Session
from postdate.migrating.names import BATCH_COLUMNS, staging_table
from postdate.migrating.preview import PAGE_ROWS
from postdate.migrating.state import OVER, MigrationState
from postdate.migrating.store_dialect import StoreDialect
from postdate.migrating.tables import MigrationSource
from postdate.persistence.timeouts import SUFFIX
from postdate.ports.migrating import BatchStatus, MigrationPreview, MigrationRun


class StoreTables(MigrationSource):
    """Messages in the tables of Postdate's stores; :class:`postdate.migrating.tables.MigrationSource`.

    One thread at a time. It connects at first use, and again after a connection was lost.

    Args:
        dialect: of the database.
    """

    def __init__(self, dialect: StoreDialect) -> None:
        super().__init__(dialect)
        self._store = dialect
        self._state = _StoreState(dialect)

    # --- looking -------------------------------------------------------------------------------------------------

    @override
    def endpoints(self) -> Sequence[str]:
        """See the port. A table that is not called ``{endpoint}.timeouts`` is called as it is; a file by its name.

        Raises:
            ConfigurationError: no Postdate store is there.
        """
        with self._session() as session:
            found = self._tables(session)
            if found:
                return sorted(found)
            of_managers = [name for name in self._sql.tables(session) if name.lower().endswith(SUFFIX.lower())]
        if of_managers:
            raise ConfigurationError(
                f"{self._sql.where} is no Postdate store, and has the table {of_managers[0]} of a timeout manager; "
                f"name it with --from instead of --from-store"
            )
        where = "" if self._sql.schema == "main" else f" in schema {self._sql.schema!r}; say with --schema where it is"
        raise ConfigurationError(f"{self._sql.where} has no Postdate store{where}")

    @override
    def preview(self, endpoint: str, cutoff: datetime) -> MigrationPreview:
        destinations, times = Counter[str](), list[datetime]()
        with self._session() as session:
            table, values = self._sql.table(self._table_of(session, endpoint)), {"floor": self._sql.floor(cutoff)}
            counting = (
                f"SELECT destination, COUNT(*), MIN(due), MAX(due) FROM {table} "
                f"WHERE {self._sql.is_due_from()} GROUP BY destination"
            )
            for page in session.pages(counting, values, PAGE_ROWS):
                for destination, count, first, last in page:
                    destinations[destination] += count
                    times += [self._store.instant_of(first), self._store.instant_of(last)]
            ((left,),) = session.rows(f"SELECT COUNT(*) FROM {table} WHERE {self._sql.is_due_before()}", values)
        ends = (min(times), max(times)) if times else (None, None)
        return MigrationPreview(endpoint, destinations.total(), left, *ends, dict(destinations))

    @override
    def read(self, run: MigrationRun, number: int) -> Sequence[DelayedMessage]:
        """See the port; by due time. A batch that was given back has none."""
        with self._session() as session:
            return self._store.messages(session, staging_table(run.run_id), number)

    @override
    def give_back(self, run: MigrationRun, number: int) -> int:
        """See the port; the dispatchers of the store are told."""
        given = super().give_back(run, number)
        if given:
            with self._session() as session:
                self._store.wake(session)
        return given

    # --- as the other end ----------------------------------------------------------------------------------------

    def same_place(self, other: StoreTables) -> bool:
        """Return whether another source has its tables in the very same schema or file, whatever the addresses say."""
        if type(self._store) is not type(other._store):
            return False
        with self._session() as mine, other._session() as theirs:
            return self._store.is_here(mine, theirs, other._sql.schema)

    def table_of(self, endpoint: str) -> str:
        """Return the table that an endpoint's messages wait in."""
        with self._session() as session:
            return self._table_of(session, endpoint)

    def table_for(self, endpoint: str, named: str | None) -> str:
        """Return the table that an endpoint's messages would wait in, whether it is there or not.

        Args:
            endpoint: its name.
            named: the table that its settings name.
        """
        return self._store.table_for(endpoint, named)

    def being_emptied(self, table: str) -> MigrationRun | None:
        """Return the run that is on its way out of a table of waiting messages."""
        with self._session() as session:
            kept = self._state.history(session) if self._state.exists(session) else []
        return next((each.run for each in kept if each.table == table and each.run.status not in OVER), None)

    def given_away(self, table: str) -> set[str]:
        """Return the ids of all messages that were ever moved out of a table of waiting messages.

        Raises:
            MigrationConflict: a table in which they were hidden is gone.
        """
        found = set[str]()
        with self._session() as session:
            kept = self._state.history(session) if self._state.exists(session) else []
            for run in (each.run for each in kept if each.table == table):
                if all(batch.status is BatchStatus.RETURNED for batch in self._state.batches(session, run)):
                    continue
                hidden = staging_table(run.run_id)
                if not self._sql.columns(session, hidden):
                    raise MigrationConflict(
                        f"migration {run.run_id} has moved messages out of {table} of {self._sql.where}, and the table "
                        f"that said which, {hidden}, is gone; move to a table or file of another name"
                    )
                for page in session.pages(f"SELECT message_id FROM {self._sql.table(hidden)}", {}, PAGE_ROWS):
                    found.update(message_id for (message_id,) in page)
        return found

    def waiting_among(self, endpoint: str, ids: Collection[str], cutoff: datetime) -> list[str]:
        """Return those of the ids whose messages would be moved, sorted; reads all ids that wait."""
        with self._session() as session:
            table = self._sql.table(self._table_of(session, endpoint))
            waiting = f"SELECT message_id FROM {table} WHERE {self._sql.is_due_from()}"
            pages = session.pages(waiting, {"floor": self._sql.floor(cutoff)}, PAGE_ROWS)
            return sorted(message_id for page in pages for (message_id,) in page if message_id in ids)

    # --- names ---------------------------------------------------------------------------------------------------

    def _tables(self, session: Session) -> dict[str, str]:
        return dict(self._store.stores(session))

    def _columns(self, session: Session, table: str) -> Sequence[str]:
        return self._sql.columns(session, table)


class _StoreState(MigrationState):
    """The same tables; due times come out of a store in another form."""

    def __init__(self, dialect: StoreDialect) -> None:
        super().__init__(dialect)
        self._store = dialect

    @override
    def add_staged(self, session: Session, run: MigrationRun, staging: str, first: int, count: int) -> None:
        marks = ", ".join(f"%({column})s" for column in BATCH_COLUMNS)
        adding = f"INSERT INTO {self._batches} ({self._sql.list_of(BATCH_COLUMNS)}) VALUES ({marks})"
        for number, size, earliest in self._store.counted(session, staging, first):
            values = (run.run_id, number, int(BatchStatus.PENDING), size, self._sql.value(earliest))
            session.change(adding, dict(zip(BATCH_COLUMNS, values, strict=True)))
        self._count(session, run, count)

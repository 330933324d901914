"""A timeout manager's tables as a source of migrations: one engine, and a dialect for each server. Source: ADR 0015."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta

from postdate.errors import ConfigurationError, MigrationConflict, StoreError, StoreUnavailable, StoreUnreachable
from postdate.messages import DelayedMessage
from postdate.migrating.dialect import Dialect, Hiding, Session
from postdate.migrating.names import NUMBER, READ, staging_table
from postdate.migrating.preview import PAGE_ROWS, Looking, to_message
from postdate.migrating.state import OVER, State
from postdate.ports.migrating import BatchStatus, MigrationBatch, MigrationPreview, MigrationRun, MigrationStatus
from postdate.timeouts.layout import DESTINATION, HEADERS, ID, SUFFIX, TIME, table_name

log = logging.getLogger("postdate.migrating")


class TimeoutTables:
    """Timeouts in tables of upstream's layout; :class:`postdate.ports.migrating.MigrationSource`.

    One thread at a time. It connects at first use, and again after a connection was lost.

    Args:
        dialect: of the server.
        prefixes: by endpoint, the prefix of tables that are not named after their endpoint.
    """

    def __init__(self, dialect: Dialect, prefixes: Mapping[str, str] | None = None) -> None:
        self._sql, self._state = dialect, State(dialect)
        self._prefixes = dict(prefixes or {})
        self._open: Session | None = None

    # --- looking -------------------------------------------------------------------------------------------------

    def endpoints(self) -> Sequence[str]:
        """See the port. Without a given prefix, an endpoint is called as its table is: points are underscores."""
        with self._session() as session:
            found = self._tables(session)
            if not found and self._sql.holds_a_store(session):
                raise ConfigurationError(
                    f"{self._sql.where} has no table of a timeout manager, but there is a Postdate store; name it "
                    f"with --from-store instead of --from"
                )
            return sorted(found)

    def preview(self, endpoint: str, cutoff: datetime) -> MigrationPreview:
        """See the port.

        Raises:
            ConfigurationError: no table of timeouts has that name, or it is none.
        """
        looking, wanted = Looking(), (ID, DESTINATION, TIME, HEADERS)
        with self._session() as session:
            live = self._table_of(session, endpoint)
            self._columns(session, live)
            table, values = self._sql.table(live), {"floor": self._sql.floor(cutoff)}
            columns, unknown = ", ".join(map(self._sql.readable, wanted)), f"{self._sql.quoted(TIME)} IS NULL"
            moving = f"SELECT {columns} FROM {table} WHERE ({self._sql.is_due_from()}) OR {unknown}"
            for page in session.pages(moving, values, PAGE_ROWS):
                looking.add(page)
            ((left,),) = session.rows(f"SELECT COUNT(*) FROM {table} WHERE {self._sql.is_due_before()}", values)
        return looking.preview(endpoint, left)

    def history(self) -> Sequence[MigrationRun]:
        """See the port."""
        with self._session() as session:
            if not self._state.exists(session):
                return []
            return [kept.run for kept in self._state.history(session)]

    # --- runs ----------------------------------------------------------------------------------------------------

    def begin(self, run: MigrationRun) -> None:
        """See the port; a second time without effect.

        Raises:
            ConfigurationError: no table of timeouts has that name, or it is none.
        """
        staging = staging_table(run.run_id)
        with self._session() as session:
            live = self._table_of(session, run.endpoint)
            columns = self._columns(session, live)
            try:
                with self._transaction(session):
                    self._sql.take_turn(session)
                    if not self._state.exists(session):
                        _run_all(session, self._sql.creating())
                    if not self._state.knows(session, run, live):
                        # Before the run: where creating a table ends a transaction, no run may lack its table.
                        _run_all(session, self._sql.creating_staging(staging, live, columns))
                        self._state.add(session, run, live)
            finally:
                self._sql.end_turn(session)

    def set_status(self, run: MigrationRun, status: MigrationStatus, at: datetime) -> None:
        """See the port."""
        with self._session() as session, self._transaction(session):
            if status in OVER and self._state.status(session, run) is status:
                return
            self._state.locked(session, run)
            if status in OVER:
                self._check_over(session, run, status)
            self._state.set_status(session, run, status, at)

    def _check_over(self, session: Session, run: MigrationRun, status: MigrationStatus) -> None:
        for batch in self._state.batches(session, run):
            if batch.status in {BatchStatus.PENDING, BatchStatus.STAGED}:
                raise MigrationConflict(
                    f"migration {run.run_id} cannot be {status.name}: batch {batch.number} is {batch.status.name}, and "
                    f"nobody would move its {batch.count} timeouts any more"
                )

    # --- moving --------------------------------------------------------------------------------------------------

    def hide(self, run: MigrationRun, batch_size: int, batches: int, margin: timedelta) -> Sequence[MigrationBatch]:
        """See the port.

        Raises:
            StoreUnavailable: gave up in time, nothing is hidden; try again, or with fewer batches.
            MigrationConflict: the run is over.
        """
        if batch_size < 1 or batches < 1 or margin <= timedelta(0):
            raise ConfigurationError("the size of batches, their number and the margin must be above 0")
        with self._session() as session:
            try:
                self._sql.limit(session, margin)
                with self._transaction(session):
                    return self._hide(session, run, batch_size, batches, margin)
            finally:
                self._unlimit(session)

    def _hide(
        self, session: Session, run: MigrationRun, batch_size: int, most: int, margin: timedelta
    ) -> list[MigrationBatch]:
        kept = self._state.locked(session, run)
        started, first = self._sql.now(session), kept.run.batches + 1
        columns = self._columns(session, kept.table)
        hiding = Hiding(kept.table, staging_table(run.run_id), columns, first, batch_size, batch_size * most)
        count = self._sql.hide(session, hiding, max(run.cutoff, started + margin))
        if not count:
            return []
        self._state.add_batches(session, run, hiding.staging, first, count)
        found = self._state.batches(session, run, first)
        elapsed = self._sql.now(session) - started
        if not timedelta(0) <= elapsed < margin / 2:
            raise StoreUnavailable(
                f"{self._sql.where}: hiding {count} timeouts took {elapsed.total_seconds():.1f} s by the database's "
                f"clock, which is too near to the margin of {margin.total_seconds():g} s; nothing was hidden. Hide "
                f"fewer at a time, or with a larger margin"
            )
        return found

    def _unlimit(self, session: Session) -> None:
        try:
            self._sql.unlimit(session)
        except StoreUnavailable:  # with the connection go its limits
            self.close()

    def batches(self, run: MigrationRun) -> Sequence[MigrationBatch]:
        """See the port."""
        with self._session() as session:
            return self._state.batches(session, run)

    def read(self, run: MigrationRun, number: int) -> Sequence[DelayedMessage]:
        """See the port; by due time. A batch that was given back has none."""
        columns = ", ".join(map(self._sql.readable, READ))
        order = self._sql.list_of((TIME, ID))
        hidden = self._sql.table(staging_table(run.run_id))
        sql = f"SELECT {columns} FROM {hidden} WHERE {self._sql.quoted(NUMBER)} = %(number)s ORDER BY {order}"
        with self._session() as session:
            return [to_message(row, run.endpoint) for row in session.rows(sql, {"number": number})]

    def advance(self, run: MigrationRun, number: int, before: BatchStatus, after: BatchStatus) -> bool:
        """See the port."""
        with self._session() as session, self._transaction(session):
            return self._state.advance(session, run, number, before, after)

    def give_back(self, run: MigrationRun, number: int) -> int:
        """See the port."""
        staging = staging_table(run.run_id)
        with self._session() as session, self._transaction(session):
            kept = self._state.locked(session, run)
            if not self._state.advance(session, run, number, BatchStatus.PENDING, BatchStatus.RETURNED):
                return 0
            columns = self._columns(session, kept.table)
            given, taken = self._sql.give_back(session, staging, kept.table, columns, number)
            if given > taken:
                raise StoreError(
                    f"{self._sql.where}: of batch {number}, {given} timeouts were put back and {taken} taken"
                )
            if given < taken:
                log.warning("%d timeouts of batch %d were there again and stay as they are", taken - given, number)
            return taken

    def close(self) -> None:
        """See the port."""
        session, self._open = self._open, None
        if session is not None:
            session.close()

    # --- names and connections -----------------------------------------------------------------------------------

    def _tables(self, session: Session) -> dict[str, str]:
        """Return the tables of timeouts by the names of their endpoints."""
        tables = list(self._sql.tables(session))
        given = {
            endpoint: table
            for endpoint, prefix in self._prefixes.items()
            if (table := _found(table_name(prefix=prefix), tables)) is not None
        }
        ending = f"_{SUFFIX}".lower()
        others = [table for table in tables if table.lower().endswith(ending) and table not in given.values()]
        return {table[: -len(ending)]: table for table in others if len(table) > len(ending)} | given

    def _table_of(self, session: Session, endpoint: str) -> str:
        tables = self._tables(session)
        name = _found(endpoint, tables) or _found(endpoint.replace(".", "_"), tables)
        if name is not None:
            return tables[name]
        close = difflib.get_close_matches(endpoint, tables, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(sorted(tables)) or 'none'}"
        raise ConfigurationError(f"{self._sql.where} has no table of timeouts of endpoint {endpoint!r}; {hint}")

    def _columns(self, session: Session, table: str) -> Sequence[str]:
        columns = self._sql.columns(session, table)
        missing = [column for column in READ if column not in columns]
        if missing:
            raise ConfigurationError(
                f"{self._sql.where}: table {table} has no column {missing[0]!r}: it has no timeouts"
            )
        return columns

    @contextmanager
    def _session(self) -> Generator[Session]:
        session = self._open = self._open or self._sql.connect()
        try:
            yield session
        except StoreUnreachable:
            self.close()
            raise

    @contextmanager
    def _transaction(self, session: Session) -> Generator[None]:
        session.begin()
        try:
            yield
            session.commit()
        except BaseException:
            try:
                session.rollback()
            except StoreError:  # the error that led here says more, and with the connection ends its transaction
                self.close()
            raise


def _run_all(session: Session, statements: Sequence[str]) -> None:
    for statement in statements:
        session.change(statement, {})


def _found(name: str, names: Collection[str]) -> str | None:
    """Return the one of ``names`` that is meant: the same in any case, exactly the same if there are several.

    Raises:
        ConfigurationError: there are several, and none is exactly the same.
    """
    same = [each for each in names if each.lower() == name.lower()]
    if name in same or not same:
        return name if same else None
    if len(same) > 1:
        raise ConfigurationError(f"{name!r} may be any of {', '.join(sorted(same))}; write it exactly so")
    return same[0]

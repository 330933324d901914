"""A timeout manager's tables as a source of migrations: one engine, and a dialect for each server. Source: ADR 0015.

First comes the preview, which changes nothing: it counts pending timeouts, and the problems that would prevent their
move. Rows are read in pages, so that a million of them takes seconds and little memory.
Source: docs/cli/pipeline-migrate.md.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections import Counter
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any, Final

from postdate import errors
from postdate.backends.sql import timeouts_layout
from postdate.backends.sql.timeouts_migration.dialect import (
    EXCHANGED,
    FINAL_STATUSES,
    NUMBER,
    READ,
    Dialect,
    HideRequest,
    MigrationState,
    Session,
    staging_table,
)
from postdate.messages import DESTINATION_LIMIT, DelayedMessage, Headers, check_text, encode_headers, size_in_bytes
from postdate.ports.migrating import BatchStatus, MigrationBatch, MigrationPreview, MigrationRun, MigrationStatus

_SHOWN: Final = 10
"""The number of ids that are shown for each kind of problem."""

_ID: Final = re.compile("[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}")

PAGE_ROWS: Final = 5_000


def to_message(row: Sequence[Any], endpoint: str) -> DelayedMessage:
    """Return the message of a row of :data:`postdate.backends.sql.timeouts_migration.dialect.READ`.

    Raises:
        MessageError: the row is no message.
    """
    timeout_id, destination, state, time, headers = row
    timeout = timeouts_layout.decode(timeout_id, destination or "", None, state, time, headers, endpoint)
    target = destination_of(destination, timeout.headers)
    check_text(target, f"the destination of timeout {timeout.timeout_id}", DESTINATION_LIMIT)
    return DelayedMessage(timeout.timeout_id, timeout.due, target, timeout.headers, timeout.body)


def destination_of(stored: str | None, headers: Mapping[str, str]) -> str:
    """Return a timeout's destination.

    Without one, it is the address to which the sender wants replies.
    """
    return stored if stored and stored.strip() else headers.get(Headers.REPLY_TO_ADDRESS, "")


class TimeoutSummary:
    """Counts rows, and remembers some ids of rows that are no messages, because :func:`to_message` refuses them."""

    def __init__(self) -> None:
        self.destinations: Counter[str] = Counter()
        self.count = 0
        self.earliest: datetime | None = None
        self.latest: datetime | None = None
        self.largest_bytes, self.largest_id = 0, ""
        self._problems: dict[str, list[str]] = {}
        self._problem_counts: Counter[str] = Counter()

    def add(self, rows: Iterable[Sequence[Any]]) -> None:
        """Add rows of id, destination, time, headers, and the size of the body in bytes."""
        for timeout_id, destination, time, headers, body_bytes in rows:
            self.count += 1
            self._add_due(timeout_id, time)
            read_headers = self._read_headers(timeout_id, headers)
            self._add_destination(timeout_id, destination, read_headers)
            self._add_size(timeout_id, headers, read_headers, body_bytes or 0)
            # Nearly all ids match the pattern, which is ten times as fast.
            if _ID.fullmatch(str(timeout_id)) is None and timeouts_layout.normal_id(timeout_id) is None:
                self._add_problem("an id that is not a UUID", timeout_id)

    def _add_due(self, timeout_id: object, time: object) -> None:
        try:
            due = timeouts_layout.read_time(time)
        except errors.InvalidTimestamp:
            self._add_problem("a due time that cannot be read", timeout_id)
            return
        self.earliest = min(due, self.earliest or due)
        self.latest = max(due, self.latest or due)

    def _read_headers(self, timeout_id: object, headers: Any) -> Mapping[str, str]:
        try:
            read_headers = timeouts_layout.row_headers(str(timeout_id), headers)
        except errors.InvalidHeaders:
            read_headers = None
        if read_headers is None or "" in read_headers:  # otherwise any JSON value can be a header
            self._add_problem("headers that are not a JSON object of named texts", timeout_id)
            return {}
        return read_headers

    def _add_destination(self, timeout_id: object, stored: str | None, headers: Mapping[str, str]) -> None:
        if (destination := destination_of(stored, headers)) not in self.destinations:
            try:
                check_text(destination, "destination", DESTINATION_LIMIT)
            except errors.InvalidMessage:
                what = f"a destination that is blank, longer than {DESTINATION_LIMIT} characters, or not text"
                self._add_problem(what, timeout_id)
                return
        self.destinations[destination] += 1

    def _add_size(self, timeout_id: object, written: object, headers: Mapping[str, str], body_bytes: int) -> None:
        # A store writes headers as short as possible, so nearly all messages need no second check.
        if size_in_bytes(str(written), b"") + body_bytes <= self.largest_bytes:
            return
        if (size := size_in_bytes(encode_headers(headers), b"") + body_bytes) > self.largest_bytes:
            self.largest_bytes, self.largest_id = size, str(timeout_id)

    def _add_problem(self, what: str, timeout_id: object) -> None:
        self._problem_counts[what] += 1
        ids = self._problems.setdefault(what, [])
        if len(ids) < _SHOWN:
            ids.append(str(timeout_id))

    def problems(self) -> list[str]:
        """Return a text for each kind of problem, with the first ids."""
        return [
            f"{self._problem_counts[what]:,} with {what}: "
            f"{', '.join(ids)}{', …' if self._problem_counts[what] > len(ids) else ''}"
            for what, ids in self._problems.items()
        ]

    def preview(self, endpoint: str, later: int) -> MigrationPreview:
        return MigrationPreview(
            endpoint,
            self.count,
            later,
            self.earliest,
            self.latest,
            dict(self.destinations),
            self.problems(),
            self.largest_bytes,
            self.largest_id,
        )


# --- the source of a migration ----------------------------------------------------------------------------------------


log = logging.getLogger("postdate.backends.sql.timeouts_migration")


class MigrationSource:
    """The pending messages that are to be moved: timeouts in tables of upstream's layout.

    All methods block: the driver and the tasks of a Spark job each use their own source. Changes are durable when a
    method returns; each is one transaction.

    One thread at a time. It connects at first use, and again after a connection was lost.

    Args:
        dialect: of the server.
        prefixes: by endpoint, the prefix of tables that are not named after their endpoint.
    """

    def __init__(self, dialect: Dialect, prefixes: Mapping[str, str] | None = None) -> None:
        self._dialect, self._state = dialect, MigrationState(dialect)
        self._prefixes = dict(prefixes or {})
        self._open_session: Session | None = None

    # --- queries -------------------------------------------------------------------------------------------------

    def endpoints(self) -> Sequence[str]:
        """Return the names of all endpoints that own messages here, sorted.

        Without a given prefix, the endpoint's name is taken from its table, with underscores for points.
        """
        with self._session() as session:
            tables = self._tables(session)
            if not tables and self._dialect.has_store(session):
                raise errors.ConfigurationError(
                    f"{self._dialect.where} has no table of a timeout manager, but there is a Postdate store: move its "
                    f"messages with `postdate move --from ADDRESS --to ADDRESS`"
                )
            return sorted(tables)

    def preview(self, endpoint: str, cutoff: datetime) -> MigrationPreview:
        """Return a preview, without changing anything.

        Raises:
            ConfigurationError: no table of timeouts has that name, or it is none.
        """
        summary, columns = (
            TimeoutSummary(),
            (timeouts_layout.ID, timeouts_layout.DESTINATION, timeouts_layout.TIME, timeouts_layout.HEADERS),
        )
        with self._session() as session:
            live = self._table_of(session, endpoint)
            self._columns(session, live)
            table, values = self._dialect.qualified_table(live), {"floor": self._dialect.floor_of(cutoff)}
            selected = ", ".join(
                [*map(self._dialect.readable_column, columns), self._dialect.size_of(timeouts_layout.STATE)]
            )
            unknown = f"{self._dialect.quote_name(timeouts_layout.TIME)} IS NULL"
            query = f"SELECT {selected} FROM {table} WHERE ({self._dialect.due_from_condition()}) OR {unknown}"
            for page in session.pages(query, values, PAGE_ROWS):
                summary.add(page)
            ((later,),) = session.rows(
                f"SELECT COUNT(*) FROM {table} WHERE {self._dialect.due_before_condition()}", values
            )
        return summary.preview(endpoint, later)

    def history(self) -> Sequence[MigrationRun]:
        """Return all runs, the oldest first; empty when there never was one. Creates nothing.

        Raises:
            MigrationConflict: another tool, or an older version, has begun a run that is in progress.
        """
        with self._session() as session:
            if not self._state.has_migrations(session):
                return []
            runs, tables = self._state.history(session), self._dialect.tables(session)
        for run in runs:
            if run.status not in FINAL_STATUSES and f"{EXCHANGED}{run.run_id}" in tables:
                raise errors.MigrationConflict(
                    f"migration {run.run_id} of endpoint {run.endpoint!r} hid the whole table, as older versions of "
                    f"Postdate did; resume or abort it with the version that began it"
                )
        return runs

    # --- runs ----------------------------------------------------------------------------------------------------

    def start_run(self, run: MigrationRun) -> None:
        """Store a run as PREPARING, and create what it needs; a run that exists already is not changed.

        Raises:
            MigrationConflict: another run of this endpoint is neither completed nor aborted.
            ConfigurationError: no table of timeouts has that name, or it is none.
        """
        staging = staging_table(run.run_id)
        with self._session() as session:
            live = self._table_of(session, run.endpoint)
            columns = self._columns(session, live)
            try:
                with self._transaction(session):
                    self._dialect.acquire_turn(session)
                    if not self._state.has_migrations(session):
                        _run_all(session, self._dialect.state_table_statements())
                    if not self._state.has_run(session, run, live):
                        # Before the run: where creating a table ends a transaction, no run may lack its table.
                        _run_all(session, self._dialect.staging_table_statements(staging, live, columns))
                        self._state.add_run(session, run, live)
            finally:
                self._dialect.release_turn(session)

    def set_status(self, run: MigrationRun, status: MigrationStatus, at: datetime) -> None:
        """Store the status of a run; with COMPLETED and ABORTED also its time. A second call has no effect.

        Raises:
            MigrationConflict: the run is over already, with another status; or it would be over with a batch that is
                PENDING or STAGED, whose messages would never be moved.
        """
        with self._session() as session:
            if status in FINAL_STATUSES and self._state.status(session, run) is status:
                return
            with self._transaction(session):
                self._state.lock_run(session, run)
                if status in FINAL_STATUSES:
                    self._check_batches_final(session, run, status)
                self._state.set_status(session, run, status, at)

    def _check_batches_final(self, session: Session, run: MigrationRun, status: MigrationStatus) -> None:
        for batch in self._state.batches(session, run):
            if batch.status in {BatchStatus.PENDING, BatchStatus.STAGED}:
                raise errors.MigrationConflict(
                    f"migration {run.run_id} cannot be {status.name}: batch {batch.number} is {batch.status.name}, "
                    f"and its {batch.count} timeouts would never be moved"
                )

    # --- moving --------------------------------------------------------------------------------------------------

    def hide(self, run: MigrationRun, batch_size: int, batches: int, margin: timedelta) -> Sequence[MigrationBatch]:
        """Hide the earliest messages from the old manager, in up to ``batches`` new batches, in one transaction.

        Only messages that are due after both the cut-off and the clock of the database plus ``margin`` are hidden: the
        old manager may already be processing earlier ones. The transaction ends before half of the margin has passed,
        so nothing becomes due to a manager that still sees it. Rows that another session has locked stay there. A run
        that is PREPARED hides nothing more.

        Returns:
            The new batches; none when nothing is left to hide, or the run is PREPARED.

        Raises:
            StoreUnavailable: it took too long and hid nothing; try again, or with fewer batches. After
                ``StoreUnreachable`` only :meth:`batches` says whether the last call took effect.
            MigrationConflict: the run is over.
        """
        if batch_size < 1 or batches < 1 or margin <= timedelta(0):
            raise errors.ConfigurationError("the size of batches, their number and the margin must be above 0")
        with self._session() as session, self._timed_transaction(session, margin) as started:
            stored_run, live = self._state.lock_run(session, run)
            if stored_run.status is not MigrationStatus.PREPARING:
                return []
            first, staging = stored_run.batches + 1, staging_table(run.run_id)
            request = HideRequest(live, staging, self._columns(session, live), first, batch_size, batch_size * batches)
            if count := self._dialect.hide(session, request, max(run.cutoff, started + margin)):
                self._state.add_batches(session, run, staging, first, count)
            return self._state.batches(session, run, first)

    @contextmanager
    def _timed_transaction(self, session: Session, margin: timedelta) -> Generator[datetime]:
        """Yield the database's time; the block is a transaction that is over before half of the margin has passed.

        Raises:
            StoreUnavailable: it took longer, and was rolled back.
        """
        try:
            self._dialect.limit_waits(session, margin)
            with self._transaction(session):
                started = self._dialect.now(session)
                yield started
                elapsed = self._dialect.now(session) - started
                if not timedelta(0) <= elapsed < margin / 2:
                    raise errors.StoreUnavailable(
                        f"{self._dialect.where}: hiding timeouts took {elapsed.total_seconds():.1f} s by the "
                        f"database's "
                        f"clock, which is too near to the margin of {margin.total_seconds():g} s; nothing was hidden. "
                        f"Hide fewer at a time, or with a larger margin"
                    )
        finally:
            try:
                self._dialect.reset_limits(session)
            except errors.StoreUnavailable:  # closing the connection also removes its limits
                self.close()

    def batches(self, run: MigrationRun) -> Sequence[MigrationBatch]:
        """Return all batches of the run, by number."""
        with self._session() as session:
            return self._state.batches(session, run)

    def read_batch(self, run: MigrationRun, number: int) -> Sequence[DelayedMessage]:
        """Return the messages of a batch, by due time; empty for a batch that was returned.

        Raises:
            MessageError: one is no message: preview reports such as problems, before anything is hidden.
        """
        columns = ", ".join(map(self._dialect.readable_column, READ))
        sql = (
            f"SELECT {columns} FROM {self._dialect.qualified_table(staging_table(run.run_id))} "
            f"WHERE {self._dialect.quote_name(NUMBER)} = {number} "
            f"ORDER BY {self._dialect.list_of((timeouts_layout.TIME, timeouts_layout.ID))}"
        )
        with self._session() as session:
            return [to_message(row, run.endpoint) for row in session.rows(sql, {})]

    def advance(self, run: MigrationRun, number: int, before: BatchStatus, after: BatchStatus) -> bool:
        """Store the status of a batch; return ``False``, with nothing changed, when it was not ``before``."""
        with self._session() as session, self._transaction(session):
            return self._state.advance(session, run, number, before, after)

    def return_batch(self, run: MigrationRun, number: int) -> int:
        """Return a PENDING batch to the old manager, as RETURNED; return its number of messages, or 0 when not PENDING.

        Raises:
            MigrationConflict: the run is over.
        """
        with self._session() as session, self._transaction(session):
            _, live = self._state.lock_run(session, run)
            if not self._state.advance(session, run, number, BatchStatus.PENDING, BatchStatus.RETURNED):
                return 0
            columns = self._columns(session, live)
            returned, removed = self._dialect.return_batch(session, run.run_id, number, live, columns)
            if returned > removed:
                raise errors.StoreError(
                    f"{self._dialect.where}: of batch {number}, {returned} timeouts were put back and {removed} taken"
                )
            if returned < removed:
                log.warning("%d timeouts of batch %d were there again and stay as they are", removed - returned, number)
            return removed

    def close(self) -> None:
        """Close the connection; a second call has no effect."""
        session, self._open_session = self._open_session, None
        if session is not None:
            session.close()

    # --- names and connections -----------------------------------------------------------------------------------

    def _tables(self, session: Session) -> dict[str, str]:
        """Return the tables of timeouts by the names of their endpoints."""
        tables = list(self._dialect.tables(session))
        configured = {
            endpoint: table
            for endpoint, prefix in self._prefixes.items()
            if (table := _find_match(timeouts_layout.table_name(prefix=prefix), tables)) is not None
        }
        ending = f"_{timeouts_layout.SUFFIX}".lower()
        unassigned = [table for table in tables if table.lower().endswith(ending) and table not in configured.values()]
        return {table[: -len(ending)]: table for table in unassigned if len(table) > len(ending)} | configured

    def _table_of(self, session: Session, endpoint: str) -> str:
        tables = self._tables(session)
        if (name := _find_match(endpoint, tables) or _find_match(endpoint.replace(".", "_"), tables)) is not None:
            return tables[name]
        close = difflib.get_close_matches(endpoint, tables, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(sorted(tables)) or 'none'}"
        raise errors.ConfigurationError(
            f"{self._dialect.where} has no table of timeouts of endpoint {endpoint!r}; {hint}"
        )

    def _columns(self, session: Session, table: str) -> Sequence[str]:
        columns = self._dialect.columns(session, table)
        if missing := [column for column in READ if column not in columns]:
            raise errors.ConfigurationError(
                f"{self._dialect.where}: table {table} has no column {missing[0]!r}: it has no timeouts"
            )
        return columns

    @contextmanager
    def _session(self) -> Generator[Session]:
        session = self._open_session = self._open_session or self._dialect.connect()
        try:
            yield session
        except errors.StoreUnreachable:
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
            except (
                errors.StoreError
            ):  # The error that led here says more, and closing the connection ends its transaction.
                self.close()
            raise


def _run_all(session: Session, statements: Sequence[str]) -> None:
    for statement in statements:
        session.change(statement, {})


def _find_match(name: str, names: Collection[str]) -> str | None:
    """Return the matching one of ``names``: the same in any case, or exactly the same if there are several.

    Raises:
        ConfigurationError: there are several, and none is exactly the same.
    """
    matches = [each for each in names if each.lower() == name.lower()]
    if name in matches or not matches:
        return name if matches else None
    if len(matches) > 1:
        raise errors.ConfigurationError(f"{name!r} may be any of {', '.join(sorted(matches))}; write it exactly so")
    return matches[0]

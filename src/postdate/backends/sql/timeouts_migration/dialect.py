"""The differences between the servers that keep tables of timeouts: SQL, limits, clocks. Source: ADR 0015.

Statements have their values as ``%(name)s``, and every other percent sign doubled. First come the names of the tables
that a migration creates beside the tables of timeouts, and last the state of runs and batches.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Any, Final, Protocol

from postdate.backends.sql.timeouts_layout import DESTINATION, HEADERS, ID, STATE, TIME, read_time
from postdate.errors import ConfigurationError, MigrationConflict, StoreUnavailable
from postdate.ports.migrating import BatchStatus, MigrationBatch, MigrationRun, MigrationStatus

STATE_TABLE: Final = "TimeoutsMigration_State"
"""The table with one row for each run: upstream's columns, and three of ours."""

RUN_ID: Final = "MigrationRunId"
ENDPOINT: Final = "EndpointName"
STATUS: Final = "Status"
PARAMETERS: Final = "RunParameters"
BATCHES: Final = "NumberOfBatches"
CUTOFF: Final = "CutOffTime"
STARTED: Final = "StartedAt"
COMPLETED: Final = "CompletedAt"
TIMEOUTS: Final = "NumberOfTimeouts"
LIVE_TABLE: Final = "TimeoutTable"
ONGOING: Final = "OngoingTable"
"""The table of timeouts during the run, then NULL. It is unique, so a table has only one run at a time."""

_STATE_TYPES: Final[Mapping[str, str]] = MappingProxyType(
    {
        RUN_ID: "char(32) NOT NULL PRIMARY KEY",
        ENDPOINT: "{text} NOT NULL",
        STATUS: "smallint NOT NULL",
        PARAMETERS: "{long_text} NOT NULL",
        BATCHES: "int NOT NULL",
        CUTOFF: "{instant} NOT NULL",
        STARTED: "{instant} NOT NULL",
        COMPLETED: "{instant} NULL",
        TIMEOUTS: "bigint NOT NULL",
        LIVE_TABLE: "{text} NOT NULL",
        ONGOING: "{text} NULL",
    }
)
"""The types by column; a server replaces the types in braces by its own."""

STATE_COLUMNS: Final = tuple(_STATE_TYPES)

BATCH_TABLE: Final = "TimeoutsMigration_Batches"
"""The table with one row for each batch and its status, so that progress writes one row and not a thousand."""

NUMBER: Final = "BatchNumber"
EARLIEST: Final = "EarliestTime"
_BATCH_TYPES: Final[Mapping[str, str]] = MappingProxyType(
    {
        RUN_ID: "char(32) NOT NULL",
        NUMBER: "int NOT NULL",
        STATUS: "smallint NOT NULL",
        TIMEOUTS: "int NOT NULL",
        EARLIEST: "{instant} NOT NULL",
    }
)
BATCH_COLUMNS: Final = tuple(_BATCH_TYPES)

READ: Final = (ID, DESTINATION, STATE, TIME, HEADERS)
"""The columns without which no timeout can be moved."""

EXCHANGED: Final = "TimeoutData_ranges_"
"""With the id of a run, the name of a table that shows that an older version hid the whole table of timeouts."""

_RUN_ID: Final = re.compile("[0-9a-f]{32}")


def staging_table(run_id: str) -> str:
    """Return the name of the table in which a run hides timeouts; it is upstream's.

    Raises:
        ConfigurationError: the id of the run is not 32 hexadecimal digits.
    """
    if not _RUN_ID.fullmatch(run_id):
        raise ConfigurationError(f"the id of a migration is 32 hexadecimal digits in lower case, not {run_id!r}")
    return f"TimeoutData_migration_{run_id}"


# --- the tables and sessions of each server ---------------------------------------------------------------------------


TURN_SECONDS: Final = 30
"""How long a run waits for another one that is beginning."""

_STORES: Final = ({"delayed_message", "postdate_migration"}, {"store", "record", "holder"}, {"postdate_store"})
"""The tables that identify a Postdate store: in SQLite, in PostgreSQL, in MariaDB and SQL Server."""


class Session(Protocol):
    """One connection, in autocommit mode outside of :meth:`begin` … :meth:`commit`; one thread at a time."""

    def rows(self, sql: str, values: Mapping[str, Any]) -> Sequence[tuple[Any, ...]]: ...

    def change(self, sql: str, values: Mapping[str, Any]) -> int:
        """Run a statement and return how many rows it changed."""
        ...

    def pages(self, sql: str, values: dict[str, Any], page: int) -> Iterable[list[tuple[Any, ...]]]:
        """Yield the rows of a statement as the server sends them; no other statement may run meanwhile."""
        ...

    def begin(self) -> None: ...

    def commit(self) -> None: ...

    def rollback(self) -> None: ...

    def close(self) -> None:
        """Close the connection. Never raises."""
        ...


@dataclass(frozen=True, slots=True)
class HideRequest:
    """The timeouts that one call hides from the old manager.

    Args:
        live: the table of timeouts.
        staging: the table that they are moved to.
        columns: of both.
        first: number of the first new batch.
        batch_size: timeouts in a batch.
        limit: timeouts in all.
    """

    live: str
    staging: str
    columns: Sequence[str]
    first: int
    batch_size: int
    limit: int


class Dialect(ABC):
    """The SQL of one server, and its connections. The statements here are common to them.

    Args:
        schema: that the tables are in.
        where: the address without secrets.
    """

    text = "varchar(200)"
    long_text = "text"
    instant = "timestamp"
    integer_division = "/"
    lock_clause = ""
    """The end of a SELECT that locks its row."""
    lock_hint = ""
    """The same, after the name of the table."""
    skip_locked_clause = ""
    """The end of a SELECT that locks rows and skips rows that other sessions have locked."""
    names_of_tables: str
    """The query for the names of all tables in ``schema``."""
    run_placeholder = "%(run)s"
    """The id of a run, as a value to compare the column with."""

    def __init__(self, schema: str, where: str) -> None:
        self.schema, self.where = schema, where

    # --- connections, and facts about the database ---------------------------------------------------------------

    @abstractmethod
    def connect(self) -> Session: ...

    @abstractmethod
    def now(self, session: Session) -> datetime:
        """Return the present instant by the database's clock, also within a transaction; UTC."""

    def tables(self, session: Session) -> Sequence[str]:
        """Return the names of all tables in the schema."""
        return [name for (name,) in session.rows(self.names_of_tables, {"schema": self.schema})]

    @abstractmethod
    def columns(self, session: Session, table: str) -> Sequence[str]:
        """Return the names of a table's columns in their order; empty when there is no such table.

        Raises:
            ConfigurationError: its rows cannot be moved in a transaction.
        """

    @abstractmethod
    def limit_waits(self, session: Session, margin: timedelta) -> None:
        """Limit each statement and each wait for a lock to well below half of ``margin``, if the server can.

        Called before the transaction that hides begins; :meth:`reset_limits` follows in any case.
        """

    def reset_limits(self, session: Session) -> None:  # noqa: B027 - most have nothing to undo
        """Undo :meth:`limit_waits`."""

    def acquire_turn(self, session: Session) -> None:  # noqa: B027 - where writers take turns anyway
        """Wait until no other run is beginning; inside a transaction.

        Raises:
            StoreUnavailable: another run has been beginning for half a minute.
        """

    def release_turn(self, session: Session) -> None:  # noqa: B027 - most do it with the end of the transaction
        """Undo :meth:`acquire_turn`, after the end of the transaction."""

    # --- values --------------------------------------------------------------------------------------------------

    def value_of(self, instant: datetime) -> object:
        """Return an instant as it is bound for writing, or for comparing with a column of times."""
        return instant.astimezone(UTC).replace(tzinfo=None)

    def floor_of(self, instant: datetime) -> object:
        """Return an instant that :meth:`due_from_condition` and :meth:`due_before_condition` compare with."""
        return self.value_of(instant)

    def due_from_condition(self) -> str:
        """Return the condition that a timeout is due at ``floor`` or later."""
        return f"{self.quote_name(TIME)} >= %(floor)s"

    def due_before_condition(self) -> str:
        """Return the condition that a timeout is due earlier than ``floor_of``."""
        return f"{self.quote_name(TIME)} < %(floor)s"

    def readable_column(self, column: str) -> str:
        """Return SQL for a column in a list of columns, such that the driver can read any value in it."""
        return self.quote_name(column)

    def size_of(self, column: str) -> str:
        """Return how many bytes a column has."""
        return f"OCTET_LENGTH({self.quote_name(column)})"

    # --- names ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def quote_name(self, name: str) -> str:
        """Return a name as SQL, percent signs doubled."""

    def qualified_table(self, name: str) -> str:
        return f"{self.quote_name(self.schema)}.{self.quote_name(name)}"

    def list_of(self, columns: Iterable[str]) -> str:
        return ", ".join(map(self.quote_name, columns))

    # --- tables of a migration -----------------------------------------------------------------------------------

    def state_table_statements(self) -> Sequence[str]:
        """Return the statements that create the tables of runs and batches where they are missing."""
        state, batches = self.qualified_table(STATE_TABLE), self.qualified_table(BATCH_TABLE)
        key = f"PRIMARY KEY ({self.list_of((RUN_ID, NUMBER))})"
        return [
            self._create_if_missing(
                STATE_TABLE, f"{state} ({self._column_definitions(_STATE_TYPES)}{self._unique_constraint()})"
            ),
            *self._statements_after_state(),
            self._create_if_missing(BATCH_TABLE, f"{batches} ({self._column_definitions(_BATCH_TYPES)}, {key})"),
        ]

    def _column_definitions(self, columns: Mapping[str, str]) -> str:
        own = {"text": self.text, "long_text": self.long_text, "instant": self.instant}
        return ", ".join(f"{self.quote_name(column)} {kind.format_map(own)}" for column, kind in columns.items())

    def _create_if_missing(self, name: str, table: str) -> str:
        return f"CREATE TABLE IF NOT EXISTS {table}"

    def _unique_constraint(self) -> str:
        return f", UNIQUE ({self.quote_name(ONGOING)})"

    def _statements_after_state(self) -> Sequence[str]:
        return ()

    @abstractmethod
    def staging_table_statements(self, staging: str, live: str, columns: Sequence[str]) -> Sequence[str]:
        """Return the statements that create the table of hidden timeouts: like the live one, with ``BatchNumber``.

        Its key is the batch and the id, so that the rows of a batch are together.
        """

    def has_store(self, session: Session) -> bool:
        """Return whether the searched place has the tables of a Postdate store."""
        names = set(self.tables(session))
        return any(tables <= names for tables in _STORES)

    # --- moving --------------------------------------------------------------------------------------------------

    def hide(self, session: Session, request: HideRequest, floor: datetime) -> int:
        """Move the earliest timeouts that are due at ``floor`` or later; return how many.

        Rows that another session has locked stay, if the server can skip them.

        Raises:
            StoreUnavailable: a wait took too long, or another session changed the table; the caller must roll back.
        """
        moved = session.change(self._copy_statement(request), {"floor": self.floor_of(floor)})
        removed = session.change(self._remove_statement(request), {}) if moved else 0
        if removed != moved:
            raise StoreUnavailable(
                f"{self.where}: {moved} timeouts were copied from {request.live} and {removed} removed; try again"
            )
        return moved

    def _copy_statement(self, request: HideRequest) -> str:
        columns, order = self.list_of(request.columns), self.list_of((TIME, ID))
        number = (
            f"{request.first} + (ROW_NUMBER() OVER (ORDER BY {order}) - 1) {self.integer_division} {request.batch_size}"
        )
        return (
            f"INSERT INTO {self.qualified_table(request.staging)} ({columns}, {self.quote_name(NUMBER)}) "
            f"SELECT {columns}, {number} FROM ({self._earliest_query(request, columns)}) AS earliest"
        )

    def _earliest_query(self, request: HideRequest, columns: str) -> str:
        """Return the query for the timeouts to hide, which locks them; ``columns`` are selected."""
        return (
            f"SELECT {columns} FROM {self.qualified_table(request.live)} WHERE {self.due_from_condition()} "
            f"ORDER BY {self.quote_name(TIME)} LIMIT {request.limit}{self.skip_locked_clause}"
        )

    def _remove_statement(self, request: HideRequest) -> str:
        id_column = self.quote_name(ID)
        return (
            f"DELETE t FROM {self.qualified_table(request.live)} AS t JOIN {self.qualified_table(request.staging)} AS "
            f"s ON s.{id_column} = t.{id_column} "
            f"WHERE s.{self.quote_name(NUMBER)} >= {request.first}"
        )

    def return_batch(
        self, session: Session, run_id: str, number: int, live: str, columns: Sequence[str]
    ) -> tuple[int, int]:
        """Return a batch to the live table; return how many timeouts it has again, and how many were hidden.

        A timeout whose id is in the live table again stays unchanged: the manager received that message twice.
        """
        column_list, id_column = self.list_of(columns), self.quote_name(ID)
        table, hidden = self.qualified_table(live), self.qualified_table(staging_table(run_id))
        batch = f"FROM {hidden} WHERE {self.quote_name(NUMBER)} = {number}"
        absent = f"NOT EXISTS (SELECT 1 FROM {table} WHERE {table}.{id_column} = {hidden}.{id_column})"
        inserted_count = session.change(
            f"INSERT INTO {table} ({column_list}) SELECT {column_list} {batch} AND {absent}", {}
        )
        return inserted_count, session.change(f"DELETE {batch}", {})


# --- the state of runs and batches, in the source's own database ------------------------------------------------------


FINAL_STATUSES: Final = frozenset({MigrationStatus.COMPLETED, MigrationStatus.ABORTED})


class MigrationState:
    """The tables of runs and batches. The caller has the session in a transaction where one is needed."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._runs, self._batches = dialect.qualified_table(STATE_TABLE), dialect.qualified_table(BATCH_TABLE)
        self._of_run = f"{dialect.quote_name(RUN_ID)} = {dialect.run_placeholder}"

    # --- runs ----------------------------------------------------------------------------------------------------

    def has_migrations(self, session: Session) -> bool:
        """Return whether there has ever been a migration here.

        Raises:
            MigrationConflict: the table of runs is not Postdate's.
        """
        columns = self._dialect.columns(session, STATE_TABLE)
        missing = [column for column in STATE_COLUMNS if column not in columns]
        if columns and missing:
            raise MigrationConflict(
                f"{self._dialect.where}: table {STATE_TABLE} lacks the column {missing[0]}: another tool made "
                f"it. Make sure that no migration of that tool is running, then rename its table"
            )
        return bool(columns)

    def history(self, session: Session) -> list[MigrationRun]:
        """Return all runs, the oldest first."""
        order = self._dialect.list_of((STARTED, RUN_ID))
        return [_run(row) for row in session.rows(f"{self._select_runs()} ORDER BY {order}", {})]

    def has_run(self, session: Session, run: MigrationRun, table: str) -> bool:
        """Return whether this very run is stored already.

        Raises:
            MigrationConflict: another run has the table.
        """
        ongoing = self._dialect.quote_name(ONGOING)
        for row in session.rows(f"{self._select_runs()} WHERE {ongoing} = %(table)s", {"table": table}):
            other = _run(row)
            if other.run_id == run.run_id:
                return True
            raise MigrationConflict(
                f"migration {other.run_id} of endpoint {other.endpoint!r}, begun {other.started_at.isoformat()}, is "
                f"neither completed nor aborted; resume it, or abort it first"
            )
        return False

    def add_run(self, session: Session, run: MigrationRun, table: str) -> None:
        parameters = json.dumps(dict(run.parameters), sort_keys=True)
        texts = [run.run_id, run.endpoint, int(MigrationStatus.PREPARING), parameters]
        times = [self._dialect.value_of(run.cutoff), self._dialect.value_of(run.started_at)]
        values = dict(zip(STATE_COLUMNS, [*texts, 0, *times, None, 0, table, table], strict=True))
        marks = ", ".join(f"%({column})s" for column in STATE_COLUMNS)
        session.change(f"INSERT INTO {self._runs} ({self._dialect.list_of(STATE_COLUMNS)}) VALUES ({marks})", values)

    def lock_run(self, session: Session, run: MigrationRun) -> tuple[MigrationRun, str]:
        """Return a run that is in progress, and its table; lock the run until the end of the transaction.

        Raises:
            MigrationConflict: it is over, or never began here.
        """
        sql = f"{self._select_runs(self._dialect.lock_hint)} WHERE {self._of_run}{self._dialect.lock_clause}"
        rows = session.rows(sql, {"run": run.run_id})
        if not rows:
            raise MigrationConflict(f"migration {run.run_id} was never started in {self._dialect.where}")
        stored = _run(rows[0])
        if stored.status in FINAL_STATUSES:
            raise MigrationConflict(f"migration {run.run_id} of endpoint {run.endpoint!r} is {stored.status.name}")
        return stored, str(rows[0][STATE_COLUMNS.index(LIVE_TABLE)])

    def status(self, session: Session, run: MigrationRun) -> MigrationStatus | None:
        """Return the status of a run; ``None``: it never began."""
        sql = f"SELECT {self._dialect.quote_name(STATUS)} FROM {self._runs} WHERE {self._of_run}"
        rows = session.rows(sql, {"run": run.run_id})
        return MigrationStatus(rows[0][0]) if rows else None

    def set_status(self, session: Session, run: MigrationRun, status: MigrationStatus, at: datetime) -> None:
        """Store the status of a run that is locked."""
        name, values = (
            self._dialect.quote_name,
            {"run": run.run_id, "status": int(status), "at": self._dialect.value_of(at)},
        )
        completion = f", {name(COMPLETED)} = %(at)s, {name(ONGOING)} = NULL" if status in FINAL_STATUSES else ""
        if not completion:
            del values["at"]
        session.change(f"UPDATE {self._runs} SET {name(STATUS)} = %(status)s{completion} WHERE {self._of_run}", values)

    def _select_runs(self, hint: str = "") -> str:
        return f"SELECT {self._dialect.list_of(STATE_COLUMNS)} FROM {self._runs}{hint}"

    # --- batches -------------------------------------------------------------------------------------------------

    def add_batches(self, session: Session, run: MigrationRun, staging: str, first: int, count: int) -> None:
        """Store the batches that are in the staging table from ``first`` on; they have ``count`` timeouts."""
        name, number = self._dialect.quote_name, self._dialect.quote_name(NUMBER)
        staged_batches = (
            f"SELECT {number} AS batch, COUNT(*) AS messages, MIN({name(TIME)}) AS earliest "
            f"FROM {self._dialect.qualified_table(staging)} WHERE {number} >= {first} GROUP BY {number}"
        )
        session.change(
            f"INSERT INTO {self._batches} ({self._dialect.list_of(BATCH_COLUMNS)}) "
            f"SELECT '{run.run_id}', batch, {int(BatchStatus.PENDING)}, messages, earliest FROM ({staged_batches}) AS "
            f"found",
            {},
        )
        last = f"SELECT MAX({number}) FROM {self._batches} WHERE {self._of_run}"
        session.change(
            f"UPDATE {self._runs} SET {name(BATCHES)} = ({last}), {name(TIMEOUTS)} = {name(TIMEOUTS)} + {count} "
            f"WHERE {self._of_run}",
            {"run": run.run_id},
        )

    def batches(self, session: Session, run: MigrationRun, first: int = 1) -> list[MigrationBatch]:
        columns, number = self._dialect.list_of((NUMBER, STATUS, TIMEOUTS, EARLIEST)), self._dialect.quote_name(NUMBER)
        sql = f"SELECT {columns} FROM {self._batches} WHERE {self._of_run} AND {number} >= {first} ORDER BY {number}"
        rows = session.rows(sql, {"run": run.run_id})
        return [MigrationBatch(each, BatchStatus(status), count, read_time(due)) for each, status, count, due in rows]

    def advance(
        self, session: Session, run: MigrationRun, number: int, before: BatchStatus, after: BatchStatus
    ) -> bool:
        """Store the status of a batch if it was ``before``."""
        name = self._dialect.quote_name
        changed = session.change(
            f"UPDATE {self._batches} SET {name(STATUS)} = %(after)s "
            f"WHERE {self._of_run} AND {name(NUMBER)} = %(number)s AND {name(STATUS)} = %(before)s",
            {"run": run.run_id, "number": number, "before": int(before), "after": int(after)},
        )
        return changed > 0


def _run(row: Sequence[Any]) -> MigrationRun:
    values = dict(zip(STATE_COLUMNS, row, strict=True))
    completed = values[COMPLETED]
    return MigrationRun(
        str(values[RUN_ID]),
        values[ENDPOINT],
        MigrationStatus(values[STATUS]),
        {str(key): str(value) for key, value in json.loads(values[PARAMETERS]).items()},
        read_time(values[CUTOFF]),
        read_time(values[STARTED]),
        None if completed is None else read_time(completed),
        int(values[BATCHES]),
        int(values[TIMEOUTS]),
    )

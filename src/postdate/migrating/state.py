"""What is written down of runs and batches, in the source's own database. Source: specification 4.12; ADR 0015."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

from postdate.errors import MigrationConflict
from postdate.migrating.dialect import (
    BATCH_COLUMNS,
    BATCH_TABLE,
    BATCHES,
    COMPLETED,
    CUTOFF,
    EARLIEST,
    ENDPOINT,
    LIVE_TABLE,
    NUMBER,
    ONGOING,
    PARAMETERS,
    RUN_ID,
    STARTED,
    STATE_COLUMNS,
    STATE_TABLE,
    STATUS,
    TIMEOUTS,
    Dialect,
    Session,
)
from postdate.persistence.timeouts import TIME, read_time
from postdate.ports.migrating import BatchStatus, MigrationBatch, MigrationRun, MigrationStatus

OVER: Final = frozenset({MigrationStatus.COMPLETED, MigrationStatus.ABORTED})


class MigrationState:
    """The tables of runs and batches, through a session that whoever calls has in a transaction where one is needed."""

    def __init__(self, dialect: Dialect) -> None:
        self._sql = dialect
        self._runs, self._batches = dialect.table(STATE_TABLE), dialect.table(BATCH_TABLE)
        self._of_run = f"{dialect.quoted(RUN_ID)} = {dialect.run}"

    # --- runs ----------------------------------------------------------------------------------------------------

    def exists(self, session: Session) -> bool:
        """Return whether there has ever been a migration here.

        Raises:
            MigrationConflict: the table of runs is not Postdate's.
        """
        found = self._sql.columns(session, STATE_TABLE)
        missing = [column for column in STATE_COLUMNS if column not in found]
        if found and missing:
            raise MigrationConflict(
                f"{self._sql.where}: table {STATE_TABLE} lacks the column {missing[0]}: another tool made "
                f"it. See that no migration of that tool is on its way, then give its table another name"
            )
        return bool(found)

    def history(self, session: Session) -> list[MigrationRun]:
        """Return all runs, the oldest first."""
        order = self._sql.list_of((STARTED, RUN_ID))
        return [_run(row) for row in session.rows(f"{self._select_runs()} ORDER BY {order}", {})]

    def knows(self, session: Session, run: MigrationRun, table: str) -> bool:
        """Return whether this very run is written down already.

        Raises:
            MigrationConflict: another run has the table.
        """
        ongoing = self._sql.quoted(ONGOING)
        for row in session.rows(f"{self._select_runs()} WHERE {ongoing} = %(table)s", {"table": table}):
            other = _run(row)
            if other.run_id == run.run_id:
                return True
            raise MigrationConflict(
                f"migration {other.run_id} of endpoint {other.endpoint!r}, begun {other.started_at.isoformat()}, is "
                f"neither completed nor aborted; go on with it, or abort it first"
            )
        return False

    def add(self, session: Session, run: MigrationRun, table: str) -> None:
        parameters = json.dumps(dict(run.parameters), sort_keys=True)
        texts = [run.run_id, run.endpoint, int(MigrationStatus.PREPARING), parameters]
        times = [self._sql.value(run.cutoff), self._sql.value(run.started_at)]
        values = dict(zip(STATE_COLUMNS, [*texts, 0, *times, None, 0, table, table], strict=True))
        marks = ", ".join(f"%({column})s" for column in STATE_COLUMNS)
        session.change(f"INSERT INTO {self._runs} ({self._sql.list_of(STATE_COLUMNS)}) VALUES ({marks})", values)

    def locked(self, session: Session, run: MigrationRun) -> tuple[MigrationRun, str]:
        """Return a run that is on its way, and its table; keep others from it until the end of the transaction.

        Raises:
            MigrationConflict: it is over, or never began here.
        """
        sql = f"{self._select_runs(self._sql.locking_hint)} WHERE {self._of_run}{self._sql.locking}"
        rows = session.rows(sql, {"run": run.run_id})
        if not rows:
            raise MigrationConflict(f"migration {run.run_id} never began in {self._sql.where}")
        found = _run(rows[0])
        if found.status in OVER:
            raise MigrationConflict(f"migration {run.run_id} of endpoint {run.endpoint!r} is {found.status.name}")
        return found, str(rows[0][STATE_COLUMNS.index(LIVE_TABLE)])

    def status(self, session: Session, run: MigrationRun) -> MigrationStatus | None:
        """Return how far a run is; ``None``: it never began."""
        sql = f"SELECT {self._sql.quoted(STATUS)} FROM {self._runs} WHERE {self._of_run}"
        rows = session.rows(sql, {"run": run.run_id})
        return MigrationStatus(rows[0][0]) if rows else None

    def set_status(self, session: Session, run: MigrationRun, status: MigrationStatus, at: datetime) -> None:
        """Write down how far a run is that is locked."""
        name, values = self._sql.quoted, {"run": run.run_id, "status": int(status), "at": self._sql.value(at)}
        end = f", {name(COMPLETED)} = %(at)s, {name(ONGOING)} = NULL" if status in OVER else ""
        if not end:
            del values["at"]
        session.change(f"UPDATE {self._runs} SET {name(STATUS)} = %(status)s{end} WHERE {self._of_run}", values)

    def _select_runs(self, hint: str = "") -> str:
        return f"SELECT {self._sql.list_of(STATE_COLUMNS)} FROM {self._runs}{hint}"

    # --- batches -------------------------------------------------------------------------------------------------

    def add_staged(self, session: Session, run: MigrationRun, staging: str, first: int, count: int) -> None:
        """Write down the batches that stand in the staging table from ``first`` on; they have ``count`` timeouts."""
        name, number = self._sql.quoted, self._sql.quoted(NUMBER)
        found = (
            f"SELECT {number} AS batch, COUNT(*) AS messages, MIN({name(TIME)}) AS earliest "
            f"FROM {self._sql.table(staging)} WHERE {number} >= {first} GROUP BY {number}"
        )
        session.change(
            f"INSERT INTO {self._batches} ({self._sql.list_of(BATCH_COLUMNS)}) "
            f"SELECT '{run.run_id}', batch, {int(BatchStatus.PENDING)}, messages, earliest FROM ({found}) AS found",
            {},
        )
        last = f"SELECT MAX({number}) FROM {self._batches} WHERE {self._of_run}"
        session.change(
            f"UPDATE {self._runs} SET {name(BATCHES)} = ({last}), {name(TIMEOUTS)} = {name(TIMEOUTS)} + {count} "
            f"WHERE {self._of_run}",
            {"run": run.run_id},
        )

    def batches(self, session: Session, run: MigrationRun, first: int = 1) -> list[MigrationBatch]:
        wanted, number = self._sql.list_of((NUMBER, STATUS, TIMEOUTS, EARLIEST)), self._sql.quoted(NUMBER)
        sql = f"SELECT {wanted} FROM {self._batches} WHERE {self._of_run} AND {number} >= {first} ORDER BY {number}"
        rows = session.rows(sql, {"run": run.run_id})
        return [MigrationBatch(each, BatchStatus(status), count, read_time(due)) for each, status, count, due in rows]

    def advance(
        self, session: Session, run: MigrationRun, number: int, before: BatchStatus, after: BatchStatus
    ) -> bool:
        """Write down how far a batch is, if it is as far as ``before`` says."""
        name = self._sql.quoted
        found = session.change(
            f"UPDATE {self._batches} SET {name(STATUS)} = %(after)s "
            f"WHERE {self._of_run} AND {name(NUMBER)} = %(number)s AND {name(STATUS)} = %(before)s",
            {"run": run.run_id, "number": number, "before": int(before), "after": int(after)},
        )
        return found > 0


def _run(row: Sequence[Any]) -> MigrationRun:
    kept = dict(zip(STATE_COLUMNS, row, strict=True))
    completed = kept[COMPLETED]
    return MigrationRun(
        str(kept[RUN_ID]),
        kept[ENDPOINT],
        MigrationStatus(kept[STATUS]),
        {str(key): str(value) for key, value in json.loads(kept[PARAMETERS]).items()},
        read_time(kept[CUTOFF]),
        read_time(kept[STARTED]),
        None if completed is None else read_time(completed),
        int(kept[BATCHES]),
        int(kept[TIMEOUTS]),
    )

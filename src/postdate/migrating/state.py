"""What is written down of runs and batches, in the source's own database. Source: specification 4.12; ADR 0015."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from postdate.errors import MigrationConflict
from postdate.migrating.dialect import (
    BATCH_COLUMNS,
    BATCH_TABLE,
    BATCHES,
    COMPLETED,
    EARLIEST,
    ENDPOINT,
    LIVE_TABLE,
    NUMBER,
    ONGOING,
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


@dataclass(frozen=True, slots=True)
class KeptRun:
    """A run as it is written down.

    Args:
        run: what the port shows of it.
        table: of its endpoint's timeouts.
    """

    run: MigrationRun
    table: str


class MigrationState:
    """The tables of runs and batches, through a session that whoever calls has in a transaction where one is needed.

    Args:
        dialect: of the server.
    """

    def __init__(self, dialect: Dialect) -> None:
        self._sql = dialect
        self._runs, self._batches = dialect.table(STATE_TABLE), dialect.table(BATCH_TABLE)

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

    def history(self, session: Session) -> list[KeptRun]:
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
            other = _run(row).run
            if other.run_id == run.run_id:
                return True
            raise MigrationConflict(
                f"migration {other.run_id} of endpoint {other.endpoint!r}, begun {other.started_at.isoformat()}, is "
                f"neither completed nor aborted; go on with it, or abort it first"
            )
        return False

    def add(self, session: Session, run: MigrationRun, table: str) -> None:
        """Write down a new run."""
        marks = ", ".join(f"%({column})s" for column in STATE_COLUMNS)
        session.change(
            f"INSERT INTO {self._runs} ({self._sql.list_of(STATE_COLUMNS)}) VALUES ({marks})", self._values(run, table)
        )

    def _values(self, run: MigrationRun, table: str) -> dict[str, Any]:
        parameters = json.dumps(dict(run.parameters), sort_keys=True)
        texts = [run.run_id, run.endpoint, int(MigrationStatus.PREPARING), parameters]
        times = [self._sql.value(run.cutoff), self._sql.value(run.started_at)]
        return dict(zip(STATE_COLUMNS, [*texts, 0, *times, None, 0, table, table], strict=True))

    def locked(self, session: Session, run: MigrationRun) -> KeptRun:
        """Return a run that is on its way, and keep others from changing it until the end of the transaction.

        Raises:
            MigrationConflict: it is over, or never began here.
        """
        rows = session.rows(
            f"{self._select_runs(self._sql.locking_hint)} "
            f"WHERE {self._sql.quoted(RUN_ID)} = {self._sql.run}{self._sql.locking}",
            {"run": run.run_id},
        )
        if not rows:
            raise MigrationConflict(f"migration {run.run_id} never began in {self._sql.where}")
        found = _run(rows[0])
        if found.run.status in OVER:
            raise MigrationConflict(f"migration {run.run_id} of endpoint {run.endpoint!r} is {found.run.status.name}")
        return found

    def status(self, session: Session, run: MigrationRun) -> MigrationStatus | None:
        """Return how far a run is; ``None``: it never began."""
        sql = f"SELECT {self._sql.quoted(STATUS)} FROM {self._runs} WHERE {self._sql.quoted(RUN_ID)} = {self._sql.run}"
        rows = session.rows(sql, {"run": run.run_id})
        return MigrationStatus(rows[0][0]) if rows else None

    def set_status(self, session: Session, run: MigrationRun, status: MigrationStatus, at: datetime) -> None:
        """Write down how far a run is that is locked."""
        name, values = self._sql.quoted, {"run": run.run_id, "status": int(status), "at": self._sql.value(at)}
        end = f", {name(COMPLETED)} = %(at)s, {name(ONGOING)} = NULL" if status in OVER else ""
        if not end:
            del values["at"]
        session.change(
            f"UPDATE {self._runs} SET {name(STATUS)} = %(status)s{end} WHERE {name(RUN_ID)} = {self._sql.run}", values
        )

    def _select_runs(self, hint: str = "") -> str:
        return f"SELECT {self._sql.list_of(STATE_COLUMNS)} FROM {self._runs}{hint}"

    # --- batches -------------------------------------------------------------------------------------------------

    def add_staged(self, session: Session, run: MigrationRun, staging: str, first: int, count: int) -> None:
        """Write down the batches that stand in the staging table from ``first`` on; they have ``count`` timeouts."""
        number = self._sql.quoted(NUMBER)
        found = (
            f"SELECT {number} AS batch, COUNT(*) AS messages, MIN({self._sql.quoted(TIME)}) AS earliest "
            f"FROM {self._sql.table(staging)} WHERE {number} >= {first} GROUP BY {number}"
        )
        session.change(
            f"INSERT INTO {self._batches} ({self._sql.list_of(BATCH_COLUMNS)}) "
            f"SELECT '{run.run_id}', batch, {int(BatchStatus.PENDING)}, messages, earliest FROM ({found}) AS found",
            {},
        )
        name = self._sql.quoted
        last = f"SELECT MAX({number}) FROM {self._batches} WHERE {name(RUN_ID)} = {self._sql.run}"
        session.change(
            f"UPDATE {self._runs} SET {name(BATCHES)} = ({last}), {name(TIMEOUTS)} = {name(TIMEOUTS)} + {count} "
            f"WHERE {name(RUN_ID)} = {self._sql.run}",
            {"run": run.run_id},
        )

    def batches(self, session: Session, run: MigrationRun, first: int = 1) -> list[MigrationBatch]:
        """Return the batches of a run from number ``first`` on."""
        wanted = self._sql.list_of((NUMBER, STATUS, TIMEOUTS, EARLIEST))
        rows = session.rows(
            f"SELECT {wanted} FROM {self._batches} WHERE {self._sql.quoted(RUN_ID)} = {self._sql.run} "
            f"AND {self._sql.quoted(NUMBER)} >= {first} ORDER BY {self._sql.quoted(NUMBER)}",
            {"run": run.run_id},
        )
        return [
            MigrationBatch(number, BatchStatus(status), count, read_time(due)) for number, status, count, due in rows
        ]

    def advance(
        self, session: Session, run: MigrationRun, number: int, before: BatchStatus, after: BatchStatus
    ) -> bool:
        """Write down how far a batch is, if it is as far as ``before`` says."""
        name = self._sql.quoted
        found = session.change(
            f"UPDATE {self._batches} SET {name(STATUS)} = %(after)s WHERE {name(RUN_ID)} = {self._sql.run} "
            f"AND {name(NUMBER)} = %(number)s AND {name(STATUS)} = %(before)s",
            {"run": run.run_id, "number": number, "before": int(before), "after": int(after)},
        )
        return found > 0


def _run(row: Sequence[Any]) -> KeptRun:
    kept = dict(zip(STATE_COLUMNS, row, strict=True))
    completed = kept[COMPLETED]
    run = MigrationRun(
        str(kept[RUN_ID]),
        kept[ENDPOINT],
        MigrationStatus(kept[STATUS]),
        _parameters(kept["RunParameters"]),
        read_time(kept["CutOffTime"]),
        read_time(kept[STARTED]),
        None if completed is None else read_time(completed),
        int(kept[BATCHES]),
        int(kept[TIMEOUTS]),
    )
    return KeptRun(run, str(kept[LIVE_TABLE]))


def _parameters(text: str) -> Mapping[str, str]:
    return {str(key): str(value) for key, value in json.loads(text).items()}

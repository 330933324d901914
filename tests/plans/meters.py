"""What each statement of an adapter reads, counted by the server itself while the adapter works.

A meter listens to the connections that the adapters open: it needs no list of statements, so that a new one is measured
as soon as the work of ``tests/plans/work.py`` sends it.
"""

from __future__ import annotations

import json
import re
import sqlite3
import threading
from abc import ABC, abstractmethod
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pymysql
import pytest

from postdate.backends.mariadb import connection as mariadb

BACKGROUND = "presence"
"""The step of statements that a thread of the adapter sends by itself."""


@dataclass(frozen=True)
class Measurement:
    """One execution of one statement.

    Args:
        step: of the work that sent it.
        statement: its text, without the names of schemas, in one line.
        rows: read or compared; for SQLite steps of its virtual machine.
        plan: how it was executed, as far as the server says.
    """

    step: str
    statement: str
    rows: int
    plan: str = ""


@dataclass
class Meter(ABC):
    """Notes what statements read, while it is switched on. ``most``: what one may read at most."""

    most: int
    measurements: list[Measurement] = field(default_factory=list[Measurement])
    _step: str = ""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @abstractmethod
    def listening(self) -> AbstractContextManager[None]:
        """Measure what is sent on connections that are opened within the block."""

    @contextmanager
    def step(self, name: str) -> Generator[None]:
        """Switch on for a step of the work."""
        self._step = name
        try:
            yield
        finally:
            self._step = ""

    def note(self, statement: str, rows: int, plan: str = "") -> None:
        """Note an execution; called from any thread."""
        if step := self._step:
            own = threading.current_thread().name.startswith(("MainThread", "AnyIO"))
            with self._lock:
                self.measurements.append(Measurement(step if own else BACKGROUND, in_one_line(statement), rows, plan))

    def worst(self) -> list[Measurement]:
        """Return the execution of each statement in each step that read most, by step."""
        found = {(each.step, each.statement): each for each in sorted(self.measurements, key=lambda each: each.rows)}
        return [found[key] for key in sorted(found)]


def in_one_line(statement: str) -> str:
    """Return a statement without line breaks, names of schemas, and values that differ with each execution."""
    text = " ".join(statement.split())
    text = re.sub(r"""("(?:[^"]|"")*"|`(?:[^`]|``)*`)\.(?=["`])""", "", text)
    return re.sub(r"""'(?:[^'\\]|''|\\.)*'|x'[0-9a-f]*'|(?<![\w$:])-?\d+""", "?", text)


# --- PostgreSQL ---------------------------------------------------------------------------------------------------

AUTO_EXPLAIN = (
    "-c session_preload_libraries=auto_explain -c auto_explain.log_min_duration=0 -c auto_explain.log_analyze=on "
    "-c auto_explain.log_buffers=on -c auto_explain.log_timing=off -c auto_explain.log_format=json "
    "-c auto_explain.log_level=notice -c auto_explain.log_nested_statements=off"
)
"""Settings of a session whose every statement is followed by a notice with its EXPLAIN (ANALYZE, BUFFERS)."""


class PostgresMeter(Meter):
    """Reads the plans of all statements of this process' sessions, as they were executed."""

    @contextmanager
    def listening(self) -> Generator[None]:
        made = psycopg.BaseConnection.__init__

        def make(connection: Any, *arguments: Any, **settings: Any) -> None:
            made(connection, *arguments, **settings)
            connection.add_notice_handler(self._hear)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(psycopg.BaseConnection, "__init__", make)
            yield

    def _hear(self, notice: psycopg.errors.Diagnostic) -> None:
        _, is_plan, text = (notice.message_primary or "").partition("plan:\n")
        if is_plan:
            told = json.loads(text)
            self.note(told["Query Text"], rows_of(told["Plan"]), json.dumps(told["Plan"], indent=1))


def rows_of(plan: dict[str, Any]) -> int:
    """Return the rows that the steps of a plan have read from tables, and compared in joins, filtered out or not."""
    read = int(plan.get("Rows Removed by Join Filter", 0))
    if "Relation Name" in plan and plan["Node Type"] != "ModifyTable":
        read += plan["Actual Rows"]
        read += sum(int(plan.get(f"Rows Removed by {name}", 0)) for name in ("Filter", "Index Recheck"))
    return read * plan["Actual Loops"] + sum(rows_of(part) for part in plan.get("Plans", ()))


# --- MariaDB ------------------------------------------------------------------------------------------------------


class MariaDbMeter(Meter):
    """Reads the session's own counters of the rows that storage engines were asked for, before and after."""

    @contextmanager
    def listening(self) -> Generator[None]:
        query = mariadb._Connection.query

        def counted(connection: Any, sql: str | bytes, unbuffered: bool = False) -> int:
            if not self._step or unbuffered:
                return query(connection, sql, unbuffered)
            before = self._reads(connection)
            found = query(connection, sql, unbuffered)
            result = connection._result
            rows = self._reads(connection) - before - self._own_reads(connection)
            connection._result = result
            self.note(sql if isinstance(sql, str) else sql.decode(errors="replace"), rows)
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mariadb._Connection, "query", counted)
            yield

    _own: int | None = None

    def _own_reads(self, connection: Any) -> int:
        """Return what asking itself adds to the counters."""
        if self._own is None:
            self._own = self._reads(connection)
            self._own = self._reads(connection) - self._own
        return self._own

    @staticmethod
    def _reads(connection: Any) -> int:
        pymysql.Connection.query(connection, "SHOW SESSION STATUS LIKE 'Handler_read%'")
        return sum(int(count) for _, count in connection._result.rows)


# --- SQLite -------------------------------------------------------------------------------------------------------

_STEPS_AT_ONCE = 10


class SqliteMeter(Meter):
    """Counts the instructions that SQLite's virtual machine executes for each statement."""

    @contextmanager
    def listening(self) -> Generator[None]:
        meter, connect = self, sqlite3.connect

        class Counted(sqlite3.Connection):
            statement, steps = "", 0

            def __init__(self, *arguments: Any, **settings: Any) -> None:
                super().__init__(*arguments, **settings)
                self.set_progress_handler(self._count, _STEPS_AT_ONCE)
                self.set_trace_callback(self._begin)

            def _count(self) -> int:
                self.steps += _STEPS_AT_ONCE
                return 0

            def _begin(self, statement: str) -> None:
                """Note the statement before, which has been read to its end, or is not read any further."""
                if self.statement:
                    meter.note(self.statement, self.steps)
                self.statement, self.steps = statement if meter._step else "", 0

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sqlite3, "connect", lambda *given, **more: connect(*given, **more, factory=Counted))
            yield

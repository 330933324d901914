"""Connections with a limit on silence: a connection on which the server says nothing for too long is abandoned.

The driver waits for its socket in short intervals. Our connections count the intervals without input. So each call has
a deadline without a thread or a timer, and a prompt answer costs a tenth of a microsecond.

An abandoned connection is closed, and so are the idle ones beside it, which are most likely silent, too. Its session
may live on at the server, with a statement that waits for a lock or a transaction with row locks. The next connection
ends that session; until then its outcome is unknown.

A connection to a read-only server is abandoned as well, with the idle ones beside it: after a fail-over the next
connection may reach another server. Source: ADR 0049, 0050, 0055.
"""

from __future__ import annotations

import logging
import math
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, cast

import psycopg

from postdate.backends.postgres.names import sql
from postdate.backends.postgres.sessions import mark, mark_condition
from postdate.clock import steady_seconds
from postdate.errors import ConfigurationError
from postdate.runtime import forks

if TYPE_CHECKING:
    from psycopg.abc import PQGen
    from psycopg.waiting import Ready, Wait

ANSWERS_WITHIN: Final = timedelta(seconds=20)
"""After a silence of this length a connection is abandoned. Our statements use indexes and take far less time."""

PATIENTLY_SECONDS: Final = 600.0
"""For statements that read or write whole tables: counts, an operator's searches, pruning."""

_CLOSING_SECONDS: Final = 2.0
"""The limit on an answer, or on a connection attempt, while the adapter closes."""

_TURN_SECONDS: Final = 0.1
_TERMINATE_WITHIN_SECONDS: Final = 1.0  # for waiting until abandoned sessions have ended
_SHORT_SLEEP: Final = "SELECT pg_sleep(0.01)"

_TERMINATE: Final = sql(f"""
    SELECT pid, pg_terminate_backend(pid)
    FROM pg_stat_activity AS a JOIN unnest(%s::integer[], %s::double precision[]) AS g(pid, age) USING (pid)
    WHERE clock_timestamp() - a.backend_start >= g.age * interval '1 second'
        AND {mark_condition("a.application_name", "%s::text")}""")
"""The age excludes a later session with the same number.

The mark excludes sessions of other programs, on another server that has taken over meanwhile.
"""

RV = TypeVar("RV")

log = logging.getLogger("postdate.postgres")


class NoAnswer(psycopg.OperationalError):
    """The server was silent for too long.

    The connection is closed, and the outcome of its last statement is unknown.
    """


_ABANDONING_ERRORS: Final = (NoAnswer, psycopg.errors.ReadOnlySqlTransaction)


class AbandonedSessions:
    """Abandoned connections of one pool, whose sessions may live on at the server. Thread-safe."""

    def __init__(self) -> None:
        self._lock = forks.lock()
        self._sessions: list[tuple[int, float]] = []
        self._distrusted_at = float("-inf")

    def __bool__(self) -> bool:
        """Return whether such sessions may still be alive."""
        return bool(self._sessions)

    def add(self, connection: Bounded, *, silent: bool = True) -> None:
        """Close a connection without a message to the server, and remember its session, which must be ended.

        ``silent``: the server did not answer on this connection; ``False``: it did not answer on another one.
        """
        with self._lock:
            self._sessions.append((connection.pgconn.backend_pid, connection.opened_at))
            if silent:
                self._distrusted_at = steady_seconds()
        connection.pgconn.finish()

    def is_distrusted(self, connection: Bounded) -> bool:
        """Return whether a connection was opened before another one fell silent."""
        return connection.opened_at <= self._distrusted_at

    def terminate(self, connection: psycopg.Connection[Any]) -> None:
        """End the remembered sessions as far as the server permits; sessions that remain are tried again.

        Errors of the driver are raised only when the connection was lost.
        """
        deadline = steady_seconds() + _TERMINATE_WITHIN_SECONDS
        while sessions := list(self._sessions):
            now = steady_seconds()
            pids, ages = [pid for pid, _ in sessions], [now - opened_at for _, opened_at in sessions]
            try:
                live_pids = {pid for pid, _ in connection.execute(_TERMINATE, (pids, ages, *[mark()] * 2)).fetchall()}
            except psycopg.Error as error:
                if connection.closed:
                    raise
                log.warning("sessions %s, which do not answer, cannot be ended: %s", pids, error)
                live_pids = set[int]()
            with self._lock:
                terminated = {each for each in sessions if each[0] not in live_pids}
                self._sessions = [each for each in self._sessions if each not in terminated]
            if now >= deadline:
                return
            if live_pids:
                connection.execute(_SHORT_SLEEP)


class Answers:
    """The deadline for answers of one adapter, on whichever connection it borrows.

    Args:
        within: the longest silence; above 0, else `ConfigurationError`.
        abandoned: gets the connections that were silent for longer.
    """

    def __init__(self, within: timedelta, abandoned: AbandonedSessions) -> None:
        if within <= timedelta(0):
            raise ConfigurationError(f"answers_within must be above 0, not {within}")
        self.within, self.abandoned = within, abandoned
        self.is_closing = False

    def max_silence_seconds(self, *, patient: bool) -> float:
        """Return after how many seconds of silence a call ends now; ``patient``: for statements on whole tables."""
        own_seconds = self.within.total_seconds()
        seconds = max(own_seconds, PATIENTLY_SECONDS) if patient else own_seconds
        return min(seconds, _CLOSING_SECONDS) if self.is_closing else seconds

    @property
    def connect_timeout_seconds(self) -> int | None:
        """The seconds that a connection attempt may take now; ``None``: as the address says."""
        return math.ceil(_CLOSING_SECONDS) if self.is_closing else None

    def shorten_deadlines(self) -> None:
        """Wait only a moment for answers from now on, also in calls that are running."""
        self.is_closing = True


class _DeadlineGenerator(Generic[RV]):
    """A generator of the driver for one call; it raises `NoAnswer` after too many intervals without input."""

    __slots__ = ("_answers", "_call", "_patient", "_silent_since")

    def __init__(self, call: PQGen[RV], answers: Answers, *, patient: bool) -> None:
        self._call, self._answers, self._patient = call, answers, patient
        self._silent_since: float | None = None

    def __next__(self) -> Wait:
        return next(self._call)

    def send(self, value: Ready) -> Wait:
        if value:
            self._silent_since = None
        elif self._silent_since is None:
            self._silent_since = steady_seconds() - _TURN_SECONDS
        elif steady_seconds() - self._silent_since >= (
            limit := self._answers.max_silence_seconds(patient=self._patient)
        ):
            raise NoAnswer(f"did not answer within {limit:g} s")
        return self._call.send(value)


def _limit_silence(call: PQGen[RV], answers: Answers, *, patient: bool) -> PQGen[RV]:
    # The driver needs no more of a generator.
    return cast("PQGen[RV]", _DeadlineGenerator(call, answers, patient=patient))


class BoundedConnection(psycopg.Connection[Any]):
    """A connection that abandons a silent server; see the module."""

    answers: Answers | None = None
    patient = False
    """Whether the running statement may take minutes."""
    brief = False
    """Whether it is acquired for one piece of work; see :class:`postdate.backends.postgres.pool.PostgresPool`."""
    opened_at = 0.0

    def wait(self, gen: PQGen[RV], interval: float = _TURN_SECONDS, timeout: float | None = None) -> RV:
        if timeout is not None:
            return super().wait(gen, interval, timeout)
        if self.answers is None:
            return super().wait(gen, interval)
        try:
            return super().wait(_limit_silence(gen, self.answers, patient=self.patient), _TURN_SECONDS)
        except _ABANDONING_ERRORS:
            self.answers.abandoned.add(self)
            raise


class BoundedAsyncConnection(psycopg.AsyncConnection[Any]):
    """An asynchronous connection that abandons a silent server; see the module."""

    answers: Answers | None = None
    patient = False
    opened_at = 0.0

    async def wait(self, gen: PQGen[RV], interval: float = _TURN_SECONDS, timeout: float | None = None) -> RV:
        if timeout is not None:
            return await super().wait(gen, interval, timeout)
        if self.answers is None:
            return await super().wait(gen, interval)
        try:
            return await super().wait(_limit_silence(gen, self.answers, patient=self.patient), _TURN_SECONDS)
        except _ABANDONING_ERRORS:
            self.answers.abandoned.add(self)
            raise


Bounded = BoundedConnection | BoundedAsyncConnection

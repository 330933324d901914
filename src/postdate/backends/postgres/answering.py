"""Connections that do not wait for ever: a server that says nothing for so long is given up, whatever keeps it silent.

The driver waits for its socket in short turns. A connection of ours counts the turns in which nothing came: so each
call has its deadline without a thread or a timer, and what answers at once pays a tenth of a microsecond. A connection
that is given up is closed, and so are the idle ones beside it, which most likely lead into the same silence. What it
left behind on the server, a statement that waits for a lock or a transaction with its row locks, is ended by the next
connection: before that nobody knows what became of it. One that answers read-only is given up, too, with those beside
it: after a fail-over the next may find another server. Source: ADR 0019, points 3 and 4.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, cast

import psycopg

from postdate.backends.postgres.names import sql
from postdate.backends.postgres.sessions import carries, mark
from postdate.errors import ConfigurationError

if TYPE_CHECKING:
    from psycopg.abc import PQGen
    from psycopg.waiting import Ready, Wait

ANSWERS_WITHIN: Final = timedelta(seconds=20)
"""After so long a silence a connection is given up. Far more than a statement of ours takes, which goes by an index."""

PATIENTLY_SECONDS: Final = 600.0
"""For what reads or writes whole tables: counts, an operator's searches, pruning."""

_LEAVING_SECONDS: Final = 2.0
"""Whoever leaves waits no longer than this for one answer, or for a connection."""

_TURN_SECONDS: Final = 0.1
_ENDS_WITHIN_SECONDS: Final = 1.0
_MOMENT: Final = "SELECT pg_sleep(0.01)"

_END: Final = sql(f"""
    SELECT pid, pg_terminate_backend(pid)
    FROM pg_stat_activity AS a JOIN unnest(%s::integer[], %s::double precision[]) AS g(pid, age) USING (pid)
    WHERE clock_timestamp() - a.backend_start >= g.age * interval '1 second'
        AND {carries("a.application_name", "%s::text")}""")
"""The age keeps it from another session that was given the same number since; the mark, where another server has taken
over meanwhile, from somebody else's there."""

RV = TypeVar("RV")

log = logging.getLogger("postdate.postgres")


class NoAnswer(psycopg.OperationalError):
    """The server has said nothing for too long; the connection is closed, and what it did last is in doubt."""


_LEADS_NOWHERE: Final = (NoAnswer, psycopg.errors.ReadOnlySqlTransaction)


class GivenUp:
    """Connections of one pool that were given up, whose sessions may live on the server. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[tuple[int, float]] = []
        self._distrusted_at = float("-inf")

    def __bool__(self) -> bool:
        """Return whether there may be sessions on the server that nobody listens to."""
        return bool(self._waiting)

    def add(self, connection: Bounded, *, silent: bool = True) -> None:
        """Close a connection without a word; its session is to be ended.

        Args:
            connection: not used by others.
            silent: it has not answered; otherwise it was beside one that has not.
        """
        with self._lock:
            self._waiting.append((connection.pgconn.backend_pid, connection.opened_at))
            if silent:
                self._distrusted_at = time.monotonic()
        connection.pgconn.finish()

    def distrusts(self, connection: Bounded) -> bool:
        """Return whether a connection was open already when another one was given up."""
        return connection.opened_at <= self._distrusted_at

    def end(self, connection: psycopg.Connection[Any]) -> None:
        """End the sessions that were given up, as far as the server lets us; those that live on are tried again.

        Raises:
            psycopg.Error: only that the connection was lost.
        """
        deadline = time.monotonic() + _ENDS_WITHIN_SECONDS
        while waiting := list(self._waiting):
            now = time.monotonic()
            pids, ages = [pid for pid, _ in waiting], [now - opened_at for _, opened_at in waiting]
            try:
                living = {pid for pid, _ in connection.execute(_END, (pids, ages, *[mark()] * 2)).fetchall()}
            except psycopg.Error as error:
                if connection.closed:
                    raise
                log.warning("sessions %s, which do not answer, cannot be ended: %s", pids, error)
                living = set[int]()
            with self._lock:
                gone = {each for each in waiting if each[0] not in living}
                self._waiting = [each for each in self._waiting if each not in gone]
            if now >= deadline:
                return
            if living:
                connection.execute(_MOMENT)


class Answers:
    """How long what one adapter does waits for answers, whichever connection it is lent.

    Args:
        within: the longest silence; above 0.
        given_up: takes the connections that did not answer.

    Raises:
        ConfigurationError: ``within`` is not above 0.
    """

    def __init__(self, within: timedelta, given_up: GivenUp) -> None:
        if within <= timedelta(0):
            raise ConfigurationError(f"answers_within must be above 0, not {within}")
        self.within, self.given_up = within, given_up
        self._leaving = False

    @property
    def leaving(self) -> bool:
        """Whether what comes now is the end."""
        return self._leaving

    def silence(self, *, patient: bool) -> float:
        """Return how many seconds of silence end a call now."""
        own = self.within.total_seconds()
        seconds = max(own, PATIENTLY_SECONDS) if patient else own
        return min(seconds, _LEAVING_SECONDS) if self._leaving else seconds

    @property
    def connects_within(self) -> int | None:
        """How many seconds a connection may take now, for the driver; ``None``: as the address says."""
        return math.ceil(_LEAVING_SECONDS) if self._leaving else None

    def hurry(self) -> None:
        """Wait for no answer any more for longer than a moment, calls that are under way included."""
        self._leaving = True


class _Watched(Generic[RV]):
    """What the driver does for one call, with its turns counted in which nothing came."""

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
            self._silent_since = time.monotonic() - _TURN_SECONDS
        elif time.monotonic() - self._silent_since >= (limit := self._answers.silence(patient=self._patient)):
            raise NoAnswer(f"did not answer within {limit:g} s")
        return self._call.send(value)


def _watched(call: PQGen[RV], answers: Answers, *, patient: bool) -> PQGen[RV]:
    return cast("PQGen[RV]", _Watched(call, answers, patient=patient))  # all that the driver asks of a generator


class BoundedConnection(psycopg.Connection[Any]):
    """A connection whose calls end; see the module."""

    answers: Answers | None = None
    patient = False
    """Whether what is done now may take its time."""
    brief = False
    """Whether it is lent for one piece of work; see :class:`postdate.backends.postgres.pool.PostgresPool`."""
    opened_at = 0.0

    def wait(self, gen: PQGen[RV], interval: float = _TURN_SECONDS, timeout: float | None = None) -> RV:
        """Do what the driver has to do for a call, unless the server stays silent."""
        if timeout is not None:
            return super().wait(gen, interval, timeout)
        if self.answers is None:
            return super().wait(gen, interval)
        try:
            return super().wait(_watched(gen, self.answers, patient=self.patient), _TURN_SECONDS)
        except _LEADS_NOWHERE:
            self.answers.given_up.add(self)
            raise


class BoundedAsyncConnection(psycopg.AsyncConnection[Any]):
    """The same for a connection that is used in an event loop."""

    answers: Answers | None = None
    patient = False
    opened_at = 0.0

    async def wait(self, gen: PQGen[RV], interval: float = _TURN_SECONDS, timeout: float | None = None) -> RV:
        """Do what the driver has to do for a call, unless the server stays silent."""
        if timeout is not None:
            return await super().wait(gen, interval, timeout)
        if self.answers is None:
            return await super().wait(gen, interval)
        try:
            return await super().wait(_watched(gen, self.answers, patient=self.patient), _TURN_SECONDS)
        except _LEADS_NOWHERE:
            self.answers.given_up.add(self)
            raise


Bounded = BoundedConnection | BoundedAsyncConnection

"""Things outside of the process that can be out of reach, and one line in the log for each outage. Source: ADR 45.

A store, the server of the queues, the error queue are *resources*. Many loops call the same one: the poller, the pumps,
the thread that listens, housekeeping. When the resource goes away, each of them fails. They share one
:class:`Resource`, so an operator reads about the outage once, and ``/readyz``, ``doctor`` and metrics have one state to
show.

Adapters with an equal identity, such as a store and the queues in one database, are one resource. Time is an argument,
in monotonic seconds.

A loop reports the result of each of its calls to its :class:`CallHealth` only. That informs the resource, which
has the state and the log; the circuit breaker of the loop, if it has one; and :class:`Backoff`, if the loop sends
probes.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Collection
from datetime import timedelta
from typing import Final, Protocol
from weakref import WeakKeyDictionary, WeakValueDictionary

from postdate.errors import PostdateError
from postdate.runtime.reporting import duration_text

LOGGED_AGAIN_AFTER_SECONDS: Final = 60.0

_SAME_OUTAGE_WITHIN_SECONDS: Final = 5.0
"""A failure so soon after the end of an outage continues it: a server may answer one call, and refuse another."""

FORGOTTEN_AFTER: Final = timedelta(seconds=150)
"""A failure is ignored after this time if no call of its kind was made since. It is longer than the longest pause of a
loop and the longest deadline of a call together."""


PAUSE: Final = timedelta(seconds=1)
"""The pause of a loop after a failed call, unless a circuit breaker returns another one."""


class Breaker(Protocol):
    """The interface of a circuit breaker for the results of calls; see :mod:`postdate.core.health.circuit_breaker`."""

    def report_failure(self, error: BaseException, seconds: float) -> timedelta:
        """Record a failure; return how long to pause before the next attempt."""
        ...

    def report_success(self) -> None: ...


class Backoff:
    """The time of the next attempt on something that is out of reach. Each failure doubles the pause.

    Args:
        shortest: first pause, in seconds.
        longest: longest pause, in seconds. A recovery is noticed after at most this time.
    """

    def __init__(self, shortest: float, longest: float) -> None:
        self.shortest = shortest
        self.longest = longest
        self.pause = 0.0
        """Seconds between the last attempt and the next; 0 while nothing has failed."""
        self.retry_at = -math.inf
        """When the next attempt may be made."""

    @property
    def is_waiting(self) -> bool:
        """Whether the last attempt failed."""
        return self.pause > 0

    def report_failure(self, seconds: float, *, is_longer: bool = True) -> None:
        """Start the next pause, longer than the last. Failures during a pause belong to the attempt before it."""
        if not self.pause:
            self.pause = self.shortest
        elif seconds < self.retry_at:
            return
        elif is_longer:
            self.pause = min(self.pause * 2, self.longest)
        self.retry_at = seconds + self.pause

    def report_success(self) -> None:
        self.pause, self.retry_at = 0.0, -math.inf

    def remaining(self, seconds: float) -> float:
        """Return how many seconds to wait before the next attempt; 0: no wait."""
        return max(self.retry_at - seconds, 0.0)


class Resource:
    """One thing that several loops of a process need. Safe to use from any thread.

    The resource is out of reach from the first failed call until each kind of call that failed has succeeded once.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        """The first words of the line about the end of an outage."""
        self._lock = threading.Lock()
        """Protects everything below. It is never held during logging."""
        self._failing: dict[CallHealth, float] = {}
        """Kinds of calls whose last call failed, with the time of that failure, in monotonic seconds."""
        self._outage_started_at = 0.0
        """When the outage began, in monotonic seconds."""
        self._resumed_at = 0.0
        """When the outage continued, if it had ended for a moment; otherwise when it began."""
        self._ended_at = -math.inf
        self._failures = 0
        self._logged_at = -math.inf
        self._is_logged = False
        """Whether the outage was logged. If so, its end must be logged, too."""
        self._answered_at: float | None = None
        """When the first call succeeded after the last failure. If nothing fails any more, the outage ended then."""
        self.outage_count = 0
        """The number of outages; it grows when one begins."""
        self._codes: set[str] = set()
        """Codes of the errors that were logged in this outage."""
        self._last_error: BaseException | None = None

    def calls(  # noqa: PLR0913 - as of Calls
        self,
        failure_text: str,
        log: logging.Logger,
        level: int = logging.ERROR,
        *,
        is_rare: bool = False,
        breaker: Breaker | None = None,
        backoff: Backoff | None = None,
        forgotten_after: timedelta = FORGOTTEN_AFTER,
    ) -> CallHealth:
        """Return the health of the calls that one loop makes; see :class:`CallHealth`."""
        return CallHealth(
            self,
            failure_text,
            log,
            level,
            is_rare=is_rare,
            breaker=breaker,
            backoff=backoff,
            forgotten_after=forgotten_after,
        )

    def outage_text(self, seconds: float) -> str | None:
        """Return a description of the outage, as ``out of reach for 3 min: …``; ``None`` while the resource answers."""
        with self._lock:
            if all(calls.is_forgotten(failed_at, seconds) for calls, failed_at in self._failing.items()):
                return None
            return f"out of reach for {duration_text(seconds - self._outage_started_at)}: {self._last_error}"

    def report_failure(self, calls: CallHealth, error: BaseException, seconds: float) -> str | None:
        """Record a failure; return the line to be logged, or ``None``."""
        code = error.code if isinstance(error, PostdateError) else type(error).__name__
        is_passing = isinstance(error, PostdateError) and (error.outage or error.transient)
        with self._lock:
            self._forget_old(seconds)
            if not self._failing:
                self._resumed_at = seconds
                if seconds - self._ended_at >= _SAME_OUTAGE_WITHIN_SECONDS:
                    self._outage_started_at, self._failures = seconds, 0
                    self._codes.clear()
                    self.outage_count += 1
            self._failing[calls], self._last_error, self._answered_at = seconds, error, None
            self._failures += 1
            is_new = not self._codes or (code not in self._codes and not is_passing)
            is_lasting = not self._is_logged and seconds - self._resumed_at >= _SAME_OUTAGE_WITHIN_SECONDS
            if is_new:
                self._codes.add(code)
                line = f"{calls.failure_text}: {error}"
            elif is_lasting or seconds - self._logged_at >= LOGGED_AGAIN_AFTER_SECONDS:
                failure_texts = "; ".join(dict.fromkeys(each.failure_text for each in self._failing))
                duration = duration_text(seconds - self._outage_started_at)
                line = f"{failure_texts}, for {duration} now ({self._failures} failures): {error}"
            else:
                return None
            self._logged_at, self._is_logged = seconds, True
            return line

    def report_success(self, calls: CallHealth, seconds: float) -> str | None:
        """Record the success of a kind of call that had failed; return the line to be logged if the outage ends."""
        with self._lock:
            if self._failing.pop(calls, None) is None and (self._failing or not self._is_logged):
                return None  # the outage ended without this kind of call
            if self._answered_at is None:
                self._answered_at = seconds
            self._forget_old(seconds)
            if any(not each.is_rare for each in self._failing):
                return None
            self._failing.clear()
            self._ended_at = seconds
            if not self._is_logged:
                return None
            self._is_logged = False
            count = f"{self._failures} failures" if self._failures > 1 else "1 failure"
            duration = duration_text(self._answered_at - self._outage_started_at)
            return f"{self.name} is reachable again after {duration} ({count})"

    def _forget_old(self, seconds: float) -> None:
        for calls, failed_at in list(self._failing.items()):
            if calls.is_forgotten(failed_at, seconds):
                del self._failing[calls]


class CallHealth:
    """The health of one kind of call to a resource, made by one loop.

    Args:
        resource: the resource that is called.
        failure_text: what a failed call could not do, for the log: ``cannot claim due messages``.
        log: logger of the loop.
        level: level of the lines about an outage that begins with one of these calls.
        is_rare: the calls are so rare that an outage ends without waiting for the next of them.
        breaker: trips when these calls fail for too long.
        backoff: of the probes, for a loop that sends probes while the resource is out of reach.
        forgotten_after: a failure is ignored if no call was made for so long since.
    """

    def __init__(  # noqa: PLR0913 - what one loop does about failures
        self,
        resource: Resource,
        failure_text: str,
        log: logging.Logger,
        level: int,
        *,
        is_rare: bool,
        breaker: Breaker | None = None,
        backoff: Backoff | None = None,
        forgotten_after: timedelta = FORGOTTEN_AFTER,
    ) -> None:
        self.resource = resource
        self.failure_text = failure_text
        self.is_rare = is_rare
        self.is_failing = False
        """Whether the last call failed. Written by the loop that makes the calls."""
        self._log = log
        self._level = level
        self._breaker = breaker
        self._backoff = backoff
        self._forgotten_after = forgotten_after.total_seconds()

    def is_forgotten(self, failed_at: float, seconds: float) -> bool:
        """Return whether a failure at that time is too old to count."""
        return seconds - failed_at >= self._forgotten_after

    def report_failure(self, error: BaseException, seconds: float) -> timedelta:
        """Record that a call failed because of the resource; return how long to pause before the next call."""
        self.is_failing = True
        if self._backoff is not None:
            self._backoff.report_failure(seconds)
        line = self.resource.report_failure(self, error, seconds)
        if line is not None:
            self._log.log(self._level, "%s", line)
        return self.report_refusal(error, seconds)

    def report_refusal(self, error: BaseException, seconds: float) -> timedelta:
        """Record a failure that one message may have caused; only the breaker counts it. Return how long to pause."""
        return PAUSE if self._breaker is None else self._breaker.report_failure(error, seconds)

    def report_recovery(self) -> None:
        """Record that calls of another loop succeed again, so the breaker starts to count with the next failure."""
        if self._breaker is not None:
            self._breaker.report_success()

    def report_success(self, seconds: float) -> bool:
        """Record that a call succeeded; return whether the call before it had failed."""
        self.report_recovery()
        if not self.is_failing:
            return False
        self.is_failing = False
        if self._backoff is not None:
            self._backoff.report_success()
        line = self.resource.report_success(self, seconds)
        if line is not None:
            self._log.info("%s", line)
        return True


_by_identity = WeakValueDictionary[object, Resource]()
_by_adapter = WeakKeyDictionary[object, Resource]()
_lock = threading.Lock()


def resource_at(identity: object, name: str) -> Resource:
    """Return the resource with an identity; all callers in this process get the same object."""
    with _lock:
        resource = _by_identity.get(identity)
        if resource is None:
            resource = _by_identity[identity] = Resource(name)
        return resource


def resource_of(adapter: object) -> Resource:
    """Return the resource that an adapter needs: its ``resource``, that of its database, or one of its own."""
    name, resource = type(adapter).__name__, getattr(adapter, "resource", None)
    if isinstance(resource, Resource):
        return resource
    identity = getattr(getattr(adapter, "capabilities", None), "database", None)
    if identity is not None:
        return resource_at(identity, name)
    try:
        with _lock:
            return _by_adapter.setdefault(adapter, Resource(name))
    except TypeError:  # the adapter cannot be a key of a weak dictionary
        return Resource(name)


def outage_texts(seconds: float, resources: Collection[Resource] | None = None) -> list[str]:
    """Return descriptions of the resources that are out of reach, in the order of names.

    ``resources``: where to look; ``None``: all resources of the adapters of this process.
    """
    if resources is None:
        with _lock:
            resources = {*_by_identity.values(), *_by_adapter.values()}
    # Adapters without an identity have the name of their class, so several resources may have one name.
    texts = [(each.name, text) for each in resources if (text := each.outage_text(seconds)) is not None]
    return [f"{name} is {text}" for name, text in sorted(texts)]

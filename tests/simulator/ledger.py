"""Accounts for every message, and says at once when a promise is broken.

A message is known by its origin: the id it was sent with, which a delayed retry of it keeps in its headers. It is in
places: a row of the store, a parcel in a queue, an unreadable row, handled, at its destination. What has been in one
place is never in none.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from postdate.messages import DelayedMessage, Envelope, Headers

REMEMBERED: Final = 400
"""Events that are shown with a violation."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A promise is broken.

    Args:
        promise: which.
        text: what happened.
    """

    promise: str
    text: str


@dataclass(frozen=True, slots=True)
class Promises:
    """What is promised in this run.

    Args:
        standstill: seconds after the last trouble, or the due time if that is later, within which a message arrives.
        in_queues: the same for what is in a queue.
        early: how much too early a message may arrive, for clocks that are wrong where the store has none.
        same_database: store and queues are one database: nothing is doubled, whatever happens.
        calls: of ports by one process in :data:`BUSY_SECONDS` at most.
        stopping: seconds within which a process ends that was told to stop.
    """

    standstill: float
    in_queues: float
    early: timedelta
    same_database: bool
    calls: int
    stopping: float


BUSY_SECONDS: Final = 10
LONGEST_RETRY_SECONDS: Final = 75.0
"""So long a message may wait that failed by itself."""


@dataclass(slots=True)
class WallTimeInstants:
    """When a message with a wall time may be due: by any version of the rules from ``oldest`` on.

    Args:
        by_version: of the rules, the instant.
        oldest: number of the first version by which it may still be due.
        since: seconds of the run from which on ``oldest`` holds.
        changed_at: seconds of the run at which it was stored, or an operator gave it the wall time; ``None``: neither
            has happened yet.
    """

    by_version: Sequence[datetime]
    oldest: int
    since: float
    changed_at: float | None = None


def origin_of(message_id: str, headers: Mapping[str, str]) -> str:
    """Return the id that a message was sent with."""
    return headers.get(Headers.MESSAGE_ID, message_id)


class Ledger:
    """Accounts for the messages of one run.

    Args:
        bounds: what is promised.
        remembered: how many events are kept; ``None``: all.
    """

    def __init__(self, bounds: Promises, remembered: int | None = REMEMBERED) -> None:
        self.bounds = bounds
        self.events: deque[str] = deque(maxlen=remembered)
        self.violation: Violation | None = None
        """The first."""
        self.error: Exception | None = None
        """Of the simulator itself."""
        self.on_violation: Callable[[], None] = lambda: None
        self.seconds: Callable[[], float] = lambda: 0.0
        """Tells the seconds of the run."""
        self.trouble_until = 0.0
        self.places: Counter[str] = Counter()
        self.dues: dict[str, datetime] = {}
        self.first_dues: dict[str, datetime] = {}
        self.senders: dict[str, str] = {}
        """Which message's handler sent a message: handled twice, it sends twice."""
        self.seen: dict[str, float] = {}
        """When a message was first anywhere."""
        self.arrived: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.in_error_queue: Counter[str] = Counter()
        self.rounds: Counter[str] = Counter()
        """Delayed retries, and returns from the error queue: each lets a message arrive once more."""
        self.doubts: Counter[str] = Counter()
        """Calls about a message whose answer nobody got, and holds on it that were lost: each may double it once."""
        self.blamed: Counter[str] = Counter()
        """Failures that are about this message."""
        self.retried: Counter[str] = Counter()
        self.cancelled: dict[str, float] = {}
        self.answered: dict[tuple[str, str], str] = {}
        """By message and life of a process: where its send was answered well."""
        self.wall_times: dict[str, WallTimeInstants] = {}
        """Of the messages that follow the clocks of a zone."""
        self.moved_by_hand: dict[str, Sequence[datetime]] = {}
        """Messages that an operator rescheduled to an instant, and when they would be due by their wall times."""
        self.newest_rules = 0
        """Number of the newest version of the rules that a process has."""
        self.rules_in_force = 0
        """Number of the version by which all that a process met at its start is due."""
        self._calls: dict[str, deque[float]] = {}
        self.calls = 0

    @property
    def now(self) -> float:
        """Seconds of the run."""
        return self.seconds()

    # --- what happens ---------------------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        """Keep an event for the trace."""
        self.events.append(f"{self.now:11.4f}  {text}")

    def trouble(self, until: float) -> None:
        """Note a fault: what stands still because of it may do so until then, in seconds of the run."""
        self.trouble_until = max(self.trouble_until, until)

    def called(self, process: str, what: str) -> None:
        """Note a call of a port."""
        self.calls += 1
        recent = self._calls.setdefault(process, deque())
        recent.append(self.now)
        while recent[0] < self.now - BUSY_SECONDS:
            recent.popleft()
        if len(recent) > self.bounds.calls:
            self.fail("no busy loop", f"{process} made {len(recent)} calls in {BUSY_SECONDS} s, the last was {what}")

    def placed(self, origin: str, where: str, change: int) -> None:
        """Note that a message is in a place, or is there no more; after the commit, additions first."""
        self.places[origin] += change
        if change > 0:
            self.seen.setdefault(origin, self.now)
        self.note(f"{origin} {'in' if change > 0 else 'out of'} {where}")
        if self.places[origin] <= 0:
            self.fail("nothing is lost", f"{origin} left {where} and is nowhere now")

    def arrives(self, envelope: Envelope) -> None:
        """Note that a message came to the queue that it was meant for."""
        origin = origin_of(envelope.message_id, envelope.headers)
        self.arrived[origin] += 1
        self.note(f"{origin} arrives in {envelope.destination}")
        if origin in self.cancelled and (self.bounds.same_database or not self.doubts[origin]):
            self.fail("what was cancelled does not arrive", f"{origin} arrives in {envelope.destination}")

    def check_time(self, origin: str, now: datetime) -> None:
        """Fail when a message arrives before its time."""
        due = self.first_due(origin)
        if self.doubts[origin] and not self.bounds.same_database:
            due = self.first_dues.get(origin, due)  # a copy of before it was rescheduled may go, too
        if due is not None and not self.rounds[origin] and now < due - self.bounds.early:
            self.fail("nothing is early", f"{origin} arrives {due - now} before it is due")

    def check_count(self, origin: str) -> None:
        """Fail when a message is more often somewhere than it may be."""
        often = self.arrived[origin] + self.errors[origin]
        allowed = 1 + self.rounds[origin]
        if not self.bounds.same_database:
            sender = self.senders.get(origin)
            allowed += self.doubts[origin] + (0 if sender is None else self.doubts[sender])
        if often > allowed:
            where = f"arrived {self.arrived[origin]} times and {self.errors[origin]} times as an error"
            self.fail("nothing is doubled", f"{origin} {where}, with {self.doubts[origin]} faults in doubt")

    def is_sent(self, origin: str, due: datetime) -> None:
        """Note that somebody is about to send a message, perhaps again, by a clock that was set since."""
        self.is_due(origin, min(due, self.dues.get(origin, due)))

    def is_due(self, origin: str, due: datetime) -> None:
        """Note when a message is due, from now on."""
        self.dues[origin] = due
        self.first_dues[origin] = min(due, self.first_dues.get(origin, due))

    # --- wall times -----------------------------------------------------------------------------------------------

    def follows_clocks(self, origin: str, instants: Sequence[datetime], version: int, *, is_there: bool) -> None:
        """Note that a message is due at a wall time, from now on.

        Args:
            origin: of the message.
            instants: when that is by each version of the rules.
            version: of the rules of the process that says so.
            is_there: it is in the store.
        """
        oldest, changed_at = min(version, self.rules_in_force), self.now if is_there else None
        self.wall_times[origin] = WallTimeInstants(instants, oldest, self.now, changed_at)
        self.moved_by_hand.pop(origin, None)
        self.first_dues[origin] = min(*instants, self.first_dues.get(origin, instants[0]))

    def is_stored_by_clocks(self, origin: str, version: int) -> None:
        """Note that a process whose rules are of a version has stored a message with a wall time."""
        wall_time = self.wall_times.get(origin)
        if wall_time is not None:
            wall_time.oldest, wall_time.changed_at = min(version, self.rules_in_force), self.now

    def is_rescheduled(self, origin: str, due: datetime) -> None:
        """Note that an operator gave a message another due time: it follows no clocks any more."""
        self.is_due(origin, due)
        wall_time = self.wall_times.pop(origin, None)
        if wall_time is not None:
            self.moved_by_hand[origin] = wall_time.by_version

    def rules_hold(self, version: int, begin: float, now: datetime) -> None:
        """Note that all that was stored before ``begin`` is due by a version of the rules, or by a newer one.

        What may be due by rules of before may be on its way already.
        """
        self.note(f"version {version} of the zone's rules is in force")
        self.rules_in_force = max(self.rules_in_force, version)
        for wall_time in self.wall_times.values():
            is_there = wall_time.changed_at is not None and wall_time.changed_at < begin
            if is_there and wall_time.oldest < version and min(self._possible(wall_time)) > now:
                wall_time.oldest, wall_time.since = version, self.now

    def _possible(self, wall_time: WallTimeInstants) -> Sequence[datetime]:
        return wall_time.by_version[wall_time.oldest : self.newest_rules + 1]

    def first_due(self, origin: str) -> datetime | None:
        """Return the first instant at which a message may be due."""
        wall_time = self.wall_times.get(origin)
        return self.dues.get(origin) if wall_time is None else min(self._possible(wall_time))

    def last_due(self, origin: str) -> tuple[datetime, float] | None:
        """Return the last instant at which a message with a wall time may be due, and since when that holds."""
        wall_time = self.wall_times.get(origin)
        return None if wall_time is None else (max(self._possible(wall_time)), wall_time.since)

    # --- what happens to messages ---------------------------------------------------------------------------------

    def becomes_error(self, origin: str, why: str, *, instead: bool) -> None:
        """Note an error copy; ``instead`` of an arrival, or of a message that had arrived."""
        self.errors[origin] += instead
        self.note(f"{origin} goes to the error queue: {why}")
        if not self.blamed[origin]:
            self.fail("nobody is given up for an outage", f"{origin} is in the error queue: {why}")

    def is_retried(self, origin: str, why: str) -> None:
        """Note a record that an attempt failed."""
        self.retried[origin] += 1
        if self.retried[origin] > self.blamed[origin]:
            self.fail("an outage is not recorded against a message", f"{origin} has a record 'retried': {why}")

    def sends(self, life: str, origin: str) -> None:
        """Note that a life of a process sends a due message."""
        if self.answered.get((origin, life)) is not None and not self.rounds[origin]:
            self.fail("what was sent is only removed", f"{life} sends {origin} again, which it knows is sent")

    def knows_sent(self, life: str, origin: str) -> None:
        """Note that a life of a process was told that a message is sent."""
        self.answered[origin, life] = life

    def doubt(self, origins: Iterable[str], why: str) -> None:
        """Note that nobody knows what became of a call about these."""
        for origin in origins:
            self.doubts[origin] += 1
            self.note(f"{origin} is in doubt: {why}")

    def blame(self, origins: Iterable[str], why: str) -> None:
        """Note that an answer was about these."""
        for origin in origins:
            self.blamed[origin] += 1
            self.note(f"{origin} is to blame: {why}")

    # --- what is asked from time to time --------------------------------------------------------------------------

    def check_progress(self, waiting: Iterable[tuple[str, float, str]]) -> None:
        """Fail when something that could go on does not.

        Args:
            waiting: messages that are due or have arrived, since when, in seconds of the run, and where they are.
        """
        for origin, since, where in waiting:
            late = self.now - max(since, self.trouble_until)
            allowed = self.bounds.in_queues if where.startswith("queue") else self.bounds.standstill
            if self.blamed[origin]:
                allowed += LONGEST_RETRY_SECONDS
            if late > allowed:
                self.fail("no standstill", f"{origin} is in {where} for {late:.1f} s although nothing fails")

    def breaks_down(self, error: Exception) -> None:
        """Note an error of the simulator itself and end the run."""
        self.error = error
        self.on_violation()

    def fail(self, promise: str, text: str) -> None:
        """Keep the first violation and end the run."""
        self.note(f"VIOLATION {promise}: {text}")
        if self.violation is None:
            self.violation = Violation(promise, text)
            self.on_violation()


def origin_of_row(message: DelayedMessage) -> str:
    """Return the id that a stored message was sent with."""
    return origin_of(message.message_id, message.headers)

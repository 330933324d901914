"""Who was promised what, and what came: the accounts of one case. Nothing here knows how Postdate works."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

_LATE = timedelta(seconds=2)
NEVER = datetime(9999, 12, 31, 23, 59, 59, 999_999, UTC)
"""What others write for it; nothing that is due then arrives."""


@dataclass(frozen=True)
class Arrival:
    """A message that a driver found in a queue.

    Args:
        queue: where it was.
        message_id: of the message.
        at: when it came there, by the clock of the server or of the test, UTC; never before it came.
    """

    queue: str
    message_id: str
    at: datetime


@dataclass(frozen=True)
class Promise:
    """What a case must keep; lost and early are always none.

    Args:
        doubled: so many copies at most come beside the messages themselves, always under their own ids.
        error_queue: so many messages at most are in the error queue: those that are to blame themselves.
        recovers_within: of the last message that was due, after the end of the fault; a bound for a machine under load.
        while_it_lasts: recovery counts from the beginning of the fault, which harms only a part or never ends.
        unread: messages that cannot be read, and are neither delivered nor lost: they stay where they are, marked.
    """

    doubled: int = 0
    error_queue: int = 0
    recovers_within: timedelta = timedelta(seconds=30)
    while_it_lasts: bool = False
    unread: int = 0


@dataclass(frozen=True)
class Figures:
    """What one run of a case came to.

    A recovery of None: not within the time that was waited; late is what came two seconds or more after its time.
    """

    messages: int
    lost: int
    doubled: int
    copies: int
    early: int
    error_queue: int
    recovery_seconds: float | None
    earliest_seconds: float
    stopped_seconds: float | None
    late: int = 0
    cpu_seconds: float = 0.0
    retried: int | None = None
    log_lines: int = 0
    tracebacks: int = 0


@dataclass
class Ledger:
    """The accounts of one case.

    Args:
        queue: where the messages go.
        error_queue: where failed ones go.
    """

    queue: str
    error_queue: str
    due: dict[str, datetime] = field(default_factory=dict)
    acknowledged: set[str] = field(default_factory=set)
    unread: set[str] = field(default_factory=set)
    arrivals: list[Arrival] = field(default_factory=list)

    def promised(self) -> set[str]:
        """Return the ids of what must arrive: what was acknowledged, can be read, and will ever be due."""
        return self.acknowledged - self.unread - {message_id for message_id, due in self.due.items() if due >= NEVER}

    def kept(self) -> int:
        """Return how many messages a store may keep at the end: those that cannot be read, or are never due."""
        return len(self.unread) + sum(due >= NEVER for due in self.due.values())

    def arrived(self) -> dict[str, list[datetime]]:
        """Return when each message came to its queue, every time, earliest first."""
        found: dict[str, list[datetime]] = defaultdict(list)
        for arrival in self.arrivals:
            if arrival.queue == self.queue:
                found[arrival.message_id].append(arrival.at)
        return {message_id: sorted(times) for message_id, times in found.items()}

    def failed(self) -> list[str]:
        """Return the ids of what is in the error queue, as often as it is there."""
        return [arrival.message_id for arrival in self.arrivals if arrival.queue == self.error_queue]

    def missing(self) -> set[str]:
        """Return what has neither come yet nor failed."""
        return self.promised() - {arrival.message_id for arrival in self.arrivals}

    def strangers(self) -> set[str]:
        """Return ids that came and that nobody sent."""
        return {arrival.message_id for arrival in self.arrivals} - set(self.due)

    def judge(self, since: datetime) -> Figures:
        """Add up; ``since`` is when the last message that was due should have begun to come."""
        arrived = self.arrived()
        lost = self.missing()
        for message_id in self.unread:  # should it come all the same, its row says when
            arrived.pop(message_id, None)
        early = [message_id for message_id, times in arrived.items() if times[0] <= self.due[message_id]]
        lateness = [times[0] - max(self.due[message_id], since) for message_id, times in arrived.items()]
        ahead = [self.due[message_id] - times[0] for message_id, times in arrived.items()]
        copies = sum(len(times) - 1 for times in arrived.values())
        return Figures(
            messages=len(self.promised()),
            lost=len(lost),
            doubled=sum(len(times) > 1 for times in arrived.values()),
            copies=copies,
            early=len(early),
            error_queue=len(self.failed()),
            recovery_seconds=None if lost else round(_seconds(max(lateness, default=timedelta(0))), 3),
            earliest_seconds=round(_seconds(max(ahead, default=timedelta(0))), 3),
            stopped_seconds=None,
            late=sum(each > _LATE for each in lateness),
        )


def _seconds(duration: timedelta) -> float:
    return max(duration / timedelta(seconds=1), 0.0)


def broken(figures: Figures, promise: Promise, strangers: Sequence[str] = ()) -> list[str]:
    """Return the promises that were not kept, in words; empty: all were."""
    said: list[str] = []
    if figures.lost:
        said.append(f"{figures.lost} of {figures.messages} messages did not come in the time that was waited")
    if figures.early:
        said.append(f"{figures.early} came early, one by {figures.earliest_seconds:g} s")
    if figures.copies > promise.doubled:
        said.append(
            f"{figures.doubled} came more than once, {figures.copies} copies in all; allowed: {promise.doubled}"
        )
    if figures.error_queue > promise.error_queue:
        said.append(f"{figures.error_queue} are in the error queue; to blame: {promise.error_queue}")
    if figures.recovery_seconds is not None and figures.recovery_seconds > promise.recovers_within.total_seconds():
        said.append(f"recovered after {figures.recovery_seconds:g} s, not within {promise.recovers_within}")
    if figures.stopped_seconds is None:
        said.append("a service had ended by itself, or did not stop when it was told to")
    if strangers:
        said.append(f"came, and was never sent: {', '.join(sorted(strangers)[:5])}")
    return said

"""State of queues that accept no messages. Pure: time is an argument, in monotonic seconds. Source: ADR 51.

A queue accepts no messages if it is full, or out of reach, or if it is awaited because it does not exist yet. It delays
only its own messages. From time to time one of them is sent as a probe. The
other messages wait for the answer, and are claimed as rarely as possible, as their claims could only be released.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from postdate.runtime.bounded import Bounded
from postdate.runtime.resource import Backoff

SHORTEST_SECONDS: Final = 0.25
LONGEST_SECONDS: Final = 1.5
"""The longest time between two probes of a transport or destination. So its recovery is noticed within this time."""

FOLLOW_SECONDS: Final = 0.25
"""Messages that wait for the answer to a probe are attempted this long after it. Only the probe is sent meanwhile."""

ANOTHER_SECONDS: Final = 0.1
"""A message that failed as a probe is attempted this long after the next probe, so that another message is the probe.
"""

MESSAGES_PER_PROBE: Final = 1_000
"""The number of messages of a full destination that are claimed and released between two probes.

Further messages wait for later attempt times, at most :data:`LATEST_ATTEMPT_SECONDS` away.
"""

LATEST_ATTEMPT_SECONDS: Final = 10.0

_NEARLY_SECONDS: Final = 0.1
_MOST_DESTINATIONS: Final = 10_000


class Destination(Backoff):
    """A queue that accepts no messages, with the times of its next probe and of the next attempts of its messages."""

    def __init__(self) -> None:
        super().__init__(SHORTEST_SECONDS, LONGEST_SECONDS)
        self.missing_since: float | None = None
        """Monotonic seconds at which the queue did not exist first; ``None``: it accepts none for another reason."""
        self.fails_at_once = False
        """Whether its messages wait no longer, and each of them fails."""
        self._probed_at = -FOLLOW_SECONDS
        self._attempt_at = 0.0
        """Monotonic seconds at which the messages that were released last may be attempted."""
        self._waiting = 0
        """The number of messages that were released until :attr:`_attempt_at`."""

    def wait_seconds(self, seconds: float) -> float:
        """Return the seconds that a message just claimed must wait; 0: it is sent, as a probe."""
        if self.fails_at_once:
            return 0.0
        if self.retry_at - seconds <= _NEARLY_SECONDS:
            self.report_failure(max(self.retry_at, seconds))
            self._probed_at = seconds
            return 0.0
        follow_wait = self._probed_at + FOLLOW_SECONDS - seconds
        return follow_wait if follow_wait > 0 else self.retry_wait_seconds(seconds)

    def retry_wait_seconds(self, seconds: float) -> float:
        """Return in how many seconds one more message may be attempted."""
        if self._attempt_at < self.retry_at:
            self._attempt_at, self._waiting = self.retry_at, 0
        elif (
            self._waiting >= MESSAGES_PER_PROBE
            and self._attempt_at + LONGEST_SECONDS <= seconds + LATEST_ATTEMPT_SECONDS
        ):
            self._attempt_at, self._waiting = self._attempt_at + LONGEST_SECONDS, 0
        self._waiting += 1
        return self._attempt_at - seconds + (FOLLOW_SECONDS if self._waiting > 1 else 0.0)


class Destinations:
    """The queues that accept no messages from this dispatcher."""

    def __init__(self) -> None:
        self._full = Bounded[str, Destination](_MOST_DESTINATIONS)
        self._recovered = Bounded[str, Destination](_MOST_DESTINATIONS)
        """Queues that accept messages again, with the backoff they had. It continues if they fail again soon."""

    def __bool__(self) -> bool:
        """Return whether any queue accepts no messages."""
        return bool(self._full)

    def wait_seconds(self, destination: str, seconds: float) -> float:
        """Return the seconds that a message just claimed must wait; 0: it is sent, perhaps as a probe."""
        full = self._full.get(destination)
        return 0.0 if full is None else full.wait_seconds(seconds)

    def report_refusal(self, destination: str, seconds: float, *, is_missing: bool = False) -> bool:
        """Report that a queue accepts no messages; return ``False`` if it did so before, or recovered only just now.

        ``is_missing``: because it does not exist.
        """
        full = self._full.get(destination)
        if full is not None:
            full.report_failure(seconds)
            if is_missing and full.missing_since is None:
                full.missing_since = seconds
            return False
        recovered = self._recovered.pop(destination, None)
        is_new = recovered is None or seconds - recovered.retry_at > LATEST_ATTEMPT_SECONDS
        full = Destination() if recovered is None or is_new else recovered
        full.report_failure(seconds, is_longer=False)
        full.missing_since = seconds if is_missing else None
        self._full[destination] = full
        return is_new

    def should_wait_for(self, destination: str, seconds: float, wait: timedelta) -> bool:
        """Return whether messages wait for a queue that does not exist. After ``wait`` they do not, until it exists."""
        full = self._full.get(destination)
        if full is None or full.missing_since is None:
            return bool(wait)
        full.fails_at_once = full.fails_at_once or seconds - full.missing_since >= wait.total_seconds()
        return not full.fails_at_once

    def retry_wait_seconds(self, destination: str, seconds: float) -> float:
        """Return in how many seconds a message that this destination refused may be attempted again."""
        full = self._full.get(destination)
        return SHORTEST_SECONDS if full is None else full.retry_wait_seconds(seconds)

    def report_success(self, destination: str) -> None:
        full = self._full.pop(destination, None)
        if full is not None:
            full.fails_at_once = False
            self._recovered[destination] = full

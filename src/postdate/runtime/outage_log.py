"""An outage in a log: when it begins, once a minute while it lasts, and when it is over. Pure; time is an argument."""

from __future__ import annotations

import logging

from postdate.errors import PostdateError

SAID_AGAIN_AFTER_SECONDS = 60.0


class OutageLog:
    """Keeps an outage from filling a log: what fails three times a second fails for one reason.

    Each kind of failure is said when it comes for the first time in an outage, with its text; after that one line a
    minute counts all of them.

    Args:
        log: where to.
        what: could not be done; begins the line of a failure.
        who: was out of reach; begins the line of the recovery.
        level: of failures.
    """

    def __init__(self, log: logging.Logger, what: str, who: str, level: int = logging.ERROR) -> None:
        self._log, self._what, self._who, self._level = log, what, who, level
        self._since: float | None = None
        self._said_at = 0.0
        self._failures = 0
        self._kinds: set[str] = set()

    @property
    def is_out(self) -> bool:
        """Whether the last that was noted was a failure."""
        return self._since is not None

    def failed(self, error: BaseException, seconds: float) -> None:
        """Note a failure.

        Args:
            error: why.
            seconds: now, on a clock that nobody sets.
        """
        kind = error.code if isinstance(error, PostdateError) else type(error).__name__
        self._failures += 1
        if self._since is None:
            self._since = seconds
        if kind not in self._kinds:
            self._kinds.add(kind)
            self._log.log(self._level, "%s: %s", self._what, error)
        elif seconds - self._said_at >= SAID_AGAIN_AFTER_SECONDS:
            lasted, failures = seconds - self._since, self._failures
            text = "%s, for %s now (%d failures): %s"
            self._log.log(self._level, text, self._what, shown_duration(lasted), failures, error)
        else:
            return
        self._said_at = seconds

    def succeeded(self, seconds: float) -> None:
        """Note a success; without effect when nothing had failed."""
        if self._since is None:
            return
        lasted, failures = shown_duration(seconds - self._since), self._failures
        self._since, self._failures = None, 0
        self._kinds.clear()
        count = f"{failures} failures" if failures > 1 else "1 failure"
        self._log.info("%s reachable again after %s (%s)", self._who, lasted, count)


def shown_duration(seconds: float) -> str:
    """Return a duration as an operator reads it: ``0.4 s``, ``26 s``, ``3 min``, ``2 h 5 min``."""
    if seconds < 1:
        return f"{max(seconds, 0):.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"

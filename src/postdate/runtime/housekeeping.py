"""What has to be done at every interval, whatever the application does meanwhile: in a thread of its own.

A handler that blocks keeps the event loop from everything else, and what shows others that this process lives must not
wait for it. Nor is it done in a thread that listens for news: a chore may take its time, and news must not wait for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from postdate.errors import PostdateError
from postdate.runtime.outage_log import OutageLog

log = logging.getLogger("postdate.housekeeping")

Share = Callable[[], bool]
"""Does a small part of a long piece of work and returns whether there is more."""

_ROUND_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Chore:
    """One thing to be done in every round.

    Args:
        what: is to be said in the log when it cannot be done.
        do: returns whether so much is left to do that the next round is to follow at once. Raises
            :class:`postdate.errors.PostdateError` or ``OSError`` when it cannot be done; then the other chores go on,
            and this one is tried again in the next round.
    """

    what: str
    do: Callable[[], bool]


class Housekeeping:
    """Does the chores of one file, or of one connection.

    Args:
        of: what it is done for, for the log.
        every: seconds between two rounds.
        chores: in order.
        end: called in the thread when it ends.
    """

    def __init__(self, of: str, every: float, chores: Sequence[Chore], end: Callable[[], None] = lambda: None) -> None:
        self._every, self._end = every, end
        self._chores = [(chore, OutageLog(log, chore.what, of, logging.WARNING)) for chore in chores]
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, one interval from now; a second time without effect."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="postdate-housekeeping", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Begin nothing more."""
        self._stopped.set()

    def join(self, seconds: float | None = None) -> None:
        """Return when the chore that may be under way has ended, or after so long; blocking."""
        if self._thread is not None:
            self._thread.join(seconds)

    def round(self) -> bool:
        """Do every chore once; return whether there is more. Raises nothing: the thread must not end by an error."""
        more = False
        for chore, outage in self._chores:
            try:
                more |= chore.do()
            except (PostdateError, OSError) as error:
                if self._stopped.is_set():  # what it is done for is being closed, which is no outage
                    return False
                outage.failed(error, time.monotonic())
            except Exception:  # a clock of the user's, say: what the dead held must become free all the same
                log.exception("%s", chore.what)
            else:
                outage.succeeded(time.monotonic())
        return more

    def in_shares(self, share: Share) -> bool:
        """Do a share of work after another until nothing is left, about a second has gone by, or this is stopped.

        After each one as long a pause as it took: whoever else writes has at least half of the time, and waits for one
        share at most.

        Returns:
            Whether anything is left.
        """
        end = time.monotonic() + _ROUND_SECONDS
        while True:
            started = time.monotonic()
            more = share()
            now = time.monotonic()
            if not more or self._stopped.wait(now - started) or now > end:
                return more

    def _run(self) -> None:
        more = False
        while not self._stopped.wait(0 if more else self._every):
            more = self.round()
        self._end()

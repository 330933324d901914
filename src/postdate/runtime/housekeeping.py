"""Chores at regular intervals, in a thread of their own.

A handler that blocks the event loop must not delay what shows others that this process lives; and a chore that takes
its time must not delay a thread that listens for notifications.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from typing_extensions import override

from postdate.clock import steady_seconds
from postdate.errors import PostdateError
from postdate.runtime import forks
from postdate.runtime.resource import Resource

log = logging.getLogger("postdate.housekeeping")

Share = Callable[[], bool]
"""Does a small part of a long piece of work and returns whether there is more."""

_ROUND_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Chore:
    """A thing to be done in every round; ``what`` begins the line in the log when it cannot be done.

    ``do`` returns whether the next round is to follow at once. When it raises :class:`postdate.errors.PostdateError` or
    ``OSError``, the other chores go on, and it is tried again in the next round.
    """

    what: str
    do: Callable[[], bool]


class Housekeeping(forks.ForkAware):
    """Does the chores of one file or connection, in order, every so many seconds; calls ``end`` in its thread.

    The child of a fork has no such thread: it calls :meth:`start`, too.
    """

    def __init__(
        self, resource: Resource, every: float, chores: Sequence[Chore], end: Callable[[], None] = lambda: None
    ) -> None:
        self._every, self._end = every, end
        self._chores = [(chore, resource.calls(chore.what, log, logging.WARNING)) for chore in chores]
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._starting = forks.lock()
        forks.register(self)

    @override
    def after_fork_in_child(self) -> None:
        was_stopped, self._stopped, self._thread = self._stopped.is_set(), threading.Event(), None
        if was_stopped:
            self._stopped.set()

    def start(self) -> None:
        """Begin, one interval from now; a second time without effect."""
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="postdate-housekeeping", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def join(self, seconds: float | None = None) -> None:
        """Block until a chore under way has ended, or for so long."""
        with self._starting:  # a thread that has not started cannot be waited for
            thread = self._thread
        if thread is not None:
            thread.join(seconds)

    def round(self) -> bool:
        """Do every chore once; return whether there is more. Raises nothing: the thread must not end by an error."""
        more = False
        for chore, calls in self._chores:
            try:
                more |= chore.do()
            except (PostdateError, OSError) as error:
                if self._stopped.is_set():  # its file or connection is being closed, which is no outage
                    return False
                calls.failed(error, steady_seconds())
            except Exception:  # in a user's clock, say: claims of dead processes must become free all the same
                log.exception("%s", chore.what)
            else:
                calls.succeeded(steady_seconds())
        return more

    def in_shares(self, share: Share) -> bool:
        """Do shares until nothing is left, about a second has gone by, or this is stopped; return whether any is left.

        A pause after each, as long as it took, leaves other writers half of the time.
        """
        end = steady_seconds() + _ROUND_SECONDS
        while True:
            started = steady_seconds()
            more = share()
            now = steady_seconds()
            if not more or self._stopped.wait(now - started) or now > end:
                return more

    def _run(self) -> None:
        more = False
        while not self._stopped.wait(0 if more else self._every):
            more = self.round()
        self._end()

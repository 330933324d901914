"""Chores at regular intervals, in a thread of their own.

Heartbeats have this thread so that a handler which blocks the event loop does not delay them. Chores do not run in the
thread that listens for notifications, because a slow chore would delay it.
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
"""Does a small part of a long piece of work. Returns whether there is more to do."""

_ROUND_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Chore:
    """A piece of work for every round. ``what`` is the first part of the line in the log when it fails.

    ``do`` returns whether the next round is to follow at once. When it raises :class:`postdate.errors.PostdateError` or
    ``OSError``, the other chores are done, and this one is tried again in the next round.
    """

    what: str
    do: Callable[[], bool]


class Housekeeping(forks.ForkAware):
    """Does the chores of one file or connection, in order, at intervals of ``every`` seconds.

    The thread calls ``end`` before it ends. The child of a fork does not have the thread, so it must call
    :meth:`start` again.
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
        """Start the thread; its first round is one interval from now. A second call has no effect."""
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="postdate-housekeeping", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def join(self, seconds: float | None = None) -> None:
        """Block until the running chore has ended, at most for ``seconds``."""
        with self._starting:  # a thread that has not started cannot be waited for
            thread = self._thread
        if thread is not None:
            thread.join(seconds)

    def round(self) -> bool:
        """Do every chore once; return whether there is more to do. Raises nothing: an error would end the thread."""
        more = False
        for chore, calls in self._chores:
            try:
                more |= chore.do()
            except (PostdateError, OSError) as error:
                if self._stopped.is_set():  # the file or connection is being closed, which is no outage
                    return False
                calls.failed(error, steady_seconds())
            except Exception:  # a user's clock may raise, and claims of dead processes must be released all the same
                log.exception("%s", chore.what)
            else:
                calls.succeeded(steady_seconds())
        return more

    def in_shares(self, share: Share) -> bool:
        """Do shares until none is left, about a second has passed, or this is stopped; return whether there are more.

        After each share there is a pause as long as the share took, so other writers get half of the time.
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

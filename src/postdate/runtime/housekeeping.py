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
    """A piece of work for every round. ``failure_text`` is the first part of the line in the log when it fails.

    ``run`` returns whether the next round is to follow at once. When it raises :class:`postdate.errors.PostdateError`
    or ``OSError``, the other chores are done, and this one is tried again in the next round.
    """

    failure_text: str
    run: Callable[[], bool]


class Housekeeping(forks.ForkAware):
    """Does the chores of one file or connection, in order, at intervals of ``every`` seconds.

    The thread calls ``end`` before it ends. The child of a fork does not have the thread, so it must call
    :meth:`start` again.
    """

    def __init__(
        self,
        resource: Resource,
        interval_seconds: float,
        chores: Sequence[Chore],
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self._interval_seconds, self._close = interval_seconds, close
        self._chores = [(chore, resource.calls(chore.failure_text, log, logging.WARNING)) for chore in chores]
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._start_lock = forks.lock()
        forks.register(self)

    @override
    def after_fork_in_child(self) -> None:
        was_stopped, self._stop, self._thread = self._stop.is_set(), threading.Event(), None
        if was_stopped:
            self._stop.set()

    def start(self) -> None:
        """Start the thread; its first round is one interval from now. A second call has no effect."""
        with self._start_lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="postdate-housekeeping", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def join(self, seconds: float | None = None) -> None:
        """Block until the running chore has ended, at most for ``seconds``."""
        with self._start_lock:  # a thread that has not started cannot be waited for
            thread = self._thread
        if thread is not None:
            thread.join(seconds)

    def run_chores(self) -> bool:
        """Do every chore once; return whether there is more to do. Raises nothing: an error would end the thread."""
        has_more = False
        for chore, calls in self._chores:
            try:
                has_more |= chore.run()
            except (PostdateError, OSError) as error:
                if self._stop.is_set():  # the file or connection is being closed, which is no outage
                    return False
                calls.report_failure(error, steady_seconds())
            except Exception:  # a user's clock may raise, and claims of dead processes must be released all the same
                log.exception("%s", chore.failure_text)
            else:
                calls.report_success(steady_seconds())
        return has_more

    def run_shares(self, share: Share) -> bool:
        """Do shares until none is left, about a second has passed, or this is stopped; return whether there are more.

        After each share there is a pause as long as the share took, so other writers get half of the time.
        """
        deadline = steady_seconds() + _ROUND_SECONDS
        while True:
            started_at = steady_seconds()
            has_more = share()
            now = steady_seconds()
            if not has_more or self._stop.wait(now - started_at) or now > deadline:
                return has_more

    def _run(self) -> None:
        has_more = False
        while not self._stop.wait(0 if has_more else self._interval_seconds):
            has_more = self.run_chores()
        self._close()

"""A store that is open in an event loop of its own, in a daemon thread.

So any thread and any event loop may use it. The open store belongs to one process: the child of a fork opens its own,
and never touches the connections of its parent.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
import weakref
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, TypeVar

from typing_extensions import override

from postdate.clock import Clock, SystemClock
from postdate.config import Settings
from postdate.core.health.deadlines import translate_store_errors
from postdate.core.upkeep.store_clock import FollowingClock, clock_of_store
from postdate.core.upkeep.wall_times import KeptZones
from postdate.errors import ConfigurationError, PostdateError, StoreUnavailable, StoreUnreachable
from postdate.ports import ClaimingStore, TransactionMode
from postdate.runtime import forks
from postdate.runtime.threads import Alarm
from postdate.wiring import naming, open_store, store_settings

log = logging.getLogger("postdate.client")

T = TypeVar("T")

_CLOSES_WITHIN: Final = 5.0
_ENDS_WITHIN: Final = 5.0
_READ_AGAIN_AFTER: Final = timedelta(minutes=10)


@dataclass(slots=True)
class InUse:
    """A store that is open in a loop, and the clock that decides when its messages are due."""

    store: ClaimingStore
    clock: Clock
    zones: KeptZones
    read_at: float

    async def refresh_clock(self) -> None:
        """Read the store's clock again if it was not read for ten minutes."""
        own = SystemClock().monotonic()
        if isinstance(self.clock, FollowingClock) and own - self.read_at > _READ_AGAIN_AFTER.total_seconds():
            self.read_at = own  # before the read, so that only one of several callers at this time reads the clock
            with suppress(PostdateError):  # the earlier bounds of the clock are still valid, and only grow
                await self.clock.read()


class Background(forks.ForkAware):
    """Opens the store of ``settings`` at first use in each process; with ``create``, also creates its tables."""

    def __init__(self, settings: Settings, *, create: bool) -> None:
        self._settings, self._create = settings, create
        self._running: _Running | None = None
        self._lock = forks.lock()
        forks.register(self)
        _all_backgrounds.add(self)

    def submit(self, work: Callable[[InUse], Awaitable[T]]) -> Future[T]:
        """Do ``work`` with the open store, in its loop; return the future of its result."""
        forks.check_process()
        with self._lock:
            if self._running is None:
                self._running = _Running(self._settings, create=self._create)
            return self._running.submit(work)

    async def run(self, work: Callable[[InUse], Awaitable[T]]) -> T:
        """Do ``work`` as :meth:`submit` does, and return its result. The work of a cancelled call may be done."""
        future, alarm = self.submit(work), Alarm()
        future.add_done_callback(lambda _: alarm.ring())
        try:
            await alarm.wait()
        finally:
            future.cancel()
        return future.result()

    def close(self) -> None:
        """Close the store, if it is open; the next use opens it again. Blocks."""
        forks.check_process()
        with self._lock:
            running, self._running = self._running, None
        if running is not None:
            running.close()

    @override
    def after_fork_in_child(self) -> None:
        """Leave the open store to the parent: closing its connections here would close those of the parent, too."""
        if self._running is not None:
            self._running.leave_to_parent()
        self._running = None


class _Running:
    def __init__(self, settings: Settings, *, create: bool) -> None:
        self._settings, self._create = settings, create
        self._open: InUse | None = None
        self._opening: asyncio.Task[InUse] | None = None
        self._tasks = set[asyncio.Task[Any]]()
        self._futures = weakref.WeakSet[Future[Any]]()
        """Results that callers wait for."""
        self._is_closing = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="postdate-client", daemon=True)
        self._thread.start()

    def leave_to_parent(self) -> None:
        """Prevent the inherited loop from changing the parent's selector; called in the child of a fork."""
        forks.keep_for_ever(self)
        selector: Any = getattr(self._loop, "_selector", None)
        if hasattr(selector, "fileno"):  # child and parent share the descriptors that are registered with epoll
            forks.blank(selector.fileno())

    def submit(self, work: Callable[[InUse], Awaitable[T]]) -> Future[T]:
        if threading.current_thread() is self._thread:
            raise ConfigurationError("a client cannot be waited for by what it calls itself, such as a handler of logs")
        future = asyncio.run_coroutine_threadsafe(self._do(work), self._loop)
        self._futures.add(future)
        return future

    async def _do(self, work: Callable[[InUse], Awaitable[T]]) -> T:
        if self._is_closing:
            raise StoreUnavailable("the client is being closed")
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            opened = await self._opened()
            with translate_store_errors(opened.store):
                await opened.refresh_clock()
                return await work(opened)
        except asyncio.CancelledError:
            if self._is_closing:
                raise _closed_meanwhile() from None
            raise
        finally:
            self._tasks.discard(task)

    async def _opened(self) -> InUse:
        """Return the open store; all callers that wait for it share one attempt, and its error."""
        if self._open is not None:
            return self._open
        if self._opening is None:
            # In an empty context: the tasks that opening starts live longer than the first caller, so they must not
            # belong to the trace of that caller.
            self._opening = self._loop.create_task(self._to_open(), context=Context())
            # A callback sets the result, not a caller that waits: all callers may be cancelled before opening ends.
            self._opening.add_done_callback(self._note_end_of_opening)
        return await asyncio.shield(self._opening)

    def _note_end_of_opening(self, opening: asyncio.Task[InUse]) -> None:
        self._opening = None
        if not opening.cancelled() and opening.exception() is None:
            self._open = opening.result()

    async def _to_open(self) -> InUse:
        settings = self._settings
        with naming("store.address", settings.store.address, settings):
            arguments = store_settings(settings, create=self._create)
            store = open_store(settings.store.address, **arguments)
        try:
            return await self._prepared(store)
        except BaseException:
            await store.close()
            raise

    async def _prepared(self, store: ClaimingStore) -> InUse:
        settings = self._settings
        with translate_store_errors(store):
            await store.initialize(settings.endpoint.name, TransactionMode.RECEIVE_ONLY)
            if self._create:
                await store.setup()
            clock = clock_of_store(SystemClock(), store, judges=settings.delayed_delivery.use_store_clock)
            if clock is not None:
                await clock.read()
        return InUse(store, clock or SystemClock(), KeptZones(store), SystemClock().monotonic())

    def close(self) -> None:
        """Let running calls end, for a limited time; then close the store, and end the loop in any case."""
        closing = asyncio.run_coroutine_threadsafe(self._close(), self._loop)
        try:
            closing.result(2 * _CLOSES_WITHIN)
        except TimeoutError:
            log.warning("the store was not closed within %g s", 2 * _CLOSES_WITHIN)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_ENDS_WITHIN)
            if not self._thread.is_alive():
                self._loop.close()
            for each in list(self._futures):  # calls that did not end: their callers would wait for ever
                with suppress(InvalidStateError):
                    each.set_exception(_closed_meanwhile())

    async def _close(self) -> None:
        self._is_closing = True
        going_on = [*self._tasks, *([] if self._opening is None else [self._opening])]
        if going_on:
            await asyncio.wait(going_on, timeout=_CLOSES_WITHIN)
            for each in going_on:
                each.cancel()
            await asyncio.wait(going_on, timeout=_CLOSES_WITHIN / 2)
        opened, self._open = self._open, None
        if opened is not None:
            await opened.store.close()


def _closed_meanwhile() -> StoreUnreachable:
    return StoreUnreachable("the client was closed before this call ended: it may have been done, or not")


_all_backgrounds: weakref.WeakSet[Background] = weakref.WeakSet()


def _at_exit() -> None:
    for each in list(_all_backgrounds):
        with suppress(Exception):  # the interpreter is ending, so nobody can handle an error
            each.close()


atexit.register(_at_exit)

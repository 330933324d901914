"""The background of clients: a store that is open in a separate event loop, in a daemon thread.

So any thread and any event loop may use it. The open store belongs to one process: the child of a fork opens another
one, and never uses the connections of its parent.
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
from postdate.core.upkeep.wall_times import ZoneMarkers
from postdate.errors import ConfigurationError, PostdateError, StoreUnavailable, StoreUnreachable
from postdate.ports import ClaimingStore, Observer, TransactionMode
from postdate.runtime import forks
from postdate.runtime.threads import WakeUp
from postdate.wiring import file_of, name_setting_in_errors, open_store, store_observer, store_settings

log = logging.getLogger("postdate.client")

T = TypeVar("T")

_CLOSE_TIMEOUT_SECONDS: Final = 5.0
"""How long closing waits for running calls before it cancels them."""

_JOIN_TIMEOUT_SECONDS: Final = 5.0
"""How long closing waits for the end of the thread."""

_READ_AGAIN_AFTER: Final = timedelta(minutes=10)
"""The clock of the store is read again when it was not read for this time."""


@dataclass(slots=True)
class StoreSession:
    """A store that is open in a loop, and the clock that decides when its messages are due."""

    store: ClaimingStore
    clock: Clock
    zones: ZoneMarkers
    read_at: float
    queues: Observer | None
    """Shows the queues, if they are in the database of the store."""

    async def refresh_clock(self) -> None:
        """Read the store's clock again if it was not read for ten minutes."""
        seconds = SystemClock().monotonic()
        if isinstance(self.clock, FollowingClock) and seconds - self.read_at > _READ_AGAIN_AFTER.total_seconds():
            self.read_at = seconds  # before the read, so that only one of several callers at this time reads the clock
            with suppress(PostdateError):  # the earlier bounds of the clock are still valid, and only grow
                await self.clock.read()


class Background(forks.ForkAware):
    """Opens a store at first use in each process; with ``create``, also creates its tables.

    Args:
        read_settings: returns the settings, with the address of the store. It is called at each use: if the address has
            changed, as a test changes it, the store is closed and the other one is opened.
        create: create missing tables.
        clock: clock of a test. ``None``: the clock of the store, or of the machine.
    """

    def __init__(self, read_settings: Callable[[], Settings], *, create: bool, clock: Clock | None = None) -> None:
        self.read_settings, self._create, self._clock = read_settings, create, clock
        self._store_thread: _StoreThread | None = None
        self._lock = forks.lock()
        forks.register(self)
        _all_backgrounds.add(self)

    def submit(self, work: Callable[[StoreSession], Awaitable[T]]) -> Future[T]:
        """Run ``work`` with the open store, in its event loop; return the future of its result."""
        forks.check_process()
        settings = self.read_settings()
        with self._lock:
            if self._store_thread is not None and not self._store_thread.has_store_of(settings):
                self._store_thread.close()
                self._store_thread = None
            if self._store_thread is None:
                self._store_thread = _StoreThread(settings, create=self._create, clock=self._clock)
            return self._store_thread.submit(work)

    async def run(self, work: Callable[[StoreSession], Awaitable[T]]) -> T:
        """Run ``work`` as :meth:`submit` does, and return its result. A cancelled call may still have its effect."""
        future, wake_up = self.submit(work), WakeUp()
        future.add_done_callback(lambda _: wake_up.wake())
        try:
            await wake_up.wait()
        finally:
            future.cancel()
        return future.result()

    def close(self) -> None:
        """Close the store, if it is open; the next use opens it again. Blocks."""
        forks.check_process()
        with self._lock:
            store_thread, self._store_thread = self._store_thread, None
        if store_thread is not None:
            store_thread.close()

    @override
    def after_fork_in_child(self) -> None:
        """Detach from the open store: closing its connections in the child would close them for the parent, too."""
        if self._store_thread is not None:
            self._store_thread.detach_after_fork()
        self._store_thread = None


class _StoreThread:
    def __init__(self, settings: Settings, *, create: bool, clock: Clock | None) -> None:
        self._settings, self._create, self._clock = settings, create, clock
        self._session: StoreSession | None = None
        self._open_task: asyncio.Task[StoreSession] | None = None
        self._tasks = set[asyncio.Task[Any]]()
        self._futures = weakref.WeakSet[Future[Any]]()
        """Futures that callers wait for."""
        self._is_closing = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="postdate-client", daemon=True)
        self._thread.start()

    def has_store_of(self, settings: Settings) -> bool:
        return settings is self._settings or settings.store.address == self._settings.store.address

    def detach_after_fork(self) -> None:
        """Prevent the inherited loop from changing the parent's selector; called in the child of a fork."""
        forks.prevent_destruction(self)
        selector: Any = getattr(self._loop, "_selector", None)
        if hasattr(selector, "fileno"):  # child and parent share the descriptors that are registered with epoll
            forks.redirect_to_null(selector.fileno())

    def submit(self, work: Callable[[StoreSession], Awaitable[T]]) -> Future[T]:
        if threading.current_thread() is self._thread:
            raise ConfigurationError("code that a client calls, such as a log handler, cannot wait for this client")
        future = asyncio.run_coroutine_threadsafe(self._run(work), self._loop)
        self._futures.add(future)
        return future

    async def _run(self, work: Callable[[StoreSession], Awaitable[T]]) -> T:
        if self._is_closing:
            raise StoreUnavailable("the client is being closed")
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            session = await self._get_session()
            with translate_store_errors(session.store):
                await session.refresh_clock()
                return await work(session)
        except asyncio.CancelledError:
            if self._is_closing:
                raise _closed_error() from None
            raise
        finally:
            self._tasks.discard(task)

    async def _get_session(self) -> StoreSession:
        """Return the open store; all callers that wait for it share one attempt, and its error."""
        if self._session is not None:
            return self._session
        if self._open_task is None:
            # In an empty context: the tasks that opening starts live longer than the first caller, so they must not
            # belong to the trace of that caller.
            self._open_task = self._loop.create_task(self._open_session(), context=Context())
            # A callback sets the result, not a caller that waits: all callers may be cancelled before opening ends.
            self._open_task.add_done_callback(self._remember_session)
        return await asyncio.shield(self._open_task)

    def _remember_session(self, open_task: asyncio.Task[StoreSession]) -> None:
        self._open_task = None
        if not open_task.cancelled() and open_task.exception() is None:
            self._session = open_task.result()

    async def _open_session(self) -> StoreSession:
        settings = self._settings
        with name_setting_in_errors("store.address", settings.store.address, settings):
            arguments = store_settings(settings, create=self._create)
            store = open_store(settings.store.address, **arguments)
        try:
            return await self._create_session(store)
        except BaseException:
            await store.close()
            raise

    async def _create_session(self, store: ClaimingStore) -> StoreSession:
        settings = self._settings
        with translate_store_errors(store):
            await store.initialize(settings.endpoint.name, TransactionMode.RECEIVE_ONLY)
            if self._create:
                await store.setup()
            clock = clock_of_store(SystemClock(), store, is_authoritative=settings.delayed_delivery.use_store_clock)
            if clock is not None:
                await clock.read()
        return StoreSession(
            store,
            self._clock or clock or SystemClock(),
            ZoneMarkers(store),
            SystemClock().monotonic(),
            store_observer(store) if _have_one_database(settings) else None,
        )

    def close(self) -> None:
        """Wait a limited time for running calls; then close the store, and stop the event loop in any case."""
        close_future = asyncio.run_coroutine_threadsafe(self._close(), self._loop)
        try:
            close_future.result(2 * _CLOSE_TIMEOUT_SECONDS)
        except TimeoutError:
            log.warning("the store was not closed within %g s", 2 * _CLOSE_TIMEOUT_SECONDS)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_JOIN_TIMEOUT_SECONDS)
            if not self._thread.is_alive():
                self._loop.close()
            for each in list(self._futures):  # calls that did not end: their callers would wait for ever
                with suppress(InvalidStateError):
                    each.set_exception(_closed_error())

    async def _close(self) -> None:
        self._is_closing = True
        unfinished_tasks = [*self._tasks, *([] if self._open_task is None else [self._open_task])]
        if unfinished_tasks:
            await asyncio.wait(unfinished_tasks, timeout=_CLOSE_TIMEOUT_SECONDS)
            for each in unfinished_tasks:
                each.cancel()
            await asyncio.wait(unfinished_tasks, timeout=_CLOSE_TIMEOUT_SECONDS / 2)
        session, self._session = self._session, None
        if session is not None:
            await session.store.close()


def _have_one_database(settings: Settings) -> bool:
    """Return whether the queues are in the database of the store; in a file the two addresses have other schemes."""
    store, queues = settings.store.address, settings.transport.address
    return store == queues or (file_of(store) is not None and file_of(store) == file_of(queues))


def _closed_error() -> StoreUnreachable:
    return StoreUnreachable("the client was closed before this call ended: the call may or may not have had its effect")


_all_backgrounds: weakref.WeakSet[Background] = weakref.WeakSet()


def _at_exit() -> None:
    for each in list(_all_backgrounds):
        with suppress(Exception):  # the interpreter is ending, so no code can handle an error
            each.close()


atexit.register(_at_exit)

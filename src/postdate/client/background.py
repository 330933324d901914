"""A store that is open in an event loop of its own, in a thread that keeps no interpreter alive.

So it may be asked from any thread and any event loop. What is open belongs to one process: the child of a fork opens
its own, and never touches what its parent has.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
import weakref
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, TypeVar

from postdate.clock import Clock, SystemClock
from postdate.config import Settings
from postdate.core.guard import calling_store
from postdate.core.store_clock import FollowingClock, clock_of_store
from postdate.ports import ClaimingStore, TransactionMode
from postdate.runtime.threads import Alarm
from postdate.wiring import naming, open_store, store_settings

log = logging.getLogger("postdate.client")

T = TypeVar("T")

_CLOSES_WITHIN: Final = 5.0
_READ_AGAIN_AFTER: Final = timedelta(minutes=10)


@dataclass(slots=True)
class InUse:
    """A store that is open in a loop, and the clock by which its messages are due."""

    store: ClaimingStore
    clock: Clock
    read_at: float

    async def now_known(self) -> None:
        """See to it that the store's clock was read lately."""
        own = SystemClock().monotonic()
        if isinstance(self.clock, FollowingClock) and own - self.read_at > _READ_AGAIN_AFTER.total_seconds():
            await self.clock.read()
            self.read_at = own


class Background:
    """Opens the store of ``settings`` at first use in each process; ``create``: its tables, too."""

    def __init__(self, settings: Settings, *, create: bool) -> None:
        self._settings, self._create = settings, create
        self._running: _Running | None = None
        self._left: list[_Running | None] = []
        """What belongs to parents: kept, as the end of its connections would be the end of theirs."""
        self._lock = threading.Lock()
        _known.add(self)

    def submit(self, work: Callable[[InUse], Awaitable[T]]) -> Future[T]:
        """Do ``work`` with the open store, in its loop."""
        with self._lock:
            if self._running is None:
                self._running = _Running(self._settings, create=self._create)
            return self._running.submit(work)

    async def run(self, work: Callable[[InUse], Awaitable[T]]) -> T:
        """:meth:`submit`, and wait in an event loop. Cancelled, it may have been done."""
        future, alarm = self.submit(work), Alarm()
        future.add_done_callback(lambda _: alarm.ring())
        try:
            await alarm.wait()
        finally:
            future.cancel()
        return future.result()

    def close(self) -> None:
        """Close the store, if it is open; the next use opens it again. Blocks."""
        with self._lock:
            running, self._running = self._running, None
        if running is not None:
            running.close()

    def leave_to_parent(self) -> None:
        """In the child of a fork: forget what is the parent's."""
        self._lock = threading.Lock()  # another thread of the parent may have held it
        self._left.append(self._running)
        self._running = None


class _Running:
    def __init__(self, settings: Settings, *, create: bool) -> None:
        self._settings, self._create = settings, create
        self._open: InUse | None = None
        self._opening = asyncio.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="postdate-client", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[InUse], Awaitable[T]]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(self._do(work), self._loop)

    async def _do(self, work: Callable[[InUse], Awaitable[T]]) -> T:
        opened = await self._opened()
        with calling_store(opened.store):
            await opened.now_known()
            return await work(opened)

    async def _opened(self) -> InUse:
        async with self._opening:
            if self._open is None:
                settings = self._settings
                with naming("store.address", settings.store.address, settings):
                    given = store_settings(settings, create=self._create)
                    store = open_store(settings.store.address, **given)
                try:
                    self._open = await self._prepared(store)
                except BaseException:
                    await store.close()
                    raise
            return self._open

    async def _prepared(self, store: ClaimingStore) -> InUse:
        settings = self._settings
        with calling_store(store):
            await store.initialize(settings.endpoint.name, TransactionMode.RECEIVE_ONLY)
            if self._create:
                await store.setup()
            clock = clock_of_store(SystemClock(), store, judges=settings.delayed_delivery.use_store_clock)
            if clock is not None:
                await clock.read()
        return InUse(store, clock or SystemClock(), SystemClock().monotonic())

    def close(self) -> None:
        closing = asyncio.run_coroutine_threadsafe(self._close(), self._loop)
        try:
            closing.result(_CLOSES_WITHIN)
        except TimeoutError:
            log.warning("the store was not closed within %g s", _CLOSES_WITHIN)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSES_WITHIN)
        if not self._thread.is_alive():
            self._loop.close()

    async def _close(self) -> None:
        async with self._opening:
            opened, self._open = self._open, None
        if opened is not None:
            await opened.store.close()


_known: weakref.WeakSet[Background] = weakref.WeakSet()


def _forked() -> None:
    for each in list(_known):
        each.leave_to_parent()


def _at_exit() -> None:
    for each in list(_known):
        with suppress(Exception):  # nobody is left to be told
            each.close()


os.register_at_fork(after_in_child=_forked)
atexit.register(_at_exit)

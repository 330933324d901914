"""Threads for COM objects, with the queues that are open in them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar, TypeVarTuple, Unpack

import anyio

from postdate.backends.msmq.com import Com
from postdate.backends.msmq.errors import release_objects
from postdate.backends.msmq.queues import Desk

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")


class Apartment:
    """A thread with a `Desk`: COM objects are used only in the thread that made them."""

    def __init__(self, com: Com, name: str) -> None:
        self._com = com
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"postdate-msmq-{name}")
        self._desk: Desk | None = None
        self.held = 0
        """Messages that are held here; for choosing among apartments."""

    def start(self, work: Callable[[Desk, Unpack[Arguments]], T], *arguments: *Arguments) -> Future[T]:
        """Run ``work`` at the desk after all earlier work."""
        return self._thread.submit(self._do, work, *arguments)

    async def do(self, work: Callable[[Desk, Unpack[Arguments]], T], *arguments: *Arguments) -> T:
        """As `start`, for short work; a cancelled caller waits for its end."""
        future = asyncio.wrap_future(self.start(work, *arguments))
        with anyio.CancelScope(shield=True):
            await asyncio.wait([future])
        return future.result()

    def _do(self, work: Callable[[Desk, Unpack[Arguments]], T], *arguments: *Arguments) -> T:
        try:
            if self._desk is None:
                self._com.enter()
                self._desk = Desk(self._com)
            return work(self._desk, *arguments)
        except BaseException as error:
            release_objects(error)
            raise

    def end(self) -> None:
        """Close the desk and end the thread after all earlier work; does not wait."""
        self._thread.submit(self._leave)
        self._thread.shutdown(wait=False)

    def _leave(self) -> None:
        desk, self._desk = self._desk, None
        if desk is not None:
            desk.close()
            del desk
            self._com.leave()

"""Threads that COM objects live in, and the queues that are open there."""

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
    """A thread, with a desk for MSMQ in it: what was made there is used there and by no other thread.

    Args:
        com: COM, for any thread.
        name: of the thread, for whoever looks at a process.
    """

    def __init__(self, com: Com, name: str) -> None:
        self._com = com
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"postdate-msmq-{name}")
        self._desk: Desk | None = None
        self.held = 0
        """Messages that are held here; for whoever chooses among apartments."""

    def start(self, work: Callable[[Desk, Unpack[Arguments]], T], *arguments: *Arguments) -> Future[T]:
        """Have something done at the desk after all that was asked before; return what becomes of it."""
        return self._thread.submit(self._do, work, *arguments)

    async def do(self, work: Callable[[Desk, Unpack[Arguments]], T], *arguments: *Arguments) -> T:
        """Have something short done at the desk; a caller that is cancelled waits for its end."""
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
        """Close what is open and end the thread, when it has done all that was asked; waits for nothing."""
        self._thread.submit(self._leave)
        self._thread.shutdown(wait=False)

    def _leave(self) -> None:
        desk, self._desk = self._desk, None
        if desk is not None:
            desk.close()
            del desk
            self._com.leave()

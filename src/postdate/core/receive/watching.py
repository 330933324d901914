"""A receiver whose calls have deadlines, but for waiting for a message.

A commit that is never answered would keep its message, its place and, when the endpoint stops, all of it. A scope
around each commit costs an eighth of handling a message; so calls are noted, and one task watches all of them. Source:
ADR 0019.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Coroutine, Sequence
from datetime import datetime, timedelta
from typing import Any, ClassVar, TypeVar

import anyio
from typing_extensions import override

from postdate.clock import Clock, in_real_time, time_left
from postdate.core.guard import ANSWERS_WITHIN, GRACE, LETTING_GO
from postdate.core.left_behind import leave_behind
from postdate.core.repetitions import leave_out_repetitions
from postdate.errors import DuplicateMessage, PostdateError, TransportUnreachable
from postdate.ports import HANDLED, End, Ending, Received, Receiver

T = TypeVar("T")


class CallWatch:
    """Gives deadlines to calls, without a task or a scope for each.

    A call that is not answered in time is cancelled, as far as it lets itself be. A task makes one call at a time.
    """

    def __init__(self, clock: Clock, answers_within: timedelta = ANSWERS_WITHIN) -> None:
        self._clock, self._monotonic, self._said = clock, clock.monotonic, answers_within
        self._within = in_real_time(clock, answers_within).total_seconds()
        self._letting_go = in_real_time(clock, LETTING_GO).total_seconds()
        self._grace = in_real_time(clock, GRACE)
        self._begun: dict[asyncio.Task[object] | None, float] = {}  # in order: the oldest is the first
        self._overdue = set[asyncio.Task[object] | None]()
        self._is_idle = True
        self._one_began, self._look = anyio.Event(), anyio.Event()

    @property
    def overdue(self) -> int:
        """Calls that were cancelled at their deadline and go on nevertheless."""
        return len(self._overdue)

    async def call(self, making: Awaitable[T], adapter: object, unreachable: type[PostdateError]) -> T:
        """Await ``making``; raise ``unreachable`` if ``adapter`` does not answer in time."""
        task = asyncio.current_task()
        self._begun[task] = self._monotonic()
        if self._is_idle:
            self._is_idle = False
            self._one_began.set()
        try:
            return await making
        except asyncio.CancelledError:
            if task is None or task not in self._overdue or _is_cancelled_by_others(task):
                raise
            text = f"{type(adapter).__name__} did not answer within {self._said.total_seconds():g} s"
            raise unreachable(text) from None
        finally:
            del self._begun[task]
            if task is not None and task in self._overdue:
                self._overdue.discard(task)
                task.uncancel()  # however the call has ended: what its task does next is not cancelled

    async def call_apart(self, making: Coroutine[Any, Any, T], adapter: object, unreachable: type[PostdateError]) -> T:
        """Do the same in a task of its own, which is left behind when it does not end."""
        return await self.call(self._apart(making), adapter, unreachable)

    async def _apart(self, making: Coroutine[Any, Any, T]) -> T:
        task = asyncio.get_running_loop().create_task(making)
        try:
            return await asyncio.shield(task)
        finally:
            if not task.done():
                over = anyio.Event()
                task.add_done_callback(lambda _: over.set())
                task.cancel()
                with anyio.CancelScope(shield=True):
                    await self._clock.wait_for(over, self._grace)
                if not task.done():
                    leave_behind(task)

    def hurry(self) -> None:
        """Shorten all deadlines to :data:`postdate.core.guard.LETTING_GO`, as the pump stops."""
        if self._within > self._letting_go:
            self._within, self._said = self._letting_go, LETTING_GO
        self._look.set()

    async def run(self) -> None:
        while True:
            if not self._begun:
                self._is_idle, self._one_began = True, anyio.Event()
                await self._one_began.wait()
            self._look = anyio.Event()
            now = self._monotonic()
            first = next((since for task, since in self._begun.items() if task not in self._overdue), now)
            await self._clock.wait_for(self._look, time_left(first + self._within, now))
            now = self._monotonic()
            for task, since in list(self._begun.items()):
                if since + self._within > now:
                    break
                if task is not None and task not in self._overdue:
                    self._overdue.add(task)
                    task.cancel()


def _is_cancelled_by_others(task: asyncio.Task[object]) -> bool:
    return anyio.current_effective_deadline() == -math.inf or task.cancelling() > 1


class WatchedReceiver(Receiver):
    """Calls ``receiver`` with deadlines; leaves messages that are stored already out of ends."""

    ends_in_batches: ClassVar[bool] = True
    """Whether messages may wait for their end, where the queue is read ahead."""

    def __init__(self, receiver: Receiver, clock: Clock, answers_within: timedelta = ANSWERS_WITHIN) -> None:
        self._receiver, self.watch = receiver, CallWatch(clock, answers_within)

    @override
    async def receive(self, limit: int) -> Sequence[Received]:
        """Has no deadline: it may wait for ever."""
        return await self._receiver.receive(limit)

    @override
    async def commit(self, received: Received, now: datetime, end: End = HANDLED) -> None:
        try:
            await self.watch.call(self._receiver.commit(received, now, end), self._receiver, TransportUnreachable)
        except DuplicateMessage as error:
            await leave_out_repetitions(end.work, error)
            await self.commit(received, now, end)

    @override
    async def settle(self, endings: Sequence[Ending]) -> Sequence[Exception | None]:
        errors = await self.watch.call(self._receiver.settle(endings), self._receiver, TransportUnreachable)
        if not any(errors):
            return errors
        return [
            (await Receiver.settle(self, [ending]))[0] if isinstance(error, DuplicateMessage) else error
            for ending, error in zip(endings, errors, strict=True)
        ]

    @override
    async def roll_back(self, received: Received, *, failed: bool = True) -> None:
        await self.watch.call(self._receiver.roll_back(received, failed=failed), self._receiver, TransportUnreachable)

    @override
    async def take(self, message_id: str) -> Received | None:
        return await self._receiver.take(message_id)

    @override
    def stop(self) -> None:
        self._receiver.stop()

    @override
    async def close(self) -> None:
        await self._receiver.close()

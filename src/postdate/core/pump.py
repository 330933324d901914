"""The message pump: receives from one queue and hands each message to a handler, several at a time."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

import anyio

from postdate.clock import Clock, in_real_time
from postdate.core.circuit_breaker import PAUSE_ARMED, RepeatedFailures
from postdate.core.guard import LETTING_GO, GuardedCall, calling_transport
from postdate.core.left_behind import leave_behind
from postdate.core.receiving import WatchedReceiver
from postdate.core.recoverability import is_outage
from postdate.errors import ClaimLost, PostdateError, TransportUnavailable
from postdate.ports import Received, Receiver
from postdate.runtime.outage_log import OutageLog

log = logging.getLogger("postdate.pump")

Handle = Callable[[Received], Awaitable[None]]
"""Handles one message completely: it commits or rolls back. What it raises is a failure of that, not of a handler."""


class MessagePump:
    """Start :meth:`run` as a task; :meth:`stop` stops receiving and lets what is in hand finish.

    Args:
        receiver: of the queue.
        handle: see :data:`Handle`.
        concurrency: messages in hand at once; 1 or more.
        clock: for the breaker.
        breaker: for failing receives and commits.
        queue: its name, for logs.
        prefetches: receive more than is handled at once, as long as it is handled within moments.
    """

    def __init__(  # noqa: PLR0913 - the parts
        self,
        receiver: Receiver,
        handle: Handle,
        concurrency: int,
        clock: Clock,
        breaker: RepeatedFailures,
        queue: str,
        *,
        prefetches: bool = False,
    ) -> None:
        self._reading = Prefetch(concurrency) if prefetches else None
        self._receiver = receiver if isinstance(receiver, WatchedReceiver) else WatchedReceiver(receiver, clock)
        self._handle, self._concurrency = handle, concurrency
        self._clock, self._breaker, self._queue = clock, breaker, queue
        self._letting_go = in_real_time(clock, LETTING_GO)
        self._stop = anyio.Event()
        self._ready: deque[Received] = deque()
        self._left: deque[Received] = deque()
        self._idle: deque[anyio.Event] = deque()
        self._workers = self._busy = 0
        self._one_done = anyio.Event()
        self._outage = OutageLog(log, f"cannot receive from {queue}", f"{queue} is")

    async def run(self) -> None:
        """Receive and hand over until stopped; then wait for what is in hand.

        That is for handlers, as long as they take. Queues that have fallen silent are not waited for: what they do not
        answer is left behind.
        """
        pump = GuardedCall(self._run)
        task = asyncio.get_running_loop().create_task(pump.run())
        try:
            await self._stop_or_end(pump)
        except BaseException:
            pump.scope.cancel()
            with anyio.CancelScope(shield=True):
                await self._end(pump)
            raise
        finally:
            if not pump.over.is_set():
                leave_behind(task)
        if pump.error is not None:
            raise pump.error

    async def _stop_or_end(self, pump: GuardedCall[None]) -> None:
        async with anyio.create_task_group() as waiting:
            waiting.start_soon(self._tell_at_stop, pump)
            await pump.told.wait()
            waiting.cancel_scope.cancel()
        await self._end(pump)

    async def _tell_at_stop(self, pump: GuardedCall[None]) -> None:
        await self._stop.wait()
        pump.told.set()

    async def _end(self, pump: GuardedCall[None]) -> None:
        """Wait for the end, unless all that keeps it from ending are queues that do not answer."""
        self._receiver.watch.hurry()
        while not pump.over.is_set():
            await self._clock.wait_for(pump.over, self._letting_go)
            if not pump.over.is_set() and self._busy <= self._receiver.watch.overdue:
                log.error("the pump of %s stops without an answer from its queue", self._queue)
                pump.leave(None)
                return

    async def _run(self) -> None:
        try:
            async with anyio.create_task_group() as watching:
                watching.start_soon(self._receiver.watch.run)
                await self._pump()
                watching.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await self._receiver.close()

    async def _pump(self) -> None:
        async with anyio.create_task_group() as messages:
            receiving = anyio.CancelScope()
            messages.start_soon(self._end_at_stop, receiving)
            if self._reading is not None:
                messages.start_soon(self._give_back_what_waits, self._reading)
            with receiving:
                while not self._stop.is_set():
                    await self._receive_some(messages)

    async def _end_at_stop(self, receiving: anyio.CancelScope) -> None:
        await self._stop.wait()
        receiving.cancel()

    async def _receive_some(self, messages: anyio.abc.TaskGroup) -> None:
        while (room := self._room()) <= 0:
            self._one_done = anyio.Event()
            await self._one_done.wait()
        try:
            with calling_transport(self._receiver):
                received = await self._receiver.receive(room)
        except PostdateError as error:
            self._outage.failed(error, self._clock.monotonic())
            await self._pause_after(error)
            return
        self._is_well()
        if self._reading is not None and self._stop.is_set():
            return  # closing the receiver gives them back
        self._ready.extend(received)
        for _ in received:
            if self._idle:
                self._idle.popleft().set()
            elif self._workers < self._concurrency:
                self._start_worker(messages)

    def _room(self) -> int:
        """Return how many may be received now; few at a time only where more are not wanted."""
        if self._reading is None:
            return self._concurrency - self._in_hand
        most = self._reading.most(anyio.current_time())
        room = most - self._in_hand
        return room if self._in_hand < self._concurrency or room >= most // 4 else 0

    async def _give_back_what_waits(self, reading: Prefetch) -> None:
        """Let others have what was received ahead when handling has become too slow for it."""
        while not self._stop.is_set():
            with anyio.move_on_after(LONGEST_WAIT_SECONDS):
                await self._stop.wait()
            most = reading.most(anyio.current_time())
            while self._ready and self._in_hand > most:
                await self._give_back(self._ready.pop(), failed=False)
        while self._left and self._busy:  # a handler may take its time; when none does, closing the receiver is quicker
            await self._give_back(self._left.pop(), failed=False)

    @property
    def _in_hand(self) -> int:
        return self._busy + len(self._ready)

    def _start_worker(self, messages: anyio.abc.TaskGroup) -> None:
        self._workers += 1
        messages.start_soon(self._work, messages)

    async def _work(self, messages: anyio.abc.TaskGroup) -> None:
        """Handle what is ready, message after message: a task for each message would cost as much as handling it.

        A handler can cancel the task it runs in, by asyncio's own means: then another worker takes its place.
        """
        try:
            await self._handle_ready()
        except anyio.get_cancelled_exc_class():
            if _is_ending():
                raise
            if self._ready:  # let out, the cancellation would end the whole pump
                self._start_worker(messages)
        finally:
            self._workers -= 1

    async def _handle_ready(self) -> None:
        while True:
            while self._ready:
                self._busy += 1
                await self._handle_one(self._ready.popleft())
            if self._stop.is_set():
                return
            woken = anyio.Event()
            self._idle.append(woken)
            try:
                await woken.wait()
            finally:
                if not woken.is_set():
                    self._idle.remove(woken)

    async def _handle_one(self, received: Received) -> None:
        try:
            with calling_transport(self._receiver):
                await self._handle(received)
        except anyio.get_cancelled_exc_class():
            if not _is_ending():
                await self._after_stray_cancellation(received)
            raise
        except PostdateError as error:
            self._not_done(received, "was not finished", error)
            await self._pause_after(error)
            await self._give_back(received, failed=not is_outage(error))
        finally:
            self._busy -= 1
            self._one_done.set()
            if self._reading is not None:
                self._reading.handled += 1

    async def _after_stray_cancellation(self, received: Received) -> None:
        """Give back, once, what was in hand of a worker that ends while its pump goes on.

        After a pause, as it may come to the same end again.
        """
        error = TransportUnavailable("the task that handled it was cancelled by somebody else than its endpoint")
        self._not_done(received, "was not finished", error)
        await self._pause_after(error)
        try:
            with calling_transport(self._receiver):
                await self._receiver.roll_back(received, failed=True)
        except PostdateError as failure:
            self._not_done(received, "cannot be given back", failure)

    def _not_done(self, received: Received, what: str, error: PostdateError) -> None:
        if is_outage(error):  # which every message in hand meets
            self._outage.failed(error, self._clock.monotonic())
        else:
            log.error("message %s %s: %s", received.envelope.message_id, what, error)

    def _is_well(self) -> None:
        self._breaker.success()
        if self._outage.is_out:
            self._outage.succeeded(self._clock.monotonic())

    async def _give_back(self, received: Received, *, failed: bool) -> None:
        """Give a message back, however often it takes: one that stays held is received by nobody."""
        while True:
            try:
                with calling_transport(self._receiver):
                    await self._receiver.roll_back(received, failed=failed)
            except ClaimLost:
                return
            except PostdateError as error:
                self._not_done(received, "cannot be given back now", error)
                if self._stop.is_set():  # closing the receiver, or the end of the process, does it
                    return
                await self._pause_after(error)
            else:
                return

    async def _pause_after(self, error: PostdateError) -> None:
        """Pause for a second, also when the breaker has tripped: it tells nobody when the queues are back.

        :meth:`stop` ends the pause.
        """
        await self._clock.wait_for(self._stop, min(self._breaker.failure(error, self._clock.monotonic()), PAUSE_ARMED))

    def stop(self) -> None:
        """Stop receiving. What was received ahead goes back."""
        self._stop.set()
        if self._reading is not None:
            self._left.extend(self._ready)
            self._ready.clear()
        while self._idle:
            self._idle.popleft().set()


LONGEST_WAIT_SECONDS: Final = 0.5
"""What was received ahead goes back about so long after handling has become slow."""


class Prefetch:
    """How much is received ahead: what is handled in a twentieth of a second, by the pace of the last moments.

    So it is none where handling takes its time, and others may have what waits; and where a message takes microseconds,
    receiving is not what it waits for.

    Args:
        concurrency: so much at least.
    """

    _AHEAD_SECONDS: Final = 0.05
    _MOST: Final = 1_000
    _SHORTEST_SECONDS: Final = _AHEAD_SECONDS  # or many slow ones that end together would look quick

    def __init__(self, concurrency: int) -> None:
        self._concurrency = self._most = concurrency
        self._since = -math.inf
        self.handled = 0
        """Messages since the last look."""

    def most(self, now: float) -> int:
        """Return how many may be in hand, at ``now`` in seconds of a clock that never goes back."""
        elapsed = now - self._since
        if elapsed >= self._SHORTEST_SECONDS:
            pace = self.handled / elapsed
            self._since, self.handled = now, 0
            self._most = max(self._concurrency, min(int(pace * self._AHEAD_SECONDS), self._MOST))
        return self._most


def _is_ending() -> bool:
    """Return whether it is the pump, or what it runs in, that is being cancelled."""
    return anyio.current_effective_deadline() == -math.inf

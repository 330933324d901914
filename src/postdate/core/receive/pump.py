"""The message pump: receives from one queue, lets a step handle each message, and carries out the outcome.

Source: ADR 0026.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Final, TypeAlias

import anyio

from postdate.clock import Clock, in_real_time
from postdate.core.health.attempts import Attempts
from postdate.core.health.circuit_breaker import PAUSE_ARMED, RepeatedFailures
from postdate.core.health.deadlines import GRACE, STOP_DEADLINE, SeparateCall
from postdate.core.receive.outcomes import REQUEUE, REQUEUE_UNCOUNTED, Failed, Recovery, Step, StepOutcome
from postdate.core.receive.settling import Ended, Report, Settler, WatchedReceiver
from postdate.core.recoverability import Resolution, is_outage, retry_delay, text_of
from postdate.errors import ClaimLost, PostdateError, TransportUnavailable
from postdate.ports import Received, Receiver
from postdate.runtime.cancellation import is_scope_cancelled
from postdate.runtime.resource import Resource

log = logging.getLogger("postdate.pump")

_YIELDS_AFTER: Final = 50
"""The number of messages that one worker handles before it lets other tasks of the event loop run."""

_WAITS: Final = (Resolution.WAIT_FOR_STORE, Resolution.REQUEUE, Resolution.WAIT_ALONE)
"""Resolutions after which failed messages of one batch wait together.

If their resolutions differ, the first of this order decides how they wait.
"""

_Failure: TypeAlias = tuple[Received, StepOutcome, PostdateError, Resolution]

_MOST_UNSETTLED: Final = 2_000
"""No messages are received while this many handled messages wait to be acknowledged."""

_ENDS_FORGOTTEN_AFTER: Final = timedelta(seconds=15)
"""Failures to end messages are forgotten after this time without another one.

A message that cannot end is rejected and received again at once. If it did not come again for so long, another process
has it.
"""


class MessagePump:
    """The pump of one queue.

    Start :meth:`run` as a task. :meth:`stop` stops receiving; messages whose handlers run are still finished.

    As many as ``concurrency`` workers handle messages, one at a time each. If a handler does not wait, its worker
    handles the next message in the same turn of the event loop, and starts no task for it. If the queue ``prefetches``,
    messages are received before a worker is free, as long as handling is quick. These messages are acknowledged in
    batches while others are handled (:class:`Settler`), unless ``receiver`` acknowledges them one by one. ``expect`` is
    called with messages that were received together, before any of them is handled. ``report`` is called when messages
    have ended. Neither may raise.
    """

    def __init__(  # noqa: PLR0913 - the parts
        self,
        receiver: Receiver,
        step: Step,
        concurrency: int,
        clock: Clock,
        breaker: RepeatedFailures,
        queue: str,
        *,
        prefetches: bool = False,
        expect: Callable[[Sequence[Received]], Awaitable[None]] | None = None,
        report: Report | None = None,
        resource: Resource | None = None,
    ) -> None:
        self._reading = Prefetch(concurrency) if prefetches else None
        self._receiver = receiver if isinstance(receiver, WatchedReceiver) else WatchedReceiver(receiver, clock)
        self._step, self._concurrency, self._expect, self._report = step, concurrency, expect, report
        self._attempts = Attempts()
        self._clock, self._queue = clock, queue
        # Set when the pump is to end, or has ended by itself.
        self._stop = anyio.Event()
        self.listening = anyio.Event()
        """Set when the first call to receive waits for its answer, or has ended, also if it ended with an error."""
        self._ready: deque[Received] = deque()
        self._to_give_back: deque[Received] = deque()
        self._unended: deque[Callable[[], Awaitable[None]]] = deque()
        self._idle: deque[anyio.Event] = deque()
        self._workers = self._busy = 0
        self._is_waking = self._is_full = self._is_over = False
        self._capacity_freed = anyio.Event()
        in_batches = prefetches and self._receiver.ends_in_batches
        self._settler = Settler(self._receiver, clock, report) if in_batches else None
        resource = resource or Resource(queue)
        self._receiving = resource.calls(f"cannot receive from {queue}", log, breaker=breaker)
        # A queue may deliver messages and take rejected ones back, but acknowledge none: a broker does so that has no
        # space to publish. Receiving succeeds then, so the failures to end need a breaker of their own.
        ends = breaker.of_repeated_calls("ends", _ENDS_FORGOTTEN_AFTER)
        self._ending = resource.calls(
            f"cannot end messages of {queue}", log, breaker=ends, forgotten_after=_ENDS_FORGOTTEN_AFTER
        )

    async def run(self) -> None:
        """Receive and handle messages until stopped; then wait for handlers, however long they take.

        It does not wait for a silent queue: calls that the queue does not answer are abandoned.
        """
        # Calls of the receiver are made in the tasks of workers. A call that does not end would keep all these tasks
        # from ending, so the whole pump runs in a call that can be abandoned.
        work = SeparateCall(self._run)
        try:
            await self._stop.wait()
            await self._wait_for_end(work)
        except BaseException:
            work.cancel()
            with anyio.CancelScope(shield=True):
                await self._wait_for_end(work)
            raise
        finally:
            if not work.ended.is_set():
                work.abandon()
        if work.error is not None:
            raise work.error

    async def _wait_for_end(self, work: SeparateCall[None]) -> None:
        """Wait until the pump has ended, or until it only waits for calls that its queue does not answer."""
        self._receiver.deadlines.shorten()
        while not work.ended.is_set():
            await self._clock.wait_for(work.ended, in_real_time(self._clock, STOP_DEADLINE + GRACE))
            calls = self._busy + (self._settler.calls if self._settler is not None else 0)
            if not work.ended.is_set() and calls <= self._receiver.deadlines.count_overdue_calls():
                log.error("the pump of %s stops without an answer from its queue", self._queue)
                return

    async def _run(self) -> None:
        try:
            async with anyio.create_task_group() as watching:
                watching.start_soon(self._receiver.deadlines.watch)
                await self._pump()
                watching.cancel_scope.cancel()
        finally:
            self._stop.set()
            with anyio.CancelScope(shield=True):
                await self._receiver.close()

    async def _pump(self) -> None:
        async with anyio.create_task_group() as messages:
            async with anyio.create_task_group() as ending:
                receiving = anyio.CancelScope()
                messages.start_soon(self._end_at_stop, receiving)
                if self._reading is not None:
                    messages.start_soon(self._give_back_what_waits, self._reading)
                if self._settler is not None:
                    ending.start_soon(self._settler.run, partial(self._not_ended, messages), self._batch_ended)
                # The loop runs this callback when this task first waits: within the call to receive, or after it.
                asyncio.get_running_loop().call_soon(self.listening.set)
                with receiving:
                    while not self._stop.is_set():
                        await self._receive_some(messages)
                if self._settler is not None:
                    await self._finish(self._settler)
            self._is_over = True
            while self._idle:
                self._idle.popleft().set()

    async def _finish(self, settler: Settler) -> None:
        """Wait until no message is in progress, then stop the settler."""
        await self._until_nothing_in_hand()
        settler.finish()

    async def _end_at_stop(self, receiving: anyio.CancelScope) -> None:
        await self._stop.wait()
        receiving.cancel()

    async def _receive_some(self, messages: anyio.abc.TaskGroup) -> None:
        while (room := self._free_capacity()) <= 0:
            await self._room_made()
        try:
            received = await self._receiver.receive(room, wait=not self._receiving.is_failing)
        except PostdateError as error:
            await self._pause(self._receiving.failed(error, self._clock.monotonic()))
            return
        self._receiving.succeeded(self._clock.monotonic())
        if self._expect is not None and len(received) > 1:
            self._busy += 1
            try:
                with anyio.CancelScope(shield=self._reading is None):
                    await self._expect(received)
            finally:
                self._busy -= 1
        if self._reading is not None and self._stop.is_set():
            return  # closing the receiver returns them to the queue
        if any(each.is_suspect for each in received):
            await self._handle_suspects(received, messages)
            return
        self._ready.extend(received)
        if received:
            self._wake_one(messages)

    async def _handle_suspects(self, received: Sequence[Received], messages: anyio.abc.TaskGroup) -> None:
        """Handle each message while no other of the queue is in hand: its handling may end this process.

        The queue counts that for every message in hand, and those that are not to blame must not reach the error queue.
        A suspect comes alone. From a queue that does not see to that, the others go back at once.
        """
        suspect = next(each for each in received if each.is_suspect)
        for other in received:
            if other is not suspect:
                await self._give_back(other, failed=False)
        await self._until_nothing_in_hand()
        self._ready.append(suspect)
        self._wake_one(messages)
        await self._until_nothing_in_hand()

    async def _until_nothing_in_hand(self) -> None:
        while self._in_hand or self._unended or (self._settler is not None and self._settler.count):
            await self._room_made()

    def _free_capacity(self) -> int:
        """Return how many messages may be received now.

        When messages are prefetched, 0 instead of a few: one call that receives many costs less.
        """
        if self._reading is None:
            return self._concurrency - self._in_hand
        if self._settler is not None and self._settler.count >= _MOST_UNSETTLED:
            return 0
        most = self._reading.most(anyio.current_time())
        room = most - self._in_hand
        return room if self._in_hand < self._concurrency or room >= most // 4 else 0

    async def _room_made(self) -> None:
        self._capacity_freed, self._is_full = anyio.Event(), True
        await self._capacity_freed.wait()

    def _batch_ended(self, *, has_ended: bool) -> None:
        """Note that the settler has finished a batch; ``has_ended``: at least one of its messages was acknowledged."""
        if has_ended:
            self._ending.succeeded(self._clock.monotonic())
        self._signal_capacity()

    def _signal_capacity(self) -> None:
        if self._is_full:
            self._is_full = False
            self._capacity_freed.set()

    async def _give_back_what_waits(self, reading: Prefetch) -> None:
        """Return prefetched messages to the queue when handling has become too slow for them."""
        while not self._stop.is_set():
            with anyio.move_on_after(LONGEST_WAIT_SECONDS):
                await self._stop.wait()
            most = reading.most(anyio.current_time())
            while self._ready and self._in_hand > most:
                await self._give_back(self._ready.pop(), failed=False)
        # After the stop, a handler may take long, and prefetched messages must not wait for it. When no worker is busy,
        # closing the receiver returns them sooner.
        while self._to_give_back and self._busy:
            await self._give_back(self._to_give_back.pop(), failed=False)

    @property
    def _in_hand(self) -> int:
        return self._busy + len(self._ready)

    def _wake_one(self, messages: anyio.abc.TaskGroup) -> None:
        """Wake or start one worker. It wakes the next one if more is ready, so no worker is woken without work."""
        if self._is_waking:
            return
        if self._idle:
            self._is_waking = True
            self._idle.popleft().set()
        elif self._workers < self._concurrency:
            self._is_waking = True
            self._workers += 1
            messages.start_soon(self._work, messages)

    async def _work(self, messages: anyio.abc.TaskGroup) -> None:
        """Handle ready messages one after the other. A task for each message would cost as much as handling it.

        A handler can cancel its own task by means of asyncio. Then another worker takes the place of this one.
        """
        self._is_waking = False
        try:
            await self._handle_ready(messages)
        except anyio.get_cancelled_exc_class():
            if is_scope_cancelled():
                raise
            # Swallow the cancellation: if it left this task, the task group would end the whole pump.
        finally:
            self._workers -= 1
        if self._ready or self._unended:
            self._wake_one(messages)

    async def _handle_ready(self, messages: anyio.abc.TaskGroup) -> None:
        handled = 0
        while True:
            while self._ready or self._unended:
                if self._unended:
                    await self._unended.popleft()()
                else:
                    received = self._ready.popleft()
                    if self._ready:
                        self._wake_one(messages)
                    await self.handle(received)
                handled += 1
                if handled % _YIELDS_AFTER == 0:
                    await asyncio.sleep(0)
            if self._is_over:
                return
            woken = anyio.Event()
            self._idle.append(woken)
            try:
                await woken.wait()
            finally:
                if woken.is_set():
                    self._is_waking = False
                else:
                    self._idle.remove(woken)

    async def handle(self, received: Received) -> None:
        """Handle a message. On return it is acknowledged, or queued in the settler, or back in its queue."""
        self._busy += 1
        try:
            as_seen = self._with_lost_claims(received) if self._attempts else received
            outcome = await self._step(as_seen)
            if self._settler is not None and outcome.end is not None and as_seen is received:
                self._settler.put(received, outcome)
            else:
                await self._see_through(received, as_seen, outcome)
        except BaseException as error:  # noqa: BLE001 - `_not_handled` raises other errors again
            await self._not_handled(received, error)
        finally:
            self._busy -= 1
            if self._reading is not None:
                self._reading.handled += 1
            self._signal_capacity()

    def _with_lost_claims(self, received: Received) -> Received:
        """Return the message with its lost claims counted as failures, unless its queue has counted as many already."""
        attempt = self._attempts.find(received.envelope.message_id)
        if attempt is None:
            return received
        lost = attempt.lost_claims - received.unanswered
        if lost <= 0:
            self._attempts.forget(received.envelope.message_id)
            return received
        return received._replace(failures=received.failures + lost, unanswered=received.unanswered + lost)

    def _note_lost_claim(self, received: Received, error: Exception) -> None:
        """Count a claim that was lost after its message was handled and before it was acknowledged.

        Few queues count these themselves, so without this the message might come again for ever.
        """
        if isinstance(error, ClaimLost):
            self._attempts.note(received.envelope.message_id).lost_claims += 1

    async def _see_through(self, received: Received, as_seen: Received, outcome: StepOutcome) -> None:
        """Carry out an outcome. If that fails, carry out the next one that is decided, until one succeeds.

        ``as_seen`` is the message as the step got it, with its lost claims counted.
        """
        while True:
            if outcome.wait is None:
                error = await self._carry_out(received, outcome)
                if error is None:
                    return
                as_seen, outcome = await self._after(as_seen, outcome, error, outcome.resolve(as_seen, error))
            else:
                await self._clock.wait_for(self._stop, outcome.wait)
                outcome = REQUEUE_UNCOUNTED if self._stop.is_set() else await self._step(as_seen)

    async def _carry_out(self, received: Received, outcome: StepOutcome) -> PostdateError | None:
        """Acknowledge a message or return it to its queue; return the error if that fails."""
        if outcome.end is None and outcome.failed is not None:
            return self._receiver.deadlines.translate(outcome.failed.error)
        if outcome.end is None:
            if not await self._give_back(received, failed=outcome is not REQUEUE_UNCOUNTED):
                self._attempts.note(received.envelope.message_id).lost_claims += 1
            if self._report is not None:
                self._report(())
            return None
        try:
            await self._receiver.commit(received, self._clock.now(), outcome.end)
        except Exception as raised:  # noqa: BLE001 - an adapter may raise any error; the settler treats it the same way
            error = self._receiver.deadlines.translate(raised)
            self._note_lost_claim(received, error)
            return error
        self._ending.succeeded(self._clock.monotonic())
        self._attempts.forget(received.envelope.message_id)
        if self._report is not None:
            self._report((outcome.end,))
        for each in outcome.afterwards:
            await each()
        return None

    async def _after(
        self, as_seen: Received, outcome: StepOutcome, error: PostdateError, resolution: Resolution
    ) -> tuple[Received, StepOutcome]:
        """Carry out the resolution of a failure. Return the message for its next step, and the next outcome, or raise.

        Raises:
            PostdateError: the message is to be returned to its queue; this is the error that was passed.
        """
        recovery = outcome.recovery
        if recovery is None or resolution is Resolution.REQUEUE:
            raise error
        if resolution in (Resolution.ERROR_COPY, Resolution.BRIEF_ERROR_COPY):
            failed = outcome.failed or Failed(error)
            log.warning("message %s goes to the error queue: %s", as_seen.envelope.message_id, text_of(error))
            return as_seen, recovery.copied(as_seen, failed, brief=resolution is Resolution.BRIEF_ERROR_COPY)
        if resolution is Resolution.STUCK:
            log.error("no error queue takes message %s, which stays: %s", as_seen.envelope.message_id, text_of(error))
            if recovery.failure_rate is not None:
                recovery.failure_rate.failure(error, self._clock.monotonic())
            recovery.metrics.count("retried", 1)
            await self._clock.wait_for(self._stop, retry_delay(as_seen.failures))
            return as_seen, REQUEUE_UNCOUNTED if self._stop.is_set() else REQUEUE
        if resolution is Resolution.POLICY:
            if recovery.pauses_after(error) and not as_seen.is_last:
                await self._wait_for_store(recovery, error, resolution)
            return as_seen, recovery.decided(as_seen, outcome, error)
        if resolution is not Resolution.RETRY_NOW and recovery.outage is not None:
            await recovery.outage.wait(error, resolution)
            if self._stop.is_set():
                return as_seen, REQUEUE_UNCOUNTED
        as_seen = as_seen._replace(tries=as_seen.tries + 1)
        return as_seen, await self._step(as_seen)

    def _not_ended(self, messages: anyio.abc.TaskGroup, some: Sequence[Ended]) -> None:
        """Let workers finish the messages of a batch that failed to end, or that have an ``afterwards``."""
        waiting = list[_Failure]()
        for received, outcome, raised in some:
            if raised is None:
                self._unended.append(partial(self._after_end, received, outcome))
                continue
            error = self._receiver.deadlines.translate(raised)
            self._note_lost_claim(received, error)
            failure = received, outcome, error, outcome.resolve(received, error)
            if failure[-1] in _WAITS:
                waiting.append(failure)
            else:
                self._unended.append(partial(self._after_end, received, outcome, failure))
        if waiting:
            self._unended.append(partial(self._wait_together, waiting))
        self._wake_one(messages)

    async def _wait_together(self, failed: Sequence[_Failure]) -> None:
        """Return messages that did not cause their errors to the queue, after one pause for all of them."""
        self._busy += 1
        try:
            first, outcome, error, resolution = min(failed, key=lambda each: _WAITS.index(each[-1]))
            if (
                resolution is not Resolution.REQUEUE
                and outcome.recovery is not None
                and outcome.recovery.outage is not None
            ):
                await outcome.recovery.outage.wait(error, resolution)
            else:
                more = f"and {len(failed) - 1} others " if len(failed) > 1 else ""
                await self._pause(self._not_done(first, f"{more}was not finished", error))
            for received, _, each, _ in failed:
                await self._give_back(received, failed=not is_outage(each))
        finally:
            self._busy -= 1
            self._signal_capacity()

    async def _after_end(self, received: Received, outcome: StepOutcome, failure: _Failure | None = None) -> None:
        self._busy += 1
        try:
            if failure is None:
                for each in outcome.afterwards:
                    await each()
            else:
                as_seen, outcome = await self._after(*failure)
                await self._see_through(received, as_seen, outcome)
        except BaseException as error:  # noqa: BLE001 - `_not_handled` raises other errors again
            await self._not_handled(received, error)
        finally:
            self._busy -= 1
            self._signal_capacity()

    async def _not_handled(self, received: Received, failure: BaseException) -> None:
        """Return a message whose handling raised an unexpected error to its queue, after a pause."""
        try:
            self._receiver.deadlines.raise_translated(failure)
        except anyio.get_cancelled_exc_class():
            if not is_scope_cancelled():  # this worker ends; another one returns the message to its queue
                self._unended.append(partial(self._after_stray_cancellation, received))
            raise
        except PostdateError as error:
            await self._pause(self._not_done(received, "was not finished", error))
            await self._give_back(received, failed=not is_outage(error))

    async def _after_stray_cancellation(self, received: Received) -> None:
        """Return the message of a worker that was cancelled while its pump goes on to the queue, after a pause."""
        self._busy += 1
        try:
            error = TransportUnavailable("the task that handled it was cancelled by somebody else than its endpoint")
            await self._pause(self._not_done(received, "was not finished", error))
            await self._give_back(received, failed=True)
        finally:
            self._busy -= 1
            self._signal_capacity()

    def _not_done(self, received: Received, what: str, error: PostdateError) -> timedelta:
        """Note that a step with a message failed; ``what`` names it for the log. Return how long to pause."""
        seconds = self._clock.monotonic()
        if is_outage(error):  # every other received message meets it, too: log it once
            return self._ending.failed(error, seconds)
        log.error("message %s %s: %s", received.envelope.message_id, what, error)
        return self._ending.refused(error, seconds)

    async def _give_back(self, received: Received, *, failed: bool) -> bool:
        """Return a message to its queue, and retry until that succeeds: as long as it is claimed, no process gets it.

        It does not count as a success of the queue: a queue may take messages back and still acknowledge none.

        Returns:
            Whether the claim was in force until then.
        """
        while True:
            try:
                await self._receiver.roll_back(received, failed=failed)
            except ClaimLost:
                return False
            except PostdateError as error:
                pause = self._not_done(received, "cannot be given back now", error)
                if self._stop.is_set():  # closing the receiver, or the end of the process, returns the message
                    return True
                await self._pause(pause)
            else:
                return True

    async def _wait_for_store(self, recovery: Recovery, error: PostdateError, resolution: Resolution) -> None:
        if recovery.outage is None:
            await self._pause(self._ending.refused(error, self._clock.monotonic()))
        else:
            await recovery.outage.wait(error, resolution)

    async def _pause(self, pause: timedelta) -> None:
        """Pause for at most a second: a breaker that has tripped does not notice when the queues are back."""
        await self._clock.wait_for(self._stop, min(pause, PAUSE_ARMED))

    def stop(self) -> None:
        """Stop receiving. Prefetched messages return to the queue."""
        self._stop.set()
        self._receiver.stop()
        if self._reading is not None:
            self._to_give_back.extend(self._ready)
            self._ready.clear()


LONGEST_WAIT_SECONDS: Final = 0.5
"""Prefetched messages return to the queue about this long after handling has become slow."""


class Prefetch:
    """The number of messages that a pump may have received: ``concurrency``, or those that it handles in 50 ms.

    Recent handling decides. If handling is slow, no message is prefetched, and other processes can receive the waiting
    messages. If a message takes microseconds, handling does not wait for receiving.
    """

    _AHEAD_SECONDS: Final = 0.05
    _MOST: Final = 1_000
    _SHORTEST_SECONDS: Final = _AHEAD_SECONDS  # over less time, slow messages that end together would look quick

    def __init__(self, concurrency: int) -> None:
        self._concurrency = self._most = concurrency
        self._since = -math.inf
        self.handled = 0
        """The number of messages handled since :meth:`most` last measured."""

    def most(self, now: float) -> int:
        """Return how many messages may be received or being handled; ``now`` is in monotonic seconds."""
        elapsed = now - self._since
        if elapsed >= self._SHORTEST_SECONDS:
            pace = self.handled / elapsed
            self._since, self.handled = now, 0
            self._most = max(self._concurrency, min(int(pace * self._AHEAD_SECONDS), self._MOST))
        return self._most

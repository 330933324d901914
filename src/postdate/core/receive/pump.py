"""The message pump: receives from one queue, has a step handle each message, and ends it. Source: ADR 0026."""

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
"""Messages that one worker handles before others have the loop."""

_WAITS: Final = (Resolution.WAIT_FOR_STORE, Resolution.REQUEUE, Resolution.WAIT_ALONE)
"""Ways of messages of one batch that wait together when they have failed; the first of them in this order says for
what."""

_Failure: TypeAlias = tuple[Received, StepOutcome, PostdateError, Resolution]

_MOST_UNSETTLED: Final = 2_000
"""No more are received while so many wait for their end."""

_ENDS_FORGOTTEN_AFTER: Final = timedelta(seconds=15)
"""A message that cannot end goes back, and comes again at once. If none came for so long, another process has it."""


class MessagePump:
    """Start :meth:`run` as a task; :meth:`stop` stops receiving and lets what is in hand finish.

    Up to ``concurrency`` messages are handled at a time, each by one of as many workers. Where a handler waits for
    nothing, the next message follows in the same turn of the loop, and no task is begun for it. A queue that
    ``prefetches`` is read ahead, as long as messages are handled within moments, and these end in batches, while others
    are handled (:class:`Settler`), unless ``receiver`` has them end one by one. ``expect`` is called with messages that
    were received together, before any of them is handled, and ``report`` when some have ended; both raise nothing.
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
        # Set when it is to end, or has ended by itself.
        self._stop = anyio.Event()
        self.listening = anyio.Event()
        """Set once a first call to receive has begun to wait for its answer, or has ended, be it with an error."""
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
        # A queue may give messages out, take them back, and end none, as a broker does that has no room to publish.
        ends = breaker.of_repeated_calls("ends", _ENDS_FORGOTTEN_AFTER)
        self._ending = resource.calls(
            f"cannot end messages of {queue}", log, breaker=ends, forgotten_after=_ENDS_FORGOTTEN_AFTER
        )

    async def run(self) -> None:
        """Receive and hand over until stopped; then wait for handlers, as long as they take.

        Queues that have fallen silent are not waited for: calls that they do not answer are abandoned.
        """
        # Calls of the receiver are made in the tasks of workers. A call that does not end keeps all tasks of the pump.
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
        """Wait for the end, unless all that keeps it from ending are calls that its queue does not answer."""
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
                # What is called soon runs when this task first waits: within the call to receive, or after it.
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
            return  # closing the receiver gives them back
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
        """Return how many may be received now; when reading ahead, 0 instead of a few."""
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
        """Note that the settler is done with a batch; ``has_ended``: with some of its messages as it was to be."""
        if has_ended:
            self._ending.succeeded(self._clock.monotonic())
        self._signal_capacity()

    def _signal_capacity(self) -> None:
        if self._is_full:
            self._is_full = False
            self._capacity_freed.set()

    async def _give_back_what_waits(self, reading: Prefetch) -> None:
        """Give back messages that were received ahead when handling has become too slow for that."""
        while not self._stop.is_set():
            with anyio.move_on_after(LONGEST_WAIT_SECONDS):
                await self._stop.wait()
            most = reading.most(anyio.current_time())
            while self._ready and self._in_hand > most:
                await self._give_back(self._ready.pop(), failed=False)
        # A handler may take its time. When none is busy, closing the receiver gives back the messages sooner.
        while self._to_give_back and self._busy:
            await self._give_back(self._to_give_back.pop(), failed=False)

    @property
    def _in_hand(self) -> int:
        return self._busy + len(self._ready)

    def _wake_one(self, messages: anyio.abc.TaskGroup) -> None:
        """Wake or start one worker, which wakes the next if more is ready: none is woken that finds nothing to do."""
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
        """Handle ready messages one after the other: a task for each would cost as much as handling it.

        A handler can cancel the task it runs in, by asyncio's own means: then another worker takes its place.
        """
        self._is_waking = False
        try:
            await self._handle_ready(messages)
        except anyio.get_cancelled_exc_class():
            if is_scope_cancelled():
                raise
            # Let out, the cancellation would end the whole pump.
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
        """Handle a message. On return it has ended, is with the settler, or is back in its queue."""
        self._busy += 1
        try:
            as_seen = self._with_lost_claims(received) if self._attempts else received
            outcome = await self._step(as_seen)
            if self._settler is not None and outcome.end is not None and as_seen is received:
                self._settler.put(received, outcome)
            else:
                await self._see_through(received, as_seen, outcome)
        except BaseException as error:  # noqa: BLE001 - what is not dealt with is raised again
            await self._not_handled(received, error)
        finally:
            self._busy -= 1
            if self._reading is not None:
                self._reading.handled += 1
            self._signal_capacity()

    def _with_lost_claims(self, received: Received) -> Received:
        """Count claims that a message lost here as failures, as far as its queue has not counted as many itself."""
        attempt = self._attempts.find(received.envelope.message_id)
        if attempt is None:
            return received
        lost = attempt.lost_claims - received.unanswered
        if lost <= 0:
            self._attempts.forget(received.envelope.message_id)
            return received
        return received._replace(failures=received.failures + lost, unanswered=received.unanswered + lost)

    def _note_lost_claim(self, received: Received, error: Exception) -> None:
        """Count a claim that was lost before its message, handled, could end: few queues count it."""
        if isinstance(error, ClaimLost):
            self._attempts.note(received.envelope.message_id).lost_claims += 1

    async def _see_through(self, received: Received, as_seen: Received, outcome: StepOutcome) -> None:
        """Carry out an outcome, or the one decided when that fails. The step saw the message ``as_seen``."""
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
        """End a message or give it back; return the error if that cannot be."""
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
        except Exception as raised:  # noqa: BLE001 - whosever it is: as where ends go in batches
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
        """Do what was resolved about a failed message. Return it for its next step, with the next outcome, or raise."""
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
        """Have workers finish messages of a batch that failed to end, or have an ``afterwards``."""
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
        """Give back messages that are not to blame for their errors, after one pause for all of them."""
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
        except BaseException as error:  # noqa: BLE001 - what is not dealt with is raised again
            await self._not_handled(received, error)
        finally:
            self._busy -= 1
            self._signal_capacity()

    async def _not_handled(self, received: Received, failure: BaseException) -> None:
        """Give a message back that could not be dealt with, after a pause."""
        try:
            self._receiver.deadlines.raise_translated(failure)
        except anyio.get_cancelled_exc_class():
            if not is_scope_cancelled():  # another worker gives it back: this one ends
                self._unended.append(partial(self._after_stray_cancellation, received))
            raise
        except PostdateError as error:
            await self._pause(self._not_done(received, "was not finished", error))
            await self._give_back(received, failed=not is_outage(error))

    async def _after_stray_cancellation(self, received: Received) -> None:
        """Give back, after a pause, the message of a worker that was cancelled while its pump goes on."""
        self._busy += 1
        try:
            error = TransportUnavailable("the task that handled it was cancelled by somebody else than its endpoint")
            await self._pause(self._not_done(received, "was not finished", error))
            await self._give_back(received, failed=True)
        finally:
            self._busy -= 1
            self._signal_capacity()

    def _not_done(self, received: Received, what: str, error: PostdateError) -> timedelta:
        """Note that something could not be done with a message; return how long to pause."""
        seconds = self._clock.monotonic()
        if is_outage(error):  # which every message in hand meets
            return self._ending.failed(error, seconds)
        log.error("message %s %s: %s", received.envelope.message_id, what, error)
        return self._ending.refused(error, seconds)

    async def _give_back(self, received: Received, *, failed: bool) -> bool:
        """Give a message back, however often it takes: one that stays held is received by nobody.

        Returns:
            Whether it was held until then. That it went back does not say that messages can end.
        """
        while True:
            try:
                await self._receiver.roll_back(received, failed=failed)
            except ClaimLost:
                return False
            except PostdateError as error:
                pause = self._not_done(received, "cannot be given back now", error)
                if self._stop.is_set():  # closing the receiver, or the end of the process, does it
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
        """Pause for a second at most: a breaker that has tripped cannot tell when the queues are back."""
        await self._clock.wait_for(self._stop, min(pause, PAUSE_ARMED))

    def stop(self) -> None:
        """Stop receiving. Messages that were received ahead go back."""
        self._stop.set()
        self._receiver.stop()
        if self._reading is not None:
            self._to_give_back.extend(self._ready)
            self._ready.clear()


LONGEST_WAIT_SECONDS: Final = 0.5
"""Messages that were received ahead go back about so long after handling has become slow."""


class Prefetch:
    """How many messages may be in hand: ``concurrency``, or as many as are handled in 50 ms, as of late.

    So none is received ahead where handling takes its time, and others may have those that wait; and where a message
    takes microseconds, handling does not wait for receiving.
    """

    _AHEAD_SECONDS: Final = 0.05
    _MOST: Final = 1_000
    _SHORTEST_SECONDS: Final = _AHEAD_SECONDS  # or many slow messages that end together would look quick

    def __init__(self, concurrency: int) -> None:
        self._concurrency = self._most = concurrency
        self._since = -math.inf
        self.handled = 0
        """Messages since the last look."""

    def most(self, now: float) -> int:
        """Return how many may be in hand; ``now`` is in monotonic seconds."""
        elapsed = now - self._since
        if elapsed >= self._SHORTEST_SECONDS:
            pace = self.handled / elapsed
            self._since, self.handled = now, 0
            self._most = max(self._concurrency, min(int(pace * self._AHEAD_SECONDS), self._MOST))
        return self._most

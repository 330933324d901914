"""The message pump: receives from one queue, lets a step handle each message, and carries out the outcome.

Source: ADR 0026.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Final, TypeAlias

import anyio

from postdate.clock import Clock, in_real_time
from postdate.core.health.circuit_breaker import PAUSE_ARMED, RepeatedFailures
from postdate.core.health.deadlines import GRACE, STOP_DEADLINE, SeparateCall
from postdate.core.health.message_memory import MessageMemory
from postdate.core.receive.outcomes import REQUEUE, REQUEUE_UNCOUNTED, Recovery, Step, StepFailure, StepOutcome
from postdate.core.receive.prefetch import LONGEST_WAIT_SECONDS, Prefetch
from postdate.core.receive.settling import Report, SettledMessage, Settler, WatchedReceiver
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

_SETTLE_FAILURES_FORGOTTEN_AFTER: Final = timedelta(seconds=15)
"""Failures to settle messages are forgotten after this time without another one.

A message that cannot be settled is rejected and received again at once. If it was not received again for so long,
another process has received it.
"""


class MessagePump:
    """The pump of one queue.

    Start :meth:`run` as a task. :meth:`stop` stops receiving; messages whose handlers run are still finished.

    As many as ``concurrency`` workers handle messages, one at a time each. If a handler does not wait, its worker
    handles the next message in the same iteration of the event loop, and starts no task for it. If the queue
    ``prefetches``, messages are received before a worker is free, as long as handling is quick. These messages are
    acknowledged in batches while others are handled (:class:`Settler`), unless ``receiver`` acknowledges them one by
    one. ``preload`` is called with messages that were received together, before any of them is handled. ``report`` is
    called when messages were settled. Neither may raise.
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
        preload: Callable[[Sequence[Received]], Awaitable[None]] | None = None,
        report: Report | None = None,
        resource: Resource | None = None,
    ) -> None:
        # All fields belong to the thread of the event loop.
        self._prefetch = Prefetch(concurrency) if prefetches else None
        self._receiver = receiver if isinstance(receiver, WatchedReceiver) else WatchedReceiver(receiver, clock)
        self._step = step
        # The largest number of workers.
        self._concurrency = concurrency
        self._preload = preload
        self._report = report
        # Lost claims by message id. Few queues count these themselves.
        self._memory = MessageMemory()
        self._clock = clock
        self._queue = queue
        # Set when the pump is to stop, or has stopped by itself.
        self._stop = anyio.Event()
        self.listening = anyio.Event()
        """Set when the first call to receive waits for its answer, or has returned or raised an error."""
        # Received messages that no worker handles yet.
        self._ready: deque[Received] = deque()
        # Prefetched messages that the stop found in `_ready`.
        self._to_reject: deque[Received] = deque()
        # Calls that finish messages of the settler. Workers make them before they handle ready messages.
        self._pending_completions: deque[Callable[[], Awaitable[None]]] = deque()
        # One event for each worker that waits for work.
        self._idle: deque[anyio.Event] = deque()
        # Worker tasks, with the idle ones.
        self._workers = 0
        # Messages, or groups of them, in handling or in a call of the queue.
        self._busy = 0
        # A worker was woken or started and does not run yet. It wakes the next one itself.
        self._is_waking = False
        # A task waits for `_capacity_freed`.
        self._has_waiter = False
        # Nothing is received any more: idle workers end.
        self._is_over = False
        self._capacity_freed = anyio.Event()
        settles_in_batches = prefetches and self._receiver.settles_in_batches
        self._settler = Settler(self._receiver, clock, report) if settles_in_batches else None
        resource = resource or Resource(queue)
        self._receive_calls = resource.calls(f"cannot receive from {queue}", log, breaker=breaker)
        # A queue may deliver messages and accept rejected ones, but acknowledge none: a broker without space to publish
        # does so. Receiving succeeds then, so the failures to settle need a separate breaker.
        settle_breaker = breaker.create_for_calls("ends", _SETTLE_FAILURES_FORGOTTEN_AFTER)
        self._settle_calls = resource.calls(
            f"cannot acknowledge messages of {queue}",
            log,
            breaker=settle_breaker,
            forgotten_after=_SETTLE_FAILURES_FORGOTTEN_AFTER,
        )

    async def run(self) -> None:
        """Receive and handle messages until stopped; then wait for handlers, however long they take.

        It does not wait for ever for the queue: calls without an answer are abandoned.
        """
        # Calls of the receiver are made in the tasks of workers. A call that never returns would keep all these tasks
        # from ending, so the whole pump runs in a call that can be abandoned.
        call = SeparateCall(self._run)
        try:
            await self._stop.wait()
            await self._wait_until_done(call)
        except BaseException:
            call.cancel()
            with anyio.CancelScope(shield=True):
                await self._wait_until_done(call)
            raise
        finally:
            if not call.ended.is_set():
                call.abandon()
        if call.error is not None:
            raise call.error

    async def _wait_until_done(self, call: SeparateCall[None]) -> None:
        """Wait until the pump has stopped, or until it only waits for calls that its queue does not answer."""
        self._receiver.deadlines.shorten()
        while not call.ended.is_set():
            await self._clock.wait_for(call.ended, in_real_time(self._clock, STOP_DEADLINE + GRACE))
            calls = self._busy + (self._settler.calls if self._settler is not None else 0)
            if not call.ended.is_set() and calls <= self._receiver.deadlines.count_overdue_calls():
                log.error("the pump of %s stops without an answer from its queue", self._queue)
                return

    async def _run(self) -> None:
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._receiver.deadlines.cancel_overdue_calls)
                await self._receive_until_stopped()
                tasks.cancel_scope.cancel()
        finally:
            self._stop.set()
            with anyio.CancelScope(shield=True):
                await self._receiver.close()

    async def _receive_until_stopped(self) -> None:
        async with anyio.create_task_group() as messages:
            async with anyio.create_task_group() as settle_tasks:
                receive_scope = anyio.CancelScope()
                messages.start_soon(self._cancel_receive_at_stop, receive_scope)
                if self._prefetch is not None:
                    messages.start_soon(self._reject_surplus, self._prefetch)
                if self._settler is not None:
                    settle_tasks.start_soon(
                        self._settler.run, partial(self._queue_completions, messages), self._report_settled_batch
                    )
                # The loop runs this callback when this task first waits: within the call to receive, or after it.
                asyncio.get_running_loop().call_soon(self.listening.set)
                with receive_scope:
                    while not self._stop.is_set():
                        await self._receive_batch(messages)
                if self._settler is not None:
                    await self._stop_settler(self._settler)
            self._is_over = True
            while self._idle:
                self._idle.popleft().set()

    async def _stop_settler(self, settler: Settler) -> None:
        """Wait until no message is in progress, then stop the settler."""
        await self._wait_until_empty()
        settler.stop_when_empty()

    async def _cancel_receive_at_stop(self, receive_scope: anyio.CancelScope) -> None:
        await self._stop.wait()
        receive_scope.cancel()

    async def _receive_batch(self, messages: anyio.abc.TaskGroup) -> None:
        while (capacity := self._free_capacity()) <= 0:
            await self._wait_for_capacity()
        try:
            received = await self._receiver.receive(capacity, wait=not self._receive_calls.is_failing)
        except PostdateError as error:
            await self._pause(self._receive_calls.report_failure(error, self._clock.monotonic()))
            return
        self._receive_calls.report_success(self._clock.monotonic())
        if self._preload is not None and len(received) > 1:
            self._busy += 1
            try:
                with anyio.CancelScope(shield=self._prefetch is None):
                    await self._preload(received)
            finally:
                self._busy -= 1
        if self._prefetch is not None and self._stop.is_set():
            return  # closing the receiver returns them to the queue
        if any(each.is_suspect for each in received):
            await self._handle_suspects(received, messages)
            return
        self._ready.extend(received)
        if received:
            self._wake_one(messages)

    async def _handle_suspects(self, received: Sequence[Received], messages: anyio.abc.TaskGroup) -> None:
        """Handle a suspect message while no other message of the queue is received: it may end this process.

        The queue counts the end of the process against every received message, and the innocent messages must not reach
        the error queue. Most queues deliver a suspect alone. If a queue does not, the other messages are rejected at
        once.
        """
        suspect = next(each for each in received if each.is_suspect)
        for other in received:
            if other is not suspect:
                await self._reject(other, failed=False)
        await self._wait_until_empty()
        self._ready.append(suspect)
        self._wake_one(messages)
        await self._wait_until_empty()

    async def _wait_until_empty(self) -> None:
        while self._received_count or self._pending_completions or (self._settler is not None and self._settler.count):
            await self._wait_for_capacity()

    def _free_capacity(self) -> int:
        """Return how many messages may be received now.

        When messages are prefetched, 0 instead of a few: one call that receives many costs less.
        """
        if self._prefetch is None:
            return self._concurrency - self._received_count
        if self._settler is not None and self._settler.count >= _MOST_UNSETTLED:
            return 0
        limit = self._prefetch.limit_at(anyio.current_time())
        capacity = limit - self._received_count
        return capacity if self._received_count < self._concurrency or capacity >= limit // 4 else 0

    async def _wait_for_capacity(self) -> None:
        self._capacity_freed, self._has_waiter = anyio.Event(), True
        await self._capacity_freed.wait()

    def _report_settled_batch(self, *, has_acknowledged: bool) -> None:
        """Report that the settler has finished a batch.

        ``has_acknowledged``: at least one of its messages was acknowledged.
        """
        if has_acknowledged:
            self._settle_calls.report_success(self._clock.monotonic())
        self._signal_capacity()

    def _signal_capacity(self) -> None:
        if self._has_waiter:
            self._has_waiter = False
            self._capacity_freed.set()

    async def _reject_surplus(self, prefetch: Prefetch) -> None:
        """Return prefetched messages to the queue when handling has become too slow for them."""
        while not self._stop.is_set():
            with anyio.move_on_after(LONGEST_WAIT_SECONDS):
                await self._stop.wait()
            limit = prefetch.limit_at(anyio.current_time())
            while self._ready and self._received_count > limit:
                await self._reject(self._ready.pop(), failed=False)
        # After the stop, a handler may run for long, and prefetched messages must not wait for it. When no worker is
        # busy, closing the receiver returns them sooner.
        while self._to_reject and self._busy:
            await self._reject(self._to_reject.pop(), failed=False)

    @property
    def _received_count(self) -> int:
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
            messages.start_soon(self._run_worker, messages)

    async def _run_worker(self, messages: anyio.abc.TaskGroup) -> None:
        """Handle ready messages one after the other. A task for each message would cost as much as handling it.

        A handler can cancel its own task by means of asyncio. Then another worker replaces this one.
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
        if self._ready or self._pending_completions:
            self._wake_one(messages)

    async def _handle_ready(self, messages: anyio.abc.TaskGroup) -> None:
        handled_count = 0
        while True:
            while self._ready or self._pending_completions:
                if self._pending_completions:
                    await self._pending_completions.popleft()()
                else:
                    received = self._ready.popleft()
                    if self._ready:
                        self._wake_one(messages)
                    await self.handle(received)
                handled_count += 1
                if handled_count % _YIELDS_AFTER == 0:
                    await asyncio.sleep(0)
            if self._is_over:
                return
            wake = anyio.Event()
            self._idle.append(wake)
            try:
                await wake.wait()
            finally:
                if wake.is_set():
                    self._is_waking = False
                else:
                    self._idle.remove(wake)

    async def handle(self, received: Received) -> None:
        """Handle a message. On return it is acknowledged, or queued in the settler, or back in its queue."""
        self._busy += 1
        try:
            step_message = self._add_lost_claims(received) if self._memory else received
            outcome = await self._step(step_message)
            if self._settler is not None and outcome.completion is not None and step_message is received:
                self._settler.add(received, outcome)
            else:
                await self._complete_message(received, step_message, outcome)
        except BaseException as error:  # noqa: BLE001 - `_handle_unexpected_error` raises other errors again
            await self._handle_unexpected_error(received, error)
        finally:
            self._busy -= 1
            if self._prefetch is not None:
                self._prefetch.handled += 1
            self._signal_capacity()

    def _add_lost_claims(self, received: Received) -> Received:
        """Return the message with its lost claims counted as failures, unless its queue has counted as many already."""
        facts = self._memory.find(received.envelope.message_id)
        if facts is None:
            return received
        lost = facts.lost_claims - received.unanswered
        if lost <= 0:
            self._memory.forget(received.envelope.message_id)
            return received
        return received._replace(failures=received.failures + lost, unanswered=received.unanswered + lost)

    def _remember_lost_claim(self, received: Received, error: Exception) -> None:
        """Count a claim that was lost after its message was handled and before it was acknowledged.

        Few queues count these themselves, so without this the message might be received again for ever.
        """
        if isinstance(error, ClaimLost):
            self._memory.get_or_create(received.envelope.message_id).lost_claims += 1

    async def _complete_message(self, received: Received, step_message: Received, outcome: StepOutcome) -> None:
        """Carry out an outcome. If that fails, carry out the next one that is decided, until one succeeds.

        ``step_message`` is the message as the step got it, with its lost claims counted.
        """
        while True:
            if outcome.wait is None:
                error = await self._apply_outcome(received, outcome)
                if error is None:
                    return
                step_message, outcome = await self._recover(
                    step_message, outcome, error, outcome.resolve(step_message, error)
                )
            else:
                await self._clock.wait_for(self._stop, outcome.wait)
                outcome = REQUEUE_UNCOUNTED if self._stop.is_set() else await self._step(step_message)

    async def _apply_outcome(self, received: Received, outcome: StepOutcome) -> PostdateError | None:
        """Acknowledge a message or return it to its queue; return the error if that fails."""
        if outcome.completion is None and outcome.failure is not None:
            return self._receiver.deadlines.translate_error(outcome.failure.error)
        if outcome.completion is None:
            if not await self._reject(received, failed=outcome is not REQUEUE_UNCOUNTED):
                self._memory.get_or_create(received.envelope.message_id).lost_claims += 1
            if self._report is not None:
                self._report(())
            return None
        try:
            await self._receiver.commit(received, self._clock.now(), outcome.completion)
        except Exception as raised:  # noqa: BLE001 - an adapter may raise any error; the settler treats it the same way
            error = self._receiver.deadlines.translate_error(raised)
            self._remember_lost_claim(received, error)
            return error
        self._settle_calls.report_success(self._clock.monotonic())
        self._memory.forget(received.envelope.message_id)
        if self._report is not None:
            self._report((outcome.completion,))
        for each in outcome.on_completed:
            await each()
        return None

    async def _recover(
        self, step_message: Received, outcome: StepOutcome, error: PostdateError, resolution: Resolution
    ) -> tuple[Received, StepOutcome]:
        """Carry out the resolution of a failure. Return the message for its next step, and the next outcome, or raise.

        Raises:
            PostdateError: the message is to be returned to its queue; this is the error that was passed.
        """
        recovery = outcome.recovery
        if recovery is None or resolution is Resolution.REQUEUE:
            raise error
        if resolution in (Resolution.ERROR_COPY, Resolution.BRIEF_ERROR_COPY):
            step_failure = outcome.failure or StepFailure(error)
            log.warning("message %s goes to the error queue: %s", step_message.envelope.message_id, text_of(error))
            return step_message, recovery.move_to_error(
                step_message, step_failure, brief=resolution is Resolution.BRIEF_ERROR_COPY
            )
        if resolution is Resolution.STUCK:
            log.error(
                "no error queue takes message %s, which stays: %s", step_message.envelope.message_id, text_of(error)
            )
            if recovery.failure_rate is not None:
                recovery.failure_rate.report_failure(error, self._clock.monotonic())
            recovery.metrics.count("retried", 1)
            await self._clock.wait_for(self._stop, retry_delay(step_message.failures))
            return step_message, REQUEUE_UNCOUNTED if self._stop.is_set() else REQUEUE
        if resolution is Resolution.POLICY:
            if recovery.is_pause_needed(error) and not step_message.is_dropped_if_returned:
                await self._wait_for_store(recovery, error, resolution)
            return step_message, recovery.decide(step_message, outcome, error)
        if resolution is not Resolution.RETRY_NOW and recovery.outage is not None:
            await recovery.outage.wait(error, resolution)
            if self._stop.is_set():
                return step_message, REQUEUE_UNCOUNTED
        step_message = step_message._replace(attempts=step_message.attempts + 1)
        return step_message, await self._step(step_message)

    def _queue_completions(self, messages: anyio.abc.TaskGroup, settled_messages: Sequence[SettledMessage]) -> None:
        """Let workers finish the messages of a batch that were not settled, or that have an ``on_completed``."""
        waiting_failures = list[_Failure]()
        for received, outcome, raised in settled_messages:
            if raised is None:
                self._pending_completions.append(partial(self._complete_settled, received, outcome))
                continue
            error = self._receiver.deadlines.translate_error(raised)
            self._remember_lost_claim(received, error)
            failure = received, outcome, error, outcome.resolve(received, error)
            if failure[-1] in _WAITS:
                waiting_failures.append(failure)
            else:
                self._pending_completions.append(partial(self._complete_settled, received, outcome, failure))
        if waiting_failures:
            self._pending_completions.append(partial(self._reject_after_pause, waiting_failures))
        self._wake_one(messages)

    async def _reject_after_pause(self, failures: Sequence[_Failure]) -> None:
        """Return messages that did not cause their errors to the queue, after one pause for all of them."""
        self._busy += 1
        try:
            first, outcome, error, resolution = min(failures, key=lambda each: _WAITS.index(each[-1]))
            if (
                resolution is not Resolution.REQUEUE
                and outcome.recovery is not None
                and outcome.recovery.outage is not None
            ):
                await outcome.recovery.outage.wait(error, resolution)
            else:
                more = f"and {len(failures) - 1} others " if len(failures) > 1 else ""
                await self._pause(self._report_failure(first, f"{more}was not finished", error))
            for received, _, each, _ in failures:
                await self._reject(received, failed=not is_outage(each))
        finally:
            self._busy -= 1
            self._signal_capacity()

    async def _complete_settled(
        self, received: Received, outcome: StepOutcome, failure: _Failure | None = None
    ) -> None:
        self._busy += 1
        try:
            if failure is None:
                for each in outcome.on_completed:
                    await each()
            else:
                step_message, outcome = await self._recover(*failure)
                await self._complete_message(received, step_message, outcome)
        except BaseException as error:  # noqa: BLE001 - `_handle_unexpected_error` raises other errors again
            await self._handle_unexpected_error(received, error)
        finally:
            self._busy -= 1
            self._signal_capacity()

    async def _handle_unexpected_error(self, received: Received, failure: BaseException) -> None:
        """Return a message whose handling raised an unexpected error to its queue, after a pause."""
        try:
            self._receiver.deadlines.raise_translated(failure)
        except anyio.get_cancelled_exc_class():
            if not is_scope_cancelled():  # this worker ends; another one rejects its message
                self._pending_completions.append(partial(self._reject_after_stray_cancellation, received))
            raise
        except PostdateError as error:
            await self._pause(self._report_failure(received, "was not finished", error))
            await self._reject(received, failed=not is_outage(error))

    async def _reject_after_stray_cancellation(self, received: Received) -> None:
        """Reject, after a pause, the message of a worker that was cancelled although its pump runs on."""
        self._busy += 1
        try:
            error = TransportUnavailable("the task that handled it was cancelled, and not by its endpoint")
            await self._pause(self._report_failure(received, "was not finished", error))
            await self._reject(received, failed=True)
        finally:
            self._busy -= 1
            self._signal_capacity()

    def _report_failure(self, received: Received, problem: str, error: PostdateError) -> timedelta:
        """Report a failure with a message; ``problem`` describes it for the log. Return how long to pause."""
        seconds = self._clock.monotonic()
        if is_outage(error):  # all received messages fail with it: log it once
            return self._settle_calls.report_failure(error, seconds)
        log.error("message %s %s: %s", received.envelope.message_id, problem, error)
        return self._settle_calls.report_refusal(error, seconds)

    async def _reject(self, received: Received, *, failed: bool) -> bool:
        """Return a message to its queue, and retry until that succeeds: as long as it is claimed, no process gets it.

        It does not count as a success of the queue: a queue may accept rejected messages and still acknowledge none.

        Returns:
            Whether the claim was in force until then.
        """
        while True:
            try:
                await self._receiver.roll_back(received, failed=failed)
            except ClaimLost:
                return False
            except PostdateError as error:
                pause = self._report_failure(received, "cannot be returned to its queue now", error)
                if self._stop.is_set():  # closing the receiver, or the end of the process, returns the message
                    return True
                await self._pause(pause)
            else:
                return True

    async def _wait_for_store(self, recovery: Recovery, error: PostdateError, resolution: Resolution) -> None:
        if recovery.outage is None:
            await self._pause(self._settle_calls.report_refusal(error, self._clock.monotonic()))
        else:
            await recovery.outage.wait(error, resolution)

    async def _pause(self, pause: timedelta) -> None:
        """Pause for at most a second: a breaker that has tripped does not notice when the queues are back."""
        await self._clock.wait_for(self._stop, min(pause, PAUSE_ARMED))

    def stop(self) -> None:
        """Stop receiving. Prefetched messages return to the queue."""
        self._stop.set()
        self._receiver.stop()
        if self._prefetch is not None:
            self._to_reject.extend(self._ready)
            self._ready.clear()

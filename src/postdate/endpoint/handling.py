"""Handling of received messages: calls their handlers, sends the messages of these, and decides after failures.

Source: docs/capabilities.md, docs/cli/errors.md.
"""

from __future__ import annotations

import asyncio
import logging
import types
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Any, Final

import anyio
from typing_extensions import override

from postdate import errors, ports
from postdate.clock import Clock, steady_seconds
from postdate.core.health.message_memory import MessageMemory
from postdate.core.receive.outcomes import REQUEUE, OnCompleted, Recovery, StepFailure, StepOutcome
from postdate.core.receive.settling import WatchedReceiver, skip_repetitions
from postdate.core.recoverability import RecoveryRules, Resolution, check_answers
from postdate.endpoint.completions import POLICY_FAILURES, MessageCompletions
from postdate.endpoint.handler_context import BusinessTransaction, HandlerContext
from postdate.endpoint.message_types import MessageTypes, type_name
from postdate.endpoint.outgoing import OutgoingMessages
from postdate.endpoint.saga_handling import OwnStoreUnreachable, Sagas, translate_own_store_errors
from postdate.endpoint.settings import Audit
from postdate.messages import Envelope, Headers, is_saga_timeout
from postdate.runtime import tracing
from postdate.runtime.bounded import Bounded
from postdate.runtime.cancellation import is_cancelled, is_scope_cancelled, is_task_cancelled, undo_task_cancellation
from postdate.runtime.reporting import Metrics

log = logging.getLogger("postdate.endpoint")

MOST_RESTARTS: Final = 5
"""How often a message may be received again without an answer before its policy decides.

Processes and brokers are restarted, and the first message of a queue returns from each process that is stopped.
"""


Handler = Callable[[Any, HandlerContext], Awaitable[None]]

_MOST_PRELOADED: Final = 2_000
"""The largest number of messages that are remembered by :meth:`Handlers.preload`."""

_BLOCKED_AFTER_SECONDS: Final = 5.0
"""A handler that blocks the event loop for this long is logged."""

_YIELD_SECONDS: Final = 0.1
"""The pause after a handler that blocked the event loop.

In this time the loop learns what happened meanwhile, for example that a connection ended, and its claim with it.
"""


class Handlers:
    """The handlers and sagas of an endpoint: decodes received messages and calls them."""

    def __init__(self, types: MessageTypes) -> None:
        self._types, self._handlers = types, dict[type[Any], list[Handler]]()
        self._preloaded = Bounded[str, tuple[Envelope, object]](_MOST_PRELOADED)
        """Messages that :meth:`preload` has decoded, by message id."""
        self.sagas: Sagas | None = None
        self.times: HandlerTimes | None = None
        """Set if metrics are recorded."""

    def add(self, message_type: type[Any], handle: Handler) -> None:
        self._handlers.setdefault(message_type, []).append(handle)

    def handles(self, message_type: type[Any]) -> bool:
        return message_type in self._handlers or (self.sagas is not None and self.sagas.handles(message_type))

    async def preload(self, received_messages: Sequence[ports.Received]) -> None:
        """Load the saga instances of messages that were received together. After a failure, each message loads its own.

        A message with a handler is skipped, as the handler runs before the saga and may change the message. So is a
        message with several sagas.
        """
        if self.sagas is None:
            return
        decoded_messages = dict[str, object]()
        with suppress(Exception):
            for envelope in [each.envelope for each in received_messages if not is_saga_timeout(each.envelope.headers)]:
                message = self._types.decode(envelope.headers, envelope.body)
                if self.sagas.has_one_saga(type(message)) and type(message) not in self._handlers:
                    self._preloaded[envelope.message_id] = envelope, message
                    decoded_messages[envelope.headers.get(Headers.MESSAGE_ID, envelope.message_id)] = message
        with suppress(errors.PostdateError):
            await self.sagas.preload(decoded_messages)

    def forget(self, envelope: Envelope) -> None:
        """Forget a message that :meth:`preload` has remembered and that is not handled after all."""
        _, message = self._preloaded.pop(envelope.message_id, (None, None))
        if message is not None and self.sagas is not None:
            self.sagas.forget(envelope.headers.get(Headers.MESSAGE_ID, envelope.message_id), type(message))

    @types.coroutine
    def call(self, received: ports.Received, context: HandlerContext) -> Generator[Any, Any, None]:
        """Decode the message and call the handlers of its type in turn; log a handler that blocks the event loop.

        The measured time includes the decoding: that saves one reading of the clock for each message.
        """
        started_at = step_started_at = steady_seconds()
        try:
            message = self._decode(received.envelope)
        except BaseException:
            _log_blocked_loop(steady_seconds() - started_at, received)
            raise
        coroutine = self._call(message, received, context)
        step: Callable[[Any], Any] = coroutine.send
        result: Any = None
        while True:
            try:
                awaited = step(result)
            except BaseException as error:
                ended_at = steady_seconds()
                if self.times is not None:
                    self.times.add(type(message), ended_at - started_at)
                if ended_at - step_started_at >= _BLOCKED_AFTER_SECONDS:
                    _log_blocked_loop(ended_at - step_started_at, received)
                    if isinstance(error, StopIteration):
                        yield from asyncio.sleep(_YIELD_SECONDS).__await__()
                if isinstance(error, StopIteration):
                    return
                raise
            _log_blocked_loop(steady_seconds() - step_started_at, received)
            try:
                result = yield awaited
                step = coroutine.send
            except BaseException as error:  # noqa: BLE001 - raised again inside the handler
                step, result = coroutine.throw, error
            step_started_at = steady_seconds()

    def _decode(self, envelope: Envelope) -> object:
        preloaded_envelope, message = self._preloaded.pop(envelope.message_id, (None, None))
        return message if preloaded_envelope is envelope else self._types.decode(envelope.headers, envelope.body)

    async def _call(self, message: object, received: ports.Received, context: HandlerContext) -> None:
        if self.sagas is not None and is_saga_timeout(received.envelope.headers):
            await self.sagas.handle_timeout(message, context)
            return
        handlers = self._handlers.get(type(message), ())
        if not handlers and not self.handles(type(message)):
            raise errors.UnknownMessageType(f"no handler for {type_name(type(message))}")
        for handle in handlers:
            await handle(message, context)
        if self.sagas is not None:
            await self.sagas.handle(message, context)


class HandlerTimes:
    """The durations of handlers since the last report, by message type."""

    def __init__(self) -> None:
        self._times = dict[type[Any], list[float]]()
        """For each type: number of runs, seconds of all runs, and seconds of the longest. Each message changes it."""

    def add(self, message_type: type[Any], seconds: float) -> None:
        times = self._times.get(message_type)
        if times is None:
            self._times[message_type] = [1, seconds, seconds]
            return
        times[0] += 1
        times[1] += seconds
        if seconds > times[2]:  # noqa: PLR1730 - max() would cost as much as the rest of this method
            times[2] = seconds

    def report(self, metrics: Metrics) -> None:
        all_times, self._times = self._times, {}
        for message_type, (runs, seconds, longest) in all_times.items():
            metrics.report_handler_runs(type_name(message_type), int(runs), seconds, longest)


def _log_blocked_loop(seconds: float, received: ports.Received) -> None:
    if seconds >= _BLOCKED_AFTER_SECONDS:
        kind = received.envelope.headers.get(Headers.ENCLOSED_MESSAGE_TYPES, "bytes")
        text = "the event loop stood for %.0f s, in the handler of %s %s: have a thread do what blocks"
        log.warning(text, seconds, kind, received.envelope.message_id)


class AcknowledgedReceiver(WatchedReceiver):
    """The receiver of transaction mode ``none``, which acknowledges a message before it is handled.

    So a commit only sends. Messages are not settled in batches: a killed process would lose the messages that wait for
    a batch.
    """

    settles_in_batches = False

    def __init__(
        self, receiver: ports.Receiver, clock: Clock, send: Callable[[ports.Completion], Awaitable[None]]
    ) -> None:
        super().__init__(receiver, clock)
        self.acknowledge, self._send = super().commit, send

    @override
    async def commit(
        self, received: ports.Received, now: datetime, completion: ports.Completion = ports.HANDLED
    ) -> None:
        await self._send(completion)


@dataclass(slots=True, kw_only=True)
class PolicyRecovery(Recovery):
    """The recovery of handlers. The policy of the endpoint decides (docs/specification-rows.md, row 111)."""

    completions: MessageCompletions

    @override
    def decide(self, received: ports.Received, outcome: StepOutcome | None, error: Exception) -> StepOutcome:
        if outcome is not None and isinstance(
            error, errors.DestinationUnavailable
        ):  # see `resolve`; no handler raised it
            return self._outcome(
                received, self.completions.completion_while_full(received, error), StepFailure(error, Resolution.POLICY)
            )
        completion = self.completions.completion_after_failure(received, error)
        if completion is None and (received.is_dropped_if_returned or self.rules.is_off_queue):
            completion = self.completions.error_completion(received, error)
        self.metrics.count("failed", 1)
        if completion is None:
            self.metrics.count("retried", 1)
            return REQUEUE
        return self._outcome(received, completion, StepFailure(error, Resolution.POLICY))

    @override
    def move_to_error(self, received: ports.Received, failure: StepFailure, *, brief: bool) -> StepOutcome:
        completion = self.completions.error_completion(received, failure.error, brief=brief)
        resolution = Resolution.BRIEF_ERROR_COPY if brief else Resolution.ERROR_COPY
        return self._outcome(received, completion, failure._replace(resolution=resolution))

    def _outcome(self, received: ports.Received, completion: ports.Completion, failure: StepFailure) -> StepOutcome:
        """Return the outcome with a completion. Earlier failures of the message are forgotten after the completion."""
        on_completed = [partial(self.report_success, received.envelope.message_id)] if self.memory else ()
        return StepOutcome(completion, self, on_completed, failure)

    @override
    def resolve(self, received: ports.Received, failure: StepFailure | None, error: errors.PostdateError) -> Resolution:
        is_undecided = failure is None or failure.resolution is None
        if isinstance(error, errors.DestinationUnavailable) and is_undecided and self.completions.can_delay_retry:
            # If the message stayed first in its queue, messages that send to other destinations would not be handled.
            return Resolution.POLICY
        if self.rules.is_off_queue and failure is not None and failure.resolution is Resolution.BRIEF_ERROR_COPY:
            log.error("message %s is lost: it is off its queue, and no copy can be sent", received.envelope.message_id)
            return Resolution.REQUEUE
        return Recovery.resolve(self, received, failure, error)


def is_own_cancellation(received: ports.Received, *, already_off_queue: bool) -> bool:
    """Return whether a handler has cancelled its own task so often that this counts as a failure of its message.

    It counts from the eleventh time on. Before, the application may be cancelling all its tasks by means of asyncio. A
    message that is off its queue already is not received again, so its first time counts.
    """
    if (received.failures < POLICY_FAILURES and not already_off_queue) or is_scope_cancelled():
        return False
    undo_task_cancellation()  # the task has other messages to handle
    return True


def failure_of(received: ports.Received, error: BaseException, *, already_off_queue: bool = False) -> Exception:
    """Return the error of a handler as a failure of its message; raise it if it is no failure of the message.

    With ``already_off_queue`` the message was acknowledged before it was handled.
    """
    is_cancellation = isinstance(error, anyio.get_cancelled_exc_class())
    if is_cancellation and (not is_cancelled() or is_own_cancellation(received, already_off_queue=already_off_queue)):
        # The handler awaited a task that was cancelled, and did not catch that: this task itself is not cancelled.
        return RuntimeError(f"the handler ended by {type(error).__name__}")
    if isinstance(error, (errors.SagaConflict, OwnStoreUnreachable)) or not isinstance(error, Exception):
        raise error
    return error


class Handling:
    """The step of an endpoint's message pump: handles a received message, and sends the messages of its handlers."""

    def __init__(
        self,
        outgoing: OutgoingMessages,
        completions: MessageCompletions,
        handlers: Handlers,
        audit: Audit | None,
        receiver: ports.Receiver,
    ) -> None:
        self.outgoing, self.completions, self.handlers, self.audit = outgoing, completions, handlers, audit
        is_off_queue = outgoing.mode is ports.TransactionMode.NONE
        self._acknowledging_receiver = (
            AcknowledgedReceiver(receiver, outgoing.clock, self.send) if is_off_queue else None
        )
        self.receiver = self._acknowledging_receiver or WatchedReceiver(receiver, outgoing.clock)
        """Acknowledges messages as the transaction mode requires."""
        self._store_memory = MessageMemory()
        # Called again, the step would acknowledge the message a second time. So off the queue, the policy decides.
        rules = RecoveryRules(
            retry_now_errors=() if is_off_queue else (errors.SagaConflict,), is_off_queue=is_off_queue
        )
        self._recovery = PolicyRecovery(rules=rules, completions=completions, metrics=completions.metrics)
        self.send_recovery = replace(self._recovery, memory=MessageMemory())
        """The recovery of messages whose completions send or store something."""

    async def handle(self, received: ports.Received) -> StepOutcome:
        outcome = self.outcome_without_handling(received)
        if outcome is not None:
            self.handlers.forget(received.envelope)
        if self._acknowledging_receiver is not None:
            discard_completion = outcome.completion if outcome is not None and outcome.failure is None else None
            await self._acknowledging_receiver.acknowledge(
                received, self.outgoing.clock.now(), discard_completion or ports.HANDLED
            )
        return outcome or await self._handle(received)

    def outcome_without_handling(self, received: ports.Received) -> StepOutcome | None:
        """Return the outcome of a message that has expired, or returned unanswered too often; ``None``: handle it."""
        try:
            reason = self.completions.discard_reason(received)
        except errors.InvalidTimestamp as error:
            return self.outcome_after_error(received, error)
        if reason is not None:
            return StepOutcome(self.completions.discard_completion(received, reason))
        is_tolerated = received.unanswered <= MOST_RESTARTS and not received.is_dropped_if_returned
        if is_tolerated or self.outgoing.mode is ports.TransactionMode.NONE:  # in mode `none` no message returns
            return None
        times, limit = (
            received.unanswered or "many",
            "; its queue would discard it soon" if received.is_dropped_if_returned else "",
        )
        error = errors.HandlingInterrupted(
            f"it came back {times} times without an answer: the process that handled it ended, lost its connection, or "
            f"took too long and lost its claim{limit}; find the cause, then return the message: postdate errors return"
        )
        outcome = self.outcome_after_error(received._replace(failures=max(0, received.failures - 1)), error)
        return None if outcome is REQUEUE else outcome

    async def _handle(self, received: ports.Received) -> StepOutcome:
        """Handle a message. An outage of the saga store is raised, as it is no failure of the message."""
        context = HandlerContext(self.outgoing, received)
        try:
            await self._call(received, context)
            completion = self.outgoing.completion_of(context.outgoing, ports.RecordKind.HANDLED, work=context.work)
        except errors.SagaConflict as error:  # another process was first: undo all and handle it again
            log.debug("message %s is handled again: %s", received.envelope.message_id, error)
            return StepOutcome(None, self._recovery, failure=StepFailure(error))
        except BaseException as error:  # noqa: BLE001 - `failure_of` raises other errors again
            return self.outcome_after_error(
                received, failure_of(received, error, already_off_queue=self._acknowledging_receiver is not None)
            )
        if not (completion.outgoing or completion.work):
            return StepOutcome(completion, self._recovery, context.on_completed)
        if self.outgoing.mode is ports.TransactionMode.RECEIVE_ONLY and completion.outgoing:
            # Sends are not undone if acknowledging the message fails. Storing is undone: if a delayed
            # message were stored again after its delivery, it would look like another message under the same id.
            try:
                completion = await self._send_before_commit(completion)
            except errors.PostdateError as error:
                return StepOutcome(None, self.send_recovery, failure=StepFailure(error))
        return self.outcome_after_handling(received, completion, context.on_completed)

    def outcome_after_handling(
        self, received: ports.Received, completion: ports.Completion, on_completed: Sequence[OnCompleted] = ()
    ) -> StepOutcome:
        """Return the outcome of a handled message whose completion sends, stores or has work."""
        if self.send_recovery.memory:
            on_completed = [*on_completed, partial(self.send_recovery.report_success, received.envelope.message_id)]
        return StepOutcome(completion, self.send_recovery, on_completed)

    def outcome_after_error(self, received: ports.Received, error: Exception) -> StepOutcome:
        return self.send_recovery.decide(received, None, error)

    # --- steps of handling --------------------------------------------------------------------------------------------

    async def call(self, received: ports.Received, business: BusinessTransaction) -> HandlerContext:
        """Call the handlers in a transaction of the outbox; return their context, with the messages they sent."""
        context = HandlerContext(self.outgoing, received, business)
        await self._call(received, context)
        for work in self.outgoing.storing_works(context.messages_with_own_id, self.outgoing.clock.now()):
            # After the commit, a single message with a used id would keep all messages from being sent.
            with translate_own_store_errors(self._store_memory, received.envelope.message_id):
                await work.skip_stored()
        return context

    async def _call(self, received: ports.Received, context: HandlerContext) -> None:
        started_at = self.outgoing.clock.now() if self.audit is not None else None
        try:
            envelope = received.envelope
            with tracing.current.handling_span(
                envelope.headers, context.message_id, self.outgoing.endpoint, envelope.due
            ):
                await self.handlers.call(received, context)
        finally:
            context.has_ended = True
            if is_task_cancelled():  # perhaps by its handler, which returned before the cancellation was raised
                await asyncio.sleep(0)
        if self.audit is not None and started_at is not None:
            now = self.outgoing.clock.now()
            context.outgoing.append(self.audit.copy(received.envelope, started_at, now, self.completions.host))

    async def send(self, completion: ports.Completion) -> None:
        """Send and store outside of a receive transaction, in one transaction if possible; leave out repetitions."""
        remaining = await self._send_before_commit(completion)
        await self._send(remaining.outgoing, remaining.work)

    async def _send_before_commit(self, completion: ports.Completion) -> ports.Completion:
        """Send messages that need not, or cannot, be sent in the transaction that stores others; return the rest."""
        capabilities = self.outgoing.transport.capabilities
        has_expiring = any(envelope.time_to_be_received is not None for envelope in completion.outgoing)
        if completion.work and (capabilities.time_to_be_received_in_transactions or not has_expiring):
            return completion
        await self._send(completion.outgoing, ())
        return replace(completion, outgoing=())

    async def _send(self, envelopes: Sequence[Envelope], work: Sequence[ports.Work]) -> None:
        if not envelopes and not work:
            return
        transport = self.outgoing.transport
        sending = transport.send(envelopes, self.outgoing.clock.now(), work=work)
        try:
            answers = await self.receiver.deadlines.call(sending, transport)
        except errors.DuplicateMessage as error:
            await skip_repetitions(work, error)
            await self._send(envelopes, work)
            return
        for error in check_answers(transport, len(envelopes), answers):
            if error is not None:
                raise error

"""Outcomes of steps with received messages, and the recovery from outcomes that fail. Source: ADR 0026."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from operator import attrgetter
from typing import Final, NamedTuple, TypeAlias

import anyio
from typing_extensions import override

from postdate.clock import Clock
from postdate.core import recoverability
from postdate.core.health.circuit_breaker import PAUSE_ARMED, FailureRate
from postdate.core.health.message_memory import MessageMemory
from postdate.errors import PostdateError, StoreError
from postdate.messages import Envelope
from postdate.ports import Completion, Received, RecordKind
from postdate.runtime.reporting import Counted, Metrics
from postdate.runtime.resource import CallHealth, Resource

log = logging.getLogger("postdate.recoverability")

OnCompleted: TypeAlias = Callable[[], Awaitable[None]]
"""Called when a message has left its queue; must not raise."""


class StepFailure(NamedTuple):
    """A failure, and its resolution, if there is one.

    The error copy is made from ``original``, or without one from the message itself.
    """

    error: Exception
    resolution: recoverability.Resolution | None = None
    original: Envelope | None = None


class StepOutcome(NamedTuple):
    """The decision of a step about a received message.

    Args:
        completion: how the message leaves its queue; ``None``: it does not leave.
        recovery: decides if the queue refuses ``completion``, and about a ``failure`` without a ``completion``;
            ``None``: the message returns to its queue after a pause.
        on_completed: called when the message has left its queue.
        failure: the failure that led to ``completion``; without a ``completion``, the failure of the step.
        wait: how long the message stays received before its step is called again.

    Without ``completion``, ``failure`` and ``wait`` the message returns to its queue: :data:`REQUEUE`,
    :data:`REQUEUE_UNCOUNTED`.
    """

    completion: Completion | None
    recovery: Recovery | None = None
    on_completed: Sequence[OnCompleted] = ()
    failure: StepFailure | None = None
    wait: timedelta | None = None

    def resolve(self, received: Received, error: PostdateError) -> recoverability.Resolution:
        """Count ``error`` as a failure to carry out this outcome. Return the resolution for its message."""
        return (
            recoverability.Resolution.REQUEUE
            if self.recovery is None
            else self.recovery.resolve(received, self.failure, error)
        )


COUNTED_AS: Final[Mapping[RecordKind | None, Counted]] = {
    RecordKind.HANDLED: "handled",
    RecordKind.RETRIED: "retried",
    RecordKind.FAILED: "moved_to_error",
    RecordKind.DISCARDED: "discarded",
}
"""The metric that counts a message that has left its queue, by the kind of its record.

Steps whose completions have no record count their messages themselves, in ``on_completed``.
"""

_record_of = attrgetter("record")


def report_completions(metrics: Metrics, completions: Iterable[Completion]) -> None:
    """Count messages by their records. Call this for settled messages only: a refused completion must not count."""
    for record, messages in Counter(map(_record_of, completions)).items():
        if record in COUNTED_AS:
            metrics.count(COUNTED_AS[record], messages)


Step: TypeAlias = Callable[[Received], Awaitable[StepOutcome]]
"""Handles one message. An error that it raises is a failure of the queues or of the step, not of a handler: the message
returns to its queue after a pause."""

REQUEUE: Final = StepOutcome(None)
REQUEUE_UNCOUNTED: Final = StepOutcome(None)
"""The message returns to its queue without a counted failure, because the pump stops.

It is equal to :data:`REQUEUE`, so compare it by identity (``is``).
"""


@dataclass(slots=True, kw_only=True)
class Recovery(ABC):
    """The handling of failures of one kind of outcome; it counts them in ``metrics``.

    Without ``memory`` each transient failure of a store counts as an outage. ``outage`` makes messages wait while
    their claims are kept. ``failure_rate`` counts messages that no error queue accepts.
    """

    rules: recoverability.RecoveryRules
    metrics: Metrics
    memory: MessageMemory | None = None
    outage: StoreWaits | None = None
    failure_rate: FailureRate | None = None

    def resolve(
        self, received: Received, failure: StepFailure | None, error: PostdateError
    ) -> recoverability.Resolution:
        """Count a failure and return its resolution; see :func:`postdate.core.recoverability.resolve_failure`."""
        refused = None if failure is None else failure.resolution
        message_id, own_failures, other_messages_succeeded = received.envelope.message_id, 0, False
        if self.memory is not None and not isinstance(error, self.rules.retry_now_errors):
            other_messages_succeeded = self.memory.has_success_since_failure(message_id)
            own_failures = self.memory.report_own_failure(message_id, error)
        return recoverability.resolve_failure(
            refused, error, received, own_failures, self.rules, other_messages_succeeded=other_messages_succeeded
        )

    def is_pause_needed(self, error: PostdateError) -> bool:
        """Return whether to pause before the policy decides, as it may decide to retry at once."""
        return self.rules.counts_transient and error.transient

    @abstractmethod
    def decide(self, received: Received, outcome: StepOutcome | None, error: Exception) -> StepOutcome:
        """Return the outcome that the policy decides for a message whose step or completion failed."""

    @abstractmethod
    def move_to_error(self, received: Received, failure: StepFailure, *, brief: bool) -> StepOutcome:
        """Return the outcome that moves a message to the error queue."""

    async def report_success(self, message_id: str) -> None:
        if self.memory is not None:
            self.memory.report_success(message_id)
        if self.outage is not None:
            self.outage.report_success()

    def forget(self, message_id: str) -> None:
        """Forget the failures of a message that is in the error queue. If it is returned, its count begins at 0."""
        if self.memory is not None:
            self.memory.forget(message_id)


@dataclass(slots=True, kw_only=True)
class AttemptsRecovery(Recovery):
    """The recovery of steps that are not handlers: some attempts by ``policy``, then the error queue ``errors``.

    ``on_moved_to_error`` is called with a message that was moved there. With ``returns_outgoing`` the error copy of a
    message that was to be sent on is made from the outgoing message, so that it can be returned to its destination.
    """

    errors: recoverability.ErrorQueue
    clock: Clock
    policy: recoverability.Recoverability
    on_moved_to_error: Callable[[Received], None] | None = None
    returns_outgoing: bool = False

    @override
    def is_pause_needed(self, error: PostdateError) -> bool:
        """See :class:`Recovery`. Pause also after a lasting error of a store, as it may concern all messages.

        The pause reports the error to the circuit breaker of the store.
        """
        is_of_store = isinstance(error, StoreError) and not isinstance(error, self.policy.unrecoverable)
        return self.rules.counts_transient and (error.transient or is_of_store)

    @override
    def decide(self, received: Received, outcome: StepOutcome | None, error: Exception) -> StepOutcome:
        failures, id_ = received.failures + 1, received.envelope.message_id
        log.error("message %s of %s failed, attempt %d: %s", id_, self.errors.failed_queue, failures, error)
        self.metrics.count("failed", 1)
        decision = recoverability.decide_handling_failure(
            error, failures, received.envelope.headers, self.policy, self.clock.now()
        )
        if isinstance(decision, recoverability.ImmediateRetry) and not received.is_dropped_if_returned:
            self.metrics.count("retried", 1)
            return REQUEUE
        completion = outcome.completion if outcome is not None and self.returns_outgoing else None
        sent = () if completion is None else completion.outgoing
        return self.move_to_error(received, StepFailure(error, original=sent[0] if sent else None), brief=False)

    @override
    def move_to_error(self, received: Received, failure: StepFailure, *, brief: bool) -> StepOutcome:
        original, now = failure.original or received.envelope, self.clock.now()
        errors = self.errors if failure.original is None else replace(self.errors, failed_queue=original.destination)
        copy = errors.copy(original, failure.error, now, brief=brief)
        failure, report_moved = (
            failure._replace(
                resolution=recoverability.Resolution.BRIEF_ERROR_COPY if brief else recoverability.Resolution.ERROR_COPY
            ),
            partial(self._report_moved, received),
        )
        return StepOutcome(Completion(record=None, outgoing=[copy]), self, [report_moved], failure)

    async def _report_moved(self, received: Received) -> None:
        id_ = received.envelope.message_id
        self.forget(id_)
        if self.failure_rate is not None:
            self.failure_rate.report_success()
        self.metrics.count("moved_to_error", 1)
        if self.on_moved_to_error is not None:
            self.on_moved_to_error(received)
        log.error("message %s of %s moved to error queue %s", id_, self.errors.failed_queue, self.errors.name)


def immediate_attempts(number: int, *unrecoverable: type[PostdateError]) -> recoverability.Recoverability:
    """Return a policy of ``number`` attempts in a row; there is no retry after an ``unrecoverable`` error."""
    return recoverability.Recoverability(immediate_retries=number - 1, delayed_retries=0, unrecoverable=unrecoverable)


class StoreWaits:
    """The pauses of received messages until their store stores messages again. ``calls`` has the state of the store."""

    def __init__(self, clock: Clock, calls: CallHealth) -> None:
        self._clock, self._calls = clock, calls
        self._message_calls = Resource("that store").calls(
            "cannot store some messages; other messages are stored", log, logging.WARNING
        )
        self._stop, self._resume_event, self._resumed_at = anyio.Event(), anyio.Event(), -math.inf

    def stop(self) -> None:
        """End all pauses. Later pauses end at once."""
        self._stop.set()
        self._resume_event.set()

    def resume(self) -> None:
        """End the pauses of messages that wait together for the store, as it answers again.

        Messages that wait alone go on waiting.
        """
        # A call that hung during the outage fails a little later, and must not cause a long pause then.
        self._calls.report_recovery()
        self._resume_event.set()
        self._resume_event, self._resumed_at = anyio.Event(), self._clock.monotonic()

    def report_success(self) -> None:
        """Report that the store has stored a message."""
        if self._calls.report_success(self._clock.monotonic()):
            self.resume()

    async def wait(self, error: PostdateError, resolution: recoverability.Resolution) -> None:
        """Wait before a message is tried again.

        With ``WAIT_FOR_STORE`` it waits with all other messages, until one of them succeeds. Otherwise it waits alone.
        A failure within a second after the end of an outage waits for at most a second, and successes of other messages
        do not end that pause: a store may store some messages and not others, and a full destination is no outage of
        the store.
        """
        seconds, until = self._clock.monotonic(), self._stop
        if resolution is recoverability.Resolution.WAIT_ALONE:
            pause = self._message_calls.report_failure(error, seconds)
        elif resolution is recoverability.Resolution.WAIT_FOR_STORE:
            pause = self._calls.report_failure(error, seconds)
            if seconds - self._resumed_at < PAUSE_ARMED.total_seconds():
                pause = min(pause, PAUSE_ARMED)
            elif not until.is_set():
                until = self._resume_event
        else:
            pause = self._calls.report_refusal(error, seconds)
        await self._clock.wait_for(until, pause)

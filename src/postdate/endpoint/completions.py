"""The completions of received messages that expired, or whose handling failed. Source: docs/cli/errors.md."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final

from postdate import messages
from postdate.clock import later
from postdate.core.expiry import discard_reason, expiry_of
from postdate.core.recoverability import (
    DEFAULT_ERROR_QUEUE,
    LONGEST_OUTAGE_DELAY,
    Decision,
    DelayedRetry,
    Discard,
    ErrorQueue,
    Host,
    ImmediateRetry,
    MoveToError,
    Recoverability,
    check_retries,
    count_delayed_retries,
    decide_handling_failure,
    delayed_retry_headers,
    escape_unstorable,
    text_of,
    unavailability_reason,
)
from postdate.endpoint.outgoing import OutgoingMessages
from postdate.endpoint.service import CriticalErrors
from postdate.errors import ConfigurationError, InvalidMessage, InvalidTimestamp
from postdate.ports import Completion, Received, RecordKind, TransactionMode
from postdate.runtime.reporting import Metrics

log = logging.getLogger("postdate.endpoint")

POLICY_FAILURES: Final = 10
"""How often a message is handled again after its policy has failed. Then it goes to the error queue."""


@dataclass(frozen=True, slots=True)
class MessageCompletions:
    """The completions of received messages that have expired, or whose handling has failed."""

    outgoing: OutgoingMessages
    recoverability: Recoverability
    host: Host
    critical_errors: CriticalErrors
    metrics: Metrics
    ignore_time_to_be_received: bool
    allowance: timedelta

    def __post_init__(self) -> None:
        check_retries(self.recoverability, immediate=self.can_requeue, delayed=self.can_delay_retry)

    @property
    def can_requeue(self) -> bool:
        """Whether a message can return to its queue for an immediate retry."""
        return self.outgoing.mode is not TransactionMode.NONE

    @property
    def can_delay_retry(self) -> bool:
        """Whether a message can be stored for a delayed retry."""
        return self.can_requeue and self.outgoing.can_delay

    @property
    def error_queue(self) -> str:
        return self.recoverability.error_queue or DEFAULT_ERROR_QUEUE

    def discard_reason(self, received: Received) -> str | None:
        """Return why a message has expired, or ``None``. Some queues apply an expiry that is not in the headers."""
        envelope, headers = received.envelope, received.envelope.headers
        by_headers = messages.Headers.EXPIRES_AT in headers or messages.Headers.TIME_TO_BE_RECEIVED in headers
        if self.ignore_time_to_be_received or not (by_headers or envelope.expires_at is not None):
            return None  # most messages: no further check is needed
        if not self.outgoing.transport.capabilities.expires_messages:
            headers = _own_headers(envelope)
        return discard_reason(headers, self.outgoing.clock.now(), self.allowance)

    def discard_completion(self, received: Received, reason: str) -> Completion:
        """Return the completion of an expired message. It is recorded, and sent to no other queue."""
        if received.failures:  # it has also failed, so operators should see it
            reason = f"{reason}, after {received.failures} failed attempts"
        level = logging.WARNING if received.failures else logging.DEBUG
        log.log(
            level, "Discarding message %s due to lapsed Time To Be Received header: %s", _message_id(received), reason
        )
        return Completion(RecordKind.DISCARDED, reason)

    def completion_after_failure(self, received: Received, error: Exception) -> Completion | None:
        """Return the completion of a message whose handling failed; ``None``: the message returns to its queue."""
        now = self.outgoing.clock.now()
        reason = f"{type(error).__name__}: {text_of(error)}"
        try:
            decision = self._decide(received, error, now)
        except Exception as failure:  # noqa: BLE001 - a policy of an application may raise any error
            message_text = f"message {_message_id(received)}, which failed with {reason}"
            self.critical_errors(f"Failed to execute the recoverability policy for {message_text}", failure)
            return self.error_completion(received, error) if received.failures >= POLICY_FAILURES else None
        match decision:
            case ImmediateRetry():
                log.info("message %s is retried at once: %s", _message_id(received), reason)
                return None
            case DelayedRetry(delay) if self._expires_before(received, later(now, delay)):
                log.warning(
                    "message %s is not retried, as it would expire before that: %s", _message_id(received), reason
                )
                return self.discard_completion(received, f"expires before its retry: {reason}")
            case DelayedRetry(delay):
                log.warning("message %s is retried in %s: %s", _message_id(received), delay, reason)
                headers = delayed_retry_headers(_own_headers(received.envelope), now)
                retry = self._retry_message(received, later(now, delay), headers)
                return self.outgoing.completion_of(
                    [retry], RecordKind.RETRIED, f"retried as {retry.message_id}: {reason}"
                )
            case Discard(policy_reason):
                log.info(
                    "message %s is discarded by the recoverability policy: %s", _message_id(received), policy_reason
                )
                return Completion(RecordKind.DISCARDED, escape_unstorable(f"{policy_reason}: {reason}"))
            case MoveToError(queue):
                return self.error_completion(received, error, queue)

    def completion_while_full(self, received: Received, error: Exception) -> Completion:
        """Return the completion of a message while a destination is full: a delayed retry without a counted failure.

        The header of retries stays at its number. It tells the store that the message is a retry, and not one that the
        application scheduled, which a bulk change may cancel.
        """
        now = self.outgoing.clock.now()
        due, reason = later(now, LONGEST_OUTAGE_DELAY), f"{type(error).__name__}: {text_of(error)}"
        if self._expires_before(received, due):
            return self.discard_completion(received, f"expires before its retry: {reason}")
        log.info("message %s is retried in %s: %s", _message_id(received), LONGEST_OUTAGE_DELAY, reason)
        headers = _own_headers(received.envelope)
        headers = {**headers, messages.Headers.DELAYED_RETRIES: str(count_delayed_retries(headers))}
        retry = self._retry_message(received, due, headers)
        return self.outgoing.completion_of([retry], RecordKind.RETRIED, f"retried as {retry.message_id}: {reason}")

    def _decide(self, received: Received, error: Exception, now: datetime) -> Decision:
        """Return the decision of the policy, or :class:`MoveToError` if it is impossible.

        Errors of the policy are raised.
        """
        settings, headers = self.recoverability, dict(received.envelope.headers)  # a copy, which the policy may change
        policy = settings.policy or decide_handling_failure
        decision = policy(error, received.failures + 1, headers, settings, now)
        if not isinstance(decision, ImmediateRetry | DelayedRetry | MoveToError | Discard):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(f"{decision!r} is not a decision of a recoverability policy")
        reason = unavailability_reason(decision, immediate=self.can_requeue, delayed=self.can_delay_retry)
        reason = reason or _impossibility_reason(decision, now)
        if reason is None:
            return decision
        log.warning("message %s goes to the error queue: %s", _message_id(received), reason)
        return MoveToError()

    def _retry_message(self, received: Received, due: datetime, headers: Mapping[str, str]) -> messages.DelayedMessage:
        """Return the message for a delayed retry. It is a separate send, so it has a new id in the store."""
        envelope = received.envelope
        # Without the headers of an earlier delay: in a queue they would look like headers of this delay.
        retry_headers = messages.strip_delay_headers(headers)
        retry_headers.pop(messages.Headers.WALL_TIME, None)
        retry_headers.pop(messages.Headers.LOAD, None)  # otherwise --sync would cancel the retry: no table has its id
        if messages.Headers.TRACE_PARENT in retry_headers:
            retry_headers[messages.Headers.START_NEW_TRACE] = "True"
        headers = {messages.Headers.MESSAGE_ID: envelope.message_id, **retry_headers}
        return messages.DelayedMessage(messages.new_message_id(), due, self.outgoing.endpoint, headers, envelope.body)

    def _expires_before(self, received: Received, instant: datetime) -> bool:
        if self.ignore_time_to_be_received:
            return False
        try:
            expiry = expiry_of(_own_headers(received.envelope))
        except InvalidTimestamp:  # unreadable: it does not expire
            return False
        return expiry is not None and instant - expiry > self.allowance

    def error_completion(
        self, received: Received, error: Exception, queue: str | None = None, *, brief: bool = False
    ) -> Completion:
        """Return the completion of a message that goes to ``queue``, or to the endpoint's error queue."""
        reason = f"{type(error).__name__}: {text_of(error)}"
        if not brief:
            log.error(
                "message %s moved to error queue %s: %s", _message_id(received), queue or self.error_queue, reason
            )
        original = replace(received.envelope, headers=_own_headers(received.envelope))
        customize = self.recoverability.customize_headers
        error_queue = ErrorQueue(queue or self.error_queue, self.outgoing.endpoint, self.host, customize)
        copy = error_queue.copy(original, error, self.outgoing.clock.now(), brief=brief)
        return Completion(RecordKind.FAILED, reason, outgoing=[copy])


def _impossibility_reason(decision: Decision, now: datetime) -> str | None:
    """Return why a decision has an impossible time or queue; ``None``: it may be possible."""
    try:
        match decision:
            case DelayedRetry(delay):
                _ = now + delay
            case MoveToError(str() as queue):
                messages.check_text(queue, "its error queue", messages.DESTINATION_LIMIT)
            case MoveToError(queue) if queue is not None:
                return f"{queue!r} is not the name of a queue"
            case _:
                pass
    except (OverflowError, TypeError, InvalidMessage) as error:
        return f"{decision!r} is not possible: {error}"
    return None


def _own_headers(envelope: messages.Envelope) -> Mapping[str, str]:
    """Return the headers, with the expiry of the envelope added, unless they have a time to be received already."""
    if messages.Headers.TIME_TO_BE_RECEIVED in envelope.headers:
        return envelope.headers
    return messages.headers_with_expiry(envelope)


def _message_id(received: Received) -> str:
    return received.envelope.message_id

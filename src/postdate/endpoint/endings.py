"""How a received message ends that is past its use, or whose handling has failed. Source: specification 5 and 6."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final, Self

from postdate.clock import later
from postdate.core.expiry import discard_reason, end_of_use, may_expire
from postdate.core.failure import ErrorQueue
from postdate.core.recoverability import (
    DEFAULT_ERROR_QUEUE,
    Decision,
    DelayedRetry,
    Discard,
    Host,
    ImmediateRetry,
    MoveToError,
    Recoverability,
    after_handling_failed,
    check_retries,
    delayed_retry_headers,
    text_of,
    why_unavailable,
)
from postdate.endpoint.critical import CriticalErrors
from postdate.endpoint.outgoing import OutgoingMessages
from postdate.errors import ConfigurationError, InvalidMessage, InvalidTimestamp
from postdate.messages import (
    DESTINATION_LIMIT,
    DelayedMessage,
    Envelope,
    Headers,
    check_text,
    headers_with_expiry,
    new_message_id,
    without_delay_headers,
)
from postdate.ports import End, Received, RecordKind, TransactionMode
from postdate.runtime.metrics import Metrics

log = logging.getLogger("postdate.endpoint")

POLICY_FAILURES: Final = 10
"""A message is handled again when the policy itself fails; from the eleventh time on it goes to the error queue."""


@dataclass(frozen=True, slots=True)
class Retries:
    """Which retries an endpoint has: ``immediate``, back to its queue; ``delayed``, with a store."""

    immediate: bool
    delayed: bool

    @classmethod
    def of(cls, mode: TransactionMode, *, delays: bool) -> Self:
        given_back = mode is not TransactionMode.NONE
        return cls(given_back, given_back and delays)

    def check(self, settings: Recoverability) -> None:
        check_retries(settings, immediate=self.immediate, delayed=self.delayed)

    def decide(self, error: Exception, received: Received, settings: Recoverability, now: datetime) -> Decision:
        """Return what the policy decides, or :class:`MoveToError` where that cannot be; raises what a policy does."""
        headers, failures = (
            dict(received.envelope.headers),
            received.failures + 1,
        )  # a copy, which the policy may change
        policy = settings.policy or after_handling_failed
        decision = policy(error, failures, headers, settings, now)
        if not isinstance(decision, ImmediateRetry | DelayedRetry | MoveToError | Discard):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(f"{decision!r} is no decision of a recoverability policy")
        reason = why_unavailable(decision, immediate=self.immediate, delayed=self.delayed)
        reason = reason or _why_impossible(decision, now)
        if reason is None:
            return decision
        log.warning("message %s goes to the error queue: %s", received.envelope.message_id, reason)
        return MoveToError()


@dataclass(frozen=True, slots=True)
class MessageEndings:
    """Decides how received messages end that have expired, or whose handling has failed."""

    outgoing: OutgoingMessages
    recoverability: Recoverability
    retries: Retries
    host: Host
    critical_errors: CriticalErrors
    metrics: Metrics
    ignore_time_to_be_received: bool
    allowance: timedelta

    @property
    def error_queue(self) -> str:
        return self.recoverability.error_queue or DEFAULT_ERROR_QUEUE

    def discard_reason(self, received: Received) -> str | None:
        """Return why a message has expired, or ``None``; queues may have judged an expiry outside its headers."""
        envelope, headers = received.envelope, received.envelope.headers
        if self.ignore_time_to_be_received or not may_expire(envelope):
            return None
        if not self.outgoing.transport.capabilities.expires_messages:
            headers = _own_headers(envelope)
        return discard_reason(headers, self.outgoing.clock.now(), self.allowance)

    def discarded(self, received: Received, reason: str) -> End:
        """Return the end of an expired message: counted, recorded, and in no other queue."""
        if received.failures:  # not just too late, so it is worth knowing
            reason = f"{reason}, after {received.failures} failed attempts"
        level = logging.WARNING if received.failures else logging.DEBUG
        log.log(level, "Discarding message %s due to lapsed Time To Be Received header: %s", _id(received), reason)
        self.metrics.discarded(1)
        return End(RecordKind.DISCARDED, reason)

    def end_after_failure(self, received: Received, error: Exception) -> End | None:
        """Return how a message ends whose handling failed, or ``None`` when it goes back to its queue."""
        now = self.outgoing.clock.now()
        reason = f"{type(error).__name__}: {text_of(error)}"
        try:
            decision = self.retries.decide(error, received, self.recoverability, now)
        except Exception as failure:  # noqa: BLE001 - whatever a policy of an application raises
            about = f"message {_id(received)}, which failed with {reason}"
            self.critical_errors(f"Failed to execute the recoverability policy for {about}", failure)
            return self.to_error(received, error) if received.failures >= POLICY_FAILURES else None
        match decision:
            case ImmediateRetry():
                log.info("message %s is retried at once: %s", _id(received), reason)
                return None
            case DelayedRetry(delay) if self._expires_before(received, later(now, delay)):
                log.warning("message %s is not retried, as it would expire before that: %s", _id(received), reason)
                return self.discarded(received, f"expires before its retry: {reason}")
            case DelayedRetry(delay):
                log.warning("message %s is retried in %s: %s", _id(received), delay, reason)
                retry = self._retry(received, later(now, delay), now)
                return self.outgoing.end_of([retry], RecordKind.RETRIED, f"retried as {retry.message_id}: {reason}")
            case Discard(why):
                log.info("message %s is discarded by the recoverability policy: %s", _id(received), why)
                self.metrics.discarded(1)
                return End(RecordKind.DISCARDED, f"{why}: {reason}")
            case MoveToError(queue):
                return self.to_error(received, error, queue)

    def _retry(self, received: Received, due: datetime, now: datetime) -> DelayedMessage:
        """Return the message for its delayed retry: a send of its own, so it has an id of its own in the store."""
        envelope = received.envelope
        own = _own_headers(envelope)
        # Without headers of an earlier delay: on the way through a queue they would be taken for those of this one.
        retried = without_delay_headers(delayed_retry_headers(own, now))
        headers = {Headers.MESSAGE_ID: envelope.message_id, **retried}
        return DelayedMessage(new_message_id(), due, self.outgoing.endpoint, headers, envelope.body)

    def _expires_before(self, received: Received, instant: datetime) -> bool:
        if self.ignore_time_to_be_received:
            return False
        try:
            end = end_of_use(_own_headers(received.envelope))
        except InvalidTimestamp:  # unreadable: it does not expire
            return False
        return end is not None and instant - end > self.allowance

    def to_error(self, received: Received, error: Exception, queue: str | None = None, *, brief: bool = False) -> End:
        """Return the end of a message that goes to ``queue``, or to the endpoint's error queue."""
        reason = f"{type(error).__name__}: {text_of(error)}"
        if not brief:
            log.error("message %s moved to error queue %s: %s", _id(received), queue or self.error_queue, reason)
        original = replace(received.envelope, headers=_own_headers(received.envelope))
        customize = self.recoverability.customize_headers
        errors = ErrorQueue(queue or self.error_queue, self.outgoing.endpoint, self.host, customize)
        copy = errors.copy(original, error, self.outgoing.clock.now(), brief=brief)
        return End(RecordKind.FAILED, reason, outgoing=[copy])


def _why_impossible(decision: Decision, now: datetime) -> str | None:
    """Return why there is no such time to retry at, or no such queue; ``None``: there may be."""
    try:
        match decision:
            case DelayedRetry(delay):
                _ = now + delay
            case MoveToError(str() as queue):
                check_text(queue, "its error queue", DESTINATION_LIMIT)
            case MoveToError(queue) if queue is not None:
                return f"{queue!r} is no name of a queue"
            case _:
                pass
    except (OverflowError, TypeError, InvalidMessage) as error:
        return f"{decision!r} cannot be: {error}"
    return None


def _own_headers(envelope: Envelope) -> Mapping[str, str]:
    """Return the headers, with an expiry that only the queue knew; a time to be received is in them already."""
    if Headers.TIME_TO_BE_RECEIVED in envelope.headers:
        return envelope.headers
    return headers_with_expiry(envelope)


def _id(received: Received) -> str:
    return received.envelope.message_id

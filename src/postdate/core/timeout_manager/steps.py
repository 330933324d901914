"""The messages of a timeout manager, and the steps of its two queues: store timeouts, dispatch due ones.

Source: docs/guides/timeout-manager.md.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import Final

import anyio

from postdate import messages
from postdate.clock import Clock, later
from postdate.core.expiry import expiry_of
from postdate.core.health.deadlines import Deadlines, translate_store_errors
from postdate.core.health.destinations import Destinations
from postdate.core.health.message_memory import MessageMemory
from postdate.core.receive.outcomes import AttemptsRecovery, OnCompleted, StepFailure, StepOutcome
from postdate.errors import (
    DestinationUnavailable,
    InvalidMessage,
    InvalidTimestamp,
    NotADelayedMessage,
    TimeoutConcurrentlyProcessed,
)
from postdate.ports import Completion, Received, Transport, Work
from postdate.ports.timeouts import Timeout, TimeoutClaim, TimeoutPersister
from postdate.runtime.bounded import Bounded
from postdate.runtime.resource import Resource

log = logging.getLogger("postdate.timeout_manager")

NOT_STORED_BEFORE_DUE: Final = timedelta(seconds=1)
"""A timeout that is due sooner than this is sent and not stored (row 93)."""

SENT_REMEMBERED: Final = 10_000
"""The number of remembered timeouts that were sent and could not be removed; later attempts only remove them.

A queue and a storage that share a transaction need no such memory.
"""


TRUE: Final = "True"
_NO_SAGA: Final = uuid.UUID(int=0)


def timeout_manager_envelope(message: messages.DelayedMessage, queue: str) -> messages.Envelope:
    """Return the envelope for a timeout manager: the message, with its due time and destination in headers (row 91).

    The timeout manager replaces the time of sending when it dispatches the message, and a time to
    be received counts from the time of sending. So the expiry is sent as an instant; without it, a delayed retry would
    extend the time.
    """
    headers = {**message.headers, messages.Headers.EXPIRE: messages.format_timestamp(message.due)}
    headers[messages.Headers.ROUTE_EXPIRED_TIMEOUT_TO] = message.destination
    expiry = message.expires_at
    if messages.Headers.TIME_TO_BE_RECEIVED in headers:
        expiry = None
        with suppress(InvalidTimestamp):  # its receiver decides
            expiry = expiry_of(headers)
    if expiry is not None:
        headers[messages.Headers.EXPIRES_AT] = messages.format_timestamp(expiry)
    return messages.Envelope(queue, message.message_id, headers, message.body)


def clear_order(saga_id: uuid.UUID, queue: str, message_id: str) -> messages.Envelope:
    """Return the order to a timeout manager to remove all timeouts of a saga."""
    headers = {
        messages.Headers.MESSAGE_ID: message_id,
        messages.Headers.CONTROL_MESSAGE: TRUE,
        messages.Headers.CLEAR_TIMEOUTS: TRUE,
        messages.Headers.SAGA_ID: str(saga_id),
    }
    return messages.Envelope(queue, message_id, headers)


def is_clear_order(envelope: messages.Envelope) -> bool:
    return messages.Headers.CLEAR_TIMEOUTS in envelope.headers


def saga_of(envelope: messages.Envelope) -> str | None:
    """Return the id of the saga in the headers of a message, or ``None``.

    Raises:
        InvalidMessage: the id is no UUID.
    """
    text = envelope.headers.get(messages.Headers.SAGA_ID)
    if text is None:
        return None
    try:
        saga = uuid.UUID(text.strip())
    except ValueError as error:
        raise InvalidMessage(
            f"message {envelope.message_id!r} has header {messages.Headers.SAGA_ID!r} with {text[:60]!r}, "
            f"which is not a UUID"
        ) from error
    return None if saga == _NO_SAGA else str(saga)


def destination_of(envelope: messages.Envelope) -> str:
    """Return the destination of a timeout; raise :class:`NotADelayedMessage` if the message has none."""
    headers = envelope.headers
    destination = headers.get(messages.Headers.ROUTE_EXPIRED_TIMEOUT_TO) or headers.get(
        messages.Headers.REPLY_TO_ADDRESS
    )
    if not destination:
        raise NotADelayedMessage(
            f"message {envelope.message_id!r} is due at {headers.get(messages.Headers.EXPIRE)}, but its destination is "
            f"unknown: it has neither header {messages.Headers.ROUTE_EXPIRED_TIMEOUT_TO!r} nor an address for replies; "
            f"add one of them and return it"
        )
    return destination


def timeout_of(envelope: messages.Envelope, owner: str) -> Timeout:
    """Return the timeout that a message asks for. The same message, received again, gives the same timeout.

    Delayed retries of a message may have the id of that message, so the id of the timeout depends on the due time and
    the destination, too.

    Raises:
        NotADelayedMessage: the message has no due time or no destination (rows 92, 94).
        InvalidTimestamp: the due time is malformed.
        InvalidMessage: the destination or the id of the saga is malformed.
    """
    headers, message_id = dict(envelope.headers), envelope.message_id
    expire = headers.get(messages.Headers.EXPIRE)
    if expire is None:
        raise NotADelayedMessage(
            f"Non timeout message arrived at the timeout manager: message {message_id!r} has no header "
            f"{messages.Headers.EXPIRE!r}"
        )
    destination = destination_of(envelope)
    messages.check_text(destination, f"the destination of message {message_id!r}", messages.DESTINATION_LIMIT)
    headers.setdefault(messages.Headers.MESSAGE_ID, message_id)
    due = messages.parse_timestamp(expire)
    own_id = str(uuid.uuid5(uuid.NAMESPACE_OID, f"{message_id}\n{messages.format_timestamp(due)}\n{destination}"))
    # A retried message may be a reply to a saga that other handlers handle, too. As a timeout of that saga it would be
    # removed together with the timeouts of the saga.
    saga = None if messages.Headers.DELAYED_RETRIES in headers else saga_of(envelope)
    return Timeout(own_id, due, destination, saga, owner, headers, envelope.body)


def announcement(timeout_id: str, queue: str) -> messages.Envelope:
    """Return the control message that announces a due timeout.

    Its id is the id of the timeout, and the dispatched message gets the same id.
    """
    headers = {
        messages.Headers.MESSAGE_ID: timeout_id,
        messages.Headers.CONTROL_MESSAGE: TRUE,
        messages.Headers.TIMEOUT_ID: timeout_id,
    }
    return messages.Envelope(queue, timeout_id, headers)


def announced_timeout_id(envelope: messages.Envelope) -> str:
    """Return the id of the timeout that a control message announces; a UUID is returned in lower case with hyphens."""
    timeout_id = envelope.headers.get(messages.Headers.TIMEOUT_ID)
    if not timeout_id:
        raise NotADelayedMessage(
            f"message {envelope.message_id!r} arrived at the dispatcher of the timeout manager without header "
            f"{messages.Headers.TIMEOUT_ID!r}"
        )
    try:
        return str(uuid.UUID(timeout_id.strip()))
    except ValueError:  # the ids of a persister of the application may be any text
        return timeout_id


def timeout_envelope(timeout: Timeout, message_id: str) -> messages.Envelope:
    """Return the envelope for the destination of a timeout, with all headers of the timeout.

    The envelope has no due time: an audit compares a message with a due time with the records of a store, and the
    timeout manager has no records. ``message_id`` is the id in the queue of the timeout manager.
    """
    return messages.Envelope(timeout.destination, message_id, timeout.headers, timeout.body, _expires_at(timeout))


def dispatch_envelope(timeout: Timeout, message_id: str, now: datetime) -> messages.Envelope:
    """Return the envelope of a stored timeout: sent now, with the id of the timeout in a header."""
    headers = {
        **timeout.headers,
        messages.Headers.TIME_SENT: messages.format_timestamp(now),
        messages.Headers.RELATED_TO_TIMEOUT_ID: timeout.timeout_id,
    }
    return timeout_envelope(replace(timeout, headers=headers), message_id)


def _expires_at(timeout: Timeout) -> datetime | None:
    """Return the expiry of a timeout in its queue. The header stays in any case, and the receiver decides by it."""
    try:
        expires_at = messages.expires_at_of(timeout.headers)
    except InvalidTimestamp:
        return None
    return None if expires_at is None or expires_at < timeout.due else expires_at


class StoreStep:
    """The step that stores timeouts. A timeout that is due within a second is sent together with its acknowledgement.

    NServiceBus sends such a timeout at once, up to a second early. Here it stays received until it is due. If its
    destination does not accept it, it is stored. ``enlisting`` is the persister, if it can store in the transaction
    that acknowledges the message. Otherwise a message may be received again after it was stored. This step remembers
    such messages, as the timeout may have been dispatched meanwhile. ``on_stored`` is called with the due time after
    the commit; NServiceBus does so before it.
    """

    def __init__(
        self,
        persister: TimeoutPersister,
        enlisting: TimeoutPersister | None,
        owner: str,
        clock: Clock,
        on_stored: Callable[[datetime], None],
        recovery: AttemptsRecovery,
    ) -> None:
        self._persister, self._enlisting, self._owner, self._clock = persister, enlisting, owner, clock
        self._on_stored, self._recovery = on_stored, recovery
        self._store_deadlines = Deadlines.of_store(persister, clock)
        self.deadlines = (self._store_deadlines,)
        """The deadlines of all calls of this step. They are shortened when its pump stops."""
        self._memory = MessageMemory()
        """What is known by the id of the timeout: two messages with one id may be two timeouts."""

    async def handle(self, received: Received) -> StepOutcome:
        envelope = received.envelope
        try:
            if is_clear_order(envelope):
                return await self._clear(envelope)
            timeout = timeout_of(envelope, self._owner)
            facts, now = self._memory.find(timeout.timeout_id), self._clock.now()
            is_stored = facts is not None and facts.may_be_stored
            # With `attempts`, sending it failed before. A worker that waits for its destination would store no others.
            if is_stored or timeout.due > later(now, NOT_STORED_BEFORE_DUE) or received.attempts:
                return await self._store(timeout, envelope, is_stored=is_stored)
            if now < timeout.due:  # the step is called again then; it stores the timeout if the clock was set back
                return StepOutcome(None, wait=timeout.due - now)
            completion = Completion(record=None, outgoing=[timeout_envelope(timeout, envelope.message_id)])
        except Exception as error:  # noqa: BLE001 - without a counted failure, the message would return for ever
            return StepOutcome(None, self._recovery, failure=StepFailure(error))
        log.debug("message %s is due and goes to %s at once", envelope.message_id, timeout.destination)
        return self._outcome(envelope, completion, partial(self._report_delivery, timeout))

    async def _report_delivery(self, timeout: Timeout) -> None:
        late = (self._clock.now() - timeout.due).total_seconds()
        self._recovery.metrics.report_deliveries({timeout.destination: 1}, [late])

    async def _store(self, timeout: Timeout, envelope: messages.Envelope, *, is_stored: bool) -> StepOutcome:
        work: list[Work] = []
        if self._enlisting is None:
            is_new = not is_stored and await self._store_deadlines.call_in_task(lambda: self._persister.add(timeout))
            if not is_new:
                log.info("message %s was stored before, as timeout %s", envelope.message_id, timeout.timeout_id)
            self._memory.get_or_create(timeout.timeout_id).may_be_stored = True
        else:
            with translate_store_errors(self._persister):
                work.append(self._enlisting.adding_work(timeout))

        async def report_stored() -> None:
            self._memory.forget(timeout.timeout_id)
            self._recovery.metrics.count("stored", 1)
            self._on_stored(timeout.due)

        return self._outcome(envelope, Completion(record=None, work=work), report_stored)

    async def _clear(self, envelope: messages.Envelope) -> StepOutcome:
        saga_id = saga_of(envelope)
        if saga_id is None:
            raise NotADelayedMessage(
                f"message {envelope.message_id!r} asks to remove the timeouts of a saga and does not name the saga: it "
                f"has no header {messages.Headers.SAGA_ID!r}"
            )
        work: list[Work] = []
        if self._enlisting is None:
            removed = await self._store_deadlines.call_in_task(lambda: self._persister.remove_by_saga(saga_id))
            log.debug("removed %d timeouts of saga %s", removed, saga_id)
        else:
            with translate_store_errors(self._persister):
                work.append(self._enlisting.removing_by_saga_work(saga_id))
        return self._outcome(envelope, Completion(record=None, work=work))

    def _outcome(self, envelope: messages.Envelope, completion: Completion, *on_completed: OnCompleted) -> StepOutcome:
        return StepOutcome(
            completion, self._recovery, [partial(self._recovery.report_success, envelope.message_id), *on_completed]
        )


async def _release_nothing() -> None:
    """Release nothing: in a transaction of the queue there is no claim."""


class DispatchStep:
    """The step that sends the timeout that a control message announces, and removes it.

    With ``enlisting`` all of this is one transaction: the timeout is sent exactly once. Without it, the timeout is
    sent, then removed, and then the control message is acknowledged. After a failure in between, the timeout is sent
    again; it is never lost. If the persister supports claims, a timeout is claimed while it is sent, and no other
    process sends it. A timeout whose destination does not accept it stays stored, and a later poll back announces it
    again. Other timeouts do not wait for it.
    """

    def __init__(
        self,
        persister: TimeoutPersister,
        enlisting: TimeoutPersister | None,
        transport: Transport,
        clock: Clock,
        on_removed: Callable[[str], None],
        recovery: AttemptsRecovery,
    ) -> None:
        self._persister, self._enlisting, self._transport, self._clock = persister, enlisting, transport, clock
        self._store_deadlines = Deadlines.of_store(persister, clock)
        self._send_deadlines = Deadlines.of_transport(transport, clock)
        self.deadlines = (self._store_deadlines, self._send_deadlines)
        """The deadlines of all calls of this step. They are shortened when its pump stops."""
        self._on_removed, self._recovery = on_removed, recovery
        self._sent = Bounded[str, None](SENT_REMEMBERED)
        self._refusing_destinations = Destinations()
        self._refusals = Resource("that queue").calls("due timeouts of some queues stay stored", log, logging.WARNING)

    async def handle(self, received: Received) -> StepOutcome:
        """Dispatch the announced timeout, unless it was removed already or another process has claimed it."""
        try:
            completion, report_dispatched = await self._dispatch(received.envelope)
        except Exception as error:  # noqa: BLE001 - without a counted failure, the message would return for ever
            return StepOutcome(None, self._recovery, failure=StepFailure(error))
        report_success = partial(self._recovery.report_success, received.envelope.message_id)
        return StepOutcome(completion, self._recovery, [report_success, report_dispatched])

    async def _dispatch(self, announcement: messages.Envelope) -> tuple[Completion, OnCompleted]:
        """Dispatch a timeout, now or with the returned completion. Also return a callback for after the completion."""
        timeout_id = announced_timeout_id(announcement)
        claim = await self._store_deadlines.call_in_task(lambda: self._claim(timeout_id), _release_late_claim)
        if claim is None:  # if its claimant does not dispatch it, a later poll back finds it again
            log.debug("timeout %s is gone already, or in other hands", timeout_id)
            return Completion(record=None), partial(self._report_dispatched, timeout_id)
        if not claim.timeout.destination:  # a row that other software wrote
            reply_to = claim.timeout.headers.get(messages.Headers.REPLY_TO_ADDRESS, "")
            claim = replace(claim, timeout=replace(claim.timeout, destination=reply_to))
        envelope = dispatch_envelope(claim.timeout, announcement.message_id, self._clock.now())
        try:
            completion = await self._send_and_remove(claim, envelope)
        except DestinationUnavailable:
            return Completion(record=None), partial(self._report_dispatched, timeout_id)
        finally:
            with anyio.CancelScope(shield=True):
                await self._store_deadlines.call_in_task(claim.release)
        return completion, partial(self._report_dispatched, timeout_id, claim.timeout)

    async def _claim(self, timeout_id: str) -> TimeoutClaim | None:
        if self._enlisting is None:
            return await self._persister.claim(timeout_id)
        # In the transaction of the queue no claim is needed: a second dispatch finds no timeout and sends nothing.
        timeout = await self._persister.peek(timeout_id)
        if timeout is None:
            return None
        return TimeoutClaim(timeout, partial(self._persister.try_remove, timeout_id), _release_nothing)

    async def _send_and_remove(self, claim: TimeoutClaim, envelope: messages.Envelope) -> Completion:
        timeout = claim.timeout
        if self._enlisting is not None:
            with translate_store_errors(self._persister):
                work = [self._enlisting.removing_work(timeout.timeout_id)]
            return Completion(record=None, outgoing=[envelope], work=work)
        if timeout.timeout_id not in self._sent:
            # Another timeout is the probe.
            if self._refusing_destinations.wait_seconds(envelope.destination, self._clock.monotonic()):
                raise DestinationUnavailable(f"{envelope.destination} accepted no message a moment ago")
            await self._send(timeout.timeout_id, envelope)
        removed = await self._store_deadlines.call_in_task(claim.remove)
        self._sent.pop(timeout.timeout_id, None)
        if not removed:
            raise TimeoutConcurrentlyProcessed(
                f"timeout {timeout.timeout_id} was concurrently processed: another process removed it while it was "
                f"sent "
                f"to {timeout.destination}"
            )
        return Completion(record=None)

    async def _send(self, timeout_id: str, envelope: messages.Envelope) -> None:
        """Send a timeout, and remember that it was sent.

        Without this memory, a storage that can be read and not written would have the timeout sent at each attempt.
        """
        (error,) = await self._send_deadlines.call_in_task(lambda: self._transport.send([envelope], self._clock.now()))
        if isinstance(error, DestinationUnavailable):
            seconds = self._clock.monotonic()
            self._refusing_destinations.report_refusal(envelope.destination, seconds)
            self._refusals.report_failure(error, seconds)
        if error is not None:
            raise error
        self._refusing_destinations.report_success(envelope.destination)
        self._sent[timeout_id] = None

    async def _report_dispatched(self, timeout_id: str, timeout: Timeout | None = None) -> None:
        self._on_removed(timeout_id)
        if timeout is not None:
            late = (self._clock.now() - timeout.due).total_seconds()
            self._recovery.metrics.report_deliveries({timeout.destination: 1}, [late])
            log.debug("timeout %s went to %s, due %s", timeout_id, timeout.destination, timeout.due)


def timeout_callback(on_moved_to_error: Callable[[str], None]) -> Callable[[Received], None]:
    """Return a callback that reports the timeout of a control message in the error queue; it stays stored."""

    def notify(received: Received) -> None:
        with suppress(NotADelayedMessage):
            on_moved_to_error(announced_timeout_id(received.envelope))

    return notify


async def _release_late_claim(claim: TimeoutClaim | None) -> None:
    """Release a timeout that was claimed by a call after its deadline."""
    if claim is not None:
        await claim.release()

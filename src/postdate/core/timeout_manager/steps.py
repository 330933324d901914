"""The messages of a timeout manager, and the steps of its two queues: store timeouts, dispatch due ones.

Source: specification 4.3, 4.5, 4.8.
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

from postdate.clock import Clock, later
from postdate.core.expiry import expiry_of
from postdate.core.health.attempts import Attempts
from postdate.core.health.deadlines import Deadlines, translate_store_errors
from postdate.core.health.destinations import Destinations
from postdate.core.receive.outcomes import AttemptsRecovery, OnCompleted, StepFailure, StepOutcome
from postdate.errors import (
    DestinationUnavailable,
    InvalidMessage,
    InvalidTimestamp,
    NotADelayedMessage,
    TimeoutConcurrentlyProcessed,
)
from postdate.messages import (
    DESTINATION_LIMIT,
    DelayedMessage,
    Envelope,
    Headers,
    check_text,
    expires_at_of,
    format_timestamp,
    parse_timestamp,
)
from postdate.ports import Completion, Received, Transport, Work
from postdate.ports.timeouts import Timeout, TimeoutClaim, TimeoutPersister
from postdate.runtime.bounded import Bounded
from postdate.runtime.resource import Resource

log = logging.getLogger("postdate.timeout_manager")

NOT_STORED_BEFORE_DUE: Final = timedelta(seconds=1)
"""A timeout that is due sooner is not stored any more (row 93)."""

SENT_REMEMBERED: Final = 10_000
"""Timeouts that were sent and could not be removed, below transaction scope: the next attempts only remove them."""


TRUE: Final = "True"
_NO_SAGA: Final = uuid.UUID(int=0)


def timeout_manager_envelope(message: DelayedMessage, queue: str) -> Envelope:
    """Return the envelope for a timeout manager: the message, with its due time and destination in headers (row 91).

    The time of sending is written anew when the message is dispatched (specification 4.8), and a time to be received
    counts from that: so its end goes along as an absolute one, which a delayed retry would lose otherwise.
    """
    headers = {**message.headers, Headers.EXPIRE: format_timestamp(message.due)}
    headers[Headers.ROUTE_EXPIRED_TIMEOUT_TO] = message.destination
    expiry = message.expires_at
    if Headers.TIME_TO_BE_RECEIVED in headers:
        expiry = None
        with suppress(InvalidTimestamp):  # its receiver decides
            expiry = expiry_of(headers)
    if expiry is not None:
        headers[Headers.EXPIRES_AT] = format_timestamp(expiry)
    return Envelope(queue, message.message_id, headers, message.body)


def clear_order(saga_id: uuid.UUID, queue: str, message_id: str) -> Envelope:
    """Return the order to a timeout manager to forget all timeouts of a saga (specification 4.10)."""
    headers = {
        Headers.MESSAGE_ID: message_id,
        Headers.CONTROL_MESSAGE: TRUE,
        Headers.CLEAR_TIMEOUTS: TRUE,
        Headers.SAGA_ID: str(saga_id),
    }
    return Envelope(queue, message_id, headers)


def is_clear_order(envelope: Envelope) -> bool:
    return Headers.CLEAR_TIMEOUTS in envelope.headers


def saga_of(envelope: Envelope) -> str | None:
    """Return the id of the saga that a message is about, or ``None``; one that is no UUID is an invalid message."""
    text = envelope.headers.get(Headers.SAGA_ID)
    if text is None:
        return None
    try:
        saga = uuid.UUID(text.strip())
    except ValueError as error:
        raise InvalidMessage(
            f"message {envelope.message_id!r} has header {Headers.SAGA_ID!r} with {text[:60]!r}, which is no UUID"
        ) from error
    return None if saga == _NO_SAGA else str(saga)


def destination_of(envelope: Envelope) -> str:
    """Return where a timeout goes when it is due; without that it is no timeout: :class:`NotADelayedMessage`."""
    headers = envelope.headers
    destination = headers.get(Headers.ROUTE_EXPIRED_TIMEOUT_TO) or headers.get(Headers.REPLY_TO_ADDRESS)
    if not destination:
        raise NotADelayedMessage(
            f"message {envelope.message_id!r} is due at {headers.get(Headers.EXPIRE)}, but nobody knows where: it has "
            f"neither header {Headers.ROUTE_EXPIRED_TIMEOUT_TO!r} nor an address for replies; add one of them and "
            f"return it"
        )
    return destination


def timeout_of(envelope: Envelope, owner: str) -> Timeout:
    """Return the timeout that a message asks for; the same message, received again, asks for the same one.

    Delayed retries of a message may have its id, so due time and destination are part of the timeout's. Raises
    :class:`NotADelayedMessage` without either of these (rows 92, 94), and errors for what is malformed.
    """
    headers, message_id = dict(envelope.headers), envelope.message_id
    expire = headers.get(Headers.EXPIRE)
    if expire is None:
        raise NotADelayedMessage(
            f"Non timeout message arrived at the timeout manager: message {message_id!r} has no header "
            f"{Headers.EXPIRE!r}"
        )
    destination = destination_of(envelope)
    check_text(destination, f"the destination of message {message_id!r}", DESTINATION_LIMIT)
    headers.setdefault(Headers.MESSAGE_ID, message_id)
    due = parse_timestamp(expire)
    own_id = str(uuid.uuid5(uuid.NAMESPACE_OID, f"{message_id}\n{format_timestamp(due)}\n{destination}"))
    # A retried message may be a reply to a saga that other handlers take, too: as a timeout of that saga it would be
    # forgotten with the others.
    saga = None if Headers.DELAYED_RETRIES in headers else saga_of(envelope)
    return Timeout(own_id, due, destination, saga, owner, headers, envelope.body)


def announcement(timeout_id: str, queue: str) -> Envelope:
    """Return the control message of a due timeout, with the timeout's id, which the dispatched message gets, too."""
    headers = {Headers.MESSAGE_ID: timeout_id, Headers.CONTROL_MESSAGE: TRUE, Headers.TIMEOUT_ID: timeout_id}
    return Envelope(queue, timeout_id, headers)


def announced_timeout_id(envelope: Envelope) -> str:
    """Return the id of the timeout that a control message announces; a UUID is spelled as Postdate does."""
    timeout_id = envelope.headers.get(Headers.TIMEOUT_ID)
    if not timeout_id:
        raise NotADelayedMessage(
            f"message {envelope.message_id!r} arrived at the dispatcher of the timeout manager without header "
            f"{Headers.TIMEOUT_ID!r}"
        )
    try:
        return str(uuid.UUID(timeout_id.strip()))
    except ValueError:  # of a storage of one's own, whose ids may be anything
        return timeout_id


def timeout_envelope(timeout: Timeout, message_id: str) -> Envelope:
    """Return the envelope for a timeout's destination; the headers that steered it stay (specification 4.3).

    It has no due time: how a message with one ends is held against the records of a store, and the timeout manager has
    none. ``message_id`` is that in the timeout manager's queue.
    """
    return Envelope(timeout.destination, message_id, timeout.headers, timeout.body, _expires_at(timeout))


def dispatch_envelope(timeout: Timeout, message_id: str, now: datetime) -> Envelope:
    """Return the envelope of a stored timeout: sent now, and related to its timeout (specification 4.8)."""
    headers = {
        **timeout.headers,
        Headers.TIME_SENT: format_timestamp(now),
        Headers.RELATED_TO_TIMEOUT_ID: timeout.timeout_id,
    }
    return timeout_envelope(replace(timeout, headers=headers), message_id)


def _expires_at(timeout: Timeout) -> datetime | None:
    """Return when the queue lets it expire; the header stays in any case, and its receiver decides."""
    try:
        expires_at = expires_at_of(timeout.headers)
    except InvalidTimestamp:
        return None
    return None if expires_at is None or expires_at < timeout.due else expires_at


class StoreStep:
    """Stores timeouts; one that is due within a second, or already, is sent on, in the transaction that takes it off.

    Upstream sends it at once, up to a second early. Here nothing is early: it is in hand until it is due. If its queue
    takes nothing now, it is stored after all. ``enlisting`` is the persister when storing is part of that transaction.
    Otherwise a message may come again after it was stored: it is remembered, as the timeout may have left meanwhile.
    ``registered`` is told of due times after the commit; upstream tells before.
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
        """Of all that it calls; to be shortened when its pump stops."""
        self._attempts = Attempts()
        """By the id of the timeout: two messages with one id may be two timeouts."""

    async def handle(self, received: Received) -> StepOutcome:
        envelope = received.envelope
        try:
            if is_clear_order(envelope):
                return await self._clear(envelope)
            timeout = timeout_of(envelope, self._owner)
            attempt, now = self._attempts.find(timeout.timeout_id), self._clock.now()
            is_stored = attempt is not None and attempt.may_be_stored
            # In hand it would keep others from being stored while its queue, which refused it, is full.
            if is_stored or timeout.due > later(now, NOT_STORED_BEFORE_DUE) or received.attempts:
                return await self._store(timeout, envelope, is_stored=is_stored)
            if now < timeout.due:  # asked again then, it is stored if the clock was set back meanwhile
                return StepOutcome(None, wait=timeout.due - now)
            completion = Completion(record=None, outgoing=[timeout_envelope(timeout, envelope.message_id)])
        except Exception as error:  # noqa: BLE001 - whatever it is: just given back, it would come for ever
            return StepOutcome(None, self._recovery, failure=StepFailure(error))
        log.debug("message %s is due and goes to %s at once", envelope.message_id, timeout.destination)
        return self._outcome(envelope, completion, partial(self._report_delivery, timeout))

    async def _report_delivery(self, timeout: Timeout) -> None:
        late = (self._clock.now() - timeout.due).total_seconds()
        self._recovery.metrics.report_deliveries({timeout.destination: 1}, [late])

    async def _store(self, timeout: Timeout, envelope: Envelope, *, is_stored: bool) -> StepOutcome:
        work: list[Work] = []
        if self._enlisting is None:
            is_new = not is_stored and await self._store_deadlines.call_in_task(lambda: self._persister.add(timeout))
            if not is_new:
                log.info("message %s was stored before, as timeout %s", envelope.message_id, timeout.timeout_id)
            self._attempts.get_or_create(timeout.timeout_id).may_be_stored = True
        else:
            with translate_store_errors(self._persister):
                work.append(self._enlisting.adding_work(timeout))

        async def report_stored() -> None:
            self._attempts.forget(timeout.timeout_id)
            self._recovery.metrics.count("stored", 1)
            self._on_stored(timeout.due)

        return self._outcome(envelope, Completion(record=None, work=work), report_stored)

    async def _clear(self, envelope: Envelope) -> StepOutcome:
        saga_id = saga_of(envelope)
        if saga_id is None:
            raise NotADelayedMessage(
                f"message {envelope.message_id!r} asks to forget the timeouts of a saga and does not say of which: it "
                f"has no header {Headers.SAGA_ID!r}"
            )
        work: list[Work] = []
        if self._enlisting is None:
            removed = await self._store_deadlines.call_in_task(lambda: self._persister.remove_by_saga(saga_id))
            log.debug("removed %d timeouts of saga %s", removed, saga_id)
        else:
            with translate_store_errors(self._persister):
                work.append(self._enlisting.removing_by_saga_work(saga_id))
        return self._outcome(envelope, Completion(record=None, work=work))

    def _outcome(self, envelope: Envelope, completion: Completion, *on_completed: OnCompleted) -> StepOutcome:
        return StepOutcome(
            completion, self._recovery, [partial(self._recovery.report_success, envelope.message_id), *on_completed]
        )


async def _release_nothing() -> None:
    """Release nothing: in a transaction of the queue there is no claim."""


class DispatchStep:
    """Sends the timeout that a control message announces, and removes it.

    With ``enlisting`` all of it is one transaction: exactly once. Without, the send leaves at once, then the timeout is
    removed, then the control message taken off its queue: whatever fails in between is sent again, never lost. Where
    timeouts can be claimed, one process has each in hand while it is sent, and others leave it alone. A timeout whose
    queue takes nothing now stays stored, and the next look back announces it again: others go meanwhile.
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
        """Of all that it calls; to be shortened when its pump stops."""
        self._on_removed, self._recovery = on_removed, recovery
        self._sent = Bounded[str, None](SENT_REMEMBERED)
        self._refusing_destinations = Destinations()
        self._refusals = Resource("that queue").calls("due timeouts of some queues stay stored", log, logging.WARNING)

    async def handle(self, received: Received) -> StepOutcome:
        """A timeout that is gone, or in other hands, before it is sent, is success."""
        try:
            completion, report_dispatched = await self._dispatch(received.envelope)
        except Exception as error:  # noqa: BLE001 - whatever it is: just given back, it would come for ever
            return StepOutcome(None, self._recovery, failure=StepFailure(error))
        report_success = partial(self._recovery.report_success, received.envelope.message_id)
        return StepOutcome(completion, self._recovery, [report_success, report_dispatched])

    async def _dispatch(self, announcement: Envelope) -> tuple[Completion, OnCompleted]:
        """Dispatch a timeout, or return the end that does; and a callback for when the message has ended so."""
        timeout_id = announced_timeout_id(announcement)
        claim = await self._store_deadlines.call_in_task(lambda: self._claim(timeout_id), _release_late_claim)
        if claim is None:  # if others hold it and do not dispatch it, the next look back finds it again
            log.debug("timeout %s is gone already, or in other hands", timeout_id)
            return Completion(record=None), partial(self._report_dispatched, timeout_id)
        if not claim.timeout.destination:  # a row of other software
            reply_to = claim.timeout.headers.get(Headers.REPLY_TO_ADDRESS, "")
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
        # In the transaction of the queue no claim is needed: the second one finds the timeout gone and sends nothing.
        timeout = await self._persister.peek(timeout_id)
        if timeout is None:
            return None
        return TimeoutClaim(timeout, partial(self._persister.try_remove, timeout_id), _release_nothing)

    async def _send_and_remove(self, claim: TimeoutClaim, envelope: Envelope) -> Completion:
        timeout = claim.timeout
        if self._enlisting is not None:
            with translate_store_errors(self._persister):
                work = [self._enlisting.removing_work(timeout.timeout_id)]
            return Completion(record=None, outgoing=[envelope], work=work)
        if timeout.timeout_id not in self._sent:
            if self._refusing_destinations.wait_seconds(
                envelope.destination, self._clock.monotonic()
            ):  # another is the probe
                raise DestinationUnavailable(f"{envelope.destination} took nothing just now")
            await self._send(timeout.timeout_id, envelope)
        removed = await self._store_deadlines.call_in_task(claim.remove)
        self._sent.pop(timeout.timeout_id, None)
        if not removed:
            raise TimeoutConcurrentlyProcessed(
                f"timeout {timeout.timeout_id} was concurrently processed: somebody else removed it while it was sent "
                f"to {timeout.destination}"
            )
        return Completion(record=None)

    async def _send(self, timeout_id: str, envelope: Envelope) -> None:
        """Send, and remember it: a storage that can be read and not written would have it sent at every attempt."""
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

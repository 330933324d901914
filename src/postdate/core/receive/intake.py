"""Stores delayed messages that come through a queue, whoever sent them. Source: specification 1.6; ADR 0009."""

from __future__ import annotations

import logging
import uuid
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import Final

from postdate.clock import Clock
from postdate.core.health.attempts import Attempts
from postdate.core.health.circuit_breaker import FailureRate, RepeatedFailures
from postdate.core.health.deadlines import Deadlines, translate_store_errors
from postdate.core.limits import LimitsCache
from postdate.core.receive.outcomes import AttemptsRecovery, StepFailure, StepOutcome, StoreWaits, immediate_attempts
from postdate.core.receive.settling import RepeatableStoring, is_stored, strip_repeat_header
from postdate.core.recoverability import DispatchSettings, RecoveryRules
from postdate.core.simple_store import enlisting_store
from postdate.core.timeout_manager.steps import destination_of
from postdate.core.upkeep.wall_times import WallTime, ZoneMarkers
from postdate.errors import (
    DestinationUnavailable,
    DuplicateMessage,
    InvalidMessage,
    InvalidTimestamp,
    MessageError,
    NotADelayedMessage,
    NotSupported,
    PostdateError,
    QueueNotFound,
)
from postdate.messages import DelayedMessage, Envelope, Headers, copy_with_due, from_delay_headers, to_envelope
from postdate.ports import AdministrableStore, ClaimingStore, Completion, Read, Received, Transport
from postdate.runtime.reporting import NO_METRICS, Metrics
from postdate.runtime.resource import resource_of

log = logging.getLogger("postdate.intake")

STORE_AGAIN_AFTER: Final = timedelta(seconds=1)
"""How long a message stays in hand before it is stored again, while its row is claimed."""

# A message in the timeouts queue is an ordinary one, so how it ends there is not recorded: the store records the
# delayed message itself.
_REMOVED_UNRECORDED: Final = Completion(record=None)


def from_timeouts_queue(envelope: Envelope, now: datetime) -> DelayedMessage:
    """Return the delayed message that an endpoint sent; see :data:`postdate.ports.Read`.

    Also one that an older endpoint sent to its timeout manager, whose queue had this name. Our headers go first: beside
    them the older ones are stale, and no more than part of the message (row 89).

    Raises:
        NotADelayedMessage: no due time; or it is an order to a timeout manager about timeouts that this has stored.
        InvalidTimestamp: its due time is malformed.
    """
    headers = envelope.headers
    is_from_endpoint = Headers.TIMEOUT_EXPIRE in headers or Headers.TIMEOUT_DESTINATION in headers
    if not is_from_endpoint and Headers.EXPIRE in headers:
        return _from_timeout_manager_headers(envelope)
    if not is_from_endpoint and (Headers.TIMEOUT_ID in headers or Headers.CLEAR_TIMEOUTS in headers):
        timeout_id = headers.get(Headers.TIMEOUT_ID)
        order_text = "to forget some" if timeout_id is None else f"to send its timeout {timeout_id!r}"
        raise NotADelayedMessage(
            f"message {envelope.message_id!r} asks a timeout manager {order_text}, of those in its own storage, which "
            f"is not "
            f"read here; let one that has this storage run to its end, and return the message to it"
        )
    return from_delay_headers(envelope.message_id, headers, envelope.body)


def _from_timeout_manager_headers(envelope: Envelope) -> DelayedMessage:
    """Return the message for a timeout manager without the headers that steered it (specification 3.7, row 94).

    It gets an id of its own, the same each time it is received: all delayed retries of one message have that message's
    id, and a store would take the second for a repetition of the first.
    """
    headers, destination = dict(envelope.headers), destination_of(envelope)
    due = headers.pop(Headers.EXPIRE)
    headers.pop(Headers.ROUTE_EXPIRED_TIMEOUT_TO, None)
    headers.setdefault(Headers.MESSAGE_ID, envelope.message_id)
    own_id = str(uuid.uuid5(uuid.NAMESPACE_OID, f"{envelope.message_id}\n{due}\n{destination}"))
    timeout_headers = {**headers, Headers.TIMEOUT_DESTINATION: destination, Headers.TIMEOUT_EXPIRE: due}
    return from_delay_headers(own_id, timeout_headers, envelope.body)


class Intake:
    """The step of a timeouts queue, or of another queue with delayed messages: stores them.

    While the store is away a message stays in hand: a broker counts how often one was given back, and some drop it at
    the twentieth time; near that it goes to the error queue. Trouble that may be one row's counts against a message
    that meets it again and again while others are stored. ``settings.number_of_retries`` counts here, too.
    """

    def __init__(  # noqa: PLR0913 - collaborators; put together in one place
        self,
        store: ClaimingStore,
        transport: Transport,
        settings: DispatchSettings,
        clock: Clock,
        breaker: RepeatedFailures,
        metrics: Metrics = NO_METRICS,
        read: Read = from_timeouts_queue,
        failure_rate: FailureRate | None = None,
    ) -> None:
        self._read, self._store, self._clock, self._metrics = read, store, clock, metrics
        self._enlisting, self._zones = enlisting_store(store, transport), ZoneMarkers(store)
        self.deadlines = Deadlines.of_store(store, clock)
        """Of all calls of the store; to be shortened when its pump stops."""
        self._limits = LimitsCache(store, self.deadlines, clock)
        unrecoverable = MessageError, QueueNotFound, DuplicateMessage
        failure = f"cannot store the delayed messages of {settings.timeouts_queue}"
        self.outage = StoreWaits(clock, resource_of(store).calls(failure, log, breaker=breaker))
        self._attempts = Attempts()
        self._store_recovery = AttemptsRecovery(
            rules=RecoveryRules(waits_in_hand=True, shares_database=self._enlisting is not None, counts_transient=True),
            attempts=self._attempts,
            outage=self.outage,
            failure_rate=failure_rate,
            errors=settings.errors,
            clock=clock,
            policy=immediate_attempts(max(1, settings.number_of_retries), *unrecoverable),
            metrics=metrics,
        )
        self._send_recovery = replace(
            self._store_recovery,
            rules=RecoveryRules(
                retry_now_errors=(DestinationUnavailable,), counts_transient=True
            ),  # the store keeps it until its queue has room
            attempts=Attempts(),
            outage=None,
            returns_outgoing=settings.errors_return_to_destination,
        )

    async def handle(self, received: Received) -> StepOutcome:
        """Store the message, now or with its end; or send it on when it is due already (row 36).

        What limits of its destination hold is stored although it is due: from there it is let through (ADR 39).

        A message that is stored already was left by an attempt that could not take it off the queue: it is done. So one
        that comes again is not sent from here, though it may be due by now: the store knows whether it was sent. Queues
        do not count what an outage gave back, so this remembers what it has given to the store. After a crash in
        between, on a queue that does not count that either, it is sent twice (row 50).
        """
        now, id_ = self._clock.now(), received.envelope.message_id
        try:
            message = self._read(received.envelope, now)
            if (wall_time := WallTime.of(message.headers)) is not None:
                message = await self._follow_zone(message, wall_time, now)
            attempt = self._attempts.find(id_)
            is_first_try = received.failures == received.attempts == 0 and not (attempt and attempt.may_be_stored)
            if is_first_try and message.due < now and not await self._limits.has_limits_for(message.destination):
                envelopes = [to_envelope(strip_repeat_header(message))]
                on_completed = [partial(self._report_outcome, self._send_recovery, id_, message)]
                return StepOutcome(Completion(record=None, outgoing=envelopes), self._send_recovery, on_completed)
            report_stored = partial(self._report_outcome, self._store_recovery, id_, message)
            if self._enlisting is not None:
                work = [RepeatableStoring(self._enlisting, [message], now)]
                return StepOutcome(Completion(record=None, work=work), self._store_recovery, [report_stored])
            self._attempts.get_or_create(id_).may_be_stored = True  # though there may be no answer
            if not await self._store_before_completion(message, now):
                return StepOutcome(None, wait=STORE_AGAIN_AFTER)
        except PostdateError as error:
            return StepOutcome(None, self._store_recovery, failure=StepFailure(error))
        return StepOutcome(
            _REMOVED_UNRECORDED, None, [report_stored]
        )  # should that fail, it is found stored when it comes again

    async def _follow_zone(self, message: DelayedMessage, wall_time: WallTime, now: datetime) -> DelayedMessage:
        """Return the message, due by the newest rules of its zone; if it cannot follow the zone, with its own time."""
        try:
            due = wall_time.instant(
                await self.deadlines.call_in_task(lambda: self._zones.ensure_marker(wall_time.zone, now))
            )
            return message if message.due == due else copy_with_due(message, due, str(wall_time))
        except (InvalidMessage, InvalidTimestamp, NotSupported) as error:
            log.warning("message %s, for %s, stays due at %s: %s", message.message_id, wall_time, message.due, error)
            return message

    async def _store_before_completion(self, message: DelayedMessage, now: datetime) -> bool:
        """Store a message before it is taken off its queue; a repetition is no error.

        Returns:
            Whether the message may leave its queue.
        """
        for is_last in (False, True):  # the row that was in the way may have been removed just then
            try:
                await self.deadlines.call_in_task(lambda: self._store.store(strip_repeat_header(message), now))
            except DuplicateMessage:
                if await self.deadlines.call_in_task(lambda: is_stored(self._store, message)):
                    return await self.deadlines.call_in_task(lambda: _reuse_row(self._store, message, now))
                if is_last:
                    raise
            else:
                break
        return True

    async def _report_outcome(self, recovery: AttemptsRecovery, received_id: str, message: DelayedMessage) -> None:
        """Note what became of a message; what is delayed may have another id than what was received."""
        await recovery.report_success(received_id)
        if recovery is self._store_recovery:
            self._metrics.count("stored", 1)
        else:
            late = (self._clock.now() - message.due).total_seconds()
            self._metrics.report_deliveries({message.destination: 1}, [late])
        if log.isEnabledFor(logging.DEBUG):
            outcome_text = "stored, for" if recovery is self._store_recovery else "was due already and is sent to"
            log.debug("message %s %s %s, due %s", message.message_id, outcome_text, message.destination, message.due)


async def _reuse_row(store: ClaimingStore, message: DelayedMessage, now: datetime) -> bool:
    """Have a message go on as the row that is stored under its id; return whether it does.

    The row may be one that has failed: its error copy is this message, returned before the row was removed. Who claimed
    the row may remove it any moment, so while it is claimed this is ``False``. A row that is free is rescheduled to
    now, which tells it apart from the one that failed. Before its due time a row has not been claimed, and stays as it
    is.
    """
    if not isinstance(store, AdministrableStore):
        return True
    with translate_store_errors(store):
        row = await store.get(message.message_id)
        if row is None:  # it was delivered since, or has failed: then this is to be stored
            return await is_stored(store, message)
        try:
            return row.due >= now or await store.reschedule(row.message_id, now, now)
        except InvalidMessage:  # it has expired, and so has this
            return True

"""The intake: stores delayed messages that are received from a queue. Source: ADR 0009."""

from __future__ import annotations

import logging
import uuid
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import Final

from postdate import errors
from postdate.clock import Clock
from postdate.core.health.circuit_breaker import FailureRate, RepeatedFailures
from postdate.core.health.deadlines import Deadlines, translate_store_errors
from postdate.core.health.message_memory import MessageMemory
from postdate.core.limits import LimitsCache
from postdate.core.receive.outcomes import AttemptsRecovery, StepFailure, StepOutcome, StoreWaits, immediate_attempts
from postdate.core.receive.settling import RepeatableStoring, is_stored, strip_repeat_header
from postdate.core.recoverability import DispatchSettings, RecoveryRules
from postdate.core.simple_store import SimpleStore, enlisting_store
from postdate.core.timeout_manager.steps import destination_of
from postdate.core.upkeep.wall_times import WallTime, ZoneMarkers
from postdate.messages import DelayedMessage, Envelope, Headers, copy_with_due, from_delay_headers, to_envelope
from postdate.ports import AdministrableStore, ClaimingStore, Completion, Read, Received, Transport
from postdate.runtime.reporting import NO_METRICS, Metrics
from postdate.runtime.resource import resource_of

log = logging.getLogger("postdate.intake")

STORE_AGAIN_AFTER: Final = timedelta(seconds=1)
"""The pause before a message is stored again whose row is claimed. The message stays received meanwhile."""

# The timeouts queue records no outcome of its messages: the store records the delayed message itself.
_REMOVED_UNRECORDED: Final = Completion(record=None)


def from_timeouts_queue(envelope: Envelope, now: datetime) -> DelayedMessage:
    """Return the delayed message that an endpoint sent; see :data:`postdate.ports.Read`.

    The message may also come from an older endpoint that sent it to its timeout manager, whose queue had this name.
    The headers of delayed delivery have precedence. Beside them, headers for a timeout manager are stale and only part
    of the message (row 89).

    Raises:
        NotADelayedMessage: the message has no due time; or it is an order to a timeout manager about timeouts in the
            storage of that manager.
        InvalidTimestamp: the due time is malformed.
    """
    headers = envelope.headers
    is_from_endpoint = Headers.TIMEOUT_EXPIRE in headers or Headers.TIMEOUT_DESTINATION in headers
    if not is_from_endpoint and Headers.EXPIRE in headers:
        return _from_timeout_manager_headers(envelope)
    if not is_from_endpoint and (Headers.TIMEOUT_ID in headers or Headers.CLEAR_TIMEOUTS in headers):
        timeout_id = headers.get(Headers.TIMEOUT_ID)
        order_text = "to forget some" if timeout_id is None else f"to send its timeout {timeout_id!r}"
        raise errors.NotADelayedMessage(
            f"message {envelope.message_id!r} asks a timeout manager {order_text}, from its own storage, which is "
            f"not read here; run a timeout manager with this storage until the storage is empty, and return the "
            f"message to it"
        )
    return from_delay_headers(envelope.message_id, headers, envelope.body)


def _from_timeout_manager_headers(envelope: Envelope) -> DelayedMessage:
    """Return the message for a timeout manager without the headers that only the manager reads.

    The message gets a new id, which is the same each time the message is received. All delayed retries of one message
    have the id of that message, and a store would refuse the second retry as a duplicate of the first.
    Source: docs/guides/azure.md; docs/specification-rows.md, row 94.
    """
    headers, destination = dict(envelope.headers), destination_of(envelope)
    due = headers.pop(Headers.EXPIRE)
    headers.pop(Headers.ROUTE_EXPIRED_TIMEOUT_TO, None)
    headers.setdefault(Headers.MESSAGE_ID, envelope.message_id)
    own_id = str(uuid.uuid5(uuid.NAMESPACE_OID, f"{envelope.message_id}\n{due}\n{destination}"))
    timeout_headers = {**headers, Headers.TIMEOUT_DESTINATION: destination, Headers.TIMEOUT_EXPIRE: due}
    return from_delay_headers(own_id, timeout_headers, envelope.body)


class Intake:
    """The step of a queue with delayed messages, such as the timeouts queue: it stores them.

    During an outage of the store, messages stay received and are not rejected. A broker counts how often a message was
    rejected, and some brokers drop it at the twentieth time; shortly before that, it goes to the error queue. An error
    that may concern one row only counts against a message that fails repeatedly while other messages are stored.
    ``settings.number_of_retries`` is the number of these attempts.
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
        """The deadlines of all calls of the store. They are shortened when the pump of this step stops."""
        self._limits = LimitsCache(store, self.deadlines, clock)
        unrecoverable = errors.MessageError, errors.QueueNotFound, errors.DuplicateMessage
        failure = f"cannot store the delayed messages of {settings.timeouts_queue}"
        self.outage = StoreWaits(clock, resource_of(store).calls(failure, log, breaker=breaker))
        self._memory = MessageMemory()
        self._store_recovery = AttemptsRecovery(
            rules=RecoveryRules(waits_in_hand=True, shares_database=self._enlisting is not None, counts_transient=True),
            memory=self._memory,
            outage=self.outage,
            failure_rate=failure_rate,
            errors=settings.errors,
            clock=clock,
            policy=immediate_attempts(max(1, settings.number_of_retries), *unrecoverable),
            metrics=metrics,
        )
        missing_queue = (errors.QueueNotFound,) if settings.missing_queue_wait else ()
        self._send_recovery = replace(
            self._store_recovery,
            rules=RecoveryRules(
                retry_now_errors=(errors.DestinationUnavailable, *missing_queue), counts_transient=True
            ),  # then it is stored, and waits in the store until its destination accepts it
            memory=MessageMemory(),
            outage=None,
            returns_outgoing=settings.errors_return_to_destination,
        )

    async def handle(self, received: Received) -> StepOutcome:
        """Store the message, now or together with its acknowledgement; or send it if it is due already (row 36).

        A due message whose destination has limits is stored, too. The limits decide when the store releases it
        (ADR 39).

        If the message is stored already, an earlier attempt stored it and could not acknowledge it. Only the store
        knows whether it was sent since. So a message that was received before is never sent from here, even if it is
        due by now. Queues do not count messages that an outage returned, so ``_memory`` remembers the messages that
        the store may have. If the process crashes in between, and the queue does not count that either, the message is
        sent twice (row 50).
        """
        now, id_ = self._clock.now(), received.envelope.message_id
        try:
            message = self._read(received.envelope, now)
            if (wall_time := WallTime.of(message.headers)) is not None:
                message = await self._follow_zone(message, wall_time, now)
            facts = self._memory.find(id_)
            is_first_try = received.failures == received.attempts == 0 and not (facts and facts.may_be_stored)
            if is_first_try and message.due < now and not await self._limits.has_limits_for(message.destination):
                envelopes = [to_envelope(strip_repeat_header(message))]
                on_completed = [partial(self._report_outcome, self._send_recovery, id_, message)]
                return StepOutcome(Completion(record=None, outgoing=envelopes), self._send_recovery, on_completed)
            report_stored = partial(self._report_outcome, self._store_recovery, id_, message)
            if self._enlisting is not None:
                work = [RepeatableStoring(self._enlisting, [message], now)]
                return StepOutcome(Completion(record=None, work=work), self._store_recovery, [report_stored])
            self._memory.get_or_create(id_).may_be_stored = True  # before the call, as it may store and not answer
            if not await self._store_before_completion(message, now):
                return StepOutcome(None, wait=STORE_AGAIN_AFTER)
        except errors.PostdateError as error:
            return StepOutcome(None, self._store_recovery, failure=StepFailure(error))
        # If acknowledging fails, the message is found in the store when it is received again.
        return StepOutcome(_REMOVED_UNRECORDED, None, [report_stored])

    async def _follow_zone(self, message: DelayedMessage, wall_time: WallTime, now: datetime) -> DelayedMessage:
        """Return the message with its due time by the newest rules of its zone, or unchanged if they give none."""
        try:
            due = wall_time.instant(await self._read_rules(wall_time.zone, now))
            if message.due != due:
                # The sender has other rules. If they are newer, the marker may have them since the last minute, and by
                # the former rules the message may go too early.
                due = wall_time.instant(await self._read_rules(wall_time.zone, now, at_once=True))
            return message if message.due == due else copy_with_due(message, due, str(wall_time))
        except (errors.InvalidMessage, errors.InvalidTimestamp, errors.NotSupported) as error:
            log.warning("message %s, for %s, stays due at %s: %s", message.message_id, wall_time, message.due, error)
            return message

    async def _read_rules(self, zone: str, now: datetime, *, at_once: bool = False) -> bytes:
        return await self.deadlines.call_in_task(partial(self._zones.ensure_marker, zone, now, at_once=at_once))

    async def _store_before_completion(self, message: DelayedMessage, now: datetime) -> bool:
        """Store a message before it is acknowledged. A repetition is no error.

        Returns:
            Whether the message may be acknowledged.
        """
        for is_last in (False, True):  # the row under the same id may have been removed just then
            try:
                await self.deadlines.call_in_task(lambda: self._store.store(strip_repeat_header(message), now))
            except errors.DuplicateMessage:
                if await self.deadlines.call_in_task(lambda: is_stored(self._store, message)):
                    return await self.deadlines.call_in_task(lambda: _reuse_row(self._store, message, now))
                if is_last:
                    raise
            else:
                break
        return True

    async def _report_outcome(self, recovery: AttemptsRecovery, received_id: str, message: DelayedMessage) -> None:
        """Count and log a message that was stored or sent. Its id may differ from ``received_id``."""
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
    """Return whether the row that is stored under the id of a message stands for this message.

    The row may have failed, and this message may be its error copy, returned before the row was removed. The process
    that claimed the row may remove it at any moment, so a claimed row does not stand for the message. A row without a
    claim is rescheduled to now, which distinguishes it from the failed one. A row before its due time stays unchanged.
    It may be claimed, too, if a clock was set back since. Stores with a clock of their own need no such check.
    """
    if isinstance(store, SimpleStore):
        return not store.is_claimed(message.message_id)
    if not isinstance(store, AdministrableStore):
        return True
    with translate_store_errors(store):
        row = await store.get(message.message_id)
        if row is None:  # delivered since, or failed; if it failed, the message must be stored again
            return await is_stored(store, message)
        if row.due >= now:
            return await _is_unclaimed(store, row.message_id)
        try:
            return await store.reschedule(row.message_id, now, now)
        except errors.InvalidMessage:  # the row has expired, and so has the message
            return True


async def _is_unclaimed(store: AdministrableStore, message_id: str) -> bool:
    """Return whether a message waits without a claim; also ``True`` if the store cannot tell."""
    if (observer := store.observer()) is None:
        return True
    state = await observer.pending_state_of(message_id)
    return state is not None and state.attempt_at is not None  # without a state it has just ended: it is asked again

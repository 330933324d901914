"""From a queue into the store: what was sent with a delay, by whomever. Source: specification 1.6; ADR 0009."""

from __future__ import annotations

import logging
import uuid
from datetime import datetime
from typing import Final

import anyio

from postdate.clock import Clock
from postdate.core.circuit_breaker import PAUSE_ARMED, FailureRate, RepeatedFailures
from postdate.core.dispatcher import DispatchSettings, enlisting, error_copy
from postdate.core.guard import calling_store
from postdate.core.outages import BORNE, Suspects
from postdate.core.receive.watching import CallWatch, WatchedReceiver
from postdate.core.recoverability import (
    ErrorHeaders,
    error_headers,
    error_headers_in_brief,
    is_outage,
    retry_delay,
)
from postdate.core.repetitions import RepeatableStoring, is_stored, to_be_stored
from postdate.errors import (
    DestinationUnavailable,
    DuplicateMessage,
    MessageError,
    NotADelayedMessage,
    PostdateError,
    QueueNotFound,
    StoreUnreachable,
)
from postdate.messages import DelayedMessage, Envelope, Headers, from_delay_headers, to_envelope
from postdate.ports import ClaimingStore, End, Read, Received, Receiver, Transport
from postdate.runtime.metrics import NO_METRICS, Metrics
from postdate.runtime.outage_log import OutageLog

log = logging.getLogger("postdate.intake")

# What goes through the timeouts queue is an ordinary message there, so none of these ends is recorded: the store
# records the delayed message itself.
_STORED = End(record=None)

_KEPT: Final = 1_000
"""Messages that not even the error queue takes, whose pauses are remembered."""

OLD_EXPIRE: Final = Headers.EXPIRE
OLD_DESTINATION: Final = Headers.ROUTE_EXPIRED_TIMEOUT_TO
"""With these, endpoints of old tell their timeout manager when and where (specification 4.3)."""


def from_timeouts_queue(envelope: Envelope, now: datetime) -> DelayedMessage:
    """Return the delayed message that an endpoint sent; see :data:`postdate.ports.Read`.

    Also one that an endpoint of old sent to its timeout manager, whose queue had this name. Headers of ours go first:
    with them, those of old are stale, and no more than part of the message (row 89).

    Raises:
        NotADelayedMessage: it says neither; or it is an order to a timeout manager about what that has stored.
        InvalidTimestamp: its due time is malformed.
    """
    headers = envelope.headers
    is_ours = Headers.TIMEOUT_EXPIRE in headers or Headers.TIMEOUT_DESTINATION in headers
    if not is_ours and OLD_EXPIRE in headers:
        return _from_timeout_manager_headers(envelope)
    if not is_ours and (Headers.TIMEOUT_ID in headers or Headers.CLEAR_TIMEOUTS in headers):
        timeout_id = headers.get(Headers.TIMEOUT_ID)
        what = "to forget some" if timeout_id is None else f"to send its timeout {timeout_id!r}"
        raise NotADelayedMessage(
            f"message {envelope.message_id!r} asks a timeout manager {what}, of those in its own storage, which is not "
            f"read here; let one that has this storage run to its end, and return the message to it"
        )
    return from_delay_headers(envelope.message_id, headers, envelope.body)


def _from_timeout_manager_headers(envelope: Envelope) -> DelayedMessage:
    """Return what was meant for a timeout manager, without the headers that steered it (specification 3.7, row 94).

    It gets an id of its own: all delayed retries of one message have the id of that message, and a store would take the
    second for a repetition of the first. One delayed send gets the same id every time it is received.
    """
    headers = dict(envelope.headers)
    due = headers.pop(OLD_EXPIRE)
    destination = headers.pop(OLD_DESTINATION, "") or headers.get(Headers.REPLY_TO_ADDRESS, "")
    if not destination:
        raise NotADelayedMessage(
            f"message {envelope.message_id!r} is due at {due}, but nobody knows where: it has neither header "
            f"{OLD_DESTINATION!r} nor an address for replies; add one of them and return it"
        )
    headers.setdefault(Headers.MESSAGE_ID, envelope.message_id)
    own_id = str(uuid.uuid5(uuid.NAMESPACE_OID, f"{envelope.message_id}\n{due}\n{destination}"))
    steered = {**headers, Headers.TIMEOUT_DESTINATION: destination, Headers.TIMEOUT_EXPIRE: due}
    return from_delay_headers(own_id, steered, envelope.body)


class Intake:
    """Handles the messages of a timeouts queue, or of another with delayed messages; the handler of a message pump.

    Args:
        receiver: of the queue; when it is watched, the calls to the store are, too.
        store: where they wait.
        transport: of the queue.
        settings: where failures go; its number of retries counts here, too.
        clock: for what is due already.
        breaker: for failing stores.
        metrics: what is counted.
        read: makes a delayed message of what came.
        failure_rate: for messages that not even the error queue takes.
    """

    def __init__(  # noqa: PLR0913 - collaborators; put together in one place
        self,
        receiver: Receiver,
        store: ClaimingStore,
        transport: Transport,
        settings: DispatchSettings,
        clock: Clock,
        breaker: RepeatedFailures,
        metrics: Metrics = NO_METRICS,
        read: Read = from_timeouts_queue,
        failure_rate: FailureRate | None = None,
    ) -> None:
        self._read = read
        self._receiver, self._store, self._settings = receiver, store, settings
        self._clock, self._breaker, self._metrics = clock, breaker, metrics
        self._enlisting = enlisting(store, transport)
        self._outage = OutageLog(
            log, f"cannot store the delayed messages of {settings.timeouts_queue}", f"{type(store).__name__} is"
        )
        self._watch = receiver.watch if isinstance(receiver, WatchedReceiver) else CallWatch(clock)
        self._failure_rate, self._kept = failure_rate, dict[str, int]()
        self._unstored, self._unsent, self._told_at = Suspects(), Suspects(), 0
        self._refused = OutageLog(
            log, f"error queue {settings.error_queue} does not take messages", f"error queue {settings.error_queue} is"
        )
        self._stop, self._store_is_back = anyio.Event(), anyio.Event()

    def stop(self) -> None:
        """End pauses: what failed is dealt with at once, and nothing waits for a breaker any more."""
        self._stop.set()
        self._store_is_back.set()

    def store_is_back(self) -> None:
        """End the pauses of those that wait for the store, as somebody has found that it answers again."""
        self._breaker.success()  # a call that hung until now fails a little later, and is not to wait any longer
        self._store_is_back.set()
        self._store_is_back = anyio.Event()

    async def handle(self, received: Received) -> None:
        """Store the message, or send it on at once when it is due already (row 36), or deal with the failure.

        While the store takes nothing, whatever it says of itself, the message stays in hand: a broker counts how often
        one was given back, and some drop it at the twentieth time. One that is near that goes to the error queue. What
        may be trouble with one row counts against the message that meets it again and again while others are stored.

        Raises:
            PostdateError: it could not be taken off the queue. What was stored by then is found stored when it comes
                again; that is no failure of the message.
        """
        try:
            message = self._read(received.envelope, self._clock.now())
        except PostdateError as error:
            await self._failed(received, error, "read")
            return
        is_new = received.failures == 0
        while not await self._try(received, message, is_new=is_new):
            if self._stop.is_set():
                await self._receiver.roll_back(received, failed=False)
                return
            is_new = False  # whether the attempt stored it is not known

    async def _try(self, received: Received, message: DelayedMessage, *, is_new: bool) -> bool:
        """Return whether the message is dealt with; if not, the store takes nothing now, and a pause has passed."""
        end = _STORED
        try:
            end = await self._store_or_send(message, is_new=is_new)
            if end is not _STORED:
                await self._receiver.commit(received, self._clock.now(), end)
        except PostdateError as error:
            if end.outgoing and isinstance(error, DestinationUnavailable):
                return await self._try(received, message, is_new=False)  # the store keeps it until its queue has room
            suspects = self._unsent if end.outgoing else self._unstored
            is_alone = suspects.are_others_well(received.envelope.message_id)
            times = suspects.met(received.envelope.message_id, error)
            if end.outgoing and is_outage(error) and times <= BORNE:
                raise  # the queues cannot be reached, whatever the store can: the pump waits for them
            if not received.is_last and is_outage(error) and times <= BORNE:
                await self._wait_for_store(received, error, alone=times > 1 and is_alone)
                return False
            if end.outgoing:
                await self._failed(received, error, "send", due=message)
            else:
                await self._failed(received, error, "store")
            return True
        if end is _STORED:
            await self._receiver.commit(received, self._clock.now(), end)
        (self._unsent if end.outgoing else self._unstored).worked(received.envelope.message_id)
        if not end.outgoing:
            if self._outage.is_out:
                self.store_is_back()
            self._breaker.success()
            self._outage.succeeded(self._clock.monotonic())
            self._metrics.stored(1)
        if log.isEnabledFor(logging.DEBUG):
            done = "was due already and is sent to" if end.outgoing else "stored, for"
            log.debug("message %s %s %s, due %s", message.message_id, done, message.destination, message.due)
        return True

    async def _wait_for_store(self, received: Received, error: PostdateError, *, alone: bool) -> None:
        if alone:  # it is not waited for by others, nor woken by them
            if self._told_at != self._unstored.went_well:
                self._told_at = self._unstored.went_well
                log.warning("cannot store delayed message %s, only others: %s", received.envelope.message_id, error)
            await self._clock.wait_for(self._stop, PAUSE_ARMED)
            return
        seconds = self._clock.monotonic()
        self._outage.failed(error, seconds)
        event = self._stop if self._stop.is_set() else self._store_is_back
        await self._clock.wait_for(event, self._breaker.failure(error, seconds))

    async def _store_or_send(self, message: DelayedMessage, *, is_new: bool) -> End:
        """Store a message, or return what does it, or sends it, in the transaction that takes it off the queue.

        What is stored already is what an earlier attempt left that could not be taken off the queue: it is done. So
        what comes again is not sent from here, though it may be due by now: the store knows whether it was sent.

        Raises:
            DuplicateMessage: another message is stored under its id.
        """
        now = self._clock.now()
        if is_new and message.due < now:
            return End(record=None, outgoing=[to_envelope(to_be_stored(message))])
        if self._enlisting is not None:
            return End(record=None, work=[RepeatableStoring(self._enlisting, [message], now)])
        try:
            with calling_store(self._store):
                await self._watch.call_apart(
                    self._store.store(to_be_stored(message), now), self._store, StoreUnreachable
                )
        except DuplicateMessage:
            if not await self._watch.call_apart(is_stored(self._store, message), self._store, StoreUnreachable):
                raise
        return _STORED

    async def _failed(
        self, received: Received, error: PostdateError, what: str, due: DelayedMessage | None = None
    ) -> None:
        """Try again, or move to the error queue: a bad message at once, others after the configured attempts.

        Its copy names this queue, unless it is of a message that was ``due`` and could be returned to its destination:
        one that is not due yet would come there too early.
        """
        hopeless = received.is_last or isinstance(error, (MessageError, QueueNotFound, DuplicateMessage))
        log.error("cannot %s delayed message %s: %s", what, received.envelope.message_id, error)
        if not hopeless:
            await self._clock.wait_for(self._stop, self._breaker.failure(error, self._clock.monotonic()))
            if received.failures + 1 < max(1, self._settings.number_of_retries):
                await self._receiver.roll_back(received)
                return
        envelope, refused = received.envelope, error
        for headers_of in (error_headers, error_headers_in_brief):
            try:
                copy = self._error_copy(envelope, error, due, headers_of)
                await self._receiver.commit(received, self._clock.now(), End(record=None, outgoing=[copy]))
            except MessageError as failure:
                refused = failure
            else:
                self._kept.pop(envelope.message_id, None)
                for suspects in (self._unstored, self._unsent):
                    suspects.forget(envelope.message_id)
                log.error("delayed message %s moved to error queue %s", envelope.message_id, copy.destination)
                return
        await self._keep(received, refused)

    def _error_copy(
        self, envelope: Envelope, error: PostdateError, due: DelayedMessage | None, headers_of: ErrorHeaders
    ) -> Envelope:
        now, settings = self._clock.now(), self._settings
        if due is not None and settings.errors_return_to_destination:
            return error_copy(due, error, settings, now, headers_of)
        headers = headers_of(envelope.headers, error, settings.timeouts_queue, now, settings.host)
        return Envelope(settings.error_queue, envelope.message_id, headers, envelope.body)

    async def _keep(self, received: Received, refused: PostdateError) -> None:
        """Give back what not even the error queue takes, after a pause that is longer each time, up to a minute."""
        message_id, seconds = received.envelope.message_id, self._clock.monotonic()
        self._refused.failed(refused, seconds)
        if self._failure_rate is not None:
            self._failure_rate.failure(refused, seconds)
        times = self._kept.pop(message_id, 0)
        if len(self._kept) >= _KEPT:
            del self._kept[next(iter(self._kept))]
        self._kept[message_id] = times + 1
        await self._clock.wait_for(self._stop, retry_delay(times))
        await self._receiver.roll_back(received, failed=not self._stop.is_set())

"""From the timeouts queue into the store: what was sent with a delay, by whomever. Source: specification 1.6."""

from __future__ import annotations

import logging

from postdate.clock import Clock
from postdate.core.circuit_breaker import RepeatedFailures
from postdate.core.dispatcher import DispatchSettings, enlisting
from postdate.core.recoverability import error_headers
from postdate.errors import DuplicateMessage, MessageError, PostdateError, QueueNotFound
from postdate.messages import DelayedMessage, Envelope, from_delay_headers, to_envelope
from postdate.ports import ClaimingStore, End, Received, Receiver, Transport

log = logging.getLogger("postdate.intake")

# What goes through the timeouts queue is an ordinary message there, so none of these ends is recorded: the store
# records the delayed message itself.
_STORED = End(record=None)


class Intake:
    """Handles the messages of a timeouts queue; the handler of a message pump.

    Args:
        receiver: of the timeouts queue.
        store: where they wait.
        transport: of the timeouts queue.
        settings: where failures go; its number of retries counts here, too.
        clock: for what is due already.
        breaker: for failing stores.
    """

    def __init__(
        self,
        receiver: Receiver,
        store: ClaimingStore,
        transport: Transport,
        settings: DispatchSettings,
        clock: Clock,
        breaker: RepeatedFailures,
    ) -> None:
        self._receiver, self._store, self._settings = receiver, store, settings
        self._clock, self._breaker = clock, breaker
        self._enlisting = enlisting(store, transport)

    async def handle(self, received: Received) -> None:
        """Store the message, or send it on at once when it is due already (row 36), or deal with the failure."""
        try:
            envelope = received.envelope
            message = from_delay_headers(envelope.message_id, envelope.headers, envelope.body)
            if message.due < self._clock.now():
                end = End(record=None, outgoing=[to_envelope(message)])
                await self._receiver.commit(received, self._clock.now(), end)
            else:
                await self._keep(received, message)
        except PostdateError as error:
            await self._failed(received, error)

    async def _keep(self, received: Received, message: DelayedMessage) -> None:
        """Store, then take off the queue; one transaction where both are one database.

        An id that is stored already is what an earlier attempt left that could not be taken off the queue: it is done.
        """
        now = self._clock.now()
        if self._enlisting is not None:
            end = End(record=None, work=[self._enlisting.storing([message], now)])
            await self._receiver.commit(received, now, end)
        else:
            try:
                await self._store.store(message, now)
            except DuplicateMessage:
                log.info("message %s was stored before", message.message_id)
            await self._receiver.commit(received, self._clock.now(), _STORED)
        self._breaker.success()

    async def _failed(self, received: Received, error: PostdateError) -> None:
        """Try again, or move to the error queue: a bad message at once, others after the configured attempts."""
        now, hopeless = self._clock.now(), isinstance(error, (MessageError, QueueNotFound))
        log.error("cannot store delayed message %s: %s", received.envelope.message_id, error)
        if not hopeless:
            pause = self._breaker.failure(error, now)
            await self._clock.sleep(pause)
            if received.failures + 1 < max(1, self._settings.number_of_retries):
                await self._receiver.roll_back(received)
                return
        envelope = received.envelope
        headers = error_headers(envelope.headers, error, self._settings.timeouts_queue, now, self._settings.host)
        copy = Envelope(self._settings.error_queue, envelope.message_id, headers, envelope.body)
        await self._receiver.commit(received, now, End(record=None, outgoing=[copy]))

"""One queue of a timeout manager: does its step for each message, and deals with failures.

Source: specification 4.9; ADR 0014.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, Protocol

import anyio

from postdate.clock import Clock
from postdate.core.guard import calling_transport
from postdate.core.outages import BORNE, Suspects
from postdate.core.recoverability import ErrorHeaders, Host, error_headers, error_headers_in_brief, is_outage
from postdate.errors import ClaimLost, MessageError, MessageTooLarge, PostdateError, TransportUnreachable
from postdate.messages import Envelope
from postdate.ports import End, Received, Receiver
from postdate.runtime.metrics import NO_METRICS, Metrics
from postdate.runtime.outage_log import OutageLog

log = logging.getLogger("postdate.timeout_manager")

ATTEMPTS: Final = 5
"""In total, before a message goes to the error queue (row 101)."""

PAUSE: Final = timedelta(seconds=1)
"""After a failure that may pass by itself: five attempts at once would be one."""


@dataclass(frozen=True, slots=True)
class Done:
    """What a step did.

    Args:
        end: how the message leaves its queue.
        afterwards: called when it has: whoever is woken by it finds what was committed.
    """

    end: End
    afterwards: Callable[[], None] | None = None


class SatelliteStep(Protocol):
    """What is done with a message of one of the queues."""

    async def do(self, received: Received, stopping: anyio.Event) -> Done | None:
        """Do it; ``None``: the endpoint stops before it could be done.

        Raises:
            PostdateError: see :meth:`Satellite.handle`.
        """
        ...

    def given_up(self, received: Received) -> None:
        """Note that a message was moved to the error queue."""
        ...


@dataclass(frozen=True, slots=True)
class SatelliteSettings:
    """Where failures go.

    Args:
        queue: the satellite's own; failed messages are returned to it.
        error_queue: for messages that failed too often.
        host: named in error copies.
    """

    queue: str
    error_queue: str
    host: Host


class Satellite:
    """The handler of the message pump of one queue.

    Args:
        receiver: of the queue.
        step: what is done.
        settings: where failures go.
        clock: for pauses.
        metrics: what is counted.
    """

    def __init__(
        self,
        receiver: Receiver,
        step: SatelliteStep,
        settings: SatelliteSettings,
        clock: Clock,
        metrics: Metrics = NO_METRICS,
    ) -> None:
        self._receiver, self._step, self._settings, self._clock = receiver, step, settings, clock
        self._metrics = metrics
        self._stopping, self._suspects = anyio.Event(), Suspects()
        self._outage = OutageLog(
            log, f"messages of {settings.queue} wait for the storage of timeouts", "the storage of timeouts is"
        )

    def stop(self) -> None:
        """End pauses: what is in hand is finished or given back."""
        self._stopping.set()

    async def handle(self, received: Received) -> None:
        """Do the step and take the message off the queue; or try again later; or move it to the error queue.

        While a server cannot be reached, or says of itself that it takes nothing, no message is to blame: it stays in
        hand, and no attempt is counted, unless it meets trouble again and again that others do not meet. A message that
        is wrong goes to the error queue at once. Everything else is tried :data:`ATTEMPTS` times.

        Raises:
            TransportUnreachable: for the pump, which waits for the queues.
            PostdateError: the message could not be taken off the queue.
        """
        while not await self._try(received):
            await self._clock.wait_for(self._stopping, PAUSE)
            if self._stopping.is_set():
                await self._receiver.roll_back(received, failed=False)
                return

    async def _try(self, received: Received) -> bool:
        """Return whether the message is dealt with; if not, the storage cannot be reached."""
        try:
            with calling_transport(self._receiver):
                done = await self._step.do(received, self._stopping)
                if done is None:
                    await self._receiver.roll_back(received, failed=False)
                    return True
                await self._receiver.commit(received, self._clock.now(), done.end)
        except ClaimLost:
            raise
        except PostdateError as error:
            is_its_own = self._suspects.met(received.envelope.message_id, error) > BORNE
            if isinstance(error, TransportUnreachable) and not is_its_own:
                raise
            if is_outage(error) and not (is_its_own or received.is_last):
                self._outage.failed(error, self._clock.monotonic())
                return False
            await self._failed(received, error)
            return True
        if self._outage.is_out:
            self._outage.succeeded(self._clock.monotonic())
        self._suspects.worked(received.envelope.message_id)
        if done.afterwards is not None:
            done.afterwards()
        return True

    async def _failed(self, received: Received, error: PostdateError) -> None:
        settings, envelope, attempts = self._settings, received.envelope, received.failures + 1
        log.error("message %s of %s failed, attempt %d: %s", envelope.message_id, settings.queue, attempts, error)
        self._metrics.failed(1)
        if not received.is_last and not isinstance(error, MessageError) and attempts < ATTEMPTS:
            if error.transient:
                await self._clock.wait_for(self._stopping, PAUSE)
            await self._receiver.roll_back(received)
            return
        try:
            await self._move(received, error, error_headers)
        except MessageTooLarge as refused:  # the stack trace was too much: it would come back for ever
            log.warning("message %s goes to the error queue in brief: %s", envelope.message_id, refused)
            await self._move(received, error, error_headers_in_brief)
        self._metrics.moved_to_error(1)
        self._step.given_up(received)
        log.error("message %s of %s moved to error queue %s", envelope.message_id, settings.queue, settings.error_queue)

    async def _move(self, received: Received, error: PostdateError, headers_of: ErrorHeaders) -> None:
        settings, envelope, now = self._settings, received.envelope, self._clock.now()
        headers = headers_of(envelope.headers, error, settings.queue, now, settings.host)
        copy = Envelope(settings.error_queue, envelope.message_id, headers, envelope.body)
        await self._receiver.commit(received, now, End(record=None, outgoing=[copy]))

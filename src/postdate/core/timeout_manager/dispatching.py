"""The dispatch step: a due timeout to its destination, then out of its storage. Source: specification 4.8."""

from __future__ import annotations

import logging
from functools import partial
from typing import Final, Protocol

import anyio

from postdate.clock import Clock
from postdate.core.guard import Guard, calling_store
from postdate.core.timeout_manager.reading import announced_timeout, dispatched
from postdate.core.timeout_manager.satellite import Done
from postdate.errors import NotADelayedMessage, TimeoutConcurrentlyProcessed
from postdate.messages import Envelope
from postdate.ports import End, Received, Transport
from postdate.ports.timeouts import Timeout, TimeoutClaim, TimeoutPersister
from postdate.runtime.metrics import NO_METRICS, Metrics

log = logging.getLogger("postdate.timeout_manager")

SENT_REMEMBERED: Final = 10_000
"""Timeouts that were sent and could not be removed, below transaction scope: the next attempts only remove them."""


class Announcer(Protocol):
    """Whoever announces due timeouts, and wants to know what became of them."""

    def gone(self, timeout_id: str) -> None:
        """Note that a timeout is not stored any more."""
        ...

    def given_up(self, timeout_id: str) -> None:
        """Note that a timeout stays stored, as its control message is in the error queue now."""
        ...


async def _hold_nothing() -> None:
    """Release nothing: in a transaction of the queue there is no claim."""


class DispatchStep:
    """Sends what a control message tells of, and removes it.

    With ``enlisting`` all of it is one transaction: exactly once. Without, the send leaves at once, then the timeout is
    removed, then the control message taken off its queue: whatever fails in between is sent again, never lost. Where
    timeouts can be claimed, one process has each in hand while it is sent, and others leave it alone.

    Args:
        persister: where timeouts are kept.
        enlisting: the same, when removing is to be part of the transaction of the queue; else ``None``.
        transport: of the destinations.
        clock: for the time of sending.
        announcer: told of what became of each timeout.
        metrics: what is counted.
    """

    def __init__(
        self,
        persister: TimeoutPersister,
        enlisting: TimeoutPersister | None,
        transport: Transport,
        clock: Clock,
        announcer: Announcer,
        metrics: Metrics = NO_METRICS,
    ) -> None:
        self._persister, self._enlisting, self._transport, self._clock = persister, enlisting, transport, clock
        self._asking, self._sending = Guard.of_store(persister, clock), Guard.of_transport(transport, clock)
        self._announcer, self._metrics = announcer, metrics
        self._sent: dict[str, None] = {}  # in order: the oldest are forgotten first

    async def do(self, received: Received, stopping: anyio.Event) -> Done:
        """See :class:`postdate.core.timeout_manager.satellite.SatelliteStep`; a timeout that is gone is success.

        Raises:
            TimeoutConcurrentlyProcessed: somebody else removed it after this has begun.
            QueueNotFound, MessageTooLarge, TransportUnavailable: it was not sent.
            StoreError: it may have been sent.
        """
        timeout_id = announced_timeout(received.envelope)
        taken = await self._asking.call(lambda: self._taken(timeout_id), _release)
        if taken is None:  # if others have it in hand and do not get done with it, the next look back finds it again
            log.debug("timeout %s is gone already, or in other hands", timeout_id)
            return Done(End(record=None), lambda: self._announcer.gone(timeout_id))
        timeout = taken.timeout
        envelope = dispatched(timeout, received.envelope.message_id, self._clock.now())
        try:
            end = await self._end(taken, envelope)
        finally:
            with anyio.CancelScope(shield=True):
                await self._asking.call(taken.release)
        return Done(end, lambda: self._dispatched(timeout_id, timeout))

    async def _taken(self, timeout_id: str) -> TimeoutClaim | None:
        if self._enlisting is None:
            return await self._persister.claim(timeout_id)
        # In the transaction of the queue no claim is needed: who comes second finds the timeout gone and sends nothing.
        timeout = await self._persister.peek(timeout_id)
        if timeout is None:
            return None
        return TimeoutClaim(timeout, partial(self._persister.try_remove, timeout_id), _hold_nothing)

    async def _end(self, taken: TimeoutClaim, envelope: Envelope) -> End:
        timeout = taken.timeout
        if self._enlisting is not None:
            with calling_store(self._persister):
                work = [self._enlisting.removing(timeout.timeout_id)]
            return End(record=None, outgoing=[envelope], work=work)
        if timeout.timeout_id not in self._sent:
            await self._send(timeout.timeout_id, envelope)
        removed = await self._asking.call(taken.remove)
        self._sent.pop(timeout.timeout_id, None)
        if not removed:
            raise TimeoutConcurrentlyProcessed(
                f"timeout {timeout.timeout_id} was concurrently processed: somebody else removed it while it was sent "
                f"to {timeout.destination}"
            )
        return End(record=None)

    async def _send(self, timeout_id: str, envelope: Envelope) -> None:
        """Send, and remember that: a storage that is read and cannot be written would have it sent at every attempt."""
        (error,) = await self._sending.call(lambda: self._transport.send([envelope], self._clock.now()))
        if error is not None:
            raise error
        self._sent[timeout_id] = None
        if len(self._sent) > SENT_REMEMBERED:
            del self._sent[next(iter(self._sent))]

    def _dispatched(self, timeout_id: str, timeout: Timeout) -> None:
        self._announcer.gone(timeout_id)
        self._metrics.delivered(1, [(self._clock.now() - timeout.due).total_seconds()])
        log.debug("timeout %s went to %s, due %s", timeout_id, timeout.destination, timeout.due)

    def given_up(self, received: Received) -> None:
        """Tell the announcer: the timeout stays stored, and returning the control message dispatches it."""
        try:
            self._announcer.given_up(announced_timeout(received.envelope))
        except NotADelayedMessage:
            log.debug("message %s told of no timeout", received.envelope.message_id)


async def _release(taken: TimeoutClaim | None) -> None:
    """Let go of what was claimed by a call that nobody waited for any more."""
    if taken is not None:
        await taken.release()

"""The store step: from the queue of timeouts into their storage, or straight on. Source: specification 4.5."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Final

import anyio

from postdate.clock import Clock, later
from postdate.core.guard import Guard, calling_store
from postdate.core.timeout_manager.reading import is_clearing, saga_of, timeout_of, undelayed
from postdate.core.timeout_manager.satellite import Done
from postdate.errors import NotADelayedMessage
from postdate.messages import Envelope, Headers
from postdate.ports import End, Received, Work
from postdate.ports.timeouts import Timeout, TimeoutPersister
from postdate.runtime.metrics import NO_METRICS, Metrics

log = logging.getLogger("postdate.timeout_manager")

NOT_STORED_BEFORE_DUE: Final = timedelta(seconds=1)
"""What is due by then is not stored any more (row 93)."""

_TAKEN = End(record=None)


class StoreStep:
    """Stores what arrives; what is due within a second, or already, goes on in the transaction that takes it off.

    Upstream sends it at once, up to a second early. Here nothing is early: it is in hand until it is due.

    Args:
        persister: where timeouts are kept.
        enlisting: the same, when storing is to be part of the transaction of the queue; else ``None``.
        owner: name of the endpoint.
        clock: tells and waits.
        registered: told of each stored timeout's due time, once it is committed; upstream tells before.
        metrics: what is counted.
    """

    def __init__(
        self,
        persister: TimeoutPersister,
        enlisting: TimeoutPersister | None,
        owner: str,
        clock: Clock,
        registered: Callable[[datetime], None],
        metrics: Metrics = NO_METRICS,
    ) -> None:
        self._persister, self._enlisting, self._owner, self._clock = persister, enlisting, owner, clock
        self._registered, self._metrics = registered, metrics
        self._asking = Guard.of_store(persister, clock)

    async def do(self, received: Received, stopping: anyio.Event) -> Done | None:
        """See :class:`postdate.core.timeout_manager.satellite.SatelliteStep`.

        Raises:
            MessageError: it is no timeout, and no order about some.
            StoreError: it could not be stored; a transaction of the queue did not happen.
        """
        envelope = received.envelope
        if is_clearing(envelope):
            return await self._clear(envelope)
        timeout = timeout_of(envelope, self._owner)
        while (now := self._clock.now()) < timeout.due:
            if timeout.due > later(now, NOT_STORED_BEFORE_DUE):  # also when the clock was set back meanwhile
                return await self._store(timeout, envelope)
            await self._clock.wait_for(stopping, timeout.due - now)
            if stopping.is_set():
                return None
        log.debug("message %s is due and goes to %s at once", envelope.message_id, timeout.destination)
        return Done(End(record=None, outgoing=[undelayed(timeout, envelope.message_id)]))

    async def _store(self, timeout: Timeout, envelope: Envelope) -> Done:
        work: list[Work] = []
        if self._enlisting is None:
            is_new = await self._asking.call(lambda: self._persister.add(timeout))
            if not is_new:
                log.info("message %s was stored before, as timeout %s", envelope.message_id, timeout.timeout_id)
        else:
            with calling_store(self._persister):
                work.append(self._enlisting.adding(timeout))

        def stored() -> None:
            self._metrics.stored(1)
            self._registered(timeout.due)

        return Done(End(record=None, work=work), stored)

    async def _clear(self, envelope: Envelope) -> Done:
        saga_id = saga_of(envelope)
        if saga_id is None:
            raise NotADelayedMessage(
                f"message {envelope.message_id!r} asks to forget the timeouts of a saga and does not say of which: it "
                f"has no header {Headers.SAGA_ID!r}"
            )
        with calling_store(self._persister):
            if self._enlisting is not None:
                return Done(End(record=None, work=[self._enlisting.removing_by_saga(saga_id)]))
        removed = await self._asking.call(lambda: self._persister.remove_by_saga(saga_id))
        log.debug("removed %d timeouts of saga %s", removed, saga_id)
        return Done(_TAKEN)

    def given_up(self, received: Received) -> None:
        """Nothing to note: it was not stored."""

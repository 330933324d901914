"""The input queue of an endpoint running: its pump, with handlers, sagas and the outbox, put together at start."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from postdate.core.receive.pump import MessagePump
from postdate.endpoint.audit import Audit
from postdate.endpoint.endings import MessageEndings
from postdate.endpoint.handlers import Handlers
from postdate.endpoint.handling import Handling
from postdate.endpoint.outbox import Outbox, OutboxCleanUp, OutboxHandling, prepare_outbox
from postdate.endpoint.outgoing import OutgoingMessages
from postdate.endpoint.sending import publishing
from postdate.endpoint.service import EndpointContext, Service


class ReceivingService(Service):
    """Handles messages of the endpoint's queue; subscribes that to events when it starts."""

    def __init__(  # noqa: PLR0913 - the parts
        self,
        context: EndpointContext,
        concurrency: int,
        outgoing: OutgoingMessages,
        endings: MessageEndings,
        handlers: Handlers,
        audit: Audit | None,
        outbox: Outbox | None,
        events: Sequence[str],
    ) -> None:
        super().__init__(context)
        self._concurrency, self._outgoing, self._endings, self._handlers = concurrency, outgoing, endings, handlers
        self._audit, self._outbox, self._events = audit, outbox, events

    @override
    async def prepare(self, *, set_up: bool) -> None:
        context, outbox = self._context, self._outbox
        clock, transport, queue = context.clock, context.transport, context.endpoint
        if set_up:
            if self._handlers.sagas is not None:
                await self._handlers.sagas.store.setup()
            audit = [] if self._audit is None else [self._audit.queue]
            await transport.create_queues([queue, self._endings.error_queue, *audit])
            if self._events:
                await publishing(transport).subscribe(queue, self._events)
        breaker = context.breaker("Receive", "Failed to receive messages")
        handling = Handling(self._outgoing, self._endings, self._handlers, self._audit, transport.receiver(queue))
        handle = handling.handle
        if outbox is not None:
            await prepare_outbox(outbox, queue, set_up=set_up)
            handle = OutboxHandling(outbox, handling).handle
        ahead = transport.capabilities.prefetches
        pump = MessagePump(handling.receiver, handle, self._concurrency, clock, breaker, queue, prefetches=ahead)
        self._runs = [pump] if outbox is None else [pump, OutboxCleanUp(outbox, queue, clock)]
        self._breakers = [breaker]

"""What an endpoint sends: made of messages of the application, then sent or stored outside of any handler.

Source: specification 5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from postdate.clock import Clock
from postdate.endpoint.delaying import Delays
from postdate.endpoint.publishing import publish_options
from postdate.endpoint.sending import Sender, SendOptions, check_headers_fit, kept, outgoing_message, transactional
from postdate.endpoint.serialization import MessageTypes, type_name
from postdate.endpoint.time_to_be_received import TimesToBeReceived, finite
from postdate.errors import NotSupported, UnknownMessageType
from postdate.messages import DelayedMessage, Envelope, Headers
from postdate.ports import DelayedMessageStore, End, MovingStore, RecordKind, TransactionMode, Transport, Work


@dataclass(frozen=True, slots=True)
class OutgoingMessages:
    """Makes envelopes and delayed messages of what an endpoint sends, and sends them.

    Args:
        sender: the endpoint.
        transport: of all queues.
        mode: of its handlers; in ``none`` what they send leaves at once.
        delays: where delayed messages go.
        store: of delayed messages; ``None``: with a timeout manager, or nowhere.
        clock: tells the time.
        types: of messages.
        times_to_be_received: of message types.
        handles: whether the endpoint itself handles a message type; where none is routed, that is its destination.
        routes: from a message type to its destination.
    """

    sender: Sender
    transport: Transport
    mode: TransactionMode
    delays: Delays
    store: DelayedMessageStore | None
    clock: Clock
    types: MessageTypes
    times_to_be_received: TimesToBeReceived
    handles: Callable[[type[Any]], bool]
    routes: dict[type[Any], str] = field(default_factory=dict[type[Any], str])

    @property
    def endpoint(self) -> str:
        """The name of the endpoint."""
        return self.sender.endpoint

    def make(
        self, message: object, options: SendOptions, related_to: Mapping[str, str] | None = None
    ) -> Envelope | DelayedMessage:
        """Return the envelope, or the delayed message, of a message of the application; sends nothing."""
        content, body = ({}, message) if isinstance(message, bytes) else self.types.encode(message)
        destination = options.destination or self.routes.get(type(message))
        if destination is None and self.handles(type(message)):
            destination = self.endpoint
        if destination is None:
            raise UnknownMessageType(
                f"no destination for {type_name(type(message))}: pass destination='queue', or route its type with "
                f"endpoint.route({type(message).__name__}, 'queue')"
            )
        options = self._expiring(type(message), options)
        if options.is_delayed:
            self.delays.check()
        if related_to:
            content = {**_conversation(related_to), **content}
        outgoing = outgoing_message(content, body, destination, options, self.sender, self.clock.now())
        check_headers_fit(outgoing, self.transport.capabilities.largest_headers_bytes)
        return outgoing

    def publish_options(
        self, message: object, headers: Mapping[str, str] | None, message_id: str | None
    ) -> SendOptions:
        """Return how an event is sent; sends nothing."""
        return publish_options(self.transport, self.types.name_of(type(message)), headers, message_id)

    def into_transaction(self, message: object, options: SendOptions) -> tuple[MovingStore, DelayedMessage]:
        """Return the store, and the delayed message for a transaction of the application; stores nothing."""
        store = transactional(self.store, self.endpoint)
        return store, kept(self.make(message, options), self.clock.now())

    async def send(self, messages: Sequence[Envelope | DelayedMessage]) -> None:
        """Send or store what :meth:`make` made, outside any handler's transaction."""
        envelopes, delayed = self.delays.split(messages)
        await self.delays.store_now(delayed, self.clock.now())
        if envelopes:
            for error in await self.transport.send(envelopes, self.clock.now()):
                if error is not None:
                    raise error

    def end_of(
        self,
        outgoing: Sequence[Envelope | DelayedMessage],
        record: RecordKind,
        detail: str = "",
        also: Sequence[Work] = (),
    ) -> End:
        """Return the end of a handled message that sends or stores ``outgoing`` in the same transaction."""
        if not outgoing and not also:
            return End(record, detail)
        envelopes, delayed = self.delays.split(outgoing)
        return End(record, detail, envelopes, [*also, *self.delays.storing(delayed, self.clock.now())])

    def _expiring(self, message_type: type[Any], options: SendOptions) -> SendOptions:
        """Return the options with the time to be received of the message type, unless this send has its own."""
        if options.time_to_be_received is None:
            span = None if message_type is bytes else self.times_to_be_received.of(message_type)
            if span is not None:
                options = replace(options, time_to_be_received=span)
        can, queues = self.transport.capabilities, f"the queues of {type(self.transport).__name__}"
        if finite(options.time_to_be_received) is not None and not can.expires_messages:
            raise NotSupported(
                f"{queues} do not expire messages: send {type_name(message_type)} without time_to_be_received"
            )
        if options.use_dead_letter_queue is not None and not can.dead_letters:
            raise NotSupported(f"{queues} have no dead letters: send without use_dead_letter_queue")
        return options


def _conversation(incoming: Mapping[str, str]) -> dict[str, str]:
    """Return the headers that tie a message to the one being handled."""
    tied = {Headers.RELATED_TO: incoming.get(Headers.MESSAGE_ID, "")}
    for header in (Headers.CONVERSATION_ID, Headers.CORRELATION_ID):
        if header in incoming:
            tied[header] = incoming[header]
    return {key: value for key, value in tied.items() if value}

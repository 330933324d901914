"""The handlers and sagas of an endpoint, by the types of messages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from postdate.endpoint.context import HandlerContext
from postdate.endpoint.saga_handling import Sagas, is_saga_timeout
from postdate.endpoint.serialization import MessageTypes, type_name
from postdate.errors import UnknownMessageType
from postdate.ports import Received

Handler = Callable[[Any, HandlerContext], Awaitable[None]]


class Handlers:
    """Decodes received messages and calls what handles them.

    Args:
        types: of messages.
    """

    def __init__(self, types: MessageTypes) -> None:
        self._types, self._handlers = types, dict[type[Any], list[Handler]]()
        self.sagas: Sagas | None = None

    def add(self, message_type: type[Any], handle: Handler) -> None:
        """Have messages of a type handled by one function more."""
        self._handlers.setdefault(message_type, []).append(handle)

    def handles(self, message_type: type[Any]) -> bool:
        """Return whether a handler or a saga takes messages of a type."""
        return message_type in self._handlers or (self.sagas is not None and self.sagas.handles(message_type))

    async def call(self, received: Received, context: HandlerContext) -> None:
        """Decode the message and call every handler of its type, one after the other."""
        message = self._types.decode(received.envelope.headers, received.envelope.body)
        if self.sagas is not None and is_saga_timeout(received.envelope.headers):
            await self.sagas.handle_timeout(message, context)
            return
        if not self.handles(type(message)):
            raise UnknownMessageType(f"no handler for {type_name(type(message))}")
        for handle in self._handlers.get(type(message), ()):
            await handle(message, context)
        if self.sagas is not None:
            await self.sagas.handle(message, context)

"""The handlers and sagas of an endpoint, by the types of messages."""

from __future__ import annotations

import asyncio
import logging
import time
import types
from collections.abc import Awaitable, Callable, Generator
from typing import Any, Final

from postdate.endpoint.context import HandlerContext
from postdate.endpoint.saga_handling import Sagas, is_saga_timeout
from postdate.endpoint.serialization import MessageTypes, type_name
from postdate.errors import UnknownMessageType
from postdate.messages import Headers
from postdate.ports import Received

Handler = Callable[[Any, HandlerContext], Awaitable[None]]

_STANDS_AFTER_SECONDS: Final = 5.0
_LOOKS_ROUND_SECONDS: Final = 0.1
"""After an event loop stood, so long a handler waits for news: that a connection ended, say, and a claim with it."""

log = logging.getLogger("postdate.endpoint")


class Handlers:
    """Decodes received messages and calls their handlers and sagas."""

    def __init__(self, types: MessageTypes) -> None:
        self._types, self._handlers = types, dict[type[Any], list[Handler]]()
        self.sagas: Sagas | None = None

    def add(self, message_type: type[Any], handle: Handler) -> None:
        self._handlers.setdefault(message_type, []).append(handle)

    def handles(self, message_type: type[Any]) -> bool:
        return message_type in self._handlers or (self.sagas is not None and self.sagas.handles(message_type))

    @types.coroutine
    def call(self, received: Received, context: HandlerContext) -> Generator[Any, Any, None]:
        """Decode the message and call every handler of its type, one after the other; log who keeps the event loop."""
        calling = self._call(received, context)
        step: Callable[[Any], Any] = calling.send
        given: Any = None
        began = time.monotonic()
        while True:
            try:
                waits_for = step(given)
            except StopIteration:
                if time.monotonic() - began >= _STANDS_AFTER_SECONDS:
                    _log_standing(began, received)
                    yield from asyncio.sleep(_LOOKS_ROUND_SECONDS).__await__()
                return
            except BaseException:
                _log_standing(began, received)
                raise
            _log_standing(began, received)
            try:
                given = yield waits_for
                step = calling.send
            except BaseException as error:  # noqa: BLE001 - raised where it belongs, in the handler
                step, given = calling.throw, error
            began = time.monotonic()

    async def _call(self, received: Received, context: HandlerContext) -> None:
        message = self._types.decode(received.envelope.headers, received.envelope.body)
        if self.sagas is not None and is_saga_timeout(received.envelope.headers):
            await self.sagas.handle_timeout(message, context)
            return
        handlers = self._handlers.get(type(message), ())
        if not handlers and not self.handles(type(message)):
            raise UnknownMessageType(f"no handler for {type_name(type(message))}")
        for handle in handlers:
            await handle(message, context)
        if self.sagas is not None:
            await self.sagas.handle(message, context)


def _log_standing(began: float, received: Received) -> None:
    stood = time.monotonic() - began
    if stood >= _STANDS_AFTER_SECONDS:
        kind = received.envelope.headers.get(Headers.ENCLOSED_MESSAGE_TYPES, "bytes")
        text = "the event loop stood for %.0f s, in the handler of %s %s: have a thread do what blocks"
        log.warning(text, stood, kind, received.envelope.message_id)

"""Handlers that are plain functions. They run in threads, and may block."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Unpack

from anyio import from_thread, to_thread

from postdate.endpoint.handler_context import HandlerContext, IncomingMessage
from postdate.endpoint.handling import Handler
from postdate.endpoint.send_options import SendKeywords
from postdate.errors import ConfigurationError


class BlockingHandlerContext(IncomingMessage):
    """The second argument of a handler that is a plain function: :class:`HandlerContext` for code that blocks.

    It has no ``transaction()``: connections of an outbox belong to the event loop, or to one thread.
    """

    def __init__(self, context: HandlerContext) -> None:
        self._context, self.received, self._headers = context, context.received, context.headers

    def send(
        self,
        message: object,
        *,
        isolated: bool = False,
        **keywords: Unpack[SendKeywords],
    ) -> str:
        """See :meth:`HandlerContext.send`."""
        return from_thread.run(functools.partial(self._context.send, message, isolated=isolated, **keywords))

    def reply(self, message: object, headers: Mapping[str, str] | None = None) -> str:
        """See :meth:`HandlerContext.reply`."""
        return from_thread.run(self._context.reply, message, headers)

    def publish(
        self, message: object, headers: Mapping[str, str] | None = None, *, message_id: str | None = None
    ) -> str:
        """See :meth:`HandlerContext.publish`."""
        return from_thread.run(functools.partial(self._context.publish, message, headers, message_id=message_id))


PlainHandler = Callable[[Any, BlockingHandlerContext], object]


def threaded_handler(handle: PlainHandler) -> Handler:
    """Return a handler that runs a plain function in a worker thread. anyio limits their number."""

    @functools.wraps(handle)
    async def call(message: Any, context: HandlerContext) -> None:
        try:
            result = await to_thread.run_sync(handle, message, BlockingHandlerContext(context))
        except SystemExit as error:
            # As of a parser of arguments. The endpoint would end with each delivery, and the message would never leave.
            # In the main thread it may be a signal that ends the process; in this one it is not.
            raise RuntimeError(f"the handler ended by SystemExit: {error.code}") from error
        if inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result):
            if inspect.iscoroutine(result):
                result.close()
            raise ConfigurationError(
                f"handler {handle!r} was called as a plain function and returned a {type(result).__name__}, which "
                f"nobody runs: define it with `async def`, and without `yield`"
            )

    return call

"""Handlers that are plain functions: they run in threads, and may block."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any

from anyio import from_thread, to_thread

from postdate.endpoint.handling import Handler
from postdate.endpoint.outgoing import HandlerContext
from postdate.errors import ConfigurationError


class BlockingHandlerContext:
    """The second argument of a handler that is a plain function: :class:`HandlerContext` for code that blocks.

    It has no ``transaction()``: connections of an outbox belong to the event loop, or to one thread.
    """

    def __init__(self, context: HandlerContext) -> None:
        self._context = context

    @property
    def headers(self) -> Mapping[str, str]:
        """See :attr:`HandlerContext.headers`."""
        return self._context.headers

    @property
    def message_id(self) -> str:
        """See :attr:`HandlerContext.message_id`."""
        return self._context.message_id

    @property
    def due(self) -> datetime | None:
        """See :attr:`HandlerContext.due`."""
        return self._context.due

    def send(  # noqa: PLR0913 - all that can be said of one send, each by its name
        self,
        message: object,
        *,
        destination: str | None = None,
        delay: timedelta | None = None,
        deliver_at: datetime | None = None,
        expires_at: datetime | None = None,
        time_to_be_received: timedelta | None = None,
        use_dead_letter_queue: bool | None = None,
        headers: Mapping[str, str] | None = None,
        message_id: str | None = None,
        isolated: bool = False,
    ) -> str:
        """See :meth:`HandlerContext.send`."""
        send = functools.partial(
            self._context.send,
            message,
            destination=destination,
            delay=delay,
            deliver_at=deliver_at,
            expires_at=expires_at,
            time_to_be_received=time_to_be_received,
            use_dead_letter_queue=use_dead_letter_queue,
            headers=headers,
            message_id=message_id,
            isolated=isolated,
        )
        return from_thread.run(send)

    def reply(self, message: object, headers: Mapping[str, str] | None = None) -> str:
        """See :meth:`HandlerContext.reply`."""
        return from_thread.run(self._context.reply, message, headers)

    def publish(
        self, message: object, headers: Mapping[str, str] | None = None, *, message_id: str | None = None
    ) -> str:
        """See :meth:`HandlerContext.publish`."""
        return from_thread.run(functools.partial(self._context.publish, message, headers, message_id=message_id))


PlainHandler = Callable[[Any, BlockingHandlerContext], object]


def in_threads(handle: PlainHandler) -> Handler:
    """Return a handler that runs a plain function in a thread of the application's: no more at once than it has."""

    @functools.wraps(handle)
    async def call(message: Any, context: HandlerContext) -> None:
        found = await to_thread.run_sync(handle, message, BlockingHandlerContext(context))
        if inspect.iscoroutine(found):
            found.close()
            raise ConfigurationError(
                f"handler {handle!r} was called as a plain function and gave a coroutine: define it with `async def`"
            )

    return call

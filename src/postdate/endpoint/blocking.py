"""The endpoint for programs without an event loop: the same calls, blocking."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from datetime import datetime, timedelta
from types import TracebackType
from typing import Self

from anyio.from_thread import BlockingPortal, start_blocking_portal

from postdate.endpoint.endpoint import Endpoint
from postdate.endpoint.sending import SendOptions
from postdate.errors import ConfigurationError
from postdate.ports import NativeTransaction


class BlockingEndpoint:
    """Runs an endpoint in an event loop of its own, in another thread. Use it as a context manager.

    Handlers run in that thread, in one event loop; a handler that blocks delays the others.

    Args:
        endpoint: configured, with its handlers registered, not started.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._stack = ExitStack()
        self._portal: BlockingPortal | None = None

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._portal = stack.enter_context(start_blocking_portal())
            stack.enter_context(self._portal.wrap_async_context_manager(self._endpoint))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self._portal = None
        return self._stack.__exit__(kind, error, trace)

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
        transaction: NativeTransaction | None = None,
    ) -> str:
        """Send a message and return its id; see :meth:`postdate.Endpoint.send`. May be called from any thread."""
        if self._portal is None:
            raise ConfigurationError("the endpoint is not running; use it as a context manager")
        options = SendOptions(
            destination, delay, deliver_at, expires_at, time_to_be_received, use_dead_letter_queue, headers, message_id
        )
        if transaction is not None:  # in the caller's thread, which the connection belongs to
            store, delayed = self._endpoint.outgoing.into_transaction(message, options)
            store.enqueue_blocking(transaction, [delayed], self._endpoint.clock.now())
            return delayed.message_id
        return self._portal.call(self._send, message, options)

    async def _send(self, message: object, options: SendOptions) -> str:
        outgoing = self._endpoint.outgoing.make(message, options)
        await self._endpoint.outgoing.send([outgoing])
        return outgoing.message_id

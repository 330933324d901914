"""Connections to an account that are kept open between requests, and may have ended meanwhile.

Azure, a load balancer or a firewall closes idle connections while a request is on its way. That is no outage: the
request is repeated at once on a new connection. All our requests can be repeated (ADR 0013).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

import anyio
from aiohttp import ClientConnectorError, ClientOSError, ServerDisconnectedError, TraceConfig
from azure.core.exceptions import AzureError
from azure.core.pipeline.transport import AioHttpTransport

log = logging.getLogger("postdate.azure.connections")

_AT_ONCE: Final = 16


@dataclass(slots=True)
class _Use:
    """Whether a request's connection had been used before."""

    is_again: bool = False


class LastingTransport(AioHttpTransport):
    """Repeats a request when a reused connection ends before any of the answer has come."""

    async def open(self) -> None:
        """Open the session, with a trace that notes which connections are reused."""
        sdk: Any = super()  # untyped
        before = self.session
        await sdk.open()
        if self.session is not None and self.session is not before:
            self.session.trace_configs.append(_tracing())

    async def send(self, request: Any, **settings: Any) -> Any:
        sdk: Any = super()
        while True:  # each repetition uses up one kept connection
            use = _Use()
            try:
                return await sdk.send(request, trace_request_ctx=use, **settings)
            except AzureError as error:
                if not (use.is_again and _has_ended(error.__cause__)):
                    raise
                log.debug("%s is asked for again, as its connection had ended: %s", request.method, error)


def _tracing() -> TraceConfig:
    async def used_again(_session: object, of: SimpleNamespace, _what: object) -> None:
        of.trace_request_ctx.is_again = True

    async def made(_session: object, of: SimpleNamespace, _what: object) -> None:
        of.trace_request_ctx.is_again = False

    tracing = TraceConfig()
    tracing.on_connection_reuseconn.append(used_again)
    tracing.on_connection_create_start.append(made)
    tracing.freeze()
    return tracing


def _has_ended(error: BaseException | None) -> bool:
    """Return whether an open connection ended without an answer; ``False`` when none could be opened."""
    if isinstance(error, ClientConnectorError):
        return False
    return isinstance(error, ServerDisconnectedError | ClientOSError)


async def at_once(calls: Sequence[Callable[[], Awaitable[None]]]) -> None:
    """Make calls, :data:`_AT_ONCE` at a time; raise the first failure after all have ended."""
    failures: list[Exception] = []
    room = anyio.Semaphore(_AT_ONCE)

    async def call(each: Callable[[], Awaitable[None]]) -> None:
        async with room:
            try:
                await each()
            except Exception as error:  # noqa: BLE001 - raised below, once the others are done
                failures.append(error)

    if len(calls) == 1:
        await calls[0]()
        return
    async with anyio.create_task_group() as tasks:
        for each in calls:
            tasks.start_soon(call, each)
    if failures:
        raise failures[0]

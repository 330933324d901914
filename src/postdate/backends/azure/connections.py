"""Connections to an account: kept open between requests, so that one may turn out to have ended meanwhile.

Whoever is at the other end - Azure, a balancer, a firewall - ends connections that were idle, and a request can be on
its way when it does. That is no outage: the request is made again at once, on another connection. Azure may have done
what it did not answer; all that we ask for bears being asked twice, as it does after an outage: messages arrive at
least once, and entities are guarded by their keys and ETags (ADR 0013).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from aiohttp import ClientConnectorError, ClientOSError, ServerDisconnectedError, TraceConfig
from azure.core.exceptions import AzureError
from azure.core.pipeline.transport import AioHttpTransport

log = logging.getLogger("postdate.azure.connections")


@dataclass(slots=True)
class _Use:
    """Whether the connection of a request had been used before."""

    is_again: bool = False


class LastingTransport(AioHttpTransport):
    """Makes a request again when a connection that had been kept ends before anything of an answer has come."""

    async def open(self) -> None:
        """Open the session, and have it tell which connections are used again."""
        sdk: Any = super()  # which leaves types open
        before = self.session
        await sdk.open()
        if self.session is not None and self.session is not before:
            self.session.trace_configs.append(_tracing())

    async def send(self, request: Any, **settings: Any) -> Any:
        """See :meth:`azure.core.pipeline.transport.AsyncHttpTransport.send`.

        Raises:
            AzureError: there is no connection, or a new one was lost, or one in the middle of the answer.
        """
        sdk: Any = super()
        while True:  # each time round, a connection that was kept is gone
            use = _Use()
            try:
                return await sdk.send(request, trace_request_ctx=use, **settings)
            except AzureError as error:
                if not (use.is_again and _has_ended(error.__cause__)):
                    raise
                log.debug("%s is asked for again, as its connection had ended: %s", request.method, error)


def _tracing() -> TraceConfig:
    """Return what notes for each request whether its connection had been used before."""

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
    """Return whether a connection ended without an answer; not whether none could be opened."""
    if isinstance(error, ClientConnectorError):
        return False
    return isinstance(error, ServerDisconnectedError | ClientOSError)

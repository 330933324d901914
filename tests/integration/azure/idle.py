"""A way to Azurite that ends connections nobody has used for a while: before a request comes, or just when it does."""

import asyncio
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from enum import Enum
from urllib.parse import urlsplit

_CHUNK_BYTES = 65_536


class Ending(Enum):
    """How connections end."""

    BEFORE = "while they are idle"
    AT_REQUEST = "at the next request"
    RESET_AT_REQUEST = "at the next request, with a reset"


class _Connection:
    """One connection of a client; idle once it has been used and while no request is on its way."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.is_idle = self.is_over = False
        self._reply = b""

    def asked(self) -> None:
        self.is_idle, self._reply = False, b""

    def replied(self, chunk: bytes) -> None:
        """Note a part of a reply; with the last of it the connection is idle."""
        self._reply += chunk
        head, end, body = self._reply.partition(b"\r\n\r\n")
        length = re.search(rb"(?im)^content-length: *(\d+)", head)
        whole = len(body) >= int(length[1]) if length else body.endswith(b"0\r\n\r\n") or b" 204 " in head[:16]
        self.is_idle = bool(end) and whole


class IdleEnding:
    """Forwards connections to one service.

    Args:
        target: URL of it, with the name of the account.
        ending: what becomes of the connections that were idle.
    """

    def __init__(self, target: str, ending: Ending) -> None:
        self._target, self._ending = urlsplit(target), ending
        self._open: set[_Connection] = set()
        self.url = ""
        self.ended = 0

    @asynccontextmanager
    async def listening(self) -> AsyncGenerator["IdleEnding"]:
        """Listen on loopback for the length of the block."""
        server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}{self._target.path}"
        try:
            yield self
        finally:
            server.close()
            for connection in self._open:
                connection.writer.transport.abort()
            await server.wait_closed()

    def end_idle(self) -> None:
        """Say that all connections without a request have been idle for too long."""
        for connection in self._open:
            if connection.is_idle and not connection.is_over:
                connection.is_over = True
                if self._ending is Ending.BEFORE:
                    self.ended += 1
                    connection.writer.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection(writer)
        self._open.add(connection)
        there, back = await asyncio.open_connection(self._target.hostname, self._target.port)
        replies = asyncio.create_task(_replies(there, connection))
        with suppress(OSError):
            while chunk := await reader.read(_CHUNK_BYTES):
                if connection.is_over:
                    self._end(writer)
                    break
                connection.asked()
                back.write(chunk)
        self._open.discard(connection)
        replies.cancel()
        for end in (back, writer):
            end.close()

    def _end(self, writer: asyncio.StreamWriter) -> None:
        self.ended += 1
        if self._ending is Ending.RESET_AT_REQUEST:
            writer.transport.abort()


async def _replies(reader: asyncio.StreamReader, to: _Connection) -> None:
    with suppress(OSError):
        while chunk := await reader.read(_CHUNK_BYTES):
            to.replied(chunk)
            to.writer.write(chunk)
            await to.writer.drain()

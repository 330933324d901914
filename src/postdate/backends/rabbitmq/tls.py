"""TLS between a connection and its socket, and without a socket: any thread may seal what it sends, one at a time."""

from __future__ import annotations

import ssl


class Tls:
    """The client's end.

    Args:
        context: how to check the server, and how to identify to it.
        host: whose certificate is expected.
        first: said as soon as the server is known.
    """

    def __init__(self, context: ssl.SSLContext, host: str, first: bytes) -> None:
        self._in, self._out, self._first = ssl.MemoryBIO(), ssl.MemoryBIO(), first
        self.broken: ssl.SSLError | None = None
        """Why nothing more is said: the server cannot prove who it is, refuses us, or breaks the protocol."""

        self._session = context.wrap_bio(self._in, self._out, server_hostname=host)

    def opened(self, content: bytes) -> tuple[bytes, bytes]:
        """Return what the server says with so many bytes more, and what is to be sent because of them."""
        self._in.write(content)
        said = b""
        try:
            if self._first:
                self._session.do_handshake()
                self._first = self._first[self._session.write(self._first) :]
            while chunk := self._session.read(262_144):
                said += chunk
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            self.broken = error
        return said, self._out.read()

    def sealed(self, content: bytes) -> bytes:
        """Return the bytes to be sent for some of ours: none when it is broken."""
        left = memoryview(content if self.broken is None else b"")
        while left:  # a record at a time
            left = left[self._session.write(left) :]
        return self._out.read()

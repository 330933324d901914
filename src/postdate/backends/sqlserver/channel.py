"""The connection beneath the driver: TLS by Python's own ``ssl``, deadlines, and control of the login.

The driver sees an unencrypted socket. This module negotiates and starts TLS before the driver sends the login, and
reads the answer to the login first. So a refusal is raised at once with the server's own text, and a routing to another
server is followed with the same encryption. Source: MS-TDS 2.2.6.5, 3.2.5.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Final, Protocol

from postdate.backends.sqlserver import login
from postdate.errors import ConfigurationError, StoreUnreachable

_CHUNK_BYTES: Final = 65_536


class LoginRefused(Exception):
    """The server refused the login. It has number and text of the first error: later ones only say that it failed."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(text)
        self.number, self.text = number, text


class LoginRouted(Exception):
    """The server routes the login to another one, at ``address``."""

    def __init__(self, address: tuple[str, int]) -> None:
        super().__init__(f"{address[0]}:{address[1]}")
        self.address = address


class _Bytes(Protocol):
    """A stream of bytes with a deadline for each call."""

    def sendall(self, content: bytes, /) -> None: ...

    def recv(self, size: int, /) -> bytes: ...


class _Tls:
    """A TLS stream over a socket; the handshake may be wrapped into TDS packets."""

    def __init__(self, raw: socket.socket, context: ssl.SSLContext, name: str, *, in_packets: bool) -> None:
        self._raw = raw
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=name)
        self._run_handshake(in_packets=in_packets)

    @property
    def version(self) -> str | None:
        return self._tls.version()

    def _run_handshake(self, *, in_packets: bool) -> None:
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._flush(in_packets=in_packets)
                received = read_message(self._raw)[1] if in_packets else self._raw.recv(_CHUNK_BYTES)
                if not received:
                    raise ConnectionResetError("the server ended the connection during the TLS handshake") from None
                self._incoming.write(received)
            except ssl.SSLError:
                with suppress(OSError):  # It tells the server why, but the server may be unreachable.
                    self._flush(in_packets=in_packets)
                raise
            else:
                self._flush(in_packets=in_packets)
                return

    def _flush(self, *, in_packets: bool = False) -> None:
        if content := self._outgoing.read():
            self._raw.sendall(login.packet(login.PRELOGIN, content) if in_packets else content)

    def sendall(self, content: bytes, /) -> None:
        self._tls.write(content)
        self._flush()

    def recv(self, size: int, /) -> bytes:
        while True:
            try:
                return self._tls.read(size)
            except ssl.SSLWantReadError:
                self._flush()
                if not (received := self._raw.recv(_CHUNK_BYTES)):
                    return b""
                self._incoming.write(received)
            except ssl.SSLZeroReturnError:
                return b""


def read_message(stream: _Bytes) -> tuple[bytes, bytes]:
    """Return the packets of one message as they came, and their joined content. Raise `ConnectionResetError`."""
    packets, content = bytearray(), bytearray()
    is_last = False
    while not is_last:
        header = _receive_exactly(stream, login.HEADER.size)
        _, status, length, *_ = login.HEADER.unpack(header)
        body = _receive_exactly(stream, length - login.HEADER.size)
        packets += header + body
        content += body
        is_last = bool(status & 1)
    return bytes(packets), bytes(content)


def _receive_exactly(stream: _Bytes, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        if not (received := stream.recv(size - len(data))):
            raise ConnectionResetError("the server ended the connection")
        data += received
    return bytes(data)


class DriverSocket:
    """A replacement for the driver's socket; one thread at a time, except for :meth:`abort`.

    Until the login is complete it keeps the deadline of ``raw``, whatever the driver sets. The server's certificate
    must have the name ``host``.
    """

    def __init__(self, raw: socket.socket, host: str, encryption: login.Encryption, where: str) -> None:
        self._raw, self._host, self._encryption, self._where = raw, host, encryption, where
        self._stream: _Bytes = raw
        self._received = b""
        self._has_sent_prelogin = self._is_logged_in = False
        if encryption.is_strict:
            with self._translate_login_errors():
                self._start_tls(in_packets=False)

    @property
    def tls_version(self) -> str | None:
        """The version of TLS; ``None`` if the connection is not encrypted."""
        return self._stream.version if isinstance(self._stream, _Tls) else None

    # --- calls of the driver --------------------------------------------------------------------------------------

    def setsockopt(self, *_options: object) -> None:
        """Do nothing: all options were set when the socket was connected."""

    def gettimeout(self) -> float | None:
        return self._raw.gettimeout()

    def settimeout(self, seconds: float | None) -> None:
        """Set the deadline; do nothing until the login is complete."""
        if self._is_logged_in:
            self._raw.settimeout(seconds)

    def sendall(self, content: bytes | bytearray, _flags: int = 0) -> None:
        """Send bytes. The driver's first message is the PRELOGIN, with which encryption is negotiated."""
        if self._is_logged_in:
            self._stream.sendall(bytes(content))
            return
        with self._translate_login_errors():
            if self._has_sent_prelogin:
                self._stream.sendall(bytes(content))
            else:
                self._has_sent_prelogin = True
                self._negotiate_encryption(bytes(content))

    def recv(self, size: int, _flags: int = 0) -> bytes:
        if not self._received:
            if self._is_logged_in:
                try:
                    return self._stream.recv(size)
                except TimeoutError as error:
                    raise TimeoutError(f"did not answer within {self.gettimeout():g} s") from error
            with self._translate_login_errors():
                self._received = self._receive_login_answer()
        data, self._received = self._received[:size], self._received[size:]
        return data

    def recv_into(self, buffer: bytearray | memoryview, size: int = 0, flags: int = 0) -> int:
        data = self.recv(size or len(buffer), flags)
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._raw.close()

    # --- other calls ----------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """End the connection from any thread: a call that waits for an answer fails. Never raise."""
        with suppress(OSError):
            self._raw.shutdown(socket.SHUT_RDWR)

    @contextmanager
    def _translate_login_errors(self) -> Generator[None]:
        """Translate errors of the connection at once, because the driver would sleep and try again."""
        try:
            yield
        except (TimeoutError, ssl.SSLError) as error:
            problem = error if isinstance(error, ssl.SSLError) else f"did not answer within {self.gettimeout():g} s"
            raise StoreUnreachable(f"{self._where}: {problem}") from error
        except OSError as error:
            raise StoreUnreachable(f"{self._where}: {error or type(error).__name__}") from error

    def _negotiate_encryption(self, prelogin: bytes) -> None:
        """Send the driver's PRELOGIN with our own encryption option, and prepare the answer that the driver expects."""
        requested = login.ENCRYPT_ON if self._encryption.is_on else login.ENCRYPT_NOT_SUPPORTED
        header, options = prelogin[: login.HEADER.size], prelogin[login.HEADER.size :]
        self._stream.sendall(header + login.set_encryption(options, requested))
        packets, content = read_message(self._stream)
        try:
            offered = login.read_encryption(content)
            self._received = login.packet(packets[0], login.set_encryption(content, login.ENCRYPT_NOT_SUPPORTED))
        except ValueError as error:
            raise StoreUnreachable(f"{self._where}: {error}; is it a SQL Server?") from error
        if self._encryption.is_strict:
            return
        if self._encryption.is_on:
            if offered not in {login.ENCRYPT_ON, login.ENCRYPT_REQUIRED}:
                raise ConfigurationError(
                    f"{self._where} offers no encryption, so the password would go over the network in the clear; give "
                    f"the server a certificate, or, where the network is safe, write encrypt=no in its address"
                )
            self._start_tls(in_packets=True)
        elif offered in {login.ENCRYPT_ON, login.ENCRYPT_REQUIRED}:
            raise ConfigurationError(f"{self._where} requires encryption; remove encrypt=no from its address")

    def _start_tls(self, *, in_packets: bool) -> None:
        context, name = self._encryption.context, self._encryption.expected_name or self._host
        assert context is not None
        try:
            self._stream = _Tls(self._raw, context, name, in_packets=in_packets)
        except ssl.SSLCertVerificationError as error:
            raise ConfigurationError(
                f"{self._where}: the certificate cannot be trusted: {error.verify_message}; name the file of the "
                f"authority that issued it with cafile=, the name in it with hostnameincertificate=, or, where the "
                f"network is safe, write trustservercertificate=yes"
            ) from error
        except ssl.SSLError as error:
            raise StoreUnreachable(f"{self._where}: the TLS handshake failed: {error.reason or error}") from error

    def _receive_login_answer(self) -> bytes:
        """Return the packets of a successful answer to the login. Raise `LoginRefused` or `LoginRouted`."""
        packets, content = read_message(self._stream)
        try:
            answer = login.parse_login_answer(content)
        except ValueError as error:
            raise StoreUnreachable(f"{self._where}: {error}") from error
        if answer.errors:
            raise LoginRefused(*answer.errors[0])
        if answer.route is not None:
            raise LoginRouted(answer.route)
        self._is_logged_in = True
        return packets

"""The bytes of a connection, with or without TLS, and the heartbeats by which each end knows that the other is alive.

A thread sends heartbeats, and nothing else: while a handler blocks the event loop, the server must get heartbeats, and
its own bytes wait in the socket. So TLS has no socket: any thread may encrypt, one at a time. Source: ADR 0029.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from contextlib import suppress
from typing import Final, cast

import anyio
from typing_extensions import override

from postdate.backends.rabbitmq import wire
from postdate.backends.rabbitmq.address import Login
from postdate.errors import PostdateError, TransportUnreachable
from postdate.runtime import forks
from postdate.runtime.housekeeping import Chore, Housekeeping
from postdate.runtime.resource import Resource

_LATE_SECONDS = 2.0
"""How late a heartbeat may be before a server that also owes an answer is considered dead."""

_SILENT_SECONDS: Final = 12.0
"""The longest silence when there are no heartbeats."""

READ_WITHIN_SECONDS = 0.5
"""Time for reading bytes that came while the event loop was blocked."""

_READ_AT_ONCE: Final = 262_144


class Stream(asyncio.BufferedProtocol, forks.ForkAware):
    """The bytes to and from a server; subclasses interpret them."""

    _transport: asyncio.Transport

    def __init__(self, login: Login) -> None:
        self.login = login
        self.loop = asyncio.get_running_loop()
        self.end_error: PostdateError | None = None  # the first error; `None` while the connection is open
        self.last_read_at = self.loop.time()
        self._lost_future: asyncio.Future[None] = self.loop.create_future()  # done when the transport is closed
        self._read_buffer = memoryview(bytearray(_READ_AT_ONCE))
        self._can_write = asyncio.Event()  # cleared while the buffer of the transport is full
        self._can_write.set()
        self._tls_input = ssl.MemoryBIO()  # encrypted bytes from the server
        self._tls_output = ssl.MemoryBIO()  # encrypted bytes to the server
        self._greeting = wire.PROTOCOL_HEADER  # the first bytes of AMQP; with TLS, the part that is not sent yet
        self._tls = (
            None
            if login.tls is None
            else login.tls.wrap_bio(self._tls_input, self._tls_output, server_hostname=login.host)
        )
        self._tls_error: ssl.SSLError | None = None
        self._write_lock = forks.lock()  # guards TLS and writes: both the event loop and the heartbeat thread write
        self._unsent = b""  # the rest of a heartbeat that the socket did not accept; guarded by `_write_lock`
        self._has_written = True  # whether the event loop has written since the last heartbeat
        self._silence_seconds = _SILENT_SECONDS
        self._silence_check: asyncio.TimerHandle | None = None
        self._beats: Housekeeping | None = None  # the heartbeat thread

    def fileno(self) -> int:
        descriptor: int = self._transport.get_extra_info("socket").fileno()
        return descriptor

    @override
    def after_fork_in_child(self) -> None:
        """Never end the connection here.

        The end of its transport would change what the parent's event loop waits for.
        """
        forks.prevent_destruction(self)

    # --- for subclasses

    def on_bytes(self, content: bytes) -> None:
        """Handle bytes from the server."""

    def on_end(self, error: PostdateError) -> None:
        """Handle the end of the connection."""

    # --- events of the loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        forks.register_connection(self)
        forks.register(self)
        if self._tls is None:
            self.write(self._greeting)
        else:
            self.data_received(b"")

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_end_error(
            TransportUnreachable(
                f"the connection to {self.login.description} was lost: {exc or 'closed by the server'}"
            )
        )
        if self._silence_check is not None:
            self._silence_check.cancel()
        with self._write_lock:  # The thread must not write to the socket, which is closed next.
            if self._beats is not None:
                self._beats.stop()
        if not self._lost_future.done():
            self._lost_future.set_result(None)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the same buffer each time: a new one of that size costs more than a copy."""
        return self._read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(self._read_buffer[:nbytes]))

    def data_received(self, data: bytes) -> None:
        """Pass on decrypted bytes, even the last ones before TLS fails."""
        self.last_read_at = self.loop.time()
        self.on_bytes(data if self._tls is None else self._decrypt(self._tls, data))
        if self._tls_error is not None:
            self.abandon(TransportUnreachable(f"{self.login.description} cannot be reached"))

    def _decrypt(self, tls: ssl.SSLObject, content: bytes) -> bytes:
        plain = b""
        with self._write_lock:
            self._tls_input.write(content)
            try:
                if self._greeting:
                    tls.do_handshake()
                    self._greeting = self._greeting[tls.write(self._greeting) :]
                while chunk := tls.read(_READ_AT_ONCE):
                    plain += chunk
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:  # The server cannot prove its identity, refuses us, or breaks the protocol.
                self._tls_error = error
            self._send(self._tls_output.read())
        return plain

    def pause_writing(self) -> None:
        self._can_write.clear()

    def resume_writing(self) -> None:
        self._can_write.set()

    # --- writing ------------------------------------------------------------------------

    def write(self, content: bytes) -> None:
        """Send bytes; do nothing on an ended connection."""
        if self.end_error is None:
            with self._write_lock:
                self._has_written = True
                self._send(self._encrypt(content))

    def _send(self, content: bytes) -> None:
        self._transport.write(self._unsent + content if self._unsent else content)
        self._unsent = b""

    def _encrypt(self, content: bytes) -> bytes:
        if self._tls is None:
            return content
        remaining = memoryview(content if self._tls_error is None else b"")
        while remaining:  # one record at a time
            remaining = remaining[self._tls.write(remaining) :]
        return self._tls_output.read()

    async def wait_until_writable(self) -> None:
        """Wait until the socket accepts more bytes."""
        await self._can_write.wait()
        if self.end_error is not None:
            raise self.end_error

    # --- its end

    async def abort(self) -> None:
        """End the connection at once."""
        self._set_end_error(TransportUnreachable("the connection was closed here"))
        with anyio.CancelScope(shield=True):
            self._transport.abort()
            await asyncio.shield(self._lost_future)

    def abandon(self, error: PostdateError) -> None:
        """End the connection at once, without waiting, so that callers open another one."""
        self._set_end_error(error)
        self._transport.abort()

    def abandon_threadsafe(self) -> None:
        """End the connection from outside its event loop, which may be blocked or closed: no heartbeat follows."""
        if self._beats is not None:
            self._beats.stop()
        with suppress(RuntimeError):  # The loop is closed.
            error = TransportUnreachable(f"{self.login.description} is used from another event loop now")
            self.loop.call_soon_threadsafe(self.abandon, error)

    def _set_end_error(self, error: PostdateError) -> None:
        if self.end_error is None:
            self.end_error = error if self._tls_error is None else TransportUnreachable(f"{error}: {self._tls_error}")
            self._can_write.set()
            self.on_end(self.end_error)

    # --- heartbeats

    @property
    def is_silent(self) -> bool:
        """Return whether nothing arrived for longer than the server's heartbeat allows."""
        return self.loop.time() - self.last_read_at > self._silence_seconds

    def _start_heartbeats(self, seconds: float) -> None:
        """Send heartbeats, and expect some bytes, at least every ``seconds``."""
        self._silence_seconds = seconds + _LATE_SECONDS
        self._check_silence(seconds)
        self._beats = Housekeeping(
            Resource(self.login.description), seconds, [Chore("cannot send heartbeats", self._send_heartbeat)]
        )
        self._beats.start()

    def _send_heartbeat(self) -> bool:
        """Send a heartbeat from the thread, if nothing was sent since the last one and no bytes wait."""
        if self.loop.is_closed() and self._beats is not None:  # no handler can run any more
            self._beats.stop()
            return False
        with self._write_lock:
            is_idle, self._has_written = not self._has_written, False
            if is_idle and self.end_error is None and not self._transport.get_write_buffer_size():
                self._unsent = self._unsent or self._encrypt(wire.HEARTBEAT_FRAME)
                self._unsent = self._unsent[_write_to_socket(self._transport, self._unsent) :]
        return False

    def _check_silence(self, seconds: float, last_read_at: float | None = None) -> None:
        """Check that the server is alive; read bytes that arrived while the event loop was blocked first."""
        if self.loop.time() - self.last_read_at < 4 * seconds:
            self._silence_check = self.loop.call_later(seconds, self._check_silence, seconds)
        elif last_read_at != self.last_read_at:
            self._silence_check = self.loop.call_later(
                READ_WITHIN_SECONDS, self._check_silence, seconds, self.last_read_at
            )
        else:
            self.abandon(TransportUnreachable(f"{self.login.description} has been silent for {4 * seconds:g} s"))


def _write_to_socket(transport: asyncio.Transport, content: bytes) -> int:
    """Write to the socket of a transport with an empty buffer; return the number of bytes written."""
    socket_copy = socket.socket(fileno=transport.get_extra_info("socket").fileno())
    socket_copy.settimeout(0)  # whatever the default of the process is
    try:
        return socket_copy.send(content)
    except BlockingIOError:  # The server reads nothing now.
        return 0
    finally:
        socket_copy.detach()

"""The bytes of a connection, in TLS or without, and the heartbeats by which both ends know that the other lives.

Only heartbeats are sent by a thread: while a handler keeps the event loop, the server must hear of us, and what it says
meanwhile waits in the socket. So TLS has no socket: any thread may seal what it sends, one at a time. Source: ADR 0029.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from contextlib import suppress
from typing import Final, cast

import anyio

from postdate.backends.rabbitmq import wire
from postdate.backends.rabbitmq.login import Login
from postdate.errors import PostdateError, TransportUnreachable
from postdate.runtime.housekeeping import Chore, Housekeeping

_LATE_SECONDS = 2.0
"""How late a heartbeat may be before a server that owes an answer besides is taken for dead."""

_SILENT_SECONDS: Final = 12.0
"""The same where there are no heartbeats: nothing came for so long."""

READ_WITHIN_SECONDS = 0.5
"""What has come while the event loop stood, however late it is."""

_READ_AT_ONCE: Final = 262_144


class Stream(asyncio.BufferedProtocol):
    """What is said to a server and by it, until one of them ends it. Subclasses say what it means.

    Args:
        login: where to.
    """

    _transport: asyncio.Transport

    def __init__(self, login: Login) -> None:
        self.login, self.loop = login, asyncio.get_running_loop()
        self.ended: PostdateError | None = None
        self.heard_at = self.loop.time()
        self._over: asyncio.Future[None] = self.loop.create_future()
        self._room = memoryview(bytearray(_READ_AT_ONCE))
        self._may_go_on = asyncio.Event()
        self._may_go_on.set()
        self._in, self._out, self._greeting = ssl.MemoryBIO(), ssl.MemoryBIO(), wire.PROTOCOL_HEADER
        self._tls = None if login.tls is None else login.tls.wrap_bio(self._in, self._out, server_hostname=login.host)
        self._broken: ssl.SSLError | None = None
        self._writing = threading.Lock()
        self._unsent, self._wrote = b"", True
        self._alive_within = _SILENT_SECONDS
        self._listening: asyncio.TimerHandle | None = None
        self._beats: Housekeeping | None = None

    # --- for subclasses

    def on_bytes(self, content: bytes) -> None:
        """Take what the server says."""

    def on_end(self, error: PostdateError) -> None:
        """Take note that nothing more will come."""

    # --- events of the loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to speak AMQP."""
        self._transport = cast("asyncio.Transport", transport)
        if self._tls is None:
            self.write(self._greeting)
        else:
            self.data_received(b"")

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell everybody."""
        self._end(
            TransportUnreachable(f"the connection to {self.login.place} was lost: {exc or 'closed by the server'}")
        )
        if self._listening is not None:
            self._listening.cancel()
        with self._writing:  # its thread sends nothing from here on into a socket that is closed next
            if self._beats is not None:
                self._beats.stop()
        if not self._over.done():
            self._over.set_result(None)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where to put what the server says: one place, for a new one of that size costs more than a copy."""
        return self._room

    def buffer_updated(self, nbytes: int) -> None:
        """Take what was put there."""
        self.data_received(bytes(self._room[:nbytes]))

    def data_received(self, data: bytes) -> None:
        """Hand on what the server says, which may be its last before TLS breaks."""
        self.heard_at = self.loop.time()
        self.on_bytes(data if self._tls is None else self._opened(self._tls, data))
        if self._broken is not None:
            self.abandon(TransportUnreachable(f"{self.login.place} cannot be reached"))

    def _opened(self, tls: ssl.SSLObject, content: bytes) -> bytes:
        said = b""
        with self._writing:
            self._in.write(content)
            try:
                if self._greeting:
                    tls.do_handshake()
                    self._greeting = self._greeting[tls.write(self._greeting) :]
                while chunk := tls.read(_READ_AT_ONCE):
                    said += chunk
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:  # it cannot prove who it is, refuses us, or breaks the protocol
                self._broken = error
            self._send(self._out.read())
        return said

    def pause_writing(self) -> None:
        """Hold senders back: the socket takes no more."""
        self._may_go_on.clear()

    def resume_writing(self) -> None:
        """Let senders go on."""
        self._may_go_on.set()

    # --- what is said

    def write(self, content: bytes) -> None:
        """Send bytes; without effect on a connection that has ended."""
        if self.ended is None:
            with self._writing:
                self._wrote = True
                self._send(self._sealed(content))

    def _send(self, content: bytes) -> None:
        self._transport.write(self._unsent + content if self._unsent else content)
        self._unsent = b""

    def _sealed(self, content: bytes) -> bytes:
        if self._tls is None:
            return content
        left = memoryview(content if self._broken is None else b"")
        while left:  # a record at a time
            left = left[self._tls.write(left) :]
        return self._out.read()

    async def flushed(self) -> None:
        """Wait until the socket takes more.

        Raises:
            TransportUnavailable: the connection has ended.
        """
        await self._may_go_on.wait()
        if self.ended is not None:
            raise self.ended

    # --- its end

    async def abort(self) -> None:
        """End the connection at once."""
        with anyio.CancelScope(shield=True):
            self._transport.abort()
            await asyncio.shield(self._over)

    def abandon(self, error: PostdateError) -> None:
        """End the connection at once, without waiting: whoever needs one gets another."""
        self._end(error)
        self._transport.abort()

    def leave(self) -> None:
        """End the connection from outside of its event loop, which may stand, or have ended: no heartbeat follows."""
        if self._beats is not None:
            self._beats.stop()
        with suppress(RuntimeError):  # its loop is closed
            error = TransportUnreachable(f"{self.login.place} is spoken to from another event loop now")
            self.loop.call_soon_threadsafe(self.abandon, error)

    def _end(self, error: PostdateError) -> None:
        if self.ended is None:
            self.ended = error if self._broken is None else TransportUnreachable(f"{error}: {self._broken}")
            self._may_go_on.set()
            self.on_end(self.ended)

    # --- heartbeats

    @property
    def is_silent(self) -> bool:
        """Whether nothing came for longer than a server that lives keeps silent: it sends heartbeats at least."""
        return self.loop.time() - self.heard_at > self._alive_within

    def _keep_alive(self, seconds: float) -> None:
        """Send something at least as often, and expect as much."""
        self._alive_within = seconds + _LATE_SECONDS
        self._listen(seconds)
        self._beats = Housekeeping(f"{self.login.place} is", seconds, [Chore("cannot send heartbeats", self._beat)])
        self._beats.start()

    def _beat(self) -> bool:
        """Show that we are alive, in a thread, where nothing else of ours waits for its turn to be sent."""
        if self.loop.is_closed() and self._beats is not None:  # nobody is left to handle what is held
            self._beats.stop()
            return False
        with self._writing:
            idle, self._wrote = not self._wrote, False
            if idle and self.ended is None and not self._transport.get_write_buffer_size():
                self._unsent = self._unsent or self._sealed(wire.HEARTBEAT_FRAME)
                self._unsent = self._unsent[_sent(self._transport, self._unsent) :]
        return False

    def _listen(self, seconds: float, heard_at: float | None = None) -> None:
        """See whether the server is alive; what it said while the event loop stood is read before it is given up."""
        if self.loop.time() - self.heard_at < 4 * seconds:
            self._listening = self.loop.call_later(seconds, self._listen, seconds)
        elif heard_at != self.heard_at:
            self._listening = self.loop.call_later(READ_WITHIN_SECONDS, self._listen, seconds, self.heard_at)
        else:
            self.abandon(TransportUnreachable(f"{self.login.place} has been silent for {4 * seconds:g} s"))


def _sent(transport: asyncio.Transport, content: bytes) -> int:
    """Send into the socket of a transport that has nothing to send itself; return how much it took."""
    end = socket.socket(fileno=transport.get_extra_info("socket").fileno())
    end.settimeout(0)  # whatever the default of the process is
    try:
        return end.send(content)
    except BlockingIOError:  # the server reads nothing now
        return 0
    finally:
        end.detach()

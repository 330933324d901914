"""A connection to RabbitMQ and its channels, in the event loop that opened it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from importlib.metadata import version
from typing import Final, TypeVar

import anyio
from typing_extensions import override

from postdate.backends.rabbitmq import wire
from postdate.backends.rabbitmq.address import Login
from postdate.backends.rabbitmq.stream import READ_WITHIN_SECONDS, Stream
from postdate.errors import DestinationUnavailable, PostdateError, TransportUnavailable, TransportUnreachable
from postdate.runtime import forks
from postdate.runtime.resource import Resource

ANSWERS_WITHIN_SECONDS = 15.0
"""The limit on an answer. It is long because a quorum queue that elects a leader takes a while."""

CLOSES_WITHIN_SECONDS = 2.0  # after that the connection is aborted
_LONGEST_PAUSE_SECONDS = 1.0
"""The longest pause between attempts to connect, and so the delay after a server is back."""

CONTENT_TOO_LARGE: Final = 311
NOT_FOUND: Final = 404
PRECONDITION_FAILED: Final = 406
_CLOSE_ARGUMENTS: Final = wire.uint16(200) + bytes(5)
LARGEST_FRAME: Final = 131_072  # in bytes; the server may ask for less
_MOST_CHANNELS: Final = 2_047  # the server may ask for less
_CAPABILITIES: Final = {
    "publisher_confirms": True,
    "basic.nack": True,
    "consumer_cancel_notify": True,
    "connection.blocked": True,
    "authentication_failure_close": True,
}


log = logging.getLogger("postdate.rabbitmq")


class ChannelClosed(TransportUnreachable):
    """The server closed a channel because of one request on it. The channel's other requests may be valid."""

    def __init__(self, reply_code: int, text: str) -> None:
        super().__init__(f"RabbitMQ closed the channel: {reply_code} {text}")
        self.reply_code, self.text = reply_code, text


class AmqpConnection(Stream):
    """One connection. When it ends, so do all of its channels; a new one is a new object."""

    def __init__(self, login: Login) -> None:
        super().__init__(login)
        self.blocked: str | None = None
        self.server: dict[str, str] = {}
        self.frame_limit = LARGEST_FRAME
        self._channels: dict[int, Channel] = {}
        self._channel_limit = _MOST_CHANNELS
        self._reader = wire.FrameReader(LARGEST_FRAME)
        self.open_future: asyncio.Future[None] = self.loop.create_future()

    @classmethod
    async def open(cls, login: Login, within_seconds: float) -> AmqpConnection:
        """Connect and log in."""
        try:
            async with asyncio.timeout(within_seconds):
                _, link = await asyncio.get_running_loop().create_connection(lambda: cls(login), login.host, login.port)
                try:
                    await link.open_future
                except BaseException:
                    await link.abort()
                    raise
        except TimeoutError as error:
            raise TransportUnreachable(f"{login.description} did not answer within {within_seconds:g} s") from error
        except OSError as error:
            raise TransportUnreachable(f"{login.description} cannot be reached: {error}") from error
        return link

    async def open_channel(
        self, create_channel: Callable[[AmqpConnection, int], C], within_seconds: float = ANSWERS_WITHIN_SECONDS
    ) -> C:
        """Open a channel; raise `TransportUnavailable` when the connection has ended, or has no channel left."""
        if self.end_error is not None:
            raise self.end_error
        number = next((n for n in range(1, self._channel_limit + 1) if n not in self._channels), None)
        if number is None:
            raise TransportUnreachable(f"all {self._channel_limit} channels of a connection are open")
        channel = self._channels[number] = create_channel(self, number)
        try:
            await channel.call(wire.CHANNEL_OPEN, b"\0", wire.CHANNEL_OPEN_OK, within_seconds)
        except BaseException:
            channel.close(TransportUnreachable("this channel was not waited for"))
            raise
        return channel

    async def request(
        self,
        method: wire.Method,
        arguments: bytes,
        answer_method: wire.Method,
        within_seconds: float = ANSWERS_WITHIN_SECONDS,
    ) -> wire.Arguments:
        """Call a method on a separate channel, because the server closes the channel when it refuses the method."""
        channel = await self.open_channel(Channel, within_seconds)
        try:
            return await channel.call(method, arguments, answer_method, within_seconds)
        finally:
            channel.close(TransportUnreachable("this channel has done its work"))

    def forget_channel(self, channel: Channel) -> None:
        """Make the channel's number available again."""
        if self._channels.get(channel.number) is channel:
            del self._channels[channel.number]

    async def close(self) -> None:
        """Close the connection; abort it when the server does not answer in time."""
        with anyio.CancelScope(shield=True):
            self.write(wire.method_frame(0, wire.CONNECTION_CLOSE, _CLOSE_ARGUMENTS))
            with anyio.move_on_after(CLOSES_WITHIN_SECONDS):
                await asyncio.shield(self._lost_future)
            await self.abort()

    # --- what the server says

    @override
    def on_bytes(self, content: bytes) -> None:
        try:
            for kind, number, payload in self._reader.frames(content):
                if number:
                    if (channel := self._channels.get(number)) is not None:
                        channel.handle_frame(kind, payload)
                elif kind == wire.METHOD:
                    self._handle_control_method(_method_of(payload), wire.Arguments(payload))
        except wire.MalformedFrame as error:
            self.abandon(error)

    @override
    def on_end(self, error: PostdateError) -> None:
        if not self.open_future.done():
            self.open_future.set_exception(error)
            # The error is retrieved here, because a caller that has given up does not retrieve it.
            self.open_future.exception()
        for channel in list(self._channels.values()):
            channel.detach(error)

    def _handle_control_method(self, method: wire.Method, arguments: wire.Arguments) -> None:
        if method == wire.CONNECTION_START:
            self._answer_start(arguments)
        elif method == wire.CONNECTION_TUNE:
            self._answer_tune(arguments.unsigned(2), arguments.unsigned(4), arguments.unsigned(2))
        elif method == wire.CONNECTION_OPEN_OK:
            if not self.open_future.done():
                self.open_future.set_result(None)
        elif method == wire.CONNECTION_CLOSE:
            reason = f"{arguments.unsigned(2)} {arguments.short_text()}"
            self.write(wire.method_frame(0, wire.CONNECTION_CLOSE_OK))
            self._set_end_error(TransportUnreachable(f"{self.login.description} closed the connection: {reason}"))
            self._transport.close()
        elif method == wire.CONNECTION_CLOSE_OK:
            self._set_end_error(TransportUnreachable("the connection was closed here"))
            self._transport.close()
        elif method in {wire.CONNECTION_BLOCKED, wire.CONNECTION_UNBLOCKED}:
            self.blocked = arguments.short_text() if method == wire.CONNECTION_BLOCKED else None
            for channel in list(self._channels.values()):
                channel.on_block()

    def _answer_start(self, arguments: wire.Arguments) -> None:
        arguments.read(2)
        fields = wire.fields_of(arguments.long_bytes())
        self.server = {_decode_text(field.name): _decode_text(field.value) for field in fields if field.kind == b"S"}
        mechanisms = arguments.long_bytes().split()
        if b"PLAIN" not in mechanisms:
            self.abandon(
                TransportUnreachable(
                    f"{self.login.description} does not accept a login with a password, only {mechanisms}"
                )
            )
            return
        properties = wire.table(
            {"product": "Postdate", "version": version("postdate"), "platform": "Python", "capabilities": _CAPABILITIES}
        )
        secret = f"\0{self.login.user}\0{self.login.password}".encode()
        answer = properties + wire.short_text("PLAIN") + wire.long_bytes(secret) + wire.short_text("en_US")
        self.write(wire.method_frame(0, wire.CONNECTION_START_OK, answer))

    def _answer_tune(self, channels: int, frame: int, heartbeat: int) -> None:
        self._channel_limit = min(channels or _MOST_CHANNELS, _MOST_CHANNELS)
        self.frame_limit = self._reader.largest = min(frame or LARGEST_FRAME, LARGEST_FRAME)
        seconds = min(heartbeat, self.login.heartbeat_seconds) if heartbeat else self.login.heartbeat_seconds
        tune_arguments = wire.uint16(self._channel_limit) + wire.uint32(self.frame_limit) + wire.uint16(seconds)
        self.write(wire.method_frame(0, wire.CONNECTION_TUNE_OK, tune_arguments))
        self.write(wire.method_frame(0, wire.CONNECTION_OPEN, wire.short_text(self.login.virtual_host) + b"\0\0"))
        if seconds:
            self._start_heartbeats(seconds / 2)


class Channel:
    """A channel of a connection; subclasses handle frames that no call waits for."""

    def __init__(self, link: AmqpConnection, number: int) -> None:
        self.link, self.number = link, number
        self.end_error: PostdateError | None = None
        self._lock = asyncio.Lock()
        self._answer: asyncio.Future[wire.Arguments] | None = None
        self._answer_method: wire.Method | None = None
        self._method: wire.Method = (0, 0)
        self._arguments = self._properties = b""
        self._body: list[bytes] = []
        self._missing_bytes = 0

    async def call(
        self,
        method: wire.Method,
        arguments: bytes,
        answer_method: wire.Method,
        within_seconds: float = ANSWERS_WITHIN_SECONDS,
    ) -> wire.Arguments:
        """Send a method and return its answer. A cancelled caller waits for the answer, so that answers match calls."""
        with anyio.CancelScope(shield=True):
            async with self._lock:
                if self.end_error is not None:
                    raise self.end_error
                self._answer_method, self._answer = answer_method, self.link.loop.create_future()
                self.link.write(wire.method_frame(self.number, method, arguments))
                try:
                    return await asyncio.wait_for(asyncio.shield(self._answer), within_seconds)
                except TimeoutError as error:
                    await asyncio.wait({self._answer}, timeout=READ_WITHIN_SECONDS)
                    if self._answer.done():
                        return self._answer.result()
                    self._answer.cancel()
                    timeout_error = TransportUnreachable(
                        f"{self.link.login.description} gave no answer within {within_seconds:.3g} s"
                    )
                    if self.link.is_silent:
                        self.link.abandon(timeout_error)
                    self.close(timeout_error)
                    raise timeout_error from error
                finally:
                    self._answer_method = self._answer = None
        raise AssertionError("unreachable: the scope is never cancelled")

    def close(self, error: PostdateError) -> None:
        """Close the channel without waiting; its number stays in use until the server has agreed."""
        if self.end_error is None:
            self.link.write(wire.method_frame(self.number, wire.CHANNEL_CLOSE, _CLOSE_ARGUMENTS))
            self._set_end_error(error)

    async def close_and_wait(self) -> None:
        """Close the channel, after the server has handled everything that was sent on it."""
        await self.call(wire.CHANNEL_CLOSE, _CLOSE_ARGUMENTS, wire.CHANNEL_CLOSE_OK)
        self.detach(TransportUnreachable("this channel was closed here"))

    def detach(self, error: PostdateError) -> None:
        self.link.forget_channel(self)
        self._set_end_error(error)

    def _set_end_error(self, error: PostdateError) -> None:
        if self.end_error is None:
            self.end_error = error
            if self._answer is not None and not self._answer.done():
                self._answer.set_exception(error)
            self.on_end(error)

    def handle_frame(self, kind: int, payload: bytes) -> None:
        if kind == wire.METHOD:
            self._handle_method(_method_of(payload), payload)
        elif kind == wire.HEADER:
            self._missing_bytes = int.from_bytes(payload[4:12], "big")
            self._properties, self._body = payload[12:], []
            self._handle_complete_content()
        else:
            self._missing_bytes -= len(payload)
            self._body.append(payload)
            self._handle_complete_content()

    def _handle_method(self, method: wire.Method, payload: bytes) -> None:
        if method in {wire.BASIC_DELIVER, wire.BASIC_RETURN}:
            self._method, self._arguments = method, payload
        elif method == wire.CHANNEL_CLOSE:
            arguments = wire.Arguments(payload)
            self.link.write(wire.method_frame(self.number, wire.CHANNEL_CLOSE_OK))
            self.detach(ChannelClosed(arguments.unsigned(2), arguments.short_text()))
        elif method == wire.CHANNEL_CLOSE_OK and method != self._answer_method:
            self.link.forget_channel(self)
        elif method == self._answer_method:
            if self._answer is not None and not self._answer.done():
                self._answer.set_result(wire.Arguments(payload))
        elif self.end_error is None:
            self.on_method(method, payload)

    def _handle_complete_content(self) -> None:
        if self._missing_bytes <= 0 and self.end_error is None:
            body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
            self._body = []
            self.on_content(self._method, wire.Arguments(self._arguments), self._properties, body)

    # --- for subclasses

    def on_method(self, method: wire.Method, payload: bytes) -> None:
        """Handle a method that no call waits for."""

    def on_content(self, method: wire.Method, arguments: wire.Arguments, properties: bytes, body: bytes) -> None:
        """Handle a message."""

    def on_block(self) -> None:
        """Handle that the server blocks this connection's publishers, or unblocks them: see ``link.blocked``."""

    def on_end(self, error: PostdateError) -> None:
        """Handle the end of the channel; called once."""


C = TypeVar("C", bound=Channel)


def node_away_error(error: ChannelClosed, queue: str) -> DestinationUnavailable | None:
    """Return an error if a 404 means that the node of an existing queue is down; otherwise ``None``."""
    if error.reply_code != NOT_FOUND or "inaccessible" not in error.text:
        return None
    return DestinationUnavailable(f"the node of queue {queue!r} is unavailable: {error.reply_code} {error.text}")


def _method_of(payload: bytes) -> wire.Method:
    return (payload[0] << 8 | payload[1], payload[2] << 8 | payload[3])


def _decode_text(content: bytes) -> str:
    return content.decode(errors="backslashreplace")


class PersistentConnection:
    """One connection to a server at a time, opened when needed, and opened again after it was lost."""

    def __init__(self, login: Login, connects_within_seconds: float, resource: Resource, purpose: str = "work") -> None:
        self.login = login
        self._connect_seconds = connects_within_seconds
        self._link: AmqpConnection | None = None
        self._lock: asyncio.Lock | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failures = 0
        self._not_before = 0.0
        self._is_closed = False
        self.frame_limit = LARGEST_FRAME
        """The most bytes in a frame of the latest connection; the usual limit before the first one."""
        self._call_health = resource.calls(f"no connection for {purpose}", log)

    async def get_link(self) -> AmqpConnection:
        """Return an open connection; for a while after a failure it raises without connecting again."""
        forks.check_process()
        loop = asyncio.get_running_loop()
        if self._loop is not loop or self._lock is None:  # a link ends with its event loop
            if self._link is not None:
                self._link.abandon_threadsafe()
            self._loop, self._lock, self._link = loop, asyncio.Lock(), None
        if self._link is not None and self._link.end_error is None:
            return self._link
        async with self._lock:
            if self._is_closed:
                raise TransportUnreachable("this transport was closed")
            if self._link is None or self._link.end_error is not None:
                link = await self._connect(loop)
                if self._is_closed or self._loop is not loop:
                    link.abandon_threadsafe()
                    raise TransportUnreachable("this transport was closed, or is used from another event loop now")
                self._link = link
            return self._link

    async def _connect(self, loop: asyncio.AbstractEventLoop) -> AmqpConnection:
        if (remaining_seconds := self._not_before - loop.time()) > 0:
            raise TransportUnreachable(
                f"{self.login.description} could not be reached; next attempt in {remaining_seconds:.1f} s"
            )
        try:
            link = await AmqpConnection.open(self.login, self._connect_seconds)
        except TransportUnavailable as error:
            self._call_health.report_failure(error, loop.time())
            self._not_before = loop.time() + min(_LONGEST_PAUSE_SECONDS, 0.1 * 2**self._failures)
            self._failures = min(self._failures + 1, 10)
            raise
        self._failures = 0
        self._call_health.report_success(loop.time())
        self.frame_limit = link.frame_limit
        return link

    async def close(self) -> None:
        """Close the connection, for good."""
        self._is_closed = True
        link, self._link = self._link, None
        if link is not None and link.loop is asyncio.get_running_loop():
            await link.close()
        elif link is not None:
            link.abandon_threadsafe()

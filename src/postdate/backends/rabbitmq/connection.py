"""A connection to RabbitMQ and its channels, in the event loop of whoever opens it.

Only its heartbeats are sent by a thread: while a handler keeps the event loop, the server must hear of us, and what it
says meanwhile waits in the socket. Source: ADR 0029.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from typing import Final, TypeVar, cast

import anyio

from postdate.backends.rabbitmq import wire
from postdate.backends.rabbitmq.login import Login
from postdate.backends.rabbitmq.tls import Tls
from postdate.backends.rabbitmq.wire import Arguments, FrameReader, MalformedFrame, Method, method_frame
from postdate.errors import DestinationUnavailable, PostdateError, TransportUnavailable, TransportUnreachable
from postdate.runtime.housekeeping import Chore, Housekeeping
from postdate.runtime.outage_log import OutageLog

ANSWERS_WITHIN_SECONDS = 15.0
"""How long the server may take to answer; a quorum queue that elects a leader takes a while."""

CLOSES_WITHIN_SECONDS = 2.0
_LONGEST_PAUSE_SECONDS = 1.0
"""Between two attempts to connect: a server that is back is found out within this."""

_LATE_SECONDS = 2.0
"""How late a heartbeat may be before a server that owes an answer besides is taken for dead."""

_SILENT_SECONDS = 12.0
"""The same where there are no heartbeats: nothing came for so long."""

_READ_WITHIN_SECONDS = 0.5
"""What has come while the event loop stood, however late it is."""

CONTENT_TOO_LARGE: Final = 311
NOT_FOUND: Final = 404
PRECONDITION_FAILED: Final = 406
_CLOSE_ARGUMENTS: Final = wire.uint16(200) + bytes(5)
LARGEST_FRAME: Final = 131_072
_MOST_CHANNELS: Final = 2_047
_CAPABILITIES: Final = {
    "publisher_confirms": True,
    "basic.nack": True,
    "consumer_cancel_notify": True,
    "connection.blocked": True,
    "authentication_failure_close": True,
}


log = logging.getLogger("postdate.rabbitmq")


class ChannelClosed(TransportUnreachable):
    """The server closed a channel, because of one thing asked for on it: nothing is known of all the others.

    Args:
        reply_code: what the server says, in the numbers of AMQP.
        text: what the server says.
    """

    def __init__(self, reply_code: int, text: str) -> None:
        super().__init__(f"RabbitMQ closed the channel: {reply_code} {text}")
        self.reply_code, self.text = reply_code, text


class AmqpConnection(asyncio.Protocol):
    """One connection. Its end is told to all of its channels; a new one is a new object.

    Args:
        login: where to, and as whom.
    """

    def __init__(self, login: Login) -> None:
        self.login = login
        self.ended: PostdateError | None = None
        self.blocked: str | None = None
        self.server: dict[str, str] = {}
        self.frame_limit = LARGEST_FRAME
        self.loop = asyncio.get_running_loop()
        self._channels: dict[int, Channel] = {}
        self._channel_limit = _MOST_CHANNELS
        self._transport: asyncio.Transport | None = None
        self._reader = FrameReader(LARGEST_FRAME)
        self.opened: asyncio.Future[None] = self.loop.create_future()
        self._over: asyncio.Future[None] = self.loop.create_future()
        self._may_go_on = asyncio.Event()
        self._may_go_on.set()
        self.heard_at = self.loop.time()
        self._writing = threading.Lock()
        self._tls = None if login.tls is None else Tls(login.tls, login.host, wire.PROTOCOL_HEADER)
        self._unsent = b""
        self._wrote = True
        self._alive_within = _SILENT_SECONDS
        self._listening: asyncio.TimerHandle | None = None
        self._beats: Housekeeping | None = None

    @classmethod
    async def open(cls, login: Login, within_seconds: float) -> AmqpConnection:
        """Connect and log in.

        Raises:
            TransportUnavailable: the server does not answer, or does not let us in.
        """
        link: AmqpConnection | None = None
        try:
            async with asyncio.timeout(within_seconds):
                loop = asyncio.get_running_loop()
                _, link = await loop.create_connection(lambda: cls(login), login.host, login.port)
                await link.opened
        except TimeoutError as error:
            if link is not None:
                await link.abort()
            raise TransportUnreachable(f"{login.place} did not answer within {within_seconds:g} s") from error
        except OSError as error:
            raise TransportUnreachable(f"{login.place} cannot be reached: {error}") from error
        except BaseException:
            if link is not None:
                await link.abort()
            raise
        return link

    # --- events of the loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to speak AMQP."""
        self._transport = cast("asyncio.Transport", transport)
        if self._tls is None:
            self._transport.write(wire.PROTOCOL_HEADER)
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

    def data_received(self, data: bytes) -> None:
        """Hand each frame to its channel."""
        self.heard_at = self.loop.time()
        try:
            if self._tls is not None and self._transport is not None:
                with self._writing:
                    data, answer = self._tls.opened(data)
                    self._transport.write(self._unsent + answer)
                    self._unsent = b""
            for kind, number, payload in self._reader.frames(data):
                if number:
                    channel = self._channels.get(number)
                    if channel is not None:
                        channel.frame(kind, payload)
                elif kind == wire.METHOD:
                    self._control(_method_of(payload), Arguments(payload))
        except MalformedFrame as error:
            self.abandon(error)
        if self._tls is not None and self._tls.broken is not None:
            self.abandon(TransportUnreachable(f"{self.login.place} cannot be reached"))

    def pause_writing(self) -> None:
        """Hold senders back: the socket takes no more."""
        self._may_go_on.clear()

    def resume_writing(self) -> None:
        """Let senders go on."""
        self._may_go_on.set()

    # --- for channels

    def write(self, content: bytes) -> None:
        """Send bytes; without effect on a connection that has ended."""
        if self.ended is None and self._transport is not None:
            with self._writing:
                self._wrote = True
                content = content if self._tls is None else self._tls.sealed(content)
                self._transport.write(self._unsent + content if self._unsent else content)
                self._unsent = b""

    async def flushed(self) -> None:
        """Wait until the socket takes more.

        Raises:
            TransportUnavailable: the connection has ended.
        """
        await self._may_go_on.wait()
        if self.ended is not None:
            raise self.ended

    async def open_channel(
        self, make: Callable[[AmqpConnection, int], C], within_seconds: float = ANSWERS_WITHIN_SECONDS
    ) -> C:
        """Open a channel.

        Raises:
            TransportUnavailable: the connection has ended, or has no channel left.
        """
        if self.ended is not None:
            raise self.ended
        number = next((n for n in range(1, self._channel_limit + 1) if n not in self._channels), None)
        if number is None:
            raise TransportUnreachable(f"all {self._channel_limit} channels of a connection are open")
        channel = self._channels[number] = make(self, number)
        try:
            await channel.call(wire.CHANNEL_OPEN, b"\0", wire.CHANNEL_OPEN_OK, within_seconds)
        except BaseException:
            channel.close(TransportUnreachable("this channel was not waited for"))
            raise
        return channel

    def forget(self, channel: Channel) -> None:
        """Let the number of a channel be used again."""
        if self._channels.get(channel.number) is channel:
            del self._channels[channel.number]

    async def close(self) -> None:
        """End the connection in good order; or without, when the server does not answer in time."""
        with anyio.CancelScope(shield=True):
            self.write(method_frame(0, wire.CONNECTION_CLOSE, _CLOSE_ARGUMENTS))
            with anyio.move_on_after(CLOSES_WITHIN_SECONDS):
                await asyncio.shield(self._over)
            await self.abort()

    async def abort(self) -> None:
        """End the connection at once."""
        with anyio.CancelScope(shield=True):
            self._abort()
            if self._transport is not None:
                await asyncio.shield(self._over)

    def leave(self) -> None:
        """End the connection from outside of its event loop, which may stand, or have ended: no heartbeat follows."""
        if self._beats is not None:
            self._beats.stop()
        with suppress(RuntimeError):  # its loop is closed
            error = TransportUnreachable(f"{self.login.place} is spoken to from another event loop now")
            self.loop.call_soon_threadsafe(self.abandon, error)

    @property
    def is_silent(self) -> bool:
        """Whether nothing came for longer than a server that lives keeps silent: it sends heartbeats at least."""
        return self.loop.time() - self.heard_at > self._alive_within

    def abandon(self, error: PostdateError) -> None:
        """End the connection at once, without waiting: whoever needs one gets another."""
        self._end(error)
        self._abort()

    def _abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # --- the connection itself

    def _control(self, method: Method, arguments: Arguments) -> None:
        if method == wire.CONNECTION_START:
            self._start(arguments)
        elif method == wire.CONNECTION_TUNE:
            self._tune(arguments.unsigned(2), arguments.unsigned(4), arguments.unsigned(2))
        elif method == wire.CONNECTION_OPEN_OK:
            if not self.opened.done():
                self.opened.set_result(None)
        elif method == wire.CONNECTION_CLOSE:
            reason = f"{arguments.unsigned(2)} {arguments.short_text()}"
            self.write(method_frame(0, wire.CONNECTION_CLOSE_OK))
            self._end(TransportUnreachable(f"{self.login.place} closed the connection: {reason}"))
            self._close_stream()
        elif method == wire.CONNECTION_CLOSE_OK:
            self._end(TransportUnreachable("the connection was closed here"))
            self._close_stream()
        elif method == wire.CONNECTION_BLOCKED:
            self.blocked = arguments.short_text()
            self._tell_of_block()
        elif method == wire.CONNECTION_UNBLOCKED:
            self.blocked = None
            self._tell_of_block()

    def _tell_of_block(self) -> None:
        for channel in list(self._channels.values()):
            channel.on_block()

    def _close_stream(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _start(self, arguments: Arguments) -> None:
        arguments.take(2)
        told = wire.fields_of(arguments.long_bytes())
        self.server = {_text(field.name): _text(field.value) for field in told if field.kind == b"S"}
        mechanisms = arguments.long_bytes().split()
        if b"PLAIN" not in mechanisms:
            self._end(TransportUnreachable(f"{self.login.place} takes no password: {mechanisms}"))
            self._abort()
            return
        properties = wire.table(
            {"product": "Postdate", "version": version("postdate"), "platform": "Python", "capabilities": _CAPABILITIES}
        )
        secret = f"\0{self.login.user}\0{self.login.password}".encode()
        answer = properties + wire.short_text("PLAIN") + wire.long_bytes(secret) + wire.short_text("en_US")
        self.write(method_frame(0, wire.CONNECTION_START_OK, answer))

    def _tune(self, channels: int, frame: int, heartbeat: int) -> None:
        self._channel_limit = min(channels or _MOST_CHANNELS, _MOST_CHANNELS)
        self.frame_limit = self._reader.largest = min(frame or LARGEST_FRAME, LARGEST_FRAME)
        seconds = min(heartbeat, self.login.heartbeat_seconds) if heartbeat else self.login.heartbeat_seconds
        agreed = wire.uint16(self._channel_limit) + wire.uint32(self.frame_limit) + wire.uint16(seconds)
        self.write(method_frame(0, wire.CONNECTION_TUNE_OK, agreed))
        host = wire.short_text(self.login.virtual_host)
        self.write(method_frame(0, wire.CONNECTION_OPEN, host + b"\0\0"))
        if seconds:
            self._alive_within = seconds / 2 + _LATE_SECONDS
            self._listen(seconds / 2)
            chores = [Chore("cannot send heartbeats", self._beat)]
            self._beats = Housekeeping(f"{self.login.place} is", seconds / 2, chores)
            self._beats.start()

    def _beat(self) -> bool:
        """Show that we are alive, in a thread, where nothing else of ours waits for its turn to be sent."""
        if self.loop.is_closed() and self._beats is not None:  # nobody is left to handle what is held
            self._beats.stop()
            return False
        with self._writing:
            transport, idle = self._transport, not self._wrote
            self._wrote = False
            if idle and self.ended is None and transport is not None and not transport.get_write_buffer_size():
                beat = wire.HEARTBEAT_FRAME
                self._unsent = self._unsent or (beat if self._tls is None else self._tls.sealed(beat))
                self._unsent = self._unsent[_sent(transport, self._unsent) :]
        return False

    def _listen(self, seconds: float, heard_at: float | None = None) -> None:
        """See whether the server is alive; what it said while the event loop stood is read before it is given up."""
        if self.loop.time() - self.heard_at < 4 * seconds:
            self._listening = self.loop.call_later(seconds, self._listen, seconds)
        elif heard_at != self.heard_at:
            self._listening = self.loop.call_later(_READ_WITHIN_SECONDS, self._listen, seconds, self.heard_at)
        else:
            self.abandon(TransportUnreachable(f"{self.login.place} has been silent for {4 * seconds:g} s"))

    def _end(self, error: PostdateError) -> None:
        if self.ended is not None:
            return
        if self._tls is not None and self._tls.broken is not None:  # the server may have said more with it
            error = TransportUnreachable(f"{error}: {self._tls.broken}")
        self.ended = error
        self._may_go_on.set()
        if not self.opened.done():
            self.opened.set_exception(error)
            self.opened.exception()  # whoever gave up waiting does not ask any more
        for channel in list(self._channels.values()):
            channel.end(error)


class Channel:
    """A conversation within a connection. Subclasses say what to do with what the server sends unasked.

    Args:
        link: the connection.
        number: of the channel.
    """

    def __init__(self, link: AmqpConnection, number: int) -> None:
        self.link, self.number = link, number
        self.ended: PostdateError | None = None
        self._turn = asyncio.Lock()
        self._answer: asyncio.Future[Arguments] | None = None
        self._awaited: Method | None = None
        self._method: Method = (0, 0)
        self._arguments = self._properties = b""
        self._body: list[bytes] = []
        self._missing = 0

    async def call(
        self, method: Method, arguments: bytes, answer: Method, within_seconds: float = ANSWERS_WITHIN_SECONDS
    ) -> Arguments:
        """Send a method and return its answer; a cancelled caller waits for that, so that answers stay in step.

        Raises:
            TransportUnavailable: the channel or the connection ended, or the server did not answer in time.
        """
        with anyio.CancelScope(shield=True):
            async with self._turn:
                if self.ended is not None:
                    raise self.ended
                self._awaited, self._answer = answer, self.link.loop.create_future()
                self.link.write(method_frame(self.number, method, arguments))
                try:
                    return await asyncio.wait_for(asyncio.shield(self._answer), within_seconds)
                except TimeoutError as error:
                    await asyncio.wait({self._answer}, timeout=_READ_WITHIN_SECONDS)
                    if self._answer.done():
                        return self._answer.result()
                    self._answer.cancel()
                    text = f"{self.link.login.place} gave no answer within {within_seconds:.3g} s"
                    late = TransportUnreachable(text)
                    if self.link.is_silent:
                        self.link.abandon(late)
                    self.close(late)
                    raise late from error
                finally:
                    self._awaited = self._answer = None
        raise AssertionError("unreachable: the scope is never cancelled")

    def close(self, error: PostdateError) -> None:
        """End the channel from our side, without waiting; its number stays taken until the server has agreed."""
        if self.ended is None:
            self.link.write(method_frame(self.number, wire.CHANNEL_CLOSE, _CLOSE_ARGUMENTS))
            self._finish(error)

    async def close_in_good_order(self) -> None:
        """End the channel from our side, and return when the server has done all that was asked before.

        Raises:
            TransportUnavailable: the channel or the connection ended otherwise.
        """
        await self.call(wire.CHANNEL_CLOSE, _CLOSE_ARGUMENTS, wire.CHANNEL_CLOSE_OK)
        self.end(TransportUnreachable("this channel was closed here"))

    def end(self, error: PostdateError) -> None:
        """Take note that the channel has ended."""
        self.link.forget(self)
        self._finish(error)

    def _finish(self, error: PostdateError) -> None:
        if self.ended is None:
            self.ended = error
            if self._answer is not None and not self._answer.done():
                self._answer.set_exception(error)
            self.on_end(error)

    def frame(self, kind: int, payload: bytes) -> None:
        """Take a frame from the server."""
        if kind == wire.METHOD:
            self._take_method(_method_of(payload), payload)
        elif kind == wire.HEADER:
            self._missing = int.from_bytes(payload[4:12], "big")
            self._properties, self._body = payload[12:], []
            self._complete()
        else:
            self._missing -= len(payload)
            self._body.append(payload)
            self._complete()

    def _take_method(self, method: Method, payload: bytes) -> None:
        if method in {wire.BASIC_DELIVER, wire.BASIC_RETURN}:
            self._method, self._arguments = method, payload
        elif method == wire.CHANNEL_CLOSE:
            arguments = Arguments(payload)
            self.link.write(method_frame(self.number, wire.CHANNEL_CLOSE_OK))
            self.end(ChannelClosed(arguments.unsigned(2), arguments.short_text()))
        elif method == wire.CHANNEL_CLOSE_OK and method != self._awaited:
            self.link.forget(self)
        elif method == self._awaited:
            if self._answer is not None and not self._answer.done():
                self._answer.set_result(Arguments(payload))
        elif self.ended is None:
            self.on_method(method, payload)

    def _complete(self) -> None:
        if self._missing <= 0 and self.ended is None:
            body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
            self._body = []
            self.on_content(self._method, Arguments(self._arguments), self._properties, body)

    # --- for subclasses

    def on_method(self, method: Method, payload: bytes) -> None:
        """Take a method that no call waits for."""

    def on_content(self, method: Method, arguments: Arguments, properties: bytes, body: bytes) -> None:
        """Take a message."""

    def on_block(self) -> None:
        """Take note that the server takes no more messages on this connection, or takes them again."""

    def on_end(self, error: PostdateError) -> None:
        """Take note that nothing more will come."""


C = TypeVar("C", bound=Channel)


def is_node_away(error: ChannelClosed) -> bool:
    """Return whether a queue is known and the node that it lives on is not there: the server says 404 then, too."""
    return error.reply_code == NOT_FOUND and "inaccessible" in error.text


def node_away(error: ChannelClosed, queue: str) -> DestinationUnavailable:
    """Return the error of :func:`is_node_away`."""
    return DestinationUnavailable(f"the node of queue {queue!r} is away: {error.reply_code} {error.text}")


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


def _method_of(payload: bytes) -> Method:
    return (payload[0] << 8 | payload[1], payload[2] << 8 | payload[3])


def _text(content: bytes) -> str:
    return content.decode(errors="backslashreplace")


async def declare_exchange_passively(
    link: AmqpConnection, exchange: str, within_seconds: float = ANSWERS_WITHIN_SECONDS
) -> None:
    """Return if the exchange exists.

    Raises:
        ChannelClosed: it does not (404), or we may not know.
        TransportUnavailable: the server does not answer.
    """
    channel = await link.open_channel(Channel, within_seconds)
    passive = b"\x01"
    arguments = b"\0\0" + wire.short_text(exchange) + wire.short_text("direct") + passive + bytes(4)
    try:
        await channel.call(wire.EXCHANGE_DECLARE, arguments, wire.EXCHANGE_DECLARE_OK, within_seconds)
    finally:
        channel.close(TransportUnreachable("this channel has done its work"))


async def declare_queue(link: AmqpConnection, queue: str, queue_type: str, **more: str) -> None:
    """Create a durable queue; one that exists stays as it is.

    Args:
        link: the connection.
        queue: its name.
        queue_type: of RabbitMQ.
        more: arguments of the declaration, with underscores for hyphens.

    Raises:
        ChannelClosed: we may not, or the name is reserved.
        TransportUnavailable: the server does not answer.
    """
    channel = await link.open_channel(Channel)
    passive, durable, name = b"\x01", b"\x02", wire.short_text(queue)
    try:
        is_there = False
        with suppress(ChannelClosed):
            await channel.call(wire.QUEUE_DECLARE, b"\0\0" + name + passive + bytes(4), wire.QUEUE_DECLARE_OK)
            is_there = True
        if is_there:
            await _compare_queue_type(link, queue, queue_type)
            return
        channel = await link.open_channel(Channel)
        arguments = (
            b"\0\0"
            + name
            + durable
            + wire.table({"x-queue-type": queue_type, **{name.replace("_", "-"): more[name] for name in more}})
        )
        await channel.call(wire.QUEUE_DECLARE, arguments, wire.QUEUE_DECLARE_OK)
    except ChannelClosed as error:
        if error.reply_code != PRECONDITION_FAILED:  # somebody else created it just now, as another type
            raise
    finally:
        channel.close(TransportUnreachable("this channel has done its work"))


async def _compare_queue_type(link: AmqpConnection, queue: str, queue_type: str) -> None:
    """Say so when a queue is of another type than the one that was asked for: it stays as it is, with its messages."""
    channel = await link.open_channel(Channel)
    arguments = b"\0\0" + wire.short_text(queue) + b"\x02" + wire.table({"x-queue-type": queue_type})
    try:
        await channel.call(wire.QUEUE_DECLARE, arguments, wire.QUEUE_DECLARE_OK)
    except ChannelClosed as error:  # or it has other arguments, or we may not declare: all of it is left alone
        if error.reply_code == PRECONDITION_FAILED and "'x-queue-type'" in error.text:
            log.warning("queue %s exists and is not of the type %s: left as it is (%s)", queue, queue_type, error.text)
    finally:
        channel.close(TransportUnreachable("this channel has done its work"))


class PersistentConnection:
    """The way to a server: one link at a time, made when it is needed, made again when it was lost.

    Args:
        login: where to, and as whom.
        connects_within_seconds: how long making a link may take.
        purpose: what the link is for, in logs.
    """

    def __init__(self, login: Login, connects_within_seconds: float, purpose: str = "work") -> None:
        self.login = login
        self._within = connects_within_seconds
        self._link: AmqpConnection | None = None
        self._turn: asyncio.Lock | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failures = 0
        self._not_before = 0.0
        self._closed = False
        self.frame_limit = LARGEST_FRAME
        """What a frame may have, as the server said last; before it was asked, what it says as a rule."""
        self._outage = OutageLog(log, f"no connection for {purpose}", f"for {purpose}, {login.place} is")

    async def link(self) -> AmqpConnection:
        """Return a link that is up.

        Raises:
            TransportUnavailable: there is none, or there was none just now: the server is left alone for a while.
        """
        loop = asyncio.get_running_loop()
        if self._loop is not loop or self._turn is None:  # a link lives and dies with its event loop
            if self._link is not None:
                self._link.leave()
            self._loop, self._turn, self._link = loop, asyncio.Lock(), None
        if self._link is not None and self._link.ended is None:
            return self._link
        async with self._turn:
            if self._closed:
                raise TransportUnreachable("this transport was closed")
            if self._link is None or self._link.ended is not None:
                self._link = await self._connect(loop)
            return self._link

    async def _connect(self, loop: asyncio.AbstractEventLoop) -> AmqpConnection:
        wait = self._not_before - loop.time()
        if wait > 0:
            raise TransportUnreachable(f"{self.login.place} could not be reached; next attempt in {wait:.1f} s")
        try:
            link = await AmqpConnection.open(self.login, self._within)
        except TransportUnavailable as error:
            self._outage.failed(error, loop.time())
            self._not_before = loop.time() + min(_LONGEST_PAUSE_SECONDS, 0.1 * 2**self._failures)
            self._failures = min(self._failures + 1, 10)
            raise
        self._failures = 0
        self._outage.succeeded(loop.time())
        self.frame_limit = link.frame_limit
        return link

    async def close(self) -> None:
        """End the link, for good."""
        self._closed = True
        link, self._link = self._link, None
        if link is not None and link.loop is asyncio.get_running_loop():
            await link.close()
        elif link is not None:
            link.leave()

"""The barest AMQP connection: one channel on a blocking socket, for limits and for looking what arrived."""

from __future__ import annotations

import re
import socket
import time
from types import TracebackType
from typing import Final, Self

from postdate.backends.rabbitmq import wire
from postdate.backends.rabbitmq.address import Login
from postdate.errors import TransportUnavailable

_CHANNEL: Final = 1
_LARGEST_FRAME: Final = 131_072
_READ_AT_ONCE: Final = 1 << 16
_CONNECTS_WITHIN_SECONDS: Final = 10.0
_CONFIRMS_WITHIN_SECONDS: Final = 30.0
_QUEUE_DELETE, _QUEUE_DELETE_OK = (50, 40), (50, 41)
_OF_THE_SERVER: Final = re.compile(rb"(product|version)S(....)", re.DOTALL)


Frame = tuple[int, int, bytes]
"""Kind, channel, payload."""


class RawConnection:
    """Logged in, with one channel open.

    Args:
        login: where and as whom.

    Raises:
        TransportUnavailable: nobody answers there, or it refuses us.
    """

    def __init__(self, login: Login) -> None:
        self._login = login
        self._reader = wire.FrameReader(_LARGEST_FRAME)
        self._unread: list[Frame] = []
        self.server: dict[str, str] = {}
        try:
            self._socket = socket.create_connection((login.host, login.port), _CONNECTS_WITHIN_SECONDS)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if login.tls is not None:
                self._socket = login.tls.wrap_socket(self._socket, server_hostname=login.host)
        except OSError as error:
            raise TransportUnavailable(f"cannot reach {login.description}: {error}") from error
        try:
            self._log_in()
        except BaseException:
            self._socket.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def _log_in(self) -> None:
        self._socket.sendall(wire.PROTOCOL_HEADER)
        greeting = self._answer(wire.CONNECTION_START)
        for name, length in _OF_THE_SERVER.findall(greeting):
            start = greeting.index(name + b"S" + length) + len(name) + 5
            self.server[name.decode()] = greeting[start : start + int.from_bytes(length, "big")].decode()
        secret = wire.long_bytes(f"\0{self._login.user}\0{self._login.password}".encode())
        self.method(
            wire.CONNECTION_START_OK, wire.table({}) + wire.short_text("PLAIN") + secret + wire.short_text("en_US"), 0
        )
        self._answer(wire.CONNECTION_TUNE)
        self.method(wire.CONNECTION_TUNE_OK, wire.uint16(1) + wire.uint32(_LARGEST_FRAME) + wire.uint16(0), 0)
        self.method(wire.CONNECTION_OPEN, wire.short_text(self._login.virtual_host) + b"\0\0", 0)
        self._answer(wire.CONNECTION_OPEN_OK)
        self.call(wire.CHANNEL_OPEN, b"\0", wire.CHANNEL_OPEN_OK)

    # --- frames -------------------------------------------------------------------------------------------------

    def send(self, content: bytes) -> None:
        """Write frames."""
        self._socket.sendall(content)

    def method(self, method: wire.Method, arguments: bytes = b"", channel: int = _CHANNEL) -> None:
        """Write the frame of a method."""
        self.send(wire.method_frame(channel, method, arguments))

    def call(self, method: wire.Method, arguments: bytes, answer: wire.Method) -> bytes:
        """Write a method and return the payload of its answer; for calls between which nothing else arrives."""
        self.method(method, arguments)
        return self._answer(answer)

    def _answer(self, expected: wire.Method) -> bytes:
        deadline = time.monotonic() + _CONNECTS_WITHIN_SECONDS
        before = self._unread
        while time.monotonic() < deadline:
            frames = self._received(_CONNECTS_WITHIN_SECONDS)
            for position, (kind, _, payload) in enumerate(frames):
                if kind == wire.METHOD and _method_of(payload) == expected:
                    self._unread = before + frames[:position] + frames[position + 1 :]
                    return payload
            before += frames
        raise TransportUnavailable(f"{self._login.description} does not answer")

    def read(self, seconds: float) -> list[Frame]:
        """Return the frames that have arrived; none after so many seconds.

        Raises:
            TransportUnavailable: the server closed the channel or the connection; the message has its reason.
        """
        if self._unread:
            unread, self._unread = self._unread, []
            return unread
        return self._received(seconds)

    @property
    def has_unread(self) -> bool:
        """Whether frames have arrived before the answer to a call, and nobody has read them."""
        return bool(self._unread)

    def _received(self, seconds: float) -> list[Frame]:
        self._socket.settimeout(seconds)
        try:
            received = self._socket.recv(_READ_AT_ONCE)
        except TimeoutError:
            return []
        except OSError as error:
            raise TransportUnavailable(f"{self._login.description} went away: {error}") from error
        finally:
            self._socket.settimeout(None)
        if not received:
            raise TransportUnavailable(
                f"{self._login.description} closed the connection; are user and virtual host right?"
            )
        frames = list(self._reader.frames(received))
        for kind, _, payload in frames:
            if kind == wire.METHOD and _method_of(payload) in {wire.CHANNEL_CLOSE, wire.CONNECTION_CLOSE}:
                code = int.from_bytes(payload[4:6], "big")
                raise TransportUnavailable(
                    f"{self._login.description} says {code} {payload[7 : 7 + payload[6]].decode()}"
                )
        return frames

    # --- queues -------------------------------------------------------------------------------------------------

    def declare(self, queue: str, queue_type: str) -> None:
        """Make a durable queue."""
        durable = b"\x02"
        arguments = b"\0\0" + wire.short_text(queue) + durable + wire.table({"x-queue-type": queue_type})
        self.call(wire.QUEUE_DECLARE, arguments, wire.QUEUE_DECLARE_OK)

    def length(self, queue: str) -> int:
        """Return how many messages wait in a queue that exists."""
        passive = b"\x01"
        arguments = b"\0\0" + wire.short_text(queue) + passive + bytes(4)
        answer = wire.Arguments(self.call(wire.QUEUE_DECLARE, arguments, wire.QUEUE_DECLARE_OK))
        answer.short_bytes()
        return answer.unsigned(4)

    def delete(self, queue: str) -> None:
        """Delete a queue with all that is in it; without effect when there is none."""
        self.call(_QUEUE_DELETE, b"\0\0" + wire.short_text(queue) + b"\0", _QUEUE_DELETE_OK)

    def consume(self, queue: str) -> None:
        """Have all messages of a queue sent to us, and taken off it, without an acknowledgement."""
        no_ack = b"\x02"
        arguments = b"\0\0" + wire.short_text(queue) + b"\0" + no_ack + wire.table({})
        self.call(wire.BASIC_CONSUME, arguments, wire.BASIC_CONSUME_OK)

    def properties_of_arrivals(self, seconds: float) -> list[bytes]:
        """Return the properties of messages that have arrived; none after so many seconds."""
        return [payload for kind, _, payload in self.read(seconds) if kind == wire.HEADER]


def publishing_frames(queue: str, properties: bytes, body: bytes) -> bytes:
    """Return the frames that publish one message to a queue."""
    publish = wire.method_frame(_CHANNEL, wire.BASIC_PUBLISH, b"\0\0\0" + wire.short_text(queue) + b"\0")
    header = wire.HEADER_FRAME.pack(wire.HEADER, _CHANNEL, 12 + len(properties), 60, 0, len(body)) + properties
    return publish + header + wire.END + wire.FRAME.pack(wire.BODY, _CHANNEL, len(body)) + body + wire.END


class Confirms:
    """Counts which of the messages published on a connection are confirmed.

    Args:
        connection: nothing has been published on it yet.
    """

    def __init__(self, connection: RawConnection) -> None:
        self._connection = connection
        self._up_to, self._beyond = 0, set[int]()
        connection.call(wire.CONFIRM_SELECT, b"\0", wire.CONFIRM_SELECT_OK)

    @property
    def count(self) -> int:
        """How many are confirmed."""
        return self._up_to + len(self._beyond)

    def wait(self) -> None:
        """Take the confirms that have arrived, at least one.

        Raises:
            TransportUnavailable: none comes, or a message was refused.
        """
        frames = self._connection.read(_CONFIRMS_WITHIN_SECONDS)
        if not frames:
            raise TransportUnavailable(f"no confirm within {_CONFIRMS_WITHIN_SECONDS:g} s")
        for kind, _, payload in frames:
            if kind != wire.METHOD:
                continue
            if _method_of(payload) != wire.BASIC_ACK:
                raise TransportUnavailable("the server refused a message of the limit")
            self._confirmed(int.from_bytes(payload[4:12], "big"), multiple=bool(payload[12] & 1))

    def _confirmed(self, tag: int, *, multiple: bool) -> None:
        if multiple:
            self._up_to = max(self._up_to, tag)
            self._beyond = {each for each in self._beyond if each > self._up_to}
        else:
            self._beyond.add(tag)
        while self._up_to + 1 in self._beyond:
            self._up_to += 1
            self._beyond.remove(self._up_to)


def _method_of(payload: bytes) -> wire.Method:
    return int.from_bytes(payload[:2], "big"), int.from_bytes(payload[2:4], "big")

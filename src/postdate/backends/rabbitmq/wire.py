"""AMQP 0-9-1 on the wire: frames, methods and the types in them. Pure: bytes in, values out, no I/O.

It has only the parts that a publisher and a consumer need. Source: AMQP 0-9-1, sections 2.3 and 4.2, with RabbitMQ's
errata for the types of table fields; ADR 0006 (why the frames are ours).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from struct import Struct
from typing import Any, Final

from postdate.errors import TransportUnreachable

PROTOCOL_HEADER: Final = b"AMQP\x00\x00\x09\x01"
METHOD, HEADER, BODY, HEARTBEAT = 1, 2, 3, 8
FRAME_END: Final = 0xCE
END: Final = b"\xce"
FRAME_OVERHEAD: Final = 8
HEARTBEAT_FRAME: Final = b"\x08\x00\x00\x00\x00\x00\x00\xce"
SHORT_TEXT_LIMIT: Final = 255
"""The most bytes in a short string: names of queues and exchanges, routing keys, names of headers, most properties."""

FRAME: Final = Struct(">BHI")
METHOD_FRAME: Final = Struct(">BHIHH")
HEADER_FRAME: Final = Struct(">BHIHHQ")
_UINT32: Final = Struct(">I")
_ACK: Final = Struct(">BHIHHQBB")

Method = tuple[int, int]

CONNECTION_START: Final = (10, 10)
CONNECTION_START_OK: Final = (10, 11)
CONNECTION_TUNE: Final = (10, 30)
CONNECTION_TUNE_OK: Final = (10, 31)
CONNECTION_OPEN: Final = (10, 40)
CONNECTION_OPEN_OK: Final = (10, 41)
CONNECTION_CLOSE: Final = (10, 50)
CONNECTION_CLOSE_OK: Final = (10, 51)
CONNECTION_BLOCKED: Final = (10, 60)
CONNECTION_UNBLOCKED: Final = (10, 61)
CHANNEL_OPEN: Final = (20, 10)
CHANNEL_OPEN_OK: Final = (20, 11)
CHANNEL_CLOSE: Final = (20, 40)
CHANNEL_CLOSE_OK: Final = (20, 41)
EXCHANGE_DECLARE: Final = (40, 10)
EXCHANGE_DECLARE_OK: Final = (40, 11)
QUEUE_DECLARE: Final = (50, 10)
QUEUE_DECLARE_OK: Final = (50, 11)
QUEUE_BIND: Final = (50, 20)
QUEUE_BIND_OK: Final = (50, 21)
BASIC_QOS: Final = (60, 10)
BASIC_QOS_OK: Final = (60, 11)
BASIC_CONSUME: Final = (60, 20)
BASIC_CONSUME_OK: Final = (60, 21)
BASIC_CANCEL: Final = (60, 30)
BASIC_CANCEL_OK: Final = (60, 31)
BASIC_PUBLISH: Final = (60, 40)
BASIC_RETURN: Final = (60, 50)
BASIC_DELIVER: Final = (60, 60)
BASIC_ACK: Final = (60, 80)
BASIC_NACK: Final = (60, 120)
CONFIRM_SELECT: Final = (85, 10)
CONFIRM_SELECT_OK: Final = (85, 11)


class MalformedFrame(TransportUnreachable):
    """The peer sent bytes that are not AMQP 0-9-1: the connection is unusable."""


# --- writing ----------------------------------------------------------------------------------------------------------


def short_text(text: str) -> bytes:
    """Return a short string; raise `ValueError` over 255 bytes."""
    return short_bytes(text.encode())


def short_bytes(content: bytes) -> bytes:
    """Return a short string of bytes that need not be text."""
    if len(content) > SHORT_TEXT_LIMIT:
        raise ValueError(f"{content[:60]!r}… has {len(content)} bytes, AMQP takes {SHORT_TEXT_LIMIT}")
    return bytes((len(content),)) + content


def long_bytes(content: bytes) -> bytes:
    return _UINT32.pack(len(content)) + content


def uint16(number: int) -> bytes:
    """Return a number as two bytes, big-endian, as all numbers of AMQP."""
    return number.to_bytes(2, "big")


def uint32(number: int) -> bytes:
    return _UINT32.pack(number)


def table(fields: Mapping[str, str | bool | int | Mapping[str, bool]]) -> bytes:
    """Return a table of the types that our arguments need: text, boolean, integer, table of booleans."""
    return long_bytes(b"".join(short_text(name) + _field(value) for name, value in fields.items()))


def _field(value: str | bool | int | Mapping[str, bool]) -> bytes:
    match value:
        case bool():
            return b"t\x01" if value else b"t\x00"
        case int():
            return b"l" + value.to_bytes(8, "big", signed=True)
        case str():
            return b"S" + long_bytes(value.encode())
        case _:
            return b"F" + table(value)


def method_frame(channel: int, method: Method, arguments: bytes = b"") -> bytes:
    return METHOD_FRAME.pack(METHOD, channel, 4 + len(arguments), *method) + arguments + END


def ack_frame(channel: int, delivery_tag: int, *, multiple: bool) -> bytes:
    """Return the frame that acknowledges one delivery, or all deliveries up to it."""
    return _ACK.pack(METHOD, channel, 13, *BASIC_ACK, delivery_tag, multiple, FRAME_END)


def requeue_frame(channel: int, delivery_tag: int) -> bytes:
    requeue = 2
    return _ACK.pack(METHOD, channel, 13, *BASIC_NACK, delivery_tag, requeue, FRAME_END)


# --- reading ----------------------------------------------------------------------------------------------------------


class FrameReader:
    """Splits a stream of bytes into frames. A frame over ``largest`` bytes is an error, before it fills the memory."""

    def __init__(self, largest: int) -> None:
        self.largest = largest
        self._incomplete = b""

    def frames(self, content: bytes) -> Iterator[tuple[int, int, bytes]]:
        """Yield type, channel and payload of each complete frame."""
        stream = self._incomplete + content if self._incomplete else content
        position, end = 0, len(stream)
        while end - position >= FRAME_OVERHEAD:
            kind, channel, size = FRAME.unpack_from(stream, position)
            if kind not in {METHOD, HEADER, BODY, HEARTBEAT} or size + FRAME_OVERHEAD > self.largest:
                raise MalformedFrame(_frame_error_text(stream[position : position + 8], size, self.largest))
            if (frame_end := position + FRAME_OVERHEAD + size) > end:
                break
            if stream[frame_end - 1] != FRAME_END:
                raise MalformedFrame(f"the server sent a frame of {size} bytes without its end mark")
            yield kind, channel, stream[position + 7 : frame_end - 1]
            position = frame_end
        self._incomplete = stream[position:]


def _frame_error_text(start: bytes, size: int, largest: int) -> str:
    if start.startswith(b"AMQP"):
        return f"the server speaks another version of AMQP than 0-9-1: {start!r}"
    return f"the server sent no AMQP: {start!r} (a frame of {size:,} bytes, at most {largest:,} were agreed)"


class Arguments:
    """Reads the arguments of a method (from ``position`` 4), or the properties of a message, one after the other."""

    def __init__(self, content: bytes, position: int = 4) -> None:
        self.content, self.position = content, position

    def read(self, count: int) -> bytes:
        """Return the next bytes; raise `MalformedFrame` when there are fewer."""
        start, self.position = self.position, self.position + count
        if self.position > len(self.content):
            raise MalformedFrame(f"the server sent a frame that ends too early: {self.content[:60]!r}")
        return self.content[start : self.position]

    def unsigned(self, count: int) -> int:
        return int.from_bytes(self.read(count), "big")

    def signed(self, count: int) -> int:
        return int.from_bytes(self.read(count), "big", signed=True)

    def short_bytes(self) -> bytes:
        return self.read(self.unsigned(1))

    def short_text(self) -> str:
        """Return a short string, with undecodable bytes escaped."""
        return self.short_bytes().decode(errors="backslashreplace")

    def long_bytes(self) -> bytes:
        """Return a long string; tables and arrays have the same form."""
        return self.read(self.unsigned(4))


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a table: ``kind`` is the letter of its type, ``raw`` its letter and value as they were sent."""

    name: bytes
    kind: bytes
    raw: bytes
    value: Any


def fields_of(content: bytes) -> list[Field]:
    """Return the fields of a table, given without its length, in order; raise `MalformedFrame`."""
    arguments, fields = Arguments(content, 0), list[Field]()
    while arguments.position < len(content):
        name = arguments.short_bytes()
        start = arguments.position
        kind, value = _read_value(arguments)
        fields.append(Field(name, kind, content[start : arguments.position], value))
    return fields


def elements_of(content: bytes) -> list[tuple[bytes, Any]]:
    """Return the elements of an array, given without its length: each encoded and decoded."""
    arguments, elements = Arguments(content, 0), list[tuple[bytes, Any]]()
    while arguments.position < len(content):
        start = arguments.position
        _, value = _read_value(arguments)
        elements.append((content[start : arguments.position], value))
    return elements


def _read_value(arguments: Arguments) -> tuple[bytes, Any]:
    kind = arguments.read(1)
    if (read := _READ.get(kind)) is None:
        raise MalformedFrame(f"a table has a field of the unknown type {kind!r}")
    return kind, read(arguments)


def _read_table(arguments: Arguments) -> dict[str, Any]:
    return {field.name.decode(errors="backslashreplace"): field.value for field in fields_of(arguments.long_bytes())}


def _read_decimal(arguments: Arguments) -> Decimal:
    places = arguments.unsigned(1)
    return Decimal(arguments.signed(4)).scaleb(-places)


def _read_timestamp(arguments: Arguments) -> datetime | int:
    seconds = arguments.unsigned(8)
    try:
        return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)
    except OverflowError:
        return seconds


_FLOAT, _DOUBLE = Struct(">f"), Struct(">d")
_READ: Final[Mapping[bytes, Callable[[Arguments], Any]]] = {
    b"t": lambda arguments: arguments.unsigned(1) != 0,
    b"b": lambda arguments: arguments.signed(1),
    b"B": lambda arguments: arguments.unsigned(1),
    b"s": lambda arguments: arguments.signed(2),
    b"u": lambda arguments: arguments.unsigned(2),
    b"I": lambda arguments: arguments.signed(4),
    b"i": lambda arguments: arguments.unsigned(4),
    b"l": lambda arguments: arguments.signed(8),
    b"L": lambda arguments: arguments.signed(8),
    b"f": lambda arguments: _FLOAT.unpack(arguments.read(4))[0],
    b"d": lambda arguments: _DOUBLE.unpack(arguments.read(8))[0],
    b"D": _read_decimal,
    b"S": Arguments.long_bytes,
    b"x": Arguments.long_bytes,
    b"A": lambda arguments: [value for _, value in elements_of(arguments.long_bytes())],
    b"T": _read_timestamp,
    b"F": _read_table,
    b"V": lambda _arguments: None,
}

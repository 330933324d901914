"""Whatever an AMQP message carries comes through an envelope and back byte for byte; and the other way round."""

import struct
from datetime import UTC, datetime

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from postdate import Envelope
from postdate.backends.rabbitmq.address import PublishAddress, exchange_address, parse_address
from postdate.backends.rabbitmq.properties import DecodedMessage, decode_message, properties_of
from postdate.backends.rabbitmq.wire import FrameReader, MalformedFrame, long_bytes, method_frame, short_bytes
from postdate.clock import from_microseconds
from postdate.errors import InvalidHeaders, QueueNotFound

NOW = datetime(2026, 1, 31, 12, 0, 5, 123_456, tzinfo=UTC)
TEXT = st.text(st.characters(exclude_categories=["Cs"]))

# --- messages of others -----------------------------------------------------------------------------------------------


def _of_size(kind: bytes, size: int) -> st.SearchStrategy[bytes]:
    return st.binary(min_size=size, max_size=size).map(lambda content: kind + content)


BYTES_OF = {1: b"tbB", 2: b"su", 4: b"Iif", 5: b"D", 8: b"lLdT"}
SCALARS = st.one_of(
    *(_of_size(bytes((kind,)), size) for size, kinds in BYTES_OF.items() for kind in kinds),
    st.just(b"V"),
    st.binary().map(lambda content: b"S" + long_bytes(content)),
    TEXT.map(lambda text: b"S" + long_bytes(text.encode())),
    st.binary().map(lambda content: b"x" + long_bytes(content)),
)
NAMES = st.one_of(
    TEXT.map(str.encode),
    st.binary(),
    st.sampled_from([b"CC", b"amqp.type", b"amqp.bare", b"x-postdate-due", b"x-delay"]),
).map(lambda name: short_bytes(name[:255]))


def _table(values: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    return st.lists(st.tuples(NAMES, values), max_size=6).map(lambda fields: b"".join(map(b"".join, fields)))


VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        _table(inner).map(lambda content: b"F" + long_bytes(content)),
        st.lists(inner, max_size=4).map(lambda values: b"A" + long_bytes(b"".join(values))),
    ),
    max_leaves=8,
)
SHORT = st.one_of(TEXT.map(str.encode), st.binary()).map(lambda content: short_bytes(content[:255]))
BYTE = st.binary(min_size=1, max_size=1)
PROPERTIES: dict[int, st.SearchStrategy[bytes]] = {
    0x8000: SHORT,
    0x4000: SHORT,
    0x2000: _table(VALUES).map(long_bytes),
    0x1000: BYTE,
    0x0800: BYTE,
    0x0400: SHORT,
    0x0200: SHORT,
    0x0100: st.integers(0, 10**9).map(lambda number: short_bytes(b"%d" % number)),
    0x0080: SHORT,
    0x0040: st.binary(min_size=8, max_size=8),
    0x0020: SHORT,
    0x0010: st.just(short_bytes(b"guest")),
    0x0008: SHORT,
    0x0004: SHORT,
}


@st.composite
def foreign(draw: st.DrawFn) -> bytes:
    bits = draw(st.sets(st.sampled_from(sorted(PROPERTIES))))
    content = b"".join(draw(PROPERTIES[bit]) for bit in sorted(bits, reverse=True))
    return struct.pack(">H", sum(bits)) + content


@given(foreign())
@example(struct.pack(">H", 0x2000) + long_bytes(short_bytes(b"f") + b"f" + struct.pack(">f", 1.5)))
@example(struct.pack(">H", 0x2000) + long_bytes(short_bytes(b"a") + b"I\0\0\0\1" + short_bytes(b"a") + b"I\0\0\0\1"))
@example(struct.pack(">H", 0x2080) + long_bytes(b"") + short_bytes(b"x" * 251))
@example(struct.pack(">H", 0x2000) + long_bytes(short_bytes(b"x-postdate-headers") + b"S" + long_bytes(b"{}")))
def test_a_message_of_others_is_sent_on_as_it_came(properties: bytes) -> None:
    came = decode_message("q", properties, b"body", redelivered=False)
    envelope = came.envelope
    onward = Envelope("q", envelope.message_id, {**envelope.headers, "amqp.bare": "true"}, due=NOW)
    if b"x-postdate-" not in properties:  # a field of ours is ours, whoever sent it
        assert properties_of(onward, NOW, "guest") == properties


@given(foreign())
def test_a_message_of_others_that_is_delayed_arrives_as_the_same_envelope(properties: bytes) -> None:
    envelope = decode_message("q", properties, b"body", redelivered=False).envelope
    again = decode_message("q", properties_of(envelope, NOW, "guest"), b"body", redelivered=False).envelope
    assert (again.headers, again.message_id) == (envelope.headers, envelope.message_id)


def test_a_readable_form_that_was_changed_or_removed_is_so_in_the_table() -> None:
    table = b"".join(short_bytes(name) + b"I\0\0\0\5" for name in (b"kept", b"changed", b"removed"))
    came = decode_message("q", struct.pack(">H", 0x2000) + long_bytes(table), b"", redelivered=False)
    headers = {**came.envelope.headers, "changed": "six", "added": "new", "amqp.bare": "true"}
    del headers["removed"]
    properties = properties_of(Envelope("q", "m", headers), NOW, "guest")
    expected = short_bytes(b"kept") + b"I\0\0\0\5"
    for name, value in ((b"changed", b"six"), (b"added", b"new")):
        expected += short_bytes(name) + b"S" + long_bytes(value)
    assert properties == struct.pack(">H", 0x2000) + long_bytes(expected)


@given(st.binary())
@example(b"")
@example(b"\x20\x00\xff\xff\xff\xff")
@example(b"\x30\x80\x00\x00\x00\x00\x02")
@example(b"\x20\x00\x00\x00\x00\x03\x01aZ")
def test_a_message_whose_properties_are_garbage_still_arrives(properties: bytes) -> None:
    came = decode_message("q", properties, b"body", redelivered=True)
    assert came.envelope.body == b"body"
    assert came.envelope.message_id


# --- messages of ours -------------------------------------------------------------------------------------------------

PROPERTY_NAMES = ["x", "user_id", "headers", "expiration", "message_id", "type", "type.base64", "priority", "timestamp"]
ODD_NAMES = [
    *(f"amqp.{name}" for name in [*PROPERTY_NAMES, "delivery_mode"]),
    "CC",
    "BCC",
    "x-postdate-due",
    "x-postdate-headers",
    "é" * 200,
]
OUR_NAMES = st.one_of(TEXT.filter(bool), st.sampled_from(ODD_NAMES))
VALUES_OF_OURS = st.one_of(TEXT, st.sampled_from(["0", "2", "255", "guest", "none", "/w==", "/w", "YQ==", "m"]))
INSTANTS = st.integers(0, 253_402_300_799_999_999).map(from_microseconds)
IDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=250)


@given(IDS.filter(str.strip), st.dictionaries(OUR_NAMES, VALUES_OF_OURS), st.none() | INSTANTS, st.none() | INSTANTS)
@example("m", {"amqp.priority": "07"}, None, None)
@example("m", {"amqp.table": "none"}, NOW, NOW)
@example("m", {"amqp.message_id": "theirs"}, NOW, NOW)
@example("é" * 250, {"amqp.message_id": "none", "amqp.type": "a", "amqp.type.base64": "YQ=="}, NOW, NOW)
def test_an_envelope_arrives_as_it_was_sent(
    message_id: str, headers: dict[str, str], due: datetime | None, expires_at: datetime | None
) -> None:
    sent = Envelope("q", message_id, headers, b"body", expires_at, due)
    came = decode_message("q", properties_of(sent, NOW, "guest"), b"body", redelivered=False)
    assert came == DecodedMessage(sent, None, has_id=True)
    assert came.envelope.headers == headers


@pytest.mark.parametrize("headers", [{"": "x"}, {"a": "\ud800"}, {"\ud800": "a"}, {"a": 1}, {1: "a"}])
def test_headers_that_are_not_text_are_refused(headers: dict) -> None:
    with pytest.raises(InvalidHeaders):
        properties_of(Envelope("q", "m", headers), NOW, "guest")


# --- addresses and frames ---------------------------------------------------------------------------------------------


@given(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=60),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=60),
)
def test_every_exchange_and_key_has_an_address(exchange: str, routing_key: str) -> None:
    assume(max(len(exchange.encode()), len(routing_key.encode())) < 256)
    assert parse_address(exchange_address(exchange, routing_key)) == PublishAddress(exchange, routing_key)


@pytest.mark.parametrize("address", ["exchange:%", "exchange:a/%4", "exchange:a/%ff", "q" * 256])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(QueueNotFound):
        parse_address(address)


@given(st.lists(st.binary(max_size=50), max_size=8), st.data())
def test_frames_arrive_whole_however_the_stream_is_cut(arguments: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(method_frame(n, (60, 80), content) for n, content in enumerate(arguments, 1))
    reader, frames = FrameReader(4_096), []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        frames += reader.frames(stream[:size])
        stream = stream[size:]
    assert [payload[4:] for _, _, payload in frames] == arguments


@pytest.mark.parametrize("garbage", [b"HTTP/1.1 400 Bad", b"AMQP\0\1\0\0", b"\1\0\1\0\0\0\1x\0", b"\1\0\1\xff\0\0\1xx"])
def test_what_is_no_frame_is_refused(garbage: bytes) -> None:
    with pytest.raises(MalformedFrame):
        list(FrameReader(4_096).frames(garbage))

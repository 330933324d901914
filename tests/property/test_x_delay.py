"""What others delay leaves as it came, bit for bit, and comes back from the error queue with all of it."""

import base64
import struct
from contextlib import suppress
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.property.test_rabbitmq_properties import foreign

from postdate.backends.rabbitmq.address import PublishAddress, parse_address
from postdate.backends.rabbitmq.consuming import Delivery
from postdate.backends.rabbitmq.content import ORIGINAL_PROPERTIES, redirect
from postdate.backends.rabbitmq.delays import create_delayed_message, decode_intake_message
from postdate.backends.rabbitmq.properties import properties_of
from postdate.backends.rabbitmq.wire import long_bytes, short_bytes
from postdate.core.recoverability import Host, error_headers
from postdate.errors import InvalidHeaders, InvalidMessage, MessageError
from postdate.messages import DelayedMessage, Envelope, to_envelope
from postdate.operations.error_returns import copy_without_failure

NOW = datetime(2026, 1, 31, 12, 0, 5, 123_456, tzinfo=UTC)
QUEUE = "postdate.intake"


def came(
    properties: bytes, key: bytes = b"orders", exchange: bytes = b"postdate", *, redelivered: bool = False
) -> Envelope:
    delivery = Delivery(1, redelivered, properties, b"body", short_bytes(exchange) + short_bytes(key))
    return decode_intake_message("postdate", QUEUE, delivery).envelope


def delayed(*fields: bytes, key: bytes = b"orders") -> DelayedMessage:
    return create_delayed_message("postdate", came(with_table(*fields), key), NOW)


def with_table(*fields: bytes) -> bytes:
    return struct.pack(">H", 0x2000) + long_bytes(b"".join(fields))


def named(name: str, value: bytes) -> bytes:
    return short_bytes(name.encode()) + value


def text(name: str, value: str) -> bytes:
    return named(name, b"S" + long_bytes(value.encode()))


@given(foreign(), st.booleans())
@example(struct.pack(">H", 0x2080) + long_bytes(named("x-postdate-due", b"l" + bytes(8))) + short_bytes(b"none"), False)
def test_it_leaves_as_it_came(properties: bytes, to_a_queue: bool) -> None:
    try:
        message = create_delayed_message("postdate", came(properties), NOW)
    except MessageError:
        return
    envelope = to_envelope(message)
    if to_a_queue:
        envelope = redirect(envelope, "exchange:/orders")
    assert properties_of(envelope, NOW, "guest") == properties


@given(foreign())
def test_the_error_queue_keeps_all_of_it_and_gives_it_back(properties: bytes) -> None:
    envelope = came(properties)
    headers = error_headers(envelope.headers, InvalidMessage("no"), QUEUE, NOW, Host("postdate"))
    failed = Envelope("error", envelope.message_id, headers, envelope.body)
    sent = properties_of(failed, NOW, "guest")
    assert not int.from_bytes(sent[:2], "big") & 0x0100, "it would expire in the error queue"
    in_error_queue = came(sent, b"error", b"")
    back = copy_without_failure(in_error_queue, QUEUE)
    again = came(properties_of(back, NOW, "guest"), QUEUE.encode(), b"")
    assert again.message_id == envelope.message_id
    assert again.headers[ORIGINAL_PROPERTIES] == envelope.headers[ORIGINAL_PROPERTIES]
    assert again.headers["amqp.routing_key"] == "orders"


@given(st.binary())
def test_what_is_no_table_is_refused_and_kept(content: bytes) -> None:
    envelope = came(b"\x20\x00" + content)
    assert envelope.headers[ORIGINAL_PROPERTIES]
    with suppress(MessageError):
        create_delayed_message("postdate", envelope, NOW)


def test_a_name_of_another_account_is_left_out_as_the_broker_would_refuse_it() -> None:
    properties = struct.pack(">H", 0x0030) + short_bytes(b"type") + short_bytes(b"somebody")
    envelope = to_envelope(create_delayed_message("postdate", came(properties), NOW))
    assert properties_of(envelope, NOW, "guest") == struct.pack(">H", 0x0020) + short_bytes(b"type")
    assert properties_of(envelope, NOW, "somebody") == properties


def test_what_a_quorum_queue_adds_does_not_leave_with_it() -> None:
    count = named("x-delivery-count", b"l" + (3).to_bytes(8, "big"))
    assert came(with_table(text("a", "b"), count), redelivered=True).headers == came(with_table(text("a", "b"))).headers
    assert came(with_table(count), redelivered=True).headers == came(b"\0\0").headers
    assert came(with_table(count)).headers[ORIGINAL_PROPERTIES] != came(b"\0\0").headers[ORIGINAL_PROPERTIES]


def table_of(*fields: bytes) -> bytes:
    return b"F" + long_bytes(b"".join(fields))


def test_what_the_broker_does_to_an_expired_message_is_undone() -> None:
    here = table_of(
        text("reason", "expired"), text("queue", QUEUE), text("exchange", "mine"), text("original-expiration", "50")
    )
    elsewhere = table_of(text("reason", "rejected"), text("queue", "q"))
    own = [text("a", "b"), named("c", b"b\x05")]
    marks = [text(f"x-{which}-death-{what}", QUEUE) for which in ("first", "last") for what in ("queue", "reason")]
    dead = named("x-death", b"A" + long_bytes(here + elsewhere + b"b\x01"))
    envelope = came(with_table(own[0], dead, own[1], *marks), exchange=b"postdate.intake.expired")
    before = named("x-death", b"A" + long_bytes(elsewhere + b"b\x01"))
    as_it_was = struct.pack(">H", 0x2100) + long_bytes(own[0] + before + own[1]) + short_bytes(b"50")
    assert envelope.headers[ORIGINAL_PROPERTIES] == base64.b64encode(as_it_was).decode()
    assert envelope.headers["amqp.exchange"] == "mine"


@pytest.mark.parametrize(
    ("value", "milliseconds"),
    [
        (b"b\x05", 5),
        (b"B\xff", 255),
        (b"s\x01\x00", 256),
        (b"u\xff\xff", 65_535),
        (b"i\xff\xff\xff\xff", 2**32 - 1),
        (b"I\xff\xff\xff\xff", 0),
        (b"l" + (2**40).to_bytes(8, "big"), 2**40),
        (b"f\x3f\xc0\x00\x00", 2),
        (b"d" + struct.pack(">d", 2.0**41), 2**41),
        (b"D\x01\x00\x00\x00\x0f", 2),
        (b"S" + long_bytes(b" 4294967301 "), 2**32 + 5),
        (b"S" + long_bytes(b"1.2"), 2),
        (b"S" + long_bytes(b"-7"), 0),
        (b"d" + struct.pack(">d", float("-1e308")), 0),
    ],
)
def test_every_kind_of_number_is_a_delay_rounded_up(value: bytes, milliseconds: int) -> None:
    assert delayed(named("x-delay", value)).due == NOW + timedelta(milliseconds=milliseconds)


@pytest.mark.parametrize(
    "value",
    [
        b"V",
        b"t\x01",
        b"F" + long_bytes(b""),
        b"T" + bytes(8),
        b"d" + struct.pack(">d", float("nan")),
        b"d" + struct.pack(">d", float("inf")),
        *(b"S" + long_bytes(each.encode()) for each in ("", "1e3", "٣", "5 s", "9" * 5_000)),
    ],
    ids=range(11),
)
def test_what_is_no_number_is_refused(value: bytes) -> None:
    with pytest.raises(InvalidHeaders, match="'x-delay' must be a number of milliseconds"):
        delayed(named("x-delay", value))


@pytest.mark.parametrize(
    ("fields", "destination"),
    [
        ([], "exchange-or-queue:postdate.due/orders"),
        ([text("x-delay-routing-key", "bills")], "bills"),
        ([text("x-delay-routing-key", "exchange:odd")], "exchange:/exchange:odd"),
        ([text("x-delay-routing-key", "exchange-or-queue:x")], "exchange:/exchange-or-queue:x"),
        ([text("x-delay-exchange", "a/b")], "exchange:a%2Fb/orders"),
        ([text("x-delay-exchange", "")], "orders"),
        ([text("x-delay-exchange", "a"), text("x-delay-routing-key", "50%")], "exchange:a/50%25"),
        ([text("x-delay-exchange", "a"), text("x-delay-exchange", "b")], "exchange:a/orders"),
    ],
)
def test_headers_and_routing_key_make_a_destination(fields: list[bytes], destination: str) -> None:
    assert delayed(*fields).destination == destination


def test_a_routing_key_that_is_not_text_is_refused_and_kept() -> None:
    with pytest.raises(InvalidMessage, match="its routing key is not UTF-8"):
        delayed(key=b"\xff")
    assert came(b"\0\0", b"\xff").headers["amqp.routing_key.base64"] == "/w=="


def test_an_exchange_or_a_queue_is_an_address() -> None:
    assert parse_address("exchange-or-queue:a%2Fb/k%25") == PublishAddress("a/b", "k%", or_queue=True)

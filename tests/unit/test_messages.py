"""Messages and the formats in which they travel (rows 10 to 14)."""

import uuid
from datetime import UTC, datetime, timedelta, timezone

import pytest

from postdate import errors, messages
from postdate.backends.msmq.content import decode_headers_xml, encode_headers_xml

DUE = datetime(2026, 1, 31, 12, 0, 5, tzinfo=UTC)
HEADERS = {"plain": "1", "ключ 🔑": "значение", "emoji": "👩\u200d🚀", "empty": "", "space": " \t\r\n x "}


# --- timestamps -------------------------------------------------------------------------------------------------------


def test_a_timestamp_has_colons_and_six_digits_and_a_z_row_14() -> None:
    assert messages.format_timestamp(DUE) == "2026-01-31 12:00:05:000000 Z"
    assert messages.format_timestamp(DUE + timedelta(microseconds=42)) == "2026-01-31 12:00:05:000042 Z"
    assert messages.format_timestamp(datetime(9, 1, 1, tzinfo=UTC)) == "0009-01-01 00:00:00:000000 Z"


def test_a_timestamp_round_trips_to_the_microsecond_row_14() -> None:
    instant = DUE.replace(microsecond=123_456)
    assert messages.parse_timestamp(messages.format_timestamp(instant)) == instant
    assert messages.parse_timestamp(messages.format_timestamp(instant)).utcoffset() == timedelta(0)


def test_a_timestamp_is_in_utc_whatever_zone_it_is_given_in_row_14() -> None:
    kathmandu = timezone(timedelta(hours=5, minutes=45))
    assert messages.format_timestamp(DUE.astimezone(kathmandu)) == "2026-01-31 12:00:05:000000 Z"


def test_separators_of_a_timestamp_are_not_checked_row_14() -> None:
    assert messages.parse_timestamp("2026/01/31T12.00.05.000000+Z") == DUE


@pytest.mark.parametrize(
    "text",
    [
        "",
        "   ",
        "2026-01-31 12:00:05:000000Z",
        "2026-01-31 12:00:05:0000000 Z",
        "2O26-01-31 12:00:05:000000 Z",
        "2026-01-31 12:00:05:00000x Z",
        "٢٠٢٦-01-31 12:00:05:000000 Z",
        "2026-13-31 12:00:05:000000 Z",
        "2026-02-30 12:00:05:000000 Z",
        "2026-01-31 24:00:05:000000 Z",
        "0000-01-31 12:00:05:000000 Z",
    ],
)
def test_a_wrong_length_a_wrong_digit_or_no_such_date_is_a_format_error_row_14(text: str) -> None:
    with pytest.raises(errors.InvalidTimestamp):
        messages.parse_timestamp(text)


def test_a_time_without_a_zone_is_refused() -> None:
    with pytest.raises(errors.InvalidTimestamp, match="time zone"):
        messages.format_timestamp(datetime(2026, 1, 31))  # noqa: DTZ001
    with pytest.raises(errors.InvalidTimestamp, match="must be a datetime"):
        messages.DelayedMessage("m", "tomorrow", "queue")  # type: ignore[arg-type]


def test_a_time_outside_the_calendar_in_utc_is_refused() -> None:
    with pytest.raises(errors.InvalidTimestamp, match="years 1 to 9999"):
        messages.format_timestamp(datetime.max.replace(tzinfo=timezone(timedelta(hours=-5))))


# --- time spans -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("span", "text"),
    [
        (timedelta(seconds=15), "00:00:15"),
        (timedelta(days=31, seconds=1), "31.00:00:01"),
        (timedelta(hours=23, minutes=59, microseconds=1), "23:59:00.0000010"),
        (-timedelta(seconds=1), "-00:00:01"),
        (timedelta(0), "00:00:00"),
    ],
)
def test_a_time_span_has_its_constant_form_and_is_read_back(span: timedelta, text: str) -> None:
    assert messages.format_time_span(span) == text
    assert messages.parse_time_span(text) == span


@pytest.mark.parametrize(
    ("text", "span"),
    [
        ("5", timedelta(days=5)),
        ("-5", timedelta(days=-5)),
        ("1:2", timedelta(hours=1, minutes=2)),
        ("1:2:3", timedelta(hours=1, minutes=2, seconds=3)),
        (" 00:00:01.5 ", timedelta(seconds=1.5)),
        ("00:00:00.0000019", timedelta(microseconds=1)),
    ],
)
def test_a_time_span_is_read_as_dotnet_writes_it(text: str, span: timedelta) -> None:
    assert messages.parse_time_span(text) == span


@pytest.mark.parametrize(
    "text", ["", "soon", "24:00:00", "1:60", "1:2:60", "1:2:3:4", "99999999", "1.5", "--1", "\u0665"]
)
def test_what_is_no_time_span_is_none(text: str) -> None:
    assert messages.parse_time_span(text) is None


# --- headers ----------------------------------------------------------------------------------------------------------


def test_headers_survive_json_row_10() -> None:
    assert messages.decode_headers(messages.encode_headers(HEADERS)) == HEADERS
    assert list(messages.decode_headers(messages.encode_headers(HEADERS))) == list(HEADERS)


def test_headers_survive_the_xml_blob_row_10() -> None:
    assert decode_headers_xml(encode_headers_xml(HEADERS)) == HEADERS


def test_the_xml_blob_is_the_one_of_msmq() -> None:
    blob = encode_headers_xml({"key": "a & b"})
    info = b"<HeaderInfo><Key>key</Key><Value>a &amp; b</Value></HeaderInfo>"
    assert blob.endswith(b"<ArrayOfHeaderInfo>" + info + b"</ArrayOfHeaderInfo>")
    assert blob.startswith(b"<?xml version='1.0' encoding='utf-8'?>")


@pytest.mark.parametrize(
    "tail", [b"\0", b"\0" * 40, b"\r\n", b"\xff\xfe junk", b"</Value></HeaderInfo></ArrayOfHeaderInfo>", b"<a>"]
)
def test_what_stands_behind_the_xml_blob_is_left_out(tail: bytes) -> None:
    """Senders give MSMQ a buffer that may be longer: zeros, or the end of a longer blob that was there before."""
    assert decode_headers_xml(encode_headers_xml(HEADERS) + tail) == HEADERS
    assert decode_headers_xml(b"<ArrayOfHeaderInfo />" + tail) == {}


def test_a_character_that_xml_cannot_carry_is_refused() -> None:
    with pytest.raises(errors.InvalidHeaders, match="XML"):
        encode_headers_xml({"bell": "\a"})


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"<ArrayOfHeaderInfo>",
        b"<Headers/>",
        b"<!DOCTYPE x [<!ENTITY a 'b'>]><ArrayOfHeaderInfo/>",
        b"<ArrayOfHeaderInfo><HeaderInfo><Value>x</Value></HeaderInfo></ArrayOfHeaderInfo>",
        b"<ArrayOfHeaderInfo>" + b"<HeaderInfo><Key>a</Key></HeaderInfo>" * 2 + b"</ArrayOfHeaderInfo>",
    ],
)
def test_a_blob_that_is_no_header_blob_is_refused(blob: bytes) -> None:
    with pytest.raises(errors.InvalidHeaders):
        decode_headers_xml(blob)


@pytest.mark.parametrize("text", ["", "[]", "1", '{"a": 1}', '{"a": null}', "{", b"\xff"])
def test_json_that_is_no_header_object_is_refused(text: str | bytes) -> None:
    with pytest.raises(errors.InvalidHeaders):
        messages.decode_headers(text)


@pytest.mark.parametrize("headers", [{"": "x"}, {"a": 1}, {1: "a"}, {"a": "\ud800"}, {"\ud800": "a"}])
def test_headers_that_no_format_can_carry_are_refused(headers: dict) -> None:
    with pytest.raises(errors.InvalidHeaders):
        messages.DelayedMessage("m", DUE, "queue", headers)


def test_size_counts_bytes() -> None:
    assert messages.size_in_bytes("{}", b"abc") == 5
    assert messages.size_in_bytes("🕰", b"") == 4


def test_what_is_too_large_is_told_with_its_size_and_the_limit() -> None:
    message = messages.DelayedMessage("m", DUE, "queue", {}, b"x" * 2_000)
    assert messages.encode_for_store(message, 2_002) == "{}"
    with pytest.raises(errors.MessageTooLarge, match="message 'm' has 2,002 bytes, this store takes 2,001; keep large"):
        messages.encode_for_store(message, 2_001)
    envelope = messages.Envelope("queue", "m", {}, b"x" * 2_000)
    assert messages.too_large_error(envelope, "{}", 2_002) is None
    told = "message 'm' to 'queue' has 2,002 bytes, this transport takes 2,001; keep large content elsewhere"
    assert str(messages.too_large_error(envelope, "{}", 2_001)).startswith(told)


@pytest.mark.parametrize("header", [messages.Headers.FAILED_QUEUE, messages.Headers.PROCESSING_ENDED])
def test_a_copy_for_the_error_or_audit_queue_has_room_for_what_it_says_besides(header: str) -> None:
    limit, room = 1_000, 256 * 1024
    copy = messages.Envelope("error", "m", {header: "x"}, b"x" * (limit + room - 2))
    assert messages.too_large_error(copy, "{}", limit) is None
    assert "takes 263,144" in str(messages.too_large_error(copy, "{} ", limit))
    delayed = messages.DelayedMessage("m", DUE, "queue", {header: "x"}, copy.body)
    with pytest.raises(errors.MessageTooLarge, match="this store takes 1,000"):  # it keeps no such copies
        messages.encode_for_store(delayed, limit)


def test_errors_say_their_sentence_themselves() -> None:
    rule = "stored before: an id is used once, even if the first message has ended"
    assert str(errors.DuplicateMessage.of("a")) == f"message 'a' was {rule}"
    assert str(errors.DuplicateMessage.of("a", "b")) == f"messages 'a', 'b' were {rule}"
    assert str(errors.ClaimLost.of("a")) == "message 'a' is not claimed by this process any more"
    assert str(errors.ClaimLost.of("a", queue="q", reason="late")) == (
        "message 'a' in 'q' is not claimed by this process any more: late"
    )
    assert str(errors.ClaimLost.of("a", "b")) == "one of 2 messages is not claimed by this process any more"
    assert str(errors.QueueNotFound.of("q")) == "there is no queue 'q'; create it: postdate setup --queue q"
    assert str(errors.QueueNotFound.of("q", "a", database="t.db")) == (
        "t.db has no queue 'q' for message 'a'; create it: postdate setup --queue q"
    )


# --- messages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", ["", " ", "x" * 251, "a\0b", "\ud800", 7])
def test_a_message_id_that_no_store_can_hold_is_refused(bad) -> None:
    with pytest.raises(errors.InvalidMessage, match="message id"):
        messages.DelayedMessage(bad, DUE, "queue")
    with pytest.raises(errors.InvalidMessage, match="message id"):
        messages.Envelope("queue", bad)


@pytest.mark.parametrize("bad", ["", " ", "x" * 201])
def test_a_destination_that_no_store_can_hold_is_refused(bad: str) -> None:
    with pytest.raises(errors.InvalidMessage, match="destination"):
        messages.DelayedMessage("m", DUE, bad)


def test_a_body_must_be_bytes_and_an_expiry_not_before_the_due_time() -> None:
    with pytest.raises(errors.InvalidMessage, match="bytes"):
        messages.DelayedMessage("m", DUE, "queue", body="text")  # type: ignore[arg-type]
    with pytest.raises(errors.InvalidMessage, match="expire"):
        messages.DelayedMessage("m", DUE, "queue", expires_at=DUE - timedelta(microseconds=1))
    assert messages.DelayedMessage("m", DUE, "queue", expires_at=DUE).expires_at == DUE


def test_messages_can_be_members_of_sets() -> None:
    assert (
        len({messages.DelayedMessage("m", DUE, "q", {"a": "1"}), messages.DelayedMessage("m", DUE, "q", {"a": "1"})})
        == 1
    )
    assert len({messages.Envelope("q", "m", {"a": "1"}), messages.Envelope("q", "m", {"a": "1"})}) == 1


def test_new_ids_are_uuids_of_version_7_and_grow() -> None:
    ids = [messages.new_message_id() for _ in range(1000)]
    assert len(set(ids)) == 1000
    assert {uuid.UUID(each).version for each in ids} == {7}
    milliseconds = [uuid.UUID(each).int >> 80 for each in ids]
    assert milliseconds == sorted(milliseconds)


# --- through a timeouts queue -----------------------------------------------------------------------------------------


def test_a_message_survives_the_timeouts_queue() -> None:
    message = messages.DelayedMessage("m", DUE, "billing@machine", HEADERS, b"\0body", DUE + timedelta(hours=1))
    arrived = messages.from_delay_headers("m", messages.delay_headers(message), b"\0body")
    expiry = {messages.Headers.EXPIRES_AT: messages.format_timestamp(DUE + timedelta(hours=1))}
    assert (arrived.due, arrived.destination, arrived.body) == (DUE, "billing@machine", b"\0body")
    assert arrived.headers == {**HEADERS, **expiry}
    assert arrived.expires_at == message.expires_at


def test_the_headers_of_the_timeouts_queue_are_those_of_the_specification() -> None:
    headers = messages.delay_headers(messages.DelayedMessage("m", DUE, "Sales@MACHINE1"))
    prefix = "NServiceBus.Timeouts.Properties."
    assert headers[f"{prefix}NServiceBus.Timeout.Destination"] == "Sales@MACHINE1"
    assert headers[f"{prefix}NServiceBus.Timeout.Expire"] == "2026-01-31 12:00:05:000000 Z"
    assert headers[f"{prefix}DeliverAt"] == "2026-01-31 12:00:05:000000 Z"


def test_internal_headers_do_not_leak_row_11() -> None:
    message = messages.DelayedMessage(
        "m", DUE, "q", {**HEADERS, f"{messages.Headers.TIMEOUT_PROPERTIES_PREFIX}TimeToBeReceived": "1"}
    )
    assert messages.to_envelope(message).headers == HEADERS


def test_the_id_is_the_same_when_it_is_due_row_12() -> None:
    headers = {messages.Headers.MESSAGE_ID: "application id"}
    envelope = messages.to_envelope(messages.DelayedMessage("native id", DUE, "q", headers))
    assert (envelope.message_id, envelope.headers[messages.Headers.MESSAGE_ID]) == ("native id", "application id")


def test_a_header_with_the_reserved_prefix_cannot_be_sent_with_a_delay() -> None:
    message = messages.DelayedMessage("m", DUE, "q", {messages.Headers.TIMEOUT_EXPIRE: "mine"})
    with pytest.raises(errors.InvalidHeaders, match="reserved"):
        messages.delay_headers(message)


@pytest.mark.parametrize("missing", [messages.Headers.TIMEOUT_DESTINATION, messages.Headers.TIMEOUT_EXPIRE])
def test_what_has_no_destination_or_due_time_is_no_delayed_message(missing: str) -> None:
    headers = messages.delay_headers(messages.DelayedMessage("m", DUE, "q"))
    del headers[missing]
    with pytest.raises(errors.NotADelayedMessage, match=missing):
        messages.from_delay_headers("m", headers, b"")


def test_a_malformed_due_time_is_an_error_of_the_message() -> None:
    headers = {
        **messages.delay_headers(messages.DelayedMessage("m", DUE, "q")),
        messages.Headers.TIMEOUT_EXPIRE: "tomorrow",
    }
    with pytest.raises(errors.MessageError):
        messages.from_delay_headers("m", headers, b"")


def test_the_expiry_travels_as_a_header_unless_the_message_has_one() -> None:
    expires_at = DUE + timedelta(seconds=1)
    assert messages.to_envelope(messages.DelayedMessage("m", DUE, "q", expires_at=expires_at)).headers == {
        messages.Headers.EXPIRES_AT: "2026-01-31 12:00:06:000000 Z"
    }
    own = {messages.Headers.EXPIRES_AT: "2026-01-31 12:00:05:500000 Z"}
    assert messages.to_envelope(messages.DelayedMessage("m", DUE, "q", own, expires_at=expires_at)).headers == own

"""Whatever can be written is read back as it was (rows 10, 14)."""

import string
from datetime import UTC, datetime, timedelta, timezone

from hypothesis import assume, example, given
from hypothesis import strategies as st

from postdate import messages
from postdate.backends.msmq.content import decode_headers_xml, encode_headers_xml
from postdate.clock import from_microseconds, to_microseconds
from postdate.core.expiry import discard_reason
from postdate.core.recoverability import Host, Recoverability, decide_handling_failure, error_headers, retry_delay
from postdate.errors import InvalidHeaders, InvalidMessage, InvalidTimestamp

ZONES = st.integers(-14 * 60, 14 * 60).map(lambda minutes: timezone(timedelta(minutes=minutes)))
INSTANTS = st.datetimes(datetime(2, 1, 1), datetime(9998, 12, 31), timezones=ZONES | st.just(UTC))  # noqa: DTZ001
TEXTS = st.text(st.characters(exclude_categories=("Cs",)))
HEADERS = st.dictionaries(TEXTS.filter(bool), TEXTS, max_size=8)
ADDRESSES = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=60).filter(str.strip)


@given(INSTANTS)
def test_timestamps_round_trip_row_14(instant: datetime) -> None:
    text = messages.format_timestamp(instant)
    assert len(text) == 28
    assert messages.parse_timestamp(text) == instant
    assert messages.parse_timestamp(text).utcoffset() == timedelta(0)


@given(st.text(max_size=30) | st.text(string.digits + " -:Z", min_size=28, max_size=28))
def test_any_text_is_a_timestamp_or_a_format_error_row_14(text: str) -> None:
    try:
        instant = messages.parse_timestamp(text)
    except InvalidTimestamp:
        return
    assert len(text) == 28
    assert [c for c in messages.format_timestamp(instant) if c.isdigit()] == [c for c in text if c.isdigit()][:20]


@given(INSTANTS)
def test_microseconds_since_1970_round_trip(instant: datetime) -> None:
    assert from_microseconds(to_microseconds(instant)) == instant


@given(INSTANTS, INSTANTS)
def test_microseconds_since_1970_keep_the_order(one: datetime, other: datetime) -> None:
    assert (to_microseconds(one) < to_microseconds(other)) == (one < other)


@given(st.timedeltas(timedelta(days=-10_000_000), timedelta(days=10_000_000)))
def test_time_spans_round_trip(span: timedelta) -> None:
    assert messages.parse_time_span(messages.format_time_span(span)) == span


@given(st.text() | st.text(string.digits + ".:- ", max_size=30))
def test_any_text_is_a_time_span_or_none(text: str) -> None:
    span = messages.parse_time_span(text)
    assert span is None or messages.parse_time_span(messages.format_time_span(span)) == span


@given(HEADERS)
def test_headers_round_trip_through_json_row_10(headers: dict[str, str]) -> None:
    assert messages.decode_headers(messages.encode_headers(headers)) == headers


@given(HEADERS, st.binary())
@example({"\r\n\t ": "\r", "a": "\r\n", "b": " "}, b"\0")
@example({"a": "</ArrayOfHeaderInfo>"}, b"</ArrayOfHeaderInfo>")
def test_headers_round_trip_through_xml_or_are_refused_row_10(headers: dict[str, str], behind: bytes) -> None:
    try:
        blob = encode_headers_xml(headers)
    except InvalidHeaders:
        carried = {"\t", "\n", "\r"}
        text = "".join((*headers, *headers.values()))
        assert any((c < " " and c not in carried) or c in "\ufffe\uffff" for c in text)
        return
    assert decode_headers_xml(blob + behind) == headers


@given(
    st.binary() | st.text().map(lambda text: f"<ArrayOfHeaderInfo>{text}</ArrayOfHeaderInfo>".encode(errors="replace"))
)
def test_any_blob_is_headers_or_refused(blob: bytes) -> None:
    for decode in (messages.decode_headers, decode_headers_xml):
        try:
            headers = decode(blob)
        except InvalidHeaders:
            continue
        assert all(isinstance(text, str) for pair in headers.items() for text in pair)


@given(
    ADDRESSES, ADDRESSES, INSTANTS, HEADERS, st.binary(), st.none() | st.timedeltas(timedelta(0), timedelta(days=99))
)
def test_a_delayed_message_round_trips_through_a_timeouts_queue_rows_10_to_12(
    message_id: str, destination: str, due: datetime, headers: dict[str, str], body: bytes, lives: timedelta | None
) -> None:
    assume(not any(name.startswith(messages.Headers.TIMEOUT_PROPERTIES_PREFIX) for name in headers))
    assume(messages.Headers.EXPIRES_AT not in headers)
    message = messages.DelayedMessage(
        message_id, due, destination, headers, body, None if lives is None else due + lives
    )
    arrived = messages.from_delay_headers(message_id, messages.delay_headers(message), body)
    assert (arrived.due, arrived.destination, arrived.expires_at) == (message.due, destination, message.expires_at)
    envelope, direct = messages.to_envelope(arrived), messages.to_envelope(message)
    assert envelope == direct
    assert not any(name.startswith(messages.Headers.TIMEOUT_PROPERTIES_PREFIX) for name in envelope.headers)


@given(st.text(), st.text())
def test_ids_and_destinations_are_stored_as_they_are_or_refused(message_id: str, destination: str) -> None:
    try:
        message = messages.DelayedMessage(message_id, datetime(2026, 1, 31, tzinfo=UTC), destination)
    except InvalidMessage:
        return
    assert (message.message_id, message.destination) == (message_id, destination)
    assert message_id.encode().decode() == message_id


@given(
    INSTANTS, st.timedeltas(timedelta(microseconds=1), timedelta(days=99)), st.timedeltas(timedelta(0), timedelta(99))
)
def test_a_message_is_discarded_strictly_after_its_time_rows_65_to_68(
    sent: datetime, lives: timedelta, later: timedelta
) -> None:
    headers = {
        messages.Headers.TIME_SENT: messages.format_timestamp(sent),
        messages.Headers.TIME_TO_BE_RECEIVED: messages.format_time_span(lives),
    }
    assert (discard_reason(headers, sent + later) is not None) == (later > lives)


@given(st.text(st.characters()), HEADERS)
def test_whatever_an_exception_says_its_error_copy_can_be_carried_row_39(text: str, headers: dict[str, str]) -> None:
    now = datetime(2026, 1, 31, tzinfo=UTC)
    copy = error_headers(headers, ValueError(text), "sales", now, Host("sales"))
    messages.DelayedMessage("m", now, "q", copy)
    assert messages.decode_headers(messages.encode_headers(copy)) == copy


@given(st.integers(0, 8), st.integers(0, 8), st.integers(1, 1000))
def test_the_number_of_attempts_is_what_the_settings_say_row_109(immediate: int, delayed: int, seconds: int) -> None:
    policy = Recoverability(
        immediate_retries=immediate, delayed_retries=delayed, time_increase=timedelta(seconds=seconds)
    )
    now, attempts, headers = datetime(2026, 1, 31, tzinfo=UTC), 0, dict[str, str]()
    while True:
        failures = 0
        while True:
            attempts, failures = attempts + 1, failures + 1
            decision = decide_handling_failure(OSError(), failures, headers, policy, now)
            if type(decision).__name__ != "ImmediateRetry":
                break
        if type(decision).__name__ == "MoveToError":
            break
        headers = {messages.Headers.DELAYED_RETRIES: str(int(headers.get(messages.Headers.DELAYED_RETRIES, "0")) + 1)}
    assert attempts == (immediate + 1) * (delayed + 1)


@given(st.integers(0, 10**9))
def test_retry_delays_never_shrink_and_never_exceed_a_minute(failures: int) -> None:
    assert retry_delay(failures) <= retry_delay(failures + 1) <= timedelta(minutes=1)

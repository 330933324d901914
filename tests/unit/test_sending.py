"""From a message of the application to what is sent or stored (rows 3 to 9, 13, 75)."""

import inspect
import re
from datetime import UTC, datetime, timedelta, timezone
from typing import Any, get_type_hints

import pytest

from postdate import (
    BlockingEndpoint,
    DelayedMessage,
    Endpoint,
    Envelope,
    HandlerContext,
    Headers,
    MemoryTransport,
    SendOptions,
)
from postdate.client.client import connect
from postdate.clock import LATEST
from postdate.endpoint.outgoing import delayed_message_of, outgoing_message, sender_headers, timeouts_queue_envelope
from postdate.endpoint.plain_handlers import BlockingHandlerContext
from postdate.endpoint.send_options import SendKeywords
from postdate.errors import DelayConflict, InvalidHeaders, InvalidMessage, InvalidTimestamp
from postdate.testing import EndpointTest, VirtualClock

NOW = datetime(2026, 1, 31, 12, 0, 5, tzinfo=UTC)
SECOND = timedelta(seconds=1)
CONTENT = {Headers.ENCLOSED_MESSAGE_TYPES: "Sales.Pay"}
SENDER = sender_headers("sales", "sales")


def send(**options) -> Envelope | DelayedMessage:
    return outgoing_message(SENDER, CONTENT, b"body", "billing", SendOptions(**options), VirtualClock(NOW))


@pytest.mark.parametrize("sends", [Endpoint, BlockingEndpoint, HandlerContext, BlockingHandlerContext, EndpointTest])
def test_the_fields_of_its_options_are_keywords_of_every_send(sends: type) -> None:
    *_, keywords = inspect.signature(sends.send).parameters.values()
    assert (keywords.kind, keywords.annotation) == (inspect.Parameter.VAR_KEYWORD, "Unpack[SendKeywords]")
    assert get_type_hints(SendKeywords) == get_type_hints(SendOptions)
    assert {each.default for each in inspect.signature(SendOptions).parameters.values()} == {None}


@pytest.mark.parametrize(
    ("keyword", "hint"),
    [
        ("delai", "use delay"),
        ("countdown", "use delay"),
        ("eta", "use deliver_at"),
        ("name", "use @postdate.message(name) above the class"),
        ("x", "it has destination, delay, "),
    ],
)
async def test_a_keyword_that_cannot_be_is_told(keyword: str, hint: str) -> None:
    wrong: dict[str, Any] = {keyword: SECOND}
    text = re.escape(f"send() has no keyword {keyword!r}; {hint}")
    with pytest.raises(TypeError, match=text):
        await Endpoint("sales", transport=MemoryTransport()).send(b"", **wrong)
    with pytest.raises(TypeError, match=text):
        await connect("memory:").send(b"", **wrong)


def test_a_delay_counts_from_now_row_1() -> None:
    message = send(delay=2 * SECOND)
    assert isinstance(message, DelayedMessage)
    assert (message.due, message.destination, message.body) == (NOW + 2 * SECOND, "billing", b"body")


def test_an_absolute_time_is_the_due_time_row_3() -> None:
    zone = timezone(timedelta(hours=-3, minutes=-30))
    message = send(deliver_at=(NOW + 5 * SECOND).astimezone(zone))
    assert isinstance(message, DelayedMessage)
    assert (message.due, message.due.utcoffset()) == (NOW + 5 * SECOND, timedelta(0))


def test_a_time_in_the_past_is_sent_at_once_row_4() -> None:
    assert isinstance(send(deliver_at=NOW - timedelta(hours=1)), Envelope)


def test_a_zero_delay_is_sent_at_once_row_5() -> None:
    assert isinstance(send(delay=timedelta(0)), Envelope)


def test_a_negative_delay_is_refused_row_5() -> None:
    with pytest.raises(InvalidMessage, match="negative"):
        SendOptions(delay=-SECOND)


@pytest.mark.parametrize(
    "slip",
    [
        {"destination": 5},
        {"delay": 5},
        {"deliver_at": 5},
        {"expires_at": 5},
        {"time_to_be_received": 5},
        {"headers": 5},
        {"message_id": 5},
        {"zone": 5, "deliver_at": "2030-01-01 09:00"},
        {"window": 5},
        {"spread": 5},
    ],
    ids=lambda slip: next(iter(slip)),
)
def test_an_option_of_another_type_is_refused_by_name(slip: dict[str, Any]) -> None:
    with pytest.raises((InvalidMessage, InvalidTimestamp), match=next(iter(slip)).replace("_", ".") + ".*int"):
        SendOptions(**slip)


def test_delay_and_absolute_time_exclude_each_other_row_6() -> None:
    with pytest.raises(DelayConflict, match="deliver_at"):
        SendOptions(delay=SECOND, deliver_at=NOW)


def test_options_used_twice_delay_both_messages_row_8() -> None:
    options = SendOptions(delay=SECOND)
    sent = [outgoing_message(SENDER, CONTENT, b"", "q", options, VirtualClock(NOW)) for _ in range(2)]
    assert all(isinstance(message, DelayedMessage) for message in sent)
    assert len({message.message_id for message in sent}) == 2


def test_a_delayed_message_says_when_it_is_due_row_13() -> None:
    assert send(delay=SECOND).headers[Headers.DELIVER_AT] == "2026-01-31 12:00:06:000000 Z"
    assert send(deliver_at=NOW - SECOND).headers[Headers.DELIVER_AT] == "2026-01-31 12:00:04:000000 Z"
    assert Headers.DELIVER_AT not in send().headers


def test_a_due_time_that_is_set_already_is_not_overwritten_row_13() -> None:
    assert send(delay=SECOND, headers={Headers.DELIVER_AT: "mine"}).headers[Headers.DELIVER_AT] == "mine"


def test_a_delay_with_a_time_to_be_received_is_refused_by_the_name_of_the_type_row_75() -> None:
    with pytest.raises(DelayConflict, match=r"Sales\.Pay"):
        send(delay=SECOND, time_to_be_received=SECOND)
    with pytest.raises(DelayConflict, match=r"Sales\.Pay"):
        send(deliver_at=NOW, headers={Headers.TIME_TO_BE_RECEIVED: "00:00:01"})


def test_a_time_to_be_received_is_a_header_row_66() -> None:
    assert send(time_to_be_received=15 * SECOND).headers[Headers.TIME_TO_BE_RECEIVED] == "00:00:15"


@pytest.mark.parametrize("span", [timedelta(0), -SECOND])
def test_a_time_to_be_received_must_be_above_zero_row_74(span: timedelta) -> None:
    with pytest.raises(InvalidMessage, match="above zero"):
        SendOptions(time_to_be_received=span)


@pytest.mark.parametrize("name", ["delay", "time_to_be_received"])
def test_a_duration_must_be_one(name: str) -> None:
    with pytest.raises(InvalidMessage, match="timedelta"):
        SendOptions(**{name: 5})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["deliver_at", "expires_at"])
def test_a_time_must_have_a_zone(name: str) -> None:
    with pytest.raises(InvalidTimestamp, match="time zone"):
        SendOptions(**{name: datetime(2026, 1, 31)})  # type: ignore[arg-type]  # noqa: DTZ001


def test_a_delay_beyond_the_calendar_ends_with_it() -> None:
    """``timedelta.max`` says never, as it does for a time to be received; it was refused before issue 14."""
    assert send(delay=timedelta.max).due == LATEST


@pytest.mark.parametrize("field", ["destination", "message_id"])
@pytest.mark.parametrize("value", ["", " ", "x" * 251, 5])
def test_a_destination_and_an_id_must_be_something(field: str, value: object) -> None:
    with pytest.raises(InvalidMessage, match=field.replace("_", " ")):
        SendOptions(**{field: value})  # type: ignore[arg-type]


def test_a_header_with_the_reserved_prefix_is_refused_by_its_name_wherever_the_message_would_wait() -> None:
    own = {Headers.TIMEOUT_PROPERTIES_PREFIX + "Mine": "1"}
    for timing in ({"delay": SECOND}, {"deliver_at": NOW - SECOND}):
        with pytest.raises(InvalidHeaders, match=r"Properties\.Mine"):
            send(headers=own, **timing)
    with pytest.raises(InvalidHeaders, match=r"Properties\.Mine"):  # stored in a transaction of the application
        delayed_message_of(send(headers=own), VirtualClock(NOW))


def test_an_absolute_expiry_goes_with_a_delay() -> None:
    message = send(delay=SECOND, expires_at=NOW + 2 * SECOND)
    assert message.expires_at == NOW + 2 * SECOND
    assert message.headers[Headers.EXPIRES_AT] == "2026-01-31 12:00:07:000000 Z"
    with pytest.raises(InvalidMessage, match="expire"):
        send(delay=2 * SECOND, expires_at=NOW + SECOND)


def test_a_message_says_who_sent_it_and_its_own_headers_win() -> None:
    headers = send(headers={Headers.CORRELATION_ID: "mine"}, message_id="m-1").headers
    assert headers[Headers.MESSAGE_ID] == headers[Headers.CONVERSATION_ID] == "m-1"
    assert headers[Headers.CORRELATION_ID] == "mine"
    assert headers[Headers.ORIGINATING_ENDPOINT] == headers[Headers.REPLY_TO_ADDRESS] == "sales"
    assert headers[Headers.TIME_SENT] == "2026-01-31 12:00:05:000000 Z"
    assert headers[Headers.MESSAGE_INTENT] == "Send"


def test_who_only_sends_asks_for_no_replies() -> None:
    message = outgoing_message(sender_headers("sales", None), {}, b"", "q", SendOptions(), VirtualClock(NOW))
    assert Headers.REPLY_TO_ADDRESS not in message.headers


def test_bad_headers_are_refused_when_sending() -> None:
    with pytest.raises(InvalidHeaders):
        send(headers={"a": 1})


def test_through_the_timeouts_queue_a_message_keeps_id_and_body_row_12() -> None:
    message = send(delay=SECOND, message_id="m-1")
    assert isinstance(message, DelayedMessage)
    envelope = timeouts_queue_envelope(message, "sales.timeouts")
    assert (envelope.destination, envelope.message_id, envelope.body) == ("sales.timeouts", "m-1", b"body")
    assert envelope.headers[Headers.TIMEOUT_DESTINATION] == "billing"

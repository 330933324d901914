"""Delayed sends on every pair of queues and store, in real time: rows 1 to 14.

What rows 5, 6 and 7 refuse is refused before any queue is asked for anything; here it is shown that nothing has left.
"""

from datetime import timedelta
from typing import Any

import pytest
from tests.integration.endpoints.places import MILLISECOND, Pay, Place, now
from tests.waiting import until

from postdate import Envelope, HandlerContext, Headers, Recoverability
from postdate.endpoint.message_types import type_name
from postdate.errors import DelayConflict, InvalidMessage
from postdate.messages import format_timestamp

SOON = 50 * MILLISECOND
MAY_LAG = timedelta(seconds=1)  # of the clock of a store that is followed
HOUR = timedelta(hours=1)


async def test_a_message_delayed_to_oneself_is_handled_when_due_and_never_earlier_row_1(place: Place) -> None:
    async with place.endpoint() as endpoint:
        sent = now()
        await endpoint.send(Pay(1), delay=SOON)
        (came,) = await place.handles(1)
    assert came.message == Pay(1)
    assert came.context.due is not None
    assert sent + SOON - MAY_LAG <= came.context.due < came.at


async def test_a_message_delayed_to_another_endpoint_is_in_its_queue_and_not_in_ones_own_row_2(place: Place) -> None:
    billing = place.queue("billing")
    await place.transport.create_queues([billing])
    async with place.endpoint() as endpoint:
        sent = now()
        id_ = await endpoint.send(Pay(1), destination=billing, delay=SOON)
        envelope = await place.take(billing)
        assert now() - sent > SOON
        await place.is_empty(place.name, billing, f"{place.name}.timeouts")
    assert envelope.message_id == id_
    assert place.handled == []


async def test_an_absolute_due_time_is_kept_to_the_microsecond_rows_3_14(place: Place) -> None:
    async with place.endpoint() as endpoint:
        due = now() + SOON
        due = due.replace(microsecond=due.microsecond // 10 * 10 + 7)
        await endpoint.send(Pay(1), deliver_at=due)
        (came,) = await place.handles(1)
    assert came.context.due == due < came.at
    assert came.context.headers[Headers.DELIVER_AT] == format_timestamp(due)


async def test_a_due_time_in_the_past_and_no_delay_at_all_are_delivered_at_once_rows_4_5(place: Place) -> None:
    async with place.endpoint() as endpoint:
        await endpoint.send(Pay(1), deliver_at=now() - HOUR)
        await endpoint.send(Pay(2), delay=timedelta(0))
        came = await place.handles(2)
        assert await place.waiting() == 0
        assert await place.store.history(came[0].context.message_id) == []  # it never was in the store
    assert sorted(each.message.amount for each in came) == [1, 2]


async def test_what_cannot_be_is_refused_and_nothing_leaves_rows_5_6_7(place: Place) -> None:
    later: Any = {"deliver_at": now() + SOON, "delay": SOON}
    async with place.endpoint() as endpoint:
        with pytest.raises(InvalidMessage, match="negative"):
            await endpoint.send(Pay(), delay=-timedelta(microseconds=1))
        for options in (later, dict(reversed(later.items()))):
            with pytest.raises(DelayConflict, match="exclude each other"):
                await endpoint.send(Pay(), **options)
        with pytest.raises(TypeError, match="delay"):
            await endpoint.publish(Pay(), delay=SOON)  # pyright: ignore[reportCallIssue]
        assert await place.waiting() == 0
        await place.is_empty(place.name, f"{place.name}.timeouts")
    assert place.handled == []


async def test_options_used_twice_delay_both_messages_row_8(place: Place) -> None:
    options: Any = {"delay": SOON, "headers": {"own": "1"}}
    async with place.endpoint() as endpoint:
        sent = now()
        ids = {await endpoint.send(Pay(number), **options) for number in (1, 2)}
        came = await place.handles(2)
    assert {each.context.message_id for each in came} == ids
    assert min(each.at for each in came) > sent + SOON


async def test_what_is_sent_while_handling_a_delayed_message_is_not_delayed_rows_7_9(place: Place) -> None:
    billing, replies = place.queue("billing"), place.queue("replies")
    await place.transport.create_queues([billing, replies])

    async def handle(message: Pay, context: HandlerContext) -> None:
        with pytest.raises(TypeError, match="delay"):
            await context.reply(Pay(3), delay=HOUR)  # pyright: ignore[reportCallIssue]
        await context.reply(Pay(3))
        await context.send(Pay(2), destination=billing)

    async with place.endpoint(handle) as endpoint:
        await endpoint.send(Pay(1), delay=SOON, headers={Headers.REPLY_TO_ADDRESS: replies})
        left = [await place.take(queue) for queue in (billing, replies)]
        await place.nothing_waits()
    assert not [each for each in left if Headers.DELIVER_AT in each.headers or each.due is not None]


async def test_the_headers_of_a_delayed_message_are_exactly_those_of_its_send_rows_10_to_13(place: Place) -> None:
    own = {"ключ 🔑": "значение 👩\u200d🚀", "empty": "", "lines": 'a\nb\t"c"\''}
    async with place.endpoint() as endpoint:
        before = now()
        id_ = await endpoint.send(Pay(1), delay=SOON, headers=own)
        after = now()
        (came,) = await place.handles(1)
    headers = dict(came.context.headers)
    sent = headers.pop(Headers.TIME_SENT)
    assert format_timestamp(before - MAY_LAG) <= sent <= format_timestamp(after)
    assert came.context.due is not None
    assert headers == {
        **own,
        Headers.MESSAGE_ID: id_,
        Headers.CORRELATION_ID: id_,
        Headers.CONVERSATION_ID: id_,
        Headers.MESSAGE_INTENT: "Send",
        Headers.ORIGINATING_ENDPOINT: place.name,
        Headers.ORIGINATING_MACHINE: endpoint.host.machine,
        Headers.REPLY_TO_ADDRESS: place.name,
        Headers.ENCLOSED_MESSAGE_TYPES: type_name(Pay),
        Headers.CONTENT_TYPE: "application/json",
        Headers.DELIVER_AT: format_timestamp(came.context.due),
    }


async def test_a_delivery_time_that_is_set_already_is_not_overwritten_row_13(place: Place) -> None:
    async with place.endpoint() as endpoint:
        preset = format_timestamp(now() - HOUR)
        await endpoint.send(Pay(1), delay=SOON, headers={Headers.DELIVER_AT: preset})
        (came,) = await place.handles(1)
    assert came.context.headers[Headers.DELIVER_AT] == preset
    assert came.context.due is not None
    assert came.context.due > now() - HOUR / 2


@pytest.mark.parametrize("wrong", ["2026-01-31 12:00:05:00000 Z", "2026-01-31 12:00:0x:000000 Z"])
async def test_a_malformed_due_time_goes_to_the_error_queue_at_once_row_14(place: Place, wrong: str) -> None:
    timeouts = f"{place.name}.timeouts"
    headers = {Headers.TIMEOUT_DESTINATION: place.name, Headers.TIMEOUT_EXPIRE: wrong, "own": "1"}
    await place.put(timeouts, Envelope(timeouts, "m-1", headers, b"body"))
    async with place.endpoint():
        copy = await place.take(place.error)
        assert await place.waiting() == 0
    assert (copy.message_id, copy.body) == ("m-1", b"body")
    assert {key: copy.headers[key] for key in headers} == headers
    assert copy.headers[Headers.FAILED_QUEUE] == timeouts
    assert copy.headers[Headers.ERROR_CODE] == "invalid_timestamp"


async def test_a_due_time_of_others_is_kept_to_the_microsecond_and_does_not_leak_rows_11_14(place: Place) -> None:
    """As any other software puts a delayed message into the queue: with the headers of the specification alone."""
    timeouts = f"{place.name}.timeouts"
    due = now() + SOON
    headers = {Headers.TIMEOUT_DESTINATION: place.name, Headers.TIMEOUT_EXPIRE: format_timestamp(due), "own": "1"}
    await place.put(timeouts, Envelope(timeouts, "m-1", headers, b"body"))
    async with place.endpoint():
        (came,) = await place.handles(1)
    assert (came.message, came.context.message_id, dict(came.context.headers)) == (b"body", "m-1", {"own": "1"})
    assert came.context.due == due < came.at


async def test_another_message_under_a_used_id_is_an_error_of_the_handler_that_delays_it(place: Place) -> None:
    """Through a timeouts queue, of the message itself: there nothing is dropped, either."""

    async def handle(message: Pay, context: HandlerContext) -> None:
        body = b"first" if message.amount == 1 else b"second"
        await context.send(body, destination=place.name, delay=timedelta(hours=1), message_id="mine")

    endpoint = place.endpoint(handle, recoverability=Recoverability(immediate_retries=0, delayed_retries=0))
    async with endpoint:
        await endpoint.send(b"first", destination=place.name, delay=timedelta(hours=1), message_id="mine")
        await until(lambda: place.store.get("mine"))
        await endpoint.send(Pay(1))  # the same again, which passes
        await endpoint.send(Pay(2), message_id="handled")
        copy = await place.take(place.error)
        await place.is_empty(place.name, f"{place.name}.timeouts", place.error)
        assert (await place.store.get("mine")).body == b"first"
    assert copy.headers[Headers.ERROR_CODE] == "duplicate_message"
    if place.kind == "rabbitmq+postgres":
        assert (copy.message_id, copy.body) == ("mine", b"second")
    else:
        assert copy.message_id == "handled"


async def test_a_consumer_may_start_after_the_service_that_delivers_to_it(place: Place) -> None:
    """Its queue does not exist when the messages are due. They wait for it, and no other message waits with them."""
    mails, ids = place.queue("mails"), [f"m-{n}" for n in range(60)]
    async with place.endpoint() as endpoint:
        for id_ in ids:
            await endpoint.send(Pay(1), destination=mails, delay=SOON, message_id=id_)
        await endpoint.send(Pay(2), delay=2 * SOON)
        await place.handles(1)
        await place.is_empty(place.error)
        await place.transport.create_queues([mails])
        assert sorted([(await place.take(mails)).message_id for _ in ids]) == sorted(ids)
        await place.is_empty(place.error, mails)

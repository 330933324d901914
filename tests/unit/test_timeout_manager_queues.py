"""What endpoints of old put into the queues of their timeout manager (specification 3.7, 4.2, 4.3, rows 88, 89, 94)."""

from dataclasses import replace

import pytest

from postdate import DelayedMessage, Envelope, Headers
from postdate.core.receive.intake import from_timeouts_queue
from postdate.endpoint.outgoing import timeouts_queue_envelope
from postdate.errors import StoreTroubled
from postdate.messages import format_timestamp
from postdate.testing import Fault

QUEUE = "sales.timeouts"


@pytest.fixture
async def bench(make_bench):
    bench = make_bench()
    await bench.create_queues("billing")
    return bench


def old(bench, due_in: float, id_: str = "o-1", **headers: str) -> Envelope:
    due = format_timestamp(bench.message(due_in=due_in).due)
    return Envelope(
        QUEUE, id_, {"own": "1", Headers.EXPIRE: due, Headers.ROUTE_EXPIRED_TIMEOUT_TO: "billing", **headers}, b"body"
    )


async def stored(bench, envelope: Envelope) -> DelayedMessage:
    await bench.pump.handle(await bench.put_in_timeouts_queue(envelope))
    message = await bench.memory.get(from_timeouts_queue(envelope, bench.start).message_id)
    assert message is not None
    assert bench.ids(QUEUE) == bench.ids("error") == []
    return message


async def test_it_is_stored_for_its_destination_until_it_is_due_row_88(bench) -> None:
    message = await stored(bench, old(bench, 60))
    assert message == DelayedMessage(
        message.message_id,
        bench.message(due_in=60).due,
        "billing",
        {"own": "1", Headers.MESSAGE_ID: "o-1"},
        b"body",
    )


async def test_what_is_past_due_is_sent_at_once_row_88(bench) -> None:
    await bench.pump.handle(await bench.put_in_timeouts_queue(old(bench, -60)))
    (arrived,) = bench.arrived("billing")
    assert (arrived.headers, arrived.body) == ({"own": "1", Headers.MESSAGE_ID: "o-1"}, b"body")
    assert bench.ids(QUEUE) == []


async def test_without_a_destination_it_goes_where_replies_go_row_94(bench) -> None:
    envelope = old(bench, 60)
    headers = {Headers.EXPIRE: envelope.headers[Headers.EXPIRE], Headers.REPLY_TO_ADDRESS: "shop"}
    assert (await stored(bench, replace(envelope, headers=headers))).destination == "shop"


async def test_two_delayed_retries_of_one_message_are_two_messages(bench) -> None:
    """They share its id; a store that went by that would take the second for a repetition, and lose it."""
    first, second = await stored(bench, old(bench, 60)), await stored(bench, old(bench, 120))
    assert first.message_id != second.message_id
    assert (await bench.memory.statistics(bench.start)).pending == 2


async def test_the_same_delayed_send_received_twice_is_stored_once(bench) -> None:
    assert await stored(bench, old(bench, 60)) == await stored(bench, old(bench, 60))
    assert (await bench.memory.statistics(bench.start)).pending == 1


async def test_one_that_met_trouble_and_is_stored_at_last_is_no_suspect_any_more(bench) -> None:
    """Though it is stored under an id of its own."""
    bench.store.faults.add(Fault("store", StoreTroubled("locked"), calls=[1]))
    await bench.handle(await bench.put_in_timeouts_queue(old(bench, 600)))
    assert (await bench.memory.statistics(bench.start)).pending == 1
    assert not bench.intake._store_recovery.memory


async def test_stale_headers_of_a_timeout_manager_do_not_steer_a_message_of_ours_row_89(bench) -> None:
    stale = {Headers.EXPIRE: "2020-01-01 00:00:00:000000 Z", Headers.ROUTE_EXPIRED_TIMEOUT_TO: "elsewhere"}
    message = bench.message(due_in=60, headers=stale)
    await bench.pump.handle(await bench.put_in_timeouts_queue(timeouts_queue_envelope(message, QUEUE)))
    assert await bench.memory.get("m-1") == message


@pytest.mark.parametrize(
    ("headers", "code", "says"),
    [
        ({Headers.EXPIRE: "2020-01-01 00:00:00:000000 Z"}, "not_a_delayed_message", "its destination is unknown"),
        ({Headers.EXPIRE: "soon", Headers.ROUTE_EXPIRED_TIMEOUT_TO: "billing"}, "invalid_timestamp", "'soon'"),
        ({"Timeout.Id": "t-7"}, "not_a_delayed_message", "to send its timeout 't-7'"),
        ({"NServiceBus.ClearTimeouts": "True"}, "not_a_delayed_message", "to forget some"),
        ({Headers.ROUTE_EXPIRED_TIMEOUT_TO: "billing"}, "not_a_delayed_message", "is missing"),
    ],
)
async def test_what_cannot_be_stored_goes_to_the_error_queue_with_the_reason(
    bench, headers: dict[str, str], code: str, says: str
) -> None:
    await bench.pump.handle(await bench.put_in_timeouts_queue(Envelope(QUEUE, "o-1", headers, b"body")))
    (copy,) = bench.arrived("error")
    assert (copy.message_id, copy.body, copy.headers[Headers.ERROR_CODE]) == ("o-1", b"body", code)
    assert says in copy.headers[Headers.EXCEPTION_MESSAGE]
    assert copy.headers[Headers.FAILED_QUEUE] == QUEUE
    assert headers.items() <= copy.headers.items()
    assert bench.ids(QUEUE) == []


async def test_a_repaired_copy_that_is_returned_is_stored(bench) -> None:
    envelope = old(bench, 60)
    lost = replace(envelope, headers={Headers.EXPIRE: envelope.headers[Headers.EXPIRE]})
    await bench.pump.handle(await bench.put_in_timeouts_queue(lost))
    (copy,) = bench.arrived("error")
    mended = Envelope(
        copy.headers[Headers.FAILED_QUEUE],
        "o-1",
        {**copy.headers, Headers.ROUTE_EXPIRED_TIMEOUT_TO: "billing"},
        copy.body,
    )
    await bench.pump.handle(await bench.put_in_timeouts_queue(mended))
    assert (await bench.memory.statistics(bench.start)).pending == 1

"""A server that cannot be reached: no message is given up for it, and the log says it once.

Source: specification 1.6, 1.10; rows 37 and 42 are about failures that a server, or a store of one's own, tells of.
"""

import logging
from datetime import timedelta

import anyio
import pytest

from postdate import DelayedDelivery, DelayedMessage, Endpoint, Headers, MemoryStore, MemoryTransport
from postdate.endpoint.sending import through_queue
from postdate.errors import (
    PostdateError,
    StoreNotSetUp,
    StoreUnreachable,
    TransportUnavailable,
    TransportUnreachable,
)
from postdate.ports import Received
from postdate.testing import Fault, FaultyStore, FaultyTransport, VirtualClock
from postdate.transports.postgres import PostgresTransport

SECOND = timedelta(seconds=1)
QUEUE = "sales.timeouts"
STORE_GONE, BROKER_GONE = StoreUnreachable("connection refused"), TransportUnreachable("connection refused")


@pytest.fixture
async def bench(make_bench):
    bench = make_bench()
    await bench.create_queues("billing")
    return bench


async def arrive(bench, message: DelayedMessage) -> Received:
    return await bench.put_in_timeouts_queue(through_queue(message, QUEUE))


async def handle(bench, received: Received) -> list[PostdateError]:
    """Handle one message, letting a pause pass; return what a pump would see."""
    errors: list[PostdateError] = []

    async def run() -> None:
        try:
            await bench.intake.handle(received)
        except PostdateError as error:
            errors.append(error)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await bench.clock.advance(10 * SECOND)
    return errors


@pytest.mark.parametrize("error", [STORE_GONE, StoreNotSetUp("no tables")], ids=lambda error: error.code)
async def test_a_message_in_hand_waits_for_a_store_that_cannot_be_reached(bench, error: PostdateError) -> None:
    """Also without retries: it is stored at the first attempt after an outage of minutes."""
    bench.store.faults.add(Fault("store", error))
    received = await arrive(bench, bench.message(due_in=60))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bench.intake.handle, received)
        await bench.clock.advance(29.5 * SECOND)
        assert bench.store.faults.calls["store"] == 30
        await bench.clock.advance(120 * SECOND)
        assert bench.store.faults.calls["store"] < 45
        assert bench.critical_errors == ["store"]
        bench.store.faults.clear()
        await bench.clock.advance(10 * SECOND)
    assert (await bench.memory.statistics(bench.start)).pending == 1  # not sent past the store, though due by now
    assert bench.ids("error") == bench.ids(QUEUE) == bench.ids("billing") == []


async def test_a_stop_gives_it_back_at_once_and_nothing_is_counted(bench) -> None:
    bench.store.faults.add(Fault("store", STORE_GONE))
    received = await arrive(bench, bench.message(due_in=600))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bench.intake.handle, received)
        await bench.clock.advance(0.5 * SECOND)
        bench.intake.stop()
    (again,) = await bench.receiver.receive(1)
    assert (again.envelope.message_id, again.failures) == ("m-1", 0)


async def test_what_is_due_already_and_cannot_be_sent_is_not_the_stores_failure(bench) -> None:
    bench.transport.faults.add(Fault("commit", BROKER_GONE))
    received = await arrive(bench, bench.message(due_in=-1))
    assert await handle(bench, received) == [BROKER_GONE]
    assert bench.store_breaker.deadline is None
    assert bench.ids("error") == []


async def test_while_the_broker_cannot_be_reached_due_messages_wait_whatever_they_have_behind_them(bench) -> None:
    bench.transport.faults.add(lambda call: BROKER_GONE if call.method == "send" and call.number <= 8 else None)
    await bench.keep(bench.message(due_in=-1))
    await bench.look_for(240 * SECOND)
    assert bench.ids("billing") == ["m-1"]
    assert bench.ids("error") == []
    assert bench.transport.faults.calls["send"] == 9


async def test_a_broker_back_between_the_failed_send_and_the_error_copy_gets_no_error_copy(bench) -> None:
    bench.transport.faults.add(Fault("send", BROKER_GONE, calls=[1]))
    await bench.keep(bench.message(due_in=-1))
    await bench.look()
    assert bench.ids("error") == bench.ids("billing") == []
    await bench.look_for(5 * SECOND)
    assert bench.ids("billing") == ["m-1"]


async def test_what_a_reachable_server_refuses_counts_as_before_row_37(bench) -> None:
    bench.transport.faults.add(Fault("send", TransportUnavailable("nack"), calls=[1]))
    await bench.keep(bench.message(due_in=-1))
    await bench.look()
    assert bench.arrived("error")[0].headers[Headers.ERROR_CODE] == "transport_unavailable"


async def test_a_store_of_ones_own_that_always_raises_counts_as_before_row_42(
    bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.store.faults.add(Fault("store", OSError("connection refused")))
    await handle(bench, await arrive(bench, bench.message(due_in=600)))
    assert bench.arrived("error")[0].headers[Headers.ERROR_CODE] == "store_unavailable"
    assert "delayed message m-1 moved to error queue error" in caplog.messages


async def test_a_move_says_what_failed(bench, caplog: pytest.LogCaptureFixture) -> None:
    await bench.intake.handle(await arrive(bench, bench.message(due_in=-1, destination="nowhere")))
    assert [message.partition(":")[0] for message in caplog.messages] == [
        "cannot send delayed message m-1",
        "delayed message m-1 moved to error queue error",
    ]


# --- the log ----------------------------------------------------------------------------------------------------------


async def test_an_outage_of_the_broker_is_said_when_it_begins_and_when_it_is_over(
    clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    queues = MemoryTransport()
    await queues.create_queues(["billing"])
    transport = FaultyTransport(queues, Fault("receive", BROKER_GONE))
    sales = Endpoint(
        "sales",
        transport=transport,
        delayed_delivery=DelayedDelivery(MemoryStore()),
        send_only=True,
        clock=clock,
        critical_error=lambda text, error: None,
    )
    async with sales:
        await clock.advance(26 * SECOND)
        transport.faults.clear()
        await sales.send(b"", destination="billing", delay=SECOND, message_id="m-1")
        await clock.advance(2 * SECOND)
    lines = [record.message for record in caplog.records if record.name == "postdate.pump"]
    assert lines[0] == "cannot receive from sales.timeouts: connection refused"
    assert len(lines) == 2
    assert lines[1].startswith("sales.timeouts is reachable again after 27 s (")


async def test_an_outage_of_the_store_is_said_when_it_begins_and_when_it_is_over(
    clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    store = FaultyStore(MemoryStore(), Fault("claim_due", STORE_GONE))
    sales = Endpoint(
        "sales",
        transport=MemoryTransport(),
        delayed_delivery=DelayedDelivery(store),
        send_only=True,
        clock=clock,
        critical_error=lambda text, error: None,
    )
    async with sales:
        await clock.advance(70 * SECOND)
        store.faults.clear()
        await clock.advance(20 * SECOND)
    lines = [record.message for record in caplog.records if record.name == "postdate.poller"]
    assert len(lines) == 3
    assert lines[0] == "cannot take due messages: connection refused"
    assert lines[1].startswith("cannot take due messages, for 6")
    assert lines[2].startswith("the store is reachable again after ")


async def test_debug_lines_say_what_was_stored_and_delivered(bench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    await bench.intake.handle(await arrive(bench, bench.message("later", due_in=60)))
    await bench.intake.handle(await arrive(bench, bench.message("now", due_in=-1)))
    await bench.keep(bench.message("a", -0.014), bench.message("b", -0.003))
    await bench.look()
    assert caplog.messages == [
        f"message later stored, for billing, due {bench.start + 60 * SECOND}",
        f"message now was due already and is sent to billing, due {bench.start - SECOND}",
        "2 messages delivered to billing, latest 14 ms late",
    ]


# --- adapters ---------------------------------------------------------------------------------------------------------


async def test_no_connection_is_unreachable_for_store_and_queues_alike() -> None:
    """Nobody listens at port 1."""
    from postdate.stores.mariadb import MariaDbStore
    from postdate.stores.postgres import PostgresStore
    from postdate.transports.rabbitmq import RabbitMqTransport

    url = "postgresql://postdate@127.0.0.1:1/postdate"
    for store in (PostgresStore(url), MariaDbStore("mariadb://postdate@127.0.0.1:1/postdate")):
        with pytest.raises(StoreUnreachable):
            await store.next_attempt()
        await store.close()
    queues = PostgresTransport(url)
    with pytest.raises(TransportUnreachable):
        await queues.queue_lengths()
    await queues.close()
    rabbitmq = RabbitMqTransport("amqp://guest:guest@127.0.0.1:1/")
    with pytest.raises(TransportUnreachable):
        await rabbitmq.create_queues(["sales"])
    await rabbitmq.close()


def test_of_sql_server_what_no_server_said_is_unreachable_and_what_one_said_is_not() -> None:
    from postdate.sqlserver.errors import translate

    assert translate(OSError("refused"), "there").code == "store_unreachable"
    assert [translate(_said(number), "there").code for number in (40613, 8645)] == [
        "store_unreachable",
        "store_unavailable",
    ]


def _said(number: int) -> Exception:
    error = Exception("text")
    error.number = number  # pyright: ignore[reportAttributeAccessIssue]
    return error

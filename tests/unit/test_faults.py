"""The faulty wrappers that other tests, and users, rely on."""

from datetime import UTC, datetime, timedelta

import pytest

from postdate import DelayedMessage, Envelope, MemoryStore, MemoryTransport
from postdate.errors import StoreUnavailable, TransportUnavailable
from postdate.ports import ClaimingStore, MovingStore, Receiver, Transport
from postdate.testing import Call, Fault, FaultyMovingStore, FaultyStore, FaultyTransport

NOW = datetime(2026, 1, 31, tzinfo=UTC)
DOWN = StoreUnavailable("down")
MESSAGE = DelayedMessage("m-1", NOW, "queue")


def test_they_have_the_methods_of_what_they_wrap() -> None:
    assert isinstance(FaultyStore(MemoryStore()), ClaimingStore)
    assert not isinstance(FaultyStore(MemoryStore()), MovingStore)
    assert isinstance(FaultyMovingStore(MemoryStore()), MovingStore)  # type: ignore[arg-type]
    transport = FaultyTransport(MemoryTransport())
    assert isinstance(transport, Transport)
    assert isinstance(transport.receiver("queue"), Receiver)


async def test_without_a_plan_they_do_what_the_wrapped_one_does() -> None:
    store = FaultyStore(MemoryStore())
    await store.store(MESSAGE, NOW)
    assert await store.fetch_next_due(NOW + timedelta(seconds=1)) == MESSAGE
    assert await store.increment_failure_count("m-1", NOW)
    assert await store.next_due() == NOW
    assert await store.remove("m-1", NOW)
    assert store.faults.calls.total() == 5


async def test_a_fault_before_a_call_leaves_no_effect_and_one_after_it_does() -> None:
    store = FaultyStore(MemoryStore(), Fault("store", DOWN, calls=[1]))
    with pytest.raises(StoreUnavailable):
        await store.store(MESSAGE, NOW)
    assert await store.next_due() is None
    store.faults.add(Fault("store", DOWN, calls=[2], after=True))
    with pytest.raises(StoreUnavailable):
        await store.store(MESSAGE, NOW)
    assert await store.next_due() == NOW


async def test_a_plan_sees_every_call_before_and_after() -> None:
    seen: list[Call] = []
    store = FaultyStore(MemoryStore(), seen.append)
    await store.next_due()
    await store.next_attempt()
    await store.next_due()
    assert seen == [
        Call("next_due", 1, 1, done=False),
        Call("next_due", 1, 1, done=True),
        Call("next_attempt", 1, 2, done=False),
        Call("next_attempt", 1, 2, done=True),
        Call("next_due", 2, 3, done=False),
        Call("next_due", 2, 3, done=True),
    ]


async def test_a_failing_send_is_answered_for_every_envelope_and_raised_with_work() -> None:
    down = TransportUnavailable("down")
    transport = FaultyTransport(MemoryTransport(), Fault("send", down))
    batch = [Envelope("a", "1"), Envelope("b", "2")]
    assert await transport.send(batch, NOW) == [down, down]
    with pytest.raises(TransportUnavailable):
        await transport.send(batch, NOW, work=[lambda tx: None])
    transport.faults.clear()
    await transport.create_queues(["a", "b"])
    assert await transport.send(batch, NOW) == [None, None]


async def test_receivers_share_the_plans_of_their_transport() -> None:
    transport = FaultyTransport(MemoryTransport())
    await transport.create_queues(["a"])
    await transport.send([Envelope("a", "1")], NOW)
    transport.faults.add(Fault("receive", TransportUnavailable("down"), calls=[1]))
    receiver = transport.receiver("a")
    with pytest.raises(TransportUnavailable):
        await receiver.receive(1)
    (received,) = await receiver.receive(1)
    await receiver.roll_back(received)
    (received,) = await receiver.receive(1)
    await receiver.commit(received, NOW)
    await receiver.close()
    await transport.close()

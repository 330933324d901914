"""MsmqTransport on a strict fake of MSMQ's COM objects: rows of the specification, failures, threads.

Needs no other fixture than its own: it runs on Windows with ``--noconftest``, too.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from tests import msmq_fake
from tests.waiting import until

from postdate import DelayedDelivery, Endpoint, MemoryStore, Outbox, Recoverability, SqliteOutbox, errors
from postdate.backends.msmq import queues
from postdate.backends.msmq.com import Com
from postdate.backends.msmq.transport import MsmqTransport
from postdate.endpoint.settings import Audit
from postdate.messages import Envelope, Headers
from postdate.ports import Completion, Received, Receiver

NOW = datetime(2026, 1, 31, 12, 0, 5, 123_456, tzinfo=UTC)
HALF_A_MINUTE = timedelta(seconds=30)
IN, OUT, ERROR = "in", "out", "error"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def short_waits(monkeypatch) -> None:
    monkeypatch.setattr(queues, "WAIT_MILLISECONDS", 5)


@pytest.fixture
def manager() -> msmq_fake.QueueManager:
    return msmq_fake.QueueManager()


@pytest.fixture
async def open_here(manager) -> AsyncIterator[Callable[..., MsmqTransport]]:
    opened: list[MsmqTransport] = []

    def open_one(**settings: Any) -> MsmqTransport:
        settings.setdefault("com", manager.process())
        opened.append(MsmqTransport(**settings))
        return opened[-1]

    yield open_one
    for transport in opened:
        await transport.close()
    assert not manager.active, "a transaction was left open"
    assert manager.faults == []


@pytest.fixture
async def transport(open_here) -> MsmqTransport:
    transport = open_here()
    await transport.create_queues([IN, OUT, ERROR])
    return transport


def message(message_id: str = "m-1", queue: str = IN, **fields: Any) -> Envelope:
    return Envelope(queue, message_id, {"kind": "check"}, b"body", **fields)


def lasting(message_id: str = "m-1", queue: str = OUT, span: timedelta = HALF_A_MINUTE) -> Envelope:
    return Envelope(queue, message_id, {Headers.TIME_TO_BE_RECEIVED: "00:00:30"}, b"", time_to_be_received=span)


async def sent(transport: MsmqTransport, *envelopes: Envelope) -> None:
    assert list(await transport.send(envelopes, NOW)) == [None] * len(envelopes)


async def one(receiver: Receiver) -> Received:
    return (await receiver.receive(1))[0]


async def any_in(transport: MsmqTransport, *queues: str) -> bool:
    return any((await transport.lengths_of(queues)).values())


async def ids_in(transport: MsmqTransport, queue: str, count: int) -> list[str]:
    receiver, found = transport.receiver(queue), list[str]()
    while len(found) < count:
        found += [each.envelope.message_id for each in await receiver.receive(count)]
    await receiver.close()
    return found


# --- time to be received ----------------------------------------------------------------------------------------------


async def test_row_59_outside_a_transaction_the_queue_is_told(transport, manager):
    await sent(transport, lasting())
    assert [values["MaxTimeToReceive"] for values in manager.values(OUT)] == [30]


async def test_row_60_an_unread_message_disappears(transport, manager):
    await sent(transport, lasting(), message("endless", OUT))
    manager.now = lambda: manager_time + 31
    manager_time = 0.0
    manager.queue(OUT).entries[0].ends_at = 30.0
    assert await ids_in(transport, OUT, 1) == ["endless"]
    assert await transport.lengths_of([OUT]) == {OUT: 1}
    assert manager.dead_letters == []


async def test_the_fake_has_the_rule_that_makes_it_necessary(manager):
    """The first message of a transaction says for all how long they are wanted."""
    com = manager.process()
    com.initialize()
    desk = queues.MsmqSession(com)
    rules = MsmqTransport(com=com, transactional=False)
    address = rules.receiving_address(OUT)
    desk.create(address, True)
    transaction = com.create("MSMQ.MSMQTransactionDispenser").BeginTransaction()
    for envelope in (lasting("first"), message("endless", OUT)):
        prepared = rules.encode(envelope, NOW, in_transaction=False)
        assert prepared is not None
        desk._send(prepared, transaction)
    transaction.Commit()
    assert [entry.ends_at is None for entry in manager.queue(OUT).entries] == [False, False]
    desk.close()
    com.uninitialize()


async def test_row_61_a_commit_refuses_it_naming_queue_and_machine_and_does_nothing(transport, manager):
    await sent(transport, message())
    receiver = transport.receiver(IN)
    held = await one(receiver)
    with pytest.raises(errors.TimeToBeReceivedInTransaction) as caught:
        await receiver.commit(held, NOW, Completion(outgoing=[message("good", OUT), lasting()]))
    assert "to out@HERE1" in str(caught.value)
    assert str(caught.value).endswith(
        "Sending messages with a custom TimeToBeReceived is not supported on transactional MSMQ."
    )
    assert manager.values(OUT) == []
    await receiver.commit(held, NOW)
    assert manager.values(IN) == []


@dataclass
class Order:
    number: int


@dataclass
class Offer:
    number: int


async def handled(transport: MsmqTransport, mode: Any, **settings: Any) -> None:
    """Let a handler send an offer with a time to be received, until its message has ended in either way."""
    endpoint = Endpoint(IN, transport=transport, transaction_mode=mode, recoverability=NO_RETRIES, **settings)

    @endpoint.handler(Order)
    async def offer(_order: Order, context: Any) -> None:
        await context.send(Offer(1), destination=OUT, time_to_be_received=HALF_A_MINUTE)

    async with endpoint:
        await endpoint.send(Order(1))
        await until(lambda: any_in(transport, OUT, ERROR))


NO_RETRIES = Recoverability(immediate_retries=0, delayed_retries=0)


async def test_row_61_a_handler_that_sends_with_it_in_the_atomic_mode_fails(transport, manager):
    await handled(transport, "sends_atomic_with_receive")
    assert manager.values(OUT) == []
    (failed,) = manager.values(ERROR)
    assert b"not supported on transactional MSMQ." in failed["Extension"]
    assert b"out@HERE1" in failed["Extension"]
    assert failed["MaxTimeToReceive"] == msmq_fake.INFINITE


@pytest.mark.parametrize("mode", ["receive_only", "none"])
async def test_row_62_in_the_other_modes_it_is_told_to_the_queue(transport, manager, mode):
    await handled(transport, mode)
    (values,) = manager.values(OUT)
    assert values["MaxTimeToReceive"] == 30
    assert b"NServiceBus.TimeToBeReceived" in values["Extension"]


async def test_row_62_queues_that_are_not_transactional_take_it_in_a_handler_too(open_here, manager):
    transport = open_here(transactional=False)
    await transport.create_queues([IN, OUT, ERROR])
    await sent(transport, message())
    receiver = transport.receiver(IN)
    await receiver.commit(await one(receiver), NOW, Completion(outgoing=[lasting("a"), message("b", OUT)]))
    assert [values["MaxTimeToReceive"] for values in manager.values(OUT)] == [30, msmq_fake.INFINITE]
    assert transport.capabilities.time_to_be_received_in_transactions


async def test_row_62_an_isolated_send_beside_a_held_message_takes_it(transport, manager):
    await sent(transport, message())
    receiver = transport.receiver(IN)
    held = await one(receiver)
    await sent(transport, lasting())
    await receiver.roll_back(held)
    assert [values["MaxTimeToReceive"] for values in manager.values(OUT)] == [30]


@pytest.fixture
async def falling_back(open_here) -> MsmqTransport:
    transport = open_here(disable_native_time_to_be_received_in_transactions=True)
    await transport.create_queues([IN, OUT, ERROR])
    return transport


async def test_row_63_with_the_setting_the_send_proceeds_without_a_native_time(falling_back, manager):
    await handled(falling_back, "sends_atomic_with_receive")
    (values,) = manager.values(OUT)
    assert values["MaxTimeToReceive"] == msmq_fake.INFINITE
    assert b"<Key>NServiceBus.TimeToBeReceived</Key><Value>00:00:30</Value>" in values["Extension"]
    assert values["Journal"] == 1  # it counts as a message without


async def test_row_64_with_the_setting_it_is_native_still_outside_a_transaction(falling_back, manager):
    await sent(falling_back, lasting())
    assert [values["MaxTimeToReceive"] for values in manager.values(OUT)] == [30]


@pytest.mark.parametrize(
    ("settings", "flags"),
    [
        ({}, [1, 0, 1]),
        ({"use_dead_letter_queue": False}, [0, 0, 1]),
        ({"use_dead_letter_queue_for_messages_with_time_to_be_received": True}, [1, 1, 1]),
        ({"use_journal_queue": True}, [3, 2, 3]),
    ],
)
async def test_row_71_dead_letters_for_messages_that_expire_are_asked_for(open_here, manager, settings, flags):
    transport = open_here(**settings)
    await transport.create_queues([OUT])
    own = Envelope(OUT, "own", {}, b"", time_to_be_received=HALF_A_MINUTE, use_dead_letter_queue=True)
    await sent(transport, message("endless", OUT), lasting("expiring"), own)
    assert [values["Journal"] for values in manager.values(OUT)] == flags


@pytest.mark.parametrize("mode", ["receive_only", "sends_atomic_with_receive"])
async def test_row_73_audit_copies_that_expire_are_refused_at_start(transport, mode):
    with pytest.raises(errors.ConfigurationError, match="not supported on transactional MSMQ"):
        Endpoint(IN, transport=transport, transaction_mode=mode, audit=Audit("audit", HALF_A_MINUTE))


async def test_row_73_without_a_transaction_they_are_not(transport, open_here, tmp_path):
    assert Endpoint(IN, transport=transport, transaction_mode="none", audit=Audit("audit", HALF_A_MINUTE)).audit
    outbox = Outbox(SqliteOutbox(tmp_path / "outbox.db"))  # what is sent for a message leaves after its commit
    assert Endpoint(
        IN, transport=transport, transaction_mode="receive_only", outbox=outbox, audit=Audit("audit", HALF_A_MINUTE)
    ).audit
    plain = open_here(transactional=False)
    assert Endpoint(IN, transport=plain, audit=Audit("audit", HALF_A_MINUTE)).audit


async def test_distributed_transactions_are_refused_at_start(transport):
    with pytest.raises(errors.UnsupportedTransactionMode, match="transaction_scope"):
        Endpoint(IN, transport=transport, transaction_mode="transaction_scope")


# --- endpoints --------------------------------------------------------------------------------------------------------


async def test_a_delayed_message_goes_through_the_timeouts_queue_and_arrives(transport, manager):
    arrived_at, seen = list[datetime](), anyio.Event()
    shop = Endpoint(IN, transport=transport, delayed_delivery=DelayedDelivery(MemoryStore()))
    through: list[bytes] = []
    manager.before = lambda call: through.extend(
        values["Extension"] for values in (manager.values("in.timeouts") if call == "Commit" else ())
    )

    @shop.handler(Order)
    async def handle(_order: Order, _context: Any) -> None:
        arrived_at.append(datetime.now(UTC))  # noqa: TID251 - against what the message was told
        seen.set()

    async with shop:
        due = datetime.now(UTC) + timedelta(seconds=0.2)  # noqa: TID251
        await shop.send(Order(1), deliver_at=due)
        await seen.wait()
    assert arrived_at[0] >= due
    assert any(b"NServiceBus.Timeouts.Properties.NServiceBus.Timeout.Expire" in blob for blob in through)
    assert manager.values(IN) == []


@pytest.mark.parametrize("mode", ["receive_only", "sends_atomic_with_receive"])
async def test_a_handler_that_fails_is_tried_again_and_then_its_message_is_in_the_error_queue(transport, manager, mode):
    attempts: list[int] = []
    policy = Recoverability(immediate_retries=2, delayed_retries=0)
    endpoint = Endpoint(IN, transport=transport, transaction_mode=mode, recoverability=policy)

    @endpoint.handler(Order)
    async def fail(order: Order, context: Any) -> None:
        attempts.append(order.number)
        await context.send(Offer(order.number), destination=OUT)
        raise RuntimeError("no such order")

    async with endpoint:
        await endpoint.send(Order(7))
        await until(lambda: any_in(transport, ERROR))
    assert attempts == [7, 7, 7]
    assert manager.values(OUT) == []
    assert b"no such order" in manager.values(ERROR)[0]["Extension"]


# --- creating queues --------------------------------------------------------------------------------------------------


async def test_queues_are_private_transactional_and_labelled(transport, manager):
    assert manager.queue(IN).transactional
    assert manager.queue(IN).label == IN


async def test_a_queue_of_the_other_kind_is_told_and_kept(transport, open_here, manager):
    plain = open_here(transactional=False)
    with pytest.raises(
        errors.ConfigurationError,
        match=r"queue in@HERE1 is there and is transactional, which cannot be changed; .*transactional=True",
    ):
        await plain.create_queues([IN])
    assert manager.queue(IN).transactional


async def test_what_cannot_be_created_says_why(transport, manager):
    with pytest.raises(errors.ConfigurationError, match="queue 'a;b' cannot be created"):
        await transport.create_queues(["a;b"])
    with pytest.raises(errors.QueueNotFound, match=r"Invalid queue path name, 0xC00E0014"):
        await transport.create_queues(["a@ELSEWHERE"])
    manager.denied.add("Create")
    with pytest.raises(errors.TransportError, match=r"MSMQ refuses new@HERE1 .*give this user the right"):
        await transport.create_queues(["new"])


# --- sending ----------------------------------------------------------------------------------------------------------


async def test_what_cannot_be_sent_is_a_value_and_the_others_are_sent(transport, manager):
    manager.denied.add("closed")
    await transport.create_queues(["closed"])
    envelopes = [
        message("a", OUT),
        message("b", "missing"),
        message("c", "no;name"),
        Envelope(OUT, "d", {}, bytes(4 * 1024 * 1024)),
        Envelope(OUT, "e", {"h": "\x01"}),
        message("f", "closed"),
        message("g", OUT),
    ]
    answers = await transport.send(envelopes, NOW)
    kinds = [
        None,
        errors.QueueNotFound,
        errors.QueueNotFound,
        errors.MessageTooLarge,
        errors.InvalidHeaders,
        errors.DestinationUnavailable,
        None,
    ]
    assert [answer and type(answer) for answer in answers] == kinds
    assert "there is no queue missing@HERE1" in str(answers[1])
    assert await ids_in(transport, OUT, 2) == ["a", "g"]


async def test_a_queue_on_another_machine_is_not_asked(transport, open_here, manager):
    await sent(transport, message("a", "orders@SALES1"), message("b", "orders@10.0.0.7"))
    await sent(open_here(address="msmq://STOCK"), message("c", "orders"))
    assert [format_name for format_name, _ in manager.sent_elsewhere] == [
        r"DIRECT=OS:SALES1\private$\orders",
        r"DIRECT=TCP:10.0.0.7\private$\orders",
        r"DIRECT=OS:STOCK\private$\orders",
    ]


async def test_a_queue_of_the_other_kind_is_told_when_something_is_sent(transport, open_here):
    (answer,) = await open_here(transactional=False).send([message()], NOW)
    assert isinstance(answer, errors.TransportError)
    assert "in@HERE1 is transactional and this transport is not, or the reverse" in str(answer)


async def test_no_room_passes(transport, manager):
    manager.room_bytes = 10
    (answer,) = await transport.send([message()], NOW)
    assert isinstance(answer, errors.TransportUnavailable)
    assert "look at the quotas" in str(answer)
    manager.room_bytes = 1 << 30
    await sent(transport, message())


async def test_a_service_that_stops_is_unreachable_and_handles_are_opened_anew_when_it_is_back(transport, manager):
    await sent(transport, message("a"))
    manager.stop()
    (answer,) = await transport.send([message("b")], NOW)
    assert isinstance(answer, errors.TransportUnreachable)
    assert "is the service MSMQ running?" in str(answer)
    manager.is_down = False
    await sent(transport, message("c"))
    assert await ids_in(transport, IN, 2) == ["a", "c"]


async def test_a_queue_that_was_deleted_and_created_again_is_found_again(transport, manager):
    await sent(transport, message("a", OUT))
    manager.delete(OUT)
    (answer,) = await transport.send([message("b", OUT)], NOW)
    assert isinstance(answer, errors.QueueNotFound)
    await transport.create_queues([OUT])
    await sent(transport, message("c", OUT))
    assert await ids_in(transport, OUT, 1) == ["c"]


async def test_many_destinations_do_not_stay_open(transport, manager):
    names = [f"q{number}" for number in range(80)]
    await transport.create_queues(names)
    await sent(transport, *(message(name, name) for name in names), message("again", "q0"))
    assert [len(manager.values(name)) for name in names] == [2] + [1] * 79


# --- receiving --------------------------------------------------------------------------------------------------------


async def test_messages_in_hand_end_each_by_itself_and_in_any_order(transport, manager):
    await sent(transport, *(message(f"{number}") for number in range(6)))
    receiver = transport.receiver(IN)
    held = await receiver.receive(6)
    await receiver.commit(held[4], NOW)
    await receiver.roll_back(held[1])
    await receiver.commit(held[0], NOW, Completion(outgoing=[message("out", OUT)]))
    await receiver.roll_back(held[3], failed=False)
    again = await receiver.receive(6)
    assert [(each.envelope.message_id, each.failures) for each in again] == [("1", 1), ("3", 0)]
    assert await ids_in(transport, OUT, 1) == ["out"]
    await receiver.close()
    assert await ids_in(transport, IN, 4) == ["1", "2", "3", "5"]


async def test_what_a_dead_process_had_in_hand_is_in_its_place_again(transport, open_here, manager):
    await sent(transport, message("a"), message("b"), message("c"))
    dying: msmq_fake.FakeCom = manager.process()
    elsewhere = open_here(com=dying)
    receiver = elsewhere.receiver(IN)
    await receiver.receive(2)
    manager.end_of(dying)
    assert await ids_in(transport, IN, 3) == ["a", "b", "c"]


async def test_a_send_that_fails_in_the_middle_of_a_commit_leaves_nothing_and_the_message_in_hand(transport, manager):
    await sent(transport, message())
    receiver = transport.receiver(IN)
    held = await one(receiver)
    sends = iter([None, msmq_fake.failure(msmq_fake.INSUFFICIENT_RESOURCES, "No room.")])
    manager.before = lambda call: _raise(next(sends)) if call == "Send" else None
    with pytest.raises(errors.TransportUnavailable):
        await receiver.commit(held, NOW, Completion(outgoing=[message("first", OUT), message("second", OUT)]))
    manager.before = lambda _call: None
    assert manager.values(OUT) == []
    assert await transport.lengths_of([IN]) == {IN: 0}  # in hand
    await receiver.commit(held, NOW, Completion(outgoing=[message("first", OUT), message("second", OUT)]))
    assert await ids_in(transport, OUT, 2) == ["first", "second"]
    assert manager.values(IN) == []


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


async def test_a_message_that_cannot_be_held_again_is_lost_to_its_holder_and_to_nobody_else(transport, manager):
    await sent(transport, message())
    receiver = transport.receiver(IN)
    held = await one(receiver)

    def fail(call: str) -> None:
        if call == "Send":
            raise msmq_fake.failure(msmq_fake.INSUFFICIENT_RESOURCES, "No room.")
        if call == "ReceiveByLookupId":
            raise msmq_fake.failure(msmq_fake.QUEUE_NOT_FOUND, "Somebody else was faster.")

    manager.before = fail
    with pytest.raises(errors.TransportUnavailable):
        await receiver.commit(held, NOW, Completion(outgoing=[message("out", OUT)]))
    manager.before = lambda _call: None
    with pytest.raises(errors.ClaimLost):
        await receiver.commit(held, NOW)
    await receiver.roll_back(held)  # what is not held any more is in its queue already
    assert (await one(receiver)).envelope.message_id == "m-1"


async def test_a_restart_of_the_service_gives_back_what_is_held_and_the_receiver_goes_on(transport, manager):
    await sent(transport, message())
    receiver = transport.receiver(IN)
    held = await one(receiver)
    manager.stop()
    with pytest.raises(errors.TransportUnreachable):
        await receiver.commit(held, NOW, Completion(outgoing=[message("out", OUT)]))
    with pytest.raises(errors.TransportUnreachable):  # its transaction is gone, and it cannot be received again now
        await receiver.commit(held, NOW)
    with pytest.raises(errors.ClaimLost):
        await receiver.commit(held, NOW)
    with pytest.raises(errors.TransportUnreachable):
        await receiver.receive(1)
    manager.is_down = False
    assert (await receiver.receive(1))[0].envelope.message_id == "m-1"
    assert manager.values(OUT) == []


async def test_a_message_whose_transaction_a_restart_has_ended_is_held_again(transport, manager):
    await sent(transport, message())
    receiver = transport.receiver(IN)
    held = await one(receiver)
    manager.restart()
    with pytest.raises(errors.TransportUnreachable):  # the handle is stale, or the transaction unknown
        await receiver.commit(held, NOW)
    await receiver.commit(held, NOW, Completion(outgoing=[message("out", OUT)]))
    assert manager.values(IN) == []
    assert await ids_in(transport, OUT, 1) == ["out"]


async def test_after_an_outage_an_empty_queue_says_that_there_is_nothing(transport, manager):
    receiver = transport.receiver(IN)
    manager.stop()
    with pytest.raises(errors.TransportUnreachable):
        await receiver.receive(1)
    manager.is_down = False
    assert list(await receiver.receive(1, wait=False)) == []
    await sent(transport, message())
    assert (await one(receiver)).envelope.message_id == "m-1"


async def test_a_service_that_stops_while_a_receiver_waits_is_told(transport, manager):
    receiver = transport.receiver(IN)
    async with anyio.create_task_group() as tasks:

        async def stop_when_it_waits() -> None:
            while receiver._pending_wait is None:  # nobody tells that somebody waits
                await anyio.lowlevel.checkpoint()
            manager.stop()

        tasks.start_soon(stop_when_it_waits)
        with pytest.raises(errors.TransportUnreachable):
            await receiver.receive(1)


async def test_timeouts_may_be_errors(transport, manager):
    manager.timeouts_raise = True
    receiver, peeks = transport.receiver(IN), list[str]()
    manager.before = peeks.append
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(receiver.receive, 1)
        await until(lambda: peeks.count("Peek") > 4)  # a wait has two of them: one look, and one when its time is over
        tasks.cancel_scope.cancel()
    await sent(transport, message("a"), message("b"))
    assert len(await receiver.receive(5)) == 2
    assert await receiver.receive_by_id("c") is None


async def test_a_refused_queue_says_so(transport, manager):
    manager.denied.add(IN)
    with pytest.raises(errors.TransportError, match="MSMQ refuses in@HERE1"):
        await transport.receiver(IN).receive(1)


async def test_messages_at_hand_are_handed_over_before_an_error(transport, manager):
    await sent(transport, message("a"), message("b"))
    receives = iter([None, msmq_fake.failure(msmq_fake.ACCESS_DENIED, "Access is denied.")])
    manager.before = lambda call: _raise(next(receives)) if call == "Receive" else None
    receiver = transport.receiver(IN)
    assert [each.envelope.message_id for each in await receiver.receive(2)] == ["a"]
    manager.before = lambda _call: None
    assert (await one(receiver)).envelope.message_id == "b"


async def test_a_receive_cancelled_by_asyncio_itself_holds_nothing(transport, manager):
    """Tasks of asyncio are cancelled without regard to shields of anyio: while the message is being taken, too."""
    await sent(transport, message())
    receiver, taking, go_on = transport.receiver(IN), threading.Event(), threading.Event()

    def stand_still(call: str) -> None:
        if call == "Receive" and not taking.is_set():
            taking.set()
            go_on.wait()

    manager.before = stand_still
    task = asyncio.create_task(receiver.receive(1))
    await anyio.to_thread.run_sync(taking.wait)
    task.cancel()
    await asyncio.wait([task])
    go_on.set()
    assert task.cancelled()
    assert await ids_in(transport, IN, 1) == ["m-1"]


async def test_what_is_taken_by_its_id_may_be_taken_by_another_in_between(transport, manager):
    await sent(transport, message("a"), message("b"), message("c"))

    def take_first(call: str) -> None:
        if call == "ReceiveByLookupId":
            manager.queue(IN).entries.pop(1)

    manager.before = take_first
    assert await transport.receiver(IN).receive_by_id("b") is None
    manager.before = lambda _call: None
    assert await ids_in(transport, IN, 2) == ["a", "c"]


async def test_a_message_that_leaves_while_the_queue_is_looked_through_hides_none_behind_it(transport, manager):
    await sent(transport, message("a"), message("b"), message("c"))
    looks: list[str] = []

    def take_current(call: str) -> None:
        looks.append(call)
        if looks == ["Open", "Reset", "PeekCurrent", "PeekNext"]:
            manager.queue(IN).entries.pop(0)

    manager.before = take_current
    taken = await transport.receiver(IN).receive_by_id("c")
    assert taken is not None


async def test_lengths_are_of_what_nobody_has_in_hand_and_of_queues_that_exist(transport):
    await sent(transport, message("a"), message("b"))
    receiver = transport.receiver(IN)
    await one(receiver)
    assert await transport.lengths_of([IN, OUT, "missing", "no;name"]) == {IN: 1, OUT: 0}


async def test_what_is_given_back_to_a_queue_without_transactions_is_sent_again_as_it_was(open_here, manager):
    transport = open_here(transactional=False)
    await transport.create_queues([IN])
    manager.put(IN, Body="text of others", Journal=1, Label="theirs")
    await sent(transport, message("ours"))
    receiver = transport.receiver(IN)
    held = await receiver.receive(2)
    for each in held:
        await receiver.roll_back(each)
    again = await receiver.receive(2)
    assert [each.envelope.body for each in again] == ["text of others".encode("utf-16-le"), b"body"]
    assert again[1].envelope == held[1].envelope
    assert again[1].failures == 1


# --- threads ----------------------------------------------------------------------------------------------------------


async def test_many_messages_in_hand_share_a_few_threads_and_closing_ends_them(transport):
    com = transport.com
    assert isinstance(com, msmq_fake.FakeCom)
    await sent(transport, *(message(f"{number}") for number in range(50)))
    receiver = transport.receiver(IN)
    held = await receiver.receive(50)
    assert len(held) == 50
    assert com.threads_inside == 16 + 1  # and the one that sends
    await receiver.close()
    await transport.close()
    await until(lambda: not com.threads_inside)
    assert com.made.count("MSMQ.MSMQTransactionDispenser") == 16


async def test_a_transport_that_was_closed_opens_again(transport):
    await transport.close()
    await sent(transport, message())
    assert await ids_in(transport, IN, 1) == ["m-1"]


async def test_the_fake_refuses_what_com_does_not_have(manager):
    com = manager.process()
    with pytest.raises(com.errors, match="CoInitialize has not been called"):
        com.create("MSMQ.MSMQMessage")
    com.initialize()
    native = com.create("MSMQ.MSMQMessage")
    for spoil in (
        lambda: setattr(native, "TimeToBeReceived", 5),  # as .NET calls it
        lambda: setattr(native, "Extension", b"bytes"),
        lambda: setattr(native, "Body", b"bytes"),
        lambda: setattr(native, "Journal", True),
        lambda: native.Recoverable,
        lambda: native.Send("queue", 3),
        lambda: _elsewhere(lambda: native.Label),
    ):
        with pytest.raises(msmq_fake.Misuse):
            spoil()
    com.uninitialize()
    with pytest.raises(msmq_fake.Misuse, match="has left COM"):
        _ = native.Label


def _elsewhere(read: Callable[[], Any]) -> None:
    failures: list[BaseException] = []

    def run() -> None:
        try:
            read()
        except msmq_fake.Misuse as fault:
            failures.append(fault)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    raise failures[0]


def test_the_fake_is_a_com(manager):
    com: Com = manager.process()
    assert com.machine == "HERE1"


# --- failures ---------------------------------------------------------------------------------------------------------


async def test_failures_are_counted_across_receivers_of_a_transport(transport):
    await sent(transport, message())
    first, second = transport.receiver(IN), transport.receiver(IN)
    await first.roll_back(await one(first))
    held = await one(second)
    assert held.failures == 1
    await second.commit(held, NOW)
    await sent(transport, message())
    assert (await one(first)).failures == 0

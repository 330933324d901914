"""Checks that one receiver has a received message until it is committed, rolled back, or the receiver is closed."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel

from postdate.errors import ClaimLost, NotSupported, QueueNotFound
from postdate.ports import Completion, Receiver, Settlement, Transport
from postdate.testing.conformance import Topic, expect, expect_equal, expect_error, expect_in_time
from postdate.testing.transport_suite.subject import (
    IN,
    NOW,
    OUT,
    TransportSubject,
    closing,
    envelope,
    ids,
    ids_in,
    is_empty,
    open_queues,
    open_receiver,
    receive,
    receive_all,
    receive_and_commit_one,
    receive_one,
    receiver_of,
    run_other_tasks,
)

receiving: Topic[TransportSubject] = Topic("receiving")


@receiving.with_fixtures(open_receiver)
async def up_to_the_limit_is_received(transport: Transport, receiver: Receiver) -> None:
    """Receiving takes the oldest messages, no more than asked for, and never none."""
    await transport.send([envelope(f"{n}") for n in range(5)], NOW)
    received = list[str]()
    while len(received) < 5:  # a broker that pushes may have delivered only some of the messages of its queue
        batch = ids(await receive(receiver, 2))
        expect(0 < len(batch) <= 2, f"one or two messages, got {batch}")
        received += batch
    expect_equal(received, ["0", "1", "2", "3", "4"], "messages in order")


@receiving.with_fixtures(open_receiver)
async def receiving_waits_for_a_message(transport: Transport, receiver: Receiver) -> None:
    """Receiving from an empty queue waits; a message sent then is received."""
    with expect_in_time("receiving a message sent later"):
        async with _receive_in_background(receiver) as received:
            expect_equal(received, [], "received from an empty queue")
            await transport.send([envelope()], NOW)
    expect_equal(received, ["e-1"], "received")


@receiving.with_fixtures(open_receiver)
async def an_empty_queue_need_not_be_waited_for(transport: Transport, receiver: Receiver) -> None:
    """Without waiting, a queue answers at once, be it empty; what comes later is received."""
    with expect_in_time("an answer of an empty queue"):
        expect_equal(list(await receiver.receive(10, wait=False)), [], "received from an empty queue")
    await transport.send([envelope()], NOW)
    expect_equal(ids(await receive(receiver)), ["e-1"], "received")


@asynccontextmanager
async def _receive_in_background(receiver: Receiver) -> AsyncGenerator[list[str]]:
    """Let a receiver wait during the block; at its end, the list has the ids of the received messages."""
    received: list[str] = []

    async def wait_for_one() -> None:
        received.extend(ids(await receiver.receive(10)))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait_for_one)
        await run_other_tasks()
        yield received


@receiving.with_fixture(open_queues)
async def several_end_at_once(transport: Transport) -> None:
    """Settling: all messages leave the queue, and what is sent with each arrives."""
    await transport.send([envelope(f"{n}") for n in range(5)], NOW)
    ends = [Completion(outgoing=[envelope(f"{n}-{which}", OUT) for which in "ab"] if n % 2 else []) for n in range(5)]
    async with receiver_of(transport) as receiver:
        messages = await receive_all(receiver, 5)
        errors = await receiver.settle([Settlement(each, NOW, end) for each, end in zip(messages, ends, strict=True)])
        expect_equal(list(errors), [None] * 5, "what settling says")
        expect_equal(sorted(await ids_in(transport, OUT, 4)), ["1-a", "1-b", "3-a", "3-b"], "sent messages")
    expect(await is_empty(transport, IN), "all have left the queue")


@receiving.with_fixtures(open_receiver)
async def one_that_cannot_end_keeps_no_other_from_it(transport: Transport, receiver: Receiver) -> None:
    """Settling: a lost hold and a missing queue are errors of their own messages; all others leave the queue."""
    await transport.send([envelope(f"{n}") for n in range(5)], NOW)
    messages = await receive_all(receiver, 5)
    await receiver.commit(messages[1], NOW)
    ends = [
        Completion(),
        Completion(),
        Completion(outgoing=[envelope("bad", "missing")]),
        Completion(outgoing=[envelope("good", OUT)]),
        Completion(),
    ]
    errors = await receiver.settle([Settlement(each, NOW, end) for each, end in zip(messages, ends, strict=True)])
    kinds = [None, ClaimLost, QueueNotFound, None, None]
    expect_equal([error and type(error) for error in errors], kinds, "what settling says")
    expect_equal(await ids_in(transport, OUT, 1), ["good"], "sent messages")
    await receiver.roll_back(messages[2])
    expect_equal(ids(await receive(receiver)), ["2"], "what could not end is held, and goes back")


@receiving.with_fixture(open_queues)
async def a_missing_queue_raises(transport: Transport) -> None:
    """Receiving from a queue that does not exist raises QueueNotFound."""
    async with receiver_of(transport, "missing") as receiver:
        with expect_error(QueueNotFound, "receiving from a missing queue"):
            await receive(receiver)


@receiving.with_fixture(open_queues)
async def a_message_is_taken_by_its_id(transport: Transport) -> None:
    """Taking: the message asked for is held, whatever is before it; none if it is held already or not there."""
    await transport.send([envelope("first"), envelope("second")], NOW)
    receiver = transport.receiver(IN)
    if not transport.capabilities.receives_by_id:
        with expect_error(NotSupported, "taking from a queue that gives messages in their order only"):
            await receiver.receive_by_id("second")
        return
    received = await receiver.receive_by_id("second")
    expect(received is not None and received.envelope.message_id == "second", "the message asked for is taken")
    expect(await receiver.receive_by_id("second") is None, "a held message is not taken")
    expect(await receiver.receive_by_id("unknown") is None, "a message that is not there is not taken")
    expect_equal(ids(await receive(receiver)), ["first"], "received beside the one taken")
    with expect_error(QueueNotFound, "taking from a missing queue"):
        await transport.receiver("missing").receive_by_id("first")
    assert received is not None
    await receiver.commit(received, NOW)
    await receiver.close()
    expect_equal(await ids_in(transport, IN, 1), ["first"], "what is left")


@receiving.with_fixture(open_queues)
async def a_held_message_is_hidden(transport: Transport) -> None:
    """A message that one receiver holds is received by no other."""
    await transport.send([envelope("held"), envelope("free")], NOW)
    async with receiver_of(transport) as one, receiver_of(transport) as other:
        expect_equal(ids(await receive(one, 1)), ["held"], "held by one")
        expect_equal(ids(await receive(other)), ["free"], "received by the other")


@receiving.with_fixture(open_queues)
async def competing_receivers_share_the_messages(transport: Transport) -> None:
    """Four receivers that compete receive every message, each of them once."""
    await transport.send([envelope(f"{n}") for n in range(60)], NOW)
    received: Counter[str] = Counter()
    all_received = anyio.Event()

    async def compete() -> None:
        receiver = transport.receiver(IN)
        while received.total() < 60:
            for each in await receiver.receive(3):
                await receiver.commit(each, NOW)
                received[each.envelope.message_id] += 1
        all_received.set()

    with expect_in_time("receiving 60 messages"):
        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(compete)
            await all_received.wait()
            tasks.cancel_scope.cancel()
    expect_equal(received, Counter(f"{n}" for n in range(60)), "received")
    expect(await is_empty(transport, IN), "nothing is left in the queue")


@receiving.with_fixture(open_queues)
async def a_committed_message_is_gone(transport: Transport) -> None:
    """After a commit the message is not received again."""
    await transport.send([envelope()], NOW)
    await receive_and_commit_one(transport)
    expect(await is_empty(transport, IN), "the queue is empty after the commit")


@receiving.with_fixtures(open_receiver)
async def a_message_rolled_back_is_received_again(transport: Transport, receiver: Receiver) -> None:
    """After a rollback the message is received again, unchanged, with one failure more, or none if told so."""
    await transport.send([envelope(headers={"é": "🕰"}, body=b"\0body")], NOW)
    first = await receive_one(receiver)
    failures = [first.failures]
    for failed in (True, True, False):
        await receiver.roll_back(await receive_one(receiver) if len(failures) > 1 else first, failed=failed)
        again = await receive_one(receiver)
        expect_equal(again.envelope, first.envelope, "the message after a rollback")
        failures.append(again.failures)
        await receiver.roll_back(again, failed=False)
    expect_equal(failures, [0, 1, 2, 2], "failures")


@receiving.with_fixture(open_queues)
async def a_message_rolled_back_wakes_others(transport: Transport) -> None:
    """A message that one receiver gives back is received by another one that waits."""
    await transport.send([envelope()], NOW)
    async with receiver_of(transport) as one, receiver_of(transport) as other:
        first = await receive_one(one)
        with expect_in_time("receiving what another receiver gave back"):
            async with _receive_in_background(other) as received:
                await one.roll_back(first)
        expect_equal(received, ["e-1"], "received by the other")


@receiving.with_fixture(open_queues)
async def closing_gives_back_what_is_held(transport: Transport) -> None:
    """A receiver that is closed gives everything back it holds, without counting failures."""
    await transport.send([envelope(f"{n}") for n in range(3)], NOW)
    async with receiver_of(transport) as receiver:
        await receiver.commit((await receive(receiver))[1], NOW)
    async with receiver_of(transport) as other:
        again = await receive(other)
        expect_equal(sorted(ids(again)), ["0", "2"], "received after closing")
        expect_equal([each.failures for each in again], [0, 0], "failures")


@receiving
async def nothing_more_comes_to_a_stopped_receiver(subject: TransportSubject) -> None:
    """Once stopped, a receiver still ends messages that it holds; others get the rest, as if never received before."""
    async with open_queues(subject) as transport:
        await transport.send([envelope(f"{n}") for n in range(4)], NOW)
        other = subject.open_elsewhere() if transport.capabilities.durable else transport
        async with closing(other), receiver_of(transport) as stopped, receiver_of(other) as elsewhere:
            committed, returned = await receive_all(stopped, 2)
            stopped.stop()
            await stopped.commit(committed, NOW)
            await stopped.roll_back(returned)
            failures = {each.envelope.message_id: each.failures for each in await receive_all(elsewhere, 3)}
            expect_equal(sorted(failures), ["1", "2", "3"], "received by another receiver")
            expect_equal((failures["2"], failures["3"]), (0, 0), "failures of what the stopped one did not hold")


@receiving.with_fixtures(open_receiver)
async def a_lost_hold_is_noticed(transport: Transport, receiver: Receiver) -> None:
    """Committing a message that was committed or given back raises ClaimLost, received again meanwhile or not."""
    await transport.send([envelope("committed"), envelope("given-back")], NOW)
    committed, returned = await receive_all(receiver, 2)
    await receiver.commit(committed, NOW)
    await receiver.roll_back(returned)
    for received in (committed, returned):
        with expect_error(ClaimLost, f"committing a message that was {received.envelope.message_id}"):
            await receiver.commit(received, NOW)
    again = await receive_one(receiver)
    expect_equal(again.envelope.message_id, "given-back", "received again")
    with expect_error(ClaimLost, "committing with the hold of before"):
        await receiver.commit(returned, NOW)
    await receiver.commit(again, NOW)


@receiving.with_fixtures(open_receiver)
async def a_cancelled_receive_loses_nothing(transport: Transport, receiver: Receiver) -> None:
    """Receiving may be cancelled at any moment: every message is still received, once."""
    received: Counter[str] = Counter()

    async def receive_until_cancelled() -> None:
        while True:
            received.update(ids(await receiver.receive(2)))

    for number in range(40):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(receive_until_cancelled)
            for _ in range(number % 8):
                await anyio.lowlevel.checkpoint()
            await transport.send([envelope(f"{number}")], NOW)
            for _ in range(number % 5):
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
    while received.total() < 40:
        received.update(ids(await receive(receiver)))
    expect_equal(received, Counter(f"{number}" for number in range(40)), "received")

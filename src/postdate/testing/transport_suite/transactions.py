"""Checks that receiving a message, and the sends and work of its handler, are one transaction."""

from __future__ import annotations

from functools import partial

from postdate.core.simple_store import enlisting_store
from postdate.endpoint.delayed_delivery import check_transport_mode
from postdate.errors import ClaimLost, DuplicateMessage, MessageTooLarge, QueueNotFound, UnsupportedTransactionMode
from postdate.messages import DelayedMessage
from postdate.ports import Completion, NativeTransaction, Receiver, Settlement, TransactionMode, Transport
from postdate.testing.conformance import Topic, expect, expect_equal, expect_error
from postdate.testing.store_suite.subject import close_adapter
from postdate.testing.transport_suite.subject import (
    IN,
    NOW,
    OUT,
    SECOND,
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
    receive_one,
    receiver_of,
)

transactions: Topic[TransportSubject] = Topic("transactions")
capabilities: Topic[TransportSubject] = Topic("capabilities")


def _is_atomic(transport: Transport) -> bool:
    return TransactionMode.SENDS_ATOMIC_WITH_RECEIVE in transport.capabilities.transaction_modes


@transactions.with_fixtures(open_receiver)
async def outgoing_messages_leave_with_the_commit(transport: Transport, receiver: Receiver) -> None:
    """Messages sent with a commit arrive, in order, and the received message is gone."""
    await transport.send([envelope()], NOW)
    end = Completion(outgoing=[envelope("a", OUT), envelope("b", OUT), envelope("c", IN)])
    await receiver.commit(await receive_one(receiver), NOW, end)
    expect_equal(await ids_in(transport, OUT, 2), ["a", "b"], "sent messages")
    expect_equal(ids(await receive(receiver)), ["c"], "messages in the queue received from")


@transactions.with_fixtures(partial(open_receiver, largest_message_bytes=1_000))
async def one_bad_outgoing_message_undoes_the_commit(transport: Transport, receiver: Receiver) -> None:
    """Sends atomic with receive: a missing queue or too large a message is raised, nothing sent, the hold remains."""
    if not _is_atomic(transport):
        return
    await transport.send([envelope()], NOW)
    received = await receive_one(receiver)
    good = envelope("good", OUT)
    with expect_error(QueueNotFound, "committing with a missing queue among the outgoing messages"):
        await receiver.commit(received, NOW, Completion(outgoing=[good, envelope("bad", "missing"), good]))
    with expect_error(MessageTooLarge, "committing with a message too large among the outgoing messages"):
        await receiver.commit(received, NOW, Completion(outgoing=[good, envelope("bad", OUT, body=b"x" * 1_001)]))
    expect(await is_empty(transport, OUT), "nothing was sent")
    await receiver.commit(received, NOW, Completion(outgoing=[envelope("sent", OUT)]))
    expect_equal(await ids_in(transport, OUT, 1), ["sent"], "sent with the commit that succeeded")


@transactions.with_fixtures(open_receiver)
async def a_lost_hold_sends_nothing(transport: Transport, receiver: Receiver) -> None:
    """Sends atomic with receive: a commit that comes too late raises ClaimLost and sends nothing."""
    if not _is_atomic(transport):
        return
    await transport.send([envelope()], NOW)
    received = await receive_one(receiver)
    await receiver.commit(received, NOW)
    with expect_error(ClaimLost, "committing a second time"):
        await receiver.commit(received, NOW, Completion(outgoing=[envelope("twice", OUT)]))
    expect(await is_empty(transport, OUT), "nothing was sent")


@capabilities.with_fixture(open_queues)
async def declared_modes_are_accepted_and_others_refused(transport: Transport) -> None:
    """A declared transaction mode is accepted; any other is refused at start-up, by name."""
    for mode in TransactionMode:
        if mode in transport.capabilities.transaction_modes:
            check_transport_mode(transport, mode)
        else:
            with expect_error(UnsupportedTransactionMode, f"mode {mode.value}"):
                check_transport_mode(transport, mode)


@capabilities
async def a_durable_queue_keeps_its_messages(subject: TransportSubject) -> None:
    """Durable: messages are still there after closing and opening again; not durable: they are not."""
    async with open_queues(subject) as transport:
        durable = transport.capabilities.durable
        await transport.send([envelope()], NOW)
    async with open_queues(subject) as transport:
        if durable:
            expect_equal(await ids_in(transport, IN, 1), ["e-1"], "messages after reopening")
        else:
            expect(await is_empty(transport, IN), "a transport that is not durable has forgotten its messages")


@capabilities
async def other_processes_share_the_queues(subject: TransportSubject) -> None:
    """Durable: a message that another process holds is hidden until that process ends; commits are final."""
    async with open_queues(subject) as transport:
        if not transport.capabilities.durable:
            return
        await transport.send([envelope("a"), envelope("b")], NOW)
        async with receiver_of(transport) as receiver:
            async with closing(subject.open_elsewhere()) as other:
                received = await receive_one(other.receiver(IN))
                expect_equal(ids(await receive(receiver)), ["b"], "received while another process holds a message")
                with expect_error(ClaimLost, "committing what another process holds"):
                    await receiver.commit(received, NOW)
            expect_equal(ids(await receive(receiver)), ["a"], "received after the other process ended")


@capabilities
async def other_processes_are_woken(subject: TransportSubject) -> None:
    """Durable: a receiver that waits receives messages that another process sends."""
    async with open_queues(subject) as transport:
        if not transport.capabilities.durable:
            return
        async with receiver_of(transport) as receiver, closing(subject.open_elsewhere()) as other:
            await other.send([envelope()], NOW)
            expect_equal(ids(await receive(receiver)), ["e-1"], "received from another process")


@capabilities
async def work_of_a_database_is_done_or_refused(subject: TransportSubject) -> None:
    """In a database: work is part of the transaction, both ways. Elsewhere: work is refused and nothing is sent."""
    async with open_queues(subject) as transport:
        await transport.send([envelope()], NOW)
        receiver = transport.receiver(IN)
        received = await receive_one(receiver)
        if transport.capabilities.database is None:
            with expect_error(UnsupportedTransactionMode, f"sending with work through {type(subject).__name__}"):
                await transport.send([envelope("x", OUT)], NOW, work=[_raise_claim_lost])
            with expect_error(UnsupportedTransactionMode, "committing with work"):
                await receiver.commit(
                    received, NOW, Completion(outgoing=[envelope("x", OUT)], work=[_raise_claim_lost])
                )
            expect(await is_empty(transport, OUT), "nothing was sent")
            await receiver.commit(received, NOW)
            return
        with expect_error(ClaimLost, "committing with work that fails"):
            await receiver.commit(received, NOW, Completion(outgoing=[envelope("x", OUT)], work=[_raise_claim_lost]))
        with expect_error(ClaimLost, "sending with work that fails"):
            await transport.send([envelope("x", OUT)], NOW, work=[_raise_claim_lost])
        expect(await is_empty(transport, OUT), "nothing was sent with work that failed")
        store = subject.store()
        try:
            expect(enlisting_store(store, transport) is not None, "the store shares transactions with the transport")
            work = store.storing_work([DelayedMessage("stored", NOW, OUT)], NOW)
            twice = Completion(outgoing=[envelope("x", OUT)], work=[work, work])
            with expect_error(DuplicateMessage, "committing with work that stores an id twice"):
                await receiver.commit(received, NOW, twice)
            (error,) = await receiver.settle([Settlement(received, NOW, twice)])
            expect(isinstance(error, DuplicateMessage), f"settling with it is refused for that, too, not {error!r}")
            expect(await is_empty(transport, OUT), "nothing was sent with a message under a known id")
            await receiver.commit(received, NOW, Completion(outgoing=[envelope("sent", OUT)], work=[work]))
            expect_equal(await ids_in(transport, OUT, 1), ["sent"], "sent with the work")
            claims = await store.claim_due(NOW + SECOND, 10)
            expect_equal([claim.message.message_id for claim in claims], ["stored"], "stored with the commit")
        finally:
            await receiver.close()
            await close_adapter(store)


def _raise_claim_lost(transaction: NativeTransaction) -> None:
    raise ClaimLost("the work of this check fails on purpose")


@capabilities.with_fixtures(open_receiver)
async def expired_messages_are_discarded_or_left_to_the_receiver(transport: Transport, receiver: Receiver) -> None:
    """A transport that says so discards expired messages; any other delivers them, for the endpoint to discard."""
    await transport.send([envelope("lapsed", expires_at=NOW.replace(year=2000)), envelope("fresh")], NOW)
    expected = ["fresh"] if transport.capabilities.expires_messages else ["lapsed", "fresh"]
    expect_equal(ids(await receive_all(receiver, len(expected))), expected, "received")

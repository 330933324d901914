"""Storage in the database of the queues changes in their transaction, or not at all."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from postdate.errors import NotSupported, TimeoutConcurrentlyProcessed
from postdate.messages import Envelope
from postdate.ports import Transport
from postdate.ports.timeouts import TimeoutPersister
from postdate.testing.conformance import Topic, expect_equal, expect_error
from postdate.testing.timeout_suite.subject import NOW, QUEUE, SAGA, TimeoutSubject, prepared, timeout, timeout_id

enlisting: Topic[TimeoutSubject] = Topic("enlisting")

_MESSAGE = Envelope(QUEUE, "m-1")


@asynccontextmanager
async def _together(subject: TimeoutSubject) -> AsyncGenerator[tuple[TimeoutPersister, Transport] | None]:
    """Open storage and queues of one database; ``None`` when the storage does not say that it can share one."""
    async with prepared(subject.open()) as persister:
        if persister.database is None:
            with expect_error(NotSupported, "work in a transaction of storage that shares none"):
                persister.removing(timeout_id(1))
            yield None
            return
        transport = subject.transport()
        try:
            await transport.create_queues([QUEUE])
            yield persister, transport
        finally:
            await transport.close()


async def _waiting(transport: Transport) -> list[str]:
    """Take all messages out of the queue, and return their ids."""
    receiver = transport.receiver(QUEUE)
    try:
        received = await receiver.receive(10)
        for each in received:
            await receiver.commit(each, NOW)
        return [each.envelope.message_id for each in received]
    finally:
        await receiver.close()


@enlisting.given(_together)
async def it_names_the_database_of_the_queues(persister: TimeoutPersister, transport: Transport) -> None:
    """Storage and queues on one database say so, by an equal value: that is what a timeout manager compares."""
    expect_equal(persister.database, transport.capabilities.database, "the database")


@enlisting.given(_together)
async def a_timeout_is_added_with_the_transaction(persister: TimeoutPersister, transport: Transport) -> None:
    """A timeout added in a transaction of the queues is there after its commit, and not after its failure (row 100)."""
    with expect_error(TimeoutConcurrentlyProcessed, "a transaction that fails after a timeout was added in it"):
        await transport.send([], NOW, work=[persister.adding(timeout()), persister.removing(timeout_id(2))])
    expect_equal(await persister.peek(timeout_id(1)), None, "a timeout of a transaction that failed")
    for _ in range(2):  # storing it again changes nothing and is no failure
        await transport.send([], NOW, work=[persister.adding(timeout())])
    expect_equal(await persister.peek(timeout_id(1)), timeout(), "a timeout of a transaction")


@enlisting.given(_together)
async def a_timeout_is_removed_with_what_is_sent(persister: TimeoutPersister, transport: Transport) -> None:
    """Sending and removing are one: if the timeout is gone, nothing is sent (4.8, row 100)."""
    await persister.add(timeout())
    await transport.send([_MESSAGE], NOW, work=[persister.removing(timeout_id(1))])
    expect_equal(await persister.peek(timeout_id(1)), None, "a timeout that was sent")
    expect_equal(await _waiting(transport), ["m-1"], "what was sent")
    for gone in (timeout_id(1), "no uuid"):
        with expect_error(TimeoutConcurrentlyProcessed, f"removing {gone}, which is gone"):
            await transport.send([_MESSAGE], NOW, work=[persister.removing(gone)])
    await transport.send([Envelope(QUEUE, "m-2")], NOW)
    expect_equal(await _waiting(transport), ["m-2"], "what was sent beside a timeout that was gone: nothing")


@enlisting.given(_together)
async def a_saga_ends_with_the_transaction(persister: TimeoutPersister, transport: Transport) -> None:
    """All timeouts of a saga are removed in a transaction of the queues; none of no saga (4.5)."""
    for number, saga in enumerate((SAGA, SAGA, None), 1):
        await persister.add(timeout(number, saga_id=saga))
    work = [persister.removing_by_saga(SAGA), persister.removing_by_saga(timeout_id(0))]
    await transport.send([], NOW, work=work)
    left = [number for number in (1, 2, 3) if await persister.peek(timeout_id(number)) is not None]
    expect_equal(left, [3], "timeouts that are left")

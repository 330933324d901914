"""What is returned or discarded by one command is what was in the error queue when it began, on every transport."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace

import anyio
import pytest
from tests.cli.test_needs import UncountedTransport
from tests.waiting import until

from postdate import Headers, operations
from postdate.clock import SystemClock
from postdate.config import load_settings
from postdate.errors import QueueNotFound
from postdate.messages import Envelope, format_timestamp
from postdate.ports import Completion, RecordKind, Transport
from postdate.testing import TransportSubject
from postdate.testing.transport_suite.subject import IN, OUT, SECOND, closing, ids_in, open_queues, receive_all
from postdate.wiring import OpenDeployment

START = SystemClock().now()
COUNT = 20


def failed(message_id: str, sent_as: str, body: bytes = b"{}", seconds: int = -1) -> Envelope:
    headers = {
        Headers.MESSAGE_ID: sent_as,
        Headers.FAILED_QUEUE: OUT,
        Headers.EXCEPTION_TYPE: "builtins.ValueError",
        Headers.TIME_OF_FAILURE: format_timestamp(START + seconds * SECOND),
    }
    return Envelope(IN, message_id, headers, body)


@asynccontextmanager
async def failing(transport: Transport) -> AsyncGenerator[list[str]]:
    """Receive what is returned and let it fail at once, as after a delayed retry; yield the ids that were received."""
    received_ids = list[str]()

    async def fail() -> None:
        async with closing(transport.receiver(OUT)) as receiver:
            while True:
                for received in await receiver.receive(1):
                    id_ = received.envelope.message_id
                    received_ids.append(id_)
                    sent_as = received.envelope.headers[Headers.MESSAGE_ID]
                    again = failed(f"{id_}.again", sent_as, received.envelope.body, seconds=len(received_ids))
                    await receiver.commit(received, START, Completion(RecordKind.FAILED, outgoing=[again]))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(fail)
        yield received_ids
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def filled(transport: Transport) -> AsyncGenerator[OpenDeployment]:
    messages = [failed(f"m{n}", f"m{n}", (b"odd", b"even")[n % 2 == 0]) for n in range(COUNT)]
    assert await transport.send(messages, START) == [None] * COUNT
    yield OpenDeployment(load_settings(None, {}), None, transport, None, transport.observer())


async def all_are_back(transport: Transport, count: int = COUNT) -> None:
    """Wait until a server counts what was given back: quorum queues of RabbitMQ do so a moment later."""

    async def counted() -> bool:
        lengths = await transport.lengths_of([IN, OUT])
        return lengths is None or sum(lengths.values()) >= count

    await until(counted)


@pytest.fixture(autouse=True)
def short_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("postdate.operations.error_queue._PAGE", 3)


async def test_each_failed_message_is_returned_once_while_its_cause_is_still_there(
    transport_subject: TransportSubject,
) -> None:
    async with open_queues(transport_subject) as transport, filled(transport) as here:
        await check_returned_once(here)


async def test_so_it_is_where_queues_cannot_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("postdate.operations.queues._LAST_MESSAGE_SECONDS", 0.1)
    transport = UncountedTransport()
    await transport.create_queues([IN, OUT])
    async with filled(transport) as here:
        await check_returned_once(here)


async def test_nor_does_it_go_on_with_what_fails_on_a_machine_whose_clock_is_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such a failure is dated before the command began. The message keeps its id, as one that has no queue does."""
    monkeypatch.setattr("postdate.operations.queues._LAST_MESSAGE_SECONDS", 0.1)
    transport = UncountedTransport()
    await transport.create_queues([IN, OUT])
    async with filled(transport) as here, anyio.create_task_group() as tasks:

        async def fail() -> None:
            async with closing(transport.receiver(OUT)) as receiver:
                while True:
                    for received in await receiver.receive(1):
                        id_ = received.envelope.message_id
                        again = failed(id_, id_, received.envelope.body, seconds=-3_600)
                        await receiver.commit(received, START, Completion(RecordKind.FAILED, outgoing=[again]))

        tasks.start_soon(fail)
        results = await operations.return_all(here, IN, START, progress=heard)
        assert sorted(each.message_id for each in results) == sorted(f"m{n}" for n in range(COUNT))
        tasks.cancel_scope.cancel()


def heard(count: int) -> None:
    assert count <= COUNT, "it goes on with what failed again"


async def check_returned_once(here: OpenDeployment) -> None:
    async with failing(here.transport) as handled:
        results = await operations.return_all(here, IN, START, progress=heard)
        assert sorted(each.message_id for each in results) == sorted(f"m{n}" for n in range(COUNT))
        assert all(each.done for each in results)
        await until(lambda: len(handled) == COUNT)
    assert sorted(handled) == sorted(f"m{n}" for n in range(COUNT))


async def test_those_that_match_are_returned_or_discarded_and_the_others_stay(
    transport_subject: TransportSubject,
) -> None:
    odd, even = operations.ErrorFilter(text="odd"), operations.ErrorFilter(text="even")
    discarding = operations.Treatment(discard=True)
    async with open_queues(transport_subject) as transport, filled(transport) as here:
        dry = await operations.return_all(here, IN, START, odd, operations.Treatment(dry_run=True))
        await all_are_back(transport)
        async with failing(transport):
            results = await operations.return_all(here, IN, START, odd, progress=heard)
        assert {each.message_id for each in results} == {f"m{n}" for n in range(1, COUNT, 2)}
        assert sorted(each.message_id for each in dry) == sorted(each.message_id for each in results)
        await all_are_back(transport)
        gone = await operations.return_all(here, IN, START, even, discarding)
        assert {each.message_id for each in gone} == {f"m{n}" for n in range(0, COUNT, 2)}


async def test_what_was_edited_is_returned_by_its_own_id_only(transport_subject: TransportSubject) -> None:
    """Or both would be handled: the message that was made of it was sent in its place."""
    async with open_queues(transport_subject) as transport:
        await transport.send([failed("m1", "m1"), failed("m2", "m2")], START)
        here = OpenDeployment(load_settings(None, {}), None, transport, None, transport.observer())
        sent = await operations.edit(here, IN, "m1", START, operations.Edit(b"new", {"own": "1"}, None))
        for how in (operations.Treatment(dry_run=True), operations.Treatment()):
            await all_are_back(transport, 3)
            results = {each.message_id: each for each in await operations.return_all(here, IN, START, treatment=how)}
            assert (results["m1"].done, results["m2"].done) == (False, True)
            assert f"it was edited and sent as {sent.message_id}" in results["m1"].remark
        assert sorted(await ids_in(transport, OUT, 2)) == sorted([sent.message_id, "m2"])
        await all_are_back(transport, 3)
        details = await operations.show_error(here, IN, "m1", START)
        assert details.headers[Headers.EDITED_AS] == sent.message_id
        await all_are_back(transport, 3)
        with pytest.raises(QueueNotFound):
            await operations.edit(here, IN, "m1", START, operations.Edit(b"newer", {}, "nowhere"))
        await all_are_back(transport, 3)
        (returned,) = await operations.return_messages(here, IN, ["m1"], START)
        assert returned.done
        bodies = dict[str, bytes]()
        async with closing(transport.receiver(OUT)) as receiver:
            for received in await receive_all(receiver, 3):
                bodies[received.envelope.message_id] = received.envelope.body
                assert Headers.EDITED_AS not in received.envelope.headers
        assert bodies == {sent.message_id: b"new", "m1": b"{}", "m2": b"{}"}


@pytest.mark.parametrize("treatment", [operations.Treatment(), operations.Treatment(discard=True)])
async def test_a_filter_never_reaches_another_message_with_the_same_id(
    transport_subject: TransportSubject, treatment: operations.Treatment
) -> None:
    """Two endpoints share an error queue, or a program sends one id to two queues. The older one was discarded."""
    async with open_queues(transport_subject) as transport:
        bill = failed("order-7", "order-7", b"the bill")
        bill = replace(bill, headers={**bill.headers, Headers.EXCEPTION_TYPE: "builtins.OSError"})
        mail = failed("order-7", "order-7", b"the mail")
        assert await transport.send([bill, mail], START) == [None, None]
        deployment = OpenDeployment(load_settings(None, {}), None, transport, None, transport.observer())
        wanted = operations.ErrorFilter(exception="builtins.ValueError")
        (result,) = await operations.return_all(deployment, IN, START, wanted, treatment)
        assert result.done
        async with closing(transport.receiver(IN)) as receiver:
            (left,) = await receive_all(receiver, 1)
            assert left.envelope.body == b"the bill"
            await receiver.commit(left, START, Completion(None))

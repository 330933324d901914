"""What a broker takes from nobody now - full, out of memory, frozen - costs no message an attempt, and ends at once."""

import signal
import uuid
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from pathlib import Path

import anyio
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from tests.machine import folder_for_servers
from tests.rabbitmq_subjects import channel_of, transport_at
from tests.servers import RabbitMQ, started
from tests.waiting import freeze_processes, until

from postdate import DelayedDelivery, DelayedMessage, Endpoint, Envelope, MemoryStore, SqliteStore, SystemClock
from postdate.backends.rabbitmq.transport import RabbitMqTransport
from postdate.errors import PostdateError, TransportUnavailable, TransportUnreachable
from postdate.ports import RecordKind

pytest_plugins = ["tests.integration.rabbitmq_fixtures"]

NOW = SystemClock().now()
SECOND = timedelta(seconds=1)


@pytest.fixture(scope="module")
def server() -> Generator[RabbitMQ]:
    """A broker of our own, which may be brought into trouble."""
    with folder_for_servers() as folder, started(RabbitMQ(folder / "rabbitmq")) as server:
        yield server


def envelopes(queue: str, count: int) -> list[Envelope]:
    return [Envelope(queue, f"{n}", {}, b"body") for n in range(count)]


@contextmanager
def frozen(server: RabbitMQ) -> Generator[None]:
    """Stop every process of a broker: its connections stay, and nothing answers."""
    processes = server.processes()
    freeze_processes(*(process.pid for process in processes))
    try:
        yield
    finally:
        for process in processes:
            process.send(signal.SIGCONT)


@asynccontextmanager
async def alarm(server: RabbitMQ) -> AsyncGenerator[None]:
    """Make a broker short of memory."""
    await anyio.to_thread.run_sync(server.control, "set_vm_memory_high_watermark", "0")
    try:
        yield
    finally:
        await anyio.to_thread.run_sync(server.control, "set_vm_memory_high_watermark", "0.4")


@asynccontextmanager
async def service(transport: RabbitMqTransport, store: MemoryStore | SqliteStore) -> AsyncGenerator[Endpoint]:
    """Deliver due messages with no retries: whatever counts against a message moves it to the error queue."""
    endpoint = Endpoint(
        f"outages.{uuid.uuid4()}",
        transport=transport,
        delayed_delivery=DelayedDelivery(store, number_of_retries=0),
        error_queue="outages.error",
    )
    async with endpoint:
        yield endpoint


async def until_logged(caplog: pytest.LogCaptureFixture, text: str) -> None:
    await until(lambda: text in caplog.text)


async def store_due(store: MemoryStore | SqliteStore, queue: str, count: int) -> None:
    due = SystemClock().now() - SECOND
    await store.store_many([DelayedMessage(f"{n}", due, queue, {}, b"body") for n in range(count)], due)


async def delivered(store: MemoryStore | SqliteStore) -> int:
    return (await store.record_counts()).get(RecordKind.DELIVERED, 0)


async def test_headers_larger_than_a_frame_that_came_past_the_queues_are_marked(
    rabbitmq_url: str, channel: BlockingChannel, tmp_path: Path
) -> None:
    """Neither the message nor a brief copy of it has room in a frame: both were tried for ever."""
    name = f"postdate.test.{uuid.uuid4()}"
    channel.queue_declare(name, durable=True)
    store = SqliteStore(tmp_path / "store.db", synchronous="normal")
    await store.store(DelayedMessage("large", NOW, name, {"large": "x" * 200_000}), NOW)
    await store_due(store, name, 5)
    async with transport_at(rabbitmq_url) as transport, service(transport, store):
        await until(store.count_unreadable)

        async def others_arrived() -> bool:
            return await delivered(store) == 5

        await until(others_arrived)
    (row,) = await store.list_unreadable(10)
    assert (row.message_id, len(row.raw["headers"]) > 200_000) == ("large", True)
    await store.close()
    channel.queue_delete(name)


async def test_a_full_queue_moves_nothing_to_the_error_queue(rabbitmq_url: str, channel: BlockingChannel) -> None:
    """120 messages to a queue of 50, no retries: 70 of them went to the error queue at the first nack."""
    name = f"postdate.test.{uuid.uuid4()}"
    channel.queue_declare(name, durable=True, arguments={"x-max-length": 50, "x-overflow": "reject-publish"})
    store = MemoryStore()
    await store_due(store, name, 120)
    seen: set[str] = set()
    async with transport_at(rabbitmq_url) as transport, service(transport, store):

        async def emptied() -> bool:
            frame, properties, _ = channel.basic_get(name, auto_ack=True)
            if frame is not None and properties is not None:
                seen.add(properties.message_id or "")
            return len(seen) == 120

        await until(emptied)

        async def all_recorded() -> bool:
            return await delivered(store) == 120

        await until(all_recorded)
    assert (await store.record_counts()).get(RecordKind.FAILED, 0) == 0
    channel.queue_delete(name)


@pytest.mark.soak(
    "brings a broker of its own into trouble",
    part="silence",
    proven_by=(
        "tests/integration/test_rabbitmq_protocol.py::test_a_broker_that_blocks_publishers_is_waited_for_in_vain",
        "tests/integration/test_rabbitmq_protocol.py::test_a_broker_that_takes_messages_again_gets_them",
    ),
)
async def test_a_memory_alarm_is_an_outage_and_its_end_is_noticed_at_once(server: RabbitMQ) -> None:
    async with transport_at(server.url, confirms_within=SECOND) as transport:
        await transport.create_queues(["alarm"])
        assert await transport.send(envelopes("alarm", 1), NOW) == [None]
        answers: Sequence[PostdateError | None] = []
        async with alarm(server):
            for _ in range(3):  # the first is written before the broker says that it takes nothing
                answers = await transport.send(envelopes("alarm", 2), NOW)
                assert [type(answer) for answer in answers] == [TransportUnreachable] * 2
            assert "blocked" in str(answers[0])
        assert await transport.send(envelopes("alarm", 1), NOW) == [None]  # by the same connection


@pytest.mark.soak(
    "brings a broker of its own into trouble",
    part="silence",
    proven_by="tests/integration/test_rabbitmq_protocol.py::test_a_broker_that_takes_messages_again_gets_them",
)
async def test_what_waits_for_the_end_of_an_alarm_goes_when_it_ends(server: RabbitMQ) -> None:
    async with transport_at(server.url, confirms_within=60 * SECOND) as transport:
        await transport.create_queues(["alarm"])
        answers: list[PostdateError | None] = []

        async def send() -> None:
            answers.extend(await transport.send(envelopes("alarm", 3), NOW))

        async with anyio.create_task_group() as tasks, alarm(server):
            tasks.start_soon(send)
        assert answers == [None] * 3


@pytest.mark.soak(
    "brings a broker of its own into trouble",
    part="silence",
    proven_by=(
        "tests/integration/test_rabbitmq_protocol.py::test_a_broker_that_blocks_publishers_is_waited_for_in_vain",
        "tests/unit/test_outages.py::test_no_answer_from_a_transport_that_pipelines_counts_against_nothing",
    ),
)
async def test_messages_wait_while_a_broker_is_short_of_memory(
    server: RabbitMQ, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore()
    async with transport_at(server.url, confirms_within=SECOND) as transport:
        await transport.create_queues(["alarm.due", "outages.error"])
        async with service(transport, store):
            async with alarm(server):
                await store_due(store, "alarm.due", 100)
                await until_logged(caplog, "did not confirm")
                assert await delivered(store) == 0

            async def all_delivered() -> bool:
                return await delivered(store) == 100

            await until(all_delivered)
    assert (await store.record_counts()).get(RecordKind.FAILED, 0) == 0
    assert _length(server, "outages.error") == 0
    assert _length(server, "alarm.due") >= 100


@pytest.mark.soak(
    "freezes a broker of its own",
    part="silence",
    proven_by="tests/integration/test_rabbitmq.py::test_a_broker_that_says_nothing_is_left_and_leaving_does_not_wait",
)
async def test_a_frozen_broker_is_an_outage_its_connection_is_left_and_leaving_does_not_wait(server: RabbitMQ) -> None:
    async with transport_at(f"{server.url}?heartbeat=2", confirms_within=4 * SECOND) as transport:
        await transport.create_queues(["frozen"])
        receiver = transport.receiver("frozen")
        assert await transport.send(envelopes("frozen", 1), NOW) == [None]
        (held,) = await receiver.receive(1)
        await receiver.commit(held, NOW)
        with frozen(server):
            answers = await transport.send(envelopes("frozen", 2), NOW)
            assert [type(answer) for answer in answers] == [TransportUnreachable] * 2
            assert "sends nothing" in str(answers[0])
            (again,) = await transport.send(envelopes("frozen", 1), NOW)
            assert isinstance(again, TransportUnreachable)
            assert "sends nothing" not in str(again)  # it has been left: nothing more is written to it
            await receiver.close()
            await transport.close()
    async with transport_at(server.url) as transport:
        answers = await until_answered(transport, "frozen")
        assert answers == [None]


async def until_answered(transport: RabbitMqTransport, queue: str) -> Sequence[PostdateError | None]:
    answers: Sequence[PostdateError | None] = [TransportUnreachable("not yet")]

    async def attempt() -> bool:
        nonlocal answers
        answers = await transport.send(envelopes(queue, 1), NOW)
        return not isinstance(answers[0], TransportUnavailable)

    await until(attempt)
    return answers


@pytest.mark.soak(
    "freezes a broker of its own",
    part="silence",
    proven_by=(
        "tests/integration/test_rabbitmq.py::test_a_broker_that_says_nothing_is_left_and_leaving_does_not_wait",
        "tests/unit/test_outages.py::test_no_answer_from_a_transport_that_pipelines_counts_against_nothing",
    ),
)
async def test_messages_wait_while_a_broker_is_frozen(server: RabbitMQ, caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    async with transport_at(f"{server.url}?heartbeat=2", confirms_within=3 * SECOND) as transport:
        await transport.create_queues(["frozen.due", "outages.error"])
        async with service(transport, store):
            with frozen(server):
                await store_due(store, "frozen.due", 100)
                await until_logged(caplog, "did not confirm")
                assert await delivered(store) == 0

            async def all_delivered() -> bool:
                return await delivered(store) == 100

            await until(all_delivered)
    assert (await store.record_counts()).get(RecordKind.FAILED, 0) == 0
    assert _length(server, "outages.error") == 0


@pytest.mark.soak(
    "freezes a broker of its own",
    part="silence",
    proven_by="tests/integration/test_rabbitmq.py::test_a_receiver_notices_a_silent_broker_by_its_heartbeats",
)
async def test_a_receiver_notices_a_frozen_broker_and_receives_when_it_wakes(server: RabbitMQ) -> None:
    async with transport_at(f"{server.url}?heartbeat=1") as transport:
        await transport.create_queues(["frozen.in"])
        receiver = transport.receiver("frozen.in")
        await transport.send(envelopes("frozen.in", 1), NOW)
        (held,) = await receiver.receive(1)
        await receiver.commit(held, NOW)
        with frozen(server), pytest.raises(TransportUnreachable, match="silent"):
            await receiver.receive(1)
        assert await until_answered(transport, "frozen.in") == [None]

        async def came() -> bool:
            try:
                return bool(await receiver.receive(1))
            except TransportUnavailable:
                return False

        await until(came)
        await receiver.close()


def _length(server: RabbitMQ, queue: str) -> int:
    with channel_of(server.url) as channel:
        return channel.queue_declare(queue, passive=True).method.message_count

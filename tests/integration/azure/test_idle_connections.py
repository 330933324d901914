"""Connections that end while they are idle: nothing is lost, doubled, or said to be an outage."""

import logging
import uuid
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import timedelta

import pytest
from tests.azure_store_subjects import TablePlace
from tests.azure_subjects import delete_queues
from tests.integration.azure.idle import Ending, IdleEnding
from tests.waiting import until

from postdate import DelayedDelivery, DelayedMessage, Endpoint, Envelope, HandlerContext, SystemClock
from postdate.backends.azure.login import AzureLogin, parse_login
from postdate.backends.azure.store import AzureTableStore
from postdate.backends.azure.transport import AzureStorageQueueTransport
from postdate.ports import Outcome, Received, RecordKind, TransactionMode

SECOND = timedelta(seconds=1)
AT_ONCE = 8


class Ways:
    """Ways to all services of the account.

    Args:
        login: by these ways.
        each: by service.
    """

    def __init__(self, login: AzureLogin, each: dict[str, IdleEnding]) -> None:
        self.login, self._each = login, each

    def end_idle(self) -> None:
        for way in self._each.values():
            way.end_idle()

    @property
    def ended(self) -> dict[str, int]:
        return {service: way.ended for service, way in self._each.items()}


@pytest.fixture(params=Ending, ids=lambda ending: ending.value)
async def ways(request: pytest.FixtureRequest, azurite_connection: str) -> AsyncGenerator[Ways]:
    login = parse_login(azurite_connection)
    async with AsyncExitStack() as stack:
        each = {
            service: await stack.enter_async_context(IdleEnding(url, request.param).listening())
            for service, url in login.endpoints.items()
        }
        yield Ways(replace(login, endpoints={service: way.url for service, way in each.items()}), each)


@pytest.fixture
async def queue(azurite_connection: str) -> AsyncGenerator[str]:
    login, name = parse_login(azurite_connection), f"t{uuid.uuid4().hex[:12]}"
    async with login.create_queue_service() as service:
        await service.create_queue(name)
    yield name
    await delete_queues(login, name)


@pytest.fixture
async def place(azurite_connection: str) -> AsyncGenerator[TablePlace]:
    place = TablePlace(azurite_connection)
    yield place
    await place.close()


def worst(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


async def test_sender_and_receiver_go_on_as_if_nothing_had_been(
    ways: Ways, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    now = SystemClock().now()
    transport = AzureStorageQueueTransport(ways.login)
    receiver = transport.receiver(queue)
    got: list[str] = []
    for turn in range(3):
        ids = [f"m-{turn}-{n}" for n in range(AT_ONCE)]
        ways.end_idle()
        assert list(await transport.send([Envelope(queue, id_, {}, b"") for id_ in ids], now)) == [None] * AT_ONCE
        received: list[Received] = []

        async def are_there(received: list[Received] = received) -> bool:
            ways.end_idle()
            received.extend(await receiver.receive(3))
            return len(received) >= AT_ONCE

        await until(are_there)
        ways.end_idle()
        await receiver.roll_back(received.pop(), failed=False)
        for each in received + list(await receiver.receive(1)):
            ways.end_idle()
            await receiver.commit(each, now)
            got.append(each.envelope.message_id)
    assert await transport.lengths_of([queue]) == {queue: 0}
    await transport.close()
    assert sorted(got) == [f"m-{turn}-{n}" for turn in range(3) for n in range(AT_ONCE)]
    assert ways.ended["queue"] > 3 * AT_ONCE
    assert worst(caplog) == []


async def test_a_table_and_its_lease_go_on_as_if_nothing_had_been(
    ways: Ways, place: TablePlace, caplog: pytest.LogCaptureFixture
) -> None:
    now = SystemClock().now()
    store = AzureTableStore(ways.login, table=place.table)
    await store.initialize("tests", TransactionMode.RECEIVE_ONLY)
    await store.setup()
    for number in range(3):
        ways.end_idle()
        await store.store(DelayedMessage(f"m{number}", now, "orders", {}, b"body"), now)
    later = now + 10 * SECOND
    ways.end_idle()
    first, second, third = await store.claim_due(later, 10)
    ways.end_idle()
    assert await store.finish([first], Outcome.DELIVERED, later) == 1
    ways.end_idle()
    assert await store.retry_later(second, later + 3600 * SECOND, later, "refused")
    ways.end_idle()
    assert await store.finish([third], Outcome.DELIVERED, later) == 1
    ways.end_idle()
    assert await store.next_attempt() == later + 3600 * SECOND
    assert [each["MessageId"] for each in place.entities()] == ["m1"]
    counts = await store.record_counts()
    assert (counts[RecordKind.SCHEDULED], counts[RecordKind.DELIVERED], counts[RecordKind.RETRIED]) == (3, 2, 1)
    ways.end_idle()
    await store.close()
    assert min(ways.ended["table"], ways.ended["blob"]) > 0
    assert worst(caplog) == []


async def test_an_endpoint_delays_dispatches_and_handles_everything_once(
    ways: Ways, place: TablePlace, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    name, count = f"{queue}-sales", 12
    transport, store = AzureStorageQueueTransport(ways.login), AzureTableStore(ways.login, table=place.table)
    endpoint = Endpoint(name, transport=transport, delayed_delivery=DelayedDelivery(store), error_queue=f"{name}.error")
    handled: list[str] = []

    @endpoint.handler(str)
    async def note(message: str, context: HandlerContext) -> None:
        handled.append(message)

    async with endpoint:
        for number in range(count):
            ways.end_idle()
            await endpoint.send(f"{number}", delay=SECOND / 10)

        def are_handled() -> bool:
            ways.end_idle()
            return len(handled) >= count

        await until(are_handled)
    await transport.close()
    await store.close()
    assert sorted(handled, key=int) == [f"{number}" for number in range(count)]
    assert min(ways.ended.values()) > 0
    assert worst(caplog) == []

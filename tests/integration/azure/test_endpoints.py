"""Endpoints on queues and tables of a real Azurite: failures, no delays, and what the timeout manager left.

Source: specification 3.3, 3.6, 3.7, rows 84, 86 to 89.
"""

import base64
import json
import socket
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, TypeVar

import pytest
from azure.core.exceptions import ResourceExistsError, ResourceNotFoundError
from azure.storage.queue import QueueMessage
from azure.storage.queue.aio import QueueServiceClient
from tests.azure_store_subjects import drop_table
from tests.azure_subjects import delete_queues
from tests.integration.azure.gateway import Gateway
from tests.waiting import until

from postdate import DelayedDelivery, Endpoint, Envelope, HandlerContext, Headers, Recoverability
from postdate.backends.azure.login import AzureLogin, parse_login
from postdate.backends.azure.store import AzureTableStore
from postdate.backends.azure.table_names import default_table
from postdate.backends.azure.transport import AzureStorageQueueTransport
from postdate.clock import SystemClock
from postdate.config import load_settings
from postdate.endpoint.message_types import type_name
from postdate.errors import ConfigurationError, DelayedDeliveryNotConfigured, ErrorQueueNotConfigured
from postdate.messages import format_timestamp
from postdate.operations.error_queue import show_error
from postdate.operations.error_returns import return_all, return_messages
from postdate.ports import Received
from postdate.wiring.deployment import OpenDeployment

QUICK = timedelta(milliseconds=50)
SECOND = timedelta(seconds=1)
HOUR = timedelta(hours=1)
EXPIRE = "NServiceBus.Timeout.Expire"
ROUTE = "NServiceBus.Timeout.RouteExpiredTimeoutTo"

T = TypeVar("T")


@dataclass
class Order:
    """What is ordered."""

    number: int


def utc_now() -> datetime:
    return SystemClock().now()


class Place:
    """Queues and an endpoint's table of a test's own, through adapters of ours and through the plain SDK.

    Args:
        connection: of the account.
    """

    def __init__(self, connection: str) -> None:
        self.connection, self.login = connection, parse_login(connection)
        self.prefix = f"t{uuid.uuid4().hex[:12]}"
        self.name = f"{self.prefix}-sales"
        self.error = f"{self.prefix}-error"

    def queue(self, name: str) -> str:
        return f"{self.prefix}-{name}"

    @asynccontextmanager
    async def adapters(
        self, login: AzureLogin | None = None, **settings: Any
    ) -> AsyncGenerator[tuple[AzureTableStore, AzureStorageQueueTransport]]:
        """Open both as an application does: the table is that of the endpoint's name."""
        store = AzureTableStore(login or self.login)
        async with self.queues(login, **settings) as transport:
            try:
                yield store, transport
            finally:
                await store.close()

    @asynccontextmanager
    async def queues(
        self, login: AzureLogin | None = None, **settings: Any
    ) -> AsyncGenerator[AzureStorageQueueTransport]:
        chosen: dict[str, Any] = {"peek_interval": QUICK, "longest_idle_wait": 3 * QUICK, **settings}
        transport = AzureStorageQueueTransport(login or self.login, **chosen)
        try:
            yield transport
        finally:
            await transport.close()

    def sender(self, transport: AzureStorageQueueTransport, delayed_delivery: DelayedDelivery) -> Endpoint:
        """Return the endpoint as one that handles nothing."""
        return Endpoint(
            self.name, transport=transport, delayed_delivery=delayed_delivery, error_queue=self.error, send_only=True
        )

    async def put(self, queue: str, text: str) -> None:
        """Put a text into a queue, which is made if need be, with the plain SDK."""
        async with self.login.create_queue_service() as service:
            client = service.get_queue_client(queue)
            with suppress(ResourceExistsError):
                await client.create_queue()
            await client.send_message(text)

    async def put_wrapped(self, queue: str, id_: str, headers: dict[str, str], body: bytes = b"body") -> None:
        """Put a message there as upstream wraps it."""
        wrapper = {
            "Id": id_,
            "MessageIntent": 1,
            "Headers": headers,
            "Body": base64.b64encode(body).decode(),
            "Recoverable": True,
        }
        await self.put(queue, base64.b64encode(json.dumps(wrapper).encode()).decode())

    async def names(self) -> set[str]:
        """Return the queues that there are, without the prefix."""
        async with self.login.create_queue_service() as service:
            found = service.list_queues(name_starts_with=self.prefix)
            return {queue.name.removeprefix(f"{self.prefix}-") async for queue in found}

    async def waiting(self) -> list[tuple[str, bytes]]:
        """Return destination and body of what lies in the table, in the order in which it is due."""
        async with self.login.create_table_service() as service:
            found = service.get_table_client(default_table(self.name)).list_entities()
            return [(each["Destination"].removeprefix(f"{self.prefix}-"), each["Body"]) async for each in found]

    async def close(self) -> None:
        await delete_queues(self.login, self.prefix)
        with suppress(ResourceNotFoundError):
            drop_table(self.connection, default_table(self.name))


@pytest.fixture
async def place(azurite_connection: str) -> AsyncGenerator[Place]:
    place = Place(azurite_connection)
    yield place
    await place.close()


@pytest.fixture
async def plain(place: Place) -> AsyncGenerator[QueueServiceClient]:
    """The SDK without us."""
    async with place.login.create_queue_service() as service:
        yield service


async def take(transport: AzureStorageQueueTransport, queue: str, count: int = 1) -> list[Envelope]:
    """Receive that many messages and take them off the queue."""
    receiver = transport.receiver(queue)
    received: list[Received] = []

    async def are_there() -> bool:
        received.extend(await receiver.receive(count - len(received)))
        return len(received) >= count

    await until(are_there)
    for each in received:
        await receiver.commit(each, utc_now())
    await receiver.close()
    return [each.envelope for each in received]


async def seen(look: Callable[[], Awaitable[T]], is_it: Callable[[T], bool]) -> T:
    """Return what a look at the account finds once it is so."""

    async def so() -> list[T]:
        found = await look()
        return [found] if is_it(found) else []

    (found,) = await until(so)
    return found


async def is_empty(plain: QueueServiceClient, *queues: str) -> bool:
    return all([await plain.get_queue_client(queue).peek_messages(32) == [] for queue in queues])


def wrapped(messages: Sequence[QueueMessage]) -> list[dict[str, Any]]:
    return [json.loads(base64.b64decode(message.content)) for message in messages]


# --- failures of delayed delivery -------------------------------------------------------------------------------------


async def test_a_missing_destination_ends_in_the_error_queue_and_can_be_returned_there_row_84(
    place: Place, plain: QueueServiceClient
) -> None:
    """Read by the plain SDK, the copy has upstream's headers; returned, it is an ordinary message of that queue."""
    nowhere = place.queue("nowhere")
    async with place.adapters() as (store, transport):
        settings = DelayedDelivery(store, errors_return_to="destination", missing_queue_wait=timedelta(0))
        endpoint = place.sender(transport, settings)
        async with endpoint:
            sent = await endpoint.send(b"body", destination=nowhere, delay=SECOND, headers={"own": "1"})
            (copy,) = wrapped(await seen(plain.get_queue_client(place.error).peek_messages, bool))
        headers = copy["Headers"]
        assert (copy["Id"], base64.b64decode(copy["Body"]), headers["own"]) == (sent, b"body", "1")
        assert headers["NServiceBus.FailedQ"] == nowhere
        assert headers["NServiceBus.ExceptionInfo.ExceptionType"] == "postdate.errors.QueueNotFound"
        assert nowhere in headers["NServiceBus.ExceptionInfo.Message"]
        assert "QueueNotFound" in headers["NServiceBus.ExceptionInfo.StackTrace"]
        assert headers["NServiceBus.ProcessingEndpoint"] == place.name
        assert {
            "NServiceBus.ExceptionInfo.Source",
            "NServiceBus.TimeOfFailure",
            "NServiceBus.ProcessingMachine",
            "$.diagnostics.hostid",
            "$.diagnostics.hostdisplayname",
        } <= headers.keys()
        assert await place.waiting() == []

        deployment = OpenDeployment(load_settings(None, {}), store, transport, None, None)
        assert (await show_error(deployment, place.error, sent, utc_now())).message.failed_queue == nowhere
        (stays,) = await return_messages(deployment, place.error, [sent], utc_now())
        assert not stays.done
        assert nowhere in stays.remark
        await transport.create_queues([nowhere])
        (returned,) = await return_all(deployment, place.error, utc_now())
        assert (returned.done, returned.queue) == (True, nowhere)
        (arrived,) = await take(transport, nowhere)
        assert (arrived.message_id, arrived.body, arrived.headers["own"]) == (sent, b"body", "1")
        assert not [name for name in arrived.headers if "Timeout" in name or "Exception" in name or "Failed" in name]


async def test_failures_of_who_only_sends_land_in_the_poison_queue_row_86(place: Place) -> None:
    async with place.adapters() as (store, transport):
        with pytest.raises(ErrorQueueNotConfigured, match="poison_queue="):
            Endpoint(
                place.name,
                transport=transport,
                delayed_delivery=DelayedDelivery(store),
                error_queue=None,
                send_only=True,
            )
        settings = DelayedDelivery(
            store,
            poison_queue=place.queue("poison"),
            errors_return_to="destination",
            missing_queue_wait=timedelta(0),
        )
        endpoint = Endpoint(
            place.name, transport=transport, delayed_delivery=settings, error_queue=None, send_only=True
        )
        async with endpoint:
            assert await place.names() == {"sales-timeouts", "poison"}
            sent = await endpoint.send(b"body", destination=place.queue("nowhere"), delay=SECOND)
            (copy,) = await take(transport, place.queue("poison"))
        assert (copy.message_id, copy.headers[Headers.FAILED_QUEUE]) == (sent, place.queue("nowhere"))


async def test_the_poison_queue_goes_before_the_error_queue_for_delays_alone_row_86(
    place: Place, plain: QueueServiceClient
) -> None:
    """What a handler fails at goes to the error queue all the same."""
    async with place.adapters() as (store, transport):
        endpoint = Endpoint(
            place.name,
            transport=transport,
            delayed_delivery=DelayedDelivery(
                store, poison_queue=place.queue("poison"), missing_queue_wait=timedelta(0)
            ),
            error_queue=place.error,
            recoverability=Recoverability(immediate_retries=0, delayed_retries=0),
        )

        @endpoint.handler(Order)
        async def handle(message: Order, context: HandlerContext) -> None:
            raise ValueError("no such order")

        async with endpoint:
            failing = await endpoint.send(Order(1))
            delayed = await endpoint.send(b"body", destination=place.queue("nowhere"), delay=SECOND)
            (of_handler,), (of_delay,) = (
                await take(transport, place.error),
                await take(transport, place.queue("poison")),
            )
        assert (of_handler.message_id, of_delay.message_id) == (failing, delayed)
        assert of_delay.headers[Headers.FAILED_QUEUE] == f"{place.name}.timeouts"
        assert await is_empty(plain, place.error, place.queue("poison"))


# --- without delayed delivery -----------------------------------------------------------------------------------------


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port that is taken, and on which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


async def handle_one_and_fail_one(place: Place, login: AzureLogin, delayed_delivery: DelayedDelivery | None) -> None:
    """Let an endpoint handle one message and give up another."""
    async with place.queues(login) as transport:
        endpoint = Endpoint(
            place.name,
            transport=transport,
            delayed_delivery=delayed_delivery,
            error_queue=place.error,
            recoverability=Recoverability(immediate_retries=1),
        )
        handled: list[int] = []
        refused: list[DelayedDeliveryNotConfigured] = []

        @endpoint.handler(Order)
        async def handle(message: Order, context: HandlerContext) -> None:
            if message.number == 2:
                raise ValueError("no such order")
            if delayed_delivery is None:
                with pytest.raises(DelayedDeliveryNotConfigured) as error:
                    await context.send(Order(3), delay=SECOND)
                refused.append(error.value)
            handled.append(message.number)

        async with endpoint:
            await endpoint.send(Order(1))
            if delayed_delivery is None:
                with pytest.raises(DelayedDeliveryNotConfigured, match="cannot delay messages: it has no delayed"):
                    await endpoint.send(Order(3), delay=SECOND)
                failing = await endpoint.send(Order(2))
                (copy,) = await take(transport, place.error)
                assert copy.message_id == failing
            await until(lambda: handled == [1])
        assert len(refused) == (delayed_delivery is None)


async def test_without_delayed_delivery_no_table_is_asked_for_anything_row_87(place: Place) -> None:
    """With it, the same endpoint asks at once; so the way is one on which questions would be seen."""
    async with Gateway(place.login.endpoint("table")).listening() as gateway:
        seen = replace(place.login, endpoints={**place.login.endpoints, "table": gateway.url})
        await handle_one_and_fail_one(place, seen, None)
        assert gateway.requests == []
        assert await place.names() == {"sales", "error"}
        store = AzureTableStore(seen)
        await handle_one_and_fail_one(place, seen, DelayedDelivery(store))
        await store.close()
        assert gateway.requests


async def test_without_delayed_delivery_there_need_be_no_tables_row_87(place: Place, closed_port: int) -> None:
    nobody = f"http://127.0.0.1:{closed_port}/devstoreaccount1"
    alone = replace(place.login, endpoints={**place.login.endpoints, "table": nobody, "blob": nobody})
    await handle_one_and_fail_one(place, alone, None)


# --- names of queues --------------------------------------------------------------------------------------------------


async def test_an_endpoint_whose_names_azure_takes_needs_no_sanitizer(place: Place) -> None:
    """Its own queue of delayed messages has a dot that is not its user's; upstream calls it with a dash."""
    shop = place.queue("shop")
    async with place.adapters(sanitizer="strict") as (store, transport):
        await transport.create_queues([shop])
        async with place.sender(transport, DelayedDelivery(store, drain_timeout_manager=True)) as endpoint:
            sent = await endpoint.send(b"body", destination=shop, delay=SECOND)
            (arrived,) = await take(transport, shop)
    assert arrived.message_id == sent
    assert await place.names() == {"shop", "sales-timeouts", "sales-timeoutsdispatcher", "error"}


async def test_an_endpoint_whose_name_azure_does_not_take_is_refused_at_start_with_what_mends_it(place: Place) -> None:
    async with place.adapters(sanitizer="strict") as (store, transport):
        endpoint = Endpoint(
            f"{place.prefix}.sales", transport=transport, delayed_delivery=DelayedDelivery(store), error_queue="error"
        )
        with pytest.raises(ConfigurationError, match=f"sanitizer='dashes', which changes it to '{place.prefix}-sales"):
            async with endpoint:
                raise AssertionError("it started")
    assert await place.names() == set()


# --- what the timeout manager left ------------------------------------------------------------------------------------


def old_headers(due: datetime, destination: str, **more: str) -> dict[str, str]:
    """Return the headers of what an endpoint of old sends to its timeout manager."""
    return {EXPIRE: format_timestamp(due), ROUTE: destination, **more}


async def test_the_queues_of_the_timeout_manager_are_drained_while_new_delays_use_the_table_row_88(
    place: Place, plain: QueueServiceClient
) -> None:
    """From both of its queues: past due, due soon, and due in an hour; twice one id, as delayed retries have it."""
    timeouts, dispatcher, shop = (place.queue(name) for name in ("sales-timeouts", "sales-timeoutsdispatcher", "shop"))
    soon, later = utc_now() + 3 * SECOND, utc_now() + HOUR
    await place.put_wrapped(timeouts, "past", old_headers(utc_now() - HOUR, shop, own="1"), b"past")
    await place.put_wrapped(timeouts, "retried", old_headers(soon, shop), b"first retry")
    await place.put_wrapped(timeouts, "retried", old_headers(later, shop), b"second retry")
    await place.put_wrapped(dispatcher, "stray", old_headers(soon, shop), b"stray")
    async with place.adapters() as (store, transport):
        await transport.create_queues([shop])
        endpoint = place.sender(transport, DelayedDelivery(store, drain_timeout_manager=True))
        async with endpoint:
            await endpoint.send(b"new", destination=shop, delay=2 * HOUR)
            (past,) = await take(transport, shop)
            assert (past.body, past.headers) == (b"past", {"own": "1", Headers.MESSAGE_ID: "past"})
            arrived = await take(transport, shop, 2)
            assert utc_now() >= soon
            assert {(each.body, each.headers[Headers.MESSAGE_ID]) for each in arrived} == {
                (b"first retry", "retried"),
                (b"stray", "stray"),
            }
            assert {each.due for each in arrived} == {soon}
            # What was sent is removed afterwards, and the new one may still be on its way.
            left = [("shop", b"second retry"), ("shop", b"new")]
            assert await seen(place.waiting, left.__eq__) == left
        assert await is_empty(plain, timeouts, dispatcher, place.error, shop)


async def test_what_was_stored_and_could_not_be_taken_off_the_queue_is_stored_once_row_88(
    place: Place, plain: QueueServiceClient
) -> None:
    """The first process ends in between; the second, which knows nothing of it, finds the message again."""
    timeouts, stored = place.queue("sales-timeouts"), [("shop", b"body")]
    await place.put_wrapped(timeouts, "old", old_headers(utc_now() + HOUR, place.queue("shop")))
    async with Gateway(place.login.endpoint("queue")).listening() as gateway:
        gateway.answer("DELETE", 500, times=1_000)
        for queues in (gateway.url, place.login.endpoint("queue")):
            login = replace(place.login, endpoints={**place.login.endpoints, "queue": queues})
            async with place.adapters(login, hold_for=SECOND) as (store, transport):
                settings = DelayedDelivery(store, drain_timeout_manager=True)
                endpoint = place.sender(transport, settings)
                async with endpoint:
                    if queues == gateway.url:
                        assert await seen(place.waiting, stored.__eq__) == stored
                        assert await seen(lambda: tried_to_delete(gateway), bool)
                        continue
                    length = await seen(lambda: length_of(plain, timeouts), lambda found: found == 0)
                    assert length == 0
    assert await place.waiting() == stored
    assert await is_empty(plain, place.error)


async def tried_to_delete(gateway: Gateway) -> bool:
    return "DELETE" in gateway.requests


async def length_of(plain: QueueServiceClient, queue: str) -> int:
    """Return how many messages a queue has, those included that somebody has in hand."""
    properties = await plain.get_queue_client(queue).get_queue_properties()
    return properties.approximate_message_count or 0


async def test_what_cannot_be_read_in_the_queues_of_the_timeout_manager_goes_to_the_error_queue_row_88(
    place: Place, plain: QueueServiceClient
) -> None:
    """Whole, with the reason, and with the queue that it came from."""
    timeouts, dispatcher = place.queue("sales-timeouts"), place.queue("sales-timeoutsdispatcher")
    await place.put(timeouts, "nobody wrote this")
    await place.put_wrapped(timeouts, "nowhere", {EXPIRE: format_timestamp(utc_now())}, b"nowhere")
    await place.put_wrapped(timeouts, "sometime", {EXPIRE: "sometime", ROUTE: "shop"}, b"sometime")
    await place.put_wrapped(dispatcher, "control", {"Timeout.Id": "t-7", "NServiceBus.ControlMessage": "True"}, b"")
    async with place.adapters() as (store, transport):
        settings = DelayedDelivery(store, drain_timeout_manager=True)
        endpoint = place.sender(transport, settings)
        async with endpoint:
            copies = {each.body: each.headers for each in await take(transport, place.error, 4)}
        reasons = {body: headers[Headers.EXCEPTION_MESSAGE] for body, headers in copies.items()}
        assert "no delayed message" in reasons[b"nobody wrote this"]
        assert "its destination is unknown" in reasons[b"nowhere"]
        assert "'sometime'" in reasons[b"sometime"]
        assert "to send its timeout 't-7'" in reasons[b""]
        assert copies[b""][Headers.FAILED_QUEUE] == f"{place.name}.timeoutsdispatcher"
        assert {copies[body][Headers.FAILED_QUEUE] for body in reasons if body} == {f"{place.name}.timeouts"}
        assert await place.waiting() == []
        assert await is_empty(plain, timeouts, dispatcher)


def beside_a_timeout_manager(name: str) -> str:
    """Return the name of a queue in Azure; the timeouts queue is another one than the timeout manager's."""
    return name.replace(".timeouts", "-delays").replace(".", "-")


async def test_beside_a_timeout_manager_that_still_runs_new_delays_use_the_table_row_88(
    place: Place, plain: QueueServiceClient
) -> None:
    """What is in its queues is left to it, and it finds nothing of ours there."""
    queues, shop = [place.queue("sales-timeouts"), place.queue("sales-timeoutsdispatcher")], place.queue("shop")
    await place.put_wrapped(queues[0], "old", old_headers(utc_now() - HOUR, shop))
    await place.put_wrapped(queues[1], "control", {"Timeout.Id": "t-7"})
    async with place.adapters(sanitizer=beside_a_timeout_manager) as (store, transport):
        await transport.create_queues([shop])
        endpoint = place.sender(transport, DelayedDelivery(store))
        async with endpoint:
            sent = await endpoint.send(b"soon", destination=shop, delay=SECOND)
            await endpoint.send(b"later", destination=shop, delay=HOUR)
            assert [each.message_id for each in await take(transport, shop)] == [sent]
            waiting = [("shop", b"later")]  # once what was sent is removed
            assert await seen(place.waiting, waiting.__eq__) == waiting
    left = [wrapped(await plain.get_queue_client(queue).peek_messages(32)) for queue in queues]
    assert [[each["Id"] for each in found] for found in left] == [["old"], ["control"]]
    assert "sales-delays" in await place.names()


async def test_only_who_drains_receives_the_orders_of_a_timeout_manager(
    place: Place, plain: QueueServiceClient
) -> None:
    dispatcher, shop = place.queue("sales-timeoutsdispatcher"), place.queue("shop")
    await place.put_wrapped(dispatcher, "control", {"Timeout.Id": "t-7"})
    async with place.adapters() as (store, transport):
        await transport.create_queues([shop])
        endpoint = place.sender(transport, DelayedDelivery(store))
        async with endpoint:
            await endpoint.send(b"new", destination=shop, delay=SECOND)
            await take(transport, shop)
    (left,) = wrapped(await plain.get_queue_client(dispatcher).peek_messages(32))
    assert left["Id"] == "control"


async def test_stale_headers_of_the_timeout_manager_reroute_nothing_row_89(
    place: Place, plain: QueueServiceClient
) -> None:
    """Not a message that is handled, nor its delayed retry, nor what is sent or forwarded with them, now or later."""
    shop, elsewhere = place.queue("shop"), place.queue("elsewhere")
    stale = old_headers(utc_now() - HOUR, elsewhere)
    incoming = {Headers.ENCLOSED_MESSAGE_TYPES: type_name(Order), Headers.MESSAGE_ID: "i-1", **stale}
    attempts: list[int] = []
    async with place.adapters() as (store, transport):
        await transport.create_queues([shop, elsewhere])
        endpoint = Endpoint(
            place.name,
            transport=transport,
            delayed_delivery=DelayedDelivery(store, errors_return_to="destination", drain_timeout_manager=True),
            error_queue=place.error,
            recoverability=Recoverability(immediate_retries=0, delayed_retries=1, time_increase=SECOND),
        )

        @endpoint.handler(Order)
        async def handle(message: Order, context: HandlerContext) -> None:
            attempts.append(message.number)
            if len(attempts) == 1:
                raise ValueError("not yet")
            assert stale.items() <= context.headers.items()
            await context.send(b"forwarded", destination=shop, headers=context.headers)
            await context.send(b"forwarded later", destination=shop, headers=context.headers, delay=SECOND)

        async with endpoint:
            await place.put_wrapped(place.name, "i-1", incoming, b'{"number": 1}')
            await endpoint.send(b"sent", destination=shop, headers=stale)
            await endpoint.send(b"sent later", destination=shop, headers=stale, delay=SECOND)
            arrived = await take(transport, shop, 4)
        assert sorted(each.body for each in arrived) == [b"forwarded", b"forwarded later", b"sent", b"sent later"]
        assert all(stale.items() <= each.headers.items() for each in arrived)
        assert attempts == [1, 1]
        assert await is_empty(plain, elsewhere, place.error, place.name, f"{place.name}-timeouts")

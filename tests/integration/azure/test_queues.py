"""AzureStorageQueueTransport and a real Azurite: upstream's envelope, times to live, holds, refusals, lost answers."""

import base64
import json
import logging
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from types import NoneType
from typing import Any
from urllib.parse import urlsplit

import anyio
import pytest
from azure.storage.queue import QueueMessage
from azure.storage.queue.aio import QueueClient, QueueServiceClient
from tests.azure_subjects import delete_queues
from tests.integration.azure.gateway import Gateway
from tests.proxy import FaultyLink
from tests.waiting import until

from postdate import DelayedDelivery, Endpoint, Envelope, HandlerContext, Headers, MemoryStore, Recoverability
from postdate.backends.azure.envelope import UNREADABLE
from postdate.backends.azure.login import AzureLogin, parse_login
from postdate.backends.azure.transport import AzureQueueReceiver, AzureStorageQueueTransport
from postdate.clock import SystemClock
from postdate.endpoint.message_types import type_name
from postdate.errors import (
    ClaimLost,
    ConfigurationError,
    InvalidMessage,
    MessageTooLarge,
    QueueNotFound,
    TransportUnreachable,
)
from postdate.ports import Completion, Received, RecordKind
from postdate.wiring import open_transport

NOW = datetime(2026, 1, 31, 12, 0, 5, 123_456, tzinfo=UTC)
SECOND = timedelta(seconds=1)
QUICK = timedelta(milliseconds=50)


@pytest.fixture
def login(azurite_connection: str) -> AzureLogin:
    return parse_login(azurite_connection)


@pytest.fixture
async def queue(login: AzureLogin) -> AsyncGenerator[str]:
    """An empty queue; every queue whose name begins like it is deleted at the end."""
    name = f"t{uuid.uuid4().hex[:12]}"
    async with login.create_queue_service() as service:
        await service.create_queue(name)
    yield name
    await delete_queues(login, name)


@pytest.fixture
async def plain(login: AzureLogin) -> AsyncGenerator[QueueServiceClient]:
    """The SDK without us."""
    async with login.create_queue_service() as service:
        yield service


@pytest.fixture
async def gateway(login: AzureLogin) -> AsyncGenerator[Gateway]:
    """A way to the same account that refuses when told to."""
    async with Gateway(login.endpoint("queue")).listening() as gateway:
        yield gateway


@asynccontextmanager
async def transport_at(login: AzureLogin, **settings: Any) -> AsyncGenerator[AzureStorageQueueTransport]:
    chosen: dict[str, Any] = {"longest_idle_wait": 3 * QUICK, "peek_interval": QUICK, **settings}
    transport = AzureStorageQueueTransport(login, **chosen)
    try:
        yield transport
    finally:
        await transport.close()


def by_way_of(gateway: Gateway, login: AzureLogin) -> AzureLogin:
    return replace(login, endpoints={"queue": gateway.url})


def envelope(destination: str, message_id: str = "m", body: bytes = b"body", **more: Any) -> Envelope:
    return Envelope(destination, message_id, {"kind": "test"}, body, **more)


async def send(transport: AzureStorageQueueTransport, *envelopes: Envelope) -> None:
    assert list(await transport.send(envelopes, NOW)) == [None] * len(envelopes)


async def receive(receiver: AzureQueueReceiver, count: int = 1) -> list[Received]:
    received: list[Received] = []

    async def are_there() -> bool:
        received.extend(await receiver.receive(count - len(received)))
        return len(received) >= count

    await until(are_there)
    return received


async def only_message(client: QueueClient) -> QueueMessage:
    """Return the one message that a queue holds, as the SDK gives it out."""
    message = await client.receive_message()
    assert message is not None
    assert await client.receive_message() is None
    return message


async def is_empty(transport: AzureStorageQueueTransport, queue: str) -> bool:
    await send(transport, envelope(queue, "probe"))
    receiver = transport.receiver(queue)
    received = await receive(receiver)
    await receiver.commit(received[0], NOW)
    await receiver.close()
    return [each.envelope.message_id for each in received] == ["probe"]


# --- upstream's envelope ----------------------------------------------------------------------------------------------


@dataclass
class Order:
    """What upstream orders."""

    number: int


@asynccontextmanager
async def handling(transport: AzureStorageQueueTransport, queue: str) -> AsyncGenerator[dict[int, HandlerContext]]:
    """Handle orders; gives the context of each by its number."""
    endpoint = Endpoint(
        queue,
        transport=transport,
        error_queue=f"{queue}-error",
        recoverability=Recoverability(immediate_retries=0, delayed_retries=0),
    )
    handled: dict[int, HandlerContext] = {}

    @endpoint.handler(Order)
    async def handle(message: Order, context: HandlerContext) -> None:
        handled[message.number] = context

    async with endpoint:
        yield handled


def upstream_order(number: int, **headers: str) -> dict[str, Any]:
    """Return an order as upstream wraps it."""
    named = {
        Headers.MESSAGE_ID: f"id-{number}",
        Headers.ENCLOSED_MESSAGE_TYPES: type_name(Order),
        Headers.CONTENT_TYPE: "application/json",
        Headers.MESSAGE_INTENT: "Send",
        **headers,
    }
    return {
        "IdForCorrelation": None,
        "Id": f"id-{number}",
        "MessageIntent": 1,
        "ReplyToAddress": "upstream-sender",
        "TimeToBeReceived": "00:00:00",
        "Headers": named,
        "Body": base64.b64encode(json.dumps({"number": number}).encode()).decode(),
        "CorrelationId": f"correlation-{number}",
        "Recoverable": True,
    }


async def test_a_message_that_the_plain_sdk_wrote_in_upstreams_envelope_is_handled(
    login: AzureLogin, queue: str, plain: QueueServiceClient
) -> None:
    """Written by hand, in base64 and without; each arrives at its handler with what only the wrapper said."""
    client = plain.get_queue_client(queue)
    await client.send_message(base64.b64encode(json.dumps(upstream_order(1)).encode()).decode())
    await client.send_message(json.dumps(upstream_order(2)))
    async with transport_at(login) as transport, handling(transport, queue) as handled:
        await until(lambda: len(handled) == 2)
    assert {number: context.headers[Headers.REPLY_TO_ADDRESS] for number, context in handled.items()} == {
        1: "upstream-sender",
        2: "upstream-sender",
    }
    assert handled[2].headers[Headers.CORRELATION_ID] == "correlation-2"
    assert await client.peek_messages(32) == []


async def test_a_message_of_ours_is_read_by_the_plain_sdk_with_every_field_where_upstream_has_it(
    login: AzureLogin, queue: str, plain: QueueServiceClient
) -> None:
    headers = {
        "kind": "тест 🕰",
        Headers.MESSAGE_ID: "id-7",
        Headers.REPLY_TO_ADDRESS: "us",
        Headers.CORRELATION_ID: "c-7",
        Headers.MESSAGE_INTENT: "Reply",
    }
    sent = Envelope(queue, "id-7", headers, b"\x00\xffbody", time_to_be_received=timedelta(days=1, milliseconds=1))
    async with transport_at(login) as transport:
        await send(transport, sent)
    message = await only_message(plain.get_queue_client(queue))
    assert json.loads(base64.b64decode(message.content, validate=True)) == {
        "IdForCorrelation": None,
        "Id": "id-7",
        "MessageIntent": 5,
        "ReplyToAddress": "us",
        "TimeToBeReceived": "1.00:00:00.0010000",
        "Headers": headers,
        "Body": base64.b64encode(b"\x00\xffbody").decode(),
        "CorrelationId": "c-7",
        "Recoverable": True,
    }


async def test_what_is_in_no_envelope_ends_in_the_error_queue_with_the_reason(
    login: AzureLogin, queue: str, plain: QueueServiceClient
) -> None:
    await plain.get_queue_client(queue).send_message("neither of us wrote this")
    async with transport_at(login) as transport, handling(transport, queue) as handled:
        await plain.get_queue_client(queue).send_message(json.dumps(upstream_order(1)))
        error_queue = transport.receiver(f"{queue}-error")
        (copy,) = await receive(error_queue)
        assert copy.envelope.body == b"neither of us wrote this"
        assert "neither JSON nor UTF-8 in base64" in copy.envelope.headers[UNREADABLE]
        assert copy.envelope.headers[Headers.FAILED_QUEUE] == queue
        await until(lambda: 1 in handled)  # it holds up nobody
        await error_queue.commit(copy, NOW)
        await error_queue.close()
    assert await plain.get_queue_client(queue).peek_messages(32) == []


async def test_a_copy_with_stale_timeout_headers_goes_where_it_is_sent_row_89(login: AzureLogin, queue: str) -> None:
    """Headers of the old Timeout Manager that a forwarded message still has steer nothing."""
    stale = {
        "NServiceBus.Timeout.Expire": "2020-01-01 00:00:00:000000 Z",
        "NServiceBus.Timeout.RouteExpiredTimeoutTo": "elsewhere",
    }
    async with transport_at(login) as transport:
        await send(transport, Envelope(queue, "forwarded", stale, b""))
        receiver = transport.receiver(queue)
        (received,) = await receive(receiver)
        assert received.envelope == Envelope(queue, "forwarded", stale, b"")
        await receiver.commit(received, NOW)


# --- how long ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "seconds"),
    [({}, 30 * 86_400), ({"time_to_be_received": 40.25 * SECOND}, 41), ({"expires_at": NOW + 90 * SECOND}, 90)],
)
async def test_azure_is_told_whole_seconds(
    login: AzureLogin, queue: str, plain: QueueServiceClient, sent: dict[str, Any], seconds: int
) -> None:
    async with transport_at(login) as transport:
        await send(transport, envelope(queue, **sent))
    message = await only_message(plain.get_queue_client(queue))
    assert message.expires_on is not None
    assert message.inserted_on is not None
    assert message.expires_on - message.inserted_on == seconds * SECOND


async def test_an_error_copy_never_expires_row_72(login: AzureLogin, queue: str, plain: QueueServiceClient) -> None:
    async with transport_at(login) as transport:
        copy = Envelope(queue, "m", {Headers.FAILED_QUEUE: "orders"}, b"", time_to_be_received=SECOND)
        await send(transport, copy)
    message = await only_message(plain.get_queue_client(queue))
    assert message.expires_on is not None
    assert message.expires_on.year > 2100


@pytest.mark.parametrize("span", [timedelta(0), -SECOND])
async def test_what_has_no_time_left_is_not_sent_and_a_warning_says_so(
    login: AzureLogin, queue: str, span: timedelta, caplog: pytest.LogCaptureFixture
) -> None:
    async with transport_at(login) as transport:
        with caplog.at_level(logging.WARNING, "postdate.azure"):
            await send(transport, envelope(queue, "late", time_to_be_received=span))
        assert "message late" in caplog.text
        assert "was not sent" in caplog.text
        assert await is_empty(transport, queue)


async def test_more_than_30_days_are_refused_and_the_others_are_sent(login: AzureLogin, queue: str) -> None:
    async with transport_at(login) as transport:
        long = envelope(queue, "long", time_to_be_received=timedelta(days=31))
        answers = await transport.send([long, envelope(queue, "other")], NOW)
        assert [type(answer) for answer in answers] == [InvalidMessage, NoneType]
        assert "at most 30 days" in str(answers[0])


# --- names ------------------------------------------------------------------------------------------------------------


async def test_a_name_that_azure_does_not_take_is_a_value_when_sending_and_an_error_at_start(
    login: AzureLogin, queue: str
) -> None:
    async with transport_at(login) as transport:
        answers = await transport.send([envelope("a_b"), envelope(queue, "fine")], NOW)
        assert [type(answer) for answer in answers] == [QueueNotFound, NoneType]
        assert "3 to 63 letters" in str(answers[0])
        with pytest.raises(ConfigurationError, match="3 to 63 letters"):
            await transport.create_queues(["a_b"])
        with pytest.raises(QueueNotFound, match="3 to 63 letters"):
            await transport.receiver("a_b").receive(1)


async def test_the_queue_of_timeouts_is_called_as_upstream_calls_it(
    login: AzureLogin, queue: str, plain: QueueServiceClient
) -> None:
    async with transport_at(login) as transport:
        await transport.create_queues([f"{queue.upper()}.Timeouts"])
        await send(transport, envelope(f"{queue.upper()}.Timeouts"))
    assert len(await plain.get_queue_client(f"{queue}-timeouts").peek_messages(32)) == 1


# --- holds ------------------------------------------------------------------------------------------------------------


async def test_what_is_held_is_hidden_anew_before_its_time_has_run_out(
    login: AzureLogin, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("postdate.backends.azure.transport._RENEWALS_IN_A_HOLD", 600)  # it looks every 50 ms
    async with transport_at(login) as transport:
        await send(transport, envelope(queue, "long"))
        receiver = transport.receiver(queue)
        (held,) = await receive(receiver)
        hold = receiver._messages_by_token[held.token]
        for _ in range(2):
            receipt = hold.receipt
            hold.hidden_until -= 30  # seconds: its time has nearly run out
            await until(lambda receipt=receipt: hold.receipt != receipt)
        await receiver.commit(held, NOW)
        assert await is_empty(transport, queue)


@pytest.mark.soak(
    "a process that stands still for two seconds loses what it holds",
    part="clocks",
    proven_by="tests/integration/azure/test_queues.py::test_what_is_held_is_hidden_anew_before_its_time_has_run_out",
)
async def test_a_message_stays_held_for_as_long_as_it_takes_and_then_can_be_committed(
    login: AzureLogin, queue: str
) -> None:
    """Held for three times the time for which it is hidden at once; nobody else receives it meanwhile."""
    async with transport_at(login, hold_for=2 * SECOND) as transport, transport_at(login) as other:
        await send(transport, envelope(queue, "long"))
        receiver, competitor = transport.receiver(queue), other.receiver(queue)
        (held,) = await receive(receiver)
        hold = receiver._messages_by_token[held.token]
        first, stolen = hold.hidden_until, list[Received]()

        async def compete() -> None:
            stolen.extend(await competitor.receive(1))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(compete)
            await until(lambda: hold.hidden_until > first + 4)
            assert not stolen, "another received what is held"
            tasks.cancel_scope.cancel()
        await receiver.commit(held, NOW)
        assert await is_empty(other, queue)


async def test_what_a_dead_process_held_is_free_when_its_time_has_run_out_and_counts_as_a_failure(
    login: AzureLogin, queue: str, plain: QueueServiceClient
) -> None:
    """A receive by a process that dies at once is a receive by the plain SDK: nobody renews it.

    What living processes gave back, with a failure or without, is told apart from that by all others.
    """
    sent = envelope(queue, "orphan", due=NOW)
    async with transport_at(login) as transport, transport_at(login) as elsewhere:
        await send(transport, sent)
        for failed in (True, False, True):
            receiver = elsewhere.receiver(queue)
            await receiver.roll_back((await receive(receiver))[0], failed=failed)
            await receiver.close()
        assert await plain.get_queue_client(queue).receive_message(visibility_timeout=1) is not None
        receiver = transport.receiver(queue)
        (received,) = await receive(receiver)
        assert (received.envelope, received.failures, received.unanswered) == (sent, 3, 1)
        await receiver.commit(received, NOW)


async def test_a_message_that_another_took_over_is_lost_to_the_first(
    login: AzureLogin, queue: str, plain: QueueServiceClient
) -> None:
    """Somebody makes a held message visible and takes it: the commit says so, and what it sent is out."""
    async with transport_at(login) as transport:
        await send(transport, envelope(queue, "stolen"))
        receiver = transport.receiver(queue)
        (held,) = await receive(receiver)
        hold = receiver._messages_by_token[held.token]
        client = plain.get_queue_client(queue)
        await client.update_message(hold.native_id, hold.receipt, visibility_timeout=0)
        assert await client.receive_message(visibility_timeout=30) is not None
        with pytest.raises(ClaimLost):
            await receiver.commit(held, NOW)
        await receiver.roll_back(held)  # without effect: it is free of us
        await receiver.close()


@pytest.mark.parametrize("is_taken", [True, False], ids=["another has it", "it is free"])
async def test_a_hold_that_lapsed_is_made_sure_of_before_anything_is_sent(
    login: AzureLogin, queue: str, plain: QueueServiceClient, *, is_taken: bool
) -> None:
    """As after a handler that blocked its loop, or in a process that was frozen."""
    async with transport_at(login) as transport:
        await send(transport, envelope(queue, "held"))
        receiver = transport.receiver(queue)
        (received,) = await receive(receiver)
        hold, client = receiver._messages_by_token[received.token], plain.get_queue_client(queue)
        hold.hidden_until = anyio.current_time()
        if is_taken:
            await client.update_message(hold.native_id, hold.receipt, visibility_timeout=0)
            assert await client.receive_message(visibility_timeout=30) is not None
            with pytest.raises(ClaimLost):
                await receiver.commit(received, NOW, Completion(outgoing=[envelope(queue, "sent")]))
            assert await is_empty(transport, queue)
        else:
            await receiver.commit(received, NOW, Completion(outgoing=[envelope(queue, "sent")]))
            assert [each.envelope.message_id for each in await receive(receiver)] == ["sent"]


async def test_a_deletion_whose_answer_is_lost_is_no_lost_claim(
    login: AzureLogin, queue: str, gateway: Gateway
) -> None:
    async with transport_at(by_way_of(gateway, login)) as transport:
        await send(transport, envelope(queue, "handled"))
        receiver = transport.receiver(queue)
        (received,) = await receive(receiver)
        gateway.lose(lambda path, _body: "popreceipt" in path)
        await receiver.commit(received, NOW)
        assert gateway.requests.count("DELETE") == 2
        assert await is_empty(transport, queue)


async def test_a_message_whose_hold_is_lost_under_renewal_is_given_up(
    login: AzureLogin, queue: str, plain: QueueServiceClient, caplog: pytest.LogCaptureFixture
) -> None:
    async with transport_at(login, hold_for=2 * SECOND) as transport:
        await send(transport, envelope(queue, "stolen"))
        receiver = transport.receiver(queue)
        (held,) = await receive(receiver)
        hold = receiver._messages_by_token[held.token]
        with caplog.at_level(logging.WARNING, "postdate.azure"):
            await plain.get_queue_client(queue).delete_message(hold.native_id, hold.receipt)
            await until(lambda: bool(hold.lost_reason))
        assert "no longer held" in caplog.text
        with pytest.raises(ClaimLost, match="not claimed by this process any more"):
            await receiver.commit(held, NOW, Completion(outgoing=[envelope(queue, "never")]))
        assert await is_empty(transport, queue)


async def test_many_are_sent_at_once_and_competing_receivers_handle_each_of_them_once(
    login: AzureLogin, queue: str
) -> None:
    """With the settings of everyday: 32 requests at once, 32 messages a receive."""
    count = 100
    async with transport_at(login) as transport:
        await send(transport, *(envelope(queue, f"{number}") for number in range(count)))
        handled: Counter[str] = Counter()
        done = anyio.Event()

        async def compete() -> None:
            receiver = transport.receiver(queue)

            async def finish(each: Received) -> None:
                await receiver.commit(each, NOW)
                handled[each.envelope.message_id] += 1

            while not done.is_set():
                batch = await receiver.receive(32)
                async with anyio.create_task_group() as commits:
                    for each in batch:
                        commits.start_soon(finish, each)
                if handled.total() >= count:
                    done.set()

        async with anyio.create_task_group() as receivers:
            for _ in range(3):
                receivers.start_soon(compete)
            await done.wait()
            receivers.cancel_scope.cancel()
        assert handled == Counter(f"{number}" for number in range(count))


# --- refusals ---------------------------------------------------------------------------------------------------------


async def test_a_wrong_key_is_an_outage_that_says_what_to_look_at(login: AzureLogin, queue: str) -> None:
    """No message is to blame for it, so none is given up for it."""
    wrong = replace(login, key=base64.b64encode(b"wrong").decode())
    async with transport_at(wrong) as transport:
        (answer,) = await transport.send([envelope(queue)], NOW)
        assert isinstance(answer, TransportUnreachable)
        for attempt in (
            lambda: transport.receiver(queue).receive(1),
            lambda: transport.create_queues([queue]),
            lambda: transport.lengths_of([queue]),
            transport.server_facts,
        ):
            with pytest.raises(TransportUnreachable, match=r"refuses this client \(403 .*key"):
                await attempt()


async def test_a_queue_that_was_deleted_is_not_found_and_works_when_it_is_there_again(
    login: AzureLogin, queue: str, plain: QueueServiceClient
) -> None:
    async with transport_at(login) as transport:
        await send(transport, envelope(queue, "held"))
        receiver = transport.receiver(queue)
        (held,) = await receive(receiver)
        await plain.delete_queue(queue)
        (answer,) = await transport.send([envelope(queue)], NOW)
        assert isinstance(answer, QueueNotFound)
        assert queue in str(answer)
        with pytest.raises(QueueNotFound, match=queue):
            await receiver.receive(1)
        with pytest.raises(ClaimLost):
            await receiver.commit(held, NOW)
        await transport.create_queues([queue])
        assert await receiver.receive(1, wait=False) == [], "it works again"
        await send(transport, envelope(queue, "again"))
        assert [each.envelope.message_id for each in await receive(receiver)] == ["again"]


async def test_a_handler_whose_message_has_no_queue_or_is_too_large_sends_nothing_else(
    login: AzureLogin, queue: str
) -> None:
    """What can be foreseen is: the good message before the bad one is not sent, and the hold remains."""
    async with transport_at(login) as transport:
        await send(transport, envelope(queue, "in"))
        receiver = transport.receiver(queue)
        (held,) = await receive(receiver)
        good = envelope(queue, "good")
        with pytest.raises(MessageTooLarge, match="65,536"):
            await receiver.commit(held, NOW, Completion(outgoing=[good, envelope(queue, "large", b"x" * 50_000)]))
        with pytest.raises(QueueNotFound):
            await receiver.commit(held, NOW, Completion(outgoing=[good, envelope("no_name")]))
        await receiver.commit(held, NOW)
        assert await is_empty(transport, queue)


async def test_the_largest_message_that_is_promised_arrives(login: AzureLogin, queue: str) -> None:
    async with transport_at(login) as transport:
        body = b"x" * (transport.capabilities.largest_message_bytes - len('{"kind":"test"}'))
        await send(transport, envelope(queue, "large", body))
        (received,) = await receive(transport.receiver(queue))
        assert received.envelope.body == body


async def test_a_throttled_account_is_left_alone_for_as_long_as_it_asks_and_nothing_is_lost(
    login: AzureLogin, queue: str, gateway: Gateway
) -> None:
    async with transport_at(by_way_of(gateway, login), concurrent_sends=1) as transport:
        gateway.answer("POST", 503, x_ms_error_code="ServerBusy", Retry_After="300")
        envelopes = [envelope(queue, f"{number}") for number in range(5)]
        answers = list(await transport.send(envelopes, NOW))
        assert [type(answer) for answer in answers] == [TransportUnreachable] * 5
        assert "throttled (503 ServerBusy); it asks for a pause of 300 s" in str(answers[0])
        assert gateway.requests == ["POST"], "one answer is enough to know"
        receiver = transport.receiver(queue)
        with pytest.raises(TransportUnreachable, match="throttled"):
            await receiver.receive(1)
        assert gateway.requests == ["POST"]
        transport.service._throttled_until -= 300  # seconds later
        assert list(await transport.send(envelopes, NOW)) == [None] * 5
        received = await receive(receiver, 5)
        assert [each.envelope.message_id for each in received] == ["0", "1", "2", "3", "4"]


async def test_throttling_of_receivers_is_an_outage_and_their_messages_stay(
    login: AzureLogin, queue: str, gateway: Gateway
) -> None:
    async with transport_at(login) as direct:
        await send(direct, envelope(queue, "waits"))
    async with transport_at(by_way_of(gateway, login)) as transport:
        receiver = transport.receiver(queue)
        gateway.answer("GET", 503, 2, x_ms_error_code="ServerBusy")
        for _ in range(2):
            with pytest.raises(TransportUnreachable, match="throttled"):
                await receiver.receive(1)
        (received,) = await receive(receiver)
        gateway.answer("DELETE", 503, x_ms_error_code="ServerBusy")
        with pytest.raises(TransportUnreachable, match="throttled"):
            await receiver.commit(received, NOW)
        await receiver.commit(received, NOW)
        assert await is_empty(transport, queue)


async def test_a_message_whose_deletion_got_lost_is_not_handled_again_by_the_same_process(
    login: AzureLogin, queue: str, gateway: Gateway
) -> None:
    """What it sent is out; so when it comes again it is deleted, and not handed out."""
    async with transport_at(by_way_of(gateway, login), concurrent_sends=1) as transport:
        await send(transport, envelope(queue, "handled"))
        receiver = transport.receiver(queue)
        (received,) = await receive(receiver)
        gateway.answer("DELETE", 500, x_ms_error_code="InternalError")
        with pytest.raises(TransportUnreachable):
            await receiver.commit(received, NOW, Completion(outgoing=[envelope(queue, "sent")]))
        await receiver.roll_back(received)  # as the pump does
        (sent,) = await receive(receiver)
        assert sent.envelope.message_id == "sent"
        await receiver.commit(sent, NOW)
        assert await is_empty(transport, queue)
        assert gateway.requests.count("DELETE") >= 3  # the lost one, its repetition, and the sent message


async def test_a_send_whose_answer_is_lost_is_answered_as_an_outage_and_may_have_arrived(
    login: AzureLogin, queue: str, gateway: Gateway
) -> None:
    async with transport_at(by_way_of(gateway, login)) as transport:
        gateway.answer("POST", 500, after=True, x_ms_error_code="OperationTimedOut")
        (answer,) = await transport.send([envelope(queue, "twice")], NOW)
        assert isinstance(answer, TransportUnreachable)
        await send(transport, envelope(queue, "twice"))
        received = await receive(transport.receiver(queue), 2)
        assert [each.envelope.message_id for each in received] == ["twice", "twice"]


async def test_a_lost_connection_is_an_outage_and_ends_when_it_is_back(login: AzureLogin, queue: str) -> None:
    where = urlsplit(login.endpoint("queue"))
    with FaultyLink(where.hostname or "", where.port or 0) as link:
        through = replace(login, endpoints={"queue": f"http://127.0.0.1:{link.port}{where.path}"})
        async with transport_at(through) as transport:
            await send(transport, envelope(queue, "before"))
            receiver = transport.receiver(queue)
            (held,) = await receive(receiver)
            link.cut()
            answers: Sequence[object] = await transport.send([envelope(queue, f"{n}") for n in range(50)], NOW)
            assert {type(answer) for answer in answers} == {TransportUnreachable}
            for attempt in (lambda: receiver.receive(1), lambda: receiver.commit(held, NOW)):
                with pytest.raises(TransportUnreachable, match="cannot be reached"):
                    await attempt()
            link.restore()
            await receiver.commit(held, NOW)
            await send(transport, envelope(queue, "after"))
            assert [each.envelope.message_id for each in await receive(receiver)] == ["after"]


async def test_closing_without_a_connection_ends_and_says_what_stays_hidden(
    login: AzureLogin, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    where = urlsplit(login.endpoint("queue"))
    with FaultyLink(where.hostname or "", where.port or 0) as link:
        through = replace(login, endpoints={"queue": f"http://127.0.0.1:{link.port}{where.path}"})
        async with transport_at(through) as transport:
            await send(transport, envelope(queue))
            await receive(transport.receiver(queue))
            link.cut()
    assert "cannot be returned to its queue now" in caplog.text
    assert "it is free within 0:00:30" in caplog.text


# --- what is told -----------------------------------------------------------------------------------------------------


async def test_lengths_are_told_of_short_and_of_long_queues_and_not_of_missing_ones(
    login: AzureLogin, queue: str
) -> None:
    async with transport_at(login) as transport:
        await transport.create_queues([f"{queue}-long"])
        await send(transport, *(envelope(f"{queue}-long", f"{number}") for number in range(40)))
        await send(transport, envelope(queue))
        names = [queue, f"{queue}-long", f"{queue}-missing", "no_name"]
        assert await transport.lengths_of(names) == {queue: 1, f"{queue}-long": 40}


async def test_closing_ends_every_receiver_and_every_connection_whatever_goes_wrong_with_one(
    login: AzureLogin, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def close() -> None:
        raise RuntimeError("no")

    transport = AzureStorageQueueTransport(login)
    await send(transport, envelope(queue))
    wrong, right = transport.receiver(queue), transport.receiver(queue)
    await receive(right)
    monkeypatch.setattr(wrong, "close", close)
    with pytest.raises(RuntimeError, match="no"):
        await transport.close()
    assert transport.service._service is None
    assert not right._messages_by_token
    async with transport_at(login) as another:
        assert len(await receive(another.receiver(queue))) == 1


async def test_the_service_tells_its_version_and_its_clock(login: AzureLogin) -> None:
    async with transport_at(login) as transport:
        facts = await transport.server_facts()
    assert facts.product == "Azure Storage"
    assert facts.version[:2] == "20"
    assert facts.now is None
    assert abs(parsedate_to_datetime(facts.settings["date"]) - SystemClock().now()) < 5 * SECOND


async def test_the_configuration_opens_queues_by_their_address(
    azurite_connection: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_ACCOUNT", azurite_connection)
    transport = open_transport("azure-queues://?connection=env:SOME_ACCOUNT", concurrent_sends=2)
    assert list(await transport.send([envelope(queue)], NOW)) == [None]
    await transport.close()


# --- delayed messages -------------------------------------------------------------------------------------------------


async def test_a_delayed_message_goes_through_the_queue_of_timeouts_and_arrives_when_due(
    login: AzureLogin, queue: str
) -> None:
    """With a store elsewhere; one that no queue would take is refused where it is sent, and not stored."""
    store = MemoryStore()
    async with transport_at(login) as transport:
        endpoint = Endpoint(
            queue, transport=transport, delayed_delivery=DelayedDelivery(store), error_queue=f"{queue}-error"
        )
        arrived: list[tuple[Order, datetime, HandlerContext]] = []

        @endpoint.handler(Order)
        async def handle(message: Order, context: HandlerContext) -> None:
            arrived.append((message, SystemClock().now(), context))

        async with endpoint:
            due = SystemClock().now() + 2 * SECOND
            await endpoint.send(Order(7), deliver_at=due)
            with pytest.raises(MessageTooLarge, match="65,536"):
                await endpoint.send(Order(8), deliver_at=due, headers={"h": "x" * 50_000})
            await until(lambda: bool(arrived))
        ((message, at, context),) = arrived
        assert message == Order(7)
        assert at >= due
        assert context.due == due
        scheduled = (await store.record_counts())[RecordKind.SCHEDULED]
        assert scheduled == 1

"""An endpoint as a whole, in memory and in a file, on a virtual clock (rows 1, 15, 29, 41, 48, 54, 55, 105, 109)."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest

from postdate import (
    DelayedDelivery,
    Endpoint,
    HandlerContext,
    Headers,
    LocalTransport,
    MemoryStore,
    MemoryTransport,
    Recoverability,
    SqliteStore,
    TransactionMode,
    errors,
)
from postdate.backends.postgres.store import PostgresStore
from postdate.messages import Origin, format_timestamp
from postdate.ports import MessageFilter, TransportCapabilities, Wake
from postdate.testing import Fault, FaultyTransport, VirtualClock

SECOND = timedelta(seconds=1)
MICROSECOND = timedelta(microseconds=1)
ONE_TRY = Recoverability(immediate_retries=0, delayed_retries=0)


@dataclass
class Pay:
    amount: int = 0


@dataclass
class Paid:
    amount: int = 0


class Surroundings:
    """A store and queues, in memory or in one file, and endpoints that use them."""

    def __init__(self, clock: VirtualClock, store, transport) -> None:
        self.clock, self.store, self.transport = clock, store, transport
        self.start = clock.now()
        self.handled: list[tuple[object, datetime, HandlerContext]] = []
        self.critical: list[str] = []

    def endpoint(self, name: str = "sales", *, delays: bool = True, handles: bool = True, **settings) -> Endpoint:
        delayed_delivery = DelayedDelivery(self.store) if delays else None
        settings.setdefault("critical_error", lambda text, _: self.critical.append(text))
        settings.setdefault("transport", self.transport)
        endpoint = Endpoint(name, delayed_delivery=delayed_delivery, clock=self.clock, **settings)
        if handles and not settings.get("send_only"):
            endpoint.handler(Pay, name="Pay")(self.handle)
        return endpoint

    async def handle(self, message: object, context: HandlerContext) -> None:
        self.handled.append((message, self.clock.now(), context))

    async def length(self, queue: str) -> int:
        return (await self.transport.queue_lengths())[queue]

    async def pending(self) -> int:
        return (await self.store.statistics(self.start)).pending

    async def error_headers(self) -> Sequence[dict[str, str]]:
        receiver = self.transport.receiver("error")
        found = [dict(each.envelope.headers) for each in await receiver.receive(100)]
        await receiver.close()
        return found


@pytest.fixture(params=["memory", "file"])
async def around(request: pytest.FixtureRequest, clock: VirtualClock, tmp_path: Path):
    if request.param == "memory":
        yield Surroundings(clock, MemoryStore(), MemoryTransport())
        return
    store = SqliteStore(tmp_path / "all.db", synchronous="normal")
    transport = LocalTransport(tmp_path / "all.db", synchronous="normal")
    yield Surroundings(clock, store, transport)
    await store.close()
    await transport.close()


@pytest.fixture
def memory(clock: VirtualClock) -> Surroundings:
    return Surroundings(clock, MemoryStore(), MemoryTransport())


# --- delayed sends ----------------------------------------------------------------------------------------------------


async def test_a_message_delayed_to_oneself_is_handled_when_due_and_never_earlier_row_1(around: Surroundings) -> None:
    async with around.endpoint() as endpoint:
        await endpoint.send(Pay(1), delay=2 * SECOND)
        await around.clock.advance(2 * SECOND)
        assert around.handled == []
        await around.clock.advance(MICROSECOND)
        ((message, at, context),) = around.handled
    assert (message, at) == (Pay(1), around.start + 2 * SECOND + MICROSECOND)
    assert context.due == around.start + 2 * SECOND


async def test_without_a_store_a_delay_is_refused_and_says_what_is_missing_row_15(around: Surroundings) -> None:
    async with around.endpoint(delays=False) as endpoint:
        with pytest.raises(errors.DelayedDeliveryNotConfigured, match=r"delayed_delivery=DelayedDelivery\(store\)"):
            await endpoint.send(Pay(1), delay=SECOND)
        await endpoint.send(Pay(1))
        await around.clock.run_until_idle()
    assert len(around.handled) == 1


async def test_delay_and_time_to_be_received_are_refused_together_row_75(around: Surroundings) -> None:
    async with around.endpoint() as endpoint:
        with pytest.raises(errors.DelayConflict, match="Pay has both"):
            await endpoint.send(Pay(1), delay=SECOND, time_to_be_received=SECOND)


async def test_an_id_used_twice_is_refused_in_one_database(around: Surroundings) -> None:
    if isinstance(around.store, MemoryStore):  # there the second copy is dropped where it is stored
        return
    async with around.endpoint() as endpoint:
        await endpoint.send(Pay(1), delay=SECOND, message_id="mine")
        with pytest.raises(errors.DuplicateMessage):
            await endpoint.send(Pay(2), delay=SECOND, message_id="mine")


# --- ids used before --------------------------------------------------------------------------------------------------


def sending(endpoint: Endpoint, amount: int, *, delay: timedelta = 3 * SECOND) -> None:
    """Have the handler of another message send one to ``later``, always under the same id."""

    @endpoint.handler(Paid, name="Paid")
    async def handle(message: Paid, context: HandlerContext) -> None:
        await context.send(Pay(amount), destination="later", delay=delay, message_id="mine")


@pytest.mark.parametrize("mode", ["none", "receive_only", "sends_atomic_with_receive"])
@pytest.mark.parametrize("left", [False, True], ids=["waits", "has left"])
async def test_what_a_handler_delays_under_the_id_of_another_message_is_an_error_of_the_handler(
    around: Surroundings, mode: str, left: bool
) -> None:
    """Where it goes through a queue, of the message itself: it is in the error queue, and nothing is dropped.

    Also where the handled one was in a backlog when the other was sent: that does not make it a repetition.
    """
    await around.transport.create_queues(["later"])
    endpoint = around.endpoint(recoverability=ONE_TRY, transaction_mode=mode)
    sending(endpoint, 2)
    async with endpoint:
        await endpoint.send(Pay(1), destination="later", delay=SECOND, message_id="mine")
        await around.clock.advance(2 * SECOND if left else 0 * SECOND)
        before = {Headers.TIME_SENT: format_timestamp(around.start - SECOND)}
        await endpoint.send(Paid(), message_id="handled", headers=before)
        await around.clock.run_until_idle()
        assert await around.length("error") == 1
        (headers,) = await around.error_headers()
        await around.clock.advance(10 * SECOND)
    assert headers[Headers.ERROR_CODE] == errors.DuplicateMessage.code
    assert headers[Headers.MESSAGE_ID] == ("mine" if isinstance(around.store, MemoryStore) else "handled")
    assert await around.length("later") == 1


@pytest.mark.parametrize("mode", ["receive_only", "sends_atomic_with_receive"])
async def test_what_a_handler_delays_again_under_its_id_passes_without_a_word(around: Surroundings, mode: str) -> None:
    """The same content, sent later: by another message, or by the same one, delivered once more."""
    await around.transport.create_queues(["later"])
    endpoint = around.endpoint(recoverability=ONE_TRY, transaction_mode=mode)
    sending(endpoint, 7)
    async with endpoint:
        for id_ in ("one", "two"):
            await endpoint.send(Paid(), message_id=id_)
            await around.clock.advance(SECOND)
        assert await around.pending() == 1
        await around.clock.advance(10 * SECOND)
        assert await around.length("error") == 0
    assert await around.length("later") == 1


async def test_a_message_that_comes_again_after_what_it_sent_has_left_is_handled_again(
    clock: VirtualClock, tmp_path: Path
) -> None:
    """In one database it has not left, in mode ``receive_only`` either: what is stored there ends with its message."""
    file = tmp_path / "all.db"
    store, transport = SqliteStore(file, synchronous="normal"), LocalTransport(file, synchronous="normal")
    faulty = FaultyTransport(transport, Fault("commit", errors.TransportUnavailable("lost"), calls=[1]))
    around = Surroundings(clock, store, transport)
    await transport.create_queues(["later"])
    endpoint = around.endpoint(transport=faulty, recoverability=ONE_TRY, transaction_mode="receive_only")
    sending(endpoint, 7, delay=SECOND / 10)
    async with endpoint:
        await endpoint.send(Paid(), message_id="one")
        await clock.advance(10 * SECOND)
        assert faulty.faults.calls["commit"] > 1
        assert await around.length("error") == 0
    assert (await around.length("later"), await around.length("sales")) == (1, 0)
    await store.close()
    await transport.close()


async def test_of_one_handler_two_messages_under_one_id_are_an_error_and_one_twice_is_stored_once(
    around: Surroundings,
) -> None:
    if isinstance(around.store, MemoryStore):  # there the timeouts queue has both: see above
        return
    await around.transport.create_queues(["later"])
    endpoint = around.endpoint(handles=False, recoverability=ONE_TRY)

    @endpoint.handler(Pay)
    async def handle(message: Pay, context: HandlerContext) -> None:
        for amount in (1, message.amount):
            await context.send(Paid(amount), destination="later", delay=SECOND, message_id=f"of-{message.amount}")
        await context.send(Paid(3), destination="later")

    async with endpoint:
        await endpoint.send(Pay(1))
        await endpoint.send(Pay(2))
        await around.clock.run_until_idle()
        assert await around.length("error") == 1
        (headers,) = await around.error_headers()
        assert headers[Headers.ERROR_CODE] == errors.DuplicateMessage.code
        assert (await around.pending(), await around.length("later")) == (1, 1)


# --- handlers ---------------------------------------------------------------------------------------------------------


def failing(endpoint: Endpoint, times: int, fails: Callable[[], Exception] = lambda: RuntimeError("no")) -> list[int]:
    attempts: list[int] = []

    @endpoint.handler(Pay, name="Pay")
    async def handle(message: Pay, context: HandlerContext) -> None:
        attempts.append(message.amount)
        if len(attempts) <= times:
            raise fails()

    return attempts


async def test_a_handler_that_always_fails_is_called_24_times_within_a_minute_row_109(around: Surroundings) -> None:
    endpoint = around.endpoint(handles=False)
    attempts = failing(endpoint, 1000)
    async with endpoint:
        await endpoint.send(Pay(1), message_id="m-1")
        for calls, seconds in ((6, 0), (12, 10), (18, 20), (24, 30)):
            await around.clock.advance(seconds * SECOND + MICROSECOND)
            assert len(attempts) == calls
        await around.clock.advance(timedelta(hours=25))
        assert len(attempts) == 24
        (headers,) = await around.error_headers()
    assert headers[Headers.FAILED_QUEUE] == "sales"
    assert headers[Headers.MESSAGE_ID] == "m-1"
    assert headers[Headers.EXCEPTION_TYPE] == "builtins.RuntimeError"
    assert Headers.DELAYED_RETRIES not in headers
    assert await around.length("sales") == await around.pending() == 0


async def test_without_a_store_there_are_no_delayed_retries(
    around: Surroundings, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint = around.endpoint(delays=False, handles=False)
    attempts = failing(endpoint, 1000)
    async with endpoint:
        await endpoint.send(Pay(1))
        await around.clock.advance(timedelta(hours=1))
    assert len(attempts) == 6
    assert await around.length("error") == 1
    assert "no delayed retry without a store" in caplog.text


@pytest.mark.parametrize("fails", [False, True])
async def test_what_is_sent_after_its_handler_has_ended_is_refused(memory: Surroundings, *, fails: bool) -> None:
    contexts: list[HandlerContext] = []
    endpoint = memory.endpoint(handles=False, recoverability=Recoverability(immediate_retries=0, delayed_retries=0))

    @endpoint.handler(Pay)
    async def handle(message: Pay, context: HandlerContext) -> None:
        contexts.append(context)
        if fails:
            raise RuntimeError("no")

    async with endpoint:
        await endpoint.send(Pay(1))
        await memory.clock.run_until_idle()
        with pytest.raises(errors.MessageError, match="has ended"):
            await contexts[0].send(Paid(), destination="sales")


@pytest.mark.parametrize("mode", [mode for mode in TransactionMode if mode is not TransactionMode.TRANSACTION_SCOPE])
async def test_sending_to_a_missing_queue_is_a_failure_of_the_message(
    around: Surroundings, mode: TransactionMode
) -> None:
    endpoint = around.endpoint(handles=False, transaction_mode=mode)
    attempts: list[int] = []

    @endpoint.handler(Pay)
    async def handle(message: Pay, context: HandlerContext) -> None:
        attempts.append(message.amount)
        await context.send(Paid(), destination="nowhere")

    async with endpoint:
        await endpoint.send(Pay(1))
        await around.clock.advance(timedelta(hours=1))
        (headers,) = await around.error_headers()
    assert headers[Headers.ERROR_CODE] == "queue_not_found"
    assert len(attempts) == (1 if mode is TransactionMode.NONE else 24)


async def test_a_full_queue_holds_up_no_messages_whose_handlers_send_elsewhere(
    memory: Surroundings, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = memory.endpoint(handles=False, concurrency=2, transaction_mode="receive_only")
    send, retries = memory.transport.send, list[str | None]()

    async def refuse(envelopes: Any, now: datetime, *, work: Any = ()) -> Any:
        if any(each.destination == "full" for each in envelopes):
            return [errors.DestinationUnavailable("it is full")] * len(envelopes)
        return await send(envelopes, now, work=work)

    @endpoint.handler(Pay)
    async def handle(message: Pay, context: HandlerContext) -> None:
        retries.append(context.headers.get(Headers.DELAYED_RETRIES))
        await context.send(Paid(), destination="full" if message.amount == 1 else "free")

    await memory.transport.create_queues(["full", "free"])
    async with endpoint:
        with monkeypatch.context() as patch:
            patch.setattr(memory.transport, "send", refuse)
            for amount in (1, 1, 1, 1, 2, 2):
                await endpoint.send(Pay(amount))
            await memory.clock.advance(SECOND)
            assert await memory.length("free") == 2
            await memory.clock.advance(timedelta(hours=1))
            assert await memory.length("full") == await memory.length("error") == 0
            waiting = await memory.store.list_pending(MessageFilter(), 10)
            assert {each.origin for each in waiting} == {Origin.RETRY}, "or a bulk change cancels them"
        await memory.clock.advance(11 * SECOND)
        assert await memory.length("full") == 4
    assert set(retries) == {None, "0"}, "it does not count"


async def test_without_an_error_queue_a_failing_message_stays_row_41(memory: Surroundings) -> None:
    policy = Recoverability(immediate_retries=0, delayed_retries=0)
    endpoint = memory.endpoint(handles=False, recoverability=policy)
    attempts = failing(endpoint, 3)
    async with endpoint:
        del memory.transport.queues["error"]
        await endpoint.send(Pay(1))
        await memory.clock.advance(2 * SECOND)
        assert len(attempts) == 3
        assert await memory.length("sales") == 1
        await memory.clock.advance(2 * SECOND)
        assert len(attempts) == 4
        assert await memory.length("sales") == 0


async def test_all_handlers_of_a_type_are_called_in_order(memory: Surroundings) -> None:
    endpoint = memory.endpoint(handles=False)
    called: list[str] = []
    for name in ("first", "second"):

        @endpoint.handler(Pay)
        async def handle(message: Pay, context: HandlerContext, name: str = name) -> None:
            called.append(name)

    async with endpoint:
        await endpoint.send(Pay(1))
        await memory.clock.run_until_idle()
    assert called == ["first", "second"]


async def test_a_reply_goes_to_where_the_sender_asked_for_it(memory: Surroundings) -> None:
    billing = memory.endpoint("billing", handles=False)

    @billing.handler(Pay, name="Pay")
    async def handle(message: Pay, context: HandlerContext) -> None:
        await context.reply(Paid(message.amount), headers={"own": "1"})

    sales = memory.endpoint("sales", handles=False)
    sales.handler(Paid)(memory.handle)
    sales.route(Pay, "billing", name="Pay")
    async with billing, sales:
        id_ = await sales.send(Pay(7))
        await memory.clock.run_until_idle()
        ((message, _, context),) = memory.handled
    assert message == Paid(7)
    assert context.headers[Headers.RELATED_TO] == context.headers[Headers.CORRELATION_ID] == id_
    assert context.headers[Headers.MESSAGE_INTENT] == "Reply"
    assert context.headers["own"] == "1"


async def test_headers_of_an_incoming_message_are_read_only(around: Surroundings) -> None:
    """Written by a handler that fails, they would come again with the retry, and stand in the error queue."""
    endpoint = around.endpoint(handles=False, recoverability=Recoverability(immediate_retries=0, delayed_retries=0))

    @endpoint.handler(Pay, name="Pay")
    async def write(_: Pay, context: HandlerContext) -> None:
        own = {**context.headers, "Mine": "1"}
        assert own["Mine"] == "1"
        context.headers["Mine"] = "1"  # type: ignore[index]

    async with endpoint:
        await endpoint.send(Pay())
        await around.clock.run_until_idle()
    (headers,) = await around.error_headers()
    assert headers[Headers.EXCEPTION_TYPE] == "builtins.TypeError"
    assert "Mine" not in headers


@pytest.mark.parametrize("options", [{"destination": ""}, {"destination": " "}, {"message_id": ""}])
@pytest.mark.parametrize("timing", [{}, {"delay": SECOND}], ids=["at once", "later"])
async def test_blank_addresses_and_ids_are_refused(memory: Surroundings, options: dict, timing: dict) -> None:
    """They were taken for none: the message went where its type is routed, under an id of ours."""
    endpoint = memory.endpoint()

    @endpoint.handler(Paid, name="Paid")
    async def handle(_: Paid, context: HandlerContext) -> None:
        await context.send(Pay(), **options, **timing)

    async with endpoint:
        with pytest.raises(errors.InvalidMessage, match="blank"):
            await endpoint.send(Pay(), **options, **timing)
        await endpoint.send(Paid())
        await memory.clock.run_until_idle()
    assert not memory.handled
    assert "is blank" in (await memory.error_headers())[0][Headers.EXCEPTION_MESSAGE]


async def test_a_route_to_nowhere_and_a_reply_to_nowhere_are_refused(memory: Surroundings) -> None:
    endpoint = memory.endpoint()
    with pytest.raises(errors.ConfigurationError, match=r"the route of .*Paid is blank"):
        endpoint.route(Paid, "")

    @endpoint.handler(Paid, name="Paid")
    async def handle(_: Paid, context: HandlerContext) -> None:
        await context.reply(Pay())

    async with endpoint:
        await endpoint.send(Paid(), headers={Headers.REPLY_TO_ADDRESS: " "})
        await memory.clock.run_until_idle()
    assert "destination is blank" in (await memory.error_headers())[0][Headers.EXCEPTION_MESSAGE]


@pytest.mark.parametrize("shares_database", [True, False])
async def test_a_retry_of_a_message_with_reserved_headers_goes_either_way(
    around: Surroundings, *, shares_database: bool
) -> None:
    """Through the queue it was refused, and in the database of the queues it was stored."""
    transport = around.transport if shares_database else MemoryTransport()
    endpoint = around.endpoint(
        handles=False, transport=transport, recoverability=Recoverability(immediate_retries=0, delayed_retries=1)
    )
    came: list[HandlerContext] = []

    @endpoint.handler(Pay, name="Pay")
    async def fail_once(_: Pay, context: HandlerContext) -> None:
        came.append(context)
        if len(came) == 1:
            raise ValueError("once")

    reserved = Headers.TIMEOUT_PROPERTIES_PREFIX + "Mine"
    async with endpoint:
        await endpoint.send(Pay(), headers={reserved: "1"})
        await around.clock.run_until_idle()
        await around.clock.advance(60 * SECOND)
    assert [reserved in context.headers for context in came] == [True, False]


class NarrowTransport(MemoryTransport):
    """Queues that take few headers, as those of RabbitMQ, whose headers must fit into one frame."""

    @property
    def capabilities(self) -> TransportCapabilities:
        return replace(super().capabilities, largest_headers_bytes=2_000)


@pytest.mark.parametrize("timing", [{}, {"delay": SECOND}], ids=["at once", "later"])
async def test_headers_that_no_queue_takes_are_refused_when_they_are_sent(memory: Surroundings, timing: dict) -> None:
    """When the message was due, its error copy had no room either: it was tried again for ever."""
    narrow = NarrowTransport()
    async with memory.endpoint(transport=narrow) as endpoint:
        with pytest.raises(errors.MessageTooLarge, match=r"has 2,\d{3} bytes of headers, more than the 2,000"):
            await endpoint.send(Pay(), headers={"large": "é" * 900}, **timing)
        await endpoint.send(Pay(1), headers={"large": "x" * 1_200}, **timing)
        await memory.clock.advance(2 * SECOND)
    assert [message for message, *_ in memory.handled] == [Pay(1)]


async def test_they_are_refused_in_a_transaction_of_the_application_too() -> None:
    """The message goes past the queues into the store, which would take it."""
    store = PostgresStore("postgresql://nobody.invalid/database")
    endpoint = Endpoint("sales", transport=NarrowTransport(), delayed_delivery=DelayedDelivery(store))
    with pytest.raises(errors.MessageTooLarge, match="more than the 2,000"):
        await endpoint.send(
            b"", destination="sales", headers={"large": "x" * 2_000}, delay=SECOND, transaction=object()
        )
    await store.close()


async def test_a_delay_for_ever_waits_and_disturbs_nobody(memory: Surroundings) -> None:
    async with memory.endpoint() as endpoint:
        await endpoint.send(Pay(1), delay=timedelta.max)
        await endpoint.send(Pay(2), delay=SECOND)
        await memory.clock.advance(2 * SECOND)
        assert [message for message, *_ in memory.handled] == [Pay(2)]
        assert await memory.pending() == 1


async def test_a_message_that_asked_for_no_reply_cannot_be_replied_to(memory: Surroundings) -> None:
    endpoint = memory.endpoint(handles=False)

    @endpoint.handler(Pay, name="Pay")
    async def handle(message: Pay, context: HandlerContext) -> None:
        await context.reply(Paid())

    sender = memory.endpoint("web", send_only=True)
    sender.route(Pay, "sales", name="Pay")
    async with endpoint, sender:
        await sender.send(Pay(1))
        await memory.clock.run_until_idle()
        (headers,) = await memory.error_headers()
    assert headers[Headers.EXCEPTION_TYPE] == "postdate.errors.InvalidMessage"


async def test_unknown_and_unreadable_messages_go_to_the_error_queue_at_once(memory: Surroundings) -> None:
    async with memory.endpoint() as endpoint:
        await endpoint.send(b"?", destination="sales")
        await endpoint.send(b"?", destination="sales", headers={Headers.ENCLOSED_MESSAGE_TYPES: "Pay"})
        await memory.clock.run_until_idle()
        codes = [headers[Headers.ERROR_CODE] for headers in await memory.error_headers()]
    assert codes == ["unknown_message_type", "invalid_message"]


async def test_type_names_of_other_platforms_are_understood(memory: Surroundings) -> None:
    names = "Sales.PaySpecial, Sales, Version=1.0.0.0; Pay, Sales"
    async with memory.endpoint() as endpoint:
        await endpoint.send(b'{"amount": 3}', destination="sales", headers={Headers.ENCLOSED_MESSAGE_TYPES: names})
        await memory.clock.run_until_idle()
    assert [message for message, _, _ in memory.handled] == [Pay(3)]


# --- expiry -----------------------------------------------------------------------------------------------------------


async def test_a_delayed_retry_of_an_expiring_message_ends_in_its_discard(memory: Surroundings) -> None:
    endpoint = memory.endpoint(handles=False)
    attempts = failing(endpoint, 1000)
    async with endpoint:
        await endpoint.send(Pay(1), expires_at=memory.start + 15 * SECOND)
        await memory.clock.advance(timedelta(hours=1))
    assert len(attempts) == 12
    assert await memory.length("error") == await memory.pending() == await memory.length("sales") == 0


# --- start and stop ---------------------------------------------------------------------------------------------------


async def test_exactly_once_is_refused_across_databases_row_29(clock: VirtualClock, tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "one.db")
    around = Surroundings(clock, store, MemoryTransport())
    with pytest.raises(errors.UnsupportedTransactionMode, match="transaction_scope"):
        around.endpoint(transaction_mode=TransactionMode.TRANSACTION_SCOPE)
    other = LocalTransport(tmp_path / "two.db")
    with pytest.raises(errors.UnsupportedTransactionMode, match="same one for both"):
        around.endpoint(transaction_mode=TransactionMode.TRANSACTION_SCOPE, transport=other)
    await store.close()
    await other.close()


def test_the_strongest_mode_both_can_keep_is_the_default(memory: Surroundings) -> None:
    assert memory.endpoint().mode is TransactionMode.SENDS_ATOMIC_WITH_RECEIVE


async def test_who_only_sends_can_delay_row_54(around: Surroundings) -> None:
    await around.transport.create_queues(["billing"])
    async with around.endpoint("web", send_only=True) as sender:
        await sender.send(Pay(1), destination="billing", delay=SECOND)
        await around.clock.advance(2 * SECOND)
    assert await around.length("billing") == 1
    assert "web" not in await around.transport.queue_lengths()


@pytest.mark.parametrize("send_only", [False, True])
def test_delayed_delivery_without_an_error_queue_is_refused_row_54(memory: Surroundings, send_only: bool) -> None:
    with pytest.raises(errors.ErrorQueueNotConfigured, match="error_queue='error'"):
        memory.endpoint(error_queue=None, send_only=send_only)


def test_who_only_sends_handles_nothing(memory: Surroundings) -> None:
    endpoint = memory.endpoint(send_only=True)
    with pytest.raises(errors.ConfigurationError, match="send-only"):
        endpoint.handler(Pay)


async def test_stopping_waits_for_the_handler_in_hand_row_55(around: Surroundings) -> None:
    await around.transport.create_queues(["audit"])
    endpoint = around.endpoint(handles=False)
    started, may_end = anyio.Event(), anyio.Event()

    @endpoint.handler(Pay)
    async def handle(message: Pay, context: HandlerContext) -> None:
        started.set()
        await may_end.wait()
        await context.send(Paid(), destination="audit")

    async with endpoint:
        await endpoint.send(Pay(1))
        await started.wait()
        endpoint.stop()
        await around.clock.run_until_idle()
        may_end.set()
    assert await around.length("audit") == 1
    assert await around.length("sales") == 0


async def test_what_is_cut_off_by_force_is_handled_after_the_next_start_row_55(around: Surroundings) -> None:
    await around.transport.create_queues(["audit"])
    endpoint = around.endpoint(handles=False)
    started = anyio.Event()

    @endpoint.handler(Pay, name="Pay")
    async def handle(message: Pay, context: HandlerContext) -> None:
        await context.send(Paid(), destination="audit")
        started.set()
        await anyio.Event().wait()

    with anyio.CancelScope() as scope:
        async with endpoint:
            await endpoint.send(Pay(1))
            await started.wait()
            scope.cancel()
            await anyio.lowlevel.checkpoint()
    assert scope.cancelled_caught
    assert await around.length("sales") == 1
    assert await around.length("audit") == 0
    async with around.endpoint():
        await around.clock.run_until_idle()
    assert len(around.handled) == 1


async def test_what_fell_due_while_nobody_ran_is_delivered_at_the_next_start_row_105(around: Surroundings) -> None:
    async with around.endpoint() as endpoint:
        await endpoint.send(Pay(1), delay=SECOND)
        await around.clock.run_until_idle()
    await around.clock.advance(timedelta(days=1))
    assert around.handled == []
    async with around.endpoint():
        await around.clock.run_until_idle()
        assert len(around.handled) == 1


async def test_it_is_entered_when_it_hears_of_what_is_stored(memory: Surroundings, monkeypatch) -> None:
    asked, may_answer, entered = anyio.Event(), anyio.Event(), anyio.Event()
    listen = memory.store.listen

    async def slowly(wake: Wake) -> Callable[[], None]:
        asked.set()
        await may_answer.wait()
        return await listen(wake)

    async def enter() -> None:
        async with memory.endpoint():
            entered.set()

    monkeypatch.setattr(memory.store, "listen", slowly)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(enter)
        await asked.wait()
        await memory.clock.run_until_idle()
        assert not entered.is_set()
        may_answer.set()
        await entered.wait()


async def test_an_endpoint_can_be_started_again_but_not_twice(memory: Surroundings) -> None:
    endpoint = memory.endpoint(delays=False)
    async with endpoint:
        with pytest.raises(errors.ConfigurationError, match="running already"):
            await endpoint.__aenter__()
    async with endpoint:
        await endpoint.send(Pay(1))
        await memory.clock.run_until_idle()
    assert len(memory.handled) == 1


async def test_queues_are_only_created_on_request(memory: Surroundings) -> None:
    async with memory.endpoint(send_only=True, delays=False, create_queues=False):
        pass
    assert await memory.transport.queue_lengths() == {}


async def test_more_messages_than_hands_wait_their_turn(memory: Surroundings) -> None:
    endpoint = memory.endpoint(handles=False, concurrency=3)
    busy, most, gate = 0, 0, anyio.Semaphore(0)

    @endpoint.handler(Pay)
    async def handle(message: Pay, context: HandlerContext) -> None:
        nonlocal busy, most
        busy += 1
        most = max(most, busy)
        await gate.acquire()
        busy -= 1

    async with endpoint:
        for number in range(10):
            await endpoint.send(Pay(number))
        for _ in range(10):
            await memory.clock.run_until_idle()
            gate.release()
    assert most == 3
    assert await memory.length("sales") == 0


async def test_a_failing_commit_pauses_and_the_message_is_handled_again(memory: Surroundings) -> None:
    transport = FaultyTransport(memory.transport, Fault("commit", errors.TransportUnavailable("down"), calls=[1, 2]))
    endpoint = memory.endpoint(transport=transport)
    async with endpoint:
        await endpoint.send(Pay(1))
        await memory.clock.run_until_idle()
        assert len(memory.handled) == 1
        await memory.clock.advance(3 * SECOND)
    assert len(memory.handled) == 3
    assert await memory.length("sales") == 0


async def test_a_message_that_cannot_even_be_given_back_is_not_lost(memory: Surroundings) -> None:
    down = errors.TransportUnavailable("down")
    faults = Fault("commit", down, calls=[1]), Fault("roll_back", down, calls=[1, 2, 3])
    endpoint = memory.endpoint(transport=FaultyTransport(memory.transport, *faults))
    async with endpoint:
        await endpoint.send(Pay(1))
        await memory.clock.advance(10 * SECOND)
    assert len(memory.handled) == 2
    assert await memory.length("sales") == 0


async def test_failing_receives_pause_and_are_a_critical_error_after_30_seconds(memory: Surroundings) -> None:
    transport = FaultyTransport(memory.transport, Fault("receive", errors.TransportUnavailable("down")))
    async with memory.endpoint(delays=False, transport=transport) as endpoint:
        await endpoint.send(Pay(1))
        await memory.clock.advance(29 * SECOND)
        assert 25 <= transport.faults.calls["receive"] <= 31
        assert memory.critical == []
        await memory.clock.advance(5 * SECOND)
        assert memory.critical == ["Failed to receive messages"]
        transport.faults.clear()
        await memory.clock.advance(11 * SECOND)
        assert len(memory.handled) == 1


async def test_a_pause_after_a_failure_does_not_hold_up_the_stop(memory: Surroundings) -> None:
    transport = FaultyTransport(memory.transport, Fault("receive", errors.TransportUnavailable("down")))
    async with memory.endpoint(delays=False, transport=transport):
        await memory.clock.run_until_idle()
    assert memory.clock.now() == memory.start


# --- configuration ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"name": " "}, "name"), ({"concurrency": 0}, "concurrency")],
)
def test_wrong_settings_are_refused(memory: Surroundings, settings: dict, said: str) -> None:
    with pytest.raises(errors.ConfigurationError, match=said):
        memory.endpoint(**settings)


@pytest.mark.parametrize(
    "wrong",
    [
        {"number_of_retries": -1},
        {"maximum_recovery_failures_per_second": 0},
        {"time_to_trigger_store_circuit_breaker": timedelta(0)},
        {"time_to_trigger_fetch_circuit_breaker": -SECOND},
        {"time_to_trigger_dispatch_circuit_breaker": timedelta(0)},
        {"number_of_retries": "3"},
        {"number_of_retries": 1.5},
        {"number_of_retries": True},
        {"maximum_recovery_failures_per_second": -1},
        {"maximum_recovery_failures_per_second": None},
        {"time_to_trigger_store_circuit_breaker": 30},
        {"time_to_trigger_fetch_circuit_breaker": "30s"},
    ],
)
def test_settings_of_delayed_delivery_are_checked_row_48(wrong: dict) -> None:
    with pytest.raises(errors.ConfigurationError, match=next(iter(wrong))):
        DelayedDelivery(MemoryStore(), **wrong)


def test_no_retries_may_be_said_explicitly_row_48() -> None:
    assert DelayedDelivery(MemoryStore(), number_of_retries=0).number_of_retries == 0


def test_settings_of_delayed_delivery_have_the_defaults_of_the_specification_row_48() -> None:
    settings = DelayedDelivery(MemoryStore())
    assert (settings.number_of_retries, settings.maximum_recovery_failures_per_second) == (0, 1)
    for name in ("store", "fetch", "dispatch"):
        assert getattr(settings, f"time_to_trigger_{name}_circuit_breaker") == 30 * SECOND


def test_what_is_no_store_is_refused() -> None:
    with pytest.raises(errors.ConfigurationError, match="store"):
        DelayedDelivery(object())  # type: ignore[arg-type]


async def test_a_message_without_a_destination_is_refused(memory: Surroundings) -> None:
    async with memory.endpoint() as endpoint:
        with pytest.raises(errors.UnknownMessageType, match="route"):
            await endpoint.send(Paid())
        with pytest.raises(errors.QueueNotFound):
            await endpoint.send(Paid(), destination="nowhere")
        with pytest.raises(errors.InvalidMessage, match="JSON"):
            await endpoint.send(object(), destination="sales")


def test_a_critical_error_is_logged_unless_told_otherwise_row_113(caplog: pytest.LogCaptureFixture) -> None:
    endpoint = Endpoint("sales", transport=MemoryTransport())
    with caplog.at_level(logging.CRITICAL, "postdate.endpoint"):
        endpoint._critical_errors("cannot receive", OSError("down"))
    assert caplog.records[0].message == "cannot receive: down"


@pytest.mark.parametrize("text", ["bad \0 byte", "lone \ud800 surrogate"])
async def test_a_failure_whose_text_no_database_takes_ends_like_any_other(around: Surroundings, text: str) -> None:
    attempts = 0

    async def fail(message: Paid, context: HandlerContext) -> None:
        nonlocal attempts
        attempts += 1
        raise ValueError(text)

    policy = Recoverability(immediate_retries=1, delayed_retries=1)
    endpoint = around.endpoint(recoverability=policy)
    endpoint.handler(Paid, name="Paid")(fail)
    async with endpoint:
        await endpoint.send(Paid(1))
        await around.clock.advance(20 * SECOND)
    assert attempts == 4
    (headers,) = await around.error_headers()
    assert headers[Headers.EXCEPTION_MESSAGE] in {"bad \\x00 byte", "lone \\ud800 surrogate"}

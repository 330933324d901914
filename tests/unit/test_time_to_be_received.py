"""Setting a time to be received, and what an endpoint does with it (specification 2, rows 61 to 75)."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec
import pytest

from postdate import (
    Audit,
    DelayedDelivery,
    DelayedMessage,
    Endpoint,
    Envelope,
    ExpiryRules,
    Headers,
    LocalTransport,
    MemoryStore,
    MemoryTransport,
    Recoverability,
    SendOptions,
    SqliteStore,
    time_to_be_received,
)
from postdate.backends.memory.transport import MemoryReceiver
from postdate.clock import from_microseconds
from postdate.endpoint import outgoing
from postdate.endpoint.message_types import INFINITE, TimesToBeReceived
from postdate.endpoint.outgoing import delayed_message_of
from postdate.errors import (
    ConfigurationError,
    DelayConflict,
    InvalidMessage,
    NotSupported,
    TimeToBeReceivedInTransaction,
)
from postdate.messages import LONGEST_TIME_TO_BE_RECEIVED, format_timestamp
from postdate.ports import HANDLED, RecordKind
from postdate.testing import RecordedMetrics, VirtualClock

SECOND = timedelta(seconds=1)
MICROSECOND = timedelta(microseconds=1)


@time_to_be_received("00:00:30")
@dataclass(slots=True)
class Offer:
    price: int = 0


class FlashOffer(Offer):
    """Inherits half a minute."""


@time_to_be_received(5 * SECOND)
class LastSecondOffer(FlashOffer):
    """Says otherwise."""


@time_to_be_received(INFINITE)
class StandingOffer(Offer):
    """Lasts."""


@time_to_be_received("1.00:00:00")
class Perishable(Protocol):
    """Whatever is of no use tomorrow."""


@time_to_be_received("2.00:00:00")
class Keeps(ABC):
    """Whatever keeps two days."""

    @abstractmethod
    def eaten_by(self) -> timedelta: ...


@dataclass
class Milk(Perishable):
    litres: int = 1


@dataclass
class Order:
    number: int = 0


# --- by type (row 74) -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message_type", "span"),
    [
        (Offer, 30 * SECOND),
        (FlashOffer, 30 * SECOND),
        (LastSecondOffer, 5 * SECOND),
        (StandingOffer, None),
        (Milk, timedelta(days=1)),
        (Order, None),
        (bytes, None),
    ],
)
def test_a_type_says_how_long_and_the_most_derived_wins_row_74(message_type: type, span: timedelta | None) -> None:
    assert TimesToBeReceived().span_of(message_type) == span


def test_structs_and_abstract_classes_can_say_it_too_row_74() -> None:
    @time_to_be_received("00:01:00")
    class Yoghurt(msgspec.Struct):
        cups: int = 1

    class Hard(Keeps):
        def eaten_by(self) -> timedelta:
            return timedelta(days=2)

    assert TimesToBeReceived().span_of(Yoghurt) == timedelta(minutes=1)
    assert TimesToBeReceived().span_of(Hard) == timedelta(days=2)
    assert msgspec.json.encode(Yoghurt()) == b'{"cups":1}'


@pytest.mark.parametrize(
    ("span", "complaint"),
    [
        ("soon", "not a time span: 'soon'"),
        ("25:00:00", "not a time span"),
        ("", "not a time span"),
        ("00:00:00", "greater than 0"),
        ("-00:00:01", "greater than 0"),
        (timedelta(0), "greater than 0"),
        (LONGEST_TIME_TO_BE_RECEIVED + MICROSECOND, "longer than 1,000,000 days"),
        (30, "timedelta or text, not int 30"),
        ("5", "not a time span: '5'"),
    ],
)
def test_a_wrong_one_is_refused_where_the_type_is_defined_row_74(span: timedelta | str, complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint) as refused:
        time_to_be_received(span)(type("Misfit", (), {}))
    assert "Misfit" in str(refused.value)


def test_without_parentheses_it_is_refused_at_once_row_74() -> None:
    with pytest.raises(ConfigurationError, match=r"Order has no time: write @time_to_be_received"):
        time_to_be_received(Order)  # type: ignore[arg-type]


def test_a_protocol_gets_no_member_by_it_row_74() -> None:
    @time_to_be_received("00:00:07")
    @runtime_checkable
    class Named(Protocol):
        name: str

    class Anybody:
        name = "x"

    class Explicit(Named):
        name = "y"

    assert isinstance(Anybody(), Named)
    assert TimesToBeReceived().span_of(Explicit) == 7 * SECOND
    assert TimesToBeReceived().span_of(Anybody) is None


def test_a_convention_is_not_asked_for_bytes_row_74() -> None:
    picky = Endpoint("sales", transport=MemoryTransport(), time_to_be_received=lambda message_type: message_type.LIFE)
    assert isinstance(picky.outgoing.create(b"raw", SendOptions(destination="billing")), Envelope)


def test_the_text_for_ever_of_the_wire_format_is_for_ever_row_74() -> None:
    assert (
        TimesToBeReceived().span_of(time_to_be_received("10675199.02:48:05.4775807")(type("Lasting", (), {}))) is None
    )


def test_a_convention_goes_before_the_type_and_leaves_the_rest_to_it_row_74() -> None:
    spans = {Order: 7 * SECOND, Offer: INFINITE}
    times = TimesToBeReceived(spans.get)
    assert times.span_of(Order) == 7 * SECOND
    assert times.span_of(Offer) is None
    assert times.span_of(LastSecondOffer) == 5 * SECOND
    assert times.expiring_types() == [f"{__name__}.LastSecondOffer", f"{__name__}.Order"]


@pytest.mark.parametrize("span", [timedelta(0), -SECOND])
def test_a_convention_that_returns_zero_or_less_is_refused_at_registration_row_74(span: timedelta) -> None:
    endpoint = Endpoint("sales", transport=MemoryTransport(), time_to_be_received=lambda _: span)
    with pytest.raises(ConfigurationError, match=r"Order.*must be greater than 0"):
        endpoint.route(Order, "billing")


# --- sending ----------------------------------------------------------------------------------------------------------


def endpoint(transport: MemoryTransport | LocalTransport | None = None, **settings) -> Endpoint:
    settings.setdefault("delayed_delivery", DelayedDelivery(MemoryStore()))
    return Endpoint("sales", transport=transport or MemoryTransport(), **settings)


def sent(message: object, **options) -> Envelope:
    envelope = endpoint().outgoing.create(message, SendOptions(destination="billing", **options))
    assert isinstance(envelope, Envelope)
    return envelope


def test_a_send_tells_the_queue_and_the_receiver_rows_59_66() -> None:
    envelope = sent(Order(), time_to_be_received=30 * SECOND)
    assert envelope.time_to_be_received == 30 * SECOND
    assert envelope.headers[Headers.TIME_TO_BE_RECEIVED] == "00:00:30"


def test_what_the_type_says_is_sent_unless_the_send_says_otherwise_row_74() -> None:
    assert sent(Offer()).time_to_be_received == 30 * SECOND
    assert sent(Offer()).headers[Headers.TIME_TO_BE_RECEIVED] == "00:00:30"
    assert sent(Offer(), time_to_be_received=31 * timedelta(days=1) + SECOND).headers[Headers.TIME_TO_BE_RECEIVED] == (
        "31.00:00:01"
    )
    lasting = sent(Offer(), time_to_be_received=INFINITE)
    assert lasting.time_to_be_received is None
    assert Headers.TIME_TO_BE_RECEIVED not in lasting.headers


def test_a_span_that_no_header_can_say_is_refused_row_74() -> None:
    with pytest.raises(InvalidMessage, match="longer than 1,000,000 days"):
        SendOptions(time_to_be_received=LONGEST_TIME_TO_BE_RECEIVED + MICROSECOND)
    assert sent(Order(), time_to_be_received=LONGEST_TIME_TO_BE_RECEIVED).time_to_be_received is not None


def test_a_type_that_expires_cannot_be_delayed_and_is_named_row_75() -> None:
    with pytest.raises(DelayConflict, match=rf"{__name__}\.Offer has both a delay and a time to be received"):
        endpoint().outgoing.create(Offer(), SendOptions(destination="billing", delay=SECOND))
    delayed = endpoint().outgoing.create(
        Offer(), SendOptions(destination="billing", delay=SECOND, time_to_be_received=INFINITE)
    )
    assert isinstance(delayed, DelayedMessage)


def test_in_a_transaction_of_the_application_the_time_begins_with_the_send() -> None:
    envelope, clock = sent(Order(), time_to_be_received=30 * SECOND), VirtualClock()
    now = clock.now()
    assert delayed_message_of(envelope, clock).expires_at == now + 30 * SECOND
    assert delayed_message_of(replace(envelope, expires_at=now + SECOND), clock).expires_at == now + SECOND
    assert delayed_message_of(sent(Order()), clock).expires_at is None


def test_a_time_to_be_received_is_not_short_where_a_clock_is_not_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was short by as much as the clock of a server may be ahead of what is known of it."""
    envelope, clock = sent(Order(), time_to_be_received=30 * SECOND), VirtualClock()
    monkeypatch.setattr(outgoing, "latest_time", lambda clock: clock.now() + MICROSECOND)
    message = delayed_message_of(envelope, clock)
    assert (message.due, message.expires_at) == (clock.now(), clock.now() + 30 * SECOND + MICROSECOND)
    absolute = delayed_message_of(replace(envelope, expires_at=clock.now() + SECOND), clock)
    assert absolute.expires_at == clock.now() + SECOND, "an instant stays as it is"


class Undying(MemoryTransport):
    """Queues that do not expire messages."""

    @property
    def capabilities(self):
        return replace(super().capabilities, expires_messages=False)


async def test_queues_that_do_not_expire_refuse_types_that_do_at_start_row_74() -> None:
    selling = endpoint(Undying())
    selling.route(Offer, "billing")
    with pytest.raises(ConfigurationError, match=rf"Undying do not expire messages.*{__name__}\.Offer"):
        async with selling:
            pass


def test_and_they_refuse_a_send_with_one_row_74() -> None:
    with pytest.raises(NotSupported, match="without time_to_be_received"):
        endpoint(Undying()).outgoing.create(Order(), SendOptions(destination="billing", time_to_be_received=SECOND))


def test_dead_letters_are_refused_where_there_are_none_row_71() -> None:
    with pytest.raises(NotSupported, match="no dead letters"):
        endpoint().outgoing.create(Order(), SendOptions(destination="billing", use_dead_letter_queue=False))


def test_dead_letters_are_for_what_is_sent_at_once_row_71() -> None:
    with pytest.raises(DelayConflict, match="not with a delay"):
        SendOptions(delay=SECOND, use_dead_letter_queue=True)


# --- in transactions (rows 61 to 64) ----------------------------------------------------------------------------------


class Site:
    """An endpoint that answers every order with an offer, on queues with the rules of MSMQ."""

    def __init__(self, folder: Path, clock: VirtualClock, **rules: bool) -> None:
        self.transport = LocalTransport(folder / "q.db", synchronous="normal", expiry=ExpiryRules(**rules), clock=clock)
        self.store = SqliteStore(folder / "q.db", synchronous="normal")
        self.clock = clock

    def endpoint(self, *, isolated: bool = False, **settings) -> Endpoint:
        selling = Endpoint(
            "sales",
            transport=self.transport,
            delayed_delivery=DelayedDelivery(self.store),
            recoverability=Recoverability(immediate_retries=0, delayed_retries=0),
            clock=self.clock,
            **settings,
        )

        @selling.handler(Order)
        async def offer(message: Order, context) -> None:
            await context.send(Offer(message.number), destination="offers", isolated=isolated)

        return selling

    async def answers(self, selling: Endpoint) -> tuple[Sequence[Envelope], Sequence[Envelope]]:
        """Send an order; return what is in the queue of offers and in the error queue then."""
        await self.transport.create_queues(["offers", "error"])
        async with selling:
            await selling.send(Order(1))
            await self.clock.run_until_idle()
        return await self.content("offers"), await self.content("error")

    async def content(self, queue: str) -> Sequence[Envelope]:
        if not (await self.transport.lengths_of([queue]))[queue]:
            return []
        receiver = self.transport.receiver(queue)
        found = [each.envelope for each in await receiver.receive(10)]
        await receiver.close()
        return found

    async def native_ends(self) -> list[datetime | None]:
        """Return when the queue of offers ends its messages by itself."""
        asked = "SELECT ends_at FROM queue_message NATURAL JOIN queue WHERE name = 'offers'"
        rows = await self.transport.file.read(lambda c: c.execute(asked).fetchall())
        return [None if end is None else from_microseconds(end) for (end,) in rows]

    async def close(self) -> None:
        await self.transport.close()
        await self.store.close()


ATOMIC = ["sends_atomic_with_receive", "transaction_scope"]


@pytest.mark.parametrize("mode", ATOMIC)
async def test_a_handlers_send_in_a_transaction_is_refused_and_the_message_fails_row_61(
    tmp_path: Path, clock: VirtualClock, mode: str
) -> None:
    site = Site(tmp_path, clock)
    offers, errors = await site.answers(site.endpoint(transaction_mode=mode))
    assert offers == []
    (error,) = errors
    assert "offers" in error.headers[Headers.EXCEPTION_MESSAGE]
    assert error.headers[Headers.EXCEPTION_MESSAGE].endswith(
        "Sending messages with a custom TimeToBeReceived is not supported on transactional MSMQ."
    )
    assert error.headers[Headers.ERROR_CODE] == TimeToBeReceivedInTransaction.code
    await site.close()


@pytest.mark.parametrize(
    ("mode", "isolated"), [("receive_only", False), ("none", False), *((mode, True) for mode in ATOMIC)]
)
async def test_outside_of_the_receive_transaction_it_is_sent_row_62(
    tmp_path: Path, clock: VirtualClock, mode: str, isolated: bool
) -> None:
    site = Site(tmp_path, clock)
    offers, errors = await site.answers(site.endpoint(transaction_mode=mode, isolated=isolated))
    assert errors == []
    (offer,) = offers
    assert offer.headers[Headers.TIME_TO_BE_RECEIVED] == "00:00:30"
    assert await site.native_ends() == [clock.now() + 30 * SECOND]
    await site.close()


async def test_beside_a_delayed_send_it_is_sent_all_the_same_row_62(tmp_path: Path, clock: VirtualClock) -> None:
    """What is delayed is stored in a transaction of its own then: a send in it would be refused."""
    site = Site(tmp_path, clock)
    selling = site.endpoint(transaction_mode="receive_only")

    @selling.handler(Order)
    async def remind(message: Order, context) -> None:
        await context.send(Order(2), destination="orders", delay=timedelta(hours=1))

    offers, errors = await site.answers(selling)
    assert (len(offers), errors) == (1, [])
    assert await site.native_ends() == [clock.now() + 30 * SECOND]
    assert (await site.store.statistics(clock.now())).pending == 1
    await site.close()


async def test_queues_without_that_limit_just_send_it_row_62(tmp_path: Path, clock: VirtualClock) -> None:
    site = Site(tmp_path, clock, one_per_transaction=False)
    offers, errors = await site.answers(site.endpoint(transaction_mode="transaction_scope"))
    assert (len(offers), errors) == (1, [])
    assert await site.native_ends() == [clock.now() + 30 * SECOND]
    await site.close()


@pytest.mark.parametrize("mode", ATOMIC)
async def test_without_native_expiry_in_transactions_the_header_remains_row_63(
    tmp_path: Path, clock: VirtualClock, mode: str
) -> None:
    site = Site(tmp_path, clock, disable_native_time_to_be_received_in_transactions=True)
    offers, errors = await site.answers(site.endpoint(transaction_mode=mode))
    assert errors == []
    (offer,) = offers
    assert offer.headers[Headers.TIME_TO_BE_RECEIVED] == "00:00:30"
    assert await site.native_ends() == [None]
    await site.close()


async def test_outside_a_transaction_it_is_native_with_that_setting_too_row_64(
    tmp_path: Path, clock: VirtualClock
) -> None:
    site = Site(tmp_path, clock, disable_native_time_to_be_received_in_transactions=True)
    await site.transport.create_queues(["offers"])
    async with site.endpoint() as selling:
        await selling.send(Offer(1), destination="offers")
    assert await site.native_ends() == [clock.now() + 30 * SECOND]
    await site.close()


# --- receiving (rows 65 to 70) ----------------------------------------------------------------------------------------


class Receiving:
    """An endpoint that handles orders, and raw messages for it."""

    def __init__(self, clock: VirtualClock, **settings) -> None:
        self.clock, self.measured = clock, RecordedMetrics()
        self.transport = settings.pop("transport", None) or MemoryTransport(clock=clock)
        self.handled: list[int] = []
        self.fails = settings.pop("fails", False)
        settings.setdefault("recoverability", Recoverability(immediate_retries=0, delayed_retries=0))
        self.endpoint = Endpoint("sales", transport=self.transport, clock=clock, metrics=self.measured, **settings)

        @self.endpoint.handler(Order, name="Order")
        async def handle(message: Order, _) -> None:
            self.handled.append(message.number)
            if self.fails:
                raise RuntimeError("no")

    async def take(self, sent_ago: timedelta | None, lives: str | None) -> None:
        """Let the endpoint take a message that was sent a while ago."""
        headers = {Headers.ENCLOSED_MESSAGE_TYPES: "Order"}
        if sent_ago is not None:
            headers[Headers.TIME_SENT] = format_timestamp(self.clock.now() - sent_ago)
        if lives is not None:
            headers[Headers.TIME_TO_BE_RECEIVED] = lives
        await self.transport.create_queues(["sales", "error", "audit"])
        await self.transport.send([Envelope("sales", "m", headers, b'{"number":1}')], self.clock.now())
        async with self.endpoint:
            await self.clock.run_until_idle()

    async def lengths(self) -> tuple[int, int, int]:
        lengths = await self.transport.lengths_of(["sales", "error", "audit"])
        return lengths["sales"], lengths["error"], lengths["audit"]


async def test_past_its_time_it_is_consumed_counted_and_in_no_other_queue_row_65(
    clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    receiving = Receiving(clock, audit=Audit("audit"))
    with caplog.at_level(logging.DEBUG, "postdate.endpoint"):
        await receiving.take(10 * SECOND, "00:00:05")
    assert (receiving.handled, await receiving.lengths()) == ([], (0, 0, 0))
    assert receiving.measured.counts["discarded"] == 1
    (line,) = [record.getMessage() for record in caplog.records if "Discarding" in record.getMessage()]
    assert line.startswith("Discarding message m due to lapsed Time To Be Received header")


async def test_within_its_time_it_is_handled_row_66(clock: VirtualClock) -> None:
    receiving = Receiving(clock)
    await receiving.take(SECOND, "00:00:10")
    assert (receiving.handled, receiving.measured.counts["discarded"]) == ([1], 0)


@pytest.mark.parametrize(
    ("sent_ago", "lives"), [(None, "00:00:05"), (10 * SECOND, None), (10 * SECOND, "soon"), (10 * SECOND, "00:00:61")]
)
async def test_without_both_headers_it_is_handled_row_67(
    clock: VirtualClock, sent_ago: timedelta | None, lives: str | None
) -> None:
    receiving = Receiving(clock)
    await receiving.take(sent_ago, lives)
    assert receiving.handled == [1]


@pytest.mark.parametrize(("late", "handled"), [(timedelta(0), [1]), (MICROSECOND, [])])
async def test_the_end_is_strict_to_the_microsecond_row_68(
    clock: VirtualClock, late: timedelta, handled: list[int]
) -> None:
    receiving = Receiving(clock)
    await receiving.take(5 * SECOND + late, "00:00:05")
    assert receiving.handled == handled


async def test_on_request_the_headers_are_ignored_row_69(clock: VirtualClock) -> None:
    receiving = Receiving(clock, ignore_incoming_time_to_be_received_headers=True)
    await receiving.take(10 * SECOND, "00:00:05")
    assert receiving.handled == [1]


@pytest.mark.parametrize(("ago", "handled"), [(60, [1]), (75, [1]), (75.000_001, [])])
async def test_an_allowance_for_clocks_that_differ_is_added_row_70(
    clock: VirtualClock, ago: float, handled: list[int]
) -> None:
    receiving = Receiving(clock, time_to_be_received_allowance=30 * SECOND)
    await receiving.take(timedelta(seconds=ago), "00:00:45")
    assert receiving.handled == handled


def test_a_negative_allowance_is_refused_row_70() -> None:
    with pytest.raises(ConfigurationError, match="must not be negative"):
        endpoint(time_to_be_received_allowance=-SECOND)


@pytest.mark.parametrize("mode", ["none", "receive_only", "sends_atomic_with_receive"])
async def test_a_time_sent_that_cannot_be_read_is_a_failure_of_the_message_row_67(
    clock: VirtualClock, mode: str
) -> None:
    receiving = Receiving(clock, transaction_mode=mode)
    await receiving.transport.create_queues(["sales", "error", "audit"])
    headers = {
        Headers.ENCLOSED_MESSAGE_TYPES: "Order",
        Headers.TIME_SENT: "yesterday",
        Headers.TIME_TO_BE_RECEIVED: "00:00:05",
    }
    await receiving.transport.send([Envelope("sales", "m", headers, b"{}")], clock.now())
    async with receiving.endpoint:
        await clock.run_until_idle()
    assert (receiving.handled, await receiving.lengths()) == ([], (0, 1, 0))


async def test_the_rule_holds_on_every_attempt_row_65(clock: VirtualClock) -> None:
    receiving = Receiving(
        clock,
        fails=True,
        delayed_delivery=DelayedDelivery(MemoryStore()),
        recoverability=Recoverability(immediate_retries=0, delayed_retries=3, time_increase=10 * SECOND),
    )
    headers = {
        Headers.ENCLOSED_MESSAGE_TYPES: "Order",
        Headers.TIME_SENT: format_timestamp(clock.now()),
        Headers.TIME_TO_BE_RECEIVED: "00:00:15",
    }
    await receiving.transport.create_queues(["sales", "error", "audit"])
    await receiving.transport.send([Envelope("sales", "m", headers, b'{"number":1}')], clock.now())
    async with receiving.endpoint:
        await clock.advance(timedelta(minutes=5))
    # Attempts at 0 and 10 s; the next would be at 30 s, when nobody wants the message any more.
    assert (receiving.handled, await receiving.lengths()) == ([1, 1], (0, 0, 0))
    assert receiving.measured.counts["discarded"] == 1


async def test_in_mode_none_a_message_that_was_taken_in_time_is_handled_row_65(tmp_path: Path) -> None:
    """Its time runs out while it is taken off its queue."""
    clock = VirtualClock()
    receiving = Receiving(clock, transaction_mode="none")
    commit = MemoryReceiver.commit

    async def slowly(self, received, now, end=HANDLED) -> None:
        await commit(self, received, now, end)
        clock.step(timedelta(minutes=1))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(MemoryReceiver, "commit", slowly)
        await receiving.take(SECOND, "00:00:05")
    assert receiving.handled == [1]


@pytest.mark.parametrize("mode", ["receive_only", "sends_atomic_with_receive"])
async def test_a_failed_message_that_is_not_retried_because_it_expires_is_warned_about(
    clock: VirtualClock, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    receiving = Receiving(
        clock,
        fails=True,
        transaction_mode=mode,
        delayed_delivery=DelayedDelivery(MemoryStore()),
        recoverability=Recoverability(immediate_retries=0, delayed_retries=3, time_increase=10 * SECOND),
    )
    await receiving.take(SECOND, "00:00:05")
    (line,) = [each.getMessage() for each in caplog.records if "not retried" in each.getMessage()]
    assert "RuntimeError: no" in line


@pytest.mark.parametrize("mode", ["none", "receive_only", "sends_atomic_with_receive"])
async def test_a_discard_is_recorded_also_of_what_was_never_delayed(
    tmp_path: Path, clock: VirtualClock, mode: str
) -> None:
    transport = LocalTransport(tmp_path / "q.db", synchronous="normal", clock=clock)
    store = SqliteStore(tmp_path / "q.db", synchronous="normal")
    receiving = Receiving(clock, transport=transport, transaction_mode=mode)
    await receiving.take(10 * SECOND, "00:00:05")
    records = await store.history("m")
    assert [(record.kind, record.due, record.destination) for record in records] == [
        (RecordKind.DISCARDED, None, "sales")
    ]
    await transport.close()
    await store.close()


# --- copies (rows 72, 73) ---------------------------------------------------------------------------------------------


async def test_an_audit_copy_outlives_the_message_and_keeps_the_header_row_72(clock: VirtualClock) -> None:
    receiving = Receiving(clock, audit=Audit("audit"))
    await receiving.take(SECOND, "00:00:10")
    await clock.advance(timedelta(days=365))
    receiver = receiving.transport.receiver("audit")
    (copy,) = await receiver.receive(10)
    await receiver.close()
    headers = copy.envelope.headers
    assert (copy.envelope.message_id, copy.envelope.body) == ("m", b'{"number":1}')
    assert headers[Headers.TIME_TO_BE_RECEIVED] == "00:00:10"
    assert headers[Headers.PROCESSING_ENDPOINT] == "sales"
    assert {Headers.PROCESSING_STARTED, Headers.PROCESSING_ENDED, Headers.PROCESSING_MACHINE} <= set(headers)


async def test_an_error_copy_outlives_the_message_and_keeps_the_header_row_72(clock: VirtualClock) -> None:
    receiving = Receiving(clock, fails=True, audit=Audit("audit"))
    await receiving.take(SECOND, "00:00:10")
    await clock.advance(timedelta(days=365))
    assert await receiving.lengths() == (0, 1, 0)
    receiver = receiving.transport.receiver("error")
    (copy,) = await receiver.receive(10)
    await receiver.close()
    assert copy.envelope.headers[Headers.TIME_TO_BE_RECEIVED] == "00:00:10"
    assert Headers.EXPIRES_AT not in copy.envelope.headers


@pytest.mark.parametrize("mode", ["none", "receive_only", "sends_atomic_with_receive"])
async def test_audit_copies_may_have_a_time_of_their_own_row_72(clock: VirtualClock, mode: str) -> None:
    receiving = Receiving(clock, audit=Audit("audit", timedelta(hours=1)), transaction_mode=mode)
    await receiving.take(SECOND, "00:00:10")
    assert await receiving.lengths() == (0, 0, 1)
    await clock.advance(timedelta(hours=1, seconds=1))
    assert await receiving.lengths() == (0, 0, 0)


@pytest.mark.parametrize("mode", ["receive_only", *ATOMIC])
async def test_audit_copies_that_expire_are_refused_on_queues_of_msmqs_kind_row_73(
    tmp_path: Path, clock: VirtualClock, mode: str
) -> None:
    site = Site(tmp_path, clock, disable_native_time_to_be_received_in_transactions=True)
    audit = Audit("audit", SECOND)
    with pytest.raises(ConfigurationError) as refused:
        site.endpoint(transaction_mode=mode, audit=audit)
    assert str(refused.value) == (
        "Setting a custom OverrideTimeToBeReceived for audits is not supported on transactional MSMQ."
    )
    site.endpoint(transaction_mode="none", audit=audit)
    site.endpoint(transaction_mode=mode, audit=Audit("audit"))
    await site.close()


@pytest.mark.parametrize("queue", ["sales", "error"])
def test_audit_copies_do_not_come_back(queue: str) -> None:
    with pytest.raises(ConfigurationError, match="give them their own queue"):
        endpoint(audit=Audit(queue))


async def test_an_audit_copy_may_be_larger_than_its_message(clock: VirtualClock) -> None:
    receiving = Receiving(
        clock, transport=MemoryTransport(clock=clock, largest_message_bytes=300), audit=Audit("audit")
    )
    await receiving.transport.create_queues(["sales"])
    headers = {Headers.ENCLOSED_MESSAGE_TYPES: "Order"}
    body = b'{"number":1' + b" " * 200 + b"}"
    await receiving.transport.send([Envelope("sales", "m", headers, body)], clock.now())
    async with receiving.endpoint:
        await clock.run_until_idle()
    assert await receiving.lengths() == (0, 0, 1)


@pytest.mark.parametrize(("queue", "span"), [(" ", None), ("audit", timedelta(0)), ("audit", "soon")])
def test_an_audit_that_cannot_be_is_refused(queue: str, span: timedelta | None) -> None:
    with pytest.raises(ConfigurationError):
        Audit(queue, span)

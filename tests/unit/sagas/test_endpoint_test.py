"""What users test their handlers and sagas with."""

import contextlib
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from examples.orders import saga

from postdate import (
    Endpoint,
    HandlerContext,
    Headers,
    MemoryStore,
    Outbox,
    Recoverability,
    SqliteOutbox,
    SqliteSagaStore,
)
from postdate.errors import ConfigurationError
from postdate.ports import Claim
from postdate.testing import EndpointTest
from postdate.testing.endpoints import WaitingMessage

START = datetime(2026, 3, 1, 12, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)


def orders(**settings) -> EndpointTest:
    return EndpointTest(lambda endpoint: saga.configure(endpoint, "mails"), start=START, **settings)


def texts(test: EndpointTest) -> list[str]:
    return [mail.text.partition(":")[0] for mail in test.sent_to("mails") if isinstance(mail, saga.SendMail)]


async def test_an_order_that_is_not_paid_is_reminded_of_three_times_and_ends_after_an_hour() -> None:
    async with orders() as test:
        await test.send(saga.PlaceOrder("o-1", "Cleo", 30))
        first, due = await test.waiting()
        assert (first.message, due.message) == (saga.ReminderDue(1), saga.PaymentDue())
        assert due == WaitingMessage(saga.PaymentDue(), "tested", START + timedelta(hours=1))
        assert await test.state_of(saga.OrderSaga, "o-1") is not None
        await test.advance(minutes=59, seconds=59)
        assert texts(test)[1:] == ["reminder 1", "reminder 2", "reminder 3"]
        await test.advance(seconds=1)
        assert texts(test)[4:] == ["your order is cancelled"]
        assert test.now == START + timedelta(hours=1) + MICROSECOND
        assert await test.state_of(saga.OrderSaga, "o-1") is None
        await test.advance(days=30)
        assert len(test.sent) == 5
        assert await test.waiting() == []


async def test_a_month_in_which_nothing_is_due_is_not_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, claim_due = list[datetime](), MemoryStore.claim_due

    async def noted(store: MemoryStore, now: datetime, limit: int) -> Sequence[Claim]:
        looks.append(now)
        return await claim_due(store, now, limit)

    monkeypatch.setattr(MemoryStore, "claim_due", noted)
    async with orders() as test:
        await test.advance(days=30)
        assert looks == [START]
        await test.send(saga.PlaceOrder("o-1", "Cleo", 30))
        await test.advance(days=30)
        assert texts(test)[-1] == "your order is cancelled"
        assert len(looks) < 20


async def test_a_clock_that_is_set_makes_due_what_is_due_by_it() -> None:
    async with orders() as test:
        await test.send(saga.PlaceOrder("o-1", "Cleo", 30))
        test.clock.step(timedelta(hours=1))
        await test.advance()
        assert texts(test)[-1] == "your order is cancelled"
        assert test.now - START < timedelta(hours=1, seconds=1)


@pytest.mark.parametrize("end", [saga.PaymentReceived, saga.CancelOrder])
async def test_an_order_that_ends_early_is_reminded_of_no_more(
    end: type[saga.PaymentReceived] | type[saga.CancelOrder],
) -> None:
    async with orders() as test:
        await test.send(saga.PlaceOrder("o-1", "Ada", 10))
        await test.advance(minutes=20)
        await test.send(end("o-1"))
        await test.advance(timedelta(days=1))
        assert len(texts(test)) == 3
        assert await test.waiting() == []


async def test_more_time_moves_the_end() -> None:
    async with orders() as test:
        await test.send(saga.PlaceOrder("o-1", "Dan", 40))
        await test.advance(minutes=50)
        await test.send(saga.GrantMoreTime("o-1", 30))
        await test.advance(minutes=29, seconds=59)
        state = await test.state_of(saga.OrderSaga, "o-1")
        assert isinstance(state, saga.OrderState)
        await test.advance(seconds=2)
        assert texts(test)[-1] == "your order is cancelled"
        assert test.deliveries[-1].at == START + timedelta(minutes=80) + MICROSECOND


async def test_a_test_ends_although_something_was_delayed_just_after_something_had_come() -> None:
    """The poller pauses between two looks, on a clock that nobody moves any more."""
    async with orders() as test:
        await test.send(saga.PlaceOrder("o-1", "Cleo", 30))
        await test.advance(hours=1)
        await test.send(saga.PlaceOrder("o-2", "Cleo", 30))


@dataclass
class Ask:
    text: str


@dataclass
class Answer:
    text: str


async def test_handlers_without_a_saga_reply_delay_and_fail() -> None:
    tries: list[datetime] = []

    def answering(endpoint: Endpoint) -> None:
        @endpoint.handler(Ask)
        async def answer(message: Ask, context: HandlerContext) -> None:
            tries.append(endpoint.clock.now())
            if message.text == "fail":
                raise LookupError(message.text)
            await context.send(Answer("later"), destination="audience", delay=timedelta(hours=2))
            await context.reply(Answer("now"))

    async with EndpointTest(answering, name="answers", start=START) as test:
        await test.send(Ask("a"), headers={Headers.REPLY_TO_ADDRESS: "whoever"})
        assert test.sent == [Answer("now")]
        assert [(each.destination, each.message) for each in await test.waiting()] == [("audience", Answer("later"))]
        await test.advance(hours=2)
        assert test.sent == [Answer("now"), Answer("later")]
        assert test.sent_to("audience") == [Answer("later")]
        assert test.deliveries[1].headers[Headers.ORIGINATING_ENDPOINT] == "answers"
        with pytest.raises(LookupError, match="fail"):
            await test.send(Ask("fail"))
        await test.advance(hours=1)  # told once

    tries.clear()
    retries = Recoverability(immediate_retries=0, delayed_retries=2, time_increase=timedelta(minutes=1))
    async with EndpointTest(answering, start=START, recoverability=retries) as test:
        await test.send(Ask("fail"))
        await test.advance(minutes=2)
        assert len(await test.waiting()) == 1
        with pytest.raises(LookupError):
            await test.advance(minutes=2)
    assert [round((at - START).total_seconds() / 60) for at in tries] == [0, 1, 3]


async def test_handlers_with_a_transaction_and_sagas_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "shop.db"
    with contextlib.closing(sqlite3.connect(file)) as connection:
        connection.execute("CREATE TABLE asked (text TEXT)")

    def asked() -> list[str]:
        with contextlib.closing(sqlite3.connect(file)) as connection:
            return [text for (text,) in connection.execute("SELECT text FROM asked")]

    def configuration(endpoint: Endpoint) -> None:
        saga.configure(endpoint, "mails")

        @endpoint.handler(Ask)
        async def ask(message: Ask, context: HandlerContext) -> None:
            (await context.transaction()).execute("INSERT INTO asked VALUES (?)", [message.text])
            await context.send(Answer(message.text), destination="audience", delay=timedelta(hours=1))
            if message.text == "fail":
                raise LookupError(message.text)

    outbox, sagas = SqliteOutbox(file, synchronous="normal"), SqliteSagaStore(file, synchronous="normal")
    async with EndpointTest(configuration, outbox=Outbox(outbox), sagas=sagas) as test:
        for _ in range(2):
            await test.send(Ask("a"), message_id="m-1")
        with pytest.raises(LookupError):
            await test.send(Ask("fail"))
        assert asked() == ["a"]
        await test.advance(hours=1)
        assert test.sent == [Answer("a")]
        await test.send(saga.PlaceOrder("o-1", "Ada", 10))
        assert isinstance(await test.state_of(saga.OrderSaga, "o-1"), saga.OrderState)
    with pytest.raises(ConfigurationError, match="no saga store"):
        EndpointTest(configuration, outbox=Outbox(outbox))
    async with EndpointTest(lambda _: None, outbox=Outbox(outbox)) as test:
        with pytest.raises(ConfigurationError, match="only in its file"):
            await test.state_of(saga.OrderSaga, "o-1")
    await outbox.close()
    await sagas.close()

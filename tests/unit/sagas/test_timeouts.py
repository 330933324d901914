"""Timeouts of sagas (rows 106 to 108; specification 5)."""

import logging
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from tests.saga_world import (
    HOUR,
    LOG,
    SECOND,
    Change,
    Due,
    Mail,
    OrderSaga,
    OtherSaga,
    Place,
    Reminder,
    State,
    Unknown,
    World,
    cannot_cancel,
)

from postdate import HandlerContext, Headers, Recoverability, Saga, handles_timeout, operations, started_by
from postdate.config import load_settings
from postdate.errors import ConfigurationError, DelayConflict, InvalidMessage, InvalidTimestamp
from postdate.operations import queues
from postdate.wiring import OpenDeployment


async def test_a_timeout_reaches_its_saga_type_and_instance_with_its_state_row_106(world: World) -> None:
    async with world.endpoint(OrderSaga, OtherSaga) as endpoint:
        await world.send(endpoint, Place("o-1", ["due 10"]), Place("o-2"))
        LOG.clear()
        await world.clock.advance(10 * SECOND)
        assert LOG == []
        await world.clock.advance(SECOND)
    assert sorted(LOG) == [("OrderSaga", "Due 10", "Place"), ("OtherSaga", "Due 10", "Place")]
    assert await world.seen("o-1") == ["Place", "Due 10"]
    assert await world.seen("o-2") == ["Place"]


async def test_a_timeout_says_in_its_headers_whose_it_is_row_106(memory: World) -> None:
    async with memory.endpoint() as endpoint:
        await memory.send(endpoint, Place("o-1", ["due 10"]))
        ((message,), record) = (await memory.pending(), await memory.record())
        assert record is not None
        assert message.destination == "orders"
        assert message.headers[Headers.IS_SAGA_TIMEOUT_MESSAGE] == "True"
        assert message.headers[Headers.SAGA_ID] == record.saga_id == str(uuid.UUID(record.saga_id))
        assert message.headers[Headers.SAGA_TYPE] == "OrderSaga"


async def test_several_timeouts_of_two_types_all_come_and_messages_go_to_message_handlers_only_row_107(
    world: World,
) -> None:
    async with world.endpoint() as endpoint:
        ordinary: list[object] = []

        @endpoint.handler(Reminder)
        async def take(message: Reminder, context: HandlerContext) -> None:
            ordinary.append(message)

        await world.send(endpoint, Place("o-1", ["due 10", "due 20", "reminder 15", "reminder 15"]))
        await world.send(endpoint, Reminder("hello", "o-1"))
        await world.clock.advance(30 * SECOND)
    assert await world.seen() == ["Place", "message hello", "Due 10", "Reminder 15", "Reminder 15", "Due 20"]
    assert ordinary == [Reminder("hello", "o-1")]


async def test_a_timeout_of_a_completed_saga_is_ignored_and_calls_no_not_found_handler_row_108(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(world.store), "cancel", cannot_cancel)  # so that the timeout comes
    async with world.endpoint() as endpoint:
        await world.send(endpoint, Place("o-1", ["due 10"]), Change("o-1", ["complete"]))
        assert await world.record() is None
        LOG.clear()
        with caplog.at_level(logging.INFO, "postdate.sagas"):
            await world.clock.advance(11 * SECOND)
    assert LOG == []
    assert [record.levelname for record in caplog.records if "completed" in record.message] == ["INFO"]
    assert await world.waiting() == await world.length("orders") == await world.length("error") == 0


async def test_completion_takes_pending_timeouts_out_of_the_store_row_108(world: World) -> None:
    async with world.endpoint() as endpoint:
        await world.send(endpoint, Place("o-1", ["due 10", "reminder 20"]), Place("o-2", ["due 10"]))
        assert await world.waiting() == 3
        await world.send(endpoint, Change("o-1", ["due 30", "complete"]))
        assert await world.waiting() == 1


async def test_a_new_instance_with_the_same_id_does_not_get_the_timeouts_of_the_old_one(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(world.store), "cancel", cannot_cancel)
    async with world.endpoint() as endpoint:
        await world.send(endpoint, Place("o-1", ["due 10"]), Change("o-1", ["complete"]), Place("o-1", ["due 20"]))
        await world.clock.advance(15 * SECOND)
        assert await world.seen() == ["Place"]
        await world.clock.advance(6 * SECOND)
        assert await world.seen() == ["Place", "Due 20"]


async def test_a_span_of_zero_comes_at_once(world: World) -> None:
    async with world.endpoint() as endpoint:
        await world.send(endpoint, Place("o-1", ["due 0"]))
        await world.clock.run_until_idle()
        assert await world.seen() == ["Place", "Due 0"]


@pytest.mark.parametrize(
    ("request_it", "error"),
    [
        (lambda saga: saga.request_timeout(Unknown(), within=SECOND), ConfigurationError),
        (lambda saga: saga.request_timeout(Place("o-1"), within=SECOND), ConfigurationError),
        (
            lambda saga: saga.request_timeout(Due(), at=datetime(2030, 1, 1, tzinfo=UTC).replace(tzinfo=None)),
            InvalidTimestamp,
        ),
        (lambda saga: saga.request_timeout(Due(), within=-SECOND), InvalidMessage),
        (lambda saga: saga.request_timeout(Due()), InvalidMessage),
        (lambda saga: saga.request_timeout(Due(), within=SECOND, at=datetime(2030, 1, 1, tzinfo=UTC)), DelayConflict),
    ],
    ids=["unknown", "no timeout", "naive", "negative", "no time", "two times"],
)
async def test_what_cannot_be_a_timeout_is_refused_when_it_is_requested(
    memory: World, request_it: Callable[[Saga[State]], Any], error: type[Exception]
) -> None:
    raised: list[type[Exception]] = []

    class Wrong(Saga[State], correlated_by="order_id"):
        @started_by(Place)
        async def place(self, message: Place, context: HandlerContext) -> None:
            try:
                await request_it(self)
            except Exception as found:
                raised.append(type(found))
                raise

        @handles_timeout(Due)
        async def due(self, timeout: Due, context: HandlerContext) -> None:
            raise AssertionError

    async with memory.endpoint(Wrong) as endpoint:
        await memory.send(endpoint, Place("o-1"))
    assert raised == [error]
    assert await memory.waiting() == 0
    assert await memory.length("error") == 1


async def test_a_timeout_may_be_requested_by_its_type_and_for_an_instant(memory: World) -> None:
    ids: list[str] = []

    class Asking(OrderSaga, correlated_by="order_id"):
        @started_by(Place)
        async def take(self, message: Place | Change, context: HandlerContext) -> None:
            ids.append(await self.request_timeout(Due, at=memory.start + HOUR))
            assert self.pending_timeouts == {ids[0]: memory.start + HOUR}

    async with memory.endpoint(Asking) as endpoint:
        await memory.send(endpoint, Place("o-1"))
        assert await memory.store.get(ids[0]) is not None
        LOG.clear()
        await memory.clock.advance(HOUR + SECOND)
    assert LOG == [("Asking", "Due ", "")]


async def test_a_cancelled_timeout_never_comes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world.endpoint() as endpoint:
        await world.send(endpoint, Place("o-1", ["due 10"]), Place("o-2", ["due 10"]))
        await world.send(endpoint, Change("o-1", ["cancel", "cancel"]))
        assert await world.waiting() == 1
        monkeypatch.setattr(type(world.store), "cancel", cannot_cancel)
        await world.send(endpoint, Change("o-2", ["cancel", "due 20", "cancel"]))
        assert await world.waiting() == 1
        await world.clock.advance(30 * SECOND)
    assert await world.seen("o-1") == ["Place", "Change", "True", "False"]
    assert await world.seen("o-2") == ["Place", "Change", "True", "True"]
    assert await world.length("error") == 0


@pytest.mark.parametrize("seconds", [5, 20])
@pytest.mark.parametrize("can_cancel", [True, False], ids=["cancelled in the store", "not cancelled"])
async def test_a_moved_timeout_comes_once_at_its_new_time_with_its_content(
    world: World, monkeypatch: pytest.MonkeyPatch, seconds: int, can_cancel: bool
) -> None:
    if not can_cancel:
        monkeypatch.setattr(type(world.store), "cancel", cannot_cancel)
    async with world.endpoint() as endpoint:
        await world.send(endpoint, Place("o-1", ["due 10"]), Change("o-1", [f"move {seconds}"]))
        before = ["Place", "Change", "True"]
        await world.clock.advance(seconds * SECOND)
        assert await world.seen() == before
        await world.clock.advance(SECOND)
        assert await world.seen() == [*before, "Due 10"]
        await world.clock.advance(HOUR)
        assert await world.seen() == [*before, "Due 10"]
        await world.send(endpoint, Change("o-1", ["move 1"]))
        assert await world.seen() == [*before, "Due 10", "Change", "False"]


async def test_a_timeout_whose_handler_fails_is_retried_later_and_handled_then(world: World) -> None:
    policy = Recoverability(immediate_retries=1, delayed_retries=1, time_increase=10 * SECOND)
    failures = 2

    class Failing(OrderSaga, correlated_by="order_id", name="OrderSaga"):
        @handles_timeout(Due)
        async def came(self, timeout: Reminder | Due, context: HandlerContext) -> None:
            nonlocal failures
            if failures:
                failures -= 1
                raise LookupError(timeout.text)
            await super().came(timeout, context)

    async with world.endpoint(Failing, recoverability=policy) as endpoint:
        await world.send(endpoint, Place("o-1", ["due 10"]))
        await world.clock.advance(15 * SECOND)
        assert (failures, await world.seen()) == (0, ["Place"])
        await world.clock.advance(10 * SECOND)
        assert await world.seen() == ["Place", "Due 10"]


async def test_a_timeout_requests_the_next_and_completes_in_the_end(world: World) -> None:
    async with world.endpoint() as endpoint:
        await world.send(endpoint, Place("o-1"))

        class Chain(Saga[State], correlated_by="order_id", name="Chain"):
            @started_by(Change)
            async def start(self, message: Change, context: HandlerContext) -> None:
                await self.request_timeout(Due("3"), within=HOUR)

            @handles_timeout(Due)
            async def next(self, timeout: Due, context: HandlerContext) -> None:
                await context.send(Mail(timeout.text), destination="mails")
                if timeout.text == "0":
                    self.complete()
                else:
                    await self.request_timeout(Due(str(int(timeout.text) - 1)), within=HOUR)

        endpoint.saga(Chain)
        await world.send(endpoint, Change("c-1"))
        for mails in range(5):
            assert await world.length("mails") == mails
            await world.clock.advance(HOUR + SECOND)
        assert await world.length("mails") == 4
        assert await world.record("c-1", "Chain") is None


async def test_a_failed_timeout_that_an_operator_has_edited_reaches_its_saga(memory: World) -> None:
    """A saga knows its timeouts by their ids; the edited one had another, and was ignored."""

    class Bill(Saga[State], correlated_by="order_id"):
        @started_by(Place)
        async def start(self, message: Place, context: HandlerContext) -> None:
            await self.request_timeout(Due("?"), within=SECOND)

        @handles_timeout(Due)
        async def due(self, timeout: Due, context: HandlerContext) -> None:
            bills.append(int(timeout.text))

    bills = list[int]()
    async with memory.endpoint(Bill, recoverability=Recoverability(immediate_retries=0, delayed_retries=0)) as endpoint:
        await memory.send(endpoint, Place("o-1"))
        await memory.clock.advance(2 * SECOND)
        deployment = OpenDeployment(load_settings(None, {}), None, memory.transport, None, None)
        (failed,) = (await queues.peek(deployment, "error", 9, memory.clock.now())).messages
        edit = operations.Edit(b'{"text": "7"}', {}, None)
        await operations.edit(deployment, "error", failed.message_id, memory.clock.now(), edit)
        await memory.clock.advance(SECOND)
    assert bills == [7]

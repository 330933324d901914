"""Messages whose ends are refused, or that cannot go back: what becomes of them, and who hears of it. Source: ADR 45.

Each of these held a message for ever, handled it for ever, lost it, or called an application for nothing.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.waiting import until

from postdate import (
    DelayedDelivery,
    Endpoint,
    HandlerContext,
    LocalTransport,
    MemoryStore,
    MemoryTransport,
    Recoverability,
)
from postdate.core.recoverability import Discard
from postdate.errors import MessageTooLarge, PostdateError, StoreTroubled, TransportUnreachable
from postdate.messages import Envelope
from postdate.ports import HANDLED, Completion, Received, Receiver, RecordKind, Settlement
from postdate.testing import VirtualClock
from postdate.testing.clock import START

SECOND = timedelta(seconds=1)

Refusing = Callable[[Received, Completion], PostdateError | None]
Returning = Callable[[Received], PostdateError | None]


def nothing(*_: object) -> None:
    return None


class Queues(MemoryTransport):
    """Queues that refuse the ends, and returns, that a test names.

    Args:
        ends: returns why a message cannot end so; ``None``: it can.
        returns: returns why it cannot go back now.
        are_shared: another process takes whatever goes back.
        answers: how many of the ends of a batch are answered; ``None``: all.
    """

    def __init__(
        self,
        *,
        ends: Refusing = nothing,
        returns: Returning = nothing,
        are_shared: bool = False,
        answers: int | None = None,
    ) -> None:
        super().__init__()
        self.ends, self.returns, self.are_shared, self.answers = ends, returns, are_shared, answers

    def receiver(self, queue: str) -> Any:
        receiver: Any = super().receiver(queue)
        commit, roll_back = receiver.commit, receiver.roll_back

        async def refusing_commit(received: Received, now: datetime, end: Completion = HANDLED) -> None:
            if (error := self.ends(received, end)) is not None:
                raise error
            await commit(received, now, end)

        async def settle(endings: Sequence[Settlement]) -> Sequence[Exception | None]:
            errors = await Receiver.settle(receiver, endings)
            return errors if self.answers is None else errors[: self.answers]

        async def refusing_roll_back(received: Received, *, failed: bool = True) -> None:
            if (error := self.returns(received)) is not None:
                raise error
            if self.are_shared:
                await commit(received, START, HANDLED)
            else:
                await roll_back(received, failed=failed)

        receiver.commit, receiver.settle, receiver.roll_back = refusing_commit, settle, refusing_roll_back
        return receiver


class World:
    """An endpoint on such queues, in virtual time."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock, self.criticals, self.handled = clock, list[str](), list[bytes]()

    def endpoint(self, queues: MemoryTransport, **settings: Any) -> Endpoint:
        settings.setdefault("error_queue", "error")
        return Endpoint(
            "sales",
            transport=queues,
            clock=self.clock,
            critical_error=lambda text, _: self.criticals.append(text),
            **settings,
        )


@pytest.fixture
def world(clock: VirtualClock) -> World:
    return World(clock)


def cancel_this_task() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


async def test_queues_that_give_out_and_take_back_and_end_nothing_are_a_critical_error_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """A broker without room to publish does that. The breaker was told of a success at each return."""
    blocked = True

    def refuse(received: Received, end: Completion) -> PostdateError | None:
        return TransportUnreachable("publishing is blocked") if blocked and end.outgoing else None

    queues = Queues(ends=refuse)
    endpoint = world.endpoint(queues, transaction_mode="sends_atomic_with_receive")

    @endpoint.handler(bytes)
    async def handle(message: bytes, context: HandlerContext) -> None:
        await context.send(b"next", destination="billing")

    await queues.create_queues(["billing"])
    caplog.set_level(logging.INFO)
    async with endpoint:
        await endpoint.send(b"1", destination="sales")
        for _ in range(150):
            await world.clock.advance(SECOND)
        assert len(world.criticals) == 1
        lines = [each.message for each in caplog.records if each.name == "postdate.pump"]
        assert not [line for line in lines if "reachable again" in line]
        assert 2 <= len(lines) <= 4
        blocked = False
        await world.clock.advance(10 * SECOND)
        assert await queues.queue_lengths() == {"sales": 0, "billing": 1, "error": 0}
        lines = [each.message for each in caplog.records if each.name == "postdate.pump"]
        assert "reachable again" in lines[-1]


@pytest.mark.parametrize("are_shared", [False, True], ids=["it comes again", "another process has it"])
async def test_a_message_whose_handler_cancels_its_task_goes_back_and_is_no_critical_error(
    world: World, are_shared: bool
) -> None:
    """It was given back once, and held for ever where that failed."""
    errors = [TransportUnreachable("away")]
    queues = Queues(returns=lambda _: errors.pop() if errors else None, are_shared=are_shared)
    endpoint = world.endpoint(queues)

    @endpoint.handler(bytes)
    async def handle(message: bytes, context: HandlerContext) -> None:
        world.handled.append(message)
        if len(world.handled) == 1:
            cancel_this_task()
            await anyio.sleep_forever()

    async with endpoint:
        await endpoint.send(b"odd", destination="sales")
        for _ in range(70):
            await world.clock.advance(SECOND)
        assert await queues.queue_lengths() == {"sales": 0, "error": 0}
    assert world.handled == [b"odd"] * (1 if are_shared else 2)
    assert world.criticals == []


async def test_off_its_queue_a_message_whose_handler_cancels_its_task_goes_to_the_error_queue(world: World) -> None:
    """In mode none it does not come again. It was lost, without a line."""
    queues = MemoryTransport()
    endpoint = world.endpoint(queues, transaction_mode="none")

    @endpoint.handler(bytes)
    async def handle(message: bytes, context: HandlerContext) -> None:
        cancel_this_task()
        await anyio.sleep_forever()

    async with endpoint:
        await endpoint.send(b"odd", destination="sales")
        for _ in range(60):
            await world.clock.advance(SECOND)
        assert await queues.queue_lengths() == {"sales": 0, "error": 1}
    assert world.criticals == []


async def test_a_failure_counts_although_its_message_cannot_go_back_at_first(world: World) -> None:
    """It went back by an outage, and so uncounted: it was handled for ever."""
    is_first = True

    def every_second_time(received: Received) -> PostdateError | None:
        nonlocal is_first
        is_first = not is_first
        return None if is_first else TransportUnreachable("away")

    queues = Queues(returns=every_second_time)
    endpoint = world.endpoint(queues, recoverability=Recoverability(immediate_retries=2, delayed_retries=0))

    @endpoint.handler(bytes)
    async def handle(message: bytes, context: HandlerContext) -> None:
        world.handled.append(message)
        raise ValueError(message)

    async with endpoint:
        await endpoint.send(b"bad", destination="sales")
        for _ in range(20):
            await world.clock.advance(SECOND)
        assert await queues.queue_lengths() == {"sales": 0, "error": 1}
    assert world.handled == [b"bad"] * 3


async def test_a_queue_that_answers_for_fewer_messages_than_it_was_given_ends_no_pump(world: World) -> None:
    queues = Queues(answers=0)
    queues._capabilities = replace(queues.capabilities, prefetches=True)
    endpoint = world.endpoint(queues)

    @endpoint.handler(bytes)
    async def handle(message: bytes, context: HandlerContext) -> None:
        world.handled.append(message)

    async with endpoint:
        await endpoint.send(b"1", destination="sales")
        await world.clock.advance(5 * SECOND)
        queues.answers = None
        await endpoint.send(b"2", destination="sales")
        await world.clock.advance(5 * SECOND)
    assert b"2" in world.handled


async def test_a_reason_that_cannot_be_stored_discards_its_message_all_the_same(tmp_path: Path) -> None:
    """The policy decided so again each second, and each time the file refused its text."""
    queues, handled = LocalTransport(tmp_path / "queues.db"), list[bytes]()
    settings = Recoverability(policy=lambda error, *_: Discard(str(error)))
    endpoint = Endpoint("sales", transport=queues, recoverability=settings)

    @endpoint.handler(bytes)
    async def handle(message: bytes, context: HandlerContext) -> None:
        handled.append(message)
        raise ValueError("odd \ud800")

    async with endpoint:
        await endpoint.send(b"bad", destination="sales")

        async def is_discarded() -> bool:
            return len(handled) > 0 and (await queues.queue_lengths())["sales"] == 0

        await until(is_discarded)
    assert handled == [b"bad"]
    await queues.close()


async def test_a_retry_that_is_refused_for_one_message_alone_counts_in_the_end(world: World) -> None:
    def refuse(received: Received, end: Completion) -> PostdateError | None:
        if end.record is not RecordKind.RETRIED:
            return None
        error = TransportUnreachable("internal error")
        error.__cause__ = StoreTroubled("page 7")
        return error

    queues = Queues(ends=refuse)
    retries = Recoverability(immediate_retries=0, delayed_retries=3)
    endpoint = world.endpoint(
        queues,
        delayed_delivery=DelayedDelivery(MemoryStore()),
        recoverability=retries,
        transaction_mode="sends_atomic_with_receive",
    )

    @endpoint.handler(bytes)
    async def handle(message: bytes, context: HandlerContext) -> None:
        if message == b"bad":
            world.handled.append(message)
            raise ValueError(message)
        await context.send(b"next", destination="billing")

    await queues.create_queues(["billing"])
    async with endpoint:
        await endpoint.send(b"bad", destination="sales")
        for _ in range(60):
            await endpoint.send(b"good", destination="sales")
            await world.clock.advance(SECOND)
        lengths = await queues.queue_lengths()
    assert (lengths["sales"], lengths["billing"], lengths["error"]) == (0, 60, 1)
    assert 11 <= len(world.handled) <= 13
    assert world.criticals == []


async def test_messages_that_no_error_queue_took_for_a_moment_hours_apart_are_no_critical_error(world: World) -> None:
    """Copies that the error queue takes meanwhile say that failures can be dealt with."""
    is_too_large = False

    def refuse(received: Received, end: Completion) -> PostdateError | None:
        to_error = any(each.destination == "error" for each in end.outgoing)
        return MessageTooLarge("no error queue takes it") if is_too_large and to_error else None

    queues = Queues(ends=refuse)
    endpoint = world.endpoint(queues, delayed_delivery=DelayedDelivery(MemoryStore()))
    async with endpoint:
        for number in range(2):
            is_too_large = True
            await queues.send([Envelope("sales.timeouts", f"bad-{number}", {}, b"body")], world.clock.now())
            await world.clock.advance(SECOND / 2)
            is_too_large = False
            await world.clock.advance(3_600 * SECOND)
        assert (await queues.queue_lengths())["error"] == 2
    assert world.criticals == []

"""Handlers that are plain functions run in threads, and send, reply and fail as others do."""

import sys
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from tests.waiting import until

from postdate import (
    BlockingHandlerContext,
    DelayedDelivery,
    Endpoint,
    HandlerContext,
    Headers,
    MemoryStore,
    MemoryTransport,
    Recoverability,
)
from postdate.errors import ConfigurationError

SECOND = timedelta(seconds=1)


@dataclass
class Pay:
    amount: int = 1


@dataclass
class Paid:
    amount: int = 1


class World:
    def __init__(self) -> None:
        self.transport, self.store = MemoryTransport(), MemoryStore()
        self.endpoint = Endpoint(
            "sales",
            transport=self.transport,
            delayed_delivery=DelayedDelivery(self.store),
            recoverability=Recoverability(immediate_retries=1, delayed_retries=0),
        )

    def arrived(self, queue: str) -> list[str]:
        return [envelope.body.decode() for envelope, _ in self.transport.queues[queue].messages]


@pytest.fixture
async def world() -> World:
    world = World()
    await world.transport.create_queues(["billing"])
    return world


async def test_a_plain_function_runs_in_a_thread_and_sends_with_its_message(world: World) -> None:
    seen = list[tuple[str, object]]()

    @world.endpoint.handler(Pay)
    def pay(message: Pay, context: BlockingHandlerContext) -> None:
        assert threading.current_thread() is not threading.main_thread()
        assert context.due is None
        id_ = context.send(Paid(message.amount), destination="billing", headers={"own": "1"})
        context.send(Paid(2), destination="billing", delay=SECOND / 100, message_id="later")
        seen.append((context.message_id, context.headers.get("said")))
        assert id_ != "later"

    async with world.endpoint as sales:
        id_ = await sales.send(Pay(7), headers={"said": "yes"})
        await until(lambda: len(world.arrived("billing")) == 2)
    assert seen == [(id_, "yes")]
    assert sorted(world.arrived("billing")) == ['{"amount":2}', '{"amount":7}']


async def test_it_replies_and_several_block_at_a_time(world: World) -> None:
    both = threading.Barrier(2, timeout=90)

    @world.endpoint.handler(Pay)
    def pay(message: Pay, context: BlockingHandlerContext) -> None:
        both.wait()
        context.reply(Paid(message.amount))

    async with world.endpoint as sales:
        for amount in (1, 2):
            await sales.send(Pay(amount), headers={Headers.REPLY_TO_ADDRESS: "billing"})
        await until(lambda: len(world.arrived("billing")) == 2)


async def test_one_that_fails_sends_nothing_and_ends_in_the_error_queue(world: World) -> None:
    tries = list[int]()

    @world.endpoint.handler(Pay)
    def pay(message: Pay, context: BlockingHandlerContext) -> None:
        context.send(Paid(), destination="billing")
        tries.append(message.amount)
        raise ValueError("no")

    async with world.endpoint as sales:
        await sales.send(Pay(3))
        await until(lambda: world.arrived("error"))
    assert tries == [3, 3]
    assert world.arrived("billing") == []


async def test_an_object_with_an_asynchronous_call_is_asynchronous(world: World) -> None:
    class Handle:
        async def __call__(self, message: Pay, context: HandlerContext) -> None:
            await context.send(Paid(message.amount), destination="billing")

    world.endpoint.handler(Pay)(Handle())
    async with world.endpoint as sales:
        await sales.send(Pay(5))
        await until(lambda: world.arrived("billing") == ['{"amount":5}'])


async def test_a_function_that_hides_that_it_is_asynchronous_fails_its_message(world: World) -> None:
    async def handle(message: Pay, context: BlockingHandlerContext) -> None:
        pass

    def hidden(message: Pay, context: BlockingHandlerContext) -> object:
        return handle(message, context)

    world.endpoint.handler(Pay)(hidden)
    async with world.endpoint as sales:
        await sales.send(Pay())
        await until(lambda: world.arrived("error"))
    ((copy, _),) = world.transport.queues["error"].messages
    assert "define it with `async def`" in copy.headers[Headers.EXCEPTION_MESSAGE]


def _with_a_yield(message: Pay, context: BlockingHandlerContext) -> Generator[int]:
    yield message.amount


async def _async_with_a_yield(message: Pay, context: HandlerContext) -> AsyncGenerator[int]:
    yield message.amount


@pytest.mark.parametrize("handle", [_with_a_yield, _async_with_a_yield])
async def test_a_function_with_a_yield_is_no_handler(world: World, handle: Callable[[Any, Any], object]) -> None:
    """Nobody would run it, and its message would be gone."""
    with pytest.raises(ConfigurationError, match="has a `yield`"):
        world.endpoint.handler(Pay)(handle)

    def hidden(message: Pay, context: BlockingHandlerContext) -> object:
        return handle(message, context)

    world.endpoint.handler(Pay)(hidden)
    async with world.endpoint as sales:
        await sales.send(Pay())
        await until(lambda: world.arrived("error"))
    ((copy, _),) = world.transport.queues["error"].messages
    assert "nobody runs" in copy.headers[Headers.EXCEPTION_MESSAGE]


async def test_one_that_ends_the_process_fails_its_message_and_ends_nothing(world: World) -> None:
    """As a parser of arguments does. The endpoint would end at each delivery, for ever."""

    @world.endpoint.handler(Pay)
    def pay(message: Pay, context: BlockingHandlerContext) -> None:
        if message.amount == 1:
            sys.exit("usage")
        context.send(Paid(message.amount), destination="billing")

    async with world.endpoint as sales:
        await sales.send(Pay(1))
        await sales.send(Pay(2))
        await until(lambda: world.arrived("error") and world.arrived("billing"))
    ((copy, _),) = world.transport.queues["error"].messages
    assert copy.headers[Headers.EXCEPTION_MESSAGE] == "the handler ended by SystemExit: usage"
    assert world.arrived("billing") == ['{"amount":2}']


def test_what_cannot_be_called_is_no_handler() -> None:
    with pytest.raises(ConfigurationError, match="must be a function"):
        Endpoint("sales", transport=MemoryTransport()).handler(Pay)(1)  # type: ignore[arg-type]

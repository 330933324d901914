"""The message pump, when a handler cancels the task it runs in."""

import asyncio
import logging
from datetime import timedelta

import anyio
import pytest

from postdate import Endpoint, HandlerContext, MemoryTransport, Recoverability
from postdate.testing import VirtualClock

SECOND = timedelta(seconds=1)


def cancel_this_task() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


@pytest.mark.parametrize("waits", [True, False], ids=["and waits", "and ends"])
@pytest.mark.parametrize("concurrency", [1, 2])
async def test_a_handler_that_cancels_its_task_once_ends_neither_endpoint_nor_message(
    clock: VirtualClock, caplog: pytest.LogCaptureFixture, concurrency: int, waits: bool
) -> None:
    queues, handled, cancelled = MemoryTransport(), list[bytes](), 0
    endpoint = Endpoint("sales", transport=queues, concurrency=concurrency, clock=clock)

    @endpoint.handler(bytes)
    async def handle(message: bytes, context: HandlerContext) -> None:
        nonlocal cancelled
        if message == b"odd" and cancelled < 3:
            cancelled += 1
            cancel_this_task()
            if waits:
                await anyio.sleep_forever()
        handled.append(message)

    async with endpoint:
        for body in (b"odd", b"1", b"2", b"3"):
            await endpoint.send(body, destination="sales")
            await clock.advance(60 * SECOND)
        lengths = await queues.queue_lengths()
    assert set(handled) == {b"odd", b"1", b"2", b"3"}
    assert lengths == {"sales": 0, "error": 0}
    if waits:
        assert cancelled == 3
        told = [each.levelno for each in caplog.records if "not finished: the task" in each.message]
        assert told == [logging.ERROR] * 3


async def test_a_handler_that_always_cancels_its_task_is_a_failure_in_the_end(clock: VirtualClock) -> None:
    queues = MemoryTransport()
    settings = Recoverability(immediate_retries=0, delayed_retries=0)
    endpoint = Endpoint("sales", transport=queues, concurrency=1, recoverability=settings, clock=clock)

    @endpoint.handler(bytes)
    async def handle(message: bytes, context: HandlerContext) -> None:
        cancel_this_task()
        await anyio.sleep_forever()

    async with endpoint:
        await endpoint.send(b"odd", destination="sales")
        await clock.advance(timedelta(minutes=10))
        assert await queues.queue_lengths() == {"sales": 0, "error": 1}

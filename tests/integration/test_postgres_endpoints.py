"""Whole endpoints on PostgreSQL, in every transaction mode (row 51)."""

from collections import Counter
from dataclasses import dataclass

import anyio
import pytest
from tests.integration.postgres_place import MILLISECOND, Place, now
from tests.waiting import received, until

from postdate import DelayedDelivery, Endpoint, HandlerContext, Headers, Recoverability, TransactionMode
from postdate.ports import RecordKind

MESSAGES = 100


@dataclass
class Ping:
    """Sent with a delay by the endpoint that handles it."""

    number: int


@dataclass
class Pong:
    """Sent with a delay by the handler of :class:`Ping`."""

    number: int


@pytest.mark.parametrize("mode", TransactionMode, ids=lambda mode: mode.value)
async def test_a_thousand_delayed_messages_arrive_once_in_every_transaction_mode_row_51(
    postgres_url: str, mode: TransactionMode
) -> None:
    """Each is delayed, handled, answered with another delayed message, which is handled, too."""
    place = Place(postgres_url)
    endpoint = Endpoint(
        "service",
        transport=place.transport,
        delayed_delivery=DelayedDelivery(place.store),
        transaction_mode=mode,
        concurrency=32,
    )
    handled = {Ping: Counter[int](), Pong: Counter[int]()}
    early: list[int] = []

    def note(message: Ping | Pong, context: HandlerContext) -> None:
        assert context.due is not None
        if now() <= context.due:
            early.append(message.number)
        handled[type(message)][message.number] += 1

    @endpoint.handler(Ping)
    async def ping(message: Ping, context: HandlerContext) -> None:
        note(message, context)
        await context.send(Pong(message.number), delay=10 * MILLISECOND)

    @endpoint.handler(Pong)
    async def pong(message: Pong, context: HandlerContext) -> None:
        note(message, context)

    try:
        async with endpoint:
            async with anyio.create_task_group() as tasks:
                limiter = anyio.CapacityLimiter(20)

                async def send(number: int) -> None:
                    async with limiter:
                        await endpoint.send(Ping(number), delay=(1 + number % 50) * MILLISECOND)

                for number in range(MESSAGES):
                    tasks.start_soon(send, number)
            await until(lambda: handled[Pong].total() >= MESSAGES)
        once = Counter(range(MESSAGES))
        assert handled == {Ping: once, Pong: once}
        assert early == []
        lengths = await place.transport.queue_lengths()
        assert set(lengths.values()) == {0}, lengths
        counts = await place.store.record_counts()
        assert counts[RecordKind.SCHEDULED] == counts[RecordKind.DELIVERED] == 2 * MESSAGES
        assert counts[RecordKind.HANDLED] == 2 * MESSAGES
        assert place.rows("SELECT count(*) FROM content") == [(0,)]
    finally:
        await place.close()


@pytest.mark.parametrize("text", ["bad \0 byte", "lone \ud800 surrogate"])
async def test_a_failure_whose_text_postgresql_does_not_take_ends_like_any_other(postgres_url: str, text: str) -> None:
    place = Place(postgres_url)
    policy = Recoverability(immediate_retries=1, delayed_retries=1, time_increase=10 * MILLISECOND)
    endpoint = Endpoint(
        "service",
        transport=place.transport,
        delayed_delivery=DelayedDelivery(place.store),
        recoverability=policy,
    )
    attempts = 0

    @endpoint.handler(Ping)
    async def fail(message: Ping, context: HandlerContext) -> None:
        nonlocal attempts
        attempts += 1
        raise ValueError(text)

    try:
        async with endpoint:
            await endpoint.send(Ping(1))
            (copy,) = await received(place.transport.receiver("error"), 1)
        assert "\0" not in copy.envelope.headers[Headers.EXCEPTION_MESSAGE]
        assert attempts == 4
    finally:
        await place.close()

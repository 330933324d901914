"""Redis without memory, and without what it had: what makes room goes on, what is gone is made again and said once."""

import logging
import shutil
from dataclasses import dataclass

import anyio
import pytest
from tests import servers
from tests.integration.test_redis import NOW, SECOND, message, prepared
from tests.waiting import patience, received, until

from postdate import DelayedMessage, Endpoint, Envelope, HandlerContext, SystemClock, TransactionMode
from postdate.backends.redis.database import Redis
from postdate.backends.redis.store import RedisStore
from postdate.backends.redis.transport import RedisTransport
from postdate.errors import QueueNotFound, StoreFull, TransportUnreachable
from postdate.ports import Completion


def fill(server: servers.Redis, limit: int = 1) -> None:
    assert server.command("CONFIG", "SET", "maxmemory", str(limit)) == b"+OK"


@dataclass
class Work:
    number: int


@dataclass
class Large:
    text: str


async def test_an_endpoint_that_starts_on_a_full_server_empties_it(
    redis_server: servers.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    """Queues, sign of life, claims, moves and commits: all of it makes room, or must be that others can.

    What would take much more room than it makes waits for room, and keeps no other message.
    """
    async with Redis(redis_server.url) as full:
        handled = list[int]()
        await full.queues.create_queues(["work", "large"])
        before = Endpoint("work", full, send_only=True)
        async with before:
            for number in range(20):
                await before.send(Work(number), destination="work")
            await before.send(Work(20), destination="work", delay=SECOND)
    fill(redis_server)
    async with Redis(redis_server.url) as full:
        endpoint = Endpoint("work", full)

        async def large_is_there() -> bool:
            return (await full.queues.lengths_of(["large"]))["large"] == 1

        @endpoint.handler(Work)
        async def handle(work: Work, context: HandlerContext) -> None:
            handled.append(work.number)
            if work.number == 7:
                await context.send(Large("x" * 2_000_000), destination="large")

        async with endpoint:
            await until(lambda: len(set(handled)) > 20 and handled.count(7) > 2)
            assert sorted(number for number in handled if number != 7) == [*range(7), *range(8, 21)]
            assert await full.queues.lengths_of(["large"]) == {"large": 0}
            said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
            assert [line.partition(":")[0] for line in said] == ["cannot acknowledge messages of work"]
            at = SystemClock().now()
            with pytest.raises(StoreFull):
                await full.store.store(DelayedMessage("m-1", at, "work", {}, b"x"), at)
            fill(redis_server, 0)
            await endpoint.send(Work(21), destination="work")
            await until(lambda: 21 in handled)
            await until(large_is_there)


async def test_what_is_held_on_a_full_server_stays_held(redis_server: servers.Redis) -> None:
    store = await prepared(RedisStore(redis_server.url))
    try:
        await store.store(message(), NOW)
        (claim,) = await store.claim_due(NOW + SECOND, 10)
        fill(redis_server)
        before = store._liveness._last_beat_at
        await until(lambda: store._liveness._last_beat_at > before + 1)
        assert store.is_in_force(claim)
        await store.report_clock(SECOND)
        assert await store.retry_later(claim, NOW, NOW, "why")
    finally:
        await store.close()


async def test_a_full_server_takes_what_belongs_to_the_end_of_a_message_and_nothing_else(
    redis_server: servers.Redis,
) -> None:
    """Or nothing that handlers answer, or delay, would ever be handled."""
    async with Redis(redis_server.url) as full:
        await full.store.initialize("service", TransactionMode.TRANSACTION_SCOPE)
        await full.queues.create_queues(["in", "out"])
        await full.queues.send([Envelope("in", "e-1")], NOW)
        receiver = full.queues.receiver("in")
        (held,) = await receiver.receive(10)
        fill(redis_server)
        delaying = full.store.storing_work([message()], NOW)
        answer = Envelope("out", "e-2", {}, b"larger than what is answered")
        with pytest.raises(TransportUnreachable, match="maxmemory"):
            await full.queues.send([answer], NOW, work=[delaying])
        await receiver.commit(held, NOW, Completion(outgoing=(answer,), work=(delaying,)))
        assert await full.queues.lengths_of(["in", "out"]) == {"in": 0, "out": 1}
        assert await full.store.get("m-1") == message()
        await receiver.close()


async def test_ends_may_send_a_megabyte_more_than_they_end_while_the_server_is_full(
    redis_server: servers.Redis,
) -> None:
    """More of it would make the server's memory grow without an end: it is refused whole, as all that is sent."""
    async with Redis(redis_server.url) as full:
        await full.queues.create_queues(["in", "out"])
        large = {4: bytes(300_000)}
        await full.queues.send([Envelope("in", f"e-{n}", {}, large.get(n, b"")) for n in range(7)], NOW)
        receiver = full.queues.receiver("in")
        held = await received(receiver, 7)
        larger = Completion(outgoing=(Envelope("out", "larger", {"h": "x" * 200_000}, bytes(100_000)),))
        fill(redis_server)
        with pytest.raises(QueueNotFound):  # what is not sent takes nothing
            await receiver.commit(held[0], NOW, Completion(outgoing=(Envelope("gone", "larger", {}, bytes(900_000)),)))
        for each in held[:3]:
            await receiver.commit(each, NOW, larger)
        with pytest.raises(TransportUnreachable, match="maxmemory"):
            await receiver.commit(held[3], NOW, larger)
        await receiver.commit(held[4], NOW, Completion(outgoing=(Envelope("out", "as-large", {}, large[4]),)))
        await receiver.commit(held[5], NOW)
        assert await full.queues.observer().queue_lengths() == {"in": 2, "out": 4}
        fill(redis_server, 0)
        await receiver.commit(held[3], NOW, larger)
        fill(redis_server)
        await receiver.commit(held[6], NOW, larger)
        assert await full.queues.observer().queue_lengths() == {"in": 0, "out": 6}
        await receiver.close()


async def test_queues_that_a_server_has_lost_are_made_again_and_that_is_said_once(
    redis_server: servers.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    elsewhere = RedisTransport(redis_server.url)

    async def made_again() -> bool:
        return len(await elsewhere.lengths_of(["work", "work.timeouts", "error"])) == 3

    async with Redis(redis_server.url) as database:
        endpoint, handled = Endpoint("work", database), anyio.Event()

        @endpoint.handler(Work)
        async def handle(work: Work, context: HandlerContext) -> None:
            handled.set()

        async with endpoint:
            await endpoint.send(Work(0), destination="work", delay=3_600 * SECOND)
            await anyio.to_thread.run_sync(redis_server.kill)
            await anyio.to_thread.run_sync(shutil.rmtree, redis_server.data)
            await anyio.to_thread.run_sync(redis_server.start)
            await until(made_again, despite=TransportUnreachable)
            await until(lambda: endpoint.send(Work(1), destination="work"), despite=TransportUnreachable)
            with patience():
                await handled.wait()
    await elsewhere.close()
    said = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.getMessage() for record in said if "made again" in record.getMessage()]
    assert not [record for record in said if record.exc_info]


async def test_a_queue_that_nobody_has_made_stays_missing(redis_server: servers.Redis) -> None:
    transport = RedisTransport(redis_server.url)
    receiver = transport.receiver("missing")
    with pytest.raises(QueueNotFound):
        await receiver.receive(1)
    await receiver.close()
    await transport.close()

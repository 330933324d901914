"""Exactly once from a Redis store to a Redis queue of the same server, whoever is killed with -9 meanwhile."""

import json
import random
import threading
import uuid
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from pathlib import Path

import anyio
import pytest
from tests.integration.poison import let_a_message_kill_its_processes
from tests.redis_subjects import Prefix
from tests.servers import Redis

from postdate import DelayedMessage, Headers, SystemClock, TransactionMode
from postdate.backends.redis.login import parse_address
from postdate.backends.redis.store import RedisStore
from postdate.backends.redis.transport import RedisTransport
from postdate.ports import RecordKind

pytestmark = pytest.mark.soak(
    "kills processes and servers at random moments",
    part="kills",
    proven_by=(
        "tests/integration/test_redis.py::test_what_a_killed_process_held_is_claimed_by_another_row_25",
        "tests/integration/test_redis.py::test_after_a_restart_who_listens_is_woken_and_who_receives_goes_on",
        "tests/integration/test_redis.py::test_a_queue_counts_the_processes_that_died_with_a_message_and_gives_a_suspect_out_alone",
        "tests/integration/test_redis_claims.py::test_what_was_claimed_by_an_answer_that_was_lost_is_claimed_again",
        "tests/integration/test_redis_claims.py::test_a_commit_whose_answer_was_lost_took_place_once",
    ),
)
CONTENT = {Headers.ENCLOSED_MESSAGE_TYPES: "Work", Headers.CONTENT_TYPE: "application/json"}


def now() -> datetime:
    return SystemClock().now()


class Place:
    """A prefix of a server with queues, which its processes share."""

    def __init__(self, url: str) -> None:
        self.prefix = Prefix(url)
        self.address = f"{url}?prefix=kills-{uuid.uuid4()}"
        self.prefix.login = parse_address(self.address)
        self.store = RedisStore(self.address, table="service.timeouts")

    async def create(self) -> None:
        await self.store.initialize("service", TransactionMode.TRANSACTION_SCOPE)
        await self.store.setup()
        transport = RedisTransport(self.address)
        await transport.create_queues(["consumer", "done", "error", "service.timeouts", "consumer.timeouts"])
        await transport.close()

    async def fill(self, numbers: range, over: timedelta) -> None:
        first_due, apart = now(), over / len(numbers)
        work = [
            DelayedMessage(
                f"m-{n}", first_due + (n - numbers[0]) * apart, "consumer", CONTENT, json.dumps({"number": n}).encode()
            )
            for n in numbers
        ]
        await self.store.store_many(work, now())

    def done(self) -> int:
        found = self.prefix.client.zcard(f"{self.prefix.login.tag}:q:done:ready")
        assert isinstance(found, int)
        return found

    async def check_all_done_once(self, messages: int) -> None:
        transport = RedisTransport(self.address)
        try:
            shown = await transport.observer().browse("done", 10 * messages)
            lengths = await transport.observer().queue_lengths()
        finally:
            await transport.close()
        ids = Counter(each.envelope.message_id for each in shown)
        assert ids == Counter(f"done-{n}" for n in range(messages)), "lost or doubled"
        assert min(json.loads(each.envelope.body)["late_microseconds"] for each in shown) > 0, "early"
        assert {name: length for name, length in lengths.items() if length} == {"done": messages}
        kinds = await self.store.record_counts()
        assert kinds == dict.fromkeys((RecordKind.SCHEDULED, RecordKind.DELIVERED, RecordKind.HANDLED), messages)
        keys = [key for key in self.prefix.all_keys() if b":m:" in key]
        assert keys == [], "messages of the store that are gone"


@asynccontextmanager
async def placed(url: str) -> AsyncGenerator[Place]:
    place = Place(url)
    try:
        await place.create()
        yield place
    finally:
        await place.store.close()
        place.prefix.drop()


@pytest.mark.timeout(280)
async def test_kills_of_processes_during_deliveries_lose_and_double_nothing(
    redis_url: str, start, eventually, chance: random.Random
) -> None:
    """The service is killed 10 times and the consumer 5 times, side by side, at random moments."""
    messages = 2_000

    def kill_again_and_again(role: str, rounds: int, chance: random.Random) -> None:
        for _ in range(rounds):
            process = start(role, place.address)
            if chance.random() < 0.8:  # the others die while they start
                process.says("ready")
            threading.Event().wait(chance.random() * 0.3)
            process.kill()

    async with placed(redis_url) as place:
        await place.fill(range(messages), timedelta(seconds=10))
        killers = [
            threading.Thread(target=kill_again_and_again, args=(role, rounds, random.Random(chance.random())))
            for role, rounds in (("service", 10), ("consumer", 5))
        ]
        for killer in killers:
            killer.start()
        for killer in killers:
            killer.join()
        last = [start("service", place.address), start("consumer", place.address)]
        eventually(lambda: place.done() >= messages, f"{messages:,} messages done")
        for process in last:
            process.stop()
        await place.check_all_done_once(messages)


@pytest.mark.timeout(280)
async def test_a_message_that_kills_its_process_each_time_goes_alone_to_the_error_queue(redis_url: str, start) -> None:
    async with placed(redis_url) as place:
        queues = RedisTransport(place.address)
        await let_a_message_kill_its_processes(start, place.address, queues)
        await queues.close()


@pytest.mark.timeout(280)
async def test_kills_of_the_server_during_deliveries_lose_and_double_nothing(
    server_folder: Path, start, eventually, chance: random.Random
) -> None:
    """The server syncs every write; service and consumer live through it all and find it again by themselves."""
    rounds, each = 5, 200
    server = Redis(server_folder / "redis", durable=True)
    server.start()
    try:
        async with placed(server.url) as place:
            processes = [start("service", place.address), start("consumer", place.address)]
            for process in processes:
                process.says("ready")
            done = 0
            for first in range(0, rounds * each, each):
                await place.fill(range(first, first + each), timedelta(seconds=0.5))
                eventually(lambda done=done: place.done() > done, "they go on by themselves")
                threading.Event().wait(chance.random() * 0.5)
                seen = place.done()
                await anyio.to_thread.run_sync(server.kill)  # the event loop sees that its connections end
                await anyio.to_thread.run_sync(server.start)
                done = place.done()
                assert done >= seen, "what was committed is gone"
            eventually(lambda: place.done() >= rounds * each, "all messages done")
            for process in processes:
                process.stop()
            await place.check_all_done_once(rounds * each)
    finally:
        server.kill()

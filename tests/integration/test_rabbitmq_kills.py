"""Nothing is lost on the way from a store to RabbitMQ, whoever is killed with -9; what comes twice has one id.

At least once is what a store and a broker can keep together: between a confirm and the removal from the store, and
between a handler's sends and its acknowledgement, a death means once more.
"""

import json
import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.rabbitmq_subjects import channel_of
from tests.servers import RabbitMQ

from postdate import DelayedMessage, Headers, SqliteStore, SystemClock
from postdate.ports import RecordKind

pytest_plugins = ["tests.integration.rabbitmq_fixtures"]
pytestmark = pytest.mark.soak(
    "kills brokers, services and consumers at random moments",
    part="kills",
    proven_by=(
        "tests/integration/test_rabbitmq.py::test_a_connection_cut_under_many_sends_loses_nothing_confirmed",
        "tests/integration/test_rabbitmq.py::test_a_receiver_whose_connection_is_cut_receives_again",
        "tests/integration/test_rabbitmq.py::test_what_another_process_gave_back_counts_as_a_failure_of_it",
        "tests/property/test_delivery_under_faults.py::test_dying_at_every_single_call_loses_nothing",
    ),
)
BROKER_ROUNDS = int(os.environ.get("POSTDATE_KILL_ROUNDS", "2"))
"""A broker needs some four seconds to come back: twenty rounds are for those who wait."""

SERVICE_ROUNDS = int(os.environ.get("POSTDATE_KILL_ROUNDS", "5"))
QUEUES = ("consumer", "done", "error", "service.timeouts")
CONTENT = {Headers.ENCLOSED_MESSAGE_TYPES: "Work", Headers.CONTENT_TYPE: "application/json"}


def now() -> datetime:
    return SystemClock().now()


@pytest.fixture
def broker(own_broker: RabbitMQ) -> RabbitMQ:
    """A broker of the test's own with the queues; a quorum queue a second old would not survive a kill (3.10)."""
    with channel_of(own_broker.url) as channel:
        for name in QUEUES:
            channel.queue_declare(name, durable=True, arguments={"x-queue-type": "quorum"})
    own_broker.stop()
    own_broker.start()
    return own_broker


class Site:
    """The store of the service, seen from the test."""

    def __init__(self, folder: Path, broker: RabbitMQ) -> None:
        path = folder / "store.db"
        self.store = SqliteStore(path, synchronous="normal")
        self.address = f"{path} {broker.url}"

    async def fill(self, numbers: range, over: timedelta) -> None:
        """Store messages that fall due one after the other."""
        first_due, apart = now(), over / len(numbers)
        work = [
            DelayedMessage(
                f"m-{n}", first_due + (n - numbers[0]) * apart, "consumer", CONTENT, json.dumps({"number": n}).encode()
            )
            for n in numbers
        ]
        for start in range(0, len(work), 1_000):
            await self.store.store_many(work[start : start + 1_000], now())

    def delivered(self) -> int:
        return self._count(f"SELECT count(*) FROM record WHERE kind = {RecordKind.DELIVERED}")

    def waiting(self) -> int:
        return self._count("SELECT count(*) FROM delayed_message")

    def _count(self, sql: str) -> int:
        return self.store.file.read_blocking(lambda connection: connection.execute(sql).fetchone())[0]

    def close(self) -> None:
        self.store.file.close()


@pytest.fixture
def site(tmp_path: Path, broker: RabbitMQ) -> Generator[Site]:
    with closing(Site(tmp_path, broker)) as site:
        yield site


class Done:
    """What came to the queue ``done``: how often each message was handled, under which id it came, how late."""

    def __init__(self, broker: RabbitMQ) -> None:
        self.broker = broker
        self.times: Counter[int] = Counter()
        self.came_as: set[tuple[int, str]] = set()
        self.earliest_microseconds = 10**9

    def take(self) -> int:
        """Take what is in the queue; return how many messages have been handled so far."""
        with channel_of(self.broker.url) as channel:
            for method, properties, body in channel.consume("done", inactivity_timeout=0.2):
                if method is None or properties is None or body is None:
                    break
                self._note(properties.message_id, json.loads(body))
                channel.basic_ack(method.delivery_tag)
            channel.cancel()
        return len(self.times)

    def _note(self, message_id: str | None, done: dict[str, Any]) -> None:
        number = done["number"]
        assert message_id == f"done-{number}"
        self.times[number] += 1
        self.came_as.add((number, done["came_as"]))
        self.earliest_microseconds = min(self.earliest_microseconds, done["late_microseconds"])


def lengths(broker: RabbitMQ) -> dict[str, int]:
    with channel_of(broker.url) as channel:
        return {name: channel.queue_declare(name, passive=True).method.message_count for name in QUEUES}


def all_come(site: Site, broker: RabbitMQ, messages: int, eventually: Callable) -> Done:
    """Wait until every message was delivered and handled."""
    done = Done(broker)
    eventually(lambda: site.waiting() == 0, f"{messages:,} messages delivered", seconds=600)
    with suppress(AssertionError):  # what is lost is said by the check, with where it may be
        eventually(lambda: done.take() >= messages, f"{messages:,} messages handled", seconds=600)
    return done


def check_nothing_is_lost(site: Site, done: Done, messages: int, what: str) -> None:
    """Every message was handled, not early, and always under its own id; nothing is left anywhere."""
    done.take()
    left, lost = lengths(done.broker), sorted(set(range(messages)) - set(done.times))
    more = done.times.total() - len(done.times)
    print(f"{what}: {messages:,} messages, {len(done.times):,} handled, {more:,} times more than once")  # noqa: T201
    assert not lost, f"lost: {lost[:20]}; in queues: {left}"
    assert done.came_as == {(number, f"m-{number}") for number in range(messages)}, "an id is not stable"
    assert done.earliest_microseconds > 0, "early"
    assert site.waiting() == 0
    assert site.delivered() == messages
    assert set(left.values()) == {0}, left


async def kill_amid_deliveries(
    site: Site, numbers: range, kill: Callable[[], None], eventually: Callable, moment: random.Random
) -> bool:
    """Let messages fall due, kill at some moment while they are delivered; return whether some had not been."""
    delivered = site.delivered()
    await site.fill(numbers, over=timedelta(seconds=1.2))
    eventually(lambda: site.delivered() > delivered, "it delivers by itself")
    threading.Event().wait(moment.random() * 0.6)
    kill()
    return site.waiting() > 0


@pytest.mark.timeout(900 + 20 * BROKER_ROUNDS)
async def test_kills_of_the_broker_during_deliveries_lose_nothing(
    site: Site, broker: RabbitMQ, start, eventually, chance: random.Random
) -> None:
    """Service and consumer live through it all and find the broker again by themselves."""
    each, rounds, amid = 500, 0, 0
    processes = [start("service", site.address), start("consumer", site.address)]
    for process in processes:
        process.says("ready")
    while rounds < BROKER_ROUNDS or amid <= BROKER_ROUNDS // 4:  # on a busy machine fewer come amid deliveries
        numbers = range(rounds * each, (rounds + 1) * each)
        amid += await kill_amid_deliveries(site, numbers, broker.kill, eventually, chance)
        broker.start()
        rounds += 1
    messages = rounds * each
    done = all_come(site, broker, messages, eventually)
    for process in processes:
        process.stop()
    check_nothing_is_lost(site, done, messages, f"{rounds} kills of the broker, {amid} amid deliveries")


async def test_kills_of_the_service_during_deliveries_lose_nothing(
    site: Site, broker: RabbitMQ, start, eventually, chance: random.Random
) -> None:
    """The consumer is killed beside it, in every fourth round."""
    each, rounds, amid = 400, 0, 0
    consumer, service = start("consumer", site.address), start("service", site.address)
    while rounds < SERVICE_ROUNDS or amid <= SERVICE_ROUNDS // 4:
        service.says("ready")
        numbers = range(rounds * each, (rounds + 1) * each)
        amid += await kill_amid_deliveries(site, numbers, service.kill, eventually, chance)
        service = start("service", site.address)
        if rounds % 4 == 0:
            consumer.kill()
            consumer = start("consumer", site.address)
        rounds += 1
    messages = rounds * each
    done = all_come(site, broker, messages, eventually)
    for process in (service, consumer):
        process.says("ready")
        process.stop()
    check_nothing_is_lost(site, done, messages, f"{rounds} kills of the service, {amid} amid deliveries")

"""Sagas through kill -9: exactly once in one file; nothing lost, nobody stuck with PostgreSQL and RabbitMQ."""

import json
import os
import random
import subprocess
import sys
import threading
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import anyio
import pytest
from tests.integration.saga_process import Begin, Relay
from tests.postgres_subjects import drop_schema, fresh_schema
from tests.rabbitmq_subjects import channel_of

from postdate import Endpoint, SystemClock, Transport
from postdate.config import load_settings
from postdate.ports import Correlation, Receiver
from postdate.wiring import open_saga_store, opened

SCRIPT = Path(__file__).with_name("saga_process.py")
RELAYS = 200
KILLS = 5
QUIET = timedelta(seconds=1)


@dataclass
class Site:
    """Where the processes are, and what the test sends and receives there."""

    environment: dict[str, str]
    name: str
    done: str

    def start(self) -> subprocess.Popen[str]:
        environment = {**os.environ, **self.environment, "RELAY_DONE": self.done}
        command = [sys.executable, "-W", "error", str(SCRIPT)]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(60)
    assert process.stdout is not None
    process.stdout.close()


@pytest.fixture(params=["one file", "postgres and rabbitmq"])
async def site(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Site]:
    name, schema = f"relay-{uuid.uuid4().hex[:12]}", fresh_schema()
    environment = {"POSTDATE_ENDPOINT__NAME": name, "POSTDATE_ENDPOINT__ERROR_QUEUE": f"{name}.error"}
    site = Site(environment, name, f"{name}.done")
    if request.param == "one file":
        environment |= {
            "POSTDATE_STORE__ADDRESS": f"sqlite:///{tmp_path / 'one.db'}",
            "POSTDATE_STORE__SYNCHRONOUS": "normal",
        }
        yield site
        return
    postgres, rabbit = request.getfixturevalue("postgres_url"), request.getfixturevalue("rabbitmq_url")
    environment |= {
        "POSTDATE_STORE__ADDRESS": postgres,
        "POSTDATE_STORE__SCHEMA": schema,
        "POSTDATE_TRANSPORT__ADDRESS": rabbit,
        "POSTDATE_TRANSPORT__QUEUE_TYPE": "classic",
    }
    yield site
    drop_schema(postgres, schema)
    with channel_of(rabbit) as channel:
        for end in ("", ".timeouts", ".error"):
            channel.queue_delete(f"{name}{end}")
        channel.queue_delete(site.done)


async def test_relays_through_kills_all_arrive_and_in_one_file_exactly_once(site: Site) -> None:
    seed = random.SystemRandom().randrange(1_000_000)
    print(f"seed {seed}")  # noqa: T201 - shown when the test fails
    settings = load_settings(None, site.environment)
    async with opened(settings, create=True, initialize=False) as deployment:
        await deployment.transport.create_queues([site.name, site.done])
        sender = Endpoint("sender", transport=deployment.transport, send_only=True)
        sender.route(Begin, site.name, name="Begin")
        async with sender:
            for number in range(RELAYS):
                await sender.send(Begin(number))
        await anyio.to_thread.run_sync(_kill_again_and_again, site, random.Random(seed))
        last = await anyio.to_thread.run_sync(site.start)
        try:
            arrived = await _received(deployment.transport, site.done)
        finally:
            _end(last)
        assert set(arrived) == set(range(RELAYS))
        if settings.transport.address.scheme == "local":
            assert set(arrived.values()) == {1}
        assert await _errors(deployment.transport, f"{site.name}.error") == 0
        sagas = open_saga_store(settings)
        for number in range(RELAYS):
            left = await sagas.find(Relay.definition.name, Correlation("number", str(number)))
            assert left is None or json.loads(left.details)["completed_by"]
        await sagas.close()


def _kill_again_and_again(site: Site, chance: random.Random) -> None:
    for _ in range(KILLS):
        process = site.start()
        threading.Event().wait(chance.random() * 0.6)
        _end(process)


async def _received(transport: Transport, queue: str) -> Counter[int]:
    """Return what has come, once everything is there and nothing more comes for a while."""
    arrived: Counter[int] = Counter()
    receiver = transport.receiver(queue)
    with anyio.fail_after(60):
        while len(arrived) < RELAYS:
            arrived += await _some(receiver)
    while True:
        with anyio.move_on_after(QUIET.total_seconds()) as silence:
            arrived += await _some(receiver)
        if silence.cancelled_caught:
            break
    await receiver.close()
    return arrived


async def _some(receiver: Receiver) -> Counter[int]:
    found = await receiver.receive(100)
    for each in found:
        await receiver.commit(each, SystemClock().now())
    return Counter(json.loads(each.envelope.body)["number"] for each in found)


async def _errors(transport: Transport, queue: str) -> int:
    receiver = transport.receiver(queue)
    found = 0
    with anyio.move_on_after(0.1):
        found = len(await receiver.receive(10))
    await receiver.close()
    return found

"""Sagas through kill -9: exactly once in one file; nothing lost, nobody stuck on servers with RabbitMQ."""

import json
import os
import random
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import anyio
import pytest
from tests import mariadb_subjects, postgres_subjects
from tests.integration.saga_process import Begin, Relay
from tests.rabbitmq_subjects import channel_of
from tests.waiting import PATIENCE_SECONDS, received, until

from postdate import Endpoint, SystemClock, Transport
from postdate.config import load_settings
from postdate.ports import Correlation, Receiver
from postdate.wiring import open_deployment, open_saga_store

SCRIPT = Path(__file__).with_name("saga_process.py")
RELAYS = 200
KILLS = 5


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
    process.wait(PATIENCE_SECONDS)
    assert process.stdout is not None
    process.stdout.close()


@pytest.fixture(params=["one file", "postgres and rabbitmq", "mariadb and rabbitmq"])
async def site(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Site]:
    name, in_mariadb = f"relay-{uuid.uuid4().hex[:12]}", str(request.param).startswith("mariadb")
    schema = (mariadb_subjects if in_mariadb else postgres_subjects).fresh_schema()
    environment = {"POSTDATE_ENDPOINT__NAME": name, "POSTDATE_ENDPOINT__ERROR_QUEUE": f"{name}.error"}
    site = Site(environment, name, f"{name}.done")
    if request.param == "one file":
        environment |= {
            "POSTDATE_STORE__ADDRESS": f"sqlite:///{tmp_path / 'one.db'}",
            "POSTDATE_STORE__SYNCHRONOUS": "normal",
        }
        yield site
        return
    database = request.getfixturevalue("mariadb_url" if in_mariadb else "postgres_url")
    rabbit = request.getfixturevalue("rabbitmq_url")
    environment |= {
        "POSTDATE_STORE__ADDRESS": database,
        "POSTDATE_STORE__SCHEMA": schema,
        "POSTDATE_TRANSPORT__ADDRESS": rabbit,
        "POSTDATE_TRANSPORT__QUEUE_TYPE": "classic",
    }
    yield site
    (mariadb_subjects if in_mariadb else postgres_subjects).drop_schema(database, schema)
    with channel_of(rabbit) as channel:
        for end in ("", ".timeouts", ".error"):
            channel.queue_delete(f"{name}{end}")
        channel.queue_delete(site.done)


@pytest.mark.soak(
    "kills processes at random moments",
    part="kills",
    proven_by=(
        "tests/property/test_delivery_under_faults.py::test_dying_at_every_single_call_loses_nothing",
        "tests/unit/sagas/test_conflicts.py::test_a_message_whose_saga_was_kept_and_whose_messages_were_not_sent_is_handled_again",
        "tests/unit/sagas/test_conflicts.py::test_a_timeout_that_is_delivered_twice_is_handled_once_where_all_is_one_transaction",
    ),
)
async def test_relays_through_kills_all_arrive_and_in_one_file_exactly_once(site: Site, chance: random.Random) -> None:
    settings = load_settings(None, site.environment)
    async with open_deployment(settings, create=True, initialize=False) as deployment:
        await deployment.transport.create_queues([site.name, site.done])
        sender = Endpoint("sender", transport=deployment.transport, send_only=True)
        sender.route(Begin, site.name, name="Begin")
        async with sender:
            for number in range(RELAYS):
                await sender.send(Begin(number))
        await anyio.to_thread.run_sync(_kill_again_and_again, site, chance)
        last = await anyio.to_thread.run_sync(site.start)
        receiver, arrived = deployment.transport.receiver(site.done), Counter[int]()
        try:
            while len(arrived) < RELAYS:
                arrived += await _some(receiver)
            await until(lambda: _are_empty(deployment.transport, site.name))
        finally:
            _end(last)
        while not await _are_empty(deployment.transport, site.done):  # what came twice
            arrived += await _some(receiver)
        await receiver.close()
        assert set(arrived) == set(range(RELAYS))
        if settings.transport.address.scheme == "local":
            assert set(arrived.values()) == {1}
        assert await _are_empty(deployment.transport, f"{site.name}.error")
        sagas = open_saga_store(settings)
        for number in range(RELAYS):
            left = await sagas.find(Relay.definition.name, Correlation("number", str(number)))
            assert left is None or json.loads(left.details)["completed_by"]
        await sagas.close()


def _kill_again_and_again(site: Site, chance: random.Random) -> None:
    for _ in range(KILLS):
        process = site.start()
        with suppress(subprocess.TimeoutExpired):
            process.wait(chance.random() * 0.6)
        _end(process)


async def _some(receiver: Receiver) -> Counter[int]:
    found = await received(receiver, 1)
    for each in found:
        await receiver.commit(each, SystemClock().now())
    return Counter(json.loads(each.envelope.body)["number"] for each in found)


async def _are_empty(transport: Transport, *queues: str) -> bool:
    """Return whether nothing is in queues but what somebody has in hand."""
    return not any((await transport.lengths_of(queues) or {}).values())

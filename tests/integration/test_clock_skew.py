"""Senders and services whose clocks are wrong, for real (row 70, ADR 0048): the table of the guide is what happens."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests import faketime
from tests.faults.clocks import SetClock
from tests.postgres_subjects import drop_schema, fresh_schema
from tests.rabbitmq_subjects import channel_of
from tests.waiting import READY, until

from postdate import (
    DelayedMessage,
    Endpoint,
    PostgresStore,
    PostgresTransport,
    SystemClock,
    TransactionMode,
    Transport,
)
from postdate.testing import RecordedMetrics
from postdate.wiring.adapters import open_transport

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guides" / "time-to-be-received.md"
SENDER = ROOT / "tests" / "skewed_sender.py"
_ROW = re.compile(
    r"^\| (?P<queue>.+?) \| (?:(?P<seconds>\d+) s (?P<side>ahead|behind)|right) \| (?P<wanted>\d+) s "
    r"\| (?P<received>at once|2 s later) \| (?:(?P<allowance>\d+) s|none) \| (?P<outcome>.+?) \|$",
    re.MULTILINE,
)


@dataclass
class Offer:
    """What is sent."""


@dataclass
class Last:
    """Comes after it."""


@dataclass(frozen=True)
class Case:
    number: int
    queue: str
    skew: int
    wanted: int
    later: bool
    allowance: int
    outcome: str

    @property
    def address(self) -> str:
        return f"skew.{os.getpid()}.{self.number}"


def cases() -> list[Case]:
    """Return the rows of the guide's table."""
    return [
        Case(
            number,
            row["queue"],
            int(row["seconds"] or 0) * (1 if row["side"] == "ahead" else -1),
            int(row["wanted"]),
            row["received"] != "at once",
            int(row["allowance"] or 0),
            row["outcome"],
        )
        for number, row in enumerate(_ROW.finditer(GUIDE.read_text(encoding="utf-8")))
    ]


def test_the_table_has_every_kind_of_clock_and_outcome() -> None:
    rows = cases()
    assert {case.queue for case in rows} == {"PostgreSQL", "RabbitMQ", "header only"}
    assert {case.skew for case in rows} == {-30, 0, 30}
    assert {case.allowance for case in rows} == {0, 30}
    assert {case.outcome for case in rows} == {"handled", "discarded", "expired in the queue"}


@pytest.mark.soak(
    "messages live for seconds of real time",
    part="clocks",
    proven_by=(
        "tests/unit/test_time_to_be_received.py::test_an_allowance_for_clocks_that_differ_is_added_row_70",
        "tests/integration/test_postgres_expiry.py::test_the_row_ends_so_long_after_it_came_whatever_the_senders_clock_says_row_59",
        "tests/integration/test_clock_skew.py::test_the_table_has_every_kind_of_clock_and_outcome",
    ),
)
@pytest.mark.parametrize("queue", ["PostgreSQL", "RabbitMQ", "header only"])
async def test_a_sender_with_a_wrong_clock_row_70(queue: str, request: pytest.FixtureRequest) -> None:
    rows = [case for case in cases() if case.queue == queue]
    if queue == "RabbitMQ":
        address, settings = request.getfixturevalue("rabbitmq_url"), {"queue_type": "classic"}
    else:
        address, settings = request.getfixturevalue("postgres_url"), {"schema": fresh_schema()}
    transport = open_transport(address, **settings)
    try:
        await transport.create_queues([case.address for case in rows])
        for skew in sorted({case.skew for case in rows}):
            await anyio.to_thread.run_sync(_send, address, settings, skew, [each for each in rows if each.skew == skew])
        later = SystemClock().now() + timedelta(seconds=2)
        found = {case: await _outcome(transport, case) for case in rows if not case.later}
        await until(lambda: SystemClock().now() > later)
        found |= {case: await _outcome(transport, case) for case in rows if case.later}
        assert found == {case: case.outcome for case in rows}
    finally:
        await transport.close()
        _clean(address, settings, rows)


def _clean(address: str, settings: dict[str, str], rows: Sequence[Case]) -> None:
    if "schema" in settings:
        drop_schema(address, settings["schema"])
        return
    with channel_of(address) as channel:
        for case in rows:
            channel.queue_delete(case.address)


def _send(address: str, settings: dict[str, str], skew: int, rows: Sequence[Case]) -> None:
    messages = [[case.address, case.wanted, case.queue != "header only"] for case in rows]
    done = subprocess.run(
        [sys.executable, str(SENDER), address, json.dumps(settings), json.dumps(messages)],
        env={**os.environ, **faketime.environment(skew)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    its_clock = datetime.fromisoformat(done.stdout.strip())
    assert abs((its_clock - SystemClock().now()).total_seconds() - skew) < 10, "the sender's clock is as wrong as asked"


async def _outcome(transport: Transport, case: Case) -> str:
    """Let an endpoint with the right clock take what is in the queue, and a message of its own that comes last."""
    metrics, handled, last = RecordedMetrics(), list[Offer](), anyio.Event()
    endpoint = Endpoint(
        case.address,
        transport=transport,
        create_queues=False,
        metrics=metrics,
        concurrency=1,
        time_to_be_received_allowance=timedelta(seconds=case.allowance),
    )

    @endpoint.handler(Offer, name="Offer")
    async def handle(message: Offer, _: Any) -> None:
        handled.append(message)

    @endpoint.handler(Last)
    async def handle_last(_message: Last, _: Any) -> None:
        last.set()

    async with endpoint:
        await endpoint.send(Last(), destination=case.address)
        await until(last.is_set)
    if handled:
        return "handled"
    return "discarded" if metrics.counts["discarded"] else "expired in the queue"


# --- services whose clocks are wrong --------------------------------------------------------------------------------

MESSAGES = 1_000
SOON = timedelta(seconds=4)
"""Before the first message is due; the rest follow within another second."""


class Service:
    """``postdate run`` under a wrong clock."""

    def __init__(self, folder: Path, ahead: timedelta, environment: dict[str, str]) -> None:
        folder.mkdir()
        clock = SetClock(folder)
        clock.set(ahead)
        self._log = folder / "run.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "postdate.cli", "run"],
                cwd=folder,
                env={**os.environ, **environment, **clock.environment},
                stdin=subprocess.DEVNULL,
                stderr=log,
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    async def says(self, text: str) -> None:
        """Return once the text is in its log."""

        def has_said() -> bool:
            assert self.process.poll() is None, self.log
            return text in self.log

        await until(has_said)


@pytest.mark.soak(
    "services under clocks that are set, beside a server in real time",
    part="clocks",
    proven_by=(
        "tests/unit/test_store_clock.py::test_an_endpoint_delays_and_judges_by_the_store_s_clock",
        "tests/unit/test_store_clock.py::test_it_shows_the_store_s_time_and_is_never_ahead_of_it",
        "tests/unit/test_store_clock.py::test_a_wrong_clock_is_named_once_and_again_when_it_changes",
    ),
)
@pytest.mark.parametrize("use_store_clock", [True, False])
async def test_services_with_wrong_clocks_deliver_by_that_of_the_store(
    postgres_url: str, tmp_path: Path, *, use_store_clock: bool
) -> None:
    """Ten minutes apart from the server, one on either side; without its clock nearly all messages come too early."""
    schema = fresh_schema()
    environment = {
        "POSTDATE_STORE__ADDRESS": postgres_url,
        "POSTDATE_STORE__SCHEMA": schema,
        "POSTDATE_QUEUES__CREATE": "orders",
        "POSTDATE_DELAYED_DELIVERY__USE_STORE_CLOCK": str(use_store_clock).lower(),
    }
    store, transport = PostgresStore(postgres_url, schema=schema), PostgresTransport(postgres_url, schema=schema)
    services: list[Service] = []
    try:
        minutes = timedelta(minutes=10)
        services += [
            Service(tmp_path / name, ahead, environment) for name, ahead in (("behind", -minutes), ("ahead", minutes))
        ]
        for service in services:
            await service.says(READY)
        await store.initialize("postdate", TransactionMode.RECEIVE_ONLY)
        receiver = transport.receiver("orders")
        now = SystemClock().now()
        spread = timedelta(seconds=1) / MESSAGES
        messages = [DelayedMessage(f"m-{n}", now + SOON + n * spread, "orders") for n in range(MESSAGES)]
        await store.store_many(messages, now)
        early, came = 0, dict.fromkeys((message.message_id for message in messages), 0)
        while sum(came.values()) < MESSAGES:
            for received in await receiver.receive(MESSAGES):
                assert received.envelope.due is not None
                early += SystemClock().now() < received.envelope.due
                came[received.envelope.message_id] += 1
        reported = await store.reported_clocks()
        await receiver.close()
        assert set(came.values()) == {1}
        assert early == 0 if use_store_clock else early > MESSAGES / 2
        assert sorted(round(ahead.total_seconds(), -1) for ahead in reported.values()) == [-600, 600]
        await services[0].says("is 10 min behind that of the store")
        await services[1].says("is 10 min ahead of that of the store")
        doctor = subprocess.run(  # noqa: ASYNC221 - nothing else happens meanwhile
            [sys.executable, "-m", "postdate.cli", "doctor", "--json"],
            cwd=tmp_path, env={**os.environ, **environment}, capture_output=True, check=False,
        )  # fmt: skip
        (check,) = [each for each in json.loads(doctor.stdout)["checks"] if each["name"] == "service clocks"]
        assert check["result"] == "warn"
        for service, side in zip(services, ("behind", "ahead of"), strict=True):
            assert re.search(rf":{service.process.pid} is (10m|9m59s) {side} the server", check["found"])
    finally:
        for service in services:
            service.process.kill()
            service.process.wait()
        await store.close()
        await transport.close()
        drop_schema(postgres_url, schema)

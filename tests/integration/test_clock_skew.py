"""Senders whose clocks are wrong, for real (row 70): the table of the guide is what happens."""

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
from tests.postgres_subjects import drop_schema, fresh_schema
from tests.rabbitmq_subjects import channel_of

from postdate import Endpoint, SystemClock, Transport
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
        found = {case: await _outcome(transport, case) for case in rows if not case.later}
        await anyio.sleep(2)
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
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    its_clock = datetime.fromisoformat(done.stdout.strip())
    assert abs((its_clock - SystemClock().now()).total_seconds() - skew) < 10, "the sender's clock is as wrong as asked"


async def _outcome(transport: Transport, case: Case) -> str:
    """Let an endpoint with the right clock take what is in the queue."""
    metrics, handled = RecordedMetrics(), list[Offer]()
    endpoint = Endpoint(
        case.address,
        transport=transport,
        create_queues=False,
        metrics=metrics,
        time_to_be_received_allowance=timedelta(seconds=case.allowance),
    )

    @endpoint.handler(Offer, name="Offer")
    async def handle(message: Offer, _: Any) -> None:
        handled.append(message)

    async with endpoint:
        with anyio.move_on_after(1.5):  # nothing comes where the queue has let it expire
            while not handled and not metrics.counts["discarded"]:  # noqa: ASYNC110 - of the handler
                await anyio.sleep(0.02)
    if handled:
        return "handled"
    return "discarded" if metrics.counts["discarded"] else "expired in the queue"

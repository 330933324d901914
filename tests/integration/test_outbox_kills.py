"""Endpoints with outboxes on real servers: killed with -9, or their connection lost under a handler (row 114)."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import anyio
import psycopg
import pytest
from tests.postgres_subjects import drop_schema, fresh_schema
from tests.waiting import until

from postdate import (
    BlockingEndpoint,
    Endpoint,
    HandlerContext,
    MemoryTransport,
    Outbox,
    PostgresOutbox,
    Recoverability,
)

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "outbox_kills.py"
ONE_TRY = Recoverability(immediate_retries=0, delayed_retries=0)


@pytest.mark.soak(
    "kills processes at random moments",
    part="kills",
    proven_by="tests/unit/test_outbox.py::test_interrupted_at_any_step_a_message_has_its_effects_once_row_114",
)
@pytest.mark.parametrize(
    ("place", "messages"), [("file+file", 1_000), ("postgres+rabbitmq", 300), ("mariadb+rabbitmq", 300)]
)
def test_what_is_sent_twice_and_killed_has_its_effects_once_row_114(
    request: pytest.FixtureRequest, place: str, messages: int
) -> None:
    """All messages are sent twice, on their way delayed ones are stored twice, and two workers are killed."""
    environment = dict(os.environ)
    if place != "file+file":
        database = place.partition("+")[0]
        environment[f"POSTDATE_{database.upper()}_URL"] = request.getfixturevalue(f"{database}_url")
        environment["POSTDATE_RABBITMQ_URL"] = request.getfixturevalue("rabbitmq_url")
    command = [sys.executable, "-W", "error", str(BENCHMARK), "--place", place, "--messages", str(messages)]
    done = subprocess.run(
        [*command, "--kills", "2", "--minutes", "4"], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    once = {"effects": messages, "messages": messages}
    assert found["effects"] == {"first": once, "second": once}
    assert found["left in queues"] == {}


async def test_a_connection_lost_under_a_handler_is_not_the_fault_of_its_message(postgres_url: str) -> None:
    schema, queues = fresh_schema(), MemoryTransport()
    outbox, calls, handled = PostgresOutbox(postgres_url, schema=schema), list[str](), anyio.Event()
    endpoint = Endpoint(
        "sales",
        transport=queues,
        transaction_mode="receive_only",
        outbox=Outbox(outbox),
        recoverability=ONE_TRY,
    )

    @endpoint.handler(bytes)
    async def handle(message: bytes, context: HandlerContext) -> None:
        calls.append(context.message_id)
        connection = await context.transaction()
        if len(calls) == 1:
            with psycopg.connect(postgres_url, autocommit=True) as other:
                other.execute("SELECT pg_terminate_backend(%s)", (connection.info.backend_pid,))
        await connection.execute("SELECT 1")
        handled.set()

    try:
        async with endpoint:
            id_ = await endpoint.send(b"", destination="sales")
            await until(handled.is_set)
        assert calls == [id_, id_]
        assert (await queues.queue_lengths())["error"] == 0
        found = await outbox.find("sales", id_)
        assert found is not None
        assert found.is_dispatched
    finally:
        await outbox.close()
        drop_schema(postgres_url, schema)


def test_a_program_without_an_event_loop_has_an_outbox_too(postgres_url: str, eventually: Callable[..., None]) -> None:
    """Its handlers are asynchronous, too, so they await the connection like all others."""
    schema, queues = fresh_schema(), MemoryTransport()
    outbox = PostgresOutbox(postgres_url, schema=schema, connections=1)
    endpoint = Endpoint("sales", transport=queues, transaction_mode="receive_only", outbox=Outbox(outbox))
    handled: list[tuple[int, ...]] = []

    @endpoint.handler(bytes)
    async def handle(message: bytes, context: HandlerContext) -> None:
        cursor = await (await context.transaction()).execute("SELECT 4711")
        handled.append(await cursor.fetchone())

    try:
        with BlockingEndpoint(endpoint) as sales:
            for _ in range(3):
                sales.send(b"", destination="sales")
            eventually(lambda: len(handled) >= 3, "three messages are handled, on one connection")
        assert handled == [(4711,)] * 3
    finally:
        anyio.run(outbox.close)
        drop_schema(postgres_url, schema)

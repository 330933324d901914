"""What was discarded: of messages that had been delayed an end like others, and of others counted apart."""

from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest
from pyspark.sql import SparkSession
from tests.postgres_subjects import drop_schema, fresh_schema

from postdate import DelayedMessage, LocalTransport
from postdate.backends.postgres.store import PostgresStore
from postdate.backends.postgres.transport import PostgresTransport
from postdate.backends.sqlite.store import SqliteStore
from postdate.messages import Envelope
from postdate.pipeline.audit import AuditResult, audit
from postdate.pipeline.report import render_html
from postdate.pipeline.stores import StoreSpec
from postdate.ports import HANDLED, Completion, Recording, RecordKind

MINUTE = timedelta(minutes=1)
DISCARDED = Completion(RecordKind.DISCARDED, "expired at noon")


async def _receive(transport: Any, queue: str, ends: dict[str, Completion], now: datetime) -> None:
    receiver = transport.receiver(queue)
    for received in await receiver.receive(len(ends)):
        await receiver.commit(received, now, ends[received.envelope.message_id])
    await receiver.close()


async def _live(store: Any, transport: Any, now: datetime) -> None:
    """Deliver three delayed messages and send two others; of either kind, one is discarded, one in two queues."""
    await transport.create_queues(["orders", "mails"])
    await store.store_many([DelayedMessage(f"delayed-{n}", now, "orders", {}, b"") for n in range(3)], now)
    assert (await store.move_due(now + MINUTE, 10)).delivered == 3
    undelayed = [("sent", "orders"), ("seen", "orders"), ("sent", "mails")]
    await transport.send([Envelope(queue, id_, {}, b"") for id_, queue in undelayed], now)
    ends = {"delayed-0": HANDLED, "delayed-1": DISCARDED, "delayed-2": HANDLED, "sent": DISCARDED, "seen": HANDLED}
    await _receive(transport, "orders", ends, now + 2 * MINUTE)
    await _receive(transport, "mails", {"sent": DISCARDED}, now + 3 * MINUTE)


def _counts(result: AuditResult) -> dict[str, int]:
    return {name: count for name, count in asdict(result.counts).items() if count}


async def _in_one_file(path: Path, now: datetime, do: Callable[[Any, Any, datetime], Awaitable[None]] = _live) -> None:
    store, transport = SqliteStore(path, synchronous="normal"), LocalTransport(path, synchronous="normal")
    await store.setup()
    try:
        await do(store, transport, now)
    finally:
        await transport.close()
        await store.close()


def test_what_was_never_delayed_and_discarded_is_counted_apart(
    spark: SparkSession, store: StoreSpec, now: datetime
) -> None:
    anyio.run(_in_one_file, Path(store.address.removeprefix("sqlite:///")), now)
    result = audit(spark, store, now + 4 * MINUTE, late_after=2 * MINUTE)
    expected = {"scheduled": 3, "delivered": 3, "handled": 2, "expired": 1, "discarded": 2, "undelayed": 1}
    assert (_counts(result), result.is_clean, result.findings) == (expected, True, ())
    assert [(row.key, row.counts.discarded, row.counts.undelayed) for row in result.by_hour] == [
        ("(never due)", 1, 1),
        ("2026-03-01T12:00Z", 1, 0),
    ]
    said = result.to_json()
    assert (said["counts"]["discarded"], said["counts"]["undelayed"]) == (2, 1)
    page = render_html(result)
    assert "of the discarded, never delayed" in page
    assert ">(never due)<" in page


def test_several_stores_of_a_database_do_not_count_it_twice(
    spark: SparkSession, postgres_url: str, now: datetime
) -> None:
    schema = fresh_schema()
    specs = [StoreSpec(postgres_url, schema=schema, table=f"{name}.timeouts") for name in ("one", "two")]

    async def live() -> None:
        stores = [PostgresStore(postgres_url, schema=schema, table=spec.table) for spec in specs]
        transport = PostgresTransport(postgres_url, schema=schema)
        try:
            for store in stores:
                await store.setup()
            await _live(stores[0], transport, now)
        finally:
            await transport.close()
            for store in stores:
                await store.close()

    try:
        anyio.run(live)
        result = audit(spark, specs, now + 4 * MINUTE, late_after=2 * MINUTE)
    finally:
        drop_schema(postgres_url, schema)
    expected = {"scheduled": 3, "delivered": 3, "handled": 2, "expired": 1, "discarded": 2, "undelayed": 1}
    assert (_counts(result), result.is_clean) == (expected, True)
    by_endpoint = {row.key: (row.counts.discarded, row.counts.undelayed) for row in result.by_endpoint}
    assert by_endpoint == {"(never delayed)": (1, 1), "one": (1, 0)}


@pytest.mark.soak(
    "as good as the first test here, and as one told on frames",
    part="spark",
    proven_by=(
        "tests/integration/pipeline/test_audit_discarded.py::test_what_was_never_delayed_and_discarded_is_counted_apart",
        "tests/integration/pipeline/test_audit_judging.py::test_one_record_of_a_discard_does_not_make_the_others_missing",
    ),
)
@pytest.mark.parametrize("recording", [Recording.OUTCOMES, Recording.ALL])
def test_a_record_of_a_discard_does_not_make_the_others_missing(
    spark: SparkSession, store: StoreSpec, now: datetime, recording: Recording
) -> None:
    """Who records only outcomes keeps no record of what was handled, but of what was discarded."""
    path = Path(store.address.removeprefix("sqlite:///"))

    async def live() -> None:
        outcomes = SqliteStore(path, synchronous="normal", recording=recording)
        transport = LocalTransport(path, synchronous="normal", recording=recording)
        await outcomes.setup()
        try:
            await _live(outcomes, transport, now)
        finally:
            await transport.close()
            await outcomes.close()

    anyio.run(live)
    result = audit(spark, replace(store, recording=recording.value), now + 4 * MINUTE, late_after=2 * MINUTE)
    handled = 2 if recording is Recording.ALL else 0
    assert (result.is_clean, result.counts.handled, result.counts.discarded) == (True, handled, 2)

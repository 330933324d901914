"""What the core counts and measures, once a batch."""

from datetime import timedelta
from pathlib import Path

import pytest

from postdate import DelayedDelivery, Endpoint, LocalTransport, MemoryStore, MemoryTransport, Sqlite, SqliteStore
from postdate.errors import TransportUnavailable
from postdate.runtime.reporting import NO_METRICS
from postdate.testing import FaultyTransport, RecordedMetrics, VirtualClock

SECOND = timedelta(seconds=1)


async def deliver(store, transport, metrics, clock: VirtualClock) -> None:
    """Deliver 10 messages at once, one late, one that fails once, one without a queue, and let one expire."""
    endpoint = Endpoint(
        "sales",
        transport=transport,
        delayed_delivery=DelayedDelivery(store, number_of_retries=3, missing_queue_wait=timedelta(0)),
        send_only=True,
        clock=clock,
        metrics=metrics,
    )
    async with endpoint:
        for number in range(10):
            await endpoint.send(b"", destination="billing", delay=10 * SECOND, message_id=f"m-{number}")
        await endpoint.send(b"", destination="nowhere", delay=20 * SECOND)
        await endpoint.send(b"", destination="billing", delay=30 * SECOND, expires_at=clock.now() + 30 * SECOND)
        await clock.advance(25 * SECOND)
        clock.step(10 * SECOND)
        await clock.advance(60 * SECOND)


async def test_with_queues_elsewhere_everything_is_counted(clock: VirtualClock) -> None:
    metrics, queues = RecordedMetrics(), MemoryTransport()
    await queues.create_queues(["billing"])
    transport = FaultyTransport(queues)
    down = TransportUnavailable("down")
    # 12 sends to the timeouts queue come first; then the batch of ten, which fails once.
    transport.faults.add(lambda call: down if call.method == "send" and call.number == 13 else None)
    await deliver(MemoryStore(), transport, metrics, clock)
    assert metrics.counts == {
        "stored": 12,
        "failed": 11,
        "retried": 10,
        "delivered": 10,
        "moved_to_error": 1,
        "expired": 1,
    }
    assert metrics.batches == [10, 10, 1, 1]
    assert metrics.lateness_seconds == [pytest.approx(1.0, abs=0.01)] * 10
    assert len(metrics.fetch_durations) >= 4
    assert metrics.sent_batches == [10, 10, 1, 1]
    assert metrics.delivered_to == {"billing": 10}
    changes = [state for _, state in metrics.breaker_changes]
    assert changes == ["armed", "disarmed"]


async def test_inside_one_database_what_moves_is_counted(clock: VirtualClock, tmp_path: Path) -> None:
    metrics = RecordedMetrics()
    store = SqliteStore(tmp_path / "one.db", synchronous="normal")
    transport = LocalTransport(tmp_path / "one.db", synchronous="normal")
    await transport.create_queues(["billing"])
    await deliver(store, transport, metrics, clock)
    assert metrics.counts == {"failed": 1, "delivered": 10, "moved_to_error": 1, "expired": 1}
    assert metrics.lateness_seconds == [pytest.approx(0.000001)]
    assert metrics.delivered_to == {"billing": 10}
    await store.close()
    await transport.close()


async def test_what_moves_is_counted_by_its_queue(clock: VirtualClock, tmp_path: Path) -> None:
    metrics, database = RecordedMetrics(), Sqlite(tmp_path / "one.db")
    await database.queues.create_queues(["billing", "shipping"])
    async with Endpoint("sales", database, clock=clock, metrics=metrics) as endpoint:
        for number in range(7):
            destination = ("billing", "shipping")[number % 2]
            await endpoint.send(b"", destination=destination, delay=SECOND, message_id=f"m-{number}")
        await clock.advance(2 * SECOND)
    assert metrics.delivered_to == {"billing": 4, "shipping": 3}
    assert len(metrics.lateness_seconds) == 1
    await database.close()


async def test_by_default_nothing_is_measured(clock: VirtualClock) -> None:
    queues = MemoryTransport()
    await queues.create_queues(["billing"])
    await deliver(MemoryStore(), queues, NO_METRICS, clock)
    assert len(queues.queues["billing"].messages) == 10

"""When a service removes records of what is over, and what it does when it cannot (ADR 32)."""

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from tests.waiting import until
from typing_extensions import override

from postdate import DelayedDelivery, Endpoint, MemoryStore, MemoryTransport, SqliteStore
from postdate.errors import ConfigurationError, StoreUnavailable
from postdate.messages import DelayedMessage
from postdate.ports import Outcome, RecordKind, ScanPart
from postdate.testing import VirtualClock

A_DAY = timedelta(days=1)


class Store(SqliteStore):
    """Refuses to remove anything while it has an ``error``; counts its rounds."""

    error: Exception | None = None
    rounds = 0

    @override
    def prune_before(self, part: ScanPart, before: datetime, now: datetime) -> int:
        self.rounds += 1
        if self.error is not None:
            raise self.error
        return super().prune_before(part, before, now)


@asynccontextmanager
async def service(path: Path, clock: VirtualClock, retention: timedelta) -> AsyncGenerator[Store]:
    """A running endpoint whose store has the records of a message that was delivered now, and one that waits."""
    store = Store(path / "messages.db", synchronous="normal")
    delivery = DelayedDelivery(store, retention=retention)
    endpoint = Endpoint(
        "shop", transport=MemoryTransport(), delayed_delivery=delivery, error_queue="error", clock=clock
    )
    async with endpoint:
        now = clock.now()
        await store.store_many([DelayedMessage("over", now, "q"), DelayedMessage("waits", now + 99 * A_DAY, "q")], now)
        claims = [claim for claim in await store.claim_due(now + A_DAY, 9) if claim.message.message_id == "over"]
        await store.finish(claims, Outcome.DELIVERED, now)
        await store.store(DelayedMessage("newest", now + 99 * A_DAY, "q"), now)
        yield store
    await store.close()


async def is_gone(store: Store) -> bool:
    return not await store.history("over")


async def until_later(clock: VirtualClock, condition: Callable[[], Awaitable[bool]]) -> None:
    """Let time pass, some hours after the others, until something is so."""

    async def later() -> bool:
        await clock.advance(A_DAY / 4)
        return await condition()

    await until(later)


async def test_once_a_day_what_is_over_for_long_goes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "postdate.retention")
    assert DelayedDelivery(MemoryStore()).retention == 30 * A_DAY
    clock = VirtualClock()
    async with service(tmp_path, clock, A_DAY) as store:
        began = clock.now()
        while clock.now() < began + A_DAY / 2:
            await clock.advance(A_DAY / 8)
            assert not await is_gone(store)
        await until_later(clock, lambda: is_gone(store))
        assert began + A_DAY < clock.now()
        assert await store.get("waits") is not None
        assert (await store.record_counts())[RecordKind.DELIVERED] == 1
        await until(lambda: "removed 2 records from before" in caplog.text)


async def test_a_failure_is_told_and_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = VirtualClock()
    async with service(tmp_path, clock, A_DAY) as store:
        store.error = StoreUnavailable("not now")

        async def is_told() -> bool:
            return f"old records are not removed; it is tried again in 1 s: {store.error}" in caplog.text

        await until_later(clock, is_told)
        store.error = None
        await until_later(clock, lambda: is_gone(store))


async def test_no_fault_of_a_store_ends_deliveries(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = VirtualClock()
    async with service(tmp_path, clock, A_DAY) as store:
        store.error = ZeroDivisionError("of an adapter")

        async def is_told() -> bool:
            return "ZeroDivisionError: of an adapter" in caplog.text

        await until_later(clock, is_told)
        store.error = None
        await until_later(clock, lambda: is_gone(store))


async def test_zero_keeps_them_for_ever(tmp_path: Path) -> None:
    clock = VirtualClock()
    async with service(tmp_path, clock, timedelta(0)) as store:
        await clock.advance(A_DAY)
        assert store.rounds == 0
    for wrong in (-A_DAY, timedelta(hours=23), timedelta.max):
        with pytest.raises(ConfigurationError, match="retention"):
            DelayedDelivery(store, retention=wrong)

"""An endpoint for sagas, in memory and in one file, on a virtual clock."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.saga_world import LOG, World

from postdate import (
    LocalTransport,
    MemorySagaStore,
    MemoryStore,
    MemoryTransport,
    Outbox,
    SqliteOutbox,
    SqliteSagaStore,
    SqliteStore,
)
from postdate.testing import VirtualClock


@pytest.fixture(autouse=True)
def empty_log() -> None:
    LOG.clear()


@pytest.fixture(params=["memory", "file", "file-receive_only", "file-outbox"])
async def world(request: pytest.FixtureRequest, clock: VirtualClock, tmp_path: Path) -> AsyncIterator[World]:
    outbox: SqliteOutbox | None = None
    if request.param == "memory":
        world = World(clock, MemoryTransport(), MemoryStore(), MemorySagaStore())
    else:
        file = tmp_path / "all.db"
        world = World(
            clock,
            LocalTransport(file, synchronous="normal"),
            SqliteStore(file, synchronous="normal"),
            SqliteSagaStore(file, synchronous="normal"),
        )
        mode = request.param.partition("-")[2]
        if mode == "outbox":
            plain, outbox = world.endpoint, SqliteOutbox(file, synchronous="normal")
            once = {"transaction_mode": "receive_only", "outbox": Outbox(outbox)}
            world.endpoint = lambda *sagas, **settings: plain(*sagas, **{**once, **settings})
        elif mode:
            plain = world.endpoint
            world.endpoint = lambda *sagas, **settings: plain(*sagas, **{"transaction_mode": mode, **settings})
    await world.transport.create_queues(["mails"])
    yield world
    await world.transport.close()
    await world.store.close()
    await world.sagas.close()
    if outbox is not None:
        await outbox.close()


@pytest.fixture
def memory(clock: VirtualClock) -> World:
    return World(clock, MemoryTransport(), MemoryStore(), MemorySagaStore())

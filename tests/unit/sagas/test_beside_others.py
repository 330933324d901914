"""Sagas beside an outbox and beside a timeout manager: what is one transaction, and what is cleared."""

from pathlib import Path

import pytest
from tests.saga_world import LOG, ONCE, SECOND, Change, OrderSaga, Place, World

from postdate import (
    Endpoint,
    LocalTransport,
    MemorySagaStore,
    MemoryStore,
    MemoryTimeouts,
    MemoryTransport,
    Outbox,
    SqliteOutbox,
    SqliteSagaStore,
    SqliteStore,
    TimeoutManager,
)
from postdate.errors import ConfigurationError
from postdate.testing import VirtualClock


async def test_with_an_outbox_state_and_messages_are_one_commit_and_a_duplicate_changes_nothing(
    clock: VirtualClock, tmp_path: Path
) -> None:
    """The queues are elsewhere: without the outbox, state would be kept before its messages leave."""
    sagas, outbox = SqliteSagaStore(tmp_path / "data.db"), SqliteOutbox(tmp_path / "data.db")
    queues, store = LocalTransport(tmp_path / "queues.db"), SqliteStore(tmp_path / "queues.db")
    world = World(clock, queues, store, sagas)
    await queues.create_queues(["mails"])
    settings = {"outbox": Outbox(outbox), "transaction_mode": "receive_only"}
    async with world.endpoint(**settings) as endpoint:
        await endpoint.send(Place("o-1", ["mail first"]), message_id="m-1")
        await clock.run_until_idle()
        await endpoint.send(Place("o-1", ["mail first"]), message_id="m-1")
        await clock.run_until_idle()
        await world.send(endpoint, Change("o-1", ["mail second", "rename"]))  # fails when its state is looked at
    assert await world.seen() == ["Place"]
    assert (await world.length("mails"), await world.length("error")) == (1, 1)
    assert [what for _, what, _ in LOG] == ["Place", "Change"]
    for each in (sagas, outbox, queues, store):
        await each.close()


async def test_row_108_a_timeout_manager_is_told_to_forget_the_timeouts_of_a_completed_saga(
    clock: VirtualClock,
) -> None:
    transport, timeouts, sagas = MemoryTransport(), MemoryTimeouts(), MemorySagaStore()
    endpoint = Endpoint(
        "orders",
        transport=transport,
        timeout_manager=TimeoutManager(timeouts),
        sagas=sagas,
        recoverability=ONCE,
        clock=clock,
    )
    endpoint.saga(OrderSaga)
    world = World(clock, transport, None, sagas)
    async with endpoint:
        await world.send(endpoint, Place("o-1", ["due 10", "reminder 20"]), Place("o-2", ["due 30"]))
        await clock.advance(11 * SECOND)
        assert await world.seen() == ["Place", "Due 10"]
        assert len((await timeouts.next_chunk(world.start, clock.now() + 60 * SECOND, 10)).due) == 2
        await world.send(endpoint, Change("o-1", ["complete"]))
        await clock.run_until_idle()
        left = (await timeouts.next_chunk(world.start, clock.now() + 60 * SECOND, 10)).due
        assert [each.due - world.start for each in left] == [30 * SECOND]
        await clock.advance(30 * SECOND)
        assert await world.seen() is None
        assert await world.seen("o-2") == ["Place", "Due 30"]
        assert await world.length("error") == 0
    await timeouts.close()


async def test_sagas_in_another_database_than_the_outbox_are_refused(clock: VirtualClock, tmp_path: Path) -> None:
    """A duplicate would change their state again, although the outbox knows it."""
    outbox, sagas = SqliteOutbox(tmp_path / "data.db"), SqliteSagaStore(tmp_path / "sagas.db")
    world = World(clock, MemoryTransport(), MemoryStore(), sagas)
    with pytest.raises(ConfigurationError, match="SqliteSagaStore cannot write in the transactions of SqliteOutbox"):
        world.endpoint(outbox=Outbox(outbox), transaction_mode="receive_only")
    await sagas.close()
    await outbox.close()

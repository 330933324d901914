"""Stores of sagas that are out of reach, foreign, or beside queues that cannot do all in one transaction."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.saga_world import LOG, ONCE, SECOND, Change, Mail, Place, State, World

from postdate import (
    Endpoint,
    HandlerContext,
    LocalTransport,
    MemorySagaStore,
    MemoryStore,
    MemoryTransport,
    Outbox,
    Recoverability,
    Saga,
    SqliteOutbox,
    SqliteSagaStore,
    started_by,
)
from postdate.errors import StoreError, StoreTroubled, StoreUnreachable
from postdate.ports import Correlation, SagaChange, SagaChangeKind
from postdate.ports.transports import ExpiryRules
from postdate.testing import VirtualClock


@pytest.mark.parametrize(
    ("method", "outbox"), [("find", False), ("load", False), ("apply", False), ("find", True), ("load", True)]
)
async def test_an_outage_of_the_store_of_sagas_is_not_the_fault_of_the_message(
    clock: VirtualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, outbox: bool
) -> None:
    """It is out of reach for one call. Beside an outbox, changes are part of the commit of that."""
    sagas = SqliteSagaStore(tmp_path / "data.db") if outbox else MemorySagaStore()
    kept, met = SqliteOutbox(tmp_path / "data.db"), list[str]()
    call = getattr(sagas, method)

    async def away(*arguments: Any) -> Any:
        if met:
            return await call(*arguments)
        met.append(method)
        raise StoreUnreachable("the server is away")

    monkeypatch.setattr(sagas, method, away)
    world = World(clock, MemoryTransport(), MemoryStore(), sagas)
    settings = {"outbox": Outbox(kept), "transaction_mode": "receive_only"} if outbox else {}
    async with world.endpoint(**settings) as endpoint:
        await world.send(endpoint, Place("o-1", ["due 10"]))
        await clock.advance(30 * SECOND)
        assert met == [method]
        assert await world.length("error") == 0
        assert await world.seen() == ["Place", "Due 10"]
    await kept.close()
    await sagas.close()


@pytest.mark.parametrize(("kind", "failed"), [(StoreTroubled, 1), (StoreUnreachable, 0)])
@pytest.mark.parametrize("method", ["find", "apply"])
async def test_a_message_that_meets_trouble_alone_again_and_again_fails_as_others_change_their_sagas(
    memory: World, monkeypatch: pytest.MonkeyPatch, method: str, kind: type[StoreError], failed: int
) -> None:
    """A damaged row was an outage of the store of sagas without an end."""
    call = getattr(memory.sagas, method)

    async def damaged(*arguments: Any) -> Any:
        if "o-bad" in repr(arguments):
            raise kind("page 7 is damaged")
        return await call(*arguments)

    monkeypatch.setattr(memory.sagas, method, damaged)
    once = Recoverability(immediate_retries=0, delayed_retries=0)
    async with memory.endpoint(recoverability=once) as endpoint:
        await memory.send(endpoint, Place("o-bad"))
        await memory.clock.advance(60 * SECOND)
        assert await memory.length("error") == 0  # nobody else came: the store may be in trouble with all
        for number in range(15):
            await memory.send(endpoint, Place(f"o-{number}"))
            await memory.clock.advance(SECOND)
        assert await memory.length("error") == failed


@pytest.mark.parametrize(
    ("method", "fate"),
    [("find", None), ("load", None), ("apply", SagaChangeKind.CREATED), ("apply", SagaChangeKind.UPDATED)],
)
async def test_trouble_with_all_of_one_kind_is_an_outage_whatever_becomes_of_other_kinds(
    memory: World, monkeypatch: pytest.MonkeyPatch, method: str, fate: SagaChangeKind | None
) -> None:
    """A page may be damaged on which new rows go, or an index; nobody is to blame for that."""
    call = getattr(memory.sagas, method)

    async def damaged(*arguments: Any) -> Any:
        if fate is None or any(each.kind is fate for each in arguments[0]):
            raise StoreTroubled("page 7 is damaged")
        return await call(*arguments)

    async with memory.endpoint(concurrency=100) as endpoint:
        await memory.send(endpoint, Place("o-1", [f"due {second}" for second in range(1, 21)]))
        with monkeypatch.context() as patch:
            patch.setattr(memory.sagas, method, damaged)
            for number in range(2, 22):
                await memory.send(endpoint, Place(f"o-{number}"), Change("o-1"))
                await memory.clock.advance(SECOND)
        assert await memory.length("error") == 0
        await memory.clock.advance(10 * SECOND)
        assert len(await memory.seen() or []) == 41
        assert await memory.seen("o-21") == ["Place"]


async def test_what_a_foreign_store_raises_after_the_end_of_a_message_changes_nothing(
    memory: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def cancel(*_: object) -> bool:
        raise OSError("of a store of one's own")

    monkeypatch.setattr(memory.store, "cancel", cancel)
    await memory.transport.create_queues(["mails"])
    async with memory.endpoint() as endpoint:
        await memory.send(endpoint, Place("o-1", ["due 10"]), Change("o-1", ["mail bye", "complete"]))
        assert await memory.record() is None  # what comes after the cancellation was done, too
        await memory.clock.advance(5 * SECOND)
        assert (await memory.length("mails"), await memory.length("error")) == (1, 0)
    assert [what for _, what, _ in LOG] == ["Place", "Change"]


async def test_what_must_leave_outside_of_transactions_leaves_once_although_its_saga_met_a_conflict(
    clock: VirtualClock, tmp_path: Path
) -> None:
    """State in the transaction of such queues would be kept after its messages had left."""
    file, others = tmp_path / "all.db", 2
    queues = LocalTransport(file, synchronous="normal", expiry=ExpiryRules(one_per_transaction=True))
    sagas = SqliteSagaStore(file, synchronous="normal")
    endpoint = Endpoint(
        "orders", transport=queues, sagas=sagas, transaction_mode="receive_only", recoverability=ONCE, clock=clock
    )

    class Expiring(Saga[State], correlated_by="order_id", name="Expiring"):
        @started_by(Place)
        async def take(self, message: Place, context: HandlerContext) -> None:
            nonlocal others
            self.state.seen.append(message.order_id)
            await context.send(Mail("hello"), destination="mails", time_to_be_received=timedelta(hours=1))
            record = await sagas.find("Expiring", Correlation("order_id", "o-1"))
            if record is not None and others:
                others -= 1
                await sagas.apply([SagaChange(SagaChangeKind.UPDATED, record)])  # somebody else is quicker

    endpoint.saga(Expiring)
    await queues.create_queues(["mails"])
    async with endpoint:
        for _ in range(2):
            await endpoint.send(Place("o-1"))
            await clock.run_until_idle()
        lengths = await queues.queue_lengths()
    assert (others, lengths["mails"], lengths["error"]) == (0, 2, 0)
    await queues.close()
    await sagas.close()

"""Sagas that others change meanwhile, and what a killed process leaves (ADR 0016)."""

import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.saga_world import LOG, SECOND, Change, OrderSaga, OtherSaga, Place, World

from postdate import (
    HandlerContext,
    Headers,
    LocalTransport,
    SqliteSagaStore,
    SqliteStore,
    TransactionMode,
    started_by,
)
from postdate.errors import SagaConflict, TransportUnavailable
from postdate.messages import to_envelope
from postdate.ports import Correlation, SagaChange, SagaChangeKind, SagaRecord
from postdate.testing import VirtualClock


async def test_a_message_that_met_a_conflict_is_handled_again_at_once_and_sends_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    find, conflicts = world.sagas.find, 3

    async def find_too_early(saga_type: str, correlation: Correlation) -> SagaRecord | None:
        nonlocal conflicts
        record = await find(saga_type, correlation)
        if record is not None and conflicts:
            conflicts -= 1
            await world.sagas.apply([SagaChange(SagaChangeKind.UPDATED, record)])  # somebody else is quicker
        return record

    async with world.endpoint() as endpoint:
        await world.send(endpoint, Place("o-1"))
        monkeypatch.setattr(world.sagas, "find", find_too_early)
        await world.send(endpoint, Change("o-1", ["mail once"]))
        assert await world.length("mails") == 1
        assert await world.length("error") == 0
    assert await world.seen() == ["Place", "Change"]
    assert [what for _, what, _ in LOG] == ["Place", "Change", "Change", "Change", "Change"]


async def test_a_store_that_says_conflict_for_ever_does_not_hold_up_its_endpoint(
    memory: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def apply(changes: object) -> None:
        raise SagaConflict("for ever")

    monkeypatch.setattr(memory.sagas, "apply", apply)
    async with memory.endpoint() as endpoint:
        await memory.send(endpoint, Place("o-1"))
        assert await memory.length("error") == 1


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("order", ["mail sent", "complete"])
async def test_a_message_whose_saga_was_kept_and_whose_messages_were_not_sent_is_handled_again(
    memory: World, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    """In the modes that promise at least once: also when it is a timeout, and also when it completed its saga."""
    await memory.transport.create_queues(["mails"])
    async with memory.endpoint() as endpoint:
        await memory.send(endpoint, Place("o-1"))
    for message in (Change("o-1", ["due 1", "mail sent"]), None):
        await _killed_before_it_sends(memory, monkeypatch, message)
        async with memory.endpoint():
            await memory.clock.run_until_idle()
    assert await memory.length("mails") == 1
    assert await memory.seen() == ["Place", "Change", "Change", "Due 1", "Due 1"]
    await _killed_before_it_sends(memory, monkeypatch, Change("o-1", ["mail sent", order]))
    async with memory.endpoint():
        await memory.clock.run_until_idle()
    assert await memory.length("mails") == (3 if order == "mail sent" else 2)
    assert (await memory.record() is None) == (order == "complete")


async def _killed_before_it_sends(memory: World, monkeypatch: pytest.MonkeyPatch, message: object) -> None:
    """Let an endpoint take a message, or what is due next, and die between keeping its saga and sending."""
    endpoint, apply = memory.endpoint(), memory.sagas.apply
    if message is not None:
        await endpoint.send(message)

    async def apply_and_die(changes: Any) -> None:
        await apply(changes)
        raise Killed

    async def run() -> None:
        async with endpoint:
            await memory.clock.advance(2 * SECOND)

    with monkeypatch.context() as patch:
        patch.setattr(memory.sagas, "apply", apply_and_die)
        with pytest.raises(BaseExceptionGroup):
            await run()


@pytest.mark.parametrize("sent", [False, True], ids=["before it was sent", "after it was sent"])
async def test_a_handler_that_sees_that_it_ran_before_need_not_request_its_timeout_again(
    memory: World, monkeypatch: pytest.MonkeyPatch, sent: bool
) -> None:
    class Once(OrderSaga, correlated_by="order_id", name="OrderSaga"):
        @started_by(Place)
        async def take(self, message: Place | Change, context: HandlerContext) -> None:
            if not self.state.timeout:
                await super().take(message, context)

    memory_endpoint = memory.endpoint
    monkeypatch.setattr(memory, "endpoint", lambda: memory_endpoint(Once))
    await memory.transport.create_queues(["orders"])
    if sent:
        async with memory.endpoint() as endpoint:
            await memory.send(endpoint, Place("o-1", ["due 10"]))
            await endpoint.send(Place("o-1"), headers={Headers.MESSAGE_ID: await _first_message_id(memory)})
            await memory.clock.run_until_idle()
    else:
        await _killed_before_it_sends(memory, monkeypatch, Place("o-1", ["due 10"]))
    assert await memory.waiting() == int(sent)
    async with memory.endpoint():
        await memory.clock.advance(15 * SECOND)
        assert await memory.seen() == ["Place", "Due 10"]
    assert await memory.length("error") == 0


async def _first_message_id(world: World) -> str:
    (timeout,) = await world.pending()
    return timeout.headers[Headers.RELATED_TO]


async def test_a_completed_instance_that_was_not_removed_counts_as_completed_and_gives_way(
    memory: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply = memory.sagas.apply

    async def apply_without_removing(changes: Any) -> None:
        if any(change.kind is SagaChangeKind.COMPLETED for change in changes):
            raise SagaConflict("not now")
        await apply(changes)

    async with memory.endpoint() as endpoint:
        await memory.send(endpoint, Place("o-1", ["due 10"]))
        with monkeypatch.context() as patch:
            patch.setattr(memory.sagas, "apply", apply_without_removing)
            await memory.send(endpoint, Change("o-1", ["complete"]))
        assert (left := await memory.record()) is not None
        LOG.clear()
        await memory.send(endpoint, Change("o-1"))
        assert LOG == [("not found", "Change", "")]
        await memory.send(endpoint, Place("o-1"))
        assert (new := await memory.record()) is not None
        assert new.saga_id != left.saga_id
        assert await memory.seen() == ["Place"]


@pytest.mark.parametrize("ends_by", ["a timeout", "a message"])
async def test_what_completed_an_instance_and_was_not_sent_goes_on_with_it_though_others_took_its_place(
    memory: World, monkeypatch: pytest.MonkeyPatch, ends_by: str
) -> None:
    class Ending(OrderSaga, correlated_by="order_id", name="OrderSaga"):
        async def do(self, orders: list[str], what: str, context: HandlerContext) -> None:
            await super().do(["mail bye", "complete"] if what.startswith("Due") else orders, what, context)

    send = memory.transport.send

    async def refuse_mails(envelopes: Any, now: Any, *, work: Any = ()) -> Any:
        if any(each.destination == "mails" for each in envelopes):
            return [TransportUnavailable("no mails now")] * len(envelopes)
        return await send(envelopes, now, work=work)

    await memory.transport.create_queues(["mails"])
    async with memory.endpoint(Ending, transaction_mode="receive_only") as endpoint:
        await memory.send(endpoint, Place("o-1", ["due 10"] if ends_by == "a timeout" else []))
        with monkeypatch.context() as patch:
            patch.setattr(memory.transport, "send", refuse_mails)
            if ends_by == "a message":
                await memory.send(endpoint, Change("o-1", ["mail bye", "complete"]))
            await memory.clock.advance(11 * SECOND)
            assert (first := await memory.record()) is not None
            await memory.send(endpoint, Place("o-1", ["complete"]))  # never kept
            await memory.send(endpoint, Place("o-1"))
            await memory.send(endpoint, Change("o-1", ["complete"]))
            await memory.send(endpoint, Place("o-1"))
            assert await memory.sagas.load("OrderSaga", first.saga_id) is not None
        await memory.clock.advance(30 * SECOND)
        assert (await memory.length("mails"), await memory.length("error")) == (1, 0)
        assert await memory.seen() == ["Place"]
        assert await memory.sagas.load("OrderSaga", first.saga_id) is None


async def test_an_instance_that_is_replaced_while_its_last_messages_leave_is_removed_all_the_same(
    memory: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = memory.transport.send

    async def begin_another_first(envelopes: Any, now: Any, *, work: Any = ()) -> Any:
        if any(each.destination == "mails" for each in envelopes):
            completed = await memory.record()
            assert completed is not None
            another = replace(completed, saga_id=str(uuid.uuid4()), version=0, details="{}")
            changes = [SagaChange(SagaChangeKind.SET_ASIDE, completed), SagaChange(SagaChangeKind.CREATED, another)]
            await memory.sagas.apply(changes)
        return await send(envelopes, now, work=work)

    await memory.transport.create_queues(["mails"])
    async with memory.endpoint(transaction_mode="receive_only") as endpoint:
        await memory.send(endpoint, Place("o-1"))
        monkeypatch.setattr(memory.transport, "send", begin_another_first)
        await memory.send(endpoint, Change("o-1", ["mail bye", "complete"]))
    (record,) = await memory.sagas.read_page(("", ""), 10)
    assert (record.correlation, record.details) == (Correlation("order_id", "o-1"), "{}")


async def test_of_two_completed_instances_one_is_removed_although_the_other_meets_a_conflict(
    memory: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply = memory.sagas.apply

    async def apply_without_removing_one(changes: Any) -> None:
        if any(each.kind is SagaChangeKind.COMPLETED and each.record.saga_type == "OrderSaga" for each in changes):
            raise SagaConflict("not now")
        await apply(changes)

    async with memory.endpoint(OrderSaga, OtherSaga) as endpoint:
        await memory.send(endpoint, Place("o-1"))
        monkeypatch.setattr(memory.sagas, "apply", apply_without_removing_one)
        await memory.send(endpoint, Change("o-1", ["complete"]))
    assert [each.saga_type for each in await memory.sagas.read_page(("", ""), 10)] == ["OrderSaga"]


async def test_a_timeout_that_is_delivered_twice_is_handled_once_where_all_is_one_transaction(
    clock: VirtualClock, tmp_path: Path
) -> None:
    file = tmp_path / "all.db"
    transport, store, sagas = LocalTransport(file), SqliteStore(file), SqliteSagaStore(file)
    world = World(clock, transport, store, sagas)
    async with world.endpoint() as endpoint:
        assert endpoint.mode is TransactionMode.TRANSACTION_SCOPE
        await world.send(endpoint, Place("o-1", ["due 10"]))
        (message,) = await world.pending()
        await world.clock.advance(11 * SECOND)
        await transport.send([to_envelope(message)], clock.now())
        await clock.run_until_idle()
        await clock.run_until_idle()
        assert await world.seen() == ["Place", "Due 10"]
    for each in (transport, store, sagas):
        await each.close()

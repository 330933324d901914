"""The four transaction modes from end to end: what each promises is kept, or refused at the start (rows 49 to 52)."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.conformance.matrix import promise

from postdate import (
    DelayedDelivery,
    Endpoint,
    HandlerContext,
    LocalTransport,
    MemoryStore,
    MemoryTransport,
    Recoverability,
    SqliteStore,
    TransactionMode,
)
from postdate.core.receive.settling import Settler
from postdate.errors import ConfigurationError, SagaConflict, StoreUnavailable, TransportUnavailable
from postdate.ports import RecordKind
from postdate.testing import Fault, FaultyMovingStore, FaultyStore, FaultyTransport, VirtualClock

SECOND = timedelta(seconds=1)
NONE, RECEIVE_ONLY, ATOMIC, SCOPE = TransactionMode
LOWER = [NONE, RECEIVE_ONLY, ATOMIC]
COMBINATIONS = ["memory", "file", "two files", "file and memory"]
ONE_TRY = Recoverability(immediate_retries=0, delayed_retries=0)


@pytest.mark.parametrize("mode", LOWER)
def test_a_mode_may_be_given_by_its_name(mode: TransactionMode) -> None:
    assert Endpoint("sales", transport=MemoryTransport(), transaction_mode=mode.value).mode is mode


def test_a_name_of_no_mode_is_refused_with_those_there_are() -> None:
    unknown: Any = "exactly_once"
    with pytest.raises(ConfigurationError, match=r"one of none, receive_only, .*, not 'exactly_once'"):
        Endpoint("sales", transport=MemoryTransport(), transaction_mode=unknown)


class World:
    """A store and queues, each able to fail, and endpoints on them."""

    def __init__(self, clock: VirtualClock, combination: str, folder: Path) -> None:
        self.clock, self.start = clock, clock.now()
        queue_file = "queues.db" if combination == "two files" else "all.db"
        in_memory = combination in {"memory", "file and memory"}
        self.bare_store: Any = (
            MemoryStore() if combination == "memory" else SqliteStore(folder / "all.db", synchronous="normal")
        )
        self.queues = MemoryTransport() if in_memory else LocalTransport(folder / queue_file, synchronous="normal")
        self.one_database = combination == "file"
        wrap: Callable = FaultyMovingStore if self.one_database else FaultyStore
        self.store, self.transport = wrap(self.bare_store), FaultyTransport(self.queues)
        self.modes = TransactionMode if self.one_database else LOWER

    def endpoint(self, mode: TransactionMode, name: str = "sales", **settings) -> Endpoint:
        settings.setdefault("recoverability", ONE_TRY)
        return Endpoint(
            name,
            transport=self.transport,
            delayed_delivery=DelayedDelivery(self.store, number_of_retries=1_000),
            transaction_mode=mode,
            clock=self.clock,
            **settings,
        )

    async def length(self, queue: str) -> int:
        return (await self.queues.queue_lengths())[queue]

    async def pending(self) -> int:
        return (await self.bare_store.statistics(self.start)).pending

    async def close(self) -> None:
        await self.bare_store.close()
        await self.queues.close()


@pytest.fixture(params=COMBINATIONS)
async def world(request: pytest.FixtureRequest, clock: VirtualClock, tmp_path: Path):
    world = World(clock, request.param, tmp_path)
    await world.queues.create_queues(["billing", "audit"])
    yield world
    await world.close()


@pytest.fixture
async def one_file(clock: VirtualClock, tmp_path: Path):
    world = World(clock, "file", tmp_path)
    await world.queues.create_queues(["billing", "audit"])
    yield world
    await world.close()


def sends_then(endpoint: Endpoint, fails: bool, **options) -> list[bytes]:
    """Handle bodies: send one message at once and one delayed, then fail or not."""
    handled: list[bytes] = []

    @endpoint.handler(dict, name="Any")
    async def handle(content: dict, context: HandlerContext) -> None:
        handled.append(content["n"])
        await context.send(b"now", destination="audit", **options)
        await context.send(b"later", destination="audit", delay=10 * SECOND, **options)
        if fails:
            raise RuntimeError("after sending")

    endpoint.route(dict, "sales", name="Any")
    return handled


# --- the handler's transaction ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", TransactionMode)
async def test_what_a_handler_delays_is_delivered_when_it_succeeds_row_52(world: World, mode: TransactionMode) -> None:
    if mode not in world.modes:
        return  # refused: test_every_promise_is_kept_or_refused
    endpoint = world.endpoint(mode)
    handled = sends_then(endpoint, fails=False)
    async with endpoint:
        await endpoint.send({"n": 1})
        await world.clock.run_until_idle()
        assert await world.length("audit") == 1
        await world.clock.advance(11 * SECOND)
        assert await world.length("audit") == 2
    assert handled == [1]
    assert await world.length("sales") == await world.length("error") == await world.pending() == 0


@pytest.mark.parametrize("mode", TransactionMode)
async def test_what_a_failing_handler_delayed_is_not_stored_except_without_transactions_row_52(
    world: World, mode: TransactionMode
) -> None:
    if mode not in world.modes:
        return
    endpoint = world.endpoint(mode)
    sends_then(endpoint, fails=True)
    async with endpoint:
        await endpoint.send({"n": 1})
        await world.clock.advance(11 * SECOND)
    assert await world.length("audit") == (2 if mode is NONE else 0)
    assert await world.length("error") == 1
    assert await world.length("sales") == await world.length("sales.timeouts") == await world.pending() == 0


@pytest.mark.parametrize("mode", TransactionMode)
async def test_isolated_sends_leave_although_the_handler_fails_row_52(world: World, mode: TransactionMode) -> None:
    if mode not in world.modes:
        return
    endpoint = world.endpoint(mode)
    sends_then(endpoint, fails=True, isolated=True)
    async with endpoint:
        await endpoint.send({"n": 1})
        await world.clock.run_until_idle()
        assert await world.length("audit") == await world.pending() == 1
        await world.clock.advance(11 * SECOND)
    assert await world.length("audit") == 2
    assert await world.length("error") == 1


@pytest.mark.parametrize("mode", TransactionMode)
async def test_a_commit_that_fails_takes_with_it_what_the_mode_says(world: World, mode: TransactionMode) -> None:
    """Receive only: what was sent stays sent. Atomic and scope: nothing left. None: handled once, whatever happens.

    What is stored in the database of the queues ends with the message in every mode: sent again, it might have left.
    """
    if mode not in world.modes:
        return
    endpoint = world.endpoint(mode)
    handled = sends_then(endpoint, fails=False)
    async with endpoint:
        world.transport.faults.add(Fault("commit", TransportUnavailable("down"), calls=[1]))
        await endpoint.send({"n": 1})
        await world.clock.advance(30 * SECOND)
    assert handled == ([1] if mode is NONE else [1, 1])
    assert await world.length("audit") == (4 if mode is RECEIVE_ONLY and not world.one_database else 2)


async def test_in_mode_none_a_handler_that_raises_a_conflict_has_failed_and_nothing_is_lost(one_file: World) -> None:
    """Its message is off the queue: there is nothing to be taken off when it is handled anew."""
    endpoint, handled = one_file.endpoint(NONE), list[int]()

    @endpoint.handler(dict, name="Any")
    async def handle(content: dict, context: HandlerContext) -> None:
        handled.append(content["n"])
        raise SagaConflict("somebody was faster")

    endpoint.route(dict, "sales", name="Any")
    async with endpoint:
        await endpoint.send({"n": 1})
        await one_file.clock.advance(10 * SECOND)
    assert handled == [1]
    assert await one_file.length("error") == 1
    assert await one_file.length("sales") == 0


async def test_in_mode_none_nothing_waits_for_the_ends_of_others(
    one_file: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Off its queue already, it would be lost with its process."""
    monkeypatch.setattr(Settler, "add", lambda *_: 1 / 0)
    endpoint = one_file.endpoint(NONE)
    handled = sends_then(endpoint, fails=True)
    async with endpoint:
        await endpoint.send({"n": 1})
        await one_file.clock.run_until_idle()
        assert await one_file.length("error") == 1
        await one_file.clock.advance(SECOND)
    assert handled == [1]


# --- delivery ---------------------------------------------------------------------------------------------------------


async def test_in_one_transaction_a_failing_remove_delivers_nothing_row_49(one_file: World) -> None:
    one_file.store.faults.add(Fault("move_due", StoreUnavailable("cannot remove")))
    async with one_file.endpoint(SCOPE, send_only=True) as sales:
        await sales.send(b"", destination="billing", delay=SECOND, message_id="m-1")
        await one_file.clock.advance(10 * SECOND)
        assert await one_file.length("billing") == 0
        assert await one_file.pending() == 1
        one_file.store.faults.clear()
        await one_file.clock.advance(10 * SECOND)
        assert await one_file.length("billing") == 1
    kinds = [record.kind for record in await one_file.bare_store.history("m-1")]
    assert kinds == [RecordKind.SCHEDULED, RecordKind.DELIVERED]


@pytest.mark.parametrize("combination", ["memory", "two files", "file and memory"])
@pytest.mark.parametrize("mode", LOWER)
async def test_across_databases_a_failing_remove_is_made_up_for_and_nothing_is_sent_again_row_50(
    clock: VirtualClock, tmp_path: Path, mode: TransactionMode, combination: str
) -> None:
    """At least once is what is promised; but a process that goes on knows what it has sent (ADR 52)."""
    world = World(clock, combination, tmp_path)
    await world.queues.create_queues(["billing"])
    world.store.faults.add(Fault("finish", StoreUnavailable("cannot remove"), calls=[1]))
    async with world.endpoint(mode, send_only=True) as sales:
        await sales.send(b"", destination="billing", delay=SECOND, message_id="m-1")
        await clock.advance(1.5 * SECOND)
        assert await world.length("billing") == 1
        assert await world.pending() == 1
        await clock.advance(10 * SECOND)
        assert await world.length("billing") == 1
        assert await world.pending() == 0
    received = await world.queues.receiver("billing").receive(10)
    assert {each.envelope.message_id for each in received} == {"m-1"}
    await world.close()


@pytest.mark.parametrize("combination", ["memory", "file"])
@pytest.mark.parametrize("mode", TransactionMode)
async def test_a_thousand_delayed_messages_are_handled_in_every_mode_row_51(
    clock: VirtualClock, tmp_path: Path, mode: TransactionMode, combination: str
) -> None:
    world = World(clock, combination, tmp_path)
    if mode not in world.modes:
        return
    endpoint = world.endpoint(mode)
    handled: list[int] = []

    @endpoint.handler(dict, name="Any")
    async def handle(content: dict, context: HandlerContext) -> None:
        handled.append(content["n"])

    endpoint.route(dict, "sales", name="Any")
    async with endpoint:
        async with anyio.create_task_group() as sends:
            for number in range(1_000):
                sends.start_soon(lambda n: endpoint.send({"n": n}, delay=(1 + n % 7) * SECOND), number)
        await world.clock.advance(20 * SECOND)
    assert sorted(handled) == list(range(1_000))
    assert await world.pending() == await world.length("sales") == await world.length("error") == 0
    await world.close()


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", TransactionMode)
async def test_every_promise_is_kept_or_refused(world: World, mode: TransactionMode) -> None:
    """What the matrix of docs/capabilities.md says of a combination is what an endpoint does with it."""
    promised = promise(world.store, world.transport, mode)
    if promised.startswith("refused: "):
        with pytest.raises(ValueError, match="transaction"):
            world.endpoint(mode)
        assert mode is SCOPE
        assert not world.one_database
    else:
        assert world.endpoint(mode).mode is mode


@pytest.mark.parametrize(
    ("combination", "promised"),
    [
        ("memory", "refused: not a mode of the transport"),
        ("file and memory", "refused: not a mode of the transport"),
        ("two files", "refused: two databases"),
        ("file", "exactly once"),
    ],
)
async def test_exactly_once_is_promised_in_one_database_only_row_49(
    clock: VirtualClock, tmp_path: Path, combination: str, promised: str
) -> None:
    world = World(clock, combination, tmp_path)
    assert promise(world.store, world.transport, SCOPE) == promised
    await world.close()


async def test_a_store_without_the_mode_is_named_as_the_reason(tmp_path: Path) -> None:
    local = LocalTransport(tmp_path / "a.db")
    assert promise(MemoryStore(), local, SCOPE) == "refused: not a mode of the store"
    await local.close()

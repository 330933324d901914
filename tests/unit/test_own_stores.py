"""A store of one's own, six methods and no more, does all that delayed delivery needs (row 26)."""

import re
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import anyio
import pytest
from tests.waiting import until

from postdate import (
    DelayedDelivery,
    Endpoint,
    Envelope,
    Headers,
    MemorySagaStore,
    MemoryStore,
    MemoryTransport,
    TransactionMode,
)
from postdate.core import simple_store
from postdate.core.health.circuit_breaker import RepeatedFailures
from postdate.core.receive.intake import Intake
from postdate.core.recoverability import DispatchSettings, Host
from postdate.core.simple_store import SimpleStore
from postdate.errors import ConfigurationError, StoreUnavailable, TransportUnavailable, UnsupportedTransactionMode
from postdate.messages import DelayedMessage, delay_headers
from postdate.ports import ClaimingStore, Outcome, Received, SagaStore, Transport, capabilities_of
from postdate.testing import Check, Fault, FaultyTransport, StoreSubject, VirtualClock, contract_checks, store_checks

SECOND = timedelta(seconds=1)
NOW = datetime(2026, 4, 1, 12, tzinfo=UTC)
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "own-store.md"
DOWN = TransportUnavailable("down")


def stores_of_the_guide() -> dict[str, Callable[[], Any]]:
    """Return the classes of the guide, as they stand there."""
    snippets = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    for snippet, end in zip(snippets[:2], ("@dataclass\n", "# The conformance checks"), strict=True):
        exec(snippet[: snippet.index(end)], names)
    return {"DictStore": names["DictStore"], "TableStore": lambda: names["TableStore"](":memory:")}


STORES = stores_of_the_guide()


class OwnSubject(StoreSubject):
    """Opens a store of the guide."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def open(self, **settings) -> Any:
        return self._make()


class InBatches(OwnSubject):
    """Opens what the core makes of it."""

    def open(self, **settings) -> Any:
        store = SimpleStore(self._make())
        store.close = getattr(store._store, "close", anyio.lowlevel.checkpoint)
        return store


@pytest.fixture(params=STORES)
def make(request: pytest.FixtureRequest) -> Callable[[], Any]:
    return STORES[request.param]


@pytest.mark.parametrize("check", contract_checks(), ids=str)
async def test_it_keeps_the_contract(check: Check[StoreSubject], make: Callable) -> None:
    await check(OwnSubject(make))


# While something is held the six methods do not tell what comes next. Of storing, all that is no record and no limit.
_BEYOND = {"claims.next_attempt_is_the_earliest"}
_STORING = {
    "a_message_is_unchanged",
    "unicode_survives",
    "an_empty_body_and_no_headers_survive",
    "a_duplicate_is_refused",
}
_IN_BATCHES = [
    check
    for check in store_checks()
    if (check.topic == "claims" and str(check) not in _BEYOND) or (check.topic == "storing" and check.name in _STORING)
]


@pytest.mark.parametrize("check", _IN_BATCHES, ids=str)
async def test_it_works_in_batches(check: Check[StoreSubject], make: Callable) -> None:
    await check(InBatches(make))


async def test_what_is_stored_while_the_next_due_time_is_asked_for_is_not_slept_over() -> None:
    """Sixty seconds late: a store that has looked, and whose answer is under way, has not seen it."""

    class AnswersLate(STORES["DictStore"]):  # type: ignore[misc]
        async def next_due(self) -> datetime | None:
            due = await super().next_due()
            for _ in range(20):
                await anyio.lowlevel.checkpoint()
            return due

    (check,) = [each for each in store_checks() if each.name == "what_is_stored_during_a_look_is_not_slept_over"]
    await check(InBatches(AnswersLate))


async def test_what_is_stored_during_a_look_is_in_its_answer_and_asks_for_no_other_look() -> None:
    class StoresMeanwhile(STORES["DictStore"]):  # type: ignore[misc]
        async def next_due(self) -> datetime | None:
            due = await super().next_due()
            for days in (7, 3):
                await store.store(DelayedMessage(f"in {days} days", NOW + timedelta(days=days), "q"), NOW)
            return due

    store, woken = SimpleStore(StoresMeanwhile()), list[bool]()
    await store.initialize("e", TransactionMode.RECEIVE_ONLY)
    stop = await store.listen(lambda: woken.append(True))
    assert await store.next_attempt() == NOW + timedelta(days=3)
    assert woken == []
    await store.store(DelayedMessage("tomorrow", NOW + timedelta(days=1), "q"), NOW)
    assert woken == [True]
    stop()


# --- end to end -------------------------------------------------------------------------------------------------------


class World:
    """An endpoint that delivers from a store of one's own."""

    def __init__(self, clock: VirtualClock, store: Any) -> None:
        self.clock, self.store, self.start = clock, store, clock.now()
        self.queues = MemoryTransport()
        self.transport = FaultyTransport(self.queues)
        self.critical: list[str] = []

    def endpoint(self, retries: int = 0, **settings) -> Endpoint:
        settings.setdefault("critical_error", lambda text, _: self.critical.append(text))
        delayed = DelayedDelivery(self.store, number_of_retries=retries, missing_queue_wait=timedelta(0))
        return Endpoint(
            "sales", transport=self.transport, delayed_delivery=delayed, send_only=True, clock=self.clock, **settings
        )

    async def create_queues(self) -> None:
        await self.queues.create_queues(["billing", "shipping"])

    def ids(self, queue: str) -> list[str]:
        return [envelope.message_id for envelope, _ in self.queues.queues[queue].messages]


@pytest.fixture
async def world(make: Callable, clock: VirtualClock):
    world = World(clock, make())
    await world.create_queues()
    yield world
    if hasattr(world.store, "close"):
        await world.store.close()


async def test_what_is_delayed_is_delivered_when_due_row_26(world: World) -> None:
    async with world.endpoint() as sales:
        for seconds in (5, 1, 3):
            await sales.send(b"x", destination="billing", delay=seconds * SECOND, message_id=f"m-{seconds}")
        await world.clock.advance(SECOND)
        assert world.ids("billing") == []
        await world.clock.advance(timedelta(microseconds=1))
        assert world.ids("billing") == ["m-1"]
        await world.clock.advance(10 * SECOND)
        assert world.ids("billing") == ["m-1", "m-3", "m-5"]
    assert await world.store.next_due() is None


async def test_a_thousand_due_at_once_are_delivered_at_once_row_26(world: World) -> None:
    await world.store.initialize("sales", TransactionMode.RECEIVE_ONLY)
    for number in range(1_200):
        await world.store.store(DelayedMessage(f"m-{number}", world.start - SECOND, "billing"), world.start)
    async with world.endpoint():
        await world.clock.run_until_idle()
        assert len(world.ids("billing")) == 1_200


async def test_expired_and_failed_messages_are_removed_row_26(world: World) -> None:
    async with world.endpoint() as sales:
        await sales.send(b"", destination="nowhere", delay=SECOND, message_id="bad")
        await world.clock.advance(2 * SECOND)
        assert world.ids("error") == ["bad"]
        expires_at = world.clock.now() + SECOND
        await sales.send(b"", destination="billing", delay=SECOND, expires_at=expires_at, message_id="late")
        await world.clock.run_until_idle()
        world.clock.step(60 * SECOND)
        await world.clock.advance(60 * SECOND)
        assert world.ids("billing") == []
    assert await world.store.next_due() is None


async def test_failures_are_retried_after_growing_delays_and_do_not_hold_up_others_row_26(world: World) -> None:
    attempts: list[float] = []
    send = world.queues.send

    async def refuse(envelopes, now, *, work=()):
        if envelopes[0].destination == "shipping":
            attempts.append((now - world.start).total_seconds())
            return [DOWN] * len(envelopes)
        return await send(envelopes, now, work=work)

    world.queues.send = refuse
    async with world.endpoint(retries=4) as sales:
        await sales.send(b"", destination="shipping", delay=SECOND, message_id="bad")
        for number in range(20):
            await sales.send(b"", destination="billing", delay=(1.5 + number) * SECOND, message_id=f"m-{number}")
        await world.clock.advance(25 * SECOND)
        assert [round(at) for at in attempts] == [1, 2, 4, 8, 16]
        assert world.ids("error") == ["bad"]
        assert len(world.ids("billing")) == 20
    assert await world.store.next_due() is None


async def test_a_message_removed_meanwhile_is_warned_about_rows_26_53(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    remove = world.store.remove

    async def remove_twice(message_id: str, now: datetime) -> bool:
        await remove(message_id, now)
        return await remove(message_id, now)

    world.store.remove = remove_twice
    async with world.endpoint() as sales:
        await sales.send(b"", destination="billing", delay=SECOND)
        await world.clock.advance(2 * SECOND)
    assert "1 messages may have been delivered more than once" in caplog.text


async def test_while_others_hold_what_is_due_the_store_is_asked_seldom_rows_26_57(world: World) -> None:
    await world.store.initialize("sales", TransactionMode.RECEIVE_ONLY)
    await world.store.store(DelayedMessage("held", world.start - SECOND, "billing"), world.start)
    asked = 0

    async def fetch_nothing(now: datetime) -> None:
        nonlocal asked
        asked += 1

    world.store.fetch_next_due = fetch_nothing
    async with world.endpoint():
        await world.clock.advance(60 * SECOND)
    assert asked <= 310


@pytest.mark.parametrize("method", ["store", "fetch_next_due", "remove", "increment_failure_count", "next_due"])
async def test_whatever_it_raises_is_an_outage_and_nothing_is_lost(
    world: World, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    works, broken = getattr(world.store, method), [True]

    async def break_down(*arguments):
        if broken[0]:
            raise ZeroDivisionError("a bug")
        return await works(*arguments)

    setattr(world.store, method, break_down)
    world.transport.faults.add(Fault("send", DOWN, calls=[2]))
    async with world.endpoint(retries=1_000) as sales:
        await sales.send(b"", destination="billing", delay=SECOND, message_id="m-1")
        await world.clock.advance(40 * SECOND)
        broken[0] = False
        await world.clock.advance(120 * SECOND)
        assert set(world.ids("billing")) == {"m-1"}
    assert await world.store.next_due() is None
    assert f"{type(world.store).__name__} failed with ZeroDivisionError: a bug" in caplog.text
    assert len(world.critical) == (0 if method == "remove" else 1)  # what is removed in vain was sent: sending works


async def test_what_waits_in_memory_for_another_attempt_is_given_back_at_the_end(world: World) -> None:
    world.transport.faults.add(lambda call: DOWN if call.method == "send" and call.number > 1 else None)
    async with world.endpoint(retries=1_000) as sales:
        await sales.send(b"", destination="billing", delay=SECOND, message_id="m-1")
        await world.clock.advance(20 * SECOND)
    world.transport.faults.clear()
    async with world.endpoint():
        await world.clock.run_until_idle()
        assert world.ids("billing") == ["m-1"]


async def test_stopping_does_not_wait_for_a_silent_store_to_take_back_what_waits_in_memory(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.transport.faults.add(lambda call: DOWN if call.method == "send" and call.number > 1 else None)

    async def be_silent(*_: object) -> bool:
        await anyio.sleep_forever()
        return False

    async with anyio.create_task_group() as tasks:

        async def live() -> None:
            async with world.endpoint(retries=1_000) as sales:
                await sales.send(b"", destination="billing", delay=SECOND, message_id="m-1")
                await world.clock.advance(20 * SECOND)
                world.store.increment_failure_count = be_silent

        tasks.start_soon(live)
        await until(lambda: world.store.increment_failure_count is be_silent)
        await world.clock.advance(10 * SECOND)
    assert "failed messages stay with this process until it ends" in caplog.text


async def test_more_failed_messages_than_are_kept_wait_their_turn(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simple_store, "MOST_LOCKED", 10)
    world.transport.faults.add(lambda call: DOWN if call.method == "send" and call.number > 30 else None)
    async with world.endpoint(retries=1_000) as sales:
        for number in range(30):
            await sales.send(b"", destination="billing", delay=SECOND, message_id=f"m-{number}")
        await world.clock.advance(10 * SECOND)
        assert isinstance(sales.delayed_delivery, DelayedDelivery)
        claims = sales.delayed_delivery.claiming_store
        assert isinstance(claims, SimpleStore)
        assert len(claims._locked_until_next_attempt) <= 10
        assert len(claims._attempts) <= 10
        world.transport.faults.clear()
        await world.clock.advance(200 * SECOND)
        assert len(world.ids("billing")) == 30


async def test_a_cancelled_look_loses_nothing(make: Callable) -> None:
    store = make()
    batches = SimpleStore(store)
    now = VirtualClock().now()
    await store.initialize("sales", TransactionMode.NONE)
    for number in range(3):
        await store.store(DelayedMessage(f"m-{number}", now - SECOND, "billing"), now)
    fetch, fetched = store.fetch_next_due, 0

    async def fetch_slowly(at: datetime):
        nonlocal fetched
        fetched += 1
        if fetched == 3:
            await anyio.sleep_forever()
        return await fetch(at)

    store.fetch_next_due = fetch_slowly
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(batches.claim_due, now, 10)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    claims = await batches.claim_due(now, 10)
    assert sorted(claim.message.message_id for claim in claims) == ["m-0", "m-1", "m-2"]
    if hasattr(store, "close"):
        await store.close()


async def test_what_is_returned_while_its_row_is_claimed_waits(make: Callable, clock: VirtualClock) -> None:
    """Taken for a repetition it was acknowledged; then the row was removed, and it was lost."""
    store, transport, now = SimpleStore(make()), MemoryTransport(), clock.now()
    message = DelayedMessage("m-1", now - SECOND, "mails", {}, b"x")
    await store.initialize("sales", TransactionMode.RECEIVE_ONLY)
    await store.store(message, now)
    claims = await store.claim_due(now, 10)
    settings = DispatchSettings("sales.timeouts", "error", 0, Host("sales"))
    breaker = RepeatedFailures("Store", "cannot store", SECOND, lambda *_: None)
    intake = Intake(store, transport, settings, clock, breaker)
    returned = Received(Envelope("sales.timeouts", "m-1", delay_headers(message), b"x"), 0, 1, attempts=1)
    assert (await intake.handle(returned)).completion is None
    assert await store.finish(claims, Outcome.FAILED, now) == 1
    assert (await intake.handle(returned)).completion is not None
    assert [each.message.message_id for each in await store.claim_due(now, 10)] == ["m-1"]


async def test_what_was_fetched_before_a_fetch_failed_is_claimed(make: Callable) -> None:
    store = make()
    batches = SimpleStore(store)
    now = VirtualClock().now()
    await store.initialize("sales", TransactionMode.NONE)
    await store.store(DelayedMessage("m-1", now - SECOND, "billing"), now)
    fetch, fetched = store.fetch_next_due, 0

    async def fetch_once(at: datetime):
        nonlocal fetched
        fetched += 1
        if fetched > 1:
            raise OSError("connection reset")
        return await fetch(at)

    store.fetch_next_due = fetch_once
    (claim,) = await batches.claim_due(now, 10)
    assert await batches.finish([claim, claim], Outcome.DELIVERED, now) == 1
    assert not await batches.retry_later(claim, now, now, "finished already")
    with pytest.raises(StoreUnavailable, match="OSError: connection reset") as outage:
        await batches.claim_due(now, 10)
    assert isinstance(outage.value.__cause__, OSError)
    if hasattr(store, "close"):
        await store.close()


class Setting:
    """Notes the order of calls; does nothing else."""

    def __init__(self, *, sets_up: bool) -> None:
        self.calls: list[str] = []
        if sets_up:
            self.setup = self._set_up

    async def initialize(self, endpoint: str, mode: TransactionMode) -> None:
        self.calls.append(f"initialize {endpoint} {mode.value}")

    async def _set_up(self) -> None:
        self.calls.append("setup")

    async def store(self, message: DelayedMessage, now: datetime) -> None: ...
    async def fetch_next_due(self, now: datetime) -> None: ...
    async def remove(self, message_id: str, now: datetime) -> bool: ...
    async def increment_failure_count(self, message_id: str, now: datetime) -> bool: ...
    async def next_due(self) -> None: ...


@pytest.mark.parametrize("creates_queues", [False, True])
@pytest.mark.parametrize("sets_up", [False, True])
async def test_a_store_is_always_initialized_and_then_set_up_if_queues_are_created_rows_27_28(
    clock: VirtualClock, sets_up: bool, creates_queues: bool
) -> None:
    """Initialize first (D2), and always; upstream leaves it out without setup when no queues are made (D3)."""
    store = Setting(sets_up=sets_up)
    world = World(clock, store)
    if not creates_queues:
        await world.queues.create_queues(["sales.timeouts", "error"])
    async with world.endpoint(create_queues=creates_queues):
        pass
    first = "initialize sales sends_atomic_with_receive"
    assert store.calls == ([first, "setup"] if sets_up and creates_queues else [first])


# --- refused ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def without() -> Callable[[str], Any]:
    def remove(method: str) -> Any:
        kind = STORES["DictStore"]
        members = {name: value for name, value in vars(kind).items() if name != method and not name.startswith("__")}
        return type("Mine", (), members)()

    return remove


@pytest.mark.parametrize("method", simple_store.REQUIRED)
def test_a_missing_method_is_named(without: Callable, method: str) -> None:
    with pytest.raises(
        ConfigurationError, match=rf"Mine is not a delayed message store: it has no method {method}\(\)"
    ):
        DelayedDelivery(without(method))


@pytest.mark.parametrize("method", simple_store.REQUIRED)
def test_a_method_that_is_not_async_is_named(without: Callable, method: str) -> None:
    mine = without(method)
    setattr(type(mine), method, lambda self, *arguments: None)
    with pytest.raises(ConfigurationError, match=rf"Mine\.{method} must be an async method"):
        DelayedDelivery(mine)


def test_half_a_store_that_claims_in_batches_is_refused(without: Callable) -> None:
    mine = without("none")

    async def claim_due(self, now: datetime, limit: int) -> list:
        return []

    type(mine).claim_due = claim_due
    with pytest.raises(ConfigurationError, match=r"must say so: class Mine\(ClaimingStore\)"):
        DelayedDelivery(mine)


def test_a_store_that_claims_in_batches_and_cannot_release_is_no_class() -> None:
    """A role has all of its methods: before, what had no release() was told of failures that were none."""
    whole = {name: getattr(MemoryStore, name) for name in cast("Any", ClaimingStore).__abstractmethods__}
    half = type("Half", (ClaimingStore,), {name: each for name, each in whole.items() if name != "release"})
    with pytest.raises(TypeError, match=r"abstract method .?release"):
        half()
    assert type("Whole", (ClaimingStore,), whole)


def test_an_adapter_that_does_not_say_what_it_can_do_is_refused_by_the_endpoint_that_is_given_it() -> None:
    def silent(role: Any, kind: type[Any]) -> Any:
        return type("Mine", (role,), {name: getattr(kind, name) for name in role.__abstractmethods__})()

    store, transport = silent(ClaimingStore, MemoryStore), silent(Transport, MemoryTransport)
    sagas = silent(SagaStore, MemorySagaStore)
    said = "Mine does not say what it can do: set _capabilities, or override capabilities"
    with pytest.raises(ConfigurationError, match=said):
        capabilities_of(store)
    with pytest.raises(ConfigurationError, match=said):
        Endpoint("sales", transport=MemoryTransport(), delayed_delivery=DelayedDelivery(store))
    with pytest.raises(ConfigurationError, match=said):
        Endpoint("sales", transport=MemoryTransport(), sagas=sagas)
    with pytest.raises(ConfigurationError, match=said):
        Endpoint("sales", transport=transport)


def test_without_capabilities_of_its_own_it_is_taken_for_a_simple_one(clock: VirtualClock) -> None:
    store = STORES["DictStore"]()
    settings = DelayedDelivery(store)
    assert isinstance(settings.claiming_store, ClaimingStore)
    assert settings.claiming_store.capabilities == capabilities_of(store)
    world = World(clock, store)
    world.queues._capabilities = replace(world.queues.capabilities, transaction_modes=frozenset(TransactionMode))
    with pytest.raises(UnsupportedTransactionMode, match="DictStore does not support transaction mode"):
        world.endpoint(transaction_mode=TransactionMode.TRANSACTION_SCOPE)


async def test_a_store_that_refuses_the_mode_keeps_the_endpoint_from_starting_row_29(clock: VirtualClock) -> None:
    store = STORES["DictStore"]()

    async def refuse(endpoint: str, mode: TransactionMode) -> None:
        raise UnsupportedTransactionMode(f"cannot keep {mode.value}")

    store.initialize = refuse
    with pytest.raises(UnsupportedTransactionMode, match="cannot keep sends_atomic_with_receive"):
        await World(clock, store).endpoint().__aenter__()


async def test_its_error_copies_can_be_returned_row_40(world: World) -> None:
    async with world.endpoint() as sales:
        await sales.send(b"body", destination="nowhere", delay=SECOND, message_id="m-1")
        await world.clock.advance(2 * SECOND)
        ((copy, _),) = world.queues.queues["error"].messages
        await world.queues.create_queues(["nowhere"])
        await sales.send(
            copy.body, destination=copy.headers[Headers.FAILED_QUEUE], headers=copy.headers, message_id=copy.message_id
        )
        await world.clock.run_until_idle()
        assert world.ids("nowhere") == ["m-1"]

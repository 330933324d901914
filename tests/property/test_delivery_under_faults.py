"""Whatever fails, and wherever the process dies: never lost, never early, delivered in the end; and exactly once where
store and queues are one database.

A process is an endpoint that only delivers. It dies between any two calls of a port, before or after one has taken
effect: from then on every call of that process fails, and what it held is free for the next one.
"""

import asyncio
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postdate import (
    DelayedDelivery,
    DelayedMessage,
    Endpoint,
    LocalTransport,
    MemoryStore,
    MemoryTransport,
    SqliteStore,
)
from postdate.backends.memory.transport import _Queue
from postdate.core.due import poller as poller_module
from postdate.endpoint.outgoing import timeouts_queue_envelope
from postdate.errors import PostdateError, StoreUnavailable, TransportUnavailable
from postdate.messages import Envelope
from postdate.ports import RecordKind
from postdate.testing import Call, FaultyMovingStore, FaultyStore, FaultyTransport, VirtualClock

TIMEOUTS = "sales.timeouts"
SECOND = timedelta(seconds=1)
LONGEST_TROUBLE = timedelta(minutes=15)


class ProcessDied(BaseException):
    """Raised inside a process at the call at which it dies; no code of ours catches it."""


@dataclass(frozen=True)
class Event:
    """What happens at a call: an error or the end of the process, before the call or after it."""

    dies: bool
    after: bool


@dataclass
class Fate:
    """The plan of all processes together: calls are counted on from one process to the next."""

    events: Mapping[int, Event]
    position: int = 0
    dead: bool = False
    died: int = 0

    def of(self, error: PostdateError) -> Callable[[Call], BaseException | None]:
        def plan(call: Call) -> BaseException | None:
            if self.dead:
                return ProcessDied()
            if not call.done:
                self.position += 1
            event = self.events.get(self.position)
            if event is None or event.after is not call.done:
                return None
            if event.dies:
                self.dead = True
                return ProcessDied()
            # What is held when the answer is lost is held until the process ends: an adapter that reports an error
            # has left nothing behind (Raises of ClaimingStore.claim_due and Receiver.receive).
            return None if call.done and call.method in {"claim_due", "receive"} else error

        return plan


class WatchedQueue(_Queue):
    """A queue in memory that notes when a message arrives."""

    __slots__ = ("arrivals", "clock")

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self.clock = clock
        self.arrivals: list[tuple[str, datetime]] = []

    def put(self, envelope: Envelope, failures: int = 0, *, first: bool = False) -> None:
        self.arrivals.append((envelope.message_id, self.clock.now()))
        super().put(envelope, failures, first=first)


@dataclass
class InMemory:
    """A store and queues that outlive the processes that use them. Delayed messages come through the timeouts queue."""

    clock: VirtualClock
    fate: Fate
    store: MemoryStore = field(default_factory=MemoryStore)
    transport: MemoryTransport = field(default_factory=MemoryTransport)

    async def begin(self, messages: list[DelayedMessage]) -> None:
        self.messages = {message.message_id: message for message in messages}
        self.queue = self.transport.queues["billing"] = WatchedQueue(self.clock)
        await self.transport.create_queues([TIMEOUTS, "error"])
        await self.transport.send(
            [timeouts_queue_envelope(message, TIMEOUTS) for message in messages], self.clock.now()
        )

    def process(self) -> Endpoint:
        store = FaultyStore(self.store, self.fate.of(StoreUnavailable("planned")))
        transport = FaultyTransport(self.transport, self.fate.of(TransportUnavailable("planned")))
        return endpoint(store, transport, self.clock)

    async def bury(self) -> None:
        """Free what the dead process held; its receivers gave theirs back when they were closed."""
        for entry in self.store._entries.values():
            if entry.token is not None:
                entry.attempt_at, entry.token = entry.message.due, None

    async def check_nothing_is_lost(self) -> None:
        waiting = {envelope.message_id for envelope, _ in self.transport.queues[TIMEOUTS].messages}
        there = {*waiting, *self.store._entries, *(id_ for id_, _ in self.queue.arrivals)}
        assert there == set(self.messages)

    async def check_the_end(self) -> None:
        assert {id_ for id_, _ in self.queue.arrivals} == set(self.messages)
        assert all(self.messages[id_].due < at for id_, at in self.queue.arrivals), "early"
        assert self.store._entries == {}
        assert await self.transport.queue_lengths() == {"billing": len(self.queue.arrivals), TIMEOUTS: 0, "error": 0}

    async def close(self) -> None:
        """Nothing to close."""


class Pipelined(InMemory):
    """The same with a transport that takes a whole batch in one call."""

    async def begin(self, messages: list[DelayedMessage]) -> None:
        self.transport._capabilities = replace(self.transport.capabilities, pipelines=True)
        await super().begin(messages)


class InOneFile:
    """The same in one SQLite file. Delayed messages are stored; every second one has no queue, and ends as an error."""

    def __init__(self, clock: VirtualClock, fate: Fate) -> None:
        self.clock, self.fate = clock, fate
        self.folder = tempfile.TemporaryDirectory()
        self.open()

    def open(self) -> None:
        path = Path(self.folder.name) / "one.db"
        self.store = SqliteStore(path, synchronous="normal")
        self.transport = LocalTransport(path, synchronous="normal")

    async def begin(self, messages: list[DelayedMessage]) -> None:
        self.messages = {message.message_id: message for message in messages}
        await self.transport.create_queues(["billing", "error", TIMEOUTS])
        await self.store.store_many(messages, self.clock.now())

    def process(self) -> Endpoint:
        store = FaultyMovingStore(self.store, self.fate.of(StoreUnavailable("planned")))
        transport = FaultyTransport(self.transport, self.fate.of(TransportUnavailable("planned")))
        return endpoint(store, transport, self.clock)

    async def bury(self) -> None:
        await self.close_adapters()
        self.open()

    async def counts(self) -> Counter[str]:
        """How often each message is somewhere."""

        def read(connection) -> list[tuple[str]]:
            waiting = "SELECT message_id FROM delayed_message UNION ALL SELECT message_id FROM queue_message"
            return connection.execute(waiting).fetchall()

        return Counter(id_ for (id_,) in await self.store.file.read(read))

    async def check_nothing_is_lost(self) -> None:
        assert await self.counts() == Counter(dict.fromkeys(self.messages, 1))

    async def check_the_end(self) -> None:
        await self.check_nothing_is_lost()
        count = "SELECT count(*) FROM content"
        assert await self.store.file.read(lambda c: c.execute(count).fetchone()) == (len(self.messages),)
        assert await self.store.next_due() is None
        lengths = await self.transport.queue_lengths()
        to_billing = sum(message.destination == "billing" for message in self.messages.values())
        assert lengths == {"billing": to_billing, "error": len(self.messages) - to_billing, TIMEOUTS: 0}
        for id_, message in self.messages.items():
            kinds = {RecordKind.DELIVERED, RecordKind.FAILED}
            (end,) = [record for record in await self.store.history(id_) if record.kind in kinds]
            assert message.due < end.at, "early"

    async def close_adapters(self) -> None:
        await self.store.close()
        await self.transport.close()

    async def close(self) -> None:
        await self.close_adapters()
        self.folder.cleanup()


def endpoint(store: FaultyStore, transport: FaultyTransport, clock: VirtualClock) -> Endpoint:
    delayed_delivery = DelayedDelivery(store, number_of_retries=1_000_000, missing_queue_wait=timedelta(0))
    return Endpoint("sales", transport=transport, delayed_delivery=delayed_delivery, send_only=True, clock=clock)


async def live(world: InMemory | InOneFile, duration: timedelta) -> None:
    """Run processes, one after the other, until all faults are over and everything had time to arrive."""
    clock, fate = world.clock, world.fate
    end = clock.now() + duration
    while clock.now() < end:
        fate.dead = False
        with suppress(PostdateError):  # at start: the process ends, and is started again a second later
            try:
                async with world.process():
                    await clock.advance(end - clock.now())
            except* ProcessDied:
                fate.died += 1
        fate.dead = True
        await world.bury()
        fate.dead = False
        await world.check_nothing_is_lost()
        await clock.advance(SECOND)
    await world.check_the_end()


def run(
    world_type: type[InMemory] | type[InOneFile],
    dues: list[int],
    events: Mapping[int, Event],
    duration: timedelta = LONGEST_TROUBLE,
) -> Fate:
    """Live through one plan in an event loop of its own."""

    async def main() -> Fate:
        clock, fate = VirtualClock(), Fate(events)
        world = world_type(clock, fate)
        try:
            await world.begin(messages(clock, dues, mixed=world_type is InOneFile))
            await live(world, duration)
        finally:
            await world.close()
        return fate

    return asyncio.run(main())


def messages(clock: VirtualClock, dues: list[int], *, mixed: bool) -> list[DelayedMessage]:
    destinations = ("billing", "nowhere") if mixed else ("billing",)
    return [
        DelayedMessage(f"m-{n}", clock.now() + timedelta(milliseconds=due), destinations[n % len(destinations)])
        for n, due in enumerate(dues)
    ]


DUES = st.lists(st.integers(-1_000, 120_000), min_size=1, max_size=6)
EVENTS = st.dictionaries(st.integers(1, 60), st.builds(Event, dies=st.booleans(), after=st.booleans()), max_size=12)


@given(DUES, EVENTS)
@settings(deadline=None)
def test_in_memory_nothing_is_lost_or_early_and_everything_arrives(dues: list[int], events: dict[int, Event]) -> None:
    run(InMemory, dues, events)


@given(DUES, EVENTS)
@settings(deadline=None, max_examples=max(settings().max_examples // 2, 20))
def test_in_one_file_everything_arrives_exactly_once(dues: list[int], events: dict[int, Event]) -> None:
    run(InOneFile, dues, events)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("world_type", [InMemory, Pipelined, InOneFile])
def test_dying_at_every_single_call_loses_nothing(world_type: type[InMemory] | type[InOneFile], after: bool) -> None:
    """Every crash point of one life is enumerated: the process dies once at each call in turn."""
    dues, duration = [-1, 0, 500, 500], timedelta(seconds=90)
    calls = run(world_type, dues, {}, duration).position
    deaths = [run(world_type, dues, {at: Event(dies=True, after=after)}, duration).died for at in range(1, calls + 1)]
    assert len(deaths) > 10
    # Calls that wait until the end, those that receive, have no effect to die after.
    assert sum(deaths) >= len(deaths) - (3 if after else 0)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("world_type", [InMemory, Pipelined, InOneFile])
def test_an_error_at_every_single_call_loses_nothing(world_type: type[InMemory] | type[InOneFile], after: bool) -> None:
    """Also when the call took effect and only its acknowledgement was lost."""
    dues, duration = [-1, 0, 500, 500], timedelta(seconds=90)
    calls = run(world_type, dues, {}, duration).position
    for position in range(1, calls + 1):
        run(world_type, dues, {position: Event(dies=False, after=after)}, duration)


# --- thirty days ------------------------------------------------------------------------------------------------------


@given(st.lists(st.timedeltas(timedelta(0), timedelta(days=30)), min_size=1, max_size=50))
def test_thirty_days_take_no_time_and_every_message_is_on_time(delays: list[timedelta]) -> None:
    async def month() -> None:
        clock = VirtualClock()
        world = InMemory(clock, Fate({}))
        await world.begin([])
        async with Endpoint(
            "sales",
            transport=world.transport,
            delayed_delivery=DelayedDelivery(world.store),
            send_only=True,
            clock=clock,
        ) as sales:
            start = clock.now()
            for number, delay in enumerate(delays):
                await sales.send(b"", destination="billing", delay=delay, message_id=f"m-{number}")
            await clock.advance(timedelta(days=30, seconds=1))
        lateness = {id_: at - start - delays[int(id_[2:])] for id_, at in world.queue.arrivals}
        assert len(lateness) == len(world.queue.arrivals) == len(delays)
        microsecond = timedelta(microseconds=1)
        for number, delay in enumerate(delays):
            # Within two milliseconds of another message it may wait for the look that finds both.
            alone = all(
                abs(delay - other) > 2 * poller_module._SHORTEST_POLL_INTERVAL for other in delays if other is not delay
            )
            expected = microsecond if delay else timedelta(0)
            assert expected <= lateness[f"m-{number}"] <= (expected if alone else poller_module._SHORTEST_POLL_INTERVAL)

    with pytest.MonkeyPatch.context() as patch:  # the minutes in which nothing happens would be most of the work
        patch.setattr(Endpoint, "_longest_sleep", timedelta(days=1))
        asyncio.run(month())

"""What unit tests share: a virtual clock, and delayed delivery put together by hand around it."""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta

import anyio
import pytest

from postdate import DelayedMessage, Envelope, MemoryStore, MemoryTransport
from postdate.core.due.dispatcher import Dispatcher
from postdate.core.due.poller import Poller
from postdate.core.health.circuit_breaker import FailureRate, RepeatedFailures
from postdate.core.receive.intake import Intake, from_timeouts_queue
from postdate.core.receive.pump import MessagePump
from postdate.core.receive.settling import WatchedReceiver
from postdate.core.recoverability import DispatchSettings, Host
from postdate.ports import ClaimingStore, Read, Received, Receiver
from postdate.testing import FaultyStore, FaultyTransport, VirtualClock

SECOND = timedelta(seconds=1)


@dataclass
class DeliveryBench:
    """Delayed delivery in memory, each part in reach, with stores and transports that fail on demand."""

    clock: VirtualClock
    number_of_retries: int = 0
    missing_queue_wait: timedelta = timedelta(0)
    critical_errors: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.start = self.clock.now()
        self.memory, self.queues = MemoryStore(), MemoryTransport()
        self.store, self.transport = FaultyStore(self.memory), FaultyTransport(self.queues)
        self.settings = DispatchSettings(
            "sales.timeouts",
            "error",
            self.number_of_retries,
            Host("sales", "machine", "0" * 32, "display"),
            missing_queue_wait=self.missing_queue_wait,
        )
        self.store_breaker, self.breaker = self._breaker("store"), self._breaker("dispatch")
        self.failure_rate = FailureRate("handling", "failure handling", 1, self.note_critical)
        self.dispatcher = Dispatcher(
            self.store, self.transport, self.settings, self.clock, self.breaker, self.failure_rate
        )
        self.dispatcher._in_flight.expect_message_size(0)  # as after the first look
        self.receiver = WatchedReceiver(self.transport.receiver("sales.timeouts"), self.clock)
        self.intake = self.intake_of(self.store)
        self.pump = self.pump_of(self.receiver)

    def intake_of(self, store: ClaimingStore, *, read: Read = from_timeouts_queue) -> Intake:
        """Return an intake from these queues into another store."""
        return Intake(store, self.transport, self.settings, self.clock, self.store_breaker, read=read)

    def pump_of(self, receiver: Receiver) -> MessagePump:
        """Return a pump whose step is the intake, which need not run to handle what it is given."""
        breaker = self._breaker("receive")
        return MessagePump(
            receiver,
            lambda each: self.intake.handle(each),  # noqa: PLW0108 - it may be another then
            16,
            self.clock,
            breaker,
            "sales.timeouts",
        )

    def _breaker(self, critical: str) -> RepeatedFailures:
        return RepeatedFailures(critical, critical, 30 * SECOND, self.note_critical)

    def note_critical(self, text: str, error: BaseException) -> None:
        self.critical_errors.append(text)

    async def create_queues(self, *names: str) -> None:
        await self.queues.create_queues([*names, "sales.timeouts", "error"])

    def message(self, id_: str = "m-1", due_in: float = 0, destination: str = "billing", **fields) -> DelayedMessage:
        return DelayedMessage(id_, self.start + due_in * SECOND, destination, **fields)

    async def keep(self, *messages: DelayedMessage) -> None:
        await self.memory.store_many(messages, self.start)

    async def look(self) -> int:
        """Let the dispatcher take what is due; return how many messages it dealt with."""
        return (await self.dispatcher.deliver_due(self.clock.now())).count

    async def look_for(self, duration: timedelta) -> None:
        """Let the dispatcher look whenever something may be attempted, and every second anyway."""
        end = self.clock.now() + duration
        while self.clock.now() < end:
            await self.look()
            await self.clock.advance(SECOND + timedelta(microseconds=1))

    @asynccontextmanager
    async def polling(self) -> AsyncGenerator[Poller]:
        """Poll until the end of the block."""
        poller = Poller(
            self.dispatcher, self.clock, RepeatedFailures("fetch", "fetch", 30 * SECOND, self.note_critical)
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(poller.run)
            await self.clock.run_until_idle()
            yield poller
            poller.stop()

    def arrived(self, queue: str) -> list[Envelope]:
        return [envelope for envelope, _ in self.queues.queues[queue].messages]

    def ids(self, queue: str) -> list[str]:
        return [envelope.message_id for envelope in self.arrived(queue)]

    async def handle(self, received: Received, *, seconds: float = 60) -> None:
        """Let the pump handle a message with the intake, and time pass."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.pump.handle, received)
            await self.clock.advance(seconds * SECOND)

    async def put_in_timeouts_queue(self, envelope: Envelope) -> Received:
        await self.queues.send([envelope], self.clock.now())
        return (await self.receiver.receive(1))[0]

    async def waiting(self) -> datetime | None:
        return await self.memory.next_due()


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def make_bench(clock: VirtualClock) -> Callable[..., DeliveryBench]:
    return lambda **settings: DeliveryBench(clock, **settings)

"""A timeout manager in memory on a virtual clock, with a storage of timeouts that fails on demand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import anyio.lowlevel

from postdate import Endpoint, Envelope, HandlerContext, Headers, MemoryTransport, TimeoutManager
from postdate.backends.memory.database import MemoryTimeouts
from postdate.core.timeout_manager.steps import timeout_of
from postdate.messages import format_timestamp
from postdate.ports.timeouts import DueChunk, Timeout, TimeoutClaim, TimeoutPersister
from postdate.testing import FaultyTransport, VirtualClock
from postdate.testing.faults import Faults, Plan

SECOND = timedelta(seconds=1)
MICROSECOND = timedelta(microseconds=1)
TIMEOUTS, DISPATCHER = "sales.Timeouts", "sales.TimeoutsDispatcher"


@dataclass
class Pay:
    amount: int = 0


class FaultyTimeouts(TimeoutPersister):
    """A persister that fails as planned and otherwise does what another does."""

    def __init__(self, persister: TimeoutPersister, *plans: Plan) -> None:
        self._persister, self.faults = persister, Faults(*plans)

    async def initialize(self, endpoint: str) -> None:
        await self.faults.run("initialize", lambda: self._persister.initialize(endpoint))

    async def setup(self) -> None:
        await self.faults.run("setup", self._persister.setup)

    async def add(self, timeout: Timeout) -> bool:
        return await self.faults.run("add", lambda: self._persister.add(timeout))

    async def peek(self, timeout_id: str) -> Timeout | None:
        return await self.faults.run("peek", lambda: self._persister.peek(timeout_id))

    async def claim(self, timeout_id: str) -> TimeoutClaim | None:
        """Hold nothing, as .NET does: others may remove it meanwhile."""
        timeout = await self.peek(timeout_id)
        if timeout is None:
            return None
        return TimeoutClaim(timeout, partial(self.try_remove, timeout_id), anyio.lowlevel.checkpoint)

    async def try_remove(self, timeout_id: str) -> bool:
        return await self.faults.run("try_remove", lambda: self._persister.try_remove(timeout_id))

    async def remove_by_saga(self, saga_id: str) -> int:
        return await self.faults.run("remove_by_saga", lambda: self._persister.remove_by_saga(saga_id))

    async def next_chunk(self, start: datetime, now: datetime, limit: int) -> DueChunk:
        return await self.faults.run("next_chunk", lambda: self._persister.next_chunk(start, now, limit))

    async def close(self) -> None:
        await self._persister.close()


class Bench:
    """Queues, a storage of timeouts, and endpoints that use them; what they handle is noted."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock, self.start = clock, clock.now()
        self.memory, self.queues = MemoryTimeouts(), MemoryTransport(clock=clock)
        self.timeouts, self.transport = FaultyTimeouts(self.memory), FaultyTransport(self.queues)
        self.handled: list[tuple[Pay, datetime, HandlerContext]] = []
        self.critical: list[tuple[str, BaseException]] = []

    def endpoint(self, name: str = "sales", manager: dict[str, Any] | None = None, **settings: Any) -> Endpoint:
        settings.setdefault("transport", self.transport)
        settings.setdefault("timeout_manager", TimeoutManager(self.timeouts, **(manager or {})))
        settings.setdefault("critical_error", lambda text, error: self.critical.append((text, error)))
        endpoint = Endpoint(name, clock=self.clock, **settings)
        if not settings.get("send_only"):
            endpoint.handler(Pay, name="Pay")(self.handle)
        return endpoint

    async def handle(self, message: Pay, context: HandlerContext) -> None:
        self.handled.append((message, self.clock.now(), context))

    @property
    def amounts(self) -> list[int]:
        return [message.amount for message, _, _ in self.handled]

    async def put(self, *envelopes: Envelope) -> None:
        assert list(await self.queues.send(envelopes, self.clock.now())) == [None] * len(envelopes)

    def arrived(self, queue: str) -> list[Envelope]:
        return [envelope for envelope, _ in self.queues.queues[queue].messages]

    def stored(self) -> list[Timeout]:
        return sorted(self.memory._timeouts.values(), key=lambda each: each.due)

    async def stored_elsewhere(self, amount: int, due_in: float, **fields: Any) -> Timeout:
        """Store a timeout behind the endpoint's back, as another process or a late commit does."""
        timeout = timeout_of(deferred(self.start + due_in * SECOND, amount=amount, **fields), "sales")
        assert await self.memory.add(timeout)
        return timeout


def deferred(
    due: datetime,
    id_: str = "",
    destination: str = "sales",
    *,
    amount: int = 1,
    headers: Mapping[str, str] | None = None,
) -> Envelope:
    """Return what any endpoint sends to the timeout manager of ``sales``."""
    own = {
        Headers.ENCLOSED_MESSAGE_TYPES: "Pay",
        Headers.CONTENT_TYPE: "application/json",
        Headers.EXPIRE: format_timestamp(due),
        Headers.ROUTE_EXPIRED_TIMEOUT_TO: destination,
        **(headers or {}),
    }
    kept = {key: value for key, value in own.items() if value}
    return Envelope(TIMEOUTS, id_ or f"m-{amount}", kept, b'{"amount":%d}' % amount)

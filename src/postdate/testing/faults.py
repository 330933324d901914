"""Stores and transports that fail as planned: before a call, or after it has taken effect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol, TypeVar

from typing_extensions import override

from postdate.errors import PostdateError
from postdate.messages import DelayedMessage, Envelope
from postdate.ports import (
    HANDLED,
    Claim,
    ClaimingStore,
    End,
    MoveReport,
    MovingStore,
    Outcome,
    Received,
    Receiver,
    StoreCapabilities,
    StoreReport,
    Transport,
    TransportCapabilities,
    Wake,
    Work,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a port.

    Args:
        method: its name, for example ``claim_due``.
        number: which call of this method it is, from 1.
        position: which call of any method it is, from 1.
        done: false before the call, true after it has taken effect.
    """

    method: str
    number: int
    position: int
    done: bool


class Plan(Protocol):
    """Decides which calls fail. Asked before every call and, with ``done``, after it."""

    def __call__(self, call: Call, /) -> BaseException | None:
        """Return what to raise, or ``None``."""
        ...


@dataclass(frozen=True, slots=True)
class Fault:
    """Fails chosen calls of one method.

    Args:
        method: name of the method.
        error: what is raised.
        calls: numbers of the calls that fail, from 1; ``None``: all of them.
        after: the call takes effect and fails then, like a lost acknowledgement.
    """

    method: str
    error: BaseException
    calls: Collection[int] | None = None
    after: bool = False

    def __call__(self, call: Call) -> BaseException | None:
        """Return the error if this call is to fail now."""
        chosen = self.calls is None or call.number in self.calls
        return self.error if call.method == self.method and call.done is self.after and chosen else None


class Faults:
    """Several plans, asked in order; counts the calls. Plans may be added and removed at any time."""

    def __init__(self, *plans: Plan) -> None:
        self.plans: list[Plan] = list(plans)
        self.calls: Counter[str] = Counter()

    def add(self, plan: Plan) -> None:
        """Ask ``plan``, too, after the others."""
        self.plans.append(plan)

    def clear(self) -> None:
        """Let every call succeed from now on."""
        self.plans.clear()

    async def run(self, method: str, call: Callable[[], Awaitable[T]]) -> T:
        """Make one call, unless a plan lets it fail."""
        self.calls[method] += 1
        before = Call(method, self.calls[method], self.calls.total(), done=False)
        self._raise_planned(before)
        result = await call()
        self._raise_planned(Call(before.method, before.number, before.position, done=True))
        return result

    def _raise_planned(self, call: Call) -> None:
        for plan in self.plans:
            error = plan(call)
            if error is not None:
                raise error


class FaultyStore(ClaimingStore):
    """A claiming store that fails as planned and otherwise does what ``store`` does.

    Args:
        store: what is wrapped.
        plans: which calls fail; more can be added to :attr:`faults`.
    """

    def __init__(self, store: ClaimingStore, *plans: Plan) -> None:
        self._store = store
        self.faults = Faults(*plans)

    @override
    async def release(self, claims: Sequence[Claim], attempt_at: datetime | None) -> int:
        return await self.faults.run("release", lambda: self._store.release(claims, attempt_at))

    @override
    async def set_aside(self, claim: Claim, reason: str, now: datetime) -> bool:
        return await self.faults.run("set_aside", lambda: self._store.set_aside(claim, reason, now))

    @property
    @override
    def capabilities(self) -> StoreCapabilities:
        return self._store.capabilities

    @override
    async def initialize(self, endpoint: str, mode: Any) -> None:
        await self.faults.run("initialize", lambda: self._store.initialize(endpoint, mode))

    @override
    async def setup(self) -> None:
        await self.faults.run("setup", self._store.setup)

    @override
    async def store(self, message: DelayedMessage, now: datetime) -> None:
        await self.faults.run("store", lambda: self._store.store(message, now))

    @override
    async def fetch_next_due(self, now: datetime) -> DelayedMessage | None:
        return await self.faults.run("fetch_next_due", lambda: self._store.fetch_next_due(now))

    @override
    async def remove(self, message_id: str, now: datetime) -> bool:
        return await self.faults.run("remove", lambda: self._store.remove(message_id, now))

    @override
    async def increment_failure_count(self, message_id: str, now: datetime) -> bool:
        return await self.faults.run(
            "increment_failure_count", lambda: self._store.increment_failure_count(message_id, now)
        )

    @override
    async def next_due(self) -> datetime | None:
        return await self.faults.run("next_due", self._store.next_due)

    @override
    async def store_many(self, messages: Sequence[DelayedMessage], now: datetime) -> StoreReport:
        return await self.faults.run("store_many", lambda: self._store.store_many(messages, now))

    @override
    async def claim_due(self, now: datetime, limit: int) -> Sequence[Claim]:
        return await self.faults.run("claim_due", lambda: self._store.claim_due(now, limit))

    @override
    async def finish(self, claims: Sequence[Claim], outcome: Outcome, now: datetime, detail: str = "") -> int:
        return await self.faults.run("finish", lambda: self._store.finish(claims, outcome, now, detail))

    @override
    async def retry_later(self, claim: Claim, attempt_at: datetime, now: datetime, reason: str) -> bool:
        return await self.faults.run("retry_later", lambda: self._store.retry_later(claim, attempt_at, now, reason))

    @override
    async def next_attempt(self) -> datetime | None:
        return await self.faults.run("next_attempt", self._store.next_attempt)

    @override
    async def listen(self, wake: Wake) -> Callable[[], None]:
        return await self.faults.run("listen", lambda: self._store.listen(wake))


class FaultyMovingStore(FaultyStore, MovingStore):
    """The same for a store that shares its database with the queues. Work inside a transaction does not fail here.

    Args:
        store: what is wrapped.
        plans: which calls fail.
    """

    def __init__(self, store: MovingStore, *plans: Plan) -> None:
        super().__init__(store, *plans)
        self._moving = store

    @override
    def storing(self, messages: Sequence[DelayedMessage], now: datetime) -> Work:
        return self._moving.storing(messages, now)

    @override
    def finishing(self, claims: Sequence[Claim], outcome: Outcome, now: datetime, detail: str = "") -> Work:
        return self._moving.finishing(claims, outcome, now, detail)

    @override
    async def move_due(self, now: datetime, limit: int, *, listing: bool = False) -> MoveReport:
        return await self.faults.run("move_due", lambda: self._moving.move_due(now, limit, listing=listing))

    @override
    async def pause(self) -> None:
        await self.faults.run("pause", self._moving.pause)


class FaultyTransport(Transport):
    """A transport that fails as planned; its receivers share the plans.

    A :class:`~postdate.errors.PostdateError` at ``send`` is returned for every envelope, as transports do, unless the
    send is part of a transaction; ``receive``, ``commit``, ``roll_back`` and ``create_queues`` raise.

    Args:
        transport: what is wrapped.
        plans: which calls fail.
    """

    def __init__(self, transport: Transport, *plans: Plan) -> None:
        self._transport = transport
        self.faults = Faults(*plans)

    @property
    @override
    def capabilities(self) -> TransportCapabilities:
        return self._transport.capabilities

    @override
    async def create_queues(self, names: Sequence[str]) -> None:
        await self.faults.run("create_queues", lambda: self._transport.create_queues(names))

    @override
    async def send(
        self, envelopes: Sequence[Envelope], now: datetime, *, work: Sequence[Work] = ()
    ) -> Sequence[PostdateError | None]:
        try:
            return await self.faults.run("send", lambda: self._transport.send(envelopes, now, work=work))
        except PostdateError as error:
            if work:
                raise
            return [error] * len(envelopes)

    @override
    def receiver(self, queue: str) -> FaultyReceiver:
        return FaultyReceiver(self._transport.receiver(queue), self.faults)

    @override
    async def close(self) -> None:
        await self._transport.close()


class FaultyReceiver(Receiver):
    """A receiver that fails as planned.

    Args:
        receiver: what is wrapped.
        faults: the plans.
    """

    def __init__(self, receiver: Receiver, faults: Faults) -> None:
        self._receiver, self._faults = receiver, faults

    @override
    async def receive(self, limit: int) -> Sequence[Received]:
        return await self._faults.run("receive", lambda: self._receiver.receive(limit))

    @override
    async def commit(self, received: Received, now: datetime, end: End = HANDLED) -> None:
        await self._faults.run("commit", lambda: self._receiver.commit(received, now, end))

    @override
    async def roll_back(self, received: Received, *, failed: bool = True) -> None:
        await self._faults.run("roll_back", lambda: self._receiver.roll_back(received, failed=failed))

    @override
    def stop(self) -> None:
        self._receiver.stop()

    @override
    async def close(self) -> None:
        """Never fails, as held messages must be given back."""
        await self._receiver.close()

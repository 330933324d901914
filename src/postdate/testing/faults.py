"""Stores and transports that fail as planned: before a call, or after the call has taken effect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import wraps
from typing import Any, Protocol, TypeVar, cast

from typing_extensions import override

from postdate import ports
from postdate.errors import PostdateError
from postdate.messages import DelayedMessage, Envelope

T = TypeVar("T")
Method = TypeVar("Method", bound=Callable[..., Awaitable[Any]])


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a port.

    Args:
        method: name of the method, for example ``claim_due``.
        number: number of the call among the calls of this method, from 1.
        position: number of the call among the calls of all methods, from 1.
        done: false before the call, true after it has taken effect.
    """

    method: str
    number: int
    position: int
    done: bool


class Plan(Protocol):
    """Decides which calls fail. It is called before every call and, with ``done``, after it."""

    def __call__(self, call: Call, /) -> BaseException | None:
        """Return the error to raise, or ``None``."""
        ...


@dataclass(frozen=True, slots=True)
class Fault:
    """A plan that makes chosen calls of one method fail.

    Args:
        method: name of the method.
        error: the error to raise.
        calls: numbers of the calls that fail, from 1; ``None``: all calls.
        after: the call takes effect and then fails, like a lost acknowledgement.
    """

    method: str
    error: BaseException
    calls: Collection[int] | None = None
    after: bool = False

    def __call__(self, call: Call) -> BaseException | None:
        """Return the error if this call is to fail now."""
        is_chosen = self.calls is None or call.number in self.calls
        return self.error if call.method == self.method and call.done is self.after and is_chosen else None


class Faults:
    """Several plans, which are called in order. It counts the calls. Plans may be added and removed at any time."""

    def __init__(self, *plans: Plan) -> None:
        self.plans: list[Plan] = list(plans)
        self.calls: Counter[str] = Counter()

    def add(self, plan: Plan) -> None:
        """Add a plan behind the others."""
        self.plans.append(plan)

    def clear(self) -> None:
        """Let every call succeed from now on."""
        self.plans.clear()

    async def run(self, method: str, call: Callable[[], Awaitable[T]]) -> T:
        """Make one call, unless a plan makes it fail."""
        self.calls[method] += 1
        call_before = Call(method, self.calls[method], self.calls.total(), done=False)
        self._raise_planned(call_before)
        result = await call()
        self._raise_planned(Call(call_before.method, call_before.number, call_before.position, done=True))
        return result

    def _raise_planned(self, call: Call) -> None:
        for plan in self.plans:
            error = plan(call)
            if error is not None:
                raise error


def _fail_as_planned(method: Method) -> Method:
    """Return a method that makes the same call of the wrapped object, unless a plan makes it fail."""

    @wraps(method, updated=())  # without __dict__, which marks an abstract method
    async def call(self: Any, *args: Any, **options: Any) -> Any:
        wrapped = getattr(self._wrapped, method.__name__)
        return await self.faults.run(method.__name__, lambda: wrapped(*args, **options))

    return cast("Method", call)


class FaultyStore(ports.ClaimingStore):
    """A claiming store that fails as planned and otherwise does what ``store`` does.

    Args:
        store: the wrapped store.
        plans: decide which calls fail; more can be added to :attr:`faults`.
    """

    def __init__(self, store: ports.ClaimingStore, *plans: Plan) -> None:
        self._wrapped = store
        self.faults = Faults(*plans)

    @property
    @override
    def capabilities(self) -> ports.StoreCapabilities:
        return self._wrapped.capabilities

    initialize = _fail_as_planned(ports.ClaimingStore.initialize)
    setup = _fail_as_planned(ports.ClaimingStore.setup)
    store = _fail_as_planned(ports.ClaimingStore.store)
    fetch_next_due = _fail_as_planned(ports.ClaimingStore.fetch_next_due)
    remove = _fail_as_planned(ports.ClaimingStore.remove)
    increment_failure_count = _fail_as_planned(ports.ClaimingStore.increment_failure_count)
    next_due = _fail_as_planned(ports.ClaimingStore.next_due)
    store_many = _fail_as_planned(ports.ClaimingStore.store_many)
    claim_due = _fail_as_planned(ports.ClaimingStore.claim_due)
    finish = _fail_as_planned(ports.ClaimingStore.finish)
    retry_later = _fail_as_planned(ports.ClaimingStore.retry_later)
    release = _fail_as_planned(ports.ClaimingStore.release)
    mark_unreadable = _fail_as_planned(ports.ClaimingStore.mark_unreadable)
    next_attempt = _fail_as_planned(ports.ClaimingStore.next_attempt)
    listen = _fail_as_planned(ports.ClaimingStore.listen)


class FaultyMovingStore(FaultyStore, ports.MovingStore):
    """A faulty store that shares its database with the queues. Work inside a transaction does not fail here.

    Args:
        store: the wrapped store.
        plans: decide which calls fail.
    """

    def __init__(self, store: ports.MovingStore, *plans: Plan) -> None:
        super().__init__(store, *plans)
        self._moving = store

    @override
    def storing_work(self, messages: Sequence[DelayedMessage], now: datetime) -> ports.Work:
        return self._moving.storing_work(messages, now)

    @override
    def finishing_work(
        self, claims: Sequence[ports.Claim], outcome: ports.Outcome, now: datetime, detail: str = ""
    ) -> ports.Work:
        return self._moving.finishing_work(claims, outcome, now, detail)

    move_due = _fail_as_planned(ports.MovingStore.move_due)
    yield_to_writers = _fail_as_planned(ports.MovingStore.yield_to_writers)


class FaultyTransport(ports.Transport):
    """A transport that fails as planned; its receivers share the plans.

    A :class:`~postdate.errors.PostdateError` at ``send`` is returned for every envelope, as transports do, unless the
    send is part of a transaction; ``receive``, ``commit``, ``roll_back`` and ``create_queues`` raise.

    Args:
        transport: the wrapped transport.
        plans: decide which calls fail.
    """

    def __init__(self, transport: ports.Transport, *plans: Plan) -> None:
        self._wrapped = transport
        self.faults = Faults(*plans)

    @property
    @override
    def capabilities(self) -> ports.TransportCapabilities:
        return self._wrapped.capabilities

    create_queues = _fail_as_planned(ports.Transport.create_queues)

    @override
    async def send(
        self, envelopes: Sequence[Envelope], now: datetime, *, work: Sequence[ports.Work] = ()
    ) -> Sequence[PostdateError | None]:
        try:
            return await self.faults.run("send", lambda: self._wrapped.send(envelopes, now, work=work))
        except PostdateError as error:
            if work:
                raise
            return [error] * len(envelopes)

    @override
    def receiver(self, queue: str) -> FaultyReceiver:
        return FaultyReceiver(self._wrapped.receiver(queue), self.faults)

    @override
    async def close(self) -> None:
        await self._wrapped.close()


class FaultyReceiver(ports.Receiver):
    """A receiver that fails as planned.

    Args:
        receiver: the wrapped receiver.
        faults: the plans.
    """

    def __init__(self, receiver: ports.Receiver, faults: Faults) -> None:
        self._wrapped, self.faults = receiver, faults

    receive = _fail_as_planned(ports.Receiver.receive)
    commit = _fail_as_planned(ports.Receiver.commit)
    roll_back = _fail_as_planned(ports.Receiver.roll_back)

    @override
    def stop(self) -> None:
        self._wrapped.stop()

    @override
    async def close(self) -> None:
        """Close the receiver. This never fails, because received messages must return to the queue."""
        await self._wrapped.close()

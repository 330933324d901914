"""A saga that does as it is told, and an endpoint around it."""

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import msgspec

from postdate import (
    DelayedDelivery,
    DelayedMessage,
    Endpoint,
    HandlerContext,
    Recoverability,
    Saga,
    handles,
    handles_timeout,
    started_by,
)
from postdate.ports import Correlation, MessageFilter, SagaRecord
from postdate.testing import VirtualClock

SECOND = timedelta(seconds=1)
HOUR = timedelta(hours=1)
ONCE = Recoverability(immediate_retries=0, delayed_retries=0)


@dataclass
class Place:
    order_id: str
    do: list[str] = field(default_factory=list)


@dataclass
class Change:
    order_id: str
    do: list[str] = field(default_factory=list)


@dataclass
class Reminder:
    """Sent as a message and requested as a timeout."""

    text: str = ""
    order_id: str = ""


@dataclass
class Due:
    text: str = ""


@dataclass
class Unknown:
    pass


@dataclass
class Mail:
    text: str


@dataclass
class State:
    order_id: str
    seen: list[str] = field(default_factory=list)
    timeout: str = ""


LOG: list[tuple[str, str, str]] = []
"""Saga, what it took, its state before."""


class OrderSaga(Saga[State], correlated_by="order_id", name="OrderSaga"):
    @started_by(Place)
    @handles(Change)
    async def take(self, message: Place | Change, context: HandlerContext) -> None:
        await self.do(message.do, type(message).__name__, context)

    @handles(Reminder)
    async def reminded(self, message: Reminder, context: HandlerContext) -> None:
        await self.do([], f"message {message.text}", context)

    @handles_timeout(Reminder)
    @handles_timeout(Due)
    async def came(self, timeout: Reminder | Due, context: HandlerContext) -> None:
        order, _, then = timeout.text.partition("; then ")
        await self.do([then] if then else [], f"{type(timeout).__name__} {order}", context)

    async def do(self, orders: list[str], what: str, context: HandlerContext) -> None:
        LOG.append((type(self).__name__, what, ",".join(self.state.seen)))
        self.state.seen.append(what)
        for order in orders:
            await self.carry_out(order, context)

    async def carry_out(self, order: str, context: HandlerContext) -> None:
        match order.split(" "):
            case ["due", seconds]:
                self.state.timeout = await self.request_timeout(Due(seconds), within=float(seconds) * SECOND)
            case ["reminder", seconds]:
                await self.request_timeout(Reminder(seconds), within=float(seconds) * SECOND)
            case ["cancel"]:
                self.state.seen.append(str(self.cancel_timeout(self.state.timeout)))
            case ["move", seconds]:
                self.state.seen.append(str(await self.move_timeout(self.state.timeout, within=float(seconds) * SECOND)))
            case ["mail", text]:
                await context.send(Mail(text), destination="mails")
            case ["complete"]:
                self.complete()
            case ["rename"]:
                self.state.order_id = "another"
            case _:
                raise AssertionError(order)

    @classmethod
    async def not_found(cls, message: object, context: HandlerContext) -> None:
        LOG.append(("not found", type(message).__name__, ""))
        await super().not_found(message, context)


class OtherSaga(OrderSaga, correlated_by="order_id", name="OtherSaga"):
    """Takes the same messages."""


class World:
    """An endpoint with queues, store and sagas, in memory or in one file."""

    def __init__(self, clock: VirtualClock, transport: Any, store: Any, sagas: Any) -> None:
        self.clock, self.transport, self.store, self.sagas = clock, transport, store, sagas
        self.start = clock.now()

    def endpoint(self, *sagas: type[Saga[Any]], **settings: Any) -> Endpoint:
        settings = {"recoverability": ONCE, "sagas": self.sagas, "clock": self.clock, **settings}
        delays = DelayedDelivery(self.store)
        endpoint = Endpoint("orders", transport=self.transport, delayed_delivery=delays, **settings)
        for saga in sagas or (OrderSaga,):
            endpoint.saga(saga)
        return endpoint

    async def send(self, endpoint: Endpoint, *messages: object) -> None:
        for message in messages:
            await endpoint.send(message)
            await self.clock.run_until_idle()

    async def record(self, order_id: str = "o-1", saga: str = "OrderSaga") -> SagaRecord | None:
        return await self.sagas.find(saga, Correlation("order_id", order_id))

    async def seen(self, order_id: str = "o-1") -> list[str] | None:
        record = await self.record(order_id)
        return None if record is None else msgspec.json.decode(record.state)["seen"]

    async def pending(self) -> list[DelayedMessage]:
        return list(await self.store.list_pending(MessageFilter(), 100))

    async def waiting(self) -> int:
        return (await self.store.statistics(self.start)).pending

    async def length(self, queue: str) -> int:
        return (await self.transport.queue_lengths())[queue]


async def cannot_cancel(*_: object) -> bool:
    """Stand in for ``cancel`` of a store, so that a timeout comes although it was revoked."""
    return False

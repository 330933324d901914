"""Delayed delivery running: the pump of the timeouts queue and the poller, put together and checked at start."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import anyio

from postdate.clock import Clock
from postdate.core.circuit_breaker import Breaker, CriticalError, FailureRate, RepeatedFailures
from postdate.core.dispatcher import Dispatcher, DispatchSettings, enlisting
from postdate.core.intake import Intake, from_timeouts_queue
from postdate.core.mover import Mover
from postdate.core.poller import LONGEST_SLEEP, DueWork, Poller
from postdate.core.receive.outcomes import Step, StoreOutage
from postdate.core.receive.pump import MessagePump
from postdate.core.receive.watching import WatchedReceiver
from postdate.core.recoverability import Host
from postdate.core.simple_store import SimpleStore
from postdate.endpoint.critical import BreakerTimers
from postdate.endpoint.settings import DelayedDelivery
from postdate.errors import ConfigurationError, ErrorQueueNotConfigured, PostdateError, UnsupportedTransactionMode
from postdate.ports import (
    DelayExchange,
    ForeignIntake,
    IntakeQueue,
    MovingStore,
    TransactionMode,
    Transport,
)
from postdate.runtime.metrics import NO_METRICS, Metrics

log = logging.getLogger("postdate.delayed_delivery")

RECEIVE_BREAKER = timedelta(seconds=30)

OrdersBefore = Callable[[str, Step], Step]
"""Wraps the step of a queue, given its name, so that orders to a timeout manager are taken out before it."""


def timeouts_queue(endpoint: str) -> str:
    """Return the name of the queue through which an endpoint's delayed messages go (specification 1.5)."""
    return f"{endpoint}.timeouts"


def timeouts_dispatcher_queue(endpoint: str) -> str:
    """Return the name of the second queue that an endpoint's timeout manager had (specification 4.2)."""
    return f"{endpoint}.timeoutsdispatcher"


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What every part of one endpoint shares."""

    endpoint: str
    transport: Transport
    mode: TransactionMode
    clock: Clock
    critical_error: CriticalError
    metrics: Metrics = NO_METRICS
    longest_sleep: timedelta = LONGEST_SLEEP


class DelayedDeliveryService:
    """Stores what arrives in the timeouts queue and delivers it when due. Start :meth:`run` as a task.

    Args:
        settings: see :class:`DelayedDelivery`.
        around: what it shares with the endpoint.
        error_queue: for messages that cannot be delivered, unless the settings name a poison queue (row 86).
        orders_before: for a timeouts queue that is that of a timeout manager, too: makes a handler that takes the
            orders to that out of it (row 88).

    Raises:
        ErrorQueueNotConfigured: there is neither (row 54).
        UnsupportedTransactionMode: store and transport together cannot keep the promise of the mode.
        ConfigurationError: ``delay_exchange`` with queues that have no exchanges.
    """

    def __init__(
        self,
        settings: DelayedDelivery,
        around: Surroundings,
        error_queue: str | None,
        orders_before: OrdersBefore | None = None,
    ) -> None:
        failures = settings.poison_queue or error_queue
        if not failures:
            raise ErrorQueueNotConfigured(
                f"endpoint {around.endpoint!r} delivers delayed messages, so it needs an error queue for those that "
                f"cannot be delivered: pass error_queue='error', or DelayedDelivery(…, poison_queue='poison')"
            )
        check_mode(settings, around.transport, around.mode)
        self._foreign = _foreign_intake(settings, around.transport)
        self._settings, self._around, self._orders_before = settings, around, orders_before
        self._dispatch = DispatchSettings(
            timeouts_queue(around.endpoint),
            failures,
            settings.number_of_retries,
            Host(around.endpoint),
            errors_return_to_destination=settings.errors_return_to == "destination",
            bytes_in_flight=settings.bytes_in_flight,
        )
        own_queues = [self._dispatch.timeouts_queue]
        if settings.drain_timeout_manager:
            own_queues.append(timeouts_dispatcher_queue(around.endpoint))
        self._own_queues: Sequence[str] = own_queues
        self._poller: Poller | None = None
        self._pumps, self._outages = list[MessagePump](), list[StoreOutage]()
        self._timers: BreakerTimers | None = None

    def _breaker(self, name: str, critical: str, time_to_trigger: timedelta) -> RepeatedFailures:
        around = self._around
        return RepeatedFailures(name, critical, time_to_trigger, around.critical_error, around.metrics)

    def _breakers(self) -> _Breakers:
        chosen, around = self._settings, self._around
        return _Breakers(
            store=self._breaker(
                "DelayedDeliveryStore",
                "Failed to store delayed messages: the store has refused them for too long",
                chosen.time_to_trigger_store_circuit_breaker,
            ),
            fetch=self._breaker(
                "DelayedDeliveryFetch",
                "Failed to fetch due delayed messages from the store",
                chosen.time_to_trigger_fetch_circuit_breaker,
            ),
            dispatch=self._breaker(
                "DelayedDeliveryDispatch",
                "Failed to dispatch delayed messages to their destination",
                chosen.time_to_trigger_dispatch_circuit_breaker,
            ),
            failure_handling=FailureRate(
                "DelayedDeliveryFailureHandling",
                "Failed to execute error handling for delayed messages: too many failures that could not be dealt with",
                chosen.maximum_recovery_failures_per_second,
                around.critical_error,
                around.metrics,
            ),
            receive=self._breaker("DelayedDeliveryReceive", "Failed to receive delayed messages", RECEIVE_BREAKER),
        )

    def _work(self, breakers: _Breakers) -> DueWork:
        store, around = self._settings.claims, self._around
        dispatcher = Dispatcher(
            store,
            around.transport,
            self._dispatch,
            around.clock,
            breakers.dispatch,
            breakers.failure_handling,
            around.metrics,
        )
        if isinstance(store, MovingStore) and enlisting(store, around.transport) is not None:
            return Mover(store, dispatcher, around.clock, around.metrics)
        return dispatcher

    async def prepare(self, *, set_up: bool) -> None:
        """Initialize the store, always; then, if asked to, set it up and create the queues.

        In this order (specification D2), and with every store: upstream initializes a store that has no setup only when
        queues are created, too (D3, row 28), which leaves it unprepared in production.
        """
        await self._settings.claims.initialize(self._around.endpoint, self._around.mode)
        if set_up:
            await self._settings.claims.setup()
            await self._around.transport.create_queues([*self._own_queues, self._dispatch.error_queue])
            if self._foreign is not None:
                await self._foreign.transport.create_intake(self._foreign.exchange)
        around, breakers = self._around, self._breakers()
        queues = [IntakeQueue(name, around.transport.receiver(name), from_timeouts_queue) for name in self._own_queues]
        if self._foreign is not None:
            queues += self._foreign.transport.intake_queues(self._foreign.exchange)
        receiving = [breakers.receive]
        for queue in queues[1:]:
            critical = f"Failed to receive messages to be delayed from {queue.name!r}"
            receiving.append(self._breaker("DelayedDeliveryIntake", critical, RECEIVE_BREAKER))
        self._outages = []
        self._pumps = [self._way_in(queue, breakers, breaker) for queue, breaker in zip(queues, receiving, strict=True)]
        self._poller = Poller(
            self._work(breakers), around.clock, breakers.fetch, self._store_is_back, around.longest_sleep
        )
        self._timers = BreakerTimers([*breakers.all, *receiving[1:]], around.clock)

    def _store_is_back(self) -> None:
        for outage in self._outages:
            outage.over()

    def _way_in(self, queue: IntakeQueue, breakers: _Breakers, receiving: RepeatedFailures) -> MessagePump:
        around = self._around
        receiver = WatchedReceiver(queue.receiver, around.clock)
        intake = Intake(
            receiver.watch,
            self._settings.claims,
            around.transport,
            replace(self._dispatch, timeouts_queue=queue.name),
            around.clock,
            breakers.store,
            around.metrics,
            queue.read,
            breakers.failure_handling,
        )
        self._outages.append(intake.outage)
        handle: Step = intake.handle
        if self._orders_before is not None and queue.name == self._dispatch.timeouts_queue:
            handle = self._orders_before(queue.name, handle)
        concurrency, ahead = max(16, os.cpu_count() or 1), around.transport.capabilities.prefetches
        return MessagePump(receiver, handle, concurrency, around.clock, receiving, queue.name, prefetches=ahead)

    async def run(self) -> None:
        """Run until :meth:`stop`, then finish what is in hand; after :meth:`prepare`, once each time."""
        assert self._timers is not None
        try:
            async with anyio.create_task_group() as timers:
                timers.start_soon(self._timers.run)
                async with anyio.create_task_group() as tasks:
                    for pump in self._pumps:
                        tasks.start_soon(pump.run)
                    if self._poller is not None:
                        tasks.start_soon(self._poller.run)
                self._timers.stop()
        finally:
            with anyio.CancelScope(shield=True):
                await self._give_back()

    async def listening(self) -> None:
        """Return when all queues are received from, and the store tells of what is stored; after :meth:`run` began.

        One that is away counts when it has refused; see :attr:`MessagePump.listening` and :attr:`Poller.listening`.
        """
        for pump in self._pumps:
            await pump.listening.wait()
        if self._poller is not None:
            await self._poller.listening.wait()

    async def _give_back(self) -> None:
        """Let go of what a store of one's own has given out and only this process' memory knows of."""
        store = self._settings.claims
        if not isinstance(store, SimpleStore):
            return
        try:
            await store.give_back(self._around.clock.now())
        except PostdateError as error:
            log.warning("failed messages stay with this process until it ends: %s", error)

    def stop(self) -> None:
        """End :meth:`run`: the pumps first, then the poller; without effect before :meth:`prepare`."""
        for part in (*self._outages, *self._pumps):
            part.stop()
        if self._poller is not None:
            self._poller.stop()


@dataclass(frozen=True, slots=True)
class _Foreign:
    """Where programs without Postdate delay messages."""

    transport: ForeignIntake
    exchange: DelayExchange


def _foreign_intake(settings: DelayedDelivery, transport: Transport) -> _Foreign | None:
    if settings.delay_exchange is None:
        return None
    if not isinstance(transport, ForeignIntake):
        raise ConfigurationError(
            f"{type(transport).__name__} has no exchanges, so no delay_exchange; leave it out, or use RabbitMqTransport"
        )
    return _Foreign(transport, settings.delay_exchange)


@dataclass(frozen=True, slots=True)
class _Breakers:
    """The four circuit breakers of delayed delivery (specification 1.11), and that of its message pump."""

    store: RepeatedFailures
    fetch: RepeatedFailures
    dispatch: RepeatedFailures
    failure_handling: FailureRate
    receive: RepeatedFailures

    @property
    def all(self) -> Sequence[Breaker]:
        return [self.store, self.fetch, self.dispatch, self.failure_handling, self.receive]


def check_mode(settings: DelayedDelivery, transport: Transport, mode: TransactionMode) -> None:
    """Refuse a transaction mode whose promise store and transport cannot keep (design.md section 4).

    Raises:
        UnsupportedTransactionMode: says which part cannot, and what can be asked for instead.
    """
    check_transport_mode(transport, mode)
    store, name = settings.claims, type(settings.store).__name__
    if mode not in store.capabilities.transaction_modes:
        raise UnsupportedTransactionMode(f"{name} does not support transaction mode {mode.value!r}")
    if mode is TransactionMode.TRANSACTION_SCOPE and enlisting(store, transport) is None:
        raise UnsupportedTransactionMode(
            f"transaction mode 'transaction_scope' promises exactly once, for which {name} and "
            f"{type(transport).__name__} must be on the same database; use the same file, or another mode"
        )


def check_transport_mode(transport: Transport, mode: TransactionMode) -> None:
    """Refuse a transaction mode that the transport does not have.

    Raises:
        UnsupportedTransactionMode: names the modes it has.
    """
    modes = transport.capabilities.transaction_modes
    if mode not in modes:
        names = ", ".join(sorted(each.value for each in modes))
        raise UnsupportedTransactionMode(
            f"{type(transport).__name__} does not support transaction mode {mode.value!r}; it supports {names}"
        )

"""Delayed delivery running: the pump of the timeouts queue and the poller, put together and checked at start."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import anyio

from postdate.clock import Clock
from postdate.core.circuit_breaker import CriticalError, FailureRate, RepeatedFailures
from postdate.core.dispatcher import Dispatcher, DispatchSettings, Mover, enlisting
from postdate.core.intake import Intake
from postdate.core.poller import DueWork, Poller
from postdate.core.pump import MessagePump
from postdate.core.recoverability import Host
from postdate.endpoint.settings import DelayedDelivery
from postdate.errors import ErrorQueueNotConfigured, UnsupportedTransactionMode
from postdate.ports import MovingStore, SetsUp, TransactionMode, Transport

RECEIVE_BREAKER = timedelta(seconds=30)


def timeouts_queue(endpoint: str) -> str:
    """Return the name of the queue through which an endpoint's delayed messages go (specification 1.5)."""
    return f"{endpoint}.timeouts"


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What every part of one endpoint shares."""

    endpoint: str
    transport: Transport
    mode: TransactionMode
    clock: Clock
    critical_error: CriticalError


class DelayedDeliveryService:
    """Stores what arrives in the timeouts queue and delivers it when due. Start :meth:`run` as a task.

    Args:
        settings: see :class:`DelayedDelivery`.
        around: what it shares with the endpoint.
        error_queue: for messages that cannot be delivered.

    Raises:
        ErrorQueueNotConfigured: ``error_queue`` is empty (row 54).
        UnsupportedTransactionMode: store and transport together cannot keep the promise of the mode.
    """

    def __init__(self, settings: DelayedDelivery, around: Surroundings, error_queue: str | None) -> None:
        if not error_queue:
            raise ErrorQueueNotConfigured(
                f"endpoint {around.endpoint!r} delivers delayed messages, so it needs an error queue for those that "
                f"cannot be delivered: pass error_queue='error'"
            )
        check_mode(settings, around.transport, around.mode)
        self._settings, self._around = settings, around
        self._dispatch = DispatchSettings(
            timeouts_queue(around.endpoint), error_queue, settings.number_of_retries, Host(around.endpoint)
        )
        self._poller: Poller | None = None
        self._pump: MessagePump | None = None

    def _breaker(self, name: str, critical: str, time_to_trigger: timedelta) -> RepeatedFailures:
        return RepeatedFailures(name, critical, time_to_trigger, self._around.critical_error)

    def _work(self) -> DueWork:
        store, around = self._settings.store, self._around
        dispatcher = Dispatcher(
            store,
            around.transport,
            self._dispatch,
            around.clock,
            self._breaker(
                "DelayedDeliveryDispatch",
                "Failed to dispatch delayed messages to their destination",
                self._settings.time_to_trigger_dispatch_circuit_breaker,
            ),
            FailureRate(
                "DelayedDeliveryFailureHandling",
                "Failed to handle failures of delayed message dispatch",
                self._settings.maximum_recovery_failures_per_second,
                around.critical_error,
            ),
        )
        if isinstance(store, MovingStore) and enlisting(store, around.transport) is not None:
            return Mover(store, dispatcher)
        return dispatcher

    def _intake_pump(self) -> MessagePump:
        around, settings = self._around, self._settings
        receiver = around.transport.receiver(self._dispatch.timeouts_queue)
        breaker = self._breaker(
            "DelayedDeliveryStore",
            "Failed to store delayed message",
            settings.time_to_trigger_store_circuit_breaker,
        )
        intake = Intake(receiver, settings.store, around.transport, self._dispatch, around.clock, breaker)
        receive = self._breaker("DelayedDeliveryReceive", "Failed to receive delayed messages", RECEIVE_BREAKER)
        return MessagePump(receiver, intake.handle, max(16, os.cpu_count() or 1), around.clock, receive)

    async def prepare(self, *, set_up: bool) -> None:
        """Initialize the store, then set it up and create the queues if asked to (specification D2: in this order)."""
        store = self._settings.store
        await store.initialize(self._around.endpoint, self._around.mode)
        if set_up:
            if isinstance(store, SetsUp):
                await store.setup()
            await self._around.transport.create_queues([self._dispatch.timeouts_queue, self._dispatch.error_queue])
        self._pump = self._intake_pump()
        self._poller = Poller(
            self._work(),
            self._around.clock,
            self._breaker(
                "DelayedDeliveryFetch",
                "Failed to fetch due delayed messages from the store",
                self._settings.time_to_trigger_fetch_circuit_breaker,
            ),
        )

    async def run(self) -> None:
        """Run until :meth:`stop`, then finish what is in hand; after :meth:`prepare`, once each time."""
        async with anyio.create_task_group() as tasks:
            for part in (self._pump, self._poller):
                if part is not None:
                    tasks.start_soon(part.run)

    def stop(self) -> None:
        """End :meth:`run`: the pump first, then the poller; without effect before :meth:`prepare`."""
        for part in (self._pump, self._poller):
            if part is not None:
                part.stop()


def check_mode(settings: DelayedDelivery, transport: Transport, mode: TransactionMode) -> None:
    """Refuse a transaction mode whose promise store and transport cannot keep (design.md section 4).

    Raises:
        UnsupportedTransactionMode: says which part cannot, and what can be asked for instead.
    """
    check_transport_mode(transport, mode)
    store = settings.store
    if mode not in store.capabilities.transaction_modes:
        raise UnsupportedTransactionMode(f"{type(store).__name__} does not support transaction mode {mode.value!r}")
    if mode is TransactionMode.TRANSACTION_SCOPE and enlisting(store, transport) is None:
        raise UnsupportedTransactionMode(
            f"transaction mode 'transaction_scope' promises exactly once, for which {type(store).__name__} and "
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

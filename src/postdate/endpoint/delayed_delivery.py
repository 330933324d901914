"""The service of delayed delivery: checks the settings, and assembles the pump of the timeouts queue and the poller."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace

import anyio
from typing_extensions import override

from postdate.core.due.dispatcher import Dispatcher
from postdate.core.due.moving import due_work
from postdate.core.due.poller import Poller
from postdate.core.health.circuit_breaker import FailureRate, RepeatedFailures
from postdate.core.health.deadlines import Deadlines
from postdate.core.receive.intake import Intake, from_timeouts_queue
from postdate.core.receive.outcomes import Step
from postdate.core.receive.pump import MessagePump
from postdate.core.receive.settling import WatchedReceiver
from postdate.core.recoverability import DispatchSettings, Host
from postdate.core.simple_store import SimpleStore, enlisting_store
from postdate.core.upkeep.retention import retention_loop
from postdate.core.upkeep.wall_times import ZoneStore, wall_time_loop
from postdate.endpoint.service import EndpointContext, Service
from postdate.endpoint.settings import DelayedDelivery, check_scope
from postdate.errors import (
    ConfigurationError,
    ErrorQueueNotConfigured,
    PostdateError,
    StoreNotSetUp,
    UnsupportedTransactionMode,
)
from postdate.ports import ForeignIntake, IntakeQueue, TransactionMode, Transport
from postdate.ports.scanning import PrunableStore
from postdate.runtime.resource import resource_of

log = logging.getLogger("postdate.delayed_delivery")

WrapStep = Callable[[str, Step], Step]
"""Wraps the step of a queue so that orders to a timeout manager do not reach it: ``(queue, step) -> step``."""


def timeouts_queue(endpoint: str) -> str:
    """Return the name of the queue from which the delayed messages of an endpoint are stored."""
    return f"{endpoint}.timeouts"


def timeouts_dispatcher_queue(endpoint: str) -> str:
    """Return the name of the second queue that an endpoint's timeout manager had."""
    return f"{endpoint}.timeoutsdispatcher"


class DelayedDeliveryService(Service):
    """The service that stores messages of the timeouts queue and delivers them when they are due.

    Messages that cannot be delivered go to the poison queue of the settings, or else to ``error_queue`` (row 86).
    Without either, creating the service raises an error (row 54). ``wrap_step`` is for a timeouts queue that a timeout
    manager shares (row 88).
    """

    def __init__(
        self,
        settings: DelayedDelivery,
        context: EndpointContext,
        error_queue: str | None,
        wrap_step: WrapStep | None = None,
    ) -> None:
        super().__init__(context)
        failure_queue = settings.poison_queue or error_queue
        if not failure_queue:
            raise ErrorQueueNotConfigured(
                f"endpoint {context.endpoint!r} delivers delayed messages, so it needs an error queue for those that "
                f"cannot be delivered: pass error_queue='error', or DelayedDelivery(…, poison_queue='poison')"
            )
        check_mode(settings, context.transport, context.mode)
        if settings.delay_exchange is not None and not isinstance(context.transport, ForeignIntake):
            raise ConfigurationError(
                f"{type(context.transport).__name__} has no exchanges, so no delay_exchange; leave it out, or use "
                f"RabbitMqTransport"
            )
        self._settings, self._wrap_step = settings, wrap_step
        self._dispatch_settings = DispatchSettings(
            timeouts_queue(context.endpoint),
            failure_queue,
            settings.number_of_retries,
            Host(context.endpoint),
            errors_return_to_destination=settings.errors_return_to == "destination",
            bytes_in_flight=settings.bytes_in_flight,
            missing_queue_wait=settings.missing_queue_wait,
        )

    @override
    async def prepare(self, *, set_up: bool) -> None:
        """Initialize the store; then, with ``set_up``, set it up and create the queues.

        Every store is initialized (docs/specification-rows.md, row 28). NServiceBus initializes a store
        without a setup only when queues are created, too (D3, row 28), so in production it stays uninitialized.
        """
        context, settings = self._context, self._settings
        await settings.claiming_store.initialize(context.endpoint, context.mode)
        names = [self._dispatch_settings.timeouts_queue]
        if settings.drain_timeout_manager:
            names.append(timeouts_dispatcher_queue(context.endpoint))
        if set_up:
            await settings.claiming_store.setup()
            await context.transport.create_queues([*names, self._dispatch_settings.error_queue])
        else:
            await self._check_tables()
        queues = [IntakeQueue(name, context.transport.receiver(name), from_timeouts_queue) for name in names]
        if settings.delay_exchange is not None and isinstance(context.transport, ForeignIntake):
            if set_up:
                await context.transport.create_intake(settings.delay_exchange)
            queues += context.transport.intake_queues(settings.delay_exchange)
        store_breaker = context.create_breaker(
            "DelayedDeliveryStore",
            "Failed to store delayed messages: the store has refused them for too long",
            settings.claiming_store,
            settings.time_to_trigger_store_circuit_breaker,
        )
        fetch_breaker = context.create_breaker(
            "DelayedDeliveryFetch",
            "Failed to fetch due delayed messages from the store",
            settings.claiming_store,
            settings.time_to_trigger_fetch_circuit_breaker,
        )
        dispatch_breaker = context.create_breaker(
            "DelayedDeliveryDispatch",
            "Failed to dispatch delayed messages to their destination",
            context.transport,
            settings.time_to_trigger_dispatch_circuit_breaker,
        )
        failure_rate = FailureRate(
            f"DelayedDeliveryFailureHandling {context.endpoint}",
            "Failed to execute error handling for delayed messages: too many failures that could not be dealt with",
            settings.maximum_recovery_failures_per_second,
            context.critical_error,
            context.metrics,
        )
        self._outages, self._deadlines, self._breakers = (
            [],
            [],
            [store_breaker, fetch_breaker, dispatch_breaker, failure_rate],
        )
        pumps = [self._create_pump(queue, store_breaker, failure_rate) for queue in queues]
        store, transport, clock, metrics = settings.claiming_store, context.transport, context.clock, context.metrics
        dispatcher = Dispatcher(
            store, transport, self._dispatch_settings, clock, dispatch_breaker, failure_rate, metrics
        )
        work = due_work(store, transport, dispatcher, clock, metrics)
        poller = Poller(
            work, context.clock, fetch_breaker, self._resume_waits, context.longest_sleep, resource_of(store)
        )
        self._parts = [*pumps, poller]
        if settings.retention and isinstance(settings.claiming_store, PrunableStore):
            self._parts.append(retention_loop(settings.claiming_store, settings.retention, context.clock))
        # A store that is not durable ends with its process, before the rules of zones change.
        if ZoneStore.is_zone_store(settings.claiming_store) and settings.claiming_store.capabilities.durable:
            self._parts.append(wall_time_loop(settings.claiming_store, context.clock))

    async def _check_tables(self) -> None:
        """Raise `StoreNotSetUp` if the store has no tables. An outage of the store is no error here: it may end."""
        store = self._settings.claiming_store
        try:
            await Deadlines.of_store(store, self._context.clock).call_in_task(store.next_attempt)
        except StoreNotSetUp:
            raise
        except PostdateError as error:
            log.debug("whether the tables of the store exist cannot be seen: %s", error)

    def _resume_waits(self) -> None:
        for outage in self._outages:
            outage.resume()

    def _create_pump(
        self, queue: IntakeQueue, store_breaker: RepeatedFailures, failure_rate: FailureRate
    ) -> MessagePump:
        context, is_own = self._context, queue.name == self._dispatch_settings.timeouts_queue
        if is_own:
            breaker = context.create_breaker(
                "DelayedDeliveryReceive", "Failed to receive delayed messages", context.transport, queue=queue.name
            )
        else:
            critical = f"Failed to receive messages to be delayed from {queue.name!r}"
            breaker = context.create_breaker("DelayedDeliveryIntake", critical, context.transport, queue=queue.name)
        self._breakers.append(breaker)
        receiver = WatchedReceiver(queue.receiver, context.clock)
        intake = Intake(
            self._settings.claiming_store,
            context.transport,
            replace(self._dispatch_settings, timeouts_queue=queue.name),
            context.clock,
            store_breaker,
            context.metrics,
            queue.read,
            failure_rate,
        )
        self._outages.append(intake.outage)
        self._deadlines.append(intake.deadlines)
        handle: Step = intake.handle
        if self._wrap_step is not None and is_own:
            handle = self._wrap_step(queue.name, handle)
        concurrency, prefetches = max(16, os.cpu_count() or 1), context.transport.capabilities.prefetches
        return MessagePump(
            receiver,
            handle,
            concurrency,
            context.clock,
            breaker,
            queue.name,
            prefetches=prefetches,
            resource=resource_of(context.transport),
        )

    @override
    async def run(self) -> None:
        try:
            await super().run()
        finally:
            store = self._settings.claiming_store
            if isinstance(store, SimpleStore):  # which locks failed messages in the memory of this process only
                clock = self._context.clock
                deadlines = Deadlines.of_store(store, clock)
                deadlines.shorten()
                with anyio.CancelScope(shield=True):
                    try:
                        await deadlines.call_in_task(lambda: store.release_locked(clock.now()))
                    except PostdateError as error:
                        log.warning("failed messages stay with this process until it ends: %s", error)


def check_mode(settings: DelayedDelivery, transport: Transport, mode: TransactionMode) -> None:
    """Raise an error for a transaction mode whose promise store and transport cannot keep."""
    check_transport_mode(transport, mode)
    store = settings.claiming_store
    if mode not in store.capabilities.transaction_modes:
        raise UnsupportedTransactionMode(
            f"{type(settings.store).__name__} does not support transaction mode {mode.value!r}"
        )
    check_scope(mode, settings.store, transport, is_one=enlisting_store(store, transport) is not None)


def check_transport_mode(transport: Transport, mode: TransactionMode) -> None:
    modes = transport.capabilities.transaction_modes
    if mode not in modes:
        names = ", ".join(sorted(each.value for each in modes))
        raise UnsupportedTransactionMode(
            f"{type(transport).__name__} does not support transaction mode {mode.value!r}; it supports {names}"
        )

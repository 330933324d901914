"""The service of a timeout manager: two pumps, and a poller for due timeouts. Source: ADR 0014."""

from __future__ import annotations

import logging
from typing import Final

from typing_extensions import override

from postdate.core.due.poller import Poller
from postdate.core.health.deadlines import translate_store_errors
from postdate.core.health.message_memory import MessageMemory
from postdate.core.receive.outcomes import AttemptsRecovery, Step, StepOutcome, StoreWaits, immediate_attempts
from postdate.core.receive.pump import MessagePump
from postdate.core.recoverability import ErrorQueue, Host, RecoveryRules
from postdate.core.simple_store import sharing_store
from postdate.core.timeout_manager.due_query import DueTimeouts
from postdate.core.timeout_manager.steps import DispatchStep, StoreStep, is_clear_order, timeout_callback
from postdate.endpoint.delayed_delivery import timeouts_queue
from postdate.endpoint.service import EndpointContext, Service
from postdate.endpoint.settings import (
    DelayedDelivery,
    ExternalTimeoutManager,
    TimeoutManager,
    check_address,
    check_scope,
)
from postdate.errors import ConfigurationError, DestinationUnavailable, MessageError, PostdateError
from postdate.ports import Received, TransactionMode, TransportCapabilities
from postdate.runtime.resource import resource_of

log = logging.getLogger("postdate.timeout_manager")

ATTEMPTS: Final = 5
"""The number of attempts before a message goes to the error queue (row 101)."""

STORAGE_BREAKER = "TimeoutStorageConnectivity"
STORAGE_CRITICAL = "Repeated failures when fetching timeouts from storage, endpoint will be terminated."


def timeout_manager_queue(endpoint: str, capabilities: TransportCapabilities) -> str:
    """Return the name of the queue of an endpoint's timeout manager."""
    return f"{endpoint}{capabilities.queue_name_separator}Timeouts"


def timeout_dispatcher_queue(endpoint: str, capabilities: TransportCapabilities) -> str:
    """Return the name of the queue in which an endpoint's due timeouts are announced."""
    return f"{endpoint}{capabilities.queue_name_separator}TimeoutsDispatcher"


def is_same_queue(one: str, other: str, capabilities: TransportCapabilities) -> bool:
    """Return whether a transport treats two names, as endpoints write them, as the same queue."""

    def fold(name: str) -> str:
        return (
            name.replace(".", capabilities.queue_name_separator).lower() if capabilities.queue_names_fold_case else name
        )

    return fold(one) == fold(other)


class TimeoutManagerService(Service):
    """The service that stores timeouts of its first queue and dispatches them when they are due.

    Some transports do not distinguish upper case from lower case. With these, the queue of ``delayed_delivery`` is also
    the queue of the timeout manager, and only the delayed delivery receives from it. It understands the messages of
    both, except for orders to remove timeouts; the step of :meth:`wrap_step` handles these.
    """

    def __init__(
        self,
        settings: TimeoutManager,
        context: EndpointContext,
        error_queue: str,
        delayed_delivery: DelayedDelivery | None,
    ) -> None:
        super().__init__(context)
        self._settings, self._error_queue = settings, error_queue
        capabilities, endpoint, persister = context.transport.capabilities, context.endpoint, settings.persister
        shared_persister = sharing_store(persister, persister.database, capabilities.database)
        check_scope(context.mode, persister, context.transport, is_one=shared_persister is not None)
        self._enlisting_persister = shared_persister if context.mode is TransactionMode.TRANSACTION_SCOPE else None
        self._queue = timeout_manager_queue(endpoint, capabilities)
        self._dispatcher_queue = timeout_dispatcher_queue(endpoint, capabilities)
        for each in (self._queue, self._dispatcher_queue):
            subject = "the name of a queue of the timeout manager"
            check_address(each, subject, advice="; give the endpoint a shorter name")
        if delayed_delivery is not None and delayed_delivery.drain_timeout_manager:
            raise ConfigurationError(
                f"endpoint {endpoint!r} has a timeout manager, and a delayed delivery with drain_timeout_manager, "
                f"which is for endpoints whose timeout manager does not run any more: leave out one of them"
            )
        self.shares_queue = delayed_delivery is not None and is_same_queue(
            self._queue, timeouts_queue(endpoint), capabilities
        )
        """Whether the first queue is also the queue of the delayed delivery, which then receives from it."""
        self._due_timeouts: DueTimeouts | None = None

    @override
    async def prepare(self, *, set_up: bool) -> None:
        """Prepare a run. If the storage cannot be set up now, that is retried before each poll (row 102)."""
        context, settings = self._context, self._settings
        await settings.persister.initialize(context.endpoint)
        is_set_up = not set_up or await self._set_up_or_log()
        own_queues = [self._dispatcher_queue] if self.shares_queue else [self._queue, self._dispatcher_queue]
        if set_up:
            await context.transport.create_queues([*own_queues, self._error_queue])
        self._due_timeouts = due_timeouts = DueTimeouts(
            settings.persister,
            context.transport,
            self._dispatcher_queue,
            context.clock,
            set_up=not is_set_up,
            metrics=context.metrics,
        )
        wait = settings.time_to_wait_before_triggering_critical_error
        storage_breaker = context.create_breaker(STORAGE_BREAKER, STORAGE_CRITICAL, settings.persister, wait)
        self._outages, self._deadlines, self._parts, self._breakers = [], [], [], [storage_breaker]
        prefetches = context.transport.capabilities.prefetches
        for queue in own_queues:
            receiver, step = context.transport.receiver(queue), self._create_step(queue, due_timeouts)
            critical = f"Failed to receive messages of the timeout manager from {queue!r}"
            breaker = context.create_breaker("TimeoutManagerReceive", critical, context.transport, queue=queue)
            at_once = settings.messages_at_once
            resource = resource_of(context.transport)
            pump = MessagePump(
                receiver, step, at_once, context.clock, breaker, queue, prefetches=prefetches, resource=resource
            )
            self._parts.append(pump)
            self._breakers.append(breaker)
        self._parts.append(
            Poller(
                due_timeouts,
                context.clock,
                storage_breaker,
                longest_sleep=context.longest_sleep,
                resource=resource_of(settings.persister),
            )
        )

    async def _set_up_or_log(self) -> bool:
        try:
            with translate_store_errors(self._settings.persister):
                await self._settings.persister.setup()
        except PostdateError as error:
            if not error.transient:
                raise
            log.warning("the storage of timeouts cannot be set up yet, and is when it can be reached: %s", error)
            return False
        return True

    def _create_step(self, queue: str, due_timeouts: DueTimeouts) -> Step:
        context, persister = self._context, self._settings.persister
        is_dispatcher = queue == self._dispatcher_queue
        calls = resource_of(persister).calls(f"messages of {queue} wait for the storage of timeouts", log)
        outage = StoreWaits(context.clock, calls)
        self._outages.append(outage)
        recovery = AttemptsRecovery(
            rules=RecoveryRules(
                # Called again at once, the step stores the timeout.
                retry_now_errors=() if is_dispatcher else (DestinationUnavailable,),
                waits_in_hand=True,
                shares_database=self._enlisting_persister is not None,
                counts_transient=True,
            ),
            memory=MessageMemory(),
            outage=outage,
            errors=ErrorQueue(self._error_queue, queue, Host(context.endpoint)),
            clock=context.clock,
            policy=immediate_attempts(ATTEMPTS, MessageError),
            metrics=context.metrics,
            on_moved_to_error=timeout_callback(due_timeouts.stop_expecting) if is_dispatcher else None,
        )
        step: StoreStep | DispatchStep
        if is_dispatcher:
            step = DispatchStep(
                persister, self._enlisting_persister, context.transport, context.clock, due_timeouts.forget, recovery
            )
        else:
            step = StoreStep(
                persister,
                self._enlisting_persister,
                context.endpoint,
                context.clock,
                due_timeouts.report_stored,
                recovery,
            )
        self._deadlines += step.deadlines
        return step.handle

    def wrap_step(self, queue: str, step: Step) -> Step:
        """Return a step that handles orders to remove timeouts, and calls ``step`` for other messages.

        Call this after :meth:`prepare`.
        """
        assert self._due_timeouts is not None
        clear_step = self._create_step(queue, self._due_timeouts)

        async def handle(received: Received) -> StepOutcome:
            return await (clear_step if is_clear_order(received.envelope) else step)(received)

        return handle


def check_timeout_manager(
    manager: TimeoutManager | ExternalTimeoutManager | None, endpoint: str, delayed_delivery: DelayedDelivery | None
) -> TimeoutManager | None:
    """Return the timeout manager that runs in an endpoint, or ``None``; check it."""
    if isinstance(manager, ExternalTimeoutManager):
        if delayed_delivery is not None:
            raise ConfigurationError(
                f"endpoint {endpoint!r} has a delayed delivery of its own and an external timeout manager: leave out "
                f"one of them"
            )
        return None
    if manager is not None and not isinstance(manager, TimeoutManager):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigurationError(
            f"timeout_manager must be TimeoutManager(persister) or ExternalTimeoutManager(address), not "
            f"{type(manager).__name__}"
        )
    return manager

"""How what an endpoint delays leaves it: into the store, or through the queue of whoever keeps it. ADR 0009, 0014."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial

from postdate.core.dispatcher import enlisting
from postdate.core.repetitions import RepeatableStoring
from postdate.core.timeout_manager.reading import clear_timeouts, to_timeout_manager
from postdate.endpoint.delayed_delivery import timeouts_queue
from postdate.endpoint.saga_handling import enlisting_sagas
from postdate.endpoint.sending import through_queue
from postdate.endpoint.settings import DelayedDelivery, ExternalTimeoutManager, TimeoutManager
from postdate.endpoint.timeout_manager import enlisting_timeouts, timeout_manager_queue
from postdate.errors import DelayedDeliveryNotConfigured
from postdate.messages import DelayedMessage, Envelope, new_message_id
from postdate.ports import MovingStore, SagaStore, TransactionMode, Transport

Outgoing = Envelope | DelayedMessage


@dataclass(frozen=True, slots=True)
class Delays:
    """Where delayed messages go.

    Args:
        endpoint: its name.
        store: where they are stored directly, in the database of the queues; ``None``: they go through a queue.
        carry: makes of a delayed message what goes through that queue; ``None``: nothing can be delayed.
        timeout_manager: its queue; ``None``: there is none.
    """

    endpoint: str
    store: MovingStore | None
    carry: Callable[[DelayedMessage], Envelope] | None
    timeout_manager: str | None

    @property
    def are_possible(self) -> bool:
        """Whether messages can be delayed."""
        return self.carry is not None

    def check(self) -> None:
        """Refuse a delayed send where nobody would keep the message.

        Raises:
            DelayedDeliveryNotConfigured: says what to do (row 15).
        """
        if self.carry is None:
            raise DelayedDeliveryNotConfigured(
                f"endpoint {self.endpoint!r} cannot delay messages: it has no delayed message store; pass "
                f"delayed_delivery=DelayedDelivery(store) when you create it"
            )

    def leave_first(self, mode: TransactionMode) -> bool:
        """Return whether what a handler delays leaves before its message does, for a store that knows used ids."""
        return mode is TransactionMode.RECEIVE_ONLY and self.store is None and self.timeout_manager is None

    def split(self, outgoing: Sequence[Outgoing]) -> tuple[list[Envelope], list[DelayedMessage]]:
        """Return what is to be sent, and what is to be stored in the database of the queues."""
        envelopes = [message for message in outgoing if isinstance(message, Envelope)]
        delayed = [message for message in outgoing if isinstance(message, DelayedMessage)]
        if self.store is not None or not delayed:
            return envelopes, delayed
        self.check()
        assert self.carry is not None
        return [*envelopes, *map(self.carry, delayed)], []

    async def store_now(self, delayed: Sequence[DelayedMessage], now: datetime) -> None:
        """Store what :meth:`split` has said is to be stored, each in a transaction of its own."""
        for message in delayed:
            assert self.store is not None
            await self.store.store(message, now)

    def storing(self, delayed: Sequence[DelayedMessage], now: datetime) -> list[RepeatableStoring]:
        """Return the work that stores what :meth:`split` has said is to be stored."""
        return [RepeatableStoring(self.store, delayed, now)] if self.store is not None and delayed else []

    def clear_timeouts(self, saga_id: uuid.UUID) -> Envelope | None:
        """Return the order to forget all timeouts of a saga, for whoever completes it; ``None``: nobody would obey it.

        A delayed delivery has nothing of the kind: what it keeps arrives, and is ignored (specification 4.10). In a
        hybrid the order is about the timeouts that are still in the storage of the timeout manager.
        """
        if self.timeout_manager is None:
            return None
        return clear_timeouts(saga_id, self.timeout_manager, new_message_id())


def delays_of(
    endpoint: str,
    transport: Transport,
    delayed_delivery: DelayedDelivery | None,
    timeout_manager: TimeoutManager | ExternalTimeoutManager | None,
) -> Delays:
    """Return where an endpoint's delayed messages go: with both settings, to the delayed delivery (row 88)."""
    manager: str | None = None
    if isinstance(timeout_manager, ExternalTimeoutManager):
        manager = timeout_manager.address
    elif timeout_manager is not None:
        manager = timeout_manager_queue(endpoint, transport.capabilities)
    if delayed_delivery is not None:
        carry = partial(through_queue, queue=timeouts_queue(endpoint))
        return Delays(endpoint, enlisting(delayed_delivery.claims, transport), carry, manager)
    carry = None if manager is None else partial(to_timeout_manager, queue=manager)
    return Delays(endpoint, None, carry, manager)


def strongest_mode(
    transport: Transport,
    delayed_delivery: DelayedDelivery | None,
    timeout_manager: TimeoutManager | None = None,
    sagas: SagaStore | None = None,
) -> TransactionMode:
    """Return the strongest transaction mode that transport and stores can keep together."""
    modes = transport.capabilities.transaction_modes
    if delayed_delivery is not None:
        modes &= delayed_delivery.claims.capabilities.transaction_modes
        if enlisting(delayed_delivery.claims, transport) is None:
            modes -= {TransactionMode.TRANSACTION_SCOPE}
    if timeout_manager is not None and enlisting_timeouts(timeout_manager.persister, transport) is None:
        modes -= {TransactionMode.TRANSACTION_SCOPE}
    if sagas is not None and enlisting_sagas(sagas, transport.capabilities.database) is None:
        modes -= {TransactionMode.TRANSACTION_SCOPE}
    strength = list(TransactionMode)
    return max(modes, key=strength.index, default=TransactionMode.NONE)

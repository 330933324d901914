"""The abilities of adapters that operations need, the error when an adapter lacks one, and readiness checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime

from postdate import ports
from postdate.clock import SystemClock
from postdate.config import Settings
from postdate.errors import NotSupported, PostdateError, QueueNotFound, StoreNotSetUp
from postdate.ports.limits import LimitingStore
from postdate.wiring import OpenDeployment, delay_exchange, intake_queues, locate_errors, service_queues


def require_administrable(deployment: OpenDeployment, purpose: str) -> ports.AdministrableStore:
    """Return the store if an operator can list and change its messages. Otherwise raise NotSupported.

    ``purpose`` completes "cannot", such as ``list messages``.
    """
    store = deployment.required_store
    if isinstance(store, ports.AdministrableStore):
        return store
    address = deployment.settings.store.address
    raise NotSupported(f"cannot {purpose}: the store {address!r} does not support listing and changing its messages")


def require_queue_view(deployment: OpenDeployment, purpose: str) -> ports.Observer:
    """Return the observer of the queues. Raise NotSupported without one; see :func:`require_administrable`."""
    if deployment.queue_view is not None:
        return deployment.queue_view
    raise NotSupported(
        f"cannot {purpose}: the queues at {deployment.settings.transport.address!r} cannot be browsed without "
        f"removing messages; use the server's own tools"
    )


async def read_present(deployment: OpenDeployment) -> datetime:
    """Return the UTC time by which services judge due times: the clock of the store, if it has one that is used."""
    store = deployment.store
    if store is not None and store.capabilities.has_clock and deployment.settings.delayed_delivery.use_store_clock:
        # A store without tables, such as one before setup, has no messages whose due time could be judged.
        with suppress(StoreNotSetUp):
            return await store.server_now()
    return SystemClock().now()


# --- what is asked where it can be ---------------------------------------------------------------------------------


async def read_queue_lengths(deployment: OpenDeployment, names: Sequence[str]) -> Mapping[str, int] | None:
    """Return the lengths of existing queues: of all if they can be listed, else of those in ``names``.

    Return ``None`` if a transport cannot even say which queues exist.
    """
    if deployment.queue_view is not None:
        return await deployment.queue_view.queue_lengths()
    return await deployment.transport.lengths_of(list(dict.fromkeys(names)))


def all_intake_queues(settings: Settings, transport: ports.Transport) -> list[str]:
    """Return the queues from which the service receives messages to delay, including those of an exchange."""
    queues, exchange = intake_queues(settings, transport.capabilities), delay_exchange(settings, transport)
    if exchange is not None and isinstance(transport, ports.ForeignIntake):
        queues += [each.name for each in transport.intake_queues(exchange)]
    return queues


async def has_queue(deployment: OpenDeployment, queue: str) -> bool | None:
    """Return whether the queue exists; ``None`` if that cannot be known. No other queue is counted."""
    if deployment.queue_view is not None:
        with suppress(QueueNotFound):
            await deployment.queue_view.browse(queue, 1)
            return True
        return False
    queue_lengths = await read_queue_lengths(deployment, [queue])
    return None if queue_lengths is None else queue in queue_lengths


async def list_store_processes(deployment: OpenDeployment) -> Sequence[ports.Process] | None:
    """Return the processes that use the store; ``None`` if they cannot be known."""
    return None if deployment.store_view is None else await deployment.store_view.processes()


async def find_pending_state(deployment: OpenDeployment, message_id: str) -> ports.PendingState | None:
    """Return a pending message with as much as the store knows of it; ``None`` if the message is not pending."""
    if deployment.store_view is not None:
        return await deployment.store_view.pending_state_of(message_id)
    message = await require_administrable(deployment, "find a message").get(message_id)
    return None if message is None else ports.PendingState(message, message.due)


async def retries_of(deployment: OpenDeployment, message_id: str) -> Sequence[ports.PendingState]:
    """Return the pending delayed retries of a message; empty if they cannot be known."""
    return () if deployment.store_view is None else await deployment.store_view.retries_of(message_id)


async def find_in_queues(deployment: OpenDeployment, message_id: str) -> Sequence[ports.QueuedMessage]:
    """Return the places of the message in queues; empty if queues cannot be browsed."""
    return () if deployment.queue_view is None else await deployment.queue_view.find_in_queues(message_id)


# --- before a service starts: whether everything it needs is there ----------------------------------------------------


async def check_readable(deployment: OpenDeployment) -> None:
    """Raise the store's error if due messages cannot be read and waiting will not help, as with a damaged file.

    Without this check, only the poller would report the error, again and again.
    """
    if deployment.store is None:
        return
    try:
        await deployment.store.next_attempt()
    except PostdateError as error:
        if not error.transient:
            raise


async def check_setup(deployment: OpenDeployment) -> None:
    """Raise StoreNotSetUp if tables, indexes or queues are missing. Otherwise a service can start and create nothing.

    The store need not be initialized.
    """
    settings = deployment.settings
    if deployment.store is not None:
        await deployment.store.initialize(settings.endpoint.name, ports.TransactionMode.RECEIVE_ONLY)
        await _check_objects(deployment.store, settings)  # before statements that force the use of an index
        await deployment.store.next_attempt()
        if isinstance(deployment.store, LimitingStore):
            await deployment.store.load_limits()
    now = SystemClock().now()
    with locate_errors(settings, "timeout_manager.address"):
        for endpoint, timeouts in deployment.timeouts.items():
            await timeouts.initialize(endpoint)
            await timeouts.next_chunk(now, now, 1)
    needed = service_queues(settings, deployment.transport.capabilities)
    needed = list(dict.fromkeys([*all_intake_queues(settings, deployment.transport), *needed]))
    existing_queues = await read_queue_lengths(deployment, needed)
    missing = [name for name in needed if existing_queues is not None and name not in existing_queues]
    if missing:
        origin = settings.origin("transport.address")
        raise StoreNotSetUp(
            f"{settings.transport.address!r} (transport.address, {origin}) lacks queues of the endpoint "
            f"{settings.endpoint.name!r}: {', '.join(missing)}; run `postdate setup`, or start without --no-setup"
        )


async def _check_objects(store: ports.ClaimingStore, settings: Settings) -> None:
    """Raise StoreNotSetUp if migrations, tables or indexes are missing: without an index, each query reads a table.

    It does not judge a place without any tables. There the next call of the store raises the error.
    """
    facts = await store.server_facts() if isinstance(store, ports.AdministrableStore) else None
    if facts is None or not facts.schema_version:
        return
    where = f"{settings.store.address!r} (store.address, {settings.origin('store.address')})"
    if facts.newest_schema_version is not None and facts.schema_version < facts.newest_schema_version:
        raise StoreNotSetUp(
            f"{where} has version {facts.schema_version} of its tables, this Postdate needs "
            f"{facts.newest_schema_version}; run `postdate setup`, or start without --no-setup"
        )
    if facts.missing_objects:
        raise StoreNotSetUp(
            f"{where} lacks {', '.join(facts.missing_objects)}; run `postdate setup`, which creates indexes again. "
            f"Restore a missing table with its rows from the backup"
        )

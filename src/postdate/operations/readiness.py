"""Checks once, before a service starts, that everything it needs is there."""

from __future__ import annotations

from postdate.clock import SystemClock
from postdate.errors import PostdateError, StoreNotSetUp
from postdate.operations.needs import lengths, sources
from postdate.ports import TransactionMode
from postdate.wiring import OpenDeployment, dispatcher_queues, placing_errors


async def check_readable(deployment: OpenDeployment) -> None:
    """Raise the store's error if due messages cannot be looked up and waiting will not help, as with a damaged file.

    Otherwise only the poller would report it, again and again.
    """
    if deployment.store is None:
        return
    try:
        await deployment.store.next_attempt()
    except PostdateError as error:
        if not error.transient:
            raise


async def check_set_up(deployment: OpenDeployment) -> None:
    """Raise StoreNotSetUp if tables or queues are missing; otherwise a service can start without creating anything.

    The store need not be initialized.
    """
    settings = deployment.settings
    if deployment.store is not None:
        await deployment.store.initialize(settings.endpoint.name, TransactionMode.RECEIVE_ONLY)
        await deployment.store.next_attempt()
    now = SystemClock().now()
    with placing_errors(settings, "timeout_manager.address"):
        for endpoint, timeouts in deployment.timeouts.items():
            await timeouts.initialize(endpoint)
            await timeouts.next_chunk(now, now, 1)
    dispatching = dispatcher_queues(settings, deployment.transport.capabilities)
    needed = [*sources(settings, deployment.transport), *dispatching, settings.endpoint.error_queue]
    there = await lengths(deployment, needed)
    missing = [name for name in needed if there is not None and name not in there]
    if missing:
        origin = settings.origins.get("transport.address", "default")
        raise StoreNotSetUp(
            f"{settings.transport.address!r} (transport.address, {origin}) lacks queues of the endpoint "
            f"{settings.endpoint.name!r}: {', '.join(missing)}; run `postdate setup`, or start without --no-setup"
        )

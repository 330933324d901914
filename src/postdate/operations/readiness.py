"""Is everything there that a service needs? Asked once, before it starts."""

from __future__ import annotations

from postdate.clock import SystemClock
from postdate.errors import PostdateError, StoreNotSetUp
from postdate.operations.needs import lengths, sources
from postdate.ports import TransactionMode
from postdate.wiring import OpenDeployment, dispatcher_queues, placing_errors


async def check_readable(deployment: OpenDeployment) -> None:
    """Return if what is due can be looked for, now or after an outage.

    Args:
        deployment: open, with its store initialized and set up.

    Raises:
        StoreError: no waiting will mend it, as a damaged file: it would be said by the poller only, again and again.
    """
    if deployment.store is None:
        return
    try:
        await deployment.store.next_attempt()
    except PostdateError as error:
        if not error.transient:
            raise


async def check_set_up(deployment: OpenDeployment) -> None:
    """Return if a service can start without creating anything.

    Args:
        deployment: open; its store need not be initialized.

    Raises:
        StoreNotSetUp: tables or queues are missing; says which, and how to create them.
        StoreUnavailable, TransportUnavailable: a server does not answer.
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

"""Set up an installation, and send a message by hand."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Literal, TypeVar

from postdate import wiring
from postdate.config import Settings
from postdate.core.upkeep.store_clock import FollowingClock
from postdate.endpoint.message_types import JSON_CONTENT_TYPE
from postdate.endpoint.send_options import SendOptions
from postdate.errors import PostdateError, StoreNotSetUp
from postdate.messages import DelayedMessage, Headers
from postdate.operations.doctor.servers import diagnose_queue_limits
from postdate.operations.needs import has_queue, list_store_processes, read_queue_lengths
from postdate.operations.plain import running_services
from postdate.ports import ForeignIntake

log = logging.getLogger("postdate.operations")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SetupResult:
    """Everything that exists after setup.

    Args:
        store, transport: addresses, without secrets.
        queues: the endpoint's own, the configured ones, and ``queues`` of the call.
        created: the queues that did not exist before; ``None`` if that cannot be known.
        exchange: the exchange for delayed messages of other programs; ``None`` if there is none.
        timeouts, sagas, outbox: addresses, if their tables were created, too.
        limits: the limits at which the server drops messages of these queues.
    """

    store: str | None
    transport: str
    queues: Sequence[str]
    created: Sequence[str] | None
    exchange: str | None = None
    timeouts: str | None = None
    sagas: str | None = None
    outbox: str | None = None
    limits: Sequence[str] = ()


async def set_up(
    deployment: wiring.OpenDeployment, queues: Sequence[str] = (), *, sagas: bool = False, outbox: bool = False
) -> SetupResult:
    """Create the tables and queues that do not exist. ``queues`` names additional queues.

    ``sagas`` and ``outbox`` create their table even if no section of the settings names a place for it: the table is
    then in the database of the store.
    """
    settings = deployment.settings
    all_queues = list(dict.fromkeys([*wiring.own_queues(settings, deployment.transport.capabilities), *queues]))
    if deployment.store is not None:
        await deployment.store.setup()
    existing_queues: Mapping[str, int] | None = {}
    with suppress(StoreNotSetUp):  # The tables of the queues are created together with the first queue.
        existing_queues = await read_queue_lengths(deployment, all_queues)
    await deployment.transport.create_queues(all_queues)
    exchange = wiring.delay_exchange(settings, deployment.transport)
    if exchange is not None and isinstance(deployment.transport, ForeignIntake):
        await deployment.transport.create_intake(exchange)
    with wiring.locate_errors(settings, "timeout_manager.address"):
        for endpoint, timeouts in deployment.timeouts.items():
            await timeouts.initialize(endpoint)
            await timeouts.setup()
    timeouts_address = settings.timeout_manager.address
    return SetupResult(
        store=None if deployment.store is None else settings.store.address.redacted_text,
        transport=settings.transport.address.redacted_text,
        queues=all_queues,
        created=None if existing_queues is None else [name for name in all_queues if name not in existing_queues],
        exchange=None if exchange is None else exchange.name,
        timeouts=None if timeouts_address is None else timeouts_address.redacted_text,
        sagas=await _set_up_part(settings, "sagas") if wiring.is_enabled(settings.sagas, sagas) else None,
        outbox=await _set_up_part(settings, "outbox") if wiring.is_enabled(settings.outbox, outbox) else None,
        limits=[limit.found for limit in await diagnose_queue_limits(deployment.transport, all_queues)],
    )


async def _set_up_part(settings: Settings, section: Literal["sagas", "outbox"]) -> str:
    """Create the tables of sagas or the outbox, and return their address."""
    section_settings = settings.sagas if section == "sagas" else settings.outbox
    with wiring.locate_errors(settings, "store.address" if section_settings.address is None else f"{section}.address"):
        part = wiring.open_saga_store(settings) if section == "sagas" else wiring.open_outbox(settings)
        try:
            await part.setup()
        finally:
            await part.close()
    return wiring.address_of_section(section_settings, settings).redacted_text


@dataclass(frozen=True, slots=True)
class SendReport:
    """A message that was sent.

    Args:
        due: ``None``: the message is in its queue already.
        queue_exists: ``False``: the message waits for its queue for some minutes when it is due, and then goes to the
            error queue; ``None``: that cannot be known.
        services: number of processes that deliver due messages now; ``None``: that cannot be seen.
    """

    message_id: str
    destination: str
    due: datetime | None
    queue_exists: bool | None
    services: int | None


async def send(
    deployment: wiring.OpenDeployment, body: bytes, options: SendOptions, message_type: str | None = None
) -> SendReport:
    """Send a message at once, or store it until it is due. Return after the commit.

    A header in ``options`` overrides the header that Postdate would write.

    Raises:
        DelayConflict, InvalidMessage, InvalidHeaders, MessageTooLarge: the request is wrong; nothing was sent.
        DuplicateMessage: the id was used before.
        QueueNotFound: the queue of a message without delay is missing; nothing was sent.
    """
    endpoint = wiring.build_endpoint(deployment)
    options = replace(options, headers={**_content_headers(body, message_type), **(options.headers or {})})
    # A delay is added to the time of the clock that later judges the due time.
    if isinstance(endpoint.clock, FollowingClock):
        await endpoint.clock.read()
    outgoing = endpoint.outgoing.create(body, options)
    await endpoint.outgoing.send([outgoing])
    processes = await _try_to_see(list_store_processes(deployment), "whether a service runs")
    return SendReport(
        message_id=outgoing.message_id,
        destination=outgoing.destination,
        due=outgoing.due if isinstance(outgoing, DelayedMessage) else None,
        queue_exists=await _try_to_see(has_queue(deployment, outgoing.destination), "whether the queue exists"),
        services=None if processes is None else len(running_services(processes)),
    )


async def _try_to_see(question: Awaitable[T], what: str) -> T | None:
    """Return the answer; ``None`` if the store has none, as with tables of an earlier version.

    The message is stored already. A caller who got an error would send it again.
    """
    try:
        return await question
    except PostdateError as error:
        log.info("%s cannot be seen: %s", what, error)
        return None


def _content_headers(body: bytes, message_type: str | None) -> dict[str, str]:
    headers = {} if message_type is None else {Headers.ENCLOSED_MESSAGE_TYPES: message_type}
    try:
        json.loads(body)
    except (ValueError, RecursionError):  # deeper than Python reads, and so no JSON that a receiver could read
        return headers
    return {Headers.CONTENT_TYPE: JSON_CONTENT_TYPE, **headers}

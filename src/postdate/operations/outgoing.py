"""Set up an installation, and send a message by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Literal

from postdate.config import Settings
from postdate.core.upkeep.store_clock import FollowingClock
from postdate.endpoint.message_types import JSON_CONTENT_TYPE
from postdate.endpoint.send_options import SendOptions
from postdate.errors import StoreNotSetUp
from postdate.messages import DelayedMessage, Headers
from postdate.operations.doctor.servers import limits_on_server
from postdate.operations.needs import exists, lengths, users_of_store
from postdate.operations.plain import delivering
from postdate.ports import ForeignIntake
from postdate.wiring import (
    OpenDeployment,
    build_endpoint,
    delay_exchange,
    is_enabled,
    open_outbox,
    open_saga_store,
    own_queues,
    place_of,
    placing_errors,
)


@dataclass(frozen=True, slots=True)
class SetUp:
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
    deployment: OpenDeployment, queues: Sequence[str] = (), *, sagas: bool = False, outbox: bool = False
) -> SetUp:
    """Create the tables and queues that do not exist. ``queues`` names additional queues.

    ``sagas`` and ``outbox`` create their table even if no section of the settings names a place for it: the table is
    then in the database of the store.
    """
    settings = deployment.settings
    all_queues = list(dict.fromkeys([*own_queues(settings, deployment.transport.capabilities), *queues]))
    if deployment.store is not None:
        await deployment.store.setup()
    before: Mapping[str, int] | None = {}
    with suppress(StoreNotSetUp):  # The tables of the queues are created together with the first queue.
        before = await lengths(deployment, all_queues)
    await deployment.transport.create_queues(all_queues)
    exchange = delay_exchange(settings, deployment.transport)
    if exchange is not None and isinstance(deployment.transport, ForeignIntake):
        await deployment.transport.create_intake(exchange)
    with placing_errors(settings, "timeout_manager.address"):
        for endpoint, timeouts in deployment.timeouts.items():
            await timeouts.initialize(endpoint)
            await timeouts.setup()
    timeouts_at = settings.timeout_manager.address
    return SetUp(
        store=None if deployment.store is None else settings.store.address.shown,
        transport=settings.transport.address.shown,
        queues=all_queues,
        created=None if before is None else [name for name in all_queues if name not in before],
        exchange=None if exchange is None else exchange.name,
        timeouts=None if timeouts_at is None else timeouts_at.shown,
        sagas=await _set_up_part(settings, "sagas") if is_enabled(settings.sagas, sagas) else None,
        outbox=await _set_up_part(settings, "outbox") if is_enabled(settings.outbox, outbox) else None,
        limits=[limit.found for limit in await limits_on_server(deployment.transport, all_queues)],
    )


async def _set_up_part(settings: Settings, section: Literal["sagas", "outbox"]) -> str:
    """Create the tables of sagas or the outbox, and return their address."""
    chosen = settings.sagas if section == "sagas" else settings.outbox
    with placing_errors(settings, "store.address" if chosen.address is None else f"{section}.address"):
        part = open_saga_store(settings) if section == "sagas" else open_outbox(settings)
        try:
            await part.setup()
        finally:
            await part.close()
    return place_of(chosen, settings).shown


@dataclass(frozen=True, slots=True)
class SendReport:
    """A message that was sent.

    Args:
        due: ``None``: the message is in its queue already.
        queue_exists: ``False``: the message will go to the error queue when it is due; ``None``: that cannot be known.
        services: number of processes that deliver due messages now; ``None``: that cannot be seen.
    """

    message_id: str
    destination: str
    due: datetime | None
    queue_exists: bool | None
    services: int | None


async def send(
    deployment: OpenDeployment, body: bytes, options: SendOptions, message_type: str | None = None
) -> SendReport:
    """Send a message at once, or store it until it is due. Return after the commit.

    A header in ``options`` overrides the header that Postdate would write.

    Raises:
        DelayConflict, InvalidMessage, InvalidHeaders, MessageTooLarge: the request is wrong; nothing was sent.
        DuplicateMessage: the id was used before.
        QueueNotFound: the queue of a message without delay is missing; nothing was sent.
    """
    endpoint = build_endpoint(deployment)
    options = replace(options, headers={**_content_headers(body, message_type), **(options.headers or {})})
    # A delay is added to the time of the clock that later judges the due time.
    if isinstance(endpoint.clock, FollowingClock):
        await endpoint.clock.read()
    outgoing = endpoint.outgoing.make(body, options)
    await endpoint.outgoing.send([outgoing])
    processes = await users_of_store(deployment)
    return SendReport(
        message_id=outgoing.message_id,
        destination=outgoing.destination,
        due=outgoing.due if isinstance(outgoing, DelayedMessage) else None,
        queue_exists=await exists(deployment, outgoing.destination),
        services=None if processes is None else len(delivering(processes)),
    )


def _content_headers(body: bytes, message_type: str | None) -> dict[str, str]:
    headers = {} if message_type is None else {Headers.ENCLOSED_MESSAGE_TYPES: message_type}
    try:
        json.loads(body)
    except ValueError:
        return headers
    return {Headers.CONTENT_TYPE: JSON_CONTENT_TYPE, **headers}

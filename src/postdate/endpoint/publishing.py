"""Events: messages for everybody who asked for them, where the queues can do that. Source: specification 5."""

from __future__ import annotations

from collections.abc import Mapping

from postdate.endpoint.sending import SendOptions
from postdate.errors import NotSupported
from postdate.messages import Headers
from postdate.ports import PublishingTransport, Transport


def publishing(transport: Transport) -> PublishingTransport:
    """Return the transport if it can publish.

    Raises:
        NotSupported: it cannot.
    """
    if not isinstance(transport, PublishingTransport):
        raise NotSupported(
            f"the queues of {type(transport).__name__} cannot publish, and nobody can subscribe there: send the "
            f"message to each of its receivers, or use RabbitMqTransport"
        )
    return transport


def publish_options(
    transport: Transport, event: str, headers: Mapping[str, str] | None, message_id: str | None
) -> SendOptions:
    """Return how an event is sent. It cannot be delayed (row 7).

    Raises:
        NotSupported: the queues cannot publish.
    """
    address = publishing(transport).event_address(event)
    return SendOptions(address, headers={Headers.MESSAGE_INTENT: "Publish", **(headers or {})}, message_id=message_id)

"""How a reply finds its way: to the queue that asked for it, and to the saga instance that asked. Pure; ADR 0016.

What a saga sends says which instance sent it. Whoever replies copies that, under the names by which timeouts find their
instances. So any endpoint that does the same can take part, whatever it is written in.
"""

from __future__ import annotations

from collections.abc import Mapping

from postdate.endpoint.sending import SendOptions
from postdate.errors import InvalidMessage
from postdate.messages import Headers


def sent_by_saga(saga_id: str, saga_type: str) -> Mapping[str, str]:
    """Return the headers of what a saga instance sends."""
    return {Headers.ORIGINATING_SAGA_ID: saga_id, Headers.ORIGINATING_SAGA_TYPE: saga_type}


def to_saga_of(incoming: Mapping[str, str]) -> Mapping[str, str]:
    """Return the headers by which a reply to a message finds the saga instance that sent it, if one did."""
    saga_id = incoming.get(Headers.ORIGINATING_SAGA_ID, "")
    saga_type = incoming.get(Headers.ORIGINATING_SAGA_TYPE, "")
    return {Headers.SAGA_ID: saga_id, Headers.SAGA_TYPE: saga_type} if saga_id and saga_type else {}


def reply_options(incoming: Mapping[str, str], message_id: str, headers: Mapping[str, str] | None) -> SendOptions:
    """Return how a reply is sent.

    Args:
        incoming: headers of the message that is replied to.
        message_id: of it.
        headers: of the application; they win.

    Raises:
        InvalidMessage: it names no address for replies.
    """
    address = incoming.get(Headers.REPLY_TO_ADDRESS)
    if not address:
        raise InvalidMessage(f"message {message_id!r} has no header {Headers.REPLY_TO_ADDRESS!r} to reply to")
    own = {Headers.MESSAGE_INTENT: "Reply", **to_saga_of(incoming), **(headers or {})}
    return SendOptions(destination=address, headers=own)

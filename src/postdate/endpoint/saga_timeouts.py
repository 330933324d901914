"""Pending timeouts of a saga instance, and who began it: the part of its record that is Postdate's own. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

import msgspec

from postdate.endpoint.sending import to_saga_of
from postdate.errors import InvalidMessage
from postdate.messages import Headers

_FIRED_REMEMBERED: Final = 32


@dataclass(slots=True)
class PendingTimeout:
    """A timeout that was requested and has not come.

    ``message_id`` is another after it was moved. ``type`` is its name on the wire, ``body`` JSON, to move it and to
    send it again. ``requested_by`` is the id of the message whose handler requested it.
    """

    message_id: str
    due: datetime
    type: str
    body: msgspec.Raw
    requested_by: str = ""


@dataclass(frozen=True, slots=True)
class Originator:
    """Who sent the message that began an instance: the address for replies, and the headers that these get."""

    address: str
    headers: Mapping[str, str]


def originator_of(headers: Mapping[str, str]) -> Originator | None:
    """Return who sent a message; ``None``: it wants no reply."""
    address = headers.get(Headers.REPLY_TO_ADDRESS)
    if not address:
        return None
    correlation = headers.get(Headers.CORRELATION_ID) or headers.get(Headers.MESSAGE_ID, "")
    about = {Headers.CORRELATION_ID: correlation} if correlation else {}
    return Originator(address, {**about, **to_saga_of(headers)})


@dataclass(slots=True)
class SagaDetails:
    """What Postdate remembers of an instance.

    Args:
        timeouts: those pending, by the id that :meth:`Saga.request_timeout` returned.
        fired: message ids of the last timeouts that came, so that one whose handling was kept and whose messages were
            not sent (a killed process) is handled again; only where these two are not one transaction.
        completed_by: id of the message that completed it, until the record is removed; likewise.
        originator: who sent the message that began it; ``None``: nobody who wants a reply.
    """

    timeouts: dict[str, PendingTimeout] = field(default_factory=dict[str, PendingTimeout])
    fired: list[str] = field(default_factory=list[str])
    completed_by: str | None = None
    originator: Originator | None = None

    def timeout_of(self, message_id: str) -> str | None:
        """Return the id of the pending timeout that travels under ``message_id``, or ``None``."""
        return next((key for key, each in self.timeouts.items() if each.message_id == message_id), None)

    def expects(self, message_id: str) -> bool:
        """Return whether to handle a timeout: it is pending, or came just now and may be unfinished."""
        return message_id in self.fired or self.timeout_of(message_id) is not None

    def came(self, message_id: str, *, remember: bool) -> None:
        """Note that a timeout was handled; ``remember`` it where that may have to be repeated."""
        timeout_id = self.timeout_of(message_id)
        if timeout_id is not None:
            del self.timeouts[timeout_id]
            if remember:
                self.fired = [*self.fired, message_id][-_FIRED_REMEMBERED:]

    def is_over_for(self, message_id: str) -> bool:
        """Return whether the instance was completed by another message than ``message_id``."""
        return self.completed_by is not None and self.completed_by != message_id


def encoded(details: SagaDetails) -> str:
    return msgspec.json.encode(details).decode()


def decoded(text: str, saga: str) -> SagaDetails:
    try:
        return msgspec.json.decode(text, type=SagaDetails)
    except msgspec.MsgspecError as error:
        raise InvalidMessage(f"what is kept of {saga} cannot be read: {error}") from error

"""Copies of handled messages for the audit queue. Source: specification 2.5."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta

from postdate.core.recoverability import Host
from postdate.endpoint.time_to_be_received import checked_span, finite
from postdate.errors import ConfigurationError, InvalidMessage
from postdate.messages import DESTINATION_LIMIT, Envelope, Headers, check_text, format_timestamp
from postdate.ports import TransportCapabilities


@dataclass(frozen=True, slots=True)
class Audit:
    """Keep a copy of every message that was handled.

    The copy outlives the time to be received of its message, and keeps its header for information.

    Args:
        queue: for the copies.
        time_to_be_received: of the copies themselves; ``None``: they are kept until somebody takes them.

    Raises:
        ConfigurationError: the queue is no address, or the time is not above zero.
    """

    queue: str
    time_to_be_received: timedelta | None = None

    def __post_init__(self) -> None:
        try:
            check_text(self.queue, "the name of the audit queue", DESTINATION_LIMIT)
        except InvalidMessage as error:
            raise ConfigurationError(str(error)) from error
        if self.time_to_be_received is not None:
            checked_span(self.time_to_be_received, "the time to be received of audit copies")

    def check(self, can: TransportCapabilities, own_queues: Collection[str], *, in_transactions: bool) -> None:
        """Refuse copies that come back, and copies that expire where that could cost other messages (row 73).

        ``in_transactions``: copies leave in the transaction that takes their message off its queue; with an outbox, or
        in transaction mode ``none``, they do not.
        """
        if self.queue in own_queues:
            raise ConfigurationError(
                f"audit copies cannot go to {self.queue!r}, which the endpoint uses itself; give them their own queue"
            )
        if finite(self.time_to_be_received) is None:
            return
        if not can.expires_messages:
            raise ConfigurationError("audit copies cannot expire: the queues of this transport do not expire messages")
        if in_transactions and not can.time_to_be_received_in_transactions:
            raise ConfigurationError(
                "Setting a custom OverrideTimeToBeReceived for audits is not supported on transactional MSMQ."
            )

    def copy(self, handled: Envelope, started: datetime, ended: datetime, host: Host) -> Envelope:
        """Return the copy of a message; ``started`` and ``ended``, UTC, are of its handling."""
        headers = {
            **handled.headers,
            Headers.PROCESSING_STARTED: format_timestamp(started),
            Headers.PROCESSING_ENDED: format_timestamp(ended),
            Headers.PROCESSING_ENDPOINT: host.endpoint,
            Headers.PROCESSING_MACHINE: host.machine,
            Headers.HOST_ID: host.host_id,
            Headers.HOST_DISPLAY_NAME: host.display_name,
        }
        return Envelope(
            self.queue, handled.message_id, headers, handled.body, time_to_be_received=finite(self.time_to_be_received)
        )

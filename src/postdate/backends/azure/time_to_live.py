"""How long a queue keeps a message. Source: specification 2.5, the lines on Azure Storage Queues."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

from postdate.errors import InvalidMessage
from postdate.messages import Envelope, Headers

LONGEST: Final = timedelta(days=30)
"""Upstream's limit, and its default."""

FOR_EVER: Final = -1
"""Azure's value."""

PRECISION: Final = timedelta(seconds=1)


def time_to_live(envelope: Envelope, now: datetime) -> int | None:
    """Return the queue's time to live in seconds, rounded up; ``None``: it has expired and is not sent.

    Copies in an error queue never expire. Raises `InvalidMessage` for more than 30 days.
    """
    if Headers.FAILED_QUEUE in envelope.headers:
        return FOR_EVER
    span = envelope.time_to_be_received
    if span is not None and span > LONGEST:
        raise InvalidMessage(
            f"message {envelope.message_id!r} to {envelope.destination} has a time to be received of {span}; a queue "
            f"in Azure must not be told more than 30 days: send it with less, or without"
        )
    left = envelope.time_left(now)
    shortest = LONGEST if left is None else min(LONGEST, left)
    return None if shortest <= timedelta(0) else -(-shortest // PRECISION)

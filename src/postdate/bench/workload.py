"""Messages to measure with: about 200 bytes of headers and 300 of body, as in the facts about physical limits."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta

from postdate.messages import DelayedMessage, Headers, new_message_id

QUEUE = "bench"
BODY = b"x" * 300
BATCH = 5_000


def message(due: datetime) -> DelayedMessage:
    """Return a message of the usual size."""
    message_id = new_message_id()
    headers = {Headers.MESSAGE_ID: message_id, "Bench.Filler": "y" * 140}
    return DelayedMessage(message_id, due, QUEUE, headers, BODY)


def batches(n: int, first_due: datetime, spacing: timedelta) -> Iterator[list[DelayedMessage]]:
    """Yield ``n`` messages in batches, due at even distances."""
    for start in range(0, n, BATCH):
        count = min(BATCH, n - start)
        yield [message(first_due + spacing * (start + offset)) for offset in range(count)]

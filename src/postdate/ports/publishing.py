"""What publishing needs from queues: an address for a kind of event, at which queues can be subscribed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable


@runtime_checkable
class PublishingTransport(Protocol):
    """Queues whose server gives one message to all who asked for it."""

    def event_address(self, event: str) -> str:
        """Return the destination that means: everybody who is subscribed to these events, which may be nobody.

        Args:
            event: name of a message type.

        Raises:
            ConfigurationError: no address can have this name.

        Guarantees:
            integration/test_publishing.py::test_what_nobody_wants_is_published_all_the_same.
        """
        ...

    async def subscribe(self, queue: str, events: Sequence[str]) -> None:
        """Let a queue, which must be there, receive events from now on; idempotent. It lasts until it is undone there.

        Guarantees:
            integration/test_publishing.py::test_all_subscribers_receive_an_event_and_nobody_else.
        """
        ...

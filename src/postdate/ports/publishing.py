"""What publishing needs from queues: an address for a kind of event, at which queues can be subscribed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence


class PublishingTransport(ABC):
    """Queues whose server gives one message to all who asked for it."""

    @abstractmethod
    def event_address(self, event: str) -> str:
        """Return the destination that means: everybody who is subscribed to these events, which may be nobody.

        Args:
            event: name of a message type.

        Raises:
            ConfigurationError: no address can have this name.

        Guarantees:
            integration/test_publishing.py::test_what_nobody_wants_is_published_all_the_same.
        """

    @abstractmethod
    async def subscribe(self, queue: str, events: Sequence[str]) -> None:
        """Let a queue, which must be there, receive events from now on; idempotent. It lasts until it is undone there.

        Guarantees:
            integration/test_publishing.py::test_all_subscribers_receive_an_event_and_nobody_else.
        """

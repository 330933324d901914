"""Queues that can publish: each kind of event has an address, to which queues can be subscribed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence


class PublishingTransport(ABC):
    """Queues whose server delivers one message to all its subscribers."""

    @abstractmethod
    def event_address(self, event: str) -> str:
        """Return the destination that stands for all subscribers of these events, of which there may be none.

        Args:
            event: name of a message type.

        Raises:
            ConfigurationError: no address can have this name.

        Guarantees:
            integration/test_publishing.py::test_what_nobody_wants_is_published_all_the_same.
        """

    @abstractmethod
    async def subscribe(self, queue: str, events: Sequence[str]) -> None:
        """Subscribe a queue, which must exist, to events; idempotent. It lasts until it is undone on the server.

        Guarantees:
            integration/test_publishing.py::test_all_subscribers_receive_an_event_and_nobody_else.
        """

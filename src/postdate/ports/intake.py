"""Queues through which programs without Postdate delay messages. Source: ADR 0009."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from postdate.errors import ConfigurationError
from postdate.messages import DelayedMessage, Envelope
from postdate.ports.transports import Receiver

_LONGEST_NAME: Final = 150
"""Characters; so that there is room for a routing key beside it in a destination."""

DUE_EXCHANGE_TYPES: Final = ("topic", "direct", "fanout", "headers")

Read = Callable[[Envelope, datetime], DelayedMessage]
"""Returns the delayed message to be stored for an envelope that arrived at this instant; raises ``MessageError`` if
there is none."""


@dataclass(frozen=True, slots=True)
class DelayExchange:
    """An exchange to which any program publishes messages to be delayed.

    Args:
        name: of the exchange; beside it there are a queue ``{name}.intake`` and an exchange ``{name}.due``.
        due_type: type of ``{name}.due``: one of :data:`DUE_EXCHANGE_TYPES`. One that exists must be of it, unless it is
            of the type of a plugin, which is left as it is.

    Raises:
        ConfigurationError: the name or the type is not allowed.
    """

    name: str = "postdate"
    due_type: str = "topic"

    def __post_init__(self) -> None:
        if not self.name.strip() or len(self.name) > _LONGEST_NAME or self.name.startswith("amq."):
            raise ConfigurationError(
                f"the name of an exchange must have 1 to {_LONGEST_NAME} characters and not begin with 'amq.', "
                f"not be {self.name[:60]!r}"
            )
        if self.due_type not in DUE_EXCHANGE_TYPES:
            raise ConfigurationError(
                f"due_type must be one of {', '.join(DUE_EXCHANGE_TYPES)}, not {self.due_type!r}; to use another type, "
                f"declare the exchange {self.name + '.due'!r} yourself: one that exists is left as it is"
            )


@dataclass(frozen=True, slots=True)
class IntakeQueue:
    """A queue of messages to be delayed.

    Args:
        name: of the queue, to which messages that could not be stored can be returned.
        receiver: of the queue.
        read: see :data:`Read`; pure.
    """

    name: str
    receiver: Receiver
    read: Read


class ForeignIntake(ABC):
    """A transport through which programs without Postdate delay messages."""

    @abstractmethod
    async def create_intake(self, exchange: DelayExchange) -> None:
        """Create what does not exist yet: exchanges, queues and bindings; idempotent.

        Raises:
            ConfigurationError: there is something else of that name; says what to do.
            TransportError: permission is missing.
            TransportUnavailable: transient.
        """

    @abstractmethod
    def intake_queues(self, exchange: DelayExchange) -> Sequence[IntakeQueue]:
        """Return the queues to be received from; they must exist when that begins. Connects to nothing."""

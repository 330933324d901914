"""The storage of an endpoint's outbox. Source: specification 7, row 114; ADR 0017."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TypeAlias

from postdate.messages import DelayedMessage, Envelope
from postdate.ports.common import NativeTransaction, Work

Operation: TypeAlias = Envelope | DelayedMessage
"""What a handler sends: at once, or at an instant that was settled when it was sent."""


@dataclass(frozen=True, slots=True)
class OutboxRecord:
    """The record of a message that was handled.

    Args:
        operations: what its handlers sent, in order, with their ids; empty once dispatched.
        dispatched: the operations have left, so handling is complete.
    """

    operations: Sequence[Operation]
    dispatched: bool


class OutboxTransaction(ABC):
    """The business transaction of one message. Its owner calls :meth:`commit` or :meth:`roll_back` in the end.

    Every method may be called from any task of one event loop.
    """

    @property
    @abstractmethod
    def begun(self) -> bool:
        """Whether :meth:`begin` was called."""

    @abstractmethod
    async def begin(self) -> NativeTransaction:
        """Return a connection of the driver with a transaction open on it; called again, the same one.

        The connection refuses to commit or roll back by itself. It may be used until the transaction ends.

        Raises:
            StoreUnavailable: transient; it may be called again.

        Guarantees:
            integration/test_outbox_storage.py::test_business_data_and_record_are_one_commit;
            integration/test_outbox_storage.py::test_a_handler_cannot_commit_by_itself.
        """

    @abstractmethod
    async def commit(self, operations: Sequence[Operation], now: datetime, work: Sequence[Work] = ()) -> bool:
        """Write the record of the message into the transaction and commit; begin it first if that was not done.

        Args:
            operations: what the handlers sent; may be empty, and is dispatched then.
            now: aware UTC.
            work: of other adapters on the same database; done in the transaction.

        Returns:
            ``False`` when another process has handled the message meanwhile: everything was rolled back.

        Raises:
            StoreError: nothing was committed. After :class:`~postdate.errors.StoreUnreachable` it may have been:
                :meth:`OutboxStore.find` tells.

        Guarantees:
            integration/test_outbox_storage.py::test_of_two_transactions_of_one_message_one_commits;
            integration/test_outbox_storage.py::test_work_of_others_is_part_of_the_commit;
            integration/test_outbox_storage.py::test_operations_come_back_as_they_were.
        """

    @abstractmethod
    async def roll_back(self) -> None:
        """Undo everything; without effect before :meth:`begin` and after the end.

        Raises:
            StoreUnreachable: the connection was lost, which undid everything, too, and may be why the transaction
                failed.
        """


class OutboxStore(ABC):
    """Where outboxes are kept: of several endpoints, each used by several processes at once."""

    @property
    @abstractmethod
    def database(self) -> object:
        """Identity of the database; see :class:`postdate.ports.TransportCapabilities`."""

    @property
    @abstractmethod
    def has_one_writer(self) -> bool:
        """Whether no other connection can write to the database while one of its transactions is open."""

    @abstractmethod
    async def setup(self) -> None:
        """Create what is missing; idempotent, and safe when several processes do it at once."""

    @abstractmethod
    async def find(self, endpoint: str, message_id: str) -> OutboxRecord | None:
        """Return the record of a message, or ``None``: no handling of it was committed, or too long ago.

        Args:
            endpoint: which handled it; the same message may be handled by several.
            message_id: ``NServiceBus.MessageId``; any text.

        Raises:
            StoreNotSetUp: the tables are missing.
            StoreUnavailable: transient.
        """

    @abstractmethod
    def transaction(self, endpoint: str, message_id: str) -> OutboxTransaction:
        """Return a transaction that is not begun yet, for handling one message."""

    @abstractmethod
    async def mark_dispatched(self, endpoint: str, message_id: str, now: datetime) -> None:
        """Note that the operations of a message have left, and drop them; once more without effect.

        Raises:
            StoreUnavailable: transient.
        """

    @abstractmethod
    async def remove_dispatched(self, endpoint: str, before: datetime, limit: int) -> int:
        """Forget messages whose operations left before an instant, oldest first; return how many.

        Those whose operations have not left stay, however old they are.

        Args:
            endpoint: whose.
            before: aware UTC, exclusive.
            limit: at most so many, in one short transaction.

        Raises:
            StoreUnavailable: transient.

        Guarantees:
            integration/test_outbox_storage.py::test_what_was_dispatched_long_ago_is_forgotten_in_batches.
        """

    @abstractmethod
    async def close(self) -> None:
        """Release connections; a second time without effect."""

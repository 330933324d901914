"""Changes of messages that wait: what became of each, under a key, and in a transaction of the application. ADR 31."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, TypeAlias, TypeVar

from postdate.errors import ConfigurationError
from postdate.messages import DelayedMessage
from postdate.ports.common import NativeTransaction, RecordKind
from postdate.ports.migrating import MOVED_AWAY
from postdate.ports.stores import MessageFilter, PendingPage


class Answer(enum.Enum):
    """What became of the change of one waiting message. True only for ``DONE``: otherwise nothing was changed."""

    DONE = "done"
    BEING_DELIVERED = "being delivered"
    """Or being changed by somebody else, whose transaction is open."""
    DELIVERED = "already delivered"
    CANCELLED = "already cancelled"
    EXPIRED = "expired"
    FAILED = "in the error queue"
    WOULD_EXPIRE = "would expire before it is due"
    """Of many that are rescheduled; of one it is an error."""
    NOT_FOUND = "not found"

    def __bool__(self) -> bool:
        return self is Answer.DONE


def answer_of(last: tuple[RecordKind, str] | None) -> Answer:
    """Return what became of a message that does not wait any more; ``last``: kind and detail of its last record."""
    match last:
        case (
            RecordKind.DELIVERED | RecordKind.HANDLED | RecordKind.RETRIED | RecordKind.RETURNED | RecordKind.DISCARDED,
            _,
        ):
            return Answer.DELIVERED
        case (RecordKind.EXPIRED, _):
            return Answer.EXPIRED
        case (RecordKind.FAILED, _):
            return Answer.FAILED
        case (RecordKind.CANCELLED, detail) if not detail.startswith(MOVED_AWAY):
            return Answer.CANCELLED
        case _:  # moved to another store, archived, or lost
            return Answer.NOT_FOUND


T = TypeVar("T")

Steps: TypeAlias = Generator[tuple[Any, Mapping[str, Any]], Sequence[Sequence[Any]] | None, T]
"""A change as statements, each with its values, that is given the rows of each, and returns what became of it."""


Making: TypeAlias = Callable[[str, datetime | None], DelayedMessage]
"""Makes the message that waits under a key, of its id, and when the one that it replaces was stored, if any."""


@dataclass(frozen=True, slots=True)
class KeyedIds:
    """The ids of the messages that wait under a key one after the other: the key, and a number that rises."""

    key: str

    @property
    def first(self) -> str:
        """The first id."""
        return f"{self.key}~{1:08d}"

    @property
    def last(self) -> str:
        """The last id that there can be."""
        return f"{self.key}~{99_999_999}"

    def has(self, message_id: str) -> bool:
        """Return whether an id is one of these."""
        return (
            message_id.startswith(f"{self.key}~") and len(message_id) == len(self.first) and message_id[-8:].isdigit()
        )

    def after(self, message_id: str) -> str:
        """Return the id after another; empty: there is none yet."""
        return f"{self.key}~{int(message_id[-8:]) + 1:08d}" if message_id else self.first


MARKERS: Final = "postdate.zones"
"""The destination of the messages by which a store keeps time zones: no queue, for nothing delivers them. ADR 33."""


class ReplacingStore(ABC):
    """A store that keeps one waiting message for each key: the last one stored takes the place of the one before."""

    @abstractmethod
    async def replace(self, key: str, make: Making, now: datetime) -> str:
        """Store the message that ``make`` makes in place of the one that waits under ``key``; return its id.

        A message that is being delivered, or has left, is not touched: the new one waits beside it, under another id.

        Raises:
            MessageTooLarge, StoreUnavailable: nothing was done.

        Guarantees:
            administration.one_message_waits_for_a_key, what_is_being_delivered_is_not_replaced.
        """


class JoiningStore(ABC):
    """A store whose changes can be part of a transaction that an application has open on a connection of its own.

    Changes are :data:`Steps`, whoever runs them. Services are woken by the commit, if it comes. Errors of the driver
    are not translated: the transaction, and the decision to repeat it, are the application's. Source: ADR 31.
    """

    @abstractmethod
    async def join(self, connection: NativeTransaction, steps: Steps[T]) -> T:
        """Do ``steps`` in the transaction that ``connection`` is in, or begins with its first statement.

        Args:
            connection: to the database of the store, of a driver that the store knows. One that blocks is used in
                another thread; the caller does not use it meanwhile.
            steps: of this store.

        Raises:
            ConfigurationError: not such a connection, or one that commits every statement by itself; nothing was done.
        """

    @abstractmethod
    def join_blocking(self, connection: NativeTransaction, steps: Steps[T]) -> T:
        """Do the same with a connection that blocks, in the calling thread."""

    @abstractmethod
    def storing_steps(self, messages: Sequence[DelayedMessage], now: datetime) -> Steps[None]:
        """Store ``messages``, one round trip each; ``now`` is recorded as the time of scheduling.

        Raises:
            DuplicateMessage: some ids were stored before; their first messages are unchanged, all others are stored,
                and the transaction can go on.
            MessageTooLarge: nothing was done.
        """

    @abstractmethod
    def cancelling_steps(self, message_id: str, now: datetime) -> Steps[Answer]:
        """Cancel a pending message, one that was stored in the same transaction, too."""

    @abstractmethod
    def rescheduling_steps(self, message_id: str, due: datetime, now: datetime) -> Steps[Answer]:
        """Give a pending message another due time. Raises `InvalidMessage` if it expires before ``due``."""

    @abstractmethod
    def replacing_steps(self, key: str, make: Making, now: datetime) -> Steps[str]:
        """Do what :meth:`ReplacingStore.replace` does."""

    @abstractmethod
    def getting_steps(self, message_id: str) -> Steps[DelayedMessage | None]:
        """Return a pending message, or ``None``."""

    @abstractmethod
    def reading_steps(self, where: MessageFilter, limit: int) -> Steps[PendingPage]:
        """Return a page as :meth:`AdministrableStore.read_pending` does."""

    async def enqueue(self, connection: NativeTransaction, messages: Sequence[DelayedMessage], now: datetime) -> None:
        """Store ``messages`` in a transaction of the application; see :meth:`join` and :meth:`storing_steps`."""
        await self.join(connection, self.storing_steps(messages, now))

    def enqueue_blocking(
        self, connection: NativeTransaction, messages: Sequence[DelayedMessage], now: datetime
    ) -> None:
        """Do the same with a connection that blocks, in the calling thread."""
        self.join_blocking(connection, self.storing_steps(messages, now))


def no_transaction_of_yours(store: object) -> ConfigurationError:
    """Return the error of a store that cannot be part of an application's own transaction."""
    return ConfigurationError(
        f"{type(store).__name__} cannot be part of a transaction of yours; keep messages in the database of your "
        f"transaction, with PostgresStore, or go on without transaction="
    )

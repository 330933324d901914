"""Changes of messages that wait: what became of each, under a key, and in a transaction of the application. ADR 31."""

from __future__ import annotations

import enum
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, TypeAlias, TypeVar

from postdate.errors import ConfigurationError, InvalidMessage
from postdate.messages import DelayedMessage
from postdate.ports.administration import MessageFilter, PendingPage
from postdate.ports.common import NativeTransaction, RecordKind
from postdate.ports.migrating import MOVED_AWAY
from postdate.ports.observation import UNREADABLE


class Answer(enum.Enum):
    """What became of the change of one waiting message. True only for ``DONE``: otherwise nothing was changed."""

    DONE = "done"
    BEING_DELIVERED = "being delivered"
    """Or being changed by somebody else, whose transaction is open."""
    DELIVERED = "already delivered"
    """It is in its queue, or was handled."""
    CANCELLED = "already cancelled"
    EXPIRED = "expired"
    FAILED = "in the error queue"
    RETURNED = "returned from the error queue"
    """To a queue: it is on its way there, or was handled since."""
    DISCARDED = "discarded"
    """From the error queue, or from its own queue: it was purged there, or nobody wanted it any more."""
    UNREADABLE = "cannot be read"
    """Its row stays in the store or in its queue, marked, until it is mended or discarded."""
    WOULD_EXPIRE = "would expire before it is due"
    """Of many that are rescheduled; of one it is an error."""
    NOT_FOUND = "not found"
    UNSEEN = "not seen by this transaction"
    """It is in the store, but was stored after the transaction's view of the database began (REPEATABLE READ)."""

    def __bool__(self) -> bool:
        return self is Answer.DONE


def answer_of(last: tuple[RecordKind, str] | None) -> Answer:
    """Return what became of a message that does not wait any more; ``last``: kind and detail of its last record."""
    match last:
        case (RecordKind.CANCELLED, detail) if detail.startswith(MOVED_AWAY):  # to another store
            return Answer.NOT_FOUND
        case (RecordKind.FAILED, detail) if detail.startswith(UNREADABLE):
            return Answer.UNREADABLE
        case (kind, _):
            return _ANSWERS.get(kind, Answer.NOT_FOUND)  # archived, or lost
        case None:
            return Answer.NOT_FOUND


_ANSWERS: Final = {
    RecordKind.DELIVERED: Answer.DELIVERED,
    RecordKind.HANDLED: Answer.DELIVERED,
    RecordKind.RETRIED: Answer.DELIVERED,
    RecordKind.EXPIRED: Answer.EXPIRED,
    RecordKind.CANCELLED: Answer.CANCELLED,
    RecordKind.FAILED: Answer.FAILED,
    RecordKind.RETURNED: Answer.RETURNED,
    RecordKind.DISCARDED: Answer.DISCARDED,
}


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
        return f"{self.key}~{_LAST_NUMBER:08d}"

    def after(self, message_id: str, refused: int = 0) -> str:
        """Return an id after another; empty: there is none yet.

        ``refused``: how many ids were tried after it and are those of other messages, which an application sent under
        them by itself. Each step is twice as long as the one before, so that few are needed, whatever is in the way.

        Raises:
            InvalidMessage: the numbers are used up.
        """
        number = (int(message_id[-8:]) if message_id else 0) + 2**refused
        if number > _LAST_NUMBER:
            raise InvalidMessage(f"the numbers of the key {self.key!r} are used up: use another key")
        return f"{self.key}~{number:08d}"


_LAST_NUMBER: Final = 99_999_999

KEYED_ID: Final = re.compile(r"~[0-9]{8}\Z")
"""How the ids of messages under a key end; others may end so, too."""

KEYED: Final = "under a key"
"""Detail of the *scheduled* record of a message that waits under a key: what was sent under a like id does not."""


class ReplacingStore(ABC):
    """A store that keeps one waiting message for each key: the last one stored takes the place of the one before."""

    @abstractmethod
    async def replace(self, key: str, make: Making, now: datetime) -> str:
        """Store the message that ``make`` makes in place of the one that waits under ``key``; return its id.

        A message that is being delivered, or has left, is not touched: the new one waits beside it, under another id.
        So does one that was stored without a key, whatever its id. The new one has all its retries.

        Args:
            key: of the application's own; the ids are made of it.
            make: called in the caller's own turn and context, again where others were faster.
            now: recorded as the time of storing; aware.

        Raises:
            MessageTooLarge, StoreUnavailable: nothing was done.
            InvalidMessage: the numbers of the key are used up; nothing was done.

        Guarantees:
            administration.one_message_waits_for_a_key, what_is_being_delivered_is_not_replaced,
            an_ordinary_id_is_not_replaced, the_numbers_of_a_key_end, what_is_replaced_has_all_its_retries,
            callers_make_their_own_messages, what_is_too_large_replaces_nothing.
        """

    @abstractmethod
    async def keep_keys(self, message_ids: Sequence[str]) -> None:
        """Have messages, stored by a migration under their ids, wait under the keys that they had where they come from.

        Guarantees:
            administration.keys_are_kept_by_a_migration.
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
    def rescheduling_steps(
        self, message_id: str, due: datetime, now: datetime, wall_time: str | None = None
    ) -> Steps[Answer]:
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

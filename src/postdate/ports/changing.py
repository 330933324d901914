"""Changes of pending messages: the result for each, messages under a key, changes in an application's transaction.

Source: ADR 31.
"""

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
    """The result of changing one pending message. It is true only for ``DONE``: otherwise nothing was changed."""

    DONE = "done"
    BEING_DELIVERED = "being delivered"
    """Or another transaction is changing the message, and is still open."""
    DELIVERED = "already delivered"
    """The message is in its queue, or was handled."""
    CANCELLED = "already cancelled"
    EXPIRED = "expired"
    FAILED = "in the error queue"
    RETURNED = "returned from the error queue"
    """The message returned to a queue. It is still there, or was handled since."""
    DISCARDED = "discarded"
    """From the error queue, or from its own queue: the queue was purged, or the message was not wanted any more."""
    UNREADABLE = "cannot be read"
    """The row stays in the store or in its queue, marked, until an operator mends or discards it."""
    WOULD_EXPIRE = "would expire before it is due"
    """For one of many messages that are rescheduled together; rescheduling a single message raises an error."""
    NOT_FOUND = "not found"
    UNSEEN = "not seen by this transaction"
    """The message was stored after the transaction's view of the database began (REPEATABLE READ)."""

    def __bool__(self) -> bool:
        return self is Answer.DONE


def answer_of(last: tuple[RecordKind, str] | None) -> Answer:
    """Return the answer for a message that is not pending any more; ``last``: kind and detail of its last record."""
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
"""A change as statements with their values. It receives the rows of each statement, and returns its result."""


CreateMessage: TypeAlias = Callable[[str, datetime | None], DelayedMessage]
"""Makes the message for a key from its id and from the time when the message that it replaces was stored, if any."""


@dataclass(frozen=True, slots=True)
class KeyedIds:
    """The ids of the messages that wait under a key one after the other: the key, and a rising number."""

    key: str

    @property
    def first(self) -> str:
        """The first id."""
        return f"{self.key}~{1:08d}"

    @property
    def last(self) -> str:
        """The last possible id."""
        return f"{self.key}~{_LAST_NUMBER:08d}"

    def id_after(self, message_id: str, refusals: int = 0) -> str:
        """Return an id after ``message_id``; an empty ``message_id`` means that there is none yet.

        ``refusals`` is the number of ids after ``message_id`` that were tried in vain: they belong to other messages,
        which the application sent under these ids itself. Each step is twice as long as the one before, so a few
        attempts are enough, however many ids are in use.

        Raises:
            InvalidMessage: the numbers are used up.
        """
        number = (int(message_id[-8:]) if message_id else 0) + 2**refusals
        if number > _LAST_NUMBER:
            raise InvalidMessage(f"the numbers of the key {self.key!r} are used up: use another key")
        return f"{self.key}~{number:08d}"


_LAST_NUMBER: Final = 99_999_999

KEYED_ID: Final = re.compile(r"~[0-9]{8}\Z")
"""The end of the ids of messages under a key; ids of other messages may end in the same way."""

KEYED: Final = "under a key"
"""Detail of the *scheduled* record of a message under a key. It tells that message from one with a similar id."""


class ReplacingStore(ABC):
    """A store that replaces pending messages: each by its id, or the one that waits under a key."""

    @abstractmethod
    async def replace_pending(self, message: DelayedMessage, now: datetime) -> bool:
        """Replace the pending message that has the id of ``message``, in one transaction.

        The new message has all its retries. A process that is killed during the call leaves the old message or the new
        one, and never none.

        Args:
            message: due time, destination, headers, body and expiry are all replaced.
            now: time of the record; aware.

        Returns:
            ``False`` if no message with this id is pending, or if it is being dispatched.

        Raises:
            MessageTooLarge, StoreUnavailable: nothing was done.

        Guarantees:
            administration.a_pending_message_is_replaced_by_its_id, only_what_is_pending_is_replaced_by_its_id,
            what_is_too_large_replaces_nothing.
        """

    @abstractmethod
    async def replace(self, key: str, create_message: CreateMessage, now: datetime) -> str:
        """Replace the message that waits under ``key`` with the message that ``create_message`` makes; return its id.

        A message that is being delivered, or was delivered, is not touched: the new one waits beside it, under another
        id. The same is true of a message that was stored without a key, whatever its id. The new message has all its
        retries.

        Args:
            key: chosen by the application; the ids are made from it.
            create_message: called in the task and context of the caller, and again if another caller was faster.
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
    async def store_keys(self, message_ids: Sequence[str]) -> None:
        """Make messages, stored by a migration under their ids, wait under the keys that they had in their source.

        Guarantees:
            administration.keys_are_kept_by_a_migration.
        """


class JoiningStore(ABC):
    """A store whose changes can be part of a transaction that an application has open on a connection of its own.

    Changes are :data:`Steps`, so a blocking and an async connection run the same ones. The commit wakes services.
    Errors of the driver are not translated: the application owns the transaction, and decides whether to repeat it.
    Only a missing table is `StoreNotSetUp`. Source: ADR 31.
    """

    @abstractmethod
    async def join(self, connection: NativeTransaction, steps: Steps[T]) -> T:
        """Do ``steps`` in the transaction of ``connection``, or in one that their first statement begins.

        Args:
            connection: a connection to the database of the store, of a driver that the store knows. A blocking
                connection is used in another thread; the caller does not use it meanwhile.
            steps: of this store.

        Raises:
            ConfigurationError: the connection is of another kind, or commits every statement by itself; nothing was
                done.
        """

    @abstractmethod
    def join_blocking(self, connection: NativeTransaction, steps: Steps[T]) -> T:
        """Do what :meth:`join` does with a connection that blocks, in the calling thread."""

    @abstractmethod
    def storing_steps(self, messages: Sequence[DelayedMessage], now: datetime) -> Steps[None]:
        """Store ``messages``, with one round trip for each; ``now`` is recorded as the time of scheduling.

        Raises:
            DuplicateMessage: some ids were stored before; their first messages are unchanged. All other messages are
                stored, and the transaction can go on.
            MessageTooLarge: nothing was done.
        """

    @abstractmethod
    def cancelling_steps(self, message_id: str, now: datetime) -> Steps[Answer]:
        """Cancel a pending message; the same transaction may have stored it."""

    @abstractmethod
    def rescheduling_steps(
        self, message_id: str, due: datetime, now: datetime, wall_time: str | None = None
    ) -> Steps[Answer]:
        """Give a pending message another due time. Raises `InvalidMessage` if it expires before ``due``."""

    @abstractmethod
    def replacing_steps(self, key: str, create_message: CreateMessage, now: datetime) -> Steps[str]:
        """Do what :meth:`ReplacingStore.replace` does."""

    @abstractmethod
    def getting_steps(self, message_id: str) -> Steps[DelayedMessage | None]:
        """Return a pending message, or ``None``."""

    @abstractmethod
    def reading_steps(self, message_filter: MessageFilter, limit: int) -> Steps[PendingPage]:
        """Return a page as :meth:`AdministrableStore.read_pending` does."""

    async def enqueue(self, connection: NativeTransaction, messages: Sequence[DelayedMessage], now: datetime) -> None:
        """Store ``messages`` in a transaction of the application; see :meth:`join` and :meth:`storing_steps`."""
        await self.join(connection, self.storing_steps(messages, now))

    def enqueue_blocking(
        self, connection: NativeTransaction, messages: Sequence[DelayedMessage], now: datetime
    ) -> None:
        """Do what :meth:`enqueue` does with a connection that blocks, in the calling thread."""
        self.join_blocking(connection, self.storing_steps(messages, now))


def cannot_join_error(store: object) -> ConfigurationError:
    """Return the error of a store that cannot be part of an application's own transaction."""
    return ConfigurationError(
        f"{type(store).__name__} cannot be part of a transaction of yours; keep messages in the database of your "
        f"transaction, with PostgresStore, or leave out transaction="
    )

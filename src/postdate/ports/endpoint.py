"""The data that an endpoint keeps beside its messages: saga instances, its outbox.

Source: ADR 0016.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, TypeAlias

from postdate.errors import NotSupported, PostdateError
from postdate.messages import DelayedMessage, Envelope
from postdate.ports.common import Capable, NativeTransaction, Work

CORRELATION_LIMIT: Final = 200
"""Characters of a correlation value; an index of every database can hold a value of this length."""


SET_UP: Final = (
    "run `postdate setup --sagas`, await the setup() of its saga store once, or start an endpoint that creates queues"
)
"""The advice about missing tables, for error texts."""


@dataclass(frozen=True, slots=True)
class SagaStoreCapabilities:
    """The capabilities of a saga store.

    Args:
        durable: instances survive the process.
        shared: several processes may use the store at once.
        database: identity of the database; a transport with an equal identity can share a transaction with the store.
    """

    durable: bool
    shared: bool
    database: object | None = None


@dataclass(frozen=True, slots=True)
class Correlation:
    """The value by which a message finds its saga instance.

    Args:
        property: name of the property of the state.
        value: value of the property, as text; 1 to 200 characters.
    """

    property: str
    value: str


@dataclass(frozen=True, slots=True)
class SagaRecord:
    """One saga instance in its store.

    Args:
        saga_id: a UUID as text. Every instance has a new one, even if an earlier instance had the same correlation.
        saga_type: name of the saga on the wire.
        correlation: unique among the instances of a saga type.
        state: state of the application, JSON.
        details: data of Postdate, JSON; stores keep it unchanged and never read it.
        version: how often the instance was stored; 0 for an instance that was never stored.
    """

    saga_id: str
    saga_type: str
    correlation: Correlation
    state: str
    details: str = "{}"
    version: int = 0


class SagaChangeKind(enum.Enum):
    """What a change does to an instance."""

    CREATED = "created"
    UPDATED = "updated"
    COMPLETED = "completed"
    SET_ASIDE = "set aside"


@dataclass(frozen=True, slots=True)
class SagaChange:
    """The change that one message makes to one instance.

    Args:
        kind: For ``CREATED``, neither this instance nor another one with its correlation may be in the store. For all
            others, the instance must be there in the version of the record, and gets the next version. A completed one
            is removed. One that is set aside keeps its state and details, and its id becomes the property of its
            correlation: the value is free for another instance, and :meth:`SagaStore.load` still finds this one.
        record: the new record, with the version that was loaded.
    """

    kind: SagaChangeKind
    record: SagaRecord


class SagaStore(Capable[SagaStoreCapabilities], ABC):
    """A store of saga instances. Several processes may call every method at once.

    Nothing is locked between loading and applying: a change is a conflict if the store has another version by then.
    """

    @abstractmethod
    async def setup(self) -> None:
        """Create missing tables; idempotent, and safe when several processes do it at once.

        Raises:
            StoreFromNewerVersion: a later version of Postdate has set the store up; nothing was changed.

        Guarantees:
            sagas.setting_up_again_keeps_what_is_there.
        """

    @abstractmethod
    async def find(self, saga_type: str, correlation: Correlation) -> SagaRecord | None:
        """Return the instance with that correlation, or ``None``.

        Raises:
            StoreNotSetUp: the tables are missing.
            StoreUnavailable: transient.

        Guarantees:
            sagas.an_instance_is_found_by_type_property_and_value.
        """

    async def find_all(self, saga_type: str, correlations: Sequence[Correlation]) -> Sequence[SagaRecord | None] | None:
        """Return :meth:`find` for several correlations, in one query; ``None``: one call for each is as fast."""
        return None

    @abstractmethod
    async def load(self, saga_type: str, saga_id: str) -> SagaRecord | None:
        """Return the instance with that id, or ``None`` if there is none or it has another type.

        Guarantees:
            sagas.an_instance_is_loaded_by_type_and_id.
        """

    @abstractmethod
    async def read_page(self, after: tuple[str, str], limit: int) -> Sequence[SagaRecord]:
        """Return up to ``limit`` instances after a type and an id, ordered by type and id; uses an index.

        Guarantees:
            sagas.instances_are_listed_page_by_page.
        """

    @abstractmethod
    async def apply(self, changes: Sequence[SagaChange]) -> None:
        """Apply ``changes`` in order, all in one transaction; return after the commit.

        Raises:
            SagaConflict: another process has created, changed or completed an instance meanwhile; nothing was applied.
            StoreUnavailable: transient; nothing was applied.

        Guarantees:
            sagas.every_update_makes_the_next_version, a_completed_instance_is_gone_and_its_correlation_free,
            an_instance_that_is_set_aside_is_found_by_its_id_and_its_correlation_is_free,
            what_was_changed_meanwhile_is_not_changed_again, a_correlation_has_one_instance_of_a_type,
            changes_are_applied_together_or_not_at_all, of_several_creators_all_but_one_are_told, no_update_is_lost.
        """

    @abstractmethod
    async def close(self) -> None:
        """Release the connections; a second call has no effect."""

    def applying_work(self, changes: Sequence[SagaChange]) -> Work:
        """Return the work that applies ``changes``; the work raises :class:`~postdate.errors.SagaConflict`.

        The work may be done again when its transaction is repeated. Call this only for a store whose capabilities name
        a database. There the changes can be part of a transaction of the queues, or of the commit of an outbox.

        Guarantees:
            sagas.applying_is_part_of_a_transaction_of_the_queues, applying_is_part_of_the_commit_of_an_outbox.
        """
        raise NotSupported(f"{type(self).__name__} shares its database with no queues")


# --- the storage of an outbox (ADR 0017) -----------------------------------------------------------------------------


Operation: TypeAlias = Envelope | DelayedMessage
"""A message that a handler sends: an envelope, sent at once, or a delayed message. Sending fixes its due time."""


@dataclass(frozen=True, slots=True)
class OutboxRecord:
    """The record of a message that was handled.

    Args:
        operations: the messages that its handlers sent, in order, with their ids; empty once they are dispatched.
        is_dispatched: the operations were sent, so handling is complete.
    """

    operations: Sequence[Operation]
    is_dispatched: bool


class OutboxTransaction(ABC):
    """The business transaction of one message. The owner ends it with :meth:`commit` or :meth:`roll_back`.

    Every method may be called from any task of one event loop.
    """

    @property
    @abstractmethod
    def has_begun(self) -> bool:
        """Whether :meth:`begin` was called."""

    @abstractmethod
    async def begin(self) -> NativeTransaction:
        """Return a connection of the driver with an open transaction; a second call returns the same connection.

        The connection refuses to commit or roll back by itself. It may be used until the transaction ends.

        Raises:
            StoreUnavailable: transient; this method may be called again.

        Guarantees:
            integration/test_outbox_storage.py::test_business_data_and_record_are_one_commit;
            integration/test_outbox_storage.py::test_a_handler_cannot_commit_by_itself.
        """

    @abstractmethod
    async def commit(self, operations: Sequence[Operation], now: datetime, work: Sequence[Work] = ()) -> bool:
        """Write the record of the message into the transaction and commit. Begin the transaction first if necessary.

        Args:
            operations: messages that the handlers sent. If there are none, the record counts as dispatched.
            now: aware UTC.
            work: work of other adapters on the same database; done in the transaction.

        Returns:
            ``False`` when another process has handled the message meanwhile: everything was rolled back.

        Raises:
            StoreError: nothing was committed, with one exception. After :class:`~postdate.errors.StoreUnreachable` the
                transaction may have been committed; :meth:`OutboxStore.find` tells.

        Guarantees:
            integration/test_outbox_storage.py::test_of_two_transactions_of_one_message_one_commits;
            integration/test_outbox_storage.py::test_work_of_others_is_part_of_the_commit;
            integration/test_outbox_storage.py::test_operations_come_back_as_they_were.
        """

    @abstractmethod
    async def roll_back(self) -> None:
        """Undo everything; no effect before :meth:`begin` and after the end of the transaction.

        Raises:
            StoreUnreachable: the connection was lost. That has undone everything, too. It may also be the reason why
                the transaction failed.
        """


class OutboxStore(ABC):
    """A store of the outboxes of several endpoints. Several processes of each endpoint use it at once."""

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
        """Create missing tables; idempotent, and safe when several processes do it at once."""

    @abstractmethod
    async def find(self, endpoint: str, message_id: str) -> OutboxRecord | None:
        """Return the record of a message, or ``None``: no handling of it was committed, or its record was pruned.

        Args:
            endpoint: endpoint that handled the message; several endpoints may handle the same message.
            message_id: ``NServiceBus.MessageId``; any text.

        Raises:
            StoreNotSetUp: the tables are missing.
            StoreUnavailable: transient.
        """

    async def find_all(self, endpoint: str, message_ids: Sequence[str]) -> Sequence[OutboxRecord | None] | None:
        """Return :meth:`find` for several messages, in one query; ``None``: one call for each is as fast."""
        return None

    def recording_work(self, endpoint: str, message_id: str, now: datetime, work: Sequence[Work]) -> Work | None:
        """Return work that records a message whose handlers sent nothing, and does ``work``; ``None``: not possible.

        The work is done in a transaction of queues in :attr:`database`. It raises
        :class:`~postdate.errors.SagaConflict` if the record is there already.
        """
        return None

    def outage_of(self, error: Exception) -> PostdateError | None:
        """Return the outage that a statement of a handler met in its transaction; ``None``: the handler has failed.

        For errors of the driver by which the database says that it takes no writes from anybody: it is full, or
        read-only. A connection that is lost is told by :meth:`OutboxTransaction.roll_back`.
        """
        return None

    @abstractmethod
    def transaction(self, endpoint: str, message_id: str) -> OutboxTransaction:
        """Return a transaction for handling one message; it is not begun yet."""

    @abstractmethod
    async def mark_dispatched(self, endpoint: str, message_id: str, now: datetime) -> None:
        """Record that the operations of a message were sent, and delete them; a second call has no effect.

        Raises:
            StoreUnavailable: transient.
        """

    @abstractmethod
    async def remove_dispatched(self, endpoint: str, before: datetime, limit: int) -> int:
        """Remove the records of messages whose operations were sent before an instant, oldest first; return how many.

        Records whose operations were not sent stay, however old they are.

        Args:
            endpoint: endpoint whose records are removed.
            before: aware UTC, exclusive.
            limit: maximum number of records, removed in one short transaction.

        Raises:
            StoreUnavailable: transient.

        Guarantees:
            integration/test_outbox_storage.py::test_what_was_dispatched_long_ago_is_forgotten_in_batches.
        """

    @abstractmethod
    async def close(self) -> None:
        """Release the connections; a second call has no effect."""

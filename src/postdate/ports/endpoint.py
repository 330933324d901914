"""What an endpoint keeps beside its messages: saga instances, its outbox. Source: specification 4.10, 5; ADR 0016."""

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
"""Characters of a correlation value: what every index holds."""


SET_UP: Final = (
    "run `postdate setup --sagas`, await the setup() of its saga store once, or start an endpoint that creates queues"
)
"""What to do about missing tables; for errors."""


@dataclass(frozen=True, slots=True)
class SagaStoreCapabilities:
    """What a saga store can do.

    Args:
        durable: instances survive the process.
        shared: several processes may use it at once.
        database: identity of the database; a transport with an equal identity can share a transaction with it.
    """

    durable: bool
    shared: bool
    database: object | None = None


@dataclass(frozen=True, slots=True)
class Correlation:
    """The value by which a message finds its instance.

    Args:
        property: name of the property of the state.
        value: of it, as text; 1 to 200 characters.
    """

    property: str
    value: str


@dataclass(frozen=True, slots=True)
class SagaRecord:
    """One saga instance in its store.

    Args:
        saga_id: a UUID as text; new for every instance, also for one with the correlation of an earlier one.
        saga_type: name of the saga on the wire.
        correlation: unique among the instances of a saga type.
        state: of the application, JSON.
        details: of Postdate's own, JSON; stores keep it unchanged and do not look inside.
        version: how often the instance was kept; 0 for one that was not yet.
    """

    saga_id: str
    saga_type: str
    correlation: Correlation
    state: str
    details: str = "{}"
    version: int = 0


class SagaFate(enum.Enum):
    """What becomes of an instance."""

    CREATED = "created"
    UPDATED = "updated"
    COMPLETED = "completed"
    SET_ASIDE = "set aside"


@dataclass(frozen=True, slots=True)
class SagaChange:
    """What one message does to one instance.

    Args:
        fate: created: the record must not be there, nor another with its correlation; all others: it must be there in
            the version of the record. The instance gets the next version; a completed one is removed. One that is set
            aside keeps state and details, and gets its id as the property of its correlation: its value is free for
            another, and :meth:`SagaStore.load` finds it still.
        record: with the version that was loaded.
    """

    fate: SagaFate
    record: SagaRecord


class SagaStore(Capable[SagaStoreCapabilities], ABC):
    """Where saga instances are kept. Every method may be called by several processes at once.

    Nothing is locked between loading and applying: a change of a version that is no longer there is a conflict.
    """

    @abstractmethod
    async def setup(self) -> None:
        """Create what is missing; idempotent, and safe when several processes do it at once.

        Raises:
            StoreFromNewerVersion: a later Postdate was here; nothing was changed.

        Guarantees:
            sagas.setting_up_again_keeps_what_is_there.
        """

    @abstractmethod
    async def find(self, saga_type: str, correlation: Correlation) -> SagaRecord | None:
        """Return the instance with that correlation, or ``None``.

        Raises:
            StoreNotSetUp, StoreUnavailable

        Guarantees:
            sagas.an_instance_is_found_by_type_property_and_value.
        """

    async def find_all(self, saga_type: str, correlations: Sequence[Correlation]) -> Sequence[SagaRecord | None] | None:
        """:meth:`find` for several correlations, in one query; ``None``: to find each by itself is as quick."""
        return None

    @abstractmethod
    async def load(self, saga_type: str, saga_id: str) -> SagaRecord | None:
        """Return the instance with that id if it is of that type, or ``None``.

        Guarantees:
            sagas.an_instance_is_loaded_by_type_and_id.
        """

    @abstractmethod
    async def page(self, after: tuple[str, str], limit: int) -> Sequence[SagaRecord]:
        """Return up to ``limit`` instances by type and id, those after a type and an id; by an index.

        Guarantees:
            sagas.instances_are_listed_page_by_page.
        """

    @abstractmethod
    async def apply(self, changes: Sequence[SagaChange]) -> None:
        """Apply ``changes`` in order, all in one transaction; returns after the commit.

        Raises:
            SagaConflict: an instance was created, changed or completed meanwhile; nothing was applied.
            StoreUnavailable: transient; nothing was applied.

        Guarantees:
            sagas.every_update_makes_the_next_version, a_completed_instance_is_gone_and_its_correlation_free,
            an_instance_that_is_set_aside_is_found_by_its_id_and_its_correlation_is_free,
            what_was_changed_meanwhile_is_not_changed_again, a_correlation_has_one_instance_of_a_type,
            changes_are_applied_together_or_not_at_all, of_several_creators_all_but_one_are_told, no_update_is_lost.
        """

    @abstractmethod
    async def close(self) -> None:
        """Release connections; a second time without effect."""

    def applying(self, changes: Sequence[SagaChange]) -> Work:
        """Return the work that applies ``changes``; it raises :class:`~postdate.errors.SagaConflict`.

        The work may be done again when its transaction is. Only of a store whose capabilities name a database, where
        its changes can be part of a transaction of the queues, or of the commit of an outbox.

        Guarantees:
            sagas.applying_is_part_of_a_transaction_of_the_queues, applying_is_part_of_the_commit_of_an_outbox.
        """
        raise NotSupported(f"{type(self).__name__} shares its database with no queues")


# --- the storage of an outbox (specification 7, row 114; ADR 0017) ----------------------------------------------------


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

    async def find_all(self, endpoint: str, message_ids: Sequence[str]) -> Sequence[OutboxRecord | None] | None:
        """:meth:`find` for several messages, in one query; ``None``: to find each by itself is as quick."""
        return None

    def handled(self, endpoint: str, message_id: str, now: datetime, work: Sequence[Work]) -> Work | None:
        """Return work that writes the record of a message that sent nothing, and does ``work``; ``None``: it cannot.

        It is done in a transaction of queues in :attr:`database`. It raises :class:`~postdate.errors.SagaConflict`
        where the record is there already.
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

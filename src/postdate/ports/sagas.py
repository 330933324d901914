"""The store of saga instances. Source: specification 5 ("Sagas"), 4.10; ADR 0016."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from postdate.errors import NotSupported
from postdate.ports.common import Capable, Work

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


@dataclass(frozen=True, slots=True)
class SagaChange:
    """What one message does to one instance.

    Args:
        fate: created: the record must not be there, nor another with its correlation; updated and completed: it must be
            there in the version of the record. The instance gets the next version; a completed one is removed.
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

    @abstractmethod
    async def load(self, saga_type: str, saga_id: str) -> SagaRecord | None:
        """Return the instance with that id if it is of that type, or ``None``.

        Guarantees:
            sagas.an_instance_is_loaded_by_type_and_id.
        """

    @abstractmethod
    async def apply(self, changes: Sequence[SagaChange]) -> None:
        """Apply ``changes`` in order, all in one transaction; returns after the commit.

        Raises:
            SagaConflict: an instance was created, changed or completed meanwhile; nothing was applied.
            StoreUnavailable: transient; nothing was applied.

        Guarantees:
            sagas.every_update_makes_the_next_version, a_completed_instance_is_gone_and_its_correlation_free,
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

"""Types that stores and transports share: modes, outcomes, records, work in a transaction, wake-ups."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, TypeVar, cast

from postdate.errors import ConfigurationError

C = TypeVar("C")


class TransactionMode(enum.Enum):
    """Says which of receiving, handling and sending are undone together when something fails: docs/capabilities.md."""

    NONE = "none"
    RECEIVE_ONLY = "receive_only"
    SENDS_ATOMIC_WITH_RECEIVE = "sends_atomic_with_receive"
    TRANSACTION_SCOPE = "transaction_scope"


class Outcome(enum.Enum):
    """How a delayed message ended."""

    DELIVERED = "delivered"
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    FAILED = "failed"


class RecordKind(enum.IntEnum):
    """The kind of event that a record describes. The numbers are stored; they never change."""

    SCHEDULED = 1
    DELIVERED = 2
    HANDLED = 3
    RETRIED = 4
    EXPIRED = 5
    CANCELLED = 6
    FAILED = 7
    RESCHEDULED = 8
    DISCARDED = 9
    RETURNED = 10
    PRUNED = 11
    """About no single message: the number of records that were pruned.

    See :class:`postdate.ports.scanning.PrunedCounts`.
    """


OUTCOME_RECORDS: Mapping[Outcome, RecordKind] = {
    Outcome.DELIVERED: RecordKind.DELIVERED,
    Outcome.EXPIRED: RecordKind.EXPIRED,
    Outcome.CANCELLED: RecordKind.CANCELLED,
    Outcome.FAILED: RecordKind.FAILED,
}


class Recording(enum.Enum):
    """How many events of delayed messages a store records for audits.

    ``ALL`` records scheduled, delivered, expired, cancelled, failed, rescheduled, retried and handled; ``OUTCOMES``
    leaves out retried and handled.
    """

    ALL = "all"
    OUTCOMES = "outcomes"


@dataclass(frozen=True, slots=True)
class Record:
    """One line about what happened to a delayed message; written in the transaction in which it happened.

    Args:
        kind: what happened.
        message_id: of the delayed message.
        at: when it happened, by the clock of the process that did it; UTC.
        due: the due time of the message at that moment; UTC.
        destination: the destination of the message.
        detail: reason of a retry, failure, or discard; empty otherwise.
    """

    kind: RecordKind
    message_id: str
    at: datetime
    due: datetime | None
    destination: str | None
    detail: str = ""


NativeTransaction = Any
"""An open database transaction, of the driver's type. Only adapters of that database use it directly."""

Work = Callable[[NativeTransaction], None]
"""Work to be done inside another adapter's native transaction. If it raises, the whole transaction is rolled back."""


@dataclass(frozen=True, slots=True)
class BatchedWork(Generic[C]):
    """A :data:`Work` that is done together with similar works, when one transaction contains those of several messages.

    Args:
        run: does the items of many works, or raises; works with an equal ``run`` are done together.
        item: what this work adds to the batch.
    """

    run: Callable[[NativeTransaction, Sequence[C]], object]
    item: C

    def __call__(self, transaction: NativeTransaction) -> None:
        """Do this work alone."""
        self.run(transaction, [self.item])


def run_works(transaction: NativeTransaction, works: Iterable[Work]) -> None:
    """Do works of one or several messages in a transaction. Batched works come last, with one call for each batch."""
    items_by_run = dict[Callable[[NativeTransaction, Sequence[Any]], object], list[Any]]()
    for work in works:
        if isinstance(work, BatchedWork):
            batched_work = cast("BatchedWork[Any]", work)
            items_by_run.setdefault(batched_work.run, []).append(batched_work.item)
        else:
            work(transaction)
    for run, items in items_by_run.items():
        run(transaction, items)


Wake = Callable[[], None]
"""Ends the sleep of a poller. It is called from any thread and never blocks."""


class Capable(Generic[C]):
    """A store or a transport that declares its capabilities."""

    _capabilities: C

    @property
    def capabilities(self) -> C:
        """The capabilities; constant. They are the field ``_capabilities``, unless this property is overridden.

        Raises:
            ConfigurationError: the field is not set, and the property is not overridden.
        """
        try:
            return self._capabilities
        except AttributeError:
            problem = f"{type(self).__name__} does not say what it can do: set _capabilities, or override capabilities"
            raise ConfigurationError(problem) from None

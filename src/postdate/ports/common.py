"""What stores and transports have in common: modes, outcomes, records, work in a transaction, wake-ups."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, TypeVar, cast

from postdate.errors import ConfigurationError

C = TypeVar("C")


class TransactionMode(enum.Enum):
    """Which of receiving, handling and sending are undone together when something fails (specification 6)."""

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
    """What a record says happened. The numbers are stored; they never change."""

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
    """Of no message: how many records are gone by now; see :class:`postdate.ports.scanning.Pruned`."""


OUTCOME_RECORDS: Mapping[Outcome, RecordKind] = {
    Outcome.DELIVERED: RecordKind.DELIVERED,
    Outcome.EXPIRED: RecordKind.EXPIRED,
    Outcome.CANCELLED: RecordKind.CANCELLED,
    Outcome.FAILED: RecordKind.FAILED,
}


class Recording(enum.Enum):
    """How much of what happens to delayed messages is kept for audits.

    ``ALL`` keeps scheduled, delivered, expired, cancelled, failed, rescheduled, retried and handled; ``OUTCOMES``
    leaves out retried and handled.
    """

    ALL = "all"
    OUTCOMES = "outcomes"


@dataclass(frozen=True, slots=True)
class Record:
    """One line of what happened to a delayed message; written in the transaction in which it happened.

    Args:
        kind: what happened.
        message_id: of the delayed message.
        at: when, on the clock of the process that did it; UTC.
        due: the due time then; UTC.
        destination: where it was meant to go.
        detail: reason of a retry, failure, or discard; empty otherwise.
    """

    kind: RecordKind
    message_id: str
    at: datetime
    due: datetime | None
    destination: str | None
    detail: str = ""


NativeTransaction = Any
"""An open database transaction, of the driver's type. Only adapters of that database look inside."""

Work = Callable[[NativeTransaction], None]
"""Something to be done inside another adapter's native transaction. Raising rolls the whole transaction back."""


@dataclass(frozen=True, slots=True)
class BatchedWork(Generic[C]):
    """A :data:`Work` of which many are done in one go, where a transaction has those of several messages.

    Args:
        do: does the items of many works, or raises; equal in works that belong together.
        item: what is to be done.
    """

    do: Callable[[NativeTransaction, Sequence[C]], object]
    item: C

    def __call__(self, transaction: NativeTransaction) -> None:
        """Do it alone."""
        self.do(transaction, [self.item])


def do_works(transaction: NativeTransaction, works: Iterable[Work]) -> None:
    """Do works of one or several messages in a transaction; batched ones come last, each batch in one go."""
    together = dict[Callable[[NativeTransaction, Sequence[Any]], object], list[Any]]()
    for work in works:
        if isinstance(work, BatchedWork):
            batched = cast("BatchedWork[Any]", work)
            together.setdefault(batched.do, []).append(batched.item)
        else:
            work(transaction)
    for do, items in together.items():
        do(transaction, items)


Wake = Callable[[], None]
"""Called from any thread to say: look again now. Never blocks."""


class Capable(Generic[C]):
    """A store or a transport that says what it can do."""

    _capabilities: C

    @property
    def capabilities(self) -> C:
        """What it can do; constant. The field ``_capabilities``, unless this is overridden.

        Raises:
            ConfigurationError: there is neither.
        """
        try:
            return self._capabilities
        except AttributeError:
            problem = f"{type(self).__name__} does not say what it can do: set _capabilities, or override capabilities"
            raise ConfigurationError(problem) from None

"""Reading and writing a store in bulk, for the pipeline. Everything here blocks. Source: ADR 0011."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType
from typing import Any, Final

from postdate.errors import NotSupported, PipelineError
from postdate.ports.stores import StoreReport

ArrowBatch = Any
"""A ``pyarrow.RecordBatch``. Named so because only the pipeline and what serves it there import pyarrow."""


@dataclass(frozen=True, slots=True)
class ScanPart:
    """One share of a scan: rows whose place is at least ``first`` and below ``end``; a store knows what a place is."""

    first: int
    end: int


@dataclass(frozen=True, slots=True)
class ScanFilter:
    """Which rows; every given condition must hold, and a row without a value never fulfils a condition on it.

    Args:
        message_ids: one of these; ``None``: any.
        destinations: one of these (of ``queued``: its queue); ``None``: any.
        due_from: due then or later; aware.
        due_to: due before then; aware.
    """

    message_ids: tuple[str, ...] | None = None
    destinations: tuple[str, ...] | None = None
    due_from: datetime | None = None
    due_to: datetime | None = None


@dataclass(frozen=True, slots=True)
class Scan:
    """What to read.

    Args:
        what: ``pending``, ``records`` or ``queued``.
        columns: of :data:`SCANNED`, in the order in which they are wanted; none at all: rows are counted.
        where: which rows.
        snapshot: from :meth:`ScannableStore.snapshot`; ``None``: each part is a snapshot of its own.
    """

    what: str
    columns: tuple[str, ...]
    where: ScanFilter = field(default_factory=ScanFilter)
    snapshot: str | None = None


WRITTEN: Final = ("message_id", "destination", "due", "expires_at", "headers", "body")
"""Columns of messages that are written to a store."""

TIMES: Final = frozenset({"at", "due", "expires_at"})
"""Columns that are instants."""

SCANNED: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "pending": (*WRITTEN, "number_of_failures"),
        "records": ("number", "kind", "message_id", "at", "due", "destination", "detail"),
        "queued": ("message_id", "queue", "due"),
    }
)
"""What there is to read, with its columns.

``headers``: JSON text as it is stored; older versions left white space behind it. ``kind``: number of
:class:`RecordKind`. ``queued``: messages that are in a queue of the same database and not yet handled.
"""


def check_scanned(what: str, columns: Sequence[str] = ()) -> None:
    """Raise `PipelineError` unless ``what``, and these columns of it, are in :data:`SCANNED`."""
    if what not in SCANNED:
        raise PipelineError(f"there is nothing called {what!r} to scan; choose one of {', '.join(SCANNED)}")
    unknown = [column for column in columns if column not in SCANNED[what]]
    if unknown:
        raise PipelineError(f"{what} has no column {unknown[0]!r}; it has {', '.join(SCANNED[what])}")


def shares(first: int, end: int, parts: int) -> list[ScanPart]:
    """Split the places from ``first`` on and below ``end`` into at most ``parts`` shares of about equal width."""
    step = max(-(-(end - first) // max(parts, 1)), 1)
    return [ScanPart(start, min(start + step, end)) for start in range(first, end, step)]


class ScannableStore(ABC):
    """Pages through everything a store holds (:data:`SCANNED`), in shares that several processes can read."""

    def snapshot(self) -> AbstractContextManager[str | None]:
        """Hold a snapshot of the store for the length of the block; its value names it to other processes.

        Scans with this name, by any process, see the store at one instant, all three kinds of rows alike. ``None``
        where the store cannot be held: then each part is a snapshot of its own, and rows written later may have lower
        places than rows seen before. Plan the shares while the snapshot is held: rows may move beyond shares that were
        planned before.

        Guarantees:
            scanning.a_snapshot_is_one_instant.
        """
        return nullcontext()

    @abstractmethod
    def scan_parts(self, what: str, parts: int) -> Sequence[ScanPart]:
        """Split the rows that exist now into at most ``parts`` shares, of about equal size.

        Guarantees:
            scanning.parts_cover_every_row_once, an_empty_store_has_no_rows, what_does_not_exist_is_refused.
        """

    @abstractmethod
    def scan(self, scan: Scan, part: ScanPart, page: int) -> Iterable[list[tuple[Any, ...]]]:
        """Yield pages of at most ``page`` plain rows of one share; times are whole microseconds since 1970 UTC.

        Raises:
            PipelineError: there is no such thing or column to read, or the snapshot is not held any more.

        Guarantees:
            scanning.columns_come_as_asked_for, parts_cover_every_row_once, only_what_is_asked_for_is_read.
        """

    @property
    def gives_columns(self) -> bool:
        """Whether it gives and takes whole Arrow batches, so that no row becomes a Python object on the way; constant.

        Columns are those of :data:`SCANNED`; times are ``timestamp('us', 'UTC')``, headers JSON text, ``kind`` and
        ``number_of_failures`` whole numbers of any width.
        """
        return False

    def scan_columns(self, scan: Scan, part: ScanPart) -> Iterable[ArrowBatch]:
        """Do what :meth:`scan` does; only where :attr:`gives_columns`.

        Guarantees:
            scanning.columns_hold_what_rows_hold.
        """
        raise _no_columns(self)

    def store_columns(self, batch: ArrowBatch, now: datetime) -> StoreReport:
        """Do what :meth:`postdate.ports.ClaimingStore.store_many` does: one transaction, idempotent by message id.

        Args:
            batch: with the columns :data:`WRITTEN`; valid messages: the caller has checked them.
            now: recorded as the time of scheduling.

        Guarantees:
            storing.columns_are_stored_as_messages_are.
        """
        raise _no_columns(self)


def _no_columns(store: object) -> NotSupported:
    return NotSupported(f"{type(store).__name__} gives rows, not columns: gives_columns says so")

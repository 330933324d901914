"""Bulk reads and writes of a store, for the pipeline. Everything here blocks. Source: ADR 0011."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType
from typing import Any, Final, Self

from postdate.errors import NotSupported, PipelineError
from postdate.ports.common import Record, RecordKind
from postdate.ports.stores import StoreReport

ArrowBatch = Any
"""A ``pyarrow.RecordBatch``. The type is ``Any`` because only the pipeline and its adapter code import pyarrow."""


@dataclass(frozen=True, slots=True)
class ScanPart:
    """One share of a scan: rows with a place of at least ``first`` and below ``end``. The store defines the places."""

    first: int
    end: int


@dataclass(frozen=True, slots=True)
class ScanFilter:
    """Conditions on rows; a row must fulfil all of them. A row without a value does not fulfil a condition on it.

    Args:
        message_ids: the row has one of these ids; ``None``: any id.
        destinations: the row has one of these destinations (for ``queued``: one of these queues); ``None``: any.
        due_from: due at this instant or later; aware.
        due_to: due before this instant; aware.
    """

    message_ids: tuple[str, ...] | None = None
    destinations: tuple[str, ...] | None = None
    due_from: datetime | None = None
    due_to: datetime | None = None


@dataclass(frozen=True, slots=True)
class Scan:
    """The rows and columns to read.

    Args:
        row_kind: ``pending``, ``records`` or ``queued``.
        columns: of :data:`SCANNED_COLUMNS`, in the order in which the caller wants them. Without columns, rows are
            counted.
        row_filter: conditions on the rows.
        snapshot: from :meth:`ScannableStore.snapshot`; ``None``: each part is a snapshot of its own.
    """

    row_kind: str
    columns: tuple[str, ...]
    row_filter: ScanFilter = field(default_factory=ScanFilter)
    snapshot: str | None = None


WRITTEN_COLUMNS: Final = ("message_id", "destination", "due", "expires_at", "headers", "body")
"""Columns of messages that are written to a store."""

TIME_COLUMNS: Final = frozenset({"at", "due", "expires_at"})
"""Columns that are instants."""

SCANNED_COLUMNS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "pending": (*WRITTEN_COLUMNS, "number_of_failures"),
        "records": ("number", "kind", "message_id", "at", "due", "destination", "detail"),
        "queued": ("message_id", "queue", "due"),
    }
)
"""The kinds of rows that can be scanned, with their columns.

``headers``: JSON text as it is stored; older versions left white space behind it. ``kind``: number of
:class:`RecordKind`. ``queued``: messages that are in a queue of the same database and not yet handled.
"""


def can_store_text(text: str) -> bool:
    """Return whether a row can contain the text: no message has a text with NUL or a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text


def check_scan(row_kind: str, columns: Sequence[str] = ()) -> None:
    """Raise `PipelineError` unless ``row_kind``, and these columns of it, are in :data:`SCANNED_COLUMNS`."""
    if row_kind not in SCANNED_COLUMNS:
        raise PipelineError(f"there is nothing called {row_kind!r} to scan; choose one of {', '.join(SCANNED_COLUMNS)}")
    if unknown := [column for column in columns if column not in SCANNED_COLUMNS[row_kind]]:
        raise PipelineError(f"{row_kind} has no column {unknown[0]!r}; it has {', '.join(SCANNED_COLUMNS[row_kind])}")


def split_into_shares(first: int, end: int, parts: int) -> list[ScanPart]:
    """Split the places from ``first`` to below ``end`` into at most ``parts`` shares of about equal width."""
    step = max(-(-(end - first) // max(parts, 1)), 1)
    return [ScanPart(start, min(start + step, end)) for start in range(first, end, step)]


class ScannableStore(ABC):
    """A store whose rows (:data:`SCANNED_COLUMNS`) several processes can read, page by page, in shares."""

    def snapshot(self) -> AbstractContextManager[str | None]:
        """Hold a snapshot of the store during the block; the value of the block is a name for other processes.

        Scans with this name, by any process, read all three kinds of rows as of one instant. The name is ``None`` where
        the store has no snapshots. Then each part is a snapshot of its own, and rows that are written later may have
        lower places than rows that were read before. Plan the shares while the snapshot is held: rows may move outside
        shares that were planned before.

        Guarantees:
            scanning.a_snapshot_is_one_instant.
        """
        return nullcontext()

    @abstractmethod
    def scan_parts(self, row_kind: str, parts: int) -> Sequence[ScanPart]:
        """Split the rows that exist now into at most ``parts`` shares, of about equal size.

        Guarantees:
            scanning.parts_cover_every_row_once, an_empty_store_has_no_rows, what_does_not_exist_is_refused.
        """

    @abstractmethod
    def scan(self, scan: Scan, part: ScanPart, page: int) -> Iterable[list[tuple[Any, ...]]]:
        """Yield pages of at most ``page`` plain rows of one share; times are whole microseconds since 1970 UTC.

        Raises:
            PipelineError: there are no such rows or columns, or the snapshot has ended.

        Guarantees:
            scanning.columns_come_as_asked_for, parts_cover_every_row_once, only_what_is_asked_for_is_read.
        """

    @property
    def has_columns(self) -> bool:
        """Whether the store reads and writes whole Arrow batches; constant.

        Then no row becomes a Python object on the way. Columns are those of :data:`SCANNED_COLUMNS`. Times are
        ``timestamp('us', 'UTC')``, headers JSON text, ``kind`` and ``number_of_failures`` whole numbers of any width.
        """
        return False

    def scan_columns(self, scan: Scan, part: ScanPart) -> Iterable[ArrowBatch]:
        """Yield the rows of :meth:`scan` as Arrow batches; only where :attr:`has_columns`.

        Guarantees:
            scanning.columns_hold_what_rows_hold.
        """
        raise _no_columns_error(self)

    def store_columns(self, batch: ArrowBatch, now: datetime) -> StoreReport:
        """Store a batch as :meth:`postdate.ports.ClaimingStore.store_many` does: one transaction, idempotent by id.

        Args:
            batch: has the columns :data:`WRITTEN_COLUMNS`. Its messages are valid: the caller has checked them.
            now: recorded as the time of scheduling.

        Guarantees:
            storing.columns_are_stored_as_messages_are.
        """
        raise _no_columns_error(self)


def _no_columns_error(store: object) -> NotSupported:
    return NotSupported(f"{type(store).__name__} gives rows, not columns: gives_columns says so")


# --- what audits and the retention ask of a store besides its rows (ADR 0011, 0032) -----------------------------------


ARCHIVED: Final = "archived"
"""Detail of a *scheduled* record. An earlier version has moved the other records of the message to an archive."""


PRUNED_ID: Final = "postdate~pruned"
"""The message id of *pruned* records; they belong to no message."""


@dataclass(frozen=True, slots=True)
class PrunedCounts:
    """The number of records that :meth:`PrunableStore.prune_before` has removed from a store so far. Source: ADR 32.

    Args:
        before: some or all records of messages that were due before this instant may be removed; UTC. ``None``: no
            record was removed.
        counts: number of removed records by kind.
    """

    before: datetime | None = None
    counts: Mapping[RecordKind, int] = field(default_factory=dict[RecordKind, int])

    @classmethod
    def of(cls, records: Iterable[tuple[datetime | None, str]]) -> Self:
        """Add up *pruned* records, each as its ``before`` and its detail; a damaged detail counts nothing."""
        before, counts = None, Counter[RecordKind]()
        for at, detail in records:
            before = max(filter(None, (before, at)), default=None)
            with suppress(ValueError, KeyError, AttributeError, TypeError):
                counts.update({RecordKind[kind.upper()]: int(count) for kind, count in json.loads(detail).items()})
        return cls(before, counts)

    def plus(self, before: datetime, kinds: Iterable[int]) -> Self:
        """Return these counts plus the records of ``kinds``, which the caller is removing."""
        counts = Counter(self.counts) + Counter(map(RecordKind, kinds))
        return type(self)(before if self.before is None else max(before, self.before), counts)

    @property
    def detail(self) -> str:
        """The detail of the *pruned* record with these counts, JSON."""
        return json.dumps({kind.name.lower(): count for kind, count in sorted(self.counts.items())})


def pruned_details(history: Iterable[Record]) -> list[tuple[datetime | None, str]]:
    """Return due time and detail of the *pruned* records in ``history``, for :meth:`PrunedCounts.of`."""
    return [(each.due, each.detail) for each in history if each.kind is RecordKind.PRUNED]


class PrunableStore(ScannableStore):
    """A store whose records can be audited, and are pruned when they are old, while other processes work with it."""

    @property
    @abstractmethod
    def records_in_commit_order(self) -> bool:
        """Whether an uncommitted record always has a higher number than every committed one; constant.

        Then all records up to a number are there once one of them was seen. A database that assigns numbers before the
        commit cannot promise this.
        """

    @abstractmethod
    def tables_of_stores(self) -> Sequence[str]:
        """Return the names of the tables of all stores that share this store's records, in order; none for a file.

        Each name is a value for ``table=``; the table of an endpoint is called ``{endpoint}.timeouts``.
        """

    @property
    @abstractmethod
    def prune_share_width(self) -> int:
        """Width of a share whose records one transaction can prune without making others wait; constant."""

    @abstractmethod
    def prune_before(self, part: ScanPart, before: datetime, now: datetime) -> int:
        """Remove records from before an instant, of messages that have ended, for good: one short transaction.

        These records stay: those of messages that are pending, that may be returned from the error queue, or that moved
        to another store; those of messages whose due time is or once was ``before`` or later; *scheduled* records that
        are marked as archived or are the last under their key; the last record of a store that numbers new records
        after it; and, in a :class:`StreamableStore`, those that a stream has not passed. The store's *pruned* record
        (:class:`PrunedCounts`) counts the removed records.

        Args:
            part: a share of a scan of ``records``, not much wider than :attr:`prune_share_width`.
            before: UTC.
            now: time of the *pruned* record.

        Returns:
            How many records were removed.
        """


# --- reading records as they are written (ADR 0011, point 5) ----------------------------------------------------------


class RecordStreamStore(ABC):
    """Reads the records of one store by their numbers while others write: each record once, and none is left out.

    Numbers grow, with gaps. They need not be in the order of commits. :meth:`safe_end` returns the number below which
    no gap will be filled any more.
    """

    @property
    @abstractmethod
    def identity(self) -> str:
        """A text that differs between stores and is the same in every process; without secrets."""

    @property
    @abstractmethod
    def location(self) -> str:
        """The place of the store, for people; without secrets."""

    @abstractmethod
    def next_number(self) -> int:
        """Return a number above every number in use; open transactions may still write lower numbers."""

    @abstractmethod
    def safe_end(self) -> int:
        """Return a number below which no record will be written any more; do not wait for writers.

        Each call checks whether the transactions that were writing at an earlier call have ended. Call again until the
        number is high enough. The number never falls; the first one may be 0.

        Raises:
            StoreNotSetUp: the store is a file, and the file does not exist.
            StoreUnavailable: transient; the next call continues from the last number.

        Guarantees:
            integration/test_record_streams.py::test_nothing_below_the_safe_end_is_written_later;
            integration/test_record_streams.py::test_the_safe_end_gets_past_writers_that_come_and_go.
        """

    @abstractmethod
    def read_records(self, first: int, end: int, columns: Sequence[str], page: int) -> Iterable[list[tuple[Any, ...]]]:
        """Yield the records with numbers from ``first`` to below ``end``, in no order, from one snapshot.

        Args:
            first: lowest number.
            end: at most :meth:`safe_end`; above that, records may still be missing.
            columns: of ``read_records``, see :class:`postdate.ports.ScannableStore`; rows are plain as there.
            page: maximum number of rows in each page.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the connections; a second call has no effect."""


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """How far a stream has copied the records of a store.

    Args:
        name: of the stream; unique in the store.
        number: every record with a lower number is where the stream copies it to.
        at: when the stream has reported this last; UTC.
    """

    name: str
    number: int
    at: datetime


class StreamableStore(PrunableStore):
    """A store whose records can be followed by :class:`RecordStreamStore`. It knows how far streams are.

    As long as a position is registered, :meth:`prune_before` removes no record with its number or a higher one. The
    methods block, as those of a scan do. Source: ADR 63.
    """

    @abstractmethod
    def stream_positions(self) -> Sequence[StreamPosition]:
        """Return the positions of all streams of this store, in the order of their names.

        Guarantees:
            scanning.positions_last_until_they_are_removed.
        """

    @abstractmethod
    def set_stream_position(self, name: str, number: int, now: datetime) -> None:
        """Register the position of a stream, or replace it: one transaction.

        When the call returns, no running :meth:`prune_before` removes a record from ``number`` on.

        Args:
            name: of the stream.
            number: of the first record that the stream has not copied.
            now: time of the report; aware.

        Guarantees:
            scanning.positions_last_until_they_are_removed, nothing_is_pruned_that_a_stream_has_not_passed.
        """

    @abstractmethod
    def remove_stream_position(self, name: str) -> bool:
        """Remove the position of a stream: retention no longer waits for it. Return whether there was one.

        Guarantees:
            scanning.positions_last_until_they_are_removed, nothing_is_pruned_that_a_stream_has_not_passed.
        """

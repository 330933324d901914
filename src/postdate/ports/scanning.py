"""Reading and writing a store in bulk, for the pipeline. Everything here blocks. Source: ADR 0011."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Self

from postdate.errors import NotSupported, PipelineError
from postdate.ports.common import Record, RecordKind
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
    if unknown := [column for column in columns if column not in SCANNED[what]]:
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


# --- what audits and archives ask of a store besides its rows (ADR 0011) ----------------------------------------------


ARCHIVED: Final = "archived"
"""Detail of a *scheduled* record whose message's other records are in an archive."""


class StoredRecord(NamedTuple):
    """A record as it stands in a store.

    Args:
        number: of the record; unique in its database, and never used again.
        kind: number of :class:`postdate.ports.RecordKind`.
        message_id: of the message.
        at: microseconds since 1970 UTC.
        due: likewise.
        destination: queue.
        detail: reason, or ``None``.
    """

    number: int
    kind: int
    message_id: str
    at: int
    due: int | None
    destination: str | None
    detail: str | None


PRUNED_ID: Final = "postdate~pruned"
"""What stands for a message's id in *pruned* records."""


@dataclass(frozen=True, slots=True)
class Pruned:
    """What :meth:`ArchivableStore.prune_before` has removed from a store so far. Source: ADR 32.

    Args:
        before: of messages that were due before it some or all records may be gone; UTC. ``None``: none are.
        counts: how many records of each kind.
    """

    before: datetime | None = None
    counts: Mapping[RecordKind, int] = field(default_factory=dict[RecordKind, int])

    @classmethod
    def of(cls, records: Iterable[tuple[datetime | None, str]]) -> Self:
        """Add up *pruned* records, each its ``before`` and its detail; one that was damaged counts nothing."""
        before, counts = None, Counter[RecordKind]()
        for at, detail in records:
            before = max(filter(None, (before, at)), default=None)
            with suppress(ValueError, KeyError, AttributeError, TypeError):
                counts.update({RecordKind[kind.upper()]: int(count) for kind, count in json.loads(detail).items()})
        return cls(before, counts)

    def and_now(self, before: datetime, kinds: Iterable[int]) -> Self:
        """Return this and records of ``kinds``, which are being removed."""
        counts = Counter(self.counts) + Counter(map(RecordKind, kinds))
        return type(self)(before if self.before is None else max(before, self.before), counts)

    @property
    def detail(self) -> str:
        """The detail of the record that says so."""
        return json.dumps({kind.name.lower(): count for kind, count in sorted(self.counts.items())})


def pruned_details(history: Iterable[Record]) -> list[tuple[datetime | None, str]]:
    """Return what the records under :data:`PRUNED_ID` say, for :meth:`Pruned.of`."""
    return [(each.due, each.detail) for each in history if each.kind is RecordKind.PRUNED]


class ArchivableStore(ScannableStore):
    """A store whose records can be audited, and moved elsewhere and back, while others work with it.

    Records are found by their place: ``part`` is a share of a scan of ``records`` in which they were seen. A record
    that is there no longer is not counted. Each call is one short transaction, so callers come in batches.

    Callers mark before they prune: at any moment a record that is missing belongs to a marked message, and no audit
    takes it for lost.
    """

    @property
    @abstractmethod
    def records_in_commit_order(self) -> bool:
        """Whether a record that is not yet committed has a higher number than every one that is; constant.

        Then the records up to a number are all there once one of them was seen. A database that hands out numbers
        before the commit cannot say so.
        """

    @abstractmethod
    def tables_of_stores(self) -> Sequence[str]:
        """Return the names of the tables of all stores that share this one's records, in order; none for a file.

        Each is what ``table=`` takes; the table of an endpoint is called ``{endpoint}.timeouts``.
        """

    @property
    @abstractmethod
    def pruned_at_once(self) -> int:
        """Width of a share whose records can be pruned in one transaction without making others wait; constant."""

    @abstractmethod
    def mark_archived(self, part: ScanPart, numbers: Sequence[int]) -> int:
        """Mark *scheduled* records with :data:`ARCHIVED`; their ids stay known, and refused when they come again.

        Args:
            part: where they were seen. Marking may move them to another place.
            numbers: of records in that share; records of other kinds than *scheduled* are left as they are.

        Returns:
            How many were marked by this call.
        """

    @abstractmethod
    def prune(self, part: ScanPart, numbers: Sequence[int]) -> int:
        """Remove records for good, whatever their kind.

        A store that takes its numbers from the last record keeps that one.

        Args:
            part: where they were seen.
            numbers: of records in that share.

        Returns:
            How many were removed.
        """

    @abstractmethod
    def prune_before(self, part: ScanPart, before: datetime, now: datetime) -> int:
        """Remove records from before an instant, of messages that are over, for good: one short transaction.

        Left are those of messages that wait, that may be returned from the error queue, that moved to another store, or
        whose due time is or once was ``before`` or later; and *scheduled* ones that were marked as archived, or are the
        last under their key. What is removed is counted in the store's *pruned* record (:class:`Pruned`).

        Args:
            part: a share of a scan of ``records``, not much wider than :attr:`pruned_at_once`.
            before: UTC.
            now: of the *pruned* record.

        Returns:
            How many were removed.
        """

    @abstractmethod
    def restore(self, records: Sequence[StoredRecord]) -> int:
        """Put records back under their numbers, message by message, and take the marks away: one transaction.

        The *scheduled* record is the claim: a message comes back if its record is marked, or if its id is unknown. The
        records of all others are left out, so a repeated call adds nothing.

        A store that counts its numbers by itself gives none to a new record, from the beginning of the call on, that is
        as high as the highest of ``records`` or lower, whether anything comes back or not; no call ever sets its count
        back. A store that takes its numbers from the last record does so once the message with the highest is back. A
        number that another record has by then is an error, and nothing is changed.

        Args:
            records: of whole messages, each with its *scheduled* record; none of its other records is in the store.
                Without its *scheduled* record, nothing of a message comes back.

        Returns:
            How many messages came back.
        """


# --- reading records as they are written (ADR 0011, point 5) ----------------------------------------------------------


class RecordStreamStore(ABC):
    """Gives the records of one store by their numbers: each once, none left out, while others write.

    Numbers grow, with gaps. They need not be in the order of commits; :meth:`safe_end` says up to where no gap will be
    filled any more.
    """

    @property
    @abstractmethod
    def identity(self) -> str:
        """What tells this store from others, the same in every process; without secrets."""

    @property
    @abstractmethod
    def where(self) -> str:
        """Where the store is, for people; without secrets."""

    @abstractmethod
    def next_number(self) -> int:
        """Return a number above every number in use; transactions that run may still write lower ones."""

    @abstractmethod
    def safe_end(self) -> int:
        """Return, without waiting for writers, a number below which nothing will be written any more.

        Each call checks whether the transactions that were writing at an earlier call have ended: call again until it
        is high enough. The answer never shrinks; the first may be 0.

        Raises:
            StoreNotSetUp: the store is a file, and there is none.
            StoreUnavailable: transient; the next call goes on from the last answer.

        Guarantees:
            integration/test_record_streams.py::test_nothing_below_the_safe_end_is_written_later;
            integration/test_record_streams.py::test_the_safe_end_gets_past_writers_that_come_and_go.
        """

    @abstractmethod
    def records(self, first: int, end: int, columns: Sequence[str], page: int) -> Iterable[list[tuple[Any, ...]]]:
        """Yield the records with numbers from ``first`` on and below ``end``, in no order, from one snapshot.

        Args:
            first: lowest number.
            end: at most :meth:`safe_end`; above that, records may still be missing.
            columns: of ``records``, see :class:`postdate.ports.ScannableStore`; rows are plain as there.
            page: rows at a time, at most.
        """

    @abstractmethod
    def close(self) -> None:
        """Release connections; a second time without effect."""

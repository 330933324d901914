"""What archiving and restoring say: values, without Spark."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from postdate.pipeline.plain import plain


@dataclass(frozen=True, slots=True)
class ArchivedDay:
    """What one run added to one day of an archive.

    Args:
        day: UTC, ISO 8601; on which the messages ended.
        records: of them.
        messages: with any of these records.
    """

    day: str
    records: int
    messages: int


@dataclass(frozen=True, slots=True)
class ArchiveResult:
    """What one run did.

    Args:
        store: address, without password.
        archive: the folder.
        before: what ended before that instant was moved; UTC.
        messages: whose records were written to the archive.
        records: that were written there.
        already_there: records of the store that the archive had already: of a run that was ended, or restored since.
        pruned: records that were removed from the store, kept ids apart.
        ids_kept: *scheduled* records that were marked, and stay in the store.
        ids_forgotten: *scheduled* records that were removed.
        days: what was added, by day.
        took_seconds: how long it took.
    """

    store: str
    archive: str
    before: datetime
    messages: int
    records: int
    already_there: int
    pruned: int
    ids_kept: int
    ids_forgotten: int
    days: tuple[ArchivedDay, ...]
    took_seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain values for JSON; instants in ISO 8601."""
        return plain(self)


@dataclass(frozen=True, slots=True)
class RestoreResult:
    """What was put back.

    Args:
        store: address, without password.
        archive: the folder.
        messages: that came back with all their records.
        left_out: messages that were asked for and whose ids are in use in the store: they came back before, or were
            never taken out, or the id was scheduled again.
        took_seconds: how long it took.
    """

    store: str
    archive: str
    messages: int
    left_out: int
    took_seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain values for JSON."""
        return plain(self)

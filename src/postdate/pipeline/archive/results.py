"""Results of archiving and restoring: values, without Spark."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from postdate.pipeline.plain import plain


@dataclass(frozen=True, slots=True)
class ArchivedDay:
    """Records that one run added to one day of an archive.

    Args:
        day: UTC, ISO 8601; on which the messages ended.
        records: number of records.
        messages: number of messages with any of these records.
    """

    day: str
    records: int
    messages: int


@dataclass(frozen=True, slots=True)
class ArchiveResult:
    """Result of one run.

    Args:
        store: address, without password.
        archive: the folder.
        before: messages that ended before this instant were moved; UTC.
        messages: whose records were written to the archive.
        records: that were written there.
        already_there: records that the archive had already, from a run that was cut off or because they were restored.
        pruned: records removed from the store, except the *scheduled* ones of kept ids.
        ids_kept: *scheduled* records that were marked, and stay in the store.
        ids_forgotten: *scheduled* records that were removed.
        days: added records, by day.
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
        return plain(self)


@dataclass(frozen=True, slots=True)
class RestoreResult:
    """Result of restoring.

    Args:
        store: address, without password.
        archive: the folder.
        messages: that came back with all their records.
        left_out: requested messages whose ids are in use in the store: they were restored before, never removed, or the
            id was scheduled again.
    """

    store: str
    archive: str
    messages: int
    left_out: int
    took_seconds: float

    def to_json(self) -> dict[str, Any]:
        return plain(self)

"""Types for a migration from the system where delayed messages wait today. Source: ADR 0015.

Everything here blocks. The driver of a Spark job and each of its tasks use a source of their own.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

MOVED_AWAY: Final = "moved to another store"
"""First words of the detail of the *cancelled* record of a message that has left its store for another one."""

RETURNED_BY_MIGRATION: Final = "given back by migration "
"""First words of the detail of the *rescheduled* record of a message that came back; only older versions wrote it."""


class MigrationStatus(enum.IntEnum):
    """The progress of a run. The numbers are stored, and are the same as upstream's."""

    PREPARING = 0
    PREPARED = 1
    COMPLETED = 2
    ABORTED = 3


class BatchStatus(enum.IntEnum):
    """The progress of a batch. The numbers are stored, and are the same as upstream's."""

    PENDING = 0
    """The messages are hidden from the old manager, and the target does not have any of them."""
    STAGED = 1
    """The target may have the messages, in part or whole; the batch can only go forward."""
    COMPLETED = 2
    """The target has the messages."""
    RETURNED = 3
    """An abort has returned the messages to their source."""


@dataclass(frozen=True, slots=True)
class MigrationPreview:
    """The timeouts that wait for one endpoint.

    Args:
        endpoint: the endpoint that owns the timeouts.
        count: number of timeouts that a migration would move.
        count_before_cutoff: number of timeouts before the cut-off, which a migration would not move.
        earliest: earliest due time that it would move, UTC; ``None`` when there is nothing to move.
        latest: latest due time that it would move; otherwise as ``earliest``.
        destinations: number of timeouts by destination.
        problems: reasons why a migration is not possible, with the ids of some timeouts; empty without problems.
        largest_bytes: size of the largest timeout to be moved, headers and body together, as a store counts it.
        largest_id: id of that timeout.
    """

    endpoint: str
    count: int
    count_before_cutoff: int
    earliest: datetime | None
    latest: datetime | None
    destinations: Mapping[str, int] = field(default_factory=dict[str, int])
    problems: Sequence[str] = ()
    largest_bytes: int = 0
    largest_id: str = ""


@dataclass(frozen=True, slots=True)
class MigrationRun:
    """One migration of one endpoint's messages.

    Args:
        run_id: a UUID's 32 hexadecimal digits.
        endpoint: endpoint that owns the messages.
        status: progress of the run.
        parameters: parameters of the run; it can only be resumed with equal ones.
        cutoff: aware UTC; messages that are due earlier stay.
        started_at: UTC.
        completed_at: UTC; ``None`` while the run is not complete.
        batches: number of batches.
        messages: number of messages that were hidden in these batches.
    """

    run_id: str
    endpoint: str
    status: MigrationStatus
    parameters: Mapping[str, str]
    cutoff: datetime
    started_at: datetime
    completed_at: datetime | None = None
    batches: int = 0
    messages: int = 0


@dataclass(frozen=True, slots=True)
class MigrationBatch:
    """Some messages that move together.

    Args:
        number: from 1.
        status: progress of the batch.
        count: number of messages in the batch.
        earliest: due time of the first message, UTC.
    """

    number: int
    status: BatchStatus
    count: int
    earliest: datetime

"""What a migration needs from where delayed messages wait today. Source: specification 4.12; ADR 0015.

Everything here blocks: a source is used by the driver and by the tasks of a Spark job, each with one of its own.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

MOVED_AWAY: Final = "moved to another store"
"""How the detail of the *cancelled* record begins of a message that has left its store for another one."""

GIVEN_BACK: Final = "given back by migration "
"""How the detail of the *rescheduled* record begins of a message that came back; written by older versions only."""


class MigrationStatus(enum.IntEnum):
    """How far a run is. The numbers are stored, and are upstream's."""

    PREPARING = 0
    PREPARED = 1
    COMPLETED = 2
    ABORTED = 3


class BatchStatus(enum.IntEnum):
    """How far a batch is. The numbers are stored, and are upstream's."""

    PENDING = 0
    """Hidden from the old manager; the target knows nothing of it."""
    STAGED = 1
    """The target may have it, in part or whole; it can only go forward."""
    COMPLETED = 2
    """The target has it."""
    RETURNED = 3
    """It went back to where it came from, by an abort."""


@dataclass(frozen=True, slots=True)
class MigrationPreview:
    """What waits for one endpoint.

    Args:
        endpoint: the one that owns the timeouts.
        count: of those that a migration would move.
        left: of those before the cut-off, which it would leave.
        earliest: due time, UTC, of what it would move; ``None`` when there is nothing.
        latest: the same.
        destinations: how many for each.
        problems: what keeps it from being migrated, with the ids of some; empty when nothing does.
        largest_bytes: size of the largest that it would move, headers and body together, as a store counts it.
        largest_id: of that one.
    """

    endpoint: str
    count: int
    left: int
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
        endpoint: whose messages.
        status: how far it is.
        parameters: what it was begun with, for whoever resumes it: equal ones only.
        cutoff: aware UTC; what is due earlier stays.
        started_at: UTC.
        completed_at: UTC; ``None`` while it is on its way.
        batches: how many there are.
        messages: how many were hidden in these batches.
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
        status: how far it is.
        count: how many messages it has.
        earliest: due time of the first, UTC.
    """

    number: int
    status: BatchStatus
    count: int
    earliest: datetime

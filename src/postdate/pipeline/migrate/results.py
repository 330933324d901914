"""What the commands of a migration say: values, without Spark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from postdate.pipeline.plain import plain
from postdate.ports.migrating import BatchStatus, MigrationBatch, MigrationRun

NAMED = 100
"""Findings that are named one by one; all are counted."""


@dataclass(frozen=True, slots=True)
class EndpointPreview:
    """What a migration would move of one endpoint.

    Args:
        endpoint: the one that owns the messages.
        count: of those that would move.
        left: of those that are due before the cut-off, and would stay.
        earliest: due time, UTC, of the first that would move; ``None`` without any.
        latest: the same of the last.
        destinations: how many for each.
        problems: what keeps all of it from being migrated; empty when nothing does.
        warnings: what is good to know before.
    """

    endpoint: str
    count: int
    left: int
    earliest: datetime | None
    latest: datetime | None
    destinations: Mapping[str, int]
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PreviewResult:
    """What a migration would do.

    Args:
        source: address, without password.
        target: the same.
        endpoints: of those asked for, by name.
    """

    source: str
    target: str
    endpoints: tuple[EndpointPreview, ...]

    @property
    def possible(self) -> bool:
        """Whether nothing is in the way."""
        return not any(each.problems for each in self.endpoints)

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain values for JSON; instants in ISO 8601."""
        addresses = {"source": self.source, "target": self.target}
        return {**addresses, "possible": self.possible, "endpoints": plain(self.endpoints)}


@dataclass(frozen=True, slots=True)
class Difference:
    """A message that the target does not have as the source had it.

    Args:
        message_id: of the message.
        what: differs: ``missing``, or the names of the fields.
    """

    message_id: str
    what: str


@dataclass(frozen=True, slots=True)
class EndpointResult:
    """What became of one endpoint's messages in one run.

    Args:
        endpoint: the one that owns them.
        run_id: of the run; ``None``: there was nothing to move, and no run.
        status: of the run, in lower case.
        messages: how many were hidden from the old manager.
        moved: of these, in batches that the target has.
        returned: of these, given back by an abort.
        refused: of these, in batches that hold something the target does not take; they are hidden still.
        already_there: how many ids the target knew before; what it has of them was compared as well.
        stored_late: how many were due already when the target got them.
        verified: how many wait in the target, each field as it was.
        delivered_meanwhile: how many the target has delivered, or ended otherwise, or rescheduled, by its records.
        mismatched: how many the target does not have, or not as they were.
        differences: of these, at most :data:`NAMED`.
        problems: why batches were refused.
    """

    endpoint: str
    run_id: str | None
    status: str
    messages: int = 0
    moved: int = 0
    returned: int = 0
    refused: int = 0
    already_there: int = 0
    stored_late: int = 0
    verified: int = 0
    delivered_meanwhile: int = 0
    mismatched: int = 0
    differences: tuple[Difference, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether everything that was moved is accounted for."""
        return not self.refused and not self.mismatched and self.moved == self.verified + self.delivered_meanwhile


@dataclass(frozen=True, slots=True)
class MigrateResult:
    """What a run, or its abort, did.

    Args:
        source: address, without password.
        target: the same.
        endpoints: of those asked for, by name.
        took_seconds: how long it took.
    """

    source: str
    target: str
    endpoints: tuple[EndpointResult, ...]
    took_seconds: float

    @property
    def exact(self) -> bool:
        """Whether everything that was moved is accounted for, and nothing was refused."""
        return all(each.exact for each in self.endpoints)

    @property
    def complete(self) -> bool:
        """Whether all of it has come to its end, exactly; an abort is no such end."""
        return self.exact and all(each.run_id is None or each.status == "completed" for each in self.endpoints)

    @property
    def moved(self) -> int:
        """Messages that the target has of these runs."""
        return sum(each.moved for each in self.endpoints)

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain values for JSON."""
        return {**plain(self), "exact": self.exact}


@dataclass(frozen=True, slots=True)
class StatusResult:
    """The runs that a source knows of.

    Args:
        source: address, without password.
        runs: the oldest first, each with its batches.
    """

    source: str
    runs: tuple[RunStatus, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain values for JSON; instants in ISO 8601."""
        return {"source": self.source, "runs": [each.to_json() for each in self.runs]}


@dataclass(frozen=True, slots=True)
class RunStatus:
    """How far one run is.

    Args:
        run: what is written down of it.
        batches: how many there are of each status.
        messages: how many they have, of each status.
    """

    run: MigrationRun
    batches: Mapping[BatchStatus, int] = field(default_factory=dict[BatchStatus, int])
    messages: Mapping[BatchStatus, int] = field(default_factory=dict[BatchStatus, int])

    @classmethod
    def of(cls, run: MigrationRun, batches: Sequence[MigrationBatch]) -> RunStatus:
        """Count the batches of a run."""
        return cls(
            run,
            {status: sum(each.status is status for each in batches) for status in BatchStatus},
            {status: sum(each.count for each in batches if each.status is status) for status in BatchStatus},
        )

    def to_json(self) -> dict[str, Any]:
        """Return the run as plain values for JSON; instants in ISO 8601."""
        found = plain(self)
        return {**found.pop("run"), **found}

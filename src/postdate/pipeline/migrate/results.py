"""Results of the commands of a migration: values, without Spark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from postdate.pipeline.plain import to_plain
from postdate.ports.migrating import BatchStatus, MigrationBatch, MigrationRun

NAMED = 100
"""Maximum number of findings that are named one by one; all are counted."""


@dataclass(frozen=True, slots=True)
class EndpointPreview:
    """Preview of one endpoint.

    Args:
        endpoint: the owner of the messages.
        count: number of messages that would move.
        left: number of messages due before the cut-off, which would stay.
        earliest: due time, UTC, of the first message that would move; ``None`` without any.
        latest: due time of the last one.
        destinations: number of messages by destination.
        problems: reasons why no message of the endpoint can be migrated.
        warnings: facts that an operator should know before.
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
    """Preview of a migration; addresses have no password, and endpoints are in order of their names."""

    source: str
    target: str
    endpoints: tuple[EndpointPreview, ...]

    @property
    def is_possible(self) -> bool:
        """Whether no endpoint has a problem."""
        return not any(each.problems for each in self.endpoints)

    def to_json(self) -> dict[str, Any]:
        addresses = {"source": self.source, "target": self.target}
        return {**addresses, "possible": self.is_possible, "endpoints": to_plain(self.endpoints)}


@dataclass(frozen=True, slots=True)
class Difference:
    """A message that differs in the target. ``what`` is ``missing``, or the names of the fields that differ."""

    message_id: str
    what: str


@dataclass(frozen=True, slots=True)
class BatchComparison:
    """Result of comparing one batch. ``moved_on``: the target has delivered, ended or rescheduled these messages."""

    run_id: str
    verified: int
    moved_on: int
    differences: tuple[Difference, ...]


@dataclass(frozen=True, slots=True)
class EndpointResult:
    """Result of one run for one endpoint.

    Args:
        endpoint: the owner of the messages.
        run_id: ``None``: there was nothing to move, and no run.
        status: status of the run, in lower case.
        messages: number of messages that were hidden from the old manager.
        moved: of these, messages in batches that the target has.
        returned: of these, messages that an abort returned to the old manager.
        refused: of these, messages in batches with a message that the target cannot take; they are still hidden.
        already_there: ids that the target knew before; its messages were compared as well.
        stored_late: messages that were due already when the target got them.
        verified: messages that are pending in the target, with every field unchanged.
        delivered_meanwhile: messages that the target has delivered, ended otherwise, or rescheduled, by its records.
        mismatched: messages that the target does not have, or has with other fields.
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
    def is_exact(self) -> bool:
        """Whether every moved message is accounted for."""
        return not self.refused and not self.mismatched and self.moved == self.verified + self.delivered_meanwhile


@dataclass(frozen=True, slots=True)
class MigrateResult:
    """Result of a run, or of its abort; addresses have no password, and endpoints are in order of their names."""

    source: str
    target: str
    endpoints: tuple[EndpointResult, ...]
    took_seconds: float

    @property
    def is_exact(self) -> bool:
        """Whether every moved message is accounted for, and none was refused."""
        return all(each.is_exact for each in self.endpoints)

    @property
    def is_complete(self) -> bool:
        """Whether all runs are completed, exactly, and without a problem. An aborted run is not complete."""
        has_completed = all(each.run_id is None or each.status == "completed" for each in self.endpoints)
        return has_completed and self.is_exact and not any(each.problems for each in self.endpoints)

    @property
    def moved(self) -> int:
        """Number of messages of these runs that the target has."""
        return sum(each.moved for each in self.endpoints)

    def to_json(self) -> dict[str, Any]:
        return {**to_plain(self), "exact": self.is_exact, "complete": self.is_complete}


@dataclass(frozen=True, slots=True)
class StatusResult:
    """The runs that a source knows, the oldest first. ``source`` is its address, without password."""

    source: str
    runs: tuple[RunStatus, ...]

    def to_json(self) -> dict[str, Any]:
        return {"source": self.source, "runs": [each.to_json() for each in self.runs]}


@dataclass(frozen=True, slots=True)
class RunStatus:
    """Progress of one run: batches, and messages in them, by status."""

    run: MigrationRun
    batches: Mapping[BatchStatus, int] = field(default_factory=dict[BatchStatus, int])
    messages: Mapping[BatchStatus, int] = field(default_factory=dict[BatchStatus, int])

    @classmethod
    def of(cls, run: MigrationRun, batches: Sequence[MigrationBatch]) -> RunStatus:
        return cls(
            run,
            {status: sum(each.status is status for each in batches) for status in BatchStatus},
            {status: sum(each.count for each in batches if each.status is status) for status in BatchStatus},
        )

    def to_json(self) -> dict[str, Any]:
        fields = to_plain(self)
        return {**fields.pop("run"), **fields}

"""Adds up the results of one run's batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from postdate.pipeline.migrate.moving import MovedBatch
from postdate.pipeline.migrate.results import NAMED, Difference, EndpointResult
from postdate.pipeline.migrate.verifying import Verified
from postdate.ports.migrating import BatchStatus, MigrationBatch, MigrationRun, MigrationStatus


@dataclass(slots=True)
class Tally:
    already_there: int = 0
    stored_late: int = 0
    verified: int = 0
    delivered_meanwhile: int = 0
    mismatched: int = 0
    differences: list[Difference] = field(default_factory=list[Difference])
    problems: list[str] = field(default_factory=list[str])

    def moved(self, batch: MovedBatch) -> None:
        """Count a batch that was moved, or refused."""
        self.already_there += batch.already_there
        self.stored_late += batch.stored_late
        if batch.problem:
            self.problems.append(batch.problem)

    def compared(self, found: Verified) -> None:
        self.verified += found.verified
        self.delivered_meanwhile += found.moved_on
        self.mismatched += len(found.differences)
        self.differences += found.differences[: NAMED - len(self.differences)]

    def result(
        self, endpoint: str, run_id: str | None, status: str, *, moved: int, returned: int, refused: int
    ) -> EndpointResult:
        return EndpointResult(
            endpoint,
            run_id,
            status,
            messages=moved + returned + refused,
            moved=moved,
            returned=returned,
            refused=refused,
            already_there=self.already_there,
            stored_late=self.stored_late,
            verified=self.verified,
            delivered_meanwhile=self.delivered_meanwhile,
            mismatched=self.mismatched,
            differences=tuple(self.differences),
            problems=tuple(self.problems[:NAMED]),
        )

    def result_of(
        self, run: MigrationRun, status: MigrationStatus, batches: Sequence[MigrationBatch]
    ) -> EndpointResult:
        def count(*of: BatchStatus) -> int:
            return sum(batch.count for batch in batches if batch.status in of)

        return self.result(
            run.endpoint,
            run.run_id,
            status.name.lower(),
            moved=count(BatchStatus.COMPLETED),
            returned=count(BatchStatus.RETURNED),
            refused=count(BatchStatus.PENDING, BatchStatus.STAGED),
        )

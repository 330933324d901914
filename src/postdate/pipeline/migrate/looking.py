"""Previews, unfinished runs, and their progress: everything that moves no message. Runs on the driver."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from postdate.backends.sql.timeouts_migration.tables import MigrationSource
from postdate.config import Address, resolve_address
from postdate.errors import MigrationConflict, PipelineError
from postdate.messages import aware_utc
from postdate.pipeline.migrate.ends import OriginSpec, open_target
from postdate.pipeline.migrate.results import EndpointPreview, PreviewResult, RunStatus, StatusResult
from postdate.pipeline.stores import StoreSpec
from postdate.ports.migrating import MigrationPreview, MigrationRun, MigrationStatus

EVERYTHING: Final = datetime(1970, 1, 1, tzinfo=UTC)
"""The cut-off with which every message moves."""

ON_ITS_WAY: Final = frozenset({MigrationStatus.PREPARING, MigrationStatus.PREPARED})
MARGIN: Final = timedelta(seconds=60)
BATCH_SIZE: Final = 5_000
_NEAR: Final = timedelta(hours=4)


@dataclass(frozen=True, slots=True)
class MigrateJob:
    """A migration from the storage of a timeout manager to a store.

    Args:
        origin: the storage that has the messages.
        target: the store that receives them; it must exist.
        endpoints: endpoints whose messages move, by name in any case; ``None``: all endpoints.
        cutoff: messages due earlier stay; aware.
        batch_size: number of messages that move together: in one transaction of the source, and one of the target.
        margin: messages due within this time from now stay, because the old manager may be delivering them.

    Raises:
        InvalidTimestamp: the cut-off has no time zone.
        PipelineError: ``batch_size`` or ``margin`` is too small.
    """

    origin: OriginSpec
    target: StoreSpec
    endpoints: tuple[str, ...] | None = None
    cutoff: datetime = EVERYTHING
    batch_size: int = BATCH_SIZE
    margin: timedelta = MARGIN

    def __post_init__(self) -> None:
        object.__setattr__(self, "cutoff", aware_utc(self.cutoff, "cutoff"))
        if self.batch_size < 1 or self.margin <= timedelta(0):
            raise PipelineError(
                f"batches have at least one message and the margin is above zero, "
                f"not batch_size={self.batch_size} and margin={self.margin}"
            )

    @property
    def parameters(self) -> Mapping[str, str]:
        """Parameters that must be equal when a run is resumed: the target and the cut-off, to the microsecond."""
        return {**target_of(self.target), "cutoff": self.cutoff.isoformat()}


def target_of(store: StoreSpec) -> dict[str, str]:
    """Return the names that identify a target, without its password.

    An address and a reference to it give the same names.
    """
    address = Address(str(resolve_address(store.address, os.environ)))
    identity = {"target": address.redacted_text, "table": store.table or f"{store.endpoint}.timeouts"}
    return identity | ({} if store.schema is None else {"schema": store.schema})


def select_endpoints(
    source: MigrationSource, endpoints: Sequence[str] | None, runs: Sequence[MigrationRun]
) -> list[str]:
    """Return the names of endpoints as the source writes them.

    ``endpoints`` are in any case; ``None``: all. Endpoints of the unfinished ``runs`` are known even if they have no
    message left. Raises PipelineError for an unknown or ambiguous endpoint.
    """
    names = sorted({*source.endpoints(), *(run.endpoint for run in runs if run.status in ON_ITS_WAY)})
    return names if endpoints is None else list(dict.fromkeys(match_endpoint(each, names) for each in endpoints))


def match_endpoint(endpoint: str, names: Sequence[str]) -> str:
    """Return the name among ``names`` that matches: as written, or in another case, or with underscores for dots.

    Tables are named after endpoints, with underscores for dots. Raises PipelineError for no match, or several.
    """
    for spelling in (endpoint, endpoint.replace(".", "_")):
        if spelling in names:
            return spelling
        matches = [name for name in names if name.casefold() == spelling.casefold()]
        if len(matches) > 1:
            matches_text = ", ".join(matches)
            raise PipelineError(f"endpoint {endpoint!r} may be any of {matches_text}; write it as one of these")
        if matches:
            return matches[0]
    names_text = ", ".join(names) or "none at all: are the tables in another schema (--schema)?"
    raise PipelineError(f"no endpoint {endpoint!r} owns messages there; it has {names_text}")


def find_unfinished(source: MigrationSource) -> dict[str, MigrationRun]:
    """Return the runs that are neither completed nor aborted, by endpoint."""
    return {run.endpoint: run for run in source.history() if run.status in ON_ITS_WAY}


def status_of(source: MigrationSource, run: MigrationRun) -> MigrationStatus:
    return next(each.status for each in source.history() if each.run_id == run.run_id)


def select_unfinished(source: MigrationSource, job: MigrateJob, purpose: str) -> list[MigrationRun]:
    """Return the unfinished runs of the endpoints of the job.

    Raises PipelineError without any (``purpose``: ``to abort``), and MigrationConflict for a run with another target.
    """
    unfinished = find_unfinished(source)
    names = [name for name in select_endpoints(source, job.endpoints, source.history()) if name in unfinished]
    if not names:
        raise PipelineError(f"no migration is on its way in {job.origin.redacted_address}; there is nothing {purpose}")
    for name in names:
        check_parameters(unfinished[name], target_of(job.target))
    return [unfinished[name] for name in names]


def check_parameters(run: MigrationRun, parameters: Mapping[str, str]) -> None:
    """Raise MigrationConflict for a run that was begun with other parameters."""
    run_parameters = {name: run.parameters.get(name) for name in parameters}
    if run_parameters != dict(parameters):
        raise MigrationConflict(
            f"the migration {run.run_id} of {run.endpoint} is on its way, begun with "
            f"{parameters_text(run_parameters)}; "
            f"this one has {parameters_text(parameters)}: go on with `resume`, or end it with `abort`"
        )


def parameters_text(parameters: Mapping[str, str | None]) -> str:
    return ", ".join(f"{name} {value}" for name, value in sorted(parameters.items()))


# --- preview ----------------------------------------------------------------------------------------------------------


def preview(job: MigrateJob, now: datetime) -> PreviewResult:
    """Return the messages that a migration would move, and reasons why they cannot move. Nothing is changed.

    Raises:
        StoreError: the source or the target is missing or unreachable.
        NotSupported: the target does not show its messages.
        PipelineError: there is no such endpoint.
    """
    with job.origin.open() as source:
        return preview_open(source, job, select_endpoints(source, job.endpoints, source.history()), now)


def check_problems(preview: PreviewResult) -> None:
    """Raise PipelineError if one of the endpoints cannot move."""
    problems = [f"{each.endpoint}: {problem}" for each in preview.endpoints for problem in each.problems]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise PipelineError(f"nothing new is moved, for {problems[0]}{more}; see `postdate pipeline migrate preview`")


def preview_open(source: MigrationSource, job: MigrateJob, names: Sequence[str], now: datetime) -> PreviewResult:
    """Return the preview of these endpoints of an open source. It raises the same errors as :func:`preview`."""
    with open_target(job.target) as store:
        store.count_overdue(now)  # The answer is not used: the call raises an error if the tables are missing.
        largest = store.largest_message_bytes
    previews_of_source = (source.preview(name, job.cutoff) for name in names)
    previews = tuple(_preview_endpoint(each, largest, now, job.margin) for each in previews_of_source)
    return PreviewResult(job.origin.redacted_address, job.target.redacted_address, previews)


def _preview_endpoint(
    preview: MigrationPreview, largest_bytes: int, now: datetime, margin: timedelta
) -> EndpointPreview:
    too_large = (
        f"{preview.largest_id} has {preview.largest_bytes:,} bytes of headers and body, and the target takes "
        f"{largest_bytes:,}; let it take larger messages, or move this one by hand"
    )
    return EndpointPreview(
        preview.endpoint,
        preview.count,
        preview.count_before_cutoff,
        preview.earliest,
        preview.latest,
        dict(preview.destinations),
        (*([too_large] if preview.largest_bytes > largest_bytes else ()), *preview.problems),
        _warnings(preview, now, margin),
    )


def _warnings(preview: MigrationPreview, now: datetime, margin: timedelta) -> tuple[str, ...]:
    if preview.earliest is None or preview.earliest - now >= _NEAR:
        return ()
    seconds = int((preview.earliest - now) / timedelta(seconds=1))
    when = f"in {seconds // 60} min {seconds % 60} s" if seconds >= 0 else "already"
    remark = f"what is due within {margin / timedelta(seconds=1):g} s of being hidden stays where it is"
    return (f"the earliest is due {when}: {remark}",)


# --- status -----------------------------------------------------------------------------------------------------------


def status(origin: OriginSpec, endpoints: Sequence[str] | None = None) -> StatusResult:
    """Return the progress of each run, of all endpoints or of some. Nothing is changed.

    Raises:
        StoreError: the source is missing or unreachable.
        PipelineError: there is no such endpoint.
    """
    with origin.open() as source:
        runs = source.history()
        names = [run.endpoint for run in runs] if endpoints is None else select_endpoints(source, endpoints, runs)
        statuses = [RunStatus.of(run, source.batches(run)) for run in runs if run.endpoint in names]
        return StatusResult(origin.redacted_address, tuple(statuses))

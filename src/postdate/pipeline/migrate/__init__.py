"""Migrating: delayed messages from a timeout manager's tables into a store. Source: specification 4.12; ADR 0015."""

from postdate.pipeline.migrate.aborting import abort
from postdate.pipeline.migrate.job import migrate, resume
from postdate.pipeline.migrate.looking import BATCH_SIZE, EVERYTHING, MARGIN, MigrateJob, preview, status
from postdate.pipeline.migrate.origin import OriginSpec
from postdate.pipeline.migrate.results import (
    Difference,
    EndpointPreview,
    EndpointResult,
    MigrateResult,
    PreviewResult,
    RunStatus,
    StatusResult,
)

__all__ = [
    "BATCH_SIZE",
    "EVERYTHING",
    "MARGIN",
    "Difference",
    "EndpointPreview",
    "EndpointResult",
    "MigrateJob",
    "MigrateResult",
    "OriginSpec",
    "PreviewResult",
    "RunStatus",
    "StatusResult",
    "abort",
    "migrate",
    "preview",
    "resume",
    "status",
]

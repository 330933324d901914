"""Moves delayed messages from a timeout manager's tables, or another store, into a store. Source: ADR 0015."""

from postdate.pipeline.migrate.between_stores import StoreMove, status_of_store
from postdate.pipeline.migrate.ends import OriginSpec
from postdate.pipeline.migrate.job import abort, migrate, resume
from postdate.pipeline.migrate.looking import BATCH_SIZE, EVERYTHING, MARGIN, MigrateJob, preview, status
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
    "StoreMove",
    "abort",
    "migrate",
    "preview",
    "resume",
    "status",
    "status_of_store",
]

"""Move delayed messages from the tables of a timeout manager into a store. Source: ADR 15."""

from postdate.pipeline.migrate.ends import OriginSpec as OriginSpec
from postdate.pipeline.migrate.job import abort as abort, migrate as migrate, resume as resume
from postdate.pipeline.migrate.looking import (
    BATCH_SIZE as BATCH_SIZE,
    EVERYTHING as EVERYTHING,
    MARGIN as MARGIN,
    MigrateJob as MigrateJob,
    preview as preview,
    status as status,
)
from postdate.pipeline.migrate.results import (
    Difference as Difference,
    EndpointPreview as EndpointPreview,
    EndpointResult as EndpointResult,
    MigrateResult as MigrateResult,
    PreviewResult as PreviewResult,
    RunStatus as RunStatus,
    StatusResult as StatusResult,
)

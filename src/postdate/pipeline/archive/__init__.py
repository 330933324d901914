"""Move records of ended messages out of the store into Parquet files by day, and back."""

from postdate.pipeline.archive.job import ArchivedDay, ArchiveResult, RestoreResult, archive
from postdate.pipeline.archive.restoring import restore

__all__ = ["ArchiveResult", "ArchivedDay", "RestoreResult", "archive", "restore"]

"""Moves records of ended messages out of the store into Parquet by day, and back."""

from postdate.pipeline.archive.job import archive
from postdate.pipeline.archive.restoring import restore
from postdate.pipeline.archive.results import ArchivedDay, ArchiveResult, RestoreResult

__all__ = ["ArchiveResult", "ArchivedDay", "RestoreResult", "archive", "restore"]

"""The embedded SQLite file that the SQLite store and the local transport share (ADR 0003)."""

from postdate.embedded.file import SqliteFile, Transaction

__all__ = ["SqliteFile", "Transaction"]

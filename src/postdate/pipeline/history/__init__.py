"""The records of a store as a stream into files: what retention removes from the store stays readable there."""

from postdate.pipeline.history.job import HistoryResult, write_history
from postdate.pipeline.history.lake import read_history

__all__ = ["HistoryResult", "read_history", "write_history"]

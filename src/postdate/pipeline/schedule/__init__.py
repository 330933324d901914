"""Store a table of messages: millions of rows, idempotent by message id. Bad rows are set aside with the reason.

The input is read twice: once to find ids with different content, which needs the whole input, and once to store. Spark
SQL checks times and texts of rows; Arrow then checks whole batches, and only doubtful rows are checked one by one. A
store that accepts columns gets them without conversion.

With ``sync``, the messages that wait under the name of a load become those of the table; see
:mod:`postdate.pipeline.syncing`.

A row is stored unchanged or set aside as a whole. A text that is not UTF-8, or headers that JSON cannot represent, are
never altered. A row whose id the store knows is compared with what the store has; see
:mod:`postdate.pipeline.duplicates`. The rows of the input are counted separately from the results, and the sums are
compared.

After a failure nothing is half done: every batch is a transaction, and ids that were stored before are left unchanged.
So the same job can be run again.

:mod:`.job` has the parameters and :mod:`.result` the result. On Spark, :mod:`.running` is the job: :mod:`.selecting`
checks the columns by Spark SQL, :mod:`.storing` checks and stores batches of Arrow on executors, :mod:`.sync` makes a
load equal to the table, and :mod:`.collecting` makes the result. Without ``schedule`` nothing here imports PySpark.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from postdate.pipeline.schedule.columns import ColumnMapping
from postdate.pipeline.schedule.job import Rejects, ScheduleJob
from postdate.pipeline.schedule.result import CONFLICTS_WITH_STORE, ScheduleResult, SyncResult

if TYPE_CHECKING:
    from postdate.pipeline.schedule.running import schedule

__all__ = [
    "CONFLICTS_WITH_STORE",
    "ColumnMapping",
    "Rejects",
    "ScheduleJob",
    "ScheduleResult",
    "SyncResult",
    "schedule",
]


# Imported at first use, because only this function needs PySpark.
def __getattr__(name: str) -> object:
    if name != "schedule":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = importlib.import_module(f"{__name__}.running").schedule
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""The parameters of a schedule job."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from postdate.errors import PipelineError
from postdate.pipeline.clock_times import LocalTimes
from postdate.pipeline.load_names import check_load
from postdate.pipeline.outputs import check_new_path
from postdate.pipeline.schedule.columns import ColumnMapping
from postdate.pipeline.stores import StoreSpec

REJECTED_ROWS, REPORT = "the rejected rows", "the report"
_REJECTED_FORMATS = frozenset({"json", "parquet"})


@dataclass(frozen=True, slots=True)
class Rejects:
    """Where to write rows that are not messages.

    Args:
        path: a directory, which must not exist yet: a path on the driver's machine, or as text a URI such as
            ``s3a://bucket/rejected``.
        format: ``json`` or ``parquet``. Columns: ``reason`` (a stable code), ``detail``, the message as texts; of CSV
            and JSON also ``file``, ``line`` and ``row``, which is the whole row exactly as it stands in the file.
            ``bytes`` has by column what a text cannot hold: bytes that are not UTF-8, and a whole body that is too
            large; in JSON as base64.
    """

    path: str | Path
    format: str = "json"

    def __post_init__(self) -> None:
        if self.format not in _REJECTED_FORMATS:
            raise PipelineError(f"rejected rows are written as json or parquet, not {self.format!r}")
        check_new_path(self.path, REJECTED_ROWS)


@dataclass(frozen=True, slots=True)
class ScheduleJob:
    """The parameters of a schedule job. The object lives on the driver; only parts of it are pickled.

    Args:
        store: the store for the messages; created if it is missing.
        now: recorded as the time of scheduling; aware.
        columns: columns of the input; by default columns of the usual names.
        local_times: how to read times without an offset; without it, rows with such times are set aside.
        rejects: where to write rows that are not messages; without it, they are only counted.
        batch: number of messages stored in one transaction; by default a good number for the store.
        report: directory, which must not exist yet, for a Parquet table of results: ``outcome``
            (``accepted``, ``already_there``, ``conflicting`` or ``set_aside``), ``reason`` (null unless set aside),
            ``rows``. A path or a URI, as for :class:`Rejects`.
        unused: columns that resemble an optional column of the usual names, but do not stand for it. An input with such
            a column that is not listed here is refused.
        dry_run: read and check everything, and store nothing. No rejected rows and no report are written.
        expected_rows: number of rows of the input, as another reader has counted them; see
            :func:`postdate.pipeline.counting.count_rows`. Without it, the rows are only counted in a pass of their own.
        load: name of the load that the messages belong to, at most 200 characters; ``None``: of no load.
        sync: make the pending messages of the load equal to the table: store, reschedule, replace and cancel. Nothing
            is cancelled if a row is set aside. An input without rows is refused.
    """

    store: StoreSpec
    now: datetime
    columns: ColumnMapping | None = None
    local_times: LocalTimes | None = None
    rejects: Rejects | None = None
    batch: int | None = None
    report: str | Path | None = None
    unused: tuple[str, ...] = ()
    dry_run: bool = False
    expected_rows: int | None = None
    load: str | None = None
    sync: bool = False

    def __post_init__(self) -> None:
        if self.load is not None:
            check_load(self.load)
        elif self.sync:
            raise PipelineError("sync needs the name of a load: the messages under this name become those of the table")
        if self.report is not None:
            check_new_path(self.report, REPORT)

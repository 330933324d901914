"""The folder of an archive, ``day=2026-11-20/*.parquet``, and how it stays complete. Runs on the driver.

A run writes to its own folder, whose name begins with ``_run-`` so that readers ignore it. Verified files are moved
one by one: a file is either missing or complete. The next run removes the folder of a run that was killed.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from filelock import FileLock, Timeout
from pyspark.sql import DataFrame, SparkSession

from postdate.errors import PipelineError
from postdate.pipeline.audit.reading import ARCHIVE_MARK
from postdate.pipeline.failures import shorten_errors
from postdate.pipeline.rows import arrow_schema, spark_schema
from postdate.pipeline.stores import StoreSpec

RECORD_SCHEMA = spark_schema(arrow_schema("records"))
"""The columns of an archive except ``endpoint`` and ``day``, which are names of folders."""

COLUMNS = tuple(arrow_schema("records").names)
_FORMAT = 1
_LOCK = "_lock"
_RUN = "_run-"


class ArchiveFolder:
    """An archive on a disk that the driver and all executors share."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()

    # --- whose it is --------------------------------------------------------------------------------------------

    def bind_to(self, store: StoreSpec, endpoint: str) -> None:
        """Make the folder the archive of a store.

        Raise PipelineError if it has other content or belongs to another store.
        """
        mark = self.path / ARCHIVE_MARK
        identity = {"format": _FORMAT, "endpoint": endpoint, "store": store.redacted_address}
        if mark.exists():
            owner = self._read_mark()
            if owner != identity:
                raise PipelineError(
                    f"{self.path} is the archive of the endpoint {owner.get('endpoint')!r} in {owner.get('store')!r}, "
                    f"not of {endpoint!r} in {store.redacted_address!r}: give each store an archive of its own, or, "
                    f"if it is the "
                    f"same store at another address, change {mark}"
                )
            return
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise PipelineError(f"{self.path} is no archive and not empty; give a new folder")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            new_mark = mark.with_name(f"{ARCHIVE_MARK}.{uuid.uuid4().hex}")
            new_mark.write_text(json.dumps(identity) + "\n", encoding="utf-8")
            new_mark.replace(mark)
        except OSError as error:
            raise PipelineError(f"the archive {self.path} cannot be written: {error}") from error

    def check(self) -> None:
        """Raise PipelineError if the folder is not an archive, or was written by a later version of Postdate."""
        if not (self.path / ARCHIVE_MARK).exists():
            raise PipelineError(f"{self.path} is no archive: it has no {ARCHIVE_MARK}")
        self._read_mark()

    def _read_mark(self) -> dict[str, object]:
        mark = self.path / ARCHIVE_MARK
        try:
            decoded = json.loads(mark.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise PipelineError(f"{mark} cannot be read: {error}") from error
        mark_fields = cast("dict[str, object]", decoded) if isinstance(decoded, dict) else {}
        if mark_fields.get("format") != _FORMAT:
            raise PipelineError(f"{mark} is not one of this Postdate; perhaps a later one has written it")
        return mark_fields

    @contextmanager
    def lock(self) -> Generator[None]:
        """Lock this archive against other runs for the length of the block.

        Raise PipelineError if another run has the lock. The lock ends with its process, even if the process is killed.
        """
        try:
            lock = FileLock(self.path / _LOCK, timeout=0).acquire()
        except Timeout as error:
            raise PipelineError(f"another process is at work on the archive {self.path}; wait for it to end") from error
        except OSError as error:
            raise PipelineError(f"the archive {self.path} cannot be written: {error}") from error
        with lock:
            yield

    # --- what is in it ------------------------------------------------------------------------------------------

    def read_published(self, spark: SparkSession) -> DataFrame:
        """Return all published records: :data:`RECORD_SCHEMA` and ``day`` (text)."""
        if not any(self.path.glob("day=*/*.parquet")):
            return spark.createDataFrame([], f"{RECORD_SCHEMA}, day string")
        return self.read_records(spark, self.path)

    def read_records(self, spark: SparkSession, path: Path) -> DataFrame:
        """Return the records in a folder, such as that of a run that is not published yet.

        They are read from the disk.
        """
        with shorten_errors(f"the archive {path} cannot be read as Parquet"):
            records = spark.read.schema(f"{RECORD_SCHEMA}, day string").parquet(str(path))
        return records.select(*COLUMNS, "day")

    # --- a run --------------------------------------------------------------------------------------------------

    def start_run(self) -> Path:
        """Remove the folders of killed runs. Return the path of a new folder, which does not exist yet."""
        for unfinished in self.path.glob(f"{_RUN}*"):
            shutil.rmtree(unfinished)
        return self.path / f"{_RUN}{uuid.uuid4().hex}"

    def publish(self, run: Path) -> None:
        """Move the files of a run to the place where readers see them, synced to the disk.

        Spark's file names are unique to the run, so no existing file is ever replaced.
        """
        folders = {self.path}
        for new_file in sorted(run.glob("day=*/*.parquet")):
            day = self.path / new_file.parent.name
            day.mkdir(exist_ok=True)
            folders.add(day)
            _sync(new_file)
            new_file.rename(day / new_file.name)
        for folder in folders:
            _sync(folder)
        shutil.rmtree(run)


def _sync(path: Path) -> None:
    """Wait until the disk has a file, or the names in a folder, so that they survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""The lake: a folder with the records of one store, and the checkpoint of the stream that writes it. On the driver.

::

    LAKE/batch=7/day=2026-11-20/*.parquet   the records of micro-batch 7, by the day on which they were written
    LAKE/_history                           which store it is of, and the id of the lake
    LAKE/_checkpoint                        of the stream, unless it is elsewhere

A micro-batch has a folder of its own, so a repeated one replaces its files and nothing else, and every reader of
Parquet sees each record once. The names that begin with ``_`` are hidden from readers.

The numbers of micro-batches come from the checkpoint. With a new checkpoint they would begin at 0 again, and replace
what is there. So a lake and its checkpoint know each other by the id of the lake, and nothing is written without both.
Everything is read and written by Spark, so that a lake can be on any file system, also behind Spark Connect.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from filelock import FileLock, Timeout
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession

from postdate.errors import PipelineError
from postdate.pipeline.failures import shorten_errors
from postdate.pipeline.outputs import is_uri, url_of
from postdate.pipeline.rows import arrow_schema, spark_schema
from postdate.pipeline.session import is_connect
from postdate.pipeline.source.streaming import LastRecord, last_record_of
from postdate.pipeline.sweep import bind_checkpoint

COLUMNS: Final = tuple(arrow_schema("records").names)
"""The columns of a record, as in the store."""

LAKE_SCHEMA: Final = f"{spark_schema(arrow_schema('records'))}, endpoint string, batch bigint, day string"
"""The columns of a lake. ``batch`` and ``day`` are names of folders."""

_MARK: Final = "_history"
_CHECKPOINT: Final = "_checkpoint"
_LOCK: Final = "_lock"
_FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class LakeMark:
    """What a lake says of itself.

    Args:
        id: of the lake; random.
        identity: of the store; see :attr:`postdate.ports.RecordStreamStore.identity`.
        location: of the store, for people.
    """

    id: str
    identity: str
    location: str


@dataclass(frozen=True, slots=True)
class Committed:
    """The last micro-batch that Spark has committed.

    Args:
        batch: its number.
        next: number of the first record that is in no committed micro-batch.
        last: the last record that is in one.
    """

    batch: int
    next: int
    last: LastRecord = None


@dataclass(frozen=True, slots=True)
class Lake:
    """A lake and the checkpoint of its stream.

    Args:
        location: as the user named it; absolute.
        url: as Spark takes it.
        checkpoint: URL of the checkpoint.
    """

    location: str
    url: str
    checkpoint: str

    @classmethod
    def at(cls, location: str | Path, checkpoint: str | Path | None) -> Lake:
        """Return the lake in a folder. Raise PipelineError for a URI that is a ``Path``."""
        url = url_of(location)
        text = str(location) if is_uri(str(location)) else str(Path(location).expanduser().absolute())
        return cls(text, url, f"{url}/{_CHECKPOINT}" if checkpoint is None else url_of(checkpoint))

    @contextmanager
    def lock(self, spark: SparkSession) -> Generator[None]:
        """Lock the lake against other runs of this machine for the length of the block.

        Two runs at once would both repeat an uncommitted micro-batch, and leave the files of both in its folder. The
        lock ends with its process, even if it is killed. There is none on other file systems, or behind Spark Connect.

        Raises:
            PipelineError: another run has the lock, or the folder cannot be made.
        """
        folder = Path(self.location)
        is_elsewhere = is_uri(self.location) or is_connect(spark)
        # A folder with something else in it is refused later, and stays as it is. A lock alone is of a run that was
        # killed before it made the mark.
        names = {each.name for each in folder.iterdir()} if folder.exists() else set[str]()
        if is_elsewhere or (_MARK not in names and names - {_LOCK}):
            yield
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(folder / _LOCK, timeout=0).acquire()
        except Timeout as error:
            raise PipelineError(f"another process is at work on the lake {folder}; wait for it to end") from error
        except OSError as error:
            raise PipelineError(f"the lake {folder} cannot be written: {error}") from error
        with lock:
            yield

    def bind(self, spark: SparkSession, identity: str, store_location: str) -> LakeMark:
        """Return the mark of the lake, which is made at the first run, and bind the checkpoint to it.

        Raises:
            PipelineError: the folder has other content, is the lake of another store, or was written with another
                checkpoint. No record was changed.
        """
        mark, has_records = read_mark(spark, self.url), bool(_list_paths(spark, self.url, limit=1))
        if mark is None:
            if has_records:
                raise PipelineError(f"{self.location} is no lake of `postdate pipeline history`; name a new folder")
            mark = LakeMark(uuid.uuid4().hex, identity, store_location)
            text = json.dumps({"format": _FORMAT, **asdict(mark)})
            frame = spark.createDataFrame([(text,)], "value string").coalesce(1)
            frame.write.mode("overwrite").text(f"{self.url}/{_MARK}")
        elif mark.identity != identity:
            raise PipelineError(
                f"{self.location} has the records of another store ({mark.location}) than the one to follow "
                f"({store_location}), or the store was made anew or restored since; name that store, or a new folder"
            )
        if has_records and not _list_log(spark, f"{self.checkpoint}/offsets"):
            raise PipelineError(
                f"the checkpoint {self.checkpoint} is new, and {self.location} was written with another one, which is "
                f"elsewhere or was removed: its micro-batches would replace those that are there. Name that "
                f"checkpoint, or a new folder for the lake; an audit reads both (--records)"
            )
        bind_checkpoint(spark, self.checkpoint, {"job": "history", "lake": mark.id})
        return mark

    def position_name(self, mark: LakeMark) -> str:
        """Return the name of the lake's position in the store: no two lakes have the same."""
        return f"{self.location}#{mark.id[:8]}"

    def read_committed(self, spark: SparkSession) -> Committed | None:
        """Return the last committed micro-batch by Spark's own log; ``None`` before the first."""
        commits = _list_log(spark, f"{self.checkpoint}/commits")
        if not commits:
            return None
        batch = max(commits)
        for text in _read_texts(spark, f"{self.checkpoint}/offsets/{batch}"):
            for line in text.splitlines():
                if '"next"' in line:
                    offset = json.loads(line)
                    return Committed(batch, int(offset["next"]), last_record_of(offset))
        raise PipelineError(f"the checkpoint {self.checkpoint} has no offset of its micro-batch {batch}: it is damaged")

    def read_records(self, spark: SparkSession) -> DataFrame:
        """Return the records, with the columns of :data:`LAKE_SCHEMA`. The list of files is fixed now."""
        if not _list_paths(spark, self.url, limit=1):
            return spark.createDataFrame([], LAKE_SCHEMA)
        return spark.read.schema(LAKE_SCHEMA).parquet(self.url)


def read_mark(spark: SparkSession, url: str) -> LakeMark | None:
    """Return what a lake says of itself; ``None`` for another folder. Raise PipelineError for a later format."""
    texts = _read_texts(spark, f"{url}/{_MARK}")
    if not texts:
        return None
    values: dict[str, Any] = json.loads(texts[0])
    if (written := values.pop("format")) != _FORMAT:
        raise PipelineError(f"the lake {url} has format {written}, and this version reads {_FORMAT}")
    return LakeMark(**values)


def read_history(spark: SparkSession, location: str | Path) -> DataFrame:
    """Return the records in a lake.

    Columns: number, kind, message_id, at, due, destination, detail; endpoint; batch and day (of ``at``, in UTC, as
    text).

    Raises:
        PipelineError: the folder is no lake, or cannot be read.
    """
    lake = Lake.at(location, None)
    with shorten_errors(f"the lake {location} cannot be read"):
        if read_mark(spark, lake.url) is None:
            raise PipelineError(f"{location} is no lake of `postdate pipeline history`")
        return lake.read_records(spark)


def _list_log(spark: SparkSession, url: str) -> list[int]:
    """Return the numbers of the micro-batches in one of Spark's logs."""
    names = (path.rpartition("/")[2] for path in _list_paths(spark, url))
    return [int(name) for name in names if name.isdecimal()]


def _list_paths(spark: SparkSession, url: str, limit: int | None = None) -> list[str]:
    """Return the paths of files in a folder and its folders of partitions; none if there is no such folder.

    The contents are not read. At most ``limit`` paths; ``None``: all.
    """
    # Spark removes old files of its logs meanwhile.
    reader = spark.read.format("binaryFile").option("ignoreMissingFiles", "true")
    try:
        paths = reader.load(url).select("path")
        return [row[0] for row in (paths.collect() if limit is None else paths.take(limit))]
    except AnalysisException as error:
        if error.getCondition() != "PATH_NOT_FOUND":
            raise
        return []


def _read_texts(spark: SparkSession, url: str) -> list[str]:
    """Return the contents of a file, or of the files in a folder; none if there is neither."""
    try:
        return [row[0] for row in spark.read.text(url, wholetext=True).collect()]
    except AnalysisException as error:
        if error.getCondition() != "PATH_NOT_FOUND":
            raise
        return []

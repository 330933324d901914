"""New folders that jobs write to: on the driver's machine, or on any file system that Spark can reach. On the driver.

A text with a scheme, such as ``s3a://bucket/rejected`` or ``hdfs:///reports/today``, is a URI of Hadoop's file systems.
Everything else is a path on the driver's machine, whatever the default file system of Spark is. Executors on other
machines write there only if they share that path.

A job checks its folders before it does anything else. Otherwise a misspelt bucket would be noticed when millions of
messages are stored, and the rows that were set aside would be lost.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from postdate.errors import PipelineError
from postdate.pipeline.failures import shorten_errors
from postdate.pipeline.rows import TIME_FORMATS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
"""The beginning of a URI. One letter is no scheme, but a drive of Windows."""

_PROBE: Final = "_postdate-probe"


def is_uri(location: str) -> bool:
    return _SCHEME.match(location) is not None


def url_of(location: str | Path) -> str:
    """Return a location as Spark's readers and writers take it, independent of the default file system of Spark.

    Raise PipelineError for a URI that is a ``Path``, which has lost one of its slashes.
    """
    text = str(location)
    if not is_uri(text):
        return f"file://{Path(text).expanduser().absolute()}"
    if isinstance(location, Path):
        raise PipelineError(f"{text!r} is a URI: give it as text, because a Path removes one of its slashes")
    return text


@dataclass(frozen=True, slots=True)
class NewFolder:
    """A folder that does not exist and can be written, by :func:`check_new_folder`.

    Args:
        location: as the user named it.
        url: as Spark takes it.
        exists_empty: the check could not remove the empty folder that it had made.
    """

    location: str
    url: str
    exists_empty: bool = False

    def write(self, frame: DataFrame, output_format: str, **options: Any) -> None:
        """Write a frame to the folder, once."""
        mode = "overwrite" if self.exists_empty else "error"
        with shorten_errors(f"{self.location} cannot be written"):
            frame.write.mode(mode).format(output_format).options(**TIME_FORMATS, **options).save(self.url)


def check_new_path(location: str | Path, subject: str) -> None:
    """Raise PipelineError if a path of this machine exists. This needs no session, and says nothing about a URI."""
    if not is_uri(str(location)) and Path(location).expanduser().exists():
        raise PipelineError(f"{location} is there already; name a new folder for {subject}")


def check_new_folder(spark: SparkSession, location: str | Path, subject: str) -> NewFolder:
    """Check that a folder can be made and written, and return it. Nothing of the check is left there.

    Over Spark Connect, only a writer of frames reaches the file systems of the server. It makes the folder, which then
    stays, empty if there is nothing to write.

    Args:
        spark: the session that will write.
        location: a path, or a URI as text.
        subject: what is written there, as in ``the rejected rows``.

    Raises:
        PipelineError: the folder exists, no file system has the scheme, or the folder cannot be written.
    """
    from postdate.pipeline.session import is_connect

    check_new_path(location, subject)
    url = url_of(location)
    with shorten_errors(f"{location} cannot be written"):
        exists = _leave_empty(spark, url) if is_connect(spark) else _probe(spark, url)
    if exists:
        raise PipelineError(f"{location} is there already; name a new folder for {subject}")
    return NewFolder(str(location), url, exists_empty=is_connect(spark))


def hadoop_files(spark: SparkSession, url: str) -> tuple[Any, Any, Any]:
    """Return Hadoop's package ``fs``, the path of a URL, and its file system with the settings of the session."""
    java: Any = spark  # Only Java code can access all file systems of Spark.
    package = java._jvm.org.apache.hadoop.fs  # noqa: SLF001
    path = package.Path(url)
    return package, path, path.getFileSystem(java._jsparkSession.sessionState().newHadoopConf())  # noqa: SLF001


def _probe(spark: SparkSession, url: str) -> bool:
    """Return whether the folder exists. Otherwise make it with a file, and remove both, and the parents made for it."""
    package, path, files = hadoop_files(spark, url)
    if files.exists(path):
        return True
    first_made = path
    while first_made.getParent() is not None and not files.exists(first_made.getParent()):
        first_made = first_made.getParent()
    try:
        files.mkdirs(path)
        files.create(package.Path(path, _PROBE), False).close()
    finally:
        files.delete(first_made, True)
    return False


def _leave_empty(spark: SparkSession, url: str) -> bool:
    """Return whether the folder exists. Otherwise make it, empty."""
    try:
        spark.range(0).coalesce(1).write.mode("error").json(url)
    except Exception as error:
        if "PATH_ALREADY_EXISTS" not in str(error):
            raise
        return True
    return False

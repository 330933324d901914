"""A failed Spark job in one line: Postdate's own error from a task, or the first line of Spark's."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Final

from pyspark.sql.streaming.query import StreamingQuery

from postdate.config import without_secrets
from postdate.errors import PipelineError

_SAME_COLUMNS: Final = "all files of a folder, and the schema if there is one, have the same columns in the same order"
_AS_SPARK_WRITES: Final = """Spark's writer does that when it is told .option("escape", '"')"""
_REASONS: Final = tuple(
    (re.compile(pattern, re.MULTILINE), said)
    for pattern, said in (
        (r"^(?:[\w.]*\.)?postdate\.errors\.\w+: (.*)", r"\1"),
        (
            r"CSV header does not conform.*\s*Header: (.*)\s*Schema: (.*)\s*Expected: .*\s*CSV file: (\S+)",
            rf"\3 has the columns \1, and others are read as \2: {_SAME_COLUMNS}",
        ),
        (
            r"Number of column in CSV header.*\s*Header length: (\d+), schema size: (\d+)\s*CSV file: (\S+)",
            rf"\3 has \1 columns, and others are read as \2: {_SAME_COLUMNS}",
        ),
        (
            r"reading file (\S+)\.\s+SQLSTATE(?:.*\n)+?.*Unescaped quote (?:.*\n)+?.*error was thrown: line=(\d+)",
            rf"\1 has a quote inside quotes, after line \2, that is not written twice: {_AS_SPARK_WRITES}",
        ),
        (
            r"reading file (\S+)\. .* Parquet column \[(.*)\]\. Expected Spark type (timestamp\w*), actual .* INT64",
            r"\1 has no microseconds in \2: for nanoseconds, as of pandas, say \3_ltz(9) or \3_ntz(9) in the schema",
        ),
        (r"^([A-Z]\w*(?:Error|Exception)): (.*)", r"\1: \2"),
    )
)
"""Patterns in the texts of an error, the best first, and the sentence for the last match of each."""

_LOOKS_EVERY_SECONDS: Final = 0.1
_NAMED: Final = re.compile(r"\[[A-Z][A-Z_.]+\] .*?SQLSTATE: \w+", re.DOTALL)


def cause(error: BaseException) -> str:
    """Return why a job failed, without tracebacks and without passwords."""
    texts, link = [str(error)], error
    while link := getattr(link, "_cause", None):  # what Spark keeps of Java's causes; a query tells the first one only
        texts.append(str(link))
    text = "\n".join(texts)
    for pattern, said in _REASONS:
        if found := list(pattern.finditer(text)):
            return without_secrets(found[-1].expand(said))
    named = _NAMED.search(text)
    return without_secrets(" ".join(named[0].split()) if named else text.strip().partition("\n")[0])


def watched(query: StreamingQuery, what: str, stop: threading.Event) -> None:
    """Wait until a query ends or ``stop`` is set, and stop it; raise PipelineError if it has failed."""
    wait_for(query, reached=stop.is_set)
    query.stop()
    check_query(query, what)


def wait_for(query: StreamingQuery, seconds: float | None = None, reached: Callable[[], bool] = lambda: False) -> None:
    """Wait until a query has ended, ``reached`` is true, or the time is up."""
    deadline = math.inf if seconds is None else time.monotonic() + seconds
    look_again = threading.Event()
    while query.isActive and not reached() and time.monotonic() < deadline:
        look_again.wait(_LOOKS_EVERY_SECONDS)


def check_query(query: StreamingQuery, what: str) -> None:
    error = query.exception()
    if error is not None:
        raise PipelineError(f"{what} has failed: {cause(error)}") from error


@contextmanager
def told_in_one_line(what: str) -> Generator[None]:
    """Raise PipelineError for errors of Spark in the block; ``what`` begins its text, as in ``the sweep has failed``.

    Also for errors of the bridge to Java, which has one type for most of Java's.
    """
    try:
        yield
    except Exception as error:
        if not type(error).__module__.startswith(("pyspark.", "py4j.")):
            raise
        raise PipelineError(f"{what}: {cause(error)}") from error

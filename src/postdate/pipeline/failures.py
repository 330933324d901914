"""Describe a failed Spark job in one line: Postdate's own error from a task, or the first line of Spark's error."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from postdate.clock import steady_seconds
from postdate.config import redact_secrets
from postdate.errors import PipelineError
from postdate.pipeline.texts import AS_SPARK_WRITES

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

_SAME_COLUMNS: Final = "all files of a folder, and the schema if there is one, have the same columns in the same order"


@dataclass(frozen=True, slots=True)
class _Reason:
    """How to recognize a reason: patterns that follow each other, and a sentence with the groups of all of them.

    Each pattern is searched after the match of the one before. A single pattern for all would start again at each
    possible beginning and scan the rest of the text each time. Errors of Spark show data, so their texts come from
    outside.
    """

    parts: tuple[re.Pattern[str], ...]
    sentence: str

    def find_last_sentence(self, text: str) -> str | None:
        """Return the sentence for the last place where all patterns occur; ``None``: there is no such place."""
        sentence, position = None, 0
        while True:
            groups = list[str]()
            for part in self.parts:
                match = part.search(text, position)
                if match is None:
                    return sentence
                groups += match.groups()
                position = match.end()
            sentence = self.sentence.format(*groups)


_REASONS: Final = (
    _Reason((re.compile(r"^(?:[\w.]*\.)?postdate\.errors\.\w+: (.*)", re.MULTILINE),), "{}"),
    _Reason(
        (
            re.compile("CSV header does not conform"),
            re.compile(r"\bHeader: (.*)"),
            re.compile(r"\bSchema: (.*)"),
            re.compile(r"\bExpected: "),
            re.compile(r"CSV file: (\S+)"),
        ),
        f"{{2}} has the columns {{0}}, and others are read as {{1}}: {_SAME_COLUMNS}",
    ),
    _Reason(
        (
            re.compile("Number of column in CSV header"),
            re.compile(r"Header length: (\d+), schema size: (\d+)"),
            re.compile(r"CSV file: (\S+)"),
        ),
        f"{{2}} has {{0}} columns, and others are read as {{1}}: {_SAME_COLUMNS}",
    ),
    _Reason(
        (
            re.compile(r"reading file (\S+)\.\s+SQLSTATE"),
            re.compile("Unescaped quote "),
            re.compile(r"error was thrown: line=(\d+)"),
        ),
        f"{{0}} has a quote inside quotes, after line {{1}}, that is not written twice: {AS_SPARK_WRITES}",
    ),
    _Reason(
        (
            re.compile(r"reading file (\S+)\. "),
            re.compile(r"Parquet column \[([^\[\]]*)\]\. Expected Spark type (timestamp\w*), actual "),
            re.compile(r"\bINT64"),
        ),
        "{0} has no microseconds in {1}: for nanoseconds, as of pandas, say {2}_ltz(9) or {2}_ntz(9) in the schema",
    ),
    _Reason((re.compile(r"^([A-Z]\w*(?:Error|Exception)): (.*)", re.MULTILINE),), "{}: {}"),
)
"""Reasons in order of preference: the best come first."""

_POLL_SECONDS: Final = 0.1
_CONDITION: Final = re.compile(r"\[[A-Z][A-Z_.]+\] ")
_SQL_STATE: Final = re.compile(r"SQLSTATE: \w+")
_JAVA_ERROR: Final = _Reason(
    (re.compile(r"^: (?:[\w$]+\.)*([A-Z]\w*(?:Error|Exception)): (.*)", re.MULTILINE),), "{}: {}"
)
"""An error of Java as the bridge to it shows it: the line before has the call of the bridge."""


def failure_cause(error: BaseException) -> str:
    """Return why a job failed, without tracebacks and without passwords."""
    texts, linked_error = [str(error)], error
    # Spark keeps Java's causes in this attribute. The text of a query names only the first cause.
    while linked_error := getattr(linked_error, "_cause", None):
        texts.append(str(linked_error))
    text = "\n".join(texts)
    for reason in _REASONS:
        if (sentence := reason.find_last_sentence(text)) is not None:
            return redact_secrets(sentence)
    condition = _CONDITION.search(text)
    state = condition and _SQL_STATE.search(text, condition.end())
    if condition and state:
        return redact_secrets(" ".join(text[condition.start() : state.end()].split()))
    return redact_secrets(_JAVA_ERROR.find_last_sentence(text) or text.strip().partition("\n")[0])


def wait_and_stop(query: StreamingQuery, subject: str, stop: threading.Event) -> None:
    """Wait until a query ends or ``stop`` is set, and stop the query. Raise PipelineError if it has failed."""
    wait_for_query(query, is_reached=stop.is_set)
    query.stop()
    check_query(query, subject)


def wait_and_stop_all(queries: Mapping[str, StreamingQuery], stop: threading.Event) -> None:
    """Wait until one of several queries ends or ``stop`` is set, and stop all. ``queries`` are named for errors.

    Raise PipelineError if one has failed.
    """
    first = next(iter(queries.values()))
    wait_for_query(first, is_reached=lambda: stop.is_set() or not all(query.isActive for query in queries.values()))
    for query in queries.values():
        query.stop()
    for subject, query in queries.items():
        check_query(query, subject)


def wait_for_query(
    query: StreamingQuery, seconds: float | None = None, is_reached: Callable[[], bool] = lambda: False
) -> None:
    """Wait until a query has ended, ``is_reached`` is true, or the time is up."""
    deadline = math.inf if seconds is None else steady_seconds() + seconds
    pause = threading.Event()
    while query.isActive and not is_reached() and steady_seconds() < deadline:
        pause.wait(_POLL_SECONDS)


def check_query(query: StreamingQuery, subject: str) -> None:
    error = query.exception()
    if error is not None:
        raise PipelineError(f"{subject} has failed: {failure_cause(error)}") from error


@contextmanager
def shorten_errors(description: str) -> Generator[None]:
    """Raise PipelineError for errors of Spark in the block.

    ``description`` begins its text, as in ``the sweep has failed``.

    This includes errors of the bridge to Java, which has one type for most errors of Java.
    """
    try:
        yield
    except Exception as error:
        if not type(error).__module__.startswith(("pyspark.", "py4j.")):
            raise
        raise PipelineError(f"{description}: {failure_cause(error)}") from error

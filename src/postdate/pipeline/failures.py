"""What Spark says when a job fails, in one line: the error of ours that a task raised, or the first line of Spark's."""

from __future__ import annotations

import re
import threading
from collections.abc import Generator
from contextlib import contextmanager

from pyspark.errors import PySparkException
from pyspark.sql.streaming.query import StreamingQuery

from postdate.config import without_secrets
from postdate.errors import PipelineError

_OURS = re.compile(r"^(?:[\w.]*\.)?postdate\.errors\.\w+: (.*)", re.MULTILINE)
_OF_PYTHON = re.compile(r"^([A-Z]\w*(?:Error|Exception)): (.*)", re.MULTILINE)


def cause(error: BaseException) -> str:
    """Return why a job failed, without tracebacks and without passwords."""
    text = str(error)
    for pattern in (_OURS, _OF_PYTHON):
        found = list(pattern.finditer(text))
        if found:
            return without_secrets(": ".join(found[-1].groups()))
    return without_secrets(text.strip().partition("\n")[0])


def watched(query: StreamingQuery, what: str, stop: threading.Event) -> None:
    """Wait until a query ends or ``stop`` is set, and stop it then.

    Raises:
        PipelineError: it has failed.
    """
    while query.isActive and not stop.wait(0.1):
        pass
    query.stop()
    error = query.exception()
    if error is not None:
        raise PipelineError(f"{what} has failed: {cause(error)}") from error


@contextmanager
def told_in_one_line(what: str) -> Generator[None]:
    """Raise what Spark raises in the block as an error of ours: a job has failed, and why.

    Args:
        what: failed, as in ``the sweep has failed``.

    Raises:
        PipelineError: from Spark's own error.
    """
    try:
        yield
    except PySparkException as error:
        raise PipelineError(f"{what} has failed: {cause(error)}") from error

"""Logging of commands that run on and on: to standard error, in UTC, without passwords."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Annotated, Final

import typer

_LEVELS: Final = ("debug", "info", "warning", "error", "critical")


def _level(text: str) -> str:
    if text.lower() not in _LEVELS:
        raise typer.BadParameter(f"{text!r} is none of {', '.join(_LEVELS)}")
    return text.upper()


LogLevel = Annotated[
    str, typer.Option("--log-level", parser=_level, metavar="LEVEL", help=f"Least level to log: {', '.join(_LEVELS)}.")
]


class _Formatter(logging.Formatter):
    """Formats times in UTC and hides passwords, whichever driver logs them."""

    converter = time.gmtime

    def format(self, record: logging.LogRecord) -> str:
        from postdate.config import without_secrets

        return without_secrets(super().format(record))


@contextmanager
def logging_to_stderr(level: str) -> Generator[None]:
    """Log to standard error, and nowhere else, for the length of the block; then restore the program's own logging.

    Other loggers than Postdate's stay at warnings unless ``level`` is ``DEBUG``: drivers log every statement at
    ``INFO``.
    """
    handler = logging.StreamHandler(sys.stderr)
    formatter = _Formatter("%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")
    handler.setFormatter(formatter)
    root, own = logging.getLogger(), logging.getLogger("postdate")
    before, levels_before = root.handlers[:], (root.level, own.level)
    root.handlers[:] = [handler]
    root.setLevel(level if level == "DEBUG" else max(logging.WARNING, logging.getLevelNamesMapping()[level]))
    own.setLevel(level)
    try:
        yield
    finally:
        root.handlers[:] = before
        root.setLevel(levels_before[0])
        own.setLevel(levels_before[1])

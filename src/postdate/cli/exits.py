"""Exit codes, and which error ends with which."""

from __future__ import annotations

import enum

from postdate.errors import (
    ConfigurationError,
    DelayConflict,
    MessageError,
    NotSupported,
    PipelineError,
    PostdateError,
    StoreError,
    TransportUnavailable,
)
from postdate.errors import DuplicateMessage as _DuplicateMessage


class Exit(enum.IntEnum):
    """Exit codes of ``postdate``; stable."""

    OK = 0
    NOT_KEPT = 1
    WRONG_USAGE = 2
    UNAVAILABLE = 3
    INTERNAL = 70
    INTERRUPTED = 130
    OUTPUT_CLOSED = 141


EXPLANATIONS = {
    Exit.OK: "done",
    Exit.NOT_KEPT: "a promise is not kept, a check failed, or what was asked for is not there",
    Exit.WRONG_USAGE: "wrong usage, or a wrong setting or message",
    Exit.UNAVAILABLE: "the store or the transport is unavailable, not set up, or no database",
    Exit.INTERNAL: "a fault in Postdate; please report the traceback",
    Exit.INTERRUPTED: "interrupted",
    Exit.OUTPUT_CLOSED: "the reader of the output went away",
}


def exit_of(error: PostdateError) -> Exit:
    match error:
        case _DuplicateMessage():
            return Exit.NOT_KEPT
        case ConfigurationError() | DelayConflict() | MessageError() | NotSupported() | PipelineError():
            return Exit.WRONG_USAGE
        case StoreError() | TransportUnavailable():
            return Exit.UNAVAILABLE
        case _:
            return Exit.NOT_KEPT


def epilog() -> str:
    """Return the text about exit codes below ``postdate --help``."""
    lines = [f"{code.value:>4}  {meaning}" for code, meaning in EXPLANATIONS.items()]
    return "\b\n" + "\n".join(["Exit codes:", *lines])

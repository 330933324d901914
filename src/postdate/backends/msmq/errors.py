"""Translates errors of MSMQ."""

from __future__ import annotations

import traceback
from typing import Any, Final

from postdate.errors import (
    DestinationUnavailable,
    PostdateError,
    QueueNotFound,
    TransportError,
    TransportUnreachable,
)

QUEUE_EXISTS: Final = 0xC00E0005
IO_TIMEOUT: Final = 0xC00E001B
MESSAGE_ALREADY_RECEIVED: Final = 0xC00E001D
MESSAGE_NOT_FOUND: Final = 0xC00E0088
ACCESS_DENIED: Final = 0xC00E0025
INSUFFICIENT_RESOURCES: Final = 0xC00E0027
TRANSACTION_USAGE: Final = 0xC00E0050

_EXCEPTION_OCCURRED: Final = 0x80020009
_SCODE: Final = 5

_MEANINGS: Final[tuple[tuple[type[TransportError], frozenset[int], str], ...]] = (
    (
        QueueNotFound,
        # Queue not found, illegal path name, illegal format name, machine not found, queue deleted.
        frozenset({0xC00E0003, 0xC00E0014, 0xC00E001E, 0xC00E000D, 0xC00E005A}),
        "there is no queue {where} ({said}); create it on its machine: postdate setup",
    ),
    (
        TransportUnreachable,
        # Service not available, stale or invalid handle (the service was restarted), remote machine not available,
        # a transaction that is not known any more; the same in the words of RPC: server unavailable, call failed, call
        # failed and not executed, disconnected.
        frozenset(
            {0xC00E000B, 0xC00E0056, 0xC00E0007, 0xC00E0069, 0x8004D00E, 0x800706BA, 0x800706BE, 0x800706BF, 0x80010108}
        ),
        "MSMQ does not answer for {where} ({said}); is the service MSMQ running?",
    ),
    (
        DestinationUnavailable,
        frozenset({INSUFFICIENT_RESOURCES, 0xC00E002A}),  # a reached quota, too
        "MSMQ has no room for {where} ({said}); look at the quotas of the queue and of the machine, and its disk",
    ),
    (
        DestinationUnavailable,
        frozenset({IO_TIMEOUT, 0xC00E0008, 0xC00E0009}),  # too late, cancelled, sharing violation
        "MSMQ cannot do that to {where} now: {said}",
    ),
    (
        TransportError,
        frozenset({ACCESS_DENIED, 0xC00E0026}),
        "MSMQ refuses {where} ({said}); give this user the right to create, send to or receive from it",
    ),
    (
        TransportError,
        frozenset({TRANSACTION_USAGE}),
        "{where} is transactional and this transport is not, or the reverse ({said}); set transactional accordingly",
    ),
)


def code_of(error: BaseException) -> int:
    """Return the HRESULT of a COM error; 0 for any other.

    Automation wraps errors: then it is the wrapped error's.
    """
    hresult: Any = getattr(error, "hresult", 0)
    details: Any = getattr(error, "excepinfo", None)
    if hresult & 0xFFFFFFFF == _EXCEPTION_OCCURRED and details and len(details) > _SCODE and details[_SCODE]:
        hresult = details[_SCODE]
    return hresult & 0xFFFFFFFF


def translate(error: BaseException, where: str) -> PostdateError:
    """Return the error for the queue ``where``, with advice."""
    code = code_of(error)
    said = f"{_words(error)}, 0x{code:08X}"
    for meaning, codes, text in _MEANINGS:
        if code in codes:
            return meaning(text.format(where=where, said=said))
    return TransportError(f"MSMQ failed with {where}: {said}")


def _words(error: BaseException) -> str:
    details: Any = getattr(error, "excepinfo", None)
    words = (details[2] if details and len(details) > 2 else None) or getattr(error, "strerror", None) or str(error)
    return str(words).strip().rstrip(".") or type(error).__name__


def release_objects(error: BaseException | None) -> None:
    """Release an error's COM objects in their thread: the error itself may be freed in another."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__

"""The COM objects of MSMQ, as pywin32 shows them. It imports pywin32 at first use, and is the only module that does.

Its objects have no types here, because pywin32 has none for them. Calls give every parameter: automation has no other
way to omit one that works with early and late binding alike. Source: Microsoft's reference "Message Queuing COM
Components", and [MC-MQAC].
"""

from __future__ import annotations

import platform
import traceback
from typing import Any, Final, Protocol

from postdate.errors import (
    ConfigurationError,
    DestinationUnavailable,
    PostdateError,
    QueueNotFound,
    TransportError,
    TransportUnreachable,
)

QUEUE_INFO: Final = "MSMQ.MSMQQueueInfo"
MESSAGE: Final = "MSMQ.MSMQMessage"
TRANSACTION_DISPENSER: Final = "MSMQ.MSMQTransactionDispenser"

MQ_RECEIVE_ACCESS: Final = 1
MQ_SEND_ACCESS: Final = 2
MQ_DENY_NONE: Final = 0
MQ_NO_TRANSACTION: Final = 0
MQ_SINGLE_MESSAGE: Final = 3
MQMSG_DELIVERY_RECOVERABLE: Final = 1
MQMSG_DEADLETTER: Final = 1
MQMSG_JOURNAL: Final = 2
INFINITE: Final = -1
"""The value of a timer that never ends; a timer is a signed 32-bit number of seconds here."""
LONGEST_SECONDS: Final = 2**31 - 1  # of a timer
LONGEST_LABEL: Final = 249
"""The longest label in UTF-16 units."""
ID_BYTES: Final = 20
"""The size of a native id: a GUID and a number."""

ByteArray = Any
"""Automation's array of bytes."""

MsmqTransaction = Any
"""``MSMQTransaction``: an internal transaction of MSMQ, which no other resource can join.

After ``Abort``, received messages are back in their places.
"""

Dispenser = Any
"""``MSMQTransactionDispenser``."""

Message = Any
"""``MSMQMessage``. ``LookupId``, its place in its queue, stays the same when a receive is undone."""

Queue = Any
"""``MSMQQueue``: an open queue, for one kind of access, with a cursor.

``Receive`` and ``Peek`` return ``None`` when no message arrives in time. ``PeekCurrent`` and ``PeekNext`` peek at the
cursor, which ``Reset`` puts before the first message.
"""

QueueInfo = Any
"""``MSMQQueueInfo``; ``IsTransactional`` is known after ``Refresh``."""


class Com(Protocol):
    """COM, in the calling thread."""

    @property
    def errors(self) -> type[Exception]:
        """The type of exception that its calls raise."""
        ...

    @property
    def machine(self) -> str:
        """The name of this machine."""
        ...

    def initialize(self) -> None:
        """Make the calling thread an apartment; call it before any other call in the thread."""
        ...

    def uninitialize(self) -> None:
        """Undo :meth:`initialize`, when no object that was created in the thread is used any more."""
        ...

    def create(self, prog_id: str) -> Any:
        """Return a new object of a class."""
        ...

    def byte_array(self, content: bytes) -> ByteArray: ...


class PyWin32:
    """COM by pywin32.

    Raises:
        ConfigurationError: this is not Windows, or pywin32 is not installed.
    """

    def __init__(self) -> None:
        try:
            import pythoncom  # pyright: ignore[reportMissingModuleSource] - only Windows has them
            import pywintypes  # pyright: ignore[reportMissingModuleSource]
            from win32com import client  # pyright: ignore[reportMissingModuleSource]
            from win32com.client.dynamic import Dispatch  # pyright: ignore[reportMissingModuleSource]
        except ImportError as error:
            raise ConfigurationError(
                "MSMQ needs Windows with the feature Message Queuing, and the extra 'msmq', which brings pywin32: "
                f"pip install 'postdate[msmq]'; this machine runs {platform.system()}: {error}"
            ) from error
        self._pythoncom, self._client, self._dispatch = pythoncom, client, Dispatch
        self.errors: type[Exception] = pywintypes.com_error
        self.machine = platform.node()

    def initialize(self) -> None:
        self._pythoncom.CoInitialize()

    def uninitialize(self) -> None:
        self._pythoncom.CoUninitialize()

    def create(self, prog_id: str) -> Any:
        """Return a new object with late binding, so that no cache of generated classes matters."""
        return self._dispatch(prog_id)

    def byte_array(self, content: bytes) -> ByteArray:
        """Return an array with its type, because versions of pywin32 convert bytes differently."""
        return self._client.VARIANT(self._pythoncom.VT_ARRAY | self._pythoncom.VT_UI1, content)


# --- errors -----------------------------------------------------------------------------------------------------------


QUEUE_EXISTS: Final = 0xC00E0005
IO_TIMEOUT: Final = 0xC00E001B
MESSAGE_ALREADY_RECEIVED: Final = 0xC00E001D
MESSAGE_NOT_FOUND: Final = 0xC00E0088
ACCESS_DENIED: Final = 0xC00E0025
INSUFFICIENT_RESOURCES: Final = 0xC00E0027
TRANSACTION_USAGE: Final = 0xC00E0050

_EXCEPTION_OCCURRED: Final = 0x80020009  # automation's code for an error that it wraps
_SCODE: Final = 5  # the index of the wrapped error's code

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
        # unknown transaction; and the corresponding errors of RPC: server unavailable, call failed, call failed and not
        # executed, disconnected.
        frozenset(
            {0xC00E000B, 0xC00E0056, 0xC00E0007, 0xC00E0069, 0x8004D00E, 0x800706BA, 0x800706BE, 0x800706BF, 0x80010108}
        ),
        "MSMQ does not answer for {where} ({said}); is the service MSMQ running?",
    ),
    (
        DestinationUnavailable,
        frozenset({INSUFFICIENT_RESOURCES, 0xC00E002A}),  # also a reached quota
        "MSMQ has no space for {where} ({said}); look at the quotas of the queue and of the machine, and its disk",
    ),
    (
        DestinationUnavailable,
        frozenset({IO_TIMEOUT, 0xC00E0008, 0xC00E0009}),  # timeout, cancelled, sharing violation
        "MSMQ cannot do this operation on {where} now: {said}",
    ),
    (
        DestinationUnavailable,
        frozenset({ACCESS_DENIED, 0xC00E0026}),
        "MSMQ refuses {where} ({said}); give this user the right to create, send to or receive from it",
    ),
    (
        TransportError,
        # About the message: a property that is unknown, not allowed, missing, of the wrong type, value or size; a label
        # that is too long.
        frozenset({0xC00E0002, 0xC00E0018, 0xC00E0019, 0xC00E0039, 0xC00E003B, 0xC00E003E, 0xC00E003F, 0xC00E005D}),
        "MSMQ does not accept this message in {where}: {said}",
    ),
    (
        DestinationUnavailable,
        frozenset({TRANSACTION_USAGE}),
        "{where} is transactional and this transport is not, or the reverse ({said}); set transactional accordingly",
    ),
)


def code_of(error: BaseException) -> int:
    """Return the HRESULT of a COM error; 0 for any other error.

    Automation wraps errors: then it is the HRESULT of the wrapped error.
    """
    hresult: Any = getattr(error, "hresult", 0)
    details: Any = getattr(error, "excepinfo", None)
    if hresult & 0xFFFFFFFF == _EXCEPTION_OCCURRED and details and len(details) > _SCODE and details[_SCODE]:
        hresult = details[_SCODE]
    return hresult & 0xFFFFFFFF


def translate(error: BaseException, queue: str) -> PostdateError:
    """Return the error for the queue ``queue``, with advice; a code that is in no list is an outage of the queue."""
    code = code_of(error)
    problem = f"{_error_text(error)}, 0x{code:08X}"
    for error_type, codes, text in _MEANINGS:
        if code in codes:
            return error_type(text.format(where=queue, said=problem))
    return DestinationUnavailable(f"MSMQ failed with {queue}: {problem}")


def _error_text(error: BaseException) -> str:
    details: Any = getattr(error, "excepinfo", None)
    words = (details[2] if details and len(details) > 2 else None) or getattr(error, "strerror", None) or str(error)
    return str(words).strip().rstrip(".") or type(error).__name__


def release_objects(error: BaseException | None) -> None:
    """Release an error's COM objects in their thread, because the error itself may be freed in another thread."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__

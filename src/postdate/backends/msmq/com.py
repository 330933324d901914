"""The COM objects of MSMQ, as pywin32 shows them; imports pywin32 at first use, and is the only module that does.

Its objects have no types here, as pywin32 has none for them. Calls give every parameter: automation has no other way to
leave one out that works with early and late binding alike. Source: Microsoft's reference "Message Queuing COM
Components", and [MC-MQAC].
"""

from __future__ import annotations

import platform
from typing import Any, Final, Protocol

from postdate.errors import ConfigurationError

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
"""Of a timer, which is a signed 32-bit number of seconds here."""
LONGEST_SECONDS: Final = 2**31 - 1
LONGEST_LABEL: Final = 249
"""UTF-16 units."""
ID_BYTES: Final = 20
"""A GUID and a number."""

ByteArray = Any
"""Automation's array of bytes."""

MsmqTransaction = Any
"""``MSMQTransaction``: an internal transaction of MSMQ, which no other resource can join. After ``Abort`` received
messages are back in their places."""

Dispenser = Any
"""``MSMQTransactionDispenser``."""

Message = Any
"""``MSMQMessage``. ``LookupId``, its place in its queue, stays the same when a receive is undone."""

Queue = Any
"""``MSMQQueue``: an open queue, for one kind of access, with a cursor. ``Receive`` and ``Peek`` return ``None`` when no
message comes in time; ``PeekCurrent`` and ``PeekNext`` look at the cursor, which ``Reset`` puts before the first."""

QueueInfo = Any
"""``MSMQQueueInfo``; ``IsTransactional`` is known after ``Refresh``."""


class Com(Protocol):
    """COM, in the calling thread."""

    @property
    def errors(self) -> type[Exception]:
        """The exception that its calls raise."""
        ...

    @property
    def machine(self) -> str:
        """Name of this machine."""
        ...

    def enter(self) -> None:
        """Make the calling thread an apartment; before any other call in it."""
        ...

    def leave(self) -> None:
        """Undo :meth:`enter`, when no object that was made in the thread is used any more."""
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
                f"pip install 'postdate[msmq]'; here is {platform.system()}, and {error}"
            ) from error
        self._pythoncom, self._client, self._dispatch = pythoncom, client, Dispatch
        self.errors: type[Exception] = pywintypes.com_error
        self.machine = platform.node()

    def enter(self) -> None:
        self._pythoncom.CoInitialize()

    def leave(self) -> None:
        self._pythoncom.CoUninitialize()

    def create(self, prog_id: str) -> Any:
        """Late binding, so that no cache of generated classes matters."""
        return self._dispatch(prog_id)

    def byte_array(self, content: bytes) -> ByteArray:
        """With its type, since versions of pywin32 differ in what they make of bytes."""
        return self._client.VARIANT(self._pythoncom.VT_ARRAY | self._pythoncom.VT_UI1, content)

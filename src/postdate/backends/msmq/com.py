"""The COM objects of MSMQ, as pywin32 shows them; imports pywin32 at first use, and is the only module that does.

The protocols have the members that Postdate uses, with every parameter: automation has no other way to leave one out
that works with early and late binding alike. Source: Microsoft's reference "Message Queuing COM Components", and
[MC-MQAC].
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


class MsmqTransaction(Protocol):
    """``MSMQTransaction``: an internal transaction of MSMQ; no other resource can join it."""

    def Commit(self) -> None:  # noqa: N802 - as COM has it
        ...

    def Abort(self) -> None:  # noqa: N802
        """Undo all: received messages are back in their places."""
        ...


class Dispenser(Protocol):
    """``MSMQTransactionDispenser``."""

    def BeginTransaction(self) -> MsmqTransaction:  # noqa: N802
        ...


class Message(Protocol):
    """``MSMQMessage``."""

    Body: Any
    Extension: ByteArray
    CorrelationId: ByteArray
    Label: str
    Delivery: int
    Journal: int
    MaxTimeToReceive: int

    @property
    def Id(self) -> ByteArray:  # noqa: N802
        ...

    @property
    def LookupId(self) -> Any:  # noqa: N802
        """The message's place in its queue; stays the same when a receive is undone."""
        ...

    def Send(self, queue: Queue, transaction: MsmqTransaction | int) -> None:  # noqa: N802
        ...


class Queue(Protocol):
    """``MSMQQueue``: an open queue, for one kind of access, with a cursor."""

    def Receive(  # noqa: N802
        self, transaction: MsmqTransaction | int, want_destination: bool, want_body: bool, milliseconds: int
    ) -> Message | None:
        """Take the first message; ``None`` when none comes in time."""
        ...

    def ReceiveByLookupId(  # noqa: N802
        self, lookup_id: Any, transaction: MsmqTransaction | int, want_destination: bool, want_body: bool
    ) -> Message: ...

    def Peek(self, want_destination: bool, want_body: bool, milliseconds: int) -> Message | None:  # noqa: N802
        """Look at the first message; ``None`` when none comes in time."""
        ...

    def PeekCurrent(self, want_destination: bool, want_body: bool, milliseconds: int) -> Message | None:  # noqa: N802
        """Look at the message at the cursor."""
        ...

    def PeekNext(self, want_destination: bool, want_body: bool, milliseconds: int) -> Message | None:  # noqa: N802
        """Move the cursor on and look at its message."""
        ...

    def Reset(self) -> None:  # noqa: N802
        """Put the cursor before the first message."""
        ...

    def Close(self) -> None:  # noqa: N802
        ...


class QueueInfo(Protocol):
    """``MSMQQueueInfo``."""

    PathName: str
    FormatName: str
    Label: str

    @property
    def IsTransactional(self) -> int:  # noqa: N802
        """Known after :meth:`Refresh`."""
        ...

    def Create(self, transactional: bool, world_readable: bool) -> None:  # noqa: N802
        """Create the queue of the path name."""
        ...

    def Refresh(self) -> None:  # noqa: N802
        """Read the queue's properties."""
        ...

    def Open(self, access: int, share_mode: int) -> Queue:  # noqa: N802
        ...


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

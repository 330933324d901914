"""The COM objects of MSMQ as pywin32 shows them: the one place that imports pywin32, and only when it is used.

What stands here of an object is what Postdate uses of it, with every parameter given in its place: automation has no
other way to leave one out that works with early and late binding alike. Source: Microsoft's reference "Message Queuing
COM Components", and [MC-MQAC].
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
"""What automation takes and gives for an array of bytes."""


class MsmqTransaction(Protocol):
    """``MSMQTransaction``: an internal transaction of MSMQ; no other resource can join it."""

    def Commit(self) -> None:  # noqa: N802 - as COM has it
        """Commit."""
        ...

    def Abort(self) -> None:  # noqa: N802
        """Undo all: what was received is in its place again."""
        ...


class Dispenser(Protocol):
    """``MSMQTransactionDispenser``."""

    def BeginTransaction(self) -> MsmqTransaction:  # noqa: N802
        """Begin an internal transaction."""
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
        """The native id."""
        ...

    @property
    def LookupId(self) -> Any:  # noqa: N802
        """Where the message is in its queue; stays the same when a receive is undone."""
        ...

    def Send(self, queue: Queue, transaction: MsmqTransaction | int) -> None:  # noqa: N802
        """Send to an open queue."""
        ...


class Queue(Protocol):
    """``MSMQQueue``: a queue opened in one way, with a cursor."""

    def Receive(  # noqa: N802
        self, transaction: MsmqTransaction | int, want_destination: bool, want_body: bool, milliseconds: int
    ) -> Message | None:
        """Take the first message; nothing when none comes in time."""
        ...

    def ReceiveByLookupId(  # noqa: N802
        self, lookup_id: Any, transaction: MsmqTransaction | int, want_destination: bool, want_body: bool
    ) -> Message:
        """Take that message."""
        ...

    def Peek(self, want_destination: bool, want_body: bool, milliseconds: int) -> Message | None:  # noqa: N802
        """Look at the first message; nothing when none comes in time."""
        ...

    def PeekCurrent(self, want_destination: bool, want_body: bool, milliseconds: int) -> Message | None:  # noqa: N802
        """Look at the message of the cursor."""
        ...

    def PeekNext(self, want_destination: bool, want_body: bool, milliseconds: int) -> Message | None:  # noqa: N802
        """Move the cursor on and look at its message."""
        ...

    def Reset(self) -> None:  # noqa: N802
        """Put the cursor before the first message."""
        ...

    def Close(self) -> None:  # noqa: N802
        """Close the handle."""
        ...


class QueueInfo(Protocol):
    """``MSMQQueueInfo``."""

    PathName: str
    FormatName: str
    Label: str

    @property
    def IsTransactional(self) -> int:  # noqa: N802
        """Whether messages are sent and received in transactions; known after :meth:`Refresh`."""
        ...

    def Create(self, transactional: bool, world_readable: bool) -> None:  # noqa: N802
        """Create the queue of the path name."""
        ...

    def Refresh(self) -> None:  # noqa: N802
        """Read its properties."""
        ...

    def Open(self, access: int, share_mode: int) -> Queue:  # noqa: N802
        """Open it."""
        ...


class Com(Protocol):
    """COM, for the thread that calls."""

    @property
    def errors(self) -> type[Exception]:
        """What its calls raise."""
        ...

    @property
    def machine(self) -> str:
        """Name of this machine."""
        ...

    def enter(self) -> None:
        """Make the calling thread an apartment; before anything else there."""
        ...

    def leave(self) -> None:
        """Undo :meth:`enter`, when nothing that was made there is used any more."""
        ...

    def create(self, prog_id: str) -> Any:
        """Return a new object of a class."""
        ...

    def byte_array(self, content: bytes) -> ByteArray:
        """Return bytes as automation takes them."""
        ...


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
        """See :class:`Com`."""
        self._pythoncom.CoInitialize()

    def leave(self) -> None:
        """See :class:`Com`."""
        self._pythoncom.CoUninitialize()

    def create(self, prog_id: str) -> Any:
        """See :class:`Com`; bound late, so that nothing depends on what a cache of generated classes holds."""
        return self._dispatch(prog_id)

    def byte_array(self, content: bytes) -> ByteArray:
        """See :class:`Com`; without the type, bytes would be left to what a version of pywin32 makes of them."""
        return self._client.VARIANT(self._pythoncom.VT_ARRAY | self._pythoncom.VT_UI1, content)

"""MSMQ as its COM objects show it, in memory: strict where the real one is, and where it is not.

It has what Microsoft's reference documents of the objects that Postdate uses, and nothing else. A property or a method
that is not documented, an argument of another type, an object used in a thread that did not make it, or before that
thread entered COM, is a fault of the caller: :class:`Misuse`, which no adapter expects. What MSMQ answers with an error
is an error of COM with the documented code, wrapped as automation wraps it.
"""

from __future__ import annotations

import itertools
import re
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

QUEUE_NOT_FOUND = 0xC00E0003
QUEUE_EXISTS = 0xC00E0005
SERVICE_NOT_AVAILABLE = 0xC00E000B
ILLEGAL_QUEUE_PATHNAME = 0xC00E0014
ILLEGAL_PROPERTY_VALUE = 0xC00E0018
IO_TIMEOUT = 0xC00E001B
ILLEGAL_CURSOR_ACTION = 0xC00E001C
MESSAGE_ALREADY_RECEIVED = 0xC00E001D
ILLEGAL_FORMATNAME = 0xC00E001E
ACCESS_DENIED = 0xC00E0025
INSUFFICIENT_RESOURCES = 0xC00E0027
ILLEGAL_PROPERTY_SIZE = 0xC00E003B
TRANSACTION_USAGE = 0xC00E0050
STALE_HANDLE = 0xC00E0056
QUEUE_DELETED = 0xC00E005A
LABEL_TOO_LONG = 0xC00E005D
REMOTE_MACHINE_NOT_AVAILABLE = 0xC00E0069
MESSAGE_NOT_FOUND = 0xC00E0088
NO_TRANSACTION_THERE = 0x8004D00E
NOT_ENTERED = 0x800401F0
NO_SUCH_CLASS = 0x800401F3
EXCEPTION_OCCURRED = 0x80020009

VT_ARRAY_OF_UI1 = 0x2011
INFINITE = -1
LARGEST_MESSAGE = 4 * 1024 * 1024
_PATH = re.compile(r"([^\\]+)\\private\$\\([^\\;+,\"\x00-\x1f]{1,124})", re.IGNORECASE)
_FORMAT = re.compile(r"DIRECT=(OS|TCP):([^\\]+)\\private\$\\([^\\;+,\"\x00-\x1f]{1,124})", re.IGNORECASE)


class Misuse(AssertionError):
    """What the documented objects do not have, or what COM does not allow."""


class com_error(Exception):  # noqa: N801 - as pywintypes has it
    """An error of COM as pywin32 shows it."""

    def __init__(self, hresult, strerror, excepinfo, argerror) -> None:
        super().__init__(hresult, strerror, excepinfo, argerror)
        self.hresult, self.strerror, self.excepinfo, self.argerror = hresult, strerror, excepinfo, argerror


def _signed(code: int) -> int:
    return code - (1 << 32) if code & 0x80000000 else code


def failure(code: int, words: str) -> com_error:
    """Return the error that automation makes of a code: its own outside, the code inside."""
    inside = (0, "MSMQ", words, None, 0, _signed(code))
    return com_error(_signed(EXCEPTION_OCCURRED), "Exception occurred.", inside, None)


@dataclass(frozen=True)
class Variant:
    """What ``win32com.client.VARIANT`` is: a type and a value."""

    varianttype: int
    value: bytes


@dataclass(eq=False)
class Entry:
    """A message in a queue."""

    id: bytes
    lookup_id: int
    values: dict[str, Any]
    ends_at: float | None
    held_by: FakeTransaction | None = None


@dataclass(eq=False)
class Store:
    """A queue."""

    name: str
    transactional: bool
    label: str = ""
    entries: list[Entry] = field(default_factory=list)
    is_deleted: bool = False

    def visible(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.held_by is None]


class QueueManager:
    """The service MSMQ of one machine: what all its processes share."""

    def __init__(self, machine: str = "HERE1") -> None:
        self.machine = machine
        self.changed = threading.Condition(threading.RLock())
        self.queues: dict[str, Store] = {}
        self.dead_letters: list[Entry] = []
        self.journal: list[dict[str, Any]] = []
        self.sent_elsewhere: list[tuple[str, dict[str, Any]]] = []
        self.denied: set[str] = set()
        self.is_down = False
        self.epoch = 0
        self.room_bytes = 1 << 40
        self.timeouts_raise = False
        self.faults: list[str] = []
        """What callers did wrong that no exception can tell them."""
        self.now: Callable[[], float] = time.monotonic
        """For timers of messages; waiting is in real time."""
        self.active: set[FakeTransaction] = set()
        self.before: Callable[[str], None] = lambda _call: None
        """Called with the name of every method, with the manager locked; may raise, or change what is there."""
        self._numbers = itertools.count(1)
        self._guid = uuid.uuid4()

    # --- from outside -------------------------------------------------------------------------------------------------

    def process(self) -> FakeCom:
        """Return COM as a process of its own has it."""
        return FakeCom(self)

    def queue(self, name: str) -> Store:
        return self.queues[name.lower()]

    def values(self, name: str) -> list[dict[str, Any]]:
        """Return the properties of the messages that a queue holds, in order."""
        with self.changed:
            self.discard_expired()
            return [entry.values for entry in self.queue(name).entries]

    def put(self, name: str, **values: Any) -> None:
        """Put a message of somebody else into a queue."""
        self.deliver(self.queue(name), {**BLANK, **values}, BLANK["MaxTimeToReceive"])

    def delete(self, name: str) -> None:
        with self.changed:
            self.queues.pop(name.lower()).is_deleted = True
            self.changed.notify_all()

    def restart(self) -> None:
        """Stop the service and start it: transactions are undone, handles are stale."""
        self.stop()
        self.is_down = False

    def stop(self) -> None:
        with self.changed:
            self.is_down = True
            self.epoch += 1
            for transaction in list(self.active):
                self.undo(transaction)
            self.changed.notify_all()

    def end_of(self, process: FakeCom) -> None:
        """A process died: what it has begun is undone."""
        with self.changed:
            for transaction in [each for each in self.active if each.com is process]:
                self.undo(transaction)

    # --- from the objects ---------------------------------------------------------------------------------------------

    def deliver(self, store: Store, values: dict[str, Any], seconds: int) -> None:
        with self.changed:
            if values["Journal"] & 2:
                self.journal.append(values)
            number = next(self._numbers)
            native_id = self._guid.bytes_le + number.to_bytes(4, "little")
            ends_at = None if seconds == INFINITE else self.now() + seconds
            store.entries.append(Entry(native_id, number, dict(values), ends_at))
            self.changed.notify_all()

    def discard_expired(self) -> None:
        now = self.now()
        for store in self.queues.values():
            for entry in store.visible():
                if entry.ends_at is not None and entry.ends_at <= now:
                    store.entries.remove(entry)
                    if entry.values["Journal"] & 1:
                        self.dead_letters.append(entry)

    def undo(self, transaction: FakeTransaction) -> None:
        self.active.discard(transaction)
        for _, entry in transaction.received:
            entry.held_by = None
        transaction.received.clear()
        transaction.state = "undone"
        self.changed.notify_all()

    def check_room(self, values: dict[str, Any]) -> None:
        size = sum(len(values[name] or b"") for name in ("Extension", "Body")) + 2 * len(values["Label"])
        used = sum(len(e.values["Body"] or b"") for store in self.queues.values() for e in store.entries)
        if size > LARGEST_MESSAGE or used + size > self.room_bytes:
            raise failure(INSUFFICIENT_RESOURCES, "Insufficient resources to perform operation.")


BLANK: dict[str, Any] = {
    "Body": None,
    "Extension": None,
    "CorrelationId": bytes(20),
    "Label": "",
    "Delivery": 0,
    "Journal": 0,
    "MaxTimeToReceive": INFINITE,
}


class FakeCom:
    """COM in one process."""

    errors = com_error

    def __init__(self, manager: QueueManager) -> None:
        self.manager, self.machine = manager, manager.machine
        self.entered: dict[int, int] = {}
        self.made: list[str] = []

    def initialize(self) -> None:
        thread = threading.get_ident()
        self.entered[thread] = self.entered.get(thread, 0) + 1

    def uninitialize(self) -> None:
        thread = threading.get_ident()
        if not self.entered.get(thread):
            raise Misuse("CoUninitialize without CoInitialize")
        self.entered[thread] -= 1

    def create(self, prog_id: str) -> Any:
        kinds = {
            "MSMQ.MSMQQueueInfo": FakeQueueInfo,
            "MSMQ.MSMQMessage": FakeMessage,
            "MSMQ.MSMQTransactionDispenser": FakeDispenser,
        }
        if not self.entered.get(threading.get_ident()):
            raise com_error(_signed(NOT_ENTERED), "CoInitialize has not been called.", None, None)
        if prog_id not in kinds:
            raise com_error(_signed(NO_SUCH_CLASS), "Invalid class string", None, None)
        self.made.append(prog_id)
        return kinds[prog_id](self)

    def byte_array(self, content: Any) -> Variant:
        _check(isinstance(content, bytes), f"an array of bytes is made of bytes, not {type(content).__name__}")
        return Variant(VT_ARRAY_OF_UI1, content)

    @property
    def threads_inside(self) -> int:
        return sum(1 for count in self.entered.values() if count)


def _check(holds: bool, fault: str) -> None:
    if not holds:
        raise Misuse(fault)


class FakeObject:
    """An object of COM: lives in the thread that made it, and has what is documented."""

    WRITABLE: ClassVar[dict[str, Any]] = {}
    _own = ("com", "manager", "_thread", "_values")

    def __init__(self, com: FakeCom) -> None:
        self.com, self.manager, self._thread = com, com.manager, threading.get_ident()
        self._values: dict[str, Any] = {}

    def __del__(self) -> None:
        if "_thread" in self.__dict__ and threading.get_ident() != self._thread:
            self.manager.faults.append(f"{type(self).__name__} was released in another thread")

    def __setattr__(self, name: str, value: object) -> None:
        if name in self.WRITABLE:
            self._here(name)
            kind = self.WRITABLE[name]
            fits = isinstance(value, kind) and not isinstance(value, bool)
            _check(fits, f"{type(self).__name__}.{name} is {kind}, not {value!r}")
            self._values[name] = value
            return
        _check(not name[0].isupper(), f"{type(self).__name__} has no property {name!r} that can be set")
        object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("_values", {})
        if name in self.WRITABLE and name in values:
            self._here(name)
            return values[name]
        raise Misuse(f"{type(self).__name__} has no {name!r}, or it has no value")

    def _here(self, call: str) -> None:
        _check(threading.get_ident() == self._thread, f"{type(self).__name__}.{call}: used in another thread")
        _check(bool(self.com.entered.get(self._thread)), f"{type(self).__name__}.{call}: its thread has left COM")

    def _called(self, call: str) -> None:
        self._here(call)
        self.manager.before(call)
        if self.manager.is_down:
            raise failure(SERVICE_NOT_AVAILABLE, "Message Queue service is not available.")


class FakeQueueInfo(FakeObject):
    """``MSMQQueueInfo``."""

    WRITABLE: ClassVar = {"PathName": str, "FormatName": str, "Label": str}

    @property
    def IsTransactional(self) -> int:  # noqa: N802
        self._here("IsTransactional")
        return self._values["IsTransactional"]

    def Create(self, transactional, world_readable) -> None:  # noqa: N802
        _check(type(transactional) is bool and type(world_readable) is bool, "Create takes two booleans")
        with self.manager.changed:
            self._called("Create")
            found = _PATH.fullmatch(self.PathName)
            if found is None or not self._is_here(found[1]):
                raise failure(ILLEGAL_QUEUE_PATHNAME, "Invalid queue path name.")
            if "Create" in self.manager.denied:
                raise failure(ACCESS_DENIED, "Access is denied.")
            if found[2].lower() in self.manager.queues:
                raise failure(QUEUE_EXISTS, "A queue with the same path name already exists.")
            label = self._values.get("Label", "")
            self.manager.queues[found[2].lower()] = Store(found[2], transactional, label)

    def Refresh(self) -> None:  # noqa: N802
        with self.manager.changed:
            self._called("Refresh")
            found = _PATH.fullmatch(self.PathName)
            if found is None or found[2].lower() not in self.manager.queues:
                raise failure(QUEUE_NOT_FOUND, "The queue does not exist.")
            self._values["IsTransactional"] = int(self.manager.queue(found[2]).transactional)

    def Open(self, access, share_mode) -> FakeQueue:  # noqa: N802
        _check(type(access) is int and access in {1, 2, 32}, f"no access {access!r}")
        _check(type(share_mode) is int and share_mode in {0, 1}, f"no share mode {share_mode!r}")
        with self.manager.changed:
            self._called("Open")
            found = _FORMAT.fullmatch(self.FormatName)
            if found is None:
                raise failure(ILLEGAL_FORMATNAME, "The format name is invalid.")
            store = None
            if self._is_here(found[2]):
                store = self.manager.queues.get(found[3].lower())
                if store is None:
                    raise failure(QUEUE_NOT_FOUND, "The queue does not exist.")
                if found[3].lower() in self.manager.denied:
                    raise failure(ACCESS_DENIED, "Access is denied.")
            elif access != 2:
                raise failure(REMOTE_MACHINE_NOT_AVAILABLE, "The remote machine is not available.")
            return FakeQueue(self.com, store, access, self.FormatName)

    def _is_here(self, machine: str) -> bool:
        return machine.lower() in {".", self.manager.machine.lower()}


class FakeQueue(FakeObject):
    """``MSMQQueue``."""

    def __init__(self, com: FakeCom, store: Store | None, access: int, format_name: str) -> None:
        super().__init__(com)
        self.store_here, self.access, self.format_name = store, access, format_name
        self.epoch, self.is_closed, self.cursor = com.manager.epoch, False, None

    @property
    def store(self) -> Store:
        assert self.store_here is not None, "what is looked at or taken is in a queue of this machine"
        return self.store_here

    def check_usable(self, call: str) -> None:
        self._called(call)
        _check(not self.is_closed, f"{call} on a queue that was closed")
        if self.epoch != self.manager.epoch:
            raise failure(STALE_HANDLE, "The queue handle is stale, and should be closed.")
        if self.store_here is not None and self.store_here.is_deleted:
            raise failure(QUEUE_DELETED, "The queue was deleted.")

    def Close(self) -> None:  # noqa: N802
        self._here("Close")
        self.is_closed = True
        if self.epoch != self.manager.epoch:
            raise failure(STALE_HANDLE, "The queue handle is stale, and should be closed.")

    def Reset(self) -> None:  # noqa: N802
        self.check_usable("Reset")
        self.cursor = None

    # --- taking -------------------------------------------------------------------------------------------------------

    def Receive(self, transaction, want_destination, want_body, milliseconds) -> FakeMessage | None:  # noqa: N802
        def take() -> FakeMessage | None:
            first = next(iter(self.store.visible()), None)
            return None if first is None else self._take(first, transaction, want_body)

        return self._wait("Receive", take, want_destination, want_body, milliseconds)

    def ReceiveByLookupId(self, lookup_id, transaction, want_destination, want_body) -> FakeMessage:  # noqa: N802
        _check(type(lookup_id) is str, f"a lookup id is text, not {lookup_id!r}")
        _check(type(want_destination) is bool and type(want_body) is bool, "what is wanted is a boolean")
        with self.manager.changed:
            self.check_usable("ReceiveByLookupId")
            self.manager.discard_expired()
            for entry in self.store.visible():
                if str(entry.lookup_id) == lookup_id:
                    return self._take(entry, transaction, want_body)
            raise failure(MESSAGE_NOT_FOUND, "The message with the specified lookup id does not exist.")

    def _take(self, entry: Entry, transaction, want_body: bool) -> FakeMessage:
        _check(self.access == 1, "receiving needs MQ_RECEIVE_ACCESS")
        if isinstance(transaction, FakeTransaction):
            transaction.check_active("Enlist")
            if not self.store.transactional:
                raise failure(TRANSACTION_USAGE, "The queue is not transactional.")
            entry.held_by = transaction
            transaction.received.append((self.store, entry))
        else:
            _check(type(transaction) is int and transaction == 0, f"receiving takes no transaction {transaction!r}")
            self.store.entries.remove(entry)
        return FakeMessage(self.com, entry, want_body)

    # --- looking ------------------------------------------------------------------------------------------------------

    def Peek(self, want_destination, want_body, milliseconds) -> FakeMessage | None:  # noqa: N802
        def look() -> FakeMessage | None:
            first = next(iter(self.store.visible()), None)
            return None if first is None else FakeMessage(self.com, first, want_body)

        return self._wait("Peek", look, want_destination, want_body, milliseconds)

    def PeekCurrent(self, want_destination, want_body, milliseconds) -> FakeMessage | None:  # noqa: N802
        def look() -> FakeMessage | None:
            if self.cursor is None:
                return self._put_cursor(0, want_body)
            entry = next((each for each in self.store.visible() if each.lookup_id == self.cursor), None)
            if entry is None:
                raise failure(MESSAGE_ALREADY_RECEIVED, "The message at the cursor was received already.")
            return FakeMessage(self.com, entry, want_body)

        return self._wait("PeekCurrent", look, want_destination, want_body, milliseconds)

    def PeekNext(self, want_destination, want_body, milliseconds) -> FakeMessage | None:  # noqa: N802
        def look() -> FakeMessage | None:
            if self.cursor is None:
                raise failure(ILLEGAL_CURSOR_ACTION, "PeekNext needs a cursor at a message.")
            return self._put_cursor(self.cursor, want_body)

        return self._wait("PeekNext", look, want_destination, want_body, milliseconds)

    def _put_cursor(self, after: int, want_body: bool) -> FakeMessage | None:
        entry = next((each for each in self.store.visible() if each.lookup_id > after), None)
        if entry is None:
            return None
        self.cursor = entry.lookup_id
        return FakeMessage(self.com, entry, want_body)

    def _wait(self, call, take: Callable[[], FakeMessage | None], want_destination, want_body, milliseconds):
        _check(type(want_destination) is bool and type(want_body) is bool, "what is wanted is a boolean")
        _check(type(milliseconds) is int and milliseconds >= INFINITE, f"no time to wait: {milliseconds!r}")
        _check(self.access in {1, 32}, f"{call} needs an access to receive or to peek")
        deadline = time.monotonic() + (1e9 if milliseconds == INFINITE else milliseconds / 1000)
        with self.manager.changed:
            while True:
                self.check_usable(call)
                self.manager.discard_expired()
                found = take()
                if found is not None:
                    return found
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self.manager.changed.wait(min(left, 0.05))
        if self.manager.timeouts_raise:
            raise failure(IO_TIMEOUT, "The timeout has expired.")
        return None


class FakeMessage(FakeObject):
    """``MSMQMessage``: to be sent, or taken out of a queue."""

    WRITABLE: ClassVar = {
        "Body": (Variant, str, int, float),
        "Extension": Variant,
        "CorrelationId": Variant,
        "Label": str,
        "Delivery": int,
        "Journal": int,
        "MaxTimeToReceive": int,
    }

    def __init__(self, com: FakeCom, entry: Entry | None = None, want_body: bool = True) -> None:
        super().__init__(com)
        self.entry = entry
        self._values.update(BLANK if entry is None else entry.values)
        if not want_body:
            del self._values["Body"]

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if name in {"Extension", "CorrelationId", "Body"} and isinstance(value, bytes):
            return memoryview(value)
        if isinstance(value, com_error):  # what reading this property ends with
            raise value
        return value

    @property
    def Id(self) -> memoryview:  # noqa: N802
        self._here("Id")
        return memoryview(self._arrived().id)

    @property
    def LookupId(self) -> str:  # noqa: N802
        self._here("LookupId")
        return str(self._arrived().lookup_id)

    def _arrived(self) -> Entry:
        if self.entry is None:
            raise Misuse("a message that was never in a queue has no id")
        return self.entry

    def Send(self, queue, transaction) -> None:  # noqa: N802
        _check(isinstance(queue, FakeQueue), f"Send takes an open queue, not {queue!r}")
        with self.manager.changed:
            self._here("Send")
            queue.check_usable("Send")
            _check(queue.access == 2, "sending needs MQ_SEND_ACCESS")
            values = self._checked_values()
            self.manager.check_room(values)
            if queue.store_here is None:
                self.manager.sent_elsewhere.append((queue.format_name, values))
                return
            is_part_of_one = isinstance(transaction, FakeTransaction) or transaction == 3
            if is_part_of_one is not queue.store.transactional:
                raise failure(TRANSACTION_USAGE, "The transaction usage is invalid for this queue.")
            if isinstance(transaction, FakeTransaction):
                transaction.check_active("Enlist")
                transaction.sent.append((queue.store, values))
            else:
                _check(type(transaction) is int and transaction in {0, 3}, f"no such transaction: {transaction!r}")
                self.manager.deliver(queue.store, values, values["MaxTimeToReceive"])

    def _checked_values(self) -> dict[str, Any]:
        values = dict(self._values)
        for name in ("Body", "Extension", "CorrelationId"):
            _check(not isinstance(values[name], bytearray | memoryview), f"{name}: an array of bytes is a VARIANT")
            if isinstance(values[name], Variant):
                _check(values[name].varianttype == VT_ARRAY_OF_UI1, f"{name} is an array of bytes")
                _check(len(values[name].value) > 0, f"{name}: MSMQ has no empty array; leave it out")
                values[name] = values[name].value
        if len(values["Label"].encode("utf-16-le")) // 2 > 249:
            raise failure(LABEL_TOO_LONG, "The label is too long.")
        if len(values["CorrelationId"]) != 20:
            raise failure(ILLEGAL_PROPERTY_SIZE, "The size of CorrelationId is not 20 bytes.")
        ranges = {"Delivery": range(2), "Journal": range(4), "MaxTimeToReceive": range(-1, 2**31)}
        for name, allowed in ranges.items():
            if values[name] not in allowed:
                raise failure(ILLEGAL_PROPERTY_VALUE, f"The value of {name} is illegal.")
        return values


class FakeDispenser(FakeObject):
    """``MSMQTransactionDispenser``."""

    def BeginTransaction(self) -> FakeTransaction:  # noqa: N802
        with self.manager.changed:
            self._called("BeginTransaction")
            return FakeTransaction(self.com)


class FakeTransaction(FakeObject):
    """``MSMQTransaction``, internal."""

    def __init__(self, com: FakeCom) -> None:
        super().__init__(com)
        self.received: list[tuple[Store, Entry]] = []
        self.sent: list[tuple[Store, dict[str, Any]]] = []
        self.state = "active"
        com.manager.active.add(self)

    def check_active(self, call: str) -> None:
        self._called(call)
        if self.state != "active":
            raise failure(NO_TRANSACTION_THERE, "The transaction does not exist any more.")

    def Commit(self) -> None:  # noqa: N802
        with self.manager.changed:
            self.check_active("Commit")
            self.state = "committed"
            self.manager.active.discard(self)
            for store, entry in self.received:
                store.entries.remove(entry)
                entry.held_by = None
            self.received.clear()
            for store, values in self.sent:
                # The rule that loses messages: what the first one says holds for all of them.
                self.manager.deliver(store, values, self.sent[0][1]["MaxTimeToReceive"])

    def Abort(self) -> None:  # noqa: N802
        with self.manager.changed:
            self.check_active("Abort")
            self.manager.undo(self)

"""Heartbeats, locks and wake-ups between the processes on one machine.

Each process with claims has a locked file, which the system unlocks when the process dies. A lock needs no clock: a
slow handler never loses its message, and after kill -9 the message can be claimed at once (ADR 0003; a lease would have
to choose between the two). A locked file also reserves a name during slow work elsewhere: a mark in the database would
cost two more commits (ADR 0014).

A frozen process keeps its lock. So each process with claims also touches a file from time to time. If it does not do so
for as long as its file states, other processes release its claims (ADR 0053). An observer counts only the time in which
it was awake itself. So no clocks are compared, and after the machine was suspended no process is considered silent.

Wake-ups are datagrams on the loopback interface, sent after the commit and never before. A datagram contains only the
name of a topic. A lost datagram costs a poll interval, but never a message: all listeners also poll by themselves.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final

from filelock import FileLock, Timeout
from typing_extensions import override

from postdate.errors import StoreNotWritable
from postdate.ports import Wake
from postdate.runtime import forks

# --- heartbeats ----------------------------------------------------------------------------------------------------

DEFAULT_HOLDS_AT_MOST: Final = timedelta(seconds=60)
"""Default of ``holds_at_most``."""

SHORTEST_BOUND: Final = timedelta(seconds=3)
"""The smallest ``holds_at_most``: heartbeats and checks are at least a second apart."""

_HEARTBEATS_IN_BOUND: Final = 4
"""The number of heartbeats within ``holds_at_most``. So three may fail before the process counts as silent."""


class _LockOfProcess(forks.ForkAware):
    """A locked file whose lock ends with this process, also if the process has forked children.

    A child inherits the descriptor and with it the lock. So without this class it would keep the claims of its parent
    after the parent's death.
    """

    def __init__(self, lock: FileLock, path: Path) -> None:
        self.lock, self.status = lock, path.stat()
        self.is_inherited = False
        """Whether the lock belongs to the parent of this process; then it must not be released here."""
        forks.register(self)

    @override
    def after_fork_in_child(self) -> None:
        self.is_inherited = True
        forks.prevent_destruction(self.lock)  # its finalizer would release the lock of the parent
        for descriptor, identity in forks.open_descriptors().items():
            if identity == (self.status.st_dev, self.status.st_ino):
                forks.redirect_to_null(descriptor)

    def release(self) -> None:
        if not self.is_inherited:
            self.lock.release()


class FileLiveness:
    """The locked file of one claimant, and the file that it touches as a heartbeat. Both are in ``folder``."""

    def __init__(self, folder: Path, claimant: int, holds_at_most: timedelta) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path, self._heartbeat_path = _lock_path(folder, claimant), _heartbeat_file(folder, claimant)
        lock = FileLock(self._path, thread_local=False, is_singleton=False)
        lock.acquire(timeout=0)
        self._lock = _LockOfProcess(lock, self._path)
        self._heartbeat_path.write_text(f"{holds_at_most.total_seconds():g}", encoding="ascii")
        self._interval_seconds = holds_at_most.total_seconds() / _HEARTBEATS_IN_BOUND
        self._next_heartbeat = 0.0

    @classmethod
    def acquire(cls, folder: Path, claimant: int, holds_at_most: timedelta) -> FileLiveness | None:
        """Return the liveness of a claimant; ``None`` if another process has the lock of that number."""
        try:
            return cls(folder, claimant, holds_at_most)
        except Timeout:
            return None

    def is_heartbeat_due(self, at: float) -> bool:
        """Return whether a heartbeat is due; ``at``: monotonic seconds."""
        return at >= self._next_heartbeat

    def is_overdue(self, at: float) -> bool:
        """Return whether the last heartbeat is so old that others may have the claims; ``at``: monotonic seconds."""
        return at >= self._next_heartbeat + (_HEARTBEATS_IN_BOUND - 1) * self._interval_seconds

    def write_heartbeat(self, at: float) -> None:
        """Touch the file. This costs one small write to the disk."""
        os.utime(self._heartbeat_path)
        self._next_heartbeat = at + self._interval_seconds

    def is_in_place(self) -> bool:
        """Return whether the locked file is still at its path: it may have been removed."""
        try:
            return os.path.samestat(self._path.stat(), self._lock.status)
        except FileNotFoundError:
            return False

    def close(self) -> None:
        if not self._lock.is_inherited:
            self._lock.release()
            _remove(self._path, self._heartbeat_path)


def is_gone(folder: Path, claimant: int) -> bool:
    """Return whether the process of a claimant has ended; if so, its files are removed."""
    path = _lock_path(folder, claimant)
    if not path.exists():
        return True
    lock = FileLock(path, thread_local=False, is_singleton=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return False
    _remove(path, _heartbeat_file(folder, claimant))
    lock.release()
    return True


def remove_files(folder: Path, claimant: int) -> None:
    """Remove the files of a silent process: if it never wakes again, no other code removes them."""
    _remove(_lock_path(folder, claimant), _heartbeat_file(folder, claimant))


def _remove(*paths: Path) -> None:
    for path in paths:
        with suppress(OSError):  # two processes may remove it at once, or one may have it open for a check
            path.unlink()


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The last heartbeat of a process.

    ``mark`` changes with each, and may be unchanged for ``bound_seconds`` seconds.
    """

    mark: int
    bound_seconds: float


def read_heartbeat(folder: Path, claimant: int) -> Heartbeat | None:
    path = _heartbeat_file(folder, claimant)
    try:
        return Heartbeat(path.stat().st_mtime_ns, float(path.read_text(encoding="ascii")))
    except (OSError, ValueError):  # the process is ending, or is starting and has not written the file yet
        return None


class SilenceObserver:
    """The time for which each other process has sent no heartbeat, as this process has observed it. Pure."""

    def __init__(self) -> None:
        self._silences: dict[int, tuple[Heartbeat, float]] = {}

    def find_silent(
        self, holders: Iterable[int], read_heartbeat_of: Callable[[int], Heartbeat | None], elapsed_seconds: float
    ) -> list[int]:
        """Return the claimants whose claims are to be released.

        Args:
            holders: claimants with claims; a process without claims sends no heartbeat.
            read_heartbeat_of: returns the last heartbeat; ``None``: the process sends none, such as one of an older
                Postdate.
            elapsed_seconds: seconds since the last check, in which this process was awake itself.
        """
        silences = dict[int, tuple[Heartbeat, float]]()
        for holder in holders:
            if (heartbeat := read_heartbeat_of(holder)) is not None:
                previous, silent_seconds = self._silences.get(holder, (None, 0.0))
                silences[holder] = (heartbeat, silent_seconds + elapsed_seconds if heartbeat == previous else 0.0)
        self._silences = silences
        return sorted(holder for holder, (sign, silent_for) in silences.items() if silent_for >= sign.bound_seconds)


def claimants_folder(path: Path) -> Path:
    return path.with_name(path.name + "-claimants")


def _lock_path(folder: Path, claimant: int) -> Path:
    return folder / f"{claimant}.lock"


def _heartbeat_file(folder: Path, claimant: int) -> Path:
    return folder / f"{claimant}.alive"


# --- names held by a locked file -----------------------------------------------------------------------------------


class LockedFile:
    """A locked file; the system unlocks it when the process ends."""

    def __init__(self, lock: FileLock, path: Path) -> None:
        self._lock, self._path, self.is_locked = _LockOfProcess(lock, path), path, True

    def unlock(self) -> None:
        """Unlock and remove the file, once: after that another process may have a file of this name. Never raises."""
        if self.is_locked and not self._lock.is_inherited:
            self.is_locked = False
            with suppress(OSError):
                self._path.unlink()
            with suppress(OSError):
                self._lock.release()


def acquire_file_lock(folder: Path, name: str) -> LockedFile | None:
    """Lock the file of ``name``, any text; return ``None`` if it is locked, by this or another process.

    The lock is not exclusive while its file is being removed: one process may lock the old file, and another one a new
    file of the same name. So check after locking whether the work is still to be done; work that was done before the
    unlocking is visible then.
    """
    path = folder / f"held-{hashlib.md5(name.encode(), usedforsecurity=False).hexdigest()}.lock"
    lock = FileLock(path, thread_local=False, is_singleton=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        return None
    except OSError as error:
        raise StoreNotWritable(
            f"{path} cannot be locked ({error}); check the owner and mode of the folder {folder}"
        ) from error
    return LockedFile(lock, path)


# --- wake-ups ------------------------------------------------------------------------------------------------------

_LOOPBACK = "127.0.0.1"
_LONGEST_TOPIC_BYTES = 2048
_STOP_CHECK_SECONDS = 1.0
"""How often the listening thread checks whether it must end, as the datagram that ends it may be lost."""

log = logging.getLogger("postdate.embedded")


class Wakeups:
    """The topics that this process listens to, and the sockets for wake-ups to and from others. Thread-safe."""

    def __init__(self) -> None:
        self._subscribers: dict[str, list[Wake]] = defaultdict(list)
        self._lock = forks.lock()
        self._sender: socket.socket | None = None
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None

    @property
    def port(self) -> int:
        """UDP port on the loopback interface; the first call starts the listening thread."""
        with self._lock:
            if self._listener is None:
                self._listener = forks.register_connection(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
                self._listener.bind((_LOOPBACK, 0))
                self._listener.settimeout(_STOP_CHECK_SECONDS)
                self._thread = threading.Thread(target=self._listen, name="postdate-wakeups", daemon=True)
                self._thread.start()
            port: int = self._listener.getsockname()[1]
            return port

    @property
    def topics(self) -> list[str]:
        with self._lock:
            return [topic for topic, wakes in self._subscribers.items() if wakes]

    def subscribe(self, topic: str, wake: Wake) -> Callable[[], None]:
        """Call ``wake`` at each signal of ``topic`` until the returned function is called."""
        with self._lock:
            self._subscribers[topic].append(wake)

        def unsubscribe() -> None:
            with self._lock:
                if wake in self._subscribers[topic]:
                    self._subscribers[topic].remove(wake)

        return unsubscribe

    def signal(self, topics: Iterable[str], listeners: Iterable[tuple[str, int]]) -> None:
        """Wake subscribers in this process, and processes ``listeners``, given as (topic, port)."""
        for topic in topics:
            self._wake(topic)
        for topic, port in listeners:
            self._send(topic, port)

    def _send(self, topic: str, port: int) -> None:
        with self._lock:
            try:
                if self._sender is None:
                    self._sender = forks.register_connection(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
                    self._sender.bind((_LOOPBACK, 0))
                self._sender.sendto(topic.encode(), (_LOOPBACK, port))
            except OSError as error:  # no loopback, or full buffers: the poll of the listener finds the message
                log.debug("no datagram to port %d: %s", port, error)

    def stop_listening(self) -> None:
        with self._lock:
            listener, self._listener = self._listener, None
        if listener is not None:
            self._send("", listener.getsockname()[1])
            if self._thread is not None and self._thread is not threading.current_thread():
                self._thread.join()
            listener.close()

    def close(self) -> None:
        with self._lock:
            sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()

    def _wake(self, topic: str) -> None:
        with self._lock:
            subscribers = list(self._subscribers.get(topic, ()))
        for wake in subscribers:
            wake()

    def _listen(self) -> None:
        while (listener := self._listener) is not None:
            with suppress(TimeoutError):
                self._wake(listener.recv(_LONGEST_TOPIC_BYTES).decode(errors="replace"))

"""What the processes on one machine know of each other: who lives, what is held, and when to look.

Each process that holds messages also holds a locked file, which the system frees when it dies. A lock needs no clock: a
slow handler never loses its message, and after kill -9 the message is free at once (ADR 0003; a lease would have to
choose between the two). A name is held by a locked file, too, during slow work elsewhere: a mark in the database would
cost two commits more (ADR 0014).

A frozen process keeps its lock. So each one with claims also touches a file now and then, and others take its claims
when it does not do so for as long as its file says (ADR 0053). An observer counts only the time in which it looked
itself: no clocks are compared, and after a machine has slept nobody is taken for silent.

Signals are datagrams on the loopback interface, sent after the commit, never before. A datagram carries only the name
of a topic. A lost one costs a poll interval, never a message: all listeners also look by themselves from time to time.
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

# --- who lives -----------------------------------------------------------------------------------------------------

HELD_AT_MOST: Final = timedelta(seconds=60)
"""Default of ``holds_at_most``."""

SHORTEST_BOUND: Final = timedelta(seconds=3)
"""Signs and looks are a second apart at best."""

_SIGNS_IN_A_BOUND: Final = 4
"""A sign may come late three times before it is missed."""


class _LockOfProcess(forks.ForkAware):
    """A locked file whose lock ends with this process, whatever children it has.

    A child inherits the descriptor, and with it the lock: it would keep what its parent held after the parent's death.
    """

    def __init__(self, lock: FileLock, path: Path) -> None:
        self.lock, self.status = lock, path.stat()
        self.is_inherited = False
        """Whether it is that of the parent: it must not be released here."""
        forks.register(self)

    @override
    def after_fork_in_child(self) -> None:
        self.is_inherited = True
        forks.keep_for_ever(self.lock)  # its end would release it
        for descriptor, identity in forks.open_descriptors().items():
            if identity == (self.status.st_dev, self.status.st_ino):
                forks.blank(descriptor)

    def release(self) -> None:
        if not self.is_inherited:
            self.lock.release()


class FileLiveness:
    """The locked file of one claimant, and the file that it touches as a sign of life, both in ``folder``."""

    def __init__(self, folder: Path, claimant: int, holds_at_most: timedelta) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path, self._sign = _lock_path(folder, claimant), _sign_path(folder, claimant)
        lock = FileLock(self._path, thread_local=False, is_singleton=False)
        lock.acquire(timeout=0)
        self._lock = _LockOfProcess(lock, self._path)
        self._sign.write_text(f"{holds_at_most.total_seconds():g}", encoding="ascii")
        self._every = holds_at_most.total_seconds() / _SIGNS_IN_A_BOUND
        self._next_sign = 0.0

    @classmethod
    def take(cls, folder: Path, claimant: int, holds_at_most: timedelta) -> FileLiveness | None:
        """Return the liveness of a claimant, or ``None``: another process has the lock of that number."""
        try:
            return cls(folder, claimant, holds_at_most)
        except Timeout:
            return None

    def sign_is_wanted(self, at: float) -> bool:
        """Return whether a sign is due; ``at``: monotonic seconds."""
        return at >= self._next_sign

    def is_overdue(self, at: float) -> bool:
        """Return whether the last sign is so old that others may have the claims; ``at``: monotonic seconds."""
        return at >= self._next_sign + (_SIGNS_IN_A_BOUND - 1) * self._every

    def show_life(self, at: float) -> None:
        """Touch the file, which costs the disk one small write."""
        os.utime(self._sign)
        self._next_sign = at + self._every

    def stands(self) -> bool:
        """Return whether the locked file is still the one at its path."""
        try:
            return os.path.samestat(self._path.stat(), self._lock.status)
        except FileNotFoundError:
            return False

    def leave(self) -> None:
        if not self._lock.is_inherited:
            self._lock.release()
            _remove(self._path, self._sign)


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
    _remove(path, _sign_path(folder, claimant))
    lock.release()
    return True


def forget(folder: Path, claimant: int) -> None:
    """Remove the files of a silent process: if it dies silent, nobody else would."""
    _remove(_lock_path(folder, claimant), _sign_path(folder, claimant))


def _remove(*paths: Path) -> None:
    for path in paths:
        with suppress(OSError):  # two processes may find it gone at once, or just be looking whether it is
            path.unlink()


@dataclass(frozen=True, slots=True)
class Sign:
    """The last sign of life of a process: ``mark`` changes with each, and may stay the same for ``bound`` seconds."""

    mark: int
    bound: float


def last_sign(folder: Path, claimant: int) -> Sign | None:
    path = _sign_path(folder, claimant)
    try:
        return Sign(path.stat().st_mtime_ns, float(path.read_text(encoding="ascii")))
    except (OSError, ValueError):  # it ends just now; or begins, and has not written yet
        return None


class Silence:
    """For how long other processes have given no sign, as far as this process has looked; pure."""

    def __init__(self) -> None:
        self._silent_for: dict[int, tuple[Sign, float]] = {}

    def look(self, holders: Iterable[int], sign_of: Callable[[int], Sign | None], passed: float) -> list[int]:
        """Return the claimants whose claims are void.

        Args:
            holders: claimants with claims; a process without any need give no sign.
            sign_of: returns the last sign; ``None``: it gives none, as those of an older Postdate.
            passed: seconds since the last look, in which this process was awake itself.
        """
        seen = dict[int, tuple[Sign, float]]()
        for holder in holders:
            if (sign := sign_of(holder)) is not None:
                before, silent_for = self._silent_for.get(holder, (None, 0.0))
                seen[holder] = (sign, silent_for + passed if sign == before else 0.0)
        self._silent_for = seen
        return sorted(holder for holder, (sign, silent_for) in seen.items() if silent_for >= sign.bound)


def presence_folder(path: Path) -> Path:
    return path.with_name(path.name + "-claimants")


def _lock_path(folder: Path, claimant: int) -> Path:
    return folder / f"{claimant}.lock"


def _sign_path(folder: Path, claimant: int) -> Path:
    return folder / f"{claimant}.alive"


# --- names held by a locked file -----------------------------------------------------------------------------------


class LockedFile:
    """A locked file; the system unlocks it when the process ends."""

    def __init__(self, lock: FileLock, path: Path) -> None:
        self._lock, self._path, self.is_locked = _LockOfProcess(lock, path), path, True

    def unlock(self) -> None:
        """Unlock and remove it, once: afterwards the file may be another's. Never raises."""
        if self.is_locked and not self._lock.is_inherited:
            self.is_locked = False
            with suppress(OSError):
                self._path.unlink()
            with suppress(OSError):
                self._lock.release()


def try_to_hold(folder: Path, name: str) -> LockedFile | None:
    """Lock the file of ``name``, any text, or return ``None``: it is locked, here or by another process.

    The lock is not exclusive while its file is being removed: a process may lock the old file and another one its
    successor. So check afterwards whether the work is still to be done: what was done before the unlocking is visible.
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
_LOOK_UP_SECONDS = 1.0
"""How often the listening thread checks whether it is to end, as the datagram that says so may be lost."""

log = logging.getLogger("postdate.embedded")


class Wakeups:
    """The topics that this process listens to, and the socket by which it hears other processes."""

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
                self._listener = forks.own(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
                self._listener.bind((_LOOPBACK, 0))
                self._listener.settimeout(_LOOK_UP_SECONDS)
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

    def signal(self, topics: Iterable[str], elsewhere: Iterable[tuple[str, int]]) -> None:
        """Wake subscribers in this process, and processes ``elsewhere``, given as (topic, port)."""
        for topic in topics:
            self._wake(topic)
        for topic, port in elsewhere:
            self._send(topic, port)

    def _send(self, topic: str, port: int) -> None:
        with self._lock:
            try:
                if self._sender is None:
                    self._sender = forks.own(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
                    self._sender.bind((_LOOPBACK, 0))
                self._sender.sendto(topic.encode(), (_LOOPBACK, port))
            except OSError as error:  # no loopback, or its buffers are full: the listener's own poll finds the message
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

"""Who is alive: each process that holds messages also holds a locked file, which the system lets go when it dies.

A lock needs no clock: a slow handler never loses its message, and after kill -9 the message is free at once
(ADR 0003; a lease would have to choose between the two).
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout


class Presence:
    """The locked file of one claimant.

    Args:
        folder: where the lock files of one database live; created here.
        claimant: number of the process in the database.
    """

    def __init__(self, folder: Path, claimant: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = _lock_path(folder, claimant)
        self._lock = FileLock(self._path, thread_local=False, is_singleton=False)
        self._lock.acquire(timeout=0)
        self._taken = self._path.stat()
        self._pid = os.getpid()

    def stands(self) -> bool:
        """Return whether the locked file is still the one that others look at."""
        try:
            return os.path.samestat(self._path.stat(), self._taken)
        except FileNotFoundError:
            return False

    def leave(self) -> None:
        """Let go; a forked child does not let go for its parent."""
        if os.getpid() == self._pid:
            self._lock.release()
            with suppress(OSError):  # another process may just be looking whether we are alive, and removes it then
                self._path.unlink()


def is_gone(folder: Path, claimant: int) -> bool:
    """Return whether the process of a claimant ended; then its file is removed."""
    path = _lock_path(folder, claimant)
    if not path.exists():
        return True
    lock = FileLock(path, thread_local=False, is_singleton=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return False
    with suppress(OSError):  # two processes may find it gone at once
        path.unlink()
    lock.release()
    return True


def presence_folder(path: Path) -> Path:
    """Return where the lock files of the database at ``path`` are."""
    return path.with_name(path.name + "-claimants")


def _lock_path(folder: Path, claimant: int) -> Path:
    return folder / f"{claimant}.lock"

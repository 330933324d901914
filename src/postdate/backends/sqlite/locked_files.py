"""Holding a name in one process while it lives: a locked file for each name, beside the lock files of the processes.

For claims during slow work elsewhere: a mark in the database would cost two commits more. Source: ADR 0003, ADR 0014.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from postdate.errors import StoreNotWritable


class LockedFile:
    """A locked file; the system unlocks it when the process ends."""

    def __init__(self, lock: FileLock, path: Path) -> None:
        self._lock, self._path = lock, path

    def let_go(self) -> None:
        """Unlock and remove it. Never raises."""
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

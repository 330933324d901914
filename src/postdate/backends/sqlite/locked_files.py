"""One thing in one process' hands, for as long as that lives: a locked file for each, beside those of the processes.

For what is held while something slow happens elsewhere: a mark in the database would cost two commits more.
Source: ADR 0003, ADR 0014.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from postdate.errors import StoreNotWritable


class LockedFile:
    """A locked file; the system lets it go when the process ends.

    Args:
        lock: taken.
        path: of the file.
    """

    def __init__(self, lock: FileLock, path: Path) -> None:
        self._lock, self._path = lock, path

    def let_go(self) -> None:
        """Let others have it. Never raises."""
        with suppress(OSError):
            self._path.unlink()
        with suppress(OSError):
            self._lock.release()


def try_to_hold(folder: Path, name: str) -> LockedFile | None:
    """Hold what is called ``name``, or return ``None``: somebody holds it, here or in another process.

    Who waits for a file that is just being taken away may hold it beside somebody who makes it anew. So look, after
    this, whether there is still anything to do: what was done before it was let go is seen.

    Args:
        folder: of the locked files; made here.
        name: any text.

    Raises:
        StoreNotWritable: no file can be made or locked there.
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

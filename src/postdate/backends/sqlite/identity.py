"""Which file is at a path, and the log that a former file may have left beside it.

After a file is replaced (a restored backup, ``mv``), SQLite would take the old log for the log of the new file, which
it overwrites or damages. So a note beside the file says to which file the log belongs, and a log of another file is
moved away before the file is opened. Source: ADR 0019.

A file is identified by its inode number, which file systems reuse after ``rm``. So while there is a log, a second name
beside the note keeps its file, and with it the number.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from filelock import FileLock, Timeout

from postdate.backends.sqlite.liveness import presence_folder
from postdate.errors import StoreUnreachable

log = logging.getLogger("postdate.embedded")

Identity = tuple[int, int]
"""Device and inode number of a file."""

_LOCK: Final = "opening.lock"
_OPENING_SECONDS: Final = 10.0
_NAME: Final = "log-of"
_PINNED: Final = "file-of-log"


def identity_of(path: Path) -> Identity | None:
    """Return the identity of the file at ``path``; ``None``: there is no file, or it may not be read."""
    try:
        found = os.stat(path)  # noqa: PTH116 - once for every transaction
    except OSError:
        return None
    return found.st_dev, found.st_ino


def log_path(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


def is_leftover(path: Path) -> bool:
    """Return whether the log beside ``path`` belongs to a former file."""
    there, beside = identity_of(path), identity_of(log_path(path))
    if there is None or beside is None:
        return False
    noted = _noted(path)
    # A copy of file and log together has new numbers for both, and belongs together.
    return noted is not None and noted[1] == beside and noted[0] != there


def refuse_leftover(path: Path) -> None:
    """Raise `StoreUnreachable` if the log belongs to a former file: only a process that writes may move it away."""
    if is_leftover(path):
        raise StoreUnreachable(
            f"{path} was replaced while it was in use, and {log_path(path).name} belongs to the file before: "
            f"any process of Postdate that writes (`postdate setup`) puts that aside"
        )


@contextmanager
def alone(path: Path) -> Generator[None]:
    """Hold the lock under which a file is opened: a former file's log is moved away first, the log is noted afterwards.

    Raises `StoreUnreachable` when another process has had the lock for too long.
    """
    folder = presence_folder(path)
    lock = FileLock(folder / _LOCK, thread_local=False, is_singleton=False)
    try:
        folder.mkdir(exist_ok=True)
        lock.acquire(timeout=_OPENING_SECONDS)
    except Timeout as error:
        raise StoreUnreachable(f"{path}: another process has been opening it for {_OPENING_SECONDS:.0f} s") from error
    except OSError:  # where nothing can be made the file cannot be opened for writing either, which says it better
        yield
        return
    try:
        _put_aside(path)
        yield
        _note(path)
    finally:
        lock.release()


def _put_aside(path: Path) -> None:
    if not is_leftover(path):
        return
    noted = _noted(path)
    kept = path.with_name(f"{path.name}-log-of-replaced-{noted[0][1] if noted else 0}")
    # First the index, then the log: while the log is there no process opens the file to read; a reader with the index
    # of the old log would share it with all connections of its process.
    with suppress(FileNotFoundError):
        path.with_name(path.name + "-shm").unlink()
    log_path(path).replace(kept)
    log.error(
        "%s was replaced while it was in use. What was written to the file before and is only in its log is not in "
        "this one; the log is kept as %s. If you have that file, put both together as FILE and FILE-wal",
        path,
        kept.name,
    )


def _noted(path: Path) -> tuple[Identity, Identity] | None:
    try:
        device, number, log_device, log_number = map(int, _note_path(path).read_text(encoding="ascii").split())
    except (OSError, ValueError):  # none yet; or written by halves when the machine failed
        return None
    return (device, number), (log_device, log_number)


def forget_log(path: Path) -> None:
    """Remove the note and the second name once the log is gone; to be called after a file was closed. Never raises.

    Otherwise a removed file would keep its room on the disk.
    """
    folder = presence_folder(path)
    with suppress(OSError, Timeout):  # whoever opens the file now notes it anew; and no more than a note is lost
        if not folder.exists():
            return
        with FileLock(folder / _LOCK, timeout=0, thread_local=False, is_singleton=False):
            if identity_of(log_path(path)) is None:
                _note_path(path).unlink(missing_ok=True)
                (folder / _PINNED).unlink(missing_ok=True)


def _note(path: Path) -> None:
    there, beside = identity_of(path), identity_of(log_path(path))
    if there is None or beside is None:
        return
    pinned = presence_folder(path) / _PINNED
    if identity_of(pinned) != there:
        with suppress(OSError):  # where a file has one name only, what is removed and made anew is not told apart
            pinned.unlink(missing_ok=True)
            os.link(path, pinned)
    if _noted(path) != (there, beside):
        _note_path(path).write_text(" ".join(map(str, (*there, *beside))), encoding="ascii")


def _note_path(path: Path) -> Path:
    return presence_folder(path) / _NAME

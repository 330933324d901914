"""Which file is at a path, and the log that a former file may have left beside it.

After a file is replaced (a restored backup, ``mv``), SQLite would take the old log for the log of the new file, which
it overwrites or damages. So a note beside the file says to which file the log belongs, and no file is opened beside the
log of another. Source: ADR 0003.

A file is identified by its inode number, which nothing else has while a process has the file open.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from filelock import FileLock, Timeout

from postdate.backends.sqlite.liveness import presence_folder
from postdate.errors import StoreReplaced, StoreUnreachable

Identity = tuple[int, int]
"""Device and inode number of a file."""

_LOCK: Final = "opening.lock"
_OPENING_SECONDS: Final = 10.0
_NAME: Final = "log-of"


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
    beside, noted = identity_of(log_path(path)), _noted(path)
    # A copy of file and log together has new numbers for both, and belongs together.
    return noted is not None and noted[1] == beside and noted[0] != identity_of(path)


def refuse_leftover(path: Path) -> None:
    """Raise `StoreReplaced` if the log beside ``path`` belongs to a former file."""
    if not is_leftover(path):
        return
    name = log_path(path).name
    if identity_of(path) is None:
        raise StoreReplaced(
            f"{path} is gone: it was removed or moved away while it was in use. Put it back; or, to begin with an "
            f"empty one, stop every process that uses it and remove {name}"
        )
    raise StoreReplaced(
        f"{path} was replaced while it was in use, and {name} belongs to the file before: stop every process that uses "
        f"it. If {name} stays, one was killed: move it beside the file before, if you have that, or remove it"
    )


@contextmanager
def alone(path: Path) -> Generator[None]:
    """Hold the lock under which a file is opened; the log is noted afterwards.

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
        yield
        _note(path)
    finally:
        lock.release()


def forget_log(path: Path) -> None:
    """Remove the note once the log is gone; to be called after a file was closed. Never raises.

    So is the empty log of a file that was replaced: all that was in it is in its own file.
    """
    folder = presence_folder(path)
    with suppress(OSError, Timeout):  # whoever opens the file now notes it anew; and no more than a note is lost
        if not folder.exists():
            return
        with FileLock(folder / _LOCK, timeout=0, thread_local=False, is_singleton=False):
            beside = log_path(path)
            if identity_of(path) is not None and is_leftover(path) and not beside.stat().st_size:
                # Its index, too: a process that still has the file before open would share it with those to come.
                path.with_name(path.name + "-shm").unlink(missing_ok=True)
                beside.unlink()
            if identity_of(beside) is None:
                _note_path(path).unlink(missing_ok=True)


def _note(path: Path) -> None:
    there, beside = identity_of(path), identity_of(log_path(path))
    if there is not None and beside is not None and _noted(path) != (there, beside):
        _note_path(path).write_text(" ".join(map(str, (*there, *beside))), encoding="ascii")


def _noted(path: Path) -> tuple[Identity, Identity] | None:
    try:
        device, number, log_device, log_number = map(int, _note_path(path).read_text(encoding="ascii").split())
    except (OSError, ValueError):  # none yet; or written by halves when the machine failed
        return None
    return (device, number), (log_device, log_number)


def _note_path(path: Path) -> Path:
    return presence_folder(path) / _NAME

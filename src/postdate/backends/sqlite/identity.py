"""Which file is at a path, and what another one, that was there before, has left beside it.

Whoever replaces the file (a backup that is put back, ``mv``) leaves the log of the old one in place, and SQLite takes
it for the log of the new one: what was put back is overwritten, or damaged. So it is written down which log belongs to
which file, and a log that belongs to another file is put aside before the file is opened. Source: ADR 0019.

A file is known by its number, and a file system gives the number of a file that was removed to the next one that is
made (``rm``, then ``cp``). So while there is a log, its file has a second name beside the note: its number is taken.
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
"""Device and number of a file: another one at the same path has another identity."""

_LOCK: Final = "opening.lock"
_OPENING_SECONDS: Final = 10.0
_NAME: Final = "log-of"
_PINNED: Final = "file-of-log"


def identity_of(path: Path) -> Identity | None:
    """Return which file is at ``path``; ``None``: none, or nobody may look."""
    try:
        found = os.stat(path)  # noqa: PTH116 - once for every transaction
    except OSError:
        return None
    return found.st_dev, found.st_ino


def log_path(path: Path) -> Path:
    """Return where SQLite keeps the log of the file at ``path``."""
    return path.with_name(path.name + "-wal")


def is_leftover(path: Path) -> bool:
    """Return whether the log at ``path`` belongs to another file, that was there before."""
    there, beside = identity_of(path), identity_of(log_path(path))
    if there is None or beside is None:
        return False
    noted = _noted(path)
    # A copy of file and log together has new numbers for both, and belongs together.
    return noted is not None and noted[1] == beside and noted[0] != there


def refuse_leftover(path: Path) -> None:
    """Refuse to read a file with the log of another one.

    Raises:
        StoreUnreachable: until a process that writes has put the log aside.
    """
    if is_leftover(path):
        raise StoreUnreachable(
            f"{path} was replaced while it was in use, and {log_path(path).name} belongs to the file before: "
            f"any process of Postdate that writes (`postdate setup`) puts that aside"
        )


@contextmanager
def alone(path: Path) -> Generator[None]:
    """Open the file at ``path`` in here: what another one has left is put aside, and the log is noted afterwards.

    Raises:
        StoreUnreachable: another process has been opening it for too long.
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
    # First the index, then the log: as long as the log is there nobody opens the file to read, and whoever did so with
    # the index of the old log would share it with all connections of its process.
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
    """Forget whose the log was, where there is none any more; to be called after a file was closed. Never raises.

    A number that nobody keeps may be that of any file soon, and a file that is removed then gives its room back.
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

"""The one place where errors of SQLite become errors of Postdate."""

from __future__ import annotations

import sqlite3
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from postdate.errors import (
    NotADatabase,
    PostdateError,
    StoreError,
    StoreFull,
    StoreNotSetUp,
    StoreNotWritable,
    StoreTroubled,
)

if TYPE_CHECKING:
    from collections.abc import Generator

_PRIMARY_CODE = 0xFF
_ABOUT_WHAT_WAS_ASKED = frozenset(
    {
        0,  # the driver itself
        sqlite3.SQLITE_ERROR,
        sqlite3.SQLITE_TOOBIG,
        sqlite3.SQLITE_CONSTRAINT,
        sqlite3.SQLITE_MISMATCH,
        sqlite3.SQLITE_MISUSE,
        sqlite3.SQLITE_RANGE,
    }
)
"""Everything else SQLite says of itself: locked, out of memory, a failing disk, interrupted."""


def is_busy(error: sqlite3.Error) -> bool:
    return _code(error) in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}


def _code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", 0) & _PRIMARY_CODE


def translate(error: sqlite3.Error, path: Path) -> PostdateError:
    said = str(error)
    if "no such table" in said or "no such column" in said:
        return StoreNotSetUp(f"{path} lacks tables of Postdate ({said}); run `postdate setup`")
    return _by_code(_code(error), said, path)


def damaged(path: Path, said: str) -> NotADatabase:
    return NotADatabase(
        f"{path} is no SQLite database or is damaged ({' '.join(said.split())}); it was left as it is. Name another "
        f"file, put a backup in its place, or take out what can be read: "
        f"sqlite3 '{path}' .recover | sqlite3 recovered.db"
    )


def _by_code(code: int, said: str, path: Path) -> PostdateError:
    if code == sqlite3.SQLITE_FULL:
        return StoreFull(f"{path}: the disk or the database is full ({said}); nothing was written; make room and go on")
    if code in {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM}:
        return StoreNotWritable(f"{path} may not be written ({said}); check the owner and mode of the file and folder")
    if code == sqlite3.SQLITE_CANTOPEN:
        return StoreNotWritable(
            f"{path} cannot be opened or created ({said}); check that the folder {path.parent} exists and is writable"
        )
    if code in {sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT}:
        return damaged(path, said)
    return (StoreError if code in _ABOUT_WHAT_WAS_ASKED else StoreTroubled)(f"{path}: {said}")


@contextmanager
def translated(path: Path) -> Generator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise translate(error, path) from error

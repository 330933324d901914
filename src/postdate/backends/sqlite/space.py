"""Giving free pages of the file back to the disk, little by little.

SQLite reuses free pages at no cost, so they are given back only when many have been free for a while: the size of a
busy file does not go up and down.

Files made before this version cannot shrink (SQLite keeps in the file whether it can); ``VACUUM`` would rewrite them
while nobody else has them open.
"""

from __future__ import annotations

import sqlite3
from collections import deque
from typing import Final

from postdate.backends.sqlite.transaction import Transaction

ROUNDS_AT_REST: Final = 10
"""Looks, one a second, in all of which the pages must have been free."""

_LEAST_BYTES: Final = 8 * 1024 * 1024
_PAGES_AT_ONCE: Final = 500
"""Pages given back in one transaction (2 MB): some 10 ms."""

_INCREMENTAL: Final = 2


class RoomToGiveBack:
    """Decides how many pages are given back; pure."""

    def __init__(self) -> None:
        self._free: deque[int] = deque(maxlen=ROUNDS_AT_REST)

    def look(self, free: int, pages: int, page_bytes: int) -> int:
        """Return how many pages to give back, of ``free`` ones in a file of ``pages``."""
        self._free.append(free)
        at_rest = min(self._free)
        enough = max(pages // 4, _LEAST_BYTES // page_bytes)
        return at_rest if len(self._free) == ROUNDS_AT_REST and at_rest > enough else 0


def shape(connection: sqlite3.Connection) -> tuple[int, int, int] | None:
    """Return free pages, all pages, and bytes of a page; ``None``: this file cannot shrink."""
    if _pragma(connection, "auto_vacuum") != _INCREMENTAL:
        return None
    return _pragma(connection, "freelist_count"), _pragma(connection, "page_count"), _pragma(connection, "page_size")


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    value: int = connection.execute(f"PRAGMA {name}").fetchone()[0]
    return value


def give_back(tx: Transaction, pages: int) -> int:
    """Give up to ``pages`` pages back, within the bound of one transaction; return how many are left."""
    share = min(pages, _PAGES_AT_ONCE)
    for _ in range(share):
        # SQLite gives back one page a step, and Python takes only one step of a statement without columns.
        tx.execute("PRAGMA incremental_vacuum(1)")
    return pages - share

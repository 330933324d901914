"""Giving room on the disk back that the file no longer needs, little by little.

Pages that messages leave are used again by the next ones, which costs nothing; so room is given back only when much of
it has been free for a while: a file that is busy does not breathe in and out.

Files that were created before this version cannot be made smaller so (SQLite keeps in the file itself whether it can):
they stay as they are, and use their free pages again. ``VACUUM`` would rewrite them, while nobody else has them open.
"""

from __future__ import annotations

import sqlite3
from collections import deque
from typing import Final

from postdate.backends.sqlite.transaction import Transaction

ROUNDS_AT_REST: Final = 10
"""Looks at the file, one a second, in all of which the pages must have been free."""

_LEAST_BYTES: Final = 8 * 1024 * 1024
_PAGES_AT_ONCE: Final = 500
"""Pages given back in one transaction (2 MB): some 10 ms."""

_INCREMENTAL: Final = 2


class RoomToGiveBack:
    """Decides how much of the file is given back; pure."""

    def __init__(self) -> None:
        self._free: deque[int] = deque(maxlen=ROUNDS_AT_REST)

    def look(self, free: int, pages: int, page_bytes: int) -> int:
        """Return how many pages are to be given back.

        Args:
            free: pages without content.
            pages: of the whole file.
            page_bytes: size of one.
        """
        self._free.append(free)
        at_rest = min(self._free)
        enough = max(pages // 4, _LEAST_BYTES // page_bytes)
        return at_rest if len(self._free) == ROUNDS_AT_REST and at_rest > enough else 0


def shape(connection: sqlite3.Connection) -> tuple[int, int, int] | None:
    """Return free pages, all pages, and bytes of one; ``None``: this file cannot be made smaller."""
    if _pragma(connection, "auto_vacuum") != _INCREMENTAL:
        return None
    return _pragma(connection, "freelist_count"), _pragma(connection, "page_count"), _pragma(connection, "page_size")


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    value: int = connection.execute(f"PRAGMA {name}").fetchone()[0]
    return value


def give_back(tx: Transaction, pages: int) -> int:
    """Give up to ``pages`` pages back, but no more than one transaction should; return how many are left to do."""
    share = min(pages, _PAGES_AT_ONCE)
    for _ in range(share):
        # SQLite gives back a page with each step of the statement, and of one without columns Python takes one step.
        tx.execute("PRAGMA incremental_vacuum(1)")
    return pages - share

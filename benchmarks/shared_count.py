"""A count that processes of a benchmark share. Imports nothing of Postdate: any version of it can be measured."""

from __future__ import annotations

import mmap
from contextlib import AbstractContextManager
from pathlib import Path

_BYTES = 8


class SharedCount(AbstractContextManager["SharedCount"]):
    """A whole number in a memory-mapped file, which is created if missing: one process writes it, others read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.exists():
            path.write_bytes(bytes(_BYTES))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _BYTES)
        self._number = memoryview(self._map).cast("q")

    def __exit__(self, *_error: object) -> None:
        self._number.release()
        self._map.close()

    @property
    def value(self) -> int:
        return self._number[0]

    def add(self, count: int) -> None:
        """Add to the number; only one process may write."""
        self._number[0] += count

"""A count that one process writes and others read."""

from __future__ import annotations

import mmap
from pathlib import Path
from types import TracebackType
from typing import Self

_BYTES = 8


class SharedCount:
    """A whole number in a memory-mapped file, which is created if it does not exist."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.exists():
            path.write_bytes(bytes(_BYTES))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _BYTES)
        self._number = memoryview(self._map).cast("q")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._number.release()
        self._map.close()

    @property
    def value(self) -> int:
        return self._number[0]

    def add(self, count: int) -> None:
        """Add to the number; only one process may write."""
        self._number[0] += count

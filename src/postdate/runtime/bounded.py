"""A dictionary with a bounded number of entries."""

from __future__ import annotations

from typing import TypeVar

from typing_extensions import override

K = TypeVar("K")
V = TypeVar("V")


class Bounded(dict[K, V]):
    """A dictionary that keeps at most ``limit`` entries. It drops the entry that was set longest ago first."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    @override
    def __setitem__(self, key: K, value: V, /) -> None:
        # A dictionary keeps the place of a key that is set again. So remove the key first: it becomes the newest.
        self.pop(key, None)
        super().__setitem__(key, value)
        if len(self) > self._limit:
            del self[next(iter(self))]

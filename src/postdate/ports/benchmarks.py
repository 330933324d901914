"""What ``postdate bench`` needs of a server that it measures: room for one run, and the barest ways to work in it.

A backend that can be measured refers to such a class as its ``bench``. It is called with an address and with twelve
hexadecimal digits that name the run, connects at once, and blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol


class BenchRoom(Protocol):
    """Room for one run on a server; everything in it is gone once it is closed."""

    @property
    def address(self) -> str:
        """By which store and queues are opened in this room."""
        ...

    @property
    def endpoint(self) -> tuple[str, int]:
        """Host and port of the server."""
        ...

    def facts(self) -> Mapping[str, str]:
        """Return the version, and the settings that decide how durable and how fast it is."""
        ...

    def insert(self, count: int, body: bytes) -> None:
        """Write bare rows of a body each, in one commit, without us: what storing cannot be quicker than."""
        ...

    def put(self, count: int, body: bytes) -> None:
        """Put bare messages into a queue of the room, in one commit, without us."""
        ...

    def ids(self, queue: str) -> Iterator[str]:
        """Yield the id of every message in a queue of ours."""
        ...

    def take(self, queue: str, limit: int) -> list[str]:
        """Take up to ``limit`` messages off a queue of ours, by the shortest way, and return their ids."""
        ...

    def close(self) -> None:
        """Remove everything in the room and every connection."""
        ...

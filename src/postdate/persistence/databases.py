"""A database as one object, from which everything is made that an endpoint keeps there; for backends. ADR 0021."""

from __future__ import annotations

from collections.abc import Awaitable
from types import TracebackType
from typing import Protocol, Self, TypeVar


class Closing(Protocol):
    """What can be closed."""

    def close(self) -> Awaitable[None]:
        """Release everything; a second time without effect."""
        ...


C = TypeVar("C", bound=Closing)


class DatabaseObject:
    """What every database object does with what is made from it. Close it, or use it as a context manager."""

    def __init__(self) -> None:
        self._made: list[Closing] = []

    def made(self, adapter: C) -> C:
        """Return an adapter that was made from this database, which is closed with it."""
        self._made.append(adapter)
        return adapter

    def serve(self, endpoint: str, concurrency: int, *, stores: bool) -> None:
        """Take note of an endpoint that uses this database: several may; nothing has to be done.

        Args:
            endpoint: its name.
            concurrency: messages that it handles at once.
            stores: its delayed messages wait in the store of this object.
        """

    async def close(self) -> None:
        """Close what was made from this database, and with it the database; a second time without effect."""
        made, self._made = self._made, []
        for adapter in reversed(made):
            await adapter.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

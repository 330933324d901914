"""A database as one object, which makes an endpoint's adapters; for backends. Source: ADR 0021."""

from __future__ import annotations

from collections.abc import Awaitable
from types import TracebackType
from typing import ClassVar, Protocol, Self, TypeVar

from postdate.errors import ConfigurationError


class Closing(Protocol):
    def close(self) -> Awaitable[None]: ...


C = TypeVar("C", bound=Closing)


class DatabaseObject:
    """The adapters of one database. Close it, or use it as a context manager."""

    has_a_table_for_each_endpoint: ClassVar[bool] = False
    """Whether its store serves one endpoint only, as each endpoint has a table of its own."""

    def __init__(self) -> None:
        self._made: list[Closing] = []
        self._stores_for: str | None = None

    def made(self, adapter: C) -> C:
        """Register an adapter to be closed with this database; return it."""
        self._made.append(adapter)
        return adapter

    def serve(self, endpoint: str, concurrency: int, *, stores: bool) -> None:
        """Note an endpoint that uses this database.

        Args:
            endpoint: its name.
            concurrency: messages that it handles at once.
            stores: whether its delayed messages wait in the store of this object.

        Raises:
            ConfigurationError: another endpoint's delayed messages wait in that store, which has a table for each.
        """
        if not stores or not self.has_a_table_for_each_endpoint:
            return
        if self._stores_for not in {None, endpoint}:
            name = type(self).__name__
            raise ConfigurationError(
                f"the delayed messages of endpoint {self._stores_for!r} wait in the store of this {name}, and those "
                f"of {endpoint!r} have another table: give each endpoint a {name} of its own, or say where they wait "
                f"with delayed_delivery=DelayedDelivery(store)"
            )
        self._stores_for = endpoint

    async def close(self) -> None:
        """Close the adapters, and with the last one the database; a second time without effect."""
        made, self._made = self._made, []
        for adapter in reversed(made):
            await adapter.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

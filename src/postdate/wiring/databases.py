"""Databases that several adapters of one process share: one object for equal addresses. Source: ADR 0021."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from postdate.ports.backends import Adapter, Backend


class SharedDatabase(Protocol):
    """A database object, as used here."""

    def expect(self, concurrency: int) -> None:
        """Open connections for an endpoint that handles so many messages at once."""
        ...


class Databases:
    """The database objects of adapters that are opened together; each is closed with the last adapter made from it."""

    def __init__(self) -> None:
        self._known: list[tuple[Backend, str, Mapping[str, Any], SharedDatabase]] = []

    def of(
        self,
        backend: Backend,
        adapter: Adapter,
        address: str,
        settings: Mapping[str, Any],
        opened: Callable[..., SharedDatabase],
    ) -> SharedDatabase:
        """Return the object for an adapter; ``opened`` makes one of an address and settings.

        Adapters share one when they have the same address and the same settings of the database itself.
        """
        own = adapter.takes if backend.database is None else backend.database.takes & adapter.takes
        if adapter is backend.timeouts:  # their tables are in upstream's schema
            own -= {"schema"}
        for other, place, theirs, database in self._known:
            if (other, place) == (backend, address) and all(theirs.get(each) == settings.get(each) for each in own):
                return database
        given = {name: value for name, value in settings.items() if name in own}
        database = opened(address, **given)
        self._known.append((backend, address, given, database))
        return database

    def expect(self, concurrency: int) -> None:
        for *_, database in self._known:
            database.expect(concurrency)

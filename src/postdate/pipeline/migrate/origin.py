"""Where messages come from, as a value that travels to the executors, and is opened there."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

from postdate.config import Address, resolved
from postdate.migrating.tables import MigrationSource
from postdate.pipeline.stores import absolute
from postdate.wiring.sources import migration_source


@dataclass(frozen=True, slots=True)
class OriginSpec:
    """A timeout manager's storage, as a value: no connection, picklable, no password when shown.

    Args:
        address: as :mod:`postdate.wiring.sources` takes it; or ``env:NAME`` or ``file:PATH``, which is
            followed in each process that opens it. A relative path is made absolute where the value is made.
        schema: of the tables; ``None``: the database's default.
        prefixes: of a timeout manager's tables, by endpoint; ``None``: found by the source.
    """

    address: str
    schema: str | None = None
    prefixes: Mapping[str, str] | None = field(default=None)

    def __post_init__(self) -> None:
        object.__setattr__(self, "address", absolute(self.address))

    def __repr__(self) -> str:
        return f"OriginSpec({self.shown!r}, schema={self.schema!r})"

    @property
    def shown(self) -> str:
        """The address without its password: for logs and reports."""
        return Address(self.address).shown

    @contextmanager
    def opened(self) -> Generator[MigrationSource]:
        """Open it for the length of the block; it connects at first use.

        Raises:
            ConfigurationError: the address leads nowhere here.
        """
        source = migration_source(resolved(self.address, os.environ), schema=self.schema, prefixes=self.prefixes)
        with closing(source):
            yield source

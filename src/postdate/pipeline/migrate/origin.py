"""Where messages come from, as a value that travels to the executors, and what is opened from it there."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import pyarrow as pa

from postdate.config import Address, resolved, without_secrets
from postdate.errors import StoreUnavailable
from postdate.migrating.dialect import HiddenColumns
from postdate.migrating.tables import MigrationSource
from postdate.pipeline.rows import to_columns
from postdate.pipeline.stores import absolute
from postdate.ports.migrating import MigrationRun
from postdate.wiring.migration_sources import hidden_columns, migration_source, store_source


@dataclass(frozen=True, slots=True)
class OriginSpec:
    """Which timeout manager's storage, or which store, as a value: no connection, picklable, no password when shown.

    Args:
        address: as :mod:`postdate.wiring.migration_sources` takes it; or ``env:NAME`` or ``file:PATH``, which is
            followed in each process that opens it. A relative path is made absolute where the value is made.
        schema: of the tables; ``None``: the default of what is there.
        prefixes: of a timeout manager's tables, by endpoint; ``None``: found by the source.
        is_store: a Postdate store is there, and not a timeout manager's tables.
    """

    address: str
    schema: str | None = None
    prefixes: Mapping[str, str] | None = field(default=None)
    is_store: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "address", absolute(self.address))

    def __repr__(self) -> str:
        return f"OriginSpec({self.shown!r}, schema={self.schema!r})"

    @property
    def shown(self) -> str:
        """The address without its password: for logs and reports."""
        return Address(self.address).shown

    @contextmanager
    def opened(self) -> Generator[Origin]:
        """Open it for the length of the block; it connects at first use.

        Raises:
            ConfigurationError: the address leads nowhere here.
        """
        place = resolved(self.address, os.environ)
        with ExitStack() as stack:
            if self.is_store:
                store = store_source(place, schema=self.schema)
                stack.callback(store.close)
                yield Origin(store)
                return
            source = migration_source(place, schema=self.schema, prefixes=self.prefixes)
            stack.callback(source.close)
            columns = hidden_columns(place, source)
            if columns is not None:
                stack.callback(columns.close)
            yield Origin(source, columns)


@dataclass(frozen=True, slots=True)
class Origin:
    """An open source.

    Args:
        source: where messages wait.
        columns: gives the messages of a batch as they are, without making each a Python object, where that can be.
    """

    source: MigrationSource
    columns: HiddenColumns | None = None

    def read(self, run: MigrationRun, number: int) -> pa.RecordBatch:
        """Return the messages of a batch, with :data:`postdate.pipeline.rows.MESSAGE_COLUMNS`; some may be missing.

        Raises:
            MessageError: one is no message.
            StoreError: the source failed.
        """
        try:
            found = None if self.columns is None else self.columns.read(run.run_id, number)
        except StoreUnavailable as error:
            raise StoreUnavailable(without_secrets(str(error))) from error
        return to_columns(self.source.read(run, number)) if found is None else found

"""Both ends of a migration, open in one task or on the driver: a timeout manager's storage, and the target."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# Arrow's stubs make arrays generic in a type that only the running program knows.

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

import pyarrow as pa

from postdate.clock import from_microseconds
from postdate.config import Address, resolved
from postdate.errors import NotSupported
from postdate.messages import DelayedMessage
from postdate.migrating.tables import MigrationSource
from postdate.pipeline.rows import MESSAGE_COLUMNS, to_columns
from postdate.pipeline.stores import PAGE_ROWS, OpenStore, StoreSpec, absolute, opened_as
from postdate.ports import AdministrableStore, Record, RecordKind, Scan, ScanFilter, ScannableStore, ScanPart
from postdate.ports.migrating import MOVED_AWAY
from postdate.ports.scanning import ARCHIVED
from postdate.wiring.sources import migration_source

# --- where messages come from -----------------------------------------------------------------------------------------


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


# --- where they go ----------------------------------------------------------------------------------------------------


_FEW: Final = 50
"""Up to this number, messages are looked up one by one, by index; more of them in one scan."""

_RECORD: Final = ("message_id", "kind", "due", "destination", "detail")


@dataclass(frozen=True, slots=True)
class Recorded:
    """One record of a message; ``archived`` stands for all records of an archived message."""

    message_id: str
    kind: RecordKind
    due: datetime | None
    destination: str | None
    archived: bool
    is_moved_away: bool

    @classmethod
    def of(
        cls, message_id: str, kind: int, due: datetime | None, destination: str | None, detail: str | None
    ) -> Recorded:
        is_moved_away = (detail or "").startswith(MOVED_AWAY)
        return cls(message_id, RecordKind(kind), due, destination, detail == ARCHIVED, is_moved_away)


class TargetStore(OpenStore):
    def waiting(self, ids: Sequence[str]) -> pa.Table:
        """Return those of the messages that wait, with :data:`MESSAGE_COLUMNS`, in any order."""
        store = self.itself
        if isinstance(store, ScannableStore) and len(ids) > _FEW:
            where = ScanFilter(message_ids=tuple(ids))
            batches = [batch for part in self.parts(1) for batch in self.part(part, where)]
            return pa.Table.from_batches(batches, MESSAGE_COLUMNS)
        return pa.Table.from_batches([to_columns(self._portal.call(_pending, _administrable(store), ids))])

    def parts(self, count: int) -> list[ScanPart]:
        """Return at most ``count`` parts that cover all waiting messages; none where a store cannot be scanned."""
        store = self.itself
        return list(store.scan_parts("pending", count)) if isinstance(store, ScannableStore) else []

    def part(self, part: ScanPart, where: ScanFilter) -> Iterable[pa.RecordBatch]:
        """Yield the waiting messages of one part, with :data:`MESSAGE_COLUMNS`."""
        return self.scan(Scan("pending", tuple(MESSAGE_COLUMNS.names), where), part, MESSAGE_COLUMNS)

    def known(self, ids: Sequence[str]) -> set[str]:
        """Return the ids that were ever stored, whatever has become of the messages."""
        return {record.message_id for record in self.recorded(ids) if record.kind is RecordKind.SCHEDULED}

    def recorded(self, ids: Sequence[str]) -> list[Recorded]:
        """Return the records of the messages, in any order."""
        store = self.itself
        if isinstance(store, ScannableStore) and len(ids) > _FEW:
            return list(_records(store, ids))
        return [
            Recorded.of(each.message_id, each.kind, each.due, each.destination, each.detail)
            for each in self._portal.call(_histories, _administrable(store), ids)
        ]


@contextmanager
def opened_target(spec: StoreSpec) -> Generator[TargetStore]:
    """Open an existing store for the length of the block.

    Raises StoreError if it is missing or unreachable, and NotSupported if it is no :class:`AdministrableStore`.
    """
    with opened_as(TargetStore, spec) as store:
        if not isinstance(store.itself, AdministrableStore):
            raise NotSupported(
                f"the store {spec.shown!r} does not show what is in it, and a migration looks there for what it has "
                f"moved: name another store, or let this one be an AdministrableStore"
            )
        yield store


def _administrable(store: object) -> AdministrableStore:
    assert isinstance(store, AdministrableStore)  # or it was not opened
    return store


async def _pending(store: AdministrableStore, ids: Sequence[str]) -> list[DelayedMessage]:
    return [message for message in [await store.get(each) for each in ids] if message is not None]


async def _histories(store: AdministrableStore, ids: Sequence[str]) -> list[Record]:
    return [record for each in ids for record in await store.history(each)]


def _records(store: ScannableStore, ids: Sequence[str]) -> Iterable[Recorded]:
    scan = Scan("records", _RECORD, ScanFilter(message_ids=tuple(ids)))
    for part in store.scan_parts("records", 1):
        for page in store.scan(scan, part, PAGE_ROWS):
            for message_id, kind, due, destination, detail in page:
                at = None if due is None else from_microseconds(due)
                yield Recorded.of(message_id, kind, at, destination, detail)

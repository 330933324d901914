"""Both ends of a migration, open in one task or on the driver: the storage of a timeout manager, and the target."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from postdate.backends.sql.timeouts_migration.tables import MigrationSource
from postdate.clock import from_microseconds
from postdate.config import Address
from postdate.errors import NotSupported
from postdate.messages import DelayedMessage
from postdate.pipeline.rows import LEDGER_ARROW, MESSAGE_COLUMNS, messages_of
from postdate.pipeline.stores import PAGE_ROWS, OpenStore, StoreSpec, open_in_task, open_spec
from postdate.ports import AdministrableStore, Record, RecordKind, Scan, ScanFilter, ScannableStore
from postdate.wiring import absolute_address_of
from postdate.wiring.sources import migration_source

# --- where messages come from -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OriginSpec:
    """The storage of a timeout manager, as a value: no connection, picklable, without its password when shown.

    Args:
        address: as :mod:`postdate.wiring.sources` takes it; or ``env:NAME`` or ``file:PATH``, which is
            followed in each process that opens it. A relative path is made absolute where the value is made.
        schema: schema of the tables; ``None``: the default of the database.
        prefixes: prefixes of the tables, by endpoint; ``None``: the source finds them.
    """

    address: str
    schema: str | None = None
    prefixes: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "address", absolute_address_of(self.address))

    def __repr__(self) -> str:
        return f"OriginSpec({self.redacted_address!r}, schema={self.schema!r})"

    @property
    def redacted_address(self) -> str:
        """The address without its password: for logs and reports."""
        return Address(self.address).redacted_text

    def open(self) -> AbstractContextManager[MigrationSource]:
        """Open the storage for the length of the block. It connects at first use.

        Raises:
            ConfigurationError: the address cannot be used on this machine.
        """
        return closing(migration_source(self.address, schema=self.schema, prefixes=self.prefixes))


# --- where they go ----------------------------------------------------------------------------------------------------


_MOST_LOOKUPS: Final = 50
"""Up to this number, messages are looked up one by one, by index. A larger number is looked up in one scan."""


class TargetStore(OpenStore):
    def read_pending(self, ids: Sequence[str]) -> list[DelayedMessage]:
        """Return the pending messages among these, in any order."""
        store = self.store
        if not isinstance(store, ScannableStore) or len(ids) <= _MOST_LOOKUPS:
            return self.portal.call(_read_pending, store, ids)
        scan = Scan("pending", tuple(MESSAGE_COLUMNS.names), ScanFilter(message_ids=tuple(ids)))
        parts = store.scan_parts("pending", 1)
        return [
            each for part in parts for batch in self.scan(scan, part, MESSAGE_COLUMNS) for each in messages_of(batch)
        ]

    def find_stored_ids(self, ids: Sequence[str]) -> set[str]:
        """Return the ids that were ever stored, whatever their outcome."""
        return {record.message_id for record in self.read_records(ids) if record.kind is RecordKind.SCHEDULED}

    def read_records(self, ids: Sequence[str]) -> list[Record]:
        """Return the records of the messages, in any order."""
        store = self.store
        if not isinstance(store, ScannableStore) or len(ids) <= _MOST_LOOKUPS:
            return self.portal.call(_read_histories, store, ids)
        scan = Scan("records", tuple(LEDGER_ARROW.names), ScanFilter(message_ids=tuple(ids)))
        parts = store.scan_parts("records", 1)
        return [_record(row) for part in parts for page in store.scan(scan, part, PAGE_ROWS) for row in page]


@contextmanager
def open_target(spec: StoreSpec, *, in_task: bool = False) -> Generator[TargetStore]:
    """Open an existing store for the length of the block. In a task, an outage is waited for.

    Raises StoreError if it is missing or unreachable, and NotSupported if it is no :class:`AdministrableStore`.
    """
    opening = open_in_task if in_task else open_spec
    with opening(spec) as store:
        if not isinstance(store.store, AdministrableStore):
            raise NotSupported(
                f"the store {spec.redacted_address!r} does not show what is in it, and a migration looks there for "
                f"what it has "
                f"moved: name another store, or let this one be an AdministrableStore"
            )
        yield TargetStore(store.store, store.portal, spec.patience if in_task else timedelta(0))


async def _read_pending(store: Any, ids: Sequence[str]) -> list[DelayedMessage]:
    return [message for message in [await store.get(each) for each in ids] if message is not None]


async def _read_histories(store: Any, ids: Sequence[str]) -> list[Record]:
    return [record for each in ids for record in await store.history(each)]


def _record(row: tuple[Any, ...]) -> Record:
    kind, message_id, at, due, destination, detail = row
    was_due = None if due is None else from_microseconds(due)
    return Record(RecordKind(kind), message_id, from_microseconds(at), was_due, destination, detail or "")

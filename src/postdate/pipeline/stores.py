"""How a Spark job reaches a store: a value that travels to the executors, and a store opened from it in each task."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final, TypeVar

import pyarrow as pa
from anyio.from_thread import BlockingPortal, start_blocking_portal

from postdate.backends.registry import place_of
from postdate.config import Address, Settings, resolved
from postdate.errors import PipelineError
from postdate.messages import DelayedMessage
from postdate.pipeline.columns import from_columns, to_batch
from postdate.pipeline.rows import restored
from postdate.ports import (
    AdministrableStore,
    ClaimingStore,
    Recording,
    Scan,
    ScannableStore,
    ScanPart,
    StoreReport,
    TransactionMode,
)
from postdate.ports.backends import Place
from postdate.wiring import open_store, store_settings, taken_by_store

T = TypeVar("T")

_COLUMNS_AT_ONCE = 20_000
PAGE_ROWS = 5_000
"""Rows fetched and turned into one Arrow batch at a time, where a store has no columns."""

_OF_MANY: Final = ("synchronous", "schema", "table", "recording", "largest_message_bytes")
"""The settings of stores that are fields of :class:`StoreSpec`."""

_RELATIVE_FILE = re.compile(r"([a-z]+:///)([^/].*)", re.DOTALL)


def absolute(address: str) -> str:
    """Return an address whose file, if it is one, is named by an absolute path: executors run in other directories."""
    relative = _RELATIVE_FILE.fullmatch(address)
    return relative[1] + str(Path(relative[2]).expanduser().resolve()) if relative else address


@dataclass(frozen=True, slots=True)
class StoreSpec:
    """Which store, as a value: no connection, picklable, without its password when shown.

    A password in ``address`` travels with the value. To keep it out, name where it is: ``env:NAME`` and ``file:PATH``
    are followed in each process that opens the store, so the variable or the file must be there on every executor.

    Args:
        address: as :func:`postdate.wiring.open_store` takes it, for example ``sqlite:///messages.db``. A relative path
            is made absolute where the spec is made: executors may run in another directory.
        synchronous: ``full`` or ``normal``. This and the following: of the store, where it has such a setting.
        schema: of its tables; ``None``: the store's default.
        table: of the waiting messages; ``None``: ``{endpoint}.timeouts``.
        endpoint: whose messages they are.
        recording: how much is kept for audits.
        largest_message_bytes: headers and body together; ``None``: the store's default.
        others: settings that only some stores have, by name, in pairs.
    """

    address: str
    synchronous: str = "full"
    schema: str | None = None
    table: str | None = None
    endpoint: str = "postdate"
    recording: str = Recording.ALL.value
    largest_message_bytes: int | None = None
    others: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "address", absolute(self.address))
        if place_of(Address(self.address).scheme) is Place.MEMORY:
            raise PipelineError(f"the store {self.address!r} lives in one process; executors need one that is shared")

    @classmethod
    def of(cls, settings: Settings) -> StoreSpec:
        """Return the store of the settings; an address that was read from elsewhere stays a reference.

        Raises:
            ConfigurationError: something was set that this store does not have.
        """
        own = dict(settings.store.values)
        address = own.pop("address")
        known = {name: own.pop(name) for name in _OF_MANY}
        known["recording"] = known["recording"].value
        taken = store_settings(settings)
        others = tuple((name, value) for name, value in own.items() if name in taken)
        return cls(address.reference or str(address), endpoint=settings.endpoint.name, others=others, **known)

    def __repr__(self) -> str:
        return f"StoreSpec({self.shown!r}, synchronous={self.synchronous!r})"

    @property
    def shown(self) -> str:
        """The address without its password: for logs and reports."""
        return Address(self.address).shown

    def open(self, *, create: bool) -> ClaimingStore:
        """Return the store; it connects at first use.

        Raises:
            ConfigurationError: a reference leads nowhere here, or the driver is not installed here.
        """
        place = resolved(self.address, os.environ)
        known = {**dict(self.others), **{name: getattr(self, name) for name in _OF_MANY}, "create": create}
        return open_store(place, **taken_by_store(place, known))


class OpenStore:
    """A store that one task, or the driver, has open; its async calls are made from a thread without an event loop.

    A call through the portal costs some 80 µs, so calls are made once a batch and never once a message.
    """

    def __init__(self, store: ClaimingStore, portal: BlockingPortal) -> None:
        self._store = store
        self._portal = portal
        self._columnar = store if isinstance(store, ScannableStore) and store.gives_columns else None

    @property
    def itself(self) -> ClaimingStore:
        """The store."""
        return self._store

    def ask(self, question: Callable[[Any], Awaitable[T]]) -> T:
        """Return the answer to a question, which is called with the store, in its event loop."""
        return self._portal.call(question, self._store)

    @property
    def largest_message_bytes(self) -> int:
        """Headers and body together; see :class:`postdate.ports.StoreCapabilities`."""
        return self._store.capabilities.largest_message_bytes

    @property
    def good_batch(self) -> int:
        """How many messages in one transaction it takes fastest without keeping others waiting for long."""
        return PAGE_ROWS if self._columnar is None else _COLUMNS_AT_ONCE

    def setup(self) -> None:
        """Create what is missing."""
        self._portal.call(self._store.setup)

    def store_many(self, messages: Sequence[DelayedMessage], now: datetime) -> StoreReport:
        """See :meth:`postdate.ports.ClaimingStore.store_many`."""
        store: ClaimingStore = self._store
        return self._portal.call(store.store_many, messages, now)

    def store_batch(self, batch: pa.RecordBatch, now: datetime) -> StoreReport:
        """Store a batch of messages in one transaction, idempotent by message id; as columns where the store can.

        Args:
            batch: with the columns of :data:`postdate.pipeline.rows.MESSAGE_COLUMNS`, valid messages: see
                :func:`postdate.pipeline.rows.checked`.
            now: recorded as the time of scheduling.
        """
        if self._columnar is not None:
            return self._columnar.store_columns(batch, now)
        return self.store_many(restored(batch), now)

    def scan(self, scan: Scan, part: ScanPart, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Read one share of the store, from one snapshot; as columns where the store can.

        Args:
            scan: what to read.
            part: the share.
            schema: from :func:`postdate.pipeline.columns.arrow_schema`, with the columns of the scan.

        Raises:
            PipelineError: this store cannot be read in bulk.
        """
        if self._columnar is not None:
            for batch in self._columnar.scan_columns(scan, part):
                yield from_columns(batch, schema)
            return
        for page in self.scannable().scan(scan, part, PAGE_ROWS):
            yield to_batch(page, schema)

    def overdue(self, as_of: datetime) -> int:
        """Return how many messages were due at ``as_of`` and are held by nobody."""
        store = self._store
        return self._portal.call(store.statistics, as_of).overdue if isinstance(store, AdministrableStore) else 0

    def scannable(self) -> ScannableStore:
        """Return the side of the store that pages through everything; its calls block.

        Raises:
            PipelineError: this store cannot be paged through.
        """
        if not isinstance(self._store, ScannableStore):
            raise PipelineError(f"{type(self._store).__name__} cannot be read in bulk")
        return self._store


@contextlib.contextmanager
def opened(spec: StoreSpec, *, create: bool = False) -> Generator[OpenStore]:
    """Open the store for the length of the block. Runs once in each task, and on the driver for set-up and planning.

    Args:
        spec: which store.
        create: create the store when it is missing, for jobs that write.

    Raises:
        StoreError: it is missing, unreachable, or something else.
    """
    with start_blocking_portal() as portal:
        store = spec.open(create=create)
        try:
            portal.call(store.initialize, spec.endpoint, TransactionMode.RECEIVE_ONLY)
            yield OpenStore(store, portal)
        finally:
            portal.call(store.close)

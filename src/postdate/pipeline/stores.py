"""How a Spark job reaches a store: a value that is sent to executors, and a store that each task opens from it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import chain, islice
from typing import Any, Final, TypeVar

import pyarrow as pa
from anyio.from_thread import BlockingPortal, start_blocking_portal

from postdate import ports
from postdate.backends.registry import place_of
from postdate.clock import SystemClock, steady_seconds
from postdate.config import Address, Settings, resolve_address
from postdate.core.health.destinations import LONGEST_SECONDS, SHORTEST_SECONDS
from postdate.errors import PipelineError, PostdateError
from postdate.messages import DelayedMessage
from postdate.pipeline.rows import from_columns, messages_of, to_batch
from postdate.ports.backends import Place
from postdate.runtime.resource import Backoff
from postdate.wiring import absolute_address_of, open_store, settings_of_store, store_settings

T = TypeVar("T")

_COLUMNS_AT_ONCE = 20_000
PAGE_ROWS = 5_000
"""Number of rows fetched and turned into one Arrow batch at a time, for a store that does not return columns."""

PATIENCE: Final = timedelta(seconds=30)
"""How long a task repeats a call that fails with a transient error: longer than the restart of a database takes."""

_FIELD_SETTINGS: Final = ("synchronous", "schema", "table", "recording", "largest_message_bytes")
"""The settings of stores that are fields of :class:`StoreSpec`."""


@dataclass(frozen=True, slots=True)
class StoreSpec:
    """The address and settings of a store, as a value: no connection, picklable, without its password when shown.

    A password in ``address`` is sent with the value. To avoid that, use a reference: ``env:NAME`` and ``file:PATH`` are
    followed in each process that opens the store, so the variable or the file must exist on every executor.

    Args:
        address: as :func:`postdate.wiring.open_store` takes it, for example ``sqlite:///messages.db``. A relative path
            is made absolute where the spec is made, because executors may run in another directory.
        synchronous: ``full`` or ``normal``. This and the following are settings of the store, if it has such a setting.
        schema: schema of the tables; ``None``: the default of the store.
        table: table of the pending messages; ``None``: ``{endpoint}.timeouts``.
        endpoint: the endpoint that the messages belong to.
        recording: how much is recorded for audits.
        largest_message_bytes: limit of headers and body together; ``None``: the default of the store.
        other_settings: settings that only some stores have, as pairs of name and value.
        patience: how long a task repeats a call that fails with a transient error, such as an outage of the store. Then
            the error is raised, and Spark may run the task again.
    """

    address: str
    synchronous: str = "full"
    schema: str | None = None
    table: str | None = None
    endpoint: str = "postdate"
    recording: str = ports.Recording.ALL.value
    largest_message_bytes: int | None = None
    other_settings: tuple[tuple[str, Any], ...] = ()
    patience: timedelta = PATIENCE

    def __post_init__(self) -> None:
        object.__setattr__(self, "address", absolute_address_of(self.address))
        if place_of(Address(self.address).scheme) is Place.MEMORY:
            raise PipelineError(f"the store {self.address!r} lives in one process; executors need one that is shared")

    @classmethod
    def of(cls, settings: Settings) -> StoreSpec:
        """Return the store of the settings. An address that was read from a reference stays a reference.

        Raises:
            ConfigurationError: this store does not have a setting.
        """
        values = dict(settings.store.values)
        address = values.pop("address")
        own_fields = {name: values.pop(name) for name in _FIELD_SETTINGS}
        own_fields["recording"] = own_fields["recording"].value
        names = store_settings(settings)
        more_settings = tuple((name, value) for name, value in values.items() if name in names)
        return cls(
            address.reference or str(address),
            endpoint=settings.endpoint.name,
            other_settings=more_settings,
            **own_fields,
        )

    def __repr__(self) -> str:
        return f"StoreSpec({self.redacted_address!r}, synchronous={self.synchronous!r})"

    @property
    def redacted_address(self) -> str:
        """The address without its password: for logs and reports."""
        return Address(self.address).redacted_text

    def open(self, *, create: bool) -> ports.ClaimingStore:
        """Return the store. It connects at first use.

        Raises:
            ConfigurationError: a reference cannot be followed on this machine, or the driver is not installed here.
        """
        resolved_address = resolve_address(self.address, os.environ)
        arguments = {
            **dict(self.other_settings),
            **{name: getattr(self, name) for name in _FIELD_SETTINGS},
            "create": create,
        }
        return open_store(resolved_address, **settings_of_store(resolved_address, arguments))


class OpenStore:
    """A store that one task, or the driver, has open. Call its methods from a thread without an event loop.

    A call through the portal costs some 80 µs, so calls are made once a batch and never once a message.

    With ``patience``, :meth:`retry` calls the store again for so long while it fails with a transient error.
    """

    def __init__(self, store: ports.ClaimingStore, portal: BlockingPortal, patience: timedelta = timedelta(0)) -> None:
        self.store, self.portal, self.patience = store, portal, patience
        self._columnar = store if isinstance(store, ports.ScannableStore) and store.has_columns else None

    def call(self, function: Callable[[Any], Awaitable[T]]) -> T:
        """Call ``function`` with the store, in the event loop of the store, and return the answer."""
        return self.portal.call(function, self.store)

    @property
    def largest_message_bytes(self) -> int:
        """Limit of headers and body together; see :class:`postdate.ports.StoreCapabilities`."""
        return self.store.capabilities.largest_message_bytes

    @property
    def rows_at_once(self) -> int:
        """Number of messages in one transaction: fast for the store, and other clients do not wait long."""
        return PAGE_ROWS if self._columnar is None else _COLUMNS_AT_ONCE

    def setup(self) -> None:
        self.portal.call(self.store.setup)

    def store_many(self, messages: Sequence[DelayedMessage], now: datetime) -> ports.StoreReport:
        return self.portal.call(self.store.store_many, messages, now)

    def store_batch(self, batch: pa.RecordBatch, now: datetime) -> ports.StoreReport:
        """Store valid messages in one transaction, idempotent by message id.

        Columns are used if the store accepts them. ``batch`` comes from :func:`postdate.pipeline.rows.checked`. If the
        answer to a committed transaction was lost, its messages are reported as duplicates by the next attempt.
        """
        if self._columnar is None:
            messages = messages_of(batch)
            return self.retry(lambda: self.store_many(messages, now))
        columnar = self._columnar
        return self.retry(lambda: columnar.store_columns(batch, now))

    def scan(self, scan: ports.Scan, part: ports.ScanPart, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Read the columns of ``schema`` in one part, from one snapshot. Columns are used if the store returns them."""
        columnar = self._columnar
        if columnar is not None:
            for batch in self._retry_start(lambda: columnar.scan_columns(scan, part)):
                yield from_columns(batch, schema)
            return
        for page in self.scan_pages(scan, part):
            yield to_batch(page, schema)

    def scan_pages(self, scan: ports.Scan, part: ports.ScanPart) -> Iterator[list[tuple[Any, ...]]]:
        """Read one part as rows of plain values."""
        scannable = self.require_scannable()
        return self._retry_start(lambda: scannable.scan(scan, part, PAGE_ROWS))

    def retry(self, call: Callable[[], T]) -> T:
        """Return the result of a call. While it fails with a transient error, repeat it for as long as the patience.

        A repeated call must have the same effect as one. Afterwards the last error is raised.
        """
        return retry_call(call, self.patience)

    def _retry_start(self, scan: Callable[[], Iterable[T]]) -> Iterator[T]:
        """Start a scan, patiently. Later errors are raised at once, because Spark has the first rows already."""

        def start() -> Iterator[T]:
            pages = iter(scan())
            return chain(list(islice(pages, 1)), pages)

        return self.retry(start)

    def count_overdue(self, as_of: datetime) -> int:
        """Return how many messages were due at ``as_of`` and are not claimed."""
        store = self.store
        return self.portal.call(store.statistics, as_of).overdue if isinstance(store, ports.AdministrableStore) else 0

    def read_clock(self) -> datetime:
        """Return the UTC time by the clock that decides what is due: the store's, or else that of this machine."""
        store = self.store
        return self.portal.call(store.server_now) if store.capabilities.has_clock else SystemClock().now()

    def require_scannable(self) -> ports.ScannableStore:
        """Return the store for bulk reading, with blocking calls. Raise PipelineError if it cannot be read in bulk."""
        if not isinstance(self.store, ports.ScannableStore):
            raise PipelineError(f"{type(self.store).__name__} cannot be read in bulk")
        return self.store


@contextlib.contextmanager
def open_spec(spec: StoreSpec, *, create: bool = False, connect: bool = True) -> Generator[OpenStore]:
    """Open the store for the length of the block, on the driver: for setup, planning and single questions.

    An error is raised at once, because a user may wait for it. With ``create``, a missing store is created; otherwise
    StoreError is raised. Without ``connect``, the store only tells what it can do.
    """
    with _open_with_patience(spec, timedelta(0), create=create, connect=connect) as store:
        yield store


@contextlib.contextmanager
def open_in_task(spec: StoreSpec, *, create: bool = False) -> Generator[OpenStore]:
    """Open the store for the length of the block, in a task: an outage is waited for, as long as ``spec.patience``.

    Calls that are repeated: opening the store, storing a batch, which is idempotent by message id, and the start of a
    scan. A scan that breaks later fails the task, because its first rows are with Spark already. When Spark runs the
    task again, its scan waits at the start.
    """
    with _open_with_patience(spec, spec.patience, create=create) as store:
        yield store


@contextlib.contextmanager
def _open_with_patience(
    spec: StoreSpec, patience: timedelta, *, create: bool = False, connect: bool = True
) -> Generator[OpenStore]:
    with start_blocking_portal() as portal:

        def open_once() -> ports.ClaimingStore:
            store = spec.open(create=create)
            try:
                if connect:
                    portal.call(store.initialize, spec.endpoint, ports.TransactionMode.RECEIVE_ONLY)
            except BaseException:
                portal.call(store.close)
                raise
            return store

        store = retry_call(open_once, patience)
        try:
            yield OpenStore(store, portal, patience)
        finally:
            portal.call(store.close)


def retry_call(call: Callable[[], T], patience: timedelta) -> T:
    """Return the result of a call. While it fails with a transient error, repeat it for at most ``patience``."""
    backoff, pause = Backoff(SHORTEST_SECONDS, LONGEST_SECONDS), threading.Event()
    deadline = steady_seconds() + patience.total_seconds()
    while True:
        try:
            return call()
        except PostdateError as error:
            seconds = steady_seconds()
            if not error.transient or seconds >= deadline:
                raise
            backoff.report_failure(seconds)
            pause.wait(min(backoff.remaining(seconds), deadline - seconds))

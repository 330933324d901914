"""How a Spark job reaches a store: a value that travels to the executors, and a store opened from it in each task."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from anyio.from_thread import BlockingPortal, start_blocking_portal

from postdate.errors import PipelineError
from postdate.messages import DelayedMessage
from postdate.ports import ClaimingStore, ScannableStore, SetsUp, StoreReport
from postdate.wiring import BuiltInStore, open_store

_RELATIVE_FILE = re.compile(r"([a-z]+:///)([^/].*)", re.DOTALL)
_PASSWORD = re.compile(r"(?<=:)[^:@/]+(?=@)")


@dataclass(frozen=True, slots=True)
class StoreSpec:
    """Which store, as a value: no connection, picklable, without its password when shown.

    Args:
        address: as :func:`postdate.wiring.open_store` takes it, for example ``sqlite:///messages.db``. A relative path
            is made absolute where the spec is made: executors may run in another directory.
        synchronous: of the store, where it has such a setting; ``full`` or ``normal``.
    """

    address: str
    synchronous: str = "full"

    def __post_init__(self) -> None:
        relative = _RELATIVE_FILE.fullmatch(self.address)
        if relative:
            object.__setattr__(self, "address", relative[1] + str(Path(relative[2]).expanduser().resolve()))
        if self.address.startswith("memory"):
            raise PipelineError(f"the store {self.address!r} lives in one process; executors need one that is shared")

    def __repr__(self) -> str:
        return f"StoreSpec({self.shown!r}, synchronous={self.synchronous!r})"

    @property
    def shown(self) -> str:
        """The address without its password: for logs and reports."""
        return _PASSWORD.sub("…", self.address)


class OpenStore:
    """A store that one task, or the driver, has open; its async calls are made from a thread without an event loop.

    A call through the portal costs some 80 µs, so calls are made once a batch and never once a message.
    """

    def __init__(self, store: BuiltInStore, portal: BlockingPortal) -> None:
        self._store = store
        self._portal = portal

    @property
    def largest_message_bytes(self) -> int:
        """Headers and body together; see :class:`postdate.ports.StoreCapabilities`."""
        return self._store.capabilities.largest_message_bytes

    def setup(self) -> None:
        """Create what is missing."""
        if isinstance(self._store, SetsUp):
            self._portal.call(self._store.setup)

    def store_many(self, messages: Sequence[DelayedMessage], now: datetime) -> StoreReport:
        """See :meth:`postdate.ports.ClaimingStore.store_many`."""
        store: ClaimingStore = self._store
        return self._portal.call(store.store_many, messages, now)

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
        store = open_store(spec.address, synchronous=spec.synchronous, create=create)
        try:
            yield OpenStore(store, portal)
        finally:
            portal.call(store.close)

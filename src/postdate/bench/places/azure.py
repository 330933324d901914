"""An account of Azure Storage, with queues, a table and a container of its own for the run."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from postdate.backends.azure.login import AzureLogin, parse_login
from postdate.backends.azure.queue_names import queue_name, sanitizer_of
from postdate.backends.azure.table_names import lease_container, records_table
from postdate.bench.limits import azure as limits
from postdate.bench.places.place import QueuePlace, StorePlace
from postdate.bench.result import Lateness
from postdate.bench.site import Opening, names_of
from postdate.bench.system import LOOPBACK, cpu_seconds, listening_pid
from postdate.errors import PostdateError, StoreUnavailable, TransportUnavailable

_SANITIZER: Final = "dashes"


class AzureQueuePlace(QueuePlace):
    """Queues that are made for the run and deleted after it.

    Args:
        run: see :class:`Place`.
        address: of the account, or its connection string.
        folder: for a file with the connection string, which other processes read.
    """

    name = "azure-queues"
    _service = "queue"
    _unavailable: type[PostdateError] = TransportUnavailable

    def __init__(self, run: str, address: str, folder: Path) -> None:
        super().__init__(run)
        self._login = parse_login(address)
        self._file = folder / f"{run}.{self.name}"
        self._facts: Mapping[str, str] = {}

    def __enter__(self) -> Self:
        self._ask()
        self._file.touch(mode=0o600)
        self._file.write_text(connection_string(self._login), encoding="utf-8")
        return self

    def _ask(self) -> None:
        with self._asking():
            self._facts = limits.facts(self._login, self._service)

    @contextmanager
    def _asking(self) -> Generator[None]:
        try:
            yield
        except limits.Error as error:
            reason = str(error).partition("\n")[0]
            raise self._unavailable(f"{self._login.place(self._service)} does not answer: {reason}") from error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        limits.remove(self._login, queues=self._queues)
        self._file.unlink()

    @property
    def _queues(self) -> list[str]:
        return [*(_clean(name) for name in names_of(self.run)), self._limit_queue]

    @property
    def _limit_queue(self) -> str:
        return f"postdate-bench-{self.run}-limit"

    @property
    def transport(self) -> Opening:
        """See :class:`QueuePlace`."""
        return Opening(f"azure-queues://?connection=file:{self._file}", {"sanitizer": _SANITIZER})

    def facts(self) -> Mapping[str, str]:
        """See :class:`Place`."""
        return self._facts

    def cpu_seconds(self) -> float | None:
        """See :class:`Place`; the emulator is one process for all services."""
        host, port = limits.port_of(self._login, self._service)
        pid = listening_pid(port) if port is not None and host in LOOPBACK else None
        return None if pid is None else cpu_seconds(pid)

    def move_limit(self, n: int) -> float:
        """See :class:`QueuePlace`: sending alone, for what waits in a store of another kind."""
        with self._asking():
            return limits.run(partial(limits.send_limit, self._login, self._limit_queue, n))

    def floor(self, rate: int, seconds: float) -> Lateness:
        """See :class:`QueuePlace`."""
        with self._asking():
            return limits.floor(self._login, self._limit_queue, rate, seconds)

    def arrived(self, queue: str) -> Iterator[str]:
        """See :class:`QueuePlace`."""
        return limits.ids_in(self._login, _clean(queue))

    def take(self, queue: str, limit: int) -> list[str]:
        """See :class:`QueuePlace`; they are hidden, which takes one request for many where deleting takes one each."""
        return list(limits.ids_in(self._login, _clean(queue), limit))


class AzurePlace(AzureQueuePlace, StorePlace):
    """A table, and the queues in the same account.

    Args:
        run: see :class:`Place`.
        address: see :class:`AzureQueuePlace`.
        folder: likewise.
        recording: how much the store records.
    """

    name = "azure-table"
    _service = "table"
    _unavailable = StoreUnavailable

    def __init__(self, run: str, address: str, folder: Path, recording: str) -> None:
        super().__init__(run, address, folder)
        self._recording = recording
        self._table = f"postdatebench{run}"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tables = [self._table, records_table(self._table), self._limit_table]
        limits.remove(self._login, queues=self._queues, tables=tables, container=lease_container(self._table, 0))
        self._file.unlink()

    @property
    def _limit_table(self) -> str:
        return f"postdatebenchlimit{self.run}"

    @property
    def store(self) -> Opening:
        """See :class:`StorePlace`."""
        settings = {"table": self._table, "recording": self._recording}
        return Opening(f"azure-table://?connection=file:{self._file}", settings)

    def insert_limit(self, n: int, batch: int) -> float:
        """See :class:`StorePlace`."""
        with self._asking():
            return limits.run(partial(limits.insert_limit, self._login, self._limit_table, n, batch))

    def move_limit(self, n: int) -> float:
        """See :class:`QueuePlace`: from a table of the account to a queue of it."""
        with self._asking():
            return limits.run(partial(limits.move_limit, self._login, self._limit_table, self._limit_queue, n))


def connection_string(login: AzureLogin) -> str:
    """Return the connection string of an account, however its address was given."""
    parts = [f"AccountName={login.account}"]
    parts.append(f"AccountKey={login.key}" if login.key else f"SharedAccessSignature={login.signature}")
    names = {"queue": "QueueEndpoint", "table": "TableEndpoint", "blob": "BlobEndpoint"}
    return ";".join([*parts, *(f"{names[service]}={url}" for service, url in login.endpoints.items())])


def _clean(queue: str) -> str:
    return queue_name(queue, sanitizer_of(_SANITIZER))

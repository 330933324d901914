"""Room for ``postdate bench``: a table, a container and queues of the run, which are deleted after it."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Self

from azure.core.exceptions import AzureError, HttpResponseError, ResourceNotFoundError
from azure.data.tables import TableServiceClient
from azure.storage.blob import BlobLeaseClient, BlobServiceClient
from azure.storage.queue import QueueServiceClient
from typing_extensions import override

from postdate.backends.azure.login import CONNECTS_WITHIN_SECONDS, AzureLogin, parse_login
from postdate.backends.azure.queues import queue_name, sanitizer_of
from postdate.backends.azure.table_names import records_table
from postdate.errors import StoreUnavailable
from postdate.ports.benchmarks import BenchmarkRun, BenchmarkTarget

_SANITIZER: Final = "dashes"
_IS_LEASED: Final = 412
_AT_ONCE: Final[Mapping[str, Any]] = {"retry_total": 0, "connection_timeout": CONNECTS_WITHIN_SECONDS}
"""Failed deletions are reported at once: by default the SDK retries for more than a minute."""


class AzureTarget(BenchmarkTarget):
    """A storage account. Plain sends are the only limit to compare with: the emulator's speed says nothing of Azure."""

    def __init__(self, address: str, run: BenchmarkRun) -> None:
        super().__init__(address, run)
        self.login = parse_login(address)
        self.table = f"postdatebench{run.name}"
        self._file = Path(tempfile.gettempdir()) / f"postdate-bench-{run.name}.connection"

    def __enter__(self) -> Self:
        self._file.touch(mode=0o600, exist_ok=False)
        self._file.write_text(connection_string(self.login), encoding="utf-8")
        return self

    def __exit__(self, *_error: object) -> None:
        self._file.unlink()
        try:
            self.remove()
        except AzureError as failure:
            reason = str(failure).partition("\n")[0]
            raise StoreUnavailable(f"{self.login.place('table')} kept what was made for the run: {reason}") from failure

    @override
    def address_of(self, scheme: str) -> str:
        """Refers to a connection string in a file, since one service's host does not name the others."""
        return f"{scheme}://?connection=file:{self._file}"

    @property
    @override
    def settings(self) -> Mapping[str, str]:
        return {"table": self.table, "sanitizer": _SANITIZER}

    @override
    def remove_queue(self, queue: str) -> None:
        service = QueueServiceClient(self.login.endpoint("queue"), self.login.credential, **_AT_ONCE)
        with service, suppress(ResourceNotFoundError):
            service.delete_queue(clean(queue))

    def remove(self) -> None:
        if "queue" in self.login.endpoints:
            for queue in self.run.queues:
                self.remove_queue(queue)
        if "table" in self.login.endpoints:
            tables: Any = TableServiceClient(
                endpoint=self.login.endpoint("table"), credential=self.login.credential, **_AT_ONCE
            )
            with tables:
                for table in (self.table, records_table(self.table)):
                    tables.delete_table(table)
        if "blob" in self.login.endpoints:
            with BlobServiceClient(self.login.endpoint("blob"), self.login.credential, **_AT_ONCE) as blobs:
                _delete_container(blobs, self.table)


def _delete_container(blobs: BlobServiceClient, name: str) -> None:
    """Delete a container, even while a dead process of the run still has a lease on it."""
    container = blobs.get_container_client(name)
    with suppress(ResourceNotFoundError):
        try:
            container.delete_container()
        except HttpResponseError as error:
            if error.status_code != _IS_LEASED:
                raise
            BlobLeaseClient(container).break_lease(lease_break_period=0)
            container.delete_container()


def connection_string(login: AzureLogin) -> str:
    secret = f"AccountKey={login.key}" if login.key else f"SharedAccessSignature={login.signature}"
    endpoints = (f"{service.title()}Endpoint={url}" for service, url in login.endpoints.items())
    return ";".join([f"AccountName={login.account}", secret, *endpoints])


def clean(queue: str) -> str:
    return queue_name(queue, sanitizer_of(_SANITIZER))

"""A place for ``postdate bench`` in a storage account: a table with its records, a container, and queues."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final
from urllib.parse import parse_qsl, urlencode, urlsplit

from azure.core.exceptions import AzureError, HttpResponseError, ResourceNotFoundError
from azure.data.tables import TableServiceClient
from azure.storage.blob import BlobLeaseClient, BlobServiceClient
from azure.storage.queue import QueueServiceClient

from postdate.backends.azure.login import CONNECTS_WITHIN_SECONDS, AzureLogin, parse_login
from postdate.backends.azure.queues import queue_name, sanitizer_of
from postdate.backends.azure.table_names import records_table
from postdate.errors import StoreUnavailable
from postdate.ports.backends import Scratch

_SANITIZER: Final = "dashes"
_IS_LEASED: Final = 412  # the status for a container that has a lease
_NO_RETRIES: Final[Mapping[str, Any]] = {"retry_total": 0, "connection_timeout": CONNECTS_WITHIN_SECONDS}
"""Settings of a client that reports failed deletions at once: by default the SDK retries for more than a minute."""


@contextmanager
def scratch(address: str, run: str, queues: Sequence[str]) -> Generator[Scratch]:
    """Yield the account with a table of the run; delete table, container and the run's queues afterwards."""
    login, table = parse_login(address), f"postdatebench{run}"
    try:
        yield Scratch(_address_of_all_services(address, login), {"table": table, "sanitizer": _SANITIZER})
    finally:
        try:
            delete_queues(login, queues)
            _delete_table(login, table)
        except AzureError as error:
            reason = str(error).partition("\n")[0]
            raise StoreUnavailable(
                f"{login.describe_service('table')} still has the tables of the run, which could not be removed: "
                f"{reason}"
            ) from error


def _address_of_all_services(address: str, login: AzureLogin) -> str:
    """Return the address with every known service named.

    Store and queues both open it, but its host is that of one service.
    """
    parts = urlsplit(address)
    if "@" not in parts.netloc:  # It is a connection string, or the emulator.
        return address
    services = {f"{service}s": urlsplit(url).netloc for service, url in login.endpoints.items()}
    return parts._replace(query=urlencode({**dict(parse_qsl(parts.query)), **services})).geturl()


def delete_queues(login: AzureLogin, queues: Sequence[str]) -> None:
    """Delete queues with all messages in them; ignore queues that do not exist."""
    if "queue" not in login.endpoints:
        return
    with QueueServiceClient(login.endpoint("queue"), login.credential, **_NO_RETRIES) as service:
        for queue in queues:
            with suppress(ResourceNotFoundError):
                service.delete_queue(sanitize_queue(queue))


def sanitize_queue(queue: str) -> str:
    """Return the name of a queue as the account has it."""
    return queue_name(queue, sanitizer_of(_SANITIZER))


def _delete_table(login: AzureLogin, table: str) -> None:
    """Delete the table of a store, that of its records, and the container by which it is leased."""
    if "table" in login.endpoints:
        tables: Any = TableServiceClient(endpoint=login.endpoint("table"), credential=login.credential, **_NO_RETRIES)
        with tables:
            for name in (table, records_table(table)):
                tables.delete_table(name)
    if "blob" in login.endpoints:
        with BlobServiceClient(login.endpoint("blob"), login.credential, **_NO_RETRIES) as blobs:
            _delete_container(blobs, table)


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

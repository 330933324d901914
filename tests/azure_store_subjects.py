"""Azure tables under the conformance suite: every subject has a table of its own, in the account of the emulator."""

import itertools
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from azure.core.exceptions import HttpResponseError, ResourceExistsError, ResourceNotFoundError
from azure.data.tables import TableClient, TableEntity, TableServiceClient, UpdateMode
from azure.storage.blob import BlobLeaseClient, BlobServiceClient, ContainerClient

from postdate.backends.azure.store import AzureTableStore
from postdate.backends.azure.table_names import records_table
from postdate.ports import DelayedMessageStore, TransactionMode
from postdate.testing import Damage, StoreSubject
from postdate.testing.damaged import Damages, damages_of

_NUMBERS = itertools.count(1)


def fresh_table() -> str:
    """Return the name of a table that does not exist."""
    return f"h{os.getpid()}t{next(_NUMBERS)}"


def drop_table(connection: str, table: str) -> None:
    """Remove what a store made: tables, and the container, leased or not."""
    with TableServiceClient.from_connection_string(connection) as tables:
        for name in (table, records_table(table)):
            tables.delete_table(name)
    with BlobServiceClient.from_connection_string(connection) as blobs:
        container = blobs.get_container_client(table)
        with suppress(ResourceNotFoundError):
            _break_lease(container)
            container.delete_container()


def _break_lease(container: ContainerClient) -> None:
    with suppress(HttpResponseError):  # there is none
        BlobLeaseClient(container).break_lease(0)


class AzureTableStoreSubject(StoreSubject):
    """The store in tables of Azure Storage."""

    def __init__(self, connection: str) -> None:
        self.connection, self.table = connection, fresh_table()

    def open(self, **settings) -> AzureTableStore:
        largest = settings.pop("largest_message_bytes", None)
        if largest is not None and largest <= 64 * 1024:
            settings["largest_message_bytes"] = largest
        return AzureTableStore(self.connection, table=self.table, **settings)

    def open_elsewhere(self) -> DelayedMessageStore:
        return AzureTableStore(self.connection, table=self.table)

    def drop(self) -> None:
        drop_table(self.connection, self.table)

    def damages(self) -> Damages:
        return damages_of(self.damage)

    def damage(self, message_id: str, damage: Damage) -> bytes:
        with TableClient.from_connection_string(self.connection, self.table) as client:
            (entity,) = [each for each in client.list_entities() if each["MessageId"] == message_id]
            if damage is Damage.CONTENT:
                del entity["Headers"], entity["Body"]
                client.update_entity(entity, UpdateMode.REPLACE)
                return b""
            name, there = _DAMAGED[damage]
            client.update_entity({**entity, name: there}, UpdateMode.REPLACE)
            return there.encode()


_DAMAGED = {
    Damage.HEADERS: ("Headers", '{"a": "b'),
    Damage.DESTINATION: ("Destination", " "),
    Damage.DUE: ("Due", "-0001-01-01T00:00:00.000000+00:00"),
}


class TablePlace:
    """A table of a test's own, through our store and through the plain SDK."""

    def __init__(self, connection: str) -> None:
        self.connection, self.table = connection, fresh_table()
        self._opened: list[AzureTableStore] = []
        self._blobs = BlobServiceClient.from_connection_string(connection)

    async def open(
        self, mode: TransactionMode = TransactionMode.RECEIVE_ONLY, connection: str = "", **settings
    ) -> AzureTableStore:
        """Return a store, as a process of its own has it."""
        store = AzureTableStore(connection or self.connection, table=self.table, **settings)
        await store.initialize("tests", mode)
        self._opened.append(store)
        return store

    async def close(self) -> None:
        for store in self._opened:
            await store.close()
        self._blobs.close()
        drop_table(self.connection, self.table)

    def lease(self, seconds: int = 60) -> BlobLeaseClient:
        """Take the lease away from whoever has it, as another process does that waited for its end."""
        container = self._blobs.get_container_client(self.table)
        with suppress(ResourceExistsError):
            container.create_container()
        _break_lease(container)
        return container.acquire_lease(seconds)

    def ends_by_itself(self) -> bool:
        """Tell whether the lease was taken for a time, after which the account ends it."""
        container = self._blobs.get_container_client(self.table)
        return container.get_container_properties().lease.duration == "fixed"

    def entities(self, table: str = "") -> list[TableEntity]:
        """Return what lies in the table, in the order of its keys."""
        with self._client(table) as client:
            return list(client.list_entities())

    def add(self, entity: Mapping[str, Any], table: str = "") -> None:
        """Put an entity there as upstream does, or an older version."""
        with self._client(table) as client:
            client.create_entity(entity)

    def remove(self, entity: Mapping[str, Any]) -> None:
        """Take an entity away as whoever delivered it."""
        with self._client() as client:
            client.delete_entity(entity)

    def delete_table(self) -> None:
        with self._client() as client:
            client.delete_table()

    def _client(self, table: str = "") -> TableClient:
        return TableClient.from_connection_string(self.connection, table or self.table)

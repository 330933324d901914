"""A storage account of Azure as one object. Source: ADR 0021."""

from __future__ import annotations

from functools import cached_property

from postdate.backends.azure.login import AzureLogin, parse_login
from postdate.backends.azure.store import AzureTableStore
from postdate.backends.azure.transport import AzureStorageQueueTransport
from postdate.ports.backends import DatabaseObject


class AzureStorage(DatabaseObject):
    """The table with a lease, and the queues, of one storage account. Each is created once, at first use.

    Store and queues share no transactions. Adapters with their own settings are constructed from the address instead.

    Args:
        address: a connection string, or ``azure-table://account`` with the login of this machine.

    Raises:
        ConfigurationError: the address cannot be parsed.
    """

    has_a_table_for_each_endpoint = True

    def __init__(self, address: str | AzureLogin) -> None:
        super().__init__()
        self._login = address if isinstance(address, AzureLogin) else parse_login(address)

    @cached_property
    def store(self) -> AzureTableStore:
        """The store of delayed messages."""
        return self.register_adapter(AzureTableStore(self._login))

    @cached_property
    def queues(self) -> AzureStorageQueueTransport:
        """The transport for the queues."""
        return self.register_adapter(AzureStorageQueueTransport(self._login))

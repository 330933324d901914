"""Azure Storage: a table with a lease as a store, and its queues, in upstream's formats."""

from typing import Final

from postdate.ports.backends import Adapter, Addresses, Backend, Place

BACKEND: Final = Backend(
    product="Azure Storage",
    place=Place.SERVER,
    addresses=Addresses(
        ("azure-table",),
        "azure-table://account:key@account.table.core.windows.net",
        product="Azure Table Storage",
        found_by="azure-table://?connection=env:POSTDATE_AZURITE_CONNECTION",
    ),
    queue_addresses=Addresses(
        ("azure-queues",),
        "azure-queues://account:key@account.queue.core.windows.net",
        product="Azure Storage Queues",
        found_by="azure-queues://?connection=env:POSTDATE_AZURITE_CONNECTION",
    ),
    extra="azure",
    store=Adapter(
        "postdate.backends.azure.store:open_store",
        frozenset(
            {
                "table",
                "recording",
                "largest_message_bytes",
                "checksum",
                "leases",
                "peek_interval",
                "longest_wait_when_idle",
                "page_size",
            }
        ),
    ),
    transport=Adapter(
        "postdate.backends.azure.transport:AzureStorageQueueTransport",
        frozenset(
            {"sanitizer", "largest_message_bytes", "concurrent_sends", "hold_for", "peek_interval", "longest_idle_wait"}
        ),
    ),
    benchmark=Adapter("postdate.backends.azure.benchmark:AzureTarget"),
)

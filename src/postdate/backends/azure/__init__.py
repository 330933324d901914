"""Delayed delivery for Azure Storage Queues: a table as the store, and a lease. Source: ADR 0013.

What differs from the other backends:

- The layout of table, container and envelopes is that of NServiceBus, so that both kinds of endpoint can share them.
- One process dispatches at a time: the one that holds the lease of a blob container. A lost lease voids its claims at
  once.
- A transaction holds up to 100 entities of one partition, so an id is made unique by an entity beside the message.
- The queues count deliveries and hide a received message for a while; a message is at most 64 KB of text.
- It has been run on Azurite only, never on Azure.

Read first: ``layout`` for the entities; then ``store`` and ``lease``; ``transport`` for the queues.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Final, Literal

from msgspec import Meta

from postdate.ports.backends import Adapter, Addresses, Backend, Place
from postdate.ports.common import Recording
from postdate.ports.settings import HowMuchIsRecorded, LimitedMessages, Span

_SECOND: Final = timedelta(seconds=1)
_PEEK_INTERVAL: Final = timedelta(milliseconds=125)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableStore(LimitedMessages):
    """Settings of the store; see :class:`postdate.backends.azure.store.AzureTableStore`."""

    table: Annotated[
        str | None, Meta(description="of the waiting messages; default: delays and the SHA-1 of {endpoint.name}")
    ] = None
    recording: HowMuchIsRecorded = Recording.ALL
    peek_interval: Annotated[
        timedelta,
        Span(),
        Meta(description="of an Azure table: each pause between two polls is longer than the one before by this span"),
    ] = _PEEK_INTERVAL
    longest_wait_when_idle: Annotated[
        timedelta,
        Span(timedelta(milliseconds=100), timedelta(minutes=1)),
        Meta(description="of an Azure table: the longest such pause, 100 ms to 1 min"),
    ] = timedelta(seconds=30)
    page_size: Annotated[
        int,
        Meta(ge=1, le=1_000, description="of an Azure table: most messages in one claim, 1 to 1,000"),
    ] = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageQueues(LimitedMessages):
    """Settings of the queues; see :class:`postdate.backends.azure.transport.AzureStorageQueueTransport`."""

    sanitizer: Annotated[
        Literal["dashes", "strict", "legacy"],
        Meta(description="on Azure, how queue names that Azure does not allow are changed; strict: they are refused"),
    ] = "dashes"
    concurrent_sends: Annotated[
        int, Meta(ge=1, description="on Azure, requests that are sent at the same time; 1: messages keep their order")
    ] = 32
    hold_for: Annotated[
        timedelta,
        Span(_SECOND, timedelta(days=7), _SECOND),
        Meta(
            description="on Azure, how long a received message is hidden; after this time other processes receive "
            "the messages of a dead process; 1 s to 7 d"
        ),
    ] = timedelta(seconds=30)
    peek_interval: Annotated[
        timedelta,
        Span(),
        Meta(description="on Azure, while a queue is empty, each pause is longer than the one before by this span"),
    ] = _PEEK_INTERVAL
    longest_idle_wait: Annotated[
        timedelta,
        Span(),
        Meta(
            description="on Azure, the longest such pause; a message of another process may be received this much later"
        ),
    ] = _SECOND


BACKEND: Final = Backend(
    product="Azure Storage",
    place=Place.SERVER,
    addresses=Addresses(
        ("azure-table",),
        "azure-table://account:key@account.table.core.windows.net",
        product="Azure Table Storage",
        bench_address="azure-table://?connection=env:POSTDATE_AZURITE_CONNECTION",
    ),
    queue_addresses=Addresses(
        ("azure-queues",),
        "azure-queues://account:key@account.queue.core.windows.net",
        product="Azure Storage Queues",
        bench_address="azure-queues://?connection=env:POSTDATE_AZURITE_CONNECTION",
    ),
    extra="azure",
    store=Adapter(
        "postdate.backends.azure.store:open_store",
        TableStore,
    ),
    transport=Adapter(
        "postdate.backends.azure.transport:AzureStorageQueueTransport",
        StorageQueues,
    ),
    scratch=Adapter("postdate.backends.azure.scratch:scratch"),
)

"""The settings by section, each with its default, its meaning and the way it is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from postdate.config import values
from postdate.config.addresses import Address
from postdate.config.texts import format_duration
from postdate.ports import DUE_EXCHANGE_TYPES, Recording, TransactionMode

FOLLOWS: Final = "as "
"""So begins the origin of a value that was not set but follows from another one."""

_SECOND: Final = timedelta(seconds=1)


def _meta(read: Callable[[Any], Any], meaning: str) -> dict[str, Any]:
    return {"read": read, "meaning": meaning}


@dataclass(frozen=True, slots=True)
class EndpointSettings:
    """The endpoint that ``postdate run`` is. Its intake queue is ``{name}.timeouts``."""

    name: str = field(
        default="postdate", metadata=_meta(values.queue_name, "the service's name; it receives from {name}.timeouts")
    )
    error_queue: str = field(default="error", metadata=_meta(values.queue_name, "where messages go that fail"))
    transaction_mode: TransactionMode | None = field(
        default=None,
        metadata=_meta(
            values.choice(TransactionMode, *(mode.value for mode in TransactionMode)),
            "default: the strongest that store and transport keep together",
        ),
    )
    concurrency: int = field(default=16, metadata=_meta(values.integer(1), "messages handled at once"))


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """Where messages wait. ``schema`` and ``table`` are for servers, ``synchronous`` is for a file.

    From ``leases`` on they are for an Azure table; see :class:`postdate.backends.azure.store.AzureTableStore`.
    """

    address: Address = field(
        default=Address("sqlite:///postdate.db"), metadata=_meta(values.address, "default: where the queues are")
    )
    schema: str | None = field(default=None, metadata=_meta(values.text, "of the tables; default: the store's own"))
    table: str | None = field(
        default=None,
        metadata=_meta(values.text, "default: {endpoint.name}.timeouts; in Azure delays and the SHA-1 of the name"),
    )
    synchronous: str = field(
        default="full",
        metadata=_meta(
            values.choice(str, "full", "normal"),
            "of a file: full survives loss of power, normal any end of the process",
        ),
    )
    recording: Recording = field(
        default=Recording.ALL,
        metadata=_meta(values.choice(Recording, *(each.value for each in Recording)), "how much is kept for audits"),
    )
    largest_message_bytes: int | None = field(
        default=None, metadata=_meta(values.integer(1), "headers and body together; default: the adapter's own")
    )
    holds_at_most: timedelta | None = field(
        default=None,
        metadata=_meta(
            values.duration_between(_SECOND, timedelta(hours=1)),
            "a process that shows no life for so long loses what it holds; default: the store's own, 60 s",
        ),
    )
    answers_within: timedelta | None = field(
        default=None,
        metadata=_meta(
            values.duration_between(_SECOND, timedelta(minutes=10)),
            "after so long a silence of the server a connection is given up; default: 20 s at PostgreSQL, else 30 s",
        ),
    )
    checksum: bool = field(
        default=False,
        metadata=_meta(values.flag, "true: store one with each message, so that damage to its content is noticed"),
    )
    leases: int = field(
        default=1,
        metadata=_meta(values.integer(1, 64), "of an Azure table: among so many processes its messages are divided"),
    )
    peek_interval: timedelta = field(
        default=timedelta(milliseconds=125),
        metadata=_meta(values.duration, "of an Azure table: each pause between looks is longer by it than the last"),
    )
    longest_wait_when_idle: timedelta = field(
        default=timedelta(seconds=30),
        metadata=_meta(
            values.duration_between(timedelta(milliseconds=100), timedelta(minutes=1)),
            "of an Azure table: the longest such pause",
        ),
    )
    page_size: int = field(
        default=50,
        metadata=_meta(values.integer(1, 1_000), "of an Azure table: messages claimed in one piece at most"),
    )


@dataclass(frozen=True, slots=True)
class TransportSettings:
    """Where the queues are. In the store's database, it has the store's ``synchronous`` and ``recording``.

    From ``sanitizer`` on they are for Azure; see :class:`postdate.backends.azure.transport.AzureStorageQueueTransport`.
    """

    address: Address = field(
        default=Address("local:///postdate.db"), metadata=_meta(values.address, "default: in the database of the store")
    )
    schema: str | None = field(default=None, metadata=_meta(values.text, "of the tables; default: the store's"))
    queue_type: str = field(
        default="quorum",
        metadata=_meta(values.choice(str, "quorum", "classic"), "of the queues that are created, on RabbitMQ"),
    )
    largest_message_bytes: int | None = field(
        default=None, metadata=_meta(values.integer(1), "headers and body together; default: the adapter's own")
    )
    sanitizer: str = field(
        default="dashes",
        metadata=_meta(
            values.choice(str, "dashes", "strict", "legacy"), "what becomes of names of queues that Azure does not take"
        ),
    )
    concurrent_sends: int = field(
        default=32,
        metadata=_meta(values.integer(1), "on Azure, requests on their way at once; 1: in the order of sending"),
    )
    hold_for: timedelta = field(
        default=timedelta(seconds=30),
        metadata=_meta(
            values.duration_between(_SECOND, timedelta(days=7), _SECOND),
            "on Azure, how long a received message is hidden; renewed while it is held",
        ),
    )
    peek_interval: timedelta = field(
        default=timedelta(milliseconds=125),
        metadata=_meta(values.duration, "on Azure, each pause while a queue is empty is longer by it than the last"),
    )
    longest_idle_wait: timedelta = field(
        default=_SECOND, metadata=_meta(values.duration, "on Azure, the longest such pause")
    )


@dataclass(frozen=True, slots=True)
class DelayedDeliverySettings:
    """Whether messages wait in the store, and how failures are borne; see :class:`postdate.DelayedDelivery`."""

    enabled: bool = field(
        default=True, metadata=_meta(values.flag, "false: there is no store, as for a timeout manager alone")
    )
    number_of_retries: int = field(
        default=0, metadata=_meta(values.integer(0), "attempts after the first before the error queue")
    )
    time_to_trigger_store_circuit_breaker: timedelta = field(
        default=timedelta(seconds=30),
        metadata=_meta(values.duration, "storing may fail this long before it is a critical error"),
    )
    time_to_trigger_fetch_circuit_breaker: timedelta = field(
        default=timedelta(seconds=30), metadata=_meta(values.duration, "the same for looking for due messages")
    )
    time_to_trigger_dispatch_circuit_breaker: timedelta = field(
        default=timedelta(seconds=30), metadata=_meta(values.duration, "the same for sending due messages")
    )
    maximum_recovery_failures_per_second: int = field(
        default=1, metadata=_meta(values.integer(1), "failures of the failure handling that are borne, over 30 s")
    )
    poison_queue: str | None = field(
        default=None, metadata=_meta(values.queue_name, "where delayed messages go that fail; default: the error queue")
    )
    errors_return_to: str = field(
        default="timeouts_queue",
        metadata=_meta(
            values.choice(str, "timeouts_queue", "destination"), "the queue that copies in the error queue name"
        ),
    )
    drain_timeout_manager: bool = field(
        default=False, metadata=_meta(values.flag, "also receive from {endpoint.name}.timeoutsdispatcher")
    )
    use_store_clock: bool = field(
        default=True, metadata=_meta(values.flag, "what is due is judged by the clock of the store's server")
    )


@dataclass(frozen=True, slots=True)
class TimeoutManagerSettings:
    """The older way to delay messages, here or elsewhere; see :class:`postdate.TimeoutManager`."""

    address: Address | None = field(
        default=None, metadata=_meta(values.address, "where timeouts are kept; default: no timeout manager runs")
    )
    schema: str | None = field(
        default=None, metadata=_meta(values.text, "of the tables; default: where upstream has them")
    )
    table_prefix: str | None = field(
        default=None, metadata=_meta(values.text, "of the table; default: the endpoint's name, with _ for every point")
    )
    endpoints: tuple[str, ...] = field(
        default=(), metadata=_meta(values.queue_names, "whose timeouts are managed here; default: endpoint.name")
    )
    time_to_wait_before_triggering_critical_error: timedelta = field(
        default=timedelta(minutes=2),
        metadata=_meta(values.duration_or_zero, "looking for due timeouts may fail this long before it is one"),
    )
    concurrency: int | None = field(
        default=None, metadata=_meta(values.integer(1), "messages in hand in each of its queues; default: processors")
    )
    external_address: str | None = field(
        default=None, metadata=_meta(values.queue_name, "queue of another one, to which delayed sends go")
    )


@dataclass(frozen=True, slots=True)
class SagaSettings:
    """Where applications keep the instances of their sagas."""

    address: Address | None = field(
        default=None, metadata=_meta(values.address, "where saga instances are kept; default: in the store's database")
    )
    schema: str | None = field(default=None, metadata=_meta(values.text, "of the table; default: the store's"))


@dataclass(frozen=True, slots=True)
class OutboxSettings:
    """Where applications keep their outbox: in the database of their own tables."""

    address: Address | None = field(
        default=None, metadata=_meta(values.address, "where the outbox is; default: in the store's database")
    )
    schema: str | None = field(default=None, metadata=_meta(values.text, "of the table; default: the store's"))


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """Queues that ``postdate setup`` and ``postdate run`` create."""

    create: tuple[str, ...] = field(
        default=(), metadata=_meta(values.queue_names, "queues to create besides the endpoint's own")
    )


@dataclass(frozen=True, slots=True)
class IntakeSettings:
    """How messages come in that other programs delay."""

    exchange: str = field(
        default="postdate",
        metadata=_meta(values.exchange_name, "of RabbitMQ, for messages with a header x-delay; empty: none"),
    )
    due_exchange_type: str = field(
        default="topic",
        metadata=_meta(values.choice(str, *DUE_EXCHANGE_TYPES), "of {exchange}.due, where they go when due"),
    )


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings.

    Args:
        endpoint, store, transport, delayed_delivery, timeout_manager, sagas, outbox, queues, intake: the sections of
            the file.
        origins: for each key (``store.address`` …) where its value came from.
        file: the file that was read, or ``None`` when there was none.
    """

    endpoint: EndpointSettings = field(default_factory=EndpointSettings)
    store: StoreSettings = field(default_factory=StoreSettings)
    transport: TransportSettings = field(default_factory=TransportSettings)
    delayed_delivery: DelayedDeliverySettings = field(default_factory=DelayedDeliverySettings)
    timeout_manager: TimeoutManagerSettings = field(default_factory=TimeoutManagerSettings)
    sagas: SagaSettings = field(default_factory=SagaSettings)
    outbox: OutboxSettings = field(default_factory=OutboxSettings)
    queues: QueueSettings = field(default_factory=QueueSettings)
    intake: IntakeSettings = field(default_factory=IntakeSettings)
    origins: Mapping[str, str] = field(default_factory=dict[str, str])
    file: Path | None = None

    @property
    def given(self) -> int:
        """How many values were set; one that follows from another was not."""
        return sum(origin != "default" and not origin.startswith(FOLLOWS) for origin in self.origins.values())

    def rows(self) -> Iterator[SettingRow]:
        """Yield every setting in the order of the sections."""
        for section, kind in SECTIONS.items():
            for each in fields(kind):
                key = f"{section}.{each.name}"
                value = getattr(getattr(self, section), each.name)
                yield SettingRow(key, _shown(value), self.origins.get(key, "default"), each.metadata["meaning"])


@dataclass(frozen=True, slots=True)
class SettingRow:
    """One setting as it is shown: secrets are hidden."""

    key: str
    value: str | int | bool | list[str] | None
    origin: str
    meaning: str


SECTIONS: Final[Mapping[str, type[Any]]] = {
    "endpoint": EndpointSettings,
    "store": StoreSettings,
    "transport": TransportSettings,
    "delayed_delivery": DelayedDeliverySettings,
    "timeout_manager": TimeoutManagerSettings,
    "sagas": SagaSettings,
    "outbox": OutboxSettings,
    "queues": QueueSettings,
    "intake": IntakeSettings,
}
KEYS: Final = tuple(f"{section}.{each.name}" for section, kind in SECTIONS.items() for each in fields(kind))


def _shown(value: Any) -> str | int | bool | list[str] | None:
    match value:
        case Address():
            return value.shown
        case timedelta():
            return format_duration(value)
        case Recording() | TransactionMode():
            return value.value
        case tuple():
            return [str(each) for each in value]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        case _:
            return value

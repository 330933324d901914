"""Settings of delayed delivery, timeout manager and audit, with their defaults."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime, timedelta
from typing import Annotated, Final, Literal, TypeAlias

from msgspec import Meta

from postdate.core.recoverability import BYTES_IN_FLIGHT, Host
from postdate.core.simple_store import check_methods, claiming_store
from postdate.endpoint.message_types import finite_span, parse_span
from postdate.errors import ConfigurationError, InvalidMessage, UnsupportedTransactionMode
from postdate.messages import DESTINATION_LIMIT, Envelope, Headers, check_text, format_timestamp
from postdate.ports import (
    ClaimingStore,
    DelayedMessageStore,
    DelayExchange,
    TransactionMode,
    Transport,
    TransportCapabilities,
)
from postdate.ports.settings import ZERO_OR_MORE, Destination, Span, check_settings
from postdate.ports.timeouts import TimeoutPersister

ModeName: TypeAlias = Literal["none", "receive_only", "sends_atomic_with_receive", "transaction_scope"]
"""Names of the transaction modes, as in the settings."""

ErrorsReturnTo: TypeAlias = Literal["timeouts_queue", "destination"]
"""Which queue an error copy of a due message names as the one to return it to."""

_30_SECONDS = timedelta(seconds=30)


@dataclass(frozen=True, slots=True)
class DelayedDelivery:
    """Settings of the store and the delivery of delayed messages.

    Args:
        store: a store of Postdate, or any object with the six methods of
            :class:`~postdate.ports.DelayedMessageStore`.
        number_of_retries: dispatch attempts after the first before a message goes to the error queue; 0 or more. The
            setter of NServiceBus refuses 0 although 0 is its default; this one accepts 0.
        time_to_trigger_store_circuit_breaker: how long storing may fail before it is a critical error; above zero.
        time_to_trigger_fetch_circuit_breaker: the same for polls for due messages.
        time_to_trigger_dispatch_circuit_breaker: the same for sending due messages.
        maximum_recovery_failures_per_second: how many failures of failure handling a second are tolerated, on average
            over 30 s; above 0.
        bytes_in_flight: largest size of the bodies of due messages that are in flight at once to queues outside of the
            store's database, in bytes; 1 or more. A larger message is sent alone.
        missing_queue_wait: how long due messages wait for a destination that does not exist, since this process first
            missed it; zero or more. Then they go to the error queue, as those of NServiceBus do at once
            (docs/specification-rows.md, row 38).
        delay_exchange: also store messages that other programs publish to this exchange; only with queues of RabbitMQ.
        poison_queue: queue for delayed messages that cannot be stored or delivered; created with the other queues.
            ``None``: the endpoint's error queue.
        errors_return_to: the queue that error copies name in ``NServiceBus.FailedQ``. With ``timeouts_queue``, a
            returned message is dispatched again. With ``destination``, it returns to the destination of the due
            message, as with NServiceBus on Azure. A message that could not be stored always names
            the timeouts queue, as it may not be due yet.
        drain_timeout_manager: also receive from ``{endpoint}.timeoutsdispatcher``, a queue of an earlier timeout
            manager of the endpoint, which must not run any more. The queue is created with the others.
        retention: how long a record is kept after its event and after the due time of its message, if the message is
            not pending. Then the id may be used again. A day or more; zero: for ever. With SQLite, PostgreSQL and
            MariaDB. If several services use one file, the shortest retention counts.
        use_store_clock: decide what is due by the clock of the store's server, if it has one, so that services with
            different clocks agree. ``False``: by the clock of the machine. A clock of tests has precedence over both.

    Raises:
        ConfigurationError: a value is out of range or of the wrong type, or a method of the store is missing or not
            async.
    """

    store: DelayedMessageStore
    number_of_retries: Annotated[int, Meta(ge=0, description="attempts after the first before the error queue")] = 0
    time_to_trigger_store_circuit_breaker: Annotated[
        timedelta, Span(), Meta(description="storing may fail this long before it is a critical error")
    ] = _30_SECONDS
    time_to_trigger_fetch_circuit_breaker: Annotated[
        timedelta, Span(), Meta(description="the same for polling due messages")
    ] = _30_SECONDS
    time_to_trigger_dispatch_circuit_breaker: Annotated[
        timedelta, Span(), Meta(description="the same for sending due messages")
    ] = _30_SECONDS
    maximum_recovery_failures_per_second: Annotated[
        int, Meta(ge=1, description="failures of the failure handling itself that are tolerated within 30 s")
    ] = 1
    bytes_in_flight: Annotated[
        int, Meta(ge=1, description="bytes of the bodies of due messages that are in flight to other queues")
    ] = BYTES_IN_FLIGHT
    missing_queue_wait: Annotated[
        timedelta,
        ZERO_OR_MORE,
        Meta(
            description="how long due messages wait for a queue that does not exist, before they go to the error queue"
        ),
    ] = timedelta(minutes=10)
    delay_exchange: DelayExchange | None = None
    poison_queue: Annotated[
        Destination | None,
        Meta(
            description="where delayed messages go that cannot be stored or delivered; created instead of "
            "endpoint.error_queue, which is the default"
        ),
    ] = None
    errors_return_to: Annotated[
        ErrorsReturnTo,
        Meta(
            description="the queue to which `errors return` sends such messages: timeouts_queue dispatches them "
            "again, destination is their own destination"
        ),
    ] = "timeouts_queue"
    drain_timeout_manager: Annotated[
        bool,
        Meta(
            description="true: also receive from {endpoint.name}.timeoutsdispatcher, of the timeout manager that the "
            "endpoint had before"
        ),
    ] = False
    retention: Annotated[
        timedelta,
        Span(timedelta(0), timedelta(days=36_500)),
        Meta(
            description="how long after its event and the due time a record is removed, a day at least; then the id "
            "may be used again; 0s: never. In SQLite, PostgreSQL and MariaDB"
        ),
    ] = timedelta(days=30)
    use_store_clock: Annotated[
        bool,
        Meta(
            description="true: the clock of the store's server decides what is due, if it has one; false: the clock "
            "of the machine decides"
        ),
    ] = True
    claiming_store: ClaimingStore = field(init=False, repr=False, compare=False)
    """The store as the core uses it: ``store`` itself, or an adapter for an object with the six methods."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "claiming_store", claiming_store(self.store))
        check_settings(self)
        if timedelta(0) < self.retention < timedelta(days=1):
            raise ConfigurationError(f"retention must be a day or more, or zero for ever, not {self.retention}")


@dataclass(frozen=True, slots=True)
class Audit:
    """Settings of the audit: a copy of each handled message is sent to a queue.

    The time to be received of a message does not apply to its copy, which has the header for information only.

    Args:
        queue: queue for the copies.
        time_to_be_received: time to be received of the copies. ``None``: they do not expire.

    Raises:
        ConfigurationError: the queue is no address, or the time is not above zero.
    """

    queue: str
    time_to_be_received: timedelta | None = None

    def __post_init__(self) -> None:
        check_address(self.queue, "the name of the audit queue")
        if self.time_to_be_received is not None:
            parse_span(self.time_to_be_received, "the time to be received of audit copies")

    def check(self, capabilities: TransportCapabilities, own_queues: Collection[str], *, in_transactions: bool) -> None:
        """Raise an error for copies that would return to the endpoint, or whose expiry could lose messages (row 73).

        With ``in_transactions``, copies are sent in the transaction that acknowledges their message; with an outbox, or
        in transaction mode ``none``, they are not.
        """
        if self.queue in own_queues:
            raise ConfigurationError(
                f"audit copies cannot go to {self.queue!r}, which the endpoint uses itself; give them their own queue"
            )
        if finite_span(self.time_to_be_received) is None:
            return
        if not capabilities.expires_messages:
            raise ConfigurationError("audit copies cannot expire: the queues of this transport do not expire messages")
        if in_transactions and not capabilities.time_to_be_received_in_transactions:
            raise ConfigurationError(
                "Setting a custom OverrideTimeToBeReceived for audits is not supported on transactional MSMQ."
            )

    def copy(self, envelope: Envelope, started_at: datetime, ended_at: datetime, host: Host) -> Envelope:
        """Return the copy of a message. Its handling lasted from ``started_at`` to ``ended_at``, UTC."""
        headers = {
            **envelope.headers,
            Headers.PROCESSING_STARTED: format_timestamp(started_at),
            Headers.PROCESSING_ENDED: format_timestamp(ended_at),
            Headers.PROCESSING_ENDPOINT: host.endpoint,
            Headers.PROCESSING_MACHINE: host.machine,
            Headers.HOST_ID: host.host_id,
            Headers.HOST_DISPLAY_NAME: host.display_name,
        }
        return Envelope(
            self.queue,
            envelope.message_id,
            headers,
            envelope.body,
            time_to_be_received=finite_span(self.time_to_be_received),
        )


_PERSISTER_METHODS: Final = [name for name in vars(TimeoutPersister) if name in TimeoutPersister.__abstractmethods__]


@dataclass(frozen=True, slots=True)
class TimeoutManager:
    """Settings of a timeout manager in this endpoint: the older way to delay messages, for systems that still use it.

    With ``delayed_delivery``, new messages are stored there, and the timeout manager dispatches its stored timeouts.

    Args:
        persister: a storage of timeouts of Postdate, or any object with the methods of
            :class:`~postdate.ports.timeouts.TimeoutPersister`.
        time_to_wait_before_triggering_critical_error: how long polls for due timeouts may fail before it is a critical
            error; zero or more (row 103).
        concurrency: number of messages handled at once from each of its two queues; 1 or more. ``None``: the number of
            processors, at least 2.

    Raises:
        ConfigurationError: a value is out of range or of the wrong type, or a method of the persister is missing or not
            async (row 104).
    """

    persister: TimeoutPersister
    _: KW_ONLY
    time_to_wait_before_triggering_critical_error: Annotated[
        timedelta,
        ZERO_OR_MORE,
        Meta(description="polling for due timeouts may fail this long before it is a critical error; 0 is allowed"),
    ] = timedelta(minutes=2)
    concurrency: Annotated[
        int | None,
        Meta(
            ge=1,
            description="messages handled at once in each of its queues; default: as many as processors, at least 2",
        ),
    ] = None

    def __post_init__(self) -> None:
        advice = (
            "; give TimeoutManager a storage of timeouts, for example MemoryTimeouts() or SqliteTimeouts(path), or "
            "leave the timeout manager out and delay messages with delayed_delivery=DelayedDelivery(store)"
        )
        check_methods(self.persister, _PERSISTER_METHODS, "cannot keep timeouts", advice)
        if not hasattr(self.persister, "database"):
            raise ConfigurationError(
                f"{type(self.persister).__name__} cannot keep timeouts: it has no property database; inherit "
                f"TimeoutPersister, whose property names no database"
            )
        check_settings(self)

    @property
    def messages_at_once(self) -> int:
        """The concurrency in force."""
        return max(2, os.cpu_count() or 1) if self.concurrency is None else self.concurrency


@dataclass(frozen=True, slots=True)
class ExternalTimeoutManager:
    """The timeout manager of another endpoint, to which this one sends its delayed messages.

    Args:
        address: address of its queue, for example ``other.Timeouts``.

    Raises:
        ConfigurationError: ``address`` is no address.
    """

    address: str

    def __post_init__(self) -> None:
        check_address(
            self.address, "the address of the external timeout manager", advice="; name a queue, or leave it out"
        )


def check_address(name: str, subject: str, limit: int = DESTINATION_LIMIT, advice: str = "") -> None:
    """Check that a queue can have this name.

    Raises:
        ConfigurationError: it cannot. The text ends with ``advice``.
    """
    try:
        check_text(name, subject, limit)
    except InvalidMessage as error:
        raise ConfigurationError(f"{error}{advice}") from error


def check_scope(mode: TransactionMode, store: object, transport: Transport, *, is_one: bool) -> None:
    """Raise an error for transaction scope, unless store and queues are in one database."""
    if mode is TransactionMode.TRANSACTION_SCOPE and not is_one:
        raise UnsupportedTransactionMode(
            f"transaction mode 'transaction_scope' promises exactly once, for which {type(store).__name__} and "
            f"{type(transport).__name__} must be on the same database; use the same one for both, or another mode"
        )


def mode_of(value: TransactionMode | str | None) -> TransactionMode | None:
    """Return the transaction mode of a setting, a mode or its name."""
    if value is None or isinstance(value, TransactionMode):
        return value
    try:
        return TransactionMode(value)
    except ValueError as error:
        names = ", ".join(mode.value for mode in TransactionMode)
        raise ConfigurationError(f"transaction_mode must be one of {names}, not {value!r}") from error

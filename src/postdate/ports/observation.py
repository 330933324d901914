"""What an operator asks about a store and its queues without changing what is in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Protocol, runtime_checkable

from postdate.messages import DelayedMessage, Envelope


@dataclass(frozen=True, slots=True)
class Standing:
    """How a pending message stands.

    Args:
        message: what waits.
        attempt_at: instant after which the next attempt may be made, UTC; ``None`` while a process holds it.
        held_by: system's number of the process that holds it.
    """

    message: DelayedMessage
    attempt_at: datetime | None
    held_by: int | None = None


@dataclass(frozen=True, slots=True)
class Queued:
    """A message in a queue, looked at without taking it.

    Args:
        queue: where it is.
        envelope: the message.
        failures: how often handling it failed in this queue.
        held_by: system's number of the process that handles it at the moment.
    """

    queue: str
    envelope: Envelope
    failures: int
    held_by: int | None = None


@dataclass(frozen=True, slots=True)
class Process:
    """A process that uses a store or queues.

    Args:
        pid: the system's number of it.
        started_at: UTC, on the machine's clock.
        alive: whether it still runs; what a dead one held is free again as soon as another process looks.
        delivers: whether it delivers due messages.
        receives: queues it receives from.
    """

    pid: int
    started_at: datetime
    alive: bool
    delivers: bool
    receives: tuple[str, ...]


class StoreObserver(Protocol):
    """Looks at a store without changing what is in it."""

    async def standing(self, message_id: str) -> Standing | None:
        """Return how a pending message stands, or ``None`` when it does not wait here."""
        ...

    async def retries_of(self, message_id: str) -> Sequence[Standing]:
        """Return pending messages that carry ``message_id`` as their header, but have another id of their own.

        These are delayed retries of the message; reads every pending message.
        """
        ...

    async def last_delivered_at(self) -> datetime | None:
        """Return when a message was last delivered, UTC; ``None`` when the latest 100,000 records have no delivery."""
        ...

    async def processes(self) -> Sequence[Process]:
        """Return every other process that uses the store, the dead ones that nobody noticed yet included."""
        ...


class QueueObserver(Protocol):
    """Looks at queues without changing what is in them."""

    async def processes(self) -> Sequence[Process]:
        """Return every other process that uses the queues, the dead ones that nobody noticed yet included."""
        ...

    async def queue_lengths(self) -> Mapping[str, int]:
        """Return how many messages each queue holds, by name, those being handled included."""
        ...

    async def browse(self, queue: str, limit: int) -> Sequence[Queued]:
        """Return up to ``limit`` messages of a queue, oldest first.

        Raises:
            QueueNotFound: there is no such queue.
        """
        ...

    async def find_in_queues(self, message_id: str) -> Sequence[Queued]:
        """Return where a message is, by its own id or by its ``NServiceBus.MessageId`` header; reads every queue."""
        ...


class Observer(StoreObserver, QueueObserver, Protocol):
    """Looks at a store and queues that live in one database."""


@runtime_checkable
class ObservableStore(Protocol):
    """A store that can be looked into beyond :class:`postdate.ports.InspectableStore`."""

    def observer(self) -> StoreObserver:
        """Return a look at this store; it uses the store's connections and ends with it."""
        ...


@runtime_checkable
class ObservableTransport(Protocol):
    """A transport whose queues can be looked into."""

    def observer(self) -> QueueObserver:
        """Return a look at these queues; it uses the transport's connections and ends with it."""
        ...


@runtime_checkable
class CountsQueues(Protocol):
    """A transport that can say of queues whether they are there, though perhaps not which others there are."""

    async def lengths_of(self, names: Sequence[str]) -> Mapping[str, int]:
        """Return how many messages each of the named queues holds, at least those that nobody has in hand.

        Queues that do not exist are left out.

        Raises:
            TransportUnavailable: transient.
        """
        ...


@runtime_checkable
class KnowsDestinations(Protocol):
    """A look at a store that tells for which queues its next messages are without reading them."""

    async def next_destinations(self, messages: int) -> Sequence[str]:
        """Return the queues for which the next ``messages`` messages are, each once, by name."""
        ...


# --- servers -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server says of itself, unjudged: what follows from it is said in :mod:`postdate.operations`.

    Args:
        product: ``PostgreSQL``, ``MariaDB``, ``SQL Server`` or ``RabbitMQ``.
        version: as the server writes it; numbers parted by dots come first.
        now: the server's clock, UTC, read while it answered; ``None`` where it does not tell.
        schema_version: number of the last migration there; 0 without tables; ``None`` where none are needed.
        newest_schema_version: number of the last migration that this version of Postdate has for it.
        settings: the server's names and values that decide what survives what, in lower case, as its driver shows them
            as text: ``fsync``, ``synchronous_commit``, ``innodb_flush_log_at_trx_commit`` …
    """

    product: str
    version: str
    now: datetime | None = None
    schema_version: int | None = None
    newest_schema_version: int | None = None
    settings: Mapping[str, str] = field(default_factory=dict[str, str])


@runtime_checkable
class DescribesServer(Protocol):
    """A store or transport whose server can be asked about itself."""

    async def server_facts(self) -> ServerFacts:
        """Ask the server about itself; changes nothing, and needs no tables.

        Raises:
            StoreUnavailable, TransportUnavailable: it does not answer, or refuses; the message says which.
        """
        ...


@dataclass(frozen=True, slots=True)
class OldSnapshot:
    """A session of a server that keeps it from cleaning up after deliveries.

    Args:
        pid: number of the session, as the server calls it.
        application: what the session says it is; empty when it says nothing.
        user: whose it is.
        age: how long it has held its snapshot.
        state: what it does, in the server's words, such as ``idle in transaction``.
        mend: the statement that ends it, where ending the session does not: then ``pid`` is 0.
    """

    pid: int
    application: str
    user: str
    age: timedelta
    state: str
    mend: str = ""


@runtime_checkable
class SeesSnapshots(Protocol):
    """A store that finds sessions which hold an old snapshot of its database."""

    async def old_snapshots(self) -> Sequence[OldSnapshot]:
        """Return the sessions with snapshots old enough to matter, the oldest first; empty without any."""
        ...


@runtime_checkable
class ScriptedStore(Protocol):
    """A store whose tables an administrator can make by hand."""

    def setup_statements(self, endpoint: str) -> str:
        """Return the SQL that creates everything ``endpoint`` needs here, as one script; connects to nothing.

        Where the store's database can hold queues, their tables are among it.
        """
        ...


@runtime_checkable
class ScriptedPart(Protocol):
    """What has tables that an administrator can make by hand."""

    def setup_statements(self) -> str:
        """Return the SQL that creates them, as one script; connects to nothing."""
        ...


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What a look at a file found, without writing to it.

    Args:
        schema_version: of its tables.
        journal_mode: of SQLite; ``wal`` is what Postdate sets.
        queues: lengths by name.
        processes: that use it.
        pending: messages that wait.
        overdue: of these, past their due time.
        next_destinations: of the 10,000 messages that are due next.
        quarantined: rows of the store and of queues that were set aside, since they cannot be read.
    """

    schema_version: int
    journal_mode: str
    queues: Mapping[str, int]
    processes: Sequence[Process]
    pending: int
    overdue: int
    next_destinations: Sequence[str]
    quarantined: int


class FileScripts(Protocol):
    """The SQL by which an administrator makes what lives in a file; nothing is opened."""

    def database(self) -> str:
        """Return the SQL that makes what store and queues need in a new file."""
        ...

    def timeouts(self, endpoint: str, table_prefix: str | None) -> str:
        """Return the SQL that makes an endpoint's table of timeouts in a file that has those of queues."""
        ...

    def sagas(self) -> str:
        """Return the SQL that makes the tables of sagas in a file that has those of queues."""
        ...

    def outbox(self) -> str:
        """Return the SQL that makes the table of an outbox in a file."""
        ...


@runtime_checkable
class ScriptedTransport(ScriptedPart, Protocol):
    """A transport whose tables an administrator can make by hand."""

    def queue_statements(self, names: Sequence[str]) -> str:
        """Return the SQL that creates queues in those tables; connects to nothing. It may be run again."""
        ...

"""Questions that an operator can ask about a store and its queues without changing their contents; unreadable rows.

An unreadable row has headers that are no JSON, a due time outside the calendar, a blank destination, or content that is
missing. It stays in its table. The first call of a store or a queue that meets the row marks it. Then nothing claims
the row, and it does not delay anything else. Its raw bytes are kept. An operator sees the row and discards it, or mends
it with the tools of the database. A message that no queue accepts, and whose copy the error queue refuses, is marked in
the same way: see :meth:`postdate.ports.ClaimingStore.mark_unreadable`.

An unreadable row never holds up the rest. Source: ADR 0043.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

from postdate.errors import QueueNotFound
from postdate.messages import DelayedMessage, Envelope
from postdate.ports.scanning import StreamPosition


@dataclass(frozen=True, slots=True)
class PendingState:
    """The state of a pending message.

    Args:
        message: the pending message.
        attempt_at: instant after which the next attempt may be made, UTC; ``None`` while a process has a claim on it.
        claimed_by: the operating system's number of the process with the claim.
    """

    message: DelayedMessage
    attempt_at: datetime | None
    claimed_by: int | None = None


@dataclass(frozen=True, slots=True)
class QueuedMessage:
    """A message that was read from a queue and left there.

    Args:
        queue: the queue.
        envelope: the message.
        failures: how often handling the message failed in this queue.
        received_by: the operating system's number of the process that handles the message at the moment.
        number: position in the queue: of two messages, the older one has the smaller number.
    """

    queue: str
    envelope: Envelope
    failures: int
    received_by: int | None = None
    number: int = 0


@dataclass(frozen=True, slots=True)
class Process:
    """A process that uses a store or queues.

    Args:
        pid: the operating system's number of the process.
        host: name of the machine on which the process runs; empty where only its session is known.
        started_at: UTC, by the clock of that machine.
        alive: whether the process still runs. The claims of a dead process end as soon as another process notices.
        delivers: whether the process delivers due messages.
        receives: queues that the process receives from.
    """

    pid: int
    host: str
    started_at: datetime
    alive: bool
    delivers: bool
    receives: tuple[str, ...]

    def merge(self, other: Process) -> Process:
        """Return this and ``other`` as one process: one part is about its store, the other about its queues."""
        receives, delivers = tuple(sorted({*self.receives, *other.receives})), self.delivers or other.delivers
        return Process(self.pid, self.host, min(self.started_at, other.started_at), self.alive, delivers, receives)


@dataclass(frozen=True, slots=True)
class DeliveredMessage:
    """The delivery of a message: when it was delivered, and its due time, both UTC.

    ``due`` is ``None`` where the store does not keep the due time.
    """

    at: datetime
    due: datetime | None


class Observer(ABC):
    """Answers questions about a store, queues, or both in one database, without changing their contents.

    An observer of queues alone returns ``None`` or nothing for questions about a store, and the other way round.
    """

    @abstractmethod
    async def processes(self) -> Sequence[Process]:
        """Return every other process that uses the store or queues, including dead ones that were not noticed yet."""

    async def pending_state_of(self, message_id: str) -> PendingState | None:
        """Return the state of a pending message, or ``None`` when it is not pending here."""
        return None

    async def retries_of(self, message_id: str) -> Sequence[PendingState]:
        """Return pending messages that carry ``message_id`` as their header, but have another id of their own.

        These are delayed retries of the message. The call reads every pending message.
        """
        return ()

    async def latest_deliveries(self, limit: int) -> Sequence[DeliveredMessage]:
        """Return up to ``limit`` of the latest deliveries, newest first, from the latest 100,000 records.

        Guarantees:
            conformance/test_deliveries.py::test_the_latest_deliveries_are_told.
        """
        return ()

    async def next_destinations(self, messages: int) -> Mapping[str, int] | None:
        """Return the number of messages for each destination among the next ``messages``; reads no message.

        ``None``: this observer cannot tell.
        """
        return None

    async def queue_lengths(self) -> Mapping[str, int]:
        """Return the number of messages in each queue, by name, including messages that are being handled."""
        return {}

    async def browse(self, queue: str, limit: int, after: int = 0) -> Sequence[QueuedMessage]:
        """Return up to ``limit`` messages of a queue whose number is greater than ``after``, oldest first.

        An empty result means that there are no more messages. Unreadable messages are left out.

        Raises:
            QueueNotFound: there is no such queue.
        """
        raise QueueNotFound(queue)

    async def last_number(self, queue: str) -> int:
        """Return the number of the newest message of a queue, 0 if the queue is empty.

        Later messages have a greater number for as long as that message is there.

        Raises:
            QueueNotFound: there is no such queue.
        """
        raise QueueNotFound(queue)

    async def find_in_queues(self, message_id: str) -> Sequence[QueuedMessage]:
        """Find a message by its own id or by its ``NServiceBus.MessageId`` header; reads every queue."""
        return ()


# --- servers -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server says of itself; :mod:`postdate.operations` judges it.

    Args:
        product: ``PostgreSQL``, ``MariaDB``, ``SQL Server`` or ``RabbitMQ``.
        version: version as the server writes it; it begins with numbers that are separated by dots.
        now: the server's clock, UTC, read while it answered; ``None`` where the server does not tell.
        schema_version: number of the last migration there; 0 without tables; ``None`` where no tables are needed.
        newest_schema_version: number of the last migration that this version of Postdate has for the server.
        settings: settings of the server that decide which data survives which failure. Names and values are in lower
            case, as texts from the driver: ``fsync``, ``synchronous_commit``, ``innodb_flush_log_at_trx_commit`` …
        missing_objects: tables and indexes that are missing although their migrations were applied, in words.
    """

    product: str
    version: str
    now: datetime | None = None
    schema_version: int | None = None
    newest_schema_version: int | None = None
    settings: Mapping[str, str] = field(default_factory=dict[str, str])
    missing_objects: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class OldSnapshot:
    """A session of a server that prevents the server from cleaning up after deliveries.

    Args:
        pid: number of the session, as the server calls it.
        application: the application that the session names; empty when it names none.
        user: of the session.
        age: how long the session has held its snapshot.
        state: what the session does, in the server's words, such as ``idle in transaction``.
        mend: statement that ends the snapshot, where ending a session does not; ``pid`` is 0 then.
    """

    pid: int
    application: str
    user: str
    age: timedelta
    state: str
    mend: str = ""


class Scripted(ABC):
    """A store, transport, or storage of timeouts, sagas or an outbox, with tables that an administrator can make."""

    @abstractmethod
    def setup_statements(self, endpoint: str) -> str:
        """Return the SQL that creates everything ``endpoint`` needs here, as one script; connects to nothing.

        The script of a store whose database can have queues also creates the tables of queues.

        Args:
            endpoint: its name; only stores and storage of timeouts have tables for each endpoint.
        """

    def queue_statements(self, names: Sequence[str]) -> str:
        """Return the SQL that creates queues in those tables; connects to nothing. The SQL may be run again."""
        return ""


@dataclass(frozen=True, slots=True)
class StoreTraffic:
    """The messages that wait in a store, and the processes that deliver them.

    Args:
        pending: number of pending messages.
        overdue: number of pending messages that are past their due time.
        oldest: earliest due time; ``None``: no message is pending.
        processes: processes that use the store; ``None`` where they cannot be seen.
        destinations: destinations of the messages that are due next, as far as these were read.
        zones: headers of the messages by which the store keeps time zones (:mod:`postdate.core.upkeep.wall_times`).
        positions: of the streams for which retention waits.
    """

    pending: int
    overdue: int
    oldest: datetime | None
    processes: Sequence[Process] | None
    destinations: Sequence[str]
    zones: Sequence[Mapping[str, str]]
    positions: Sequence[StreamPosition]


@dataclass(frozen=True, slots=True)
class FileFacts(StoreTraffic):
    """The state of a file, read without writing to it.

    Args:
        schema_version: of its tables.
        journal_mode: of SQLite; ``wal`` is what Postdate sets.
        queues: lengths by name.
        unreadable: number of unreadable rows of the store and of queues.
    """

    schema_version: int
    journal_mode: str
    queues: Mapping[str, int]
    unreadable: int


@dataclass(frozen=True, slots=True)
class FileScripts:
    """Functions that return the SQL with which an administrator makes the tables of a file; they open nothing.

    Args:
        database: makes the tables of store and queues in a new file.
        timeouts: makes the table of timeouts of an endpoint, with a prefix or ``None``, in a file that has those of
            queues.
        sagas: makes the tables of sagas in a file that has those of queues.
        outbox: makes the table of an outbox in a file.
    """

    database: Callable[[], str]
    timeouts: Callable[[str, str | None], str]
    sagas: Callable[[], str]
    outbox: Callable[[], str]


# --- rows that cannot be read -----------------------------------------------------------------------------------------


UNREADABLE: Final = "unreadable: "
"""First words of the details of records about unreadable rows; the reason follows."""


@dataclass(frozen=True, slots=True)
class UnreadableRow:
    """A row that is marked as unreadable.

    Args:
        number: identifies the row within this store or these queues.
        queue: the queue of the row; empty for the store.
        message_id: of the message, as far as it can be read.
        reason: why the row cannot be read.
        at: when the row was marked, UTC.
        raw: content of the row by column, byte for byte; text is in UTF-8, numbers in decimal digits.
    """

    number: int
    queue: str
    message_id: str
    reason: str
    at: datetime
    raw: Mapping[str, bytes]


class UnreadableRows(ABC):
    """A store, or queues, that mark unreadable rows. Every built-in store that has rows is one.

    Rows are marked inside claims, moves, receives and lists. Each row is decoded by itself. An unreadable row is marked
    in the same transaction. A *failed* record of the store is written where the id of the message can be read. The row
    is logged once, because the mark survives restarts. If reading fails for another reason, the messages that were
    claimed by then are released. Limits that became tighter later do not make stored rows unreadable.

    A marked row is not pending: it is neither claimed, listed, found by its id, cancelled, rescheduled nor replaced. No
    other message can be stored with its id.

    Guarantees:
        unreadable.an_unreadable_message_holds_up_nothing, an_unreadable_row_keeps_its_bytes,
        an_unreadable_row_is_discarded_once, the_oldest_that_can_be_read_is_fetched, an_operator_sees_the_others,
        an_unreadable_message_does_not_wait, unreadable_messages_are_counted_alone,
        tightened_limits_refuse_nothing_that_is_stored, what_no_queue_takes_is_marked.
    """

    @abstractmethod
    async def list_unreadable(self, limit: int) -> Sequence[UnreadableRow]:
        """Return up to ``limit`` marked rows, those with the lowest numbers first."""

    @abstractmethod
    async def count_unreadable(self) -> int:
        """Return how many rows are marked."""

    @abstractmethod
    async def discard_unreadable(self, number: int, now: datetime) -> None:
        """Delete a marked row for good; the message is recorded as discarded where its id can be read.

        Raises:
            MessageNotFound: no marked row has that number.
        """

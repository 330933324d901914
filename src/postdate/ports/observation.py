"""What an operator can ask about a store and its queues without changing their contents; and unreadable rows.

A row that is damaged (headers that are no JSON, a due time outside the calendar, a blank destination, content that is
gone) stays in its table. The first call of a store or a queue that meets it marks it, so that nothing claims it and it
holds up nothing else. Its raw bytes are kept. An operator sees them, and discards the row, or mends it with the tools
of the database. A message that no queue takes, and whose copy the error queue refuses, is marked in the same way: see
:meth:`postdate.ports.ClaimingStore.mark_unreadable`.

Source: design.md section 3.4 (an unreadable row never holds up the rest); ADR 0043.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

from postdate.errors import QueueNotFound
from postdate.messages import DelayedMessage, Envelope


@dataclass(frozen=True, slots=True)
class Standing:
    """The state of a pending message.

    Args:
        message: the pending message.
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
        number: its place in the queue: of two messages, the older one has the smaller number.
    """

    queue: str
    envelope: Envelope
    failures: int
    held_by: int | None = None
    number: int = 0


@dataclass(frozen=True, slots=True)
class Process:
    """A process that uses a store or queues.

    Args:
        pid: the system's number of it.
        host: the machine on which it runs, by its name; empty where only its session is known.
        started_at: UTC, on the machine's clock.
        alive: whether it still runs; claims of a dead one are free again as soon as another process looks.
        delivers: whether it delivers due messages.
        receives: queues it receives from.
    """

    pid: int
    host: str
    started_at: datetime
    alive: bool
    delivers: bool
    receives: tuple[str, ...]

    def joined(self, other: Process) -> Process:
        """Return what both say of one process, which has a part for its store and another for its queues."""
        receives, delivers = tuple(sorted({*self.receives, *other.receives})), self.delivers or other.delivers
        return Process(self.pid, self.host, min(self.started_at, other.started_at), self.alive, delivers, receives)


@dataclass(frozen=True, slots=True)
class Delivered:
    """That a message was delivered: when, and when it was due; ``None`` where the store does not keep that. UTC."""

    at: datetime
    due: datetime | None


class Observer(ABC):
    """Looks at a store, or queues, or both where they live in one database, without changing their contents.

    An observer of queues alone returns ``None`` or nothing for questions about a store, and the other way round.
    """

    @abstractmethod
    async def processes(self) -> Sequence[Process]:
        """Return every other process that uses them, dead ones included that were not noticed yet."""

    async def standing(self, message_id: str) -> Standing | None:
        """Return the state of a pending message, or ``None`` when it does not wait here."""
        return None

    async def retries_of(self, message_id: str) -> Sequence[Standing]:
        """Return pending messages that carry ``message_id`` as their header, but have another id of their own.

        These are delayed retries of the message; reads every pending message.
        """
        return ()

    async def last_delivered(self, limit: int) -> Sequence[Delivered]:
        """Return up to ``limit`` of the latest deliveries, newest first, of those that the latest 100,000 records tell.

        Guarantees:
            conformance/test_deliveries.py::test_the_latest_deliveries_are_told.
        """
        return ()

    async def next_destinations(self, messages: int) -> Mapping[str, int] | None:
        """Return how many of the next ``messages`` messages each destination gets, without reading the messages.

        ``None``: this observer cannot tell.
        """
        return None

    async def queue_lengths(self) -> Mapping[str, int]:
        """Return how many messages each queue holds, by name, those being handled included."""
        return {}

    async def browse(self, queue: str, limit: int, after: int = 0) -> Sequence[Queued]:
        """Return up to ``limit`` messages of a queue whose number is greater than ``after``, oldest first.

        Without one there are no more. Messages that cannot be read are left out.

        Raises:
            QueueNotFound: there is no such queue.
        """
        raise QueueNotFound(queue)

    async def last_number(self, queue: str) -> int:
        """Return the number of the newest message of a queue, 0 if it is empty.

        What comes later has a greater number for as long as that message is there.

        Raises:
            QueueNotFound: there is no such queue.
        """
        raise QueueNotFound(queue)

    async def find_in_queues(self, message_id: str) -> Sequence[Queued]:
        """Return where a message is, by its own id or by its ``NServiceBus.MessageId`` header; reads every queue."""
        return ()


# --- servers -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server says of itself; :mod:`postdate.operations` judges it.

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


@dataclass(frozen=True, slots=True)
class OldSnapshot:
    """A session of a server that keeps it from cleaning up after deliveries.

    Args:
        pid: number of the session, as the server calls it.
        application: what the session says it is; empty when it says nothing.
        user: of the session.
        age: how long it has held its snapshot.
        state: what it does, in the server's words, such as ``idle in transaction``.
        mend: statement that ends the snapshot, where ending a session does not; ``pid`` is 0 then.
    """

    pid: int
    application: str
    user: str
    age: timedelta
    state: str
    mend: str = ""


class Scripted(ABC):
    """A store, transport, or storage of timeouts, sagas or an outbox, whose tables can be made by hand."""

    @abstractmethod
    def setup_statements(self, endpoint: str) -> str:
        """Return the SQL that creates everything ``endpoint`` needs here, as one script; connects to nothing.

        Where a store's database can hold queues, it creates their tables, too.

        Args:
            endpoint: its name; only stores and storage of timeouts have tables of an endpoint.
        """

    def queue_statements(self, names: Sequence[str]) -> str:
        """Return the SQL that creates queues in those tables; connects to nothing. It may be run again."""
        return ""


@dataclass(frozen=True, slots=True)
class StoreTraffic:
    """Messages that wait in a store, and who delivers them.

    Args:
        pending: messages that wait.
        overdue: of these, past their due time.
        oldest: when the first of them is due; ``None``: none waits.
        processes: that use the store; ``None`` where they cannot be seen.
        destinations: of the messages that are due next, as far as was looked.
        zones: headers of the messages by which the store keeps time zones (:mod:`postdate.core.upkeep.wall_times`).
    """

    pending: int
    overdue: int
    oldest: datetime | None
    processes: Sequence[Process] | None
    destinations: Sequence[str]
    zones: Sequence[Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class FileFacts(StoreTraffic):
    """What a look at a file found, without writing to it.

    Args:
        schema_version: of its tables.
        journal_mode: of SQLite; ``wal`` is what Postdate sets.
        queues: lengths by name.
        unreadable: rows of the store and of queues that cannot be read.
    """

    schema_version: int
    journal_mode: str
    queues: Mapping[str, int]
    unreadable: int


@dataclass(frozen=True, slots=True)
class FileScripts:
    """The SQL by which an administrator makes the tables of a file; nothing is opened.

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
"""How the details of records about unreadable rows begin; the reason follows."""


@dataclass(frozen=True, slots=True)
class UnreadableRow:
    """A row that is marked as unreadable.

    Args:
        number: names it for the operator, within this store or these queues.
        queue: the queue it is in; empty for the store.
        message_id: of the message, as far as it can be read.
        reason: why it cannot be read.
        at: when it was marked, UTC.
        raw: what the row holds, by column, byte for byte; text is in UTF-8, numbers in decimal digits.
    """

    number: int
    queue: str
    message_id: str
    reason: str
    at: datetime
    raw: Mapping[str, bytes]


class UnreadableRows(ABC):
    """A store, or queues, that mark rows that they cannot read. Every built-in store that has rows is one.

    Rows are marked inside claims, moves, receives and lists: each row is decoded by itself, and one that cannot be is
    marked in the same transaction, with a *failed* record of the store where its id can be read. It is logged once, as
    the mark survives restarts. If reading fails otherwise, messages claimed by then are given back. Stored rows are not
    held against limits that were tightened since.

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
        """Delete a marked row, for good; recorded as discarded where its id can be read.

        Raises:
            MessageNotFound: no row of that number is marked.
        """

"""What the core needs from the outside: stores, transports, and what each of them can do.

Ports are small. A store of one's own is the class :class:`DelayedMessageStore`; everything else is a capability that
an adapter declares as a value and that is checked at start-up, never silently assumed.

Source: specification 1.1 and 6; design.md sections 3 and 4; ADR 0002 (claims), ADR 0003 (one file).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Protocol, runtime_checkable

from postdate.errors import PostdateError
from postdate.messages import DelayedMessage, Envelope


class TransactionMode(enum.Enum):
    """What receiving, handling and sending have in common when something fails (specification 6)."""

    NONE = "none"
    RECEIVE_ONLY = "receive_only"
    SENDS_ATOMIC_WITH_RECEIVE = "sends_atomic_with_receive"
    TRANSACTION_SCOPE = "transaction_scope"


class Outcome(enum.Enum):
    """How a delayed message ended."""

    DELIVERED = "delivered"
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    FAILED = "failed"


class RecordKind(enum.IntEnum):
    """What a record says happened. The numbers are stored; they never change."""

    SCHEDULED = 1
    DELIVERED = 2
    HANDLED = 3
    RETRIED = 4
    EXPIRED = 5
    CANCELLED = 6
    FAILED = 7
    RESCHEDULED = 8
    DISCARDED = 9
    RETURNED = 10


OUTCOME_RECORDS: Mapping[Outcome, RecordKind] = {
    Outcome.DELIVERED: RecordKind.DELIVERED,
    Outcome.EXPIRED: RecordKind.EXPIRED,
    Outcome.CANCELLED: RecordKind.CANCELLED,
    Outcome.FAILED: RecordKind.FAILED,
}


class Recording(enum.Enum):
    """How much of what happens to delayed messages is kept for audits.

    ``ALL`` keeps scheduled, delivered, expired, cancelled, failed, rescheduled, retried and handled; ``OUTCOMES``
    leaves out retried and handled; ``NONE`` keeps nothing once a message has left the store, so that an id may be used
    again and nothing can be audited.
    """

    ALL = "all"
    OUTCOMES = "outcomes"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Record:
    """One line of what happened to a delayed message; written in the transaction in which it happened.

    Args:
        kind: what happened.
        message_id: of the delayed message.
        at: when, on the clock of the process that did it; UTC.
        due: the due time then; UTC.
        destination: where it was meant to go.
        detail: reason of a retry, failure, or discard; empty otherwise.
    """

    kind: RecordKind
    message_id: str
    at: datetime
    due: datetime | None
    destination: str | None
    detail: str = ""


NativeTransaction = Any
"""A database transaction that is open: what the driver calls it. Only adapters of one database look inside."""

Work = Callable[[NativeTransaction], None]
"""Something to be done inside another adapter's native transaction. Raising rolls the whole transaction back."""

Wake = Callable[[], None]
"""Called from any thread to say: look again now. Never blocks."""


# --- stores -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoreCapabilities:
    """What a store can do.

    Args:
        durable: what was stored survives the process.
        shared: several processes may use it at once.
        time_precision: due times are kept to this; never rounded to an earlier instant.
        transaction_modes: modes in which the store can keep its part of the promise.
        database: identity of the database; a transport with an equal identity can share a transaction with it.
        largest_message_bytes: headers and body together.
    """

    durable: bool
    shared: bool
    time_precision: timedelta
    transaction_modes: frozenset[TransactionMode]
    database: object | None = None
    largest_message_bytes: int = 16 * 1024 * 1024


@runtime_checkable
class DelayedMessageStore(Protocol):
    """Keeps messages until they are due. This is all that a store of one's own must have (specification 1.1)."""

    @property
    def capabilities(self) -> StoreCapabilities:
        """What this store can do; constant."""
        ...

    async def initialize(self, endpoint: str, mode: TransactionMode) -> None:
        """Prepare for use by ``endpoint``; called once, before :meth:`SetsUp.setup` and any other call.

        Raises:
            UnsupportedTransactionMode: the store cannot keep its part of ``mode``; the endpoint does not start.

        Guarantees:
            capabilities.declared_modes_are_accepted_and_others_refused.
        """
        ...

    async def store(self, message: DelayedMessage, now: datetime) -> None:
        """Keep one message durably; returns after the commit.

        A message that went to the error queue may be stored again under its id: so it comes back when it is returned.

        Raises:
            DuplicateMessage: the id was stored before; the first message is unchanged.
            MessageTooLarge: over ``largest_message_bytes``; nothing was stored.
            StoreUnavailable: transient; nothing was stored.

        Guarantees:
            storing.a_message_is_unchanged, a_duplicate_is_refused, a_failed_message_may_come_back,
            too_large_is_refused, a_race_for_one_id_has_one_winner, what_is_stored_survives_closing.
        """
        ...

    async def fetch_next_due(self, now: datetime) -> DelayedMessage | None:
        """Claim the oldest message with ``due`` strictly before ``now``, or return ``None``.

        A claimed message is hidden from every other caller until it is removed, its failure count is incremented, or
        the claiming process dies.

        Guarantees:
            contract.oldest_due_first, due_is_compared_strictly, a_fetched_message_is_hidden.
        """
        ...

    async def remove(self, message_id: str, now: datetime) -> bool:
        """Remove a message that was delivered; ``False`` when it is not there (any more).

        Guarantees:
            contract.remove_says_whether_it_was_there, remove_is_a_delivery.
        """
        ...

    async def increment_failure_count(self, message_id: str, now: datetime) -> bool:
        """Count one failed attempt and give the claim back; ``False`` when the message is not there (any more).

        Guarantees:
            contract.increment_says_whether_it_was_there, a_failed_message_is_fetched_again_unchanged.
        """
        ...

    async def next_due(self) -> datetime | None:
        """Return the earliest due time, UTC, overdue messages included; ``None`` when the store is empty.

        Guarantees:
            contract.next_due_is_the_earliest.
        """
        ...


@runtime_checkable
class SetsUp(Protocol):
    """A store or transport that can create what it needs (tables, indexes)."""

    async def setup(self) -> None:
        """Create what is missing; idempotent, and safe when several processes do it at once."""
        ...


@dataclass(frozen=True, slots=True)
class StoreReport:
    """What became of a batch.

    Args:
        stored: how many are new in the store.
        already_there: ids that were stored before, in the order given; the first messages are unchanged.
    """

    stored: int
    already_there: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Claim:
    """A due message held by one process until it is finished, released, or the process dies.

    Args:
        message: what is held.
        token: fences the claim: finishing or releasing with a token that was taken over has no effect and says so.
    """

    message: DelayedMessage
    token: object


@runtime_checkable
class ClaimingStore(DelayedMessageStore, Protocol):
    """A store that works in batches. Every built-in store is one."""

    async def store_many(self, messages: Sequence[DelayedMessage], now: datetime) -> StoreReport:
        """Keep a batch in one transaction, idempotent by message id.

        Args:
            messages: any number; an id that stands twice counts once as already there.
            now: recorded as the time of scheduling.

        Raises:
            MessageTooLarge, StoreUnavailable: nothing of the batch was stored.

        Guarantees:
            storing.a_batch_is_idempotent, an_id_twice_in_a_batch_counts_once,
            a_batch_with_one_too_large_is_refused_whole.
        """
        ...

    async def claim_due(self, now: datetime, limit: int) -> Sequence[Claim]:
        """Claim up to ``limit`` messages that may be attempted strictly before ``now``, oldest first.

        Guarantees:
            claims.oldest_first_up_to_the_limit, due_is_compared_strictly, a_claimed_message_is_hidden,
            tasks_claim_each_message_once, other_processes_do_not_claim_it_too, claims_end_with_their_process.
        """
        ...

    async def finish(self, claims: Sequence[Claim], outcome: Outcome, now: datetime, detail: str = "") -> int:
        """Remove claimed messages and record how they ended, in one transaction; return how many were still held.

        Guarantees:
            claims.finish_removes, a_claim_given_back_is_void; recording.all_keeps_everything.
        """
        ...

    async def retry_later(self, claim: Claim, attempt_at: datetime, now: datetime, reason: str) -> bool:
        """Count a failure and give the claim back; not eligible again before ``attempt_at``.

        Guarantees:
            claims.retry_later_waits, failures_add_up, a_finished_claim_cannot_be_given_back,
            a_claim_given_back_is_void.
        """
        ...

    async def next_attempt(self) -> datetime | None:
        """Return the earliest instant at which an unclaimed message may be attempted, UTC; ``None`` without any.

        Guarantees:
            claims.next_attempt_is_the_earliest.
        """
        ...

    async def listen(self, wake: Wake) -> Callable[[], None]:
        """Call ``wake`` after the commit of a message that is due before all others; returns the way to stop it.

        Guarantees:
            claims.what_is_due_earlier_wakes, a_wake_up_follows_the_commit, other_processes_are_woken.
        """
        ...


@runtime_checkable
class EnlistingStore(ClaimingStore, Protocol):
    """A store whose writes can be part of a transaction on the same database."""

    def storing(self, messages: Sequence[DelayedMessage], now: datetime) -> Work:
        """Return the work that stores ``messages`` (ids already there are left as they are).

        Guarantees:
            capabilities.storing_is_part_of_the_transaction.
        """
        ...

    def finishing(self, claims: Sequence[Claim], outcome: Outcome, now: datetime, detail: str = "") -> Work:
        """Return the work that finishes ``claims``; it raises ``ClaimLost`` when one is no longer held.

        Guarantees:
            capabilities.finishing_is_part_of_the_transaction.
        """
        ...


@dataclass(frozen=True, slots=True)
class MoveReport:
    """What one move did.

    Args:
        delivered: how many went to their queue.
        expired: how many were past their expiry and were recorded instead.
        left_behind: whether the oldest message that is still due has no queue in this database: it must be claimed.
        next_attempt: see :meth:`ClaimingStore.next_attempt`, as of the end of the move.
    """

    delivered: int
    expired: int
    left_behind: bool
    next_attempt: datetime | None


@runtime_checkable
class MovingStore(EnlistingStore, Protocol):
    """A store that shares its database with the queues: due messages move without leaving the database."""

    async def move_due(self, now: datetime, limit: int) -> MoveReport:
        """Move up to ``limit`` due messages to their queues, oldest first, remove and record them: one transaction.

        Guarantees:
            capabilities.due_messages_move_to_their_queues, a_move_takes_no_more_than_its_limit.
        """
        ...

    async def pause(self) -> None:
        """Give other writers their turn between two moves; returns at once when there are none."""
        ...


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """Counts of one store, consistent with each other.

    Args:
        pending: messages that wait.
        overdue: of these, due strictly before ``now`` and held by nobody.
        claimed: of these, held by a process at the moment.
        failing: of these, with at least one failed attempt.
        next_due: earliest due time, UTC.
    """

    pending: int
    overdue: int
    claimed: int
    failing: int
    next_due: datetime | None


@dataclass(frozen=True, slots=True)
class MessageFilter:
    """Which pending messages; every given condition must hold. Due bounds: from inclusive, to exclusive."""

    destination: str | None = None
    due_from: datetime | None = None
    due_to: datetime | None = None

    def matches(self, message: DelayedMessage) -> bool:
        """Return whether ``message`` fulfils every condition."""
        return (
            (self.destination is None or message.destination == self.destination)
            and (self.due_from is None or message.due >= self.due_from)
            and (self.due_to is None or message.due < self.due_to)
        )


@runtime_checkable
class InspectableStore(Protocol):
    """What an operator asks of a store."""

    async def statistics(self, now: datetime) -> StoreStatistics:
        """Count what is there; reads an index, not the messages.

        Guarantees:
            administration.statistics_agree_with_the_messages.
        """
        ...

    async def record_counts(self) -> Mapping[RecordKind, int]:
        """Count the records of each kind; reads them all.

        Guarantees:
            recording.a_record_says_what_when_and_why.
        """
        ...

    async def list_pending(self, where: MessageFilter, limit: int) -> Sequence[DelayedMessage]:
        """Return up to ``limit`` pending messages by due time, then id of storing.

        Guarantees:
            administration.pending_messages_are_listed.
        """
        ...

    async def get(self, message_id: str) -> DelayedMessage | None:
        """Return a pending message, or ``None``.

        Guarantees:
            administration.a_pending_message_is_found_by_id.
        """
        ...

    async def history(self, message_id: str) -> Sequence[Record]:
        """Return every record of one message in the order of writing.

        Guarantees:
            recording.a_record_says_what_when_and_why, all_keeps_everything, outcomes_leaves_out_retries,
            none_keeps_nothing_of_what_has_left.
        """
        ...


@runtime_checkable
class AdministrableStore(InspectableStore, Protocol):
    """A store whose pending messages an operator can change (specification row 119)."""

    async def cancel(self, message_id: str, now: datetime) -> bool:
        """Remove a pending message for good and record it; ``False`` when it is not there or is being dispatched.

        Guarantees:
            administration.a_cancelled_message_is_gone, what_is_being_dispatched_is_left_alone.
        """
        ...

    async def reschedule(self, message_id: str, due: datetime, now: datetime) -> bool:
        """Give a pending message another due time; ``False`` when it is not there or is being dispatched.

        Raises:
            InvalidMessage: the message expires before ``due``.

        Guarantees:
            administration.a_rescheduled_message_has_its_new_due_time, rescheduling_earlier_wakes,
            nothing_is_rescheduled_past_its_expiry, what_is_being_dispatched_is_left_alone.
        """
        ...


@dataclass(frozen=True, slots=True)
class ScanPart:
    """One share of a scan: rows whose number is at least ``first`` and below ``end``."""

    first: int
    end: int


@runtime_checkable
class ScannableStore(Protocol):
    """Pages through everything a store holds, in shares that can be read in parallel by several processes.

    Pages are lists of plain rows, in the order of the column names given; times are whole microseconds since 1970 UTC.
    ``what`` is one of ``pending``, ``records``, ``queued``:

    - ``pending``: message_id, destination, due, expires_at, headers (JSON text), body, number_of_failures
    - ``records``: kind (number of :class:`RecordKind`), message_id, at, due, destination, detail
    - ``queued``: message_id, queue, due; messages that are in a queue of the same database and not yet handled
    """

    def scan_parts(self, what: str, parts: int) -> Sequence[ScanPart]:
        """Split the rows that exist now into at most ``parts`` shares; blocking, meant for pipeline processes.

        Guarantees:
            scanning.parts_cover_every_row_once, an_empty_store_has_no_rows, what_does_not_exist_is_refused.
        """
        ...

    def scan(self, what: str, part: ScanPart, columns: Sequence[str], page: int) -> Iterable[list[tuple[Any, ...]]]:
        """Yield pages of at most ``page`` rows of one share, from one consistent snapshot of the share; blocking.

        Guarantees:
            scanning.columns_come_as_asked_for, parts_cover_every_row_once.
        """
        ...


# --- transports -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TransportCapabilities:
    """What a transport can do.

    Args:
        durable: what was sent survives the process.
        transaction_modes: modes whose promise it keeps.
        database: identity of the database that its queues live in, if any; see :class:`StoreCapabilities`.
        largest_message_bytes: headers and body together.
        expires_messages: a message past its expiry is discarded by the queue itself.
    """

    durable: bool
    transaction_modes: frozenset[TransactionMode]
    database: object | None = None
    largest_message_bytes: int = 16 * 1024 * 1024
    expires_messages: bool = False


@dataclass(frozen=True, slots=True)
class Received:
    """A message taken from a queue and held by this process.

    Args:
        envelope: the message; ``destination`` is the queue it was in.
        failures: how often handling it failed before, as far as the transport knows.
        token: fences the hold.
    """

    envelope: Envelope
    failures: int
    token: object


@dataclass(frozen=True, slots=True)
class End:
    """How handling of a received message ended.

    Args:
        record: what is recorded of a message that had been delayed; ``None``: nothing.
        detail: reason, for the record.
        outgoing: messages to send.
        work: to be done in the same transaction; only with a transport in the database of the work.
    """

    record: RecordKind | None = RecordKind.HANDLED
    detail: str = ""
    outgoing: Sequence[Envelope] = ()
    work: Sequence[Work] = ()


HANDLED = End()


@runtime_checkable
class Receiver(Protocol):
    """One queue being received from."""

    async def receive(self, limit: int) -> Sequence[Received]:
        """Wait until there is a message, then hold up to ``limit``, oldest first; never empty.

        The wait may be cancelled; nothing is held then.

        Guarantees:
            receiving.up_to_the_limit_is_received, receiving_waits_for_a_message, a_held_message_is_hidden,
            a_cancelled_receive_loses_nothing, competing_receivers_share_the_messages.
        """
        ...

    async def commit(self, received: Received, now: datetime, end: End = HANDLED) -> None:
        """Take the message off the queue for good, with everything in ``end``: one transaction where it can be.

        Raises:
            ClaimLost: another process took the message over; nothing was sent or done.
            QueueNotFound: an outgoing message has no queue; nothing was sent or done.
            TransportUnavailable: transient; the message is still held.

        Guarantees:
            receiving.a_committed_message_is_gone, a_lost_hold_is_noticed;
            transactions.outgoing_messages_leave_with_the_commit, one_bad_outgoing_message_undoes_the_commit,
            a_lost_hold_sends_nothing.
        """
        ...

    async def roll_back(self, received: Received, *, failed: bool = True) -> None:
        """Give the message back to its queue; with ``failed`` its failure count grows by one.

        Guarantees:
            receiving.a_message_rolled_back_is_received_again, a_message_rolled_back_wakes_others.
        """
        ...

    async def close(self) -> None:
        """Give back everything still held.

        Guarantees:
            receiving.closing_gives_back_what_is_held.
        """
        ...


@runtime_checkable
class TakingReceiver(Receiver, Protocol):
    """A receiver that can pick one message out of its queue."""

    async def take(self, message_id: str) -> Received | None:
        """Hold one message, chosen by its id, or return ``None``: it is not in the queue, or held already.

        Raises:
            QueueNotFound: there is no such queue.

        Guarantees:
            receiving.a_message_is_taken_by_its_id.
        """
        ...


@runtime_checkable
class Transport(Protocol):
    """Queues."""

    @property
    def capabilities(self) -> TransportCapabilities:
        """What this transport can do; constant."""
        ...

    async def create_queues(self, names: Sequence[str]) -> None:
        """Create the queues that do not exist yet; idempotent.

        Guarantees:
            sending.creating_a_queue_again_keeps_its_messages.
        """
        ...

    async def send(
        self, envelopes: Sequence[Envelope], now: datetime, *, work: Sequence[Work] = ()
    ) -> Sequence[PostdateError | None]:
        """Send each message durably, or say why not.

        Args:
            envelopes: in the order in which they are to arrive.
            now: time of sending.
            work: only with a transport that lives in the database of the work: one transaction with all the sends, in
                which any failure rolls back everything and is raised.

        Returns:
            One entry an envelope, in order: ``None`` when it was sent, else ``QueueNotFound``, ``MessageTooLarge`` or
            ``TransportUnavailable``.

        Guarantees:
            sending.order_is_kept, headers_and_body_are_unchanged, unicode_survives,
            expiry_and_due_time_are_carried, a_missing_queue_is_a_value, too_large_is_a_value;
            capabilities.work_of_a_database_is_done_or_refused.
        """
        ...

    def receiver(self, queue: str) -> Receiver:
        """Return a receiver on ``queue``, which must exist when :meth:`Receiver.receive` is called.

        Guarantees:
            receiving.a_missing_queue_raises.
        """
        ...

    async def close(self) -> None:
        """Release connections."""
        ...


# --- observation ------------------------------------------------------------------------------------------------


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


class Observer(Protocol):
    """Looks at a store and its queues without changing what is in them."""

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
        """Return every other process that uses the file, the dead ones that nobody noticed yet included."""
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

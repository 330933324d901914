"""Stores of delayed messages as the core uses them: store, claim, move. Source: ADR 0002, 0003."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, Protocol, Self, runtime_checkable

from typing_extensions import override

from postdate.errors import NotSupported
from postdate.messages import DelayedMessage
from postdate.ports.common import Capable, Outcome, TransactionMode, Wake, Work


@dataclass(frozen=True, slots=True)
class StoreCapabilities:
    """The capabilities of a store.

    Args:
        durable: stored messages survive the process.
        shared: several processes may use the store at once.
        time_precision: due times are kept to this precision; the store never rounds to an earlier instant.
        transaction_modes: modes in which the store can keep its part of the promise.
        database: identity of the database; a transport with an equal identity can share a transaction with the store.
        largest_message_bytes: limit for headers and body together.
        holds_at_most: a process that shows no sign of life for so long loses its claims to other processes, and its
            tokens become void. ``None``: a frozen process keeps its claims until it ends or wakes.
        has_clock: the store is on a server with a clock of its own (PostgreSQL, MariaDB, SQL Server, Azure). All
            services that share the store can follow that clock: see :meth:`ClaimingStore.server_now`.
    """

    durable: bool
    shared: bool
    time_precision: timedelta
    transaction_modes: frozenset[TransactionMode]
    database: object | None = None
    largest_message_bytes: int = 16 * 1024 * 1024
    holds_at_most: timedelta | None = None
    has_clock: bool = False


SIMPLE_STORE = StoreCapabilities(
    durable=True,
    shared=False,
    time_precision=timedelta(microseconds=1),
    transaction_modes=frozenset(TransactionMode) - {TransactionMode.TRANSACTION_SCOPE},
)
"""The capabilities of a store that declares none."""


@runtime_checkable
class DelayedMessageStore(Protocol):
    """A store that keeps messages until they are due, with the methods that a user's store must have.

    There is no base class to inherit from: every class with these methods is a store. It may have
    more: ``async setup()``, which creates missing tables; ``close()``; and a property ``capabilities``
    (:class:`StoreCapabilities`). A store without that property has the capabilities :data:`SIMPLE_STORE`. A store
    declares every other role by inheriting from the class of the role.
    """

    @abstractmethod
    async def initialize(self, endpoint: str, mode: TransactionMode) -> None:
        """Prepare the store for ``endpoint``; called once, before ``setup()`` and any other call.

        Raises:
            UnsupportedTransactionMode: the store cannot keep its part of ``mode``; the endpoint does not start.

        Guarantees:
            capabilities.declared_modes_are_accepted_and_others_refused.
        """

    @abstractmethod
    async def store(self, message: DelayedMessage, now: datetime) -> None:
        """Store one message durably; return after the commit.

        A message that went to the error queue may be stored again under its id. This happens when an operator returns
        the message from the error queue.

        Raises:
            DuplicateMessage: the id was stored before; the first message is unchanged.
            MessageTooLarge: over ``largest_message_bytes``; nothing was stored.
            StoreUnavailable: transient; nothing was stored.

        Guarantees:
            storing.a_message_is_unchanged, a_duplicate_is_refused, a_failed_message_may_come_back,
            too_large_is_refused, a_race_for_one_id_has_one_winner,
            of_many_at_once_each_id_is_stored_once, what_is_stored_survives_closing,
            what_a_store_says_of_itself_blames_no_message.
        """

    @abstractmethod
    async def fetch_next_due(self, now: datetime) -> DelayedMessage | None:
        """Claim the oldest message with ``due`` strictly before ``now``, or return ``None``.

        A claimed message is hidden from every other caller until it is removed, its failure count is incremented, or
        the claiming process dies.

        Guarantees:
            contract.oldest_due_first, due_is_compared_strictly, a_fetched_message_is_hidden.
        """

    @abstractmethod
    async def remove(self, message_id: str, now: datetime) -> bool:
        """Remove a message that was delivered; return ``False`` when the store does not have the message (any more).

        Guarantees:
            contract.remove_says_whether_it_was_there, remove_is_a_delivery.
        """

    @abstractmethod
    async def increment_failure_count(self, message_id: str, now: datetime) -> bool:
        """Count one failed attempt and release the claim; return ``False`` when the message is not there (any more).

        Guarantees:
            contract.increment_says_whether_it_was_there, a_failed_message_is_fetched_again_unchanged.
        """

    @abstractmethod
    async def next_due(self) -> datetime | None:
        """Return the earliest due time, UTC, overdue messages included; ``None`` when the store is empty.

        Guarantees:
            contract.next_due_is_the_earliest.
        """


def capabilities_of(store: DelayedMessageStore) -> StoreCapabilities:
    """Return the capabilities that a store declares, or :data:`SIMPLE_STORE`."""
    capabilities = getattr(store, "capabilities", None)
    return capabilities if isinstance(capabilities, StoreCapabilities) else SIMPLE_STORE


@dataclass(frozen=True, slots=True)
class StoreReport:
    """The number of messages of a batch that were stored, and the ids of the others.

    Args:
        stored: number of messages that are new in the store.
        duplicate_ids: ids that were stored before, in the order of the batch; the first messages are unchanged.
    """

    stored: int
    duplicate_ids: tuple[str, ...] = ()

    @classmethod
    def of(cls, message_ids: Iterable[str], new_ids: Iterable[str]) -> Self:
        """Return the report of a batch in which the ``new_ids`` ids are new; an id is new only once."""
        remaining_ids = set(new_ids)
        stored, duplicate_ids = len(remaining_ids), list[str]()
        for message_id in message_ids:
            if message_id in remaining_ids:
                remaining_ids.discard(message_id)
            else:
                duplicate_ids.append(message_id)
        return cls(stored, tuple(duplicate_ids))


@dataclass(frozen=True, slots=True)
class Claim:
    """A due message that is reserved for one process until it is finished, released, or the process dies.

    Args:
        message: the claimed message.
        token: proves that the claim is still the one that was made. When another process has claimed the message
            since, finishing or releasing with the old token has no effect, and the result says so.
    """

    message: DelayedMessage
    token: object


class ClaimingStore(DelayedMessageStore, Capable[StoreCapabilities]):
    """A store that works in batches. Every built-in store is a claiming store."""

    @override
    async def fetch_next_due(self, now: datetime) -> DelayedMessage | None:
        claims = await self.claim_due(now, 1)
        return claims[0].message if claims else None

    async def setup(self) -> None:
        """Create missing tables and indexes; idempotent, and safe when several processes do it at once."""

    async def close(self) -> None:
        """Release the connections; a second call has no effect."""

    @abstractmethod
    async def store_many(self, messages: Sequence[DelayedMessage], now: datetime) -> StoreReport:
        """Store a batch in one transaction, idempotent by message id.

        Args:
            messages: any number; the second occurrence of an id counts as already there.
            now: recorded as the time of scheduling.

        Raises:
            MessageTooLarge, StoreUnavailable: no message of the batch was stored.

        Guarantees:
            storing.a_batch_is_idempotent, an_id_twice_in_a_batch_counts_once,
            a_batch_with_one_too_large_is_refused_whole.
        """

    @abstractmethod
    async def claim_due(self, now: datetime, limit: int) -> Sequence[Claim]:
        """Claim up to ``limit`` messages that may be attempted strictly before ``now``, oldest first.

        A cancelled call leaves nothing claimed. If the server makes the claims after the cancellation, the store
        releases them. The release wakes listeners, unless :meth:`next_attempt` has counted these messages meanwhile.

        Guarantees:
            claims.oldest_first_up_to_the_limit, due_is_compared_strictly, a_claimed_message_is_hidden,
            tasks_claim_each_message_once, other_processes_do_not_claim_it_too, claims_end_with_their_process.
        """

    @abstractmethod
    async def finish(self, claims: Sequence[Claim], outcome: Outcome, now: datetime, detail: str = "") -> int:
        """Remove claimed messages and record their outcome, in one transaction; return how many claims were in force.

        Callers take a return for a sign that the store works. So a store whose claims end with an error asks its server
        also for claims that have ended.

        Guarantees:
            claims.finish_removes, a_claim_given_back_is_void, a_claim_from_before_a_comeback_is_void;
            recording.all_keeps_everything.
        """

    @abstractmethod
    async def retry_later(self, claim: Claim, attempt_at: datetime, now: datetime, reason: str) -> bool:
        """Count a failure and release the claim; the message is not claimed again before ``attempt_at``.

        Guarantees:
            claims.retry_later_waits, failures_add_up, a_finished_claim_cannot_be_given_back,
            a_claim_given_back_is_void.
        """

    @abstractmethod
    async def next_attempt(self) -> datetime | None:
        """Return the earliest instant at which an unclaimed message may be attempted, UTC; ``None`` without any.

        For a message that is stored during the call, either the answer counts the message or listeners are woken.

        Guarantees:
            claims.next_attempt_is_the_earliest, what_is_stored_during_a_look_is_not_slept_over.
        """

    @abstractmethod
    async def listen(self, wake: Wake) -> Callable[[], None]:
        """Call ``wake`` after the commit of a message that is due before all others; return a function that stops this.

        Guarantees:
            claims.what_is_due_earlier_wakes, a_wake_up_follows_the_commit, other_processes_are_woken.
        """

    @abstractmethod
    async def release(self, claims: Sequence[Claim], attempt_at: datetime | None) -> int:
        """Release claims in one transaction; the store counts no failure and writes no record.

        A dispatcher calls this for messages that it could not send because of an outage, and for messages that it has
        not begun to send when its process stops.

        Args:
            claims: any number; the call ignores claims that are not in force any more.
            attempt_at: the messages are not claimed again before this instant, UTC. ``None``: they can be claimed
                again at once, as before the claim.

        Returns:
            How many claims were in force.

        Raises:
            StoreUnavailable: transient; the claims are still in force, or have ended because their connection was lost.

        Guarantees:
            claims.a_released_claim_counts_nothing, a_released_message_waits_until_then, a_released_claim_is_void.
        """

    async def mark_unreadable(self, claim: Claim, reason: str, now: datetime) -> bool:
        """Mark a claimed message that neither its queue nor the error queue accepts; see :class:`UnreadableRows`.

        The mark ends the claim, and the message is recorded as failed.

        Args:
            claim: of this process; the call ignores a claim that is not in force.
            reason: shown to the operator, and recorded.
            now: UTC.

        Returns:
            Whether the message is marked now; always ``False`` for a store that is no :class:`UnreadableRows`.

        Guarantees:
            unreadable.what_no_queue_takes_is_marked.
        """
        return False

    def listen_for_lost_claims(self, on_lost: Callable[[Collection[str]], None]) -> Callable[[], None]:
        """Call ``on_lost`` with the ids of messages whose claims are void from now on.

        Return a function that stops this.

        Only stores call it whose claims can end while the process lives: by a lease, or by ``holds_at_most``.
        The store calls ``on_lost`` in its event loop as soon as it knows of the loss. Another process may be sending
        these messages already, so the caller stops sending them.

        Guarantees:
            integration/azure/test_lease.py::test_row_81_what_is_being_sent_is_cut_off_when_the_lease_is_lost;
            integration/test_frozen_processes.py::test_whoever_sends_is_told_that_others_have_it.
        """
        return lambda: None

    def is_in_force(self, claim: Claim) -> bool:
        """Return whether a claim is in force as far as this process knows; cheap, because it asks no server.

        Call it immediately before anything is sent because of a claim, such as an error copy. In a process that was
        frozen, the lease may have ended before ``lost`` is called. Row locks end with the transaction of their batch.

        Guarantees:
            integration/azure/test_lease.py::test_a_claim_is_void_as_soon_as_its_lease_is_over_by_our_own_clock;
            integration/test_postgres_silence.py::test_a_right_that_is_taken_away_holds_up_delivery_and_costs_no_message.
        """
        return True

    async def server_now(self) -> datetime:
        """Return the time of the server, UTC, to its precision, or a little before that time, never after.

        It takes one round trip. The store may add the time since the answer arrived, and does so, because the caller
        may run again much later than that. Call this method and the next two only if the capabilities of the store say
        ``has_clock``. Source: ADR 0048.

        Raises:
            StoreUnavailable: transient.
        """
        raise _no_clock_error(self)

    async def report_clock(self, ahead: timedelta) -> None:
        """Tell other processes how far this process' clock is ahead of the server's; negative: behind."""
        raise _no_clock_error(self)

    async def reported_clocks(self) -> Mapping[str, timedelta]:
        """Return the clock differences that live processes have reported, by ``machine:pid``."""
        raise _no_clock_error(self)


def _no_clock_error(store: object) -> NotSupported:
    return NotSupported(f"{type(store).__name__} has no clock of its own: its capabilities say so")


@dataclass(frozen=True, slots=True)
class MovedMessages:
    """The messages of one move, in the same order in every list.

    Args:
        message_ids: ids of the messages.
        dues: due times, UTC.
        destinations: destinations of the messages.
        expired: whether the message was past its expiry and was therefore recorded as expired, not delivered.
    """

    message_ids: Sequence[str]
    dues: Sequence[datetime]
    destinations: Sequence[str]
    expired: Sequence[bool]


NOTHING_MOVED: Final = MovedMessages((), (), (), ())


@dataclass(frozen=True, slots=True)
class MoveReport:
    """The result of one move.

    Args:
        delivered: number of messages that went to their queues.
        expired: number of messages that were past their expiry and were recorded as expired.
        needs_claim: whether the oldest message that is still due has no queue in this database: it must be claimed.
        next_attempt: see :meth:`ClaimingStore.next_attempt`, as of the end of the move.
        by_destination: number of messages by destination.
        first_due: earliest due time of the moved messages, UTC. That message waited longest, except for messages with
            retries. ``None``: no message was moved.
        messages: the messages; ``None`` when the caller did not ask for them.
    """

    delivered: int
    expired: int
    needs_claim: bool
    next_attempt: datetime | None
    by_destination: Mapping[str, int]
    first_due: datetime | None = None
    messages: MovedMessages | None = None


class MovingStore(ClaimingStore):
    """A store that can share its database with the queues (``capabilities.database``).

    The writes of the store can be part of a transaction there, and due messages move without leaving the database.
    """

    @abstractmethod
    def storing_work(self, messages: Sequence[DelayedMessage], now: datetime) -> Work:
        """Return the work that stores ``messages``.

        The transaction fails with ``DuplicateMessage`` when an id is stored already; then it stores nothing. A
        message that went to the error queue may be stored again, as in :meth:`store`.

        Guarantees:
            capabilities.storing_is_part_of_the_transaction, storing_refuses_an_id_that_was_used,
            work_of_a_database_is_done_or_refused.
        """

    @abstractmethod
    def finishing_work(self, claims: Sequence[Claim], outcome: Outcome, now: datetime, detail: str = "") -> Work:
        """Return the work that removes ``claims`` and records their outcome, as :meth:`finish` does.

        The transaction fails with ``ClaimLost`` when one claim is not in force any more.

        Guarantees:
            capabilities.finishing_is_part_of_the_transaction.
        """

    @abstractmethod
    async def move_due(self, now: datetime, limit: int, *, listing: bool = False) -> MoveReport:
        """Move up to ``limit`` due messages to their queues, oldest first, and record them, in one transaction.

        Args:
            now: messages that are due strictly before this instant move; recorded as the time of the move.
            limit: messages at most.
            listing: list the messages in the report.

        Guarantees:
            capabilities.due_messages_move_to_their_queues, a_move_takes_no_more_than_its_limit,
            a_move_lists_what_it_took;
            claims.what_is_stored_during_a_move_is_not_slept_over.
        """

    @abstractmethod
    async def yield_to_writers(self) -> None:
        """Let other writers work between two moves; return at once when there are none."""

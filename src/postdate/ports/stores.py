"""Stores of delayed messages as the core uses them: store, claim, move. Source: specification 1.1; ADR 0002, 0003."""

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
    """What a store can do.

    Args:
        durable: stored messages survive the process.
        shared: several processes may use it at once.
        time_precision: due times are kept to this; never rounded to an earlier instant.
        transaction_modes: modes in which the store can keep its part of the promise.
        database: identity of the database; a transport with an equal identity can share a transaction with it.
        largest_message_bytes: headers and body together.
        holds_at_most: a process that shows no life for so long loses its claims to others, and is fenced off; ``None``:
            a frozen process keeps its claims until it ends or wakes.
        has_clock: it is on a server with a clock of its own (PostgreSQL, MariaDB, SQL Server, Azure), by which all
            services that share it can go: see :meth:`ClaimingStore.server_now`.
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
    """Keeps messages until they are due. These methods are all that a user's store must have (specification 1.1).

    There is nothing to inherit from: a class with these methods is one. It may have more: ``async setup()``, which
    creates missing tables; ``close()``; and a property ``capabilities`` (:class:`StoreCapabilities`), without which the
    store is taken for :data:`SIMPLE_STORE`. Every other role is declared by inheriting its class.
    """

    @abstractmethod
    async def initialize(self, endpoint: str, mode: TransactionMode) -> None:
        """Prepare for use by ``endpoint``; called once, before ``setup()`` and any other call.

        Raises:
            UnsupportedTransactionMode: the store cannot keep its part of ``mode``; the endpoint does not start.

        Guarantees:
            capabilities.declared_modes_are_accepted_and_others_refused.
        """

    @abstractmethod
    async def store(self, message: DelayedMessage, now: datetime) -> None:
        """Keep one message durably; returns after the commit.

        A message that went to the error queue may be stored again under its id: so it comes back when it is returned.

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
        """Remove a message that was delivered; ``False`` when it is not there (any more).

        Guarantees:
            contract.remove_says_whether_it_was_there, remove_is_a_delivery.
        """

    @abstractmethod
    async def increment_failure_count(self, message_id: str, now: datetime) -> bool:
        """Count one failed attempt and give the claim back; ``False`` when the message is not there (any more).

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
    said = getattr(store, "capabilities", None)
    return said if isinstance(said, StoreCapabilities) else SIMPLE_STORE


@dataclass(frozen=True, slots=True)
class StoreReport:
    """How many messages of a batch were stored.

    Args:
        stored: how many are new in the store.
        already_there: ids that were stored before, in the order given; the first messages are unchanged.
    """

    stored: int
    already_there: tuple[str, ...] = ()

    @classmethod
    def of(cls, message_ids: Iterable[str], fresh: Iterable[str]) -> Self:
        """Return the report of a batch of which the ``fresh`` ids are new; one that stands a second time is not."""
        new = set(fresh)
        stored, there = len(new), list[str]()
        for message_id in message_ids:
            if message_id in new:
                new.discard(message_id)
            else:
                there.append(message_id)
        return cls(stored, tuple(there))


@dataclass(frozen=True, slots=True)
class Claim:
    """A due message held by one process until it is finished, released, or the process dies.

    Args:
        message: the message that is held.
        token: fences the claim: finishing or releasing with a token that was taken over has no effect and says so.
    """

    message: DelayedMessage
    token: object


class ClaimingStore(DelayedMessageStore, Capable[StoreCapabilities]):
    """A store that works in batches. Every built-in store is one."""

    @override
    async def fetch_next_due(self, now: datetime) -> DelayedMessage | None:
        claims = await self.claim_due(now, 1)
        return claims[0].message if claims else None

    async def setup(self) -> None:
        """Create what is missing (tables, indexes); idempotent, and safe when several processes do it at once."""

    async def close(self) -> None:
        """Release connections; a second time without effect."""

    @abstractmethod
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

    @abstractmethod
    async def claim_due(self, now: datetime, limit: int) -> Sequence[Claim]:
        """Claim up to ``limit`` messages that may be attempted strictly before ``now``, oldest first.

        Cancelled, it leaves nothing claimed. What a server claims for it later is given back, and that wakes whoever
        listens, unless :meth:`next_attempt` has counted it meanwhile.

        Guarantees:
            claims.oldest_first_up_to_the_limit, due_is_compared_strictly, a_claimed_message_is_hidden,
            tasks_claim_each_message_once, other_processes_do_not_claim_it_too, claims_end_with_their_process.
        """

    @abstractmethod
    async def finish(self, claims: Sequence[Claim], outcome: Outcome, now: datetime, detail: str = "") -> int:
        """Remove claimed messages and record how they ended, in one transaction; return how many were still held.

        Guarantees:
            claims.finish_removes, a_claim_given_back_is_void, a_claim_from_before_a_comeback_is_void;
            recording.all_keeps_everything.
        """

    @abstractmethod
    async def retry_later(self, claim: Claim, attempt_at: datetime, now: datetime, reason: str) -> bool:
        """Count a failure and give the claim back; not eligible again before ``attempt_at``.

        Guarantees:
            claims.retry_later_waits, failures_add_up, a_finished_claim_cannot_be_given_back,
            a_claim_given_back_is_void.
        """

    @abstractmethod
    async def next_attempt(self) -> datetime | None:
        """Return the earliest instant at which an unclaimed message may be attempted, UTC; ``None`` without any.

        A message that is stored during the call is in the answer, or wakes listeners.

        Guarantees:
            claims.next_attempt_is_the_earliest, what_is_stored_during_a_look_is_not_slept_over.
        """

    @abstractmethod
    async def listen(self, wake: Wake) -> Callable[[], None]:
        """Call ``wake`` after the commit of a message due before all others; returns a function that stops it.

        Guarantees:
            claims.what_is_due_earlier_wakes, a_wake_up_follows_the_commit, other_processes_are_woken.
        """

    @abstractmethod
    async def release(self, claims: Sequence[Claim], attempt_at: datetime | None) -> int:
        """Give claims back, in one transaction: no failure is counted and no record is written.

        For messages that an outage kept from being sent, and for those that a stopping process has not begun to send.

        Args:
            claims: any number; those that are not held any more are passed over.
            attempt_at: not eligible again before it, UTC; ``None``: as before the claim, that is at once.

        Returns:
            How many were still held.

        Raises:
            StoreUnavailable: transient; the claims are still held, or are free because their connection was lost.

        Guarantees:
            claims.a_released_claim_counts_nothing, a_released_message_waits_until_then, a_released_claim_is_void.
        """

    async def mark_unreadable(self, claim: Claim, reason: str, now: datetime) -> bool:
        """Mark a held message that neither its queue nor the error queue takes; see :class:`UnreadableRows`.

        Its claim ends with that, and it is recorded as failed.

        Args:
            claim: held by this process; another one is passed over.
            reason: shown to the operator, and recorded.
            now: UTC.

        Returns:
            Whether it is marked now; never with a store that is no :class:`UnreadableRows`.

        Guarantees:
            unreadable.what_no_queue_takes_is_marked.
        """
        return False

    def when_lost(self, lost: Callable[[Collection[str]], None]) -> Callable[[], None]:
        """Call ``lost`` with the ids of messages whose claims are void from now on; returns a function that stops it.

        For stores whose claims end with a lease, or a bound on holding, while the process lives; others never call it.
        Called in the event loop of the store, as soon as the loss is known. Others may be sending these messages, so
        the caller stops sending them.

        Guarantees:
            integration/azure/test_lease.py::test_row_81_what_is_being_sent_is_cut_off_when_the_lease_is_lost;
            integration/test_frozen_processes.py::test_whoever_sends_is_told_that_others_have_it.
        """
        return lambda: None

    def still_holds(self, claim: Claim) -> bool:
        """Return whether a claim is in force as far as is known here; costs nothing, as no server is asked.

        To be looked at right before anything leaves because of a claim, such as an error copy: in a process that was
        frozen the lease may be over before ``lost`` is called, and row locks end with the transaction of their batch.

        Guarantees:
            integration/azure/test_lease.py::test_a_claim_is_void_as_soon_as_its_lease_is_over_by_our_own_clock;
            integration/test_postgres_silence.py::test_a_right_that_is_taken_away_holds_up_delivery_and_costs_no_message.
        """
        return True

    async def server_now(self) -> datetime:
        """Return the time of the server, UTC, to its precision, or a little before it, never after; one round trip.

        The time since the answer arrived may be added, and is: the caller may go on much later than that. Only of a
        store whose capabilities say ``has_clock``, as the two methods below. Source: ADR 0048.

        Raises:
            StoreUnavailable: transient.
        """
        raise _no_clock(self)

    async def report_clock(self, ahead: timedelta) -> None:
        """Note for others how far this process' clock is ahead of the server's; negative: behind."""
        raise _no_clock(self)

    async def reported_clocks(self) -> Mapping[str, timedelta]:
        """Return what live processes have reported, by ``machine:pid``."""
        raise _no_clock(self)


def _no_clock(store: object) -> NotSupported:
    return NotSupported(f"{type(store).__name__} has no clock of its own: its capabilities say so")


@dataclass(frozen=True, slots=True)
class Moved:
    """The messages that one move took, in the same order in every list.

    Args:
        message_ids: of each.
        dues: due times, UTC.
        destinations: of each.
        expired: whether it was past its expiry and was recorded instead of delivered.
    """

    message_ids: Sequence[str]
    dues: Sequence[datetime]
    destinations: Sequence[str]
    expired: Sequence[bool]


NOTHING_MOVED: Final = Moved((), (), (), ())


@dataclass(frozen=True, slots=True)
class MoveReport:
    """The result of one move.

    Args:
        delivered: how many went to their queue.
        expired: how many were past their expiry and were recorded instead.
        left_behind: whether the oldest message that is still due has no queue in this database: it must be claimed.
        next_attempt: see :meth:`ClaimingStore.next_attempt`, as of the end of the move.
        to: how many went where.
        first_due: when the first of them was due: the one that waited longest, but for retries; ``None`` without any.
        moved: the messages; ``None`` when that was not asked for.
    """

    delivered: int
    expired: int
    left_behind: bool
    next_attempt: datetime | None
    to: Mapping[str, int]
    first_due: datetime | None = None
    moved: Moved | None = None


class MovingStore(ClaimingStore):
    """A store that can share its database with the queues (``capabilities.database``).

    Its writes can be part of a transaction there, and due messages move without leaving the database.
    """

    @abstractmethod
    def storing(self, messages: Sequence[DelayedMessage], now: datetime) -> Work:
        """Return the work that stores ``messages``.

        Its transaction fails with ``DuplicateMessage`` when an id is there already: then nothing of it is kept. A
        message that went to the error queue may come back, as in :meth:`store`.

        Guarantees:
            capabilities.storing_is_part_of_the_transaction, storing_refuses_an_id_that_was_used,
            work_of_a_database_is_done_or_refused.
        """

    @abstractmethod
    def finishing(self, claims: Sequence[Claim], outcome: Outcome, now: datetime, detail: str = "") -> Work:
        """Return the work that removes ``claims`` and records how they ended, as :meth:`finish` does.

        Its transaction fails with ``ClaimLost`` when one is no longer held.

        Guarantees:
            capabilities.finishing_is_part_of_the_transaction.
        """

    @abstractmethod
    async def move_due(self, now: datetime, limit: int, *, listing: bool = False) -> MoveReport:
        """Move up to ``limit`` due messages to their queues, oldest first, remove and record them: one transaction.

        Args:
            now: messages due strictly before it move; recorded as the time of the move.
            limit: messages at most.
            listing: say which messages they were.

        Guarantees:
            capabilities.due_messages_move_to_their_queues, a_move_takes_no_more_than_its_limit,
            a_move_lists_what_it_took;
            claims.what_is_stored_during_a_move_is_not_slept_over.
        """

    @abstractmethod
    async def pause(self) -> None:
        """Give other writers their turn between two moves; returns at once when there are none."""

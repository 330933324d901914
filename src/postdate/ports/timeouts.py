"""The storage of a timeout manager's timeouts. Source: ADR 0014."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from postdate.errors import NotSupported
from postdate.ports.common import Work


@dataclass(frozen=True, slots=True)
class Timeout:
    """One stored timeout.

    Args:
        timeout_id: a UUID as text, lower case with hyphens. The caller chooses it before storing, so that a second
            attempt to store is noticed. Upstream lets its storage choose the id, and stores a message twice that is
            received twice.
        due: aware, UTC. Storage with coarser times rounds up, so that no timeout is sent early.
        destination: the queue to send to; 1 to 200 characters.
        saga_id: a UUID as text; ``None``: the timeout belongs to no saga.
        owner: the endpoint whose timeout manager keeps the timeout.
        headers: of the message, unchanged.
        body: of the message, unchanged.
    """

    timeout_id: str
    due: datetime
    destination: str
    saga_id: str | None = None
    owner: str = ""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class DueTimeout:
    """The part of a due timeout that the poller needs."""

    timeout_id: str
    due: datetime


@dataclass(frozen=True, slots=True)
class DueChunk:
    """The result of one query for due timeouts.

    Args:
        due: ordered by due time, and by id among equal due times.
        next_query: time of the next query. ``now`` when the limit cut the chunk, else the earliest due time after
            ``now``; ``None`` when nothing else is stored.
    """

    due: Sequence[DueTimeout]
    next_query: datetime | None


@dataclass(frozen=True, slots=True)
class TimeoutClaim:
    """A claim of one caller on one timeout. It ends when the timeout is removed or released, or its process ends.

    Args:
        timeout: as it is stored.
        remove: removes the timeout, which ends the claim; ``False`` when the timeout is gone. It may raise
            ``StoreError``: then the timeout may still be stored, and the claim has ended.
        release: ends the claim; no effect when the claim has ended. Never raises.
    """

    timeout: Timeout
    remove: Callable[[], Awaitable[bool]]
    release: Callable[[], Awaitable[None]]


class TimeoutPersister(ABC):
    """The storage of a timeout manager's timeouts. Several processes may call every method at once."""

    @abstractmethod
    async def initialize(self, endpoint: str) -> None:
        """Set the endpoint whose timeouts these are.

        This asks no server, because an endpoint starts also while the server is down (row 102).

        Raises:
            ConfigurationError: no table name there can be made from the endpoint's name.

        Guarantees:
            timeouts.each_endpoint_has_its_own.
        """

    @abstractmethod
    async def setup(self) -> None:
        """Create missing tables; idempotent, and safe when several processes do it at once.

        Guarantees:
            timeouts.setting_up_may_be_done_at_once_and_again, without_its_table_it_says_so.
        """

    @abstractmethod
    async def add(self, timeout: Timeout) -> bool:
        """Store a timeout; ``False`` when its id is stored already: then nothing changes.

        Raises:
            MessageError: the timeout cannot be stored: for example, its id is no UUID, or its destination is too long.
            StoreError: nothing was stored, with one exception. If a connection was lost, the timeout may be stored; the
                caller adds it again.

        Guarantees:
            timeouts.a_timeout_is_unchanged, what_is_left_out_stays_out, a_due_time_is_never_earlier,
            adding_again_changes_nothing, an_id_is_known_however_it_is_written, of_several_who_add_one_is_told_so,
            what_is_stored_survives_closing.
        """

    @abstractmethod
    async def peek(self, timeout_id: str) -> Timeout | None:
        """Return a timeout, or ``None`` when it is gone; needs no lock and waits for none.

        While another caller removes the timeout, this method returns the timeout as it was. In SQL Server it returns
        ``None`` then: if the removal fails, a later query for due timeouts returns the timeout again.

        Raises:
            InvalidHeaders, InvalidTimestamp: the row cannot be read; the text names the id.

        Guarantees:
            timeouts.looking_waits_for_nobody.
        """

    @abstractmethod
    async def try_remove(self, timeout_id: str) -> bool:
        """Remove a timeout; ``False`` when it is gone. Only one of several callers gets ``True``.

        Guarantees:
            timeouts.what_is_removed_is_gone, of_several_who_remove_one_is_told_so.
        """

    @abstractmethod
    async def remove_by_saga(self, saga_id: str) -> int:
        """Remove all timeouts of a saga; return how many there were. The empty UUID belongs to no saga.

        Guarantees:
            timeouts.a_saga_takes_all_its_timeouts_along.
        """

    @abstractmethod
    async def next_chunk(self, start: datetime, now: datetime, limit: int) -> DueChunk:
        """Return timeouts due after ``start``, exclusive, and until ``now``, inclusive.

        Args:
            start: aware UTC, exclusive.
            now: aware UTC, inclusive.
            limit: approximate maximum, 1 or more. A chunk never ends between timeouts with one due time, so the next
                chunk may start after the last due time.

        Guarantees:
            due.the_start_is_exclusive_and_now_inclusive, the_next_query_is_the_earliest_to_come,
            the_next_query_after_a_cut_chunk_is_now, a_chunk_does_not_end_between_equal_due_times,
            going_on_finds_each_one_once, any_start_will_do.
        """

    @abstractmethod
    async def close(self) -> None:
        """Release the connections; a second call has no effect."""

    @abstractmethod
    async def claim(self, timeout_id: str) -> TimeoutClaim | None:
        """Claim a timeout; return ``None`` if it is gone, or another caller has claimed it. Never waits.

        A claim only prevents other claims: .NET endpoints can still peek and remove.

        Raises:
            InvalidHeaders, InvalidTimestamp: the row cannot be read; the text names the id.

        Guarantees:
            claiming.of_several_who_claim_one_has_it, what_was_let_go_is_as_it_was, looking_sees_what_is_claimed.
        """

    @property
    def database(self) -> object | None:
        """Identity of the database; see :class:`postdate.ports.TransportCapabilities`.

        If the queues have the same identity, the writes below can be part of their transactions. ``None``: the timeouts
        are in no database.

        Guarantees:
            enlisting.it_names_the_database_of_the_queues.
        """
        return None

    def adding_work(self, timeout: Timeout) -> Work:
        """Return the work that stores ``timeout``; the work does nothing when its id is stored already.

        Guarantees:
            enlisting.a_timeout_is_added_with_the_transaction.
        """
        raise _not_shared_error(self)

    def removing_work(self, timeout_id: str) -> Work:
        """Return the work that removes a timeout.

        The work raises :class:`~postdate.errors.TimeoutConcurrentlyProcessed` when the timeout is gone.

        Guarantees:
            enlisting.a_timeout_is_removed_with_what_is_sent.
        """
        raise _not_shared_error(self)

    def removing_by_saga_work(self, saga_id: str) -> Work:
        """Return the work that removes all timeouts of a saga.

        Guarantees:
            enlisting.a_saga_ends_with_the_transaction.
        """
        raise _not_shared_error(self)


def _not_shared_error(persister: object) -> NotSupported:
    return NotSupported(f"{type(persister).__name__} shares its database with no queues")

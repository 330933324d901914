"""The storage of a timeout manager's timeouts. Source: specification 4.5, 4.6; ADR 0014."""

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
        timeout_id: a UUID as text, lower case with hyphens. Whoever stores it chooses it, so that storing twice is
            noticed; upstream lets its storage choose, and stores a message twice that is received twice.
        due: aware, UTC. Storage with coarser times rounds it up, so that nothing fires early.
        destination: where it is sent; 1 to 200 characters.
        saga_id: a UUID as text; ``None``: it belongs to no saga.
        owner: the endpoint whose timeout manager keeps it.
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
        due: by due time; among equal ones by id.
        next_query: when there may be more: ``now`` when the chunk was cut by its limit, else the earliest due time
            after ``now``; ``None`` when nothing else is stored.
    """

    due: Sequence[DueTimeout]
    next_query: datetime | None


@dataclass(frozen=True, slots=True)
class TimeoutClaim:
    """One timeout held by one caller, until it is removed or released; the end of its process ends it, too.

    Args:
        timeout: as it is stored.
        remove: removes the timeout, which ends the claim; ``False`` when it is gone. Raises ``StoreError``: it may be
            stored still, and the claim has ended.
        release: ends the claim; without effect when it has ended. Never raises.
    """

    timeout: Timeout
    remove: Callable[[], Awaitable[bool]]
    release: Callable[[], Awaitable[None]]


class TimeoutPersister(ABC):
    """Where a timeout manager keeps its timeouts. Every method may be called by several processes at once."""

    @abstractmethod
    async def initialize(self, endpoint: str) -> None:
        """Name the endpoint whose timeouts these are. Asks no server: an endpoint starts while that is down (row 102).

        Raises:
            ConfigurationError: the endpoint's name makes no name of a table there.

        Guarantees:
            timeouts.each_endpoint_has_its_own.
        """

    @abstractmethod
    async def setup(self) -> None:
        """Create what is missing; idempotent, and safe when several processes do it at once.

        Guarantees:
            timeouts.setting_up_may_be_done_at_once_and_again, without_its_table_it_says_so.
        """

    @abstractmethod
    async def add(self, timeout: Timeout) -> bool:
        """Keep a timeout; ``False`` when its id is stored already, which changes nothing.

        Raises:
            MessageError: the timeout cannot be kept: an id that is no UUID, say, or a destination that is too long.
            StoreError: nothing was kept, but for a connection that was lost: then it may be there, and is added again.

        Guarantees:
            timeouts.a_timeout_is_unchanged, what_is_left_out_stays_out, a_due_time_is_never_earlier,
            adding_again_changes_nothing, an_id_is_known_however_it_is_written, of_several_who_add_one_is_told_so,
            what_is_stored_survives_closing.
        """

    @abstractmethod
    async def peek(self, timeout_id: str) -> Timeout | None:
        """Return a timeout, or ``None`` when it is gone; takes no lock and waits for none.

        While it is being removed, it is seen as it was, or, in SQL Server, not at all: if the removal fails, a later
        query for due timeouts finds it again.

        Raises:
            InvalidHeaders, InvalidTimestamp: what stands there cannot be read; names the id.

        Guarantees:
            timeouts.looking_waits_for_nobody.
        """

    @abstractmethod
    async def try_remove(self, timeout_id: str) -> bool:
        """Remove a timeout; ``False`` when it is gone. Of several callers, one is told ``True``.

        Guarantees:
            timeouts.what_is_removed_is_gone, of_several_who_remove_one_is_told_so.
        """

    @abstractmethod
    async def remove_by_saga(self, saga_id: str) -> int:
        """Remove all timeouts of a saga; return how many there were. The empty UUID names no saga.

        Guarantees:
            timeouts.a_saga_takes_all_its_timeouts_along.
        """

    @abstractmethod
    async def next_chunk(self, start: datetime, now: datetime, limit: int) -> DueChunk:
        """Return timeouts due after ``start``, exclusive, and until ``now``, inclusive.

        Args:
            start: aware UTC, exclusive.
            now: aware UTC, inclusive.
            limit: about how many at most; 1 or more. A chunk never ends between timeouts of one due time, so that the
                next may start after the last one's.

        Guarantees:
            due.the_start_is_exclusive_and_now_inclusive, the_next_query_is_the_earliest_to_come,
            the_next_query_after_a_cut_chunk_is_now, a_chunk_does_not_end_between_equal_due_times,
            going_on_finds_each_one_once, any_start_will_do.
        """

    @abstractmethod
    async def close(self) -> None:
        """Release connections; a second time without effect."""

    @abstractmethod
    async def claim(self, timeout_id: str) -> TimeoutClaim | None:
        """Claim a timeout, or return ``None``: it is gone, or another caller holds it. Never waits.

        A claim keeps off other claims only: .NET endpoints peek and remove as ever.

        Raises:
            InvalidHeaders, InvalidTimestamp: what stands there cannot be read; names the id.

        Guarantees:
            claiming.of_several_who_claim_one_has_it, what_was_let_go_is_as_it_was, looking_sees_what_is_claimed.
        """

    @property
    def database(self) -> object | None:
        """Identity of the database; see :class:`postdate.ports.TransportCapabilities`.

        Where it is that of the queues, the writes below can be part of their transactions. ``None``: of none.

        Guarantees:
            enlisting.it_names_the_database_of_the_queues.
        """
        return None

    def adding(self, timeout: Timeout) -> Work:
        """Return the work that keeps ``timeout``; nothing when its id is stored already.

        Guarantees:
            enlisting.a_timeout_is_added_with_the_transaction.
        """
        raise _not_shared(self)

    def removing(self, timeout_id: str) -> Work:
        """Return the work that removes a timeout.

        The work raises :class:`~postdate.errors.TimeoutConcurrentlyProcessed` when the timeout is gone.

        Guarantees:
            enlisting.a_timeout_is_removed_with_what_is_sent.
        """
        raise _not_shared(self)

    def removing_by_saga(self, saga_id: str) -> Work:
        """Return the work that removes all timeouts of a saga.

        Guarantees:
            enlisting.a_saga_ends_with_the_transaction.
        """
        raise _not_shared(self)


def _not_shared(persister: object) -> NotSupported:
    return NotSupported(f"{type(persister).__name__} shares its database with no queues")

"""The questions that an operator asks of a store, and the changes that an operator makes there.

These are counts, the list of pending messages with its cursors, records, cancelling and rescheduling.

Source: docs/specification-rows.md, row 119.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final, Self

from postdate.errors import InvalidMessage
from postdate.messages import DelayedMessage
from postdate.ports.common import Record, RecordKind
from postdate.ports.observation import Observer, OldSnapshot, ServerFacts


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """Counts of one store, consistent with each other.

    Args:
        pending: number of pending messages.
        overdue: number of pending messages that are due strictly before ``now`` and not claimed. Messages that wait
            because of the limits of a destination count, too.
        claimed: number of pending messages that a process has claimed.
        failing: number of pending messages with at least one failed attempt.
        next_due: earliest due time, UTC.
        unreadable: number of unreadable rows; they do not count as pending.
    """

    pending: int
    overdue: int
    claimed: int
    failing: int
    next_due: datetime | None
    unreadable: int = 0


@dataclass(frozen=True, slots=True)
class MessageFilter:
    """Conditions on pending messages; a message must fulfil all of them. Due bounds: from inclusive, to exclusive.

    Args:
        search_limit: only the first so many messages within the due bounds, by due time, need to be searched; ``None``:
            all.
        after: only messages behind this place in the list of all pending messages: see :attr:`DelayedMessage.cursor`
            and :attr:`PendingPage.after`.
    """

    destination: str | None = None
    due_from: datetime | None = None
    due_to: datetime | None = None
    search_limit: int | None = None
    after: str | None = None

    def matches(self, message: DelayedMessage) -> bool:
        """Return whether ``message`` fulfils the conditions, apart from its place in the list."""
        return (
            (self.destination is None or message.destination == self.destination)
            and (self.due_from is None or message.due >= self.due_from)
            and (self.due_to is None or message.due < self.due_to)
        )


@dataclass(frozen=True, slots=True)
class PendingPage:
    """Some pending messages in the order of the list, each with its cursor.

    Args:
        messages: the readable messages of the page.
        after: cursor where the next page begins; ``None``: there is no next page. The cursor does not depend on the
            content of the rows, so unreadable rows do not end a list.
    """

    messages: Sequence[DelayedMessage]
    after: str | None

    @classmethod
    def of(cls, messages: Sequence[DelayedMessage], limit: int) -> Self:
        """Return the page of a store that skips unreadable messages until it has read ``limit`` readable ones."""
        return cls(messages, messages[-1].cursor if messages and len(messages) >= limit else None)


def cursor_text(due: int, number: int) -> str:
    """Return the cursor of a message in a store that numbers them; ``due`` in microseconds since 1970 UTC."""
    return f"{due} {number}"


def parse_cursor(cursor: str) -> tuple[int, int]:
    """Return due time and number from a cursor of :func:`cursor_text`. Raises `InvalidMessage`."""
    match = _CURSOR.fullmatch(cursor) if isinstance(cursor, str) else None  # pyright: ignore[reportUnnecessaryIsInstance]
    numbers = (0, 0) if match is None else (int(match[1]), int(match[2]))
    if match is None or max(map(abs, numbers)) >= _NUMBER_LIMIT:
        raise invalid_cursor_error(cursor)
    return numbers


_CURSOR: Final = re.compile(r"(-?[0-9]{1,19}) ([0-9]{1,19})", re.ASCII)


_NUMBER_LIMIT: Final = 2**63
"""Databases store the due time and the number in signed 64-bit integers."""


def invalid_cursor_error(cursor: object) -> InvalidMessage:
    """Return the error for a text that is no cursor of the store."""
    return InvalidMessage(f"{_short_text(cursor)} is not a cursor that a list of this store returned")


def _short_text(value: object) -> str:
    return repr(value)[:80]


def counts_between(edges: Sequence[datetime], dues: Iterable[tuple[datetime, int]]) -> list[int]:
    """Return the number of messages in each interval of :meth:`AdministrableStore.due_counts`.

    Args:
        edges: bounds of the intervals, ascending.
        dues: pairs of an instant and the number of messages that are due at it, in any order.
    """
    counts = [0] * (len(edges) - 1)
    for due, count in dues:
        if edges[0] <= due < edges[-1]:
            counts[bisect_right(edges, due) - 1] += count
    return counts


class AdministrableStore(ABC):
    """A store that answers an operator's questions, and whose pending messages can be changed (row 119).

    Every built-in store is administrable.
    """

    def observer(self) -> Observer | None:
        """Return an observer of this store, or ``None``; it uses the store's connections.

        Guarantees:
            administration.a_look_is_had_before_the_store_is_prepared.
        """
        return None

    async def server_facts(self) -> ServerFacts | None:
        """Return what the server says of itself, or ``None`` without a server; changes nothing, needs no tables.

        Raises:
            StoreUnavailable: the server does not answer, or refuses; the message says which.
        """
        return None

    async def old_snapshots(self) -> Sequence[OldSnapshot] | None:
        """Return the sessions that hold an old snapshot of the database, the oldest first.

        Only snapshots that are old enough to matter are listed; ``None`` for a database without snapshots.
        """
        return None

    @abstractmethod
    async def statistics(self, now: datetime) -> StoreStatistics:
        """Return the counts of the store; reads an index, not the messages.

        Guarantees:
            administration.statistics_agree_with_the_messages.
        """

    @abstractmethod
    async def due_counts(self, edges: Sequence[datetime]) -> Sequence[int]:
        """Count the pending messages that are due in each interval; reads an index, not the messages.

        A message that waits because of an outage may count at its next attempt.

        Args:
            edges: instants, UTC, ascending, on whole seconds; at least two.

        Returns:
            One count for each interval, from ``edges[i]`` (inclusive) to ``edges[i + 1]`` (exclusive), in their order.

        Guarantees:
            administration.what_is_due_is_counted_by_interval.
        """

    @abstractmethod
    async def record_counts(self) -> Mapping[RecordKind, int]:
        """Count the records of each kind; reads all records.

        Guarantees:
            recording.a_record_says_what_when_and_why.
        """

    @abstractmethod
    async def read_pending(self, message_filter: MessageFilter, limit: int) -> PendingPage:
        """Return a page of the list of pending messages, ordered by due time, then by order of storing.

        The call reads the messages of the page. Where few messages match ``message_filter``, it also reads those
        between them. It never reads messages of earlier pages, however many are due at one instant.

        Args:
            message_filter: conditions on the messages, and the place in the list behind which the page begins.
            limit: messages at most; at least 1.

        Raises:
            InvalidMessage: ``where.after`` is no cursor of this store.

        Guarantees:
            administration.pending_messages_are_listed, a_herd_is_listed_page_by_page,
            a_cursor_is_exact_when_its_message_has_gone;
            unreadable.unreadable_messages_do_not_end_a_list.
        """

    async def list_pending(self, message_filter: MessageFilter, limit: int) -> Sequence[DelayedMessage]:
        """Return the first ``limit`` messages of the list, page by page.

        Guarantees:
            administration.pending_messages_are_listed.
        """
        messages = list[DelayedMessage]()
        page = PendingPage((), message_filter.after)
        while limit > len(messages) and (page.after is not None or not messages):
            page = await self.read_pending(replace(message_filter, after=page.after), limit - len(messages))
            messages += page.messages
            if page.after is None:
                break
        return messages

    @abstractmethod
    async def get(self, message_id: str) -> DelayedMessage | None:
        """Return a pending message, or ``None``.

        Guarantees:
            administration.a_pending_message_is_found_by_id.
        """

    @abstractmethod
    async def history(self, message_id: str) -> Sequence[Record]:
        """Return every record of one message in the order of writing.

        Guarantees:
            recording.a_record_says_what_when_and_why, all_keeps_everything, outcomes_leaves_out_retries.
        """

    @abstractmethod
    async def cancel(self, message_id: str, now: datetime) -> bool:
        """Remove a pending message for good and record this; ``False`` if it is not there or is being dispatched.

        Guarantees:
            administration.a_cancelled_message_is_gone, what_is_being_dispatched_is_left_alone.
        """

    @abstractmethod
    async def reschedule(self, message_id: str, due: datetime, now: datetime, wall_time: str | None = None) -> bool:
        """Give a pending message another due time; ``False`` when it is not there or is being dispatched.

        The failure count of the message starts again at zero.

        Args:
            message_id: of the message.
            due: aware, UTC; may be past.
            now: for the record; aware, UTC.
            wall_time: set the header of the message with its wall time to this. ``None``: remove that header, as the
                message does not follow the clocks of a zone any more.

        Raises:
            InvalidMessage: the message expires before ``due``.

        Guarantees:
            administration.a_rescheduled_message_has_its_new_due_time, rescheduling_earlier_wakes,
            what_is_rescheduled_has_all_its_retries, nothing_is_rescheduled_past_its_expiry,
            what_is_rescheduled_follows_the_clocks_that_are_given,
            what_is_being_dispatched_is_left_alone.
        """

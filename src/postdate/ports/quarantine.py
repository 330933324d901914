"""Rows that cannot be read are set aside, so that they hold up nothing else and nothing of them is lost.

A row that is damaged (headers that are no JSON, a due time outside the calendar, a blank destination, content that is
gone) is taken out of the way by the first call that meets it, of a store or a queue. Its raw bytes are kept. An
operator sees it, mends it, and puts it back where it was. The same is done with a message that no queue takes, and
whose copy the error queue refuses: see :meth:`postdate.ports.ClaimingStore.set_aside`.

Source: design.md section 3.4 (an unreadable row never holds up the rest); ADR 0019.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from typing_extensions import override

from postdate.messages import DESTINATION_LIMIT, aware_utc, check_headers, check_text


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A row that was set aside.

    Args:
        number: names it for the operator, within this store or these queues.
        place: the queue it was in; empty for the store.
        message_id: of the message, as far as it can be read.
        reason: why it cannot be read.
        at: when it was set aside, UTC.
        raw: what the row holds, by column, byte for byte; text is in UTF-8, numbers in decimal digits.
    """

    number: int
    place: str
    message_id: str
    reason: str
    at: datetime
    raw: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class Mending:
    """Parts to put in place of unreadable ones; ``None`` keeps a part, which may have been mended by hand.

    Args:
        headers: of the message.
        due: due time, UTC; in a queue only of a message that was delayed.
        destination: only of a message of a store.
        body: content.

    Raises:
        InvalidHeaders, InvalidTimestamp, InvalidMessage: a part could not be stored.
    """

    headers: Mapping[str, str] | None = None
    due: datetime | None = None
    destination: str | None = None
    body: bytes | None = None

    def __post_init__(self) -> None:
        if self.headers is not None:
            check_headers(self.headers)
        if self.due is not None:
            object.__setattr__(self, "due", aware_utc(self.due, "the due time"))
        if self.destination is not None:
            check_text(self.destination, "destination", DESTINATION_LIMIT)


class Quarantine(ABC):
    """A store, or queues, that set aside rows that they cannot read. Every built-in store that has rows is one.

    Setting aside happens inside claims, moves, receives and lists: each row is decoded by itself, and one that cannot
    be is set aside in the same transaction, with a *failed* record of the store where its id can be read. If reading
    fails otherwise, messages claimed by then are given back. Stored rows are not held against limits that were
    tightened since.

    Guarantees:
        quarantine.an_unreadable_message_holds_up_nothing, the_oldest_that_can_be_read_is_fetched,
        an_operator_sees_the_others, an_unreadable_message_is_set_aside_with_its_bytes, a_mended_message_is_put_back,
        what_is_still_unreadable_stays_set_aside, what_came_back_otherwise_is_not_put_back,
        tightened_limits_refuse_nothing_that_is_stored, what_no_queue_takes_is_set_aside.
    """

    @abstractmethod
    async def quarantined(self, limit: int) -> Sequence[Quarantined]:
        """Return up to ``limit`` rows that are set aside, oldest first."""

    @abstractmethod
    async def quarantined_count(self) -> int:
        """Return how many rows are set aside."""

    @abstractmethod
    async def put_back(self, number: int, mending: Mending, now: datetime) -> None:
        """Put a mended row back where it was, in one transaction; a message of a store waits again and is recorded.

        Raises:
            MessageNotFound: nothing of that number is set aside.
            InvalidMessage, InvalidHeaders: it still cannot be read; it says why. Nothing was changed.
            QueueNotFound: the queue that it was in is gone. Nothing was changed.
            DuplicateMessage: the store has a message of this id. Nothing was changed.
        """

    @abstractmethod
    async def discard_quarantined(self, number: int, now: datetime) -> None:
        """Delete a row that is set aside, for good; recorded as discarded where its id can be read.

        Raises:
            MessageNotFound: nothing of that number is set aside.
        """


class DelegatedQuarantine(Quarantine):
    """A store, or queues, whose quarantine is an object of its own."""

    @property
    @abstractmethod
    def _quarantine(self) -> Quarantine:
        """The object with the rows that are set aside."""

    @override
    async def quarantined(self, limit: int) -> Sequence[Quarantined]:
        return await self._quarantine.quarantined(limit)

    @override
    async def quarantined_count(self) -> int:
        return await self._quarantine.quarantined_count()

    @override
    async def put_back(self, number: int, mending: Mending, now: datetime) -> None:
        await self._quarantine.put_back(number, mending, now)

    @override
    async def discard_quarantined(self, number: int, now: datetime) -> None:
        await self._quarantine.discard_quarantined(number, now)

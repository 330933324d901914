"""Changes of waiting messages by an application, and what became of each. Source: ADR 31."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

import anyio

from postdate.errors import InvalidMessage, InvalidTimestamp, NotSupported
from postdate.messages import DelayedMessage, Headers, aware_utc, check_headers, parse_timestamp
from postdate.ports import (
    AdministrableStore,
    Answer,
    ClaimingStore,
    JoiningStore,
    MessageFilter,
    Record,
    RecordKind,
    Steps,
    answer_of,
)
from postdate.ports.changing import MARKERS

_PAGE: Final = 500
_AT_ONCE: Final = 16
_TIMESTAMP_LENGTH: Final = 28


def administrable(store: ClaimingStore) -> AdministrableStore:
    """Return the store if its messages can be seen and changed; raises `NotSupported`."""
    if isinstance(store, AdministrableStore):
        return store
    raise NotSupported(f"{type(store).__name__} does not show what is in it, nor lets it be changed")


# --- one message ------------------------------------------------------------------------------------------------------


async def cancel(store: AdministrableStore, message_id: str, now: datetime) -> Answer:
    return Answer.DONE if await store.cancel(message_id, now) else await _standing(store, message_id)


async def reschedule(store: AdministrableStore, message_id: str, due: datetime, now: datetime) -> Answer:
    """Give a message another due time. Raises `InvalidMessage` if it expires before ``due``."""
    return Answer.DONE if await store.reschedule(message_id, due, now) else await _standing(store, message_id)


async def _standing(store: AdministrableStore, message_id: str) -> Answer:
    """Return why a message was not changed."""
    records = list[Record]()
    for _ in range(2):  # it may come back from the error queue between the two questions
        if await store.get(message_id) is not None:
            return Answer.BEING_DELIVERED
        records = await store.history(message_id)
        if not records or records[-1].kind not in {RecordKind.SCHEDULED, RecordKind.RESCHEDULED}:
            break
    return answer_of((records[-1].kind, records[-1].detail) if records else None)


# --- those that match -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pending:
    """Which of the waiting messages: those that fulfil every condition that is given.

    Args:
        destination: queue that they are meant for.
        due_from, due_to: due from then on, and before then; aware.
        headers: that they have, with these values.
        text: that is in their bodies, in UTF-8.
        failing: whether an attempt to deliver them has failed.
        zone: by whose clocks they are due, such as ``Europe/Paris``.

    Raises:
        InvalidTimestamp: a date-time without a time zone.
        InvalidMessage, InvalidHeaders: a condition that is empty, or headers that are no texts.
    """

    destination: str | None = None
    due_from: datetime | None = None
    due_to: datetime | None = None
    headers: Mapping[str, str] | None = None
    text: str | None = None
    failing: bool | None = None
    zone: str | None = None

    def __post_init__(self) -> None:
        for name in ("due_from", "due_to"):
            if getattr(self, name) is not None:
                aware_utc(getattr(self, name), name)
        check_headers(self.headers or {})
        for name in ("destination", "headers", "text", "zone"):
            if getattr(self, name) is not None and not getattr(self, name):
                raise InvalidMessage(f"{name} is empty, which says nothing: leave it out, or say which")

    @property
    def says_something(self) -> bool:
        """Whether there is a condition."""
        return self != Pending()

    def check_says_something(self) -> None:
        """Refuse to mean everything: it may be a variable that was not set."""
        if not self.says_something:
            raise InvalidMessage("no condition is given, which would change every message: give one, such as due_to=…")

    def matches(self, message: DelayedMessage) -> bool:
        """Return whether a message fulfils the conditions that no store knows, and is none of the store's own."""
        return (
            message.destination != MARKERS
            and all(message.headers.get(name) == value for name, value in (self.headers or {}).items())
            and (self.text is None or self.text.encode() in message.body)
            and (self.failing is None or self.failing == (message.number_of_failures > 0))
            and (self.zone is None or message.headers.get(Headers.WALL_TIME, "").endswith(f" {self.zone}"))
        )


def _read_cursor(cursor: str) -> tuple[datetime, str]:
    """Return due time and id of the message whose cursor it is. Raises `InvalidMessage`."""
    try:
        return parse_timestamp(cursor[:_TIMESTAMP_LENGTH]), cursor[_TIMESTAMP_LENGTH + 1 :]
    except (InvalidTimestamp, TypeError):
        raise InvalidMessage(f"{cursor!r} is no cursor of a message, as a list before gave it") from None


def _brief(message: DelayedMessage) -> DelayedMessage:
    headers = {Headers.WALL_TIME: message.headers[Headers.WALL_TIME]} if Headers.WALL_TIME in message.headers else {}
    return replace(message, headers=headers, body=b"")


class PendingPages:
    """Reads what matches, the first due first, a page at a time: :meth:`ask` the store, :meth:`take` what it says.

    Args:
        wanted: which.
        limit: how many; ``None``: all, without bodies and most headers, as there may be millions.
        after: the cursor of the message behind which the list goes on. Has that gone, all that is due at its instant is
            read again.
        among: where so many were looked through in vain, reading is over; ``None``: when nothing is left.

    What is due at one instant is read again for each page, so pages grow where a herd is. What is stored meanwhile, due
    before what was read, is not found.
    """

    def __init__(self, wanted: Pending, limit: int | None, after: str | None = None, among: int | None = None) -> None:
        is_read_here = replace(wanted, destination=None, due_from=None, due_to=None).says_something
        self._page = _PAGE if limit is None or is_read_here else min(limit, _PAGE)
        self._wanted, self._limit, self._here = wanted, limit, set[str]()
        self._where = MessageFilter(wanted.destination, wanted.due_from, wanted.due_to, among)
        self._found, self.is_over = dict[str, DelayedMessage](), limit == 0
        self._after = None if after is None else _read_cursor(after)
        self._unsure = list[DelayedMessage]()
        if self._after is not None and (wanted.due_from is None or wanted.due_from < self._after[0]):
            self._where = replace(self._where, due_from=self._after[0])

    @property
    def found(self) -> list[DelayedMessage]:
        """What was found so far."""
        return list(self._found.values())[: self._limit]

    def ask(self) -> tuple[MessageFilter, int]:
        return self._where, self._page + 2 * len(self._here)

    def take(self, page: Sequence[DelayedMessage]) -> list[DelayedMessage]:
        """Note what matches of the answer, and return it."""
        fresh = [each for each in page if each.message_id not in self._here]
        wanted = [each for each in self._behind(fresh) if self._wanted.matches(each)]
        found = wanted if self._limit else [_brief(each) for each in wanted]
        for each in found:  # one that moves meanwhile is met again
            self._found.setdefault(each.message_id, each)
        is_enough = self._limit is not None and len(self._found) >= self._limit
        # A page may be short of rows that cannot be read, or of those that are not among the first.
        is_last = self._where.among is not None and self._after is None and len(page) < self.ask()[1]
        self.is_over = not fresh or is_enough or is_last
        if fresh:
            last = page[-1].due
            self._here = {each.message_id for each in page if each.due == last}
            self._where = replace(self._where, due_from=last)
        return found

    def _behind(self, fresh: Sequence[DelayedMessage]) -> Sequence[DelayedMessage]:
        """Leave out those up to the one whose cursor was given."""
        if self._after is None:
            return fresh
        places = [(each.due, each.message_id) for each in fresh]  # its message may be there, due later by now
        if self._after in places:
            behind = fresh[places.index(self._after) + 1 :]
        else:
            self._unsure += filter(self._wanted.matches, fresh)
            if fresh and fresh[-1].due == self._after[0]:
                return ()
            behind = self._unsure
        self._after = None
        return behind


async def first_of(
    store: AdministrableStore,
    wanted: Pending,
    limit: int | None,
    after: str | None = None,
    among: int | None = None,
) -> list[DelayedMessage]:
    """Return up to ``limit`` that match, the first due first; ``None``: all, without bodies and most headers."""
    reading = PendingPages(wanted, limit, after, among)
    while not reading.is_over:
        reading.take(await store.list_pending(*reading.ask()))
    return reading.found


def first_steps(
    store: JoiningStore, wanted: Pending, limit: int | None, after: str | None = None
) -> Steps[list[DelayedMessage]]:
    """:func:`first_of` in a transaction of the application."""
    reading = PendingPages(wanted, limit, after)
    while not reading.is_over:
        reading.take((yield from store.listing_steps(*reading.ask())))
    return reading.found


async def change_all(
    found: Sequence[DelayedMessage], change: Callable[[DelayedMessage], Awaitable[Answer]]
) -> Counter[Answer]:
    """Change messages, several at a time; return how often each answer was given. Raises what one of them raises."""
    told, waiting = Counter[Answer](), iter(found)

    first_errors = list[Exception]()

    async def work(scope: anyio.CancelScope) -> None:
        for message in waiting:
            try:
                told[await change(message)] += 1
            except InvalidMessage:
                told[Answer.WOULD_EXPIRE] += 1
            except Exception as error:  # noqa: BLE001 - raised below, by itself
                first_errors.append(error)
                scope.cancel()

    async with anyio.create_task_group() as tasks:
        for _ in range(_AT_ONCE):
            tasks.start_soon(work, tasks.cancel_scope)
    if first_errors:
        raise first_errors[0]
    return told


def change_steps(
    found: Sequence[DelayedMessage], change: Callable[[DelayedMessage], Steps[Answer]]
) -> Steps[Counter[Answer]]:
    """:func:`change_all` in a transaction of the application."""
    told = Counter[Answer]()
    for message in found:
        try:
            told[(yield from change(message))] += 1
        except InvalidMessage:
            told[Answer.WOULD_EXPIRE] += 1
    return told

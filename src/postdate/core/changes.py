"""Changes of waiting messages by an application, and what became of each. Source: ADR 31."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final, TypeAlias, cast

import anyio

from postdate.errors import InvalidMessage, NotSupported
from postdate.messages import (
    DESTINATION_LIMIT,
    OF_THE_STORE,
    DelayedMessage,
    Headers,
    Origin,
    aware_utc,
    check_headers,
    check_reschedule,
    check_text,
)
from postdate.ports import (
    AdministrableStore,
    Answer,
    ClaimingStore,
    JoiningStore,
    MessageFilter,
    PendingPage,
    Record,
    RecordKind,
    Steps,
    answer_of,
)

_PAGE: Final = 500
_AT_ONCE: Final = 16


def administrable(store: ClaimingStore) -> AdministrableStore:
    """Return the store if its messages can be seen and changed; raises `NotSupported`."""
    if isinstance(store, AdministrableStore):
        return store
    raise NotSupported(f"{type(store).__name__} does not show what is in it, nor lets it be changed")


# --- one message ------------------------------------------------------------------------------------------------------


async def cancel(store: AdministrableStore, message_id: str, now: datetime) -> Answer:
    return Answer.DONE if await store.cancel(message_id, now) else await standing(store, message_id)


async def reschedule(
    store: AdministrableStore, message_id: str, due: datetime, now: datetime, wall_time: str | None = None
) -> Answer:
    """Give a message another due time. Raises `InvalidMessage` if it expires before ``due``."""
    done = await store.reschedule(message_id, due, now, wall_time)
    return Answer.DONE if done else await standing(store, message_id)


def would_be(message: DelayedMessage, due: datetime | None) -> Answer:
    """Return the answer that a change would be given, if nothing changes until then; ``due``: ``None`` to cancel."""
    try:
        if due is not None:
            check_reschedule(message.message_id, due, message.expires_at)
    except InvalidMessage:
        return Answer.WOULD_EXPIRE
    return Answer.DONE


async def standing(store: AdministrableStore, message_id: str) -> Answer:
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
        origins: why they wait. Unless you say otherwise they are those that an application scheduled: no messages that
            wait to be tried again after their handler failed, and no timeouts of sagas.

    Raises:
        InvalidTimestamp: a date-time without a time zone.
        InvalidMessage, InvalidHeaders: a condition that is empty, or of another type.
    """

    destination: str | None = None
    due_from: datetime | None = None
    due_to: datetime | None = None
    headers: Mapping[str, str] | None = None
    text: str | None = None
    failing: bool | None = None
    zone: str | None = None
    origins: Collection[Origin] = frozenset({Origin.APPLICATION})

    def __post_init__(self) -> None:
        for name in ("due_from", "due_to"):
            if (instant := getattr(self, name)) is not None:
                object.__setattr__(self, name, aware_utc(instant, name))
        for name, kind in _TYPES.items():
            value: object = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise InvalidMessage(f"{name} must be {kind.__name__}, not {type(value).__name__} {repr(value)[:80]}")
            if kind is not bool and value is not None and not value:
                raise InvalidMessage(f"{name} is empty, which says nothing: leave it out, or say which")
        check_headers(self.headers or {})
        check_headers({name: getattr(self, name) or "" for name in ("text", "zone")})
        if self.destination is not None:
            check_text(self.destination, "destination", DESTINATION_LIMIT)
        object.__setattr__(self, "origins", _origins(self.origins))

    @property
    def says_something(self) -> bool:
        """Whether there is a condition; to leave out what an application scheduled is one, too."""
        return replace(self, origins=_SCHEDULED) != Pending() or Origin.APPLICATION not in self.origins

    def check_says_something(self) -> None:
        """Refuse to mean everything: it may be a variable that was not set."""
        if not self.says_something:
            raise InvalidMessage("no condition is given, which would change every message: give one, such as due_to=…")

    def matches(self, message: DelayedMessage) -> bool:
        """Return whether a message fulfils the conditions that no store knows, and is none of the store's own."""
        return (
            message.destination not in OF_THE_STORE
            and message.origin in self.origins
            and all(message.headers.get(name) == value for name, value in (self.headers or {}).items())
            and (self.text is None or self.text.encode() in message.body)
            and (self.failing is None or self.failing == (message.number_of_failures > 0))
            and (self.zone is None or message.headers.get(Headers.WALL_TIME, "").endswith(f" {self.zone}"))
        )


_SCHEDULED: Final = frozenset({Origin.APPLICATION})
_TYPES: Final = {"destination": str, "headers": Mapping, "text": str, "failing": bool, "zone": str}


def _origins(origins: object) -> frozenset[Origin]:
    shown = repr(origins)[:80]
    several = cast("Collection[object]", origins) if isinstance(origins, Collection) else (origins,)
    chosen = [each for each in several if isinstance(each, Origin)]
    if not chosen or len(chosen) < len(several):
        raise InvalidMessage(f"origins must be some of Origin, such as {{Origin.RETRY}}, not {shown}")
    return frozenset(chosen)


EVERYTHING: Final = Pending(origins=frozenset(Origin))
"""All that waits, for whatever reason."""


def check_limit(limit: object) -> None:
    """Refuse what is no number of messages, in the same way for each store."""
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 0:
        raise InvalidMessage(f"limit must be a whole number of messages, 0 or more, not {repr(limit)[:80]}")


class PendingPages:
    """Reads what matches, the first due first: :meth:`ask` the store for a page, :meth:`take` what matches of it.

    Nothing that was passed is read again, and no page is kept. What is stored meanwhile, due before what was read, is
    not met; a message that gets a later due time meanwhile may be met twice.

    Args:
        pending: which messages.
        limit: how many; ``None``: all.
        after: the cursor of the message behind which the list goes on.
        among: where so many were read, reading is over; ``None``: when nothing is left.
    """

    def __init__(self, pending: Pending, limit: int | None, after: str | None = None, among: int | None = None) -> None:
        self._pending, self._missing, self._readable = pending, limit, among
        self._where = MessageFilter(pending.destination, pending.due_from, pending.due_to, among, after)
        # Most often all messages of the first page match. Where they do not, few of the next ones may.
        self._page = _PAGE if limit is None else min(limit, _PAGE)
        self.is_over = limit == 0

    def ask(self) -> tuple[MessageFilter, int]:
        return self._where, self._page

    def take(self, page: PendingPage) -> list[DelayedMessage]:
        """Return what matches of a page, no more than is missing, and note where the next one begins."""
        messages = [each for each in page.messages if self._pending.matches(each)][: self._missing]
        self.is_over = page.after is None
        if self._missing is not None:
            self._missing -= len(messages)
            self.is_over |= self._missing == 0
        if self._readable is not None:
            self._readable -= self._page
            self.is_over |= self._readable <= 0
        self._where, self._page = replace(self._where, after=page.after), _PAGE
        return messages


async def first_of(
    store: AdministrableStore,
    pending: Pending,
    limit: int | None,
    after: str | None = None,
    among: int | None = None,
) -> list[DelayedMessage]:
    """Return up to ``limit`` that match, the first due first; ``None``: all, without bodies and most headers."""
    pages, messages = PendingPages(pending, limit, after, among), dict[str, DelayedMessage]()
    while not pages.is_over:
        _keep(messages, pages.take(await store.read_pending(*pages.ask())), limit)
    return list(messages.values())


def first_steps(
    store: JoiningStore, pending: Pending, limit: int | None, after: str | None = None
) -> Steps[list[DelayedMessage]]:
    """:func:`first_of` in a transaction of the application."""
    pages, messages = PendingPages(pending, limit, after), dict[str, DelayedMessage]()
    while not pages.is_over:
        _keep(messages, pages.take((yield from store.reading_steps(*pages.ask()))), limit)
    return list(messages.values())


def _keep(messages: dict[str, DelayedMessage], page: Sequence[DelayedMessage], limit: int | None) -> None:
    """Add the messages of a page by their ids, each once: one that moves meanwhile may be met again."""
    for each in page:
        messages.setdefault(each.message_id, each if limit is not None else _without_content(each))


def _without_content(message: DelayedMessage) -> DelayedMessage:
    headers = {Headers.WALL_TIME: message.headers[Headers.WALL_TIME]} if Headers.WALL_TIME in message.headers else {}
    return replace(message, headers=headers, body=b"", cursor="")


Expected: TypeAlias = Callable[[DelayedMessage], Answer]
"""Returns the answer that a change of a message would be given; see :func:`would_be`."""


async def count_of(store: AdministrableStore, pending: Pending, expected: Expected) -> Counter[Answer]:
    """Return how many of those that match would be given each answer; none of them is kept."""
    pages, count = PendingPages(pending, None), Counter[Answer]()
    while not pages.is_over:
        count.update(map(expected, pages.take(await store.read_pending(*pages.ask()))))
    return count


def count_steps(store: JoiningStore, pending: Pending, expected: Expected) -> Steps[Counter[Answer]]:
    """:func:`count_of` in a transaction of the application."""
    pages, count = PendingPages(pending, None), Counter[Answer]()
    while not pages.is_over:
        count.update(map(expected, pages.take((yield from store.reading_steps(*pages.ask())))))
    return count


async def change_all(
    messages: Sequence[DelayedMessage], change: Callable[[DelayedMessage], Awaitable[Answer]]
) -> Counter[Answer]:
    """Change messages, several at a time; return how often each answer was given.

    After the first error no further message is begun, and the error is raised.
    """
    answers, waiting = Counter[Answer](), iter(messages)

    first_errors = list[Exception]()

    async def work() -> None:
        # Cancelling these tasks would not do: SQLite finishes a call that is cancelled, and the loop would go on.
        while not first_errors and (message := next(waiting, None)) is not None:
            try:
                answers[await change(message)] += 1
            except InvalidMessage:
                answers[Answer.WOULD_EXPIRE] += 1
            except Exception as error:  # noqa: BLE001 - raised below, by itself
                first_errors.append(error)

    async with anyio.create_task_group() as tasks:
        for _ in range(_AT_ONCE):
            tasks.start_soon(work)
    if first_errors:
        raise first_errors[0]
    return answers


def change_steps(
    messages: Sequence[DelayedMessage], change: Callable[[DelayedMessage], Steps[Answer]]
) -> Steps[Counter[Answer]]:
    """:func:`change_all` in a transaction of the application."""
    answers = Counter[Answer]()
    for message in messages:
        try:
            answers[(yield from change(message))] += 1
        except InvalidMessage:
            answers[Answer.WOULD_EXPIRE] += 1
    return answers

"""Changes of pending messages by an application, and the answer for each. Source: ADR 31."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final, TypeAlias, cast

import anyio

from postdate import ports
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

_PAGE: Final = 500
_AT_ONCE: Final = 16


def administrable_store(store: ports.ClaimingStore) -> ports.AdministrableStore:
    """Return the store if its messages can be listed and changed; else raise `NotSupported`."""
    if isinstance(store, ports.AdministrableStore):
        return store
    raise NotSupported(f"{type(store).__name__} does not support listing and changing its messages")


# --- one message ------------------------------------------------------------------------------------------------------


async def cancel(store: ports.AdministrableStore, message_id: str, now: datetime) -> ports.Answer:
    return ports.Answer.DONE if await store.cancel(message_id, now) else await find_refusal(store, message_id)


async def reschedule(
    store: ports.AdministrableStore, message_id: str, due: datetime, now: datetime, wall_time: str | None = None
) -> ports.Answer:
    """Give a message another due time. Raises `InvalidMessage` if it expires before ``due``."""
    is_rescheduled = await store.reschedule(message_id, due, now, wall_time)
    return ports.Answer.DONE if is_rescheduled else await find_refusal(store, message_id)


def preview_change(message: DelayedMessage, due: datetime | None) -> ports.Answer:
    """Return the answer that a change would get if it were made now; ``due``: ``None`` to cancel."""
    try:
        if due is not None:
            check_reschedule(message.message_id, due, message.expires_at)
    except InvalidMessage:
        return ports.Answer.WOULD_EXPIRE
    return ports.Answer.DONE


async def find_refusal(store: ports.AdministrableStore, message_id: str) -> ports.Answer:
    """Return why a message was not changed."""
    records = list[ports.Record]()
    for _ in range(2):  # the message may be returned from the error queue between the two calls
        if await store.get(message_id) is not None:
            return ports.Answer.BEING_DELIVERED
        records = await store.history(message_id)
        if not records or records[-1].kind not in {ports.RecordKind.SCHEDULED, ports.RecordKind.RESCHEDULED}:
            break
    return ports.answer_of((records[-1].kind, records[-1].detail) if records else None)


# --- those that match -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pending:
    """A filter for pending messages. A message matches if it fulfils all given conditions.

    Args:
        destination: the queue that the messages are for.
        due_from, due_to: due at or after ``due_from``, and before ``due_to``; aware.
        headers: headers that the messages have, with these values.
        text: a text that is in their bodies, in UTF-8.
        failing: whether an attempt to deliver them has failed.
        zone: the zone by whose clocks they are due, such as ``Europe/Paris``.
        origins: why they are stored. By default only messages that an application scheduled match: no messages that
            wait for a retry after their handler failed, and no timeouts of sagas.

    Raises:
        InvalidTimestamp: a date-time has no time zone.
        InvalidMessage, InvalidHeaders: a condition is empty or has another type.
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
                raise InvalidMessage(f"{name} is empty: leave it out, or give at least one value")
        check_headers(self.headers or {})
        check_headers({name: getattr(self, name) or "" for name in ("text", "zone")})
        if self.destination is not None:
            check_text(self.destination, "destination", DESTINATION_LIMIT)
        object.__setattr__(self, "origins", _convert_origins(self.origins))

    @property
    def has_condition(self) -> bool:
        """Whether there is a condition. ``origins`` without :attr:`Origin.APPLICATION` is a condition, too."""
        return replace(self, origins=_SCHEDULED) != Pending() or Origin.APPLICATION not in self.origins

    def check_has_condition(self) -> None:
        """Raise `InvalidMessage` if there is no condition: the caller may have left a variable unset."""
        if not self.has_condition:
            raise InvalidMessage("no condition is given, which would change every message: give one, such as due_to=…")

    def matches(self, message: DelayedMessage) -> bool:
        """Return whether a message fulfils the conditions that a store cannot check, and is no message of the store."""
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


def _convert_origins(origins: object) -> frozenset[Origin]:
    origins_text = repr(origins)[:80]
    values = cast("Collection[object]", origins) if isinstance(origins, Collection) else (origins,)
    valid_origins = [each for each in values if isinstance(each, Origin)]
    if not valid_origins or len(valid_origins) < len(values):
        raise InvalidMessage(f"origins must be some of Origin, such as {{Origin.RETRY}}, not {origins_text}")
    return frozenset(valid_origins)


EVERYTHING: Final = Pending(origins=frozenset(Origin))
"""All pending messages of any origin."""


def check_limit(limit: object) -> None:
    """Raise `InvalidMessage` unless ``limit`` is a number of messages. The error is the same for each store."""
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 0:
        raise InvalidMessage(f"limit must be a whole number of messages, 0 or more, not {repr(limit)[:80]}")


class PendingPages:
    """Reads matching messages page by page, the first due first.

    :meth:`next_query` returns the filter and size of the next page; :meth:`accept` returns the matching messages of a
    page. Pages are not kept, and no page is read again. A message that is stored meanwhile, due before the messages
    that were read, is not returned. A message that gets a later due time meanwhile may be returned twice.

    Args:
        pending: the filter.
        limit: how many messages to return; ``None``: all.
        after: the cursor of the message after which the list continues.
        search_limit: how many messages to read at most, matching or not; ``None``: all.
    """

    def __init__(
        self, pending: Pending, limit: int | None, after: str | None = None, search_limit: int | None = None
    ) -> None:
        self._pending, self._remaining, self._remaining_reads = pending, limit, search_limit
        self._filter = ports.MessageFilter(pending.destination, pending.due_from, pending.due_to, search_limit, after)
        # Mostly all messages of the first page match, so read no more than needed. If they do not, few of the next
        # ones may match, and full pages are cheaper.
        self._page = _PAGE if limit is None else min(limit, _PAGE)
        self.is_over = limit == 0

    def next_query(self) -> tuple[ports.MessageFilter, int]:
        return self._filter, self._page

    def accept(self, page: ports.PendingPage) -> list[DelayedMessage]:
        """Return the matching messages of a page, at most as many as are missing; note where the next page begins."""
        messages = [each for each in page.messages if self._pending.matches(each)][: self._remaining]
        self.is_over = page.after is None
        if self._remaining is not None:
            self._remaining -= len(messages)
            self.is_over |= self._remaining == 0
        if self._remaining_reads is not None:
            self._remaining_reads -= self._page
            self.is_over |= self._remaining_reads <= 0
        self._filter, self._page = replace(self._filter, after=page.after), _PAGE
        return messages


async def list_matching(
    store: ports.AdministrableStore,
    pending: Pending,
    limit: int | None,
    after: str | None = None,
    search_limit: int | None = None,
) -> list[DelayedMessage]:
    """Return up to ``limit`` matching messages, the first due first.

    With ``None`` return all of them, without bodies and most headers, as they may be many.
    """
    pages, messages = PendingPages(pending, limit, after, search_limit), dict[str, DelayedMessage]()
    while not pages.is_over:
        _add_page(messages, pages.accept(await store.read_pending(*pages.next_query())), limit)
    return list(messages.values())


def list_steps(
    store: ports.JoiningStore, pending: Pending, limit: int | None, after: str | None = None
) -> ports.Steps[list[DelayedMessage]]:
    """:func:`list_matching` in a transaction of the application."""
    pages, messages = PendingPages(pending, limit, after), dict[str, DelayedMessage]()
    while not pages.is_over:
        _add_page(messages, pages.accept((yield from store.reading_steps(*pages.next_query()))), limit)
    return list(messages.values())


def _add_page(messages: dict[str, DelayedMessage], page: Sequence[DelayedMessage], limit: int | None) -> None:
    """Add the messages of a page by their ids, each once: a message that is rescheduled meanwhile may be read twice."""
    for each in page:
        messages.setdefault(each.message_id, each if limit is not None else _strip_content(each))


def _strip_content(message: DelayedMessage) -> DelayedMessage:
    headers = {Headers.WALL_TIME: message.headers[Headers.WALL_TIME]} if Headers.WALL_TIME in message.headers else {}
    return replace(message, headers=headers, body=b"", cursor="")


Preview: TypeAlias = Callable[[DelayedMessage], ports.Answer]
"""Returns the answer that a change of a message would get; see :func:`preview_change`."""


async def count_answers(store: ports.AdministrableStore, pending: Pending, preview: Preview) -> Counter[ports.Answer]:
    """Return how many matching messages would get each answer. It keeps no message in memory."""
    pages, count = PendingPages(pending, None), Counter[ports.Answer]()
    while not pages.is_over:
        count.update(map(preview, pages.accept(await store.read_pending(*pages.next_query()))))
    return count


def count_steps(store: ports.JoiningStore, pending: Pending, preview: Preview) -> ports.Steps[Counter[ports.Answer]]:
    """:func:`count_answers` in a transaction of the application."""
    pages, count = PendingPages(pending, None), Counter[ports.Answer]()
    while not pages.is_over:
        count.update(map(preview, pages.accept((yield from store.reading_steps(*pages.next_query())))))
    return count


async def change_all(
    messages: Sequence[DelayedMessage], change: Callable[[DelayedMessage], Awaitable[ports.Answer]]
) -> Counter[ports.Answer]:
    """Change messages, several concurrently; return how often each answer was given.

    After the first error no further change is begun. The changes in progress are finished, then the error is raised.
    """
    answers, remaining_messages = Counter[ports.Answer](), iter(messages)

    first_errors = list[Exception]()

    async def change_next() -> None:
        # Cancelling these tasks would not stop them: SQLite finishes a call that is cancelled, and the loop goes on.
        while not first_errors and (message := next(remaining_messages, None)) is not None:
            try:
                answers[await change(message)] += 1
            except InvalidMessage:
                answers[ports.Answer.WOULD_EXPIRE] += 1
            except Exception as error:  # noqa: BLE001 - raised below, without an exception group
                first_errors.append(error)

    async with anyio.create_task_group() as tasks:
        for _ in range(_AT_ONCE):
            tasks.start_soon(change_next)
    if first_errors:
        raise first_errors[0]
    return answers


def change_steps(
    messages: Sequence[DelayedMessage], change: Callable[[DelayedMessage], ports.Steps[ports.Answer]]
) -> ports.Steps[Counter[ports.Answer]]:
    """:func:`change_all` in a transaction of the application."""
    answers = Counter[ports.Answer]()
    for message in messages:
        try:
            answers[(yield from change(message))] += 1
        except InvalidMessage:
            answers[ports.Answer.WOULD_EXPIRE] += 1
    return answers

"""Pending messages: count, list, show, cancel and reschedule them."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TypeVar

from postdate.core import changes
from postdate.core.limits import load_limits_in_force
from postdate.core.upkeep.wall_times import WallTime, ZoneMarkers
from postdate.errors import MessageError, MessageNotFound, PostdateError
from postdate.messages import OWN_PREFIX, DelayedMessage, Envelope, check_id, origin_of
from postdate.operations import plain
from postdate.operations.explanation import explain
from postdate.operations.needs import (
    find_in_queues,
    find_pending_state,
    list_store_processes,
    read_queue_lengths,
    require_administrable,
)
from postdate.operations.unreadable import UnreadableDetails, count_unreadable_in, find_unreadable
from postdate.ports import AdministrableStore, Answer, PendingState
from postdate.ports.limits import LimitingStore, is_in_lane
from postdate.wiring import OpenDeployment, own_queues

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Statistics:
    """Counts of one store and its queues.

    Args:
        at: the time of counting.
        store: the address of the store, without secrets.
        pending, overdue, claimed, failing, next_due: see :class:`postdate.ports.StoreStatistics`; they count every
            pending message, of any origin.
        records: number of records by kind.
        queues: number of messages by queue: of all queues if these can be listed, else of the endpoint's queues and
            those of the settings; ``None`` if no queue can be counted.
        services: number of processes that deliver due messages now; ``None`` if that cannot be seen.
        unreadable: number of unreadable rows of the store and the queues; ``None`` if the queues do not answer.
    """

    at: datetime
    store: str
    pending: int
    overdue: int
    claimed: int
    failing: int
    next_due: datetime | None
    records: Mapping[str, int]
    queues: Mapping[str, int] | None
    services: int | None
    unreadable: int | None = 0


async def statistics(deployment: OpenDeployment, now: datetime, *, at_a_glance: bool = False) -> Statistics:
    """Return all counts.

    ``at_a_glance``: leave out the counts of records, which are many, and of queues that do not answer.
    """
    counts = await require_administrable(deployment, "count messages").statistics(now)
    records = dict[str, int]() if at_a_glance else await record_counts(deployment)
    processes = await list_store_processes(deployment)
    names = own_queues(deployment.settings, deployment.transport.capabilities)
    queues = await _ask_queues(read_queue_lengths(deployment, names), may_be_away=at_a_glance)
    unreadable = await _ask_queues(count_unreadable_in(deployment.transport), may_be_away=at_a_glance)
    if unreadable is not None:
        unreadable += await count_unreadable_in(deployment.store)
    return Statistics(
        at=now,
        store=deployment.settings.store.address.redacted_text,
        pending=counts.pending,
        overdue=counts.overdue,
        claimed=counts.claimed,
        failing=counts.failing,
        next_due=counts.next_due,
        records=records,
        queues=queues,
        services=None if processes is None else len(plain.running_services(processes)),
        unreadable=unreadable,
    )


async def _ask_queues(answer: Awaitable[T], *, may_be_away: bool) -> T | None:
    """Return the answer of the queues; ``None`` if they do not answer and ``may_be_away``.

    Queues in a database raise its errors, which are errors of a store.
    """
    try:
        return await answer
    except PostdateError as error:
        if may_be_away and (error.outage or error.transient):
            return None
        raise


async def record_counts(deployment: OpenDeployment) -> Mapping[str, int]:
    """Return the number of records of each kind, by the name of the kind in lower case. This reads all records."""
    counts = await require_administrable(deployment, "count records").record_counts()
    return {kind.name.lower(): count for kind, count in counts.items()}


@dataclass(frozen=True, slots=True)
class MessageLine:
    """One pending message in a list.

    ``held``: the message is due, and limits of its queue hold it. ``origin``: why the message waits.
    """

    message_id: str
    due: datetime
    overdue: bool
    held: bool
    destination: str
    number_of_failures: int
    expires_at: datetime | None
    body_bytes: int
    origin: str


@dataclass(frozen=True, slots=True)
class MessageList:
    """Pending messages by due time. ``more``: others exist beyond the limit; they begin after ``cursor``."""

    messages: Sequence[MessageLine]
    more: bool
    cursor: str | None


async def list_messages(
    deployment: OpenDeployment,
    pending_filter: changes.Pending,
    limit: int,
    now: datetime,
    after: str | None = None,
    search_limit: int | None = None,
) -> MessageList:
    """Return pending messages after the cursor ``after``, the first due first.

    ``search_limit``: the number of messages to search, for a filter that few messages match.
    """
    store = require_administrable(deployment, "list messages")
    changes.check_limit(limit)
    messages = await changes.list_matching(store, pending_filter, limit + 1, after, search_limit)
    limited_queues = set(await load_limits_in_force(store) if isinstance(store, LimitingStore) else ())
    page = messages[:limit]
    more = len(messages) > limit
    lines = [
        _line(message, now, limits_hold=await _limits_hold(deployment, message, now, limited_queues))
        for message in page
    ]
    return MessageList(lines, more, page[-1].cursor if more else None)


async def _limits_hold(
    deployment: OpenDeployment, message: DelayedMessage, now: datetime, limited_queues: Container[str]
) -> bool:
    """Return whether limits hold a due message, as :func:`explain` judges it."""
    if message.due >= now or message.destination not in limited_queues:
        return False
    if not message.number_of_failures:
        return True
    # Until its next attempt, a message that failed waits for that. Only its state has the time of the attempt.
    state = await find_pending_state(deployment, message.message_id)
    if state is None or state.attempt_at is None:
        return False
    return state.attempt_at < now or is_in_lane(state.attempt_at, message.due)


def _line(message: DelayedMessage, now: datetime, *, limits_hold: bool) -> MessageLine:
    return MessageLine(
        message_id=message.message_id,
        due=message.due,
        overdue=message.due < now and not limits_hold,
        held=limits_hold,
        destination=message.destination,
        number_of_failures=message.number_of_failures,
        expires_at=message.expires_at,
        body_bytes=len(message.body),
        origin=message.origin.value,
    )


@dataclass(frozen=True, slots=True)
class MessageLocation:
    """Where a message is.

    Args:
        where: ``waiting`` (in the store), or ``queue``.
        queue: the queue that the message is in, or its destination.
        next_attempt_at: of a pending message; ``None`` while a process has claimed it, or limits of its queue hold it,
            or if the store does not show it.
        number_of_failures: failed deliveries of a pending message, failed attempts to handle a queued one.
        held_by: the process that is delivering or handling the message.
        origin: why the message waits, or waited before it came to its queue: see :class:`postdate.messages.Origin`.
    """

    where: str
    queue: str
    due: datetime | None
    next_attempt_at: datetime | None
    number_of_failures: int
    expires_at: datetime | None
    held_by: int | None
    headers: Mapping[str, str]
    body: plain.Body
    origin: str


@dataclass(frozen=True, slots=True)
class MessageDetails:
    """One message. It has no places when it is in no store or queue, and no history when nothing was recorded.

    ``unreadable``: the rows of this message that cannot be read.
    """

    message_id: str
    places: Sequence[MessageLocation]
    history: Sequence[plain.Event]
    unreadable: Sequence[UnreadableDetails] = ()


async def show_message(deployment: OpenDeployment, message_id: str, *, queued: bool = True) -> MessageDetails:
    """Return places, content and history of a message. Raise MessageNotFound if none of these exists.

    ``queued``: also search the queues, which reads their messages.
    """
    pending_state = await find_pending_state(deployment, message_id)
    shows_attempts = deployment.store_view is not None
    places = [] if pending_state is None else [_location_of_pending(pending_state, shows_attempts=shows_attempts)]
    places += [
        _location("queue", each.queue, each.envelope, each.failures, each.received_by)
        for each in (await find_in_queues(deployment, message_id) if queued else ())
    ]
    history = plain.events_of(await require_administrable(deployment, "show a message").history(message_id))
    unreadable = await find_unreadable(deployment, message_id)
    if not places and not history and not unreadable:
        raise MessageNotFound(
            f"no message {message_id!r} is pending in {deployment.settings.store.address.redacted_text}, "
            f"is in a queue, or was recorded; list pending messages with `postdate messages list`"
        )
    return MessageDetails(message_id, places, history, unreadable)


def _location_of_pending(pending_state: PendingState, *, shows_attempts: bool) -> MessageLocation:
    message, attempt_at = pending_state.message, pending_state.attempt_at
    location = _location("waiting", message.destination, message, message.number_of_failures, pending_state.claimed_by)
    if not shows_attempts or is_in_lane(attempt_at, message.due):
        return location
    return replace(location, next_attempt_at=attempt_at)


def _location(
    kind: str, queue: str, message: DelayedMessage | Envelope, failures: int, held_by: int | None
) -> MessageLocation:
    return MessageLocation(
        where=kind,
        queue=queue,
        due=message.due,
        next_attempt_at=None,
        number_of_failures=failures,
        expires_at=message.expires_at,
        held_by=held_by,
        headers=message.headers,
        body=plain.body_of(message.body),
        origin=origin_of(message.headers).value,
    )


@dataclass(frozen=True, slots=True)
class Change:
    """Result of changing one message. ``reason`` says why it was not changed; ``due`` is its new due time."""

    message_id: str
    done: bool
    reason: str = ""
    due: datetime | None = None


def _check_not_own_id(message_id: str) -> None:
    """Raise `InvalidMessage` if the id belongs to one of the store's own messages (ADR 41)."""
    if message_id.startswith(OWN_PREFIX):
        check_id(message_id)


async def change_each(
    message_ids: Sequence[str], change: Callable[[str], Awaitable[Change]]
) -> tuple[list[Change], PostdateError | None]:
    """Change messages one after the other; return what became of each, and the first error.

    An error about one message does not keep the others from their change. After any other error, such as that of a
    store that is away, the rest is left alone. So whoever reads the result knows which messages have been changed.
    """
    changes, first_error = list[Change](), None
    for position, message_id in enumerate(message_ids):
        try:
            changes.append(await change(message_id))
        except PostdateError as error:
            first_error = first_error or error
            changes.append(Change(message_id, done=False, reason=str(error)))
            if not isinstance(error, MessageError):
                others = message_ids[position + 1 :]
                changes += [Change(each, done=False, reason="not tried after that error") for each in others]
                break
    return changes, first_error


async def cancel(deployment: OpenDeployment, message_id: str, now: datetime) -> Change:
    """Remove a pending message permanently. For another message, return why it cannot be cancelled.

    Raises InvalidMessage if the id belongs to one of the store's own messages.
    """
    store = require_administrable(deployment, "cancel a message")
    _check_not_own_id(message_id)
    if await store.cancel(message_id, now):
        return Change(message_id, done=True)
    return Change(message_id, done=False, reason=await _explain_refusal(deployment, message_id, now))


async def reschedule(
    deployment: OpenDeployment, message_id: str, due: datetime, now: datetime, wall_time: WallTime | None = None
) -> Change:
    """Change the due time of a pending message. Raise InvalidMessage, and change nothing, if it expires before ``due``.

    ``wall_time``: the local time that ``due`` stands for; the message follows the rules of its zone from now on.
    """
    _check_not_own_id(message_id)
    store = require_administrable(deployment, "reschedule a message")
    header = await _store_zone(deployment, wall_time, now)
    if await store.reschedule(message_id, due, now, header):
        return Change(message_id, done=True, due=due)
    return Change(message_id, done=False, reason=await _explain_refusal(deployment, message_id, now))


async def _store_zone(deployment: OpenDeployment, wall_time: WallTime | None, now: datetime) -> str | None:
    """Store the rules of the zone, and return the header of the wall time. Return ``None`` without a wall time."""
    if wall_time is None:
        return None
    assert deployment.store is not None  # The caller has checked that messages of the store can be changed.
    await ZoneMarkers(deployment.store).ensure_marker(wall_time.zone, now)
    return str(wall_time)


@dataclass(frozen=True, slots=True)
class ChangeCounts:
    """Result of changing all matching messages: the number of each answer. In a dry run, the expected numbers."""

    answers: Mapping[str, int]
    dry_run: bool


async def cancel_all(
    deployment: OpenDeployment,
    pending_filter: changes.Pending,
    now: datetime,
    *,
    dry_run: bool,
    progress: plain.Progress = plain.ignore_progress,
) -> ChangeCounts:
    """Remove all pending messages that match, permanently."""
    store = require_administrable(deployment, "cancel messages")
    return await _change_all(
        store,
        pending_filter,
        lambda each: changes.cancel(store, each.message_id, now),
        lambda each: changes.preview_change(each, None),
        progress,
        dry_run=dry_run,
    )


async def reschedule_all(  # noqa: PLR0913 - which, when, and how
    deployment: OpenDeployment,
    pending_filter: changes.Pending,
    due: Callable[[DelayedMessage, datetime], datetime],
    now: datetime,
    *,
    dry_run: bool,
    progress: plain.Progress = plain.ignore_progress,
    wall_time: WallTime | None = None,
) -> ChangeCounts:
    """Change the due time of all pending messages that match; ``due`` returns the new one of each message."""
    store = require_administrable(deployment, "reschedule messages")
    header = None if dry_run else await _store_zone(deployment, wall_time, now)

    async def change(message: DelayedMessage) -> Answer:
        return await changes.reschedule(store, message.message_id, due(message, now), now, header)

    def preview_change(message: DelayedMessage) -> Answer:
        return changes.preview_change(message, due(message, now))

    return await _change_all(store, pending_filter, change, preview_change, progress, dry_run=dry_run)


async def _change_all(
    store: AdministrableStore,
    pending_filter: changes.Pending,
    change: Callable[[DelayedMessage], Awaitable[Answer]],
    preview_change: changes.Preview,
    progress: plain.Progress,
    *,
    dry_run: bool,
) -> ChangeCounts:
    pending_filter.check_has_condition()
    if dry_run:
        count = await changes.count_answers(store, pending_filter, preview_change)
        return ChangeCounts({answer.value: number for answer, number in count.items()}, dry_run)
    messages, counter = await changes.list_matching(store, pending_filter, None), itertools.count(1)

    async def change_and_report(message: DelayedMessage) -> Answer:
        try:
            return await change(message)
        finally:
            progress(next(counter))

    answers = await changes.change_all(messages, change_and_report)
    return ChangeCounts({answer.value: count for answer, count in answers.items()}, dry_run)


async def _explain_refusal(deployment: OpenDeployment, message_id: str, now: datetime) -> str:
    return (await explain(deployment, message_id, now)).headline

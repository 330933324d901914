"""Delayed messages in memory, for tests and trials."""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from typing_extensions import override

from postdate.clock import EARLIEST, nearest_instant, to_microseconds
from postdate.errors import DuplicateMessage
from postdate.messages import DelayedMessage, rescheduled, stored_headers, with_failures
from postdate.ports import (
    OUTCOME_RECORDS,
    AdministrableStore,
    Claim,
    ClaimingStore,
    MessageFilter,
    Outcome,
    PendingPage,
    Record,
    Recording,
    RecordKind,
    ReplacingStore,
    StoreCapabilities,
    StoreReport,
    StoreStatistics,
    TransactionMode,
    Wake,
    counted_between,
)
from postdate.ports.administration import place_text, read_place
from postdate.ports.changing import KeyedIds, Making
from postdate.ports.limits import LANES, NONE_IN_USE, KeptLimits, LimitingStore, LimitsInUse


@dataclass(slots=True)
class _Entry:
    """A pending message. ``attempt_at`` is its next attempt; while it is claimed, ``None``, and it has a token."""

    message: DelayedMessage
    attempt_at: datetime | None
    token: int | None = None
    claimed_from: datetime | None = None
    """``attempt_at`` before the claim."""
    number: int = 0
    """The position in the order of storing. It does not change."""


_Place = tuple[datetime, int, str]
"""The place of a message in the list of all: due time, number, id."""


class MemoryStore(ClaimingStore, AdministrableStore, ReplacingStore, LimitingStore):
    """Keeps delayed messages in memory; they are lost with the process.

    Args:
        recording: how much is kept for audits.
        largest_message_bytes: of headers and body together.
    """

    def __init__(self, *, recording: Recording = Recording.ALL, largest_message_bytes: int = 16 * 1024 * 1024) -> None:
        self._capabilities = StoreCapabilities(
            durable=False,
            shared=False,
            time_precision=timedelta(microseconds=1),
            transaction_modes=frozenset(TransactionMode) - {TransactionMode.TRANSACTION_SCOPE},
            largest_message_bytes=largest_message_bytes,
        )
        self._recording = recording
        self._entries: dict[str, _Entry] = {}
        self._list: list[_Place] = []
        """The places of all entries, sorted."""
        self._numbers = itertools.count(1)
        self._seen_ids: set[str] = set()
        self._newest: dict[str, str] = {}
        """The id of the last message that was stored under each key."""
        self._records: list[Record] = []
        self._tokens = itertools.count(1)
        self._wakes: list[Wake] = []
        self._limits: dict[str, KeptLimits] = {}

    @override
    async def initialize(self, endpoint: str, mode: TransactionMode) -> None: ...

    @override
    async def store(self, message: DelayedMessage, now: datetime) -> None:
        if self._last_failed(message.message_id):
            self._check_size(message)
            first_before = self._first_attempt()
            self._add(message, now, RecordKind.RESCHEDULED, "came back from the error queue")
            self._wake_if_earlier(first_before)
        elif (await self.store_many([message], now)).already_there:
            raise DuplicateMessage.of(message.message_id)

    @override
    async def store_many(self, messages: Sequence[DelayedMessage], now: datetime) -> StoreReport:
        for message in messages:
            self._check_size(message)
        first_before = self._first_attempt()
        already_there = list[str]()
        for message in messages:
            if message.message_id in self._seen_ids:
                already_there.append(message.message_id)
            else:
                self._add(message, now, RecordKind.SCHEDULED)
        self._wake_if_earlier(first_before)
        return StoreReport(len(messages) - len(already_there), tuple(already_there))

    def _wake_if_earlier(self, first_before: datetime | None) -> None:
        first = self._first_attempt()
        if first is not None and (first_before is None or first < first_before):
            for wake in self._wakes:
                wake()

    def _last_failed(self, message_id: str) -> bool:
        """Return whether the message is in the error queue, so that it may be returned and stored again."""
        ends = [record.kind for record in self._records if record.message_id == message_id]
        return message_id not in self._entries and bool(ends) and ends[-1] is RecordKind.FAILED

    def _check_size(self, message: DelayedMessage) -> None:
        stored_headers(message, self._capabilities.largest_message_bytes)

    def _add(self, message: DelayedMessage, now: datetime, kind: RecordKind, detail: str = "") -> None:
        self._seen_ids.add(message.message_id)
        self._enter(_Entry(with_failures(message, 0), message.due, number=next(self._numbers)))
        self._record(kind, message, now, detail)

    @override
    async def remove(self, message_id: str, now: datetime) -> bool:
        """Remove a message; it is recorded as delivered."""
        return self._end(message_id, RecordKind.DELIVERED, now, "")

    @override
    async def increment_failure_count(self, message_id: str, now: datetime) -> bool:
        entry = self._entries.get(message_id)
        return entry is not None and self._count_failure(entry, entry.message.due, now, "")

    @override
    async def next_due(self) -> datetime | None:
        return min((entry.message.due for entry in self._entries.values()), default=None)

    @override
    async def claim_due(self, now: datetime, limit: int) -> Sequence[Claim]:
        return self._claim(EARLIEST, now, limit)

    @override
    async def claim_held(self, kept: KeptLimits, now: datetime, limit: int) -> Sequence[Claim]:
        return self._claim(kept.begin, kept.end, limit)

    def _claim(self, begin: datetime, end: datetime, limit: int) -> list[Claim]:
        due = [
            each for each in self._entries.values() if each.attempt_at is not None and begin <= each.attempt_at < end
        ]
        due.sort(key=lambda entry: entry.attempt_at or entry.message.due)
        for entry in due[:limit]:
            entry.claimed_from, entry.attempt_at, entry.token = entry.attempt_at, None, next(self._tokens)
        return [Claim(entry.message, entry.token) for entry in due[:limit]]

    @override
    async def finish(self, claims: Sequence[Claim], outcome: Outcome, now: datetime, detail: str = "") -> int:
        claimed = [claim for claim in claims if self._claimed_entry(claim) is not None]
        return sum(self._end(claim.message.message_id, OUTCOME_RECORDS[outcome], now, detail) for claim in claimed)

    @override
    async def retry_later(self, claim: Claim, attempt_at: datetime, now: datetime, reason: str) -> bool:
        entry = self._claimed_entry(claim)
        return entry is not None and self._count_failure(entry, attempt_at, now, reason)

    @override
    async def release(self, claims: Sequence[Claim], attempt_at: datetime | None) -> int:
        entries = [entry for claim in claims if (entry := self._claimed_entry(claim)) is not None]
        for entry in entries:
            entry.attempt_at, entry.token = attempt_at or entry.claimed_from, None
        for wake in self._wakes if entries else ():
            wake()
        return len(entries)

    @override
    async def next_attempt(self) -> datetime | None:
        return self._first_attempt()

    @override
    async def listen(self, wake: Wake) -> Callable[[], None]:
        self._wakes.append(wake)

        def stop() -> None:
            with suppress(ValueError):
                self._wakes.remove(wake)

        return stop

    @override
    async def cancel(self, message_id: str, now: datetime) -> bool:
        entry = self._entries.get(message_id)
        return entry is not None and entry.token is None and self._end(message_id, RecordKind.CANCELLED, now, "")

    @override
    async def reschedule(self, message_id: str, due: datetime, now: datetime, wall_time: str | None = None) -> bool:
        entry = self._entries.get(message_id)
        if entry is None or entry.token is not None:
            return False
        message = rescheduled(entry.message, due, wall_time)
        self._remove_entry(entry)
        entry.message, entry.attempt_at = message, message.due
        self._enter(entry)
        self._record(RecordKind.RESCHEDULED, entry.message, now)
        for wake in self._wakes:
            wake()
        return True

    @override
    async def replace(self, key: str, make: Making, now: datetime) -> str:
        ids, newest = KeyedIds(key), self._newest.get(key, "")
        entry = self._entries.get(newest)
        if entry is None or entry.token is not None:
            candidates = (ids.after(newest, refused) for refused in itertools.count())
            message = make(next(each for each in candidates if each not in self._seen_ids), None)
            await self.store(message, now)
            await self.keep_keys([message.message_id])
            return message.message_id
        stored = next(each.at for each in self._records if each.message_id == newest)
        message = make(newest, stored)
        self._check_size(message)
        self._remove_entry(entry)
        entry.message, entry.attempt_at = message, message.due
        self._enter(entry)
        self._record(RecordKind.RESCHEDULED, entry.message, now, "replaced")
        for wake in self._wakes:
            wake()
        return newest

    @override
    async def keep_keys(self, message_ids: Sequence[str]) -> None:
        for each in sorted(message_ids):
            self._newest[each[: -len(KeyedIds("").first)]] = each

    @override
    async def kept_limits(self, destinations: Collection[str] | None = None) -> Sequence[KeptLimits]:
        names = self._limits.keys() if destinations is None else self._limits.keys() & set(destinations)
        return [self._limits[each] for each in sorted(names)]

    @override
    async def limits_in_use(self) -> LimitsInUse:
        if not self._limits:
            return NONE_IN_USE
        # A claimed message has no attempt time, so use the one before its claim. That is valid only during the claim.
        times = sorted(each.attempt_at or each.claimed_from or LANES for each in self._entries.values())

        def has_messages(limits: KeptLimits) -> bool:
            place = bisect_left(times, limits.begin)
            return place < len(times) and times[place] < limits.end

        in_use = [each for each in self._limits.values() if has_messages(each)]
        return LimitsInUse(any(each.limits for each in self._limits.values()), in_use)

    @override
    async def keep_limits(self, destination: str, limits: str, free_at: datetime, before: str = "") -> bool:
        stored = self._limits.get(destination, KeptLimits(destination, len(self._limits) + 1, "", free_at))
        if stored.limits != before:
            return False
        self._limits[destination] = replace(stored, limits=limits, free_at=free_at)
        return True

    @override
    async def take_turns(self, kept: KeptLimits, free_at: datetime) -> bool:
        if self._limits.get(kept.destination) != kept:
            return False
        self._limits[kept.destination] = replace(kept, free_at=free_at)
        return True

    @override
    async def statistics(self, now: datetime) -> StoreStatistics:
        entries = self._entries.values()
        return StoreStatistics(
            pending=len(entries),
            overdue=sum(entry.message.due < now for entry in entries if entry.token is None),
            claimed=sum(entry.token is not None for entry in entries),
            failing=sum(entry.message.number_of_failures > 0 for entry in entries),
            next_due=await self.next_due(),
        )

    @override
    async def due_counts(self, edges: Sequence[datetime]) -> Sequence[int]:
        return counted_between(edges, ((entry.message.due, 1) for entry in self._entries.values()))

    @override
    async def record_counts(self) -> Mapping[RecordKind, int]:
        return Counter(record.kind for record in self._records)

    @override
    async def read_pending(self, where: MessageFilter, limit: int) -> PendingPage:
        messages, begin = list[DelayedMessage](), bisect_left(self._list, (where.due_from or EARLIEST, 0, ""))
        if where.after is not None:
            due, number = read_place(where.after)
            begin = max(begin, bisect_left(self._list, (nearest_instant(due), number + 1, "")))
        for due, number, message_id in itertools.islice(self._list, begin, None):
            if len(messages) == limit or (where.due_to is not None and due >= where.due_to):
                break
            message = self._entries[message_id].message
            if where.matches(message):
                messages.append(copy(message).listed(place_text(to_microseconds(due), number)))
        return PendingPage.of(messages, limit)

    @override
    async def get(self, message_id: str) -> DelayedMessage | None:
        entry = self._entries.get(message_id)
        return None if entry is None else entry.message

    @override
    async def history(self, message_id: str) -> Sequence[Record]:
        return [record for record in self._records if record.message_id == message_id]

    @override
    async def close(self) -> None: ...

    def _enter(self, entry: _Entry) -> None:
        self._entries[entry.message.message_id] = entry
        insort(self._list, _place_of(entry))

    def _remove_entry(self, entry: _Entry) -> None:
        del self._entries[entry.message.message_id]
        del self._list[bisect_left(self._list, _place_of(entry))]

    def _first_attempt(self) -> datetime | None:
        return min((e.attempt_at for e in self._entries.values() if e.attempt_at is not None), default=None)

    def _claimed_entry(self, claim: Claim) -> _Entry | None:
        entry = self._entries.get(claim.message.message_id)
        return entry if entry is not None and entry.token == claim.token else None

    def _count_failure(self, entry: _Entry, attempt_at: datetime, now: datetime, reason: str) -> bool:
        entry.message = with_failures(entry.message, entry.message.number_of_failures + 1)
        entry.attempt_at, entry.token = attempt_at, None
        if self._recording is Recording.ALL:
            self._record(RecordKind.RETRIED, entry.message, now, reason)
        return True

    def _end(self, message_id: str, kind: RecordKind, now: datetime, detail: str) -> bool:
        if (entry := self._entries.get(message_id)) is None:
            return False
        self._remove_entry(entry)
        self._record(kind, entry.message, now, detail)
        return True

    def _record(self, kind: RecordKind, message: DelayedMessage, now: datetime, detail: str = "") -> None:
        self._records.append(Record(kind, message.message_id, now, message.due, message.destination, detail))


def _place_of(entry: _Entry) -> _Place:
    return entry.message.due, entry.number, entry.message.message_id

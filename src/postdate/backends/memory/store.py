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

from postdate import ports
from postdate.clock import EARLIEST, nearest_instant, to_microseconds
from postdate.errors import DuplicateMessage
from postdate.messages import DelayedMessage, copy_with_due, copy_with_failures, encode_for_store
from postdate.ports.administration import cursor_text, parse_cursor
from postdate.ports.changing import CreateMessage, KeyedIds
from postdate.ports.limits import LANES, NONE_IN_USE, LimitingStore, LimitsInUse, StoredLimits


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


_Position = tuple[datetime, int, str]
"""The place of a message in the list of all: due time, number, id."""


class MemoryStore(ports.ClaimingStore, ports.AdministrableStore, ports.ReplacingStore, LimitingStore):
    """Keeps delayed messages in memory; they are lost with the process.

    Args:
        recording: how much is kept for audits.
        largest_message_bytes: of headers and body together.
    """

    def __init__(
        self, *, recording: ports.Recording = ports.Recording.ALL, largest_message_bytes: int = 16 * 1024 * 1024
    ) -> None:
        self._capabilities = ports.StoreCapabilities(
            durable=False,
            shared=False,
            time_precision=timedelta(microseconds=1),
            transaction_modes=frozenset(ports.TransactionMode) - {ports.TransactionMode.TRANSACTION_SCOPE},
            largest_message_bytes=largest_message_bytes,
        )
        self._recording = recording
        self._entries: dict[str, _Entry] = {}
        self._positions: list[_Position] = []
        """The places of all entries, sorted."""
        self._numbers = itertools.count(1)
        self._known_ids: set[str] = set()
        self._last_id_by_key: dict[str, str] = {}
        """The id of the last message that was stored under each key."""
        self._records: list[ports.Record] = []
        self._tokens = itertools.count(1)
        self._wakes: list[ports.Wake] = []
        self._limits: dict[str, StoredLimits] = {}

    @override
    async def initialize(self, endpoint: str, mode: ports.TransactionMode) -> None: ...

    @override
    async def store(self, message: DelayedMessage, now: datetime) -> None:
        if self._has_failed(message.message_id):
            self._check_size(message)
            previous_first = self._first_attempt()
            self._add(message, now, ports.RecordKind.RESCHEDULED, "came back from the error queue")
            self._wake_if_earlier(previous_first)
        elif (await self.store_many([message], now)).duplicate_ids:
            raise DuplicateMessage.of(message.message_id)

    @override
    async def store_many(self, messages: Sequence[DelayedMessage], now: datetime) -> ports.StoreReport:
        for message in messages:
            self._check_size(message)
        previous_first = self._first_attempt()
        duplicate_ids = list[str]()
        for message in messages:
            if message.message_id in self._known_ids:
                duplicate_ids.append(message.message_id)
            else:
                self._add(message, now, ports.RecordKind.SCHEDULED)
        self._wake_if_earlier(previous_first)
        return ports.StoreReport(len(messages) - len(duplicate_ids), tuple(duplicate_ids))

    def _wake_if_earlier(self, previous_first: datetime | None) -> None:
        first = self._first_attempt()
        if first is not None and (previous_first is None or first < previous_first):
            for wake in self._wakes:
                wake()

    def _has_failed(self, message_id: str) -> bool:
        """Return whether the message is in the error queue, so that it may be returned and stored again."""
        ends = [record.kind for record in self._records if record.message_id == message_id]
        return message_id not in self._entries and bool(ends) and ends[-1] is ports.RecordKind.FAILED

    def _check_size(self, message: DelayedMessage) -> None:
        encode_for_store(message, self._capabilities.largest_message_bytes)

    def _add(self, message: DelayedMessage, now: datetime, kind: ports.RecordKind, detail: str = "") -> None:
        self._known_ids.add(message.message_id)
        self._add_entry(_Entry(copy_with_failures(message, 0), message.due, number=next(self._numbers)))
        self._record(kind, message, now, detail)

    @override
    async def remove(self, message_id: str, now: datetime) -> bool:
        """Remove a message; it is recorded as delivered."""
        return self._remove_message(message_id, ports.RecordKind.DELIVERED, now, "")

    @override
    async def increment_failure_count(self, message_id: str, now: datetime) -> bool:
        entry = self._entries.get(message_id)
        return entry is not None and self._count_failure(entry, entry.message.due, now, "")

    @override
    async def next_due(self) -> datetime | None:
        return min((entry.message.due for entry in self._entries.values()), default=None)

    @override
    async def claim_due(self, now: datetime, limit: int) -> Sequence[ports.Claim]:
        return self._claim_between(EARLIEST, now, limit)

    @override
    async def claim_lane(self, stored_limits: StoredLimits, now: datetime, limit: int) -> Sequence[ports.Claim]:
        return self._claim_between(stored_limits.lane_start, stored_limits.lane_end, limit)

    def _claim_between(self, start: datetime, end: datetime, limit: int) -> list[ports.Claim]:
        due_entries = [
            each for each in self._entries.values() if each.attempt_at is not None and start <= each.attempt_at < end
        ]
        due_entries.sort(key=lambda entry: entry.attempt_at or entry.message.due)
        for entry in due_entries[:limit]:
            entry.claimed_from, entry.attempt_at, entry.token = entry.attempt_at, None, next(self._tokens)
        return [ports.Claim(entry.message, entry.token) for entry in due_entries[:limit]]

    @override
    async def finish(
        self, claims: Sequence[ports.Claim], outcome: ports.Outcome, now: datetime, detail: str = ""
    ) -> int:
        valid_claims = [claim for claim in claims if self._claimed_entry(claim) is not None]
        return sum(
            self._remove_message(claim.message.message_id, ports.OUTCOME_RECORDS[outcome], now, detail)
            for claim in valid_claims
        )

    @override
    async def retry_later(self, claim: ports.Claim, attempt_at: datetime, now: datetime, reason: str) -> bool:
        entry = self._claimed_entry(claim)
        return entry is not None and self._count_failure(entry, attempt_at, now, reason)

    @override
    async def release(self, claims: Sequence[ports.Claim], attempt_at: datetime | None) -> int:
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
    async def listen(self, wake: ports.Wake) -> Callable[[], None]:
        self._wakes.append(wake)

        def stop() -> None:
            with suppress(ValueError):
                self._wakes.remove(wake)

        return stop

    @override
    async def cancel(self, message_id: str, now: datetime) -> bool:
        entry = self._entries.get(message_id)
        return (
            entry is not None
            and entry.token is None
            and self._remove_message(message_id, ports.RecordKind.CANCELLED, now, "")
        )

    @override
    async def reschedule(self, message_id: str, due: datetime, now: datetime, wall_time: str | None = None) -> bool:
        entry = self._entries.get(message_id)
        if entry is None or entry.token is not None:
            return False
        message = copy_with_due(entry.message, due, wall_time)
        self._remove_entry(entry)
        entry.message, entry.attempt_at = message, message.due
        self._add_entry(entry)
        self._record(ports.RecordKind.RESCHEDULED, entry.message, now)
        for wake in self._wakes:
            wake()
        return True

    @override
    async def replace(self, key: str, create_message: CreateMessage, now: datetime) -> str:
        ids, last_id = KeyedIds(key), self._last_id_by_key.get(key, "")
        entry = self._entries.get(last_id)
        if entry is None or entry.token is not None:
            candidates = (ids.id_after(last_id, refused) for refused in itertools.count())
            message = create_message(next(each for each in candidates if each not in self._known_ids), None)
            await self.store(message, now)
            await self.store_keys([message.message_id])
            return message.message_id
        stored_at = next(each.at for each in self._records if each.message_id == last_id)
        self._replace_message(entry, create_message(last_id, stored_at), now)
        return last_id

    @override
    async def replace_pending(self, message: DelayedMessage, now: datetime) -> bool:
        entry = self._entries.get(message.message_id)
        if entry is None or entry.token is not None:
            return False
        self._replace_message(entry, copy_with_failures(message, 0), now)
        return True

    def _replace_message(self, entry: _Entry, message: DelayedMessage, now: datetime) -> None:
        self._check_size(message)
        self._remove_entry(entry)
        entry.message, entry.attempt_at = message, message.due
        self._add_entry(entry)
        self._record(ports.RecordKind.RESCHEDULED, entry.message, now, "replaced")
        for wake in self._wakes:
            wake()

    @override
    async def store_keys(self, message_ids: Sequence[str]) -> None:
        for each in sorted(message_ids):
            self._last_id_by_key[each[: -len(KeyedIds("").first)]] = each

    @override
    async def load_limits(self, destinations: Collection[str] | None = None) -> Sequence[StoredLimits]:
        names = self._limits.keys() if destinations is None else self._limits.keys() & set(destinations)
        return [self._limits[each] for each in sorted(names)]

    @override
    async def load_limits_in_use(self) -> LimitsInUse:
        if not self._limits:
            return NONE_IN_USE
        # A claimed message has no attempt time, so use the one before its claim. That is valid only during the claim.
        times = sorted(each.attempt_at or each.claimed_from or LANES for each in self._entries.values())

        def has_messages(limits: StoredLimits) -> bool:
            index = bisect_left(times, limits.lane_start)
            return index < len(times) and times[index] < limits.lane_end

        lanes = [each for each in self._limits.values() if has_messages(each)]
        return LimitsInUse(any(each.limits for each in self._limits.values()), lanes)

    @override
    async def store_limits(self, destination: str, limits: str, free_at: datetime, previous_limits: str = "") -> bool:
        stored = self._limits.get(destination, StoredLimits(destination, len(self._limits) + 1, "", free_at))
        if stored.limits != previous_limits:
            return False
        self._limits[destination] = replace(stored, limits=limits, free_at=free_at)
        return True

    @override
    async def reserve_slots(self, stored_limits: StoredLimits, free_at: datetime) -> bool:
        if self._limits.get(stored_limits.destination) != stored_limits:
            return False
        self._limits[stored_limits.destination] = replace(stored_limits, free_at=free_at)
        return True

    @override
    async def statistics(self, now: datetime) -> ports.StoreStatistics:
        entries = self._entries.values()
        return ports.StoreStatistics(
            pending=len(entries),
            overdue=sum(entry.message.due < now for entry in entries if entry.token is None),
            claimed=sum(entry.token is not None for entry in entries),
            failing=sum(entry.message.number_of_failures > 0 for entry in entries),
            next_due=await self.next_due(),
        )

    @override
    async def due_counts(self, edges: Sequence[datetime]) -> Sequence[int]:
        return ports.counts_between(edges, ((entry.message.due, 1) for entry in self._entries.values()))

    @override
    async def record_counts(self) -> Mapping[ports.RecordKind, int]:
        return Counter(record.kind for record in self._records)

    @override
    async def read_pending(self, message_filter: ports.MessageFilter, limit: int) -> ports.PendingPage:
        messages, start_index = (
            list[DelayedMessage](),
            bisect_left(self._positions, (message_filter.due_from or EARLIEST, 0, "")),
        )
        if message_filter.after is not None:
            due, number = parse_cursor(message_filter.after)
            start_index = max(start_index, bisect_left(self._positions, (nearest_instant(due), number + 1, "")))
        for due, number, message_id in itertools.islice(self._positions, start_index, None):
            if len(messages) == limit or (message_filter.due_to is not None and due >= message_filter.due_to):
                break
            message = self._entries[message_id].message
            if message_filter.matches(message):
                messages.append(copy(message).set_cursor(cursor_text(to_microseconds(due), number)))
        return ports.PendingPage.of(messages, limit)

    @override
    async def get(self, message_id: str) -> DelayedMessage | None:
        entry = self._entries.get(message_id)
        return None if entry is None else entry.message

    @override
    async def history(self, message_id: str) -> Sequence[ports.Record]:
        return [record for record in self._records if record.message_id == message_id]

    @override
    async def close(self) -> None: ...

    def _add_entry(self, entry: _Entry) -> None:
        self._entries[entry.message.message_id] = entry
        insort(self._positions, _position_of(entry))

    def _remove_entry(self, entry: _Entry) -> None:
        del self._entries[entry.message.message_id]
        del self._positions[bisect_left(self._positions, _position_of(entry))]

    def _first_attempt(self) -> datetime | None:
        return min((entry.attempt_at for entry in self._entries.values() if entry.attempt_at is not None), default=None)

    def _claimed_entry(self, claim: ports.Claim) -> _Entry | None:
        entry = self._entries.get(claim.message.message_id)
        return entry if entry is not None and entry.token == claim.token else None

    def _count_failure(self, entry: _Entry, attempt_at: datetime, now: datetime, reason: str) -> bool:
        entry.message = copy_with_failures(entry.message, entry.message.number_of_failures + 1)
        entry.attempt_at, entry.token = attempt_at, None
        if self._recording is ports.Recording.ALL:
            self._record(ports.RecordKind.RETRIED, entry.message, now, reason)
        return True

    def _remove_message(self, message_id: str, kind: ports.RecordKind, now: datetime, detail: str) -> bool:
        if (entry := self._entries.get(message_id)) is None:
            return False
        self._remove_entry(entry)
        self._record(kind, entry.message, now, detail)
        return True

    def _record(self, kind: ports.RecordKind, message: DelayedMessage, now: datetime, detail: str = "") -> None:
        self._records.append(ports.Record(kind, message.message_id, now, message.due, message.destination, detail))


def _position_of(entry: _Entry) -> _Position:
    return entry.message.due, entry.number, entry.message.message_id

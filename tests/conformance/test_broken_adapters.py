"""A suite that lets a broken adapter pass proves nothing: each defect is caught by the check named beside it."""

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from contextvars import copy_context
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import anyio
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from tests.conftest import LocalTransportSubject

from postdate import (
    DelayedMessage,
    Envelope,
    LocalTransport,
    MemoryStore,
    MemoryTransport,
    SqliteStore,
    TransactionMode,
    ports,
)
from postdate.backends.memory.transport import MemoryReceiver, _has_expired
from postdate.backends.sqlite.observation import FileObserver
from postdate.backends.sqlite.transport import LocalReceiver
from postdate.clock import LATEST, to_microseconds
from postdate.errors import (
    ClaimLost,
    ConfigurationError,
    DuplicateMessage,
    InvalidMessage,
    PostdateError,
    StoreError,
)
from postdate.messages import new_message_id
from postdate.pipeline.rows import INSTANT, messages_of
from postdate.ports.changing import KEYED_ID, CreateMessage
from postdate.ports.limits import LimitsInUse, StoredLimits
from postdate.testing import ConformanceFailure, StoreSubject, TransportSubject, store_checks, transport_checks

MICROSECOND = timedelta(microseconds=1)
Broken = dict[str, tuple[Callable[..., Any], str]]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect that makes a check wait for ever shall not make us wait for long."""
    for limit in ("NEWS_SECONDS", "WAKE_UP_SECONDS"):
        monkeypatch.setattr(f"postdate.testing.conformance.{limit}", 0.2)


# --- stores -----------------------------------------------------------------------------------------------------------


class EarlyByOneMicrosecond(MemoryStore):
    async def claim_due(self, now: datetime, limit: int) -> Sequence[ports.Claim]:
        return await super().claim_due(now + MICROSECOND, limit)


class OverwritesOnDuplicate(MemoryStore):
    async def store(self, message: DelayedMessage, now: datetime) -> None:
        self._entries.pop(message.message_id, None)
        self._known_ids.discard(message.message_id)
        await super().store(message, now)


class SwallowsDuplicates(MemoryStore):
    async def store(self, message: DelayedMessage, now: datetime) -> None:
        await self.store_many([message], now)


class LosesTheBatchAfterADuplicate(MemoryStore):
    async def store_many(self, messages: Sequence[DelayedMessage], now: datetime) -> ports.StoreReport:
        report = await super().store_many(messages, now)
        if report.duplicate_ids and len(messages) > 1:
            self._entries.pop(messages[0].message_id, None)
        return report


class ForgetsFailures(MemoryStore):
    def _count_failure(self, entry, attempt_at, now, reason) -> bool:
        counted = super()._count_failure(entry, attempt_at, now, reason)
        entry.message = replace(entry.message, number_of_failures=min(entry.message.number_of_failures, 1))
        return counted


class ClaimsTwice(MemoryStore):
    async def claim_due(self, now: datetime, limit: int) -> Sequence[ports.Claim]:
        claims = await super().claim_due(now, limit)
        for claim in claims:
            self._entries[claim.message.message_id].attempt_at = claim.message.due
        return claims


class NewestFirst(MemoryStore):
    async def claim_due(self, now: datetime, limit: int) -> Sequence[ports.Claim]:
        return list(reversed(await super().claim_due(now, limit)))


class BlamesTheMessage(SqliteStore):
    async def store(self, message: DelayedMessage, now: datetime) -> None:
        try:
            await super().store(message, now)
        except StoreError as error:
            raise StoreError(str(error)) from error


class DropsUnicode(MemoryStore):
    def _add(self, message: DelayedMessage, now: datetime, kind: ports.RecordKind, detail: str = "") -> None:
        headers = {key: value.encode("ascii", "replace").decode() for key, value in message.headers.items()}
        super()._add(replace(message, headers=headers), now, kind, detail)


class AcceptsTooLarge(MemoryStore):
    def _check_size(self, message: DelayedMessage) -> None:
        """Take anything."""


class StoresHalfABatch(MemoryStore):
    async def store_many(self, messages: Sequence[DelayedMessage], now: datetime) -> ports.StoreReport:
        if len(messages) < 2:
            return await super().store_many(messages, now)
        reports = [await self.store_many([message], now) for message in messages]
        return ports.StoreReport(
            sum(each.stored for each in reports), tuple(id_ for each in reports for id_ in each.duplicate_ids)
        )


class RoundsToMilliseconds(MemoryStore):
    def _add(self, message: DelayedMessage, now: datetime, kind: ports.RecordKind, detail: str = "") -> None:
        due = message.due.replace(microsecond=message.due.microsecond // 1000 * 1000)
        super()._add(replace(message, due=due), now, kind, detail)


class IgnoresTokens(MemoryStore):
    def _claimed_entry(self, claim: ports.Claim):
        return self._entries.get(claim.message.message_id)


class RetriesAtOnce(MemoryStore):
    async def retry_later(self, claim: ports.Claim, attempt_at: datetime, now: datetime, reason: str) -> bool:
        return await super().retry_later(claim, claim.message.due, now, reason)


class CountsWhatIsReleased(MemoryStore):
    async def release(self, claims: Sequence[ports.Claim], attempt_at: datetime | None) -> int:
        return sum(
            [await self.retry_later(each, attempt_at or each.message.due, each.message.due, "") for each in claims]
        )


class ReleasesAtOnce(MemoryStore):
    async def release(self, claims: Sequence[ports.Claim], attempt_at: datetime | None) -> int:
        return await super().release(claims, None)


class ReleasesWhatItDoesNotHold(MemoryStore):
    async def release(self, claims: Sequence[ports.Claim], attempt_at: datetime | None) -> int:
        await super().release(claims, attempt_at)
        return len(claims)


class KeepsWhatItCannotRead(SqliteStore):
    async def claim_due(self, now: datetime, limit: int) -> Sequence[ports.Claim]:
        with mock.patch(
            "postdate.backends.sqlite.rows.decode_rows", lambda rows, decode: ([decode(row) for row in rows], {})
        ):
            return await super().claim_due(now, limit)


class ForgetsTheBytes(SqliteStore):
    async def list_unreadable(self, limit: int) -> Sequence[ports.UnreadableRow]:
        return [replace(each, raw={}) for each in await super().list_unreadable(limit)]


class MarksNothing(SqliteStore):
    async def mark_unreadable(self, claim: ports.Claim, reason: str, now: datetime) -> bool:
        return False


class MarksWithoutAClaim(SqliteStore):
    async def mark_unreadable(self, claim: ports.Claim, reason: str, now: datetime) -> bool:
        await super().mark_unreadable(claim, reason, now)
        return True


class MarksWhatItReadsAgain(SqliteStore):
    """It forgets the mark, so that the next claim meets the row again."""

    async def claim_due(self, now: datetime, limit: int) -> Sequence[ports.Claim]:
        sql = "UPDATE delayed_message SET attempt_at = due, unreadable = NULL WHERE unreadable IS NOT NULL"
        await self.file.write(lambda tx: tx.execute(sql) and None)
        return await super().claim_due(now, limit)


class CountsWhatItCannotRead(SqliteStore):
    async def statistics(self, now: datetime) -> ports.StoreStatistics:
        counts = await super().statistics(now)
        return replace(counts, pending=counts.pending + counts.unreadable)


class CancelsWhatItCannotRead(SqliteStore):
    async def cancel(self, message_id: str, now: datetime) -> bool:
        return await super().cancel(message_id, now) or bool(await self.list_unreadable(1))


class DiscardsTheFirst(SqliteStore):
    async def discard_unreadable(self, number: int, now: datetime) -> None:
        rows = await self.list_unreadable(1)
        await super().discard_unreadable(rows[0].number if rows else number, now)


class ChecksWhatItReads(SqliteStore):
    async def claim_due(self, now: datetime, limit: int) -> Sequence[ports.Claim]:
        return [replace(each, message=replace(each.message)) for each in await super().claim_due(now, limit)]


class NeverWakes(MemoryStore):
    async def listen(self, wake: ports.Wake) -> Callable[[], None]:
        return lambda: None


class AlwaysWakes(MemoryStore):
    async def store_many(self, messages: Sequence[DelayedMessage], now: datetime) -> ports.StoreReport:
        report = await super().store_many(messages, now)
        for wake in self._wakes:
            wake()
        return report


class SleepsOverWhatIsStoredDuringALook(MemoryStore):
    """Takes what it knew before a look for what there is, as long as the look lasts, and keeps its answer."""

    _is_looking = False

    async def next_attempt(self) -> datetime | None:
        self._is_looking = True
        first = await super().next_attempt()
        for _ in range(10):
            await anyio.lowlevel.checkpoint()
        self._is_looking = False
        return first

    def _wake_if_earlier(self, previous_first: datetime | None) -> None:
        if not self._is_looking:
            super()._wake_if_earlier(previous_first)


class MovesAndSleepsOverWhatIsStored(SqliteStore):
    async def listen(self, wake: ports.Wake) -> Callable[[], None]:
        return lambda: None

    async def move_due(self, *arguments: Any, **settings: Any) -> ports.MoveReport:
        report = await super().move_due(*arguments, **settings)
        while not await super().list_pending(ports.MessageFilter(), 3):
            await anyio.lowlevel.checkpoint()
        return report


class IsLookedAtWhenPreparedOnly(SqliteStore):
    _is_prepared = False

    async def initialize(self, endpoint: str, mode: TransactionMode) -> None:
        self._is_prepared = True
        await super().initialize(endpoint, mode)

    def observer(self) -> FileObserver:
        if not self._is_prepared:
            raise ConfigurationError("it does not know its name yet")
        return super().observer()


class CancelsWhatIsBeingDispatched(MemoryStore):
    async def cancel(self, message_id: str, now: datetime) -> bool:
        return await self.remove(message_id, now)


class ReplacesNothing(MemoryStore):
    async def replace(self, key: str, create_message: CreateMessage, now: datetime) -> str:
        message = create_message(new_message_id(), None)
        await self.store(message, now)
        return message.message_id


class ForgetsLanes(MemoryStore):
    async def load_limits(self, destinations: Collection[str] | None = None) -> Sequence[StoredLimits]:
        return [replace(each, lane=1) for each in await super().load_limits(destinations)]


class ChangesWhatItHasNotSeen(MemoryStore):
    async def store_limits(self, destination: str, limits: str, free_at: datetime, previous_limits: str = "") -> bool:
        seen = self._limits[destination].limits if destination in self._limits else ""
        return await super().store_limits(destination, limits, free_at, seen)


class ForgetsWhatIsLifted(MemoryStore):
    async def load_limits(self, destinations: Collection[str] | None = None) -> Sequence[StoredLimits]:
        return [each for each in await super().load_limits(destinations) if each.limits]


class ReadsTheLimitsOfAll(MemoryStore):
    async def load_limits(self, destinations: Collection[str] | None = None) -> Sequence[StoredLimits]:
        return await super().load_limits()


class LooksIntoNoLane(MemoryStore):
    async def load_limits_in_use(self) -> LimitsInUse:
        return replace(await super().load_limits_in_use(), lanes=())


class GivesATurnToAll(MemoryStore):
    async def reserve_slots(self, stored_limits: StoredLimits, free_at: datetime) -> bool:
        await super().reserve_slots(stored_limits, free_at)
        return True


class ClaimsEveryLane(MemoryStore):
    async def claim_lane(self, stored_limits: StoredLimits, now: datetime, limit: int) -> Sequence[ports.Claim]:
        return await self.claim_due(LATEST, limit)


class MarksByTheLane(SqliteStore):
    async def claim_lane(self, stored_limits: StoredLimits, now: datetime, limit: int) -> Sequence[ports.Claim]:
        return await super().claim_lane(stored_limits, stored_limits.lane_end, limit)


class MovesWhatIsLimited(SqliteStore):
    async def store_limits(self, destination: str, limits: str, free_at: datetime, previous_limits: str = "") -> bool:
        return await super().store_limits(destination + "?", limits, free_at, previous_limits)


class ReplacesWhatIsBeingDelivered(MemoryStore):
    async def replace(self, key: str, create_message: CreateMessage, now: datetime) -> str:
        for entry in self._entries.values():
            entry.token = None
        return await super().replace(key, create_message, now)


class ReplacesOnlyTheDueTime(MemoryStore):
    async def replace_pending(self, message: DelayedMessage, now: datetime) -> bool:
        return await self.reschedule(message.message_id, message.due, now)


class ReplacesByIdWhatIsBeingDelivered(MemoryStore):
    async def replace_pending(self, message: DelayedMessage, now: datetime) -> bool:
        for entry in self._entries.values():
            entry.token = None
        return await super().replace_pending(message, now)


class StoresWhatItCannotReplace(MemoryStore):
    async def replace_pending(self, message: DelayedMessage, now: datetime) -> bool:
        if await self.get(message.message_id) is None:
            self._add(message, now, ports.RecordKind.SCHEDULED)
        return await super().replace_pending(message, now)


class ReplacesByTheFormOfTheId(MemoryStore):
    async def replace(self, key: str, create_message: CreateMessage, now: datetime) -> str:
        likely = [id_ for id_ in self._known_ids if KEYED_ID.search(id_) and id_.startswith(f"{key}~")]
        await self.store_keys(sorted(likely)[-1:])
        return await super().replace(key, create_message, now)


class KeepsFailures(MemoryStore):
    async def reschedule(self, message_id: str, due: datetime, now: datetime, wall_time: str | None = None) -> bool:
        before = await self.get(message_id)
        done = await super().reschedule(message_id, due, now, wall_time)
        return done and self._keep(message_id, before)

    async def replace(self, key: str, create_message: CreateMessage, now: datetime) -> str:
        before = await self.get(self._last_id_by_key.get(key, ""))
        message_id = await super().replace(key, create_message, now)
        self._keep(message_id, before)
        return message_id

    def _keep(self, message_id: str, before: DelayedMessage | None) -> bool:
        if before is not None:
            entry = self._entries[message_id]
            entry.message = replace(entry.message, number_of_failures=before.number_of_failures)
        return True


class MakesMessagesOfAllInOneTurn(MemoryStore):
    async def replace(self, key: str, create_message: CreateMessage, now: datetime) -> str:
        if not hasattr(self, "_turn"):
            self._turn = copy_context()
        return await super().replace(key, partial(self._turn.run, create_message), now)


class ForgetsKeys(MemoryStore):
    async def store_keys(self, message_ids: Sequence[str]) -> None: ...


class CountsOn(MemoryStore):
    async def replace(self, key: str, create_message: CreateMessage, now: datetime) -> str:
        try:
            return await super().replace(key, create_message, now)
        except InvalidMessage:
            message = create_message(f"{key}~100000000", None)
            await self.store(message, now)
            return message.message_id


class RecordsNothing(MemoryStore):
    def __init__(self, *, recording: ports.Recording = ports.Recording.ALL, **settings) -> None:
        super().__init__(recording=ports.Recording.OUTCOMES, **settings)


class SaysItIsDurable(MemoryStore):
    def __init__(self, **settings) -> None:
        super().__init__(**settings)
        self._capabilities = replace(self._capabilities, durable=True)


class SaysItIsExactlyOnce(MemoryStore):
    def __init__(self, **settings) -> None:
        super().__init__(**settings)
        self._capabilities = replace(self._capabilities, transaction_modes=frozenset(TransactionMode))


def with_only(method: str, store: type = MemoryStore) -> type:
    """Return a store that has one method of a port and none of the others."""
    return type(f"{store.__name__}With_{method}", (store,), {method: lambda *_: ()})


class ScansTheLastRowOfAPartTwice(SqliteStore):
    def scan(self, scan, part, page):
        return super().scan(scan, ports.ScanPart(part.first, part.end + 1), page)


class IgnoresFilters(SqliteStore):
    def scan(self, scan, part, page):
        return super().scan(replace(scan, row_filter=replace(scan.row_filter, destinations=None)), part, page)


class LeavesOutTheLastMicrosecond(SqliteStore):
    def scan(self, scan, part, page):
        due_to = scan.row_filter.due_to
        where = scan.row_filter if due_to is None else replace(scan.row_filter, due_to=due_to - MICROSECOND)
        return super().scan(replace(scan, row_filter=where), part, page)


class KeepsTheFirstPosition(SqliteStore):
    def set_stream_position(self, name, number, now):
        if name not in {each.name for each in self.stream_positions()}:
            super().set_stream_position(name, number, now)


class FollowsTheFastestStream(SqliteStore):
    def prune_before(self, part, before, now):
        positions = self.stream_positions()
        for each in positions:
            self.set_stream_position(each.name, max(each.number for each in positions), each.at)
        return super().prune_before(part, before, now)


class NamesASnapshotThatMoves(SqliteStore):
    def snapshot(self):
        return nullcontext("now")


class ColumnarSqlite(SqliteStore):
    """A store that gives and takes columns, as simply as can be; not broken."""

    @property
    def has_columns(self) -> bool:
        return True

    def scan_columns(self, scan, part):
        for page in self.scan(scan, part, 100):
            if not scan.columns:
                yield pa.record_batch({"none": pa.nulls(len(page))}).select([])
                continue
            columns = zip(scan.columns, zip(*page, strict=True), strict=True)
            yield pa.record_batch({name: self.array(name, values) for name, values in columns})

    def array(self, name: str, values: Sequence[Any]) -> pa.Array:
        if name in ("due", "expires_at", "at"):
            return pa.array(values, pa.int64()).cast(INSTANT)
        whole = name in ("number", "kind", "number_of_failures")
        return pa.array(values, pa.int64() if whole else pa.binary() if name == "body" else pa.string())

    def store_columns(self, batch, now):
        return anyio.run(self.store_many, messages_of(batch), now)


class CutsColumnsToMilliseconds(ColumnarSqlite):
    def array(self, name, values):
        found = super().array(name, values)
        return pc.floor_temporal(found, unit="millisecond") if found.type == INSTANT else found


class ScansColumnsUnfiltered(ColumnarSqlite):
    def scan_columns(self, scan, part):
        return super().scan_columns(replace(scan, row_filter=ports.ScanFilter()), part)


class StoresColumnsWithoutExpiry(ColumnarSqlite):
    def store_columns(self, batch, now):
        position = batch.schema.get_field_index("expires_at")
        return super().store_columns(batch.set_column(position, "expires_at", pa.nulls(len(batch), INSTANT)), now)


class ForgetsWhichIdsWereKnown(ColumnarSqlite):
    def store_columns(self, batch, now):
        report = super().store_columns(batch, now)
        return ports.StoreReport(report.stored, tuple(dict.fromkeys(report.duplicate_ids)) if report.stored else ())


class FinishesLostClaims(SqliteStore):
    def finishing_work(
        self, claims: Sequence[ports.Claim], outcome: ports.Outcome, now: datetime, detail: str = ""
    ) -> ports.Work:
        work = super().finishing_work(claims, outcome, now, detail)

        def forgiving(transaction: object) -> None:
            try:
                work(transaction)
            except ClaimLost:
                return

        return forgiving


class SwallowsDuplicatesInTransactions(SqliteStore):
    def storing_work(self, messages: Sequence[DelayedMessage], now: datetime) -> ports.Work:
        work = super().storing_work(messages, now)

        def forgiving(transaction: object) -> None:
            try:
                work(transaction)
            except DuplicateMessage:
                return

        return forgiving


class CountsByNextAttempt(MemoryStore):
    async def due_counts(self, edges: Sequence[datetime]) -> Sequence[int]:
        dues = [(each.attempt_at, 1) for each in self._entries.values() if each.attempt_at is not None]
        return ports.counts_between(edges, dues)


class ForgetsWhatHasLeft(MemoryStore):
    async def history(self, message_id: str) -> Sequence[ports.Record]:
        return await super().history(message_id) if message_id in self._entries else ()


BROKEN_STORES: Broken = {
    "early by one microsecond": (EarlyByOneMicrosecond, "claims.due_is_compared_strictly"),
    "early by one microsecond, fetching": (EarlyByOneMicrosecond, "contract.due_is_compared_strictly"),
    "loses the first on a duplicate": (OverwritesOnDuplicate, "storing.a_duplicate_is_refused"),
    "swallows duplicates": (SwallowsDuplicates, "storing.a_duplicate_is_refused"),
    "loses messages of a batch with a duplicate": (LosesTheBatchAfterADuplicate, "storing.a_batch_is_idempotent"),
    "forgets failures": (ForgetsFailures, "claims.failures_add_up"),
    "claims twice": (ClaimsTwice, "claims.a_claimed_message_is_hidden"),
    "claims twice among tasks": (ClaimsTwice, "claims.tasks_claim_each_message_once"),
    "swaps the order": (NewestFirst, "claims.oldest_first_up_to_the_limit"),
    "blames the message": (BlamesTheMessage, "storing.what_a_store_says_of_itself_blames_no_message"),
    "drops unicode": (DropsUnicode, "storing.unicode_survives"),
    "accepts too large": (AcceptsTooLarge, "storing.too_large_is_refused"),
    "stores half a batch": (StoresHalfABatch, "storing.a_batch_with_one_too_large_is_refused_whole"),
    "rounds to milliseconds": (RoundsToMilliseconds, "storing.microseconds_survive"),
    "ignores tokens": (IgnoresTokens, "claims.a_claim_given_back_is_void"),
    "retries at once": (RetriesAtOnce, "claims.retry_later_waits"),
    "counts what is released": (CountsWhatIsReleased, "claims.a_released_claim_counts_nothing"),
    "releases at once": (ReleasesAtOnce, "claims.a_released_message_waits_until_then"),
    "releases what it does not hold": (ReleasesWhatItDoesNotHold, "claims.a_released_claim_is_void"),
    "keeps what it cannot read": (KeepsWhatItCannotRead, "unreadable.an_unreadable_message_holds_up_nothing"),
    "keeps the oldest": (KeepsWhatItCannotRead, "unreadable.the_oldest_that_can_be_read_is_fetched"),
    "forgets the bytes": (ForgetsTheBytes, "unreadable.an_unreadable_row_keeps_its_bytes"),
    "marks nothing": (MarksNothing, "unreadable.what_no_queue_takes_is_marked"),
    "marks without a claim": (MarksWithoutAClaim, "unreadable.what_no_queue_takes_is_marked"),
    "marks what it reads again": (MarksWhatItReadsAgain, "unreadable.an_unreadable_row_keeps_its_bytes"),
    "counts what it cannot read": (CountsWhatItCannotRead, "unreadable.unreadable_messages_are_counted_alone"),
    "cancels what it cannot read": (CancelsWhatItCannotRead, "unreadable.an_unreadable_message_does_not_wait"),
    "discards the first": (DiscardsTheFirst, "unreadable.an_unreadable_row_is_discarded_once"),
    "checks what it reads": (ChecksWhatItReads, "unreadable.tightened_limits_refuse_nothing_that_is_stored"),
    "never wakes": (NeverWakes, "claims.what_is_due_earlier_wakes"),
    "always wakes": (AlwaysWakes, "claims.what_is_due_earlier_wakes"),
    "sleeps over what is stored during a look": (
        SleepsOverWhatIsStoredDuringALook,
        "claims.what_is_stored_during_a_look_is_not_slept_over",
    ),
    "sleeps over what is stored during a move": (
        MovesAndSleepsOverWhatIsStored,
        "claims.what_is_stored_during_a_move_is_not_slept_over",
    ),
    "is looked at when prepared only": (
        IsLookedAtWhenPreparedOnly,
        "administration.a_look_is_had_before_the_store_is_prepared",
    ),
    "cancels what is dispatched": (
        CancelsWhatIsBeingDispatched,
        "administration.what_is_being_dispatched_is_left_alone",
    ),
    "counts by the next attempt": (CountsByNextAttempt, "administration.what_is_due_is_counted_by_interval"),
    "replaces nothing": (ReplacesNothing, "administration.one_message_waits_for_a_key"),
    "replaces what is delivered": (
        ReplacesWhatIsBeingDelivered,
        "administration.what_is_being_delivered_is_not_replaced",
    ),
    "replaces only the due time": (
        ReplacesOnlyTheDueTime,
        "administration.a_pending_message_is_replaced_by_its_id",
    ),
    "replaces by its id what is being delivered": (
        ReplacesByIdWhatIsBeingDelivered,
        "administration.only_what_is_pending_is_replaced_by_its_id",
    ),
    "stores what it cannot replace": (
        StoresWhatItCannotReplace,
        "administration.only_what_is_pending_is_replaced_by_its_id",
    ),
    "replaces by the form of the id": (ReplacesByTheFormOfTheId, "administration.an_ordinary_id_is_not_replaced"),
    "keeps failures when it replaces": (KeepsFailures, "administration.what_is_replaced_has_all_its_retries"),
    "keeps failures when it reschedules": (KeepsFailures, "administration.what_is_rescheduled_has_all_its_retries"),
    "makes messages of all in one turn": (
        MakesMessagesOfAllInOneTurn,
        "administration.callers_make_their_own_messages",
    ),
    "forgets keys": (ForgetsKeys, "administration.keys_are_kept_by_a_migration"),
    "counts on": (CountsOn, "administration.the_numbers_of_a_key_end"),
    "forgets lanes": (ForgetsLanes, "limiting.limits_are_kept"),
    "changes what it has not seen": (ChangesWhatItHasNotSeen, "limiting.limits_of_before_are_changed_once"),
    "reads the limits of all": (ReadsTheLimitsOfAll, "limiting.limits_are_read_by_destination"),
    "looks into no lane": (LooksIntoNoLane, "limiting.lanes_with_messages_are_in_use"),
    "forgets what is lifted": (ForgetsWhatIsLifted, "limiting.lifted_limits_are_kept_as_lifted"),
    "gives a turn to all": (GivesATurnToAll, "limiting.one_of_many_takes_a_turn"),
    "claims every lane": (ClaimsEveryLane, "limiting.what_is_held_is_claimed_by_its_lane_alone"),
    "marks by the lane": (
        MarksByTheLane,
        "limiting.what_is_held_and_cannot_be_read_keeps_its_due_time",
    ),
    "moves what is limited": (MovesWhatIsLimited, "limiting.no_move_takes_what_is_limited"),
    "records cancelled as delivered": (CancelsWhatIsBeingDispatched, "administration.a_cancelled_message_is_gone"),
    "leaves out records": (RecordsNothing, "recording.all_keeps_everything"),
    "says it is durable": (SaysItIsDurable, "storing.what_is_stored_survives_closing"),
    "says it is exactly once": (SaysItIsExactlyOnce, "capabilities.a_shared_transaction_needs_one_database"),
    "is half scannable": (with_only("scan_parts"), "capabilities.no_role_is_half_there"),
    "is half columnar": (
        with_only("scan_columns", SqliteStore),
        "capabilities.a_clock_and_columns_are_there_as_it_says",
    ),
    "is half auditable": (with_only("tables_of_stores"), "capabilities.no_role_is_half_there"),
    "is half prunable": (with_only("prune_before"), "capabilities.no_role_is_half_there"),
    "is half streamable": (with_only("stream_positions"), "capabilities.no_role_is_half_there"),
    "keeps the first position": (KeepsTheFirstPosition, "scanning.positions_last_until_they_are_removed"),
    "follows the fastest stream": (
        FollowsTheFastestStream,
        "scanning.nothing_is_pruned_that_a_stream_has_not_passed",
    ),
    "scans rows twice": (ScansTheLastRowOfAPartTwice, "scanning.parts_cover_every_row_once"),
    "ignores filters": (IgnoresFilters, "scanning.only_what_is_asked_for_is_read"),
    "leaves out the last microsecond": (LeavesOutTheLastMicrosecond, "scanning.only_what_is_asked_for_is_read"),
    "names a snapshot that moves": (NamesASnapshotThatMoves, "scanning.a_snapshot_is_one_instant"),
    "cuts columns to milliseconds": (CutsColumnsToMilliseconds, "scanning.columns_hold_what_rows_hold"),
    "scans columns without a filter": (ScansColumnsUnfiltered, "scanning.columns_hold_what_rows_hold"),
    "stores columns without expiry": (StoresColumnsWithoutExpiry, "storing.columns_are_stored_as_messages_are"),
    "forgets which ids were known": (ForgetsWhichIdsWereKnown, "storing.columns_are_stored_as_messages_are"),
    "finishes lost claims": (FinishesLostClaims, "capabilities.finishing_is_part_of_the_transaction"),
    "swallows duplicates in transactions": (
        SwallowsDuplicatesInTransactions,
        "capabilities.storing_refuses_an_id_that_was_used",
    ),
    "forgets what has left": (ForgetsWhatHasLeft, "storing.a_repetition_is_told_from_another_message"),
}


class BrokenStoreSubject(StoreSubject):
    def __init__(self, store: Callable[..., Any], folder: Path, good: StoreSubject) -> None:
        self._store, self._folder, self._good = store, folder, good

    def open(self, **settings):
        if self._is_sqlite():
            return self._store(self._folder / "store.db", synchronous="normal", **settings)
        return self._store(**settings)

    def _is_sqlite(self) -> bool:
        return isinstance(self._store, type) and issubclass(self._store, SqliteStore)

    def transport(self):
        return self._good.transport()

    def damages(self):
        return self._good.damages() if self._is_sqlite() else {}

    def refusals(self, store):
        return self._good.refusals(store) if self._is_sqlite() else {}


@pytest.mark.parametrize("store_subject", ["SqliteStore"], indirect=True)
@pytest.mark.parametrize("name", ["scanning.columns_hold_what_rows_hold", "storing.columns_are_stored_as_messages_are"])
async def test_a_store_with_columns_passes_their_checks(name: str, tmp_path: Path, store_subject: StoreSubject) -> None:
    check = {str(check): check for check in store_checks()}[name]
    await check(BrokenStoreSubject(ColumnarSqlite, tmp_path, store_subject))


@pytest.mark.parametrize("store_subject", ["SqliteStore"], indirect=True)
@pytest.mark.parametrize("defect", BROKEN_STORES)
async def test_a_broken_store_fails_its_check(defect: str, tmp_path: Path, store_subject: StoreSubject) -> None:
    broken, name = BROKEN_STORES[defect]
    check = {str(check): check for check in store_checks()}[name]
    with pytest.raises((ConformanceFailure, PostdateError)):
        await check(BrokenStoreSubject(broken, tmp_path, store_subject))


# --- transports -------------------------------------------------------------------------------------------------------


class BrokenTransport(MemoryTransport):
    """Opens the receiver class named here."""

    receiver_class: type[MemoryReceiver] = MemoryReceiver

    def receiver(self, queue: str) -> MemoryReceiver:
        return self.receiver_class(self, queue)


class IgnoresRollback(BrokenTransport):
    class receiver_class(MemoryReceiver):  # noqa: N801
        async def roll_back(self, received: ports.Received, *, failed: bool = True) -> None:
            self._pop_unsettled(received)


class ForgetsFailuresOnRollback(BrokenTransport):
    class receiver_class(MemoryReceiver):  # noqa: N801
        async def roll_back(self, received: ports.Received, *, failed: bool = True) -> None:
            await super().roll_back(received, failed=False)


class KeepsWhatItHeldWhenClosed(BrokenTransport):
    class receiver_class(MemoryReceiver):  # noqa: N801
        async def close(self) -> None:
            self._unsettled.clear()
            await super().close()


class HandsOutTwice(BrokenTransport):
    class receiver_class(MemoryReceiver):  # noqa: N801
        async def receive(self, limit: int, *, wait: bool = True) -> Sequence[ports.Received]:
            received = await super().receive(limit, wait=wait)
            for each in received:
                self._queue.put(each.envelope, each.failures)
            return received


class GoesOnTakingWhenStopped(BrokenTransport):
    class receiver_class(MemoryReceiver):  # noqa: N801
        async def commit(
            self, received: ports.Received, now: datetime, completion: ports.Completion = ports.HANDLED
        ) -> None:
            await super().commit(received, now, completion)
            await super().receive(1)


class WaitsAlways(BrokenTransport):
    class receiver_class(MemoryReceiver):  # noqa: N801
        async def receive(self, limit: int, *, wait: bool = True) -> Sequence[ports.Received]:
            return await super().receive(limit)


class LosesWhatIsCancelled(BrokenTransport):
    class receiver_class(MemoryReceiver):  # noqa: N801
        async def receive(self, limit: int, *, wait: bool = True) -> Sequence[ports.Received]:
            received = await super().receive(limit, wait=wait)
            await anyio.lowlevel.checkpoint()
            return received


class NewestFirstOut(BrokenTransport):
    class receiver_class(MemoryReceiver):  # noqa: N801
        async def receive(self, limit: int, *, wait: bool = True) -> Sequence[ports.Received]:
            return list(reversed(await super().receive(limit, wait=wait)))


class CommitsTwice(BrokenTransport):
    class receiver_class(MemoryReceiver):  # noqa: N801
        async def commit(
            self, received: ports.Received, now: datetime, completion: ports.Completion = ports.HANDLED
        ) -> None:
            try:
                await super().commit(received, now, completion)
            except ClaimLost:
                await self._transport.send(completion.outgoing, now)


class SendsBeforeItFails(BrokenTransport):
    class receiver_class(MemoryReceiver):  # noqa: N801
        async def commit(
            self, received: ports.Received, now: datetime, completion: ports.Completion = ports.HANDLED
        ) -> None:
            errors = await self._transport.send(completion.outgoing, now)
            for error in errors:
                if error is not None:
                    raise error
            await super().commit(received, now)


class IgnoresWork(BrokenTransport):
    async def send(
        self, envelopes: Sequence[Envelope], now: datetime, *, work: Sequence[ports.Work] = ()
    ) -> Sequence[PostdateError | None]:
        return await super().send(envelopes, now)


class RaisesForAMissingQueue(BrokenTransport):
    async def send(
        self, envelopes: Sequence[Envelope], now: datetime, *, work: Sequence[ports.Work] = ()
    ) -> Sequence[PostdateError | None]:
        answers = await super().send(envelopes, now, work=work)
        for answer in answers:
            if answer is not None:
                raise answer
        return answers


class CreatesMissingQueues(BrokenTransport):
    async def send(
        self, envelopes: Sequence[Envelope], now: datetime, *, work: Sequence[ports.Work] = ()
    ) -> Sequence[PostdateError | None]:
        await self.create_queues([envelope.destination for envelope in envelopes])
        return await super().send(envelopes, now, work=work)


class _Changes(BrokenTransport):
    def changed(self, envelope: Envelope) -> Envelope:
        raise NotImplementedError

    def _send(self, envelope: Envelope) -> PostdateError | None:
        return super()._send(self.changed(envelope))


class DropsUnicodeOnTheWay(_Changes):
    def changed(self, envelope: Envelope) -> Envelope:
        headers = {key: value.encode("ascii", "ignore").decode() for key, value in envelope.headers.items()}
        return replace(envelope, headers=headers)


class DropsTheDueTime(_Changes):
    def changed(self, envelope: Envelope) -> Envelope:
        return replace(envelope, due=None)


class DecodesTheBody(_Changes):
    def changed(self, envelope: Envelope) -> Envelope:
        return replace(envelope, body=envelope.body.decode(errors="replace").encode())


class TakesTooLarge(BrokenTransport):
    def __init__(self, **settings) -> None:
        super().__init__()
        self._reported = ports.TransportCapabilities(durable=False, transaction_modes=frozenset(), **settings)

    @property
    def capabilities(self) -> ports.TransportCapabilities:
        return self._reported


class SaysItExpires(BrokenTransport):
    def add_expiry(self, envelope, now):
        return envelope


class SaysItDoesNotExpire(BrokenTransport):
    def __init__(self, **settings) -> None:
        super().__init__(**settings)
        self._capabilities = replace(self._capabilities, expires_messages=False)


class LivesByTheSendersClock(BrokenTransport):
    def add_expiry(self, envelope, now):
        if envelope.time_to_be_received is None:
            return envelope
        return super().add_expiry(replace(envelope, expires_at=now + envelope.time_to_be_received), self._clock.now())


class LosesWhatExpiresInItsHands(BrokenTransport):
    class receiver_class(MemoryReceiver):  # noqa: N801
        async def commit(
            self, received: ports.Received, now: datetime, completion: ports.Completion = ports.HANDLED
        ) -> None:
            assert isinstance(received.token, int)
            _, kept = self._unsettled[received.token]
            if _has_expired(kept, to_microseconds(self._transport._clock.now())):
                self._pop_unsettled(received)
            await super().commit(received, now, completion)


class RefusesInTransactions(BrokenTransport):
    def __init__(self, **settings) -> None:
        super().__init__(**settings)
        self._capabilities = replace(self._capabilities, time_to_be_received_in_transactions=False)


class StopsAtWhatItCannotRead(LocalTransport):
    """Its receivers meet a damaged message again and again."""

    def receiver(self, queue: str) -> LocalReceiver:
        return StopsAtWhatItCannotReadReceiver(self, queue)


class StopsAtWhatItCannotReadReceiver(LocalReceiver):
    async def receive(self, limit: int, *, wait: bool = True) -> Sequence[ports.Received]:
        def decoded(rows, decode):
            return [decode(row) for row in rows], {}

        with mock.patch("postdate.backends.sqlite.rows.decode_rows", decoded):
            return await super().receive(limit, wait=wait)


class ForgetsTheBytesOfAQueue(LocalTransport):
    async def list_unreadable(self, limit: int) -> Sequence[ports.UnreadableRow]:
        return [replace(each, raw={}) for each in await super().list_unreadable(limit)]


class DiscardsTheFirstOfAQueue(LocalTransport):
    async def discard_unreadable(self, number: int, now: datetime) -> None:
        rows = await self.list_unreadable(1)
        await super().discard_unreadable(rows[0].number if rows else number, now)


class ChecksWhatItReceives(LocalTransport):
    def receiver(self, queue: str) -> LocalReceiver:
        return ChecksWhatItReceivesReceiver(self, queue)


class ChecksWhatItReceivesReceiver(LocalReceiver):
    async def receive(self, limit: int, *, wait: bool = True) -> Sequence[ports.Received]:
        return [each._replace(envelope=replace(each.envelope)) for each in await super().receive(limit, wait=wait)]


class WorksAfterTheCommit(LocalTransport):
    def receiver(self, queue: str) -> LocalReceiver:
        return WorksAfterTheCommitReceiver(self, queue)


class WorksAfterTheCommitReceiver(LocalReceiver):
    async def commit(
        self, received: ports.Received, now: datetime, completion: ports.Completion = ports.HANDLED
    ) -> None:
        await super().commit(received, now, replace(completion, work=()))
        await self._transport.send((), now, work=completion.work)


BROKEN_TRANSPORTS: dict[str, tuple[type[Any], str]] = {
    "stops at what it cannot read": (StopsAtWhatItCannotRead, "unreadable.an_unreadable_message_holds_up_nothing"),
    "forgets the bytes": (ForgetsTheBytesOfAQueue, "unreadable.an_unreadable_row_keeps_its_bytes"),
    "discards the first": (DiscardsTheFirstOfAQueue, "unreadable.an_unreadable_row_is_discarded_once"),
    "checks what it receives": (ChecksWhatItReceives, "unreadable.tightened_limits_refuse_nothing_that_is_there"),
    "ignores rollback": (IgnoresRollback, "receiving.a_message_rolled_back_is_received_again"),
    "ignores rollback while others wait": (IgnoresRollback, "receiving.a_message_rolled_back_wakes_others"),
    "forgets failures": (ForgetsFailuresOnRollback, "receiving.a_message_rolled_back_is_received_again"),
    "keeps what it held": (KeepsWhatItHeldWhenClosed, "receiving.closing_gives_back_what_is_held"),
    "hands out twice": (HandsOutTwice, "receiving.a_held_message_is_hidden"),
    "hands out twice to competitors": (HandsOutTwice, "receiving.competing_receivers_share_the_messages"),
    "goes on taking when stopped": (GoesOnTakingWhenStopped, "receiving.nothing_more_comes_to_a_stopped_receiver"),
    "waits always": (WaitsAlways, "receiving.an_empty_queue_need_not_be_waited_for"),
    "loses what is cancelled": (LosesWhatIsCancelled, "receiving.a_cancelled_receive_loses_nothing"),
    "swaps the order": (NewestFirstOut, "sending.order_is_kept"),
    "commits twice": (CommitsTwice, "transactions.a_lost_hold_sends_nothing"),
    "does not notice a lost hold": (CommitsTwice, "receiving.a_lost_hold_is_noticed"),
    "sends before it fails": (SendsBeforeItFails, "transactions.one_bad_outgoing_message_undoes_the_commit"),
    "works after the commit": (WorksAfterTheCommit, "capabilities.work_of_a_database_is_done_or_refused"),
    "ignores work": (IgnoresWork, "capabilities.work_of_a_database_is_done_or_refused"),
    "raises for a missing queue": (RaisesForAMissingQueue, "sending.a_missing_queue_is_a_value"),
    "creates missing queues": (CreatesMissingQueues, "sending.a_missing_queue_is_a_value"),
    "drops unicode": (DropsUnicodeOnTheWay, "sending.unicode_survives"),
    "drops the due time": (DropsTheDueTime, "sending.expiry_and_due_time_are_carried"),
    "decodes the body": (DecodesTheBody, "sending.headers_and_body_are_unchanged"),
    "takes too large": (TakesTooLarge, "sending.too_large_is_a_value"),
    "says it expires": (SaysItExpires, "capabilities.expired_messages_are_discarded_or_left_to_the_receiver"),
    "says it expires by itself": (SaysItExpires, "expiry.past_its_time_a_message_is_never_received"),
    "expires though it says it does not": (SaysItDoesNotExpire, "expiry.past_its_time_a_message_is_never_received"),
    "never lets it leave": (SaysItExpires, "expiry.an_expired_message_leaves_the_queue_without_a_receiver"),
    "lives by the sender's clock": (LivesByTheSendersClock, "expiry.the_clock_of_the_sender_does_not_count"),
    "loses what expires in its hands": (
        LosesWhatExpiresInItsHands,
        "expiry.a_received_message_is_no_longer_subject_to_it",
    ),
    "says it refuses": (RefusesInTransactions, "expiry.in_a_transaction_each_has_its_own_or_all_is_refused"),
}


class BrokenTransportSubject(TransportSubject):
    def __init__(self, transport: type[Any], good: LocalTransportSubject) -> None:
        self._transport, self._good = transport, good

    def open(self, **settings):
        if issubclass(self._transport, LocalTransport):
            return self._transport(self._good.path, synchronous="normal", **settings)
        return self._transport(**settings)

    def store(self):
        return self._good.store()

    def damages(self):
        return self._good.damages() if issubclass(self._transport, LocalTransport) else {}


@pytest.mark.parametrize("defect", BROKEN_TRANSPORTS)
async def test_a_broken_transport_fails_its_check(defect: str, tmp_path: Path) -> None:
    broken, name = BROKEN_TRANSPORTS[defect]
    check = {str(check): check for check in transport_checks()}[name]
    with pytest.raises((ConformanceFailure, PostdateError, ExceptionGroup)) as failure:
        await check(BrokenTransportSubject(broken, LocalTransportSubject(tmp_path)))
    if isinstance(failure.value, ExceptionGroup):
        assert failure.group_contains(ConformanceFailure)

"""Delayed messages in a table of Azure Storage in upstream's layout. Source: specification 3; ADR 0013."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, fields, replace
from datetime import datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import anyio
from typing_extensions import override

from postdate.backends.azure.errors import TABLES, translated
from postdate.backends.azure.groups import Operation, Rounds, Table
from postdate.backends.azure.layout import LARGEST_BODY, DelayedEntity, check_size
from postdate.backends.azure.lease import (
    LASTS_SECONDS,
    AzureClaims,
    ClaimedEntity,
    ClaimLimit,
    ContainerLease,
    Keeper,
    deletion_of,
)
from postdate.backends.azure.login import LEAVES_WITHIN_SECONDS, AzureLogin, at_once, headers_of, parse_login
from postdate.backends.azure.pages import BackOff, Pages, Polling
from postdate.backends.azure.records import IndexRow, Records, Storing
from postdate.backends.azure.table_names import checked_table, default_table, records_table
from postdate.backends.azure.unreadable import UnreadableEntities
from postdate.clock import from_microseconds, later, to_microseconds
from postdate.errors import (
    ConfigurationError,
    InvalidMessage,
    StoreUnavailable,
    UnsupportedTransactionMode,
)
from postdate.messages import DelayedMessage
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
    ServerFacts,
    StoreCapabilities,
    StoreReport,
    StoreStatistics,
    TransactionMode,
    UnreadableRow,
    UnreadableRows,
    Wake,
)
from postdate.runtime import forks
from postdate.runtime.next_due import NextDue
from postdate.runtime.resource import resource_of

if TYPE_CHECKING:
    from azure.data.tables.aio import TableServiceClient
    from azure.storage.blob.aio import BlobServiceClient

_MODES: Final = frozenset({TransactionMode.NONE, TransactionMode.RECEIVE_ONLY})

NEAR: Final = timedelta(seconds=5)
"""A message due sooner is changed only under the lease: the dispatching process' clock may be ahead."""

log = logging.getLogger("postdate.stores.azure_table")


class AzureTableStore(ClaimingStore, AdministrableStore, UnreadableRows, forks.ForkAware):
    """Keeps delayed messages in a table of Azure Storage; the process with the lease dispatches them.

    Args:
        address: ``azure-table://…``, or a connection string (see :mod:`postdate.backends.azure.login`).
        table: name of the table and of the leased container: a letter, then letters and digits, 3 to 63 in all; every
            endpoint has its own. ``None``: ``delays`` and the SHA-1 of the endpoint's name.
        recording: how much is kept for audits.
        largest_message_bytes: of headers and body together; 64 KiB at most, of which headers may have 32,768
            characters.
        polling: how to look for messages that other processes stored.

    Raises:
        ConfigurationError: the address, the table or a number is not valid.
    """

    def __init__(
        self,
        address: str | AzureLogin,
        *,
        table: str | None = None,
        recording: Recording = Recording.ALL,
        largest_message_bytes: int = LARGEST_BODY,
        polling: Polling | None = None,
    ) -> None:
        self._login = address if isinstance(address, AzureLogin) else parse_login(address)
        for service in ("table", "blob"):
            self._login.endpoint(service)
        self._table_name = None if table is None else checked_table(table)
        self._recording, self.polling = recording, polling or Polling()
        if largest_message_bytes > LARGEST_BODY:
            raise ConfigurationError(
                f"largest_message_bytes must be at most {LARGEST_BODY:,}, what a column of an Azure table takes, not "
                f"{largest_message_bytes:,}"
            )
        self._mode = TransactionMode.RECEIVE_ONLY
        self._capabilities = StoreCapabilities(
            durable=True,
            shared=True,
            time_precision=timedelta(microseconds=1),
            transaction_modes=_MODES,
            largest_message_bytes=largest_message_bytes,
            holds_at_most=timedelta(seconds=LASTS_SECONDS),
            has_clock=True,
        )
        self._holding, self._stride = AzureClaims(), ClaimLimit(self.polling.page_size)
        self._waits_for_capacity = False
        self._next_due, self._back_off = NextDue[int](), BackOff(self.polling)
        self._services: tuple[TableServiceClient, BlobServiceClient] | None = None
        self._rooms: _Rooms | None = None
        self._claiming = anyio.Lock()
        forks.register(self)

    @override
    def after_fork_in_child(self) -> None:
        """Leave connections and lease to the parent: with the parent's lease, two processes would dispatch."""
        forks.keep_for_ever((self._rooms, self._services))
        self._rooms = self._services = None
        self._holding.forget()
        self._claiming = anyio.Lock()

    def __repr__(self) -> str:
        return f"AzureTableStore({self._login.place('table')}, table={self._table_name!r})"

    @property
    def table_name(self) -> str | None:
        """The table of the waiting messages; ``None`` before ``initialize`` when it follows from the endpoint."""
        return self._table_name

    @override
    async def initialize(self, endpoint: str, mode: TransactionMode) -> None:
        """Sets the table's name; no request."""
        if mode not in _MODES:
            raise UnsupportedTransactionMode(
                f"{type(self).__name__} does not support transaction mode {mode.value!r}: Azure Storage has no "
                f"transaction over tables and queues; use 'receive_only'"
            )
        self._mode = mode
        if self._table_name is None:
            self._table_name = default_table(endpoint)

    @override
    async def setup(self) -> None:
        rooms = self._opened
        await rooms.table.create()
        await rooms.records.table.create()
        await rooms.lease.create()
        await rooms.unreadable.bring_back()

    @override
    async def close(self) -> None:
        """Waits for writes first, since others dispatch once they have the lease.

        They get half of the time, so that the lease, at another service, is given up even when tables do not answer.
        """
        rooms, services = self._rooms, self._services
        self._rooms = self._services = None
        doubtful = list(self._holding.doubtful.values())
        self._holding.forget()
        async with AsyncExitStack() as leaving:
            for service in services or ():
                leaving.push_async_callback(service.close)
            if rooms is not None:
                now = asyncio.get_running_loop().time()
                leaving.push_async_callback(rooms.keeper.stop, now + LEAVES_WITHIN_SECONDS)
                halfway = now + LEAVES_WITHIN_SECONDS / 2
                await at_once(
                    [
                        partial(rooms.records.rounds.stop, halfway),
                        partial(rooms.removals.stop, halfway),
                        partial(self._put_back, rooms, doubtful, halfway),
                    ]
                )

    @property
    def _opened(self) -> _Rooms:
        """Opened at first use, in the event loop of the caller."""
        if self._rooms is None:
            if self._table_name is None:
                name = type(self).__name__
                raise ConfigurationError(
                    f"{name} does not know its table yet: call initialize(endpoint, mode) first, or give table="
                )
            self._rooms = self._open(self._table_name)
        return self._rooms

    def _open(self, name: str) -> _Rooms:
        tables, blobs = self._services = self._login.table_service(), self._login.blob_service()
        place, blob_place = self._login.place("table"), self._login.place("blob")
        table = Table(tables.get_table_client(name), place)
        of_records = Table(tables.get_table_client(records_table(name)), place)
        records = Records(of_records, keeps_retries=self._recording is Recording.ALL)
        lease = ContainerLease(blobs.get_container_client(name), blob_place, self._lost)
        keeper = Keeper(lease, self._next_due.forget, self._look, self._back_off, resource_of(self))

        unreadable = UnreadableEntities(table, records)
        pages = Pages(table, unreadable.mark)
        storing = Storing(table, records, pages)
        return _Rooms(table, Rounds(table), records, lease, pages, storing, unreadable, keeper)

    # --- storing ------------------------------------------------------------------------------------------------

    @override
    async def store(self, message: DelayedMessage, now: datetime) -> None:
        check_size(message, self._capabilities.largest_message_bytes)
        self._stored([await self._opened.storing.store(message, now)])

    @override
    async def store_many(self, messages: Sequence[DelayedMessage], now: datetime) -> StoreReport:
        """Repeat it when it was interrupted."""
        for message in messages:
            check_size(message, self._capabilities.largest_message_bytes)
        if not messages:
            return StoreReport(0)
        stored = await self._opened.storing.store_many(messages, now)
        self._stored(stored)
        fresh = (each.message.message_id for each in stored)
        return StoreReport.of((message.message_id for message in messages), fresh)

    def _stored(self, stored: Sequence[DelayedEntity]) -> None:
        if stored:
            self._may_be_attempted(min(each.attempt_at for each in stored))

    def _may_be_attempted(self, attempt_at: datetime) -> None:
        self._opened.pages.changed(attempt_at)
        self._next_due.announce(to_microseconds(attempt_at))

    # --- claims -------------------------------------------------------------------------------------------------

    @override
    async def claim_due(self, now: datetime, limit: int) -> Sequence[Claim]:
        """Claims a page at a time, and nothing without the lease."""
        rooms = self._opened
        async with self._claiming:
            if not await rooms.lease.hold():
                return []
            rooms.keeper.start()
            room = self._stride.free_capacity(len(self._holding), asyncio.get_running_loop().time())
            self._waits_for_capacity = not room
            limit = min(limit, room)
            if self._holding.end_deferring(now):
                rooms.pages.forget()
            doubtful = list(self._holding.doubtful.values())[:limit]
            try:
                waiting = await rooms.pages.take(
                    now, limit - len(doubtful), lambda each: self._is_free(each.message.message_id)
                )
                if waiting:
                    self._back_off.reset()
                await rooms.lease.sure()  # reading may have taken long
                return await self._claimed(rooms, [*doubtful, *waiting] if rooms.lease.is_in_force else [])
            except BaseException:
                rooms.pages.forget()  # what was read and not claimed
                raise

    def _is_free(self, message_id: object) -> bool:
        return message_id not in self._holding and message_id not in self._holding.deferred

    async def _claimed(self, rooms: _Rooms, waiting: Sequence[DelayedEntity]) -> list[Claim]:
        """Hold messages; in mode ``none`` they leave the table first, so that none is ever sent twice (row 85)."""
        removes = self._mode is TransactionMode.NONE
        if removes:
            waiting = await self._delete(rooms, waiting)
        now = asyncio.get_running_loop().time()
        return [self._holding.hold(ClaimedEntity(each, rooms.lease.term, removes, now)) for each in waiting]

    async def _delete(self, rooms: _Rooms, waiting: Sequence[DelayedEntity]) -> list[DelayedEntity]:
        """Return the messages that have certainly left the table by this deletion, or by an earlier one of ours.

        The others stay doubtful after an error or when the claim is cancelled: they may have left it, too.
        """
        doubtful = self._holding.doubtful
        deletions = [deletion_of(each, is_again=each.message.message_id in doubtful) for each in waiting]
        doubtful.update({each.message.message_id: each for each in waiting})
        outcomes: dict[int, bool] = {}
        try:
            await rooms.table.each(deletions, outcomes)
        except StoreUnavailable as error:
            if not any(outcomes.values()):
                raise
            log.warning("%d messages are claimed later: %s", len(waiting) - len(outcomes), error)
        finally:
            for index, is_deleted in outcomes.items():
                if not is_deleted:  # another process took it
                    doubtful.pop(waiting[index].message.message_id, None)
        deleted = [waiting[index] for index in sorted(outcomes) if outcomes[index]]
        for each in deleted:
            doubtful.pop(each.message.message_id, None)
        return deleted

    async def _put_back(self, rooms: _Rooms, doubtful: Sequence[DelayedEntity], until: float) -> None:
        """Put messages back that a claim in mode ``none`` may have deleted and did not return."""
        with anyio.CancelScope(deadline=until) as scope:
            try:
                await rooms.table.each([Operation("upsert", each.entity()) for each in doubtful])
            except StoreUnavailable as error:
                log.warning("%d messages may have left the table without being sent: %s", len(doubtful), error)
        if scope.cancelled_caught:
            log.warning("%d messages may have left the table without being sent", len(doubtful))

    def _lost(self) -> None:
        """Forget claims and read-ahead of a lease that another may have by now."""
        if self._rooms is not None:
            self._rooms.pages.forget()
        self._holding.lose()

    @override
    def when_lost(self, lost: Callable[[Collection[str]], None]) -> Callable[[], None]:
        return self._holding.when_lost(lost)

    @override
    def still_holds(self, claim: Claim) -> bool:
        return self._rooms is not None and self._holding.still_holds(claim, self._rooms.lease)

    @override
    async def release(self, claims: Sequence[Claim], attempt_at: datetime | None) -> int:
        """Not written to the table, since nobody else dispatches; in mode ``none`` messages are put back into it."""
        rooms = self._opened
        claimed = await self._holding.claims_in_force(claims, rooms.lease)
        await rooms.table.each([Operation("upsert", each.waiting.entity()) for each in claimed if each.is_removed])
        self._holding.let_go(claimed)
        for each in claimed:
            if attempt_at is not None:
                self._holding.deferred[each.waiting.message.message_id] = attempt_at
        if claimed:
            rooms.pages.forget()
        if attempt_at is None or self._waits_for_capacity:
            self._next_due.forget()
        elif claimed:
            self._next_due.announce(to_microseconds(attempt_at))
        return len(claimed)

    @override
    async def finish(self, claims: Sequence[Claim], outcome: Outcome, now: datetime, detail: str = "") -> int:
        """Recorded first, then deleted."""
        claimed = await self._holding.claims_in_force(claims, self._opened.lease)
        done = await self._end([each.waiting for each in claimed], OUTCOME_RECORDS[outcome], now, detail, claimed)
        self._holding.let_go(claimed)
        if claimed:
            at = asyncio.get_running_loop().time()
            self._stride.done(at, at - min(each.since for each in claimed))
        if self._waits_for_capacity:
            self._next_due.forget()
        return done

    async def _end(
        self,
        messages: Sequence[DelayedEntity],
        kind: RecordKind,
        now: datetime,
        detail: str = "",
        claimed: Sequence[ClaimedEntity] = (),
    ) -> int:
        if not messages:
            return 0
        rooms = self._opened
        await rooms.records.end(messages, kind, now, detail)
        if claimed:
            deletions = [each.deletion() for each in claimed if not each.is_removed]
        else:
            deletions = [deletion_of(each) for each in messages]
        return len(messages) - len(deletions) + sum(await rooms.removals.each(deletions))

    @override
    async def retry_later(self, claim: Claim, attempt_at: datetime, now: datetime, reason: str) -> bool:
        """The message moves to the key of its next attempt."""
        claimed = await self._holding.claims_in_force([claim], self._opened.lease)
        return bool(claimed) and await self._retry(claimed[0], attempt_at, now, reason)

    @override
    async def mark_unreadable(self, claim: Claim, reason: str, now: datetime) -> bool:
        claimed = await self._holding.claims_in_force([claim], self._opened.lease)
        for each in claimed:
            await self._opened.unreadable.mark(each.waiting.entity(), InvalidMessage(reason), now)
        self._holding.let_go(claimed)
        return bool(claimed)

    async def _retry(self, claimed: ClaimedEntity, attempt_at: datetime, now: datetime, reason: str) -> bool:
        rooms, old = self._opened, claimed.waiting
        new = old.after_failure(attempt_at, old.records + int(rooms.records.keeps_retries))
        await rooms.records.retried(old, new, now, reason)
        if claimed.is_removed:
            await rooms.table.atomically([Operation("upsert", new.entity())])
            moved = True
        else:
            moved = await self._move(old, new, claimed.deletion())
        self._holding.let_go([claimed])
        if moved:
            self._may_be_attempted(attempt_at)
        return moved

    async def _move(self, old: DelayedEntity, new: DelayedEntity, deletion: Operation) -> bool:
        """Write a message under another key: in one transaction within the same hour, else add first, then delete."""
        rooms = self._opened
        put = Operation("upsert", new.entity(), is_again=deletion.is_again)
        if old.row == new.row:
            return await rooms.table.atomically([Operation("replace", new.entity(), old.etag, deletion.is_again)])
        if old.partition == new.partition:
            return await rooms.table.atomically([deletion, put])
        await rooms.table.atomically([put])
        if await rooms.table.atomically([deletion]):
            return True
        # The new copy may be the only one: it goes only when the old one stands, changed by another process, or when
        # another process has ended the message.
        if await rooms.pages.at(old.row) is None and not await rooms.records.has_ended(old.message.message_id):
            return True
        await rooms.table.atomically([Operation("delete", new.keys)])
        return False

    @override
    async def next_attempt(self) -> datetime | None:
        """``None`` while another process has the lease: taking the lease wakes the poller."""
        look = self._next_due.look()
        first = await self._first_attempt()
        again_at = self._next_due.seen(look, None if first is None else to_microseconds(first))
        return None if again_at is None else from_microseconds(again_at)

    async def _first_attempt(self) -> datetime | None:
        rooms = self._opened
        if rooms.lease.was_just_refused and rooms.keeper.is_needed:
            return None
        attempts = [*self._holding.deferred.values(), *(each.attempt_at for each in self._holding.doubtful.values())]
        first = rooms.pages.next_ahead if rooms.lease.is_in_force else None
        if first is None:
            first = await rooms.pages.first(lambda entity: self._is_free(entity.get("MessageId")))
        return min(attempts if first is None else [*attempts, first], default=None)

    @override
    async def listen(self, wake: Wake) -> Callable[[], None]:
        """Tries to take the lease first; never fails for it.

        While there is a listener, a free lease is taken and messages of other processes are looked for: they are
        noticed within the pause between looks.
        """
        keeper = self._opened.keeper
        keeper.is_needed = True
        self._back_off.reset()
        await keeper.begin()
        stop_listening = self._next_due.listen(wake)

        def stop() -> None:
            stop_listening()
            keeper.is_needed = self._next_due.is_listened_to

        return stop

    async def _look(self) -> None:
        """Wake the poller when a message is due before all that it knows of."""
        if (first := await self._first_attempt()) is not None:
            self._next_due.announce(to_microseconds(first))

    # --- what cannot be read ------------------------------------------------------------------------------------

    @override
    async def list_unreadable(self, limit: int) -> Sequence[UnreadableRow]:
        """Oldest first; their numbers are hashes of their keys."""
        return await self._opened.unreadable.list(limit)

    @override
    async def count_unreadable(self) -> int:
        return await self._opened.unreadable.count()

    @override
    async def discard_unreadable(self, number: int, now: datetime) -> None:
        await self._opened.unreadable.discard(number, now)

    # --- the simple contract ------------------------------------------------------------------------------------

    @override
    async def remove(self, message_id: str, now: datetime) -> bool:
        """Recorded as delivered."""
        if (claimed := self._holding.of(message_id)) is not None:
            return bool(await self.finish([Claim(claimed.waiting.message, claimed)], Outcome.DELIVERED, now))
        async with self._changing(message_id, _clock_from(now)) as entry:
            return entry is not None and bool(await self._end([entry[1]], RecordKind.DELIVERED, now))

    @override
    async def increment_failure_count(self, message_id: str, now: datetime) -> bool:
        if (claimed := self._holding.of(message_id)) is not None:
            return await self.retry_later(Claim(claimed.waiting.message, claimed), claimed.waiting.message.due, now, "")
        async with self._changing(message_id, _clock_from(now)) as entry:
            if entry is None:
                return False
            _, waiting = entry
            return await self._retry(ClaimedEntity(waiting, self._opened.lease.term), waiting.message.due, now, "")

    @override
    async def next_due(self) -> datetime | None:
        """Reads every message that has failed before."""
        return await self._opened.pages.next_due()

    # --- administration -----------------------------------------------------------------------------------------

    async def _may_change(self, waiting: DelayedEntity, now: datetime) -> bool:
        """Return whether no process can be dispatching a message: it is not due for a while, or only we could."""
        if waiting.message.message_id in self._holding:
            return False
        if waiting.attempt_at > now + NEAR:
            return True
        rooms = self._opened
        has_lease = await rooms.lease.hold()
        rooms.keeper.start()
        return has_lease

    @asynccontextmanager
    async def _changing(
        self, message_id: str, clock: Callable[[], datetime]
    ) -> AsyncGenerator[tuple[IndexRow, DelayedEntity] | None]:
        """Yield a message that is to be changed, and its id's row; ``None`` when a process may be dispatching it.

        No claims are made meanwhile, and none of messages that were read before: it may be among them, unchanged.
        """
        rooms = self._opened
        async with self._claiming:
            entry = await rooms.storing.find(message_id)
            if entry is None or not all([await self._may_change(each, clock()) for each in entry[1]]):
                yield None
                return
            index, (*others, waiting) = entry
            try:
                # A process that died between the two steps of a move left another copy, which would be delivered. A
                # living one may delete it first.
                is_single = all(await rooms.table.each([deletion_of(each, is_again=True) for each in others]))
                yield (index, waiting) if is_single else None
            finally:
                rooms.pages.forget()

    @override
    async def cancel(self, message_id: str, now: datetime) -> bool:
        """A message due within :data:`NEAR` counts as being dispatched while another process has the lease."""
        rooms, clock = self._opened, _clock_from(now)
        async with self._changing(message_id, clock) as entry:
            if entry is None:
                return False
            _, waiting = entry
            await rooms.records.end([waiting], RecordKind.CANCELLED, now)
            # Recording may have taken so long that another process dispatches the message by now.
            if await self._may_change(waiting, clock()) and all(await rooms.removals.each([deletion_of(waiting)])):
                return True
            index = await rooms.records.find(message_id)
            if index is None or [(each.kind, each.at) for each in index.ended()] != [(RecordKind.CANCELLED, now)]:
                return False  # another process has ended it
            if await rooms.storing.find(message_id) is None:
                return True
            await rooms.records.not_ended(index)
            return False

    @override
    async def reschedule(self, message_id: str, due: datetime, now: datetime, wall_time: str | None = None) -> bool:
        """As for :meth:`cancel`."""
        records, clock = self._opened.records, _clock_from(now)
        async with self._changing(message_id, clock) as entry:
            if entry is None:
                return False
            index, old = entry
            new = old.rescheduled(due, wall_time, index.records + 1)
            record = Record(RecordKind.RESCHEDULED, message_id, now, new.message.due, old.message.destination)
            if not await records.append(index, old.row, new, record):
                return False
            done = await self._may_change(old, clock()) and await self._move(old, new, deletion_of(old))
            if not done:
                await records.not_moved(old, new)
        if done:
            self._holding.deferred.pop(message_id, None)
            self._next_due.announce(to_microseconds(new.attempt_at))
        return done

    @override
    async def statistics(self, now: datetime) -> StoreStatistics:
        """Reads the keys of all messages; claims are those of this process."""
        counts = await self._opened.pages.statistics(self._holding, now)
        return replace(counts, unreadable=await self.count_unreadable())

    @override
    async def due_counts(self, edges: Sequence[datetime]) -> Sequence[int]:
        """Reads the keys of all messages from the first edge on."""
        return await self._opened.pages.due_counts(edges)

    @override
    async def record_counts(self) -> Mapping[RecordKind, int]:
        return await self._opened.records.counts()

    @override
    async def read_pending(self, where: MessageFilter, limit: int) -> PendingPage:
        """A message that has failed stands at its next attempt."""
        return await self._opened.pages.pending(where, limit)

    @override
    async def get(self, message_id: str) -> DelayedMessage | None:
        """Finds our messages only, not those that upstream stored."""
        entry = await self._opened.storing.find(message_id)
        return None if entry is None else entry[1][-1].message

    @override
    async def history(self, message_id: str) -> Sequence[Record]:
        return await self._opened.records.history(message_id)

    @override
    async def server_now(self) -> datetime:
        """Two round trips; works after :meth:`setup`."""
        return await self._opened.records.server_now()

    @override
    async def report_clock(self, ahead: timedelta) -> None:
        await self._opened.records.report_clock(ahead)

    @override
    async def reported_clocks(self) -> Mapping[str, timedelta]:
        """Of processes that reported within two minutes."""
        return await self._opened.records.reported_clocks()

    @override
    async def server_facts(self) -> ServerFacts:
        """The clock has whole seconds."""
        rooms = self._opened
        assert self._services is not None
        with translated(TABLES, self._login.place("table")):
            headers = await headers_of(self._services[0])
        now = parsedate_to_datetime(headers["date"]) if "date" in headers else None
        version = headers.get("x-ms-version", "without a version")
        return ServerFacts("Azure Storage", version, now, int(await rooms.table.exists()), newest_schema_version=1)


@dataclass(frozen=True, slots=True)
class _Rooms:
    """The parts that work on one table."""

    table: Table
    removals: Rounds
    records: Records
    lease: ContainerLease
    pages: Pages
    storing: Storing
    unreadable: UnreadableEntities
    keeper: Keeper


def _clock_from(now: datetime) -> Callable[[], datetime]:
    """Return a clock that goes on from ``now`` while requests are under way."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    return lambda: later(now, timedelta(seconds=loop.time() - began))


def open_store(address: str, **settings: Any) -> AzureTableStore:
    """Return a store with the fields of :class:`Polling` as separate arguments, as settings have them."""
    polling_settings = {each.name: settings.pop(each.name, None) for each in fields(Polling)}
    polling = Polling(**{name: value for name, value in polling_settings.items() if value is not None})
    return AzureTableStore(address, polling=polling, **settings)

"""Delayed messages in a table of Azure Storage in upstream's layout. Source: ADR 0013."""

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

from postdate import ports
from postdate.backends.azure.errors import TABLES, translate_errors
from postdate.backends.azure.groups import Operation, OperationBatcher, Table
from postdate.backends.azure.layout import LARGEST_BODY, DelayedEntity, check_size
from postdate.backends.azure.lease import (
    LASTS_SECONDS,
    AzureClaims,
    ClaimedEntity,
    ClaimLimit,
    ContainerLease,
    LeaseTask,
    deletion_of,
)
from postdate.backends.azure.login import (
    LEAVES_WITHIN_SECONDS,
    AzureLogin,
    fetch_headers,
    parse_login,
    run_concurrently,
)
from postdate.backends.azure.pages import BackOff, Pages, Polling
from postdate.backends.azure.records import IndexRow, MessageEntities, Records
from postdate.backends.azure.table_names import default_table, normalize_table, records_table
from postdate.backends.azure.unreadable import UnreadableEntities
from postdate.clock import from_microseconds, later, to_microseconds
from postdate.errors import (
    ConfigurationError,
    InvalidMessage,
    StoreUnavailable,
    UnsupportedTransactionMode,
)
from postdate.messages import DelayedMessage
from postdate.runtime import forks
from postdate.runtime.next_due import NextDue
from postdate.runtime.resource import resource_of

if TYPE_CHECKING:
    from azure.data.tables.aio import TableServiceClient
    from azure.storage.blob.aio import BlobServiceClient

_MODES: Final = frozenset({ports.TransactionMode.NONE, ports.TransactionMode.RECEIVE_ONLY})

NEAR: Final = timedelta(seconds=5)
"""A message that is due sooner is changed only under the lease: the dispatching process's clock may be ahead."""

log = logging.getLogger("postdate.stores.azure_table")


class AzureTableStore(ports.ClaimingStore, ports.AdministrableStore, ports.UnreadableRows, forks.ForkAware):
    """Keeps delayed messages in a table of Azure Storage; the process with the lease dispatches them.

    Args:
        address: ``azure-table://…``, or a connection string (see :mod:`postdate.backends.azure.login`).
        table: name of the table and of the leased container: a letter, then letters and digits, 3 to 63 in all; every
            endpoint has its own. ``None``: ``delays`` and the SHA-1 of the endpoint's name.
        recording: how much is recorded for audits.
        largest_message_bytes: of headers and body together; 64 KiB at most, of which headers may have 32,768
            characters.
        polling: how to poll for messages that other processes stored.

    Raises:
        ConfigurationError: the address, the table or a number is not valid.
    """

    def __init__(
        self,
        address: str | AzureLogin,
        *,
        table: str | None = None,
        recording: ports.Recording = ports.Recording.ALL,
        largest_message_bytes: int = LARGEST_BODY,
        polling: Polling | None = None,
    ) -> None:
        self._login = address if isinstance(address, AzureLogin) else parse_login(address)
        for service in ("table", "blob"):
            self._login.endpoint(service)
        self.table_name = None if table is None else normalize_table(table)
        """The table of the pending messages; ``None`` before ``initialize`` when it follows from the endpoint."""
        self._recording = recording
        self.polling = polling or Polling()
        if largest_message_bytes > LARGEST_BODY:
            raise ConfigurationError(
                f"largest_message_bytes must be at most {LARGEST_BODY:,}, the limit of a column of an Azure table, not "
                f"{largest_message_bytes:,}"
            )
        self._mode = ports.TransactionMode.RECEIVE_ONLY
        self._capabilities = ports.StoreCapabilities(
            durable=True,
            shared=True,
            time_precision=timedelta(microseconds=1),
            transaction_modes=_MODES,
            largest_message_bytes=largest_message_bytes,
            holds_at_most=timedelta(seconds=LASTS_SECONDS),
            has_clock=True,
        )
        self._claims = AzureClaims()
        self._claim_limit = ClaimLimit(self.polling.page_size)
        self._waits_for_capacity = False  # whether the last claim found no capacity
        self._next_due = NextDue[int]()
        self._back_off = BackOff(self.polling)
        self._services: tuple[TableServiceClient, BlobServiceClient] | None = None
        self._parts: _TableParts | None = None
        self._claim_lock = anyio.Lock()
        forks.register(self)

    @override
    def after_fork_in_child(self) -> None:
        """Leave connections and lease to the parent: with the parent's lease, two processes would dispatch."""
        forks.prevent_destruction((self._parts, self._services))
        self._parts = self._services = None
        self._claims.forget_all()
        self._claim_lock = anyio.Lock()

    def __repr__(self) -> str:
        return f"AzureTableStore({self._login.describe_service('table')}, table={self.table_name!r})"

    @override
    async def initialize(self, endpoint: str, mode: ports.TransactionMode) -> None:
        """Set the table's name; no request."""
        if mode not in _MODES:
            raise UnsupportedTransactionMode(
                f"{type(self).__name__} does not support transaction mode {mode.value!r}: Azure Storage has no "
                f"transaction over tables and queues; use 'receive_only'"
            )
        self._mode = mode
        if self.table_name is None:
            self.table_name = default_table(endpoint)

    @override
    async def setup(self) -> None:
        parts = self._open_parts
        await parts.table.create()
        await parts.records.table.create()
        await parts.lease.create()
        await parts.unreadable.migrate_former_rows()

    @override
    async def close(self) -> None:
        """Wait for writes first, because other processes dispatch once they have the lease.

        The writes get half of the time. So the lease, at another service, is released even when tables do not answer.
        """
        parts, services = self._parts, self._services
        self._parts = self._services = None
        doubtful = list(self._claims.doubtful.values())
        self._claims.forget_all()
        async with AsyncExitStack() as exit_stack:
            for service in services or ():
                exit_stack.push_async_callback(service.close)
            if parts is not None:
                now = asyncio.get_running_loop().time()
                exit_stack.push_async_callback(parts.lease_task.stop, now + LEAVES_WITHIN_SECONDS)
                halfway = now + LEAVES_WITHIN_SECONDS / 2
                await run_concurrently(
                    [
                        partial(parts.records.rounds.stop, halfway),
                        partial(parts.removal_batcher.stop, halfway),
                        partial(self._restore_doubtful, parts, doubtful, halfway),
                    ]
                )

    @property
    def _open_parts(self) -> _TableParts:
        """Open the parts at first use, in the event loop of the caller."""
        if self._parts is None:
            if self.table_name is None:
                name = type(self).__name__
                raise ConfigurationError(
                    f"{name} does not know its table yet: call initialize(endpoint, mode) first, or give table="
                )
            self._parts = self._create_parts(self.table_name)
        return self._parts

    def _create_parts(self, name: str) -> _TableParts:
        tables, blobs = self._services = self._login.create_table_service(), self._login.create_blob_service()
        place, blob_place = self._login.describe_service("table"), self._login.describe_service("blob")
        table = Table(tables.get_table_client(name), place)
        table_of_records = Table(tables.get_table_client(records_table(name)), place)
        records = Records(table_of_records, keeps_retries=self._recording is ports.Recording.ALL)
        lease = ContainerLease(blobs.get_container_client(name), blob_place, self._void_claims)
        lease_task = LeaseTask(lease, self._next_due.forget, self._poll_table, self._back_off, resource_of(self))

        unreadable = UnreadableEntities(table, records)
        pages = Pages(table, unreadable.mark)
        message_entities = MessageEntities(table, records, pages)
        return _TableParts(
            table, OperationBatcher(table), records, lease, pages, message_entities, unreadable, lease_task
        )

    # --- storing ------------------------------------------------------------------------------------------------

    @override
    async def store(self, message: DelayedMessage, now: datetime) -> None:
        check_size(message, self._capabilities.largest_message_bytes)
        self._announce_stored([await self._open_parts.message_entities.store(message, now)])

    @override
    async def store_many(self, messages: Sequence[DelayedMessage], now: datetime) -> ports.StoreReport:
        """Store the messages that are new. Repeat the call after an interruption."""
        for message in messages:
            check_size(message, self._capabilities.largest_message_bytes)
        if not messages:
            return ports.StoreReport(0)
        entities = await self._open_parts.message_entities.store_many(messages, now)
        self._announce_stored(entities)
        stored_ids = (each.message.message_id for each in entities)
        return ports.StoreReport.of((message.message_id for message in messages), stored_ids)

    def _announce_stored(self, entities: Sequence[DelayedEntity]) -> None:
        if entities:
            self._announce_attempt(min(each.attempt_at for each in entities))

    def _announce_attempt(self, attempt_at: datetime) -> None:
        self._open_parts.pages.forget_if_before(attempt_at)
        self._next_due.announce(to_microseconds(attempt_at))

    # --- claims -------------------------------------------------------------------------------------------------

    @override
    async def claim_due(self, now: datetime, limit: int) -> Sequence[ports.Claim]:
        """Claim due messages, a page at a time; none without the lease."""
        parts = self._open_parts
        async with self._claim_lock:
            if not await parts.lease.acquire_or_renew():
                return []
            parts.lease_task.start()
            capacity = self._claim_limit.free_capacity(len(self._claims), asyncio.get_running_loop().time())
            self._waits_for_capacity = not capacity
            limit = min(limit, capacity)
            if self._claims.resume_deferred(now):
                parts.pages.forget_buffer()
            doubtful_entities = list(self._claims.doubtful.values())[:limit]
            try:
                entities = await parts.pages.read_due(
                    now, limit - len(doubtful_entities), lambda each: self._is_free(each.message.message_id)
                )
                if entities:
                    self._back_off.reset()
                await parts.lease.renew_if_uncertain()  # reading may have taken long
                return await self._claim_entities(
                    parts, [*doubtful_entities, *entities] if parts.lease.is_in_force else []
                )
            except BaseException:
                parts.pages.forget_buffer()  # It contains messages that were read and not claimed.
                raise

    def _is_free(self, message_id: object) -> bool:
        return message_id not in self._claims and message_id not in self._claims.deferred

    async def _claim_entities(self, parts: _TableParts, entities: Sequence[DelayedEntity]) -> list[ports.Claim]:
        """Claim messages. In mode ``none`` they leave the table first, so that none is ever sent twice (row 85)."""
        is_removed = self._mode is ports.TransactionMode.NONE
        if is_removed:
            entities = await self._delete_entities(parts, entities)
        now = asyncio.get_running_loop().time()
        return [self._claims.remember(ClaimedEntity(each, parts.lease.term, is_removed, now)) for each in entities]

    async def _delete_entities(self, parts: _TableParts, entities: Sequence[DelayedEntity]) -> list[DelayedEntity]:
        """Return the messages that have certainly left the table by this deletion, or by an earlier one of ours.

        The other messages stay doubtful after an error or when the claim is cancelled, because they may have left it,
        too.
        """
        doubtful = self._claims.doubtful
        deletions = [deletion_of(each, is_repeated=each.message.message_id in doubtful) for each in entities]
        doubtful.update({each.message.message_id: each for each in entities})
        outcomes: dict[int, bool] = {}
        try:
            await parts.table.apply_each(deletions, outcomes)
        except StoreUnavailable as error:
            if not any(outcomes.values()):
                raise
            log.warning("%d messages are claimed later: %s", len(entities) - len(outcomes), error)
        finally:
            for index, is_deleted in outcomes.items():
                if not is_deleted:  # Another process deleted it.
                    doubtful.pop(entities[index].message.message_id, None)
        deleted = [entities[index] for index in sorted(outcomes) if outcomes[index]]
        for each in deleted:
            doubtful.pop(each.message.message_id, None)
        return deleted

    async def _restore_doubtful(self, parts: _TableParts, doubtful: Sequence[DelayedEntity], deadline: float) -> None:
        """Store messages again that a claim in mode ``none`` may have deleted and did not return."""
        with anyio.CancelScope(deadline=deadline) as scope:
            try:
                await parts.table.apply_each([Operation("upsert", each.entity()) for each in doubtful])
            except StoreUnavailable as error:
                log.warning("%d messages may have left the table without being sent: %s", len(doubtful), error)
        if scope.cancelled_caught:
            log.warning("%d messages may have left the table without being sent", len(doubtful))

    def _void_claims(self) -> None:
        """Forget claims and buffer of a lease that another process may have by now."""
        if self._parts is not None:
            self._parts.pages.forget_buffer()
        self._claims.forget_lost_claims()

    @override
    def listen_for_lost_claims(self, on_lost: Callable[[Collection[str]], None]) -> Callable[[], None]:
        return self._claims.listen_for_lost_claims(on_lost)

    @override
    def is_in_force(self, claim: ports.Claim) -> bool:
        return self._parts is not None and self._claims.is_in_force(claim, self._parts.lease)

    @override
    async def release(self, claims: Sequence[ports.Claim], attempt_at: datetime | None) -> int:
        """Release claims without a write, because no other process dispatches.

        In mode ``none`` messages are stored again.
        """
        parts = self._open_parts
        claimed_entities = await self._claims.select_claims_in_force(claims, parts.lease)
        await parts.table.apply_each(
            [Operation("upsert", each.delayed_entity.entity()) for each in claimed_entities if each.is_removed]
        )
        self._claims.forget_claims(claimed_entities)
        for each in claimed_entities:
            if attempt_at is not None:
                self._claims.deferred[each.delayed_entity.message.message_id] = attempt_at
        if claimed_entities:
            parts.pages.forget_buffer()
        if attempt_at is None or self._waits_for_capacity:
            self._next_due.forget()
        elif claimed_entities:
            self._next_due.announce(to_microseconds(attempt_at))
        return len(claimed_entities)

    @override
    async def finish(
        self, claims: Sequence[ports.Claim], outcome: ports.Outcome, now: datetime, detail: str = ""
    ) -> int:
        """Record the outcome first, then delete the messages."""
        claimed_entities = await self._claims.select_claims_in_force(claims, self._open_parts.lease)
        completed_count = await self._complete_messages(
            [each.delayed_entity for each in claimed_entities],
            ports.OUTCOME_RECORDS[outcome],
            now,
            detail,
            claimed_entities,
        )
        self._claims.forget_claims(claimed_entities)
        if claimed_entities:
            loop_time = asyncio.get_running_loop().time()
            self._claim_limit.adjust_limit(loop_time, loop_time - min(each.claimed_at for each in claimed_entities))
        if self._waits_for_capacity:
            self._next_due.forget()
        return completed_count

    async def _complete_messages(
        self,
        messages: Sequence[DelayedEntity],
        kind: ports.RecordKind,
        now: datetime,
        detail: str = "",
        claimed_entities: Sequence[ClaimedEntity] = (),
    ) -> int:
        if not messages:
            return 0
        parts = self._open_parts
        await parts.records.record_ends(messages, kind, now, detail)
        if claimed_entities:
            deletions = [each.build_deletion() for each in claimed_entities if not each.is_removed]
        else:
            deletions = [deletion_of(each) for each in messages]
        return len(messages) - len(deletions) + sum(await parts.removal_batcher.apply_each(deletions))

    @override
    async def retry_later(self, claim: ports.Claim, attempt_at: datetime, now: datetime, reason: str) -> bool:
        """Move the message to the key of its next attempt."""
        claimed_entities = await self._claims.select_claims_in_force([claim], self._open_parts.lease)
        return bool(claimed_entities) and await self._retry(claimed_entities[0], attempt_at, now, reason)

    @override
    async def mark_unreadable(self, claim: ports.Claim, reason: str, now: datetime) -> bool:
        claimed_entities = await self._claims.select_claims_in_force([claim], self._open_parts.lease)
        for each in claimed_entities:
            await self._open_parts.unreadable.mark(each.delayed_entity.entity(), InvalidMessage(reason), now)
        self._claims.forget_claims(claimed_entities)
        return bool(claimed_entities)

    async def _retry(self, claimed_entity: ClaimedEntity, attempt_at: datetime, now: datetime, reason: str) -> bool:
        parts, old = self._open_parts, claimed_entity.delayed_entity
        new = old.copy_for_retry(attempt_at, old.records + int(parts.records.keeps_retries))
        await parts.records.record_retry(old, new, now, reason)
        if claimed_entity.is_removed:
            await parts.table.apply_atomically([Operation("upsert", new.entity())])
            is_moved = True
        else:
            is_moved = await self._move(old, new, claimed_entity.build_deletion())
        self._claims.forget_claims([claimed_entity])
        if is_moved:
            self._announce_attempt(attempt_at)
        return is_moved

    async def _move(self, old: DelayedEntity, new: DelayedEntity, deletion: Operation) -> bool:
        """Write a message under another key: in one transaction within the same hour, else add first, then delete."""
        parts = self._open_parts
        put_operation = Operation("upsert", new.entity(), is_repeated=deletion.is_repeated)
        if old.row == new.row:
            return await parts.table.apply_atomically(
                [Operation("replace", new.entity(), old.etag, deletion.is_repeated)]
            )
        if old.partition == new.partition:
            return await parts.table.apply_atomically([deletion, put_operation])
        await parts.table.apply_atomically([put_operation])
        if await parts.table.apply_atomically([deletion]):
            return True
        # The new copy may be the only one. It is deleted only if the old one is still stored, changed by another
        # process, or if another process has ended the message.
        if await parts.pages.get_entity(old.row) is None and not await parts.records.has_ended(old.message.message_id):
            return True
        await parts.table.apply_atomically([Operation("delete", new.keys)])
        return False

    @override
    async def next_attempt(self) -> datetime | None:
        """Return the next attempt; ``None`` while another process has the lease: acquiring it wakes the poller."""
        query_number = self._next_due.start_query()
        first = await self._find_first_attempt()
        again_at = self._next_due.finish_query(query_number, None if first is None else to_microseconds(first))
        return None if again_at is None else from_microseconds(again_at)

    async def _find_first_attempt(self) -> datetime | None:
        parts = self._open_parts
        if parts.lease.was_just_refused and parts.lease_task.is_needed:
            return None
        attempts = [*self._claims.deferred.values(), *(each.attempt_at for each in self._claims.doubtful.values())]
        first = parts.pages.next_cached_attempt if parts.lease.is_in_force else None
        if first is None:
            first = await parts.pages.find_first_attempt(lambda entity: self._is_free(entity.get("MessageId")))
        return min(attempts if first is None else [*attempts, first], default=None)

    @override
    async def listen(self, wake: ports.Wake) -> Callable[[], None]:
        """Register a listener; try to acquire the lease first, but never fail because of it.

        While there is a listener, a free lease is acquired, and the table is polled: messages of other processes are
        found within the pause between two polls.
        """
        lease_task = self._open_parts.lease_task
        lease_task.is_needed = True
        self._back_off.reset()
        await lease_task.acquire_and_start()
        stop_listening = self._next_due.listen(wake)

        def stop() -> None:
            stop_listening()
            lease_task.is_needed = self._next_due.has_listeners

        return stop

    async def _poll_table(self) -> None:
        """Wake the poller if a message is due before all messages that it knows."""
        if (first := await self._find_first_attempt()) is not None:
            self._next_due.announce(to_microseconds(first))

    # --- unreadable messages ------------------------------------------------------------------------------------

    @override
    async def list_unreadable(self, limit: int) -> Sequence[ports.UnreadableRow]:
        """List unreadable entities, oldest first; their numbers are hashes of their keys."""
        return await self._open_parts.unreadable.list(limit)

    @override
    async def count_unreadable(self) -> int:
        return await self._open_parts.unreadable.count()

    @override
    async def discard_unreadable(self, number: int, now: datetime) -> None:
        await self._open_parts.unreadable.discard(number, now)

    # --- the simple contract ------------------------------------------------------------------------------------

    @override
    async def remove(self, message_id: str, now: datetime) -> bool:
        """Remove a message and record it as delivered."""
        if (claimed_entity := self._claims.find(message_id)) is not None:
            return bool(
                await self.finish(
                    [ports.Claim(claimed_entity.delayed_entity.message, claimed_entity)], ports.Outcome.DELIVERED, now
                )
            )
        async with self._lock_for_change(message_id, _clock_from(now)) as entry:
            return entry is not None and bool(
                await self._complete_messages([entry[1]], ports.RecordKind.DELIVERED, now)
            )

    @override
    async def increment_failure_count(self, message_id: str, now: datetime) -> bool:
        if (claimed_entity := self._claims.find(message_id)) is not None:
            return await self.retry_later(
                ports.Claim(claimed_entity.delayed_entity.message, claimed_entity),
                claimed_entity.delayed_entity.message.due,
                now,
                "",
            )
        async with self._lock_for_change(message_id, _clock_from(now)) as entry:
            if entry is None:
                return False
            _, entity = entry
            return await self._retry(ClaimedEntity(entity, self._open_parts.lease.term), entity.message.due, now, "")

    @override
    async def next_due(self) -> datetime | None:
        """Return the earliest due time. It reads every message that has failed before."""
        return await self._open_parts.pages.next_due()

    # --- administration -----------------------------------------------------------------------------------------

    async def _can_change(self, entity: DelayedEntity, now: datetime) -> bool:
        """Return whether no process can be dispatching a message.

        That is so if the message is not due for a while, or if only this process could dispatch it.
        """
        if entity.message.message_id in self._claims:
            return False
        if entity.attempt_at > now + NEAR:
            return True
        parts = self._open_parts
        has_lease = await parts.lease.acquire_or_renew()
        parts.lease_task.start()
        return has_lease

    @asynccontextmanager
    async def _lock_for_change(
        self, message_id: str, clock: Callable[[], datetime]
    ) -> AsyncGenerator[tuple[IndexRow, DelayedEntity] | None]:
        """Yield a message that is to be changed, and its id's row; ``None`` when a process may be dispatching it.

        No claims are made meanwhile. The buffer is not claimed either, because it may contain the message, unchanged.
        """
        parts = self._open_parts
        async with self._claim_lock:
            entry = await parts.message_entities.find(message_id)
            if entry is None or not all([await self._can_change(each, clock()) for each in entry[1]]):
                yield None
                return
            index, (*older, latest) = entry
            try:
                # A process that died between the two steps of a move left another copy, which would be delivered. A
                # process that is alive may delete it first.
                is_single = all(await parts.table.apply_each([deletion_of(each, is_repeated=True) for each in older]))
                yield (index, latest) if is_single else None
            finally:
                parts.pages.forget_buffer()

    @override
    async def cancel(self, message_id: str, now: datetime) -> bool:
        """Cancel a message.

        One that is due within :data:`NEAR` counts as in dispatch while another process has the lease.
        """
        parts, clock = self._open_parts, _clock_from(now)
        async with self._lock_for_change(message_id, clock) as entry:
            if entry is None:
                return False
            _, entity = entry
            await parts.records.record_ends([entity], ports.RecordKind.CANCELLED, now)
            # Recording may have taken so long that another process dispatches the message by now.
            if await self._can_change(entity, clock()) and all(
                await parts.removal_batcher.apply_each([deletion_of(entity)])
            ):
                return True
            index = await parts.records.find(message_id)
            if index is None or [(each.kind, each.at) for each in index.end_records()] != [
                (ports.RecordKind.CANCELLED, now)
            ]:
                return False  # Another process has recorded an outcome.
            if await parts.message_entities.find(message_id) is None:
                return True
            await parts.records.undo_end(index)
            return False

    @override
    async def reschedule(self, message_id: str, due: datetime, now: datetime, wall_time: str | None = None) -> bool:
        """Reschedule a message, under the same condition as :meth:`cancel`."""
        records, clock = self._open_parts.records, _clock_from(now)
        async with self._lock_for_change(message_id, clock) as entry:
            if entry is None:
                return False
            index, old = entry
            new = old.copy_for_reschedule(due, wall_time, index.records + 1)
            record = ports.Record(
                ports.RecordKind.RESCHEDULED, message_id, now, new.message.due, old.message.destination
            )
            if not await records.append_record(index, old.row, new, record):
                return False
            is_moved = await self._can_change(old, clock()) and await self._move(old, new, deletion_of(old))
            if not is_moved:
                await records.undo_reschedule(old, new)
        if is_moved:
            self._claims.deferred.pop(message_id, None)
            self._next_due.announce(to_microseconds(new.attempt_at))
        return is_moved

    @override
    async def statistics(self, now: datetime) -> ports.StoreStatistics:
        """Count messages by reading the keys of all; claims are those of this process."""
        counts = await self._open_parts.pages.statistics(self._claims, now)
        return replace(counts, unreadable=await self.count_unreadable())

    @override
    async def due_counts(self, edges: Sequence[datetime]) -> Sequence[int]:
        """Count messages by reading the keys of all from the first edge on."""
        return await self._open_parts.pages.due_counts(edges)

    @override
    async def record_counts(self) -> Mapping[ports.RecordKind, int]:
        return await self._open_parts.records.record_counts()

    @override
    async def read_pending(self, message_filter: ports.MessageFilter, limit: int) -> ports.PendingPage:
        """List messages; one that has failed is listed at its next attempt."""
        return await self._open_parts.pages.read_pending(message_filter, limit)

    @override
    async def get(self, message_id: str) -> DelayedMessage | None:
        """Find a message of ours; messages that upstream stored are not found."""
        entry = await self._open_parts.message_entities.find(message_id)
        return None if entry is None else entry[1][-1].message

    @override
    async def history(self, message_id: str) -> Sequence[ports.Record]:
        return await self._open_parts.records.history(message_id)

    @override
    async def server_now(self) -> datetime:
        """Return the server's time after two round trips; it works after :meth:`setup`."""
        return await self._open_parts.records.server_now()

    @override
    async def report_clock(self, ahead: timedelta) -> None:
        await self._open_parts.records.report_clock(ahead)

    @override
    async def reported_clocks(self) -> Mapping[str, timedelta]:
        """Return how far the clocks of processes are ahead that reported within two minutes."""
        return await self._open_parts.records.reported_clocks()

    @override
    async def server_facts(self) -> ports.ServerFacts:
        """Return facts about the server; their clock has whole seconds."""
        parts = self._open_parts
        assert self._services is not None
        with translate_errors(TABLES, self._login.describe_service("table")):
            headers = await fetch_headers(self._services[0])
        now = parsedate_to_datetime(headers["date"]) if "date" in headers else None
        version = headers.get("x-ms-version", "without a version")
        return ports.ServerFacts(
            "Azure Storage", version, now, int(await parts.table.exists()), newest_schema_version=1
        )


@dataclass(frozen=True, slots=True)
class _TableParts:
    """The parts that work on one table."""

    table: Table
    removal_batcher: OperationBatcher
    records: Records
    lease: ContainerLease
    pages: Pages
    message_entities: MessageEntities
    unreadable: UnreadableEntities
    lease_task: LeaseTask


def _clock_from(now: datetime) -> Callable[[], datetime]:
    """Return a clock that starts at ``now`` and runs on while requests are in flight."""
    loop = asyncio.get_running_loop()
    started_at = loop.time()
    return lambda: later(now, timedelta(seconds=loop.time() - started_at))


def open_store(address: str, **settings: Any) -> AzureTableStore:
    """Return a store; the fields of :class:`Polling` are separate arguments, as settings have them."""
    polling_settings = {each.name: settings.pop(each.name, None) for each in fields(Polling)}
    polling = Polling(**{name: value for name, value in polling_settings.items() if value is not None})
    return AzureTableStore(address, polling=polling, **settings)

"""Move the pending messages of one store into another. Services of the old store must be stopped. Source: ADR 44.

A page is claimed in the old store, stored in the new one, and completed in the old one. A process that is killed leaves
at most one page in both stores. Its claims end with it, and the next run finds these ids in the new store.
"""

from __future__ import annotations

import os
from abc import ABC
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Final, TypeGuard

import anyio

from postdate import ports
from postdate.backends.registry import place_of
from postdate.clock import LATEST, Clock, SystemClock
from postdate.config import Address, Settings, resolve_address
from postdate.core.changes import EVERYTHING, PendingPages
from postdate.core.copies import IN_ANOTHER_STORE, MISSING, difference
from postdate.core.limits import Limits, change_limits, load_limits_in_force
from postdate.core.upkeep.wall_times import ZoneStore, decode_rules, ensure_rules, list_markers
from postdate.errors import ConfigurationError, MessageError, MigrationConflict, NotSupported, StoreError, StoreNotSetUp
from postdate.messages import INTENTS, DelayedMessage, Headers, Origin, encode_headers, size_in_bytes
from postdate.operations.plain import Progress, format_count, ignore_progress, running_services
from postdate.ports.backends import Place
from postdate.ports.changing import KEYED, KEYED_ID
from postdate.ports.limits import LimitingStore
from postdate.ports.migrating import MOVED_AWAY
from postdate.wiring import (
    file_of,
    locate_errors,
    name_setting_in_errors,
    open_store,
    settings_of_store,
    store_settings,
)
from postdate.wiring.deployment import close_adapter

PAGE: Final = 1_000
"""Number of messages that move together, and may be in both stores after a kill. 5,000 move only a seventh faster."""

MOST_REFUSED: Final = 10_000
"""A run ends when it has refused this many messages, because it remembers their ids and keeps their claims."""

_NAMED: Final = 100
"""Number of refused messages that are named in the result; all are counted."""

_PATIENCE_SECONDS: Final = 90
"""How long to wait for messages that another process has claimed. Stores free those of a dead one within a minute."""

_CLAIM_PAUSE_SECONDS: Final = 0.5

_REASONS: Final = {
    MISSING: "the new store has a record of the id, but does not have the message",
    IN_ANOTHER_STORE: "it was moved out of the new store before, so the new store would not deliver it",
}

_INTENTS_DUE: Final = datetime(9999, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class StoreMove:
    """The parameters of a move.

    Args:
        source: address of the old store, or a reference to one.
        settings: the new store is the store of these settings; their endpoint names the table of both stores.
        schema: of the old store; ``None``: the default.
        table: of the old store; ``None``: ``{endpoint}.timeouts``.
        services_stopped: the caller says that no service of the old store runs; one that runs is only remarked.
        dry_run: only count.
    """

    source: str
    settings: Settings
    schema: str | None = None
    table: str | None = None
    services_stopped: bool = False
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class Refusal:
    """A message that stays in the old store, and the reason."""

    message_id: str
    reason: str


@dataclass(slots=True)
class StoreMoveResult:
    """Result of a move. The run adds to these numbers while it moves messages.

    Args:
        source, target: addresses, without passwords.
        dry_run: nothing was moved; the numbers say what would be moved.
        waiting_before: messages that were pending in the old store at the start.
        moved: messages that are in the new store, and no longer in the old one.
        known_before: number of moved messages whose ids the new store knew before, as after an interrupted run.
        refused: messages that stay in the old store because the new store cannot take them.
        waiting: other messages that are pending in the old store at the end.
        refusals: the first refused messages.
        destinations: moved messages by queue.
        limits: limits that were set in the new store, by queue.
        remarks: sentences about everything that did not move, and what to do.
        took_seconds: duration of the whole run.
    """

    source: str
    target: str
    dry_run: bool
    waiting_before: int = 0
    moved: int = 0
    known_before: int = 0
    refused: int = 0
    waiting: int = 0
    refusals: list[Refusal] = field(default_factory=list[Refusal])
    destinations: Counter[str] = field(default_factory=Counter[str])
    limits: dict[str, str] = field(default_factory=dict[str, str])
    remarks: list[str] = field(default_factory=list[str])
    took_seconds: float = 0.0

    @property
    def is_complete(self) -> bool:
        """Whether all pending messages have moved, or would move."""
        return not self.refused and not self.waiting

    def refuse(self, message_id: str, reason: str) -> None:
        self.refused += 1
        if len(self.refusals) < _NAMED:
            self.refusals.append(Refusal(message_id, reason))


class MovableStore(ports.AdministrableStore, ports.ClaimingStore, ABC):
    """A store from which messages can be moved, and into which messages can be moved."""

    @classmethod
    def is_movable(cls, store: object) -> TypeGuard[MovableStore]:
        return isinstance(store, ports.AdministrableStore) and isinstance(store, ports.ClaimingStore)


async def move_store(plan: StoreMove, progress: Progress = ignore_progress) -> StoreMoveResult:
    """Move the pending messages of one store into another, and return the counts.

    After a failure of any kind, repeat the move before a service of the old store is started.

    Raises:
        MigrationConflict: services of the old store run, or one of the stores is in an earlier, interrupted migration.
            Nothing was moved.
        ConfigurationError: an address is not that of a store, both addresses are the same store, or a store does not
            show its services. Nothing was moved.
        NotSupported: a store does not show its messages, or the new store cannot keep limits of the old one.
        StoreError: a store is missing or failed. Messages that were not moved are in the old store.
    """
    settings, endpoint = plan.settings, plan.settings.endpoint.name
    addresses = [_format_address(each) for each in (resolve_address(plan.source, os.environ), settings.store.address)]
    async with AsyncExitStack() as stack:
        source = await stack.enter_async_context(_open_movable(_open_source(plan), endpoint, addresses[0]))
        with locate_errors(settings, "store.address"):
            target = await stack.enter_async_context(_open_movable(_open_target(settings), endpoint, addresses[1]))
        transfer = _Transfer(source, target, StoreMoveResult(addresses[0], addresses[1], plan.dry_run), progress)
        await transfer.run(services_stopped=plan.services_stopped)
        return transfer.result


def _open_source(plan: StoreMove) -> ports.ClaimingStore:
    address = resolve_address(plan.source, os.environ)
    _check_exists(address, "name the file in which messages wait")
    given_options = {"schema": plan.schema, "table": plan.table}
    arguments = {name: value for name, value in given_options.items() if value is not None}
    return open_store(address, **settings_of_store(address, {"create": False}), **arguments)


def _open_target(settings: Settings) -> ports.ClaimingStore:
    address = settings.store.address
    with name_setting_in_errors("store.address", address, settings):
        arguments = store_settings(settings, create=False)
        _check_exists(address, "create it with `postdate setup`, or name another")
        return open_store(address, **arguments)


def _check_exists(address: Address, advice: str) -> None:
    """Raise an error for a store of one process, and for a missing file. To open a missing file would create it."""
    if place_of(address.scheme) is Place.MEMORY:
        raise ConfigurationError(f"{address!r} exists in one process only: name a file or a server")
    path = file_of(address)
    if path is not None and not path.expanduser().exists():
        raise StoreNotSetUp(f"there is no file {path}; {advice}")


def _format_address(address: Address) -> str:
    """Return an address without its password, and with the full path of a file, because records keep this text."""
    path = file_of(address)
    return address.redacted_text if path is None else f"{address.scheme}:///{path.expanduser().resolve()}"


@asynccontextmanager
async def _open_movable(store: ports.ClaimingStore, endpoint: str, address_text: str) -> AsyncGenerator[MovableStore]:
    """Open a store for the length of the block.

    Raises StoreError if the store has no tables, NotSupported if its messages cannot be read.
    """
    try:
        await store.initialize(endpoint, ports.TransactionMode.RECEIVE_ONLY)
        if not MovableStore.is_movable(store):
            raise NotSupported(
                f"the store {address_text!r} does not support listing its messages: nothing can be moved out of it "
                f"or into it"
            )
        await store.next_attempt()  # This call fails if the tables do not exist.
        yield store
    finally:
        await close_adapter("a store", store.close)


async def list_services(store: MovableStore) -> Sequence[str] | None:
    """Return the services that deliver from a store, by process and machine; ``None`` if they cannot be known."""
    view = store.observer()
    if view is not None:
        return [f"process {each.pid} on {each.host}" for each in running_services(await view.processes())]
    if store.capabilities.has_clock and (reported := await store.reported_clocks()):
        places = [each.rpartition(":") for each in sorted(reported)]
        return [f"process {pid} on {machine}" for machine, _, pid in places]
    return None


# --- one run ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Transfer:
    """One move from an open store into another. ``progress`` receives the number of moved messages."""

    source: MovableStore
    target: MovableStore
    result: StoreMoveResult
    progress: Progress
    _clock: Clock = field(default_factory=SystemClock)
    _saga_timeouts: int = 0
    # The claims of the current page and of refused messages, without the content of the messages.
    _claims: dict[str, ports.Claim] = field(default_factory=dict[str, ports.Claim])

    async def run(self, *, services_stopped: bool) -> None:
        started, result = self._clock.monotonic(), self.result
        await self._check_services_stopped(stopped=services_stopped)
        await _check_no_intents(self.source, result.source)
        await _check_no_intents(self.target, result.target)
        for first in await self.source.list_pending(ports.MessageFilter(), 1):
            await self._check_different_stores(first.message_id)
        await self._copy_limits()
        result.waiting_before, unreadable_before = await self._count_pending()
        async for message in self._read_pending(due_from=LATEST):
            result.refuse(
                message.message_id, "it is due at the last microsecond of the year 9999: no store delivers it"
            )
        if result.dry_run:
            await self._preview()
            result.waiting = result.waiting_before - result.moved - result.refused
            unreadable = unreadable_before
        else:
            await self._copy_rules()
            await self._move_pages()
            result.waiting, unreadable = await self._count_pending()
            result.waiting -= result.refused
        result.refused += unreadable - unreadable_before
        self._add_remarks(unreadable)
        await self._add_queue_remark()
        result.took_seconds = self._clock.monotonic() - started

    # --- before anything moves -----------------------------------------------------------------------------------

    async def _check_services_stopped(self, *, stopped: bool) -> None:
        source_address, services = self.result.source, await list_services(self.source)
        services_text = f"services of {source_address} run: {', '.join(services or ())}; stop them first"
        if services and (stopped or self.result.dry_run):
            self.result.remarks.append(services_text)
        elif services:
            raise MigrationConflict(
                f"{services_text}. If they deliver only for other endpoints, add --services-stopped"
            )
        elif services is None and not (stopped or self.result.dry_run):
            raise ConfigurationError(
                f"this store does not show whether services of {source_address} run: stop them, and then add "
                f"--services-stopped"
            )

    async def _check_different_stores(self, message_id: str) -> None:
        """Raise ConfigurationError if both stores scheduled a message at the same instant: then they are one store."""
        source_history, target_history = [(await store.history(message_id))[:1] for store in (self.source, self.target)]
        if source_history and source_history == target_history:
            raise ConfigurationError(
                f"{self.result.source} and {self.result.target} are the same store, or one is a copy of the other: "
                f"{message_id!r} is the same message in both"
            )

    async def _copy_limits(self) -> None:
        """Set the limits of the old store in the new store, before the first message can be delivered there."""
        limits, result = await _load_limits(self.source), self.result
        if limits and not isinstance(self.target, LimitingStore):
            raise NotSupported(
                f"{result.target} does not support limits of queues; these queues have limits: {', '.join(limits)}; "
                f"remove them first: "
                f"postdate destinations limit QUEUE --store {result.source}"
            )
        target_limits = await _load_limits(self.target)
        for queue, source_limits in limits.items():
            if queue in target_limits and target_limits[queue] != source_limits:
                result.remarks.append(
                    f"limits of {queue} stay as in the new store: {target_limits[queue]}; in the old: {source_limits}"
                )
            elif queue not in target_limits:
                result.limits[queue] = str(source_limits)
                if isinstance(self.target, LimitingStore) and not result.dry_run:
                    await change_limits(
                        self.target, queue, lambda _, source_limits=source_limits: source_limits, self._clock.now()
                    )

    async def _copy_rules(self) -> None:
        """Store the zone rules by which messages are due in the new store. Without them, it refuses such messages."""
        target = self.target
        if not ZoneStore.is_zone_store(target):
            return
        for marker in await list_markers(self.source):
            with suppress(ValueError):  # A damaged marker says nothing about messages.
                zone, version = marker.headers.get("zone", ""), marker.headers.get("version", "")
                await ensure_rules(target, zone, decode_rules(marker), version, self._clock.now())

    # --- moving --------------------------------------------------------------------------------------------------

    async def _move_pages(self) -> None:
        deadline = self._clock.monotonic() + _PATIENCE_SECONDS
        try:
            while len(self._claims) < MOST_REFUSED:
                if claims := await self.source.claim_due(LATEST, PAGE):
                    await self._move_page(claims)
                    self.progress(self.result.moved)
                    deadline = self._clock.monotonic() + _PATIENCE_SECONDS
                elif (await self._count_pending())[0] <= self.result.refused or self._clock.monotonic() > deadline:
                    return
                else:
                    await anyio.sleep(_CLAIM_PAUSE_SECONDS)
                    await self.source.next_attempt()  # During this call, a store frees the claims of dead processes.
            self.result.remarks.append(f"the run ended when it had refused {len(self._claims):,}; more may move")
        finally:
            # Shielded, so that a cancelled run releases its claims. If that fails, they end with this process.
            with suppress(StoreError), anyio.CancelScope(shield=True):
                await self.source.release(list(self._claims.values()), None)

    async def _move_page(self, claims: Sequence[ports.Claim]) -> None:
        now, messages = self._clock.now(), {claim.message.message_id: claim.message for claim in claims}
        self._claims |= {claim.message.message_id: claim for claim in claims}
        reasons = {id_: reason for id_, message in messages.items() if (reason := self._refusal_reason(message))}
        existing_ids = await self._store_messages(
            [each for id_, each in messages.items() if id_ not in reasons], now, reasons
        )
        for id_ in existing_ids[:1]:
            await self._check_different_stores(id_)
        for id_ in existing_ids:
            # Read the copy before its records: if the message ends between the two calls, the records show that.
            copy, records = await self.target.get(id_), await self.target.history(id_)
            if difference_name := difference(messages[id_], copy, records):
                reasons[id_] = _REASONS.get(
                    difference_name, f"the new store has another message of this id: {difference_name} differs"
                )
        moved_claims = [claim for claim in claims if claim.message.message_id not in reasons]
        await self._store_keys([claim.message.message_id for claim in moved_claims])
        detail = f"{MOVED_AWAY}: {self.result.target}"
        self.result.moved += await self.source.finish(moved_claims, ports.Outcome.CANCELLED, now, detail)
        self.result.known_before += sum(id_ not in reasons for id_ in existing_ids)
        for claim in moved_claims:
            self._add_to_counts(claim.message)
            del self._claims[claim.message.message_id]
        for id_, reason in reasons.items():
            self.result.refuse(id_, reason)
            self._claims[id_] = replace(self._claims[id_], message=replace(messages[id_], headers={}, body=b""))

    async def _store_messages(
        self, messages: Sequence[DelayedMessage], now: datetime, reasons: dict[str, str]
    ) -> list[str]:
        """Store messages. Return the ids that the new store knew already.

        Add a reason for each message that it refuses.
        """
        if not messages:
            return []
        try:
            return list((await self.target.store_many(messages, now)).duplicate_ids)
        except MessageError as error:
            if len(messages) == 1:
                reasons[messages[0].message_id] = f"the new store does not accept it: {error}"
                return []
            half = len(messages) // 2
            return [
                id_
                for part in (messages[:half], messages[half:])
                for id_ in await self._store_messages(part, now, reasons)
            ]

    async def _store_keys(self, message_ids: Sequence[str]) -> None:
        """Give messages the keys that they have in the old store, according to the records of their scheduling."""
        if isinstance(self.target, ports.ReplacingStore):
            candidate_ids = [id_ for id_ in message_ids if KEYED_ID.search(id_)]
            records = [record for id_ in candidate_ids for record in await self.source.history(id_)]
            keyed_ids = [
                each.message_id for each in records if (each.kind, each.detail) == (ports.RecordKind.SCHEDULED, KEYED)
            ]
            await self.target.store_keys(keyed_ids)

    # --- looking -------------------------------------------------------------------------------------------------

    async def _read_pending(self, **due: datetime) -> AsyncGenerator[DelayedMessage]:
        """Yield the pending messages whose due times are within bounds. One page of them is in memory."""
        pages = PendingPages(replace(EVERYTHING, **due), None)
        while not pages.is_over:
            for message in pages.accept(await self.source.read_pending(*pages.next_query())):
                yield message

    async def _preview(self) -> None:
        """Count the messages that would move, without claims."""
        async for message in self._read_pending(due_to=LATEST):
            if reason := self._refusal_reason(message):
                self.result.refuse(message.message_id, reason)
            else:
                self.result.moved += 1
                self._add_to_counts(message)
                self.progress(self.result.moved)

    async def _count_pending(self) -> tuple[int, int]:
        """Return how many messages are pending in the old store, and how many of its rows are unreadable."""
        counted = await self.source.statistics(self._clock.now())
        return counted.pending - len(await list_markers(self.source)), counted.unreadable

    def _refusal_reason(self, message: DelayedMessage) -> str:
        """Return why the new store cannot take a message; empty: no reason is known before the message is stored."""
        if Headers.WALL_TIME in message.headers and not ZoneStore.is_zone_store(self.target):
            return f"it has a wall time in a zone, which {type(self.target).__name__} does not support"
        size, largest = size_in_bytes(encode_headers(message.headers), message.body), self._largest_message_bytes
        return f"it has {size:,} bytes, and the new store accepts {largest:,}" if size > largest else ""

    @property
    def _largest_message_bytes(self) -> int:
        return self.target.capabilities.largest_message_bytes

    def _add_to_counts(self, message: DelayedMessage) -> None:
        self.result.destinations[message.destination] += 1
        self._saga_timeouts += message.origin is Origin.SAGA_TIMEOUT

    # --- what did not move ---------------------------------------------------------------------------------------

    def _add_remarks(self, unreadable: int) -> None:
        result, remarks = self.result, self.result.remarks
        if unreadable:
            remarks.append(
                f"{format_count(unreadable, 'row')} of the old store cannot be read, and stay there: see "
                f"`postdate messages list --unreadable --store {result.source}`"
            )
        if result.waiting > 0:
            remarks.append(
                "the remaining messages are claimed by a process, were stored meanwhile, or cannot be read: run it "
                "again"
            )
        if unexplained := result.waiting_before - result.moved - result.refused - max(result.waiting, 0):
            action = "removed from the old store" if unexplained > 0 else "stored there"
            remarks.append(f"counts differ by {abs(unexplained):,} messages that other processes {action} meanwhile")
        result.waiting = max(result.waiting, 0)
        if self._saga_timeouts:
            remarks.append(
                f"timeouts of sagas are among them ({self._saga_timeouts:,}); the state of sagas, and what an outbox "
                f"keeps, is not moved: copy it, or leave sagas.address and outbox.address where they are"
            )

    async def _add_queue_remark(self) -> None:
        view = self.source.observer()
        lengths = dict[str, int]() if view is None else await view.queue_lengths()
        if queue_list := ", ".join(f"{length:,} in {queue}" for queue, length in lengths.items() if length):
            self.result.remarks.append(
                f"messages in queues of the old store stay there: {queue_list}; let receivers empty them"
            )


async def _load_limits(store: MovableStore) -> dict[str, Limits]:
    return await load_limits_in_force(store) if isinstance(store, LimitingStore) else {}


async def _check_no_intents(store: MovableStore, address_text: str) -> None:
    """Raise MigrationConflict if a store still has batches of an unfinished live migration by an earlier version."""
    if await store.list_pending(ports.MessageFilter(INTENTS, due_from=_INTENTS_DUE), 1):
        raise MigrationConflict(
            f"a migration out of {address_text} was interrupted, and messages of its last batch may be in neither "
            f"store; end "
            f"it with the version of Postdate that began it (`postdate pipeline migrate resume --from-store …`), then "
            f"move"
        )

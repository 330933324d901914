"""Delayed messages in Redis: a hash each, in sorted sets by due time and next attempt.

Source: docs/guides/redis.md, ``lua/common.lua`` (the keys); ADR 0002 (claims), ADR 0043 (damage),
ADR 0048 (clocks), ADR 0050 (outages).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from typing_extensions import override

from postdate import ports
from postdate.backends.redis import server as redis_server
from postdate.backends.redis.layout import Part, instant_of, message_parts, microseconds_of, read_message
from postdate.backends.redis.layout import format_instant as instant
from postdate.backends.redis.liveness import Claimer, OpenRedis
from postdate.backends.redis.login import RedisLogin
from postdate.backends.redis.questions import Questions, RedisStoreObserver
from postdate.backends.redis.unreadable import UnreadableHashes
from postdate.clock import from_microseconds, to_microseconds
from postdate.errors import ConfigurationError, DuplicateMessage, MessageError
from postdate.messages import DelayedMessage, copy_with_due, encode_for_store, encode_headers
from postdate.runtime.next_due import NextDue

_MOST_BYTES_AT_ONCE: Final = 16 * 1024 * 1024
"""The most bytes of headers and bodies in one claim; a single message may have more."""

log = logging.getLogger("postdate.redis")


class RedisStore(UnreadableHashes, Questions, ports.MovingStore):
    """Keeps delayed messages in a database of a Redis server.

    Args:
        address: ``redis://…`` or ``rediss://…`` (see :mod:`postdate.backends.redis.login`), or an open database.
        table: the store's name among the stores with the same prefix; ``None``: ``{endpoint}.timeouts``.
        recording: how much is recorded for audits; records stay in the server's memory.
        largest_message_bytes: of headers and body together.
        holds_at_most: after so long without a heartbeat a process loses its claims; ``None``: 60 s.
        answers_within: a call that is not answered for so long fails; ``None``: 30 s.

    Raises:
        ConfigurationError: the address cannot be parsed.
    """

    def __init__(
        self,
        address: str | RedisLogin | OpenRedis,
        *,
        table: str | None = None,
        recording: ports.Recording = ports.Recording.ALL,
        largest_message_bytes: int = 16 * 1024 * 1024,
        holds_at_most: timedelta | None = None,
        answers_within: timedelta | None = None,
    ) -> None:
        self._database = OpenRedis.of(address, holds_at_most, answers_within)
        self._server = redis_server.RedisServer(self._database.connections, redis_server.STORE)
        self._table, self._recording = table, recording
        self._capabilities = ports.StoreCapabilities(
            durable=True,
            shared=True,
            time_precision=timedelta(microseconds=1),
            transaction_modes=frozenset(ports.TransactionMode),
            database=self._server.login.identity,
            largest_message_bytes=largest_message_bytes,
            holds_at_most=self._database.liveness.holds_at_most,
            has_clock=True,
        )
        self._claims: dict[str, ports.Claim] = {}
        self._loss_listeners: list[Callable[[Collection[str]], None]] = []
        self._next_due, self._liveness = NextDue[int](), self._database.liveness
        self._liveness.loss_callbacks.append(self._forget_lost_claims)
        self._database.attach_user(self)
        self._claimer = Claimer(self._server, self._liveness)
        self._unsubscribe: Callable[[], None] | None = None

    def __repr__(self) -> str:
        return f"RedisStore({self._server!r}, table={self._table!r})"

    @override
    async def initialize(self, endpoint: str, mode: ports.TransactionMode) -> None:
        if self._table is None:
            self._table = f"{endpoint}.timeouts"

    @override
    async def setup(self) -> None:
        """Check the server, and bring back unreadable messages of earlier versions. There is nothing to create.

        Raises:
            ConfigurationError: the server is older than 7.0, or evicts keys when its memory is full, which loses
                messages.
        """
        await redis_server.check_eviction(self._server)
        await self._migrate_unreadable()

    @override
    async def close(self) -> None:
        """Release all claims, and close the database if this is its last user."""
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None
        self._claims.clear()
        if not await self._database.detach_user(self):
            await self._claimer.close_or_log()

    @property
    @override
    def key_prefix(self) -> str:
        if self._table is None:
            raise ConfigurationError(
                "RedisStore does not know its name yet: call initialize(endpoint, mode) first, or give table="
            )
        return f"{self._server.login.tag}:s:{self._table}"

    # --- storing ------------------------------------------------------------------------------------------------

    @override
    async def store(self, message: DelayedMessage, now: datetime) -> None:
        if (await self._store_messages([message], now, may_replace_failed=True)).duplicate_ids:
            raise DuplicateMessage.of(message.message_id)

    @override
    async def store_many(self, messages: Sequence[DelayedMessage], now: datetime) -> ports.StoreReport:
        return await self._store_messages(messages, now, may_replace_failed=False) if messages else ports.StoreReport(0)

    async def _store_messages(
        self, messages: Sequence[DelayedMessage], now: datetime, *, may_replace_failed: bool
    ) -> ports.StoreReport:
        parts = self._parts(messages)
        head = (self.key_prefix, instant(now), int(may_replace_failed), len(messages))
        duplicate_indexes: list[int] = await self._server.run("store", *head, *parts)
        duplicate_index_set = set(duplicate_indexes)
        if new_messages := [message for index, message in enumerate(messages) if index not in duplicate_index_set]:
            self._next_due.announce(to_microseconds(min(message.due for message in new_messages)))
        return ports.StoreReport(len(new_messages), tuple(messages[index].message_id for index in duplicate_indexes))

    def _parts(self, messages: Sequence[DelayedMessage]) -> list[Part]:
        for message in messages:
            encode_for_store(message, self._capabilities.largest_message_bytes)
        return [part for message in messages for part in message_parts(message)]

    # --- in a transaction with the queues -------------------------------------------------------------------------

    @override
    def storing_work(self, messages: Sequence[DelayedMessage], now: datetime) -> ports.Work:
        parts = self._parts(messages)
        head: tuple[Part, ...] = ("store", self.key_prefix, instant(now), len(messages))

        def work(transaction: ports.NativeTransaction) -> None:
            self._transaction(transaction).add(*head, *parts, messages=messages)

        return work

    @override
    def finishing_work(
        self, claims: Sequence[ports.Claim], outcome: ports.Outcome, now: datetime, detail: str = ""
    ) -> ports.Work:
        head: tuple[Part, ...] = ("finish", self.key_prefix, int(ports.OUTCOME_RECORDS[outcome]), instant(now), detail)

        def work(transaction: ports.NativeTransaction) -> None:
            native = self._transaction(transaction)
            native.add(*head, *redis_server.finish_parts(claims))
            native.ended_messages += [claim.message for claim in claims]
            native.commit_callbacks.append(lambda: self._forget_claims(claims))

        return work

    def _transaction(self, transaction: ports.NativeTransaction) -> redis_server.RedisTransaction:
        return redis_server.transaction_of(transaction, self._server.login.identity)

    # --- claims -------------------------------------------------------------------------------------------------

    @override
    async def claim_due(self, now: datetime, limit: int) -> Sequence[ports.Claim]:
        while limit > 0:
            token, rows = await self._claimer.claim("claim", self.key_prefix, instant(now), limit, _MOST_BYTES_AT_ONCE)
            try:
                claims = [each for row in rows if (each := await self._read_claim(row, token, now)) is not None]
            except BaseException:
                self._claimer.void_claim(token)
                raise
            self._claims |= {claim.message.message_id: claim for claim in claims}
            if claims or not rows:
                return claims
        return []

    async def _read_claim(self, row: Sequence[Any], token: str, now: datetime) -> ports.Claim | None:
        """Return the claim of a row; ``None`` when the row cannot be read and was marked."""
        message_id, *fields = row
        try:
            return ports.Claim(read_message(message_id, fields), token)
        except MessageError as error:
            await self._mark_row(message_id, token, error, now)
            return None

    async def _mark_row(self, message_id: bytes, token: str, error: MessageError, now: datetime) -> None:
        key_prefix = self.key_prefix
        key = f"{key_prefix}:m:".encode() + message_id
        await self._server.run("mark_unreadable", f"s{key_prefix}", instant(now), key, message_id, token, str(error))
        text = "cannot be read, and marked so: message %r of %r (%s); `postdate messages list --unreadable` lists it"
        log.error(text, message_id, self, error)

    @override
    async def finish(
        self, claims: Sequence[ports.Claim], outcome: ports.Outcome, now: datetime, detail: str = ""
    ) -> int:
        head = (self.key_prefix, int(ports.OUTCOME_RECORDS[outcome]), instant(now), detail)
        completed_count: int = await self._server.run(
            "finish", *head, *redis_server.finish_parts(self._own_claims(claims))
        )
        self._forget_claims(claims)
        return completed_count

    @override
    async def retry_later(self, claim: ports.Claim, attempt_at: datetime, now: datetime, reason: str) -> bool:
        if not self._own_claims([claim]):
            return False
        is_moved = await self._retry(claim.message.message_id, str(claim.token), instant(attempt_at), now, reason)
        self._forget_claims([claim])
        return is_moved

    async def _retry(self, message_id: str, token: str, attempt: str, now: datetime, reason: str) -> bool:
        holder = self._liveness.current_holder
        recorded = int(self._recording is ports.Recording.ALL)
        call = (self.key_prefix, message_id, token, holder, attempt, instant(now), reason, recorded)
        if is_moved := bool(await self._server.run("retry", *call)):
            self._next_due.forget()
        return is_moved

    @override
    async def mark_unreadable(self, claim: ports.Claim, reason: str, now: datetime) -> bool:
        message_id, is_marked = claim.message.message_id, 0
        for each in self._own_claims([claim]):
            call = (f"s{self.key_prefix}", instant(now), f"{self.key_prefix}:m:{message_id}", message_id)
            is_marked = await self._server.run("mark_unreadable", *call, str(each.token), reason)
        self._forget_claims([claim])
        return bool(is_marked)

    @override
    async def release(self, claims: Sequence[ports.Claim], attempt_at: datetime | None) -> int:
        attempt = "" if attempt_at is None else instant(attempt_at)
        released_count: int = await self._server.run(
            "release", self.key_prefix, attempt, *redis_server.finish_parts(self._own_claims(claims))
        )
        self._forget_claims(claims)
        if released_count:
            if attempt_at is None:
                self._next_due.forget()
            else:
                self._next_due.announce(to_microseconds(attempt_at))
        return released_count

    def _own_claims(self, claims: Sequence[ports.Claim]) -> Sequence[ports.Claim]:
        """Return the claims that this process made under its current holder."""
        holder_prefix = f"{self._liveness.current_holder}:"
        return [claim for claim in claims if str(claim.token).startswith(holder_prefix)]

    def _forget_claims(self, claims: Sequence[ports.Claim]) -> None:
        """Forget completed or released claims, but not a newer claim of the same message."""
        for claim in claims:
            if self._claims.get(claim.message.message_id) is claim:
                del self._claims[claim.message.message_id]

    def _claims_by_id(self, message_id: str) -> Sequence[ports.Claim]:
        """Return a message's claim, as a list of one or none."""
        claim = self._claims.get(message_id)
        return [] if claim is None else [claim]

    def _forget_lost_claims(self) -> None:
        lost_claims, self._claims = self._claims, {}
        for listener in list(self._loss_listeners) if lost_claims else ():
            listener(lost_claims.keys())
        self._next_due.forget()

    @override
    def listen_for_lost_claims(self, on_lost: Callable[[Collection[str]], None]) -> Callable[[], None]:
        self._loss_listeners.append(on_lost)
        return lambda: self._loss_listeners.remove(on_lost)

    @override
    def is_in_force(self, claim: ports.Claim) -> bool:
        """Return whether the claim is certainly in force; the next heartbeat releases a claim that is not.

        The caller drops such a claim, and perhaps no other process has it. The server would keep it while this process
        lives.
        """
        if claim.message.message_id not in self._claims or not self._own_claims([claim]):
            return False
        if self._liveness.is_certain:
            return True
        if self._liveness.is_in_force:  # otherwise the next heartbeat releases all claims
            self._forget_claims([claim])
            self._liveness.postponed_calls.append(("release", self.key_prefix, "", *redis_server.finish_parts([claim])))
        return False

    @override
    async def next_attempt(self) -> datetime | None:
        query_number = self._next_due.start_query()
        first: list[bytes] = await self._server.execute_command("ZRANGE", f"{self.key_prefix}:free", 0, 0)
        return self._next_attempt_after(query_number, first[0] if first else None)

    def _next_attempt_after(self, query_number: int, first: bytes | None) -> datetime | None:
        """Remember the first member that a query returned, and return when to poll again.

        More messages may have been stored since the query.
        """
        again_at = self._next_due.finish_query(query_number, microseconds_of(first) if first else None)
        return None if again_at is None else from_microseconds(again_at)

    @override
    async def listen(self, wake: ports.Wake) -> Callable[[], None]:
        if self._unsubscribe is None:
            subscription = self._database.subscriptions.listen(f"{self.key_prefix}:wake", self._on_notification)
            self._unsubscribe = await self._server.translate_errors(subscription)
        stores: list[str] = self._liveness.process_facts.setdefault("delivers", [])
        if self.key_prefix not in stores:
            stores.append(self.key_prefix)
        return self._next_due.listen(wake)

    def _on_notification(self, text: bytes | None) -> None:
        if text:
            self._next_due.announce(microseconds_of(text))
        else:
            self._next_due.forget()

    # --- moves --------------------------------------------------------------------------------------------------

    @override
    async def move_due(self, now: datetime, limit: int, *, listing: bool = False) -> ports.MoveReport:
        query_number = self._next_due.start_query()
        call = (self.key_prefix, instant(now), limit, int(listing))
        delivered, expired, has_unmoved, first, to, first_due, rows = await self._server.run("move", *call)
        next_attempt, moved_messages = (
            self._next_attempt_after(query_number, first or None),
            _read_moved(rows, now) if listing else None,
        )
        counts = {queue.decode(errors="replace"): count for queue, count in to}
        earliest = _due_of(first_due, now) if first_due else None
        return ports.MoveReport(delivered, expired, bool(has_unmoved), next_attempt, counts, earliest, moved_messages)

    @override
    async def yield_to_writers(self) -> None:
        """Do nothing: the server runs other clients' commands between any two scripts."""

    # --- the simple contract --------------------------------------------------------------------------------------

    @override
    async def remove(self, message_id: str, now: datetime) -> bool:
        claims, holder = self._claims_by_id(message_id), self._liveness.current_holder
        call = (self.key_prefix, int(ports.RecordKind.DELIVERED), instant(now), message_id, holder)
        is_removed = bool(await self._server.run("remove", *call))
        self._forget_claims(claims)
        return is_removed

    @override
    async def increment_failure_count(self, message_id: str, now: datetime) -> bool:
        claims = self._claims_by_id(message_id)
        is_counted = await self._retry(message_id, "", "", now, "")
        self._forget_claims(claims)
        return is_counted

    @override
    async def next_due(self) -> datetime | None:
        first: list[bytes] = await self._server.execute_command("ZRANGE", f"{self.key_prefix}:due", 0, 0)
        return instant_of(first[0]) if first else None

    # --- administration -------------------------------------------------------------------------------------------

    @override
    async def cancel(self, message_id: str, now: datetime) -> bool:
        no_holder = "-"
        call = (self.key_prefix, int(ports.RecordKind.CANCELLED), instant(now), message_id, no_holder)
        return bool(await self._server.run("remove", *call))

    @override
    async def reschedule(self, message_id: str, due: datetime, now: datetime, wall_time: str | None = None) -> bool:
        while True:
            row = await self.find_row(message_id)
            if row is None or row.is_claimed:
                return False
            headers = encode_headers(copy_with_due(row.message, due, wall_time).headers)
            call = (self.key_prefix, instant(now), message_id, row.member, instant(due), headers)
            if await self._server.run("reschedule", *call):
                self._next_due.announce(to_microseconds(due.astimezone(UTC)))
                return True

    @override
    def observer(self) -> ports.Observer:
        return RedisStoreObserver(self._server, self, self._liveness)

    @property
    @override
    def _unreadable_scope(self) -> str:
        return f"s{self.key_prefix}"

    # --- the server -----------------------------------------------------------------------------------------------

    @override
    async def server_now(self) -> datetime:
        return await redis_server.server_now(self._server)

    @override
    async def server_facts(self) -> ports.ServerFacts:
        return await redis_server.server_facts(self._server)


def _due_of(member: bytes, default: datetime) -> datetime:
    """Return when a moved message was due.

    The result is ``default`` if the member was damaged by hand, because the message has moved already.
    """
    try:
        return instant_of(member)
    except (ValueError, OverflowError):
        return default


def _read_moved(rows: Sequence[Any], now: datetime) -> ports.MovedMessages:
    if not rows:
        return ports.NOTHING_MOVED
    return ports.MovedMessages(
        [row[0].decode(errors="replace") for row in rows],
        [_due_of(row[1], now) for row in rows],
        [row[2].decode(errors="replace") for row in rows],
        [bool(row[3]) for row in rows],
    )

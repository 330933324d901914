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

from postdate.backends.redis.layout import Part, instant_of, message_parts, microseconds_of, read_message
from postdate.backends.redis.layout import written as instant
from postdate.backends.redis.liveness import Claimant, OpenRedis
from postdate.backends.redis.login import RedisLogin
from postdate.backends.redis.questions import Questions, RedisStoreObserver
from postdate.backends.redis.server import (
    STORE,
    RedisServer,
    RedisTransaction,
    check_eviction,
    finish_parts,
    server_facts,
    server_now,
    transaction_of,
)
from postdate.backends.redis.unreadable import UnreadableHashes
from postdate.clock import from_microseconds, to_microseconds
from postdate.errors import ConfigurationError, DuplicateMessage, MessageError
from postdate.messages import DelayedMessage, encode_headers, rescheduled, stored_headers
from postdate.ports import (
    NOTHING_MOVED,
    OUTCOME_RECORDS,
    Claim,
    Moved,
    MoveReport,
    MovingStore,
    NativeTransaction,
    Observer,
    Outcome,
    Recording,
    RecordKind,
    ServerFacts,
    StoreCapabilities,
    StoreReport,
    TransactionMode,
    Wake,
    Work,
)
from postdate.runtime.next_due import NextDue

_MOST_BYTES_AT_ONCE: Final = 16 * 1024 * 1024
"""Of headers and bodies in one claim; a single message may have more."""

log = logging.getLogger("postdate.redis")


class RedisStore(UnreadableHashes, Questions, MovingStore):
    """Keeps delayed messages in a database of a Redis server.

    Args:
        address: ``redis://…`` or ``rediss://…`` (see :mod:`postdate.backends.redis.login`), or an open database.
        table: the store's name among those with the same prefix; ``None``: ``{endpoint}.timeouts``.
        recording: how much is kept for audits; records stay in the server's memory.
        largest_message_bytes: of headers and body together.
        holds_at_most: a process that is silent for so long loses the messages that it holds; ``None``: 60 s.
        answers_within: a connection that is silent for so long is given up; ``None``: 30 s.

    Raises:
        ConfigurationError: the address cannot be read.
    """

    def __init__(
        self,
        address: str | RedisLogin | OpenRedis,
        *,
        table: str | None = None,
        recording: Recording = Recording.ALL,
        largest_message_bytes: int = 16 * 1024 * 1024,
        holds_at_most: timedelta | None = None,
        answers_within: timedelta | None = None,
    ) -> None:
        self._opened = OpenRedis.of(address, holds_at_most, answers_within)
        self._server = RedisServer(self._opened.connections, STORE)
        self._table, self._recording = table, recording
        self._capabilities = StoreCapabilities(
            durable=True,
            shared=True,
            time_precision=timedelta(microseconds=1),
            transaction_modes=frozenset(TransactionMode),
            database=self._server.login.identity,
            largest_message_bytes=largest_message_bytes,
            holds_at_most=self._opened.liveness.holds_at_most,
            has_clock=True,
        )
        self._claims: dict[str, Claim] = {}
        self._when_lost: list[Callable[[Collection[str]], None]] = []
        self._next_due, self._liveness = NextDue[int](), self._opened.liveness
        self._liveness.about["delivers"] = True
        self._liveness.when_lost.append(self._lost)
        self._opened.used_by(self)
        self._claimant = Claimant(self._server, self._liveness)
        self._stops_hearing: Callable[[], None] | None = None

    def __repr__(self) -> str:
        return f"RedisStore({self._server!r}, table={self._table!r})"

    @override
    async def initialize(self, endpoint: str, mode: TransactionMode) -> None:
        if self._table is None:
            self._table = f"{endpoint}.timeouts"

    @override
    async def setup(self) -> None:
        """Checks the server; there is nothing to create. Unreadable messages of earlier versions are brought back.

        Raises:
            ConfigurationError: it is older than 7.0, or evicts keys when its memory is full: messages would be lost.
        """
        await check_eviction(self._server)
        await self._bring_back_unreadable()

    @override
    async def close(self) -> None:
        """Releases all claims, and closes the database if this is its last user."""
        if self._stops_hearing is not None:
            self._stops_hearing()
            self._stops_hearing = None
        self._claims.clear()
        if not await self._opened.close_for(self):
            await self._claimant.close_soon()

    @property
    @override
    def place(self) -> str:
        if self._table is None:
            raise ConfigurationError(
                "RedisStore does not know its name yet: call initialize(endpoint, mode) first, or give table="
            )
        return f"{self._server.login.tag}:s:{self._table}"

    # --- storing ------------------------------------------------------------------------------------------------

    @override
    async def store(self, message: DelayedMessage, now: datetime) -> None:
        if (await self._store([message], now, may_come_back=True)).already_there:
            raise DuplicateMessage.of(message.message_id)

    @override
    async def store_many(self, messages: Sequence[DelayedMessage], now: datetime) -> StoreReport:
        return await self._store(messages, now, may_come_back=False) if messages else StoreReport(0)

    async def _store(self, messages: Sequence[DelayedMessage], now: datetime, *, may_come_back: bool) -> StoreReport:
        parts = self._parts(messages)
        head = (self.place, instant(now), int(may_come_back), len(messages))
        existing: list[int] = await self._server.run("store", *head, *parts)
        there = set(existing)
        if new := [message for place, message in enumerate(messages) if place not in there]:
            self._next_due.announce(to_microseconds(min(message.due for message in new)))
        return StoreReport(len(new), tuple(messages[place].message_id for place in existing))

    def _parts(self, messages: Sequence[DelayedMessage]) -> list[Part]:
        for message in messages:
            stored_headers(message, self._capabilities.largest_message_bytes)
        return [part for message in messages for part in message_parts(message)]

    # --- in a transaction with the queues -------------------------------------------------------------------------

    @override
    def storing(self, messages: Sequence[DelayedMessage], now: datetime) -> Work:
        parts = self._parts(messages)
        head: tuple[Part, ...] = ("store", self.place, instant(now), len(messages))

        def work(transaction: NativeTransaction) -> None:
            self._transaction(transaction).add(*head, *parts, messages=messages)

        return work

    @override
    def finishing(self, claims: Sequence[Claim], outcome: Outcome, now: datetime, detail: str = "") -> Work:
        head: tuple[Part, ...] = ("finish", self.place, int(OUTCOME_RECORDS[outcome]), instant(now), detail)

        def work(transaction: NativeTransaction) -> None:
            native = self._transaction(transaction)
            native.add(*head, *finish_parts(claims))
            native.ended += [claim.message for claim in claims]
            native.afterwards.append(lambda: self._forget_claims(claims))

        return work

    def _transaction(self, transaction: NativeTransaction) -> RedisTransaction:
        return transaction_of(transaction, self._server.login.identity)

    # --- claims -------------------------------------------------------------------------------------------------

    @override
    async def claim_due(self, now: datetime, limit: int) -> Sequence[Claim]:
        while limit > 0:
            token, rows = await self._claimant.claim("claim", self.place, instant(now), limit, _MOST_BYTES_AT_ONCE)
            try:
                claims = [each for row in rows if (each := await self._claim(row, token, now)) is not None]
            except BaseException:
                self._claimant.doubt(token)
                raise
            self._claims |= {claim.message.message_id: claim for claim in claims}
            if claims or not rows:
                return claims
        return []

    async def _claim(self, row: Sequence[Any], token: str, now: datetime) -> Claim | None:
        """Return the claim of a row; ``None`` when it cannot be read and was marked."""
        message_id, *fields = row
        try:
            return Claim(read_message(message_id, fields), token)
        except MessageError as error:
            await self._mark(message_id, token, error, now)
            return None

    async def _mark(self, message_id: bytes, token: str, error: MessageError, now: datetime) -> None:
        place = self.place
        key = f"{place}:m:".encode() + message_id
        await self._server.run("mark_unreadable", f"s{place}", instant(now), key, message_id, token, str(error))
        text = "cannot be read, and marked so: message %r of %r (%s); `postdate messages list --unreadable` lists it"
        log.error(text, message_id, self, error)

    @override
    async def finish(self, claims: Sequence[Claim], outcome: Outcome, now: datetime, detail: str = "") -> int:
        head = (self.place, int(OUTCOME_RECORDS[outcome]), instant(now), detail)
        done: int = await self._server.run("finish", *head, *finish_parts(self._own(claims)))
        self._forget_claims(claims)
        return done

    @override
    async def retry_later(self, claim: Claim, attempt_at: datetime, now: datetime, reason: str) -> bool:
        if not self._own([claim]):
            return False
        done = await self._retry(claim.message.message_id, str(claim.token), instant(attempt_at), now, reason)
        self._forget_claims([claim])
        return done

    async def _retry(self, message_id: str, token: str, attempt: str, now: datetime, reason: str) -> bool:
        holder = self._liveness.holder_now
        recorded = int(self._recording is Recording.ALL)
        call = (self.place, message_id, token, holder, attempt, instant(now), reason, recorded)
        if done := bool(await self._server.run("retry", *call)):
            self._next_due.forget()
        return done

    @override
    async def mark_unreadable(self, claim: Claim, reason: str, now: datetime) -> bool:
        message_id, done = claim.message.message_id, 0
        for each in self._own([claim]):
            call = (f"s{self.place}", instant(now), f"{self.place}:m:{message_id}", message_id)
            done = await self._server.run("mark_unreadable", *call, str(each.token), reason)
        self._forget_claims([claim])
        return bool(done)

    @override
    async def release(self, claims: Sequence[Claim], attempt_at: datetime | None) -> int:
        attempt = "" if attempt_at is None else instant(attempt_at)
        freed: int = await self._server.run("release", self.place, attempt, *finish_parts(self._own(claims)))
        self._forget_claims(claims)
        if freed:
            if attempt_at is None:
                self._next_due.forget()
            else:
                self._next_due.announce(to_microseconds(attempt_at))
        return freed

    def _own(self, claims: Sequence[Claim]) -> Sequence[Claim]:
        """Return the claims that this process made under its current holder."""
        begin = f"{self._liveness.holder_now}:"
        return [claim for claim in claims if str(claim.token).startswith(begin)]

    def _forget_claims(self, claims: Sequence[Claim]) -> None:
        """Drop ended claims; a message may have been claimed anew before this is called."""
        for claim in claims:
            if self._claims.get(claim.message.message_id) is claim:
                del self._claims[claim.message.message_id]

    def _claims_by_id(self, message_id: str) -> Sequence[Claim]:
        """Return a message's claim, as a list of one or none."""
        claim = self._claims.get(message_id)
        return [] if claim is None else [claim]

    def _lost(self) -> None:
        lost, self._claims = self._claims, {}
        for tell in list(self._when_lost) if lost else ():
            tell(lost.keys())
        self._next_due.forget()

    @override
    def when_lost(self, lost: Callable[[Collection[str]], None]) -> Callable[[], None]:
        self._when_lost.append(lost)
        return lambda: self._when_lost.remove(lost)

    @override
    def still_holds(self, claim: Claim) -> bool:
        """As far as is certain; the next beat releases a claim that is not.

        Its caller drops it, and perhaps no other process has it: the server would keep it while this process lives.
        """
        if claim.message.message_id not in self._claims or not self._own([claim]):
            return False
        if self._liveness.is_certain:
            return True
        if self._liveness.is_in_force:  # else the next beat releases all claims
            self._forget_claims([claim])
            self._liveness.postponed.append(("release", self.place, "", *finish_parts([claim])))
        return False

    @override
    async def next_attempt(self) -> datetime | None:
        look = self._next_due.look()
        first: list[bytes] = await self._server.command("ZRANGE", f"{self.place}:free", 0, 0)
        return self._seen(look, first[0] if first else None)

    def _seen(self, look: int, first: bytes | None) -> datetime | None:
        """Note the first member that a look saw; return when to look again: more may have been stored meanwhile."""
        again_at = self._next_due.seen(look, microseconds_of(first) if first else None)
        return None if again_at is None else from_microseconds(again_at)

    @override
    async def listen(self, wake: Wake) -> Callable[[], None]:
        if self._stops_hearing is None:
            listening = self._opened.listening.listen(f"{self.place}:wake", self._hear)
            self._stops_hearing = await self._server.calling(listening)
        return self._next_due.listen(wake)

    def _hear(self, text: bytes | None) -> None:
        if text:
            self._next_due.announce(microseconds_of(text))
        else:
            self._next_due.forget()

    # --- moves --------------------------------------------------------------------------------------------------

    @override
    async def move_due(self, now: datetime, limit: int, *, listing: bool = False) -> MoveReport:
        look = self._next_due.look()
        call = (self.place, instant(now), limit, int(listing))
        delivered, expired, has_unmoved, first, to, first_due, rows = await self._server.run("move", *call)
        next_attempt, moved = self._seen(look, first or None), _moved(rows, now) if listing else None
        counts = {queue.decode(errors="replace"): count for queue, count in to}
        earliest = _due_of(first_due, now) if first_due else None
        return MoveReport(delivered, expired, bool(has_unmoved), next_attempt, counts, earliest, moved)

    @override
    async def pause(self) -> None:
        """Does nothing: other clients' commands run between any two scripts."""

    # --- the simple contract --------------------------------------------------------------------------------------

    @override
    async def remove(self, message_id: str, now: datetime) -> bool:
        claims, holder = self._claims_by_id(message_id), self._liveness.holder_now
        call = (self.place, int(RecordKind.DELIVERED), instant(now), message_id, holder)
        done = bool(await self._server.run("remove", *call))
        self._forget_claims(claims)
        return done

    @override
    async def increment_failure_count(self, message_id: str, now: datetime) -> bool:
        claims = self._claims_by_id(message_id)
        done = await self._retry(message_id, "", "", now, "")
        self._forget_claims(claims)
        return done

    @override
    async def next_due(self) -> datetime | None:
        first: list[bytes] = await self._server.command("ZRANGE", f"{self.place}:due", 0, 0)
        return instant_of(first[0]) if first else None

    # --- administration -------------------------------------------------------------------------------------------

    @override
    async def cancel(self, message_id: str, now: datetime) -> bool:
        nobody = "-"
        call = (self.place, int(RecordKind.CANCELLED), instant(now), message_id, nobody)
        return bool(await self._server.run("remove", *call))

    @override
    async def reschedule(self, message_id: str, due: datetime, now: datetime, wall_time: str | None = None) -> bool:
        while True:
            row = await self.row(message_id)
            if row is None or row.is_claimed:
                return False
            headers = encode_headers(rescheduled(row.message, due, wall_time).headers)
            call = (self.place, instant(now), message_id, row.member, instant(due), headers)
            if await self._server.run("reschedule", *call):
                self._next_due.announce(to_microseconds(due.astimezone(UTC)))
                return True

    @override
    def observer(self) -> Observer:
        return RedisStoreObserver(self._server, self, self._liveness)

    @property
    @override
    def _unreadable_place(self) -> str:
        return f"s{self.place}"

    # --- the server -----------------------------------------------------------------------------------------------

    @override
    async def server_now(self) -> datetime:
        return await server_now(self._server)

    @override
    async def server_facts(self) -> ServerFacts:
        return await server_facts(self._server)


def _due_of(member: bytes, otherwise: datetime) -> datetime:
    """Return when a message was due; ``otherwise`` where that was damaged by hand, as the message has moved already."""
    try:
        return instant_of(member)
    except (ValueError, OverflowError):
        return otherwise


def _moved(rows: Sequence[Any], now: datetime) -> Moved:
    if not rows:
        return NOTHING_MOVED
    return Moved(
        [row[0].decode(errors="replace") for row in rows],
        [_due_of(row[1], now) for row in rows],
        [row[2].decode(errors="replace") for row in rows],
        [bool(row[3]) for row in rows],
    )

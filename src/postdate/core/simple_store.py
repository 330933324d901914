"""Claims in batches on top of the six methods of a user's store (docs/specification-rows.md, row 26).

These methods cannot store the next attempt of a failed message, so it is kept in memory. Other processes that share
such a store do not know it, and may attempt the message earlier.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import ParamSpec, TypeVar, cast

from typing_extensions import override

from postdate import ports
from postdate.core.health.deadlines import translate_store_errors
from postdate.errors import ConfigurationError, DuplicateMessage, PostdateError
from postdate.messages import DelayedMessage
from postdate.runtime.bounded import Bounded

P = ParamSpec("P")
T = TypeVar("T")

REQUIRED = ("initialize", "store", "fetch_next_due", "remove", "increment_failure_count", "next_due")

MOST_LOCKED = 10_000
"""The most failed messages kept in memory until their next attempt, and the most next attempts remembered.

Above that, due messages that the store would return later wait until some of these are due again.
"""

POLL_AGAIN_AFTER = timedelta(milliseconds=200)
"""The poll interval while the earliest message is claimed here: ``next_due`` does not return the one that follows."""


def claiming_store(store: object) -> ports.ClaimingStore:
    """Return the store if it claims in batches, or a :class:`SimpleStore` of its six methods.

    Raises:
        ConfigurationError: a method is missing or is not async; it is named.
    """
    check_methods(store, REQUIRED, "is not a delayed message store")
    if isinstance(store, ports.ClaimingStore):
        return store
    name = type(store).__name__
    if hasattr(store, "claim_due"):
        raise ConfigurationError(f"{name} claims in batches, so it must say so: class {name}(ClaimingStore)")
    return SimpleStore(cast("ports.DelayedMessageStore", store))


def sharing_store(store: T, store_database: object | None, database: object | None) -> T | None:
    """Return the store if its ``store_database`` database is ``database``, so that a transaction can span both.

    Else ``None``.
    """
    return store if store_database is not None and store_database == database else None


def enlisting_store(store: ports.ClaimingStore, transport: ports.Transport) -> ports.MovingStore | None:
    """Return the store if it and the transport can share a transaction, else ``None``."""
    if not isinstance(store, ports.MovingStore):
        return None
    return sharing_store(store, store.capabilities.database, transport.capabilities.database)


def check_methods(store: object, methods: Sequence[str], problem: str, advice: str = "") -> None:
    """Raise :class:`ConfigurationError` for a method of a user's object that is missing or is not async."""
    name = type(store).__name__
    for method in methods:
        member = getattr(store, method, None)
        if not callable(member):
            raise ConfigurationError(f"{name} {problem}: it has no method {method}(){advice}")
        is_function = inspect.isfunction(member) or inspect.ismethod(member)
        if is_function and not inspect.iscoroutinefunction(inspect.unwrap(member)):
            raise ConfigurationError(f"{name}.{method} must be an async method (async def {method})")


@dataclass(slots=True)
class _LockedMessage:
    """A failed message that the store returned again before its next attempt."""

    message: DelayedMessage
    attempt_at: datetime


class SimpleStore(ports.ClaimingStore):
    """A claiming store on six methods: it claims by fetching, finishes by removing, releases by counting a failure."""

    def __init__(self, store: ports.DelayedMessageStore) -> None:
        self._store = store
        self._claimed: dict[str, object] = {}
        self._locked_until_next_attempt: dict[str, _LockedMessage] = {}
        self._attempts = Bounded[str, datetime](MOST_LOCKED)
        self._tokens = itertools.count(1)
        self._wakes: list[ports.Wake] = []
        self._polled_at: datetime | None = None
        self._announced_due: datetime | None = None
        self._dues_during_query: list[datetime] | None = None

    @property
    @override
    def capabilities(self) -> ports.StoreCapabilities:
        return ports.capabilities_of(self._store)

    @override
    async def setup(self) -> None:
        set_up = getattr(self._store, "setup", None)
        if set_up is not None:
            await self._call(set_up)

    @override
    async def close(self) -> None:
        close_store = getattr(self._store, "close", None)
        with translate_store_errors(self._store):
            result = None if close_store is None else close_store()
            if inspect.isawaitable(result):
                await result

    # --- the six methods ----------------------------------------------------------------------------------------

    @override
    async def initialize(self, endpoint: str, mode: ports.TransactionMode) -> None:
        """Call the store. Its error is not translated, as the error is its answer."""
        await self._store.initialize(endpoint, mode)

    async def _call(self, method: Callable[P, Awaitable[T]], *args: P.args, **more: P.kwargs) -> T:
        with translate_store_errors(self._store):
            return await method(*args, **more)

    @override
    async def store(self, message: DelayedMessage, now: datetime) -> None:
        await self._call(self._store.store, message, now)
        if self._dues_during_query is not None:
            self._dues_during_query.append(message.due)
        elif self._announced_due is None or message.due < self._announced_due:
            self._announced_due = message.due
            for wake in self._wakes:
                wake()

    @override
    async def fetch_next_due(self, now: datetime) -> DelayedMessage | None:
        return await self._call(self._store.fetch_next_due, now)

    @override
    async def remove(self, message_id: str, now: datetime) -> bool:
        return await self._call(self._store.remove, message_id, now)

    @override
    async def increment_failure_count(self, message_id: str, now: datetime) -> bool:
        return await self._call(self._store.increment_failure_count, message_id, now)

    @override
    async def next_due(self) -> datetime | None:
        return await self._call(self._store.next_due)

    # --- claims -------------------------------------------------------------------------------------------------

    @override
    async def store_many(self, messages: Sequence[DelayedMessage], now: datetime) -> ports.StoreReport:
        """Store messages one after the other, without a transaction around them."""
        duplicate_ids: list[str] = []
        for message in messages:
            try:
                await self.store(message, now)
            except DuplicateMessage:
                duplicate_ids.append(message.message_id)
        return ports.StoreReport(len(messages) - len(duplicate_ids), tuple(duplicate_ids))

    @override
    async def claim_due(self, now: datetime, limit: int) -> Sequence[ports.Claim]:
        """Fetch until there are enough messages or no more. After a failed fetch, return those fetched before."""
        self._polled_at = now
        ready = [locked.message for locked in self._locked_until_next_attempt.values() if locked.attempt_at < now][
            :limit
        ]
        for message in ready:
            del self._locked_until_next_attempt[message.message_id]
        try:
            while len(ready) < limit and len(self._locked_until_next_attempt) < MOST_LOCKED:
                message = await self.fetch_next_due(now)
                if message is None:
                    break
                attempt_at = self._attempts.get(message.message_id, message.due)
                if attempt_at < now:
                    ready.append(message)
                else:
                    self._locked_until_next_attempt[message.message_id] = _LockedMessage(message, attempt_at)
        except PostdateError:
            if not ready:
                raise
        except BaseException:  # cancelled: keep the fetched messages for the next poll
            self._locked_until_next_attempt.update({each.message_id: _LockedMessage(each, each.due) for each in ready})
            raise
        ready.sort(key=lambda each: each.due)
        return [self._add_claim(message) for message in ready]

    def is_claimed(self, message_id: str) -> bool:
        """Return whether this process has a claim on a message."""
        return message_id in self._claimed

    def _add_claim(self, message: DelayedMessage) -> ports.Claim:
        token = self._claimed[message.message_id] = next(self._tokens)
        return ports.Claim(message, token)

    def _forget_claim(self, claim: ports.Claim) -> bool:
        """Forget a claim; return whether it was in force."""
        message_id = claim.message.message_id
        if self._claimed.get(message_id) != claim.token:
            return False
        del self._claimed[message_id]
        return True

    @override
    async def finish(
        self, claims: Sequence[ports.Claim], outcome: ports.Outcome, now: datetime, detail: str = ""
    ) -> int:
        """Remove each message, with any outcome: the six methods have no records."""
        finished = 0
        for claim in claims:
            if self._claimed.get(claim.message.message_id) == claim.token:
                finished += await self.remove(claim.message.message_id, now)
                self._forget_claim(claim)
                self._attempts.pop(claim.message.message_id, None)
        return finished

    @override
    async def retry_later(self, claim: ports.Claim, attempt_at: datetime, now: datetime, reason: str) -> bool:
        message_id = claim.message.message_id
        if self._claimed.get(message_id) != claim.token:
            return False
        is_stored = await self.increment_failure_count(message_id, now)
        self._forget_claim(claim)
        self._attempts.pop(message_id, None)
        if is_stored:
            self._attempts[message_id] = attempt_at
        return is_stored

    @override
    async def release(self, claims: Sequence[ports.Claim], attempt_at: datetime | None) -> int:
        """Keep messages in memory until they are claimed again: the store can only release by counting a failure."""
        messages = [claim.message for claim in claims if self._forget_claim(claim)]
        for message in messages:
            self._locked_until_next_attempt[message.message_id] = _LockedMessage(message, attempt_at or message.due)
        return len(messages)

    @override
    async def next_attempt(self) -> datetime | None:
        """Return when to poll again; see :data:`POLL_AGAIN_AFTER`."""
        new_dues = self._dues_during_query = []  # the answer may lack messages that are stored during the call
        try:
            due = await self.next_due()
        finally:
            self._dues_during_query = None
        if due is not None and self._polled_at is not None and due < self._polled_at:
            # That message is claimed here or elsewhere, or was stored just now; the store does not return the one that
            # follows. Poll soon, but not at once, or the poller would spin.
            due = self._polled_at + POLL_AGAIN_AFTER
        times = [locked.attempt_at for locked in self._locked_until_next_attempt.values()]
        self._announced_due = min([*times, *new_dues, *([] if due is None else [due])], default=None)
        return self._announced_due

    @override
    async def listen(self, wake: ports.Wake) -> Callable[[], None]:
        """Register ``wake``. Messages stored by other processes do not call it."""
        self._wakes.append(wake)

        def stop() -> None:
            with suppress(ValueError):
                self._wakes.remove(wake)

        return stop

    async def release_locked(self, now: datetime) -> None:
        """Release messages kept in memory, at the end. This counts a failure: the six methods have no other way."""
        while self._locked_until_next_attempt:
            message_id = next(iter(self._locked_until_next_attempt))
            await self.increment_failure_count(message_id, now)
            del self._locked_until_next_attempt[message_id]

"""The subject through which the suite opens the store under test, and the messages that the suite stores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from postdate import ports
from postdate.messages import DelayedMessage
from postdate.testing.conformance import expect, expect_equal
from postdate.testing.damaged import DamagingSubject, Rows, rows_of

NOW = datetime(2026, 1, 31, 12, 0, 5, 123_456, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)
SECOND = timedelta(seconds=1)
QUEUE = "conformance"
LARGEST_MESSAGE = 16 * 1024 * 1024

P = TypeVar("P", bound=ports.DelayedMessageStore)
R = TypeVar("R")


class StoreSubject(DamagingSubject, ABC):
    """How the suite opens the store under test. Make a new subject, on empty storage, for every check."""

    @abstractmethod
    def open(
        self, *, recording: ports.Recording = ports.Recording.ALL, largest_message_bytes: int = LARGEST_MESSAGE
    ) -> ports.DelayedMessageStore:
        """Return a store object on the storage. After it was closed, the next call opens the same storage again.

        A store without such settings may ignore them: then the checks of its recording and of its limit fail.
        """

    def open_elsewhere(self) -> ports.DelayedMessageStore:
        """Return a store object such as another process would have. Only called for stores that say ``shared``."""
        raise NotImplementedError(f"{type(self).__name__} must define open_elsewhere(): its store says it is shared")

    def transport(self) -> ports.Transport:
        """Return queues in the same database. Only called for stores that name a database."""
        raise NotImplementedError(f"{type(self).__name__} must define transport(): its store names a database")

    def refusals(self, store: ports.DelayedMessageStore) -> Mapping[str, AbstractContextManager[object]]:
        """Return, by name, contexts in which this storage alone refuses writes; empty if there are none."""
        return {}


def open_prepared(subject: StoreSubject, **settings: Any) -> AbstractAsyncContextManager[ports.DelayedMessageStore]:
    """Open a store and prepare it as an endpoint does; close it at the end."""
    return use_store(subject.open(**settings))


@asynccontextmanager
async def use_store(store: P) -> AsyncGenerator[P]:
    """Prepare a store as an endpoint does; close it at the end."""
    try:
        await prepare_store(store)
        yield store
    finally:
        await close_adapter(store)


async def prepare_store(store: ports.DelayedMessageStore) -> None:
    await store.initialize("conformance", ports.TransactionMode.RECEIVE_ONLY)
    setup = getattr(store, "setup", None)
    if setup is not None:
        await setup()


async def close_adapter(store: ports.DelayedMessageStore | ports.Transport) -> None:
    close_call = getattr(store, "close", None)
    if close_call is not None:
        await close_call()


@asynccontextmanager
async def open_claiming(subject: StoreSubject, **settings: Any) -> AsyncGenerator[ports.ClaimingStore]:
    """Open a store that an endpoint can use."""
    async with open_prepared(subject, **settings) as store:
        yield claiming_store_of(store)


def fixture_with_role(
    role: type[R], **settings: Any
) -> Callable[[StoreSubject], AbstractAsyncContextManager[tuple[ports.ClaimingStore, R] | None]]:
    """Return a function that opens a store with a role, for checks of the role."""

    @asynccontextmanager
    async def open_role(subject: StoreSubject) -> AsyncGenerator[tuple[ports.ClaimingStore, R] | None]:
        async with open_claiming(subject, **settings) as store:
            yield (store, store) if isinstance(store, role) else None

    return open_role


open_administrable = fixture_with_role(ports.AdministrableStore)
open_replacing = fixture_with_role(ports.ReplacingStore)
open_scannable = fixture_with_role(ports.ScannableStore)
open_streamable = fixture_with_role(ports.StreamableStore)


@asynccontextmanager
async def open_columnar(
    subject: StoreSubject,
) -> AsyncGenerator[tuple[ports.ClaimingStore, ports.ScannableStore] | None]:
    """Open a store that reads and writes columns."""
    async with open_claiming(subject) as store:
        yield (store, store) if isinstance(store, ports.ScannableStore) and store.has_columns else None


@asynccontextmanager
async def open_with_rows(
    subject: StoreSubject, **settings: Any
) -> AsyncGenerator[tuple[ports.ClaimingStore, Rows] | None]:
    """Open a store that marks unreadable rows."""
    async with open_claiming(subject, **settings) as store:
        rows = rows_of(store, subject.damages())
        yield rows and (store, rows)


@asynccontextmanager
async def open_beside_queues(subject: StoreSubject) -> AsyncGenerator[tuple[ports.MovingStore, ports.Transport] | None]:
    """Open a store that moves messages and shares transactions with its queues; :data:`QUEUE` exists."""
    async with open_claiming(subject) as store:
        if (moving_store := moving_store_of(store)) is None:
            yield None
            return
        transport = subject.transport()
        try:
            await transport.create_queues([QUEUE])
            yield moving_store, transport
        finally:
            await close_adapter(transport)


def claiming_store_of(store: ports.DelayedMessageStore) -> ports.ClaimingStore:
    """Return the store if it works in batches: an endpoint accepts no other store."""
    expect(isinstance(store, ports.ClaimingStore), "the store says that it is a ClaimingStore")
    assert isinstance(store, ports.ClaimingStore)
    return store


async def expect_history(store: object, message_id: str, *kinds: str) -> None:
    """Raise `ConformanceFailure` unless the records of a message have these kinds; only for administrable stores."""
    if isinstance(store, ports.AdministrableStore):
        recorded_kinds = [record.kind.name for record in await store.history(message_id)]
        expect_equal(recorded_kinds, list(kinds), f"history of {message_id}")


def moving_store_of(store: ports.DelayedMessageStore) -> ports.MovingStore | None:
    """Return the store if it can share a transaction with its queues, and moves messages itself."""
    return store if isinstance(store, ports.MovingStore) and store.capabilities.database is not None else None


def message(
    message_id: str = "m-1",
    due: datetime = NOW,
    *,
    destination: str = QUEUE,
    headers: Mapping[str, str] | None = None,
    body: bytes = b"body",
    expires_at: datetime | None = None,
) -> DelayedMessage:
    return DelayedMessage(message_id, due, destination, headers or {"kind": "check"}, body, expires_at)


def ids(claims: Sequence[ports.Claim | DelayedMessage]) -> list[str]:
    return [each.message.message_id if isinstance(each, ports.Claim) else each.message_id for each in claims]


async def claim_one(store: ports.ClaimingStore, now: datetime = NOW + SECOND) -> ports.Claim:
    """Claim the only due message."""
    claims = await store.claim_due(now, 10)
    expect(len(claims) == 1, f"exactly one message can be claimed, got {ids(claims)}")
    return claims[0]


async def store_and_claim_one(store: ports.ClaimingStore) -> ports.Claim:
    """Store a message that is due, and claim it."""
    await store.store(message(), NOW)
    return await claim_one(store)

"""Messages that this process holds: by the row locks of an open transaction, or leased under its number.

A batch is locked by the transaction that claimed it, which stays open: claiming writes nothing, and whatever happens to
the process, the server frees the rows. The first part of the batch that is finished or given back commits that
transaction, and in it the rest is leased: marked with the number under which this process is known to be alive.

**The doubtful commit.** When the answer to a commit is lost, nobody here knows whether it took effect. These rules hold
for every store on row locks:

1. What failed before the commit did nothing: the transaction is rolled back by the server, and the whole batch is free.
2. What was to be settled is held no more, whichever way it went: it is settled, or it is free and is claimed anew.
3. The rest is held as if it were leased: whatever is done to it later names the holder, which takes effect on a lease
   and finds nothing on a free row, or on one that somebody else has claimed.
4. Leases that nobody was given (:meth:`Claims.lease` failed) are remembered as abandoned, and freed as soon as the
   server answers.

What a dialect gives is :class:`LeasingTables`, and :class:`ClaimConnections`. Source: ADR 0007, 0008.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol, TypeVar

from postdate.ports import Claim

T = TypeVar("T")

_ASKED_FOR_SECONDS: Final = 1.0
"""How long a server is asked at least that should have ended the transaction: it may have been as slow as we."""

SettlingStep = Callable[[Any, Sequence[int], int | None], int]
"""Does something to messages, given by ascending numbers, of one holder; returns to how many."""


class LeasingTables(Protocol):
    """What a dialect gives: how messages are held beyond a transaction. Each is a step of one."""

    def lease(self, session: Any, numbers: Sequence[int], holder: int) -> None:
        """Have ``holder`` hold messages that this transaction has locked beyond its end.

        Raises:
            StoreUnavailable: the number is buried. It cannot be buried before this transaction has ended, either.
        """
        ...

    def free(self, session: Any, holders: Sequence[int], numbers: Sequence[int] | None = None) -> int:
        """Give back what the holders hold, or those of ``numbers``; may be attempted at their due times."""
        ...


class ClaimConnections(Protocol):
    """Where the connections of batches come from and go to; see :class:`postdate.backends.rowlocks.pool.Pool`."""

    def put(self, session: Any, /) -> None:
        """Take a connection back that is in no transaction."""
        ...

    def drop(self, session: Any, /) -> None:
        """Close a connection, with whatever transaction it is in; asks the server nothing. Never raises."""
        ...

    def end(self, session: Any, /) -> None:
        """Roll back the transaction of a connection and close it, whether the server answers or not. Never raises."""
        ...

    def transaction_blocking(self, work: Callable[[Any], T], /) -> T:
        """Do ``work`` on another connection, so that all of it is done or nothing."""
        ...


class LockedBatch:
    """Messages locked by one open transaction, until a part of them is settled."""

    def __init__(self, session: Any, rows: Iterable[tuple[int, Any]]) -> None:
        self.session: Any | None = session
        self.tokens = [HeldMessage(number, attempt_at, self) for number, attempt_at in rows]
        self.lock = threading.Lock()
        self.heard_at = time.monotonic()


class HeldMessage:
    """What holds one message: the row lock of its batch, or a lease under the number of this process."""

    __slots__ = ("attempt_at", "batch", "holder", "number")

    def __init__(self, number: int, attempt_at: Any, batch: LockedBatch) -> None:
        self.number, self.attempt_at, self.batch = number, attempt_at, batch
        self.holder: int | None = None


class Claims:
    """Everything that this process holds of one store. Thread-safe.

    Args:
        pool: where connections come from and go to.
        tables: of the store.
        holder: returns the number under which this process is alive; blocking.
        left_out: returns the numbers of what is not to be claimed for now, without being held.
    """

    def __init__(
        self,
        pool: ClaimConnections,
        tables: LeasingTables,
        holder: Callable[[], int],
        left_out: Callable[[], Collection[int]] = frozenset,
    ) -> None:
        self._pool, self._tables, self._holder, self._left_out = pool, tables, holder, left_out
        self._held: dict[int, HeldMessage] = {}
        self._abandoned: dict[int, int] = {}
        self._lock = threading.Lock()

    def hold(self, session: Any, rows: Sequence[tuple[int, Any]]) -> Sequence[HeldMessage]:
        """Hold what the open transaction of ``session`` has locked, given by number and when it may be attempted."""
        batch = LockedBatch(session, rows)
        with self._lock:
            self._held.update((token.number, token) for token in batch.tokens)
            for token in batch.tokens:  # it was free, so it is not what was abandoned any more
                self._abandoned.pop(token.number, None)
        return batch.tokens

    def locked(self) -> list[int]:
        """Return the numbers that are held by row locks, and those that are left out: what not to be woken for."""
        with self._lock:
            held = [token.number for token in self._held.values() if token.holder is None]
        return [*held, *self._left_out()]

    def holders(self) -> set[int]:
        """Return the numbers of this process under which something is leased."""
        with self._lock:
            return {token.holder for token in self._held.values() if token.holder is not None}

    def holds(self, claim: Claim) -> bool:
        """Return whether a claim is in force: it ends also when another part of its batch cannot be settled."""
        token = claim.token
        return isinstance(token, HeldMessage) and self._held.get(token.number) is token

    def held(self, claims: Iterable[Claim]) -> Sequence[HeldMessage]:
        """Return what holds those of ``claims`` that are held still."""
        return [token for _, tokens in self._by_batch(claims) for token in tokens]

    def settle(self, claims: Sequence[Claim], step: SettlingStep, *, as_it_was: bool = False) -> int:
        """Do ``step`` to those of ``claims`` that are held still, which ends them; return the sum of its results.

        Args:
            claims: of this store; those that ended are left out.
            step: see :data:`SettlingStep`.
            as_it_was: the messages do not change, so a whole batch needs no step: it is free with its transaction.
        """
        return sum(self._settle(batch, tokens, step, as_it_was=as_it_was) for batch, tokens in self._by_batch(claims))

    def lease(self, tokens: Sequence[HeldMessage]) -> None:
        """Turn whole batches into leases: a lock would keep a connection busy."""
        try:
            for batch in {token.batch for token in tokens}:
                self._settle(batch, [], lambda _session, _numbers, _holder: 0, as_it_was=False)
        except BaseException:  # nobody gets these messages, so nobody will give them back
            self._abandon(tokens)
            raise

    def _abandon(self, tokens: Sequence[HeldMessage]) -> None:
        with self._lock:
            for token in tokens:
                if self._held.get(token.number) is token and token.holder is not None:
                    del self._held[token.number]
                    self._abandoned[token.number] = token.holder

    def abandoned(self) -> Mapping[int, list[int]]:
        """Return by holder the numbers of what may be leased and is nobody's: to be freed as soon as possible."""
        found = dict[int, list[int]]()
        with self._lock:
            for number, holder in sorted(self._abandoned.items()):
                found.setdefault(holder, []).append(number)
        return found

    def freed(self, numbers: Sequence[int]) -> None:
        """Note that what was abandoned is free."""
        with self._lock:
            for number in numbers:
                self._abandoned.pop(number, None)

    def silent(self, after_seconds: float) -> Sequence[LockedBatch]:
        """Return the batches on whose connections nothing was said for so long."""
        with self._lock:
            batches = {token.batch for token in self._held.values()}
        return [each for each in batches if each.session and time.monotonic() - each.heard_at >= after_seconds]

    def keep(self, batches: Iterable[LockedBatch], ends_after_seconds: float) -> int:
        """Say something on each connection that holds one of these batches, so that it stays; blocking.

        The server ends the transaction of a process that falls silent: a frozen one must not hold messages for ever. It
        has as long to answer as to anything else: while it stands still it ends nothing, and what is given up here
        is sent twice.

        Args:
            batches: of :meth:`silent`.
            ends_after_seconds: after so long a silence the server ends the transaction, and an answer need not be
                waited for.

        Returns:
            How many messages are found to be held no more, because their connection is gone.
        """
        return sum(self._keep(batch, ends_after_seconds) for batch in batches)

    def _keep(self, batch: LockedBatch, ends_after_seconds: float) -> int:
        if not batch.lock.acquire(blocking=False):  # it is being settled just now
            return 0
        try:
            left = ends_after_seconds - (time.monotonic() - batch.heard_at)
            if batch.session is None or batch.session.is_alive(max(left, _ASKED_FOR_SECONDS)):
                batch.heard_at = time.monotonic()
                return 0
            self._pool.drop(batch.session)
            self._unlocked(batch, batch.tokens, None)
            return len(batch.tokens)
        finally:
            batch.lock.release()

    def forget(self, number: int) -> None:
        """Note that a message is not held any more, whatever it was held by."""
        with self._lock:
            self._held.pop(number, None)

    def _by_batch(self, claims: Iterable[Claim]) -> list[tuple[LockedBatch, list[HeldMessage]]]:
        batches: dict[LockedBatch, list[HeldMessage]] = {}
        with self._lock:
            for claim in claims:
                token = claim.token
                if isinstance(token, HeldMessage) and self._held.get(token.number) is token:
                    batches.setdefault(token.batch, []).append(token)
        return list(batches.items())

    def _settle(self, batch: LockedBatch, tokens: Sequence[HeldMessage], step: SettlingStep, *, as_it_was: bool) -> int:
        with batch.lock:
            if batch.session is None:
                return self._settle_leased(tokens, step)
            if as_it_was and len(tokens) == len(batch.tokens):
                return self._give_back(batch, batch.session)
            return self._settle_locked(batch, batch.session, tokens, step)

    def _give_back(self, batch: LockedBatch, session: Any) -> int:
        self._unlocked(batch, batch.tokens, None)
        try:
            session.rollback()
        except BaseException:
            self._pool.drop(session)
            raise
        self._pool.put(session)
        return len(batch.tokens)

    def _settle_locked(
        self, batch: LockedBatch, session: Any, tokens: Sequence[HeldMessage], step: SettlingStep
    ) -> int:
        settled = {token.number for token in tokens}
        rest = [token for token in batch.tokens if token.number not in settled]
        holder, is_in_doubt = None, False
        try:
            done = step(session, sorted(settled), None) if tokens else 0
            if rest:
                holder = self._holder()
                self._tables.lease(session, sorted(token.number for token in rest), holder)
            is_in_doubt = True
            session.commit()
        except BaseException:  # the locks are gone with the transaction, or go now
            self._unlocked(batch, tokens if is_in_doubt else batch.tokens, holder)
            self._pool.drop(session)
            raise
        self._unlocked(batch, tokens, holder)
        self._pool.put(session)
        return done

    def _unlocked(self, batch: LockedBatch, gone: Iterable[HeldMessage], holder: int | None) -> None:
        """Note that the transaction of a batch has ended: some are held no more, the rest is leased."""
        batch.session = None
        self._forget(gone)
        for token in batch.tokens:
            token.holder = holder

    def _settle_leased(self, tokens: Sequence[HeldMessage], step: SettlingStep) -> int:
        with self._lock:
            held = [token for token in tokens if self._held.get(token.number) is token]
        done = 0
        for holder in {token.holder for token in held}:
            numbers = sorted(token.number for token in held if token.holder == holder)
            done += self._pool.transaction_blocking(lambda session, n=numbers, h=holder: step(session, n, h))
            self._forget(token for token in held if token.holder == holder)
        return done

    def _forget(self, tokens: Iterable[HeldMessage]) -> None:
        with self._lock:
            for token in tokens:
                if self._held.get(token.number) is token:
                    del self._held[token.number]

    def give_up(self) -> None:
        """Give back everything that is held, and free what is abandoned."""
        with self._lock:
            held, self._held = list(self._held.values()), {}
            leased, self._abandoned = self._abandoned, {}
        for batch in {token.batch for token in held}:
            with batch.lock:
                session, batch.session = batch.session, None
            if session is not None:
                self._pool.end(session)  # one that just ends keeps its locks for another moment
        leased |= {token.number: token.holder for token in held if token.holder is not None}
        if leased:
            holders, numbers = sorted(set(leased.values())), sorted(leased)
            self._pool.transaction_blocking(lambda session: self._tables.free(session, holders, numbers))

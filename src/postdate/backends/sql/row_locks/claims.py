"""The messages that this process holds: by row locks of an open transaction, or leased under its number.

A batch is locked by the transaction that claimed it, which stays open: claiming writes nothing, and the server frees
the rows whatever happens to the process. The first part of the batch that is finished or released commits that
transaction, which also leases the rest: marks it with the number under which this process is known to live.

**The doubtful commit.** When the answer to a commit is lost, its outcome is unknown here. These rules hold for every
store on row locks:

1. What failed before the commit did nothing: the server rolls the transaction back, and the whole batch is free.
2. Messages to be settled are no longer held, whichever way it went: they are settled, or free and claimed anew.
3. The rest is treated as leased: every later step names the holder, so it changes a leased row, and leaves alone one
   that is free or claimed by another process.
4. Leases that no caller received (:meth:`Claims.lease` failed) are remembered as abandoned, and freed as soon as the
   server answers.

A dialect gives :class:`LeasingTables` and :class:`ClaimConnections`. Source: ADR 0007, 0008.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol, TypeVar

from typing_extensions import override

from postdate.clock import steady_seconds
from postdate.ports import Claim
from postdate.runtime import forks

T = TypeVar("T")

_ASKED_FOR_SECONDS: Final = 1.0
"""At least so long for an answer, even if the server should have ended the transaction: it may be as slow as we."""

SettlingStep = Callable[[Any, Sequence[int], int | None], int]
"""``(session, ascending numbers, holder)``: changes those messages of the holder; returns how many."""


class LeasingTables(Protocol):
    """Steps of a dialect by which messages are held beyond a transaction; each runs in one."""

    def lease(self, session: Any, numbers: Sequence[int], holder: int) -> None:
        """Let ``holder`` keep messages locked by this transaction beyond its end.

        Raises `StoreUnavailable` if the holder was buried, which it cannot be while this transaction lasts.
        """
        ...

    def free(self, session: Any, holders: Sequence[int], numbers: Sequence[int] | None = None) -> int:
        """Free all messages of the holders, or those of ``numbers``; their next attempt is at their due times."""
        ...


class ClaimConnections(Protocol):
    """Lends the connections of batches; see :class:`postdate.backends.sql.row_locks.pool.Pool`."""

    def put(self, session: Any, /) -> None: ...

    def drop(self, session: Any, /) -> None:
        """Close a connection with its transaction, without asking the server. Never raises."""
        ...

    def end(self, session: Any, /) -> None:
        """Roll back and close a connection; a silent server does not keep it from being closed. Never raises."""
        ...

    def transaction_blocking(self, work: Callable[[Any], T], /) -> T:
        """Run ``work`` on another connection, all of it or nothing."""
        ...


class LockedBatch:
    """Messages locked by one open transaction, until a part of them is settled."""

    def __init__(self, session: Any, rows: Iterable[tuple[int, Any]]) -> None:
        self.session: Any | None = session
        self.tokens = [HeldMessage(number, attempt_at, self) for number, attempt_at in rows]
        self.lock = forks.lock()
        self.answered_at = steady_seconds()


class HeldMessage:
    """The token of a claim: locked with its batch, or, with a ``holder``, leased under that number of this process."""

    __slots__ = ("attempt_at", "batch", "holder", "number")

    def __init__(self, number: int, attempt_at: Any, batch: LockedBatch) -> None:
        self.number, self.attempt_at, self.batch = number, attempt_at, batch
        self.holder: int | None = None


class Claims(forks.ForkAware):
    """All messages of one store that this process holds. Thread-safe.

    Args:
        pool: lends connections.
        tables: of the store.
        holder: returns the number under which this process lives; blocking.
    """

    def __init__(self, pool: ClaimConnections, tables: LeasingTables, holder: Callable[[], int]) -> None:
        self._pool, self._tables, self._holder = pool, tables, holder
        self._tokens: dict[int, HeldMessage] = {}
        self._abandoned: dict[int, int] = {}
        self._lock = forks.lock()
        forks.register(self)

    @override
    def after_fork_in_child(self) -> None:
        """Hold nothing: what the parent holds must neither be settled nor given back here."""
        forks.keep_for_ever(self._tokens)
        self._tokens, self._abandoned = {}, {}

    def hold(self, session: Any, rows: Sequence[tuple[int, Any]]) -> Sequence[HeldMessage]:
        """Hold the messages that the open transaction of ``session`` has locked; rows: number, next attempt."""
        batch = LockedBatch(session, rows)
        with self._lock:
            self._tokens.update((token.number, token) for token in batch.tokens)
            for token in batch.tokens:  # it was free, so it is not what was abandoned any more
                self._abandoned.pop(token.number, None)
        return batch.tokens

    def locked(self) -> list[int]:
        """Return the numbers to leave out of a look for the next attempt, as they are locked here."""
        with self._lock:
            return [token.number for token in self._tokens.values() if token.holder is None]

    def holders(self) -> set[int]:
        """Return the numbers of this process under which messages are leased."""
        with self._lock:
            return {token.holder for token in self._tokens.values() if token.holder is not None}

    def holds(self, claim: Claim) -> bool:
        """Return whether a claim is in force: it also ends when another part of its batch cannot be settled."""
        token = claim.token
        return isinstance(token, HeldMessage) and self._tokens.get(token.number) is token

    def tokens_of(self, claims: Iterable[Claim]) -> Sequence[HeldMessage]:
        """Return the tokens of the claims still in force."""
        return [token for _, tokens in self._by_batch(claims) for token in tokens]

    def settle(self, claims: Sequence[Claim], step: SettlingStep, *, as_it_was: bool = False) -> int:
        """Run ``step`` on the claims still in force, which ends them; return the sum of its results.

        ``as_it_was``: the messages do not change, so a whole batch needs no step: its transaction is rolled back.
        """
        return sum(self._settle(batch, tokens, step, as_it_was=as_it_was) for batch, tokens in self._by_batch(claims))

    def lease(self, tokens: Sequence[HeldMessage]) -> None:
        """Turn whole batches into leases, as a lock keeps a connection busy."""
        try:
            for batch in {token.batch for token in tokens}:
                self._settle(batch, [], lambda _session, _numbers, _holder: 0, as_it_was=False)
        except BaseException:  # nobody gets these messages, so nobody will give them back
            self._abandon(tokens)
            raise

    def _abandon(self, tokens: Sequence[HeldMessage]) -> None:
        with self._lock:
            for token in tokens:
                if self._tokens.get(token.number) is token and token.holder is not None:
                    del self._tokens[token.number]
                    self._abandoned[token.number] = token.holder

    def abandoned(self) -> Mapping[int, list[int]]:
        """Return by holder the numbers of leases that no caller received, to be freed as soon as possible."""
        numbers = dict[int, list[int]]()
        with self._lock:
            for number, holder in sorted(self._abandoned.items()):
                numbers.setdefault(holder, []).append(number)
        return numbers

    def freed(self, numbers: Sequence[int]) -> None:
        with self._lock:
            for number in numbers:
                self._abandoned.pop(number, None)

    def silent(self, after_seconds: float) -> Sequence[LockedBatch]:
        """Return the batches whose connections have sent nothing for so long."""
        with self._lock:
            batches = {token.batch for token in self._tokens.values()}
        return [each for each in batches if each.session and steady_seconds() - each.answered_at >= after_seconds]

    def keep(self, batches: Iterable[LockedBatch], ends_after_seconds: float) -> int:
        """Ping each connection that holds one of these batches, so that the server keeps its transaction; blocking.

        The server ends the transaction of a silent process: a frozen one must not hold messages for ever. It gets much
        time to answer, as a frozen server ends nothing, and messages given up here are sent twice.

        Args:
            batches: of :meth:`silent`.
            ends_after_seconds: the silence after which the server ends a transaction, so an answer is not waited for.

        Returns:
            How many messages are no longer held, because their connection is lost.
        """
        return sum(self._keep(batch, ends_after_seconds) for batch in batches)

    def _keep(self, batch: LockedBatch, ends_after_seconds: float) -> int:
        if not batch.lock.acquire(blocking=False):  # it is being settled just now
            return 0
        try:
            seconds = ends_after_seconds - (steady_seconds() - batch.answered_at)
            if batch.session is None or batch.session.is_alive(max(seconds, _ASKED_FOR_SECONDS)):
                batch.answered_at = steady_seconds()
                return 0
            self._pool.drop(batch.session)
            self._unlocked(batch, batch.tokens, None)
            return len(batch.tokens)
        finally:
            batch.lock.release()

    def forget(self, number: int) -> None:
        with self._lock:
            self._tokens.pop(number, None)

    def _by_batch(self, claims: Iterable[Claim]) -> list[tuple[LockedBatch, list[HeldMessage]]]:
        batches: dict[LockedBatch, list[HeldMessage]] = {}
        with self._lock:
            for claim in claims:
                token = claim.token
                if isinstance(token, HeldMessage) and self._tokens.get(token.number) is token:
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
        unsettled = [token for token in batch.tokens if token.number not in settled]
        holder, is_in_doubt = None, False
        try:
            done = step(session, sorted(settled), None) if tokens else 0
            if unsettled:
                holder = self._holder()
                self._tables.lease(session, sorted(token.number for token in unsettled), holder)
            is_in_doubt = True
            session.commit()
        except BaseException:  # the locks are gone with the transaction, or go now
            self._unlocked(batch, tokens if is_in_doubt else batch.tokens, holder)
            self._pool.drop(session)
            raise
        self._unlocked(batch, tokens, holder)
        self._pool.put(session)
        return done

    def _unlocked(self, batch: LockedBatch, settled: Iterable[HeldMessage], holder: int | None) -> None:
        """The transaction of a batch has ended: the messages of ``settled`` are no longer held, the rest is leased."""
        batch.session = None
        self._forget(settled)
        for token in batch.tokens:
            token.holder = holder

    def _settle_leased(self, tokens: Sequence[HeldMessage], step: SettlingStep) -> int:
        with self._lock:
            claimed = [token for token in tokens if self._tokens.get(token.number) is token]
        done = 0
        for holder in {token.holder for token in claimed}:
            numbers = sorted(token.number for token in claimed if token.holder == holder)
            done += self._pool.transaction_blocking(lambda session, n=numbers, h=holder: step(session, n, h))
            self._forget(token for token in claimed if token.holder == holder)
        return done

    def _forget(self, tokens: Iterable[HeldMessage]) -> None:
        with self._lock:
            for token in tokens:
                if self._tokens.get(token.number) is token:
                    del self._tokens[token.number]

    def give_up(self) -> None:
        """Release all messages, abandoned ones included."""
        with self._lock:
            tokens, self._tokens = list(self._tokens.values()), {}
            leased, self._abandoned = self._abandoned, {}
        for batch in {token.batch for token in tokens}:
            with batch.lock:
                session, batch.session = batch.session, None
            if session is not None:
                self._pool.end(session)  # one that just ends keeps its locks for another moment
        leased |= {token.number: token.holder for token in tokens if token.holder is not None}
        if leased:
            holders, numbers = sorted(set(leased.values())), sorted(leased)
            self._pool.transaction_blocking(lambda session: self._tables.free(session, holders, numbers))

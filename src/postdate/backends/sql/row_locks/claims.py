"""The claims of this process: row locks of an open transaction, or leases under its number.

A batch is locked by the transaction that claimed it, and this transaction stays open. So claiming writes nothing, and
the server unlocks the rows whatever happens to the process. When a first part of the batch is finished or released, the
transaction is committed. It also leases the other messages: it marks them with the number of this process.

**The doubtful commit.** If the answer to a commit is lost, its outcome is unknown here. These rules hold for each store
on row locks:

1. A failure before the commit has no effect: the server rolls the transaction back, and the whole batch is free.
2. Claims of messages to be settled end in both cases: the messages are settled, or free and claimed again.
3. The other messages count as leased. Each later step names the holder. So it changes a leased row, and does not change
   a row that is free or claimed by another process.
4. Leases that no caller received (:meth:`Claims.lease` failed) are remembered as abandoned, and released as soon as the
   server answers.

A dialect provides :class:`LeasingTables` and :class:`ClaimConnections`. Source: ADR 0007, 0008.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol, TypeVar

from typing_extensions import override

from postdate.clock import steady_seconds
from postdate.ports import Claim
from postdate.runtime import forks

T = TypeVar("T")

_MIN_ANSWER_SECONDS: Final = 1.0
"""The shortest wait for an answer, even if the server should have ended the transaction: it may be slow, too."""

_NUMBER_OF_NO_MESSAGE: Final = 0
"""Numbers of messages begin at 1."""

SettlingStep = Callable[[Any, Sequence[int], int | None], int]
"""``(session, ascending numbers, holder)``: changes those messages that the holder has; returns how many."""


class LeasingTables(Protocol):
    """Steps of a dialect for claims that outlive their transaction. Each step runs in a transaction."""

    def lease(self, session: Any, numbers: Sequence[int], holder: int) -> None:
        """Lease messages that are locked by this transaction to ``holder``, so that the claims outlive it.

        Raises `StoreUnavailable` if the number of the holder was deleted. It cannot be deleted during this transaction.
        """
        ...

    def release_leases(self, session: Any, holders: Sequence[int], numbers: Sequence[int] | None = None) -> int:
        """Release all messages of the holders, or those in ``numbers``. Their next attempt is at their due times."""
        ...


class ClaimConnections(Protocol):
    """Lends the connections of batches; see :class:`postdate.backends.sql.row_locks.pool.Pool`."""

    def release(self, session: Any, /) -> None: ...

    def close_connection(self, session: Any, /) -> None:
        """Close a connection with its transaction, without a statement to the server. Never raises."""
        ...

    def roll_back_and_close(self, session: Any, /) -> None:
        """Roll back and close a connection, also if the server is silent. Never raises."""
        ...

    def transaction_blocking(self, work: Callable[[Any], T], /) -> T:
        """Run ``work`` in a transaction on another connection."""
        ...


class LockedBatch:
    """Messages locked by one open transaction, until a part of them is settled.

    ``session`` is ``None`` after that. ``answered_at``: monotonic seconds of the last answer on its connection.
    """

    def __init__(self, session: Any, rows: Iterable[tuple[int, Any]]) -> None:
        self.session: Any | None = session
        self.tokens = [ClaimToken(number, attempt_at, self) for number, attempt_at in rows]
        self.lock = forks.lock()
        self.answered_at = steady_seconds()


class ClaimToken:
    """The token of a claim: locked with its batch; or, with a ``holder``, leased under that number of this process."""

    __slots__ = ("attempt_at", "batch", "holder", "number")

    def __init__(self, number: int, attempt_at: Any, batch: LockedBatch) -> None:
        self.number, self.attempt_at, self.batch = number, attempt_at, batch
        self.holder: int | None = None


class Claims(forks.ForkAware):
    """All claims of this process in one store. Thread-safe.

    Args:
        pool: lends connections.
        tables: of the store.
        holder: returns the number of this process; blocking.
    """

    def __init__(self, pool: ClaimConnections, tables: LeasingTables, holder: Callable[[], int]) -> None:
        self._pool, self._tables, self._holder = pool, tables, holder
        self._tokens: dict[int, ClaimToken] = {}
        self._abandoned: dict[int, int] = {}
        self._lock = forks.lock()
        forks.register(self)

    @override
    def after_fork_in_child(self) -> None:
        """Forget all claims: they belong to the parent, and must be neither settled nor released here."""
        forks.prevent_destruction(self._tokens)
        self._tokens, self._abandoned = {}, {}

    def remember_batch(self, session: Any, rows: Sequence[tuple[int, Any]]) -> Sequence[ClaimToken]:
        """Remember the claims that the open transaction of ``session`` has locked; rows: number, next attempt."""
        batch = LockedBatch(session, rows)
        with self._lock:
            self._tokens.update((token.number, token) for token in batch.tokens)
            for token in batch.tokens:  # it could be claimed, so its abandoned lease has ended
                self._abandoned.pop(token.number, None)
        return batch.tokens

    def locked_numbers(self) -> list[int]:
        """Return the numbers that a query for the next attempt leaves out, as they are locked here."""
        with self._lock:
            return [token.number for token in self._tokens.values() if token.holder is None]

    def holders(self) -> set[int]:
        """Return the numbers of this process under which messages are leased."""
        with self._lock:
            return {token.holder for token in self._tokens.values() if token.holder is not None}

    def has_claim(self, claim: Claim) -> bool:
        """Return whether a claim is in force. It also ends if another part of its batch cannot be settled."""
        token = claim.token
        return isinstance(token, ClaimToken) and self._tokens.get(token.number) is token

    def tokens_of(self, claims: Iterable[Claim]) -> Sequence[ClaimToken]:
        """Return the tokens of the claims still in force."""
        return [token for _, tokens in self._group_by_batch(claims) for token in tokens]

    def settle(self, claims: Sequence[Claim], step: SettlingStep, *, is_unchanged: bool = False) -> int:
        """Run ``step`` on the claims that are in force, which ends them; return the sum of its results.

        ``is_unchanged``: the messages do not change. Then the transaction of a whole batch is rolled back, without a
        step.

        If no claim is in force, the step runs on no message: callers take a return for a sign that the server answers
        and accepts such a step, and after a failed step the claims of its batch are gone.
        """
        batches = self._group_by_batch(claims)
        if not batches:
            self._pool.transaction_blocking(lambda session: step(session, [_NUMBER_OF_NO_MESSAGE], None))
            return 0
        return sum(self._settle(batch, tokens, step, is_unchanged=is_unchanged) for batch, tokens in batches)

    def lease(self, tokens: Sequence[ClaimToken]) -> None:
        """Turn whole batches into leases, as a row lock occupies a connection."""
        try:
            for batch in {token.batch for token in tokens}:
                self._settle(batch, [], lambda _session, _numbers, _holder: 0, is_unchanged=False)
        except BaseException:  # no caller gets these claims, so no caller will release them
            self._abandon(tokens)
            raise

    def _abandon(self, tokens: Sequence[ClaimToken]) -> None:
        with self._lock:
            for token in tokens:
                if self._tokens.get(token.number) is token and token.holder is not None:
                    del self._tokens[token.number]
                    self._abandoned[token.number] = token.holder

    def abandoned_leases(self) -> Mapping[int, list[int]]:
        """Return, by holder, the numbers of leases that no caller received. They are to be released soon."""
        numbers = dict[int, list[int]]()
        with self._lock:
            for number, holder in sorted(self._abandoned.items()):
                numbers.setdefault(holder, []).append(number)
        return numbers

    def forget_abandoned(self, numbers: Sequence[int]) -> None:
        with self._lock:
            for number in numbers:
                self._abandoned.pop(number, None)

    def silent_batches(self, after_seconds: float) -> Sequence[LockedBatch]:
        """Return the batches without an answer on their connection for ``after_seconds``."""
        with self._lock:
            batches = {token.batch for token in self._tokens.values()}
        return [each for each in batches if each.session and steady_seconds() - each.answered_at >= after_seconds]

    def ping_batches(self, batches: Iterable[LockedBatch], ends_after_seconds: float) -> int:
        """Ping the connections of these batches, so that the server keeps their transactions; blocking.

        The server ends the transaction of a silent process, as a frozen process must not keep messages for ever. The
        server has much time to answer: a frozen server ends no transaction, and messages whose claims are given up
        here would be sent twice.

        Args:
            batches: of :meth:`silent_batches`.
            ends_after_seconds: the silence after which the server ends a transaction. After it no answer is waited for.

        Returns:
            The number of lost claims, whose connection is lost.
        """
        return sum(self._ping_batch(batch, ends_after_seconds) for batch in batches)

    def _ping_batch(self, batch: LockedBatch, ends_after_seconds: float) -> int:
        if not batch.lock.acquire(blocking=False):  # the batch is being settled, which uses the connection anyway
            return 0
        try:
            seconds = ends_after_seconds - (steady_seconds() - batch.answered_at)
            if batch.session is None or batch.session.is_alive(max(seconds, _MIN_ANSWER_SECONDS)):
                batch.answered_at = steady_seconds()
                return 0
            self._pool.close_connection(batch.session)
            self._remember_unlock(batch, batch.tokens, None)
            return len(batch.tokens)
        finally:
            batch.lock.release()

    def forget(self, number: int) -> None:
        with self._lock:
            self._tokens.pop(number, None)

    def _group_by_batch(self, claims: Iterable[Claim]) -> list[tuple[LockedBatch, list[ClaimToken]]]:
        batches: dict[LockedBatch, list[ClaimToken]] = {}
        with self._lock:
            for claim in claims:
                token = claim.token
                if isinstance(token, ClaimToken) and self._tokens.get(token.number) is token:
                    batches.setdefault(token.batch, []).append(token)
        return list(batches.items())

    def _settle(
        self, batch: LockedBatch, tokens: Sequence[ClaimToken], step: SettlingStep, *, is_unchanged: bool
    ) -> int:
        with batch.lock:
            if batch.session is None:
                return self._settle_leased(tokens, step)
            if is_unchanged and len(tokens) == len(batch.tokens):
                return self._roll_back_batch(batch, batch.session)
            return self._settle_locked(batch, batch.session, tokens, step)

    def _roll_back_batch(self, batch: LockedBatch, session: Any) -> int:
        self._remember_unlock(batch, batch.tokens, None)
        try:
            session.rollback()
        except BaseException:
            self._pool.close_connection(session)
            raise
        self._pool.release(session)
        return len(batch.tokens)

    def _settle_locked(self, batch: LockedBatch, session: Any, tokens: Sequence[ClaimToken], step: SettlingStep) -> int:
        settled = {token.number for token in tokens}
        unsettled = [token for token in batch.tokens if token.number not in settled]
        new_holder, is_in_doubt = None, False
        try:
            changed_count = step(session, sorted(settled), None) if tokens else 0
            if unsettled:
                new_holder = self._holder()
                self._tables.lease(session, sorted(token.number for token in unsettled), new_holder)
            is_in_doubt = True
            session.commit()
        except BaseException:  # the transaction has ended, or ends with `drop`, and with it the locks
            self._remember_unlock(batch, tokens if is_in_doubt else batch.tokens, new_holder)
            self._pool.close_connection(session)
            raise
        self._remember_unlock(batch, tokens, new_holder)
        self._pool.release(session)
        return changed_count

    def _remember_unlock(self, batch: LockedBatch, settled: Iterable[ClaimToken], holder: int | None) -> None:
        """Remember that the transaction of a batch has ended: claims in ``settled`` end, and the others are leases."""
        batch.session = None
        self._forget(settled)
        for token in batch.tokens:
            token.holder = holder

    def _settle_leased(self, tokens: Sequence[ClaimToken], step: SettlingStep) -> int:
        """Run the step on claims whose batch transaction has ended.

        They are leases: the row of each has the number in its token's ``holder``, and no row lock holds it.
        """
        with self._lock:
            claimed = [token for token in tokens if self._tokens.get(token.number) is token]
        changed_count = 0
        for holder in {token.holder for token in claimed}:
            numbers = sorted(token.number for token in claimed if token.holder == holder)
            changed_count += self._pool.transaction_blocking(lambda session, n=numbers, h=holder: step(session, n, h))
            self._forget(token for token in claimed if token.holder == holder)
        return changed_count

    def _forget(self, tokens: Iterable[ClaimToken]) -> None:
        with self._lock:
            for token in tokens:
                if self._tokens.get(token.number) is token:
                    del self._tokens[token.number]

    def release_all(self) -> None:
        """Release all claims, including abandoned leases."""
        with self._lock:
            tokens, self._tokens = list(self._tokens.values()), {}
            leased, self._abandoned = self._abandoned, {}
        for batch in {token.batch for token in tokens}:
            with batch.lock:
                session, batch.session = batch.session, None
            if session is not None:
                # With a rollback: if only closed, it keeps its locks for a moment.
                self._pool.roll_back_and_close(session)
        leased |= {token.number: token.holder for token in tokens if token.holder is not None}
        if leased:
            holders, numbers = sorted(set(leased.values())), sorted(leased)
            self._pool.transaction_blocking(lambda session: self._tables.release_leases(session, holders, numbers))

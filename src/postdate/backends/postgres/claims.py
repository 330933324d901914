"""What one process holds of a store: batches locked by open transactions, and leases of what was left of a batch.

A batch is locked by the transaction that read it, on a connection of its own; finishing the whole batch at once costs
nothing besides. When only a part is finished, the transaction has to end, and the rest is leased in the same
transaction: marked with the number under which this process is known to be alive. Source: ADR 0007.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from functools import partial
from typing import Any

from postdate.backends.postgres.access import Access, Connection
from postdate.backends.postgres.answering import BoundedConnection
from postdate.backends.postgres.names import array
from postdate.backends.postgres.statements import Statements
from postdate.errors import PostdateError
from postdate.ports import Claim

Step = Callable[[Connection, Sequence[int], int | None], int]
"""Does something to messages, given by number, that are held under a holder's number (``None``: locked by the
connection itself); returns how many it found."""


class OpenBatch:
    """Messages locked by one open transaction, until a part of them is finished."""

    def __init__(self, connection: BoundedConnection) -> None:
        self.connection: BoundedConnection | None = connection
        self.tokens: list[Token] = []
        self.lock = threading.Lock()


class Token:
    """What holds one message: the row lock of its batch, or a lease under the number of this process."""

    __slots__ = ("attempt_at", "batch", "holder", "number")

    def __init__(self, number: int, attempt_at: datetime, batch: OpenBatch) -> None:
        self.number, self.attempt_at, self.batch = number, attempt_at, batch
        self.holder: int | None = None


class PostgresClaims:
    """Everything that one store object holds. Thread-safe; every method that talks to the database blocks."""

    def __init__(self, database: Access) -> None:
        self._database = database
        self._held: dict[int, Token] = {}
        self._finished: list[Token] = []
        self._lock = threading.Lock()
        self.left_some = False
        """Whether messages may be leased that nobody here will end: until the process does, or has another number."""

    def add(self, connection: BoundedConnection, rows: Sequence[tuple[int, datetime]]) -> list[Token]:
        """Take over a connection in a transaction that has locked these messages, given as number and attempt."""
        batch = OpenBatch(connection)
        batch.tokens = [Token(number, attempt_at, batch) for number, attempt_at in rows]
        with self._lock:
            self._held.update((token.number, token) for token in batch.tokens)
        return batch.tokens

    def of(self, claims: Iterable[Claim]) -> list[tuple[OpenBatch, list[Token]]]:
        """Return what is still held of some claims, by batch: a claim that ended, or of another process, is not."""
        batches: dict[OpenBatch, list[Token]] = {}
        with self._lock:
            for claim in claims:
                token = claim.token
                if isinstance(token, Token) and self._held.get(token.number) is token:
                    batches.setdefault(token.batch, []).append(token)
        return list(batches.items())

    def locked(self) -> tuple[list[int], datetime | None]:
        """Return the numbers of what is locked, and the earliest attempt among it."""
        with self._lock:
            tokens = [token for token in self._held.values() if token.holder is None]
        return [token.number for token in tokens], min((token.attempt_at for token in tokens), default=None)

    def lease(self, batch: OpenBatch, sql: Statements) -> None:
        """Turn the row locks of a batch into leases."""
        self.settle(batch, [], None, sql)

    def settle(self, batch: OpenBatch, tokens: Sequence[Token], step: Step | None, sql: Statements) -> int:
        """Do ``step`` on a part of a batch for good; what is left of it, if locked until now, is leased from then on.

        Raises:
            StoreUnavailable: nothing was done, and what was locked is free again; or, when the connection was lost in
                the commit, all of it was done. The rest is then kept as leased: if it is not, ending the lease finds
                nothing.
        """
        with batch.lock:
            if batch.connection is None:
                return self._settle_leased(tokens, step)
            connection, batch.connection = batch.connection, None
            part = set(tokens)
            rest = [token for token in batch.tokens if token not in part]
            committing = False
            try:
                with self._database.translating():
                    done = 0 if step is None else step(connection, [token.number for token in tokens], None)
                    if rest:
                        holder = self._database.listener().holder()
                        numbers = array(token.number for token in rest)
                        connection.execute(sql.lease, {"numbers": numbers, "holder": holder})
                        for token in rest:
                            token.holder = holder
                    committing = True
                    connection.execute("COMMIT")
            except BaseException:
                self.forget(tokens if committing else batch.tokens)
                self._database.drop(connection)
                raise
            self._database.put(connection)
            self.forget(tokens)
            return done

    def give_back(self, batch: OpenBatch, tokens: Sequence[Token]) -> int | None:
        """Give a batch back that is locked, as it was; ``None``: it is not, or a part of it is not to be given back."""
        with batch.lock:
            if batch.connection is None or len(tokens) < len(batch.tokens):
                return None
            connection, batch.connection = batch.connection, None
            try:
                with self._database.translating():
                    connection.execute("ROLLBACK")
            finally:
                self.forget(batch.tokens)
                self._database.put(connection)  # which closes it when that has failed, and frees them so
        return len(tokens)

    def _settle_leased(self, tokens: Sequence[Token], step: Step | None) -> int:
        if step is None:
            return 0
        done = 0
        with self._lock:  # the part that ended the transaction may have failed, and with it everything was free again
            tokens = [token for token in tokens if self._held.get(token.number) is token]
        for holder, numbers in by_holder(tokens):
            done += self._database.run_blocking(partial(_turned, step, holder, numbers))
        self.forget(tokens)
        return done

    def forget(self, tokens: Iterable[Token]) -> None:
        """Note that some are held no more."""
        with self._lock:
            for token in tokens:
                if self._held.get(token.number) is token:
                    del self._held[token.number]

    def forget_number(self, number: int) -> None:
        """Note that whatever held a message holds it no more."""
        with self._lock:
            self._held.pop(number, None)

    def leasing_as(self) -> str:
        """Return the numbers under which messages are leased, as an array: several, after a lost connection."""
        with self._lock:
            return array({token.holder for token in self._held.values() if token.holder is not None})

    def finished_elsewhere(self, tokens: Iterable[Token]) -> None:
        """Note that some end with a transaction of others, whose commit we do not see."""
        with self._lock:
            self._finished += tokens

    def forget_finished(self, connection: Connection, sql: Statements) -> None:
        """Forget what has ended with transactions of others by now."""
        with self._lock:
            finished = list(self._finished)
        if not finished:
            return
        values = {"numbers": array(token.number for token in finished)}
        still_held = {number for (number,) in connection.execute(sql.still_held, values)}
        ended = [token for token in finished if token.number not in still_held]
        self.forget(ended)
        with self._lock:
            self._finished = [token for token in self._finished if token not in set(ended)]

    def release(self, tokens: Sequence[Token], sql: Statements) -> None:
        """End leases that nobody will end otherwise, if the database can be reached."""
        leased = [token for token in tokens if token.holder is not None]
        self.forget(tokens)
        if leased:
            values: dict[str, Any] = {
                "numbers": array(token.number for token in leased),
                "holders": list({token.holder for token in leased}),
            }
            try:
                self._database.run_blocking(lambda c: c.execute(sql.free, values))
            except PostdateError:  # the database cannot be reached
                self.left_some = True

    def give_up(self, sql: Statements) -> None:
        """Give everything back, for the end of the store object."""
        with self._lock:
            tokens = list(self._held.values())
        for batch in {token.batch for token in tokens}:
            self._end(batch)
        self.release(tokens, sql)

    def _end(self, batch: OpenBatch) -> None:
        with batch.lock:
            connection, batch.connection = batch.connection, None
        if connection is not None:
            self._database.roll_back(connection)


def by_holder(tokens: Iterable[Token]) -> list[tuple[int | None, list[int]]]:
    """Group the numbers of messages by the holder's number."""
    groups: dict[int | None, list[int]] = {}
    for token in tokens:
        groups.setdefault(token.holder, []).append(token.number)
    return list(groups.items())


def _turned(step: Step, holder: int | None, numbers: Sequence[int], connection: Connection) -> int:
    return step(connection, numbers, holder)

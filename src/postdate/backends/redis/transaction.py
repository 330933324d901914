"""Parts that one script does atomically: the native transaction of these queues."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from redis.exceptions import OutOfMemoryError

from postdate.backends.redis.layout import Part, size_of
from postdate.backends.redis.server import RedisServer
from postdate.errors import ClaimLost, DuplicateMessage, PostdateError, QueueNotFound, UnsupportedTransactionMode
from postdate.messages import DelayedMessage, Envelope
from postdate.ports import Claim

_EACH_BYTES: Final = 512
"""Estimate of a message's memory besides headers and body."""

_MOST_OVERDRAWN_BYTES: Final = 1024 * 1024


class RedisTransaction:
    """Parts of ``transact.lua``; nothing is changed before :meth:`commit`."""

    def __init__(self, database: object) -> None:
        self.database = database
        self.afterwards: list[Callable[[], None]] = []
        """Called after a successful commit; not when it is refused, or its answer is lost."""
        self.ended: list[DelayedMessage | Envelope] = []
        """Messages that it ends: allowed even when the memory is full, unless it adds much more than it ends."""
        self._parts: list[Part] = []
        self._added: list[DelayedMessage | Envelope] = []

    def add(self, *parts: Part, messages: Sequence[DelayedMessage | Envelope] = ()) -> None:
        """Add one part, as ``transact.lua`` describes them, and the messages that it adds."""
        self._parts += parts
        self._added += messages

    async def commit(self, server: RedisServer) -> Sequence[int]:
        """Do everything; return the indexes of messages without a queue, of a send that is not strict.

        After `ClaimLost`, `DuplicateMessage` and `QueueNotFound` nothing was done.
        """
        kind, *rest = await self._answer(server)
        match kind:
            case b"done":
                for each in self.afterwards:
                    each()
                return rest[0]
            case b"queue":
                raise QueueNotFound.of(rest[0].decode())
            case b"known":
                raise DuplicateMessage.of(rest[0].decode(errors="replace"))
            case b"claim":
                raise ClaimLost.of(rest[0].decode(errors="replace"))
            case _:
                raise ClaimLost("the message is no longer held here")

    async def _answer(self, server: RedisServer) -> Sequence[Any]:
        if self.ended and not self._added:
            return await server.run("settle", *self._parts)
        try:
            answer = await server.run("transact", *self._parts)
        except PostdateError as error:
            more = max(0, _bytes_of(self._added) - _bytes_of(self.ended))
            is_full = isinstance(error.__cause__, OutOfMemoryError)
            if not (self.ended and is_full and server.overdrawn + more <= _MOST_OVERDRAWN_BYTES):
                raise
            server.overdrawn += more  # before anything is awaited: others are near the limit, too
            answer = await server.run("settle", *self._parts)
            if answer[0] != b"done":
                server.overdrawn = max(0, server.overdrawn - more)
        else:
            server.overdrawn = 0
        return answer


def _bytes_of(messages: Sequence[DelayedMessage | Envelope]) -> int:
    return sum(_EACH_BYTES + size_of(each) for each in messages)


def transaction_of(transaction: Any, database: object) -> RedisTransaction:
    """Return the transaction; raises `UnsupportedTransactionMode` unless it is one of this database."""
    if not isinstance(transaction, RedisTransaction) or transaction.database != database:
        raise UnsupportedTransactionMode("a store in Redis shares transactions with queues of its own database only")
    return transaction


def finish_parts(claims: Sequence[Claim]) -> list[Part]:
    """Return claims as script arguments: their number, then id and token of each."""
    return [len(claims), *(part for claim in claims for part in (claim.message.message_id, str(claim.token)))]

"""What is collected and then done in one script, whole or not at all: the native transaction of these queues."""

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
"""What a message takes in the server besides its headers and body, about."""

_MOST_OVERDRAWN_BYTES: Final = 1024 * 1024


class RedisTransaction:
    """Parts of ``transact.lua``; nothing is changed before :meth:`commit`.

    Args:
        database: identity of the database in which it is done.
    """

    def __init__(self, database: object) -> None:
        self.database = database
        self.afterwards: list[Callable[[], None]] = []
        """Called once everything is done; not when nothing was, or when nobody knows."""
        self.ended: list[DelayedMessage | Envelope] = []
        """What it ends: done also where the server is full, with what belongs to it unless that is much more."""
        self._parts: list[Part] = []
        self._added: list[DelayedMessage | Envelope] = []

    def add(self, *parts: Part, messages: Sequence[DelayedMessage | Envelope] = ()) -> None:
        """Have one thing more done, by which there are these messages more; ``transact.lua`` says how it is written."""
        self._parts += parts
        self._added += messages

    async def commit(self, server: RedisServer) -> Sequence[int]:
        """Do everything; return the places, in a send that is not strict, of messages whose queue is missing.

        Raises:
            ClaimLost: what was held is held no more; nothing was done.
            DuplicateMessage: what was to be stored has an id that is known; nothing was done.
            QueueNotFound: in a strict send; nothing was done.
            PostdateError: as the server's meanings have it.
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
    """Return a transaction if it is one of ours, in the database of a store.

    Raises:
        UnsupportedTransactionMode: it is not.
    """
    if not isinstance(transaction, RedisTransaction) or transaction.database != database:
        raise UnsupportedTransactionMode("a store in Redis shares transactions with queues of its own database only")
    return transaction


def finish_parts(claims: Sequence[Claim]) -> list[Part]:
    """Return how claims are written for a script: their number, and id and token of each."""
    return [len(claims), *(part for claim in claims for part in (claim.message.message_id, str(claim.token)))]
